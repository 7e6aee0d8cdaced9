//! Refusals: of streams whose headers were sent with a comment, and before the headers with `Retry-After`.

use std::time::Duration;

use inflight_proto::v1;
use inflight_router::{DispatcherOptions, HttpOptions, Options, UsageLogOptions};
use serde_json::{Value, json};

use crate::cluster::{bounded, queue_of, text, tokens};
use crate::http_client::{Call, ENDPOINTS, Event, HttpCluster, Response, SHORT, with_http};
use crate::tenants::{Folder, digest};
use inflight_scripted::WorkerProfile;

const LENGTH: v1::FinishReason = v1::FinishReason::Length;

fn short() -> Options {
    with_http(HttpOptions { keepalive: SHORT, ..HttpOptions::default() })
}

/// Opens a stream at each endpoint whose request is queued, and reads up to its first comment.
async fn queued_streams(http: &HttpCluster) -> Vec<(&'static str, Call)> {
    let mut calls = Vec::new();
    for (path, ask) in ENDPOINTS {
        calls.push((path, http.post(path, &format!("{ask},\"stream\":true}}")).await));
    }
    for (_, call) in &mut calls {
        assert_eq!(call.head().await.0, 200);
        assert_eq!(call.until_comments(1).await, "", "a queued stream has comments only");
    }
    calls
}

/// Checks that all that a stream had after its comments is one failure.
fn check_failure(path: &str, events: &[Event], code: &str, anthropic_type: &str) {
    assert!(events.iter().all(|event| event.data != "[DONE]" && event.id.is_none()), "{path}: {events:?}");
    let names: Vec<Option<&str>> = events.iter().map(|event| event.name.as_deref()).collect();
    let json: Vec<Value> = events.iter().map(Event::json).collect();
    match path {
        "/v1/responses" => {
            assert_eq!(names, [Some("error"), Some("response.failed")], "{events:?}");
            assert_eq!((&json[0]["type"], &json[0]["code"]), (&json!("error"), &json!(code)));
            let response = &json[1]["response"];
            assert_eq!((&response["status"], &response["error"]["code"]), (&json!("failed"), &json!(code)));
            assert_eq!(json[0]["message"], response["error"]["message"]);
            let numbers = [&json[0]["sequence_number"], &json[1]["sequence_number"]];
            assert_eq!(numbers, [&json!(0), &json!(1)]);
        }
        "/v1/messages" => {
            assert_eq!(names, [Some("error")], "{events:?}");
            assert_eq!(
                (&json[0]["type"], &json[0]["error"]["type"]),
                (&json!("error"), &json!(anthropic_type))
            );
        }
        _ => {
            assert_eq!(names, [None], "{path}: {events:?}");
            assert_eq!(json[0]["error"]["code"], code, "{path}");
            assert!(json[0].get("choices").is_none());
        }
    }
}

#[tokio::test]
async fn a_stream_displaced_from_the_queue_after_a_comment_ends_with_one_error() {
    bounded(async {
        let options = Options { dispatcher: queue_of(ENDPOINTS.len()), anonymous_weights: true, ..short() };
        let mut http = HttpCluster::ungranted(WorkerProfile::default(), options).await;
        let calls = queued_streams(&http).await;
        let mut displacing = Vec::new();
        for _ in ENDPOINTS {
            let request = v1::GenerateRequest { priority: 1, ..text("first") };
            displacing.push(http.cluster.generate(request).await.unwrap());
        }
        for (path, call) in calls {
            check_failure(path, &call.rest().await, "overloaded", "overloaded_error");
        }
        assert_eq!(http.cluster.handle.stats().waiting, ENDPOINTS.len());
        // Nothing of them reaches the worker.
        http.session.grant(64, 1 << 16);
        for _ in &displacing {
            assert_eq!(http.session.submit().await.prompt_token_ids[1..], tokens("first"));
        }
    })
    .await;
}

#[tokio::test]
async fn a_stream_without_a_worker_after_a_comment_ends_with_one_error() {
    bounded(async {
        let options = Options {
            dispatcher: DispatcherOptions {
                no_worker_timeout: Duration::from_millis(1),
                ..DispatcherOptions::default()
            },
            ..short()
        };
        let http = HttpCluster::ungranted(WorkerProfile::default(), options).await;
        let calls = queued_streams(&http).await;
        drop(http.worker);
        http.session.break_stream();
        for (path, call) in calls {
            check_failure(path, &call.rest().await, "unavailable", "overloaded_error");
        }
        assert_eq!(http.cluster.handle.stats().waiting, 0);
    })
    .await;
}

