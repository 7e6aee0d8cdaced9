use std::collections::BTreeMap;

/// What a session may have in flight: absolute bounds, see `Grant` in worker.proto.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Grant {
    /// Sequences.
    pub sequences: u32,
    /// KV blocks, at admission cost.
    pub blocks: u32,
}

/// What there is to divide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Sequences that may be in flight, running and waiting together.
    pub sequences: u32,
    /// KV blocks that admission may use: the pool less the watermark.
    pub blocks: u32,
}

/// Divides a worker's capacity among its sessions, keyed by `K`.
///
/// Each session is granted what it has in flight plus an equal share of what nobody has, so an idle session can
/// start at once and a busy one is never asked to take back what runs. The sum of the grants never exceeds the
/// capacity, unless what is in flight already does: then every grant equals what the session has.
#[derive(Debug)]
pub struct Grants<K> {
    capacity: Capacity,
    in_flight: BTreeMap<K, Grant>,
}

impl<K: Ord + Copy> Grants<K> {
    /// No sessions yet.
    pub fn new(capacity: Capacity) -> Self {
        Self { capacity, in_flight: BTreeMap::new() }
    }

    /// A session begins, with nothing in flight.
    pub fn open(&mut self, session: K) {
        self.in_flight.entry(session).or_default();
    }

    /// A session is over; whatever it had in flight must have been released.
    pub fn close(&mut self, session: K) {
        let left = self.in_flight.remove(&session).unwrap_or_default();
        debug_assert_eq!(left, Grant::default(), "a session was closed with work in flight");
    }

    /// Whether a session is there.
    pub fn is_open(&self, session: K) -> bool {
        self.in_flight.contains_key(&session)
    }

    /// Counts a request, or a part of it, in. A session that is not there is charged nothing.
    pub fn charge(&mut self, session: K, cost: Grant) {
        if let Some(held) = self.in_flight.get_mut(&session) {
            held.sequences += cost.sequences;
            held.blocks = held.blocks.saturating_add(cost.blocks);
        }
    }

    /// Counts a request, or a part of it, out.
    pub fn release(&mut self, session: K, cost: Grant) {
        if let Some(held) = self.in_flight.get_mut(&session) {
            debug_assert!(held.sequences >= cost.sequences && held.blocks >= cost.blocks);
            held.sequences = held.sequences.saturating_sub(cost.sequences);
            held.blocks = held.blocks.saturating_sub(cost.blocks);
        }
    }

    /// Sequences in flight over all sessions.
    pub fn sequences_in_flight(&self) -> u32 {
        self.in_flight.values().map(|held| held.sequences).sum()
    }

    /// Each session's grant. `blocks_used` are the blocks really owned: sequences outgrow their admission cost,
    /// and what they took is not there to be granted.
    pub fn divide(&self, blocks_used: u32) -> impl Iterator<Item = (K, Grant)> + '_ {
        let sessions = self.in_flight.len().max(1) as u32;
        let charged = self.in_flight.values().fold(0u32, |sum, held| sum.saturating_add(held.blocks));
        let free_sequences = self.capacity.sequences.saturating_sub(self.sequences_in_flight());
        let free_blocks = self.capacity.blocks.saturating_sub(charged.max(blocks_used));
        self.in_flight.iter().enumerate().map(move |(place, (session, held))| {
            // The remainder goes to the first sessions, so that nothing is lost to rounding.
            let share = |free: u32| free / sessions + u32::from((place as u32) < free % sessions);
            let grant = Grant {
                sequences: held.sequences + share(free_sequences),
                blocks: held.blocks.saturating_add(share(free_blocks)),
            };
            (*session, grant)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn grants_divide_the_capacity_exactly_and_never_take_back_what_runs(
            sequences in 0u32..50, blocks in 0u32..500, used in 0u32..500,
            held in prop::collection::vec((0u32..20, 0u32..200), 1..6)
        ) {
            let mut grants = Grants::new(Capacity { sequences, blocks });
            for (session, (s, b)) in held.iter().enumerate() {
                grants.open(session);
                grants.charge(session, Grant { sequences: *s, blocks: *b });
            }
            let divided: Vec<_> = grants.divide(used).collect();
            let sum = |of: fn(&Grant) -> u32| divided.iter().map(|(_, grant)| of(grant)).sum::<u32>();
            let held_sequences: u32 = held.iter().map(|(s, _)| s).sum();
            let held_blocks: u32 = held.iter().map(|(_, b)| b).sum();
            prop_assert_eq!(sum(|g| g.sequences), sequences.max(held_sequences));
            prop_assert_eq!(sum(|g| g.blocks), held_blocks + blocks.saturating_sub(held_blocks.max(used)));
            for (session, grant) in divided {
                prop_assert!(grant.sequences >= held[session].0 && grant.blocks >= held[session].1);
            }
        }
    }
}
