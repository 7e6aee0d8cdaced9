//! Simulated router around the real dispatcher.

use std::collections::BTreeSet;
use std::time::Duration;

use inflight_contract::ModelLimits;
use inflight_router_core::{
    BlockHashChain, ClientCommand, Command, Credits, Dispatcher, DispatcherOptions, Event, FairQueueOptions,
    LaneId, QueueLimits, RequestId, RequestSpec, SessionId, Submission, Tier, WorkerCommand, WorkerId,
    WorkerInfo, WorkerUpdate,
};
use inflight_worker_core::Time;
use slotmap::SlotMap;

use super::worker::{SimulatedWorker, tier_of};
use super::{ClusterError, ClusterOptions, ClusterRequest};

/// Only queue lane, since all workers serve one model.
const LANE: LaneId = LaneId(0);

/// Message of a router to a worker.
#[derive(Debug)]
pub(super) enum RouterMessage {
    /// A request is dispatched.
    Submit { worker: usize, request: usize, submission: Box<Submission>, expected_tokens: u32 },
    /// Whether requests wait that the worker could run.
    Backlog { worker: usize, waiting: bool },
    /// A snapshot of the prefix cache is requested.
    Resync { worker: usize },
}

/// Simulated router: the real dispatcher, with clients that read at once.
#[derive(Debug)]
pub(super) struct SimulatedRouter {
    dispatcher: Dispatcher,
    /// Index of each open request in the workload.
    requests: SlotMap<RequestId, usize>,
    commands: Vec<Command>,
    messages: Vec<RouterMessage>,
}

impl SimulatedRouter {
    pub fn new(options: &ClusterOptions, nth: usize) -> Self {
        let limits = QueueLimits { requests: usize::MAX, tokens: u64::MAX };
        let hour = Duration::from_secs(3600);
        let dispatcher_options = DispatcherOptions {
            queue: FairQueueOptions { limits, ..FairQueueOptions::default() },
            request_tokens_max: u64::MAX,
            no_worker_timeout: hour,
            model_retention: hour,
            drain_grace: hour,
            retry_rate: 1,
            retry_burst: 1,
        };
        let mut router = Self {
            dispatcher: Dispatcher::new(dispatcher_options, (options.policy)(0x5eed + nth as u64)),
            requests: SlotMap::with_key(),
            commands: Vec::new(),
            messages: Vec::new(),
        };
        for worker in 0..options.workers {
            let info = worker_info(options, worker);
            let id = info.worker;
            router.dispatcher.apply(Event::WorkerJoined { worker: id }, Duration::ZERO, &mut router.commands);
            let opened = Event::SessionOpened { session: SessionId(worker as u64), worker: Box::new(info) };
            router.dispatcher.apply(opened, Duration::ZERO, &mut router.commands);
        }
        router.commands.clear();
        router
    }

    /// Queues a request, and dispatches it if a worker has room.
    pub fn arrive(&mut self, index: usize, request: &ClusterRequest, now: Time) -> Result<(), ClusterError> {
        let sizes = self.dispatcher.block_sizes(LANE);
        let chain =
            |size: &u32| BlockHashChain::of_names(request.hashes(*size).map(|hash| hash.short()), *size);
        let call = RequestSpec {
            lane: LANE,
            tenant: request.tenant.name.clone(),
            weight: request.tenant.weight,
            priority: request.tenant.priority,
            bounds: QueueLimits::NONE,
            prompt_tokens: request.prompt_tokens,
            max_tokens: request.output_tokens,
            choices: 1,
            logprobs: None,
            prompt_logprobs: None,
            deadline: None,
            require_fingerprint: None,
            resumed: Vec::new(),
            chains: sizes.iter().map(chain).collect(),
        };
        let request = self.requests.insert(index);
        self.apply(Event::Arrived { request, call: Box::new(call) }, now)
    }

    /// Applies an update of a worker.
    pub fn update(
        &mut self,
        worker: usize,
        update: Box<WorkerUpdate>,
        now: Time,
    ) -> Result<(), ClusterError> {
        let (worker, session) = (worker_id(worker), SessionId(worker as u64));
        self.apply(Event::Updated { worker, session, update }, now)
    }

    /// Runs the dispatcher's time-driven work.
    pub fn tick(&mut self, now: Time) -> Result<(), ClusterError> {
        self.apply(Event::Tick, now)
    }

