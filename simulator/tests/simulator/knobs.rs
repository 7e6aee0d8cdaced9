//! Effect of each knob of the worker's scheduler, in size and direction: the tables of docs/operating.md.
//!
//! `cargo test --workspace --test simulator knobs -- --nocapture` prints them.

use std::time::Duration;

use inflight_simulator::workload::{LengthDistribution, Workload};
use inflight_simulator::{ProfiledDevice, Records, Request, RequestRecord, Simulation, percentile};
use inflight_worker_core::policy::{Aging, Policy, PolicyKind};
use inflight_worker_core::{LatencyObjectives, SchedulerLimits, StepTarget, Time};

use crate::common::{LIKE_AN_A10G, scheduler};

const SEED: u64 = 26;
const BLOCK_TOKENS: u32 = 16;

/// Records of a simulation.
struct Outcome {
    records: Records,
}

impl Outcome {
    fn concurrency(&self) -> f64 {
        self.records.kv().concurrency()
    }

    fn gap(&self, p: f64) -> f64 {
        percentile(&self.records.gaps(), p)
    }

    /// Quantile of the times to first token of the requests that `of` selects, in seconds.
    fn first_token(&self, p: f64, of: impl Fn(&Request) -> bool) -> f64 {
        let chosen = self.records.iter().filter(|record| of(&record.request));
        let mut times: Vec<f64> =
            chosen.filter_map(RequestRecord::time_to_first_token).map(|time| time.as_secs_f64()).collect();
        times.sort_by(f64::total_cmp);
        percentile(&times, p)
    }
}

/// Serves `requests` on a device like an A10G; the same on every machine.
fn serve(limits: SchedulerLimits, requests: &[Request]) -> Outcome {
    serve_by(PolicyKind::Fair, limits, requests)
}

fn serve_by(policy: impl Into<Policy>, limits: SchedulerLimits, requests: &[Request]) -> Outcome {
    let device = ProfiledDevice::from_entries(LIKE_AN_A10G, 20e-6).unwrap();
    let mut records = Records::new(requests);
    Simulation::new(scheduler(limits, policy), device).run(requests, &mut records).unwrap();
    assert!(records.iter().all(|record| record.output_tokens == record.request.output_tokens));
    Outcome { records }
}

fn limits(blocks: u32, running_max: u32) -> SchedulerLimits {
    SchedulerLimits {
        waiting_max: 10_000,
        prefix_cache: false,
        ..SchedulerLimits::new(BLOCK_TOKENS, blocks, running_max, 2048)
    }
}

fn fixed(tokens: f64) -> LengthDistribution {
    LengthDistribution::new(&[(0.0, tokens), (1.0, tokens)])
}

/// Chats that all wait from the start, so that the KV pool bounds the batch. Like a real client, each allows more
/// output than it takes.
fn backlog() -> Vec<Request> {
    let requests = Workload { requests: 600, ..Workload::chat() }.generate(SEED);
    let waiting = |request: Request| Request { arrival: Time::ZERO, max_tokens: 1024, ..request };
    requests.into_iter().map(waiting).collect()
}

/// Chats beside prompts that fill several iterations.
fn chats_and_documents() -> Vec<Request> {
    let chats =
        Workload { rate: 1.0, requests: 200, shares: vec![1.0], prompts: fixed(60.0), outputs: fixed(200.0) };
    let documents =
        Workload { rate: 0.15, requests: 30, prompts: fixed(6000.0), outputs: fixed(20.0), ..chats.clone() };
    let mut requests = chats.generate(SEED);
    requests.extend(documents.generate(SEED + 1));
    requests.sort_by_key(|request| request.arrival);
    requests
}

#[test]
fn a_higher_watermark_preempts_less_and_runs_fewer_at_once() {
    let requests = backlog();
    let [none, default, tenth, third] = [0.0, SchedulerLimits::WATERMARK_SHARE, 0.1, 0.3].map(|share| {
        let base = limits(625, 256);
        let watermark_blocks = SchedulerLimits::watermark_of(base.blocks, share);
        let outcome = serve(SchedulerLimits { watermark_blocks, ..base }, &requests);
        println!(
            "--kv-watermark {share:4}            {:4} preemptions  {:5.1} at once  {:6.1} tok/s  gap P99 {:6.1} ms",
            outcome.records.preemptions(),
            outcome.concurrency(),
            outcome.records.tokens_per_second(),
            1e3 * outcome.gap(0.99),
        );
        outcome
    });
    let preemptions = [&none, &default, &tenth, &third].map(|outcome| outcome.records.preemptions());
    assert!(preemptions.is_sorted_by(|less, more| less > more), "{preemptions:?}");
    assert!(3 * preemptions[3] < preemptions[0], "{preemptions:?}");
    assert!(third.concurrency() < 0.9 * none.concurrency());
}