#[tokio::test]
async fn a_stream_whose_deadline_passes_after_a_comment_ends_with_one_error() {
    bounded(async {
        let http = HttpCluster::ungranted(WorkerProfile::default(), short()).await;
        let address = http.address;
        let expire = |path: &'static str, ask: &'static str| async move {
            let body = format!("{ask},\"stream\":true}}");
            let mut deadline_ms = 200;
            // On a slow machine the deadline may pass before the first comment.
            loop {
                let timeout = format!("{deadline_ms}m");
                let headers = [("grpc-timeout", timeout.as_str())];
                let mut call = Call::send(address, "POST", path, &headers, body.as_bytes()).await;
                match call.head().await.0 {
                    200 => return (path, call.rest().await),
                    status => assert_eq!(status, 504, "{path}"),
                }
                deadline_ms *= 2;
            }
        };
        for (path, events) in futures::future::join_all(ENDPOINTS.map(|(path, ask)| expire(path, ask))).await
        {
            check_failure(path, &events, "timeout", "timeout_error");
        }
        assert_eq!(http.cluster.handle.stats().waiting, 0);
    })
    .await;
}

#[tokio::test]
async fn bodies_that_are_not_json_in_utf_8_are_refused_by_their_header_or_place() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        for (path, ask) in ENDPOINTS {
            let body = format!("{ask}}}");
            for (name, value, param) in [
                ("content-encoding", "gzip", "Content-Encoding"),
                ("content-type", "application/json; charset=utf-16", "Content-Type"),
            ] {
                let call = Call::send(http.address, "POST", path, &[(name, value)], body.as_bytes()).await;
                let refused = call.response().await;
                let error = &refused.json()["error"];
                assert_eq!(refused.status, 415, "{path}: {refused:?}");
                assert!(error["message"].as_str().unwrap().starts_with(param), "{path}: {error}");
                assert!(path == "/v1/messages" || error["param"] == param, "{path}: {error}");
            }
            let marked = [b"\xef\xbb\xbf", body.as_bytes()].concat();
            let call =
                Call::send(http.address, "POST", path, &[("content-encoding", "identity")], &marked).await;
            let submit = http.session.submit().await;
            http.session.finish(&submit, 0, &tokens("a"), LENGTH);
            assert_eq!(call.response().await.status, 200, "{path}");
            for (body, words) in [
                (body.replacen("\"a\"", "\"a\\ud83d\"", 1), "the escape \\ud83d at byte 2"),
                (body.replacen("\"a\"", "\"a\\q\"", 1), "invalid escape at line 1"),
            ] {
                let (status, error) = http.refused(path, &body).await;
                assert!(
                    status == 400 && error["message"].as_str().unwrap().contains(words),
                    "{path} {body}: {error}"
                );
            }
            let invalid = body.replacen("\"a\"", "\"\u{1}\"", 1).into_bytes();
            let invalid: Vec<u8> =
                invalid.into_iter().map(|byte| if byte == 1 { 0xff } else { byte }).collect();
            let call = Call::send(http.address, "POST", path, &[], &invalid).await;
            assert!(call.response().await.body.contains("the body is not UTF-8: byte"), "{path}");
        }
    })
    .await;
}

/// Checks a refusal that clients shall repeat later.
fn check_retry(path: &str, refused: &Response, status: u16, code: &str, anthropic_type: &str) -> u64 {
    assert_eq!(refused.status, status, "{path}: {refused:?}");
    assert!(!refused.headers.contains_key("x-should-retry"), "{path}: {refused:?}");
    let error = &refused.json()["error"];
    if path == "/v1/messages" {
        assert_eq!(error["type"], anthropic_type);
    } else {
        assert_eq!(error["code"], code, "{path}");
    }
    refused.headers["retry-after"].parse().unwrap()
}

#[tokio::test]
async fn calls_beyond_the_limit_of_open_calls_are_refused_with_the_time_to_retry() {
    bounded(async {
        let retry_delay = Duration::from_millis(6_500);
        let options = Options { streams_max: 1, retry_delay, ..with_http(HttpOptions::default()) };
        let mut http = HttpCluster::start(options).await;
        let open = http.post(ENDPOINTS[0].0, &format!("{}}}", ENDPOINTS[0].1)).await;
        let submit = http.session.submit().await;
        for (path, ask) in ENDPOINTS {
            for stream in [false, true] {
                let refused = http.post(path, &format!("{ask},\"stream\":{stream}}}")).await.response().await;
                let retry = check_retry(path, &refused, 503, "overloaded", "overloaded_error");
                assert_eq!(retry, 7, "seconds, rounded up");
                assert!(
                    refused.body.contains("1 calls are open, the limit (--streams-max)"),
                    "{}",
                    refused.body
                );
            }
        }
        http.session.finish(&submit, 0, &tokens("a"), LENGTH);
        assert_eq!(open.response().await.status, 200);
    })
    .await;
}

