//! HTTP APIs over the router's core: OpenAI's chat completions, completions and responses, Anthropic's
//! messages, models, tokenization and probes.

mod aside;
mod body;
mod call;
mod chat;
mod chat_stream;
mod completion_stream;
mod completions;
mod content;
mod cors;
mod errors;
mod event_writer;
mod faults;
mod fields;
pub(crate) mod fuzz;
mod generations;
mod logprobs;
mod message_blocks;
mod message_stream;
mod messages;
mod models;
mod probes;
mod request_id;
mod response_events;
mod response_object;
mod responses;
mod sampling;
mod sse;
mod structured;
mod tokenize;
mod tools;
mod ui;
mod usage;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::State;
use axum::routing::{MethodRouter, get, on};
use futures::future::BoxFuture;
use inflight_net::ReservedBytes;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::{Request, Response};

use crate::api::admission::Admission;
use crate::api::cursor::{CursorKeys, CursorTracker};
use crate::api::generation::{GenerationRequest, Resume};
use crate::api::ingress::Ingress;
use crate::api::response_stream::ResponseStream;
use crate::cluster::bundle::Model;
use crate::dispatcher::request::AdmittedCall;
use crate::options::{HttpOptions, Options};
use crate::outcome::Outcome;
pub(crate) use aside::{SMALL_BODY_BYTES, read_aside};
pub(crate) use call::Call;
pub(crate) use cors::CorsLayer;
pub(crate) use errors::refuse;
pub(crate) use faults::FaultLayer;
use generations::Generations;
pub(crate) use request_id::RequestIdLayer;
pub(crate) use tools::{check_values, message_call};
pub(crate) use ui::Ui;

/// Renders the metrics of the process for Prometheus.
pub type RenderMetrics = Arc<dyn Fn() -> String + Send + Sync>;

/// State of the HTTP APIs.
pub(crate) struct HttpApi {
    ingress: Arc<Ingress>,
    admission: Admission,
    options: Options,
    http: HttpOptions,
    /// Metrics of the process, if they are served here.
    metrics: Option<RenderMetrics>,
    /// Whether the router drains.
    draining: Box<dyn Fn() -> bool + Send + Sync>,
    /// Start of the process, in seconds since the epoch: the creation time of models.
    started_at: u64,
    /// The live view, if it is served.
    ui: Option<Ui>,
}

type AxumResponse = Response<axum::body::Body>;
type Answer = BoxFuture<'static, Result<Response<Body>, Outcome>>;
/// Handler of a call whose body was received.
type Handler = fn(Arc<HttpApi>, Call, Bytes) -> Answer;

