//! Client of OpenAI-compatible completion APIs: `POST …/completions`, streamed as server-sent events.

use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};

use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::json;

use crate::client::{CompletionRequest, Connector, GenerationSettings, PromptForm, ServerInfo};
use crate::error::{BenchError, ErrorKind};
use crate::event_lines::EventLines;
use crate::measure::{InFlightRequest, Meter, Quota, Slo};
use crate::outcome::{ReportedUsage, RequestOutcome};
use crate::tenants::Tenant;
use crate::workload::as_text;

/// Maximum bytes read of a response that is not a stream.
const RESPONSE_BYTES_MAX: usize = 1 << 20;
/// Maximum characters of a server's response quoted in a message.
const QUOTE_CHARS_MAX: usize = 300;

type RequestBody = Full<Bytes>;

/// Client of a server, with its idle HTTP/1.1 connections. Each request uses a connection exclusively.
#[derive(Debug)]
pub struct OpenAi {
    connector: Connector,
    /// `HOST:PORT`, for the `Host` header.
    authority: String,
    /// Base path of the API, such as `/v1`.
    base: String,
    idle: Mutex<Vec<SendRequest<RequestBody>>>,
    model: String,
    text: bool,
}

/// Event of a completion stream.
#[derive(Debug, Deserialize)]
struct CompletionChunk<'a> {
    #[serde(default)]
    choices: Vec<ChunkChoice>,
    #[serde(default)]
    usage: Option<ChunkUsage>,
    #[serde(borrow, default)]
    error: Option<&'a serde_json::value::RawValue>,
}

#[derive(Debug, Deserialize)]
struct ChunkChoice {
    #[serde(default)]
    text: NonEmptyText,
    #[serde(default)]
    finish_reason: NonEmptyText,
}

#[derive(Debug, Deserialize)]
struct ChunkUsage {
    #[serde(default)]
    prompt_tokens: Option<u32>,
    #[serde(default)]
    completion_tokens: Option<u32>,
}

/// Whether a string is present and not empty; deserialized without allocation, as its content is not needed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct NonEmptyText(bool);

impl<'de> Deserialize<'de> for NonEmptyText {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = NonEmptyText;

            fn expecting(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                out.write_str("a string or null")
            }

            fn visit_str<E>(self, text: &str) -> Result<NonEmptyText, E> {
                Ok(NonEmptyText(!text.is_empty()))
            }

            fn visit_unit<E>(self) -> Result<NonEmptyText, E> {
                Ok(NonEmptyText(false))
            }

