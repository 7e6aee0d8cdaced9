//! The open connections of a listener, and which of them is closed to make room.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::limits::Limits;

/// After a search for an idle connection found none, this long nothing is searched again: a flood of connections must
/// not cost a search each.
const SEARCH_PAUSE: Duration = Duration::from_millis(20);

/// What an address is counted by: itself, or for IPv6 the /64 that one host usually has to itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Source(IpAddr);

impl Source {
    fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            v4 @ IpAddr::V4(_) => Self(v4),
            IpAddr::V6(v6) => {
                let [a, b, c, d, ..] = v6.segments();
                Self(IpAddr::V6([a, b, c, d, 0, 0, 0, 0].into()))
            }
        }
    }
}

/// Tells since when no call is open on a connection; `None` while one is.
type IdleSince = Box<dyn Fn() -> Option<Instant> + Send>;

struct Entry {
    source: Source,
    /// Absent until the handshake is complete; such a connection is not authenticated.
    idle_since: Option<IdleSince>,
    evicted: CancellationToken,
}

#[derive(Default)]
struct Table {
    next: u64,
    entries: BTreeMap<u64, Entry>,
    /// Connections of each source: all, and those not authenticated. Ids ascend in the order of acceptance.
    all: BTreeMap<Source, BTreeSet<u64>>,
    unauthenticated: BTreeMap<Source, BTreeSet<u64>>,
    search_after: Option<Instant>,
}

/// Why a connection was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Every connection is in use.
    Full,
    /// Every connection of its address is in use.
    Address,
}

impl Refused {
    /// A label for metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Address => "address",
        }
    }
}

/// The open connections of one listener.
///
/// **Invariant**: a connection that passed authentication and has a call open is never closed for another.
#[derive(Clone)]
pub(crate) struct Registry {
    table: Arc<Mutex<Table>>,
    limits: Limits,
}

impl Registry {
    pub fn new(limits: Limits) -> Self {
        Self { table: Arc::default(), limits }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Nothing can panic while it is held but an allocation that fails.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a new connection in, closing another where the limits ask for it.
    pub fn register(&self, address: IpAddr) -> Result<Registration, Refused> {
        let source = Source::of(address);
        let mut table = self.lock();
        let own = table.all.get(&source).map_or(0, BTreeSet::len);
        if own >= self.limits.per_address_max && !table.evict_of(source) {
            return Err(Refused::Address);
        }
        if table.entries.len() >= self.limits.connections_max && !table.evict_any() {
            return Err(Refused::Full);
        }
        let id = table.next;
        table.next += 1;
        let evicted = CancellationToken::new();
        let entry = Entry { source, idle_since: None, evicted: evicted.clone() };
        table.entries.insert(id, entry);
        table.all.entry(source).or_default().insert(id);
        table.unauthenticated.entry(source).or_default().insert(id);
        Ok(Registration { registry: self.clone(), id, evicted })
    }
}

impl Table {
    /// Closes a connection of one source; whether there was one to close.
    fn evict_of(&mut self, source: Source) -> bool {
        let oldest = self.unauthenticated.get(&source).and_then(BTreeSet::first).copied();
        let id = oldest.or_else(|| {
            let ids = self.all.get(&source).into_iter().flatten().copied();
            let idle = ids.filter_map(|id| self.idle_since(id).map(|since| (since, id)));
            idle.min().map(|(_, id)| id)
        });
        id.is_some_and(|id| self.evict(id))
    }

    /// Closes the connection that is missed least; whether there was one to close.
    fn evict_any(&mut self) -> bool {
        let most = self.unauthenticated.iter().max_by_key(|(_, ids)| ids.len());
        if let Some(id) = most.and_then(|(_, ids)| ids.first()).copied() {
            return self.evict(id);
        }
        let now = Instant::now();
        if self.search_after.is_some_and(|after| now < after) {
            return false;
        }
        let idle = self.entries.keys().filter_map(|id| self.idle_since(*id).map(|since| (since, *id)));
        match idle.min() {
            Some((_, id)) => self.evict(id),
            None => {
                self.search_after = Some(now + SEARCH_PAUSE);
                false
            }
        }
    }

    fn idle_since(&self, id: u64) -> Option<Instant> {
        self.entries.get(&id)?.idle_since.as_ref()?()
    }

    fn evict(&mut self, id: u64) -> bool {
        let removed = self.remove(id);
        if let Some(entry) = &removed {
            entry.evicted.cancel();
        }
        removed.is_some()
    }

    fn remove(&mut self, id: u64) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        for index in [&mut self.all, &mut self.unauthenticated] {
            if let Some(ids) = index.get_mut(&entry.source) {
                ids.remove(&id);
                if ids.is_empty() {
                    index.remove(&entry.source);
                }
            }
        }
        Some(entry)
    }
}

/// A connection's place in the registry, until it is dropped.
pub(crate) struct Registration {
    registry: Registry,
    id: u64,
    evicted: CancellationToken,
}

impl Registration {
    /// Cancelled when the connection has to make room for another.
    pub fn evicted(&self) -> &CancellationToken {
        &self.evicted
    }