impl HttpApi {
    pub(crate) fn new(
        ingress: Arc<Ingress>,
        admission: Admission,
        options: &Options,
        http: &HttpOptions,
        metrics: Option<RenderMetrics>,
        draining: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Self {
        Self {
            ingress,
            admission,
            options: options.clone(),
            http: http.clone(),
            metrics: metrics.filter(|_| http.metrics),
            draining: Box::new(draining),
            started_at: unix_seconds(),
            ui: None,
        }
    }

    /// Serves the live view too.
    pub(crate) fn with_ui(self, ui: Option<Ui>) -> Self {
        Self { ui, ..self }
    }

    /// Returns the routes of the APIs.
    pub(crate) fn routes(self) -> Router {
        let api = Arc::new(self);
        let router = if api.ui.is_some() { ui::routes(Router::new()) } else { Router::new() };
        router
            .route("/v1/chat/completions", post(|api, call, body| Box::pin(chat::create(api, call, body))))
            .route("/v1/completions", post(|api, call, body| Box::pin(completions::create(api, call, body))))
            .route("/v1/responses", post(|api, call, body| Box::pin(responses::create(api, call, body))))
            .route("/v1/messages", post(|api, call, body| Box::pin(messages::create(api, call, body))))
            .route(
                "/v1/messages/count_tokens",
                post(|api, call, body| Box::pin(messages::count_tokens(api, call, body))),
            )
            .route("/tokenize", post(|api, call, body| Box::pin(tokenize::tokenize(api, call, body))))
            .route("/detokenize", post(|api, call, body| Box::pin(tokenize::detokenize(api, call, body))))
            .route("/tokenizer_info", get(tokenize::info))
            .route("/v1/models", get(models::list))
            .route("/v1/models/{*id}", get(models::retrieve))
            .route("/health", get(probes::ready))
            .route("/ready", get(probes::ready))
            .route("/readyz", get(probes::ready))
            .route("/livez", get(probes::live))
            .route("/version", get(probes::version))
            .route("/metrics", get(probes::metrics))
            .method_not_allowed_fallback(wrong_method)
            .fallback(unknown_path)
            .with_state(api)
    }

    /// Starts the generation of every prompt of a call. Each is admitted as a request of its own.
    async fn start(
        &self,
        mut requests: Vec<GenerationRequest>,
        streamed: bool,
        call: Call,
    ) -> Result<Started, Outcome> {
        let Call { context, request_id, path, last_event_id } = call;
        if let [first, ..] = &*requests
            && !first.request_id.is_empty()
        {
            request_id.set(&first.request_id);
        }
        let request_id = request_id.get().to_owned();
        set_position(&mut requests, streamed, path, last_event_id)?;
        let further = requests.iter().skip(1).map(|_| context.for_next_request(&self.admission));
        let further: Vec<_> = further.collect::<Result<_, _>>()?;
        let contexts = std::iter::once(context).chain(further);
        let mut prepared = Vec::with_capacity(requests.len());
        for (at, (mut request, context)) in requests.into_iter().zip(contexts).enumerate() {
            request.request_id = if at == 0 { request_id.clone() } else { format!("{request_id}-{at}") };
            prepared.push(self.ingress.prepare(request, context).await.map_err(at_header)?);
        }
        // All prompts are tokenized before the first is submitted: a stream that is not read for --stall-timeout ends, and none is
        // read before all are submitted.
        let streams = prepared.into_iter().map(|prepared| self.ingress.submit(prepared).map_err(at_header));
        let streams: Vec<_> = streams.collect::<Result<_, _>>()?;
        let model = streams.first().map_or_else(String::new, |stream| stream.call().model.clone());
        let cursor = streams.first().and_then(|stream| self.ingress.track(stream));
        // A resumed response has the times of its first part.
        let created = cursor.as_ref().map_or_else(unix_seconds, |cursor| cursor.started_at().into());
        Ok(Started { request_id, model, created, streams, cursor })
    }
}

/// Generations of a call that were accepted.
struct Started {
    request_id: String,
    /// Name of the model.
    model: String,
    /// Seconds since the epoch.
    created: u64,
    /// One stream for each prompt.
    streams: Vec<ResponseStream>,
    /// Cursor of a resumable stream.
    cursor: Option<CursorTracker>,
}

impl Started {
    /// Returns the id of the response object.
    fn id(&self, prefix: &str) -> String {
        format!("{prefix}{}", self.request_id)
    }

    /// Whether the output of the first prompt is parsed.
    fn is_parsed(&self) -> bool {
        self.streams.first().is_some_and(|stream| stream.call().output.is_some())
    }

    /// Returns the bundle of the model.
    fn bundle(&self) -> Option<Arc<Model>> {
        self.streams.first().map(ResponseStream::bundle)
    }

    /// Returns the number of choices of each prompt.
    fn choices(&self) -> u32 {
        self.streams.first().map_or(1, |stream| stream.call().sampling.n)
    }

    /// Returns the maximum output tokens of all choices of all prompts.
    fn output_tokens_max(&self) -> u64 {
        let of = |call: &AdmittedCall| u64::from(call.max_tokens) * u64::from(call.sampling.n);
        self.streams.iter().map(|stream| of(stream.call())).sum()
    }

    /// Completes the texts of the prompts: one that was given as token ids is decoded.
    fn prompt_texts(&self, given: Vec<Option<String>>) -> Vec<String> {
        let text = |(given, stream): (Option<String>, &ResponseStream)| {
            given.unwrap_or_else(|| {
                stream.bundle().tokenizer.decode(&stream.call().prompt).unwrap_or_default()
            })
        };
        given.into_iter().zip(&self.streams).map(text).collect()
    }

