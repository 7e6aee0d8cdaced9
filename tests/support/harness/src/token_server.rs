//! Scripted server for tests of load generators: sends the requested number of tokens at scripted times.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Either, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_server::{Inference, InferenceServer};
use inflight_proto::v1::{
    ChoiceFinished, FinishReason, GenerateRequest, GenerateResponse, GenerateUnaryResponse,
    GenerationCompleted, GenerationDelta, GenerationStarted, ListModelsRequest, ListModelsResponse, Model,
    TokenizeRequest, TokenizeResponse, Usage,
};
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::server::Connected;
use tonic::{Request, Response, Status};

/// Model name that the server reports.
pub const TOKEN_SERVER_MODEL: &str = "clockwork";
const VOCAB_SIZE: u32 = 5000;
const CONTEXT_TOKENS: u32 = 100_000;
/// Messages buffered per stream for a slow reader.
const UNREAD_MAX: usize = 64;

/// Fault that the server injects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// HTTP status 500, or INTERNAL.
    Error,
    /// HTTP status 429, or RESOURCE_EXHAUSTED.
    Refusal,
    /// End of the stream after this many tokens, without a finish event.
    EndsEarly(u32),
    /// Error after this many tokens: an error event over HTTP, or INTERNAL.
    ErrorAfter(u32),
    /// HTTP status 400 for prompts of token ids (OpenAI only).
    NoTokenIds,
}

/// Timing and faults of a [`TokenServer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Script {
    /// Time from the start of a request's service to its first message.
    pub first: Duration,
    /// Time between two messages of a stream.
    pub gap: Duration,
    /// Tokens per message.
    pub tokens_per_message: u32,
    /// Whether each message contains usage with the token count so far (OpenAI only).
    pub counts: bool,
    /// Maximum requests served concurrently; others wait.
    pub at_once: usize,
    /// Fault of all requests but the first `healthy`.
    pub fault: Option<Fault>,
    /// Number of requests without fault.
    pub healthy: usize,
    /// Whether send times are logged.
    pub keeps_log: bool,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            first: Duration::from_millis(20),
            gap: Duration::from_millis(5),
            tokens_per_message: 1,
            counts: true,
            at_once: Semaphore::MAX_PERMITS,
            fault: None,
            healthy: 0,
            keeps_log: true,
        }
    }
}

/// Log entry of one request.
#[derive(Debug, Clone)]
pub struct Answered {
    /// Token ids of the prompt; empty for a text prompt.
    pub prompt: Vec<u32>,
    /// Requested number of tokens (`max_tokens`).
    pub asked: u32,
    /// Tenant, or OpenAI's `user`.
    pub tenant: String,
    /// Arrival time.
    pub arrived: Instant,
    /// Send time and number of tokens of each message.
    pub sent: Vec<(Instant, u32)>,
}

/// Server that generates tokens without a model, by a [`Script`].
#[derive(Debug, Clone)]
pub struct TokenServer {
    script: Script,
    slots: Arc<Semaphore>,
    log: Arc<Mutex<Vec<Answered>>>,
}

impl TokenServer {
    /// Creates a server with an empty log.
    pub fn new(script: Script) -> Self {
        Self { script, slots: Arc::new(Semaphore::new(script.at_once)), log: Arc::default() }
    }

