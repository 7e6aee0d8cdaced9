//! Tokenizing: special tokens in messages, bounds and charges of Tokenize, large prompts, and a worker that does not
//! read what it is sent.

use std::collections::BTreeMap;

use inflight_fixtures::{Chat, Family};
use inflight_proto::kserve;
use inflight_proto::kserve::grpc_inference_service_client::GrpcInferenceServiceClient;
use inflight_proto::kserve::infer_parameter::ParameterChoice;
use inflight_proto::v1;
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::tokenize_request;
use inflight_router::text::Tokenizer;
use inflight_router::{HttpOptions, Options};
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

use crate::cluster::{Cluster, bounded, metrics, text, tokens};
use crate::http_client::{HttpCluster, with_http};
use crate::tenants::{started, tenant, with_key};
use inflight_scripted::{Command, ScriptedSession, ScriptedWorker, WorkerProfile};

fn tokenizer() -> Tokenizer {
    Tokenizer::from_json(Family::Llama3.tokenizer_json().as_bytes()).unwrap()
}

/// Returns the special tokens among `ids`.
fn special(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<u32> {
    ids.iter().copied().filter(|id| tokenizer.vocabulary().is_special(*id)).collect()
}

/// Returns a conversation whose contents have `injected`.
fn chat(injected: &str) -> v1::Chat {
    let messages = Chat::load(Family::Llama3).unwrap().messages;
    let message = |message: &inflight_fixtures::Message| v1::ChatMessage {
        role: message.role.clone(),
        content: format!("{injected}{}{injected}", message.content),
        ..Default::default()
    };
    v1::Chat { messages: messages.iter().map(message).collect(), ..Default::default() }
}

/// Returns the next submission; earlier calls that were dropped are cancelled in between.
async fn submitted(session: &mut ScriptedSession) -> v1::Submit {
    loop {
        if let Command::Submit(submit) = session.command().await {
            return submit;
        }
    }
}

#[tokio::test]
async fn special_tokens_in_messages_are_text_unless_the_router_has_the_option() {
    bounded(async {
        let tokenizer = tokenizer();
        let ids = 0..tokenizer.vocabulary().len() as u32;
        let all = ids.filter(|id| tokenizer.vocabulary().is_special(*id));
        let injected: String = all.map(|id| tokenizer.piece(id)).collect();
        let own = special(&tokenizer, &Chat::load(Family::Llama3).unwrap().tokens);
        for recognised in [false, true] {
            let mut worker =
                ScriptedWorker::start(WorkerProfile { context_tokens: 4096, ..Default::default() }).await;
            let options = Options { special_tokens_in_chat: recognised, ..Options::default() };
            let mut cluster = Cluster::start(&[&worker], options).await;
            let mut session = worker.granted().await;
            cluster.handle.ready().await;
            let input = Some(tokenize_request::Input::Chat(chat(&injected)));
            let answer = cluster.client.tokenize(v1::TokenizeRequest { input, ..Default::default() }).await;
            let answer = answer.unwrap().into_inner().token_ids;
            assert_eq!(special(&tokenizer, &answer) == own, !recognised, "{answer:?}");
            let request =
                v1::GenerateRequest { input: Some(Input::Chat(chat(&injected))), ..Default::default() };
            let _stream = cluster.generate(request).await.unwrap();
            assert_eq!(session.submit().await.prompt_token_ids, answer, "Generate tokenizes like Tokenize");
        }
    })
    .await;
}

#[tokio::test]
async fn texts_have_special_tokens_unless_the_request_says_otherwise() {
    bounded(async {
        let mut http = HttpCluster::start(with_http(HttpOptions::default())).await;
        let tokenizer = tokenizer();
        let of = |prompt: &[u32]| special(&tokenizer, prompt).len();
        for (parse_special, expected) in [(None, 2), (Some(true), 2), (Some(false), 1)] {
            let input = Some(tokenize_request::Input::Text("a<|eot_id|>b".to_owned()));
            let request = v1::TokenizeRequest { input, parse_special, ..Default::default() };
            let answer = http.cluster.client.tokenize(request).await.unwrap().into_inner();
            assert_eq!(of(&answer.token_ids), expected, "{parse_special:?}");
            let request = v1::GenerateRequest { parse_special, ..text("a<|eot_id|>b") };
            let _stream = http.cluster.generate(request).await.unwrap();
            assert_eq!(submitted(&mut http.session).await.prompt_token_ids, answer.token_ids);
            let field = parse_special.map_or(String::new(), |parse| format!(", \"parse_special\": {parse}"));
            let body = format!("{{\"prompt\": \"a<|eot_id|>b\"{field}}}");
            let tokenized = http.post("/tokenize", &body).await.response().await.json();
            let ids: Vec<u32> = serde_json::from_value(tokenized["tokens"].clone()).unwrap();
            assert_eq!(ids, answer.token_ids);
            let completion = http.post("/v1/completions", &body).await;
            assert_eq!(submitted(&mut http.session).await.prompt_token_ids, answer.token_ids);
            drop(completion);
            let parameter = |choice| kserve::InferParameter { parameter_choice: Some(choice) };
            let mut parameters = BTreeMap::from([(
                "text_input".to_owned(),
                parameter(ParameterChoice::StringParam("a<|eot_id|>b".to_owned())),
            )]);
            parameters.extend(
                parse_special
                    .map(|parse| ("parse_special".to_owned(), parameter(ParameterChoice::BoolParam(parse)))),
            );
            let request = kserve::ModelInferRequest { parameters, ..Default::default() };
            let mut infer = GrpcInferenceServiceClient::new(http.cluster.channel.clone());
            let infer = tokio::spawn(async move { infer.model_infer(request).await });
            assert_eq!(submitted(&mut http.session).await.prompt_token_ids, answer.token_ids);
            infer.abort();
        }
    })
    .await;
}

#[tokio::test]
async fn tokenize_is_bounded_and_charged() {
    bounded(async {
        let limits = "tokens_per_minute = 600";
        let file = tenant("greedy", limits)
            + &tenant("careful", limits)
            + &tenant("cutting", limits)
            + &tenant("free", "");
        let options = Options { tokenize_tokens_max: 100, ..Options::default() };
        let (cluster, _session, _folder, _worker) = started(&file, options).await;
        let mut client = InferenceClient::new(cluster.channel.clone());
        let mut tokenize = async |key: &str, text: &str, omit_pieces: bool| {
            let input = Some(tokenize_request::Input::Text(text.to_owned()));
            let request = v1::TokenizeRequest { input, omit_pieces, ..Default::default() };
            client.tokenize(with_key(request, key)).await.map(tonic::Response::into_inner)
        };
        let refused_at_limit = |status: Status| {
            assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
            let violations = status.get_details_quota_failure().unwrap().violations;
            assert_eq!(violations[0].description, "tokens_per_minute");
        };
        let chat = v1::Chat { messages: vec![v1::ChatMessage::default(); 20_000], ..Default::default() };
        let input = Some(tokenize_request::Input::Chat(chat));
        let request = v1::TokenizeRequest { input, ..Default::default() };
        let status = cluster.client.clone().tokenize(with_key(request, "free")).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("20000 messages"), "{status}");
        let long = "xy".repeat(120);
        let status = tokenize("free", &long, false).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("--tokenize-tokens-max"), "{status}");
        // A text that is refused while it is tokenized is charged, too: ten seconds of the rate.
        assert_eq!(tokenize("greedy", &long, false).await.unwrap_err().code(), Code::InvalidArgument);
        refused_at_limit(tokenize("greedy", &long, false).await.unwrap_err());
        // Charged are the tokens, not the bytes that they might have been.
        let words = " the".repeat(12);
        for _ in 0..4 {
            let answer = tokenize("careful", &words, true).await.unwrap();
            assert_eq!((answer.token_ids.len(), answer.pieces.len()), (13, 0));
        }
        let refused = loop {
            if let Err(status) = tokenize("careful", &words, true).await {
                break status;
            }
        };
        refused_at_limit(refused);
        // What truncation drops was tokenized, too.
        let mut cut = Vec::new();
        let refused = loop {
            let request = v1::GenerateRequest {
                input: Some(v1::generate_request::Input::Text(words.clone())),
                truncate_prompt_tokens: Some(1),
                stop: Some(v1::StopConditions { max_tokens: Some(1), ..Default::default() }),
                ..Default::default()
            };
            match cluster.client.clone().generate(with_key(request, "cutting")).await {
                Ok(stream) => cut.push(stream),
                Err(status) => break status,
            }
        };
        assert!((5..=9).contains(&cut.len()), "{} calls of 13 tokens within 100", cut.len());
        refused_at_limit(refused);
        let answer = tokenize("free", &words, false).await.unwrap();
        assert_eq!(
            answer.pieces.len(),
            answer.token_ids.len(),
            "clients that do not know the field get pieces"
        );
    })
    .await;
}

