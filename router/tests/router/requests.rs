use std::time::Duration;

use inflight_fixtures::{Chat, Family};
use inflight_proto::v1;
use inflight_proto::v1::constraint::Grammar;
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::tokenize_request;
use inflight_router::{Error, Options, Router};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::{Code, Request, Status};
use tonic_types::StatusExt;

use crate::cluster::{Cluster, bounded, queue_of, text, tokens};
use inflight_scripted::{ScriptedWorker, WorkerProfile};

type Change = fn(&mut v1::GenerateRequest);

fn changed(change: Change) -> v1::GenerateRequest {
    let mut request = v1::GenerateRequest {
        sampling: Some(v1::SamplingParams::default()),
        stop: Some(v1::StopConditions::default()),
        ..text("a")
    };
    change(&mut request);
    request
}

fn sampling(request: &mut v1::GenerateRequest) -> &mut v1::SamplingParams {
    request.sampling.as_mut().unwrap()
}

fn stop(request: &mut v1::GenerateRequest) -> &mut v1::StopConditions {
    request.stop.as_mut().unwrap()
}

fn constraint(grammar: Grammar, begins_after: Option<u32>) -> Option<v1::Constraint> {
    Some(v1::Constraint { grammar: Some(grammar), begins_after, ..v1::Constraint::default() })
}

fn word(token_ids: &[u32]) -> v1::TokenSequence {
    v1::TokenSequence { token_ids: token_ids.to_vec() }
}

