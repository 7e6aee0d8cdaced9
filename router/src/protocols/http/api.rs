//! State of the HTTP APIs, and the start of a call's generations.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use inflight_contract::{Constraint, JsonWhitespace};
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::Response;

use super::call::Call;
use super::known_paths::KnownPaths;
use super::started::Started;
use crate::layers::admission::Admission;
use crate::options::{HttpOptions, Options};
use crate::outcome::Outcome;
use crate::protocols::page::Ui;
use crate::request::cursor::CursorKeys;
use crate::request::draft::{Draft, Resume};
use crate::request::ingress::Ingress;

/// Renders the metrics of the process for Prometheus.
pub type RenderMetrics = Arc<dyn Fn() -> String + Send + Sync>;

/// Response of axum.
pub(crate) type AxumResponse = Response<axum::body::Body>;

/// State of the HTTP APIs.
pub(crate) struct HttpApi {
    pub(crate) ingress: Arc<Ingress>,
    admission: Admission,
    pub(crate) options: Options,
    pub(crate) http: HttpOptions,
    /// Metrics of the process, if they are served here.
    pub(crate) metrics: Option<RenderMetrics>,
    /// Whether the router drains.
    pub(crate) draining: Box<dyn Fn() -> bool + Send + Sync>,
    /// Start of the process, in seconds since the epoch: the creation time of models.
    pub(crate) started_at: u64,
    /// The live view, if it is served.
    pub(crate) ui: Option<Ui>,
    /// Paths of the port.
    pub(crate) known: KnownPaths,
    /// OpenAPI document of the port.
    pub(crate) openapi: Bytes,
}

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
            known: KnownPaths::default(),
            openapi: Bytes::new(),
        }
    }

    /// Serves the live view too.
    pub(crate) fn with_ui(self, ui: Option<Ui>) -> Self {
        Self { ui, ..self }
    }

    /// Starts the generation of every prompt of a call. Each is admitted as a request of its own.
    pub(crate) async fn start(
        &self,
        mut requests: Vec<Draft>,
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
        set_json_whitespace(&mut requests, self.options.json_whitespace);
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

/// Name of the header with the cursor, in error messages.
const LAST_EVENT_ID: &str = "Last-Event-ID";

/// Makes the stream of a single prompt resumable, and resumes it from the client's last event.
fn set_position(
    requests: &mut [Draft],
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

/// Sets the whitespace of JSON in the grammar of a call, which its prompts share, so that there is no copy for each prompt.
fn set_json_whitespace(requests: &mut [Draft], whitespace: JsonWhitespace) {
    let Some(mut shared) = requests.first().and_then(|first| first.sampling.constraint.clone()) else {
        return;
    };
    Constraint::set_json_whitespace(&mut shared, whitespace);
    requests.iter_mut().for_each(|request| request.sampling.constraint = Some(Arc::clone(&shared)));
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

/// Returns a response with a JSON body.
pub(crate) fn json(value: &impl serde::Serialize) -> Result<Response<Body>, Outcome> {
    let body = serde_json::to_vec(value).map_err(|error| Outcome::Internal(error.to_string()))?;
    let mut response = Response::new(Body::new(http_body_util::Full::new(Bytes::from(body))));
    let headers = response.headers_mut();
    headers.insert(
        tonic::codegen::http::header::CONTENT_TYPE,
        tonic::codegen::http::HeaderValue::from_static("application/json"),
    );
    Ok(response)
}
