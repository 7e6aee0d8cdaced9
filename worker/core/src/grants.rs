//! Division of a worker's capacity among its sessions: max-min fair grants of sequences and KV blocks.

use std::collections::BTreeMap;

/// Absolute limit of what a session may have in flight; see `Grant` in worker.proto.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Grant {
    /// Number of sequences.
    pub sequences: u32,
    /// Number of KV blocks, at admission cost.
    pub blocks: u32,
}

/// Worker capacity divided among sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Maximum number of sequences in flight, running and waiting.
    pub sequences: u32,
    /// KV blocks available to admission: the pool without the watermark.
    pub blocks: u32,
}

#[derive(Debug, Clone, Copy, Default)]
struct SessionUsage {
    in_flight: Grant,
    /// Set if the router reported an empty queue; a router that has not reported counts as backlogged.
    idle: bool,
}

/// Divides a worker's capacity among its sessions, which are keyed by `K`.
///
/// Running work is never revoked. Free capacity goes to the sessions whose routers have a backlog, so that
/// their totals become equal (max-min fairness, over sequences in flight and over blocks). Without any
/// backlog it is shared equally among all sessions, so that each can start a request at once. The sum of the
/// grants does not exceed the capacity unless the work in flight already does; then every grant equals the
/// session's work in flight.
#[derive(Debug)]
pub struct Grants<K> {
    capacity: Capacity,
    sessions: BTreeMap<K, SessionUsage>,
    /// Round-robin offset of the session that receives the remainder of a division.
    rotation: u32,
}

/// Returns the maximum sequences in flight beyond the grants, for requests that outrank others in flight. Those that have started count until
/// they end, so half of the slots may be theirs beside the ones that wait.
pub fn priority_sequences_max(running_max: u32, queue_ahead: u32) -> u32 {
    queue_ahead + running_max / 2
}

impl<K: Ord + Copy> Grants<K> {
    /// Creates a divider without sessions.
    pub fn new(capacity: Capacity) -> Self {
        Self { capacity, sessions: BTreeMap::new(), rotation: 0 }
    }

    /// Adds a session with nothing in flight.
    pub fn open(&mut self, session: K) {
        self.sessions.entry(session).or_default();
    }

    /// Removes a session; the caller has released all its work in flight.
    pub fn close(&mut self, session: K) {
        let in_flight = self.sessions.remove(&session).unwrap_or_default().in_flight;
        debug_assert_eq!(in_flight, Grant::default(), "a session was closed with work in flight");
    }

    /// Returns true if the session was opened and not closed.
    pub fn is_open(&self, session: K) -> bool {
        self.sessions.contains_key(&session)
    }

    /// Sets the number of sequences that may be in flight over all sessions.
    pub fn set_sequences(&mut self, sequences: u32) {
        self.capacity.sequences = sequences;
    }

    /// Sets whether a session's router has queued requests.
    pub fn set_backlog(&mut self, session: K, backlog: bool) {
        if let Some(usage) = self.sessions.get_mut(&session) {
            usage.idle = !backlog;
        }
    }

    /// Adds the cost of a request, or of a part of it, to a session; no-op for an unknown session.
    pub fn charge(&mut self, session: K, cost: Grant) {
        if let Some(SessionUsage { in_flight, .. }) = self.sessions.get_mut(&session) {
            in_flight.sequences += cost.sequences;
            in_flight.blocks = in_flight.blocks.saturating_add(cost.blocks);
        }
    }

    /// Subtracts the cost of a request, or of a part of it, from a session.
    pub fn release(&mut self, session: K, cost: Grant) {
        if let Some(SessionUsage { in_flight, .. }) = self.sessions.get_mut(&session) {
            debug_assert!(in_flight.sequences >= cost.sequences && in_flight.blocks >= cost.blocks);
            in_flight.sequences = in_flight.sequences.saturating_sub(cost.sequences);
            in_flight.blocks = in_flight.blocks.saturating_sub(cost.blocks);
            self.rotation = self.rotation.wrapping_add(1);
        }
    }

    /// Returns the number of sequences in flight over all sessions.
    pub fn sequences_in_flight(&self) -> u32 {
        self.sessions.values().map(|usage| usage.in_flight.sequences).sum()
    }

