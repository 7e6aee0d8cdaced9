//! The dispatcher: queues requests, places them on workers and follows them to their end.
//!
//! A pure state machine, like the worker's scheduler: [`Dispatcher::apply`] takes an event and its time and
//! appends the commands that follow from it. The router carries them out; a simulator drives the same code
//! with a virtual clock, and a recording of the events reproduces every command.

mod assignment;
mod catalogue;
mod cluster_queue;
mod command;
mod dispatch;
mod drain;
mod ending;
mod event;
mod failure;
mod lanes;
mod non_finite;
mod placement_state;
mod quarantine;
mod reason;
mod request;
mod resubmission;
mod retry_queue;
mod retry_wait;
mod sessions;
mod updates;
mod violation;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use slotmap::SecondaryMap;

pub use catalogue::ResolveError;
use cluster_queue::ClusterQueue;
pub use command::{
    ChoiceOutput, ClientCommand, Command, Notice, RequestPlaced, ResumedChoice, Submission, WorkerCommand,
};
pub use event::{Event, RequestSpec, WorkerInfo};
pub use failure::Failure;
pub use lanes::Lane;
use lanes::Lanes;
use placement_state::PlacementState;
pub use placement_state::prompt_chains;
pub use reason::ResubmissionReason;
use request::Request;
use retry_queue::RetryQueue;
pub use retry_wait::RetryWait;
use sessions::Sessions;
pub use violation::Violation;

use crate::{
    Candidate, Credits, FairQueueOptions, LaneId, OutlierDetector, OutlierLimits, Policy, RequestId,
    RetryBudget, SessionId, SubmissionId, WorkerId,
};

/// Limits and times of a [`Dispatcher`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, clap::Args)]
pub struct DispatcherOptions {
    /// Order and bounds of the queue.
    #[command(flatten)]
    pub queue: FairQueueOptions,
    /// Maximum tokens of one request: prompt plus max_tokens of all its choices
    #[arg(long, value_name = "N", default_value_t = 4 << 20, env = "INFLIGHT_ROUTER_REQUEST_TOKENS_MAX")]
    pub request_tokens_max: u64,
    /// How long requests wait for a model without connected workers before they fail
    // Requests for a worker that is large enough wait as long.
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "30s",
        value_parser = inflight_options::duration,
        env = "INFLIGHT_ROUTER_NO_WORKER_TIMEOUT"
    )]
    pub no_worker_timeout: Duration,
    /// How long a model whose workers are gone stays UNAVAILABLE before it is NOT_FOUND
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "10m",
        value_parser = inflight_options::duration,
        env = "INFLIGHT_ROUTER_MODEL_RETENTION"
    )]
    pub model_retention: Duration,
    /// How long streams stay on a draining worker before they move to another
    #[arg(
        long,
        value_name = "DURATION",
        default_value = "10s",
        value_parser = inflight_options::duration,
        env = "INFLIGHT_ROUTER_DRAIN_GRACE"
    )]
    pub drain_grace: Duration,
    /// Retry budget: requests resubmitted per second after worker failures; more wait
    #[arg(long, value_name = "N", default_value_t = 256, env = "INFLIGHT_ROUTER_RETRY_RATE")]
    pub retry_rate: u32,
    /// Retry budget: burst of resubmissions
    #[arg(long, value_name = "N", default_value_t = 1024, env = "INFLIGHT_ROUTER_RETRY_BURST")]
    pub retry_burst: u32,
}

impl Default for DispatcherOptions {
    fn default() -> Self {
        inflight_options::defaults()
    }
}

/// Load of a dispatcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DispatcherLoad {
    /// Requests whose calls are open.
    pub open: usize,
    /// Requests in the queue.
    pub queued: usize,
    /// Maximum tokens of these.
    pub queued_tokens: u64,
    /// Resubmissions that wait for the retry budget.
    pub retries: usize,
    /// Quarantined requests that wait for a worker of their own.
    pub quarantined: usize,
    /// Submissions that their workers have not ended.
    pub in_flight: usize,
    /// Credits in use over all workers.
    pub used: Credits,
}

