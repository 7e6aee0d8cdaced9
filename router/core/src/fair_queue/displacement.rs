//! Displacement: which waiting requests are evicted for an arrival when the queue is full.

use std::collections::BTreeMap;

use inflight_contract::Weight;

use super::{Arrival, FairQueue, QueuePosition};
use crate::queue_bounds::{QueueLimits, QueueUsage};

impl<L: Ord + Copy, T> FairQueue<L, T> {
    /// Returns the requests to displace so that the arrival fits, where `usage` counts against `limits`;
    /// `None` if that is not enough. Lowest priority first; within a priority, the latest arrival of the
    /// tenant that holds most over its weight. At the arrival's own priority, only requests of other tenants
    /// beyond what its own tenant would hold.
    pub(super) fn victims(
        &self,
        arrival: &Arrival<'_>,
        only: Option<&str>,
        mut usage: QueueUsage,
        limits: QueueLimits,
    ) -> Option<Vec<QueuePosition<L>>> {
        let mut victims = Vec::new();
        let mut displaced: BTreeMap<&str, u64> = BTreeMap::new();
        let share = |tokens: u64, weight: Weight| tokens as f64 / weight.get();
        let own = self.usage.get(arrival.tenant).map_or(0, |usage| usage.tokens) + arrival.tokens;
        let own_share = share(own, arrival.weight);
        for (priority, class) in self.fresh.range(..=arrival.priority) {
            let equal = *priority == arrival.priority;
            if equal && only.is_some() {
                break;
            }
            let of_class = class.iter().filter(|(name, _)| only.is_none_or(|only| only == &***name));
            let mut tails: Vec<_> =
                of_class.map(|(name, arrivals)| (&**name, arrivals.values().rev().peekable())).collect();
            loop {
                if usage.exceeded(arrival.tokens, limits).is_none() {
                    return Some(victims);
                }
                // Tokens over weight that a tenant still holds after displacing `more`.
                let remaining_share = |name: &str, more: u64| {
                    let all = self.usage.get(name).copied().unwrap_or_default();
                    share(all.tokens - displaced.get(name).copied().unwrap_or(0) - more, all.weight)
                };
                let candidates = tails.iter_mut().enumerate().filter_map(|(at, (name, tail))| {
                    let tokens = self.entry(tail.peek()?).map_or(0, |entry| entry.tokens);
                    // Never inverts the order of two tenants, or they would displace each other forever.
                    let may_displace =
                        !equal || (*name != arrival.tenant && remaining_share(name, tokens) >= own_share);
                    may_displace.then(|| (remaining_share(name, 0), at))
                });
                let Some((_, at)) = candidates.max_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))) else {
                    break;
                };
                let (name, tail) = &mut tails[at];
                let Some(position) = tail.next() else { break };
                let tokens = self.entry(position).map_or(0, |entry| entry.tokens);
                *displaced.entry(name).or_insert(0) += tokens;
                usage = usage.minus(1, tokens);
                victims.push(*position);
            }
        }
        usage.exceeded(arrival.tokens, limits).is_none().then_some(victims)
    }
}