    /// Tells how to know whether a call is open on the connection.
    pub fn watch(&self, idle_since: impl Fn() -> Option<Instant> + Send + 'static) {
        if let Some(entry) = self.registry.lock().entries.get_mut(&self.id) {
            entry.idle_since = Some(Box::new(idle_since));
        }
    }

    /// Marks the connection as authenticated, from elsewhere.
    pub fn authentication(&self) -> Authentication {
        Authentication { registry: self.registry.clone(), id: self.id }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.registry.lock().remove(self.id);
    }
}

/// Marks one connection as authenticated.
pub(crate) struct Authentication {
    registry: Registry,
    id: u64,
}

impl Authentication {
    /// From now on the connection is closed for another only while it is idle.
    pub fn mark(&self) {
        let mut table = self.registry.lock();
        let Table { entries, unauthenticated, .. } = &mut *table;
        let Some(entry) = entries.get(&self.id) else { return };
        if let Some(ids) = unauthenticated.get_mut(&entry.source) {
            ids.remove(&self.id);
            if ids.is_empty() {
                unauthenticated.remove(&entry.source);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn registry(connections_max: usize, per_address_max: usize) -> Registry {
        Registry::new(Limits { connections_max, per_address_max, ..Limits::default() })
    }

    /// Registered, with a call open.
    fn in_use(registry: &Registry, last: u8) -> Registration {
        let registration = registry.register(address(last)).unwrap();
        registration.watch(|| None);
        registration.authentication().mark();
        registration
    }

    #[test]
    fn strangers_make_room_for_each_other_and_the_address_with_most_of_them_first() {
        let registry = registry(4, 4);
        let kept = in_use(&registry, 1);
        let flood: Vec<_> = (0..3).map(|_| registry.register(address(2)).unwrap()).collect();
        let other = registry.register(address(3)).unwrap();
        assert!(flood[0].evicted().is_cancelled(), "the oldest of the flood");
        let another = registry.register(address(4)).unwrap();
        assert!(flood[1].evicted().is_cancelled());
        assert!(!other.evicted().is_cancelled() && !another.evicted().is_cancelled());
        assert!(!kept.evicted().is_cancelled());
    }

    #[test]
    fn an_address_over_its_limit_closes_its_own_connections_only() {
        let registry = registry(100, 2);
        let other = registry.register(address(1)).unwrap();
        let used = in_use(&registry, 2);
        let idle = registry.register(address(2)).unwrap();
        let since = Instant::now();
        idle.watch(move || Some(since));
        idle.authentication().mark();
        let third = registry.register(address(2)).unwrap();
        assert!(idle.evicted().is_cancelled(), "it had no call open");
        third.watch(|| None);
        third.authentication().mark();
        assert_eq!(registry.register(address(2)).err(), Some(Refused::Address), "both are in use");
        assert!(!other.evicted().is_cancelled() && !used.evicted().is_cancelled());
    }

    #[test]
    fn a_host_counts_once_however_many_ipv6_addresses_it_has() {
        let registry = registry(100, 1);
        let first = registry.register("2001:db8::1".parse().unwrap()).unwrap();
        let _other = registry.register("2001:db8:0:1::1".parse().unwrap()).unwrap();
        assert!(!first.evicted().is_cancelled());
        let _second = registry.register("2001:db8::2".parse().unwrap()).unwrap();
        assert!(first.evicted().is_cancelled());
        let mapped = registry.register("::ffff:10.0.0.1".parse().unwrap()).unwrap();
        let _plain = registry.register(address(1)).unwrap();
        assert!(mapped.evicted().is_cancelled());
    }

    proptest! {
        /// Whatever comes and goes: the limits hold, no connection in use is closed, and the indices agree.
        #[test]
        fn limits_hold_and_no_connection_in_use_is_closed(
            connections_max in 1usize..6, per_address_max in 1usize..6,
            events in prop::collection::vec((0u8..4, 0u8..4, any::<prop::sample::Index>()), 1..80)
        ) {
            let registry = registry(connections_max, per_address_max);
            let mut open: Vec<(Registration, bool)> = Vec::new();
            for (kind, from, index) in events {
                match kind {
                    0 | 1 => open.extend(registry.register(address(from)).ok().map(|r| (r, false))),
                    2 if !open.is_empty() => {
                        let (registration, used) = index.get(&open);
                        if !registration.evicted().is_cancelled() && !used {
                            registration.watch(|| None);
                            registration.authentication().mark();
                            let place = index.index(open.len());
                            open[place].1 = true;
                        }
                    }
                    _ if !open.is_empty() => drop(open.swap_remove(index.index(open.len()))),
                    _ => {}
                }
                for (registration, used) in &open {
                    prop_assert!(!used || !registration.evicted().is_cancelled());
                }
                open.retain(|(registration, _)| !registration.evicted().is_cancelled());
                let table = registry.lock();
                prop_assert_eq!(table.entries.len(), open.len());
                prop_assert!(table.entries.len() <= connections_max);
                prop_assert!(table.all.values().all(|ids| ids.len() <= per_address_max));
                let (all, unauthenticated) = (table.all.values().flatten(), table.unauthenticated.values().flatten());
                prop_assert!(all.eq(table.entries.keys()) || table.all.len() > 1);
                prop_assert_eq!(unauthenticated.count(), open.iter().filter(|(_, used)| !used).count());
            }
        }
    }
}
