//! `/ui` and `/chat`: the pages of the live view and of the chat, and their data.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::response::Redirect;
use axum::routing::{get, on};
use futures::stream;
use http_body::Frame;
use http_body_util::{Full, StreamBody};
use inflight_net::Peer;
use tokio::time::Instant;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use tonic::codegen::http::request::Parts;
use tonic::codegen::http::{HeaderValue, Request, Response, StatusCode, Uri};

use crate::clock;
use crate::live::page::Page;
use crate::live::supervisor;
use crate::outcome::Outcome;
use crate::protocols::http::errors::refuse;
use crate::protocols::http::{AxumResponse, HttpApi, json};
use crate::protocols::operations::{Operations, Watching};
use crate::protocols::route::{EVENTS, HTML, JSON, NOTHING, Part, Route, RouteMethod};
use crate::tenants::Caller;

/// Header without which nothing is changed: other sites' pages cannot send it.
const UI_HEADER: HeaderName = HeaderName::from_static("x-inflight-ui");
/// Interval of comments that keep a stream's connection alive.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Path of the chat's page.
pub(crate) const CHAT: &str = "/chat";

/// State of `/ui`.
pub(crate) struct Ui {
    operations: Operations,
    /// Content security policies of the pages: each permits its own script and nothing else.
    live_policy: HeaderValue,
    chat_policy: HeaderValue,
}

impl Ui {
    pub(crate) fn new(operations: Operations) -> Self {
        let [live_policy, chat_policy] = [Page::live(), Page::chat()].map(|page| policy(&page.script_sha256));
        Self { operations, live_policy, chat_policy }
    }
}

/// Returns the content security policy of a page whose one script has this SHA-256, in base64.
fn policy(script_sha256: &str) -> HeaderValue {
    let policy = format!(
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_sha256}'; connect-src 'self'; img-src data:; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    // Base64 has only visible characters.
    HeaderValue::from_str(&policy).unwrap_or(HeaderValue::from_static("default-src 'none'"))
}

/// Routes of the live view.
pub(crate) static ROUTES: [Route<Arc<HttpApi>>; 6] = [
    Route::get("/", "Redirects to the live view.", NOTHING, || get(async || Redirect::temporary("/ui")))
        .of(Part::LiveView)
        .by(RouteMethod::Get, 307),
    Route::get("/ui", "Page of the live view; it has no data.", HTML, || get(live_page)).of(Part::LiveView),
    Route::get(CHAT, "Page of the chat; it has no data.", HTML, || get(chat_page)).of(Part::LiveView),
    Route::get("/ui/events", "State of the cluster and its changes.", EVENTS, || get(events))
        .of(Part::LiveView),
    Route::get("/ui/requests/{number}", "Life of a request.", JSON, || get(request)).of(Part::LiveView),
    Route::get("/ui/workers/{number}/kill", "Kills a worker process of `inflight up`.", NOTHING, || {
        on(axum::routing::MethodFilter::POST, kill)
    })
    .of(Part::LiveView)
    .by(RouteMethod::Post, 204),
];

fn finish(path: &str, answer: Result<Response<Body>, Outcome>) -> AxumResponse {
    let mut response = answer.unwrap_or_else(|outcome| refuse(path, outcome));
    let headers = response.headers_mut();
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.entry(CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response.map(axum::body::Body::new)
}

/// Returns the state of `/ui`, if the caller may use it. Pages of other sites were refused before ([`crate::layers::sites`]).
fn authorize<'a>(api: &'a HttpApi, parts: &Parts) -> Result<&'a Ui, Outcome> {
    let caller = parts.extensions.get::<Caller>();
    Operations::authorize(caller)?;
    // The routes exist only with it.
    api.ui.as_ref().ok_or_else(|| Outcome::unknown_path("/ui"))
}

/// The page of the live view, which shows data only with a key that may read them.
async fn live_page(State(api): State<Arc<HttpApi>>) -> AxumResponse {
    document("/ui", Page::live(), api.ui.as_ref().map(|ui| &ui.live_policy))
}

/// The page of the chat, which calls the APIs with a key that its user types.
async fn chat_page(State(api): State<Arc<HttpApi>>) -> AxumResponse {
    document(CHAT, Page::chat(), api.ui.as_ref().map(|ui| &ui.chat_policy))
}

fn document(path: &str, page: &'static Page, policy: Option<&HeaderValue>) -> AxumResponse {
    let mut response = Response::new(Body::new(Full::new(Bytes::from_static(page.html.as_bytes()))));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    if let Some(policy) = policy {
        headers.insert(CONTENT_SECURITY_POLICY, policy.clone());
    }
    finish(path, Ok(response))
}