/// Grant and usage of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WorkerUsage {
    /// Submissions in flight.
    pub requests: usize,
    /// Credits in use.
    pub used: Credits,
    /// Credits granted.
    pub grant: Credits,
}

/// Decisions of a router: fair queue, placement, grant ledgers, failover, quarantine, outlier ejection and
/// the model catalogue.
///
/// Requests are queued until a worker's grant has room, then submitted to it; a lost worker's requests are
/// resubmitted from their journals. The cost of a worker's update depends on its entries, not on the number
/// of workers or requests; that of a placement on the workers of its model.
///
/// **Invariants**: a request is in exactly one of the phases queued, awaiting retry, paused, running, ended;
/// it ends at most once; a running one is in the ledger of exactly its worker's session, and every credit
/// charged is released when the worker ends the choice or its session closes.
#[derive(Debug)]
pub struct Dispatcher {
    options: DispatcherOptions,
    queue: ClusterQueue,
    lanes: Lanes,
    sessions: Sessions,
    /// Known workers, connected or not.
    members: BTreeSet<WorkerId>,
    next_submission: SubmissionId,
    placement: PlacementState,
    connected_ever: bool,
    /// Admitted requests whose calls are open.
    requests: SecondaryMap<RequestId, Request>,
    retries: RetryQueue,
    /// Quarantined requests that wait for a worker of their own.
    quarantined: VecDeque<RequestId>,
    outliers: OutlierDetector,
    ticks: u32,
    /// Number of routers at the last [`Command::RoutersChanged`].
    reported_routers: u32,
    /// Time of the current event.
    now: Duration,
    /// Commands of the current event.
    commands: Vec<Command>,
    /// Scratch space of placement.
    candidates: Vec<Candidate>,
}

impl Dispatcher {
    /// Interval of [`Event::Tick`].
    pub const TICK: Duration = Duration::from_millis(100);
    /// Ticks between two checks of all open requests.
    const TICKS_PER_CHECK: u32 = 10;
    /// Maximum number of block sizes for which a prompt is hashed: one per cluster, two during a migration.
    const BLOCK_SIZES_MAX: usize = 2;

    /// Creates a dispatcher without workers.
    pub fn new(options: DispatcherOptions, policy: Box<dyn Policy>) -> Self {
        Self {
            options,
            queue: ClusterQueue::new(options.queue),
            lanes: Lanes::default(),
            sessions: Sessions::default(),
            members: BTreeSet::new(),
            next_submission: SubmissionId(0),
            placement: PlacementState::new(policy),
            connected_ever: false,
            requests: SecondaryMap::new(),
            retries: RetryQueue::new(RetryBudget::new(options.retry_rate, options.retry_burst)),
            quarantined: VecDeque::new(),
            outliers: OutlierDetector::new(OutlierLimits::default()),
            ticks: 0,
            reported_routers: 1,
            now: Duration::ZERO,
            commands: Vec::new(),
            candidates: Vec::new(),
        }
    }

    /// Applies an event and appends the commands that follow from it, in the order in which they must be
    /// carried out. `now` is the time since a fixed epoch; if it goes backwards, the latest time counts.
    pub fn apply(&mut self, event: Event, now: Duration, commands: &mut Vec<Command>) {
        self.now = self.now.max(now);
        std::mem::swap(&mut self.commands, commands);
        match event {
            Event::WorkerJoined { worker } => {
                self.members.insert(worker);
                self.outliers.join(worker);
                self.commands.push(Command::TopologyChanged);
            }
            Event::WorkerRetired { worker } => self.retire(worker),
            Event::WorkerLeft { worker } => {
                self.members.remove(&worker);
                self.outliers.leave(worker);
                self.commands.push(Command::TopologyChanged);
            }
            Event::SessionOpened { session, worker } => self.open_session(session, *worker),
            Event::Updated { worker, session, update } => self.apply_update(worker, session, *update),
            Event::SessionClosed { worker, session, reason } => self.close_session(worker, session, reason),
            Event::Arrived { request, call } => self.arrive(request, *call),
            Event::ChoiceWithdrawn { request, choice } => self.withdraw(request, choice),
            Event::ClientBehind { request } => self.pause(request),
            Event::ClientResumed { request } => self.resume(request),
            Event::ClientStalled { request, waited } => self.end(request, Failure::ClientStalled { waited }),
            Event::Released { request } => {
                self.cancel_everywhere(request);
                self.requests.remove(request);
            }
            Event::Tick => self.tick(),
        }
        self.dispatch_waiting();
        let routers = self.queue.routers();
        if std::mem::replace(&mut self.reported_routers, routers) != routers {
            self.commands.push(Command::RoutersChanged { routers });
        }
        std::mem::swap(&mut self.commands, commands);
    }

