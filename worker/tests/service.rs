//! The worker's service over real connections, with a router that the test plays.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::time::Duration;

use inflight_proto::v1::session_request::Message as Say;
use inflight_proto::v1::session_response::Message as Hear;
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_proto::{PROTOCOL_VERSION, v1};
use inflight_worker::runtime::sim::{SimOptions, SimRuntime};
use inflight_worker::{Bundle, Core, Options, Served, Turning};
use inflight_worker_core::DeviceProfile;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{TcpListenerStream, UnboundedReceiverStream};
use tokio_util::sync::CancellationToken;
use tonic::Streaming;

const CONTEXT: u32 = 400_000;
const VOCAB: u32 = 1 << 17;

struct Router {
    commands: mpsc::UnboundedSender<v1::SessionRequest>,
    updates: Streaming<v1::SessionResponse>,
    hello: v1::Hello,
    address: String,
    drain: CancellationToken,
    serving: tokio::task::JoinHandle<Result<(), inflight_worker::Error>>,
}

impl Router {
    async fn start(step: f64, protocol_version: u32) -> Self {
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
            name: "sim".to_owned(),
            architecture: "none".to_owned(),
            eos_token_ids: Vec::new(),
            bundle: Bundle::new(Vec::new()),
        };
        let options = Options {
            max_sequences: 4,
            heartbeat: Duration::from_millis(100),
            drain_timeout: Duration::from_secs(30),
            ..Options::default()
        };
        let core = Core::new(&options, served, "1".to_owned()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let drain = CancellationToken::new();
        let serving =
            tokio::spawn(core.serve(TcpListenerStream::new(listener), Turning::Thread, drain.clone()));
        let mut client = WorkerClient::connect(address.clone()).await.unwrap();
        let (commands, outgoing) = mpsc::unbounded_channel();
        let open =
            v1::SessionOpen { protocol_version, router_id: "test".to_owned(), incarnation: String::new() };
        commands.send(v1::SessionRequest { message: Some(Say::Open(open)) }).unwrap();
        let mut updates = client.session(UnboundedReceiverStream::new(outgoing)).await.unwrap().into_inner();
        let Some(Hear::Hello(hello)) = updates.message().await.unwrap().unwrap().message else {
            panic!("a worker says hello first")
        };
        Self { commands, updates, hello, address, drain, serving }
    }

    fn say(&self, message: Say) {
        self.commands.send(v1::SessionRequest { message: Some(message) }).unwrap();
    }

    fn submit(&self, request: u64, prompt: Vec<u32>, max_tokens: u32, resumed: Vec<v1::ResumedChoice>) {
        let n = resumed.len().max(1) as u32;
        self.say(Say::Submit(v1::Submit {
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

    async fn update(&mut self) -> Option<v1::Update> {
        match self.updates.message().await.unwrap()?.message.unwrap() {
            Hear::Update(update) => Some(update),
            Hear::Hello(_) => panic!("hello comes once"),
        }
    }

    /// The tokens and the end of a request's only choice.
    async fn end_of(&mut self, request: u64) -> (usize, v1::SequenceUpdate) {
        let mut tokens = 0;
        loop {
            let update = self.update().await.expect("the session goes on");
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
async fn the_largest_submission_that_the_limits_allow_breaks_no_session() {
    let mut router = Router::start(0.0, PROTOCOL_VERSION).await;
    // 16 choices far in: more than 16 MiB on the wire, and more than the pool can hold at once, which is no error.
    let choice = |choice| v1::ResumedChoice { choice, token_ids: vec![VOCAB - 1; 390_000], finished: false };
    let submit: Vec<_> = (0..16).map(choice).collect();
    router.submit(1, vec![1; 100], 390_000, submit);
    // All of them hold max_tokens already: there is nothing left to generate.
    let mut ended = 0;
    while ended < 16 {
        for end in router.update().await.expect("the session goes on").sequences {
            assert_eq!((end.token_ids.len(), end.finish_reason()), (0, v1::FinishReason::Length), "{end:?}");
            ended += 1;
        }
    }
    router.submit(2, vec![1, 2, 3], 5, Vec::new());
    let (tokens, end) = router.end_of(2).await;
    assert_eq!((tokens, end.finish_reason()), (5, v1::FinishReason::Length));
}

#[tokio::test]
async fn a_draining_worker_grants_nothing_finishes_what_it_has_and_goes() {
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
async fn a_newer_router_is_answered_in_the_version_that_both_speak() {
    let router = Router::start(0.0, PROTOCOL_VERSION + 7).await;
    assert_eq!(router.hello.protocol_version, PROTOCOL_VERSION);
}

#[tokio::test]
async fn how_far_service_has_got_is_the_least_that_waits_and_else_the_furthest_that_began() {
    let mut router = Router::start(0.0, PROTOCOL_VERSION).await;
    for (request, order, least_waiting, told) in [
        (1, 9_000_000, Some(5_000), 5_000),
        (2, 9_000_000, Some(7_000), 7_000),
        (3, 8_000_000, None, 9_000_000),
    ] {
        router.say(Say::Submit(v1::Submit {
            submission_id: request,
            attempt: 1,
            prompt_token_ids: vec![1; 20],
            sampling: Some(v1::SamplingParams { seed: Some(1), ..Default::default() }),
            stop: Some(v1::StopConditions { max_tokens: Some(1), ignore_eos: true, ..Default::default() }),
            tenant: "a".to_owned(),
            weight: 1.0,
            virtual_start_time: Some(order),
            min_waiting_virtual_time: least_waiting,
            ..Default::default()
        }));
        loop {
            let update = router.update().await.expect("the session goes on");
            if update.sequences.iter().any(|sequence| sequence.submission_id == request) {
                assert_eq!(update.virtual_time, told, "at request {request}");
                break;
            }
        }
    }
}

#[tokio::test]
async fn routers_count_once_however_many_sessions_they_open_and_the_newest_is_the_one_that_stays() {
    let router = Router::start(0.0, PROTOCOL_VERSION).await;
    let client = WorkerClient::connect(router.address.clone()).await.unwrap();
    let open = async |incarnation: &str| {
        let (commands, outgoing) = mpsc::unbounded_channel();
        let (router_id, incarnation) = ("same".to_owned(), incarnation.to_owned());
        let open = v1::SessionOpen { protocol_version: PROTOCOL_VERSION, router_id, incarnation };
        commands.send(v1::SessionRequest { message: Some(Say::Open(open)) }).unwrap();
        let updates = client.clone().session(UnboundedReceiverStream::new(outgoing)).await.unwrap();
        (commands, updates.into_inner())
    };
    let routers_of = async |updates: &mut Streaming<v1::SessionResponse>, expected: u32| {
        loop {
            match updates.message().await.unwrap().expect("the session goes on").message.unwrap() {
                Hear::Update(update) if update.router_count == expected => break,
                Hear::Update(_) | Hear::Hello(_) => {}
            }
        }
    };
    let (_kept, mut first) = open("1").await;
    routers_of(&mut first, 2).await;
    // Another process of the same name is another router.
    let (_kept, mut other) = open("2").await;
    routers_of(&mut first, 3).await;
    // Its connection is gone without a word: the same process comes back.
    let (_kept, mut again) = open("1").await;
    routers_of(&mut again, 3).await;
    routers_of(&mut other, 3).await;
    while first.message().await.unwrap().is_some() {}
}
