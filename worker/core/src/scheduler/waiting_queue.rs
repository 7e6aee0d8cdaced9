//! Waiting sequences by flow: those of one tenant at one priority are served in order of arrival.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Bound;

use inflight_contract::{Service, Tenant};

use crate::sequence::Sequence;

/// Key of a flow: the waiting sequences of one tenant at one priority, which are served in order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FlowKey {
    priority: Reverse<i32>,
    tenant: Tenant,
}

impl FlowKey {
    /// Returns the flow of a priority and a tenant.
    pub fn new(priority: i32, tenant: Tenant) -> Self {
        Self { priority: Reverse(priority), tenant }
    }

    fn of(sequence: &Sequence) -> Self {
        Self::new(sequence.priority, sequence.tenant)
    }
}

/// Waiting sequences, and the virtual time that those which left the queue have reached.
#[derive(Debug, Default)]
pub(super) struct WaitingQueue {
    /// Indices by arrival number, by flow; no flow is empty.
    flows: BTreeMap<FlowKey, BTreeMap<u64, u32>>,
    len: u32,
    /// Highest virtual start time of the sequences that left the queue.
    virtual_time: Service,
}

impl WaitingQueue {
    /// Adds a sequence to its flow, at the place of its arrival.
    pub fn insert(&mut self, sequence: &Sequence) {
        self.flows.entry(FlowKey::of(sequence)).or_default().insert(sequence.arrival, sequence.id.index);
        self.len += 1;
    }

    /// Removes a sequence from its flow and advances the system virtual time.
    pub fn remove(&mut self, sequence: &Sequence) {
        self.virtual_time = self.virtual_time.max(sequence.virtual_start_time.unwrap_or_default());
        let flow = FlowKey::of(sequence);
        if let Some(waiting) = self.flows.get_mut(&flow) {
            waiting.remove(&sequence.arrival);
            if waiting.is_empty() {
                self.flows.remove(&flow);
            }
        }
        self.len -= 1;
    }

    /// Returns the number of sequences.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Returns true without sequences.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the system virtual time: the highest virtual start time of the sequences that left the queue.
    pub fn virtual_time(&self) -> Service {
        self.virtual_time
    }

    /// Returns the flows, each with the index of its first sequence.
    pub fn heads(&self) -> impl Iterator<Item = (FlowKey, u32)> + '_ {
        self.flows.iter().filter_map(|(flow, waiting)| Some((*flow, *waiting.first_key_value()?.1)))
    }

    /// Returns the index of the first sequence of a flow that arrived after `arrival`.
    pub fn behind(&self, flow: FlowKey, arrival: u64) -> Option<u32> {
        let behind = (Bound::Excluded(arrival), Bound::Unbounded);
        self.flows.get(&flow)?.range(behind).next().map(|(_, index)| *index)
    }

    /// Returns the index of the last sequence of a flow.
    pub fn last(&self, flow: FlowKey) -> Option<u32> {
        self.flows.get(&flow)?.last_key_value().map(|(_, index)| *index)
    }

    /// Returns true if a sequence is in its flow, for tests.
    pub fn contains(&self, sequence: &Sequence) -> bool {
        let flow = self.flows.get(&FlowKey::of(sequence));
        flow.and_then(|flow| flow.get(&sequence.arrival)) == Some(&sequence.id.index)
    }
}
