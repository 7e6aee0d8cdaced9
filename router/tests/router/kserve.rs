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

#[tokio::test]
async fn versions_that_a_model_does_not_have_are_not_ready_and_not_found() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let mut client = GrpcInferenceServiceClient::new(cluster.channel.clone());
        for version in ["", "1", "9", "latest"] {
            let known = matches!(version, "" | "1");
            let (name, version) = ("tiny".to_owned(), version.to_owned());
            let ready = kserve::ModelReadyRequest { name: name.clone(), version: version.clone() };
            assert_eq!(client.model_ready(ready).await.unwrap().into_inner().ready, known, "{version:?}");
            let metadata = kserve::ModelMetadataRequest { name: name.clone(), version: version.clone() };
            let config = kserve::ModelConfigRequest { name: name.clone(), version: version.clone() };
            let statistics = kserve::ModelStatisticsRequest { name, version: version.clone() };
            let mut refusals = vec![
                client.model_metadata(metadata).await.err(),
                client.model_config(config).await.err(),
                client.model_statistics(statistics).await.err(),
            ];
            if !known {
                let infer =
                    kserve::ModelInferRequest { model_version: version.clone(), ..ask("x", "a", false) };
                refusals.push(client.model_infer(infer.clone()).await.err());
                let mut answers =
                    client.model_stream_infer(tokio_stream::once(infer)).await.unwrap().into_inner();
                let answer = answers.message().await.unwrap().unwrap();
                let expected = format!(
                    "[NotFound] the model \"tiny\" has no version {version:?}; its only version is 1"
                );
                assert_eq!(
                    (answer.error_message, answer.infer_response.unwrap().id),
                    (expected, "x".to_owned())
                );
            }
            for refusal in refusals {
                assert_eq!(
                    refusal.map(|status| status.code()),
                    (!known).then_some(Code::NotFound),
                    "{version:?}"
                );
            }
        }
        let infer = kserve::ModelInferRequest { model_version: "1".to_owned(), ..ask("x", "a", false) };
        let call = tokio::spawn(async move { client.model_infer(infer).await });
        let submit = session.submit().await;
        session.finish(&submit, 0, &tokens("b"), LENGTH);
        assert_eq!(call.await.unwrap().unwrap().into_inner().model_version, "1");
    })
    .await;
}

#[tokio::test]
async fn configuration_and_index_describe_the_model_and_statistics_count_its_requests() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let mut client = GrpcInferenceServiceClient::new(cluster.channel.clone());
        let named = || "tiny".to_owned();
        let config = kserve::ModelConfigRequest { name: named(), ..Default::default() };
        let config = client.model_config(config).await.unwrap().into_inner().config.unwrap();
        let metadata = kserve::ModelMetadataRequest { name: named(), ..Default::default() };
        let metadata = client.model_metadata(metadata).await.unwrap().into_inner();
        let inputs: Vec<&str> = metadata.inputs.iter().map(|input| &*input.name).collect();
        assert_eq!(config.input.iter().map(|input| &*input.name).collect::<Vec<_>>(), inputs);
        assert_eq!(config.input[0].data_type(), kserve::DataType::TypeString);
        assert!(config.model_transaction_policy.unwrap().decoupled && config.max_batch_size == 0);
        let index =
            client.repository_index(kserve::RepositoryIndexRequest::default()).await.unwrap().into_inner();
        let entry = &index.models[0];
        assert_eq!(
            (index.models.len(), &*entry.name, &*entry.version, &*entry.state),
            (1, "tiny", "1", "READY")
        );
        let elsewhere = kserve::RepositoryIndexRequest { repository_name: "x".to_owned(), ready: false };
        assert_eq!(client.repository_index(elsewhere).await.unwrap_err().code(), Code::InvalidArgument);

        // One completes, one fails, and one is cancelled, over two protocols.
        let mut calling = client.clone();
        let call = tokio::spawn(async move { calling.model_infer(ask("a", "a", false)).await });
        let submit = session.submit().await;
        session.finish(&submit, 0, &tokens("b"), LENGTH);
        call.await.unwrap().unwrap();
        let mut calling = client.clone();
        let call = tokio::spawn(async move { calling.model_infer(ask("b", "a", false)).await });
        let submit = session.submit().await;
        session.finish(&submit, 0, &[], v1::FinishReason::Error);
        call.await.unwrap().unwrap_err();
        let mut generating = cluster.client.clone();
        let stream = generating.generate(crate::cluster::text("a")).await.unwrap();
        let submit = session.submit().await;
        drop(stream);
        session.cancel().await;
        session.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
        let of = |counted: Option<kserve::StatisticDuration>| counted.unwrap().count;
        let statistics = loop {
            let all = client
                .model_statistics(kserve::ModelStatisticsRequest::default())
                .await
                .unwrap()
                .into_inner();
            let [model] = &all.model_stats[..] else { panic!("{all:?}") };
            let stats = model.inference_stats.unwrap();
            if of(stats.success) + of(stats.fail) == 2 && of(stats.queue) == 3 {
                break model.clone();
            }
            tokio::task::yield_now().await;
        };
        let stats = statistics.inference_stats.unwrap();
        assert_eq!((statistics.inference_count, of(stats.fail), of(stats.compute_infer)), (1, 1, 1));
        let ns = |counted: Option<kserve::StatisticDuration>| counted.unwrap().ns;
        assert!(
            ns(stats.success) >= ns(stats.compute_infer) && statistics.last_inference > 1_700_000_000_000,
            "{stats:?}"
        );
    })
    .await;
}

#[tokio::test]
async fn the_input_is_repeated_on_request_but_not_in_streams() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let client = GrpcInferenceServiceClient::new(cluster.channel.clone());
        let request = |exclude: bool, stream: bool| {
            let choice = Some(ParameterChoice::BoolParam(exclude));
            let parameter = kserve::InferParameter { parameter_choice: choice };
            let parameters = [("exclude_input_in_output".to_owned(), parameter)].into();
            kserve::ModelInferRequest { parameters, ..ask("x", "hello ", stream) }
        };
        for (exclude, text) in [(true, "world"), (false, "hello world")] {
            let mut calling = client.clone();
            let call = tokio::spawn(async move { calling.model_infer(request(exclude, false)).await });
            let submit = session.submit().await;
            session.finish(&submit, 0, &tokens("world"), LENGTH);
            assert_eq!(text_of(&call.await.unwrap().unwrap().into_inner()), text);
        }
        let refused = client.clone().model_infer(request(false, true)).await.unwrap_err();
        assert!(refused.message().contains("exclude_input_in_output"), "{refused}");
    })
    .await;
}

#[tokio::test]
async fn statistics_are_for_administrators() {
    bounded(async {
        let file = tenant("a", "") + &tenant("b", "") + "admin = true\n";
        let (cluster, _session, _folder, _worker) = started(&file, Options::default()).await;
        let mut client = GrpcInferenceServiceClient::new(cluster.channel.clone());
        let mut ask = async |key: &str| {
            let request = with_key(kserve::ModelStatisticsRequest::default(), key);
            client.model_statistics(request).await.map(|_| ()).map_err(|status| status.code())
        };
        assert_eq!((ask("a").await, ask("b").await), (Err(Code::PermissionDenied), Ok(())));
    })
    .await;
}
