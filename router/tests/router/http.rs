//! Every endpoint of the HTTP APIs, on the bytes of the wire.

use inflight_proto::v1;
use inflight_router::{Admin, HttpOptions, Options};
use serde_json::{Value, json};

use crate::cluster::{Cluster, bounded, tokens};
use crate::http_client::{Call, HttpCluster, parse_events, timeless, with_http};
use crate::tenants::{Folder, digest};
use inflight_scripted::{ScriptedWorker, WorkerProfile, sequence};

const LENGTH: v1::FinishReason = v1::FinishReason::Length;
const STOP: v1::FinishReason = v1::FinishReason::Stop;
const CHAT: &str = r#"{"model":"tiny","messages":[{"role":"user","content":"hello"}]"#;
/// The end-of-turn token of the scripted workers.
const EOT: u32 = 2;

async fn cluster() -> HttpCluster {
    HttpCluster::start(with_http(HttpOptions::default())).await
}

#[tokio::test]
async fn a_chat_completion_in_one_piece() {
    bounded(async {
        let mut http = cluster().await;
        let body = format!("{CHAT},\"max_completion_tokens\":9,\"max_tokens\":3,\"seed\":7,\"tools\":[]}}");
        let headers = [("x-request-id", "mine"), ("content-type", "application/json")];
        let call = Call::send(http.address, "POST", "/v1/chat/completions", &headers, body.as_bytes()).await;
        let submit = http.session.submit().await;
        assert_eq!((submit.request_id.as_str(), submit.stop.as_ref().unwrap().max_tokens), ("mine", Some(9)));
        assert_eq!(submit.sampling.as_ref().unwrap().seed, Some(7));
        http.session.tokens(&submit, 0, &tokens("wor"));
        http.session.sequence(v1::SequenceUpdate { ..sequence(&submit, 0, &tokens("ld"), LENGTH) });
        let response = call.response().await;
        let (prompt, output) = (submit.prompt_token_ids.len(), tokens("wor").len() + tokens("ld").len());
        let expected = format!(
            "{{\"id\":\"chatcmpl-mine\",\"object\":\"chat.completion\",\"created\":0,\"model\":\"tiny\",\
             \"system_fingerprint\":\"f1\",\"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\
             \"content\":\"world\",\"refusal\":null}},\"logprobs\":null,\"finish_reason\":\"length\"}}],\
             \"usage\":{{\"prompt_tokens\":{prompt},\"completion_tokens\":{output},\"total_tokens\":{},\
             \"prompt_tokens_details\":{{\"cached_tokens\":{}}},\
             \"completion_tokens_details\":{{\"reasoning_tokens\":0}}}}}}",
            prompt + output,
            prompt,
        );
        assert_eq!(timeless(&response.body), expected);
        assert_eq!((response.status, response.headers["x-request-id"].as_str()), (200, "mine"));
        assert_eq!(response.headers["content-type"], "application/json");
    })
    .await;
}

