//! Cursors of the HTTP APIs that are refused, and resumed streams that fail.

use inflight_proto::v1;
use inflight_router::{DispatcherOptions, HttpOptions, Options};
use serde_json::{Value, json};

use crate::cluster::{bounded, tokens};
use crate::http_client::{Call, ENDPOINTS, Event, HttpCluster, SHORT, parse_events, with_http};
use crate::tenants::{Folder, digest};
use inflight_scripted::WorkerProfile;

const LENGTH: v1::FinishReason = v1::FinishReason::Length;
const KEY: &[u8] = b"a key that all routers of the cluster share";

fn with_resume_key(keepalive: std::time::Duration) -> Options {
    Options {
        resume_keys: vec![KEY.to_vec()],
        ..with_http(HttpOptions { keepalive, ..HttpOptions::default() })
    }
}

fn options() -> Options {
    with_resume_key(HttpOptions::default().keepalive)
}

/// Equal limits everywhere, so that only the endpoint differs.
fn body(path: &str, ask: &str) -> String {
    let limit = match path {
        "/v1/messages" => "",
        "/v1/responses" => r#","max_output_tokens":9"#,
        _ => r#","max_tokens":9"#,
    };
    format!("{ask}{limit},\"stream\":true}}")
}

/// Starts a stream whose client disconnects after "ab", and returns the events that it has received.
async fn cut(http: &mut HttpCluster, path: &str, body: &str, headers: &[(&str, &str)]) -> Vec<Event> {
    let mut call = Call::send(http.address, "POST", path, headers, body.as_bytes()).await;
    let submit = http.session.submit().await;
    http.session.tokens(&submit, 0, &tokens("ab"));
    assert_eq!(call.head().await.0, 200);
    let received = call.until("\"ab\"").await;
    drop(call);
    http.session.cancel().await;
    http.session.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
    parse_events(&received)
}

/// Resumes a stream.
async fn resume(http: &HttpCluster, path: &str, body: &str, id: &str, key: Option<&'static str>) -> Call {
    let mut headers = vec![("last-event-id", id)];
    headers.extend(key.map(|key| ("x-api-key", key)));
    Call::send(http.address, "POST", path, &headers, body.as_bytes()).await
}

fn last_id(events: &[Event]) -> String {
    events.last().unwrap().id.clone().unwrap()
}

/// Resumes a stream that is refused, and returns the status and the error's code; in Anthropic's dialect,
/// which has none, its type.
async fn refused(
    http: &HttpCluster,
    path: &str,
    body: &str,
    id: &str,
    key: Option<&'static str>,
) -> (u16, Value) {
    let response = resume(http, path, body, id, key).await.response().await;
    let error = &response.json()["error"];
    if response.status == 409 {
        assert_eq!(response.headers["x-should-retry"], "false", "{path}");
    }
    (response.status, if path == "/v1/messages" { error["type"].clone() } else { error["code"].clone() })
}

/// Code of an error in OpenAI's dialect, or its type in Anthropic's.
fn named(path: &str, code: &str) -> Value {
    if path == "/v1/messages" { json!("invalid_request_error") } else { json!(code) }
}