#[test]
fn a_longer_decode_reserve_preempts_less_and_runs_fewer_at_once() {
    let requests = backlog();
    let [block, most, all] = [BLOCK_TOKENS, 256, 1024].map(|min_decode_tokens| {
        let outcome = serve(SchedulerLimits { min_decode_tokens, ..limits(625, 256) }, &requests);
        println!(
            "--decode-reserve-tokens {min_decode_tokens:4}   {:4} preemptions  {:5.1} at once  {:6.1} tok/s  gap P99 \
             {:6.1} ms",
            outcome.records.preemptions(),
            outcome.concurrency(),
            outcome.records.tokens_per_second(),
            1e3 * outcome.gap(0.99),
        );
        outcome
    });
    assert!(2 * most.records.preemptions() < block.records.preemptions());
    assert_eq!(all.records.preemptions(), 0, "what is reserved for all of the output needs no more blocks");
    assert!(all.concurrency() < 0.6 * block.concurrency());
}

#[test]
fn a_higher_preemption_threshold_spares_running_requests_and_lets_important_ones_wait() {
    // Long requests of priority 0 hold all eight slots; short ones of priority 1 and 10 arrive beside them.
    let long = Workload {
        rate: 0.5,
        requests: 120,
        shares: vec![1.0],
        prompts: fixed(200.0),
        outputs: fixed(600.0),
    };
    let short =
        Workload { rate: 0.2, requests: 40, prompts: fixed(50.0), outputs: fixed(50.0), ..long.clone() };
    let of_priority = |workload: &Workload, seed: u64, priority: i32| {
        workload.generate(seed).into_iter().map(move |request| Request { priority, ..request })
    };
    let mut requests: Vec<Request> = of_priority(&long, SEED, 0)
        .chain(of_priority(&short, SEED + 1, 1))
        .chain(of_priority(&short, SEED + 2, 10))
        .collect();
    requests.sort_by_key(|request| request.arrival);
    let [one, five, off] = [1, 5, 100].map(|preemption_threshold| {
        let outcome = serve(SchedulerLimits { preemption_threshold, ..limits(1000, 8) }, &requests);
        let wait = |priority| outcome.first_token(0.9, |request| request.priority == priority);
        println!(
            "--preemption-threshold {preemption_threshold:3}     {:4} preemptions  first token P90 {:6.2} s at priority 10, \
             {:6.2} s at 1, {:6.1} s at 0",
            outcome.records.preemptions(),
            wait(10),
            wait(1),
            wait(0),
        );
        (outcome.records.preemptions(), wait(10), wait(1))
    });
    assert!(one.0 > five.0 && five.0 > 0 && off.0 == 0, "{one:?} {five:?} {off:?}");
    assert!(one.2 * 3.0 < five.2, "at 5, a request of priority 1 waits for a slot");
    assert!(five.1 * 3.0 < off.1, "at 100, so does one of priority 10");
}

/// Requests of priority 1 that keep eight slots busy for five minutes, and a few of priority 0 beside them.
fn steady_important_requests() -> Vec<Request> {
    let important =
        Workload { rate: 1.6, requests: 480, shares: vec![1.0], prompts: fixed(50.0), outputs: fixed(150.0) };
    let other = Workload { rate: 0.1, requests: 30, ..important.clone() };
    let mut requests: Vec<Request> = important
        .generate(SEED)
        .into_iter()
        .map(|request| Request { priority: 1, ..request })
        .chain(other.generate(SEED + 1))
        .collect();
    requests.sort_by_key(|request| request.arrival);
    requests
}

/// Serves [`steady_important_requests`]; returns the longest times to first token, of priority 0 and of 1.
fn longest_waits(name: &str, kind: PolicyKind, aging: Aging) -> [f64; 2] {
    let limits = SchedulerLimits { preemption_threshold: 100, ..limits(1000, 8) };
    let outcome = serve_by(Policy { kind, aging }, limits, &steady_important_requests());
    let [other, important] =
        [0, 1].map(|level| outcome.first_token(1.0, |request| request.priority == level));
    let median = outcome.first_token(0.5, |request| request.priority == 1);
    println!(
        "{name:28} longest first token {other:6.1} s at priority 0, {important:5.1} s at 1; median {median:5.2} s at 1"
    );
    [other, important]
}

#[test]
fn a_shorter_aging_threshold_bounds_the_wait_behind_higher_priorities() {
    let waits = [600, 60, 10].map(|seconds| {
        let aging = Aging { threshold: Duration::from_secs(seconds), ..Aging::default() };
        longest_waits(&format!("--aging-threshold {seconds}s"), PolicyKind::Fair, aging)
    });
    let [late, minute, soon] = waits.map(|[other, _]| other);
    assert!(late > 1.5 * minute && minute > 1.5 * soon, "{waits:?}");
}

