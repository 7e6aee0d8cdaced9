//! Tools and reasoning over gRPC: streams, outputs in one message, resumed streams, and bad input.

use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::{self, FinishReason};
use inflight_router::Options;
use tonic::Code;

use crate::cluster::{Cluster, bounded};
use crate::http_tools::{ARGUMENTS, OUTPUT, TEMPLATE, WEATHER, profile, tokenizer};
use inflight_scripted::ScriptedWorker;

fn message(role: &str, content: &str) -> v1::ChatMessage {
    v1::ChatMessage { role: role.to_owned(), content: content.to_owned(), ..Default::default() }
}

fn tool(name: &str, parameters: &str) -> v1::Tool {
    v1::Tool { name: name.to_owned(), parameters: parameters.to_owned(), ..Default::default() }
}

fn request(messages: Vec<v1::ChatMessage>, tools: Vec<v1::Tool>) -> v1::GenerateRequest {
    v1::GenerateRequest {
        input: Some(Input::Chat(v1::Chat { messages, ..Default::default() })),
        tools: Some(v1::ToolUse { tools, ..Default::default() }),
        resumable: true,
        ..Default::default()
    }
}

fn weather(messages: Vec<v1::ChatMessage>) -> v1::GenerateRequest {
    request(messages, vec![tool("weather", WEATHER), tool("now", "")])
}

/// Output of a choice.
#[derive(Debug, Default, Clone, PartialEq)]
struct Parsed {
    text: String,
    reasoning: String,
    calls: Vec<(String, String, String)>,
}

impl Parsed {
    fn add(&mut self, text: &str, reasoning: &str, calls: &[v1::ToolCallDelta]) {
        self.text.push_str(text);
        self.reasoning.push_str(reasoning);
        for call in calls {
            if call.index as usize == self.calls.len() {
                self.calls.push((call.id.clone(), call.name.clone(), String::new()));
            }
            self.calls[call.index as usize].2.push_str(&call.arguments);
        }
    }
}

#[tokio::test]
async fn calls_are_streamed_and_a_resumed_stream_continues_them() {
    bounded(async {
        let mut worker = ScriptedWorker::start(profile(TEMPLATE)).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let tokens = tokenizer().encode_rendered(OUTPUT).unwrap();
        let ask = weather(vec![message("user", "hi")]);
        let mut stream = cluster.client.generate(ask.clone()).await.unwrap().into_inner();
        let submit = session.submit().await;
        tokens.chunks(5).for_each(|chunk| session.tokens(&submit, 0, chunk));
        session.finish(&submit, 0, &[282], FinishReason::Stop);
        let (mut parsed, mut ids, mut cuts, mut seed) = (Parsed::default(), Vec::new(), Vec::new(), 0);
        let mut usage = v1::Usage::default();
        while let Some(message) = stream.message().await.unwrap() {
            match message.event.unwrap() {
                Event::Started(started) => seed = started.seed,
                Event::Delta(delta) => {
                    parsed.add(&delta.text, &delta.reasoning, &delta.tool_calls);
                    ids.extend(delta.token_ids);
                    cuts.push((delta.cursor, ids.clone(), parsed.clone()));
                }
                Event::Finished(finished) => {
                    parsed.add(&finished.text, &finished.reasoning, &finished.tool_calls);
                }
                Event::Completed(completed) => usage = completed.usage.unwrap(),
                Event::FingerprintChanged(_) | Event::PromptLogprobs(_) => {}
            }
        }
        let short = |(_, name, arguments): &(String, String, String)| (name.clone(), arguments.clone());
        let calls: Vec<_> = parsed.calls.iter().map(short).collect();
        let expected = [("weather".to_owned(), ARGUMENTS.to_owned()), ("now".to_owned(), "{}".to_owned())];
        assert_eq!(
            (&calls[..], parsed.text.as_str(), parsed.reasoning.as_str()),
            (&expected[..], "Let me see.", "hm")
        );
        assert!(usage.reasoning_tokens > 3 && parsed.calls[0].0.starts_with("call_"), "{usage:?} {parsed:?}");
        assert_ne!(seed, 0);
        for (cursor, received, before) in cuts.into_iter().step_by(7) {
            let resume = v1::Resume { cursor, choices: vec![v1::TokenIds { ids: received.clone() }] };
            let again = v1::GenerateRequest { resume: Some(resume), ..ask.clone() };
            let mut stream = cluster.client.generate(again).await.unwrap().into_inner();
            let submit = session.submit().await;
            let rest: Vec<u32> = tokens[received.len() - 1..].to_vec();
            rest.chunks(3).for_each(|chunk| session.tokens(&submit, 0, chunk));
            session.finish(&submit, 0, &[282], FinishReason::Stop);
            let mut whole = before;
            while let Some(message) = stream.message().await.unwrap() {
                match message.event.unwrap() {
                    Event::Delta(delta) => whole.add(&delta.text, &delta.reasoning, &delta.tool_calls),
                    Event::Finished(finished) => {
                        whole.add(&finished.text, &finished.reasoning, &finished.tool_calls);
                    }
                    _ => {}
                }
            }
            assert_eq!(whole, parsed, "after {} tokens", received.len());
        }
    })
    .await;
}