#[tokio::test]
async fn a_spent_daily_budget_is_refused_until_the_next_day() {
    bounded(async {
        let folder = Folder::new();
        let file = format!(
            "[tenants.acme]\nlimits = {{ tokens_per_day = 64 }}\nkeys = [{{ name = \"main\", sha256 = \"{}\" }}]\n",
            digest("acme")
        );
        let options = Options {
            tenants_file: Some(folder.write("tenants.toml", &file)),
            usage_log: Some(folder.0.join("usage")),
            ..with_http(HttpOptions::default())
        };
        let mut http = HttpCluster::start(options).await;
        let key = [("x-api-key", "acme")];
        let body = br#"{"prompt":"a","max_tokens":50}"#;
        let call = Call::send(http.address, "POST", "/v1/completions", &key, body).await;
        let submit = http.session.submit().await;
        http.session.finish(&submit, 0, &[tokens("b")[0]; 50], LENGTH);
        assert_eq!(call.response().await.status, 200);
        let limits = [r#","max_tokens":30}"#, r#","max_tokens":30}"#, r#","max_output_tokens":30}"#, "}"];
        for ((path, ask), limit) in ENDPOINTS.into_iter().zip(limits) {
            let body = format!("{}{limit}", ask.replace(r#""max_tokens":9"#, r#""max_tokens":30"#));
            let call = Call::send(http.address, "POST", path, &key, body.as_bytes()).await;
            let refused = call.response().await;
            let retry = check_retry(path, &refused, 429, "rate_limit_exceeded", "rate_limit_error");
            assert!((1..=86_400).contains(&retry), "{retry}");
            assert!(refused.body.contains("more than 64 tokens a UTC day"), "{}", refused.body);
        }
        assert!(http.session.try_command().is_none());
    })
    .await;
}

#[tokio::test]
async fn calls_are_refused_while_the_usage_log_cannot_be_written() {
    bounded(async {
        let folder = Folder::new();
        let (directory, moved) = (folder.0.join("usage"), folder.0.join("moved"));
        // Every line needs a new file, which cannot be created in a directory that is gone.
        let usage_files = UsageLogOptions { file_bytes_max: 1, ..UsageLogOptions::default() };
        let options =
            Options { usage_log: Some(directory.clone()), usage_files, ..with_http(HttpOptions::default()) };
        let mut http = HttpCluster::start(options).await;
        let serve = async |http: &mut HttpCluster| loop {
            let mut response = Box::pin(http.post("/v1/completions", r#"{"prompt":"a"}"#).await.response());
            tokio::select! {
                submit = http.session.submit() => http.session.finish(&submit, 0, &tokens("b"), LENGTH),
                refused = &mut response => break refused,
            }
            assert_eq!(response.await.status, 200);
        };
        let call = http.post("/v1/completions", r#"{"prompt":"a"}"#).await;
        let submit = http.session.submit().await;
        std::fs::rename(&directory, &moved).unwrap();
        http.session.finish(&submit, 0, &tokens("b"), LENGTH);
        assert_eq!(call.response().await.status, 200);
        serve(&mut http).await;
        for (path, ask) in ENDPOINTS {
            for stream in [false, true] {
                let refused = http.post(path, &format!("{ask},\"stream\":{stream}}}")).await.response().await;
                assert_eq!(check_retry(path, &refused, 503, "unavailable", "overloaded_error"), 1);
                assert!(refused.body.contains("could not bill"), "{}", refused.body);
            }
        }
        assert!(http.session.try_command().is_none());
        // What computes nothing is not billed.
        assert_eq!(http.get("/v1/models").await.status, 200);
        std::fs::rename(&moved, &directory).unwrap();
        loop {
            let mut response = Box::pin(http.post("/v1/completions", r#"{"prompt":"a"}"#).await.response());
            tokio::select! {
                submit = http.session.submit() => {
                    http.session.finish(&submit, 0, &tokens("b"), LENGTH);
                    assert_eq!(response.await.status, 200);
                    break;
                }
                refused = &mut response => assert_eq!(refused.status, 503),
            }
        }
    })
    .await;
}