    /// Takes the messages to workers since the last call.
    pub fn drain_messages(&mut self) -> Vec<RouterMessage> {
        std::mem::take(&mut self.messages)
    }

    /// Applies an event and those that follow from its commands.
    fn apply(&mut self, event: Event, now: Time) -> Result<(), ClusterError> {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let mut commands = std::mem::take(&mut self.commands);
            self.dispatcher.apply(event, since_start(now), &mut commands);
            let mut expected_tokens = 0;
            for command in commands.drain(..) {
                match command {
                    // Precedes the submission it belongs to.
                    Command::Client { command: ClientCommand::Placed(placed), .. } => {
                        expected_tokens = placed.cached_tokens;
                    }
                    Command::Worker { worker, command } => self.send(worker, command, expected_tokens),
                    Command::Client { request, command } => events.extend(self.receive(request, command)?),
                    Command::CloseSession { violation, .. } => {
                        return Err(ClusterError::Violation(violation.to_string()));
                    }
                    _ => {}
                }
            }
            self.commands = commands;
        }
        Ok(())
    }

    fn send(&mut self, worker: WorkerId, command: WorkerCommand, expected_tokens: u32) {
        let worker = worker.0 as usize;
        match command {
            WorkerCommand::Submit(submission) => {
                if let Some(request) = self.requests.get(submission.request).copied() {
                    self.messages.push(RouterMessage::Submit {
                        worker,
                        request,
                        submission,
                        expected_tokens,
                    });
                }
            }
            WorkerCommand::ResyncPrefixCache => self.messages.push(RouterMessage::Resync { worker }),
            WorkerCommand::Backlog { waiting } => {
                self.messages.push(RouterMessage::Backlog { worker, waiting })
            }
            WorkerCommand::Cancel { .. } | WorkerCommand::ServiceTable(_) => {}
        }
    }

    /// Receives output for a client. Returns the end of its call after the last token.
    fn receive(&mut self, request: RequestId, command: ClientCommand) -> Result<Option<Event>, ClusterError> {
        match command {
            ClientCommand::Reject(failure) | ClientCommand::Fail(failure) => {
                let index = self.requests.get(request).copied().unwrap_or_default();
                Err(ClusterError::Refused(index, format!("{failure:?}")))
            }
            ClientCommand::Deliver(output) if output.finish.is_some() => {
                self.requests.remove(request);
                Ok(Some(Event::Released { request }))
            }
            ClientCommand::Deliver(_) | ClientCommand::Placed(_) | ClientCommand::Pause => Ok(None),
        }
    }

    /// Returns the number of blocks that only one of prefix index and worker cache contains.
    pub fn index_difference(&self, worker: usize, node: &SimulatedWorker) -> usize {
        let reads_prefixes = !self.dispatcher.block_sizes(LANE).is_empty();
        let index = self.dispatcher.worker_states().index(worker_id(worker)).filter(|_| reads_prefixes);
        let Some(index) = index else { return 0 };
        let has: BTreeSet<(Tier, u64)> =
            node.contents().map(|(tier, hash)| (tier_of(tier), hash.short())).collect();
        let missing = has.iter().filter(|(tier, block)| !index.holds(*tier, *block)).count();
        let known: BTreeSet<u64> = has.iter().map(|(_, block)| *block).collect();
        missing + index.len().abs_diff(known.len())
    }
}

/// Returns the id of a worker in a router.
fn worker_id(worker: usize) -> WorkerId {
    WorkerId(u32::try_from(worker).unwrap_or(u32::MAX))
}

/// Returns the hello message of a simulated worker.
fn worker_info(options: &ClusterOptions, worker: usize) -> WorkerInfo {
    let limits = options.limits;
    let tokens = limits.pool_tokens();
    WorkerInfo {
        worker: worker_id(worker),
        model: "model".to_owned(),
        architecture: "simulated".to_owned(),
        bundle_digest: String::new(),
        fingerprint: "simulated".to_owned(),
        incarnation: format!("worker-{worker}"),
        limits: ModelLimits { vocab_size: 1, context_tokens: tokens, kv_tokens: tokens },
        shape: limits.shape,
        capacity: Credits { sequences: limits.running_max + options.queue_ahead, blocks: limits.blocks },
        host_blocks: limits.host_blocks,
        // Simulated workers report changes only.
        heartbeat: Duration::from_secs(1 << 20),
    }
}

fn since_start(now: Time) -> Duration {
    now.since(Time::ZERO)
}
