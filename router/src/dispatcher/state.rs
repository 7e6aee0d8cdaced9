//! What the dispatcher's shell keeps beside the pure dispatcher: open requests, connections to workers, models
//! and metric handles.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use inflight_contract::ModelLimits;
use inflight_router_core::{
    Command, Dispatcher, LaneId, RequestId, SessionId, WorkerCommand, WorkerId, WorkerInfo, WorkerUsage,
};
use metrics::Gauge;
use slotmap::SlotMap;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio_util::sync::CancellationToken;

use super::model_aliases::ModelAliases;
use super::recorder::Recorder;
use super::request::ActiveRequest;
use crate::cluster::bundle::Model;
use crate::live::hub::Hub;
use crate::metrics as names;

/// Model as requests resolve it.
#[derive(Debug, Clone)]
pub(crate) struct ServedModel {
    pub(crate) lane: LaneId,
    pub(crate) name: String,
    pub(crate) architecture: String,
    pub(crate) limits: ModelLimits,
    pub(crate) model: Arc<Model>,
}

/// Message to a worker, with the request of a submission.
#[derive(Debug)]
pub(crate) struct WorkerMessage {
    pub(crate) command: WorkerCommand,
    /// The submitted request; `None` for other commands.
    pub(crate) request: Option<Arc<ActiveRequest>>,
}

/// Connection of a worker's session.
#[derive(Debug)]
pub(crate) struct WorkerConnection {
    pub(crate) address: String,
    pub(crate) model: Arc<Model>,
    /// Further names of the model.
    pub(crate) aliases: Vec<String>,
    /// Queue of the messages that the worker has not read.
    pub(crate) commands: mpsc::Sender<WorkerMessage>,
    /// Cancelled when `commands` is full: the session must then be closed, as it has missed a message.
    pub(crate) overflow: CancellationToken,
    pub(crate) pool: Arc<ReportedPool>,
}

/// KV pool of a worker, as it reports it; for metrics alone.
#[derive(Debug)]
pub(crate) struct ReportedPool {
    blocks: u32,
    used: AtomicU32,
}

impl ReportedPool {
    pub(crate) fn new(blocks: u32) -> Self {
        Self { blocks, used: AtomicU32::new(0) }
    }

    /// Sets the number of blocks in use, at most all.
    pub(crate) fn set_used(&self, used: u32) {
        self.used.store(used.min(self.blocks), Ordering::Relaxed);
    }
}

/// Connected worker.
pub(super) struct ConnectedWorker {
    /// Open session.
    session: SessionId,
    pub(super) address: String,
    commands: mpsc::Sender<WorkerMessage>,
    overflow: CancellationToken,
    pool: Arc<ReportedPool>,
    gauges: WorkerGauges,
}

/// Maximum models with gauges: an exported series stays for ever, and workers name their models.
const MODEL_GAUGES_MAX: usize = 1024;

/// Gauges of a model over all of its lanes.
struct ModelGauges {
    workers: Gauge,
    queued: Gauge,
    sequences: Gauge,
    blocks: Gauge,
    blocks_used: Gauge,
}

/// Load of a model over all of its lanes.
#[derive(Debug, Clone, Copy, Default)]
struct ModelLoad {
    workers: usize,
    queued: usize,
    /// In flight from this router.
    sequences: u64,
    /// In the pools of all workers.
    blocks: u64,
    blocks_used: u64,
}

struct WorkerGauges {
    commands: Gauge,
    requests: Gauge,
    sequences: Gauge,
    sequences_granted: Gauge,
    blocks: Gauge,
    blocks_granted: Gauge,
}

/// Metric handles; a lookup by name costs more than an update.
struct QueueGauges {
    requests: Gauge,
    tokens: Gauge,
    retry_queue: Gauge,
    quarantine: Gauge,
    ejected: Gauge,
    indexed: Gauge,
}

