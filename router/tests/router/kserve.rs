use inflight_proto::kserve;
use inflight_proto::kserve::grpc_inference_service_client::GrpcInferenceServiceClient;
use inflight_proto::kserve::infer_parameter::ParameterChoice;
use inflight_proto::kserve::model_infer_request::InferInputTensor;
use inflight_proto::v1;
use inflight_router::Options;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::cluster::{Cluster, bounded, tokens};
use crate::tenants::{started, tenant, with_key};
use inflight_scripted::{ScriptedWorker, WorkerProfile};

const LENGTH: v1::FinishReason = v1::FinishReason::Length;

fn bytes(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

fn ask(id: &str, prompt: &str, stream: bool) -> kserve::ModelInferRequest {
    let inputs = [
        ("text_input", "BYTES", bytes(prompt)),
        ("max_tokens", "INT32", 9i32.to_le_bytes().to_vec()),
        ("stream", "BOOL", vec![stream.into()]),
    ];
    kserve::ModelInferRequest {
        model_name: "tiny".to_owned(),
        id: id.to_owned(),
        inputs: inputs
            .iter()
            .map(|(name, datatype, _)| InferInputTensor {
                name: (*name).to_owned(),
                datatype: (*datatype).to_owned(),
                shape: vec![1],
                ..Default::default()
            })
            .collect(),
        raw_input_contents: inputs.into_iter().map(|(.., raw)| raw).collect(),
        ..Default::default()
    }
}

fn text_of(response: &kserve::ModelInferResponse) -> String {
    String::from_utf8(response.raw_output_contents[0][4..].to_vec()).unwrap()
}

fn parameter(response: &kserve::ModelInferResponse, name: &str) -> ParameterChoice {
    response.parameters[name].parameter_choice.clone().unwrap()
}

#[tokio::test]
async fn a_text_tensor_is_answered_with_a_text_tensor() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut client = GrpcInferenceServiceClient::new(cluster.channel.clone());
        assert!(client.server_live(kserve::ServerLiveRequest {}).await.unwrap().into_inner().live);
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        assert!(client.server_ready(kserve::ServerReadyRequest {}).await.unwrap().into_inner().ready);
        let named = |name: &str| kserve::ModelReadyRequest { name: name.to_owned(), ..Default::default() };
        assert!(client.model_ready(named("tiny")).await.unwrap().into_inner().ready);
        assert_eq!(client.model_ready(named("gpt")).await.unwrap_err().code(), Code::NotFound);
        let metadata = kserve::ModelMetadataRequest { name: "tiny".to_owned(), ..Default::default() };
        let metadata = client.model_metadata(metadata).await.unwrap().into_inner();
        assert_eq!((metadata.platform.as_str(), metadata.outputs.len()), ("LlamaForCausalLM", 1));
        let mut health = HealthClient::new(cluster.channel.clone());
        for service in ["inference.GRPCInferenceService", "model/tiny"] {
            let request = HealthCheckRequest { service: service.to_owned() };
            while health.check(request.clone()).await.ok().map(|answer| answer.into_inner().status())
                != Some(ServingStatus::Serving)
            {
                tokio::task::yield_now().await;
            }
        }

        let mut calling = client.clone();
        let call = tokio::spawn(async move { calling.model_infer(ask("mine", "hello", false)).await });
        let submit = session.submit().await;
        assert_eq!(
            (submit.prompt_token_ids[1..].to_vec(), submit.request_id.as_str()),
            (tokens("hello"), "mine")
        );
        assert_eq!(submit.stop.as_ref().unwrap().max_tokens, Some(9));
        session.tokens(&submit, 0, &tokens("wor"));
        session.finish(&submit, 0, &tokens("ld"), LENGTH);
        let answer = call.await.unwrap().unwrap().into_inner();
        assert_eq!((text_of(&answer).as_str(), answer.id.as_str()), ("world", "mine"));
        assert_eq!((answer.outputs[0].name.as_str(), &answer.outputs[0].shape), ("text_output", &vec![1]));
        assert_eq!(parameter(&answer, "finish_reason"), ParameterChoice::StringParam("length".to_owned()));
        let completion = (tokens("wor").len() + tokens("ld").len()) as i64;
        assert_eq!(parameter(&answer, "completion_tokens"), ParameterChoice::Int64Param(completion));

        let nameless = kserve::ModelInferRequest { model_name: "gpt".to_owned(), ..ask("x", "a", false) };
        assert_eq!(client.model_infer(nameless).await.unwrap_err().code(), Code::NotFound);
        let empty = client.model_infer(ask("x", "", false)).await.unwrap_err();
        assert_eq!(
            (empty.code(), empty.message().contains("prompt is empty")),
            (Code::InvalidArgument, true)
        );
    })
    .await;
}

