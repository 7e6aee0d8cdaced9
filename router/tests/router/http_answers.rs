//! Tools together with a format of the answer, and tools of which some are allowed: grammars, outputs and refusals.

use inflight_proto::v1;
use inflight_proto::v1::constraint::Grammar;
use inflight_router::{HttpOptions, Options};
use serde_json::{Value, json};

use crate::cluster::bounded;
use crate::http_client::{HttpCluster, with_http};
use crate::http_tools::{TEMPLATE, profile, tokenizer};

const CALL: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>";
const ANSWER: &str = "{\"y\": 1, \"s\": \"<tool_call>\"}";

fn weather() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": false})
}

fn answer_schema() -> Value {
    json!({"type": "object", "properties": {"y": {"type": "integer"}, "s": {"type": "string"}}, "required": ["y"],
        "additionalProperties": false})
}

async fn cluster(format: &str) -> HttpCluster {
    let options = Options { tool_call_format: format.parse().unwrap(), ..with_http(HttpOptions::default()) };
    HttpCluster::over(profile(TEMPLATE), options).await
}

/// Bodies with two tools and a format of the answer: path, body, and values of the choice: automatic, required, none.
fn bodies(strict: bool, schema: &Value) -> [(&'static str, Value, [Value; 3]); 3] {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let function = |name: &str| json!({"name": name, "parameters": weather(), "strict": strict});
    let nested = ["weather", "forecast"].map(|name| json!({"type": "function", "function": function(name)}));
    let flat = ["weather", "forecast"]
        .map(|name| json!({"type": "function", "name": name, "parameters": weather(), "strict": strict}));
    let tools = ["weather", "forecast"]
        .map(|name| json!({"name": name, "input_schema": weather(), "strict": strict}));
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    let openai = [json!("auto"), json!("required"), json!("none")];
    let anthropic = ["auto", "any", "none"].map(|kind| json!({"type": kind}));
    let plain = json!({"type": "json_schema", "schema": schema});
    [
        (
            "/v1/chat/completions",
            json!({"messages": messages, "tools": nested, "response_format": format}),
            openai.clone(),
        ),
        ("/v1/responses", json!({"input": "hi", "tools": flat, "text": {"format": plain}}), openai),
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 200, "tools": tools, "output_config": {"format": plain}}),
            anthropic,
        ),
    ]
}

/// Lets the worker answer with a text; returns the grammar that it received.
async fn answer(http: &mut HttpCluster, text: &str) -> Option<Grammar> {
    let submit = http.session.submit().await;
    for tokens in tokenizer().encode_rendered(text).unwrap().chunks(3) {
        http.session.tokens(&submit, 0, tokens);
    }
    http.session.finish(&submit, 0, &[282], v1::FinishReason::Stop);
    submit.sampling.unwrap().constraint.and_then(|constraint| constraint.grammar)
}

/// Content and names of calls of a response of any API.
fn parts(path: &str, body: &Value) -> (String, Vec<String>) {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    match path {
        "/v1/chat/completions" => {
            let message = &body["choices"][0]["message"];
            let calls = list(&message["tool_calls"]);
            (text(&message["content"]), calls.iter().map(|call| text(&call["function"]["name"])).collect())
        }
        _ => {
            let items = list(&body[if path == "/v1/messages" { "content" } else { "output" }]);
            let of = |kind: &[&str]| {
                items
                    .iter()
                    .filter(|item| kind.contains(&item["type"].as_str().unwrap()))
                    .cloned()
                    .collect::<Vec<_>>()
            };
            let content = of(&["text", "message"]).into_iter().map(|item| {
                if path == "/v1/messages" { text(&item["text"]) } else { text(&item["content"][0]["text"]) }
            });
            let calls = of(&["tool_use", "function_call"]);
            (content.collect(), calls.iter().map(|call| text(&call["name"])).collect())
        }
    }
}

#[tokio::test]
async fn with_a_format_the_output_is_calls_or_the_answer_by_the_choice_of_tools() {
    bounded(async {
        let mut http = cluster("hermes").await;
        for strict in [false, true] {
            for (path, body, choices) in bodies(strict, &answer_schema()) {
                for (at, choice) in choices.iter().enumerate() {
                    let mut body = body.clone();
                    body["tool_choice"] = choice.clone();
                    let outputs: &[&str] = [&[CALL, ANSWER][..], &[CALL], &[ANSWER]][at];
                    for output in outputs {
                        let place = format!("{path} {choice} {output}");
                        let call = http.post(path, &body.to_string()).await;
                        let grammar = answer(&mut http, output).await;
                        let response = call.response().await;
                        assert_eq!(response.status, 200, "{place}: {}", response.body);
                        let (content, calls) = parts(path, &response.json());
                        let expected = if *output == CALL {
                            (String::new(), vec!["weather".to_owned()])
                        } else {
                            (ANSWER.to_owned(), vec![])
                        };
                        assert_eq!((content, calls), expected, "{place}");
                        match (at, grammar) {
                            (2, grammar) => assert_eq!(
                                grammar,
                                Some(Grammar::JsonSchema(answer_schema().to_string())),
                                "{place}"
                            ),
                            (_, Some(Grammar::Lark(text))) => {
                                assert_eq!(text.contains("answer: %json"), at == 0, "{place}: {text}");
                                assert!(
                                    text.contains("forecast") && !text.contains("TEXT"),
                                    "{place}: {text}"
                                );
                            }
                            other => panic!("{place}: {other:?}"),
                        }
                    }
                }
            }
        }
    })
    .await;
}