    /// Returns the sum of what all sessions have in flight.
    pub fn in_flight(&self) -> Grant {
        self.sessions.values().fold(Grant::default(), |sum, usage| Grant {
            sequences: sum.sequences + usage.in_flight.sequences,
            blocks: sum.blocks.saturating_add(usage.in_flight.blocks),
        })
    }

    /// Returns each session's grant. `blocks_used` is the number of owned blocks in the pool, which exceeds
    /// the charged cost as sequences grow; these blocks cannot be granted.
    pub fn divide(&self, blocks_used: u32) -> impl Iterator<Item = (K, Grant)> + use<K> {
        let charged =
            self.sessions.values().fold(0u32, |sum, usage| sum.saturating_add(usage.in_flight.blocks));
        let free_sequences = self.capacity.sequences.saturating_sub(self.sequences_in_flight());
        let free_blocks = self.capacity.blocks.saturating_sub(charged.max(blocks_used));
        let mut grants: Vec<_> = self.sessions.iter().map(|(key, usage)| (*key, usage.in_flight)).collect();
        for (grant, extra) in grants.iter_mut().zip(self.distribute(free_sequences, |grant| grant.sequences))
        {
            grant.1.sequences += extra;
        }
        for (grant, extra) in grants.iter_mut().zip(self.distribute(free_blocks, |grant| grant.blocks)) {
            grant.1.blocks = grant.1.blocks.saturating_add(extra);
        }
        grants.into_iter()
    }

    /// Returns the number of sequences that each session may have in flight beyond its grant for requests
    /// that outrank its others. Divides `max`, less the sequences already in flight beyond the capacity,
    /// equally among the sessions. A session that has not read the latest value still uses an older one.
    pub fn priority_sequences(&self, max: u32) -> impl Iterator<Item = (K, u32)> + use<K> {
        let excess = self.sequences_in_flight().saturating_sub(self.capacity.sequences);
        let left = max.saturating_sub(excess);
        let sessions = (self.sessions.len() as u32).max(1);
        let (quotient, remainder, rotation) = (left / sessions, left % sessions, self.rotation % sessions);
        // The remainder is assigned round-robin.
        let share = move |position: u32| {
            quotient + u32::from((position + sessions - rotation) % sessions < remainder)
        };
        let keys: Vec<K> = self.sessions.keys().copied().collect();
        keys.into_iter().enumerate().map(move |(position, key)| (key, share(position as u32)))
    }

