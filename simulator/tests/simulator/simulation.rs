//! Correctness of the simulation: under any limits every request is served completely, once and
//! deterministically.

use std::time::Duration;

use inflight_contract::FinishReason;
use inflight_simulator::{
    BatchWork, Device, Observer, ProfileError, ProfiledDevice, Records, Request, RequestEvent, Simulation,
    SimulationError, StepSample,
};
use inflight_traces::{TraceError, read_lengths, read_vtc};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{CostModel, CostPrior, Preemption, SchedulerLimits, Time};
use proptest::prelude::*;

use crate::common::{a10g, scheduler};

/// Observer that sums the tokens of each request and checks each step.
#[derive(Debug, Default)]
struct TokenCounts {
    prompt_tokens: Vec<u32>,
    output_tokens: Vec<u32>,
    ends: Vec<u32>,
    swaps: u32,
    until: Time,
    last: Time,
}

impl TokenCounts {
    fn new(requests: usize) -> Self {
        let zeros = || vec![0; requests];
        Self { prompt_tokens: zeros(), output_tokens: zeros(), ends: zeros(), ..Self::default() }
    }
}

impl Observer for TokenCounts {
    fn request(&mut self, at: Time, index: usize, request: &Request, event: &RequestEvent) {
        assert!(at >= self.last && at >= request.arrival, "time goes backwards");
        self.last = at;
        match event {
            RequestEvent::Served { prompt_tokens, output_tokens } => {
                assert_eq!(self.ends[index], 0, "served after its end");
                self.prompt_tokens[index] += prompt_tokens;
                self.output_tokens[index] += output_tokens;
            }
            RequestEvent::Ended(reason) => {
                let short = request.output_tokens < request.max_tokens;
                assert_eq!(*reason == FinishReason::Length, !short && *reason != FinishReason::Stop);
                self.ends[index] += 1;
            }
            RequestEvent::Preempted(Preemption::Swap) => self.swaps += 1,
            _ => {}
        }
    }

    fn step(&mut self, step: &StepSample) {
        assert!(step.began >= self.until, "two steps at once on one device");
        self.until = step.began.after(step.took);
        assert!(step.stored_tokens + step.pending_tokens <= step.allocated_tokens, "{step:?}");
        assert!(step.running <= step.slots);
    }
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    prop::collection::vec((0u64..20, 0u32..3, 1u32..80, 1u32..40, 0u32..20, -1i32..=1), 1..60).prop_map(
        |requests| {
            let mut at = Time::ZERO;
            let request = |(pause_ms, tenant, prompt, output, more, priority)| {
                at = at.after(Duration::from_millis(pause_ms));
                Request { priority, max_tokens: output + more, ..Request::new(at, tenant, prompt, output) }
            };
            requests.into_iter().map(request).collect()
        },
    )
}

fn limits() -> impl Strategy<Value = SchedulerLimits> {
    (0u32..=4, 140u32..400, 1u32..12, 0u32..64, 1u32..=2, prop::bool::ANY).prop_map(
        |(block_log, tokens, running_max, extra, depth, swaps)| {
            let blocks = tokens.div_ceil(1 << block_log);
            let host_blocks = if swaps { blocks } else { 0 };
            let limits = SchedulerLimits::new(1 << block_log, blocks, running_max, running_max + extra);
            SchedulerLimits { depth, host_blocks, prefix_cache: false, ..limits }
        },
    )
}

fn policy() -> impl Strategy<Value = PolicyKind> {
    use PolicyKind::{Fair, Fcfs, Priority, Static};
    prop_oneof![Just(Fcfs), Just(Priority), Just(Fair), Just(Static)]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]
    #[test]
    fn every_request_is_served_completely_once_and_deterministically(
        requests in requests(), limits in limits(), policy in policy()
    ) {
        // Copies are cheap, so that preemption is by swap.
        let prior = CostPrior::default().with_copies(1e-6, 1e-6);
        let run = || {
            let tenants = inflight_contract::VirtualTokenCounters::new(Default::default(), 100);
            let cost = CostModel::new(prior);
            let scheduler =
                inflight_worker_core::Scheduler::new(limits, policy.build(), cost.clone(), tenants).unwrap();
            let mut simulation = Simulation::new(scheduler, cost);
            let mut observers = (TokenCounts::new(requests.len()), Records::new(&requests));
            simulation.run(&requests, &mut observers).unwrap();
            assert!(simulation.scheduler().is_idle());
            simulation.scheduler().assert_consistent();
            observers
        };
        let (counts, records) = run();
        for (index, request) in requests.iter().enumerate() {
            prop_assert_eq!(counts.ends[index], 1);
            prop_assert_eq!(counts.prompt_tokens[index], request.prompt_tokens);
            prop_assert_eq!(counts.output_tokens[index], request.output_tokens);
        }
        prop_assert_eq!(run().1, records);
    }
}