#[tokio::test]
async fn answers_that_cannot_be_told_from_strict_calls_and_faulty_schemas_are_refused_by_their_field() {
    bounded(async {
        let mut http = cluster("llama3").await;
        let any = json!({"type": "object"});
        let names = ["response_format", "text", "output_config"];
        for ((path, body, _), field) in bodies(true, &any).into_iter().zip(names) {
            let (status, error) = http.refused(path, &body.to_string()).await;
            let message = error["message"].as_str().unwrap();
            assert!(
                status == 400 && message.contains("look like a call of a strict tool"),
                "{path}: {message}"
            );
            assert!(path == "/v1/messages" || error["param"] == field, "{error}");
        }
        let bare = r#"{"name": "weather", "parameters": {"city": "Bern"}}"#;
        let other = r#"{"name": "weather", "parameters": {"city": "Bern"}, "z": 1}"#;
        for (strict, schema) in [(false, any), (true, answer_schema())] {
            for (path, body, _) in bodies(strict, &schema) {
                for stream in [false, true] {
                    let mut body = body.clone();
                    body["stream"] = json!(stream);
                    let call = http.post(path, &body.to_string()).await;
                    answer(&mut http, bare).await;
                    if stream {
                        let text: String =
                            call.events().await.iter().map(|event| event.data.clone()).collect();
                        assert!(
                            text.contains("\"name\":\"weather\"") && text.contains("Bern"),
                            "{path}: {text}"
                        );
                        continue;
                    }
                    assert_eq!(
                        parts(path, &call.response().await.json()),
                        (String::new(), vec!["weather".to_owned()])
                    );
                    let call = http.post(path, &body.to_string()).await;
                    answer(&mut http, other).await;
                    assert_eq!(
                        parts(path, &call.response().await.json()),
                        (other.to_owned(), vec![]),
                        "{path}"
                    );
                }
            }
        }
        // The field of the faulty part is named, whichever it is.
        let remote = json!({"$ref": "https://example.com/a.json"});
        for ((path, body, _), field) in bodies(false, &remote).into_iter().zip(names).take(2) {
            let (status, error) = http.refused(path, &body.to_string()).await;
            assert_eq!((status, &error["param"]), (400, &json!(field)), "{error}");
        }
        let (path, mut body, _) = bodies(true, &answer_schema())[0].clone();
        body["tools"][0]["function"]["parameters"]["properties"]["city"] = remote;
        let (status, error) = http.refused(path, &body.to_string()).await;
        assert_eq!((status, &error["param"]), (400, &json!("tools")), "{error}");
    })
    .await;
}

#[tokio::test]
async fn a_grammar_that_is_not_json_holds_for_the_whole_output() {
    bounded(async {
        let mut http = cluster("hermes").await;
        let (path, mut body, _) = bodies(false, &answer_schema())[0].clone();
        body.as_object_mut().unwrap().remove("response_format");
        body["guided_choice"] = json!(["yes", "no"]);
        let call = http.post(path, &body.to_string()).await;
        let grammar = answer(&mut http, "yes").await;
        assert!(matches!(grammar, Some(Grammar::Choice(_))), "{grammar:?}");
        assert_eq!(parts(path, &call.response().await.json()), ("yes".to_owned(), vec![]));
        body["tool_choice"] = json!("required");
        let (status, error) = http.refused(path, &body.to_string()).await;
        assert_eq!((status, &error["param"]), (400, &json!("tool_choice")), "{error}");
    })
    .await;
}

#[tokio::test]
async fn only_allowed_tools_are_called_and_all_are_seen() {
    bounded(async {
        let mut http = cluster("hermes").await;
        for (path, mut body, _) in bodies(false, &answer_schema()).into_iter().take(2) {
            body.as_object_mut().unwrap().retain(|key, _| key != "response_format" && key != "text");
            let is_chat = path == "/v1/chat/completions";
            let tool = |name: &str| {
                if is_chat {
                    json!({"type": "function", "function": {"name": name}})
                } else {
                    json!({"type": "function", "name": name})
                }
            };
            let allowed = |mode: &str, names: &[&str]| {
                let tools: Vec<Value> = names.iter().map(|name| tool(name)).collect();
                let allowed = json!({"mode": mode, "tools": tools});
                if is_chat {
                    json!({"type": "allowed_tools", "allowed_tools": allowed})
                } else {
                    json!({"type": "allowed_tools", "mode": mode, "tools": tools})
                }
            };
            for mode in ["auto", "required"] {
                body["tool_choice"] = allowed(mode, &["weather"]);
                let call = http.post(path, &body.to_string()).await;
                let submit = http.session.submit().await;
                let prompt = tokenizer().decode_all(&submit.prompt_token_ids).unwrap();
                assert!(prompt.contains("weather") && prompt.contains("forecast"), "{prompt}");
                http.session.tokens(&submit, 0, &tokenizer().encode_rendered(CALL).unwrap());
                http.session.finish(&submit, 0, &[282], v1::FinishReason::Stop);
                assert_eq!(parts(path, &call.response().await.json()).1, ["weather"]);
                let Some(Grammar::Lark(text)) = submit.sampling.unwrap().constraint.unwrap().grammar else {
                    panic!()
                };
                assert!(text.contains("weather") && !text.contains("forecast"), "{text}");
                assert_eq!(text.contains("TEXT"), mode == "auto", "{text}");
            }
            for wrong in
                [allowed("auto", &[]), allowed("auto", &["gone"]), allowed("sometimes", &["weather"])]
            {
                body["tool_choice"] = wrong;
                let (status, error) = http.refused(path, &body.to_string()).await;
                assert_eq!((status, &error["param"]), (400, &json!("tool_choice")), "{error}");
            }
        }
    })
    .await;
}
