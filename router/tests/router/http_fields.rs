//! Fields of request bodies on the wire: what reaches the worker, and null, huge, ignored and nested values of
//! every documented field.

use std::collections::BTreeMap;

use inflight_proto::v1;
use inflight_router::HttpOptions;
use serde_json::{Map, Value, json};

use crate::cluster::{bounded, metrics, tokens};
use crate::http_client::{Call, HttpCluster, with_http};

const LENGTH: v1::FinishReason = v1::FinishReason::Length;

async fn cluster() -> HttpCluster {
    HttpCluster::start(with_http(HttpOptions::default())).await
}

/// Returns a submission without the time that its request was queued.
fn untimed(submit: Option<v1::Submit>) -> Option<v1::Submit> {
    submit.map(|submit| v1::Submit { queued_us: None, ..submit })
}

/// Returns a submission as it should be, with the ids and times of one that was received.
fn expected(received: &v1::Submit, sampling: v1::SamplingParams, stop: v1::StopConditions) -> v1::Submit {
    v1::Submit {
        queued_us: received.queued_us,
        submission_id: received.submission_id,
        attempt: 1,
        request_id: "mine".to_owned(),
        prompt_token_ids: received.prompt_token_ids.clone(),
        resumed: Vec::new(),
        sampling: Some(sampling),
        stop: Some(stop),
        tenant: String::new(),
        weight: 1.0,
        priority: 0,
        deadline_us: None,
        traceparent: received.traceparent.clone(),
        tracestate: received.tracestate.clone(),
        prompt_logprobs_received: 0,
        virtual_start_time: received.virtual_start_time,
        min_waiting_virtual_time: received.min_waiting_virtual_time,
    }
}

/// Posts a body and returns the submission; the client then disconnects.
async fn submitted(http: &mut HttpCluster, path: &str, body: &Value) -> v1::Submit {
    let headers = [("x-request-id", "mine")];
    let call = Call::send(http.address, "POST", path, &headers, body.to_string().as_bytes()).await;
    let submit = http.session.submit().await;
    drop(call);
    http.session.cancel().await;
    for choice in 0..submit.sampling.as_ref().unwrap().n.unwrap() {
        http.session.finish(&submit, choice, &[], v1::FinishReason::Cancelled);
    }
    submit
}

#[tokio::test]
async fn all_sampling_fields_together_reach_the_worker() {
    bounded(async {
        let mut http = cluster().await;
        let fields = json!({
            "model": "tiny", "temperature": 0.5, "top_p": 0.25, "frequency_penalty": 0.75,
            "presence_penalty": -0.5, "logit_bias": {"5": 1.5, "6": -2}, "seed": -7, "n": 2,
            "stop": ["END"], "top_k": 3, "min_p": 0.125, "repetition_penalty": 1.25, "min_tokens": 2,
            "stop_token_ids": [9, 8], "ignore_eos": true, "require_fingerprint": "f1", "best_of": 1,
            "prompt_logprobs": 4, "allowed_token_ids": [5, 6, 7], "bad_words": ["x"],
            "truncate_prompt_tokens": 2, "max_tokens": 11,
        });
        let words = [tokens(" x"), tokens("x")].map(|token_ids| v1::TokenSequence { token_ids });
        let sampling = v1::SamplingParams {
            temperature: Some(0.5),
            top_p: Some(0.25),
            top_k: Some(3),
            min_p: Some(0.125),
            presence_penalty: Some(-0.5),
            frequency_penalty: Some(0.75),
            repetition_penalty: Some(1.25),
            logit_bias: [(5, 1.5), (6, -2.0)].into(),
            logprobs: Some(3),
            seed: Some((-7i64).cast_unsigned()),
            n: Some(2),
            allowed_token_ids: vec![5, 6, 7],
            bad_words: Vec::new(),
            bad_word_token_ids: words.to_vec(),
            prompt_logprobs: Some(4),
            constraint: None,
        };
        let stop = v1::StopConditions {
            max_tokens: Some(11),
            min_tokens: 2,
            stop: Vec::new(),
            stop_token_ids: vec![8, 9],
            ignore_eos: true,
        };
        let own = [
            ("/v1/completions", json!({"prompt": [5, 6, 7], "logprobs": 3})),
            (
                "/v1/chat/completions",
                json!({"messages": [{"role": "user", "content": "hello"}], "logprobs": true, "top_logprobs": 3}),
            ),
        ];
        for (path, own) in own {
            let mut body = fields.clone();
            body.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
            let submit = submitted(&mut http, path, &body).await;
            assert_eq!(submit, expected(&submit, sampling.clone(), stop.clone()), "{path}");
            assert_eq!(submit.prompt_token_ids.len(), 2, "{path}");
            if path == "/v1/completions" {
                assert_eq!(submit.prompt_token_ids, [6, 7]);
            }
        }
    })
    .await;
}

