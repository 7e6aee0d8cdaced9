//! Registry of a listener's open connections, with eviction at the limits.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::connection_limits::ConnectionLimits;

/// Minimum time between searches for an idle connection that found none, so that a flood of connections does
/// not cost a full scan each.
const SEARCH_PAUSE: Duration = Duration::from_millis(20);

/// Key of limits per address: an IPv4 address, or the /64 prefix of an IPv6 address, usually one host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct AddressKey(IpAddr);

impl AddressKey {
    /// Returns the key of an address.
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            v4 @ IpAddr::V4(_) => Self(v4),
            IpAddr::V6(v6) => {
                let [a, b, c, d, ..] = v6.segments();
                Self(IpAddr::V6([a, b, c, d, 0, 0, 0, 0].into()))
            }
        }
    }
}

/// Function that returns since when no call but probes is open on a connection; `None` while one is.
type IdleSince = Box<dyn Fn() -> Option<Instant> + Send>;

struct ConnectionEntry {
    address: AddressKey,
    /// Absent until the handshake is complete; such a connection is not authenticated.
    idle_since: Option<IdleSince>,
    evicted: CancellationToken,
}

#[derive(Default)]
struct ConnectionTable {
    next_id: u64,
    entries: BTreeMap<u64, ConnectionEntry>,
    /// Ids of all connections per address. Ids ascend in the order of acceptance.
    all: BTreeMap<AddressKey, BTreeSet<u64>>,
    /// Ids of the unauthenticated connections per address.
    unauthenticated: BTreeMap<AddressKey, BTreeSet<u64>>,
    search_after: Option<Instant>,
}

/// Reason for which a connection was rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rejection {
    /// All `connections_max` connections are in use.
    Full,
    /// All `per_address_max` connections of the address are in use.
    Address,
}

impl Rejection {
    /// Returns the value of the metrics' `reason` label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Address => "address",
        }
    }
}

/// Open connections of one listener.
///
/// **Invariant**: an authenticated connection with an open call that is no probe is never evicted.
#[derive(Clone)]
pub(crate) struct Registry {
    table: Arc<Mutex<ConnectionTable>>,
    limits: ConnectionLimits,
}

