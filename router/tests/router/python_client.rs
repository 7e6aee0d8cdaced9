//! The helper for Python clients, client/python, against a scripted worker that fails a stream
//! after its headers.

use std::path::Path;
use std::process::Output;
use std::time::Duration;

use inflight_proto::v1;
use inflight_router::HttpOptions;
use serde_json::Value;
use tonic::Code;

use crate::cluster::{bounded, tokens};
use crate::http_client::{HttpCluster, with_http};

/// Bodies of each endpoint, and the last events of a stream whose failure is final.
const ENDPOINTS: [(&str, &str, &[Option<&str>]); 4] = [
    ("/v1/chat/completions", r#"{"messages":[{"role":"user","content":"a"}],"seed":7}"#, &[None]),
    ("/v1/completions", r#"{"prompt":"a","seed":7}"#, &[None]),
    ("/v1/responses", r#"{"input":"a"}"#, &[Some("error"), Some("response.failed")]),
    ("/v1/messages", r#"{"max_tokens":9,"messages":[{"role":"user","content":"a"}]}"#, &[Some("error")]),
];

/// Name and data of an event.
type Event = (Option<String>, Value);

/// Starts a client.
fn client(
    python: &str,
    http: &HttpCluster,
    (path, body): (&str, &str),
    patience_seconds: &str,
) -> tokio::task::JoinHandle<Output> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients/python/stream_events.py");
    let mut command = tokio::process::Command::new(python);
    let url = format!("http://{}", http.address);
    command.arg(script).args([&url, path, body, patience_seconds]).kill_on_drop(true);
    tokio::spawn(async move {
        let output = tokio::time::timeout(Duration::from_secs(50), command.output()).await;
        output.expect("the client hangs").unwrap()
    })
}

/// Returns the events that a client has read.
fn events_of(output: &Output) -> Vec<Event> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the text of a stream's deltas.
fn text(events: &[Event]) -> String {
    let pointers = ["/choices/0/delta/content", "/choices/0/text", "/delta/text", "/delta"];
    let of = |(_, data): &Event| {
        pointers.iter().find_map(|pointer| data.pointer(pointer).and_then(Value::as_str).map(str::to_owned))
    };
    events.iter().filter_map(of).collect()
}

#[tokio::test]
async fn the_python_client_resumes_after_an_overload_for_a_while_and_yields_a_final_failure() {
    let Ok(python) = std::env::var("INFLIGHT_TEST_PYTHON") else {
        inflight_fixtures::skipped("the Python client", "INFLIGHT_TEST_PYTHON names no Python");
        return;
    };
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        for (path, body, last) in ENDPOINTS {
            let running = client(&python, &http, (path, body), "20");
            let submit = http.session.submit().await;
            http.session.tokens(&submit, 0, &tokens("one "));
            http.session.fail(&submit, 0, Code::ResourceExhausted);
            // The resumed call has the same tokens again, of which only the new ones are sent.
            let submit = http.session.submit().await;
            http.session.tokens(&submit, 0, &tokens("one "));
            http.session.finish(&submit, 0, &tokens("two"), v1::FinishReason::Length);
            let events = events_of(&running.await.unwrap());
            assert_eq!(text(&events), "one two", "{path}: {events:?}");
            assert!(
                !events
                    .iter()
                    .any(|(name, data)| name.as_deref() == Some("error") || data["error"].is_object())
            );

            let running = client(&python, &http, (path, body), "20");
            let submit = http.session.submit().await;
            http.session.tokens(&submit, 0, &tokens("one "));
            http.session.fail(&submit, 0, Code::Internal);
            let events = events_of(&running.await.unwrap());
            assert_eq!(text(&events), "one ", "{path}: {events:?}");
            let names: Vec<_> = events.iter().map(|(name, _)| name.as_deref()).collect();
            assert!(names.ends_with(last), "{path}: {names:?}");
            assert!(events.last().unwrap().1.to_string().contains("scripted"), "{path}: {events:?}");
        }
        // A router that stays overloaded.
        let mut running = client(&python, &http, (ENDPOINTS[0].0, ENDPOINTS[0].1), "0.5");
        let mut attempts = 0;
        let output = loop {
            let submit = tokio::select! {
                output = &mut running => break output.unwrap(),
                submit = http.session.submit() => submit,
            };
            attempts += 1;
            http.session.tokens(&submit, 0, &tokens("one "));
            http.session.fail(&submit, 0, Code::ResourceExhausted);
        };
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains("overloaded"), "{error}");
        assert!((2..100).contains(&attempts), "{attempts} attempts in half a second");
    })
    .await;
}
