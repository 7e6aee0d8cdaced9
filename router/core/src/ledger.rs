//! Grant ledger of one session: credits granted by a worker and credits used by requests in flight.

use std::collections::BTreeMap;
use std::sync::Arc;

use inflight_contract::Service;

use crate::{Credits, SubmissionId};

/// Credits released by the end of one choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// The choice's sequence and its own blocks; other choices of the request still run.
    Choice,
    /// The last sequence and all remaining blocks: the request is no longer in flight.
    Request,
    /// None: the choice was not in flight.
    Unknown,
}

#[derive(Debug)]
struct Charge {
    priority: i32,
    tenant: Arc<str>,
    /// Virtual start time by which the worker orders it.
    start: Option<Service>,
    /// Whether its worker has reported progress.
    started: bool,
    /// Bit mask of the running choices.
    running: u32,
    /// Blocks held until the last choice ends.
    shared: u32,
    /// Blocks held by each running choice until it ends, as (choice, blocks).
    own: Vec<(u32, u32)>,
}

/// Credits of one session: the worker's grant and the usage of its requests in flight. A request that
/// outranks another one in flight may use a few sequences beyond the grant: it need not wait for an end,
/// because its worker preempts in its favour, or begins it before the other one, which has not started.
///
/// Invariant: `used` is the sum over the running choices in flight and their blocks; every charge is released
/// exactly once. A grant is absolute and may shrink below `used`; then nothing fits until enough has ended.
#[derive(Debug, Default)]
pub struct Ledger {
    grant: Credits,
    priority_sequences: u32,
    /// Highest number so far: what the worker allows while nothing is in flight beyond its grants.
    priority_sequences_most: u32,
    used: Credits,
    /// Number of requests in flight by priority.
    priorities: BTreeMap<i32, u32>,
    /// Number of requests in flight that have not started, by virtual start time, for each tenant and priority.
    unstarted: BTreeMap<(Arc<str>, i32), BTreeMap<Option<Service>, u32>>,
    charges: BTreeMap<SubmissionId, Charge>,
}

impl Ledger {
    /// Maximum choices of a request.
    pub const CHOICES_MAX: u32 = 32;

    /// Replaces the grant.
    pub fn set_grant(&mut self, grant: Credits) {
        self.grant = grant;
    }

    /// Replaces the number of sequences allowed beyond the grant.
    pub fn set_priority_sequences(&mut self, priority_sequences: u32) {
        self.priority_sequences = priority_sequences;
        self.priority_sequences_most = self.priority_sequences_most.max(priority_sequences);
    }

    /// Returns the sequences beyond the grant that a request of this priority and tenant may use; 0 if it outranks
    /// nothing in flight. It outranks a lower priority, and a request that has not started whose tenant `has_more`:
    /// clearly more service over its weight than its own tenant would have with it. A request that outranks by priority only, and
    /// not the highest one in flight, leaves half of all to those that outrank it.
    pub fn priority_sequences(&self, priority: i32, tenant: &str, has_more: impl Fn(&str) -> bool) -> u32 {
        if self.priority_sequences == 0 {
            return 0;
        }
        let than = |other: Option<(&i32, &u32)>| other.is_some_and(|(other, _)| *other < priority);
        let mut unstarted =
            self.unstarted.keys().filter(|(name, other)| *other <= priority && **name != *tenant);
        if than(self.priorities.last_key_value()) || unstarted.any(|(name, _)| has_more(name)) {
            self.priority_sequences
        } else if than(self.priorities.first_key_value()) {
            self.priority_sequences.saturating_sub(self.priority_sequences_most / 2)
        } else {
            0
        }
    }

    /// Returns the earliest virtual start time of the requests of this priority that have not started and whose tenants
    /// `has_more`; `None` if there are none. A request that outranks them starts before them with it.
    pub fn outranked_start(
        &self,
        priority: i32,
        tenant: &str,
        has_more: impl Fn(&str) -> bool,
    ) -> Option<Service> {
        let outranked = self
            .unstarted
            .iter()
            .filter(|((name, other), _)| *other == priority && **name != *tenant && has_more(name));
        outranked.filter_map(|(_, starts)| starts.keys().flatten().next().copied()).min()
    }

    /// Records that a submission has started.
    pub fn start(&mut self, submission: SubmissionId) {
        if let Some(charge) = self.charges.get_mut(&submission).filter(|charge| !charge.started) {
            charge.started = true;
            let (key, start) = ((charge.tenant.clone(), charge.priority), charge.start);
            self.remove_unstarted(&key, start);
        }
    }

    /// Returns the grant.
    pub fn grant(&self) -> Credits {
        self.grant
    }

    /// Returns the credits in use.
    pub fn used(&self) -> Credits {
        self.used
    }

    /// Returns the number of requests in flight.
    pub fn requests(&self) -> usize {
        self.charges.len()
    }

