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

#[derive(Debug, Clone, Copy, Default)]
struct Held {
    in_flight: Grant,
    /// Nothing waits at its router. One that never said is taken for one at which something does.
    idle: bool,
}

/// Divides a worker's capacity among its sessions, keyed by `K`.
///
/// Nobody is asked to take back what runs. What nobody has in flight goes first to the sessions whose routers have
/// something waiting, so that all of these come to the same total (max-min fairness over sequences in flight, and over
/// blocks): a router that is full is not granted more before another has as much. Only if nobody waits is it shared
/// equally among all, so that each can start a request at once. The sum of the grants never exceeds the capacity, unless
/// what is in flight already does: then every grant equals what the session has.
#[derive(Debug)]
pub struct Grants<K> {
    capacity: Capacity,
    sessions: BTreeMap<K, Held>,
    /// Whose turn it is to get what does not divide.
    turn: u32,
}

impl<K: Ord + Copy> Grants<K> {
    /// No sessions yet.
    pub fn new(capacity: Capacity) -> Self {
        Self { capacity, sessions: BTreeMap::new(), turn: 0 }
    }

    /// A session begins, with nothing in flight.
    pub fn open(&mut self, session: K) {
        self.sessions.entry(session).or_default();
    }

    /// A session is over; whatever it had in flight must have been released.
    pub fn close(&mut self, session: K) {
        let left = self.sessions.remove(&session).unwrap_or_default().in_flight;
        debug_assert_eq!(left, Grant::default(), "a session was closed with work in flight");
    }

    /// Whether a session is there.
    pub fn is_open(&self, session: K) -> bool {
        self.sessions.contains_key(&session)
    }

    /// Changes how many sequences may be in flight together.
    pub fn set_sequences(&mut self, sequences: u32) {
        self.capacity.sequences = sequences;
    }

    /// Notes whether anything waits at a session's router.
    pub fn set_backlog(&mut self, session: K, backlog: bool) {
        if let Some(held) = self.sessions.get_mut(&session) {
            held.idle = !backlog;
        }
    }

    /// Counts a request, or a part of it, in. A session that is not there is charged nothing.
    pub fn charge(&mut self, session: K, cost: Grant) {
        if let Some(Held { in_flight, .. }) = self.sessions.get_mut(&session) {
            in_flight.sequences += cost.sequences;
            in_flight.blocks = in_flight.blocks.saturating_add(cost.blocks);
        }
    }

    /// Counts a request, or a part of it, out.
    pub fn release(&mut self, session: K, cost: Grant) {
        if let Some(Held { in_flight, .. }) = self.sessions.get_mut(&session) {
            debug_assert!(in_flight.sequences >= cost.sequences && in_flight.blocks >= cost.blocks);
            in_flight.sequences = in_flight.sequences.saturating_sub(cost.sequences);
            in_flight.blocks = in_flight.blocks.saturating_sub(cost.blocks);
            self.turn = self.turn.wrapping_add(1);
        }
    }

    /// Sequences in flight over all sessions.
    pub fn sequences_in_flight(&self) -> u32 {
        self.sessions.values().map(|held| held.in_flight.sequences).sum()
    }

    /// What all sessions hold together.
    pub fn held(&self) -> Grant {
        self.sessions.values().fold(Grant::default(), |sum, held| Grant {
            sequences: sum.sequences + held.in_flight.sequences,
            blocks: sum.blocks.saturating_add(held.in_flight.blocks),
        })
    }

    /// Each session's grant. `blocks_used` are the blocks really owned: sequences outgrow their admission cost,
    /// and what they took is not there to be granted.
    pub fn divide(&self, blocks_used: u32) -> impl Iterator<Item = (K, Grant)> + use<K> {
        let charged =
            self.sessions.values().fold(0u32, |sum, held| sum.saturating_add(held.in_flight.blocks));
        let free_sequences = self.capacity.sequences.saturating_sub(self.sequences_in_flight());
        let free_blocks = self.capacity.blocks.saturating_sub(charged.max(blocks_used));
        let mut grants: Vec<_> = self.sessions.iter().map(|(key, held)| (*key, held.in_flight)).collect();
        for (grant, extra) in grants.iter_mut().zip(self.share(free_sequences, |grant| grant.sequences)) {
            grant.1.sequences += extra;
        }
        for (grant, extra) in grants.iter_mut().zip(self.share(free_blocks, |grant| grant.blocks)) {
            grant.1.blocks = grant.1.blocks.saturating_add(extra);
        }
        grants.into_iter()
    }

