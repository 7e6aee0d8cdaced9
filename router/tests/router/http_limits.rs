//! Bad input to the HTTP APIs: each field, malformed and huge bodies, floods of headers, slow senders.

use std::time::Duration;

use inflight_proto::v1;
use inflight_router::{HttpOptions, Options};
use serde_json::json;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use crate::cluster::{bounded, metrics, tokens};
use crate::http_client::{Call, HttpCluster, with_http};

const CHAT: &str = "/v1/chat/completions";

#[tokio::test]
async fn every_bad_field_is_refused_by_name_and_unknown_ones_pass() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        let table = [
            ("temperature", "-1", "[0, 100]"),
            ("temperature", "1e300", "[0, 100]"),
            ("temperature", "\"warm\"", "must be a number"),
            ("temperature", "[]", "must be a number"),
            ("top_p", "-0.1", "[0, 1]"),
            ("top_k", "-2", "top_k"),
            ("top_k", "99999999999", "must be an integer"),
            ("min_p", "2", "[0, 1]"),
            ("frequency_penalty", "3", "[-2, 2]"),
            ("presence_penalty", "true", "must be a number"),
            ("repetition_penalty", "0", "(0, 100]"),
            ("n", "0", "[1, 16]"),
            ("n", "17", "[1, 16]"),
            ("n", "4294967296", "non-negative integer"),
            ("stop", "[\"\"]", "stop[0] has 0 bytes"),
            ("stop", "7", "a string or an array of strings"),
            ("stop_token_ids", "[-1]", "array of token ids"),
            ("logit_bias", "{\"1\": 101}", "[-100, 100]"),
            ("logit_bias", "[1]", "an object of token id to bias"),
            ("max_tokens", "0", "max_tokens is 0"),
            ("max_completion_tokens", "-5", "non-negative integer"),
            ("top_logprobs", "2", "needs logprobs"),
            ("allowed_token_ids", "[]", "allowed_token_ids is empty"),
            ("allowed_token_ids", "[-1]", "an array of token ids"),
            ("allowed_token_ids", "7", "an array of token ids"),
            ("bad_words", "\"x\"", "an array of strings"),
            ("bad_words", "[\"\"]", "bad_words[0] has 0 bytes"),
            ("prompt_logprobs", "21", "[0, 20]"),
            ("prompt_logprobs", "-1", "non-negative integer"),
            ("prompt_logprobs", "true", "non-negative integer"),
            ("truncate_prompt_tokens", "0", "in [1, 256], or -1"),
            ("truncate_prompt_tokens", "99999999999", "must be an integer"),
            ("truncate_prompt_tokens", "[]", "must be an integer"),
            ("seed", "1.5", "must be an integer"),
            ("stream", "1", "true or false"),
            ("stream_options", "7", "an object of flags"),
            ("messages", "{}", "an array of messages"),
            ("model", "7", "must be a string"),
            ("tools", "[{\"type\": \"function\"}]", "has no function"),
            ("response_format", "{\"type\": \"xml\"}", "types are text, json_object and json_schema"),
            ("response_format", "{\"type\": \"json_schema\"}", "response_format.schema is missing"),
            ("guided_json", "{\"$ref\": \"https://example.com/a.json\"}", "leads out of the schema"),
            ("guided_json", "{\"type\": \"integer\", \"minimum\": 3, \"maximum\": 1}", "minimum (3) is greater than maximum (1)"),
            ("guided_json", "{\"$schema\": \"http://json-schema.org/draft-03/schema#\"}", "draft-03"),
            ("guided_json", "7", "must be a JSON schema"),
            ("guided_json", "\"7\"", "must be an object or a boolean"),
            ("guided_regex", "\"((\"", ""),
            ("guided_regex", "\"\"", "the grammar is empty"),
            ("guided_choice", "[]", "the grammar is empty"),
            ("guided_choice", "[\"\"]", "choice 0 is empty"),
            ("guided_grammar", "\"start: a\"", ""),
            ("structured_outputs", "{\"regex\": \"a\", \"choice\": [\"b\"]}", "several grammars"),
            ("audio", "{\"voice\": \"x\"}", "audio is not supported"),
            ("max_completion_tokens", "0", "max_completion_tokens is 0"),
            ("request_id", "7", "must be a string"),
            ("request_id", "\"a b\"", "1 to 120 visible characters"),
            ("stop_token_ids", "[9999]", "token id 9999"),
            ("logit_bias", "{\"9999\": 1}", "token id 9999"),
            ("allowed_token_ids", "[9999]", "token id 9999"),
            // Arrays in place of objects.
            ("stream_options", "[true]", "an object of flags"),
            ("response_format", "[\"text\"]", "an object with a type"),
            ("messages", "[[\"user\", \"hi\"]]", "a message with role and content"),
            ("messages", "[{\"role\": \"user\", \"content\": [[\"text\", \"hi\"]]}]", "a part with a type"),
            ("messages", "[]", "messages is empty"),
        ];
        for (field, value, words) in table {
            let messages = if field == "messages" { "" } else { r#""messages":[{"role":"user","content":"a"}],"# };
            let (status, error) = http.refused(CHAT, &format!("{{{messages}\"{field}\":{value}}}")).await;
            assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")), "{field}: {error}");
            assert_eq!(error["param"], field, "{value}: {error}");
            assert!(error["message"].as_str().unwrap().contains(words), "{field} {value}: {error}");
        }
        let (status, error) =
            http.refused(CHAT, r#"{"messages":[{"role":"user","content":"a"}],"max_tokens":9999}"#).await;
        assert_eq!((status, &error["code"]), (400, &json!("context_length_exceeded")));
        let said = error["message"].as_str().unwrap();
        assert!(said.starts_with("This model's maximum context length is 256 tokens. However, the prompt has"), "{said}");
        assert!(said.ends_with("shorten the prompt or lower max_tokens"), "{said}");
        // In every API, for a prompt that is too long by itself, in the words that its clients look for.
        let long = "a ".repeat(2000);
        for (path, body, phrase) in [
            (CHAT, json!({"messages": [{"role": "user", "content": long}]}), "This model's maximum context length is 256 tokens"),
            ("/v1/completions", json!({"prompt": long}), "This model's maximum context length is 256 tokens"),
            ("/v1/responses", json!({"input": long}), "This model's maximum context length is 256 tokens"),
            ("/v1/messages", json!({"max_tokens": 9, "messages": [{"role": "user", "content": long}]}), "prompt is too long: "),
            (
                "/v1/messages",
                json!({"max_tokens": 256, "messages": [{"role": "user", "content": "a"}]}),
                "input length and `max_tokens` exceed context limit: ",
            ),
        ] {
            let (status, error) = http.refused(path, &body.to_string()).await;
            assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")));
            assert!(error["message"].as_str().unwrap().starts_with(phrase), "{path}: {error}");
        }
        let (status, error) =
            http.refused(CHAT, r#"{"model":"gpt","messages":[{"role":"user","content":"a"}]}"#).await;
        assert_eq!((status, &error["code"], &error["param"]), (404, &json!("model_not_found"), &json!("model")));
        let fingerprint = r#"{"require_fingerprint":"x","messages":[{"role":"user","content":"a"}]}"#;
        let call = http.post(CHAT, fingerprint).await.response().await;
        assert_eq!((call.status, call.headers["x-should-retry"].as_str()), (409, "false"));

        let body = r#"{"messages":[{"role":"user","content":"a","x":1}],"x_new":[[]],"user":"me","temperature":null}"#;
        let call = http.post(CHAT, body).await;
        let submit = http.session.submit().await;
        http.session.finish(&submit, 0, &tokens("a"), v1::FinishReason::Length);
        assert_eq!(call.response().await.status, 200);
        let rendered = metrics().render();
        for field in ["unknown", "user"] {
            let line = format!(
                "inflight_router_http_ignored_fields_total{{api=\"chat completions\",field=\"{field}\"}}"
            );
            assert!(rendered.contains(&line), "{line}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_refusal_names_the_field_of_the_api_that_was_called() {
    bounded(async {
        let http = HttpCluster::start(with_http(HttpOptions::default())).await;
        let chat = r#""messages": [{"role": "user", "content": "a"}]"#;
        let table = [
            (CHAT, chat, "top_logprobs", r#""logprobs": true, "top_logprobs": 21"#, "[0, 20]"),
            (
                "/v1/completions",
                r#""prompt": "a""#,
                "logprobs",
                r#""logprobs": 1000, "echo": true"#,
                "[0, 20]",
            ),
            ("/v1/completions", "", "prompt", r#""prompt": [5, 9999]"#, "token id 9999"),
            ("/v1/completions", "", "prompt", r#""prompt": """#, "prompt is empty"),
            ("/v1/completions", "", "prompt", r#""prompt": ["a", ""]"#, "prompt[1] is empty"),
            ("/v1/completions", "", "prompt", r#""prompt": [[5], []]"#, "prompt[1] is empty"),
            (
                "/v1/responses",
                r#""input": "a""#,
                "max_output_tokens",
                r#""max_output_tokens": 0"#,
                "max_output_tokens is 0",
            ),
            ("/v1/responses", r#""input": "a""#, "top_logprobs", r#""top_logprobs": 21"#, "[0, 20]"),
            (
                "/v1/responses",
                r#""input": "a""#,
                "text",
                r#""text": [{"type": "text"}]"#,
                "an object with a format",
            ),
            (
                "/v1/responses",
                r#""input": "a""#,
                "text",
                r#""text": {"format": ["text"]}"#,
                "text.format must be",
            ),
            ("/v1/responses", r#""input": "a""#, "tools", r#""tools": [["web_search"]]"#, "tools[0] must be"),
            ("/v1/responses", "", "input", r#""input": [["message", "user", "hi"]]"#, "input[0] must be"),
        ];
        for (path, needed, param, more, words) in table {
            let comma = if needed.is_empty() { "" } else { "," };
            let (status, error) = http.refused(path, &format!("{{{needed}{comma}{more}}}")).await;
            assert_eq!((status, &error["param"]), (400, &json!(param)), "{path} {more}: {error}");
            assert!(error["message"].as_str().unwrap().contains(words), "{path} {more}: {error}");
        }
        // Anthropic's errors have no param; their messages name the field.
        let ask = r#""max_tokens": 9, "messages": [{"role": "user", "content": "a"}]"#;
        for (more, words) in [
            (r#""stop_sequences": [""]"#, "stop_sequences[0] has 0 bytes"),
            (r#""max_tokens": 0"#, "max_tokens is 0"),
            (r#""output_config": [{"type": "json_schema"}]"#, "output_config must be an object"),
            (r#""messages": [["user", "hi"]]"#, "messages[0] must be a message"),
            (r#""messages": []"#, "messages is empty"),
        ] {
            let (status, error) = http.refused("/v1/messages", &format!("{{{ask},{more}}}")).await;
            assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")), "{more}: {error}");
            assert!(error["message"].as_str().unwrap().starts_with(words), "{more}: {error}");
        }
        for forged in ["not base64", "AAAA"] {
            let body = format!("{{{chat}, \"stream\": true}}");
            let headers = [("last-event-id", forged)];
            let call = Call::send(http.address, "POST", CHAT, &headers, body.as_bytes()).await;
            let refused = call.response().await;
            assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("Last-Event-ID")));
        }
        let fields: Vec<String> = (0..256).map(|at| format!("\"x{at}\": 1")).collect();
        let (status, error) = http.refused(CHAT, &format!("{{{}, {chat}}}", fields.join(","))).await;
        assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")));
        assert!(error["message"].as_str().unwrap().contains("at most 256 fields"), "{error}");
    })
    .await;
}

#[tokio::test]
async fn malformed_nested_and_huge_bodies_are_refused() {
    bounded(async {
        let http = HttpCluster::start(with_http(HttpOptions::default())).await;
        let deep = format!("{{\"messages\":{}", "[".repeat(1 << 20));
        let nested = format!("{{\"messages\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
        for body in
            ["", "{", "[]", "null", "\u{0}", "{\"messages\":}", "{\"a\":1}{", deep.as_str(), nested.as_str()]
        {
            let (status, error) = http.refused(CHAT, body).await;
            assert_eq!((status, &error["type"]), (400, &json!("invalid_request_error")), "{body:.20}");
        }
        let call = Call::send(http.address, "POST", CHAT, &[], b"{\"messages\":\"\xff\"}").await;
        assert_eq!(call.response().await.status, 400);

        // Announced and in chunks.
        let huge = vec![b' '; 100 << 20];
        let refused = Call::send(http.address, "POST", CHAT, &[], &huge).await.response().await;
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (413, &json!("request_too_large")));
        assert!(refused.body.contains("--message-bytes-max"), "{}", refused.body);
        let refused = Call::send(http.address, "POST", "/v1/messages", &[], &huge).await.response().await;
        assert_eq!(refused.json()["error"]["type"], "request_too_large");
        let mut stream = TcpStream::connect(http.address).await.unwrap();
        let head = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let chunk = [b"100000\r\n".as_slice(), &vec![b' '; 1 << 20], b"\r\n"].concat();
        for _ in 0..5 {
            stream.write_all(&chunk).await.unwrap();
        }
        assert_eq!(Call::over(stream).response().await.status, 413);
        // Without a host, and with two.
        for hosts in ["", "host: localhost\r\nhost: localhost\r\n"] {
            let mut stream = TcpStream::connect(http.address).await.unwrap();
            stream.write_all(format!("GET /v1/models HTTP/1.1\r\n{hosts}\r\n").as_bytes()).await.unwrap();
            assert_eq!(Call::over(stream).response().await.status, 400, "{hosts:?}");
        }
        // Still there.
        assert_eq!(http.get("/health").await.status, 200);
    })
    .await;
}

#[tokio::test]
async fn floods_of_headers_and_slow_senders_are_ended() {
    bounded(async {
        let message_time_max = Duration::from_millis(200);
        let options = Options { message_time_max, ..with_http(HttpOptions::default()) };
        let http = HttpCluster::start(options).await;
        let value = "x".repeat(4000);
        let names: Vec<String> = (0..200).map(|at| format!("x-{at}")).collect();
        let many: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "1")).collect();
        let large: Vec<(&str, &str)> =
            names.iter().take(20).map(|name| (name.as_str(), value.as_str())).collect();
        for headers in [many, large] {
            let response =
                Call::send(http.address, "GET", "/v1/models", &headers, b"").await.response().await;
            assert_eq!(response.status, 431);
        }
        // A body that never ends.
        let mut stream = TcpStream::connect(http.address).await.unwrap();
        let head = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{{");
        stream.write_all(head.as_bytes()).await.unwrap();
        let refused = Call::over(stream).response().await;
        assert_eq!((refused.status, &refused.json()["error"]["code"]), (408, &json!("request_timeout")));
        assert_eq!(http.get("/health").await.status, 200);
    })
    .await;
}

#[tokio::test]
async fn a_call_gives_its_bytes_back_once_its_prompt_is_tokenized() {
    bounded(async {
        let options = Options {
            message_bytes_max: 16_000,
            receive_bytes_max: 20_000,
            ..with_http(HttpOptions::default())
        };
        let mut http = HttpCluster::start(options).await;
        let padding = "x".repeat(12_000);
        let body = format!(
            r#"{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": 9, "unknown": "{padding}"}}"#
        );
        // Together they have more than the budget; neither has an answer yet.
        let mut calls = Vec::new();
        for _ in 0..3 {
            let call = http.post(CHAT, &body).await;
            calls.push((call, http.session.submit().await));
        }
        for (call, submit) in calls {
            http.session.finish(&submit, 0, &tokens("b"), v1::FinishReason::Length);
            assert_eq!(call.response().await.status, 200);
        }
    })
    .await;
}