    /// Returns the requests so far, in the order of arrival.
    pub fn log(&self) -> Vec<Answered> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Serves `inflight.v1` on a free port until the tokio runtime ends.
    ///
    /// # Errors
    /// No port is free.
    pub async fn listen_grpc(&self) -> Result<SocketAddr> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let incoming = TcpListenerStream::new(listener).map(|stream| {
            let stream = stream?;
            stream.set_nodelay(true)?;
            Ok(stream)
        });
        tokio::spawn(self.clone().serve_grpc(incoming));
        Ok(address)
    }

    /// Serves OpenAI completions on a free port until the tokio runtime ends.
    ///
    /// # Errors
    /// No port is free.
    pub async fn listen_openai(&self) -> Result<SocketAddr> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let server = self.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let _ = stream.set_nodelay(true);
                tokio::spawn(server.clone().serve_openai(stream));
            }
        });
        Ok(address)
    }

    /// Serves `inflight.v1` on the given connections.
    pub async fn serve_grpc<C>(self, incoming: impl Stream<Item = io::Result<C>>)
    where
        C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let served = tonic::transport::Server::builder()
            .add_service(InferenceServer::new(self))
            .serve_with_incoming(incoming);
        if let Err(error) = served.await {
            eprintln!("the token server ended: {error}");
        }
    }

    /// Serves OpenAI completions on one connection.
    pub async fn serve_openai(self, connection: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let service = service_fn(move |request| {
            let server = self.clone();
            async move { Ok::<_, Infallible>(server.http(request).await) }
        });
        // Errors of disconnected clients are expected.
        let _ = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(connection), service)
            .await;
    }

    /// Logs a request; returns its index in the log and its fault.
    fn log_request(&self, prompt: Vec<u32>, asked: u32, tenant: String) -> (usize, Option<Fault>) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.push(Answered { prompt, asked, tenant, arrived: Instant::now(), sent: Vec::new() });
        (log.len() - 1, self.script.fault.filter(|_| log.len() > self.script.healthy))
    }

    /// Sends the messages of a request at the scripted times. `index` is its index in the log.
    async fn send_scripted<T: Send>(
        self,
        index: usize,
        asked: u32,
        fault: Option<Fault>,
        messages: mpsc::Sender<T>,
        encode: impl Fn(StreamStep) -> Vec<T> + Send,
    ) {
        let Ok(_slot) = self.slots.acquire().await else { return };
        let mut at = Instant::now() + self.script.first;
        let mut so_far = 0;
        let limit = match fault {
            Some(Fault::EndsEarly(tokens) | Fault::ErrorAfter(tokens)) => tokens.min(asked),
            _ => asked,
        };
        while so_far < limit {
            tokio::time::sleep_until(at).await;
            let tokens = self.script.tokens_per_message.min(limit - so_far);
            so_far += tokens;
            if self.script.keeps_log {
                let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
                log[index].sent.push((Instant::now(), tokens));
            }
            for message in encode(StreamStep::Tokens { tokens, so_far }) {
                if messages.send(message).await.is_err() {
                    return;
                }
            }
            at += self.script.gap;
        }
        let last = match fault {
            Some(Fault::EndsEarly(_)) => Vec::new(),
            Some(Fault::ErrorAfter(_)) => encode(StreamStep::Error),
            _ => encode(StreamStep::End { so_far }),
        };
        for message in last {
            if messages.send(message).await.is_err() {
                return;
            }
        }
    }

    async fn http(&self, request: hyper::Request<Incoming>) -> hyper::Response<HttpBody> {
        let json_response = |status: u16, value: Value| {
            let mut response = hyper::Response::new(Either::Left(Full::new(Bytes::from(value.to_string()))));
            *response.status_mut() = hyper::StatusCode::from_u16(status).unwrap_or_default();
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            response
        };
        match request.uri().path() {
            "/v1/models" => return json_response(200, json!({ "data": [{ "id": TOKEN_SERVER_MODEL }] })),
            "/v1/completions" => {}
            _ => return json_response(404, json!({ "error": { "message": "no such path" } })),
        }
        let body =
            request.into_body().collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        let Ok(parameters) = serde_json::from_slice::<Value>(&body) else {
            return json_response(400, json!({ "error": { "message": "not JSON" } }));
        };
        let prompt: Vec<u32> = serde_json::from_value(parameters["prompt"].clone()).unwrap_or_default();
        let prompt_tokens = match parameters["prompt"].as_str() {
            Some(text) => text.split_whitespace().count(),
            None => prompt.len(),
        };
        let is_text = parameters["prompt"].is_string();
        let tenant = parameters["user"].as_str().unwrap_or_default().to_owned();
        let tokens =
            parameters["max_tokens"].as_u64().and_then(|tokens| u32::try_from(tokens).ok()).unwrap_or(16);
        let (index, fault) = self.log_request(prompt, tokens, tenant);
        match fault {
            Some(Fault::Error) => {
                return json_response(500, json!({ "error": { "message": "out of order" } }));
            }
            Some(Fault::Refusal) => {
                return json_response(429, json!({ "error": { "message": "too much to do" } }));
            }
            Some(Fault::NoTokenIds) if !is_text => {
                return json_response(400, json!({ "error": { "message": "a prompt is a string" } }));
            }
            _ => {}
        }
        let (sender, messages) = mpsc::channel::<Bytes>(UNREAD_MAX);
        let counts = self.script.counts;
        let encode = move |step| {
            let usage = |so_far: u32| json!({ "prompt_tokens": prompt_tokens, "completion_tokens": so_far, "total_tokens": so_far as usize + prompt_tokens });
            let line = |value: &Value| Bytes::from(format!("data: {value}\n\n"));
            match step {
                StreamStep::Tokens { tokens, so_far } => {
                    let text = " tok".repeat(tokens as usize);
                    let choice = json!({ "index": 0, "text": text, "finish_reason": null });
                    let mut value = json!({ "object": "text_completion", "choices": [choice] });
                    if counts {
                        value["usage"] = usage(so_far);
                    }
                    vec![line(&value)]
                }
                StreamStep::End { so_far } => vec![
                    line(&json!({ "choices": [{ "index": 0, "text": "", "finish_reason": "length" }] })),
                    line(&json!({ "choices": [], "usage": usage(so_far) })),
                    Bytes::from_static(b"data: [DONE]\n\n"),
                ],
                StreamStep::Error => vec![line(&json!({ "error": { "message": "lost the thread" } }))],
            }
        };
        tokio::spawn(self.clone().send_scripted(index, tokens, fault, sender, encode));
        let frames: FrameStream = Box::pin(ReceiverStream::new(messages).map(|bytes| Ok(Frame::data(bytes))));
        let mut response = hyper::Response::new(Either::Right(StreamBody::new(frames)));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        response
    }
}

