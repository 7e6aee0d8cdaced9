//! Entry point for fuzzing: any bytes as the messages of a worker, applied to a dispatcher with running requests.

use std::collections::BTreeMap;
use std::time::Duration;

use inflight_contract::{Priority, Weight};
use inflight_proto::fuzz::decode_length_delimited;
use inflight_proto::v1;
use inflight_proto::v1::session_response::Message as Response;
use inflight_router_core::{
    ClientCommand, Command, Credits, Dispatcher, DispatcherLoad, DispatcherOptions, Event, FairQueueOptions,
    Grant, LaneId, PlacementKind, QueueLimits, RequestId, RequestSpec, ResubmissionReason, SessionId,
    WorkerId, WorkerInfo, WorkerUpdate,
};
use prost::Message as _;
use slotmap::SlotMap;

use super::update;
use crate::cluster::worker_session::check_hello;

const WORKER: WorkerId = WorkerId(0);
const SESSION: SessionId = SessionId(0);
const MAX_TOKENS: u32 = 8;
const CHOICES: u32 = 2;
/// Time between two messages.
const INTERVAL: Duration = Duration::from_millis(10);

/// Stream of a client: tokens received and end of each choice.
#[derive(Debug, Default)]
struct Stream {
    tokens: BTreeMap<u32, u32>,
    ended: BTreeMap<u32, bool>,
    failed: bool,
}

/// Dispatcher with one worker and three running requests, and what it sends to their clients.
struct Router {
    dispatcher: Dispatcher,
    streams: SlotMap<RequestId, Stream>,
    now: Duration,
    open: bool,
}

/// Decodes length-delimited session messages. Each takes at most the memory that the codec measures, and is the same after another
/// encoding; the dispatcher keeps what it promises to clients, whatever the worker reports. Returns whether there was a message.
///
/// # Panics
/// If one of these does not hold.
pub(crate) fn session(mut data: &[u8]) -> bool {
    let (mut router, mut decoded) = (Router::new(), false);
    while let Some((message, bytes)) = decode_length_delimited::<v1::SessionResponse>(&mut data) {
        decoded = true;
        let heap = heap_bytes(&message);
        assert!(heap <= bytes, "{heap} bytes of memory, measured as {bytes}");
        let encoded = message.encode_to_vec();
        let again = v1::SessionResponse::decode(encoded.as_slice()).expect("an encoded message decodes");
        // As bytes, because NaN differs from itself.
        assert_eq!(again.encode_to_vec(), encoded);
        match message.message {
            Some(Response::Hello(hello)) => {
                if let Ok((limits, shape, capacity)) = check_hello(&hello) {
                    assert!(limits.sequence_tokens() > 0 && shape.block_tokens() > 0 && capacity.blocks > 0);
                    router.reopen(hello.model, limits, shape, capacity);
                }
            }
            Some(Response::Update(message)) if router.open => router.update(update(message)),
            _ => {}
        }
    }
    router.finish();
    decoded
}

/// Heap memory of the outputs in an update.
fn heap_bytes(message: &v1::SessionResponse) -> usize {
    let Some(Response::Update(update)) = &message.message else { return 0 };
    let sequences = update.sequences.iter().map(|sequence| {
        let positions = sequence.logprobs.iter().map(|position| size_of_val(&*position.top));
        size_of_val(&*sequence.token_ids) + size_of_val(&*sequence.logprobs) + positions.sum::<usize>()
    });
    size_of_val(&*update.sequences) + sequences.sum::<usize>()
}