    /// Returns the token ids of the prompts, if they are echoed with log probabilities; else none.
    fn scored_prompts(&self, output: completions::Output) -> Vec<Vec<u32>> {
        let scored = output.echo && output.logprobs.is_some();
        self.streams.iter().filter(|_| scored).map(|stream| stream.call().prompt.clone()).collect()
    }

    fn generations(self) -> Generations {
        Generations::new(self.streams)
    }

    /// Returns the generations with the cursor of their stream.
    fn split(self) -> (Generations, Option<CursorTracker>) {
        (Generations::new(self.streams), self.cursor)
    }
}

/// Name of the header with the cursor, in error messages.
const LAST_EVENT_ID: &str = "Last-Event-ID";

/// Makes the stream of a single prompt resumable, and resumes it from the client's last event.
fn set_position(
    requests: &mut [GenerationRequest],
    streamed: bool,
    path: String,
    last_event_id: Option<String>,
) -> Result<(), Outcome> {
    let refused = |reason: &str| Err(Outcome::field(LAST_EVENT_ID, reason));
    match (requests, last_event_id) {
        ([request], None) => (request.resumable, request.event_path) = (streamed, path),
        ([request], Some(id)) if streamed => {
            let cursor = CursorKeys::decode(&id).map_err(|error| Outcome::field(LAST_EVENT_ID, error))?;
            (request.resume, request.event_path) = (Some(Resume { cursor, tokens: None }), path);
        }
        (_, None) => {}
        (_, Some(_)) if streamed => {
            return refused("a response to several prompts cannot be resumed; send them one by one");
        }
        (_, Some(_)) => {
            return refused("only streamed responses can be resumed; set stream, or leave it out");
        }
    }
    Ok(())
}

/// Names the header that has the cursor in HTTP.
fn at_header(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::InvalidField { field, reason } if field == "cursor" => Outcome::field(LAST_EVENT_ID, reason),
        outcome => outcome,
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Returns the route of a handler of POST requests.
fn post(handler: Handler) -> MethodRouter<Arc<HttpApi>> {
    let run = move |State(api): State<Arc<HttpApi>>, request: Request<axum::body::Body>| async move {
        let (mut parts, body) = request.into_parts();
        let path = parts.uri.path().to_owned();
        let call = Call::new(&path, &parts.extensions, &parts.headers);
        // The call gives back what its message has reserved of the receive budget, long before it ends.
        parts.extensions.remove::<Arc<ReservedBytes>>();
        let answer = async {
            let call = call?;
            let body = body::receive(body, &api.options).await?;
            handler(api, call, body).await
        };
        answer.await.unwrap_or_else(|outcome| refuse(&path, outcome)).map(axum::body::Body::new)
    };
    on(axum::routing::MethodFilter::POST, run)
}

async fn unknown_path(request: Request<axum::body::Body>) -> AxumResponse {
    let path = request.uri().path();
    refuse(path, Outcome::UnknownPath { path: path.to_owned() }).map(axum::body::Body::new)
}

async fn wrong_method(request: Request<axum::body::Body>) -> AxumResponse {
    let path = request.uri().path();
    let outcome = Outcome::WrongMethod { method: request.method().to_string(), path: path.to_owned() };
    refuse(path, outcome).map(axum::body::Body::new)
}

/// Returns a response with a JSON body.
fn json(value: &impl serde::Serialize) -> Result<Response<Body>, Outcome> {
    let body = serde_json::to_vec(value).map_err(|error| Outcome::Internal(error.to_string()))?;
    let mut response = Response::new(Body::new(http_body_util::Full::new(Bytes::from(body))));
    let headers = response.headers_mut();
    headers.insert(
        tonic::codegen::http::header::CONTENT_TYPE,
        tonic::codegen::http::HeaderValue::from_static("application/json"),
    );
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::fields::{Fate, FieldTable};
    use super::*;

    /// Reads a body of an API and returns what it says.
    type Read = fn(&[u8]) -> Result<String, Outcome>;

    fn said(read: Result<impl std::fmt::Debug, Outcome>) -> Result<String, Outcome> {
        read.map(|read| format!("{read:?}"))
    }

    /// Every table of fields, in the order of the documentation, with the fields that a body needs, and the
    /// reader that applies the table.
    const TABLES: [(&FieldTable, &str, Read); 7] = [
        (&chat::FIELDS, r#""messages": [{"role": "user", "content": "a"}]"#, |body| said(chat::read(body))),
        (&completions::FIELDS, r#""prompt": "a""#, |body| said(completions::read(body))),
        (&responses::FIELDS, r#""input": "a""#, |body| said(responses::read(body))),
        (&messages::FIELDS, r#""max_tokens": 9, "messages": [{"role": "user", "content": "a"}]"#, |body| {
            said(messages::read(body))
        }),
        (&messages::COUNT_FIELDS, r#""messages": [{"role": "user", "content": "a"}]"#, |body| {
            said(messages::read_count(body))
        }),
        (&tokenize::FIELDS, r#""prompt": "a""#, |body| said(tokenize::read(body))),
        (&tokenize::DETOKENIZE_FIELDS, r#""tokens": [1]"#, |body| said(tokenize::read_tokens(body))),
    ];

    /// Returns the section of the documentation with the fields of an API.
    fn section<'a>(documentation: &'a str, api: &str) -> &'a str {
        let heading = format!("### Fields of {api}\n");
        let section = documentation.split(&heading).nth(1).unwrap_or_default();
        section.split("\n#").next().unwrap_or_default()
    }

    #[test]
    fn the_documentation_has_the_fate_of_every_field_and_of_no_other() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/http-api.md");
        let documentation = std::fs::read_to_string(path).unwrap();
        for (table, ..) in TABLES {
            let rows: Vec<String> = table
                .iter()
                .map(|field| {
                    let fate = match field.fate {
                        Fate::Honoured => "honoured",
                        Fate::Ignored => "ignored",
                        Fate::Refused => "refused",
                    };
                    format!("| `{}` | {fate} | {} |", field.name, field.note)
                })
                .collect();
            let documented =
                section(&documentation, table.api).lines().filter(|line| line.starts_with("| `"));
            let documented: Vec<&str> = documented.collect();
            let (missing, stale): (Vec<_>, Vec<_>) = (
                rows.iter().filter(|row| !documented.contains(&row.as_str())).collect(),
                documented.iter().filter(|row| !rows.iter().any(|known| known == **row)).collect(),
            );
            assert!(
                missing.is_empty() && stale.is_empty(),
                "docs/http-api.md, {}: lacks {missing:#?}, has {stale:#?}",
                table.api
            );
        }
    }

    #[test]
    fn every_honoured_field_is_read_null_is_absent_and_a_refusal_names_the_field() {
        let wrong = ["7.5", "true", r#""\n""#, r#"{"x": [[]]}"#, r#"[{"x": [[]]}]"#, "[[true]]", "[7]"];
        for (table, needed, read) in TABLES {
            let api = table.api;
            let absent = read(format!("{{{needed}}}").as_bytes()).unwrap();
            for field in table.iter().filter(|field| field.fate == Fate::Honoured) {
                let name = field.name;
                // A field that the body needs is missing if it is null.
                if !needed.contains(&format!("\"{name}\":")) {
                    let null = read(format!("{{{needed}, \"{name}\": null}}").as_bytes());
                    assert_eq!(null.as_ref(), Ok(&absent), "{api}: {name} is null");
                }
                let mut refused = false;
                for value in wrong {
                    match read(format!("{{{needed}, \"{name}\": {value}}}").as_bytes()) {
                        Ok(_) => {}
                        Err(Outcome::InvalidField { field, reason }) => {
                            assert_eq!(field, name, "{api}: {name} = {value}: {reason}");
                            refused = true;
                        }
                        Err(other) => panic!("{api}: {name} = {value}: {other:?} names no field"),
                    }
                }
                assert!(refused, "{api}: {name} takes any value, so it is not read");
            }
        }
    }

    #[test]
    fn no_field_has_two_fates() {
        for (table, ..) in TABLES {
            let mut names: Vec<&str> = table.iter().map(|field| field.name).collect();
            names.sort_unstable();
            let count = names.len();
            names.dedup();
            assert_eq!(names.len(), count, "{}", table.api);
        }
    }
}