/// State behind the lock of the shared dispatcher.
pub(super) struct DispatcherState {
    pub(super) core: Dispatcher,
    /// Commands of the current event.
    pub(super) commands: Vec<Command>,
    /// Admitted requests whose streams are open.
    pub(super) requests: SlotMap<RequestId, Arc<ActiveRequest>>,
    /// Requests that were ended by the deadline or for a stalled client, until their streams have ended.
    pub(super) ended: Vec<RequestId>,
    workers: BTreeMap<WorkerId, ConnectedWorker>,
    pub(super) models: BTreeMap<LaneId, Arc<Model>>,
    pub(super) aliases: ModelAliases,
    next_session: SessionId,
    ticks: u32,
    gauges: QueueGauges,
    /// By name of the model.
    model_gauges: BTreeMap<String, ModelGauges>,
    /// `None` if nothing is recorded.
    pub(super) recorder: Option<Recorder>,
    /// Live view; `None` without one.
    pub(super) live: Option<Arc<Hub>>,
}

impl DispatcherState {
    /// Ticks between two checks of all open requests.
    const TICKS_PER_STALL_CHECK: u32 = 10;

    pub(super) fn new(core: Dispatcher, recorder: Option<Recorder>, live: Option<Arc<Hub>>) -> Self {
        let gauges = QueueGauges {
            requests: metrics::gauge!(names::QUEUE_REQUESTS),
            tokens: metrics::gauge!(names::QUEUE_TOKENS),
            retry_queue: metrics::gauge!(names::RETRY_QUEUE),
            quarantine: metrics::gauge!(names::QUARANTINE),
            ejected: metrics::gauge!(names::WORKERS_EJECTED),
            indexed: metrics::gauge!(names::PREFIX_INDEX_BLOCKS),
        };
        Self {
            core,
            commands: Vec::new(),
            requests: SlotMap::with_key(),
            ended: Vec::new(),
            workers: BTreeMap::new(),
            models: BTreeMap::new(),
            aliases: ModelAliases::default(),
            next_session: SessionId(0),
            ticks: 0,
            gauges,
            model_gauges: BTreeMap::new(),
            recorder,
            live,
        }
    }

    pub(super) fn next_session(&mut self) -> SessionId {
        let session = self.next_session;
        self.next_session = SessionId(session.0 + 1);
        session
    }

    pub(super) fn connect(&mut self, worker: WorkerId, session: SessionId, connection: WorkerConnection) {
        let WorkerConnection { address, commands, overflow, pool, model: _, aliases: _ } = connection;
        let gauges = WorkerGauges::new(&address);
        self.workers.insert(worker, ConnectedWorker { session, address, commands, overflow, pool, gauges });
    }

    pub(super) fn disconnect(&mut self, worker: WorkerId, session: SessionId) {
        // A later session of the worker stays connected.
        if self.workers.get(&worker).is_some_and(|connected| connected.session == session)
            && let Some(connected) = self.workers.remove(&worker)
        {
            connected.gauges.set(WorkerUsage::default());
            connected.gauges.commands.set(0.0);
            self.aliases.release(worker);
        }
    }

    /// Keeps the names that a worker gives its model.
    pub(super) fn name(&mut self, info: &WorkerInfo, connection: &WorkerConnection) {
        for alias in &connection.aliases {
            let own = self.core.lane_loads().map(|(model, ..)| model).find(|model| model == alias);
            let other =
                own.into_iter().chain(self.aliases.models_of(alias)).find(|model| *model != info.model);
            if let Some(other) = other {
                let worker = &connection.address;
                tracing::warn!(
                    worker,
                    model = info.model,
                    other,
                    alias,
                    "alias is a name of another model too"
                );
            }
        }
        self.aliases.set(info.worker, &info.model, &connection.aliases);
    }

    /// Resolves a requested model name to the first name of the model. A first name takes precedence over an alias; if several models share
    /// an alias, the model with the most workers is chosen.
    pub(super) fn model_of<'a>(&'a self, asked: &'a str) -> &'a str {
        let mut candidates = self.aliases.models_of(asked).peekable();
        if candidates.peek().is_none() || self.core.lane_loads().any(|(model, ..)| model == asked) {
            return asked;
        }
        let workers = |name: &str| -> usize {
            let lanes = self.core.lane_loads().filter(|(model, ..)| *model == name);
            lanes.map(|(_, workers, _)| workers).sum()
        };
        candidates.max_by_key(|name| (workers(name), std::cmp::Reverse(*name))).unwrap_or(asked)
    }

