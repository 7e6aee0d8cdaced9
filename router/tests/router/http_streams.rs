//! Streams of the HTTP APIs: keep-alive comments, failures, disconnects, slow clients, drain.

use std::time::Duration;

use inflight_proto::v1;
use inflight_router::{HttpOptions, Options};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;

use crate::cluster::{bounded, tokens};
use crate::http_client::{Call, Event, HttpCluster, KEEP_ALIVE, SHORT, parse_events, raw_post, with_http};
use inflight_scripted::{Command, WorkerProfile, sequence};

const LENGTH: v1::FinishReason = v1::FinishReason::Length;
const ASK: &str = r#"{"messages":[{"role":"user","content":"hello"}]"#;

/// Body of a streamed request to each generating endpoint, and whether failures are named events.
const ENDPOINTS: [(&str, &str, Option<&str>); 4] = [
    ("/v1/chat/completions", r#"{"messages":[{"role":"user","content":"a"}]"#, None),
    ("/v1/completions", r#"{"prompt":"a""#, None),
    ("/v1/responses", r#"{"input":"a""#, Some("error")),
    ("/v1/messages", r#"{"max_tokens":9,"messages":[{"role":"user","content":"a"}]"#, Some("error")),
];

fn short() -> Options {
    with_http(HttpOptions { keepalive: SHORT, ..HttpOptions::default() })
}

#[tokio::test]
async fn comments_keep_a_stream_alive_while_queued_in_prefill_between_tokens_and_without_a_worker() {
    bounded(async {
        let mut http = HttpCluster::start(short()).await;
        // No grant: requests queue.
        http.session.grant(0, 0);
        let mut call = http.post("/v1/chat/completions", &format!("{ASK},\"stream\":true}}")).await;
        assert_eq!(call.head().await.0, 200);
        for _ in 0..3 {
            assert_eq!(call.chunk().await.unwrap(), KEEP_ALIVE, "queued");
        }
        http.session.grant(64, 1 << 16);
        let submit = http.session.submit().await;
        // The dispatch starts the stream.
        let mut body = loop {
            match call.chunk().await.unwrap() {
                chunk if chunk == KEEP_ALIVE => {}
                chunk => break chunk,
            }
        };
        assert!(body.contains("\"role\":\"assistant\""), "{body}");
        for _ in 0..3 {
            assert_eq!(call.chunk().await.unwrap(), KEEP_ALIVE, "in prefill");
        }
        http.session.tokens(&submit, 0, &tokens("a"));
        let mut comments = 0;
        while comments < 3 {
            match call.chunk().await.unwrap() {
                chunk if chunk == KEEP_ALIVE => comments += usize::from(body.contains("\"a\"")),
                chunk => body.push_str(&chunk),
            }
        }
        // Its worker is lost, and no other has room.
        http.session.break_stream();
        http.session = http.worker.session().await;
        for _ in 0..3 {
            assert_eq!(call.chunk().await.unwrap(), KEEP_ALIVE, "without a worker");
        }
        http.session.grant(64, 1 << 16);
        let submit = http.session.submit().await;
        assert_eq!(submit.resumed[0].token_ids, tokens("a"));
        http.session.finish(&submit, 0, &tokens("b"), LENGTH);
        while let Some(chunk) = call.chunk().await {
            body.push_str(&chunk);
        }
        let events = parse_events(&body);
        let text: String = events[..events.len() - 1]
            .iter()
            .filter_map(|event| event.json()["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
            .collect();
        assert_eq!((text.as_str(), events.last().unwrap().data.as_str()), ("ab", "[DONE]"));
    })
    .await;
}

#[tokio::test]
async fn every_endpoint_has_comments_while_queued_and_in_prefill_and_then_the_whole_output() {
    bounded(async {
        let mut http = HttpCluster::ungranted(WorkerProfile::default(), short()).await;
        let mut calls = Vec::new();
        for (path, ask, _) in ENDPOINTS {
            calls.push((path, http.post(path, &format!("{ask},\"stream\":true}}")).await));
        }
        for (path, call) in &mut calls {
            assert_eq!(call.head().await.0, 200, "{path}");
            assert_eq!(call.until_comments(3).await, "", "{path}: queued");
        }
        http.session.grant(64, 1 << 16);
        let mut submits = Vec::new();
        for _ in &calls {
            submits.push(http.session.submit().await);
        }
        let mut started = Vec::new();
        for (_, call) in &mut calls {
            // The events of the dispatch, then comments.
            started.push(call.until_comments(3).await);
        }
        for submit in &submits {
            http.session.finish(submit, 0, &tokens("out"), LENGTH);
        }
        for ((path, call), started) in calls.into_iter().zip(started) {
            let before = if started.is_empty() { Vec::new() } else { parse_events(&started) };
            assert!(before.iter().all(|event| !event.data.contains("\"out\"")), "{path}: {before:?}");
            let events = [before, call.rest().await].concat();
            let kinds: Vec<_> = events.iter().map(|event| event.name.as_deref()).collect();
            let firsts = match path {
                "/v1/responses" => Some("response.created"),
                "/v1/messages" => Some("message_start"),
                _ => None,
            };
            assert_eq!(kinds[0], firsts, "{path}");
            let text: String = events
                .iter()
                .filter(|event| event.data != "[DONE]")
                .filter_map(|event| {
                    let json = event.json();
                    let at = ["/choices/0/delta/content", "/choices/0/text", "/delta/text", "/delta"];
                    at.iter().find_map(|at| Some(json.pointer(at)?.as_str()?.to_owned()))
                })
                .collect();
            assert_eq!(text, "out", "{path}");
            let last = events.last().unwrap();
            match firsts {
                None => assert_eq!(last.data, "[DONE]"),
                Some("message_start") => assert_eq!(last.name.as_deref(), Some("message_stop")),
                Some(_) => assert_eq!(last.name.as_deref(), Some("response.incomplete")),
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_failure_before_the_headers_has_a_status_and_one_after_them_is_an_event() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        for (path, ask, name) in ENDPOINTS {
            for stream in [false, true] {
                let call = http.post(path, &format!("{ask},\"stream\":{stream}}}")).await;
                let submit = http.session.submit().await;
                http.session.fail(&submit, 0, tonic::Code::ResourceExhausted);
                let refused = call.response().await;
                assert_eq!((refused.status, refused.headers["retry-after"].as_str()), (503, "1"), "{path}");
                assert!(refused.json()["error"]["message"].as_str().unwrap().contains("scripted"), "{path}");
            }
            let call = http.post(path, &format!("{ask},\"stream\":true}}")).await;
            let submit = http.session.submit().await;
            http.session.tokens(&submit, 0, &tokens("a"));
            http.session.fail(&submit, 0, tonic::Code::Internal);
            let events = call.events().await;
            let last = events.last().unwrap();
            match name {
                None => {
                    assert_eq!(last.name, None);
                    let error = &last.json()["error"];
                    assert_eq!((&error["type"], &error["param"]), (&json!("server_error"), &json!(null)));
                }
                Some(name) => {
                    let error = events.iter().find(|event| event.name.as_deref() == Some(name)).unwrap();
                    assert_eq!(error.json()["type"], "error");
                    assert!(error.data.contains("scripted"), "{path}");
                    if path == "/v1/responses" {
                        assert_eq!(last.json()["response"]["status"], "failed");
                    }
                }
            }
            assert!(events.iter().all(|event| event.data != "[DONE]"), "{path}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_disconnect_cancels_in_every_phase_streamed_or_not() {
    bounded(async {
        let mut http = HttpCluster::start(short()).await;
        for (path, ask, _) in ENDPOINTS {
            for stream in [false, true] {
                let body = format!("{ask},\"stream\":{stream}}}");
                // In prefill.
                let call = http.post(path, &body).await;
                let submit = http.session.submit().await;
                drop(call);
                assert_eq!(
                    http.session.cancel().await.submission_id,
                    submit.submission_id,
                    "{path} {stream}"
                );
                // While it generates.
                let mut call = http.post(path, &body).await;
                let submit = http.session.submit().await;
                http.session.tokens(&submit, 0, &tokens("a"));
                if stream {
                    assert_eq!(call.head().await.0, 200);
                    call.chunk().await.unwrap();
                }
                drop(call);
                assert_eq!(
                    http.session.cancel().await.submission_id,
                    submit.submission_id,
                    "{path} {stream}"
                );
            }
        }
        // While queued: the request never reaches the worker, and the queue is empty again.
        http.session.grant(0, 0);
        for (path, ask, _) in ENDPOINTS {
            let call = http.post(path, &format!("{ask}}}")).await;
            while http.cluster.handle.stats().waiting == 0 {
                tokio::task::yield_now().await;
            }
            drop(call);
            while http.cluster.handle.stats().waiting > 0 {
                tokio::task::yield_now().await;
            }
        }
        assert!(http.session.try_command().is_none());
    })
    .await;
}

/// Returns an update with twenty alternatives for each token, so that few of them fill a connection.
fn scored(submit: &v1::Submit, tokens: &[u32], reason: v1::FinishReason) -> v1::SequenceUpdate {
    let one = |token_id| v1::TokenLogprob { token_id, logprob: -0.5 };
    let position =
        |token: &u32| v1::PositionLogprobs { chosen: Some(one(*token)), top: (33..53).map(one).collect() };
    let logprobs = tokens.iter().map(position).collect();
    v1::SequenceUpdate { logprobs, ..sequence(submit, 0, tokens, reason) }
}

/// Body of the request to [`pause`].
pub const PAUSED: &str = r#"{"prompt":"a","max_tokens":900000,"logprobs":20,"stream":true}"#;

/// Sends pieces of output that the client does not read until the request is paused: it is cancelled at its
/// worker, and not submitted again. Confirms the cancel.
pub async fn pause(http: &mut HttpCluster, submit: &v1::Submit, piece: &[u32]) {
    let mut submit = submit.clone();
    'pile: loop {
        let command = loop {
            http.session.sequence(scored(&submit, piece, v1::FinishReason::Unspecified));
            tokio::task::yield_now().await;
            if let Some(command) = http.session.try_command() {
                break command;
            }
        };
        assert!(matches!(command, Command::Cancel(_)), "{command:?}");
        http.session.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
        while http.cluster.handle.stats().in_flight > 0 {
            tokio::task::yield_now().await;
        }
        // The connection may have taken the output just after the pause.
        for _ in 0..100 {
            tokio::task::yield_now().await;
            match http.session.try_command() {
                None => {}
                Some(Command::Submit(again)) => {
                    submit = again;
                    continue 'pile;
                }
                Some(other) => panic!("{other:?}"),
            }
        }
        return;
    }
}

#[tokio::test]
async fn a_client_that_reads_slowly_is_paused_and_loses_nothing() {
    bounded(async {
        let options = Options { client_buffer_tokens: 512, ..short() };
        let profile = WorkerProfile { context_tokens: 1 << 20, ..WorkerProfile::default() };
        let mut http = HttpCluster::over(profile, options).await;
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let mut stream = socket.connect(http.address).await.unwrap();
        stream.write_all(&raw_post("/v1/completions", PAUSED)).await.unwrap();
        let submit = http.session.submit().await;
        let piece = tokens("0123456789abcdef");
        pause(&mut http, &submit, &piece).await;

        let mut call = Call::over(stream);
        let reader = tokio::spawn(async move {
            assert_eq!(call.head().await.0, 200);
            // Comments come while the worker prepares to go on.
            let body = call.until_comments(3).await;
            (body, call)
        });
        let submit = http.session.submit().await;
        let (body, call) = reader.await.unwrap();
        let before = joined_text(&parse_events(&body));
        let resumed = &submit.resumed[0].token_ids;
        assert!(resumed.len() > 512 && resumed.chunks(piece.len()).all(|tokens| piece.starts_with(tokens)));
        http.session.sequence(scored(&submit, &tokens(" and the rest"), LENGTH));
        let events = call.rest().await;
        assert_eq!(events.last().unwrap().data, "[DONE]");
        let after = joined_text(&events[..events.len() - 1]);
        let expected: String = "0123456789abcdef".chars().cycle().take(before.len()).collect();
        assert!(before == expected, "cut or changed after {} bytes", before.len());
        assert_eq!((before.len(), after.as_str()), (resumed.len(), " and the rest"), "one token is one byte");
    })
    .await;
}

/// Joins the text of a streamed completion with one choice.
fn joined_text(events: &[Event]) -> String {
    events.iter().map(|event| event.json()["choices"][0]["text"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_ended_and_frees_its_place() {
    bounded(async {
        let options = Options {
            client_buffer_tokens: 512,
            streams_max: 1,
            stall_timeout: Duration::from_millis(300),
            ..with_http(HttpOptions::default())
        };
        let profile = WorkerProfile { context_tokens: 1 << 20, ..WorkerProfile::default() };
        let mut http = HttpCluster::over(profile, options).await;
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let mut stream = socket.connect(http.address).await.unwrap();
        let body = r#"{"prompt":"a","max_tokens":900000,"stream":true}"#;
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let submit = http.session.submit().await;
        let (status, error) = http.refused("/v1/completions", r#"{"prompt":"b"}"#).await;
        assert_eq!((status, &error["code"]), (503, &json!("overloaded")), "one stream is open");
        // More than the sockets hold.
        let piece = tokens("stall stall stall ");
        while http.session.try_command().is_none() {
            http.session.tokens(&submit, 0, &piece);
            tokio::task::yield_now().await;
        }
        http.session.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
        let (response, second) = loop {
            let mut response = Box::pin(http.post("/v1/completions", r#"{"prompt":"b"}"#).await.response());
            tokio::select! {
                submit = http.session.submit() => break (response, submit),
                refused = &mut response => assert_eq!(refused.status, 503),
            }
        };
        http.session.finish(&second, 0, &tokens("quick"), LENGTH);
        assert_eq!(response.await.json()["choices"][0]["text"], "quick");
        // What it reads afterwards is cut by a closed connection, or ends with an error.
        let mut rest = Vec::new();
        while !rest.ends_with(b"\r\n0\r\n\r\n") {
            match stream.read_buf(&mut rest).await {
                Ok(0) | Err(_) => break,
                Ok(_) => {}
            }
        }
        assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
    })
    .await;
}

#[tokio::test]
async fn a_drain_finishes_streams_and_accepts_no_call() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        let mut call = http.post("/v1/chat/completions", &format!("{ASK},\"stream\":true}}")).await;
        let submit = http.session.submit().await;
        http.session.tokens(&submit, 0, &tokens("a"));
        assert_eq!(call.head().await.0, 200);
        http.cluster.drain.cancel();
        http.session.finish(&submit, 0, &tokens("b"), LENGTH);
        let mut body = String::new();
        while let Some(chunk) = call.chunk().await {
            body.push_str(&chunk);
        }
        assert!(body.ends_with("data: [DONE]\n\n"), "{body}");
        http.cluster.serving.await.unwrap().unwrap();
        assert!(tokio::net::TcpStream::connect(http.address).await.is_err());
    })
    .await;
}
