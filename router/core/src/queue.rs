use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::QueueLimits;

/// Why a request was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum QueueFull {
    /// The limit on requests is reached.
    #[error("the queue holds {held} requests, its limit; try again later")]
    Requests {
        /// Requests held.
        held: usize,
    },
    /// The limit on tokens is reached.
    #[error(
        "the queue holds {held} tokens and this request would add {asked}, over its limit of {limit}; try again later"
    )]
    Tokens {
        /// Tokens held.
        held: u64,
        /// Tokens of the request.
        asked: u64,
        /// The limit.
        limit: u64,
    },
}

/// Order within a lane: resubmissions first, then higher priority, then earlier arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    fresh: bool,
    priority: Reverse<i32>,
    arrival: u64,
}

/// Where a request waits; the key to take it out again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place<L> {
    lane: L,
    rank: Rank,
}

impl<L> Place<L> {
    /// The request's number in the order of arrivals; keeps its turn when it is put back.
    pub fn arrival(&self) -> u64 {
        self.rank.arrival
    }
}

#[derive(Debug)]
struct Entry<T> {
    tokens: u64,
    item: T,
}

/// A bounded queue of requests, with one lane for each kind that is served apart (a model, say), so that a
/// lane whose head cannot start does not hold up the others. Limits are common to all lanes.
///
/// Invariants: `len` and `tokens` are the sums over the lanes; arrivals are refused at the limits; resubmitted
/// requests were admitted once and are always taken back, so they are bounded by what was in flight.
#[derive(Debug)]
pub struct RequestQueue<L, T> {
    limits: QueueLimits,
    lanes: BTreeMap<L, BTreeMap<Rank, Entry<T>>>,
    len: usize,
    tokens: u64,
    arrivals: u64,
}

impl<L: Ord + Copy, T> RequestQueue<L, T> {
    /// An empty queue.
    pub fn new(limits: QueueLimits) -> Self {
        Self { limits, lanes: BTreeMap::new(), len: 0, tokens: 0, arrivals: 0 }
    }

    /// Takes a new request in. An empty queue takes any request, so that none is too large for ever.
    ///
    /// # Errors
    /// [`QueueFull`] with the limit reached; the queue is unchanged.
    pub fn push(&mut self, lane: L, priority: i32, tokens: u64, item: T) -> Result<Place<L>, QueueFull> {
        if self.len >= self.limits.requests {
            return Err(QueueFull::Requests { held: self.len });
        }
        if self.len > 0 && self.tokens.saturating_add(tokens) > self.limits.tokens {
            return Err(QueueFull::Tokens { held: self.tokens, asked: tokens, limit: self.limits.tokens });
        }
        let arrival = self.arrivals;
        self.arrivals += 1;
        Ok(self.insert(lane, Rank { fresh: true, priority: Reverse(priority), arrival }, tokens, item))
    }

    /// Puts a request back, ahead of all that never started, in the order of the arrivals among its like.
    pub fn push_front(&mut self, lane: L, priority: i32, arrival: u64, tokens: u64, item: T) -> Place<L> {
        debug_assert!(arrival < self.arrivals, "only what arrived can be put back");
        self.insert(lane, Rank { fresh: false, priority: Reverse(priority), arrival }, tokens, item)
    }

    fn insert(&mut self, lane: L, rank: Rank, tokens: u64, item: T) -> Place<L> {
        let before = self.lanes.entry(lane).or_default().insert(rank, Entry { tokens, item });
        debug_assert!(before.is_none(), "an arrival number waits once");
        self.len += 1;
        self.tokens += tokens;
        Place { lane, rank }
    }

    /// The next request of a lane.
    pub fn head(&self, lane: L) -> Option<&T> {
        self.lanes.get(&lane)?.first_key_value().map(|(_, entry)| &entry.item)
    }

    /// Takes the next request of a lane out.
    pub fn pop(&mut self, lane: L) -> Option<(Place<L>, T)> {
        let rank = *self.lanes.get(&lane)?.first_key_value()?.0;
        let place = Place { lane, rank };
        self.remove(&place).map(|item| (place, item))
    }

    /// Takes a request out of the middle, O(log n); `None` if it is not waiting there any more.
    pub fn remove(&mut self, place: &Place<L>) -> Option<T> {
        let waiting = self.lanes.get_mut(&place.lane)?;
        let entry = waiting.remove(&place.rank)?;
        if waiting.is_empty() {
            self.lanes.remove(&place.lane);
        }
        self.len -= 1;
        self.tokens -= entry.tokens;
        Some(entry.item)
    }