type FrameStream = Pin<Box<dyn Stream<Item = Result<Frame<Bytes>, Infallible>> + Send>>;
type HttpBody = Either<Full<Bytes>, StreamBody<FrameStream>>;

/// Step of a request's stream, to be encoded as messages of the protocol.
#[derive(Debug, Clone, Copy)]
enum StreamStep {
    Tokens { tokens: u32, so_far: u32 },
    End { so_far: u32 },
    Error,
}

#[tonic::async_trait]
impl Inference for TokenServer {
    type GenerateStream = ReceiverStream<Result<GenerateResponse, Status>>;

    async fn generate(
        &self,
        request: Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        let prompt = match request.input {
            Some(Input::TokenIds(ids)) => ids.ids,
            _ => Vec::new(),
        };
        let prompt_tokens = prompt.len() as u32;
        let asked = request.stop.and_then(|stop| stop.max_tokens).unwrap_or(16);
        let (index, fault) = self.log_request(prompt, asked, request.tenant);
        match fault {
            Some(Fault::Error) => return Err(Status::internal("out of order")),
            Some(Fault::Refusal) => return Err(Status::resource_exhausted("too much to do")),
            _ => {}
        }
        let (sender, messages) = mpsc::channel(UNREAD_MAX);
        let event = |event| Ok(GenerateResponse { event: Some(event) });
        let started = GenerationStarted {
            request_id: index.to_string(),
            model: TOKEN_SERVER_MODEL.to_owned(),
            prompt_tokens,
            seed: 0,
            ..GenerationStarted::default()
        };
        let encode = move |step| match step {
            StreamStep::Tokens { tokens, .. } => {
                let token_ids = vec![7; tokens as usize];
                let text = " tok".repeat(tokens as usize);
                vec![event(Event::Delta(GenerationDelta {
                    choice: 0,
                    text,
                    token_ids,
                    logprobs: Vec::new(),
                    ..GenerationDelta::default()
                }))]
            }
            StreamStep::End { so_far } => {
                let reason = FinishReason::Length.into();
                let usage = Some(Usage { prompt_tokens, completion_tokens: so_far, ..Usage::default() });
                vec![
                    event(Event::Finished(ChoiceFinished { reason, ..ChoiceFinished::default() })),
                    event(Event::Completed(GenerationCompleted { usage, timings: None })),
                ]
            }
            StreamStep::Error => vec![Err(Status::internal("lost the thread"))],
        };
        // Cannot fail: the channel is empty and the receiver alive.
        let _ = sender.try_send(event(Event::Started(started)));
        tokio::spawn(self.clone().send_scripted(index, asked, fault, sender, encode));
        Ok(Response::new(ReceiverStream::new(messages)))
    }

    async fn generate_unary(
        &self,
        _: Request<GenerateRequest>,
    ) -> Result<Response<GenerateUnaryResponse>, Status> {
        Err(Status::unimplemented("the token server only streams"))
    }

    async fn list_models(
        &self,
        _: Request<ListModelsRequest>,
    ) -> Result<Response<ListModelsResponse>, Status> {
        let model = Model {
            name: TOKEN_SERVER_MODEL.to_owned(),
            architecture: "none".to_owned(),
            context_tokens: CONTEXT_TOKENS,
            vocab_size: VOCAB_SIZE,
            workers: 1,
            has_chat_template: false,
            ..Model::default()
        };
        Ok(Response::new(ListModelsResponse { models: vec![model] }))
    }

    async fn tokenize(&self, _: Request<TokenizeRequest>) -> Result<Response<TokenizeResponse>, Status> {
        Err(Status::unimplemented("it has no tokenizer"))
    }
}