#[test]
fn aging_by_levels_bounds_the_wait_behind_higher_priorities() {
    let waits = [600, 60, 10].map(|seconds| {
        let aging = Aging { level_every: Duration::from_secs(seconds), ..Aging::default() };
        longest_waits(&format!("--aging-level-every {seconds}s"), PolicyKind::Priority, aging)
    });
    let [late, minute, soon] = waits.map(|[other, _]| other);
    assert!(late > 1.5 * minute && minute > 1.5 * soon, "{waits:?}");
    let none = Aging { levels_max: 0, ..Aging::default() };
    let [never, _] = longest_waits("--aging-levels-max 0", PolicyKind::Priority, none);
    assert!(never > 1.5 * minute, "{never}");
}

#[test]
fn more_bypasses_serve_small_requests_sooner_and_large_ones_later() {
    // A request in a hundred needs two fifths of the pool for its prompt; the others fill most of it.
    let small = Workload {
        rate: 7.5,
        requests: 1875,
        shares: vec![1.0],
        prompts: fixed(60.0),
        outputs: fixed(120.0),
    };
    let large =
        Workload { rate: 0.08, requests: 20, prompts: fixed(3200.0), outputs: fixed(60.0), ..small.clone() };
    let mut requests = small.generate(SEED);
    requests.extend(large.generate(SEED + 1));
    requests.sort_by_key(|request| request.arrival);
    let [none, default, many] = [0, SchedulerLimits::BYPASS_MAX, 256].map(|bypass_max| {
        let outcome = serve(SchedulerLimits { bypass_max, ..limits(500, 256) }, &requests);
        let wait = |p, large: bool| outcome.first_token(p, |request| (request.prompt_tokens > 1000) == large);
        println!(
            "--bypass-max {bypass_max:4}              first token P50 {:5.2} s, P90 {:5.2} s of small ones; P50 {:5.1} s, P90 \
             {:5.1} s of large ones",
            wait(0.5, false),
            wait(0.9, false),
            wait(0.5, true),
            wait(0.9, true),
        );
        (wait(0.9, false), wait(0.9, true))
    });
    let ordered = many.0 < default.0 && default.0 < none.0 && 2.0 * many.0 < none.0;
    assert!(ordered, "small: {none:?} {default:?} {many:?}");
    let ordered = many.1 > default.1 && default.1 > none.1 && many.1 > 2.0 * none.1;
    assert!(ordered, "large: {none:?} {default:?} {many:?}");
}

#[test]
fn without_a_step_target_gaps_are_longer_and_long_prompts_shorter() {
    let requests = chats_and_documents();
    let targets = [
        ("auto", StepTarget::Adaptive(LatencyObjectives::default())),
        ("100ms", StepTarget::Fixed(Duration::from_millis(100))),
        ("off", StepTarget::Unbounded),
    ];
    let [auto, fixed, off] = targets.map(|(name, step_target)| {
        let outcome = serve(SchedulerLimits { step_target, ..limits(4000, 256) }, &requests);
        let wait = |document: bool| outcome.first_token(0.5, |request| (request.prompt_tokens > 1000) == document);
        println!(
            "--step-target {name:6}           gap P50 {:5.1} ms, P99 {:6.1} ms  first token P50 {:5.2} s of chats, {:5.2} s \
             of documents",
            1e3 * outcome.gap(0.5),
            1e3 * outcome.gap(0.99),
            wait(false),
            wait(true),
        );
        (outcome.gap(0.99), wait(true))
    });
    assert!(2.0 * auto.0 < off.0 && 2.0 * fixed.0 < off.0, "gaps: {auto:?} {fixed:?} {off:?}");
    assert!(off.1 < auto.1 && off.1 < fixed.1, "documents: {auto:?} {fixed:?} {off:?}");
}

#[test]
fn larger_chunks_lengthen_gaps_and_shorten_the_wait_of_long_prompts() {
    let requests = chats_and_documents();
    let sweep = [64, 128, 256, 512, 1024, 2048, 4096, 8192].map(|batch_tokens| {
        let limits = SchedulerLimits {
            step_target: StepTarget::Unbounded,
            waiting_max: 10_000,
            prefix_cache: false,
            ..SchedulerLimits::new(BLOCK_TOKENS, 4000, 64, batch_tokens)
        };
        let outcome = serve(limits, &requests);
        let wait = outcome.first_token(0.5, |request| request.prompt_tokens > 1000);
        let longest = outcome.gap(1.0);
        println!(
            "--max-batch-tokens {batch_tokens:5}  gap P50 {:5.1} ms, P99 {:6.1} ms, longest {:6.1} ms  first token P50 {wait:5.2} s of \
             documents",
            1e3 * outcome.gap(0.5),
            1e3 * outcome.gap(0.99),
            1e3 * longest,
        );
        (longest, wait)
    });
    let monotonic = sweep.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 > pair[1].1);
    assert!(monotonic, "gaps grow and waits shrink: {sweep:?}");
    let [first, .., last] = sweep;
    assert!(last.0 > 8.0 * first.0 && first.1 > 2.0 * last.1, "gaps against waits: {sweep:?}");
}
