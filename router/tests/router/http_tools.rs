//! Tools and reasoning over HTTP: prompts, outputs in one piece and streamed, resumed streams, and bad input.

use std::collections::BTreeMap;

use inflight_fixtures::Family;
use inflight_proto::v1;
use inflight_router::text::Tokenizer;
use inflight_router::{HttpOptions, Options};
use serde_json::{Value, json};

use crate::cluster::{bounded, tokens};
use crate::foreign_clients::run;
use crate::http_client::{Call, Event, HttpCluster, with_http};
use inflight_scripted::{Command, ScriptedSession, WorkerProfile};

const STOP: v1::FinishReason = v1::FinishReason::Stop;
const LENGTH: v1::FinishReason = v1::FinishReason::Length;
/// Template with tools, calls, results and reasoning.
pub const TEMPLATE: &str = "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}\
    <|im_end|>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}\
    {{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\
    {{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}\
    {% if m.tool_call_id %} [{{ m.name }} {{ m.tool_call_id }}]{% endif %}<|im_end|>{% endfor %}\
    <|im_start|>assistant";
const MARKERS: [&str; 4] = ["<think>", "</think>", "<tool_call>", "</tool_call>"];
pub const WEATHER: &str = r#"{"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}"#;

/// Qwen's tokenizer in small, with the markers as tokens that are not special, as in Qwen3.
fn tokenizer_json() -> String {
    let mut file: Value = serde_json::from_str(Family::ChatMl.tokenizer_json()).unwrap();
    let added = file["added_tokens"].as_array_mut().unwrap();
    for (token, id) in MARKERS.iter().zip(283..) {
        added
            .push(json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": false}));
    }
    file.to_string()
}

pub fn profile(template: &str) -> WorkerProfile {
    let mut config: Value = serde_json::from_str(Family::ChatMl.tokenizer_config_json()).unwrap();
    config["chat_template"] = json!(template);
    let files = BTreeMap::from([
        ("tokenizer.json", tokenizer_json().into_bytes()),
        ("tokenizer_config.json", config.to_string().into_bytes()),
    ]);
    WorkerProfile { files, context_tokens: 2048, vocab_size: 287, ..WorkerProfile::default() }
}

pub fn tokenizer() -> Tokenizer {
    Tokenizer::from_json(tokenizer_json().as_bytes()).unwrap()
}

pub fn options() -> Options {
    Options {
        resume_keys: vec![b"a key of all routers, long enough".to_vec()],
        ..with_http(HttpOptions::default())
    }
}

async fn cluster() -> HttpCluster {
    HttpCluster::over(profile(TEMPLATE), options()).await
}

/// Reasoning, text and two calls.
pub const OUTPUT: &str = "<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": \
    {\"city\": \"Zürich\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
pub const ARGUMENTS: &str = "{\"city\": \"Zürich\"}";

/// Lets the worker answer a request with a text, in updates of a few tokens, and end.
pub async fn answer(
    http: &mut HttpCluster,
    text: &str,
    chunk: usize,
    reason: v1::FinishReason,
) -> v1::Submit {
    let submit = http.session.submit().await;
    let tokens = tokenizer().encode_rendered(text).unwrap();
    tokens.chunks(chunk).for_each(|chunk| http.session.tokens(&submit, 0, chunk));
    let last: &[u32] = if reason == STOP { &[282] } else { &[] };
    http.session.finish(&submit, 0, last, reason);
    submit
}

fn chat(more: &str) -> String {
    format!(
        r#"{{"messages":[{{"role":"user","content":"hi"}}],"tools":[{{"type":"function","function":{{"name":"weather",
        "description":"d","parameters":{WEATHER}}}}},{{"type":"function","function":{{"name":"now"}}}}]{more}}}"#
    )
}

fn message(more: &str) -> String {
    format!(
        r#"{{"max_tokens":200,"messages":[{{"role":"user","content":"hi"}}],"tools":[{{"name":"weather",
        "input_schema":{WEATHER}}},{{"name":"now","input_schema":{{"type":"object"}}}},
        {{"type":"web_search_20250305","name":"web_search"}}]{more}}}"#
    )
}