            fn visit_none<E>(self) -> Result<NonEmptyText, E> {
                Ok(NonEmptyText(false))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl OpenAi {
    /// Creates a client of the API with base path `base` at `authority`.
    pub fn new(connector: Connector, authority: String, base: String) -> Self {
        Self { connector, authority, base, idle: Mutex::default(), model: String::new(), text: false }
    }

    /// Selects the model and requests two tokens, to determine whether the server accepts token ids.
    ///
    /// # Errors
    /// The server is unreachable or does not serve the model, or the request for two tokens fails.
    pub async fn probe(&mut self, model: Option<&str>, form: PromptForm) -> Result<ServerInfo, BenchError> {
        let models = self.models().await?;
        self.model = match (model, models.as_slice()) {
            (Some(name), []) => name.to_owned(),
            (Some(name), models) if models.iter().any(|model| model == name) => name.to_owned(),
            (Some(name), models) => {
                let message = format!("{self} serves no model {name:?}; it serves {}", models.join(", "));
                return Err(BenchError::new(ErrorKind::Refused, message));
            }
            (None, [only]) => only.clone(),
            (None, []) => {
                return Err(BenchError::new(
                    ErrorKind::Usage,
                    format!("{self} does not say which models it has; name one with --model"),
                ));
            }
            (None, several) => {
                let message = format!("{self} serves {}; name one with --model", several.join(", "));
                return Err(BenchError::new(ErrorKind::Usage, message));
            }
        };
        let forms: &[bool] = match form {
            PromptForm::Auto => &[false, true],
            PromptForm::Ids => &[false],
            PromptForm::Text => &[true],
        };
        let mut refusal = None;
        for text in forms {
            self.text = *text;
            match self.test_completion().await {
                RequestOutcome::Completed(_) => {
                    let model = self.model.clone();
                    return Ok(ServerInfo { model, vocab_size: None, context_tokens: None, text: *text });
                }
                RequestOutcome::Refused { message, .. } => {
                    return Err(BenchError::new(ErrorKind::Exhausted, format!("{self}: {message}")));
                }
                RequestOutcome::Failed { kind, message } => {
                    let client_error = kind.starts_with("http_4");
                    refusal.get_or_insert((kind, message));
                    if !client_error {
                        break;
                    }
                }
            }
        }
        let (kind, message) = refusal.unwrap_or_default();
        let exit = if kind.starts_with("http_4") { ErrorKind::Refused } else { ErrorKind::Failure };
        Err(BenchError::new(exit, format!("{self} did not answer a first request of two tokens: {message}")))
    }

    async fn test_completion(&self) -> RequestOutcome {
        let meter = Meter::new(0, Quota::Requests(1), Slo::default(), 1);
        let mut in_flight = meter.start_request(0, tokio::time::Instant::now(), 0, 2, 8);
        let call =
            CompletionRequest { prompt: (100..108).collect(), output_tokens: 2, tenant: &Tenant::named("") };
        self.generate(&call, GenerationSettings { temperature: 0.0, allow_eos: false }, &mut in_flight).await
    }

    async fn models(&self) -> Result<Vec<String>, BenchError> {
        #[derive(Deserialize)]
        struct ModelList {
            data: Vec<ModelEntry>,
        }
        #[derive(Deserialize)]
        struct ModelEntry {
            id: String,
        }
        let request = self
            .request(Method::GET, "/models", Bytes::new())
            .map_err(|error| BenchError::new(ErrorKind::Failure, error.to_string()))?;
        let unavailable = |error: HttpError| {
            BenchError::new(
                ErrorKind::Unavailable,
                format!("cannot connect to {self} ({error}); check that the server runs at this address"),
            )
        };
        let mut connection = self.connection(true).await.map_err(unavailable)?;
        let response =
            connection.send_request(request).await.map_err(|error| unavailable(HttpError::Http(error)))?;
        let status = response.status();
        if status == StatusCode::NOT_FOUND || status == StatusCode::METHOD_NOT_ALLOWED {
            return Ok(Vec::new());
        }
        let body = read_body(response).await;
        if !status.is_success() {
            return Err(BenchError::new(
                ErrorKind::Failure,
                format!("{self}/models answers {status}: {}", quote(&body)),
            ));
        }
        let list: ModelList = serde_json::from_slice(&body).map_err(|_| {
            let message = format!("{self}/models is not a list of models ({}); give the base URL of an OpenAI-compatible API, such as http://HOST:PORT/v1", quote(&body));
            BenchError::new(ErrorKind::Failure, message)
        })?;
        Ok(list.data.into_iter().map(|entry| entry.id).collect())
    }

    /// Sends a request and reads its stream to the end, recording tokens as they arrive.
    pub async fn generate(
        &self,
        call: &CompletionRequest<'_>,
        settings: GenerationSettings,
        in_flight: &mut InFlightRequest,
    ) -> RequestOutcome {
        let prompt = if self.text { json!(as_text(&call.prompt)) } else { json!(call.prompt) };
        let mut body = json!({
            "model": self.model,
            "prompt": prompt,
            "max_tokens": call.output_tokens,
            "temperature": settings.temperature,
            "stream": true,
            "stream_options": { "include_usage": true, "continuous_usage_stats": true },
        });
        if !settings.allow_eos {
            body["ignore_eos"] = json!(true);
        }
        if !call.tenant.name.is_empty() {
            body["user"] = json!(call.tenant.name);
        }
        if call.tenant.priority != 0 {
            body["priority"] = json!(call.tenant.priority);
        }
        let body = Bytes::from(body.to_string());
        let (connection, response) = match self.send(&body).await {
            Ok(sent) => sent,
            Err(error) => return RequestOutcome::failed(error.kind(), error.to_string()),
        };
        let status = response.status();
        if !status.is_success() {
            let message = format!("{status}: {}", quote(&read_body(response).await));
            let kind = format!("http_{}", status.as_u16());
            return match status {
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                    RequestOutcome::Refused { kind, message }
                }
                _ => RequestOutcome::failed(kind, message),
            };
        }
        let kind =
            response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        if !kind.starts_with("text/event-stream") {
            return RequestOutcome::failed(
                "no_stream",
                format!("the answer is {kind:?}, not text/event-stream"),
            );
        }
        let outcome = read_stream(response.into_body(), in_flight).await;
        if matches!(outcome, RequestOutcome::Completed(_)) {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        }
        outcome
    }

    /// Sends a completion request; retries on a new connection if an idle one was closed by the server.
    async fn send(&self, body: &Bytes) -> Result<(SendRequest<RequestBody>, Response<Incoming>), HttpError> {
        let mut fresh = false;
        loop {
            let mut connection = self.connection(fresh).await?;
            let request =
                self.request(Method::POST, "/completions", body.clone()).map_err(HttpError::Request)?;
            match connection.send_request(request).await {
                Ok(response) => return Ok((connection, response)),
                Err(_) if !fresh => fresh = true,
                Err(error) => return Err(HttpError::Http(error)),
            }
        }
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Request<RequestBody>, hyper::http::Error> {
        Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header(HOST, &self.authority)
            .header(ACCEPT, "text/event-stream, application/json")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))
    }

    /// Returns an idle connection that is still open.
    async fn idle_connection(&self) -> Option<SendRequest<RequestBody>> {
        loop {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
            if idle.ready().await.is_ok() {
                return Some(idle);
            }
        }
    }