#[test]
fn rejected_requests_are_recorded_and_the_others_are_served() {
    let long = Request::new(Time::ZERO, 0, 5000, 10);
    let requests = [Request::new(Time::ZERO, 0, 10, 10), long];
    let limits = SchedulerLimits::new(16, 100, 4, 64);
    let mut records = Records::new(&requests);
    let mut simulation = Simulation::new(scheduler(limits, PolicyKind::Fcfs), a10g());
    simulation.run(&requests, &mut records).unwrap();
    let refused: Vec<bool> = records.iter().map(|record| record.refused).collect();
    assert_eq!(refused, [false, true]);
    assert_eq!(records.iter().next().unwrap().output_tokens, 10);
}

#[test]
fn invalid_requests_are_rejected_with_their_position() {
    let run = |requests: &[Request]| {
        let scheduler = scheduler(SchedulerLimits::new(16, 100, 4, 64), PolicyKind::Fcfs);
        Simulation::new(scheduler, a10g()).run(requests, &mut Records::new(requests))
    };
    let late = Request::new(Time::from_nanos(5), 0, 1, 1);
    let early = Request::new(Time::ZERO, 0, 1, 1);
    assert!(matches!(run(&[late, early]), Err(SimulationError::Unsorted(1))));
    let greedy = Request { max_tokens: 1, ..Request::new(Time::ZERO, 0, 1, 2) };
    assert!(matches!(run(&[greedy]), Err(SimulationError::MaxTokensTooSmall { index: 0, .. })));
}

#[test]
fn malformed_files_are_rejected_with_the_position() {
    let folder = std::env::temp_dir().join(format!("inflight-simulator-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = |name: &str, text: &str| {
        std::fs::write(folder.join(name), text).unwrap();
        folder.join(name)
    };
    let missing = read_lengths(&folder.join("missing")).unwrap_err();
    assert!(matches!(missing, TraceError::Read { .. }), "{missing}");
    let column = read_vtc(&file("vtc", "req_time,adapter_dir,prompt_len\n1,a,1\n")).unwrap_err();
    assert!(matches!(column, TraceError::Column { column: "output_len", .. }), "{column}");
    let value =
        read_lengths(&file("lengths", "num_prefill_tokens,num_decode_tokens\n1,2\n3,-4\n")).unwrap_err();
    assert!(matches!(value, TraceError::Value { line: 3, column: "num_decode_tokens", .. }), "{value}");
    let format = ProfiledDevice::read(&file("profile", r#"{"8": [1, 2]}"#), 0.0).unwrap_err();
    assert!(matches!(format, ProfileError::Format { .. }), "{format}");
    let lacks = ProfiledDevice::read(&file("one", r#"{"8": {"1": [5, 0.1, 0.1]}}"#), 0.0).unwrap_err();
    assert!(matches!(lacks, ProfileError::Lacks(_)), "{lacks}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_profiled_device_reproduces_its_profile() {
    let mut device_work = BatchWork::default();
    for (input, output, batch, prefill, decode) in crate::common::LIKE_AN_A10G {
        device_work.prefill = BatchWork::default().prefill;
        (0..batch).for_each(|_| device_work.prefill.add(0, input));
        let took = a10g_like().step(&BatchWork { decode: Default::default(), ..device_work });
        let expected = prefill * f64::from(batch);
        assert!((took.as_secs_f64() / expected - 1.0).abs() < 0.01, "prefill of {input}: {took:?}");
        let mut decodes = BatchWork::default();
        (0..batch).for_each(|_| decodes.decode.add(input + output / 2, 1));
        let steps = f64::from(output.saturating_sub(1).max(1));
        let expected = decode * f64::from(batch) / steps;
        let took = a10g_like().step(&decodes);
        assert!(
            (took.as_secs_f64() / expected - 1.0).abs() < 0.05,
            "decode of {batch}: {took:?}, not {expected}"
        );
    }
}

fn a10g_like() -> ProfiledDevice {
    ProfiledDevice::from_entries(crate::common::LIKE_AN_A10G, 0.0).unwrap()
}