#[tokio::test]
async fn an_output_in_one_message_has_calls_and_their_results_are_rendered() {
    bounded(async {
        let mut worker = ScriptedWorker::start(profile(TEMPLATE)).await;
        let cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let call =
            v1::ToolCall { id: "c1".to_owned(), name: "now".to_owned(), arguments: String::from("{}") };
        let asked = v1::ChatMessage { tool_calls: vec![call], ..message("assistant", "") };
        let result = v1::ChatMessage { tool_call_id: "c1".to_owned(), ..message("tool", "noon") };
        let ask = weather(vec![message("user", "hi"), asked, result.clone()]);
        let ask = v1::GenerateRequest { resumable: false, ..ask };
        let mut client = cluster.client.clone();
        let answer = tokio::spawn(async move { client.generate_unary(ask).await });
        let submit = session.submit().await;
        let prompt = tokenizer().decode_all(&submit.prompt_token_ids).unwrap();
        assert!(prompt.contains("noon [now c1]") && prompt.contains("\"name\": \"weather\""), "{prompt}");
        session.tokens(&submit, 0, &tokenizer().encode_rendered(OUTPUT).unwrap());
        session.finish(&submit, 0, &[282], FinishReason::Stop);
        let choice = answer.await.unwrap().unwrap().into_inner().choices.remove(0);
        assert_eq!((choice.text.as_str(), choice.reasoning.as_str()), ("Let me see.", "hm"));
        assert_eq!(
            (choice.tool_calls[0].name.as_str(), &*choice.tool_calls[0].arguments),
            ("weather", ARGUMENTS)
        );
        let mut client = cluster.client.clone();
        for (ask, words) in [
            (weather(vec![message("user", "hi"), result]), "which no message before it has"),
            (request(vec![message("user", "hi")], vec![tool("", "")]), "has no name"),
            (request(vec![message("user", "hi")], vec![tool("f", "{")]), "not JSON"),
            (request(vec![message("user", "hi")], vec![tool("f", ""), tool("f", "")]), "two tools"),
            (
                v1::GenerateRequest { input: Some(Input::Text("a".to_owned())), ..weather(Vec::new()) },
                "needs chat input",
            ),
        ] {
            let refused = client.generate(ask).await.unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
            assert!(refused.message().contains(words), "{refused}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_call_that_was_not_made_is_marked_in_a_stream_and_text_in_one_message() {
    bounded(async {
        let mut worker = ScriptedWorker::start(profile(TEMPLATE)).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let cut = &OUTPUT[..OUTPUT.find("rich").unwrap()];
        let tokens = tokenizer().encode_rendered(cut).unwrap();
        let mut stream =
            cluster.client.generate(weather(vec![message("user", "hi")])).await.unwrap().into_inner();
        let submit = session.submit().await;
        session.tokens(&submit, 0, &tokens);
        session.finish(&submit, 0, &[282], FinishReason::Stop);
        let mut fragments = Vec::new();
        while let Some(message) = stream.message().await.unwrap() {
            match message.event.unwrap() {
                Event::Delta(delta) => fragments.extend(delta.tool_calls),
                Event::Finished(finished) => fragments.extend(finished.tool_calls),
                _ => {}
            }
        }
        let (last, before) = fragments.split_last().unwrap();
        assert!(
            last.cut && !before.is_empty() && before.iter().all(|fragment| !fragment.cut),
            "{fragments:?}"
        );

        let ask = v1::GenerateRequest { resumable: false, ..weather(vec![message("user", "hi")]) };
        let mut client = cluster.client.clone();
        let call = tokio::spawn(async move { client.generate_unary(ask).await });
        let submit = session.submit().await;
        session.tokens(&submit, 0, &tokens);
        session.finish(&submit, 0, &[282], FinishReason::Stop);
        let choice = call.await.unwrap().unwrap().into_inner().choices.remove(0);
        assert!(choice.tool_calls.is_empty() && choice.text.ends_with("{\"city\": \"Zü"), "{choice:?}");
    })
    .await;
}