/// Checks that no refused call has reached the worker: the next submission is of a new request.
async fn expect_no_submission(http: &mut HttpCluster, key: &str) {
    let headers = [("x-api-key", key)];
    let call = Call::send(http.address, "POST", "/v1/completions", &headers, br#"{"prompt":"new"}"#).await;
    let submit = http.session.submit().await;
    assert_eq!(submit.prompt_token_ids[1..], tokens("new"));
    http.session.finish(&submit, 0, &tokens("a"), LENGTH);
    assert_eq!(call.response().await.status, 200);
}

#[tokio::test]
async fn a_stream_is_not_resumed_by_workers_of_another_fingerprint() {
    bounded(async {
        let mut one = HttpCluster::start(options()).await;
        let profile = WorkerProfile { fingerprint: "f2", ..WorkerProfile::default() };
        let mut other = HttpCluster::over(profile, options()).await;
        for (path, ask) in ENDPOINTS {
            let body = body(path, ask);
            let id = last_id(&cut(&mut one, path, &body, &[]).await);
            let (status, name) = refused(&other, path, &body, &id, None).await;
            assert_eq!((status, name), (409, named(path, "unknown_fingerprint")), "{path}");
        }
        expect_no_submission(&mut other, "").await;
    })
    .await;
}

#[tokio::test]
async fn a_worker_that_generates_other_tokens_ends_the_resumed_stream_before_or_after_the_headers() {
    bounded(async {
        for has_comments in [false, true] {
            let options = if has_comments { with_resume_key(SHORT) } else { options() };
            let mut http = HttpCluster::start(options).await;
            for (path, ask) in ENDPOINTS {
                let body = body(path, ask);
                let id = last_id(&cut(&mut http, path, &body, &[]).await);
                let mut call = resume(&http, path, &body, &id, None).await;
                let submit = http.session.submit().await;
                assert!(submit.resumed.is_empty(), "the tokens are generated again");
                http.session.tokens(&submit, 0, &tokens("a"));
                if has_comments {
                    assert_eq!(call.head().await.0, 200);
                    assert_eq!(call.until_comments(1).await, "", "{path}");
                    http.session.tokens(&submit, 0, &tokens("z"));
                    let events = call.rest().await;
                    let error = match path {
                        "/v1/responses" => {
                            let kinds: Vec<_> = events.iter().map(|event| event.name.as_deref()).collect();
                            assert_eq!(kinds, [Some("error"), Some("response.failed")], "{events:?}");
                            events[0].json()
                        }
                        _ => {
                            assert_eq!(events.len(), 1, "{path}: {events:?}");
                            events[0].json()["error"].clone()
                        }
                    };
                    let name = &error[if path == "/v1/messages" { "type" } else { "code" }];
                    assert_eq!(*name, named(path, "resume_diverged"), "{path}");
                    assert!(events.iter().all(|event| event.id.is_none()), "it cannot be resumed again");
                    assert!(error["message"].as_str().unwrap().contains("start over"), "{path}: {error}");
                } else {
                    http.session.tokens(&submit, 0, &tokens("z"));
                    let response = call.response().await;
                    assert_eq!((response.status, &*response.headers["x-should-retry"]), (409, "false"));
                    let error = &response.json()["error"];
                    let name = &error[if path == "/v1/messages" { "type" } else { "code" }];
                    assert_eq!(*name, named(path, "resume_diverged"), "{path}");
                }
                http.session.cancel().await;
                http.session.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_resumed_stream_that_is_lost_in_the_queue_after_a_comment_ends_with_an_error() {
    bounded(async {
        let no_worker_timeout = std::time::Duration::from_millis(1);
        let dispatcher = DispatcherOptions { no_worker_timeout, ..DispatcherOptions::default() };
        let mut http = HttpCluster::start(Options { dispatcher, ..with_resume_key(SHORT) }).await;
        let mut ids = Vec::new();
        for (path, ask) in ENDPOINTS {
            ids.push(last_id(&cut(&mut http, path, &body(path, ask), &[]).await));
        }
        let mut calls = Vec::new();
        for ((path, ask), id) in ENDPOINTS.into_iter().zip(&ids) {
            let mut call = resume(&http, path, &body(path, ask), id, None).await;
            http.session.submit().await;
            assert_eq!(call.head().await.0, 200);
            call.until_comments(1).await;
            calls.push((path, call));
        }
        drop(http.worker);
        http.session.break_stream();
        for (path, call) in calls {
            let events = call.rest().await;
            assert!(events.last().is_some_and(|event| event.data.contains("error")), "{path}: {events:?}");
            assert!(events.iter().all(|event| event.data != "[DONE]" && event.id.is_none()), "{path}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_stale_cursor_is_refused() {
    bounded(async {
        let options = Options { resume_age_max: std::time::Duration::ZERO, ..options() };
        let mut http = HttpCluster::start(options).await;
        let mut ids = Vec::new();
        for (path, ask) in ENDPOINTS {
            ids.push(last_id(&cut(&mut http, path, &body(path, ask), &[]).await));
        }
        for ((path, ask), id) in ENDPOINTS.into_iter().zip(&ids) {
            // Ages are whole seconds, so within the first one the cursor is accepted.
            let response = loop {
                let mut response = Box::pin(resume(&http, path, &body(path, ask), id, None).await.response());
                tokio::select! {
                    submit = http.session.submit() => {
                        drop(response);
                        http.session.cancel().await;
                        http.session.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
                    }
                    refused = &mut response => break refused,
                }
            };
            assert_eq!(
                (response.status, &*response.headers["x-should-retry"]),
                (409, "false"),
                "{response:?}"
            );
            let error = &response.json()["error"];
            let name = &error[if path == "/v1/messages" { "type" } else { "code" }];
            assert_eq!(*name, named(path, "cursor_rejected"), "{path}");
            assert!(error["message"].as_str().unwrap().contains("streams can be resumed for 0 s"), "{error}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_cursor_is_of_its_tenant_only() {
    bounded(async {
        let folder = Folder::new();
        let tenant = |name: &str| {
            format!("[tenants.{name}]\nkeys = [{{ name = \"main\", sha256 = \"{}\" }}]\n", digest(name))
        };
        let file = format!("{}{}", tenant("acme"), tenant("other"));
        let tenants_file = Some(folder.write("tenants.toml", &file));
        let mut http = HttpCluster::start(Options { tenants_file, ..options() }).await;
        for (path, ask) in ENDPOINTS {
            let body = body(path, ask);
            let id = last_id(&cut(&mut http, path, &body, &[("x-api-key", "acme")]).await);
            let (status, name) = refused(&http, path, &body, &id, Some("other")).await;
            assert_eq!((status, name), (409, named(path, "cursor_rejected")), "{path}");
            assert_eq!(refused(&http, path, &body, &id, None).await.0, 401, "{path}");
            expect_no_submission(&mut http, "other").await;
            // Its own tenant resumes it.
            let call = resume(&http, path, &body, &id, Some("acme")).await;
            let submit = http.session.submit().await;
            http.session.finish(&submit, 0, &tokens("abc"), LENGTH);
            let events = call.events().await;
            assert!(events[0].data.contains("\"c\""), "{path}: {events:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn an_id_with_one_changed_character_is_refused() {
    bounded(async {
        let mut http = HttpCluster::start(options()).await;
        let (path, ask) = ENDPOINTS[0];
        let body = body(path, ask);
        let id = last_id(&cut(&mut http, path, &body, &[]).await);
        assert!(id.is_ascii());
        for at in (0..id.len()).step_by(5).chain([id.len() - 1]) {
            let other = if id.as_bytes()[at] == b'A' { "B" } else { "A" };
            let forged = format!("{}{other}{}", &id[..at], &id[at + 1..]);
            assert_eq!(refused(&http, path, &body, &forged, None).await.0, 400, "changed at {at}: {forged}");
        }
        for length in [1, id.len() / 2, id.len() - 1] {
            assert_eq!(refused(&http, path, &body, &id[..length], None).await.0, 400, "cut to {length}");
        }
        expect_no_submission(&mut http, "").await;
    })
    .await;
}

#[tokio::test]
async fn a_cursor_is_of_its_endpoint_only() {
    bounded(async {
        let mut http = HttpCluster::start(options()).await;
        for (from, ask) in ENDPOINTS {
            let id = last_id(&cut(&mut http, from, &body(from, ask), &[]).await);
            for (path, ask) in ENDPOINTS {
                if path != from {
                    let (status, name) = refused(&http, path, &body(path, ask), &id, None).await;
                    assert_eq!((status, name), (409, named(path, "cursor_rejected")), "{from} at {path}");
                }
            }
        }
        expect_no_submission(&mut http, "").await;
    })
    .await;
}
