//! Options of a conversation's rendering over HTTP: arguments of the chat template, and messages that the output continues.

use inflight_proto::v1;
use serde_json::json;

use crate::cluster::bounded;
use crate::http_client::HttpCluster;
use crate::http_tools::{answer, options, profile, tokenizer};

const STOP: v1::FinishReason = v1::FinishReason::Stop;

/// Qwen3's switch of reasoning in small: without it, the prompt has an empty reasoning.
const SWITCHED: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}\
    <think>\n\n</think>\n\n{% else %}<think>{% endif %}{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}{% endif %}";

#[tokio::test]
async fn arguments_of_the_template_change_the_prompt_and_how_the_output_is_parsed() {
    bounded(async {
        let mut http = HttpCluster::over(profile(SWITCHED), options()).await;
        let user = r#""messages":[{"role":"user","content":"hi"}]"#;
        let prompt = |submit: &v1::Submit| tokenizer().decode_all(&submit.prompt_token_ids).unwrap();
        for (path, body, end, thinks) in [
            ("/v1/chat/completions", "", "<think>", true),
            (
                "/v1/chat/completions",
                r#","chat_template_kwargs":{"enable_thinking":false}"#,
                "</think>\n\n",
                false,
            ),
            ("/v1/chat/completions", r#","chat_template_kwargs":{"enable_thinking":true}"#, "<think>", true),
            ("/v1/chat/completions", r#","reasoning_effort":"low""#, "<think>[low]", false),
            ("/v1/chat/completions", r#","reasoning_effort":"none""#, "</think>\n\n[none]", false),
            (
                "/v1/chat/completions",
                r#","reasoning_effort":"none","chat_template_kwargs":{"enable_thinking":true}"#,
                "<think>[none]",
                false,
            ),
            ("/v1/messages", r#","max_tokens":9,"thinking":{"type":"disabled"}"#, "</think>\n\n", false),
            (
                "/v1/messages",
                r#","max_tokens":9,"thinking":{"type":"enabled","budget_tokens":1024}"#,
                "<think>",
                true,
            ),
            ("/v1/messages", r#","max_tokens":9,"output_config":{"effort":"high"}"#, "<think>[high]", false),
        ] {
            let call = http.post(path, &format!("{{{user}{body}}}")).await;
            let submit = answer(&mut http, "a</think>b", 1, STOP).await;
            assert!(prompt(&submit).ends_with(end), "{path} {body}: {:?}", prompt(&submit));
            let answer = call.response().await.json();
            let text = match path {
                "/v1/messages" => answer["content"].to_string(),
                _ => answer["choices"][0]["message"]["content"].to_string(),
            };
            // Text behind an open reasoning is reasoning up to its end.
            assert_eq!(text.contains("</think>"), !thinks, "{path} {body}: {text}");
        }
        for (body, field) in [
            (r#","chat_template_kwargs":[1]"#, "chat_template_kwargs"),
            (r#","chat_template_kwargs":{"messages":[]}"#, "chat_template_kwargs"),
            (r#","reasoning_effort":"extreme""#, "reasoning_effort"),
            (r#","continue_final_message":true"#, "continue_final_message"),
        ] {
            let (status, error) = http.refused("/v1/chat/completions", &format!("{{{user}{body}}}")).await;
            assert_eq!((status, &error["param"]), (400, &json!(field)), "{body}: {error}");
        }
    })
    .await;
}

#[tokio::test]
async fn the_output_continues_a_last_message_of_the_assistant() {
    bounded(async {
        let mut http = HttpCluster::over(profile(SWITCHED), options()).await;
        let messages = |last: &str| {
            format!(
                r#""messages":[{{"role":"user","content":"hi"}},{{"role":"assistant","content":"{last}"}}]"#
            )
        };
        let begun = "<|im_start|>user\nhi<|im_end|><|im_start|>assistant\n";
        for (path, body, expected) in [
            ("/v1/chat/completions", r#""continue_final_message":true,"#, format!("{begun}Sure: ")),
            (
                "/v1/chat/completions",
                r#""continue_final_message":true,"add_generation_prompt":false,"#,
                format!("{begun}Sure: "),
            ),
            ("/v1/chat/completions", r#""add_generation_prompt":false,"#, format!("{begun}Sure: <|im_end|>")),
            ("/v1/messages", r#""max_tokens":9,"#, format!("{begun}Sure: ")),
        ] {
            let call = http.post(path, &format!("{{{body}{}}}", messages("Sure: "))).await;
            let submit = answer(&mut http, "yes", 1, STOP).await;
            assert_eq!(tokenizer().decode_all(&submit.prompt_token_ids).unwrap(), expected, "{path} {body}");
            let text = call.response().await.body;
            assert!(text.contains("\"yes\"") && !text.contains("Sure"), "{path} {body}: {text}");
        }
        for (body, field) in [
            (
                format!(r#""continue_final_message":true,"add_generation_prompt":true,{}"#, messages("a")),
                "continue_final_message",
            ),
            (format!(r#""continue_final_message":true,{}"#, messages("")), "continue_final_message"),
        ] {
            let (status, error) = http.refused("/v1/chat/completions", &format!("{{{body}}}")).await;
            assert_eq!((status, &error["param"]), (400, &json!(field)), "{body}: {error}");
        }
    })
    .await;
}
