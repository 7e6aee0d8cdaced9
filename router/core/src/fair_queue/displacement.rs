//! Displacement: which waiting requests are evicted for an arrival when the queue is full.

use std::collections::BTreeMap;

use inflight_contract::Weight;

use super::{Arrival, FairQueue, QueuePosition};
use crate::queue_bounds::{QueueBound, QueueFull, QueueLimits, QueueUsage};

/// Part of the queue, in both units of its bounds.
#[derive(Debug, Clone, Copy, Default)]
struct Held {
    requests: usize,
    tokens: u64,
}

impl Held {
    /// Returns what is held over a weight, in the unit of a bound.
    fn share(self, bound: QueueBound, weight: Weight) -> f64 {
        let held = match bound {
            QueueBound::Requests { .. } => self.requests as f64,
            QueueBound::Tokens { .. } => self.tokens as f64,
        };
        held / weight.get()
    }
}

impl<L: Ord + Copy, T> FairQueue<L, T> {
    /// Returns the requests to displace so that the arrival fits, where `usage` counts against `limits`;
    /// `None` if that is not enough. Lowest priority first; within a priority, the latest arrival of the
    /// tenant that holds most over its weight. At the arrival's own priority, only requests of other tenants
    /// beyond what its own tenant would hold. A tenant's part is counted in requests where
    /// the bound on requests is exceeded, and in tokens where that on tokens is.
    pub(super) fn victims(
        &self,
        arrival: &Arrival<'_>,
        only: Option<&str>,
        mut usage: QueueUsage,
        limits: QueueLimits,
    ) -> Option<Vec<QueuePosition<L>>> {
        let mut victims = Vec::new();
        let mut displaced: BTreeMap<&str, Held> = BTreeMap::new();
        let held = |name: &str| self.usage.get(name).copied().unwrap_or_default();
        let own = held(arrival.tenant);
        let own = Held { requests: own.requests + 1, tokens: own.tokens + arrival.tokens };
        for (priority, class) in self.fresh.range(..=arrival.priority) {
            let equal = *priority == arrival.priority;
            if equal && only.is_some() {
                break;
            }
            let of_class = class.iter().filter(|(name, _)| only.is_none_or(|only| only == &***name));
            let mut tails: Vec<_> =
                of_class.map(|(name, arrivals)| (&**name, arrivals.values().rev().peekable())).collect();
            loop {
                let Some(QueueFull { bound, .. }) = usage.exceeded(arrival.tokens, limits) else {
                    return Some(victims);
                };
                let own_share = own.share(bound, arrival.weight);
                // What a tenant still holds over its weight after displacing `more`.
                let remaining_share = |name: &str, more: Held| {
                    let (all, gone) = (held(name), displaced.get(name).copied().unwrap_or_default());
                    let requests = all.requests - gone.requests - more.requests;
                    Held { requests, tokens: all.tokens - gone.tokens - more.tokens }.share(bound, all.weight)
                };
                let candidates = tails.iter_mut().enumerate().filter_map(|(at, (name, tail))| {
                    let tokens = self.entry(tail.peek()?).map_or(0, |entry| entry.tokens);
                    // Never inverts the order of two tenants, or they would displace each other forever.
                    let without = || remaining_share(name, Held { requests: 1, tokens });
                    let may_displace = !equal || (*name != arrival.tenant && without() >= own_share);
                    may_displace.then(|| (remaining_share(name, Held::default()), at))
                });
                let Some((_, at)) = candidates.max_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))) else {
                    break;
                };
                let (name, tail) = &mut tails[at];
                let Some(position) = tail.next() else { break };
                let tokens = self.entry(position).map_or(0, |entry| entry.tokens);
                let gone = displaced.entry(name).or_default();
                (gone.requests, gone.tokens) = (gone.requests + 1, gone.tokens + tokens);
                usage = usage.minus(1, tokens);
                victims.push(*position);
            }
        }
        usage.exceeded(arrival.tokens, limits).is_none().then_some(victims)
    }
}