#[tokio::test]
async fn the_sampling_fields_of_responses_and_messages_reach_the_worker() {
    bounded(async {
        let mut http = cluster().await;
        let defaults = |submit: &v1::Submit| v1::SamplingParams {
            temperature: Some(0.5),
            top_p: Some(0.25),
            top_k: Some(0),
            min_p: Some(0.0),
            presence_penalty: Some(0.0),
            frequency_penalty: Some(0.0),
            repetition_penalty: Some(1.0),
            seed: submit.sampling.as_ref().unwrap().seed,
            n: Some(1),
            ..Default::default()
        };
        let stop = v1::StopConditions { max_tokens: Some(11), ..Default::default() };
        let body = json!({
            "model": "tiny", "input": "hello", "temperature": 0.5, "top_p": 0.25, "max_output_tokens": 11,
            "top_logprobs": 3, "include": ["message.output_text.logprobs"],
        });
        let submit = submitted(&mut http, "/v1/responses", &body).await;
        let sampling = v1::SamplingParams { logprobs: Some(3), ..defaults(&submit) };
        assert_eq!(submit, expected(&submit, sampling, stop.clone()));
        let body = json!({
            "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0.5,
            "top_p": 0.25, "max_tokens": 11, "top_k": 3, "stop_sequences": ["END"],
        });
        let submit = submitted(&mut http, "/v1/messages", &body).await;
        let sampling = v1::SamplingParams { top_k: Some(3), ..defaults(&submit) };
        assert_eq!(submit, expected(&submit, sampling, stop));
    })
    .await;
}

/// API with its path and a body that is accepted.
struct Api {
    /// Name in the documentation.
    name: &'static str,
    path: &'static str,
    body: Value,
    generates: bool,
}

fn apis() -> Vec<Api> {
    let messages = json!([{"role": "user", "content": "a"}]);
    let api = |name, path, body, generates| Api { name, path, body, generates };
    vec![
        api("chat completions", "/v1/chat/completions", json!({"messages": messages}), true),
        api("completions", "/v1/completions", json!({"prompt": "a"}), true),
        api("responses", "/v1/responses", json!({"input": "a"}), true),
        api("messages", "/v1/messages", json!({"messages": messages, "max_tokens": 9}), true),
        api("count_tokens", "/v1/messages/count_tokens", json!({"messages": messages}), false),
        api("tokenize", "/tokenize", json!({"prompt": "a"}), false),
        api("detokenize", "/detokenize", json!({"tokens": [5]}), false),
    ]
}

/// Returns the fields of an API with their fates, as documented. A unit test compares the documentation with
/// the code.
pub fn documented(api: &str) -> BTreeMap<String, String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/http-api.md");
    let text = std::fs::read_to_string(path).unwrap();
    let section = text.split(&format!("### Fields of {api}\n")).nth(1).unwrap_or_else(|| panic!("no {api}"));
    let section = section.split("\n#").next().unwrap();
    let row = |line: &str| {
        let mut cells = line.strip_prefix("| `")?.split(" | ");
        Some((cells.next()?.trim_end_matches('`').to_owned(), cells.next()?.to_owned()))
    };
    let fields: BTreeMap<_, _> = section.lines().filter_map(row).collect();
    assert!(fields.values().all(|fate| ["honoured", "ignored", "refused"].contains(&fate.as_str())));
    fields
}

impl Api {
    /// Returns the body with further fields.
    fn with(&self, fields: impl IntoIterator<Item = (String, Value)>) -> Value {
        let mut body: Map<String, Value> = self.body.as_object().unwrap().clone();
        body.extend(fields);
        Value::Object(body)
    }

