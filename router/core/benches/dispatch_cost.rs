//! Cost of the dispatcher: `cargo bench -p inflight-router-core --bench dispatch_cost`.
//!
//! Prints nanoseconds per worker update, per sequence in it, and per placement of a request, by the number of
//! workers. Every worker runs 16 requests; updates give each of them one token.

#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "a benchmark needs the clock")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use inflight_contract::{MemoryShape, ModelLimits, Priority, Weight};
use inflight_router_core::{
    Command, Credits, Dispatcher, DispatcherOptions, Event, FairQueueOptions, Grant, LaneId, PlacementKind,
    QueueLimits, RequestId, RequestSpec, SequenceUpdate, SessionId, Submission, WorkerCommand, WorkerId,
    WorkerInfo, WorkerUpdate,
};
use slotmap::SlotMap;

/// Requests that each worker runs.
const RUNNING: usize = 16;
const ROUNDS: u32 = 20_000;

fn main() {
    println!("{:>8} {:>12} {:>14} {:>14}", "workers", "update ns", "a sequence ns", "placement ns");
    for workers in [10, 200, 1000] {
        measure(workers);
    }
}

/// Dispatcher with workers, and the submissions that each worker runs.
struct Cluster {
    dispatcher: Dispatcher,
    requests: SlotMap<RequestId, ()>,
    commands: Vec<Command>,
    submissions: Vec<Vec<Submission>>,
    now: Duration,
}

impl Cluster {
    fn apply(&mut self, event: Event) {
        self.now += Duration::from_micros(100);
        self.dispatcher.apply(event, self.now, &mut self.commands);
        for command in self.commands.drain(..) {
            if let Command::Worker { worker, command: WorkerCommand::Submit(submission) } = command {
                self.submissions[worker.0 as usize].push(*submission);
            }
        }
    }

    fn arrive(&mut self) -> RequestId {
        let request = self.requests.insert(());
        let call = RequestSpec {
            lane: LaneId(0),
            tenant: "tenant".to_owned(),
            weight: Weight::default(),
            priority: Priority::default(),
            bounds: QueueLimits::NONE,
            prompt_tokens: 100,
            max_tokens: 1_000_000,
            choices: 1,
            logprobs: None,
            prompt_logprobs: None,
            deadline: None,
            require_fingerprint: None,
            resumed: Vec::new(),
            chains: Vec::new(),
        };
        self.apply(Event::Arrived { request, call: Box::new(call) });
        request
    }
}

fn measure(workers: usize) {
    let hour = Duration::from_secs(3600);
    let limits = QueueLimits { requests: usize::MAX, tokens: u64::MAX };
    let options = DispatcherOptions {
        queue: FairQueueOptions { limits, ..FairQueueOptions::default() },
        request_tokens_max: u64::MAX,
        no_worker_timeout: hour,
        model_retention: hour,
        drain_grace: hour,
        retry_rate: 10,
        retry_burst: 10,
    };
    let mut cluster = Cluster {
        dispatcher: Dispatcher::new(options, PlacementKind::default().build(1)),
        requests: SlotMap::with_key(),
        commands: Vec::new(),
        submissions: (0..workers).map(|_| Vec::new()).collect(),
        now: Duration::ZERO,
    };
    for worker in 0..workers {
        let (id, session) = (WorkerId(worker as u32), SessionId(worker as u64));
        let tokens = 1 << 24;
        let info = WorkerInfo {
            worker: id,
            model: "model".to_owned(),
            architecture: String::new(),
            bundle_digest: String::new(),
            fingerprint: String::new(),
            incarnation: worker.to_string(),
            limits: ModelLimits { vocab_size: 1000, context_tokens: tokens, kv_tokens: tokens },
            shape: MemoryShape::uniform(16),
            capacity: Credits { sequences: 1 << 20, blocks: 1 << 20 },
            host_blocks: 0,
            heartbeat: hour,
        };
        cluster.apply(Event::WorkerJoined { worker: id });
        cluster.apply(Event::SessionOpened { session, worker: Box::new(info) });
        let grant = Grant { credits: Credits { sequences: 64, blocks: 1 << 20 }, priority_sequences: 0 };
        let update = WorkerUpdate { grant: Some(grant), ..WorkerUpdate::default() };
        cluster.apply(Event::Updated { worker: id, session, update: Box::new(update) });
    }
    for _ in 0..RUNNING * workers {
        cluster.arrive();
    }
    let (mut updating, mut placing) = (Duration::ZERO, Duration::ZERO);
    let mut sequences = 0;
    for round in 0..ROUNDS {
        let worker = round as usize % workers;
        let of_worker = cluster.submissions[worker].iter().take(RUNNING);
        let token = |submission: &Submission| SequenceUpdate {
            submission: submission.id,
            attempt: 1,
            tokens: vec![7],
            ..SequenceUpdate::default()
        };
        let update = WorkerUpdate { sequences: of_worker.map(token).collect(), ..WorkerUpdate::default() };
        sequences += update.sequences.len();
        let event = Event::Updated {
            worker: WorkerId(worker as u32),
            session: SessionId(worker as u64),
            update: Box::new(update),
        };
        let began = Instant::now();
        cluster.apply(event);
        updating += began.elapsed();
        if round % 10 == 0 {
            let began = Instant::now();
            let request = cluster.arrive();
            placing += began.elapsed();
            black_box(request);
        }
    }
    println!(
        "{workers:>8} {:>12.0} {:>14.1} {:>14.0}",
        updating.as_nanos() as f64 / f64::from(ROUNDS),
        updating.as_nanos() as f64 / sequences as f64,
        placing.as_nanos() as f64 / f64::from(ROUNDS / 10),
    );
}
