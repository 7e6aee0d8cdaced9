//! Observation of a worker: its iterations add up with its streams, and without observers nothing is kept.

use std::collections::BTreeMap;
use std::sync::Arc;

use inflight_contract::{SamplingSpec, Weight};
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_proto::{PROTOCOL_VERSION, v1};
use inflight_runtime_sim::{SimOptions, SimRuntime};
use inflight_worker::engine::{
    Command, Engine, EngineOptions, Request, RequestKey, ResumedChoice, SessionId,
};
use inflight_worker_core::{DeviceProfile, SequencePhase, Time};
use tonic::{Code, Status, Streaming};

use crate::service::Router;

async fn observe(router: &Router) -> Result<Streaming<v1::ObserveResponse>, Status> {
    let mut client = WorkerClient::connect(router.address.clone()).await.unwrap();
    Ok(client.observe(v1::ObserveRequest::default()).await?.into_inner())
}

#[tokio::test]
async fn the_observed_iterations_add_up_with_the_streams() {
    // An observer that reads nothing for as long as 256 steps take would miss some.
    let mut router = Router::start(0.02, PROTOCOL_VERSION).await;
    let mut observation = observe(&router).await.unwrap();
    let first = observation.message().await.unwrap().unwrap();
    assert!(first.state.unwrap().sequences.is_empty(), "the first response has the state of an idle worker");
    // More requests than slots run until a state of a computing worker has been read, however seldom this thread runs.
    let endless = 11..=16;
    for request in endless.clone() {
        router.submit(request, vec![request as u32; 10], 100_000, Vec::new());
    }
    let requests = [(1, 100, 40), (2, 3000, 25), (3, 1, 1), (4, 17, 60), (5, 50, 30), (6, 5, 2)];
    let (mut names, mut prefill, mut generated) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    let (mut numbers, mut ran, mut waited) = (Vec::new(), false, false);
    loop {
        let response = observation.message().await.unwrap().unwrap();
        assert_eq!(response.dropped_iterations, 0);
        for joined in response.joined {
            let identity = (joined.router_id.as_str(), joined.attempt, joined.choice, joined.tenant.as_str());
            assert_eq!(identity, ("test", 1, 0, "a"));
            assert!(names.insert(joined.sequence, joined.submission_id).is_none(), "it joins once");
        }
        for iteration in &response.iterations {
            numbers.push(iteration.iteration);
            let sums = iteration.work.iter().fold((0, 0), |(computed, sampled), work| {
                let computed_now = if work.prefill_tokens > 0 { work.prefill_tokens } else { 1 };
                (computed + computed_now, sampled + work.generated_tokens)
            });
            assert_eq!(sums, (iteration.tokens, iteration.generated_tokens));
            for work in &iteration.work {
                let request = names[&work.sequence];
                *prefill.entry(request).or_insert(0) += work.prefill_tokens as usize;
                *generated.entry(request).or_insert(0) += work.generated_tokens;
            }
        }
        let Some(state) = response.state else { continue };
        let was_seen = ran && waited;
        ran |= state.sequences.iter().any(|sequence| sequence.slot.is_some() && sequence.kv_blocks > 0);
        waited |= state.sequences.iter().any(|sequence| sequence.phase() == v1::SequencePhase::Waiting);
        if ran && waited && !was_seen {
            for request in endless.clone() {
                router.cancel(request);
            }
            for (request, prompt, tokens) in requests {
                router.submit(request, vec![request as u32; prompt], tokens, Vec::new());
            }
        }
        let counted = generated.iter().filter(|(request, _)| !endless.contains(request));
        if state.sequences.is_empty() && counted.map(|(_, tokens)| tokens).sum::<u32>() == 158 {
            break;
        }
    }
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
    for (request, prompt, tokens) in requests {
        assert_eq!((prefill[&request], generated[&request]), (prompt, tokens), "request {request}");
    }
    // Its 60 tokens are the last to be generated.
    assert_eq!(router.end_of(4).await.0, 60);
}

