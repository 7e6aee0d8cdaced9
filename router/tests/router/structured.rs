//! Structured output: the grammar of each field reaches the worker, also after a failover, and one that does not
//! compile reaches none.

use inflight_proto::v1;
use inflight_proto::v1::constraint::Grammar;
use inflight_router::HttpOptions;
use serde_json::{Value, json};

use crate::cluster::{bounded, tokens};
use crate::http_client::{HttpCluster, with_http};
use inflight_scripted::sequence;

const SCHEMA: &str = r#"{"type":"object","properties":{"a":{"type":"integer"}}}"#;

/// Posts a body, lets the worker end the request, and returns the constraint that it received.
async fn constraint(http: &mut HttpCluster, path: &str, body: &Value) -> Option<v1::Constraint> {
    let call = http.post(path, &body.to_string()).await;
    let submit = http.session.submit().await;
    http.session.finish(&submit, 0, &tokens("a"), v1::FinishReason::Stop);
    assert_eq!(call.response().await.status, 200, "{path} {body}");
    submit.sampling.unwrap().constraint
}

#[tokio::test]
async fn the_grammar_of_each_field_reaches_the_worker() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        let schema: Value = serde_json::from_str(SCHEMA).unwrap();
        let by_schema = Grammar::JsonSchema(SCHEMA.to_owned());
        let named =
            json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true, "schema": schema}});
        let flat = json!({"type": "json_schema", "name": "n", "schema": schema});
        let texts = vec!["yes".to_owned(), "no".to_owned()];
        let choice = Grammar::Choice(v1::ChoiceGrammar { texts });
        let chat = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 9});
        let text = json!({"prompt": "a", "max_tokens": 9});
        let cases = [
            ("/v1/chat/completions", &chat, json!({"response_format": named}), by_schema.clone()),
            ("/v1/chat/completions", &chat, json!({"guided_choice": ["yes", "no"]}), choice),
            ("/v1/completions", &text, json!({"guided_json": schema}), by_schema.clone()),
            (
                "/v1/completions",
                &text,
                json!({"response_format": {"type": "json_object"}}),
                Grammar::JsonObject(v1::JsonObject {}),
            ),
            ("/v1/completions", &text, json!({"guided_regex": "[ab]+"}), Grammar::Regex("[ab]+".to_owned())),
            ("/v1/completions", &text, json!({"structured_outputs": {"json": SCHEMA}}), by_schema.clone()),
            ("/v1/responses", &json!({"input": "a"}), json!({"text": {"format": flat}}), by_schema.clone()),
            ("/v1/messages", &chat, json!({"output_config": {"format": flat}}), by_schema),
        ];
        for (path, body, fields, expected) in cases {
            let mut body = body.clone();
            body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            let found = constraint(&mut http, path, &body).await.and_then(|one| one.grammar);
            assert_eq!(found, Some(expected), "{path} {body}");
        }
        assert_eq!(constraint(&mut http, "/v1/completions", &text).await, None);
    })
    .await;
}

#[tokio::test]
async fn a_grammar_that_does_not_compile_reaches_no_worker_and_names_its_field() {
    bounded(async {
        let http = HttpCluster::start(with_http(HttpOptions::default())).await;
        let format = json!({"type": "json_schema", "schema": {"$ref": "https://example.com/a.json"}});
        let cases = [
            ("/v1/responses", json!({"input": "a", "text": {"format": format}}), "text"),
            ("/v1/completions", json!({"prompt": "a", "guided_regex": "(["}), "guided_regex"),
        ];
        // Twice: compiled, then from the cache.
        for (path, body, field) in cases.iter().chain(&cases) {
            let (status, error) = http.refused(path, &body.to_string()).await;
            assert_eq!((status, &error["param"]), (400, &json!(field)), "{error}");
        }
    })
    .await;
}

#[tokio::test]
async fn the_token_that_completes_a_grammar_is_output_and_a_stop_token_is_not() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        for (path, field, input) in [
            ("/v1/completions", "text", json!({"prompt": "a"})),
            ("/v1/chat/completions", "message", json!({"messages": [{"role": "user", "content": "a"}]})),
        ] {
            for complete in [true, false] {
                // Two tokens: `y` and `es`.
                let mut body = input.clone();
                body.as_object_mut().unwrap().extend(
                    json!({"guided_choice": ["yes", "no"], "max_tokens": 9}).as_object().unwrap().clone(),
                );
                let call = http.post(path, &body.to_string()).await;
                let submit = http.session.submit().await;
                let last = sequence(&submit, 0, &tokens("yes"), v1::FinishReason::Stop);
                http.session.sequence(v1::SequenceUpdate { grammar_complete: complete, ..last });
                let choice = call.response().await.json()["choices"][0].clone();
                let text = if field == "text" { &choice["text"] } else { &choice[field]["content"] };
                let expected = if complete { "yes" } else { "y" };
                assert_eq!((text, &choice["finish_reason"]), (&json!(expected), &json!("stop")), "{path}");
            }
        }
    })
    .await;
}