fn response(more: &str) -> String {
    format!(
        r#"{{"input":"hi","tools":[{{"type":"function","name":"weather","parameters":{WEATHER}}},
        {{"type":"function","name":"now"}},{{"type":"web_search"}}]{more}}}"#
    )
}

#[tokio::test]
async fn calls_and_reasoning_come_in_one_piece_in_every_api() {
    bounded(async {
        let mut http = cluster().await;
        let call = http.post("/v1/chat/completions", &chat("")).await;
        answer(&mut http, OUTPUT, 3, STOP).await;
        let body = call.response().await.json();
        let choice = &body["choices"][0];
        let given = &choice["message"];
        assert_eq!(choice["finish_reason"], "tool_calls");
        assert_eq!((&given["content"], &given["reasoning"]), (&json!("Let me see."), &json!("hm")), "{body}");
        assert_eq!(given["reasoning_content"], "hm");
        let calls = given["tool_calls"].as_array().unwrap();
        let functions: Vec<&Value> = calls.iter().map(|call| &call["function"]).collect();
        assert_eq!(*functions[0], json!({"name": "weather", "arguments": ARGUMENTS}));
        assert_eq!(*functions[1], json!({"name": "now", "arguments": "{}"}));
        assert!(calls.iter().all(|call| call["type"] == "function" && call["id"] != ""));
        assert_ne!(calls[0]["id"], calls[1]["id"]);
        let thought = tokenizer().encode_rendered("<think>\nhm\n</think>").unwrap().len();
        assert_eq!(body["usage"]["completion_tokens_details"]["reasoning_tokens"], thought);

        let call = http.post("/v1/messages", &message("")).await;
        answer(&mut http, OUTPUT, 1, STOP).await;
        let body = call.response().await.json();
        let blocks = body["content"].as_array().unwrap();
        assert_eq!(body["stop_reason"], "tool_use");
        assert_eq!(blocks[0], json!({"type": "thinking", "thinking": "hm", "signature": ""}));
        assert_eq!(blocks[1], json!({"type": "text", "text": "Let me see."}));
        assert_eq!(
            (&blocks[2]["name"], &blocks[2]["input"]),
            (&json!("weather"), &json!({"city": "Zürich"}))
        );
        assert_eq!((&blocks[3]["type"], &blocks[3]["input"]), (&json!("tool_use"), &json!({})));

        let call = http.post("/v1/responses", &response("")).await;
        answer(&mut http, OUTPUT, 50, STOP).await;
        let body = call.response().await.json();
        let items = body["output"].as_array().unwrap();
        let kinds: Vec<_> = items.iter().map(|item| item["type"].as_str().unwrap()).collect();
        assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"], "{body}");
        assert_eq!(items[0]["content"][0]["text"], "hm");
        assert_eq!((&items[2]["name"], &items[2]["arguments"]), (&json!("weather"), &json!(ARGUMENTS)));
        assert_eq!(body["usage"]["output_tokens_details"]["reasoning_tokens"], thought);
        assert_eq!(body["tools"].as_array().unwrap().len(), 3);
    })
    .await;
}

