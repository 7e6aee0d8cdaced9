//! A server that computes nothing: it sends as many tokens as asked for at times known beforehand, and remembers what it did.

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
    ChoiceFinished, FinishReason, GenerateRequest, GenerateResponse, GenerationCompleted, GenerationDelta,
    GenerationStarted, ListModelsRequest, ListModelsResponse, Model, TokenizeRequest, TokenizeResponse,
    Usage,
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

/// Name of its model.
pub const TOKEN_SERVER_MODEL: &str = "clockwork";
const VOCAB_SIZE: u32 = 5000;
const CONTEXT_TOKENS: u32 = 100_000;
/// Messages that may wait for a slow reader.
const UNREAD_MAX: usize = 64;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// 500, or INTERNAL.
    Error,
    /// 429, or RESOURCE_EXHAUSTED.
    Refusal,
    /// After this many tokens the stream ends as if it were done, but without saying so.
    EndsEarly(u32),
    /// After this many tokens it tells of an error: an event of its own, or INTERNAL.
    ErrorAfter(u32),
    /// It takes no token ids (OpenAI only).
    NoTokenIds,
}

/// How it answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Script {
    /// From the beginning of a request's service to its first message.
    pub first: Duration,
    /// From one message to the next.
    pub gap: Duration,
    /// Tokens in a message.
    pub tokens_per_message: u32,
    /// Whether each message says how many tokens there are so far (OpenAI only; our own protocol always does).
    pub counts: bool,
    /// Requests served at once; others wait.
    pub at_once: usize,
    /// What goes wrong, with all requests but the first `healthy`.
    pub fault: Option<Fault>,
    /// Requests before anything goes wrong.
    pub healthy: usize,
    /// Whether it remembers when it sent what.
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

/// A request that it answered.
#[derive(Debug, Clone)]
pub struct Answered {
    /// Token ids of the prompt; empty if it was text.
    pub prompt: Vec<u32>,
    /// Tokens asked for.
    pub asked: u32,
    /// Whom for.
    pub tenant: String,
    /// When it came.
    pub arrived: Instant,
    /// When which number of tokens was sent.
    pub sent: Vec<(Instant, u32)>,
}

/// The server.
#[derive(Debug, Clone)]
pub struct TokenServer {
    script: Script,
    slots: Arc<Semaphore>,
    log: Arc<Mutex<Vec<Answered>>>,
}

impl TokenServer {
    /// A server that follows a script.
    pub fn new(script: Script) -> Self {
        Self { script, slots: Arc::new(Semaphore::new(script.at_once)), log: Arc::default() }
    }

    /// What it did so far, in the order in which requests came.
    pub fn log(&self) -> Vec<Answered> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Serves our own protocol on a free port as long as the runtime runs.
    ///
    /// # Errors
    /// There is no port.
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

    /// Serves OpenAI's completions on a free port as long as the runtime runs.
    ///
    /// # Errors
    /// There is no port.
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

    /// Serves our own protocol on connections made elsewhere.
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