#[tokio::test]
async fn a_streamed_chat_interleaves_choices_and_splits_no_character_and_no_stop_string() {
    bounded(async {
        let mut http = cluster().await;
        let body = format!(
            "{CHAT},\"n\":3,\"stop\":\"END\",\"stream\":true,\"stream_options\":{{\"include_usage\":true}}}}"
        );
        let headers = [("x-request-id", "r")];
        let call = Call::send(http.address, "POST", "/v1/chat/completions", &headers, body.as_bytes()).await;
        let submit = http.session.submit().await;
        let emoji = tokens("🙂");
        assert!(emoji.len() > 1, "the emoji is split over tokens");
        http.session.tokens(&submit, 0, &emoji[..1]);
        http.session.tokens(&submit, 1, &tokens("xE"));
        http.session.tokens(&submit, 0, &emoji[1..]);
        http.session.finish(&submit, 2, &tokens("z"), LENGTH);
        http.session.tokens(&submit, 1, &tokens("ND and more"));
        http.session.finish(&submit, 0, &[EOT], STOP);
        let events = call.events().await;
        assert!(events.iter().all(|event| event.name.is_none()));
        let chunks: Vec<Value> = events[..events.len() - 1].iter().map(|event| event.json()).collect();
        let mut text = [String::new(), String::new(), String::new()];
        let mut reasons = [Value::Null, Value::Null, Value::Null];
        let last = chunks.len() - 1;
        for chunk in &chunks[..last] {
            assert_eq!((&chunk["id"], &chunk["model"]), (&json!("chatcmpl-r"), &json!("tiny")));
            assert_eq!(chunk["usage"], Value::Null);
            assert!(chunk.as_object().unwrap().contains_key("usage"));
            let choice = &chunk["choices"][0];
            let index = choice["index"].as_u64().unwrap() as usize;
            assert_eq!(reasons[index], Value::Null, "nothing follows the finish reason");
            match choice["delta"]["role"].as_str() {
                Some(role) => assert_eq!((role, text[index].as_str()), ("assistant", "")),
                None => text[index].push_str(choice["delta"]["content"].as_str().unwrap_or_default()),
            }
            reasons[index] = choice["finish_reason"].clone();
        }
        assert_eq!(text, ["🙂", "x", "z"]);
        assert_eq!(reasons, [json!("stop"), json!("stop"), json!("length")]);
        assert_eq!(chunks[last]["choices"], json!([]));
        let usage = &chunks[last]["usage"];
        assert_eq!(usage["prompt_tokens"], submit.prompt_token_ids.len());
        assert!(usage["prompt_tokens_details"]["cached_tokens"].is_u64());
        assert_eq!(events.last().unwrap().data, "[DONE]");
        // The first choice's chunks, byte for byte.
        let first: Vec<String> = events.iter().map(|event| timeless(&event.data)).collect();
        let head = r#"{"id":"chatcmpl-r","object":"chat.completion.chunk","created":0,"model":"tiny","#;
        let first: Vec<&str> = first.iter().filter_map(|data| data.strip_prefix(head)).collect();
        let first: Vec<&&str> = first.iter().filter(|data| data.contains(r#"[{"index":0,"#)).collect();
        assert_eq!(
            first,
            [
                &r#""system_fingerprint":"f1","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}"#,
                &r#""choices":[{"index":0,"delta":{"content":"🙂"},"logprobs":null,"finish_reason":null}],"usage":null}"#,
                &r#""system_fingerprint":"f1","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}],"usage":null}"#,
            ]
        );
    })
    .await;
}

#[tokio::test]
async fn chat_logprobs_have_the_bytes_of_each_token() {
    bounded(async {
        let mut http = cluster().await;
        let body = format!("{CHAT},\"logprobs\":true,\"top_logprobs\":1}}");
        let call = http.post("/v1/chat/completions", &body).await;
        let submit = http.session.submit().await;
        let token = tokens("x")[0];
        let one = |logprob| v1::TokenLogprob { token_id: token, logprob };
        let logprobs = vec![v1::PositionLogprobs { chosen: Some(one(-0.25)), top: vec![one(-0.25)] }];
        http.session.sequence(v1::SequenceUpdate { logprobs, ..sequence(&submit, 0, &[token], LENGTH) });
        let response = call.response().await.json();
        let entry = json!({"token": "x", "logprob": -0.25, "bytes": [120]});
        let mut expected = entry.clone();
        expected["top_logprobs"] = json!([entry]);
        assert_eq!(response["choices"][0]["logprobs"], json!({"content": [expected], "refusal": null}));
    })
    .await;
}

#[tokio::test]
async fn completions_take_four_forms_of_prompts_and_echo_them() {
    bounded(async {
        let mut http = cluster().await;
        let forms = [("\"ab\"", 1), ("[\"ab\", \"ab\"]", 2), ("[[5, 6], [7]]", 2), ("[5, 6]", 1)];
        for (prompt, prompts) in forms {
            let body = format!("{{\"prompt\": {prompt}, \"echo\": true, \"n\": 2, \"max_tokens\": 4}}");
            let call = http.post("/v1/completions", &body).await;
            let mut submits = Vec::new();
            for _ in 0..prompts {
                submits.push(http.session.submit().await);
            }
            for (at, submit) in submits.iter().enumerate().rev() {
                assert_eq!(submit.stop.as_ref().unwrap().max_tokens, Some(4));
                http.session.finish(submit, 1, &tokens(&format!("{at}b")), LENGTH);
                http.session.finish(submit, 0, &tokens(&format!("{at}a")), LENGTH);
            }
            let response = call.response().await.json();
            let choices = response["choices"].as_array().unwrap();
            assert_eq!(choices.len(), 2 * prompts);
            for (index, choice) in choices.iter().enumerate() {
                assert_eq!(choice["index"], index);
                let text = choice["text"].as_str().unwrap();
                let suffix = format!("{}{}", index / 2, if index % 2 == 0 { 'a' } else { 'b' });
                assert!(text.ends_with(&suffix) && text.len() > 2, "{prompt}: {text:?} {suffix:?}");
                assert!(!prompt.contains("ab") || text == format!("ab{suffix}"), "{text}");
            }
            let prompt_tokens: usize = submits.iter().map(|submit| submit.prompt_token_ids.len()).sum();
            assert_eq!(response["usage"]["prompt_tokens"], prompt_tokens, "{prompt}");
        }
        // Streamed, an echo precedes the output of each choice; the default of max_tokens is 16.
        let call =
            http.post("/v1/completions", r#"{"prompt": ["x", "y"], "echo": true, "stream": true}"#).await;
        let (first, second) = (http.session.submit().await, http.session.submit().await);
        assert_eq!(first.stop.as_ref().unwrap().max_tokens, Some(16));
        http.session.finish(&second, 0, &tokens("2"), LENGTH);
        http.session.finish(&first, 0, &tokens("1"), LENGTH);
        let mut text = [String::new(), String::new()];
        let events = call.events().await;
        for event in &events[..events.len() - 1] {
            let choice = event.json()["choices"][0].clone();
            text[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
        }
        assert_eq!(
            (text, events.last().unwrap().data.as_str()),
            (["x1".to_owned(), "y2".to_owned()], "[DONE]")
        );
    })
    .await;
}

#[tokio::test]
async fn completion_logprobs_align_tokens_alternatives_and_offsets() {
    bounded(async {
        let mut http = cluster().await;
        for stream in [false, true] {
            let body = format!("{{\"prompt\": \"a\", \"logprobs\": 1, \"stream\": {stream}}}");
            let call = http.post("/v1/completions", &body).await;
            let submit = http.session.submit().await;
            let emoji = tokens("🙂!");
            let other = tokens("z")[0];
            for (at, token) in emoji.iter().enumerate() {
                let one = |token_id, logprob| v1::TokenLogprob { token_id, logprob };
                let logprobs = vec![v1::PositionLogprobs {
                    chosen: Some(one(*token, -0.25)),
                    top: vec![one(other, -0.125)],
                }];
                let reason = if at + 1 == emoji.len() { LENGTH } else { v1::FinishReason::Unspecified };
                http.session
                    .sequence(v1::SequenceUpdate { logprobs, ..sequence(&submit, 0, &[*token], reason) });
            }
            let mut text = String::new();
            let mut lists = [Vec::new(), Vec::new(), Vec::new(), Vec::new()];
            let response = call.response().await;
            let parts = if stream {
                let events = parse_events(&response.body);
                events[..events.len() - 1].iter().map(|event| event.json()).collect()
            } else {
                vec![response.json()]
            };
            for part in parts {
                let choice = &part["choices"][0];
                text += choice["text"].as_str().unwrap();
                for (list, key) in
                    lists.iter_mut().zip(["tokens", "token_logprobs", "top_logprobs", "text_offset"])
                {
                    list.extend(choice["logprobs"][key].as_array().cloned().unwrap_or_default());
                }
            }
            assert_eq!(text, "🙂!");
            let [names, logprobs, top, offsets] = lists;
            assert_eq!(names.len(), emoji.len());
            assert_eq!(*names.last().unwrap(), "!");
            assert!(names[0].as_str().unwrap().starts_with("bytes:\\xf0"), "{names:?}");
            for at in 0..emoji.len() {
                let chosen = &top[at][names[at].as_str().unwrap()];
                assert_eq!((chosen, &top[at]["z"]), (&logprobs[at], &json!(-0.125)));
                assert_eq!(offsets[at], u32::from(at + 1 == emoji.len()));
            }
        }
    })
    .await;
}

#[tokio::test]
async fn responses_are_complete_objects_and_ordered_events() {
    bounded(async {
        let mut http = cluster().await;
        let call = http.post("/v1/responses", r#"{"input": "hello", "instructions": "be brief"}"#).await;
        let submit = http.session.submit().await;
        http.session.finish(&submit, 0, &[tokens("wor"), vec![EOT]].concat(), STOP);
        let response = call.response().await.json();
        assert_eq!((&response["object"], &response["status"]), (&json!("response"), &json!("completed")));
        assert_eq!(response["output"][0]["content"][0]["text"], "wor");
        assert_eq!(response["usage"]["input_tokens"], submit.prompt_token_ids.len());
        assert!(response["usage"]["input_tokens_details"]["cached_tokens"].is_u64());
        assert_eq!((&response["instructions"], &response["store"]), (&json!("be brief"), &json!(false)));

        let body = r#"{"input": [{"role": "user", "content": "hi"}], "stream": true, "max_output_tokens": 3,
            "tools": [{"type": "web_search"}]}"#;
        let call = http.post("/v1/responses", body).await;
        let submit = http.session.submit().await;
        http.session.tokens(&submit, 0, &tokens("a"));
        http.session.finish(&submit, 0, &tokens("b"), LENGTH);
        let events = call.events().await;
        let kinds: Vec<&str> = events.iter().map(|event| event.name.as_deref().unwrap()).collect();
        let (before, after) = kinds.split_at(4);
        assert_eq!(
            before,
            [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added"
            ]
        );
        let deltas = after.iter().take_while(|kind| **kind == "response.output_text.delta").count();
        assert_eq!(
            after[deltas..],
            [
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.incomplete"
            ]
        );
        let mut text = String::new();
        for (number, event) in events.iter().enumerate() {
            let json = event.json();
            assert_eq!((&json["type"], &json["sequence_number"]), (&json!(event.name), &json!(number)));
            text += json["delta"].as_str().unwrap_or_default();
        }
        let last = events.last().unwrap().json()["response"].clone();
        assert_eq!((text.as_str(), &last["output"][0]["content"][0]["text"]), ("ab", &json!("ab")));
        assert_eq!(last["incomplete_details"], json!({"reason": "max_output_tokens"}));
        let (status, error) =
            http.refused("/v1/responses", r#"{"input": "a", "previous_response_id": "resp_1"}"#).await;
        assert_eq!((status, &error["param"]), (400, &json!("previous_response_id")));
        // The probe of clients that ask whether the API is there.
        let call = http.post("/v1/responses", r#"{"input": [], "max_output_tokens": 1}"#).await;
        let submit = http.session.submit().await;
        http.session.finish(&submit, 0, &tokens("a"), LENGTH);
        assert_eq!(call.response().await.json()["status"], "incomplete");
    })
    .await;
}

#[tokio::test]
async fn messages_speak_anthropics_api() {
    bounded(async {
        let mut http = cluster().await;
        let ask = r#"{"model": "tiny", "max_tokens": 9, "system": "be kind", "stop_sequences": ["END"],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]"#;
        let call = http.post("/v1/messages", &format!("{ask}}}")).await;
        let submit = http.session.submit().await;
        http.session.tokens(&submit, 0, &tokens("oneE"));
        http.session.tokens(&submit, 0, &tokens("ND"));
        let response = call.response().await;
        assert!(response.headers.contains_key("request-id"));
        let message = response.json();
        assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
        assert_eq!(message["content"], json!([{"type": "text", "text": "one"}]));
        assert_eq!(
            (&message["stop_reason"], &message["stop_sequence"]),
            (&json!("stop_sequence"), &json!("END"))
        );
        let count = r#"{"system": "be kind", "messages": [{"role": "user", "content": "hello"}]}"#;
        let counted = http.post("/v1/messages/count_tokens", count).await;
        let counted = counted.response().await.json();
        assert_eq!(counted, json!({"input_tokens": submit.prompt_token_ids.len()}));

        let _ = http.session.command().await;
        let call = http.post("/v1/messages", &format!("{ask},\"stream\":true}}")).await;
        let submit = http.session.submit().await;
        http.session.tokens(&submit, 0, &tokens("a"));
        http.session.finish(&submit, 0, &[EOT], STOP);
        let events = call.events().await;
        let kinds: Vec<&str> = events.iter().map(|event| event.name.as_deref().unwrap()).collect();
        assert_eq!(
            kinds,
            [
                "message_start",
                "content_block_start",
                "content_block_delta",
                "content_block_stop",
                "message_delta",
                "message_stop"
            ]
        );
        assert!(events.iter().all(|event| event.json()["type"] == json!(event.name)));
        assert_eq!(
            events[2].data,
            r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}"#
        );
        let end = events[4].json();
        assert_eq!(end["delta"], json!({"stop_reason": "end_turn", "stop_sequence": null}));
        assert_eq!(end["usage"]["output_tokens"], 2);

        let refused = http.post("/v1/messages", r#"{"messages": []}"#).await.response().await;
        assert_eq!(refused.status, 400);
        assert_eq!(
            refused.body,
            r#"{"type":"error","error":{"type":"invalid_request_error","message":"max_tokens is missing"}}"#
        );
    })
    .await;
}

#[tokio::test]
async fn models_tokenizers_and_probes() {
    bounded(async {
        let http = HttpCluster::start(with_http(HttpOptions { metrics: true, ..Default::default() })).await;
        let list = http.get("/v1/models").await.json();
        assert_eq!((&list["object"], list["data"].as_array().unwrap().len()), (&json!("list"), 1));
        let model = http.get("/v1/models/tiny").await.json();
        assert_eq!(model, list["data"][0]);
        assert_eq!((&model["max_model_len"], &model["context_length"]), (&json!(256), &json!(256)));
        let unknown = http.get("/v1/models/meta/other").await;
        assert_eq!((unknown.status, &unknown.json()["error"]["code"]), (404, &json!("model_not_found")));
        assert!(unknown.body.contains("meta/other"));

        let tokenized = http.post("/tokenize", r#"{"prompt": "hello", "return_token_strs": true}"#).await;
        let tokenized = tokenized.response().await.json();
        let all: Vec<u32> = serde_json::from_value(tokenized["tokens"].clone()).unwrap();
        assert_eq!(all[1..], tokens("hello"));
        assert_eq!((&tokenized["count"], &tokenized["max_model_len"]), (&json!(all.len()), &json!(256)));
        let plain = http.post("/tokenize", r#"{"prompt": "hello", "add_special_tokens": false}"#).await;
        assert_eq!(plain.response().await.json()["tokens"], json!(tokens("hello")));
        let chat = http.post("/tokenize", &format!("{CHAT}}}")).await.response().await.json();
        assert!(chat["count"].as_u64().unwrap() > all.len() as u64);
        let body = json!({ "tokens": all }).to_string();
        let text = http.post("/detokenize", &body).await.response().await.json();
        assert_eq!(text["prompt"], "<|begin_of_text|>hello");
        let (status, error) = http.refused("/detokenize", r#"{"tokens": [9999]}"#).await;
        assert_eq!((status, &error["param"]), (400, &json!("tokens")));
        let info = http.get("/tokenizer_info").await.json();
        assert_eq!(info["bos_token"], "<|begin_of_text|>");
        assert!(info["chat_template"].as_str().unwrap().contains("messages"));

        for path in ["/health", "/ready", "/readyz", "/livez", "/version"] {
            assert_eq!(http.get(path).await.status, 200, "{path}");
        }
        assert!(http.get("/metrics").await.body.contains("inflight_router_open_calls"));
        let unknown = http.get("/v1/embeddings").await;
        assert_eq!((unknown.status, &unknown.json()["error"]["code"]), (404, &json!("unknown_url")));
        let wrong = http.get("/v1/chat/completions").await;
        assert_eq!((wrong.status, &wrong.json()["error"]["code"]), (405, &json!("method_not_allowed")));
        http.cluster.drain.cancel();
    })
    .await;
}

#[tokio::test]
async fn a_router_without_workers_is_alive_and_unready() {
    bounded(async {
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let address = worker.address;
        drop(worker);
        let listen = "127.0.0.1:0".parse().unwrap();
        let options = inflight_router::Options {
            listen,
            workers: vec![address.to_string()],
            ..with_http(HttpOptions::default())
        };
        let router = inflight_router::Router::bind(options).await.unwrap();
        let http = router.http_address().unwrap();
        let serving = tokio::spawn(router.serve(Default::default()));
        let get = |path: &'static str| async move {
            Call::send(http, "GET", path, &[], b"").await.response().await
        };
        assert_eq!(get("/livez").await.status, 200);
        let health = get("/health").await;
        assert_eq!((health.status, health.headers["retry-after"].as_str()), (503, "1"));
        assert!(health.body.contains("is connected yet"), "{}", health.body);
        serving.abort();
    })
    .await;
}

#[tokio::test]
async fn keys_and_limits_are_the_tenants() {
    bounded(async {
        let folder = Folder::new();
        let file = format!(
            "[tenants.acme]\nlimits = {{ concurrent_requests = 1 }}\nkeys = [{{ name = \"main\", sha256 = \"{}\" }}]\n",
            digest("acme")
        );
        let tenants_file = Some(folder.write("tenants.toml", &file));
        let options = inflight_router::Options { tenants_file, ..with_http(HttpOptions::default()) };
        let mut http = HttpCluster::start(options).await;
        let body = format!("{CHAT}}}");
        let send = |path: &'static str, headers: Vec<(&'static str, &'static str)>| {
            let (body, address) = (body.clone(), http.address);
            async move { Call::send(address, "POST", path, &headers, body.as_bytes()).await }
        };
        let refused = send("/v1/chat/completions", vec![]).await.response().await;
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (401, &json!("invalid_api_key")));
        let refused = send("/v1/messages", vec![("x-api-key", "wrong")]).await.response().await;
        assert_eq!(refused.json()["error"]["type"], "authentication_error");
        for header in [("authorization", "Bearer acme"), ("x-api-key", "acme")] {
            let call = send("/v1/chat/completions", vec![header]).await;
            let submit = http.session.submit().await;
            assert_eq!(submit.tenant, "acme");
            http.session.finish(&submit, 0, &tokens("a"), LENGTH);
            assert_eq!(call.response().await.status, 200);
        }
        // Two prompts are two requests.
        let prompts = br#"{"prompt": ["a", "b"]}"#;
        let key = [("x-api-key", "acme")];
        let call = Call::send(http.address, "POST", "/v1/completions", &key, prompts).await;
        let limited = call.response().await;
        assert_eq!((limited.status, &limited.json()["error"]["type"]), (429, &json!("rate_limit_error")));
        assert!(limited.headers["retry-after"].parse::<u64>().unwrap() >= 1);
        assert_eq!(http.get("/health").await.status, 200);
        assert_eq!(http.get("/metrics").await.status, 404, "not asked for");
    })
    .await;
}

#[tokio::test]
async fn browsers_of_allowed_origins_may_call() {
    bounded(async {
        let cors_origins = vec!["https://chat.example".to_owned()];
        let http = HttpCluster::start(with_http(HttpOptions { cors_origins, ..Default::default() })).await;
        let address = http.address;
        let preflight = async |origin: &'static str| {
            let headers = [
                ("origin", origin),
                ("access-control-request-method", "POST"),
                ("access-control-request-headers", "authorization,content-type"),
            ];
            Call::send(address, "OPTIONS", "/v1/chat/completions", &headers, b"").await
        };
        let allowed = preflight("https://chat.example").await.response().await;
        assert_eq!((allowed.status, allowed.body.as_str()), (204, ""));
        assert_eq!(allowed.headers["access-control-allow-origin"], "https://chat.example");
        assert_eq!(allowed.headers["access-control-allow-headers"], "authorization,content-type");
        let other = preflight("https://evil.example").await.response().await;
        assert!(!other.headers.contains_key("access-control-allow-origin"));
        let origin = [("origin", "https://chat.example")];
        let models = Call::send(http.address, "GET", "/v1/models", &origin, b"").await.response().await;
        assert_eq!(models.headers["access-control-allow-origin"], "https://chat.example");
        // The live view is for its own page only, even if all origins are allowed.
        let options = Options {
            admin: Admin::On,
            ..with_http(HttpOptions { cors_origins: vec!["*".to_owned()], ..Default::default() })
        };
        let open = HttpCluster::start(options).await;
        for (path, any) in [("/v1/models", true), ("/ui", false), ("/ui/requests/1", false)] {
            let answer = Call::send(open.address, "GET", path, &origin, b"").await.response().await;
            assert_eq!(answer.headers.contains_key("access-control-allow-origin"), any, "{path}: {answer:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn http2_clients_and_grpc_clients_get_the_same_output() {
    bounded(async {
        use http_body_util::BodyExt as _;
        use tonic::codegen::Service as _;
        let mut http = cluster().await;
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", http.address)).unwrap();
        let mut channel = endpoint.connect().await.unwrap();
        let body = tonic::body::Body::new(http_body_util::Full::new(bytes::Bytes::from(format!("{CHAT}}}"))));
        let request = tonic::codegen::http::Request::post("/v1/chat/completions").body(body).unwrap();
        std::future::poll_fn(|context| channel.poll_ready(context)).await.unwrap();
        let call = tokio::spawn(channel.call(request));
        let submit = http.session.submit().await;
        http.session.finish(&submit, 0, &tokens("world"), LENGTH);
        let response = call.await.unwrap().unwrap();
        assert_eq!(response.version(), tonic::codegen::http::Version::HTTP_2);
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let answer: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(answer["choices"][0]["message"]["content"], "world");

        let chat = v1::Chat {
            messages: vec![v1::ChatMessage {
                role: "user".to_owned(),
                content: "hello".to_owned(),
                ..Default::default()
            }],
            ..Default::default()
        };
        let input = Some(v1::generate_request::Input::Chat(chat));
        let request = v1::GenerateRequest { input, ..Default::default() };
        let cluster: &mut Cluster = &mut http.cluster;
        let mut stream = cluster.generate(request).await.unwrap();
        let over_grpc = http.session.submit().await;
        assert_eq!(over_grpc.prompt_token_ids, submit.prompt_token_ids);
        http.session.finish(&over_grpc, 0, &tokens("world"), LENGTH);
        stream.read_to_end().await.unwrap();
        assert_eq!(stream.text[0], "world");
    })
    .await;
}

#[tokio::test]
async fn the_id_of_a_request_is_that_of_its_header_then_of_its_body() {
    bounded(async {
        let mut http = cluster().await;
        for (path, ask, prefix) in
            [("/v1/chat/completions", CHAT, "chatcmpl-"), ("/v1/completions", r#"{"prompt":"a""#, "cmpl-")]
        {
            for (header, stream, expected) in [
                (None, false, "from-body"),
                (None, true, "from-body"),
                (Some("from-header"), false, "from-header"),
            ] {
                let body = format!("{ask},\"request_id\":\"from-body\",\"stream\":{stream}}}");
                let headers: Vec<_> = header.map(|id| ("x-request-id", id)).into_iter().collect();
                let call = Call::send(http.address, "POST", path, &headers, body.as_bytes()).await;
                let submit = http.session.submit().await;
                assert_eq!(submit.request_id, expected, "{path} {header:?}");
                http.session.finish(&submit, 0, &tokens("a"), LENGTH);
                let response = call.response().await;
                assert_eq!(response.headers["x-request-id"], expected, "{path} {header:?}");
                assert!(
                    response.body.contains(&format!("\"id\":\"{prefix}{expected}\"")),
                    "{}",
                    response.body
                );
            }
        }
        // A refusal after the body was read has it too.
        let body = format!("{},\"request_id\":\"from-body\"}}", CHAT.replace("tiny", "other"));
        let refused = http.post("/v1/chat/completions", &body).await.response().await;
        assert_eq!((refused.status, refused.headers["x-request-id"].as_str()), (404, "from-body"));
    })
    .await;
}
