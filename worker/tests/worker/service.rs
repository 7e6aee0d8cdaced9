//! gRPC service of the worker over TCP, with a scripted router.

use std::time::Duration;

use inflight_proto::v1::session_request::Message as RequestMessage;
use inflight_proto::v1::session_response::Message as ResponseMessage;
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_proto::{PROTOCOL_VERSION, v1};
use inflight_runtime_sim::{SimOptions, SimRuntime};
use inflight_worker::{Bundle, ComputeOptions, Core, EngineExecution, Options, Served};
use inflight_worker_core::DeviceProfile;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;

use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};

const CONTEXT: u32 = 400_000;
const VOCAB: u32 = 1 << 17;
const BUNDLE_FILE: &str = "tokenizer.json";
/// More than a call that is not read buffers.
const BUNDLE_BYTES: usize = 1 << 20;

pub struct Router {
    commands: mpsc::UnboundedSender<v1::SessionRequest>,
    updates: Streaming<v1::SessionResponse>,
    hello: v1::Hello,
    pub address: String,
    drain: CancellationToken,
    serving: tokio::task::JoinHandle<Result<(), inflight_worker::Error>>,
}

impl Router {
    /// Starts a worker on a simulated device with steps of `step` seconds, and opens a session.
    pub async fn start(step: f64, protocol_version: u32) -> Self {
        let flat = DeviceProfile::built_in("flat").unwrap();
        let profile = DeviceProfile { step, pool_tokens: 2 * CONTEXT, host_tokens: 0, ..flat };
        let sim = SimOptions {
            profile,
            vocab_size: VOCAB,
            context_tokens: CONTEXT,
            block_tokens: 16,
            slots: 4,
            batch_tokens: 1 << 16,
            overlap: false,
        };
        let served = Served {
            runtime: Box::new(SimRuntime::new(&sim).unwrap()),
            prior: Some(profile.prior(16)),
            self_test_interval: None,
            name: "sim".to_owned(),
            aliases: Vec::new(),
            architecture: "none".to_owned(),
            eos_token_ids: Vec::new(),
            bundle: Bundle::new(vec![(BUNDLE_FILE.to_owned(), vec![b'x'; BUNDLE_BYTES])]),
        };
        let options = Options {
            compute: ComputeOptions { max_sequences: 4, ..ComputeOptions::default() },
            heartbeat: Duration::from_millis(100),
            drain_timeout: Duration::from_secs(30),
            ..Options::default()
        };
        let core = Core::new(&options, served, "1".to_owned()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let drain = CancellationToken::new();
        let serving = tokio::spawn(core.serve(
            TcpListenerStream::new(listener),
            EngineExecution::Thread,
            drain.clone(),
        ));
        let mut client = WorkerClient::connect(address.clone()).await.unwrap();
        let (commands, outgoing) = mpsc::unbounded_channel();
        let open =
            v1::SessionOpen { protocol_version, router_id: "test".to_owned(), incarnation: String::new() };
        commands.send(v1::SessionRequest { message: Some(RequestMessage::Open(open)) }).unwrap();
        let mut updates = client.session(UnboundedReceiverStream::new(outgoing)).await.unwrap().into_inner();
        let Some(ResponseMessage::Hello(hello)) = updates.message().await.unwrap().unwrap().message else {
            panic!("a worker says hello first")
        };
        Self { commands, updates, hello, address, drain, serving }
    }

    fn send(&self, message: RequestMessage) {
        self.commands.send(v1::SessionRequest { message: Some(message) }).unwrap();
    }

    pub fn submit(&self, request: u64, prompt: Vec<u32>, max_tokens: u32, resumed: Vec<v1::ResumedChoice>) {
        let n = resumed.len().max(1) as u32;
        self.send(RequestMessage::Submit(v1::Submit {
            submission_id: request,
            attempt: 1,
            request_id: request.to_string(),
            prompt_token_ids: prompt,
            resumed,
            sampling: Some(v1::SamplingParams { n: Some(n), seed: Some(1), ..Default::default() }),
            stop: Some(v1::StopConditions {
                max_tokens: Some(max_tokens),
                ignore_eos: true,
                ..Default::default()
            }),
            tenant: "a".to_owned(),
            weight: 1.0,
            ..Default::default()
        }));
    }

    pub fn cancel(&self, request: u64) {
        self.send(RequestMessage::Cancel(v1::Cancel { submission_id: request, choice: None }));
    }

    /// Receives the next update; `None` at the end of the session.
    async fn update(&mut self) -> Option<v1::Update> {
        match self.updates.message().await.unwrap()?.message.unwrap() {
            ResponseMessage::Update(update) => Some(update),
            ResponseMessage::Hello(_) => panic!("hello comes once"),
        }
    }

    /// Waits for the end of a request's only choice; returns its number of tokens and the last update.
    pub async fn end_of(&mut self, request: u64) -> (usize, v1::SequenceUpdate) {
        let mut tokens = 0;
        loop {
            let update = self.update().await.expect("the session continues");
            for sequence in update.sequences.into_iter().filter(|sequence| sequence.submission_id == request)
            {
                tokens += sequence.token_ids.len();
                if sequence.finish_reason() != v1::FinishReason::Unspecified {
                    return (tokens, sequence);
                }
            }
        }
    }
}

#[tokio::test]
async fn the_largest_allowed_submission_keeps_the_session_open() {
    let mut router = Router::start(0.0, PROTOCOL_VERSION).await;
    // 16 long resumed choices: over 16 MiB on the wire, and more than the pool holds at once, which is no
    // error.
    let choice = |choice| v1::ResumedChoice { choice, token_ids: vec![VOCAB - 1; 390_000], finished: false };
    let submit: Vec<_> = (0..16).map(choice).collect();
    router.submit(1, vec![1; 100], 390_000, submit);
    // All of them have max_tokens already, so nothing is generated.
    let mut ended = 0;
    while ended < 16 {
        for end in router.update().await.expect("the session continues").sequences {
            assert_eq!((end.token_ids.len(), end.finish_reason()), (0, v1::FinishReason::Length), "{end:?}");
            ended += 1;
        }
    }
    router.submit(2, vec![1, 2, 3], 5, Vec::new());
    let (tokens, end) = router.end_of(2).await;
    assert_eq!((tokens, end.finish_reason()), (5, v1::FinishReason::Length));
}

#[tokio::test]
async fn at_most_64_bundles_are_sent_at_a_time() {
    let router = Router::start(0.0, PROTOCOL_VERSION).await;
    let fetch = || v1::FetchBundleRequest { digest: router.hello.bundle_digest.clone() };
    let mut unread = Vec::new();
    for _ in 0..4 {
        let endpoint = tonic::transport::Endpoint::new(router.address.clone()).unwrap();
        let channel = endpoint.initial_stream_window_size(1 << 10).connect().await.unwrap();
        let mut client = WorkerClient::new(channel);
        for _ in 0..16 {
            unread.push(client.fetch_bundle(fetch()).await.unwrap().into_inner());
        }
    }
    let mut client = WorkerClient::connect(router.address.clone()).await.unwrap();
    let refused = client.fetch_bundle(fetch()).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused}");
    assert!(refused.message().contains("64 bundles"), "{refused}");
    // Another one that waits is sent when one ends.
    drop(unread.pop());
    let mut pieces = client.fetch_bundle(fetch()).await.unwrap().into_inner();
    let mut bytes = 0;
    while let Some(piece) = pieces.message().await.unwrap() {
        assert_eq!(piece.file, BUNDLE_FILE);
        bytes += piece.data.len();
    }
    assert_eq!(bytes, BUNDLE_BYTES);
}