    /// Distributes `free` units by water-filling over what sessions have in flight, as read by `in_flight`.
    /// Returns the units added for each session, in key order.
    fn distribute(&self, free: u32, in_flight: fn(&Grant) -> u32) -> Vec<u32> {
        let backlog = self.sessions.values().any(|usage| !usage.idle);
        // Without a backlog the free units are shared equally; with one they equalize the totals.
        let base = |usage: &SessionUsage| match (backlog, usage.idle) {
            (false, _) => Some(0),
            (true, false) => Some(in_flight(&usage.in_flight)),
            (true, true) => None,
        };
        let bases: Vec<Option<u32>> = self.sessions.values().map(base).collect();
        let mut order: Vec<usize> = (0..bases.len()).filter(|session| bases[*session].is_some()).collect();
        let mut extra = vec![0u32; bases.len()];
        // Among equals, the remainder is assigned round-robin.
        let rotation = self.rotation as usize % bases.len().max(1);
        order.sort_by_key(|session| (bases[*session], (session + bases.len() - rotation) % bases.len()));
        let mut left = free;
        for (rank, session) in order.iter().enumerate() {
            // Raise the sessions up to this rank to the base of the next one, as far as `left` suffices.
            let count = rank as u32 + 1;
            let level = bases[*session].unwrap_or(0);
            let next = order.get(rank + 1).map_or(u32::MAX, |next| bases[*next].unwrap_or(0));
            let lift = (next - level).min(left / count);
            let exhausted = lift < next - level;
            for (nth, lifted) in order[..=rank].iter().enumerate() {
                let remainder = u32::from(exhausted && (nth as u32) < left - lift * count);
                extra[*lifted] += lift + remainder;
            }
            if exhausted {
                break;
            }
            left -= lift * count;
        }
        extra
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn grants_divide_the_capacity_exactly_and_never_revoke_running_work(
            sequences in 0u32..50, blocks in 0u32..500, used in 0u32..500,
            held in prop::collection::vec((0u32..20, 0u32..200, any::<bool>()), 1..6), most in 0u32..40
        ) {
            let mut grants = Grants::new(Capacity { sequences, blocks });
            for (session, (s, b, backlog)) in held.iter().enumerate() {
                grants.open(session);
                grants.set_backlog(session, *backlog);
                grants.charge(session, Grant { sequences: *s, blocks: *b });
            }
            let divided: Vec<_> = grants.divide(used).collect();
            let sum = |of: fn(&Grant) -> u32| divided.iter().map(|(_, grant)| of(grant)).sum::<u32>();
            let held_sequences: u32 = held.iter().map(|(s, ..)| s).sum();
            let held_blocks: u32 = held.iter().map(|(_, b, _)| b).sum();
            prop_assert_eq!(sum(|g| g.sequences), sequences.max(held_sequences));
            prop_assert_eq!(sum(|g| g.blocks), held_blocks + blocks.saturating_sub(held_blocks.max(used)));
            let urgent: Vec<u32> = grants.priority_sequences(most).map(|(_, urgent)| urgent).collect();
            let beyond = held_sequences.saturating_sub(sequences);
            prop_assert_eq!(urgent.iter().sum::<u32>(), most.saturating_sub(beyond), "bound over all sessions");
            prop_assert!(urgent.iter().max().unwrap() - urgent.iter().min().unwrap() <= 1);
            let any_backlog = held.iter().any(|(.., backlog)| *backlog);
            for (session, grant) in &divided {
                let (s, b, backlog) = held[*session];
                prop_assert!(grant.sequences >= s && grant.blocks >= b);
                if any_backlog && !backlog {
                    prop_assert_eq!(grant.sequences, s, "capacity is granted to an idle session");
                }
                // Max-min: a session that received anything has at most one more than any backlogged session.
                if any_backlog && grant.sequences > s {
                    for (other, rival) in &divided {
                        prop_assert!(!held[*other].2 || rival.sequences + 1 >= grant.sequences);
                    }
                }
            }
        }
    }

    #[test]
    fn backlogged_routers_share_a_single_sequence_round_robin() {
        let mut grants = Grants::new(Capacity { sequences: 1, blocks: 10 });
        (0..3).for_each(|session| grants.open(session));
        let one = Grant { sequences: 1, blocks: 1 };
        let mut served = [0; 3];
        for _ in 0..30 {
            let (next, _) = grants.divide(0).find(|(_, grant)| grant.sequences == 1).unwrap();
            served[next] += 1;
            grants.charge(next, one);
            grants.release(next, one);
        }
        assert_eq!(served, [10; 3]);
    }

    #[test]
    fn an_idle_router_yields_capacity_and_regains_its_share_with_a_backlog() {
        let mut grants = Grants::new(Capacity { sequences: 10, blocks: 100 });
        grants.open("full");
        grants.open("other");
        let of = |grants: &Grants<&str>, who: &str| {
            grants.divide(0).find(|(key, _)| *key == who).unwrap().1.sequences
        };
        grants.set_backlog("full", false);
        grants.set_backlog("other", false);
        assert_eq!((of(&grants, "full"), of(&grants, "other")), (5, 5), "each can start at once");
        grants.charge("full", Grant { sequences: 5, blocks: 5 });
        grants.set_backlog("full", true);
        assert_eq!((of(&grants, "full"), of(&grants, "other")), (10, 0));
        grants.charge("full", Grant { sequences: 4, blocks: 4 });
        grants.set_backlog("other", true);
        assert_eq!((of(&grants, "full"), of(&grants, "other")), (9, 1), "revoked before it was used");
        grants.release("full", Grant { sequences: 1, blocks: 1 });
        assert_eq!((of(&grants, "full"), of(&grants, "other")), (8, 2));
    }
}