/// Updates a second in a query such as `rate=4`; 0 without.
fn rate(uri: &Uri) -> Result<u32, Outcome> {
    let mut parameters = uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    let Some((_, rate)) = parameters.rfind(|(name, _)| *name == "rate") else { return Ok(0) };
    match rate.parse() {
        Ok(rate @ 1..=10) => Ok(rate),
        _ => Err(Outcome::field("rate", format!("rate is {rate:?}; it must be 1 to 10"))),
    }
}

/// Updates of a watch as server-sent events.
async fn events(State(api): State<Arc<HttpApi>>, request: Request<axum::body::Body>) -> AxumResponse {
    let (parts, _) = request.into_parts();
    let answer = authorize(&api, &parts).and_then(|ui| {
        let caller = parts.extensions.get::<Caller>();
        let peer = parts.extensions.get::<Peer>();
        let watching = ui.operations.watch(caller, peer, rate(&parts.uri)?, true, "http")?;
        Ok(event_stream(watching))
    });
    finish("/ui/events", answer)
}

fn event_stream(watching: Watching) -> Response<Body> {
    let frames = stream::unfold((watching, Instant::now()), |(mut watching, kept_alive)| async move {
        let update = watching.next().await.ok()?;
        let mut event = format!("id: {}\nevent: update\ndata: ", update.number).into_bytes();
        // Numbers, strings and lists: serialization to memory cannot fail.
        serde_json::to_writer(&mut event, &update).ok()?;
        event.extend_from_slice(b"\n\n");
        let now = Instant::now();
        let comment = now.saturating_duration_since(kept_alive) >= KEEP_ALIVE;
        if comment {
            event.extend_from_slice(b": keep-alive\n\n");
        }
        watching.sent(event.len());
        let frame = Ok::<_, Infallible>(Frame::data(Bytes::from(event)));
        Some((frame, (watching, if comment { now } else { kept_alive })))
    });
    let mut response = Response::new(Body::new(StreamBody::new(frames)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    // nginx would buffer the stream.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

/// Parses a number in a path.
fn number(text: &str, path: &str) -> Result<u64, Outcome> {
    let unknown = || Outcome::unknown_path(path);
    text.parse().ok().filter(|number| *number > 0).ok_or_else(unknown)
}

/// The life of a request.
async fn request(
    State(api): State<Arc<HttpApi>>,
    Path(text): Path<String>,
    request: Request<axum::body::Body>,
) -> AxumResponse {
    let (parts, _) = request.into_parts();
    let path = parts.uri.path();
    let answer = authorize(&api, &parts).and_then(|ui| {
        let life = ui.operations.hub.life(number(&text, path)?, "", clock::now());
        json(&life.ok_or_else(|| Outcome::unknown_path(path))?)
    });
    finish(path, answer)
}

/// Kills a worker process of `inflight up`, which starts it again.
async fn kill(
    State(api): State<Arc<HttpApi>>,
    Path(text): Path<String>,
    request: Request<axum::body::Body>,
) -> AxumResponse {
    let (parts, _) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let killed = async {
        let ui = authorize(&api, &parts)?;
        let hub = &ui.operations.hub;
        let socket = hub.killer().ok_or_else(|| {
            Outcome::Denied("workers can be killed only under `inflight up` with --admin on".to_owned())
        })?;
        if parts.headers.get(UI_HEADER).is_none_or(|value| value.as_bytes() != b"1") {
            return Err(Outcome::Denied("the header X-Inflight-UI: 1 is missing".to_owned()));
        }
        let index = text.parse().ok().filter(|index: &usize| *index < hub.up_workers());
        let index = index.ok_or_else(|| Outcome::unknown_path(&*path))?;
        tracing::warn!(worker = format!("worker-{index}"), "killing a worker process, as an operator asked");
        // The supervisor's processes count from 1.
        supervisor::kill(socket, index + 1).await.map_err(Outcome::Internal)?;
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        Ok(response)
    };
    finish(&path, killed.await)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_updates_is_one_to_ten() {
        assert_eq!(rate(&Uri::from_static("/ui/events")), Ok(0));
        assert_eq!(rate(&Uri::from_static("/ui/events?a=b&rate=10")), Ok(10));
        for wrong in ["/ui/events?rate=0", "/ui/events?rate=11", "/ui/events?rate=", "/ui/events?rate=-1"] {
            assert!(rate(&wrong.parse().unwrap()).is_err(), "{wrong}");
        }
    }
}
