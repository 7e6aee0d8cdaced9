//! The simulated device under the real engine: its tokens are those of the request, whatever device, schedule or
//! worker it ran on, and it takes the time that its profile says.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_contract::{FinishReason, SamplingSpec, Weight};
use inflight_worker::engine::{Command, Engine, Finish, Request, RequestKey, Resumed, SessionId, Settings};
use inflight_worker::runtime::sim::{SimOptions, SimRuntime};
use inflight_worker_core::{DeviceProfile, Load, Time};
use proptest::prelude::*;

const SESSION: SessionId = SessionId(1);

/// A device that takes no time.
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
    let mut engine = Engine::new(Box::new(runtime), &[], Settings::default()).unwrap();
    engine.command(Command::Open(SESSION), Time::ZERO, &mut Vec::new());
    engine
}

/// A prompt of so many tokens and so many to generate, with its seed and the number of choices.
type Ask = (u32, u32, u64, u32);

fn request(handle: u64, (prompt, max_tokens, seed, n): Ask, resumed: Vec<Resumed>) -> Request {
    let spec = SamplingSpec { seed, n, logprobs: Some(2), ..SamplingSpec::default() };
    Request {
        key: RequestKey { session: SESSION, request: handle },
        attempt: 1,
        prompt: (0..prompt).map(|i| (i * 7 + prompt / 8) % 1000).collect(),
        max_tokens,
        sampling: Arc::new(spec.validate().unwrap()),
        choices: if resumed.is_empty() { vec![Resumed::default(); n as usize] } else { resumed },
        tenant: "a".into(),
        weight: Weight::default(),
        order: None,
        priority: 0,
        deadline: None,
        span: tracing::Span::none(),
    }
}

/// Runs requests to their ends; the tokens of each choice, by request.
fn run(engine: &mut Engine, requests: Vec<Request>) -> BTreeMap<(u64, u32), Vec<u32>> {
    let (mut events, mut tokens) = (Vec::new(), BTreeMap::<_, Vec<u32>>::new());
    let mut now = Time::ZERO;
    for request in requests {
        engine.command(Command::Submit(Box::new(request)), now, &mut events);
    }
    loop {
        now = now.after(Duration::from_micros(10));
        let idle = engine.turn(now, &mut events).unwrap().idle;
        for event in events.drain(..) {
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
    fn tokens_belong_to_the_request_and_not_to_the_schedule(
        asks in prop::collection::vec((1u32..60, 1u32..40, 0u64..3, 1u32..=2), 1..16),
        (blocks, host, overlap) in (30u32..60, prop_oneof![Just(0u32), Just(40)], any::<bool>()),
        cut in 0usize..40,
    ) {
        let roomy = options(40_000, 0, false);
        let mut expected = BTreeMap::new();
        for (handle, ask) in asks.iter().enumerate() {
            expected.extend(run(&mut engine(&roomy), vec![request(handle as u64, *ask, vec![])]));
        }
        let mut scarce = engine(&options(blocks * 4, host * 4, overlap));
        let all = asks.iter().enumerate().map(|(handle, ask)| request(handle as u64, *ask, vec![]));
        prop_assert_eq!(&run(&mut scarce, all.collect()), &expected, "{} preemptions", preemptions(&scarce.load()));

        // The same from the middle of each, as after the loss of a worker.
        let resumed = asks.iter().enumerate().map(|(handle, ask)| {
            let choices = (0..ask.3).map(|choice| {
                let tokens = &expected[&(handle as u64, choice)];
                Resumed { tokens: tokens[..cut.min(tokens.len() - 1)].to_vec(), finished: false }
            });
            request(handle as u64, *ask, choices.collect())
        });
        for (key, rest) in run(&mut scarce, resumed.collect()) {
            let whole = &expected[&key];
            prop_assert_eq!(&rest, &whole[cut.min(whole.len() - 1)..]);
        }
    }
}

#[test]
fn a_stream_resumed_with_a_wrong_token_goes_on_differently() {
    let roomy = options(4000, 0, false);
    let whole = &run(&mut engine(&roomy), vec![request(0, (9, 12, 1, 1), vec![])])[&(0, 0)];
    for broken in [[whole[0], whole[0]], [whole[1], whole[0]], [whole[0], whole[2]]] {
        let resumed = vec![Resumed { tokens: broken.to_vec(), finished: false }];
        let rest = &run(&mut engine(&roomy), vec![request(0, (9, 12, 1, 1), resumed)])[&(0, 0)];
        assert_ne!(rest[..], whole[2..], "resumed after {broken:?}");
    }
}

#[test]
fn it_takes_at_least_the_time_of_its_profile() {
    let mut slow = options(4000, 0, false);
    slow.profile.step = 4e-3;
    slow.profile.prompt_token = 1e-4;
    let begun = Instant::now();
    run(&mut engine(&slow), vec![request(0, (20, 10, 1, 1), vec![])]);
    // Ten steps, one of which computes the twenty tokens of the prompt.
    assert!(begun.elapsed() >= Duration::from_millis(42), "{:?}", begun.elapsed());
}