/// Invalid field, and words that the message must have.
const INVALID: &[(Change, &str)] = &[
    (|r| r.input = None, "input is missing"),
    (|r| r.input = Some(Input::Text(String::new())), "the prompt is empty"),
    (|r| r.input = Some(Input::TokenIds(v1::TokenIds { ids: vec![] })), "the prompt is empty"),
    (
        |r| r.input = Some(Input::Chat(v1::Chat { messages: vec![], ..Default::default() })),
        "the prompt is empty",
    ),
    (|r| r.input = Some(Input::TokenIds(v1::TokenIds { ids: vec![1, 285] })), "token id 285 at position 1"),
    (|r| r.input = Some(Input::TokenIds(v1::TokenIds { ids: vec![1; 257] })), "context length is 256"),
    (|r| stop(r).max_tokens = Some(0), "max_tokens is 0"),
    (|r| stop(r).max_tokens = Some(255), "context length is 256"),
    (|r| stop(r).max_tokens = Some(u32::MAX), "context length is 256"),
    (|r| (stop(r).max_tokens, stop(r).min_tokens) = (Some(3), 4), "min_tokens is 4"),
    (|r| stop(r).stop = vec!["x".to_owned(); 10_000], "stop has 10000 strings"),
    (|r| stop(r).stop = vec!["x".to_owned(), String::new()], "stop[1] has 0 bytes"),
    (|r| stop(r).stop = vec!["x".repeat(257)], "stop[0] has 257 bytes"),
    (|r| stop(r).stop_token_ids = vec![1; 129], "stop_token_ids"),
    (|r| stop(r).stop_token_ids = vec![9999], "token id 9999"),
    (|r| sampling(r).temperature = Some(-0.1), "temperature"),
    (|r| sampling(r).temperature = Some(f32::NAN), "temperature"),
    (|r| sampling(r).constraint = Some(v1::Constraint::default()), "the grammar is empty"),
    (|r| sampling(r).constraint = constraint(Grammar::Lark("start: (".to_owned()), None), ""),
    (|r| sampling(r).constraint = constraint(Grammar::JsonSchema("{".to_owned()), None), "not valid JSON"),
    (|r| sampling(r).constraint = constraint(Grammar::Regex("a".repeat(300_000)), None), "300000 bytes"),
    (|r| sampling(r).constraint = constraint(Grammar::Regex("a".to_owned()), Some(9999)), "token id 9999"),
    (|r| sampling(r).top_p = Some(-0.1), "top_p"),
    (|r| sampling(r).top_p = Some(1.1), "top_p"),
    (|r| sampling(r).top_k = Some(-1), "top_k"),
    (|r| sampling(r).min_p = Some(f32::INFINITY), "min_p"),
    (|r| sampling(r).presence_penalty = Some(2.1), "presence_penalty"),
    (|r| sampling(r).frequency_penalty = Some(-2.1), "frequency_penalty"),
    (|r| sampling(r).repetition_penalty = Some(0.0), "repetition_penalty"),
    (|r| sampling(r).logprobs = Some(21), "logprobs"),
    (|r| sampling(r).n = Some(0), "n is 0"),
    (|r| sampling(r).n = Some(17), "n is 17"),
    (|r| sampling(r).logit_bias = (0..1025).map(|id| (id, 0.0)).collect(), "logit_bias"),
    (|r| sampling(r).logit_bias = [(285, 1.0)].into(), "token id 285"),
    (|r| sampling(r).logit_bias = [(1, 101.0)].into(), "logit_bias"),
    (|r| sampling(r).allowed_token_ids = vec![285], "token id 285"),
    (|r| sampling(r).allowed_token_ids = vec![1; 65_537], "allowed_token_ids has 65537 entries"),
    (|r| sampling(r).bad_words = vec!["x".to_owned(); 257], "bad_words has 257 words"),
    (|r| sampling(r).bad_words = vec!["x".to_owned(), "  ".to_owned()], "bad_words[1] has 2 bytes"),
    (|r| sampling(r).bad_words = vec!["x".repeat(129)], "bad_words[0] has 129 bytes"),
    (|r| sampling(r).bad_words = vec!["\u{1f642}".repeat(20)], "each must have 1 to 32"),
    (|r| sampling(r).bad_words = vec!["\u{1f642}".repeat(7); 200], "tokens together; at most 4096"),
    (|r| sampling(r).bad_word_token_ids = vec![word(&[])], "bad_word_token_ids[0] has 0 tokens"),
    (|r| sampling(r).bad_word_token_ids = vec![word(&[1; 33])], "bad_word_token_ids[0] has 33 tokens"),
    (|r| sampling(r).bad_word_token_ids = vec![word(&[1, 285])], "token id 285 at position 1"),
    (|r| sampling(r).bad_word_token_ids = (0..513).map(|_| word(&[1])).collect(), "has 513 entries"),
    (
        |r| (sampling(r).allowed_token_ids, sampling(r).bad_word_token_ids) = (vec![7], vec![word(&[7])]),
        "every allowed token is a bad word",
    ),
    (|r| sampling(r).prompt_logprobs = Some(21), "prompt_logprobs is 21"),
    (|r| r.truncate_prompt_tokens = Some(0), "truncate_prompt_tokens is 0"),
    (|r| r.truncate_prompt_tokens = Some(-2), "in [1, 256], or -1"),
    (|r| r.truncate_prompt_tokens = Some(257), "truncate_prompt_tokens is 257"),
    (|r| r.truncate_prompt_tokens = Some(i32::MIN), "truncate_prompt_tokens"),
    (|r| (r.truncate_prompt_tokens, stop(r).max_tokens) = (Some(-1), Some(256)), "context length is 256"),
    (|r| r.weight = Some(0.0), "weight is 0"),
    (|r| r.weight = Some(f32::NAN), "weight is NaN"),
    (|r| r.weight = Some(1000.5), "weight is 1000.5"),
    (|r| r.priority = 101, "priority is 101"),
    (|r| r.priority = i32::MIN, "priority is -2147483648"),
    (|r| r.tenant = "t".repeat(129), "tenant has 129 bytes"),
    (|r| r.request_id = "r".repeat(129), "request_id has 129 bytes"),
];

#[tokio::test]
async fn every_field_out_of_range_is_rejected_by_name_before_dispatch() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        for (change, words) in INVALID {
            let status = cluster.generate(changed(*change)).await.err().expect(words);
            assert_eq!(status.code(), Code::InvalidArgument, "{words}: {status}");
            assert!(status.message().contains(words), "{words:?} is not in {:?}", status.message());
        }
        // The worker receives the first valid request only.
        let _stream = cluster.generate(text("right")).await.unwrap();
        assert_eq!(session.submit().await.prompt_token_ids[1..], tokens("right"));
    })
    .await;
}

#[tokio::test]
async fn bad_words_reach_the_worker_with_and_without_a_leading_space() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let request = changed(|r| {
            sampling(r).bad_words = vec![" word".to_owned()];
            sampling(r).bad_word_token_ids = vec![word(&[9, 8])];
            sampling(r).allowed_token_ids = vec![7, 3, 7];
        });
        let _stream = cluster.generate(request).await.unwrap();
        let submitted = session.submit().await.sampling.unwrap();
        let mut expected = vec![word(&tokens("word")), word(&tokens(" word")), word(&[9, 8])];
        expected.sort_by(|a, b| a.token_ids.cmp(&b.token_ids));
        assert_eq!(submitted.bad_word_token_ids, expected);
        assert_eq!((submitted.allowed_token_ids, submitted.bad_words), (vec![3, 7], vec![]));
        // So many that they are tokenized in turns with other tenants.
        let request = changed(|r| {
            sampling(r).bad_words = (0..256).map(|number| format!("w{number}")).collect();
        });
        let words = request.sampling.clone().unwrap().bad_words;
        let expected = words.iter().flat_map(|word| [word.clone(), format!(" {word}")]);
        let mut expected: Vec<_> = expected.map(|text| word(&tokens(&text))).collect();
        expected.sort_by(|a, b| a.token_ids.cmp(&b.token_ids));
        let _stream = cluster.generate(request).await.unwrap();
        assert_eq!(session.submit().await.sampling.unwrap().bad_word_token_ids, expected);
    })
    .await;
}

