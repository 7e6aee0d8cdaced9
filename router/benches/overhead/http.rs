//! HTTP clients of the measurement: text completions as server-sent events, over HTTP/1.1 with a connection for
//! each stream, and over HTTP/2 with as many streams on a connection as gRPC has.

use std::time::Duration;

use futures::future::join_all;
use http_body_util::BodyExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};
use tonic::body::Body;
use tonic::codegen::http::Request;
use tonic::transport::Endpoint;
use tower::{Service as _, ServiceExt as _};

use crate::client::{self, Done, Latency, Load};

/// Connection that is used for one call at a time.
pub struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// End of a response with chunked transfer encoding.
const LAST_CHUNK: &[u8] = b"\r\n0\r\n\r\n";

impl Connection {
    pub async fn open(address: &str) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, buffer: vec![0; 64 << 10] }
    }

    /// Streams a completion and returns the number of its chunks; calls `on_output` at the first with text.
    pub async fn complete(&mut self, tokens: u32, seed: u64, on_output: impl FnOnce()) -> u64 {
        let body = body(tokens, seed);
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).await.unwrap();
        let (mut on_output, mut chunks) = (Some(on_output), 0);
        // Long enough for what ends a response, and for the beginning of an event.
        let mut tail: Vec<u8> = Vec::new();
        loop {
            let read = self.stream.read(&mut self.buffer).await.unwrap();
            assert!(read > 0, "the router closed the connection");
            let start = tail.len();
            tail.extend_from_slice(&self.buffer[..read]);
            let from = start.saturating_sub(MARK.len() - 1);
            chunks += tail[from..].windows(MARK.len()).filter(|window| *window == MARK).count() as u64;
            if chunks > 0
                && let Some(on_output) = on_output.take()
            {
                on_output();
            }
            if tail.ends_with(LAST_CHUNK) {
                return chunks;
            }
            let keep = tail.len().min(LAST_CHUNK.len().max(MARK.len()) - 1);
            tail.drain(..tail.len() - keep);
        }
    }
}

/// Returns the body of a request.
fn body(tokens: u32, seed: u64) -> String {
    let ids = vec!["65"; 32].join(",");
    format!(r#"{{"prompt":[{ids}],"max_tokens":{tokens},"seed":{seed},"stream":true}}"#)
}

/// Runs a load over HTTP/2, with the connections that gRPC would have.
pub async fn run_http2(address: &str, load: Load) -> Done {
    let connect = || async {
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap().tcp_nodelay(true);
        endpoint.initial_connection_window_size(64 << 20).connect().await.unwrap()
    };
    let channels = join_all((0..load.connections).map(|_| connect())).await;
    let calls = (0..load.streams).map(|call| {
        let mut channel = channels[call % channels.len()].clone();
        tokio::spawn(async move {
            let body = Body::new(http_body_util::Full::from(body(load.tokens, load.pace_us)));
            let request = Request::post("/v1/completions").header("content-type", "application/json");
            let response = channel.ready().await.unwrap().call(request.body(body).unwrap()).await.unwrap();
            assert_eq!(response.status(), 200);
            let (mut body, mut chunks) = (response.into_body(), 0);
            while let Some(frame) = body.frame().await {
                let data = frame.unwrap().into_data().unwrap_or_default();
                chunks += data.windows(MARK.len()).filter(|window| *window == MARK).count() as u64;
            }
            chunks
        })
    });
    let mut sum = Done::default();
    for chunks in join_all(calls).await {
        sum.tokens += u64::from(load.tokens);
        sum.messages += chunks.unwrap();
    }
    sum
}

/// Beginning of a chunk with output.
const MARK: &[u8] = br#""choices":[{"#;

/// Runs a load over HTTP/1.1, with a connection for each stream.
pub async fn run(address: &str, load: Load) -> Done {
    let calls = (0..load.streams).map(|_| {
        let address = address.to_owned();
        tokio::spawn(async move {
            let mut connection = Connection::open(&address).await;
            connection.complete(load.tokens, load.pace_us, || {}).await
        })
    });
    let mut sum = Done::default();
    for chunks in join_all(calls).await {
        sum.tokens += u64::from(load.tokens);
        sum.messages += chunks.unwrap();
    }
    sum
}

/// Measures times to first token like [`client::first_tokens`]; the streams beside are those of gRPC.
pub async fn first_tokens(address: &str, grpc: &str, calls: u32, interval: Duration) -> Latency {
    const CONNECTIONS: u32 = 16;
    let beside = client::run(grpc, client::BESIDE);
    let measured = async {
        let began = Instant::now();
        let workers = (0..CONNECTIONS).map(|worker| {
            let address = address.to_owned();
            tokio::spawn(async move {
                let mut connection = Connection::open(&address).await;
                let mut times = Vec::new();
                for nth in (worker..calls).step_by(CONNECTIONS as usize) {
                    sleep_until(began + interval * nth).await;
                    let sent = std::time::Instant::now();
                    connection.complete(1, 0, || times.push(sent.elapsed())).await;
                }
                times
            })
        });
        join_all(workers).await
    };
    let (_, times) = tokio::join!(beside, measured);
    Latency::of(times.into_iter().flat_map(Result::unwrap).collect())
}
