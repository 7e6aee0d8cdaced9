//! Chaos over the whole dispatcher: random workers, clients and failures, against a model of every stream.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::collections::BTreeMap;
use std::time::Duration;

use inflight_contract::{FinishReason, MemoryShape, ModelLimits, Priority, Weight};
use inflight_router_core::{
    ClientCommand, Command, Credits, Dispatcher, DispatcherLoad, DispatcherOptions, Event, Failure,
    FailureBlame, FairQueueOptions, Grant, LaneId, PlacementKind, QueueLimits, Recording, ReplayError,
    RequestId, RequestSpec, ResubmissionReason, SequenceEnd, SequenceUpdate, SessionId, SubmissionId,
    WorkerCommand, WorkerId, WorkerInfo, WorkerUpdate, replay,
};
use proptest::prelude::*;
use slotmap::SlotMap;

const SECOND: Duration = Duration::from_secs(1);

fn options() -> DispatcherOptions {
    DispatcherOptions {
        queue: FairQueueOptions {
            limits: QueueLimits { requests: 24, tokens: 4000 },
            ..FairQueueOptions::default()
        },
        request_tokens_max: 1000,
        no_worker_timeout: 20 * SECOND,
        model_retention: 30 * SECOND,
        drain_grace: SECOND,
        retry_rate: 2,
        retry_burst: 3,
    }
}

/// Submission that a scripted worker runs: the tokens of each running choice so far.
#[derive(Debug, Clone)]
struct Running {
    request: RequestId,
    attempt: u32,
    choices: BTreeMap<u32, u32>,
    cancelled: bool,
}

#[derive(Debug, Default)]
struct ScriptedWorker {
    session: Option<SessionId>,
    draining: bool,
    running: BTreeMap<SubmissionId, Running>,
}

/// Stream of a client: the number of tokens received of each choice, and the ends.
#[derive(Debug)]
struct Client {
    max_tokens: u32,
    received: Vec<u32>,
    ended: Vec<bool>,
    withdrawn: Vec<bool>,
    paused: bool,
    failure: Option<Failure>,
}

/// Cluster of scripted workers and clients around one dispatcher, whose events are recorded.
struct Cluster {
    dispatcher: Dispatcher,
    recording: Recording,
    workers: Vec<ScriptedWorker>,
    ids: SlotMap<RequestId, ()>,
    clients: BTreeMap<RequestId, Client>,
    next_session: u64,
    now: Duration,
    commands: u64,
}

impl Cluster {
    fn new(workers: usize) -> Self {
        let placement = PlacementKind::Cost;
        let mut cluster = Self {
            dispatcher: Dispatcher::new(options(), placement.build(7)),
            recording: Recording::new(options(), placement, 7),
            workers: (0..workers).map(|_| ScriptedWorker::default()).collect(),
            ids: SlotMap::with_key(),
            clients: BTreeMap::new(),
            next_session: 0,
            now: Duration::ZERO,
            commands: 0,
        };
        for worker in 0..workers {
            cluster.apply(Event::WorkerJoined { worker: WorkerId(worker as u32) });
        }
        cluster
    }

    fn apply(&mut self, event: Event) {
        let mut commands = Vec::new();
        self.recording.event(&event, self.now);
        self.dispatcher.apply(event, self.now, &mut commands);
        self.recording.commands(&commands);
        self.commands += commands.len() as u64;
        for command in commands {
            match command {
                Command::Worker { worker, command } => self.send(worker, command),
                Command::Client { request, command } => self.pass(request, command),
                Command::CloseSession { violation, .. } => panic!("these workers are correct: {violation}"),
                _ => {}
            }
        }
    }

    fn send(&mut self, worker: WorkerId, command: WorkerCommand) {
        let worker = &mut self.workers[worker.0 as usize];
        assert!(worker.session.is_some(), "messages go to open sessions only");
        match command {
            WorkerCommand::Submit(submission) => {
                let client = &self.clients[&submission.request];
                assert!(
                    client.failure.is_none() && !client.paused,
                    "an ended or paused request runs nowhere"
                );
                let mut choices: BTreeMap<u32, u32> =
                    (0..client.received.len() as u32).map(|c| (c, 0)).collect();
                for resumed in submission.resumed {
                    let received = client.received[resumed.choice as usize];
                    assert_eq!(resumed.tokens.len() as u32, received, "the journal holds what was delivered");
                    match resumed.finished {
                        true => choices.remove(&resumed.choice),
                        false => choices.insert(resumed.choice, received),
                    };
                }
                assert!(!choices.is_empty(), "a submission runs something");
                let (request, attempt) = (submission.request, submission.attempt);
                let running = Running { request, attempt, choices, cancelled: false };
                assert!(worker.running.insert(submission.id, running).is_none(), "ids are unique");
            }
            WorkerCommand::Cancel { submission, choice } => {
                if let Some(running) = worker.running.get_mut(&submission) {
                    match choice {
                        None => running.cancelled = true,
                        Some(choice) => assert!(running.choices.contains_key(&choice)),
                    }
                }
            }
            WorkerCommand::Backlog { .. }
            | WorkerCommand::ServiceTable(_)
            | WorkerCommand::ResyncPrefixCache => {}
        }
    }

