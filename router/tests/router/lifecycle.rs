use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use inflight_proto::v1;
use inflight_router::{Connector, Core, DispatcherOptions, Options};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::cluster::{Cluster, bounded, count, queue_of, spans_of, text, tokens};
use inflight_scripted::{ScriptedWorker, WorkerProfile};

const STOP: v1::FinishReason = v1::FinishReason::Stop;
const LENGTH: v1::FinishReason = v1::FinishReason::Length;
/// Token id of `<|eot_id|>`.
const EOT: u32 = 284;

fn service(name: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: name.to_owned() }
}

#[tokio::test]
async fn health_follows_workers_and_drain_and_open_streams_complete() {
    bounded(async {
        let mut worker =
            ScriptedWorker::start(WorkerProfile { bad_bundles: 2, ..WorkerProfile::default() }).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut health = HealthClient::new(cluster.channel.clone());
        let mut watch = health.watch(service("inflight.v1.Inference")).await.unwrap().into_inner();
        let seen = |answer: Option<HealthCheckResponse>| answer.unwrap().status();
        assert_eq!(seen(watch.message().await.unwrap()), ServingStatus::NotServing);
        // The first two sessions fail on a bundle with a wrong digest.
        for _ in 0..2 {
            assert!(worker.session().await.closed().await);
            assert!(!cluster.handle.is_ready());
        }
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        assert_eq!(seen(watch.message().await.unwrap()), ServingStatus::Serving);
        let overall = health.check(service("")).await.unwrap().into_inner();
        assert_eq!(overall.status(), ServingStatus::Serving);

        let mut stream = cluster.generate(text("a")).await.unwrap();
        let submit = session.submit().await;
        session.tokens(&submit, 0, &tokens("x"));
        stream.until_text("x").await;
        cluster.drain.cancel();
        assert_eq!(seen(watch.message().await.unwrap()), ServingStatus::NotServing);
        assert!(!cluster.serving.is_finished());
        session.finish(&submit, 0, &tokens("y"), LENGTH);
        stream.read_to_end().await.unwrap();
        assert_eq!(stream.text[0], "xy");
        // The health watch is still open, and does not delay the shutdown.
        cluster.serving.await.unwrap().unwrap();
        assert!(session.closed().await, "sessions end with the router");
    })
    .await;
}

#[tokio::test]
async fn a_draining_worker_completes_its_requests_and_gets_no_new_ones() {
    bounded(async {
        let mut workers = [
            ScriptedWorker::start(WorkerProfile::default()).await,
            ScriptedWorker::start(WorkerProfile::default()).await,
        ];
        let mut cluster = Cluster::start(&[&workers[0], &workers[1]], Options::default()).await;
        let mut first = workers[0].granted().await;
        let mut second = workers[1].session().await;
        cluster.handle.ready().await;
        let mut old = cluster.generate(text("old")).await.unwrap();
        let submit = first.submit().await;
        first.update(v1::Update {
            draining: true,
            sequences: vec![inflight_scripted::sequence(
                &submit,
                0,
                &tokens("x"),
                v1::FinishReason::Unspecified,
            )],
            ..Default::default()
        });
        old.until_text("x").await;
        let mut new = cluster.generate(text("new")).await.unwrap();
        second.grant(8, 1000);
        let other = second.submit().await;
        second.finish(&other, 0, &tokens("n"), LENGTH);
        new.read_to_end().await.unwrap();
        first.finish(&submit, 0, &tokens("y"), LENGTH);
        old.read_to_end().await.unwrap();
        assert_eq!((old.text[0].as_str(), new.text[0].as_str()), ("xy", "n"));
    })
    .await;
}