    /// Sequences that each session may have in flight beyond its grant, for what is more important than something else that
    /// it has: `most` over all sessions, less what is in flight beyond the capacity already, shared equally. A session that has
    /// not read the newest number goes by an older one.
    pub fn urgent(&self, most: u32) -> impl Iterator<Item = (K, u32)> + use<K> {
        let over = self.sequences_in_flight().saturating_sub(self.capacity.sequences);
        let left = most.saturating_sub(over);
        let sessions = (self.sessions.len() as u32).max(1);
        let (each, odd, turn) = (left / sessions, left % sessions, self.turn % sessions);
        // What does not divide goes round.
        let share = move |place: u32| each + u32::from((place + sessions - turn) % sessions < odd);
        let keys: Vec<K> = self.sessions.keys().copied().collect();
        keys.into_iter().enumerate().map(move |(place, key)| (key, share(place as u32)))
    }

    /// What each session gets of `free` units, on top of the `has` that it has.
    fn share(&self, free: u32, has: fn(&Grant) -> u32) -> Vec<u32> {
        let backlog = self.sessions.values().any(|held| !held.idle);
        // Without a backlog what is free is shared; with one it evens out the totals.
        let base = |held: &Held| match (backlog, held.idle) {
            (false, _) => Some(0),
            (true, false) => Some(has(&held.in_flight)),
            (true, true) => None,
        };
        let bases: Vec<Option<u32>> = self.sessions.values().map(base).collect();
        let mut order: Vec<usize> = (0..bases.len()).filter(|place| bases[*place].is_some()).collect();
        let mut extra = vec![0u32; bases.len()];
        // Among equals, what does not divide goes round.
        let turn = self.turn as usize % bases.len().max(1);
        order.sort_by_key(|place| (bases[*place], (place + bases.len() - turn) % bases.len()));
        let mut left = free;
        for (rank, place) in order.iter().enumerate() {
            // Lift all before it, and itself, to the base of the next one, as far as it goes.
            let here = rank as u32 + 1;
            let level = bases[*place].unwrap_or(0);
            let next = order.get(rank + 1).map_or(u32::MAX, |next| bases[*next].unwrap_or(0));
            let lift = (next - level).min(left / here);
            let short = lift < next - level;
            for (nth, lifted) in order[..=rank].iter().enumerate() {
                let odd = u32::from(short && (nth as u32) < left - lift * here);
                extra[*lifted] += lift + odd;
            }
            if short {
                break;
            }
            left -= lift * here;
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
        fn grants_divide_the_capacity_exactly_and_never_take_back_what_runs(
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
            let urgent: Vec<u32> = grants.urgent(most).map(|(_, urgent)| urgent).collect();
            let beyond = held_sequences.saturating_sub(sequences);
            prop_assert_eq!(urgent.iter().sum::<u32>(), most.saturating_sub(beyond), "no more in all, ever");
            prop_assert!(urgent.iter().max().unwrap() - urgent.iter().min().unwrap() <= 1);
            let anybody = held.iter().any(|(.., backlog)| *backlog);
            for (session, grant) in &divided {
                let (s, b, backlog) = held[*session];
                prop_assert!(grant.sequences >= s && grant.blocks >= b);
                if anybody && !backlog {
                    prop_assert_eq!(grant.sequences, s, "what others wait for is not kept idle");
                }
                // Max-min: who was given anything has at most one more than anybody else who waits.
                if anybody && grant.sequences > s {
                    for (other, rival) in &divided {
                        prop_assert!(!held[*other].2 || rival.sequences + 1 >= grant.sequences);
                    }
                }
            }
        }
    }

    #[test]
    fn routers_that_all_have_a_backlog_take_turns_at_a_single_place() {
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
    fn an_idle_router_gives_way_to_a_full_one_and_gets_its_share_once_it_waits() {
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