#[tokio::test]
async fn an_observer_that_falls_behind_misses_the_oldest_iterations_and_is_told() {
    let mut router = Router::start(0.0, PROTOCOL_VERSION).await;
    let mut observation = observe(&router).await.unwrap();
    router.submit(1, vec![1; 8], 30_000, Vec::new());
    let read = async {
        let (mut next, mut dropped, mut left) = (1, 0, 30_000);
        while left > 0 {
            let response = observation.message().await.unwrap().unwrap();
            assert!(response.iterations.len() <= 256);
            next += response.dropped_iterations;
            left -= response.dropped_iterations.min(left);
            dropped += response.dropped_iterations;
            for iteration in response.iterations {
                assert_eq!(iteration.iteration, next, "only those before the kept ones are missing");
                (next, left) = (next + 1, left - 1);
            }
        }
        dropped
    };
    // The session is read meanwhile: a router that reads nothing pauses its requests.
    let (dropped, (tokens, _)) = tokio::join!(read, router.end_of(1));
    assert!(dropped > 0, "30,000 iterations are not read at 10 responses a second");
    assert_eq!(tokens, 30_000, "the engine did not wait");
}

#[tokio::test]
async fn observers_are_bounded_and_a_place_is_free_again() {
    let router = Router::start(0.0, PROTOCOL_VERSION).await;
    let mut observers = Vec::new();
    for _ in 0..16 {
        observers.push(observe(&router).await.unwrap());
    }
    assert_eq!(observe(&router).await.unwrap_err().code(), Code::ResourceExhausted);
    observers.pop();
    while observe(&router).await.is_err() {}
    let mut client = WorkerClient::connect(router.address.clone()).await.unwrap();
    drop(observers);
    let wrong = v1::ObserveRequest { responses_per_second: 11 };
    loop {
        let status = client.observe(wrong).await.unwrap_err();
        if status.code() == Code::InvalidArgument {
            break;
        }
        assert_eq!(status.code(), Code::ResourceExhausted);
    }
}

#[test]
fn without_an_observer_an_engine_keeps_nothing_for_one() {
    let flat = DeviceProfile::built_in("flat").unwrap();
    let sim = SimOptions {
        profile: DeviceProfile { pool_tokens: 4096, host_tokens: 0, ..flat },
        vocab_size: 100,
        context_tokens: 1000,
        block_tokens: 16,
        slots: 4,
        batch_tokens: 64,
        overlap: false,
    };
    let mut engine =
        Engine::new(Box::new(SimRuntime::new(&sim).unwrap()), &[], EngineOptions::default()).unwrap();
    let session = SessionId(3);
    let mut events = Vec::new();
    engine.command(Command::Open(session), Time::ZERO, &mut events);
    let request = Request {
        key: RequestKey { session, request: 9 },
        attempt: 2,
        prompt: Arc::from(vec![1; 100]),
        choices: vec![ResumedChoice::default(); 2],
        sampling: Arc::new(SamplingSpec { n: 2, ..SamplingSpec::default() }.validate().unwrap()),
        max_tokens: 10,
        tenant: Arc::from("t"),
        weight: Weight::default(),
        priority: 0,
        deadline: None,
        virtual_start_time: None,
        prompt_logprobs_received: 0,
        span: tracing::Span::none(),
        queued: None,
        grammar: None,
    };
    engine.command(Command::Submit(Box::new(request)), Time::ZERO, &mut events);
    let mut steps = 0;
    for observed in [false, true] {
        engine.observe(observed);
        for _ in 0..3 {
            let step = engine.step(Time::ZERO, &mut events).unwrap();
            assert!(step.tokens > 0 && !step.idle);
            steps += 1;
            assert_eq!(engine.completed_iteration().map(|(number, _)| number), Some(steps));
            let work: Vec<_> = engine.completed_work().collect();
            let generated: u32 = work.iter().map(|work| work.generated_tokens).sum();
            assert_eq!(generated, if observed { step.sampled } else { 0 });
            assert_eq!(work.is_empty(), !observed);
            for work in work {
                assert_eq!((work.owner.key.request, work.owner.attempt), (9, 2));
                assert_eq!(work.owner.tenant.map(|tenant| engine.tenant_name(tenant)), Some("t"));
            }
        }
    }
    let live: Vec<_> = engine.live_sequences().collect();
    assert_eq!(live.len(), 2);
    assert!(live.iter().all(|live| live.status.phase == SequencePhase::Decode && live.status.blocks >= 7));
}