#[tokio::test]
async fn a_call_open_during_a_drain_completes_and_accepts_no_more_requests() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let mut client = GrpcInferenceServiceClient::new(cluster.channel.clone());
        let (requests, outgoing) = tokio::sync::mpsc::unbounded_channel();
        let outgoing = tokio_stream::wrappers::UnboundedReceiverStream::new(outgoing);
        requests.send(ask("a", "first", false)).unwrap();
        let mut answers = client.model_stream_infer(outgoing).await.unwrap().into_inner();
        let first = session.submit().await;
        cluster.drain.cancel();
        requests.send(ask("late", "second", false)).unwrap();
        let refused = answers.message().await.unwrap().unwrap();
        assert!(refused.error_message.starts_with("[Unavailable] "), "{}", refused.error_message);
        assert_eq!(refused.infer_response.unwrap().id, "late");
        session.finish(&first, 0, &tokens("x"), LENGTH);
        let answer = answers.message().await.unwrap().unwrap().infer_response.unwrap();
        assert_eq!((answer.id.as_str(), text_of(&answer).as_str()), ("a", "x"));
        // The client could send more requests; the router ends the call to complete its drain.
        assert_eq!(answers.message().await.unwrap_err().code(), Code::Unavailable);
        cluster.serving.await.unwrap().unwrap();
        drop(requests);
    })
    .await;
}

#[tokio::test]
async fn one_call_streams_several_requests_that_fail_independently() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let mut client = GrpcInferenceServiceClient::new(cluster.channel.clone());
        let (requests, outgoing) = tokio::sync::mpsc::unbounded_channel();
        let outgoing = tokio_stream::wrappers::UnboundedReceiverStream::new(outgoing);
        requests.send(ask("a", "first", true)).unwrap();
        let mut answers = client.model_stream_infer(outgoing).await.unwrap().into_inner();
        let first = session.submit().await;
        requests.send(ask("bad", "", true)).unwrap();
        let failed = answers.message().await.unwrap().unwrap();
        assert!(failed.error_message.starts_with("[InvalidArgument] "), "{}", failed.error_message);
        assert_eq!(failed.infer_response.unwrap().id, "bad");
        requests.send(ask("b", "second", false)).unwrap();
        let second = session.submit().await;
        session.tokens(&first, 0, &tokens("x"));
        let message = answers.message().await.unwrap().unwrap().infer_response.unwrap();
        assert_eq!((message.id.as_str(), text_of(&message).as_str()), ("a", "x"));
        assert_eq!(parameter(&message, "triton_final_response"), ParameterChoice::BoolParam(false));
        session.tokens(&second, 0, &tokens("never alone"));
        session.finish(&first, 0, &tokens("y"), LENGTH);
        session.finish(&second, 0, &tokens("."), LENGTH);
        drop(requests);
        let mut texts = std::collections::BTreeMap::from([("a".to_owned(), "x".to_owned())]);
        let mut last = Vec::new();
        while let Some(answer) = answers.message().await.unwrap() {
            let answer = answer.infer_response.unwrap();
            *texts.entry(answer.id.clone()).or_default() += &text_of(&answer);
            if parameter(&answer, "triton_final_response") == ParameterChoice::BoolParam(true) {
                last.push(answer.id);
            }
        }
        last.sort();
        assert_eq!(last, ["a", "b"]);
        assert_eq!((texts["a"].as_str(), texts["b"].as_str()), ("xy", "never alone."));

        // A client that leaves cancels its requests.
        let (requests, outgoing) = tokio::sync::mpsc::unbounded_channel();
        let outgoing = tokio_stream::wrappers::UnboundedReceiverStream::new(outgoing);
        requests.send(ask("c", "third", true)).unwrap();
        let answers = client.model_stream_infer(outgoing).await.unwrap();
        let third = session.submit().await;
        drop((answers, requests));
        assert_eq!(session.cancel().await.submission_id, third.submission_id);
    })
    .await;
}