impl Registry {
    pub fn new(limits: ConnectionLimits) -> Self {
        Self { table: Arc::default(), limits }
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionTable> {
        // Only a failed allocation can panic while the lock is held.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a new connection, evicting another at a limit.
    ///
    /// # Errors
    /// [`Rejection`] if the limit is reached and no connection can be evicted.
    pub fn register(&self, address: IpAddr) -> Result<Registration, Rejection> {
        let address = AddressKey::of(address);
        let mut table = self.lock();
        let own = table.all.get(&address).map_or(0, BTreeSet::len);
        if own >= self.limits.per_address_max && !table.evict_from(address) {
            return Err(Rejection::Address);
        }
        if table.entries.len() >= self.limits.connections_max && !table.evict_any() {
            return Err(Rejection::Full);
        }
        let id = table.next_id;
        table.next_id += 1;
        let evicted = CancellationToken::new();
        let entry = ConnectionEntry { address, idle_since: None, evicted: evicted.clone() };
        table.entries.insert(id, entry);
        table.all.entry(address).or_default().insert(id);
        table.unauthenticated.entry(address).or_default().insert(id);
        Ok(Registration { registry: self.clone(), id, evicted })
    }

    /// Evicts up to `count` connections that are not in use, to free their file descriptors.
    pub fn evict(&self, count: usize) {
        let mut table = self.lock();
        for _ in 0..count {
            if !table.evict_any() {
                return;
            }
        }
    }
}

impl ConnectionTable {
    /// Evicts the oldest unauthenticated or the longest idle connection of an address, and returns if it did.
    fn evict_from(&mut self, address: AddressKey) -> bool {
        let oldest = self.unauthenticated.get(&address).and_then(BTreeSet::first).copied();
        let id = oldest.or_else(|| {
            let ids = self.all.get(&address).into_iter().flatten().copied();
            let idle = ids.filter_map(|id| self.idle_since(id).map(|since| (since, id)));
            idle.min().map(|(_, id)| id)
        });
        id.is_some_and(|id| self.evict(id))
    }

    /// Evicts the oldest unauthenticated connection of the address with most of those, else the longest idle
    /// one; returns whether one was evicted.
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

    fn remove(&mut self, id: u64) -> Option<ConnectionEntry> {
        let entry = self.entries.remove(&id)?;
        for index in [&mut self.all, &mut self.unauthenticated] {
            if let Some(ids) = index.get_mut(&entry.address) {
                ids.remove(&id);
                if ids.is_empty() {
                    index.remove(&entry.address);
                }
            }
        }
        Some(entry)
    }
}

/// Registration of one connection; the drop removes it from the registry.
pub(crate) struct Registration {
    registry: Registry,
    id: u64,
    evicted: CancellationToken,
}

impl Registration {
    /// Token that is cancelled when the connection is evicted.
    pub fn evicted(&self) -> &CancellationToken {
        &self.evicted
    }

    /// Sets the function that reports since when no call but probes is open on the connection.
    pub fn watch_idle(&self, idle_since: impl Fn() -> Option<Instant> + Send + 'static) {
        if let Some(entry) = self.registry.lock().entries.get_mut(&self.id) {
            entry.idle_since = Some(Box::new(idle_since));
        }
    }

    /// Returns a handle that can mark the connection as authenticated.
    pub fn authentication(&self) -> Authentication {
        Authentication { registry: self.registry.clone(), id: self.id }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.registry.lock().remove(self.id);
    }
}

/// Handle that marks one connection as authenticated.
pub(crate) struct Authentication {
    registry: Registry,
    id: u64,
}

impl Authentication {
    /// Marks the connection as authenticated: from now on it is evicted only while idle.
    pub fn mark(&self) {
        let mut table = self.registry.lock();
        let ConnectionTable { entries, unauthenticated, .. } = &mut *table;
        let Some(entry) = entries.get(&self.id) else { return };
        if let Some(ids) = unauthenticated.get_mut(&entry.address) {
            ids.remove(&self.id);
            if ids.is_empty() {
                unauthenticated.remove(&entry.address);
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
        Registry::new(ConnectionLimits { connections_max, per_address_max, ..ConnectionLimits::default() })
    }

    /// Registers an authenticated connection with an open call.
    fn in_use(registry: &Registry, last: u8) -> Registration {
        let registration = registry.register(address(last)).unwrap();
        registration.watch_idle(|| None);
        registration.authentication().mark();
        registration
    }

    #[test]
    fn unauthenticated_connections_of_the_address_with_most_are_evicted_first() {
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
    fn an_address_at_its_limit_evicts_only_its_own_connections() {
        let registry = registry(100, 2);
        let other = registry.register(address(1)).unwrap();
        let used = in_use(&registry, 2);
        let idle = registry.register(address(2)).unwrap();
        let since = Instant::now();
        idle.watch_idle(move || Some(since));
        idle.authentication().mark();
        let third = registry.register(address(2)).unwrap();
        assert!(idle.evicted().is_cancelled(), "it had no call open");
        third.watch_idle(|| None);
        third.authentication().mark();
        assert_eq!(registry.register(address(2)).err(), Some(Rejection::Address), "both are in use");
        assert!(!other.evicted().is_cancelled() && !used.evicted().is_cancelled());
    }

    #[test]
    fn ipv6_addresses_of_one_64_prefix_share_a_limit() {
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
        /// For any events, the limits hold, no connection in use is evicted, and the indices agree.
        #[test]
        fn limits_hold_and_no_connection_in_use_is_evicted(
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
                            registration.watch_idle(|| None);
                            registration.authentication().mark();
                            let position = index.index(open.len());
                            open[position].1 = true;
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
