//! Simulated device under the engine: tokens depend on the request alone, not on schedule or worker, and
//! steps take the time of the profile.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_contract::{FinishReason, SamplingSpec, Weight};
use inflight_runtime_sim::{SimOptions, SimRuntime};
use inflight_worker::engine::{
    Command, Engine, EngineOptions, Finish, Request, RequestKey, ResumedChoice, SessionId,
};
use inflight_worker_core::{DeviceProfile, Load, Time};
use proptest::prelude::*;

const SESSION: SessionId = SessionId(1);

/// Options of a device whose steps take no time.
fn options(pool_tokens: u32, host_tokens: u32, overlap: bool) -> SimOptions {
    let flat = DeviceProfile::built_in("flat").unwrap();
    SimOptions {
        profile: DeviceProfile { step: 0.0, pool_tokens, host_tokens, ..flat },
        vocab_size: 1000,
        context_tokens: 512,
        block_tokens: 4,
        slots: 8,
        batch_tokens: 32,
        overlap,
    }
}

fn engine(options: &SimOptions) -> Engine {
    let runtime = SimRuntime::new(options).unwrap();
    let mut engine = Engine::new(Box::new(runtime), &[], EngineOptions::default()).unwrap();
    engine.command(Command::Open(SESSION), Time::ZERO, &mut Vec::new());
    engine
}

/// Prompt tokens, output tokens, seed and number of choices.
type RequestSpec = (u32, u32, u64, u32);

fn request(id: u64, (prompt, max_tokens, seed, n): RequestSpec, resumed: Vec<ResumedChoice>) -> Request {
    let spec =
        SamplingSpec { seed, n, logprobs: Some(2), prompt_logprobs: Some(3), ..SamplingSpec::default() };
    Request {
        key: RequestKey { session: SESSION, request: id },
        attempt: 1,
        prompt: (0..prompt).map(|i| (i * 7 + prompt / 8) % 1000).collect(),
        max_tokens,
        sampling: Arc::new(spec.validate().unwrap()),
        choices: if resumed.is_empty() { vec![ResumedChoice::default(); n as usize] } else { resumed },
        prompt_logprobs_received: 0,
        tenant: "a".into(),
        weight: Weight::default(),
        virtual_start_time: None,
        priority: 0,
        deadline: None,
        queued: None,
        grammar: None,
        span: tracing::Span::none(),
    }
}

/// Choice under which [`run`] returns the ranks of a prompt's tokens.
const RANKS: u32 = u32::MAX;

/// Runs requests until the engine is idle; returns tokens by request and choice.
fn run(engine: &mut Engine, requests: Vec<Request>) -> BTreeMap<(u64, u32), Vec<u32>> {
    let (mut events, mut tokens) = (Vec::new(), BTreeMap::<_, Vec<u32>>::new());
    let mut now = Time::ZERO;
    for request in requests {
        engine.command(Command::Submit(Box::new(request)), now, &mut events);
    }
    loop {
        now = now.after(Duration::from_micros(10));
        let idle = engine.step(now, &mut events).unwrap().idle;
        for event in events.drain(..) {
            for scored in event.prompt_logprobs {
                assert_eq!((event.choice, scored.top.len()), (0, 3));
                tokens.entry((event.key.request, RANKS)).or_default().push(scored.rank);
            }
            let entry = tokens.entry((event.key.request, event.choice)).or_default();
            if let Some(token) = event.token {
                assert_eq!(event.logprobs.unwrap().top.len(), 2);
                entry.push(token);
            }
            if let Some(finish) = event.finish {
                assert_eq!(finish, Finish::Ended(FinishReason::Length));
            }
        }
        if idle {
            return tokens;
        }
    }
}

fn preemptions(load: &Load) -> u64 {
    load.recompute_preemptions + load.swap_preemptions
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]
    #[test]
    fn tokens_depend_on_the_request_and_not_on_the_schedule(
        specs in prop::collection::vec((1u32..60, 1u32..40, 0u64..3, 1u32..=2), 1..16),
        (blocks, host, overlap) in (30u32..60, prop_oneof![Just(0u32), Just(40)], any::<bool>()),
        cut in 0usize..40,
    ) {
        let roomy = options(40_000, 0, false);
        let mut expected = BTreeMap::new();
        for (id, spec) in specs.iter().enumerate() {
            expected.extend(run(&mut engine(&roomy), vec![request(id as u64, *spec, vec![])]));
        }
        let mut scarce = engine(&options(blocks * 4, host * 4, overlap));
        let all = specs.iter().enumerate().map(|(id, spec)| request(id as u64, *spec, vec![]));
        prop_assert_eq!(&run(&mut scarce, all.collect()), &expected, "{} preemptions", preemptions(&scarce.load()));

        // Resumed from the middle of each output, as after a failover.
        let resumed = specs.iter().enumerate().map(|(id, spec)| {
            let choices = (0..spec.3).map(|choice| {
                let tokens = &expected[&(id as u64, choice)];
                ResumedChoice { tokens: tokens[..cut.min(tokens.len() - 1)].to_vec(), finished: false }
            });
            request(id as u64, *spec, choices.collect())
        });
        for (key, rest) in run(&mut scarce, resumed.collect()) {
            let whole = &expected[&key];
            if key.1 == RANKS {
                prop_assert_eq!(&rest, whole);
                continue;
            }
            prop_assert_eq!(&rest, &whole[cut.min(whole.len() - 1)..]);
        }
    }
}

#[test]
fn a_stream_resumed_with_a_wrong_token_continues_differently() {
    let roomy = options(4000, 0, false);
    let whole = &run(&mut engine(&roomy), vec![request(0, (9, 12, 1, 1), vec![])])[&(0, 0)];
    for broken in [[whole[0], whole[0]], [whole[1], whole[0]], [whole[0], whole[2]]] {
        let resumed = vec![ResumedChoice { tokens: broken.to_vec(), finished: false }];
        let rest = &run(&mut engine(&roomy), vec![request(0, (9, 12, 1, 1), resumed)])[&(0, 0)];
        assert_ne!(rest[..], whole[2..], "resumed after {broken:?}");
    }
}

#[test]
fn steps_take_at_least_the_time_of_the_profile() {
    let mut slow = options(4000, 0, false);
    slow.profile.step = 4e-3;
    slow.profile.prompt_token = 1e-4;
    let begun = Instant::now();
    run(&mut engine(&slow), vec![request(0, (20, 10, 1, 1), vec![])]);
    // Ten steps, one of which computes the 20 prompt tokens.
    assert!(begun.elapsed() >= Duration::from_millis(42), "{:?}", begun.elapsed());
}
