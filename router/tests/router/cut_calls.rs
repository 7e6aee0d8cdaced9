//! Tool calls that the end of the output cuts: no API reports one as made.

use inflight_proto::v1;
use serde_json::{Value, json};

use crate::cluster::bounded;
use crate::http_client::{Event, HttpCluster, with_http};
use crate::http_tools::{ARGUMENTS, OUTPUT, TEMPLATE, WEATHER, profile, tokenizer};
use inflight_router::HttpOptions;

const STOP: v1::FinishReason = v1::FinishReason::Stop;
const LENGTH: v1::FinishReason = v1::FinishReason::Length;

/// What a client takes of a response.
#[derive(Debug, Default, PartialEq)]
struct Taken {
    text: String,
    /// Names and arguments.
    calls: Vec<(String, String)>,
    /// Finish reason, stop reason or status.
    end: String,
}

fn of(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn chat(body: &Value) -> Taken {
    let choice = &body["choices"][0];
    let calls = choice["message"]["tool_calls"].as_array().into_iter().flatten();
    let call = |call: &Value| (of(&call["function"]["name"]), of(&call["function"]["arguments"]));
    Taken {
        text: of(&choice["message"]["content"]),
        calls: calls.map(call).collect(),
        end: of(&choice["finish_reason"]),
    }
}

fn streamed_chat(events: &[Event]) -> Taken {
    let mut taken = Taken::default();
    for event in &events[..events.len() - 1] {
        let choice = &event.json()["choices"][0];
        taken.text += choice["delta"]["content"].as_str().unwrap_or_default();
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            taken.calls.resize(taken.calls.len().max(index + 1), (String::new(), String::new()));
            taken.calls[index].0 += call["function"]["name"].as_str().unwrap_or_default();
            taken.calls[index].1 += call["function"]["arguments"].as_str().unwrap_or_default();
        }
        taken.end += choice["finish_reason"].as_str().unwrap_or_default();
    }
    taken
}

fn message(body: &Value) -> Taken {
    let blocks = || body["content"].as_array().into_iter().flatten();
    let call = |block: &Value| {
        (block["type"] == "tool_use").then(|| (of(&block["name"]), block["input"].to_string()))
    };
    Taken {
        text: blocks().map(|block| of(&block["text"])).collect(),
        calls: blocks().filter_map(call).collect(),
        end: of(&body["stop_reason"]),
    }
}

fn streamed_message(events: &[Event]) -> Taken {
    let mut taken = Taken::default();
    for event in events.iter().map(Event::json) {
        let block = &event["content_block"];
        if block["type"] == "tool_use" {
            taken.calls.push((of(&block["name"]), String::new()));
        }
        taken.text += event["delta"]["text"].as_str().unwrap_or_default();
        taken.end += event["delta"]["stop_reason"].as_str().unwrap_or_default();
        if let Some(fragment) = event["delta"]["partial_json"].as_str() {
            taken.calls.last_mut().unwrap().1 += fragment;
        }
    }
    taken
}

fn response(body: &Value) -> Taken {
    let items = || body["output"].as_array().into_iter().flatten();
    let call =
        |item: &Value| (item["type"] == "function_call").then(|| (of(&item["name"]), of(&item["arguments"])));
    let text = |item: &Value| (item["type"] == "message").then(|| of(&item["content"][0]["text"]));
    Taken {
        text: items().filter_map(text).collect(),
        calls: items().filter_map(call).collect(),
        end: of(&body["status"]),
    }
}

fn streamed_response(events: &[Event]) -> Taken {
    let last = events.last().unwrap().json();
    assert_eq!(of(&last["type"]), format!("response.{}", of(&last["response"]["status"])));
    response(&last["response"])
}

fn is_object(text: &str) -> bool {
    serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object())
}