    async fn connection(&self, fresh: bool) -> Result<SendRequest<RequestBody>, HttpError> {
        if !fresh && let Some(idle) = self.idle_connection().await {
            return Ok(idle);
        }
        let stream = self.connector.connect().await.map_err(HttpError::Connect)?;
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(HttpError::Http)?;
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "connection ended early");
            }
        });
        Ok(sender)
    }
}

impl std::fmt::Display for OpenAi {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "http://{}{}", self.authority, self.base)
    }
}

async fn read_stream(mut body: Incoming, in_flight: &mut InFlightRequest) -> RequestOutcome {
    let mut lines = EventLines::default();
    let mut stream = CompletionStream::default();
    while let Some(frame) = body.frame().await {
        let piece = match frame.map(hyper::body::Frame::into_data) {
            Ok(Ok(piece)) => piece,
            Ok(Err(_)) => continue,
            Err(error) => {
                return RequestOutcome::failed(
                    "truncated",
                    format!("the connection broke in mid-stream: {}", root_cause(&error)),
                );
            }
        };
        if let Err(error) = lines.push(&piece, |data| stream.process_event(data, in_flight)) {
            return RequestOutcome::failed("protocol", error.to_string());
        }
        if let Some(failure) = stream.failure.take() {
            return failure;
        }
    }
    if stream.done || stream.finished {
        return RequestOutcome::Completed(stream.usage);
    }
    RequestOutcome::failed(
        "truncated",
        "the stream ended before its completion did: neither a finish_reason nor [DONE] came",
    )
}

/// State of a completion stream that is being read.
#[derive(Debug, Default)]
struct CompletionStream {
    usage: ReportedUsage,
    /// Whether every event reports the number of tokens so far.
    has_token_counts: bool,
    finished: bool,
    done: bool,
    failure: Option<RequestOutcome>,
}

impl CompletionStream {
    fn process_event(&mut self, data: &[u8], in_flight: &mut InFlightRequest) {
        if data == b"[DONE]" {
            self.done = true;
            return;
        }
        let chunk: CompletionChunk<'_> = match serde_json::from_slice(data) {
            Ok(chunk) => chunk,
            Err(error) => {
                let message = format!("an event is not a completion ({error}): {}", quote(data));
                self.failure.get_or_insert(RequestOutcome::failed("protocol", message));
                return;
            }
        };
        if let Some(error) = chunk.error {
            let message = format!("an error in mid-stream: {}", quote(error.get().as_bytes()));
            self.failure.get_or_insert(RequestOutcome::failed("error_event", message));
            return;
        }
        let last = chunk.choices.iter().any(|choice| choice.finish_reason.0);
        self.finished |= last;
        let text = chunk.choices.iter().any(|choice| choice.text.0);
        match chunk.usage {
            Some(usage) => {
                self.usage.prompt_tokens = usage.prompt_tokens.or(self.usage.prompt_tokens);
                self.usage.output_tokens = usage.completion_tokens.or(self.usage.output_tokens);
                self.has_token_counts |= !chunk.choices.is_empty() && !last;
                match usage.completion_tokens {
                    Some(total) if self.has_token_counts => in_flight.record_total_tokens(total),
                    // A total at the end alone does not show when tokens arrived.
                    _ => in_flight.record_tokens(u32::from(text)),
                }
            }
            // The number of tokens is unknown; the final usage corrects the count.
            None => in_flight.record_tokens(u32::from(text)),
        }
    }
}

/// Reason for which a request got no response.
#[derive(Debug, thiserror::Error)]
enum HttpError {
    #[error("{0}")]
    Connect(std::io::Error),
    #[error("{}", root_cause(.0))]
    Http(hyper::Error),
    #[error("{0}")]
    Request(hyper::http::Error),
}

impl HttpError {
    fn kind(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Http(_) => "no_answer",
            Self::Request(_) => "request",
        }
    }
}

/// Formats an error with its root cause.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut deepest = error;
    while let Some(deeper) = deepest.source() {
        deepest = deeper;
    }
    if std::ptr::addr_eq(deepest, error) { error.to_string() } else { format!("{error}: {deepest}") }
}

async fn read_body(response: Response<Incoming>) -> Bytes {
    let body = Limited::new(response.into_body(), RESPONSE_BYTES_MAX).collect().await;
    body.map(http_body_util::Collected::to_bytes).unwrap_or_default()
}

/// Quotes a response: the `message` of a JSON error, otherwise the body; truncated.
fn quote(body: &[u8]) -> String {
    let value: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let message = value.as_ref().and_then(|value| {
        [&value["error"]["message"], &value["message"], &value["detail"], &value["error"]]
            .into_iter()
            .find_map(serde_json::Value::as_str)
    });
    let text = message.map_or_else(|| String::from_utf8_lossy(body), Cow::Borrowed);
    let text = text.trim();
    match text.char_indices().nth(QUOTE_CHARS_MAX) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None if text.is_empty() => "(nothing)".to_owned(),
        None => text.to_owned(),
    }
}