#[tokio::test]
async fn a_draining_worker_grants_nothing_finishes_its_requests_and_stops() {
    let mut router = Router::start(0.002, PROTOCOL_VERSION).await;
    router.submit(1, vec![1; 20], 200, Vec::new());
    while router.update().await.unwrap().sequences.is_empty() {}
    router.drain.cancel();
    loop {
        let update = router.update().await.unwrap();
        if update.draining {
            assert_eq!(update.grant, Some(v1::Grant::default()));
            break;
        }
    }
    router.submit(2, vec![1; 20], 5, Vec::new());
    let (mut tokens, mut refused) = (0, false);
    while let Some(update) = router.update().await {
        assert!(update.draining);
        for sequence in update.sequences {
            match sequence.submission_id {
                1 => tokens += sequence.token_ids.len(),
                _ => refused = sequence.error_code == tonic::Code::Unavailable as i32,
            }
        }
    }
    assert!(tokens > 100 && refused, "{tokens} tokens came during the drain");
    router.serving.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_newer_router_gets_the_protocol_version_that_both_support() {
    let router = Router::start(0.0, PROTOCOL_VERSION + 7).await;
    assert_eq!(router.hello.protocol_version, PROTOCOL_VERSION);
}

#[tokio::test]
async fn a_worker_says_what_it_is_and_diagnoses_the_time_that_is_asked_for() {
    let mut router = Router::start(0.0, PROTOCOL_VERSION).await;
    let facts = router.hello.facts.clone().unwrap();
    assert_eq!((facts.device.as_str(), facts.tensor_parallel), ("simulated", 1));
    assert_eq!(facts.version, env!("CARGO_PKG_VERSION"));
    router.submit(1, vec![1; 20], 5, Vec::new());
    router.end_of(1).await;
    let mut client = WorkerClient::connect(router.address.clone()).await.unwrap();
    let mut iterations = async |age_max_us| {
        let request = v1::DiagnoseRequest { age_max_us, iterations: 100, ..v1::DiagnoseRequest::default() };
        let diagnosis = client.diagnose(request).await.unwrap().into_inner();
        (diagnosis.window_iterations, diagnosis.iterations.len())
    };
    let (all, listed) = iterations(0).await;
    assert!(all >= 1 && listed == all as usize, "{all} iterations, {listed} listed");
    // Those that are listed are not limited by it.
    let (none, listed) = iterations(1).await;
    assert!(none == 0 && listed >= all as usize, "{none} iterations, {listed} listed");
    assert!(iterations(u64::MAX).await.0 >= all);
}

#[tokio::test]
async fn virtual_time_is_the_minimum_waiting_or_else_the_maximum_started() {
    let mut router = Router::start(0.0, PROTOCOL_VERSION).await;
    for (request, virtual_start_time, min_waiting, reported) in [
        (1, 9_000_000, Some(5_000), 5_000),
        (2, 9_000_000, Some(7_000), 7_000),
        (3, 8_000_000, None, 9_000_000),
    ] {
        router.send(RequestMessage::Submit(v1::Submit {
            submission_id: request,
            attempt: 1,
            prompt_token_ids: vec![1; 20],
            sampling: Some(v1::SamplingParams { seed: Some(1), ..Default::default() }),
            stop: Some(v1::StopConditions { max_tokens: Some(1), ignore_eos: true, ..Default::default() }),
            tenant: "a".to_owned(),
            weight: 1.0,
            virtual_start_time: Some(virtual_start_time),
            min_waiting_virtual_time: min_waiting,
            ..Default::default()
        }));
        loop {
            let update = router.update().await.expect("the session continues");
            if update.sequences.iter().any(|sequence| sequence.submission_id == request) {
                assert_eq!(update.virtual_time, reported, "at request {request}");
                break;
            }
        }
    }
}

#[tokio::test]
async fn a_router_counts_once_and_its_newest_session_stays() {
    let router = Router::start(0.0, PROTOCOL_VERSION).await;
    let client = WorkerClient::connect(router.address.clone()).await.unwrap();
    let open = async |incarnation: &str| {
        let (commands, outgoing) = mpsc::unbounded_channel();
        let (router_id, incarnation) = ("same".to_owned(), incarnation.to_owned());
        let open = v1::SessionOpen { protocol_version: PROTOCOL_VERSION, router_id, incarnation };
        commands.send(v1::SessionRequest { message: Some(RequestMessage::Open(open)) }).unwrap();
        let updates = client.clone().session(UnboundedReceiverStream::new(outgoing)).await.unwrap();
        (commands, updates.into_inner())
    };
    let routers_of = async |updates: &mut Streaming<v1::SessionResponse>, expected: u32| {
        loop {
            match updates.message().await.unwrap().expect("the session continues").message.unwrap() {
                ResponseMessage::Update(update) if update.router_count == expected => break,
                ResponseMessage::Update(_) | ResponseMessage::Hello(_) => {}
            }
        }
    };
    let (_kept, mut first) = open("1").await;
    routers_of(&mut first, 2).await;
    // Another process with the same id is another router.
    let (_kept, mut other) = open("2").await;
    routers_of(&mut first, 3).await;
    // The same process reconnects after its connection was lost.
    let (_kept, mut again) = open("1").await;
    routers_of(&mut again, 3).await;
    routers_of(&mut other, 3).await;
    while first.message().await.unwrap().is_some() {}
}