#[tokio::test]
async fn a_truncated_prompt_keeps_its_last_tokens() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let long = "word ".repeat(300);
        let all = tokens(&long);
        let chat = v1::Chat {
            messages: vec![v1::ChatMessage {
                role: "user".to_owned(),
                content: long.clone(),
                ..Default::default()
            }],
            ..Default::default()
        };
        let ids = |ids| Input::TokenIds(v1::TokenIds { ids });
        let mut streams = Vec::new();
        let cases = [
            (Input::Text(long.clone()), Some(7), Some(3), 7),
            (ids(all.clone()), Some(256 - 3), Some(3), 253),
            (ids(all.clone()), Some(-1), Some(3), 253),
            (ids(all.clone()), Some(-1), None, 255),
            (ids(all[..5].to_vec()), Some(100), None, 5),
            (Input::Chat(chat), Some(20), None, 20),
        ];
        for (input, truncate_prompt_tokens, max_tokens, kept) in cases {
            let is_chat = matches!(input, Input::Chat(_));
            let whole = if let Input::TokenIds(ids) = &input { ids.ids.clone() } else { all.clone() };
            let stop = Some(v1::StopConditions { max_tokens, ..Default::default() });
            let input = Some(input);
            let request = v1::GenerateRequest { input, truncate_prompt_tokens, stop, ..Default::default() };
            // Dropping a stream would cancel its request.
            streams.push(cluster.generate(request).await.unwrap());
            let submitted = session.submit().await.prompt_token_ids;
            assert_eq!(submitted.len(), kept);
            assert!(is_chat || whole.ends_with(&submitted), "{truncate_prompt_tokens:?}");
        }
        let endless = v1::GenerateRequest { truncate_prompt_tokens: Some(7), ..text(&long.repeat(200)) };
        let refused = cluster.generate(endless).await.err().unwrap();
        assert!(refused.message().contains("send the end of the text only"), "{refused}");
    })
    .await;
}

/// Tokenizing takes a second for each such text, and other requests queue behind it.
#[tokio::test]
async fn text_that_cannot_fit_is_rejected_by_its_size() {
    bounded(async {
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        cluster.handle.ready().await;
        let long = "Once upon a time. ".repeat(200_000);
        let chat = v1::ChatMessage { role: "user".to_owned(), content: long.clone(), ..Default::default() };
        let chat = v1::Chat { messages: vec![chat], ..Default::default() };
        for input in [Input::Text(long.clone()), Input::Chat(chat)] {
            let request = v1::GenerateRequest { input: Some(input), ..Default::default() };
            let refused = cluster.client.generate(request).await.unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument);
            assert!(refused.message().contains("bytes of text are at least"), "{}", refused.message());
        }
        let request =
            v1::TokenizeRequest { input: Some(tokenize_request::Input::Text(long)), ..Default::default() };
        let refused = cluster.client.tokenize(request).await.unwrap_err();
        assert!(refused.message().contains("the model takes 256"), "{}", refused.message());
    })
    .await;
}

#[tokio::test]
async fn an_unknown_model_is_not_found_and_the_message_names_those_served() {
    bounded(async {
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let other = ScriptedWorker::start(WorkerProfile { model: "other", ..WorkerProfile::default() }).await;
        let mut cluster = Cluster::start(&[&worker, &other], Options::default()).await;
        let models = loop {
            let models =
                cluster.client.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
            if models.len() == 2 {
                break models;
            }
            tokio::task::yield_now().await;
        };
        let names: Vec<_> = models
            .iter()
            .map(|model| (model.name.as_str(), model.workers, model.has_chat_template))
            .collect();
        assert_eq!(names, [("other", 1, true), ("tiny", 1, true)]);
        assert_eq!((models[1].context_tokens, models[1].vocab_size), (256, 285));
        let asked = |model: &str| v1::GenerateRequest { model: model.to_owned(), ..text("a") };
        let unknown = cluster.generate(asked("gpt")).await.err().unwrap();
        assert_eq!(unknown.code(), Code::NotFound);
        assert!(unknown.message().contains("\"gpt\"") && unknown.message().contains("other, tiny"));
        let unnamed = cluster.generate(asked("")).await.err().unwrap();
        assert_eq!(unnamed.code(), Code::InvalidArgument);
        assert!(unnamed.message().contains("other, tiny"), "{unnamed}");
    })
    .await;
}