    /// Keeps the model of a worker's lane, for requests that resolve to it.
    pub(super) fn set_model(&mut self, worker: WorkerId, model: Arc<Model>) {
        if let Some(lane) = self.core.lane_of(worker) {
            self.models.entry(lane).or_insert(model);
        }
    }

    pub(super) fn served_model(&self, lane: LaneId) -> Option<ServedModel> {
        let of_lane = self.core.lane(lane)?;
        Some(ServedModel {
            lane,
            name: of_lane.name().to_owned(),
            architecture: of_lane.architecture().to_owned(),
            limits: of_lane.limits(),
            model: self.models.get(&lane)?.clone(),
        })
    }

    /// Returns the address of a worker, for logs and metrics.
    pub(super) fn address(&self, worker: WorkerId) -> &str {
        self.workers.get(&worker).map_or("", |worker| worker.address.as_str())
    }

    /// Returns the id of an open request, for logs.
    pub(super) fn request_id(&self, request: RequestId) -> &str {
        self.requests.get(request).map_or("", |active| active.call.request_id.as_str())
    }

    /// Sends a message to a worker.
    pub(super) fn send(&self, worker: WorkerId, command: WorkerCommand) {
        let Some(connected) = self.workers.get(&worker) else { return };
        // After a missed message, later ones would be out of context.
        if connected.overflow.is_cancelled() {
            return;
        }
        let request = match &command {
            WorkerCommand::Submit(submission) => self.requests.get(submission.request).cloned(),
            _ => None,
        };
        match connected.commands.try_send(WorkerMessage { command, request }) {
            Ok(()) => connected.set_command_gauge(),
            // The session is closed, like that of a silent worker, which resubmits its requests.
            Err(TrySendError::Full(_)) => connected.overflow.cancel(),
            // The session is being closed.
            Err(TrySendError::Closed(_)) => {}
        }
    }

    /// Returns the requests whose clients have read nothing for `patience`; checked at some ticks only.
    pub(super) fn stalled_requests(&mut self, now: Instant, patience: Duration) -> Vec<RequestId> {
        self.ticks = self.ticks.wrapping_add(1);
        if !self.ticks.is_multiple_of(Self::TICKS_PER_STALL_CHECK) {
            return Vec::new();
        }
        let stalled = self.requests.iter().filter(|(_, active)| active.unread_for(now) >= patience);
        stalled.map(|(request, _)| request).collect()
    }

    /// Takes the ended requests whose transports do not poll for the failure.
    pub(super) fn take_unread_failures(&mut self, now: Instant) -> Vec<Arc<ActiveRequest>> {
        let Self { requests, ended, .. } = self;
        let mut unread = Vec::new();
        ended.retain(|request| {
            let Some(active) = requests.get(*request) else { return false };
            let is_unread = active.has_unread_failure(now);
            unread.extend(is_unread.then(|| active.clone()));
            !is_unread
        });
        unread
    }

    /// Writes the recording through to its file. After a failed write nothing more is recorded.
    pub(super) fn flush_recording(&mut self) {
        let flushed = self.recorder.as_mut().map_or(Ok(()), Recorder::flush);
        if let Err(error) = flushed {
            tracing::error!(%error, "recording stopped: cannot write the file");
            self.recorder = None;
            metrics::gauge!(names::RECORDING_FAILED).set(1);
            if let Some(live) = &self.live {
                live.set_recording_failed();
            }
        }
    }

    /// Sets the gauges of the queues.
    pub(super) fn set_queue_gauges(&self) {
        let (requests, tokens) = self.core.queue_usage();
        self.gauges.requests.set(requests as f64);
        self.gauges.tokens.set(tokens as f64);
        let (retries, quarantined) = self.core.waiting_retries();
        self.gauges.retry_queue.set(retries as f64);
        self.gauges.quarantine.set(quarantined as f64);
        self.gauges.indexed.set(self.core.worker_states().indexed_blocks() as f64);
    }

