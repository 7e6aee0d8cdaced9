//! Clients that disconnect: their requests are cancelled in every phase.

use http_body_util::BodyExt as _;
use inflight_proto::v1;
use inflight_router::{HttpOptions, Options};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpSocket;
use tonic::codegen::Service as _;
use tonic::codegen::http::Request;

use crate::cluster::{bounded, tokens};
use crate::http_client::{Call, ENDPOINTS, HttpCluster, SHORT, parse_events, raw_post, with_http};
use crate::http_streams::{PAUSED, pause};
use inflight_scripted::WorkerProfile;

const LENGTH: v1::FinishReason = v1::FinishReason::Length;

fn short() -> Options {
    with_http(HttpOptions { keepalive: SHORT, ..HttpOptions::default() })
}

/// Waits until that many requests are queued.
async fn until_waiting(http: &HttpCluster, waiting: usize) {
    while http.cluster.handle.stats().waiting != waiting {
        tokio::task::yield_now().await;
    }
}

/// Waits until no call is open and nothing is charged to the worker's grant.
async fn until_idle(http: &HttpCluster) {
    while http.cluster.handle.stats() != inflight_router::RouterStats::default() {
        tokio::task::yield_now().await;
    }
}

/// Expects the request to be cancelled at its worker, which confirms it.
async fn expect_cancel(http: &mut HttpCluster, submit: &v1::Submit) {
    assert_eq!(http.session.cancel().await.submission_id, submit.submission_id);
    http.session.finish(submit, 0, &[], v1::FinishReason::Cancelled);
}