    /// Charges a submission of priority 0: the choices in the bit mask `running`, and `blocks` for all of
    /// them together.
    pub fn charge(&mut self, submission: SubmissionId, running: u32, blocks: u32) {
        let tenant = Arc::from("");
        let (priority, start, own) = (0, None, Vec::new());
        let charge = Charge { priority, tenant, start, started: false, running, shared: blocks, own };
        self.insert(submission, charge);
    }

    /// Charges a submission that its worker orders by `start`: `shared` blocks, and its choices below [`Ledger::CHOICES_MAX`] with
    /// the blocks of each.
    pub fn charge_choices(
        &mut self,
        submission: SubmissionId,
        priority: i32,
        tenant: &str,
        start: Option<Service>,
        shared: u32,
        own: impl Iterator<Item = (u32, u32)>,
    ) {
        let own: Vec<_> = own.collect();
        let running = own.iter().fold(0, |mask, (choice, _)| mask | 1u32.checked_shl(*choice).unwrap_or(0));
        let tenant = Arc::from(tenant);
        self.insert(submission, Charge { priority, tenant, start, started: false, running, shared, own });
    }

    fn insert(&mut self, submission: SubmissionId, charge: Charge) {
        debug_assert!(charge.running != 0, "a submission runs something");
        self.used.sequences += charge.running.count_ones();
        self.used.blocks += charge.shared + charge.own.iter().map(|(_, blocks)| blocks).sum::<u32>();
        *self.priorities.entry(charge.priority).or_default() += 1;
        let unstarted = self.unstarted.entry((charge.tenant.clone(), charge.priority)).or_default();
        *unstarted.entry(charge.start).or_default() += 1;
        let before = self.charges.insert(submission, charge);
        debug_assert!(before.is_none(), "a submission is charged once");
    }

    /// Releases the credits of an ended choice.
    pub fn settle(&mut self, submission: SubmissionId, choice: u32) -> Settled {
        let Some(charge) = self.charges.get_mut(&submission) else { return Settled::Unknown };
        let bit = 1u32.checked_shl(choice).unwrap_or(0);
        if charge.running & bit == 0 {
            return Settled::Unknown;
        }
        charge.running &= !bit;
        self.used.sequences -= 1;
        if let Some(place) = charge.own.iter().position(|(of, _)| *of == choice) {
            self.used.blocks -= charge.own.swap_remove(place).1;
        }
        if charge.running != 0 {
            return Settled::Choice;
        }
        self.used.blocks -= charge.shared;
        let (priority, start) = (charge.priority, charge.start);
        let key = (!charge.started).then(|| (charge.tenant.clone(), charge.priority));
        self.charges.remove(&submission);
        remove_one(&mut self.priorities, &priority);
        if let Some(key) = key {
            self.remove_unstarted(&key, start);
        }
        Settled::Request
    }

    fn remove_unstarted(&mut self, key: &(Arc<str>, i32), start: Option<Service>) {
        if let Some(starts) = self.unstarted.get_mut(key) {
            remove_one(starts, &start);
            if starts.is_empty() {
                self.unstarted.remove(key);
            }
        }
    }

    /// Whether a choice of a submission still runs.
    pub fn runs(&self, submission: SubmissionId, choice: u32) -> bool {
        let bit = 1u32.checked_shl(choice).unwrap_or(0);
        self.charges.get(&submission).is_some_and(|charge| charge.running & bit != 0)
    }
}