    /// Posts a body that is accepted. Returns the submission without ids, times and seed.
    async fn accepted(&self, http: &mut HttpCluster, body: &str) -> Option<v1::Submit> {
        let call = http.post(self.path, body).await;
        let submit = if self.generates {
            let mut submit = http.session.submit().await;
            http.session.finish(&submit, 0, &tokens("a"), LENGTH);
            (submit.submission_id, submit.request_id, submit.traceparent) = (0, String::new(), String::new());
            submit.virtual_start_time = None;
            submit.sampling.as_mut().unwrap().seed = None;
            Some(submit)
        } else {
            None
        };
        let response = call.response().await;
        assert_eq!(response.status, 200, "{}: {response:?}", self.name);
        submit
    }
}

#[tokio::test]
async fn null_is_the_same_as_an_absent_field() {
    bounded(async {
        let mut http = cluster().await;
        for api in apis() {
            let fields = documented(api.name);
            let nulls = fields.keys().filter(|name| api.body.get(name.as_str()).is_none());
            let nulls = nulls.map(|name| (name.clone(), Value::Null));
            let plain = api.accepted(&mut http, &api.body.to_string()).await;
            let with_nulls = api.accepted(&mut http, &api.with(nulls).to_string()).await;
            assert_eq!(untimed(with_nulls), untimed(plain), "{}", api.name);
            for name in api.body.as_object().unwrap().keys() {
                let mut absent = api.body.clone();
                absent.as_object_mut().unwrap().remove(name);
                let null = api.with([(name.clone(), Value::Null)]);
                if api.name == "responses" {
                    let submits = [
                        untimed(api.accepted(&mut http, &absent.to_string()).await),
                        untimed(api.accepted(&mut http, &null.to_string()).await),
                    ];
                    assert_eq!(submits[0], submits[1], "{name}");
                    continue;
                }
                let refused = [
                    http.refused(api.path, &absent.to_string()).await,
                    http.refused(api.path, &null.to_string()).await,
                ];
                assert_eq!(refused[0], refused[1], "{} {name}", api.name);
                assert_eq!(refused[0].0, 400, "{} {name}", api.name);
            }
        }
    })
    .await;
}

#[tokio::test]
async fn huge_values_are_refused_by_name_or_ignored() {
    bounded(async {
        let mut http = cluster().await;
        for api in apis() {
            let fields = documented(api.name);
            // More than 64 bits, and more than any number.
            for huge in ["18446744073709551616", "-1e400"] {
                let honoured = fields.iter().filter(|(_, fate)| *fate != "ignored");
                for (name, fate) in honoured {
                    let mut body = api.body.clone();
                    body.as_object_mut().unwrap().remove(name);
                    if (api.name, name.as_str()) == ("tokenize", "messages") {
                        body = json!({});
                    }
                    let rest = body.to_string();
                    let comma = if rest == "{}" { "" } else { "," };
                    let body = format!("{{\"{name}\":{huge}{comma}{}", &rest[1..]);
                    let refused = http.post(api.path, &body).await.response().await;
                    assert_eq!(refused.status, 400, "{} {fate} {name} {huge}: {}", api.name, refused.body);
                    let error = &refused.json()["error"];
                    let message = error["message"].as_str().unwrap();
                    assert!(message.contains(name.as_str()), "{} {name}: {message}", api.name);
                    if !api.path.starts_with("/v1/messages") {
                        assert_eq!(error["param"], json!(name), "{}: {message}", api.name);
                    }
                }
            }
            let ignored = fields.iter().filter(|(_, fate)| *fate == "ignored");
            let long = json!("x".repeat(1 << 10));
            let ignored = ignored.map(|(name, _)| (name.clone(), long.clone()));
            let plain = api.accepted(&mut http, &api.body.to_string()).await;
            let with_ignored = api.accepted(&mut http, &api.with(ignored).to_string()).await;
            assert_eq!(untimed(with_ignored), untimed(plain), "{}", api.name);
        }
        assert!(http.session.try_command().is_none());
    })
    .await;
}

/// Returns the values of the counter of ignored fields by its labels.
fn ignored_counts() -> BTreeMap<String, u64> {
    let rendered = metrics().render();
    let name = "inflight_router_http_ignored_fields_total{";
    let lines = rendered.lines().filter_map(|line| line.strip_prefix(name)?.split_once("} "));
    lines.map(|(labels, count)| (labels.to_owned(), count.parse().unwrap())).collect()
}