    fn pass(&mut self, request: RequestId, command: ClientCommand) {
        let Some(client) = self.clients.get_mut(&request) else { panic!("nothing comes after the release") };
        assert!(
            client.failure.is_none() || matches!(command, ClientCommand::Fail(_)),
            "a failure is the end"
        );
        match command {
            ClientCommand::Reject(failure) | ClientCommand::Fail(failure) => {
                client.failure.get_or_insert(failure);
            }
            ClientCommand::Placed(_) => client.paused = false,
            ClientCommand::Pause => client.paused = true,
            ClientCommand::Deliver(output) => {
                let at = output.choice as usize;
                assert!(!client.ended[at] && !client.withdrawn[at], "nothing follows the end of a choice");
                for token in output.tokens {
                    // Each token is its position: no gap, no repetition, whatever worker generates it.
                    assert_eq!(token, client.received[at]);
                    client.received[at] += 1;
                }
                client.ended[at] = output.finish.is_some();
                assert!(client.received[at] <= client.max_tokens);
            }
        }
    }

    fn open(&mut self, worker: usize) {
        let session = SessionId(self.next_session);
        self.next_session += 1;
        self.workers[worker] = ScriptedWorker { session: Some(session), ..ScriptedWorker::default() };
        let tokens = if worker == 0 { 60 } else { 400 };
        let info = WorkerInfo {
            worker: WorkerId(worker as u32),
            model: "tiny".to_owned(),
            architecture: String::new(),
            bundle_digest: String::new(),
            fingerprint: if worker == 1 { "other" } else { "one" }.to_owned(),
            incarnation: format!("{session}"),
            limits: ModelLimits { vocab_size: 1000, context_tokens: tokens, kv_tokens: tokens },
            shape: MemoryShape::uniform(16),
            capacity: Credits { sequences: 4, blocks: 100 },
            host_blocks: 0,
            heartbeat: SECOND,
        };
        self.apply(Event::SessionOpened { session, worker: Box::new(info) });
    }

    fn close(&mut self, worker: usize, reason: ResubmissionReason) {
        let Some(session) = self.workers[worker].session.take() else { return };
        self.workers[worker].running.clear();
        self.apply(Event::SessionClosed { worker: WorkerId(worker as u32), session, reason });
    }

    /// Sends an update in which every running choice gets up to `tokens` tokens. With `fail`, one submission
    /// fails or is returned.
    fn step(&mut self, worker: usize, tokens: u32, fail: Option<FailureBlame>) {
        let scripted = &mut self.workers[worker];
        let Some(session) = scripted.session else { return };
        let mut sequences = Vec::new();
        let mut failing = fail;
        scripted.running.retain(|submission, running| {
            let blame = failing.take();
            let max_tokens = self.clients.get(&running.request).map_or(0, |client| client.max_tokens);
            let attempt = running.attempt;
            running.choices.retain(|choice, received| {
                let from = *received;
                *received = (from + tokens).min(max_tokens).max(from);
                let end = match blame {
                    _ if running.cancelled => Some(SequenceEnd::Finished(FinishReason::Cancelled)),
                    Some(blame) => Some(SequenceEnd::Failed { blame, code: 13, message: "test".to_owned() }),
                    None => (*received >= max_tokens).then_some(SequenceEnd::Finished(FinishReason::Length)),
                };
                let generates = !running.cancelled && blame.is_none();
                let (submission, choice, ended) = (*submission, *choice, end.is_some());
                let tokens = if generates { (from..*received).collect() } else { Vec::new() };
                let update =
                    SequenceUpdate { submission, attempt, choice, tokens, end, ..SequenceUpdate::default() };
                sequences.push(update);
                !ended
            });
            !running.choices.is_empty()
        });
        let grant = Grant { credits: Credits { sequences: 4, blocks: 60 }, priority_sequences: 0 };
        let draining = scripted.draining;
        let update = WorkerUpdate { sequences, grant: Some(grant), draining, ..WorkerUpdate::default() };
        self.apply(Event::Updated { worker: WorkerId(worker as u32), session, update: Box::new(update) });
    }