/// Counts one less; entries of 0 are removed.
fn remove_one<K: Ord>(counts: &mut BTreeMap<K, u32>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Candidate;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_charge_is_released_exactly_once(
            charges in proptest::collection::vec((1u32..=0xffff, 0u32..1000, 0u32..9), 1..20),
            settles in proptest::collection::vec((0u64..24, 0u32..40), 0..400),
            grants in proptest::collection::vec((0u32..100, 0u32..100), 1..10)) {
            let mut ledger = Ledger::default();
            let mut open: BTreeMap<u64, (u32, u32, u32)> = BTreeMap::new();
            for (i, (mask, blocks, each)) in charges.iter().enumerate() {
                match each {
                    0 => ledger.charge(SubmissionId(i as u64), *mask, *blocks),
                    _ => {
                        let choices = (0..32).filter(|choice| mask & (1 << choice) != 0);
                        ledger.charge_choices(SubmissionId(i as u64), 0, "a", None, *blocks, choices.map(|choice| (choice, *each)));
                    }
                }
                open.insert(i as u64, (*mask, *blocks, *each));
            }
            let finish_all = (0u64..20).flat_map(|s| (0..32).map(move |c| (s, c)));
            for (i, (submission, choice)) in settles.into_iter().chain(finish_all).enumerate() {
                let (sequences, blocks) = grants[i % grants.len()];
                ledger.set_grant(Credits { sequences, blocks });
                let expected = match open.get_mut(&submission) {
                    Some((mask, ..)) if choice < 32 && *mask & (1 << choice) != 0 => {
                        *mask &= !(1 << choice);
                        if *mask == 0 { open.remove(&submission); Settled::Request } else { Settled::Choice }
                    }
                    _ => Settled::Unknown,
                };
                prop_assert_eq!(ledger.settle(SubmissionId(submission), choice), expected);
                let used = Credits {
                    sequences: open.values().map(|(mask, ..)| mask.count_ones()).sum(),
                    blocks: open.values().map(|(mask, shared, each)| shared + mask.count_ones() * each).sum(),
                };
                prop_assert_eq!(ledger.used(), used);
                prop_assert_eq!(ledger.requests(), open.len());
            }
            prop_assert_eq!(ledger.used(), Credits::default());
        }

        #[test]
        fn only_requests_that_outrank_others_use_sequences_beyond_the_grant(
            grants in proptest::collection::vec((0u32..6, 0u32..4), 1..8),
            steps in proptest::collection::vec((any::<bool>(), -2i32..3, 1u32..3), 1..120)) {
            let mut ledger = Ledger::default();
            let mut open: Vec<(u64, i32, u32)> = Vec::new();
            let (mut most, mut most_beyond) = (0, 0);
            for (i, (arrives, priority, sequences)) in steps.into_iter().enumerate() {
                let (granted, priority_sequences) = grants[i * grants.len() / 120];
                let grant = Credits { sequences: granted, blocks: 1 };
                ledger.set_grant(grant);
                ledger.set_priority_sequences(priority_sequences);
                most = most.max(granted + priority_sequences).max(2);
                most_beyond = most_beyond.max(priority_sequences);
                if !arrives {
                    if !open.is_empty() {
                        let (submission, _, choices) = open.remove(i % open.len());
                        for choice in 0..choices {
                            ledger.settle(SubmissionId(submission), choice);
                        }
                    }
                    continue;
                }
                let need = Credits { sequences, blocks: 1 };
                let used = ledger.used();
                let candidate =
                    Candidate { grant, used, need, priority_sequences: ledger.priority_sequences(priority, "a", |_| true), ..Candidate::default() };
                let outranks = open.iter().any(|(_, other, _)| *other < priority);
                let highest = open.iter().all(|(_, other, _)| *other < priority);
                let own = if highest { priority_sequences } else { priority_sequences.saturating_sub(most_beyond / 2) };
                let beyond = outranks && own > 0 && used.sequences + sequences <= granted + own;
                let expected = grant.fit(used, need) || (used.sequences == 0 && granted > 0) || beyond;
                prop_assert_eq!(candidate.has_room(), expected);
                if expected {
                    ledger.charge_choices(SubmissionId(i as u64), priority, "a", None, 1, (0..sequences).map(|choice| (choice, 0)));
                    open.push((i as u64, priority, sequences));
                    prop_assert!(ledger.used().sequences <= most);
                }
            }
        }
    }

    #[test]
    fn a_tenant_with_less_service_outranks_what_has_not_started() {
        let mut ledger = Ledger::default();
        ledger.set_priority_sequences(4);
        let has_more = |tenant: &str| tenant == "crowd";
        let submit = |ledger: &mut Ledger, id, priority, tenant: &str| {
            let start = Some(Service::from_thousandths(100 + id));
            ledger.charge_choices(SubmissionId(id), priority, tenant, start, 0, [(0, 1)].into_iter());
        };
        submit(&mut ledger, 1, 0, "crowd");
        submit(&mut ledger, 2, 0, "crowd");
        submit(&mut ledger, 3, 0, "other");
        assert_eq!(ledger.priority_sequences(0, "small", has_more), 4);
        assert_eq!(ledger.priority_sequences(0, "small", |_| false), 0, "none has clearly more");
        assert_eq!(ledger.priority_sequences(0, "crowd", has_more), 0, "not its own");
        assert_eq!(ledger.priority_sequences(-1, "small", has_more), 0, "a higher priority is not outranked");
        let start = |ledger: &Ledger, priority, tenant| {
            ledger.outranked_start(priority, tenant, has_more).map(Service::thousandths)
        };
        assert_eq!(start(&ledger, 0, "small"), Some(101), "the earliest of the crowd");
        assert_eq!(start(&ledger, 1, "small"), None, "a lower priority is behind it in any case");
        assert_eq!(start(&ledger, 0, "crowd"), None);
        ledger.start(SubmissionId(1));
        ledger.start(SubmissionId(1));
        assert_eq!(start(&ledger, 0, "small"), Some(102));
        assert_eq!(ledger.priority_sequences(0, "small", has_more), 4);
        assert_eq!(ledger.settle(SubmissionId(2), 0), Settled::Request);
        assert_eq!(ledger.priority_sequences(0, "small", has_more), 0, "what crowd has there has started");
        for id in [1, 3] {
            assert_eq!(ledger.settle(SubmissionId(id), 0), Settled::Request);
        }
        assert!(ledger.unstarted.is_empty() && ledger.priorities.is_empty());
    }
}
