use std::collections::BTreeMap;
use std::sync::Arc;

use inflight_contract::ModelLimits;
use inflight_proto::v1;
use inflight_proto::v1::session_request::Message;
use inflight_router_core::{Credits, Ledger, Settled};
use metrics::Gauge;
use tokio::sync::mpsc;

use crate::dispatch::{Introduction, LaneId};
use crate::metrics as names;
use crate::relay::Relay;

/// A submission that its worker has not ended.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) relay: Arc<Relay>,
    pub(crate) attempt: u32,
    cancelled: bool,
}

/// An open session, as the dispatcher sees it: what its worker is, what it grants, what is in flight there.
pub(crate) struct Session {
    pub(crate) id: u64,
    pub(crate) worker: usize,
    pub(crate) address: String,
    pub(crate) lane: LaneId,
    pub(crate) fingerprint: String,
    pub(crate) limits: ModelLimits,
    pub(crate) block_tokens: u32,
    pub(crate) draining: bool,
    pub(crate) ledger: Ledger,
    pub(crate) flights: BTreeMap<u64, Flight>,
    /// Bounded by what is sent into it: at most one submission for each flight, whose number the grant bounds,
    /// and for each one cancel and one more for each choice.
    commands: mpsc::UnboundedSender<v1::SessionRequest>,
    gauges: Gauges,
}

struct Gauges {
    requests: Gauge,
    sequences: Gauge,
    sequences_granted: Gauge,
    blocks: Gauge,
    blocks_granted: Gauge,
}

impl Session {
    pub(crate) fn new(id: u64, lane: LaneId, introduction: Introduction) -> Self {
        let gauge = |name: &'static str| metrics::gauge!(name, "worker" => introduction.address.clone());
        let gauges = Gauges {
            requests: gauge(names::WORKER_REQUESTS),
            sequences: gauge(names::WORKER_SEQUENCES),
            sequences_granted: gauge(names::WORKER_SEQUENCES_GRANTED),
            blocks: gauge(names::WORKER_BLOCKS),
            blocks_granted: gauge(names::WORKER_BLOCKS_GRANTED),
        };
        Self {
            id,
            worker: introduction.worker,
            address: introduction.address,
            lane,
            fingerprint: introduction.fingerprint,
            limits: introduction.limits,
            block_tokens: introduction.block_tokens,
            draining: false,
            ledger: Ledger::default(),
            flights: BTreeMap::new(),
            commands: introduction.commands,
            gauges,
        }
    }

    /// Hands a submission to the worker and charges it.
    pub(crate) fn submit(
        &mut self,
        relay: &Arc<Relay>,
        attempt: u32,
        running: u32,
        blocks: u32,
        submit: v1::Submit,
    ) {
        let submission = submit.request;
        self.ledger.charge(submission, running, blocks);
        self.flights.insert(submission, Flight { relay: relay.clone(), attempt, cancelled: false });
        self.send(Message::Submit(submit));
        self.show();
    }

    /// Withdraws all that still runs of a submission.
    pub(crate) fn cancel(&mut self, submission: u64) {
        let Some(flight) = self.flights.get_mut(&submission) else { return };
        if !std::mem::replace(&mut flight.cancelled, true) {
            self.send(Message::Cancel(v1::Cancel { request: submission, choice: None }));
        }
    }

    /// Withdraws one choice of a submission.
    pub(crate) fn cancel_choice(&mut self, submission: u64, choice: u32) {
        let cancelled = self.flights.get(&submission).is_none_or(|flight| flight.cancelled);
        if !cancelled && self.ledger.runs(submission, choice) {
            self.send(Message::Cancel(v1::Cancel { request: submission, choice: Some(choice) }));
        }
    }

    /// Gives back what an ended choice held.
    pub(crate) fn settle(&mut self, submission: u64, choice: u32) {
        match self.ledger.settle(submission, choice) {
            Settled::Choice => {}
            Settled::Request => {
                self.flights.remove(&submission);
            }
            Settled::Unknown => {
                tracing::warn!(worker = self.address, submission, choice, "worker ended a choice twice");
            }
        }
    }

    /// Shows the ledger in the metrics.
    pub(crate) fn show(&self) {
        let (used, grant) = (self.ledger.used(), self.ledger.grant());
        self.gauges.set(self.ledger.requests(), used, grant);
    }

    /// Shows that nothing is in flight or granted.
    pub(crate) fn clear_gauges(&self) {
        self.gauges.set(0, Credits::default(), Credits::default());
    }

    fn send(&self, message: Message) {
        // A receiver that is gone means that the session is being closed, which queues its requests again.
        let _ = self.commands.send(v1::SessionRequest { message: Some(message) });
    }
}

impl Gauges {
    fn set(&self, requests: usize, used: Credits, grant: Credits) {
        self.requests.set(requests as f64);
        self.sequences.set(used.sequences);
        self.sequences_granted.set(grant.sequences);
        self.blocks.set(used.blocks);
        self.blocks_granted.set(grant.blocks);
    }
}
