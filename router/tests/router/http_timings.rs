//! Timings and usage in responses of the HTTP APIs: which event of a stream has them.

use inflight_proto::v1;
use inflight_router::HttpOptions;
use serde_json::{Value, json};

use crate::cluster::{bounded, tokens};
use crate::http_client::{Event, HttpCluster, with_http};

const LENGTH: v1::FinishReason = v1::FinishReason::Length;

/// Bodies of two choices, where the API has them.
const ENDPOINTS: [(&str, &str); 4] = [
    ("/v1/chat/completions", r#"{"messages":[{"role":"user","content":"a"}],"n":2"#),
    ("/v1/completions", r#"{"prompt":"a","n":2"#),
    ("/v1/responses", r#"{"input":"a""#),
    ("/v1/messages", r#"{"max_tokens":9,"messages":[{"role":"user","content":"a"}]"#),
];

/// Returns every `timings` in a value.
fn timings(value: &Value) -> Vec<Value> {
    match value {
        Value::Object(entries) => entries
            .iter()
            .flat_map(|(key, value)| if key == "timings" { vec![value.clone()] } else { timings(value) })
            .collect(),
        Value::Array(values) => values.iter().flat_map(timings).collect(),
        _ => Vec::new(),
    }
}

fn check(timings: &Value) {
    let of = |key: &str| timings[key].as_f64().unwrap_or_else(|| panic!("{key}: {timings}"));
    let (queue, first) = (of("queue_seconds"), of("time_to_first_token_seconds"));
    assert!(queue >= 0.0 && first >= queue && of("time_per_output_token_seconds") >= 0.0, "{timings}");
    assert!(of("total_seconds") >= first && of("total_seconds") < 60.0, "{timings}");
    assert_eq!(timings.as_object().unwrap().len(), 4);
}

/// Runs a streamed call; each choice gets two tokens.
async fn stream(http: &mut HttpCluster, path: &str, body: &str) -> Vec<Event> {
    let call = http.post(path, body).await;
    let submit = http.session.submit().await;
    let choices = submit.sampling.as_ref().unwrap().n.unwrap();
    for choice in 0..choices {
        http.session.tokens(&submit, choice, &tokens("a"));
    }
    for choice in (0..choices).rev() {
        http.session.finish(&submit, choice, &tokens("b"), LENGTH);
    }
    call.events().await.into_iter().filter(|event| event.data != "[DONE]").collect()
}

#[tokio::test]
async fn timings_are_once_in_each_response_and_in_the_documented_event_of_each_stream() {
    bounded(async {
        let options = with_http(HttpOptions { timings: true, ..HttpOptions::default() });
        let mut http = HttpCluster::start(options).await;
        for (path, ask) in ENDPOINTS {
            let call = http.post(path, &format!("{ask}}}")).await;
            let submit = http.session.submit().await;
            for choice in 0..submit.sampling.as_ref().unwrap().n.unwrap() {
                http.session.finish(&submit, choice, &tokens("ab"), LENGTH);
            }
            let found = timings(&call.response().await.json());
            assert_eq!(found.len(), 1, "{path}");
            check(&found[0]);

            let events = stream(&mut http, path, &format!("{ask},\"stream\":true}}")).await;
            let with: Vec<_> = events.iter().filter(|event| !timings(&event.json()).is_empty()).collect();
            assert_eq!(with.len(), 1, "{path}");
            let (event, value) = (with[0], with[0].json());
            check(&timings(&value)[0]);
            match path {
                "/v1/messages" => assert_eq!(event.name.as_deref(), Some("message_delta")),
                "/v1/responses" => assert_eq!(event.name.as_deref(), Some("response.incomplete")),
                _ => {
                    assert_eq!(Some(event), events.last(), "{path}");
                    assert_eq!(value["choices"][0]["finish_reason"], "length", "{path}");
                    assert!(
                        events.iter().all(|event| event.json()["choices"][0]["index"].is_u64()),
                        "{path}"
                    );
                    assert_eq!(events.iter().filter(|event| event.data.contains("\"length\"")).count(), 2);
                }
            }
        }
        // With the usage at the end, the timings are beside it.
        for (path, ask) in &ENDPOINTS[..2] {
            let body = format!("{ask},\"stream\":true,\"stream_options\":{{\"include_usage\":true}}}}");
            let events = stream(&mut http, path, &body).await;
            let with: Vec<_> = events.iter().filter(|event| !timings(&event.json()).is_empty()).collect();
            assert_eq!((with.len(), Some(with[0])), (1, events.last()), "{path}");
            assert_eq!(with[0].json()["choices"], json!([]), "{path}");
            assert_eq!(with[0].json()["usage"]["completion_tokens"], 4, "{path}");
        }
    })
    .await;
}

#[tokio::test]
async fn timings_of_several_prompts_follow_the_last_of_them() {
    bounded(async {
        let options = with_http(HttpOptions { timings: true, ..HttpOptions::default() });
        let mut http = HttpCluster::start(options).await;
        let call = http.post("/v1/completions", r#"{"prompt":["a","b"],"stream":true}"#).await;
        let (first, second) = (http.session.submit().await, http.session.submit().await);
        http.session.finish(&second, 0, &tokens("2"), LENGTH);
        http.session.finish(&first, 0, &tokens("1"), LENGTH);
        let events = call.events().await;
        let events: Vec<Value> = events[..events.len() - 1].iter().map(Event::json).collect();
        let ended: Vec<_> =
            events.iter().filter(|event| event["choices"][0]["finish_reason"] == "length").collect();
        assert_eq!(ended.len(), 2);
        let with: Vec<_> = events.iter().filter(|event| !timings(event).is_empty()).collect();
        assert_eq!((with.len(), Some(with[0])), (1, events.last()));
        check(&timings(with[0])[0]);
        assert_eq!(with[0]["choices"][0]["finish_reason"], "length");
    })
    .await;
}

#[tokio::test]
async fn continuous_usage_is_in_every_chunk_and_adds_none() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        for (path, ask) in &ENDPOINTS[..2] {
            for include_usage in [false, true] {
                let body = format!(
                    "{ask},\"stream\":true,\"stream_options\":{{\"continuous_usage_stats\":true,\"include_usage\":{include_usage}}}}}"
                );
                let events = stream(&mut http, path, &body).await;
                let counts: Vec<u64> = events
                    .iter()
                    .map(|event| event.json()["usage"]["completion_tokens"].as_u64().unwrap())
                    .collect();
                assert!(counts.is_sorted() && counts.last() == Some(&4), "{path}: {counts:?}");
                let without = events.iter().filter(|event| event.json()["choices"] == json!([])).count();
                assert_eq!(without, usize::from(include_usage), "{path}: chunks without choices");
            }
        }
    })
    .await;
}