#[tokio::test]
async fn an_open_call_takes_no_requests_of_a_key_that_was_revoked() {
    bounded(async {
        let (cluster, mut session, folder, _worker) =
            started(&(tenant("a", "") + &tenant("b", "")), Options::default()).await;
        session.grant(8, 1000);
        let mut client = GrpcInferenceServiceClient::new(cluster.channel.clone());
        let (requests, outgoing) = tokio::sync::mpsc::unbounded_channel();
        let outgoing = tokio_stream::wrappers::UnboundedReceiverStream::new(outgoing);
        requests.send(ask("before", "first", false)).unwrap();
        let mut answers = client.model_stream_infer(with_key(outgoing, "a")).await.unwrap().into_inner();
        let first = session.submit().await;
        folder.write("tenants.toml", &tenant("b", ""));
        let ready = || kserve::ModelReadyRequest { name: "tiny".to_owned(), ..Default::default() };
        while client.model_ready(with_key(ready(), "a")).await.is_ok() {
            tokio::task::yield_now().await;
        }
        requests.send(ask("after", "second", false)).unwrap();
        let refused = answers.message().await.unwrap().unwrap();
        assert!(refused.error_message.starts_with("[Unauthenticated] "), "{}", refused.error_message);
        assert_eq!(refused.infer_response.unwrap().id, "after");
        // What has begun is completed, and with it the call.
        session.finish(&first, 0, &tokens("x"), LENGTH);
        let answer = answers.message().await.unwrap().unwrap().infer_response.unwrap();
        assert_eq!((answer.id.as_str(), text_of(&answer).as_str()), ("before", "x"));
        assert!(answers.message().await.unwrap().is_none());
    })
    .await;
}

#[tokio::test]
async fn open_stream_calls_are_bounded_and_a_tenant_leaves_some_to_others() {
    bounded(async {
        let file = tenant("a", "") + &tenant("b", "");
        let options = Options { streams_max: 5, ..Options::default() };
        let (cluster, _session, _folder, _worker) = started(&file, options).await;
        // A call without requests, until the sender is dropped.
        let open = async |key: &str| {
            let mut client = GrpcInferenceServiceClient::new(cluster.channel.clone());
            let (requests, outgoing) = tokio::sync::mpsc::channel::<kserve::ModelInferRequest>(1);
            let outgoing = tokio_stream::wrappers::ReceiverStream::new(outgoing);
            client.model_stream_infer(with_key(outgoing, key)).await.map(|answers| (requests, answers))
        };
        let mut calls = Vec::new();
        for (key, accepted) in
            [("a", true), ("a", true), ("a", true), ("a", false), ("b", true), ("b", false)]
        {
            match open(key).await {
                Ok(call) if accepted => calls.push(call),
                Err(refused) if !accepted => {
                    assert_eq!(refused.code(), Code::ResourceExhausted);
                    assert!(refused.message().contains("--streams-max"), "{refused}");
                }
                other => panic!("{key}: {:?}", other.map(|_| ())),
            }
        }
        drop(calls);
        while open("a").await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}