    /// Returns the number of routers that share the workers.
    pub fn routers(&self) -> u32 {
        self.queue.routers()
    }

    /// Returns the current load.
    pub fn load(&self) -> DispatcherLoad {
        let used = self.sessions.iter().map(|session| session.ledger.used());
        DispatcherLoad {
            open: self.requests.len(),
            queued: self.queue.len(),
            queued_tokens: self.queue.tokens(),
            retries: self.retries.len(),
            quarantined: self.quarantined.len(),
            in_flight: self.sessions.iter().map(|session| session.submissions.len()).sum(),
            used: Credits {
                sequences: used.clone().map(|used| used.sequences).sum(),
                blocks: used.map(|used| used.blocks).sum(),
            },
        }
    }

    /// Returns the number and the maximum tokens of the queued requests.
    pub fn queue_usage(&self) -> (usize, u64) {
        (self.queue.len(), self.queue.tokens())
    }

    /// Returns the numbers of resubmissions that wait for the retry budget and for a worker of their own.
    pub fn waiting_retries(&self) -> (usize, usize) {
        (self.retries.len(), self.quarantined.len())
    }

    /// Returns grant and usage of a worker with an open session.
    pub fn worker_usage(&self, worker: WorkerId) -> Option<WorkerUsage> {
        let session = self.sessions.get(worker)?;
        let ledger = &session.ledger;
        Some(WorkerUsage { requests: ledger.requests(), used: ledger.used(), grant: ledger.grant() })
    }

    /// Returns the lane of a worker with an open session.
    pub fn lane_of(&self, worker: WorkerId) -> Option<LaneId> {
        self.sessions.get(worker).map(|session| session.lane)
    }

    /// Returns the numerics fingerprint of a worker with an open session.
    pub fn fingerprint_of(&self, worker: WorkerId) -> Option<&str> {
        self.sessions.get(worker).map(|session| &*session.fingerprint)
    }

    /// Returns the numbers of known workers and of open sessions.
    pub fn workers(&self) -> (usize, usize) {
        (self.members.len(), self.sessions.len())
    }

    /// Returns the number of ejected workers.
    pub fn ejected(&self) -> usize {
        self.outliers.ejected(self.now)
    }

    /// Returns the state of the workers that placement uses.
    pub fn worker_states(&self) -> &crate::WorkerStates {
        self.placement.worker_states()
    }

    /// Whether at least one worker accepts requests.
    pub fn is_ready(&self) -> bool {
        self.sessions.iter().any(|session| session.draining().is_none())
    }

    /// Whether a session has nothing in flight.
    pub fn is_idle(&self, worker: WorkerId, session: SessionId) -> bool {
        let open = self.sessions.get(worker).filter(|open| open.id == session);
        open.is_none_or(|open| open.submissions.is_empty())
    }

    /// Runs the time-driven work.
    fn tick(&mut self) {
        self.ticks = self.ticks.wrapping_add(1);
        if self.ticks.is_multiple_of(Self::TICKS_PER_CHECK) {
            self.end_expired();
            self.forget_lanes();
            self.queue.expire_indirect_counters(self.now);
        }
        self.fail_unserved();
        self.move_streams();
        self.queue.lanes().for_each(|lane| self.lanes.touch(lane));
    }

    /// Ends requests past their deadlines. A stream that is not polled would hold its resources until its
    /// connection ends.
    fn end_expired(&mut self) {
        let now = self.now;
        let over = self.requests.values().filter(|request| request.expired(now));
        let over: Vec<RequestId> = over.map(|request| request.id).collect();
        for request in over {
            self.end(request, Failure::DeadlineExceeded);
        }
    }
}