    /// Lanes in which something waits.
    pub fn lanes(&self) -> impl Iterator<Item = L> + '_ {
        self.lanes.keys().copied()
    }

    /// Whether something waits in a lane.
    pub fn waits_in(&self, lane: L) -> bool {
        self.lanes.contains_key(&lane)
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that the waiting requests may come to hold.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Op {
        Push { lane: u8, priority: i32, tokens: u64 },
        Pop { lane: u8 },
        Cancel { nth: usize },
        PutBack { nth: usize },
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let op = prop_oneof![
            3 => (0..3u8, -2..3i32, 0..50u64)
                .prop_map(|(lane, priority, tokens)| Op::Push { lane, priority, tokens }),
            2 => (0..3u8).prop_map(|lane| Op::Pop { lane }),
            1 => any::<usize>().prop_map(|nth| Op::Cancel { nth }),
            1 => any::<usize>().prop_map(|nth| Op::PutBack { nth }),
        ];
        proptest::collection::vec(op, 0..200)
    }

    /// One request in the naive model: (lane, put back, priority, arrival, tokens).
    type Naive = (u8, bool, i32, u64, u64);

    fn next_of(model: &[Naive], lane: u8) -> Option<usize> {
        let order = |(_, back, priority, arrival, _): &Naive| (!back, -priority, *arrival);
        (0..model.len()).filter(|i| model[*i].0 == lane).min_by_key(|i| order(&model[*i]))
    }

    proptest! {
        #[test]
        fn agrees_with_a_sorted_list_under_any_interleaving(ops in ops()) {
            let limits = QueueLimits { requests: 8, tokens: 200 };
            let mut queue = RequestQueue::new(limits);
            let mut model: Vec<Naive> = Vec::new();
            let mut places = BTreeMap::new();
            let mut popped: Vec<Naive> = Vec::new();
            let mut returned = 0;
            for op in ops {
                match op {
                    Op::Push { lane, priority, tokens } => {
                        let held: u64 = model.iter().map(|m| m.4).sum();
                        let room = model.len() < limits.requests
                            && (model.is_empty() || held + tokens <= limits.tokens);
                        let arrival = queue.arrivals;
                        let taken = queue.push(lane, priority, tokens, arrival);
                        prop_assert_eq!(taken.is_ok(), room);
                        if let Ok(place) = taken {
                            places.insert(arrival, place);
                            model.push((lane, false, priority, arrival, tokens));
                        }
                    }
                    Op::Pop { lane } => {
                        let expected = next_of(&model, lane).map(|i| model.remove(i));
                        prop_assert_eq!(queue.head(lane).copied(), expected.map(|m| m.3));
                        prop_assert_eq!(queue.pop(lane).map(|(_, item)| item), expected.map(|m| m.3));
                        popped.extend(expected);
                    }
                    Op::Cancel { nth } => if !model.is_empty() {
                        let gone = model.remove(nth % model.len());
                        prop_assert_eq!(queue.remove(&places[&gone.3]), Some(gone.3));
                        prop_assert_eq!(queue.remove(&places[&gone.3]), None, "a second cancel finds nothing");
                    },
                    Op::PutBack { nth } => if !popped.is_empty() {
                        let (lane, _, priority, arrival, tokens) = popped.remove(nth % popped.len());
                        places.insert(arrival, queue.push_front(lane, priority, arrival, tokens, arrival));
                        model.push((lane, true, priority, arrival, tokens));
                        returned += 1;
                    },
                }
                prop_assert_eq!(queue.len(), model.len());
                prop_assert_eq!(queue.tokens(), model.iter().map(|m| m.4).sum::<u64>());
                prop_assert!(queue.len() <= limits.requests + returned);
            }
        }

        #[test]
        fn within_a_priority_nobody_is_overtaken_by_a_later_arrival(priorities in
            proptest::collection::vec(-2..3i32, 1..100)) {
            let mut queue = RequestQueue::new(QueueLimits { requests: 100, tokens: 100 });
            for (i, priority) in priorities.iter().enumerate() {
                queue.push(0, *priority, 1, i).unwrap();
            }
            let mut last = BTreeMap::new();
            while let Some((_, i)) = queue.pop(0) {
                if let Some(before) = last.insert(priorities[i], i) {
                    prop_assert!(before < i);
                }
            }
        }
    }
}
