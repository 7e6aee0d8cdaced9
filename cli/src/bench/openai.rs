//! A client of OpenAI-compatible completions: `POST …/completions`, answered with server-sent events.

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

use super::client::{Call, Dial, Greeting, Manner, Outcome, PromptForm, Served};
use super::measure::{Flight, Meter, Quota, Slo};
use super::sse::Events;
use super::tenants::Tenant;
use super::workload::as_text;
use crate::exit::{Exit, Failure};

/// Most bytes read of an answer that is no stream.
const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Most characters of a server's own words in a message.
const QUOTE_CHARS_MAX: usize = 300;

type Body = Full<Bytes>;

/// A server and the connections to it that are idle. Each request has a connection to itself while it runs.
#[derive(Debug)]
pub struct OpenAi {
    dial: Dial,
    /// `HOST:PORT`, for the `Host` header.
    authority: String,
    /// Path of the API, such as `/v1`.
    base: String,
    idle: Mutex<Vec<SendRequest<Body>>>,
    model: String,
    text: bool,
}

/// A line of a stream.
#[derive(Debug, Deserialize)]
struct Chunk<'a> {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(borrow, default)]
    error: Option<&'a serde_json::value::RawValue>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(default)]
    text: Presence,
    #[serde(default)]
    finish_reason: Presence,
}

#[derive(Debug, Deserialize)]
struct Usage {
    #[serde(default)]
    prompt_tokens: Option<u32>,
    #[serde(default)]
    completion_tokens: Option<u32>,
}

/// Whether a string is there and not empty; its content is nobody's business, so nothing is allocated for it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Presence(bool);

impl<'de> Deserialize<'de> for Presence {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Presence;

            fn expecting(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                out.write_str("a string or null")
            }

            fn visit_str<E>(self, text: &str) -> Result<Presence, E> {
                Ok(Presence(!text.is_empty()))
            }

            fn visit_unit<E>(self) -> Result<Presence, E> {
                Ok(Presence(false))
            }