#[tokio::test]
async fn without_any_worker_requests_are_rejected_at_once() {
    bounded(async {
        let gone = ScriptedWorker::start(WorkerProfile::default()).await;
        let address = gone.address;
        drop(gone);
        let mut client = {
            let options = Options {
                listen: "127.0.0.1:0".parse().unwrap(),
                workers: vec![address.to_string()],
                ..Options::default()
            };
            let router = Router::bind(options).await.unwrap();
            let url = format!("http://{}", router.address());
            tokio::spawn(router.serve(Default::default()));
            v1::inference_client::InferenceClient::connect(url).await.unwrap()
        };
        let status = client.generate(text("a")).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("none of the 1 configured workers"), "{status}");
    })
    .await;
}

#[tokio::test]
async fn chats_are_rendered_like_transformers_and_rejected_without_a_template() {
    bounded(async {
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        cluster.handle.ready().await;
        let reference = Chat::load(Family::Llama3).unwrap();
        let message = |message: &inflight_fixtures::Message| v1::ChatMessage {
            role: message.role.clone(),
            content: message.content.clone(),
            ..Default::default()
        };
        let chat =
            v1::Chat { messages: reference.messages.iter().map(message).collect(), ..Default::default() };
        let input = Some(tokenize_request::Input::Chat(chat.clone()));
        let tokenize = v1::TokenizeRequest { input, ..Default::default() };
        let answer = cluster.client.tokenize(tokenize).await.unwrap().into_inner();
        assert_eq!(answer.token_ids, reference.tokens);
        assert_eq!(answer.pieces.len(), answer.token_ids.len());
        assert_eq!(answer.pieces[0], "<|begin_of_text|>");

        let mut files = WorkerProfile::default().files;
        files.remove("tokenizer_config.json");
        let mute = ScriptedWorker::start(WorkerProfile { files, ..WorkerProfile::default() }).await;
        let mut cluster = Cluster::start(&[&mute], Options::default()).await;
        cluster.handle.ready().await;
        let request = v1::GenerateRequest { input: Some(Input::Chat(chat)), ..Default::default() };
        let status = cluster.generate(request).await.err().unwrap();
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().contains("no chat template"), "{status}");
    })
    .await;
}

#[tokio::test]
async fn unset_fields_get_the_defaults_of_the_model_and_the_router() {
    bounded(async {
        let mut files = WorkerProfile::default().files;
        let config = br#"{"do_sample": true, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}"#;
        files.insert("generation_config.json", config.to_vec());
        let mut worker = ScriptedWorker::start(WorkerProfile { files, ..WorkerProfile::default() }).await;
        let options = Options { default_max_tokens: 100, anonymous_weights: true, ..Options::default() };
        let mut cluster = Cluster::start(&[&worker], options).await;
        let mut session = worker.granted().await;
        assert_eq!(session.open.router_id, "router@127.0.0.1:0");
        cluster.handle.ready().await;
        let request = v1::GenerateRequest {
            sampling: Some(v1::SamplingParams { top_k: Some(3), n: Some(2), ..Default::default() }),
            tenant: "t".to_owned(),
            priority: 7,
            request_id: "mine".to_owned(),
            ..text("hello")
        };
        let mut stream = cluster.generate(request.clone()).await.unwrap();
        let submit = session.submit().await;
        let sampling = submit.sampling.clone().unwrap();
        assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p), (Some(0.6), Some(3), Some(1.0)));
        assert_eq!((sampling.repetition_penalty, sampling.n), (Some(1.1), Some(2)));
        assert_eq!((submit.weight, submit.priority, submit.tenant.as_str()), (1.0, 7, "t"));
        assert_eq!((submit.attempt, submit.request_id.as_str(), submit.deadline_us), (1, "mine", None));
        assert_eq!(submit.stop.as_ref().unwrap().max_tokens, Some(100));
        assert!(submit.resumed.is_empty());
        stream.advance().await.unwrap();
        let started = stream.started.clone().unwrap();
        assert_eq!((started.request_id.as_str(), started.model.as_str()), ("mine", "tiny"));
        assert_eq!(
            (Some(started.seed), started.prompt_tokens),
            (sampling.seed, submit.prompt_token_ids.len() as u32)
        );

        // With less room than the default, max_tokens is the room.
        let ids = v1::TokenIds { ids: vec![5; 200] };
        let _stream =
            cluster.generate(v1::GenerateRequest { input: Some(Input::TokenIds(ids)), ..request }).await;
        let second = session.submit().await;
        assert_eq!(second.stop.unwrap().max_tokens, Some(56));
        assert_ne!(second.sampling.unwrap().seed, sampling.seed, "each request draws a seed of its own");
    })
    .await;
}