    fn arrive(&mut self, size: u32, choices: u32, priority: i32, deadline: Option<Duration>) {
        let request = self.ids.insert(());
        let max_tokens = 1 + size % 50;
        let of_choices = choices as usize;
        // Some requests resume streams of other routers.
        let had = if size.is_multiple_of(5) { (size / 5) % max_tokens } else { 0 };
        let client = Client {
            max_tokens,
            received: vec![had; of_choices],
            ended: vec![false; of_choices],
            withdrawn: vec![false; of_choices],
            paused: false,
            failure: None,
        };
        self.clients.insert(request, client);
        let call = RequestSpec {
            lane: LaneId(0),
            tenant: format!("tenant-{}", size % 3),
            weight: Weight::default(),
            priority: Priority::try_from(priority).expect("in range"),
            bounds: QueueLimits::NONE,
            prompt_tokens: 1 + size % 90,
            max_tokens,
            choices,
            logprobs: None,
            prompt_logprobs: None,
            deadline: deadline.map(|left| self.now + left),
            require_fingerprint: size.is_multiple_of(7).then(|| "one".to_owned()),
            resumed: if had > 0 { vec![vec![7; had as usize]; of_choices] } else { Vec::new() },
            chains: Vec::new(),
        };
        self.apply(Event::Arrived { request, call: Box::new(call) });
    }

    fn release(&mut self, request: RequestId) {
        self.apply(Event::Released { request });
        self.clients.remove(&request);
    }

    fn pick(&self, index: usize) -> Option<RequestId> {
        self.clients.keys().nth(index % self.clients.len().max(1)).copied()
    }

    /// Applies one random action.
    fn act(&mut self, (action, pick, size): (u8, usize, u32)) {
        let worker = pick % self.workers.len();
        self.now += Duration::from_millis(u64::from(size % 40));
        match action {
            0..=3 => self.arrive(size, 1 + size % 3, [0, 0, 0, 5][size as usize % 4], None),
            4 => self.arrive(size, 1, 0, Some(Duration::from_millis(u64::from(size)))),
            5..=13 => self.step(worker, 1 + size % 6, None),
            14 => self.step(worker, 1, Some(FailureBlame::Returned)),
            15 => self.step(worker, 1, Some(FailureBlame::Worker)),
            16 => self.close(worker, ResubmissionReason::SessionLost),
            17 | 18 if self.workers[worker].session.is_none() => self.open(worker),
            17 => self.workers[worker].draining |= size % 4 == 0,
            18 => self.apply(Event::WorkerRetired { worker: WorkerId(worker as u32) }),
            19 => {
                if let Some(request) = self.pick(pick) {
                    self.apply(Event::ClientBehind { request });
                }
            }
            20 => {
                if let Some(request) = self.pick(pick) {
                    self.apply(Event::ClientResumed { request });
                }
            }
            21 => {
                if let Some(request) = self.pick(pick) {
                    let choice = size % self.clients[&request].received.len() as u32;
                    if let Some(client) = self.clients.get_mut(&request) {
                        client.withdrawn[choice as usize] |= !client.ended[choice as usize];
                    }
                    self.apply(Event::ChoiceWithdrawn { request, choice });
                }
            }
            22 => {
                if let Some(request) = self.pick(pick) {
                    self.release(request);
                }
            }
            23 => {
                if let Some(request) = self.pick(pick) {
                    self.apply(Event::ClientStalled { request, waited: SECOND });
                }
            }
            _ => {
                self.now += Dispatcher::TICK;
                self.apply(Event::Tick);
            }
        }
    }

    /// Lets every request end: correct workers, clients that read, and time.
    fn settle(&mut self) {
        for worker in 0..self.workers.len() {
            self.close(worker, ResubmissionReason::SessionLost);
            self.open(worker);
        }
        for _ in 0..3000 {
            let paused: Vec<RequestId> =
                self.clients.iter().filter(|(_, client)| client.paused).map(|(id, _)| *id).collect();
            for request in paused {
                self.apply(Event::ClientResumed { request });
            }
            (0..self.workers.len()).for_each(|worker| self.step(worker, 3, None));
            self.now += Dispatcher::TICK;
            self.apply(Event::Tick);
            if self.clients.values().all(Client::is_over) {
                return;
            }
        }
        let open: Vec<_> = self.clients.values().filter(|client| !client.is_over()).collect();
        panic!("requests that never end: {open:?}, {:?}", self.dispatcher.load());
    }
}