            fn visit_none<E>(self) -> Result<Presence, E> {
                Ok(Presence(false))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

impl OpenAi {
    /// A client of the API at `base` of the server at `authority`.
    pub fn new(dial: Dial, authority: String, base: String) -> Self {
        Self { dial, authority, base, idle: Mutex::default(), model: String::new(), text: false }
    }

    /// Asks which models there are, and for two tokens: whether it takes token ids shows in the answer.
    ///
    /// # Errors
    /// Nobody answers, the model is not there, or the two tokens do not come.
    pub async fn greet(&mut self, model: Option<&str>, form: PromptForm) -> Result<Greeting, Failure> {
        let served = self.models().await?;
        self.model = match (model, served.as_slice()) {
            (Some(name), []) => name.to_owned(),
            (Some(name), served) if served.iter().any(|model| model == name) => name.to_owned(),
            (Some(name), served) => {
                let message = format!("{self} serves no model {name:?}; it serves {}", served.join(", "));
                return Err(Failure::new(Exit::Refused, message));
            }
            (None, [only]) => only.clone(),
            (None, []) => {
                return Err(Failure::new(
                    Exit::Usage,
                    format!("{self} does not say which models it has; name one with --model"),
                ));
            }
            (None, several) => {
                let message = format!("{self} serves {}; name one with --model", several.join(", "));
                return Err(Failure::new(Exit::Usage, message));
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
            match self.try_out().await {
                Outcome::Completed(_) => {
                    let model = self.model.clone();
                    return Ok(Greeting { model, vocab_size: None, context_tokens: None, text: *text });
                }
                Outcome::Refused { message, .. } => {
                    return Err(Failure::new(Exit::Exhausted, format!("{self}: {message}")));
                }
                Outcome::Failed { kind, message } => {
                    let worth_another = kind.starts_with("http_4");
                    refusal.get_or_insert((kind, message));
                    if !worth_another {
                        break;
                    }
                }
            }
        }
        let (kind, message) = refusal.unwrap_or_default();
        let exit = if kind.starts_with("http_4") { Exit::Refused } else { Exit::Failure };
        Err(Failure::new(exit, format!("{self} did not answer a first request of two tokens: {message}")))
    }

    async fn try_out(&self) -> Outcome {
        let meter = Meter::new(0, Quota::Requests(1), Slo::default(), 1);
        let mut flight = meter.begin(0, tokio::time::Instant::now(), 0, 2, 8);
        let call = Call { prompt: (100..108).collect(), output_tokens: 2, tenant: &Tenant::named("") };
        self.generate(&call, Manner { temperature: 0.0, allow_eos: false }, &mut flight).await
    }

    async fn models(&self) -> Result<Vec<String>, Failure> {
        #[derive(Deserialize)]
        struct List {
            data: Vec<Entry>,
        }
        #[derive(Deserialize)]
        struct Entry {
            id: String,
        }
        let request =
            self.request(Method::GET, "/models", Bytes::new()).map_err(|error| Failure::chain("", &error))?;
        let unavailable = |error: Broken| {
            Failure::new(
                Exit::Unavailable,
                format!("cannot connect to {self} ({error}); check that the server runs at this address"),
            )
        };
        let mut connection = self.connection(true).await.map_err(unavailable)?;
        let response =
            connection.send_request(request).await.map_err(|error| unavailable(Broken::Http(error)))?;
        let status = response.status();
        if status == StatusCode::NOT_FOUND || status == StatusCode::METHOD_NOT_ALLOWED {
            return Ok(Vec::new());
        }
        let body = whole(response).await;
        if !status.is_success() {
            return Err(Failure::new(
                Exit::Failure,
                format!("{self}/models answers {status}: {}", quote(&body)),
            ));
        }
        let list: List = serde_json::from_slice(&body).map_err(|_| {
            let message = format!("{self}/models is not a list of models ({}); give the base URL of an OpenAI-compatible API, such as http://HOST:PORT/v1", quote(&body));
            Failure::new(Exit::Failure, message)
        })?;
        Ok(list.data.into_iter().map(|entry| entry.id).collect())
    }

    /// Sends a request and follows its stream to the end.
    pub async fn generate(&self, call: &Call<'_>, manner: Manner, flight: &mut Flight) -> Outcome {
        let prompt = if self.text { json!(as_text(&call.prompt)) } else { json!(call.prompt) };
        let mut body = json!({
            "model": self.model,
            "prompt": prompt,
            "max_tokens": call.output_tokens,
            "temperature": manner.temperature,
            "stream": true,
            "stream_options": { "include_usage": true, "continuous_usage_stats": true },
        });
        if !manner.allow_eos {
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
            Err(error) => return Outcome::failed(error.kind(), error.to_string()),
        };
        let status = response.status();
        if !status.is_success() {
            let message = format!("{status}: {}", quote(&whole(response).await));
            let kind = format!("http_{}", status.as_u16());
            return match status {
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                    Outcome::Refused { kind, message }
                }
                _ => Outcome::failed(kind, message),
            };
        }
        let kind =
            response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        if !kind.starts_with("text/event-stream") {
            return Outcome::failed("no_stream", format!("the answer is {kind:?}, not text/event-stream"));
        }
        let outcome = follow(response.into_body(), flight).await;
        if matches!(outcome, Outcome::Completed(_)) {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        }
        outcome
    }

    /// Sends the body; once more on a new connection if an idle one turns out to be closed.
    async fn send(&self, body: &Bytes) -> Result<(SendRequest<Body>, Response<Incoming>), Broken> {
        let mut fresh = false;
        loop {
            let mut connection = self.connection(fresh).await?;
            let request =
                self.request(Method::POST, "/completions", body.clone()).map_err(Broken::Request)?;
            match connection.send_request(request).await {
                Ok(response) => return Ok((connection, response)),
                Err(_) if !fresh => fresh = true,
                Err(error) => return Err(Broken::Http(error)),
            }
        }
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Result<Request<Body>, hyper::http::Error> {
        Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base))
            .header(HOST, &self.authority)
            .header(ACCEPT, "text/event-stream, application/json")
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))
    }

    /// One that is still open.
    async fn idle_connection(&self) -> Option<SendRequest<Body>> {
        loop {
            let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
            if idle.ready().await.is_ok() {
                return Some(idle);
            }
        }
    }

    async fn connection(&self, fresh: bool) -> Result<SendRequest<Body>, Broken> {
        if !fresh && let Some(idle) = self.idle_connection().await {
            return Ok(idle);
        }
        let wire = self.dial.connect().await.map_err(Broken::Connect)?;
        let (sender, connection) = http1::handshake(TokioIo::new(wire)).await.map_err(Broken::Http)?;
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

async fn follow(mut body: Incoming, flight: &mut Flight) -> Outcome {
    let mut events = Events::default();
    let mut stream = Stream::default();
    while let Some(frame) = body.frame().await {
        let piece = match frame.map(hyper::body::Frame::into_data) {
            Ok(Ok(piece)) => piece,
            Ok(Err(_)) => continue,
            Err(error) => {
                return Outcome::failed(
                    "truncated",
                    format!("the connection broke in mid-stream: {}", cause(&error)),
                );
            }
        };
        if events.feed(&piece, |data| stream.take(data, flight)).is_err() {
            return Outcome::failed("protocol", "the stream has a line of over a mebibyte");
        }
        if let Some(failure) = stream.failure.take() {
            return failure;
        }
    }
    if stream.done || stream.finished {
        return Outcome::Completed(stream.served);
    }
    Outcome::failed(
        "truncated",
        "the stream ended before its completion did: neither a finish_reason nor [DONE] came",
    )
}

/// A stream as far as it was read.
#[derive(Debug, Default)]
struct Stream {
    served: Served,
    /// Every message says how many tokens there are so far.
    counted: bool,
    finished: bool,
    done: bool,
    failure: Option<Outcome>,
}

impl Stream {
    fn take(&mut self, data: &[u8], flight: &mut Flight) {
        if data == b"[DONE]" {
            self.done = true;
            return;
        }
        let chunk: Chunk<'_> = match serde_json::from_slice(data) {
            Ok(chunk) => chunk,
            Err(error) => {
                let message = format!("an event is not a completion ({error}): {}", quote(data));
                self.failure.get_or_insert(Outcome::failed("protocol", message));
                return;
            }
        };
        if let Some(error) = chunk.error {
            let message = format!("an error in mid-stream: {}", quote(error.get().as_bytes()));
            self.failure.get_or_insert(Outcome::failed("error_event", message));
            return;
        }
        let last = chunk.choices.iter().any(|choice| choice.finish_reason.0);
        self.finished |= last;
        let text = chunk.choices.iter().any(|choice| choice.text.0);
        match chunk.usage {
            Some(usage) => {
                self.served.prompt_tokens = usage.prompt_tokens.or(self.served.prompt_tokens);
                self.served.output_tokens = usage.completion_tokens.or(self.served.output_tokens);
                self.counted |= !chunk.choices.is_empty() && !last;
                match usage.completion_tokens {
                    Some(total) if self.counted => flight.arrived_up_to(total),
                    // A sum at the end alone says nothing of when they came.
                    _ => flight.arrived(u32::from(text)),
                }
            }
            // Nobody says how many tokens it has; what is missing is made up for at the end.
            None => flight.arrived(u32::from(text)),
        }
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
enum Broken {
    #[error("{0}")]
    Connect(std::io::Error),
    #[error("{}", cause(.0))]
    Http(hyper::Error),
    #[error("{0}")]
    Request(hyper::http::Error),
}

impl Broken {
    fn kind(&self) -> &'static str {
        match self {
            Self::Connect(_) => "connect",
            Self::Http(_) => "no_answer",
            Self::Request(_) => "request",
        }
    }
}

/// The error that is at the bottom of others.
fn cause(error: &dyn std::error::Error) -> String {
    let mut deepest = error;
    while let Some(deeper) = deepest.source() {
        deepest = deeper;
    }
    if std::ptr::addr_eq(deepest, error) { error.to_string() } else { format!("{error}: {deepest}") }
}

async fn whole(response: Response<Incoming>) -> Bytes {
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
    body.map(http_body_util::Collected::to_bytes).unwrap_or_default()
}

/// A server's words: the `message` of its error, if it is JSON, else what it sent, cut short.
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