#[tokio::test]
async fn a_full_queue_rejects_with_a_retry_delay() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let options = Options { dispatcher: queue_of(2), ..Options::default() };
        let mut cluster = Cluster::start(&[&worker], options).await;
        let mut session = worker.session().await;
        cluster.handle.ready().await;
        // Nothing is granted, so requests wait.
        let first = cluster.generate(text("first")).await.unwrap();
        let _second = cluster.generate(text("second")).await.unwrap();
        let status = cluster.generate(text("third")).await.err().unwrap();
        assert_eq!(status.code(), Code::ResourceExhausted);
        let retry = status.get_details_retry_info().unwrap().retry_delay;
        assert_eq!(retry, Some(Duration::from_secs(1)));
        assert_eq!(status.metadata().get("grpc-retry-pushback-ms").unwrap(), "1000");
        assert_eq!(status.get_details_error_info().unwrap().reason, "FULL");
        assert!(status.message().contains("the limit is 2 (--queue-requests-max)"), "{status}");
        // A client that leaves frees its queue slot, and its request never reaches a worker.
        drop(first);
        let third = loop {
            match cluster.generate(text("third")).await {
                Ok(third) => break third,
                Err(status) => assert_eq!(status.code(), Code::ResourceExhausted),
            }
        };
        session.grant(64, 1000);
        assert_eq!(session.submit().await.prompt_token_ids[1..], tokens("second"));
        assert_eq!(session.submit().await.prompt_token_ids[1..], tokens("third"));
        drop(third);
    })
    .await;
}

#[tokio::test]
async fn a_message_over_the_limit_is_resource_exhausted() {
    bounded(async {
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let options = Options { message_bytes_max: 1000, ..Options::default() };
        let mut cluster = Cluster::start(&[&worker], options).await;
        cluster.handle.ready().await;
        let status = cluster.generate(text(&"a".repeat(1001))).await.err().unwrap();
        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
        let input = Some(tokenize_request::Input::Text("a".repeat(1001)));
        let tokenize = v1::TokenizeRequest { input, ..Default::default() };
        assert_eq!(cluster.client.tokenize(tokenize).await.unwrap_err().code(), Code::ResourceExhausted);
    })
    .await;
}

/// Codec that sends raw bytes.
#[derive(Default)]
struct RawCodec;

impl Codec for RawCodec {
    type Encode = Vec<u8>;
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for RawCodec {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, bytes: Vec<u8>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        bytes::BufMut::put_slice(buffer, &bytes);
        Ok(())
    }
}

impl Decoder for RawCodec {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, _: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        Ok(Some(()))
    }
}

#[tokio::test]
async fn invalid_utf8_and_a_truncated_message_are_the_clients_fault() {
    bounded(async {
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let cluster = Cluster::start(&[&worker], Options::default()).await;
        cluster.handle.ready().await;
        let path = "/inflight.v1.Inference/Generate";
        // Field 2 (text), two bytes, of which the first can begin no character; then a length beyond the end.
        for bytes in [vec![0x12, 2, 0xff, b'a'], vec![0x12, 200, b'a']] {
            let mut client = tonic::client::Grpc::new(cluster.channel.clone());
            client.ready().await.unwrap();
            let request = Request::new(bytes);
            let answer = client.server_streaming(request, path.parse().unwrap(), RawCodec).await;
            let status = answer.err().unwrap();
            assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_port_in_use_is_named() {
    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let listen = taken.local_addr().unwrap();
    let options = Options { listen, workers: vec!["127.0.0.1:1".to_owned()], ..Options::default() };
    let error = Router::bind(options).await.err().unwrap();
    assert!(matches!(error, Error::Bind { .. }));
    assert!(error.to_string().contains(&listen.to_string()), "{error}");
}