impl Client {
    fn is_over(&self) -> bool {
        let ends = self.ended.iter().zip(&self.withdrawn);
        self.failure.is_some() || ends.clone().all(|(ended, withdrawn)| *ended || *withdrawn)
    }
}

proptest! {
    #[test]
    fn every_stream_is_whole_ends_once_and_returns_its_credits_and_the_recording_replays(
        workers in 1usize..5,
        actions in prop::collection::vec((0u8..28, any::<usize>(), 0u32..1000), 1..400)
    ) {
        let mut cluster = Cluster::new(workers);
        (0..workers).for_each(|worker| cluster.open(worker));
        for action in actions {
            cluster.act(action);
        }
        cluster.settle();
        for request in cluster.clients.keys().copied().collect::<Vec<_>>() {
            let client = &cluster.clients[&request];
            if client.failure.is_none() {
                let whole = client.received.iter().zip(&client.withdrawn);
                prop_assert!(whole.clone().all(|(received, withdrawn)| *withdrawn || *received == client.max_tokens));
            }
            cluster.release(request);
        }
        // Cancelled submissions end at their workers' next update.
        (0..workers).for_each(|worker| cluster.step(worker, 1, None));
        prop_assert_eq!(cluster.dispatcher.load(), DispatcherLoad::default());
        let log = cluster.recording.take();
        let mut commands = 0;
        let replayed = replay(&log, |_, _, of_event| commands += of_event.len() as u64);
        prop_assert!(replayed.is_ok(), "{:?}", replayed);
        prop_assert_eq!(commands, cluster.commands);
    }
}

#[test]
fn a_truncated_recording_replays_up_to_its_end_and_a_changed_one_is_named() {
    let mut cluster = Cluster::new(2);
    cluster.open(0);
    cluster.open(1);
    (0..20).for_each(|size| cluster.arrive(size, 1, 0, None));
    (0..40).for_each(|step| cluster.step(step % 2, 2, None));
    let log = cluster.recording.take();
    let whole = replay(&log, |_, _, _| {}).unwrap();
    assert_eq!(whole, 2 + 2 + 20 + 40);
    for end in (8..log.len()).step_by(7) {
        match replay(&log[..end], |_, _, _| {}) {
            Ok(events) => assert!(events < whole),
            Err(error) => assert!(matches!(error, ReplayError::Malformed { at: 8, .. }), "{error}"),
        }
    }
    let last = log.len() - 1;
    let mut changed = log.clone();
    changed[last] ^= 1;
    let diverged = replay(&changed, |_, _, _| {});
    assert!(
        matches!(diverged, Err(ReplayError::Diverged { event, .. }) if event == whole - 1),
        "{diverged:?}"
    );
    // Damage is detected before a dispatcher gets an event that no router has made.
    for at in (8..last - 7).step_by(3) {
        let mut damaged = log.clone();
        damaged[at] ^= 1 << (at % 8);
        let replayed = replay(&damaged, |_, _, _| {});
        assert!(replayed.as_ref().map_or(true, |events| *events < whole), "byte {at}: {replayed:?}");
    }
    assert!(matches!(replay(b"inflrec2", |_, _, _| {}), Err(ReplayError::Malformed { at: 0, .. })));
}

#[test]
fn an_update_causes_no_more_commands_beside_a_thousand_workers_than_beside_ten() {
    let per_update = |workers: usize| {
        let mut cluster = Cluster::new(workers);
        (0..workers).for_each(|worker| cluster.open(worker));
        (0..workers).for_each(|worker| cluster.step(worker, 0, None));
        (0..16).for_each(|size| cluster.arrive(10 + size, 1, 0, None));
        let busy = cluster.workers.iter().position(|worker| !worker.running.is_empty()).unwrap();
        let before = cluster.commands;
        cluster.step(busy, 1, None);
        (cluster.commands - before, cluster.workers[busy].running.len() as u64)
    };
    for workers in [10, 1000] {
        let (commands, running) = per_update(workers);
        assert!(commands <= running, "{workers} workers: {commands} commands for {running} sequences");
    }
}