#[tokio::test]
async fn equal_workers_are_used_round_robin_and_higher_priority_goes_first() {
    bounded(async {
        let mut workers = [
            ScriptedWorker::start(WorkerProfile::default()).await,
            ScriptedWorker::start(WorkerProfile::default()).await,
        ];
        let options = Options { anonymous_weights: true, ..Options::default() };
        let mut cluster = Cluster::start(&[&workers[0], &workers[1]], options).await;
        let mut sessions = [workers[0].session().await, workers[1].session().await];
        while cluster
            .client
            .list_models(v1::ListModelsRequest {})
            .await
            .unwrap()
            .into_inner()
            .models
            .is_empty()
        {
            tokio::task::yield_now().await;
        }
        let ask = |name: &str, priority| v1::GenerateRequest { priority, ..text(name) };
        let mut streams = Vec::new();
        for (name, priority) in [("low", -1), ("first", 0), ("second", 0), ("high", 5)] {
            streams.push(cluster.generate(ask(name, priority)).await.unwrap());
        }
        // One grant at a time, so that the order is observable.
        for (turn, name) in ["high", "first", "second", "low"].into_iter().enumerate() {
            let session = &mut sessions[turn % 2];
            session.grant(1, 100);
            let submit = session.submit().await;
            assert_eq!(submit.prompt_token_ids[1..], tokens(name));
            session.update(v1::Update {
                sequences: vec![inflight_scripted::sequence(&submit, 0, &[EOT], STOP)],
                grant: Some(v1::Grant { sequences: 0, kv_blocks: 0, priority_sequences: 0 }),
                ..Default::default()
            });
        }
        for mut stream in streams {
            stream.read_to_end().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn only_a_request_that_outranks_another_exceeds_the_grant() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let options = Options { anonymous_weights: true, ..Options::default() };
        let mut cluster = Cluster::start(&[&worker], options).await;
        let mut session = worker.session().await;
        session.update(v1::Update {
            grant: Some(v1::Grant { sequences: 1, kv_blocks: 100, priority_sequences: 1 }),
            ..Default::default()
        });
        cluster.handle.ready().await;
        let ask = |name: &str, priority| v1::GenerateRequest { priority, ..text(name) };
        let mut streams = vec![cluster.generate(ask("running", 0)).await.unwrap()];
        let running = session.submit().await;
        for (name, priority) in [("equal", 0), ("important", 1), ("as important", 1)] {
            streams.push(cluster.generate(ask(name, priority)).await.unwrap());
        }
        // Requests of equal priority wait, and so does the second important one: one sequence beyond the
        // grant is the maximum.
        let important = session.submit().await;
        assert_eq!(important.prompt_token_ids[1..], tokens("important"));
        session.finish(&running, 0, &[EOT], STOP);
        session.finish(&important, 0, &[EOT], STOP);
        // The remaining requests outrank nothing and are dispatched within the grant, in order.
        for name in ["as important", "equal"] {
            let submit = session.submit().await;
            assert_eq!(submit.prompt_token_ids[1..], tokens(name));
            session.finish(&submit, 0, &[EOT], STOP);
        }
        for mut stream in streams {
            stream.read_to_end().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_clients_trace_continues_in_router_spans_and_the_submission() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let trace = "0af7651916cd43dd8448eb211c80319c";
        let mut request = Request::new(text("secret words"));
        let parent = format!("00-{trace}-b7ad6b7169203331-01");
        request.metadata_mut().insert("traceparent", parent.parse().unwrap());
        request.metadata_mut().insert("tracestate", "vendor=1".parse().unwrap());
        let mut stream = cluster.client.generate(request).await.unwrap().into_inner();
        let submit = session.submit().await;
        assert_eq!(submit.tracestate, "vendor=1");
        let fields: Vec<_> = submit.traceparent.split('-').collect();
        assert_eq!(fields[1], trace);
        session.finish(&submit, 0, &[EOT], STOP);
        while stream.message().await.unwrap().is_some() {}
        drop(stream);
        let spans = loop {
            let spans = spans_of(trace);
            if spans.iter().any(|span| span.name == "generate") {
                break spans;
            }
            tokio::task::yield_now().await;
        };
        let named = |name: &str| spans.iter().find(|span| span.name == name).unwrap();
        let (generate, queue, attempt) = (named("generate"), named("queue"), named("attempt"));
        assert_eq!(generate.parent_span_id.to_string(), "b7ad6b7169203331");
        assert_eq!(attempt.span_context.span_id().to_string(), fields[2]);
        assert_eq!(attempt.parent_span_id, generate.span_context.span_id());
        assert_eq!(queue.parent_span_id, generate.span_context.span_id());
        let attributes: HashMap<_, _> =
            generate.attributes.iter().map(|kv| (kv.key.as_str(), kv.value.to_string())).collect();
        assert_eq!(attributes["model"], "tiny");
        assert_eq!(attributes["outcome"], "completed");
        assert_eq!(attributes["prompt_tokens"], submit.prompt_token_ids.len().to_string());
        assert!(attributes.values().all(|value| !value.contains("secret")), "no prompt in a span");
    })
    .await;
}

#[tokio::test]
async fn reflection_is_served_if_enabled() {
    use tonic_reflection::pb::v1::ServerReflectionRequest;
    use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
    use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
    use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
    bounded(async {
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        for reflection in [true, false] {
            let cluster = Cluster::start(&[&worker], Options { reflection, ..Options::default() }).await;
            let mut client = ServerReflectionClient::new(cluster.channel.clone());
            let list = Some(MessageRequest::ListServices(String::new()));
            let request = ServerReflectionRequest { host: String::new(), message_request: list };
            let answer = client.server_reflection_info(futures::stream::iter([request])).await;
            if !reflection {
                assert_eq!(answer.err().unwrap().code(), Code::Unimplemented);
                continue;
            }
            let message = answer.unwrap().into_inner().message().await.unwrap().unwrap();
            let Some(MessageResponse::ListServicesResponse(list)) = message.message_response else {
                panic!("expected a list of services");
            };
            let names: Vec<_> = list.service.into_iter().map(|service| service.name).collect();
            assert!(names.contains(&"inflight.v1.Inference".to_owned()), "{names:?}");
            assert!(names.contains(&"grpc.health.v1.Health".to_owned()), "{names:?}");
        }
    })
    .await;
}

/// A panic in a session task must not leave the worker without a session.
#[tokio::test]
async fn a_session_task_is_restarted_after_a_panic() {
    bounded(async {
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let panicked = Arc::new(AtomicBool::new(false));
        let (panics, address) = (panicked.clone(), worker.address);
        let connector = Connector::new(move |_| {
            let first = !panics.swap(true, Ordering::Relaxed);
            async move {
                assert!(!first, "the first connection");
                TcpStream::connect(address).await
            }
        });
        let options = Options { workers: vec![address.to_string()], ..Options::default() };
        let core = Core::new(options).unwrap().with_connector(connector);
        let handle = core.handle();
        let incoming = futures::stream::pending::<std::io::Result<TcpStream>>();
        let serving = tokio::spawn(core.serve(incoming, CancellationToken::new()));
        handle.ready().await;
        assert!(panicked.load(Ordering::Relaxed));
        let counted = "inflight_router_task_panics_total{task=\"worker_session\"} 1";
        assert!(crate::cluster::metrics().render().contains(counted));
        serving.abort();
    })
    .await;
}

#[tokio::test]
async fn requests_for_an_expected_model_are_held_until_a_worker_serves_it() {
    bounded(async {
        let options = |cold_start_timeout| Options {
            expected_models: vec!["expected".to_owned()],
            cold_start_timeout,
            dispatcher: DispatcherOptions { no_worker_timeout: Duration::ZERO, ..queue_of(2) },
            ..Options::default()
        };
        let named = |model: &str| v1::GenerateRequest { model: model.to_owned(), ..text("a") };
        let profile = WorkerProfile { model: "expected", ..WorkerProfile::default() };
        let stopped = ScriptedWorker::stopped();
        let mut cluster = Cluster::of([stopped.address], options(Duration::from_secs(60))).await;
        let held = || count("inflight_router_cold_start_requests", "model=\"expected\"");
        let mut waiting = Vec::new();
        // By its name, and as the only one.
        for model in ["expected", ""] {
            let mut client = cluster.client.clone();
            waiting.push(tokio::spawn(async move { client.generate(named(model)).await }));
        }
        while held() < 2.0 {
            tokio::task::yield_now().await;
        }
        let full = cluster.generate(named("expected")).await.err().unwrap();
        assert_eq!(full.code(), Code::ResourceExhausted);
        assert!(full.message().contains("would exceed --queue-requests-max"), "{full:?}");
        let unknown = cluster.generate(named("other")).await.err().unwrap();
        assert_eq!(
            unknown.code(),
            Code::Unavailable,
            "a model that nobody expects is refused at once: {unknown:?}"
        );
        // A client that leaves frees its place, as does one whose deadline passes, which it notices itself or hears of.
        waiting.remove(0).abort();
        while held() > 1.0 {
            tokio::task::yield_now().await;
        }
        let mut late = Request::new(named("expected"));
        late.metadata_mut().insert("grpc-timeout", "50m".parse().unwrap());
        let late = cluster.client.generate(late).await.err().unwrap();
        assert!(matches!(late.code(), Code::DeadlineExceeded | Code::Cancelled), "{late:?}");
        while held() > 1.0 {
            tokio::task::yield_now().await;
        }

        let mut worker = stopped.listen(profile);
        let mut session = worker.granted().await;
        let submit = session.submit().await;
        session.finish(&submit, 0, &tokens("x"), LENGTH);
        let mut stream = waiting.remove(0).await.unwrap().unwrap().into_inner();
        while stream.message().await.unwrap().is_some() {}
        assert_eq!(held(), 0.0);
        // A worker that is there is used at once; one that has left is waited for.
        let mut stream = cluster.generate(named("expected")).await.unwrap();
        let submit = session.submit().await;
        session.finish(&submit, 0, &tokens("y"), LENGTH);
        stream.read_to_end().await.unwrap();
        session.break_stream();
        let mut client = cluster.client.clone();
        let again = tokio::spawn(async move { client.generate(named("expected")).await });
        let mut session = worker.granted().await;
        let submit = session.submit().await;
        session.finish(&submit, 0, &tokens("z"), LENGTH);
        again.await.unwrap().unwrap();

        let absent = ScriptedWorker::stopped();
        let mut impatient = Cluster::of([absent.address], options(Duration::from_millis(50))).await;
        let timed_out = impatient.generate(named("expected")).await.err().unwrap();
        assert_eq!(timed_out.code(), Code::Unavailable);
        assert!(timed_out.message().contains("expected"), "{timed_out:?}");

        // A router that drains holds nothing.
        let draining = Cluster::of([absent.address], options(Duration::from_secs(60))).await;
        let mut client = draining.client.clone();
        let held_there = tokio::spawn(async move { client.generate(named("expected")).await });
        while held() < 1.0 {
            tokio::task::yield_now().await;
        }
        draining.drain.cancel();
        assert_eq!(held_there.await.unwrap().unwrap_err().code(), Code::Unavailable);
    })
    .await;
}

/// Waits until a gauge of the model `summed` has a value.
async fn gauge_is(name: &str, value: f64) {
    while count(&format!("{name}{{"), "model=\"summed\"") != value {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn the_load_of_a_model_is_summed_over_its_workers_and_ends_with_their_sessions() {
    const KV_BLOCKS: f64 = 65_536.0;
    bounded(async {
        let profile = WorkerProfile { model: "summed", ..WorkerProfile::default() };
        let mut workers =
            [ScriptedWorker::start(profile.clone()).await, ScriptedWorker::start(profile).await];
        let mut cluster = Cluster::start(&[&workers[0], &workers[1]], Options::default()).await;
        let (mut first, mut second) = (workers[0].granted().await, workers[1].granted().await);
        cluster.handle.ready().await;
        for (session, kv_blocks_used) in [(&first, 7), (&second, u32::MAX)] {
            let load = Some(v1::Load { kv_blocks_used, ..Default::default() });
            session.update(v1::Update { load, ..Default::default() });
        }
        gauge_is("inflight_router_model_kv_blocks", 2.0 * KV_BLOCKS).await;
        // No more than there are, whatever a worker says.
        gauge_is("inflight_router_model_kv_blocks_used", 7.0 + KV_BLOCKS).await;
        let request = v1::GenerateRequest { model: "summed".to_owned(), ..text("a") };
        let mut stream = cluster.generate(request).await.unwrap();
        let (to_first, submit) = tokio::select! {
            submit = first.submit() => (true, submit),
            submit = second.submit() => (false, submit),
        };
        gauge_is("inflight_router_model_sequences", 1.0).await;
        let session = if to_first { &first } else { &second };
        session.finish(&submit, 0, &tokens("x"), LENGTH);
        stream.read_to_end().await.unwrap();
        gauge_is("inflight_router_model_sequences", 0.0).await;
        first.break_stream();
        second.break_stream();
        gauge_is("inflight_router_model_kv_blocks_used", 0.0).await;
    })
    .await;
}
