//! Load generator and measurements on the client's side.

use std::time::Duration;

use futures::future::join_all;
use inflight_proto::v1;
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use tokio::time::{Instant, sleep, sleep_until};
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use crate::source::IDLE;

/// Set of concurrent calls.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub streams: usize,
    /// Tokens per call.
    pub tokens: u32,
    /// Time between two tokens of a call, in microseconds.
    pub pace_us: u64,
    pub connections: usize,
}

/// Result of a load.
#[derive(Debug, Clone, Copy, Default)]
pub struct Done {
    pub tokens: u64,
    pub messages: u64,
}

/// Times to first token.
#[derive(Debug, Clone, Copy)]
pub struct Latency {
    pub p50: Duration,
    pub p99: Duration,
}

impl Latency {
    pub fn of(mut times: Vec<Duration>) -> Self {
        times.sort();
        Self { p50: times[times.len() / 2], p99: times[times.len() * 99 / 100] }
    }
}

async fn connect(address: &str) -> InferenceClient<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap().tcp_nodelay(true);
    // h2's limit on pending small frames scales with its window.
    let endpoint = endpoint.initial_connection_window_size(64 << 20);
    InferenceClient::new(endpoint.connect().await.unwrap())
}

fn request(tokens: u32, seed: u64) -> v1::GenerateRequest {
    v1::GenerateRequest {
        input: Some(Input::TokenIds(v1::TokenIds { ids: vec![65; 32] })),
        sampling: Some(v1::SamplingParams { seed: Some(seed), ..Default::default() }),
        stop: Some(v1::StopConditions { max_tokens: Some(tokens), ..Default::default() }),
        ..Default::default()
    }
}

pub async fn run(address: &str, load: Load) -> Done {
    let clients = join_all((0..load.connections).map(|_| connect(address))).await;
    let calls = (0..load.streams).map(|call| {
        let mut client = clients[call % clients.len()].clone();
        tokio::spawn(async move {
            let mut stream = client.generate(request(load.tokens, load.pace_us)).await.unwrap().into_inner();
            let mut done = Done::default();
            while let Some(message) = stream.message().await.unwrap() {
                match message.event.unwrap() {
                    Event::Delta(_) => done.messages += 1,
                    Event::Completed(end) => done.tokens = end.usage.unwrap().completion_tokens.into(),
                    _ => {}
                }
            }
            done
        })
    });
    let mut sum = Done::default();
    for done in join_all(calls).await {
        let done = done.unwrap();
        assert_eq!(done.tokens, u64::from(load.tokens));
        sum.tokens += done.tokens;
        sum.messages += done.messages;
    }
    sum
}

/// Streams that run beside a measurement of the time to first token.
pub const BESIDE: Load = Load { streams: 32, tokens: 340, pace_us: 10_000, connections: 1 };

/// Measures times to first token of calls at this interval, beside the streams of a load.
pub async fn first_tokens(address: &str, beside: Load, calls: u32, interval: Duration) -> Latency {
    let beside = run(address, beside);
    let client = connect(address).await;
    let measured = async {
        let began = Instant::now();
        let calls = (0..calls).map(|nth| {
            let mut client = client.clone();
            tokio::spawn(async move {
                sleep_until(began + interval * nth).await;
                let sent = std::time::Instant::now();
                let mut stream = client.generate(request(1, 0)).await.unwrap().into_inner();
                loop {
                    let message = stream.message().await.unwrap().expect("a token comes");
                    if let Some(Event::Delta(_)) = message.event {
                        return sent.elapsed();
                    }
                }
            })
        });
        join_all(calls).await
    };
    let (_, times) = tokio::join!(beside, measured);
    Latency::of(times.into_iter().map(Result::unwrap).collect())
}

/// Opens streams that receive no tokens.
pub async fn hold(address: &str, streams: usize) -> Vec<Streaming<v1::GenerateResponse>> {
    let clients = join_all((0..1 + streams / 100).map(|_| connect(address))).await;
    let mut held = Vec::new();
    for call in 0..streams {
        let mut client = clients[call % clients.len()].clone();
        let mut stream = client.generate(request(16, IDLE)).await.unwrap().into_inner();
        // Router and source send a message when the request has started.
        stream.message().await.unwrap();
        held.push(stream);
    }
    sleep(Duration::from_millis(500)).await;
    held
}

/// Waits until dropped streams have ended.
pub async fn settle(address: &str) {
    sleep(Duration::from_secs(1)).await;
    run(address, Load { streams: 8, tokens: 8, pace_us: 0, connections: 1 }).await;
}