impl Router {
    fn new() -> Self {
        let options = DispatcherOptions {
            queue: FairQueueOptions {
                limits: QueueLimits { requests: 24, tokens: 4000 },
                ..FairQueueOptions::default()
            },
            request_tokens_max: 1000,
            no_worker_timeout: Duration::from_secs(20),
            model_retention: Duration::from_secs(30),
            drain_grace: Duration::from_secs(1),
            retry_rate: 2,
            retry_burst: 3,
        };
        let mut router = Self {
            dispatcher: Dispatcher::new(options, PlacementKind::Cost.build(7)),
            streams: SlotMap::with_key(),
            now: Duration::ZERO,
            open: false,
        };
        router.apply(Event::WorkerJoined { worker: WORKER });
        let limits = inflight_contract::ModelLimits { vocab_size: 1000, context_tokens: 64, kv_tokens: 1600 };
        router.reopen(
            "m".to_owned(),
            limits,
            inflight_contract::MemoryShape::uniform(16),
            Credits { sequences: 8, blocks: 100 },
        );
        for logprobs in [None, Some(1), None] {
            let request = router.streams.insert(Stream::default());
            let call = RequestSpec {
                lane: LaneId(0),
                tenant: "t".to_owned(),
                weight: Weight::default(),
                priority: Priority::default(),
                bounds: QueueLimits::NONE,
                prompt_tokens: 4,
                max_tokens: MAX_TOKENS,
                choices: CHOICES,
                logprobs,
                prompt_logprobs: logprobs,
                deadline: None,
                require_fingerprint: None,
                resumed: Vec::new(),
                chains: Vec::new(),
            };
            router.apply(Event::Arrived { request, call: Box::new(call) });
        }
        let grant = Grant { credits: Credits { sequences: 8, blocks: 100 }, priority_sequences: 0 };
        router.update(WorkerUpdate { grant: Some(grant), ..WorkerUpdate::default() });
        router
    }

    /// Opens a session, after closing the one before.
    fn reopen(
        &mut self,
        model: String,
        limits: inflight_contract::ModelLimits,
        shape: inflight_contract::MemoryShape,
        capacity: Credits,
    ) {
        self.close(ResubmissionReason::SessionLost);
        let info = WorkerInfo {
            worker: WORKER,
            model,
            architecture: String::new(),
            bundle_digest: String::new(),
            fingerprint: "f".to_owned(),
            incarnation: "i".to_owned(),
            limits,
            shape,
            capacity,
            host_blocks: 4,
            heartbeat: Duration::from_secs(1),
        };
        self.open = true;
        self.apply(Event::SessionOpened { session: SESSION, worker: Box::new(info) });
    }

    fn close(&mut self, reason: ResubmissionReason) {
        if std::mem::take(&mut self.open) {
            self.apply(Event::SessionClosed { worker: WORKER, session: SESSION, reason });
        }
    }

    fn update(&mut self, update: WorkerUpdate) {
        self.apply(Event::Updated { worker: WORKER, session: SESSION, update: Box::new(update) });
    }

    fn apply(&mut self, event: Event) {
        self.now += INTERVAL;
        let mut commands = Vec::new();
        self.dispatcher.apply(event, self.now, &mut commands);
        for command in commands {
            match command {
                Command::Client { request, command } => self.check(request, command),
                Command::CloseSession { violation, .. } => {
                    self.close(ResubmissionReason::ProtocolViolation { about: violation.request() });
                }
                _ => {}
            }
        }
    }

    /// Checks what a client gets.
    fn check(&mut self, request: RequestId, command: ClientCommand) {
        let stream = self.streams.get_mut(request).expect("messages go to open requests");
        match command {
            ClientCommand::Reject(_) | ClientCommand::Fail(_) => {
                assert!(!std::mem::replace(&mut stream.failed, true), "a request fails once");
            }
            ClientCommand::Deliver(output) => {
                assert!(!stream.failed && output.choice < CHOICES, "{output:?}");
                let received = stream.tokens.entry(output.choice).or_default();
                *received += output.tokens.len() as u32;
                assert!(*received <= MAX_TOKENS, "{received} tokens");
                let ended = stream.ended.entry(output.choice).or_default();
                assert!(!*ended, "output after the end of choice {}", output.choice);
                *ended = output.finish.is_some();
            }
            ClientCommand::Placed(_) | ClientCommand::Pause => {}
        }
    }

    /// Closes the session and releases the requests: nothing is left.
    fn finish(mut self) {
        self.close(ResubmissionReason::SessionLost);
        let requests: Vec<_> = self.streams.keys().collect();
        for request in requests {
            self.apply(Event::Released { request });
        }
        assert_eq!(self.dispatcher.load(), DispatcherLoad::default());
    }
}