#[tokio::test]
async fn every_ignored_field_is_counted() {
    bounded(async {
        let mut http = cluster().await;
        for api in apis() {
            let fields = documented(api.name);
            let mut names: Vec<&str> =
                fields.iter().filter(|(_, fate)| *fate == "ignored").map(|(name, _)| name.as_str()).collect();
            names.push("a_field_of_tomorrow");
            let before = ignored_counts();
            let body = api.with(names.iter().map(|name| ((*name).to_owned(), json!("set"))));
            api.accepted(&mut http, &body.to_string()).await;
            let after = ignored_counts();
            for name in names {
                let name = if name == "a_field_of_tomorrow" { "unknown" } else { name };
                let labels = format!("api=\"{}\",field=\"{name}\"", api.name);
                let count = |counts: &BTreeMap<String, u64>| counts.get(&labels).copied().unwrap_or(0);
                // Other tests of the process may count, too.
                assert!(count(&after) > count(&before), "{labels}");
            }
        }
    })
    .await;
}

#[tokio::test]
async fn deeply_nested_values_are_refused_where_they_are_read_and_skipped_elsewhere() {
    bounded(async {
        let mut http = cluster().await;
        let nested = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
        let objects = format!("{}1{}", "{\"a\":".repeat(100_000), "}".repeat(100_000));
        for api in apis() {
            for nested in [&nested, &objects] {
                for name in api.body.as_object().unwrap().keys() {
                    let body = format!("{{\"{name}\":{nested}}}");
                    let (status, error) = http.refused(api.path, &body).await;
                    assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")), "{name}");
                }
                let body = api.body.to_string();
                let body = format!("{{\"a_field_of_tomorrow\":{nested},{}", &body[1..]);
                api.accepted(&mut http, &body).await;
            }
            let cut = format!("{{\"a_field_of_tomorrow\":{}", "[".repeat(100_000));
            assert_eq!(http.refused(api.path, &cut).await.0, 400, "{}", api.name);
        }
    })
    .await;
}

/// Clients in JavaScript and from YAML write integers as numbers of a whole value.
#[tokio::test]
async fn integers_may_be_written_as_numbers_of_a_whole_value() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        let more = r#""n":1.0,"seed":3.0,"top_k":4e1,"top_p":0,"min_tokens":1.0,"stop_token_ids":[7.0]"#;
        for (path, body) in [
            ("/v1/completions", format!(r#"{{"prompt":[5.0,6],"max_tokens":16.0,{more}}}"#)),
            (
                "/v1/chat/completions",
                format!(r#"{{"messages":[{{"role":"user","content":"a"}}],"max_tokens":16.0,{more}}}"#),
            ),
        ] {
            let call = http.post(path, &body).await;
            let submit = http.session.submit().await;
            let (sampling, stop) = (submit.sampling.clone().unwrap(), submit.stop.clone().unwrap());
            assert_eq!((sampling.seed, sampling.top_k), (Some(3), Some(40)), "{path}");
            assert_eq!((stop.max_tokens, stop.min_tokens), (Some(16), 1), "{path}");
            assert_eq!(stop.stop_token_ids, [7], "{path}");
            if path == "/v1/completions" {
                assert_eq!(submit.prompt_token_ids, [5, 6]);
            }
            http.session.finish(&submit, 0, &tokens("a"), v1::FinishReason::Length);
            assert_eq!(call.response().await.status, 200, "{path}");
        }
        for (field, value) in
            [("max_tokens", "1.5"), ("seed", "1e400"), ("seed", "9007199254740993.0"), ("top_k", "-1.5")]
        {
            let (status, error) =
                http.refused("/v1/completions", &format!(r#"{{"prompt":"a","{field}":{value}}}"#)).await;
            assert_eq!((status, error["param"].as_str()), (400, Some(field)), "{error}");
        }
        let (status, error) = http.refused("/detokenize", r#"{"tokens": [1.0, 2.5]}"#).await;
        assert_eq!((status, error["param"].as_str()), (400, Some("tokens")), "{error}");
    })
    .await;
}
