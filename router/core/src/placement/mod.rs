/// Capacity at a worker, as grants and requests count it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Credits {
    /// Sequences (choices) in flight.
    pub sequences: u32,
    /// KV blocks for their admission.
    pub blocks: u32,
}

impl Credits {
    /// Whether `need` more fit when `used` of these are taken. A shrunken grant may be below what is used.
    pub fn fit(self, used: Credits, need: Credits) -> bool {
        let within = |bound: u32, used: u32, need: u32| u64::from(used) + u64::from(need) <= u64::from(bound);
        within(self.sequences, used.sequences, need.sequences)
            && within(self.blocks, used.blocks, need.blocks)
    }
}

/// A worker that could run a request, as one session knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// The worker's index in the router's list.
    pub worker: usize,
    /// What the session may have in flight.
    pub grant: Credits,
    /// What it has in flight.
    pub used: Credits,
    /// What the request needs there (workers may have blocks of different sizes).
    pub need: Credits,
    /// It failed this request before: taken only if no other has room.
    pub avoid: bool,
}

impl Candidate {
    /// Whether the request may be handed over now. A session with nothing in flight takes any request as soon
    /// as it has a grant: a request larger than every grant would otherwise wait for ever.
    pub fn has_room(&self) -> bool {
        let idle = self.used.sequences == 0;
        self.grant.fit(self.used, self.need) || (idle && self.grant.sequences > 0 && self.grant.blocks > 0)
    }

    /// Compares the load after taking the request: the fuller of the two bounds, as a fraction.
    fn load(&self) -> Fraction {
        let sequences = Fraction::new(self.used.sequences, self.need.sequences, self.grant.sequences);
        let blocks = Fraction::new(self.used.blocks, self.need.blocks, self.grant.blocks);
        sequences.max(blocks)
    }
}

/// A non-negative fraction, compared exactly.
#[derive(Debug, Clone, Copy)]
struct Fraction {
    over: u64,
    under: u64,
}

impl Fraction {
    fn new(used: u32, need: u32, bound: u32) -> Self {
        Self { over: u64::from(used) + u64::from(need), under: u64::from(bound).max(1) }
    }
}

impl PartialEq for Fraction {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Fraction {}

impl PartialOrd for Fraction {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Fraction {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let scale = |a: u64, b: u64| u128::from(a) * u128::from(b);
        scale(self.over, other.under).cmp(&scale(other.over, self.under))
    }
}

/// Decides where a request runs.
pub trait Placement: Send {
    /// The worker to hand the request to now; `None` if none of the candidates has room.
    fn choose(&mut self, candidates: &[Candidate]) -> Option<usize>;
}

/// Takes the worker that is relatively least loaded after taking the request; among equals, the next one
/// after the worker chosen last, so that an idle cluster is filled round and round.
#[derive(Debug, Default)]
pub struct LeastLoaded {
    last: Option<usize>,
}

impl Placement for LeastLoaded {
    fn choose(&mut self, candidates: &[Candidate]) -> Option<usize> {
        let wrapped = |worker: usize| self.last.is_some_and(|last| worker <= last);
        let chosen = candidates
            .iter()
            .filter(|candidate| candidate.has_room())
            .min_by_key(|c| (c.avoid, c.load(), wrapped(c.worker), c.worker))?
            .worker;
        self.last = Some(chosen);
        Some(chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn credits(most: u32) -> impl Strategy<Value = Credits> {
        (0..=most, 0..=most).prop_map(|(sequences, blocks)| Credits { sequences, blocks })
    }

    fn idle(worker: usize, sequences: u32) -> Candidate {
        Candidate {
            worker,
            grant: Credits { sequences, blocks: 100 },
            used: Credits::default(),
            need: Credits { sequences: 1, blocks: 2 },
            avoid: false,
        }
    }

    #[test]
    fn equal_workers_are_taken_in_turn() {
        let mut policy = LeastLoaded::default();
        let candidates: Vec<_> = (0..3).map(|worker| idle(worker, 8)).collect();
        let chosen: Vec<_> = (0..6).filter_map(|_| policy.choose(&candidates)).collect();
        assert_eq!(chosen, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn load_is_relative_to_the_grant_and_a_worker_to_avoid_comes_last() {
        let mut policy = LeastLoaded::default();
        let busy_but_large = Candidate { used: Credits { sequences: 4, blocks: 8 }, ..idle(0, 64) };
        let small = Candidate { used: Credits { sequences: 2, blocks: 4 }, ..idle(1, 4) };
        assert_eq!(policy.choose(&[busy_but_large, small]), Some(0));
        assert_eq!(policy.choose(&[Candidate { avoid: true, ..busy_but_large }, small]), Some(1));
        let full = Candidate { used: Credits { sequences: 4, blocks: 8 }, ..small };
        assert_eq!(policy.choose(&[Candidate { avoid: true, ..busy_but_large }, full]), Some(0));
    }

    #[test]
    fn a_request_larger_than_every_grant_starts_on_an_idle_session_alone() {
        let mut policy = LeastLoaded::default();
        let large = Candidate { need: Credits { sequences: 16, blocks: 900 }, ..idle(0, 8) };
        assert_eq!(policy.choose(&[large]), Some(0));
        assert_eq!(policy.choose(&[Candidate { used: Credits { sequences: 1, blocks: 1 }, ..large }]), None);
        assert_eq!(policy.choose(&[Candidate { grant: Credits::default(), ..large }]), None);
    }

    proptest! {
        #[test]
        fn only_a_worker_with_room_is_chosen_and_one_is_if_there_is_any(
            workers in proptest::collection::vec((credits(20), credits(20), credits(4), any::<bool>()), 0..8)) {
            let candidates: Vec<_> = workers.into_iter().enumerate()
                .map(|(worker, (grant, used, need, avoid))| Candidate { worker, grant, used, need, avoid })
                .collect();
            match LeastLoaded::default().choose(&candidates) {
                Some(worker) => {
                    let c = candidates[worker];
                    prop_assert!(c.grant.fit(c.used, c.need) || c.used.sequences == 0);
                    prop_assert!(!c.avoid || candidates.iter().all(|o| o.avoid || !o.has_room()));
                    let used = |x: &Candidate| (f64::from(x.used.sequences + x.need.sequences) / f64::from(x.grant.sequences.max(1)))
                        .max(f64::from(x.used.blocks + x.need.blocks) / f64::from(x.grant.blocks.max(1)));
                    for other in candidates.iter().filter(|o| o.avoid == c.avoid && o.has_room()) {
                        prop_assert!(used(&c) <= used(other) + 1e-9);
                    }
                }
                None => prop_assert!(candidates.iter().all(|c| !c.has_room())),
            }
        }
    }
}