#[tokio::test]
async fn a_call_that_is_cut_at_any_token_is_reported_by_no_api() {
    bounded(async {
        let mut http = HttpCluster::over(profile(TEMPLATE), with_http(HttpOptions::default())).await;
        let function =
            |name: &str| json!({"name": name, "parameters": serde_json::from_str::<Value>(WEATHER).unwrap()});
        let tool = |name: &str| json!({"name": name, "input_schema": {"type": "object"}});
        let flat = |name: &str| json!({"type": "function", "name": name});
        let messages = json!([{"role": "user", "content": "hi"}]);
        let nested = ["weather", "now"].map(|name| json!({"type": "function", "function": function(name)}));
        let apis = [
            ("/v1/chat/completions", json!({"messages": messages, "tools": nested})),
            (
                "/v1/messages",
                json!({"messages": messages, "max_tokens": 300, "tools": (["weather", "now"].map(tool))}),
            ),
            ("/v1/responses", json!({"input": "hi", "tools": (["weather", "now"].map(flat))})),
        ];
        let tokens = tokenizer().encode_rendered(OUTPUT).unwrap();
        let begin =
            tokenizer().encode_rendered(&OUTPUT[..OUTPUT.find("<tool_call>").unwrap()]).unwrap().len();
        let all = [("weather".to_owned(), json!({"city": "Zürich"})), ("now".to_owned(), json!({}))];
        let mut cut = 0;
        for at in begin..=tokens.len() {
            let reason = if at % 3 == 0 { LENGTH } else { STOP };
            for (path, body) in &apis {
                for stream in [false, true] {
                    let mut body = body.clone();
                    body["stream"] = json!(stream);
                    let call = http.post(path, &body.to_string()).await;
                    let submit = http.session.submit().await;
                    tokens[..at].chunks(5).for_each(|chunk| http.session.tokens(&submit, 0, chunk));
                    let last: &[u32] = if reason == STOP { &[282] } else { &[] };
                    http.session.finish(&submit, 0, last, reason);
                    let taken = match (*path, stream) {
                        ("/v1/chat/completions", false) => chat(&call.response().await.json()),
                        ("/v1/chat/completions", true) => streamed_chat(&call.events().await),
                        ("/v1/messages", false) => message(&call.response().await.json()),
                        ("/v1/messages", true) => streamed_message(&call.events().await),
                        (_, false) => response(&call.response().await.json()),
                        (_, true) => streamed_response(&call.events().await),
                    };
                    let place = format!("{path} stream {stream}, {at} tokens: {taken:?}");
                    let made: Vec<_> = taken.calls.iter().filter(|(_, text)| is_object(text)).collect();
                    let values =
                        made.iter().map(|(name, text)| (name.clone(), serde_json::from_str(text).unwrap()));
                    assert_eq!(values.collect::<Vec<_>>(), all[..made.len()], "{place}");
                    let is_cut = made.len() < taken.calls.len();
                    // Only fragments that a client has had before the end are of calls that were not made.
                    assert!(!is_cut || (stream && *path != "/v1/messages"), "{place}");
                    // It has begun with its name and the first character of its arguments.
                    let open_text = taken.text.contains("\"arguments\": {") || is_cut;
                    cut += usize::from(open_text);
                    let expected = match (*path, reason) {
                        ("/v1/chat/completions", LENGTH) => "length",
                        ("/v1/messages", LENGTH) => "max_tokens",
                        ("/v1/responses", LENGTH) => "incomplete",
                        ("/v1/responses", _) if open_text => "incomplete",
                        ("/v1/responses", _) => "completed",
                        ("/v1/messages", _) if made.is_empty() => "end_turn",
                        ("/v1/messages", _) => "tool_use",
                        // Fragments of a call that was not made are in the stream.
                        _ if is_cut || made.is_empty() => "stop",
                        _ => "tool_calls",
                    };
                    assert_eq!(taken.end, expected, "{place}");
                }
            }
        }
        assert!(cut > 100, "{cut} answers end in a call");
    })
    .await;
}

#[tokio::test]
async fn a_stop_sequence_within_a_call_is_named_and_there_is_no_call() {
    bounded(async {
        let tokens = tokenizer().encode_rendered(OUTPUT).unwrap();
        for stream in [false, true] {
            let mut http = HttpCluster::over(profile(TEMPLATE), with_http(HttpOptions::default())).await;
            let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300, "stream": stream,
                "tools": [{"name": "weather", "input_schema": {"type": "object"}}], "stop_sequences": ["rich\""]});
            let call = http.post("/v1/messages", &body.to_string()).await;
            let submit = http.session.submit().await;
            http.session.tokens(&submit, 0, &tokens);
            let taken = if stream {
                let events = call.events().await;
                let end = events.iter().map(Event::json).find(|event| event["type"] == "message_delta").unwrap();
                assert_eq!(end["delta"]["stop_sequence"], "rich\"");
                streamed_message(&events)
            } else {
                let body = call.response().await.json();
                assert_eq!(body["stop_sequence"], "rich\"");
                message(&body)
            };
            let cut = &ARGUMENTS[..ARGUMENTS.find("rich").unwrap()];
            assert!(taken.text.ends_with(cut), "{taken:?}");
            assert_eq!((taken.calls.len(), taken.end.as_str()), (0, "stop_sequence"));
        }
    })
    .await;
}

#[tokio::test]
async fn a_stop_string_that_is_a_marker_or_ends_with_one_ends_the_output() {
    bounded(async {
        let tokens = tokenizer().encode_rendered(OUTPUT).unwrap();
        for (stop, text, thought) in [
            ("</think>", "", "hm"),
            ("m\n</think>", "", "h"),
            ("</think>\n\nLet", "", "hm"),
            ("<tool_call>", "Let me see.", "hm"),
            ("see.\n<tool_", "Let me ", "hm"),
        ] {
            let mut http = HttpCluster::over(profile(TEMPLATE), with_http(HttpOptions::default())).await;
            let body = json!({"messages": [{"role": "user", "content": "hi"}], "stop": [stop],
                "tools": [{"type": "function", "function": {"name": "weather"}}]});
            let call = http.post("/v1/chat/completions", &body.to_string()).await;
            let submit = http.session.submit().await;
            http.session.tokens(&submit, 0, &tokens);
            let body = call.response().await.json();
            let taken = chat(&body);
            let reasoning = of(&body["choices"][0]["message"]["reasoning"]);
            assert_eq!(
                (taken.text.trim_end(), reasoning.trim_end()),
                (text.trim_end(), thought),
                "{stop:?}: {body}"
            );
            assert_eq!((taken.calls.len(), &*taken.end), (0, "stop"), "{stop:?}");
        }
    })
    .await;
}