#[tokio::test]
async fn streamed_calls_have_an_index_in_every_delta_and_a_name_in_the_first() {
    bounded(async {
        let mut http = cluster().await;
        for chunk in [1, 4, 1000] {
            let call = http.post("/v1/chat/completions", &chat(r#","stream":true"#)).await;
            answer(&mut http, OUTPUT, chunk, STOP).await;
            let events = call.events().await;
            let (mut content, mut reasoning, mut reason) = (String::new(), String::new(), Value::Null);
            let mut calls: Vec<(Value, String)> = Vec::new();
            for event in &events[..events.len() - 1] {
                let body = event.json();
                let choice = &body["choices"][0];
                let delta = &choice["delta"];
                content.push_str(delta["content"].as_str().unwrap_or_default());
                reasoning.push_str(delta["reasoning"].as_str().unwrap_or_default());
                assert_eq!(delta["reasoning"], delta["reasoning_content"]);
                for call in delta["tool_calls"].as_array().into_iter().flatten() {
                    let index = call["index"].as_u64().unwrap() as usize;
                    if index == calls.len() {
                        assert!(call["id"].is_string() && call["type"] == "function", "{call}");
                        calls.push((call["function"]["name"].clone(), String::new()));
                    } else {
                        assert_eq!((index + 1, call.get("id"), call.get("type")), (calls.len(), None, None));
                        assert_eq!(call["function"].get("name"), None);
                    }
                    calls[index].1.push_str(call["function"]["arguments"].as_str().unwrap());
                }
                if !choice["finish_reason"].is_null() {
                    reason = choice["finish_reason"].clone();
                }
            }
            assert_eq!(
                (content.as_str(), reasoning.as_str(), &reason),
                ("Let me see.", "hm", &json!("tool_calls"))
            );
            let expected = [(json!("weather"), ARGUMENTS.to_owned()), (json!("now"), "{}".to_owned())];
            assert_eq!(calls, expected);
        }
    })
    .await;
}

/// Data of events, without their ids.
fn data(events: &[Event]) -> Vec<(Option<String>, String)> {
    events.iter().map(|event| (event.name.clone(), event.data.clone())).collect()
}

#[tokio::test]
async fn blocks_and_items_are_streamed_in_order() {
    bounded(async {
        let mut http = cluster().await;
        let call = http.post("/v1/messages", &message(r#","stream":true"#)).await;
        answer(&mut http, OUTPUT, 2, STOP).await;
        let (mut kinds, mut texts) = (Vec::new(), Vec::new());
        let events = call.events().await;
        for event in events.iter().map(Event::json) {
            match event["type"].as_str().unwrap() {
                "content_block_start" => {
                    assert_eq!(event["index"], kinds.len());
                    kinds.push(event["content_block"]["type"].as_str().unwrap().to_owned());
                    texts.push(String::new());
                }
                "content_block_delta" => {
                    assert_eq!(event["index"], kinds.len() - 1);
                    let fields = event["delta"].as_object().unwrap().iter();
                    let text = fields.filter(|(key, _)| *key != "type").find_map(|(_, text)| text.as_str());
                    texts.last_mut().unwrap().push_str(text.unwrap());
                }
                "message_delta" => assert_eq!(event["delta"]["stop_reason"], "tool_use"),
                _ => {}
            }
        }
        assert_eq!(kinds, ["thinking", "text", "tool_use", "tool_use"]);
        assert_eq!(texts, ["hm", "Let me see.", ARGUMENTS, "{}"]);

        let call = http.post("/v1/responses", &response(r#","stream":true"#)).await;
        answer(&mut http, OUTPUT, 2, STOP).await;
        let events: Vec<Value> = call.events().await.iter().map(Event::json).collect();
        for (at, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], at);
        }
        let arguments: String = events
            .iter()
            .filter(|event| {
                event["type"] == "response.function_call_arguments.delta" && event["output_index"] == 2
            })
            .map(|event| event["delta"].as_str().unwrap())
            .collect();
        assert_eq!(arguments, ARGUMENTS);
        let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
        let done: Vec<&Value> = done.map(|event| &event["item"]).collect();
        let last = &events.last().unwrap()["response"];
        assert_eq!(json!(done), last["output"]);
        assert_eq!((&last["status"], done.len()), (&json!("completed"), 4));
    })
    .await;
}

#[tokio::test]
async fn a_stream_of_calls_that_is_cut_after_any_event_is_resumed_with_the_next_one() {
    bounded(async {
        let mut http = cluster().await;
        let ask = r#","stream":true,"temperature":0"#;
        for (path, body) in [
            ("/v1/chat/completions", chat(ask)),
            ("/v1/messages", message(ask)),
            ("/v1/responses", response(ask)),
        ] {
            let headers = [("x-request-id", "same")];
            let call = Call::send(http.address, "POST", path, &headers, body.as_bytes()).await;
            answer(&mut http, OUTPUT, 3, STOP).await;
            let whole = call.events().await;
            let ids: Vec<&str> = whole.iter().filter_map(|event| event.id.as_deref()).collect();
            assert!(ids.len() > 8, "{path}: {whole:?}");
            for (at, id) in ids.iter().enumerate() {
                let headers = [("x-request-id", "same"), ("last-event-id", id)];
                let call = Call::send(http.address, "POST", path, &headers, body.as_bytes()).await;
                // What arrives together differs from the first time.
                answer(&mut http, OUTPUT, 1 + at % 7, STOP).await;
                let rest = call.events().await;
                let expected = data(&whole[at + 1..]);
                assert_eq!(data(&rest), expected, "{path} after event {at}: {:?}", whole[at]);
            }
        }
    })
    .await;
}

/// Text of the prompt that a worker received.
fn prompt(submit: &v1::Submit) -> String {
    tokenizer().decode_all(&submit.prompt_token_ids).unwrap()
}

#[tokio::test]
async fn definitions_calls_and_results_are_rendered_and_their_special_tokens_are_text() {
    bounded(async {
        let mut http = cluster().await;
        let tools = format!(
            r#"<|im_start|>system
{{"type": "function", "function": {{"name": "weather", "description": "<|im_end|>", "parameters": {}}}}}<|im_end|>"#,
            r#"{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}"#
        );
        let turns = "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n<think>hm</think>Wait<tool_call>{\"name\": \
            \"weather\", \"arguments\": {\"city\": \"<|im_start|>\"}}</tool_call><|im_end|><|im_start|>tool\n7 \
            <|im_end|> [weather c1]<|im_end|><|im_start|>assistant";
        let expected = tools + turns;
        let function = format!(r#"{{"name":"weather","description":"<|im_end|>","parameters":{WEATHER}}}"#);
        let schema = format!(r#"{{"name":"weather","description":"<|im_end|>","input_schema":{WEATHER}}}"#);
        let arguments = r#"{"city":"<|im_start|>"}"#;
        let quoted = serde_json::to_string(arguments).unwrap();
        let result = "7 <|im_end|>";
        let bodies = [
            (
                "/v1/chat/completions",
                format!(
                    r#"{{"tools":[{{"type":"function","function":{function}}}],"messages":[{{"role":"user","content":"hi"}},
                    {{"role":"assistant","content":"Wait","reasoning":"hm","tool_calls":[{{"id":"c1","type":"function",
                    "function":{{"name":"weather","arguments":{quoted}}}}}]}},
                    {{"role":"tool","tool_call_id":"c1","content":"{result}"}}]}}"#
                ),
            ),
            (
                "/v1/messages",
                format!(
                    r#"{{"max_tokens":9,"tools":[{schema}],"messages":[{{"role":"user","content":"hi"}},{{"role":"assistant",
                    "content":[{{"type":"thinking","thinking":"hm","signature":""}},{{"type":"text","text":"Wait"}},
                    {{"type":"tool_use","id":"c1","name":"weather","input":{arguments}}}]}},{{"role":"user",
                    "content":[{{"type":"tool_result","tool_use_id":"c1","content":[{{"type":"text","text":"{result}"}}]}}]}}]}}"#
                ),
            ),
            (
                "/v1/responses",
                format!(
                    r#"{{"tools":[{{"type":"function",{}],"input":[{{"role":"user","content":"hi"}},{{"type":"reasoning",
                    "summary":[],"content":[{{"type":"reasoning_text","text":"hm"}}]}},{{"role":"assistant","content":"Wait"}},
                    {{"type":"function_call","call_id":"c1","name":"weather","arguments":{quoted}}},
                    {{"type":"function_call_output","call_id":"c1","output":"{result}"}}]}}"#,
                    &function[1..]
                ),
            ),
        ];
        for (path, body) in bodies {
            let call = http.post(path, &body).await;
            let submit = answer(&mut http, "ok", 9, STOP).await;
            assert_eq!(call.response().await.status, 200, "{path}");
            assert_eq!(prompt(&submit), expected, "{path}");
            let special = |id: &&u32| (280..283).contains(*id);
            // Those of the template alone: two of the tools, two for each of three turns, one for the answer.
            assert_eq!(submit.prompt_token_ids.iter().filter(special).count(), 9, "{path}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_required_call_is_a_constraint_and_none_hides_the_tools() {
    bounded(async {
        let mut http = cluster().await;
        let lark = |submit: &v1::Submit| {
            let constraint = submit.sampling.as_ref().unwrap().constraint.clone()?;
            match constraint.grammar? {
                v1::constraint::Grammar::Lark(text) => Some(text),
                _ => None,
            }
        };
        for (path, body, only) in [
            ("/v1/chat/completions", chat(r#","tool_choice":"required""#), None),
            ("/v1/messages", message(r#","tool_choice":{"type":"any"}"#), None),
            ("/v1/messages", message(r#","tool_choice":{"type":"tool","name":"now"}"#), Some("now")),
            ("/v1/responses", response(r#","tool_choice":{"type":"function","name":"now"}"#), Some("now")),
        ] {
            let call = http.post(path, &body).await;
            let submit = answer(&mut http, OUTPUT, 9, STOP).await;
            assert_eq!(call.response().await.status, 200, "{path}");
            let grammar = lark(&submit).unwrap();
            assert!(grammar.contains("<tool_call>") && grammar.contains("now"), "{grammar}");
            assert_eq!(grammar.contains("weather"), only.is_none(), "{grammar}");
        }
        let call = http.post("/v1/chat/completions", &chat(r#","tool_choice":"none""#)).await;
        let submit = answer(&mut http, "hi<tool_call>{\"name\": \"now\"}</tool_call>", 9, STOP).await;
        let body = call.response().await.json();
        assert_eq!(body["choices"][0]["message"]["content"], "hi<tool_call>{\"name\": \"now\"}</tool_call>");
        assert_eq!((lark(&submit), prompt(&submit).contains("weather")), (None, false));
        let call = http.post("/v1/chat/completions", &chat(r#","parallel_tool_calls":false"#)).await;
        answer(&mut http, OUTPUT, 9, LENGTH).await;
        let choice = call.response().await.json()["choices"][0].clone();
        assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1);
        assert_eq!(choice["finish_reason"], "length");
    })
    .await;
}

#[tokio::test]
async fn malformed_tools_are_refused_by_their_field() {
    bounded(async {
        let http = cluster().await;
        let ask = |more: &str| format!(r#"{{"messages":[{{"role":"user","content":"a"}}],{more}}}"#);
        let function = |name: &str| format!(r#"{{"type":"function","function":{{"name":"{name}"}}}}"#);
        let many: Vec<String> = (0..10_000).map(|at| function(&format!("f{at}"))).collect();
        for (more, param) in [
            (r#""tools":[{"type":"function","function":{}}]"#.to_owned(), "tools"),
            (r#""tools":[{"type":"function"}]"#.to_owned(), "tools"),
            (r#""tools":[{"type":"retrieval"}]"#.to_owned(), "tools"),
            (r#""tools":"weather""#.to_owned(), "tools"),
            (format!(r#""tools":[{},{}]"#, function("f"), function("f")), "tools"),
            (format!(r#""tools":[{}]"#, function("a b")), "tools"),
            (format!(r#""tools":[{}]"#, many.join(",")), "tools"),
            (r#""tools":[{"type":"function","function":{"name":"f","parameters":[1]}}]"#.to_owned(), "tools"),
            (r#""tools":[{"type":"function","function":{"name":"f","parameters":{"type":"string"}}}]"#.to_owned(), "tools"),
            (format!(r#""tools":[{}],"tool_choice":{}"#, function("f"), function("g")), "tool_choice"),
            (format!(r#""tools":[{}],"tool_choice":"always""#, function("f")), "tool_choice"),
            (r#""tool_choice":"required""#.to_owned(), "tool_choice"),
            (r#""functions":[{"name":"f"}]"#.to_owned(), "functions"),
            (r#""messages":[{"role":"tool","tool_call_id":"c","content":"x"}]"#.to_owned(), "messages"),
            (r#""messages":[{"role":"assistant","tool_calls":[{"id":"c"}]}]"#.to_owned(), "messages"),
            (
                format!(
                    r#""messages":[{{"role":"assistant","tool_calls":[{{"id":"c","function":{{"name":"{}"}}}}]}}]"#,
                    "n".repeat(129)
                ),
                "messages",
            ),
            (
                r#""messages":[{"role":"assistant","tool_calls":[{"id":"c","function":{"name":"f","arguments":[1]}}]}]"#.to_owned(),
                "messages",
            ),
        ] {
            let (status, error) = http.refused("/v1/chat/completions", &ask(&more)).await;
            assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{more:.200}: {error}");
        }
        let (status, error) = http
            .refused(
                "/v1/messages",
                r#"{"max_tokens":5,"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"c"}]}]}"#,
            )
            .await;
        assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")));
        let body = r#"{"input":[{"type":"function_call_output","call_id":"c","output":"x"}]}"#;
        assert_eq!(http.refused("/v1/responses", body).await.1["param"], "input");
    })
    .await;
}

#[tokio::test]
async fn definitions_that_every_parameter_repeats_end_the_grammar_at_its_limit() {
    bounded(async {
        let formats = Options { tool_call_format: "qwen-xml".parse().unwrap(), ..options() };
        let http = HttpCluster::over(profile(TEMPLATE), formats).await;
        let integer = json!({"type": "integer"});
        let properties: BTreeMap<String, &Value> = (0..2000).map(|at| (format!("p{at}"), &integer)).collect();
        let schema = json!({"properties": properties, "$defs": {"p": {"enum": vec![7; 50_000]}}});
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": schema}}]);
        let body =
            json!({"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required"});
        let (status, error) = http.refused("/v1/chat/completions", &body.to_string()).await;
        assert_eq!((status, &error["param"]), (400, &json!("tools")), "{error}");
        assert!(error["message"].as_str().unwrap().contains("more than 262144 bytes"), "{error}");
    })
    .await;
}

#[tokio::test]
async fn the_grammar_of_a_required_call_counts_in_the_receive_budget_until_the_stream_ends() {
    bounded(async {
        let value = "x".repeat(20_000);
        let parameters = json!({"type": "object", "properties": {"a": {"enum": [value]}}});
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
        let body = |choice: &str| {
            let messages = json!([{"role": "user", "content": "a"}]);
            json!({"messages": messages, "tools": tools, "tool_choice": choice}).to_string()
        };
        let budget =
            |receive_bytes_max| Options { message_bytes_max: 30_000, receive_bytes_max, ..options() };
        // The message alone fits, and so does the grammar beside it in a larger budget.
        for (receive_bytes_max, choice, fits) in
            [(35_000, "auto", true), (35_000, "required", false), (60_000, "required", true)]
        {
            // The template shows the schema, a token a character.
            let profile = WorkerProfile { context_tokens: 100_000, ..profile(TEMPLATE) };
            let mut http = HttpCluster::over(profile, budget(receive_bytes_max)).await;
            if !fits {
                let (status, error) = http.refused("/v1/chat/completions", &body(choice)).await;
                assert!(error["message"].as_str().unwrap().contains("--receive-bytes-max"), "{error}");
                assert_eq!(status, 503, "{error}");
                continue;
            }
            let first = http.post("/v1/chat/completions", &body(choice)).await;
            let submit = http.session.submit().await;
            if choice == "required" {
                // Two thirds of the budget would be taken by the message and the grammar of a second call.
                let (status, error) = http.refused("/v1/chat/completions", &body(choice)).await;
                assert_eq!(status, 503, "{error}");
            }
            http.session.finish(&submit, 0, &tokens("b"), v1::FinishReason::Length);
            assert_eq!(first.response().await.status, 200);
            if choice == "required" {
                let next = http.post("/v1/chat/completions", &body(choice)).await;
                let submit = http.session.submit().await;
                http.session.finish(&submit, 0, &tokens("b"), v1::FinishReason::Length);
                assert_eq!(next.response().await.status, 200);
            }
        }
    })
    .await;
}

#[tokio::test]
async fn an_unknown_format_refuses_tools_and_a_flag_sets_it() {
    bounded(async {
        let template =
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}";
        let http = HttpCluster::over(profile(template), options()).await;
        let (status, error) = http.refused("/v1/chat/completions", &chat("")).await;
        let reason = error["message"].as_str().unwrap();
        assert_eq!((status, &error["param"]), (400, &json!("tools")));
        assert!(reason.contains("--tool-call-format") && reason.contains("tiny"), "{reason}");
        let formats = Options { tool_call_format: "none,tiny=hermes".parse().unwrap(), ..options() };
        let mut http = HttpCluster::over(profile(template), formats).await;
        let call = http.post("/v1/chat/completions", &chat("")).await;
        answer(&mut http, "<think>a</think><tool_call>{\"name\": \"now\"}</tool_call>", 4, STOP).await;
        let body = call.response().await.json();
        let given = &body["choices"][0]["message"];
        assert_eq!(given["content"], "<think>a</think>", "the template knows no reasoning");
        assert_eq!(given["tool_calls"][0]["function"]["name"], "now");
    })
    .await;
}

/// Serves a session: a call of the weather, or an answer if the prompt has its result, or JSON if the prompt asks for it.
async fn serve(mut session: ScriptedSession) {
    let tokenizer = tokenizer();
    loop {
        let Command::Submit(submit) = session.command().await else { continue };
        let prompt = prompt(&submit);
        let output = if prompt.contains("7 in Zürich") || prompt.contains("\"celsius\": 7") {
            "<think>\nok\n</think>\n\nIt is 7 degrees."
        } else if prompt.contains("PARSE") {
            "{\"city\": \"Bern\"}"
        } else if prompt.contains("\"temperature\"") {
            "<tool_call>\n{\"name\": \"temperature\", \"arguments\": {\"city\": \"Z\u{fc}rich\"}}\n</tool_call>"
        } else {
            "<think>\nhm\n</think>\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\"}}\n</tool_call>"
        };
        for tokens in tokenizer.encode_rendered(output).unwrap().chunks(3) {
            session.tokens(&submit, 0, tokens);
        }
        session.finish(&submit, 0, &[282], STOP);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn third_party_clients_loop_over_tools_and_parse_structured_output() {
    let HttpCluster { cluster: _cluster, session, address, worker: _worker } = cluster().await;
    let serving = tokio::spawn(serve(session));
    let url = format!("http://{address}");
    let main = ("INFLIGHT_TEST_PYTHON", "Python with tests/clients/python/requirements.txt");
    let frameworks =
        ("INFLIGHT_TEST_FRAMEWORKS_PYTHON", "Python with tests/clients/python/requirements-frameworks.txt");
    let node = ("INFLIGHT_TEST_NODE_MODULES", "folder with the package openai");
    for (client, (variable, needed)) in [
        ("openai chat", main),
        ("openai responses", main),
        ("anthropic", main),
        ("langchain", frameworks),
        ("node", node),
    ] {
        let arguments: &[&str] = if client == "node" {
            &[&url, "tiny"]
        } else {
            &["--client", client, "--server", &url, "--model", "tiny"]
        };
        let Some(answer) = run(variable, needed, "tool_loops.py", "tool_loop.cjs", arguments).await else {
            continue;
        };
        assert_eq!(answer["answers"], json!(["It is 7 degrees.", "It is 7 degrees."]), "{client}");
        for (key, city) in [("parsed", "Bern"), ("tool", "Zürich")] {
            if let Some(found) = answer.get(key) {
                assert_eq!(found, city, "{client}");
            }
        }
    }
    if let Ok(python) = std::env::var("INFLIGHT_TEST_PYTHON") {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/python/agent.py");
        let mut agent = tokio::process::Command::new(python);
        let output = agent
            .args([script, "--url", &url, "How warm is it in Zürich?"])
            .kill_on_drop(true)
            .output()
            .await;
        let output = output.unwrap();
        let (stdout, stderr) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        let lines: Vec<&str> = stdout.lines().collect();
        let [
            "temperature({\"city\": \"Zürich\"}) = {\"city\": \"Z\\u00fcrich\", \"celsius\": 7}",
            "It is 7 degrees.",
        ] = lines[..]
        else {
            panic!("the example printed {stdout}{stderr}");
        };
    }
    serving.abort();
}