    /// Serves OpenAI's completions on a connection made elsewhere.
    pub async fn serve_openai(self, connection: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let answer = service_fn(move |request| {
            let server = self.clone();
            async move { Ok::<_, Infallible>(server.http(request).await) }
        });
        // A client that leaves in the middle is none of our business.
        let _ = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(connection), answer)
            .await;
    }

    /// Notes a request; its number, and what is to go wrong with it.
    fn arrive(&self, prompt: Vec<u32>, asked: u32, tenant: String) -> (usize, Option<Fault>) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.push(Answered { prompt, asked, tenant, arrived: Instant::now(), sent: Vec::new() });
        (log.len() - 1, self.script.fault.filter(|_| log.len() > self.script.healthy))
    }

    /// Sends the messages of a request at their times.
    async fn play<T: Send>(
        self,
        number: usize,
        asked: u32,
        fault: Option<Fault>,
        messages: mpsc::Sender<T>,
        encode: impl Fn(Played) -> Vec<T> + Send,
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
                log[number].sent.push((Instant::now(), tokens));
            }
            for message in encode(Played::Tokens { tokens, so_far }) {
                if messages.send(message).await.is_err() {
                    return;
                }
            }
            at += self.script.gap;
        }
        let last = match fault {
            Some(Fault::EndsEarly(_)) => Vec::new(),
            Some(Fault::ErrorAfter(_)) => encode(Played::Error),
            _ => encode(Played::End { so_far }),
        };
        for message in last {
            if messages.send(message).await.is_err() {
                return;
            }
        }
    }

    async fn http(&self, request: hyper::Request<Incoming>) -> hyper::Response<HttpBody> {
        let answer = |status: u16, value: Value| {
            let mut response = hyper::Response::new(Either::Left(Full::new(Bytes::from(value.to_string()))));
            *response.status_mut() = hyper::StatusCode::from_u16(status).unwrap_or_default();
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            response
        };
        match request.uri().path() {
            "/v1/models" => return answer(200, json!({ "data": [{ "id": TOKEN_SERVER_MODEL }] })),
            "/v1/completions" => {}
            _ => return answer(404, json!({ "error": { "message": "no such path" } })),
        }
        let body =
            request.into_body().collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        let Ok(asked) = serde_json::from_slice::<Value>(&body) else {
            return answer(400, json!({ "error": { "message": "not JSON" } }));
        };
        let prompt: Vec<u32> = serde_json::from_value(asked["prompt"].clone()).unwrap_or_default();
        let prompt_tokens = match asked["prompt"].as_str() {
            Some(text) => text.split_whitespace().count(),
            None => prompt.len(),
        };
        let is_text = asked["prompt"].is_string();
        let tenant = asked["user"].as_str().unwrap_or_default().to_owned();
        let tokens = asked["max_tokens"].as_u64().and_then(|tokens| u32::try_from(tokens).ok()).unwrap_or(16);
        let (number, fault) = self.arrive(prompt, tokens, tenant);
        match fault {
            Some(Fault::Error) => return answer(500, json!({ "error": { "message": "out of order" } })),
            Some(Fault::Refusal) => return answer(429, json!({ "error": { "message": "too much to do" } })),
            Some(Fault::NoTokenIds) if !is_text => {
                return answer(400, json!({ "error": { "message": "a prompt is a string" } }));
            }
            _ => {}
        }
        let (sender, messages) = mpsc::channel::<Bytes>(UNREAD_MAX);
        let counts = self.script.counts;
        let encode = move |played| {
            let usage = |so_far: u32| json!({ "prompt_tokens": prompt_tokens, "completion_tokens": so_far, "total_tokens": so_far as usize + prompt_tokens });
            let line = |value: &Value| Bytes::from(format!("data: {value}\n\n"));
            match played {
                Played::Tokens { tokens, so_far } => {
                    let text = " tok".repeat(tokens as usize);
                    let choice = json!({ "index": 0, "text": text, "finish_reason": null });
                    let mut value = json!({ "object": "text_completion", "choices": [choice] });
                    if counts {
                        value["usage"] = usage(so_far);
                    }
                    vec![line(&value)]
                }
                Played::End { so_far } => vec![
                    line(&json!({ "choices": [{ "index": 0, "text": "", "finish_reason": "length" }] })),
                    line(&json!({ "choices": [], "usage": usage(so_far) })),
                    Bytes::from_static(b"data: [DONE]\n\n"),
                ],
                Played::Error => vec![line(&json!({ "error": { "message": "lost the thread" } }))],
            }
        };
        tokio::spawn(self.clone().play(number, tokens, fault, sender, encode));
        let frames: FrameStream = Box::pin(ReceiverStream::new(messages).map(|bytes| Ok(Frame::data(bytes))));
        let mut response = hyper::Response::new(Either::Right(StreamBody::new(frames)));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
        response
    }
}

type FrameStream = Pin<Box<dyn Stream<Item = Result<Frame<Bytes>, Infallible>> + Send>>;
type HttpBody = Either<Full<Bytes>, StreamBody<FrameStream>>;

/// A moment of a request's stream.
#[derive(Debug, Clone, Copy)]
enum Played {
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
        let (number, fault) = self.arrive(prompt, asked, request.tenant);
        match fault {
            Some(Fault::Error) => return Err(Status::internal("out of order")),
            Some(Fault::Refusal) => return Err(Status::resource_exhausted("too much to do")),
            _ => {}
        }
        let (sender, messages) = mpsc::channel(UNREAD_MAX);
        let event = |event| Ok(GenerateResponse { event: Some(event) });
        let started = GenerationStarted {
            request_id: number.to_string(),
            model: TOKEN_SERVER_MODEL.to_owned(),
            prompt_tokens,
            seed: 0,
            ..GenerationStarted::default()
        };
        let encode = move |played| match played {
            Played::Tokens { tokens, .. } => {
                let token_ids = vec![7; tokens as usize];
                let text = " tok".repeat(tokens as usize);
                vec![event(Event::Delta(GenerationDelta {
                    choice: 0,
                    text,
                    token_ids,
                    logprobs: Vec::new(),
                }))]
            }
            Played::End { so_far } => {
                let reason = FinishReason::Length.into();
                let usage = Some(Usage { prompt_tokens, completion_tokens: so_far, ..Usage::default() });
                vec![
                    event(Event::Finished(ChoiceFinished { reason, ..ChoiceFinished::default() })),
                    event(Event::Completed(GenerationCompleted { usage, timings: None })),
                ]
            }
            Played::Error => vec![Err(Status::internal("lost the thread"))],
        };
        // There is room: it is the first message.
        let _ = sender.try_send(event(Event::Started(started)));
        tokio::spawn(self.clone().play(number, asked, fault, sender, encode));
        Ok(Response::new(ReceiverStream::new(messages)))
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