/// Whether a template renders them is known only afterwards.
#[tokio::test]
async fn numbers_in_the_arguments_of_a_call_are_charged_like_text() {
    bounded(async {
        let file = tenant("small", "tokens_per_day = 2000");
        let (cluster, _session, _folder, _worker) = started(&file, Options::default()).await;
        let tokenize = async |numbers: usize| {
            let arguments = format!("{{\"x\": {:?}}}", vec![1; numbers]);
            let call = v1::ToolCall { id: "c".to_owned(), name: "f".to_owned(), arguments };
            let message = v1::ChatMessage {
                role: "assistant".to_owned(),
                tool_calls: vec![call],
                ..Default::default()
            };
            let input = Some(tokenize_request::Input::Chat(v1::Chat {
                messages: vec![message],
                ..Default::default()
            }));
            let request = v1::TokenizeRequest { input, ..Default::default() };
            cluster.client.clone().tokenize(with_key(request, "small")).await
        };
        tokenize(100).await.unwrap();
        let refused = tokenize(1000).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
        let violations = refused.get_details_quota_failure().unwrap().violations;
        assert_eq!(violations[0].description, "tokens_per_day");
        tokenize(100).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_large_prompt_is_tokenized_in_pieces_like_a_whole() {
    bounded(async {
        let profile = WorkerProfile { context_tokens: 1 << 18, ..Default::default() };
        let mut worker = ScriptedWorker::start(profile).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let words = "some words, and more. ".repeat(10_000);
        let stop = Some(v1::StopConditions { max_tokens: Some(1), ..Default::default() });
        let _stream = cluster.generate(v1::GenerateRequest { stop, ..text(&words) }).await.unwrap();
        let prompt = session.submit().await.prompt_token_ids;
        assert_eq!(prompt, tokenizer().encode(&words).unwrap());
        assert_eq!(prompt[1..], tokens(&words));
        assert!(metrics().render().contains("inflight_router_tokenize_queue_seconds"));
    })
    .await;
}

#[tokio::test]
async fn a_worker_that_does_not_read_its_commands_loses_its_session_and_its_streams_move() {
    bounded(async {
        let profile = WorkerProfile {
            context_tokens: 1 << 15,
            unread_sessions: 1,
            incarnation: "unread",
            ..Default::default()
        };
        let mut worker = ScriptedWorker::start(profile).await;
        let cluster =
            Cluster::start(&[&worker], Options { worker_commands_max: 8, ..Options::default() }).await;
        let _unread = worker.granted().await;
        cluster.handle.ready().await;
        // More than the windows and buffers of the connection hold.
        let calls = (0..48).map(|_| {
            let ids = vec![200; 20_000];
            let stop = Some(v1::StopConditions { max_tokens: Some(1), ..Default::default() });
            let input = Some(Input::TokenIds(v1::TokenIds { ids }));
            let request = v1::GenerateRequest { input, stop, ..Default::default() };
            let mut client = InferenceClient::new(cluster.channel.clone());
            tokio::spawn(async move { client.generate(request).await.unwrap().into_inner() })
        });
        let calls: Vec<_> = calls.collect();
        let mut session = worker.session().await;
        session.grant(4, 1 << 16);
        for _ in 0..48 {
            let submit = session.submit().await;
            session.finish(&submit, 0, &tokens("x"), v1::FinishReason::Length);
        }
        for call in calls {
            let mut stream = call.await.unwrap();
            let mut completed = false;
            while let Some(message) = stream.message().await.unwrap() {
                completed = matches!(message.event, Some(v1::generate_response::Event::Completed(_)));
            }
            assert!(completed);
        }
        let overflows =
            format!("inflight_router_worker_command_overflows_total{{worker=\"{}\"}} 1", worker.address);
        assert!(metrics().render().contains(&overflows));
    })
    .await;
}