#[tokio::test]
async fn a_queued_stream_is_cancelled_before_and_after_its_first_comment() {
    bounded(async {
        for options in [with_http(HttpOptions::default()), short()] {
            let has_comments = options.http.keepalive == SHORT;
            let mut http = HttpCluster::ungranted(WorkerProfile::default(), options).await;
            for (path, ask) in ENDPOINTS {
                let mut call = http.post(path, &format!("{ask},\"stream\":true}}")).await;
                until_waiting(&http, 1).await;
                if has_comments {
                    assert_eq!(call.head().await.0, 200);
                    call.until_comments(1).await;
                }
                drop(call);
                until_idle(&http).await;
            }
            // The next submission is of the only request that is left.
            let _call = http.post("/v1/completions", r#"{"prompt":"last"}"#).await;
            http.session.grant(64, 1 << 16);
            assert_eq!(http.session.submit().await.prompt_token_ids[1..], tokens("last"));
        }
    })
    .await;
}

#[tokio::test]
async fn a_stream_in_prefill_is_cancelled_after_its_first_comment() {
    bounded(async {
        let mut http = HttpCluster::start(short()).await;
        for (path, ask) in ENDPOINTS {
            let mut call = http.post(path, &format!("{ask},\"stream\":true}}")).await;
            let submit = http.session.submit().await;
            assert_eq!(call.head().await.0, 200);
            call.until_comments(1).await;
            drop(call);
            expect_cancel(&mut http, &submit).await;
            until_idle(&http).await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_paused_stream_is_cancelled() {
    bounded(async {
        let options = Options { client_buffer_tokens: 512, ..with_http(HttpOptions::default()) };
        let profile = WorkerProfile { context_tokens: 1 << 20, ..WorkerProfile::default() };
        let mut http = HttpCluster::over(profile, options).await;
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let mut stream = socket.connect(http.address).await.unwrap();
        stream.write_all(&raw_post("/v1/completions", PAUSED)).await.unwrap();
        let submit = http.session.submit().await;
        pause(&mut http, &submit, &tokens("paused ")).await;
        assert_eq!(http.cluster.handle.stats().open, 1, "the call is paused, not ended");
        drop(stream);
        until_idle(&http).await;
        assert!(http.session.try_command().is_none(), "it is not resumed");
    })
    .await;
}

#[tokio::test]
async fn the_replay_of_a_resumed_stream_is_cancelled() {
    bounded(async {
        let mut http = HttpCluster::start(short()).await;
        for (path, ask) in ENDPOINTS {
            let body = format!("{ask},\"stream\":true}}");
            let mut call = http.post(path, &body).await;
            let submit = http.session.submit().await;
            http.session.tokens(&submit, 0, &tokens("abc"));
            assert_eq!(call.head().await.0, 200);
            let received = parse_events(&call.until_comments(1).await);
            drop(call);
            expect_cancel(&mut http, &submit).await;

            let cursor = received.last().unwrap().id.clone().unwrap();
            let headers = [("last-event-id", cursor.as_str())];
            let mut call = Call::send(http.address, "POST", path, &headers, body.as_bytes()).await;
            let submit = http.session.submit().await;
            http.session.tokens(&submit, 0, &tokens("ab"));
            assert_eq!(call.head().await.0, 200);
            assert_eq!(call.until_comments(1).await, "", "{path}: a replay has comments only");
            drop(call);
            expect_cancel(&mut http, &submit).await;
            until_idle(&http).await;
        }
    })
    .await;
}

#[tokio::test]
async fn every_prompt_of_a_call_is_cancelled() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        for stream in [false, true] {
            let body = format!(r#"{{"prompt":["a","b","c"],"n":2,"stream":{stream}}}"#);
            let mut call = http.post("/v1/completions", &body).await;
            let mut submits = Vec::new();
            for _ in 0..3 {
                submits.push(http.session.submit().await);
            }
            // One has ended, one generates, one is in prefill.
            for choice in 0..2 {
                http.session.finish(&submits[0], choice, &tokens("x"), LENGTH);
            }
            http.session.tokens(&submits[1], 0, &tokens("y"));
            if stream {
                assert_eq!(call.head().await.0, 200);
                call.chunk().await.unwrap();
            }
            while http.cluster.handle.stats().sequences > 4 {
                tokio::task::yield_now().await;
            }
            drop(call);
            let mut cancelled = [http.session.cancel().await, http.session.cancel().await];
            cancelled.sort_by_key(|cancel| cancel.submission_id);
            for (cancel, submit) in cancelled.iter().zip(&submits[1..]) {
                assert_eq!(cancel.submission_id, submit.submission_id);
                for choice in 0..2 {
                    http.session.finish(submit, choice, &[], v1::FinishReason::Cancelled);
                }
            }
            until_idle(&http).await;
            assert!(http.session.try_command().is_none());
        }
    })
    .await;
}

#[tokio::test]
async fn a_reset_stream_of_http2_is_cancelled_and_its_neighbour_goes_on() {
    bounded(async {
        let mut http = HttpCluster::start(short()).await;
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", http.address)).unwrap();
        let channel = endpoint.connect().await.unwrap();
        let call = |path: &str, body: String| {
            let mut channel = channel.clone();
            let body = tonic::body::Body::new(http_body_util::Full::new(bytes::Bytes::from(body)));
            let request = Request::post(path).body(body).unwrap();
            tokio::spawn(async move {
                std::future::poll_fn(|context| channel.poll_ready(context)).await.unwrap();
                channel.call(request).await.unwrap()
            })
        };
        let neighbour = call("/v1/completions", r#"{"prompt":"n","stream":true}"#.to_owned());
        let kept = http.session.submit().await;
        for (path, ask) in ENDPOINTS {
            for stream in [false, true] {
                let task = call(path, format!("{ask},\"stream\":{stream}}}"));
                let submit = http.session.submit().await;
                if stream {
                    // Headers and a comment or an event have arrived.
                    let mut response = task.await.unwrap();
                    response.body_mut().frame().await.unwrap().unwrap();
                    drop(response);
                } else {
                    task.abort();
                }
                expect_cancel(&mut http, &submit).await;
            }
        }
        http.session.finish(&kept, 0, &tokens("kept"), LENGTH);
        let body = neighbour.await.unwrap().into_body().collect().await.unwrap().to_bytes();
        let events = parse_events(std::str::from_utf8(&body).unwrap());
        assert_eq!(events.last().unwrap().data, "[DONE]");
        assert_eq!(events[0].json()["choices"][0]["text"], "kept");
    })
    .await;
}