    /// Sets the gauges that cost more to compute, at ticks.
    pub(super) fn set_slow_gauges(&mut self) {
        self.gauges.ejected.set(self.core.ejected() as f64);
        let mut loads: BTreeMap<&str, ModelLoad> = BTreeMap::new();
        for (model, workers, queued) in self.core.lane_loads() {
            let load = loads.entry(model).or_default();
            (load.workers, load.queued) = (load.workers + workers, load.queued + queued);
        }
        for (id, worker) in &self.workers {
            let lane = self.core.lane_of(*id).and_then(|lane| self.core.lane(lane));
            let (Some(lane), Some(usage)) = (lane, self.core.worker_usage(*id)) else { continue };
            let load = loads.entry(lane.name()).or_default();
            load.sequences += u64::from(usage.used.sequences);
            load.blocks += u64::from(worker.pool.blocks);
            load.blocks_used += u64::from(worker.pool.used.load(Ordering::Relaxed));
        }
        // A model that was forgotten has neither workers nor requests.
        for (model, gauges) in &self.model_gauges {
            gauges.set(loads.remove(model.as_str()).unwrap_or_default());
        }
        let free = MODEL_GAUGES_MAX.saturating_sub(self.model_gauges.len());
        let unknown: Vec<String> = loads.into_keys().take(free).map(str::to_owned).collect();
        for model in unknown {
            // Set at the next tick.
            let gauges = ModelGauges::new(&model);
            self.model_gauges.insert(model, gauges);
        }
    }

    /// Sets the gauges of a worker's grant and usage.
    pub(super) fn set_worker_gauges(&self, worker: WorkerId) {
        if let (Some(connected), Some(usage)) = (self.workers.get(&worker), self.core.worker_usage(worker)) {
            connected.gauges.set(usage);
            connected.set_command_gauge();
        }
    }
}

impl ConnectedWorker {
    fn set_command_gauge(&self) {
        let queued = self.commands.max_capacity() - self.commands.capacity();
        self.gauges.commands.set(queued as f64);
    }
}

impl ModelGauges {
    fn new(model: &str) -> Self {
        let gauge = |name: &'static str| metrics::gauge!(name, "model" => model.to_owned());
        Self {
            workers: gauge(names::MODEL_WORKERS),
            queued: gauge(names::MODEL_QUEUE_REQUESTS),
            sequences: gauge(names::MODEL_SEQUENCES),
            blocks: gauge(names::MODEL_KV_BLOCKS),
            blocks_used: gauge(names::MODEL_KV_BLOCKS_USED),
        }
    }

    fn set(&self, load: ModelLoad) {
        self.workers.set(load.workers as f64);
        self.queued.set(load.queued as f64);
        self.sequences.set(load.sequences as f64);
        self.blocks.set(load.blocks as f64);
        self.blocks_used.set(load.blocks_used as f64);
    }
}

impl WorkerGauges {
    fn new(address: &str) -> Self {
        let gauge = |name: &'static str| metrics::gauge!(name, "worker" => address.to_owned());
        Self {
            commands: gauge(names::WORKER_COMMANDS),
            requests: gauge(names::WORKER_REQUESTS),
            sequences: gauge(names::WORKER_SEQUENCES),
            sequences_granted: gauge(names::WORKER_SEQUENCES_GRANTED),
            blocks: gauge(names::WORKER_BLOCKS),
            blocks_granted: gauge(names::WORKER_BLOCKS_GRANTED),
        }
    }

    fn set(&self, usage: WorkerUsage) {
        self.requests.set(usage.requests as f64);
        self.sequences.set(usage.used.sequences);
        self.sequences_granted.set(usage.grant.sequences);
        self.blocks.set(usage.used.blocks);
        self.blocks_granted.set(usage.grant.blocks);
    }
}
