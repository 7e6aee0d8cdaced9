//! Deterministic simulation of complete routers and workers over a simulated network and device: links are
//! partitioned and held, workers crash and drain, routers drain, and every client's stream must stay complete
//! and exact.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod device;
mod network;
mod scenario;

use std::cell::{Cell, RefCell};
use std::error::Error as _;
use std::ops::Range;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use inflight_fixtures::{Family, is_thorough};
use inflight_proto::v1;
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event as StreamEvent;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_router::{BundleLoad, Connector, DispatcherOptions, Handle, RouterStats};
use inflight_worker::{Bundle, ComputeOptions, EngineExecution, Served};
use inflight_worker_core::CostPrior;
use metrics_exporter_prometheus::PrometheusBuilder;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::transport::Channel;

use scenario::{ClientCall, FAULT_WINDOW, FaultEvent, ROUTERS, Scenario, WORKERS};

const PORT: u16 = 7000;
const TICK: Duration = Duration::from_millis(1);
/// Simulated time at which a run fails if it has not ended.
const END: Duration = Duration::from_secs(60);

type Failure = Box<dyn std::error::Error>;

/// Result of a run, compared between runs of one seed.
#[derive(Debug, Clone, PartialEq, Default)]
struct RunReport {
    /// Call id, simulated end time and number of tokens of each call.
    ended: Vec<(usize, Duration, usize)>,
    /// Simulated time, call id and text of every message that a client received.
    trace: Vec<(Duration, usize, String)>,
    /// Prometheus lines of the failover metrics.
    counted: Vec<String>,
}

/// State shared by the simulated hosts and the test.
#[derive(Default)]
struct SimulationState {
    incarnations: Cell<u32>,
    workers: RefCell<[CancellationToken; WORKERS]>,
    routers: RefCell<[CancellationToken; ROUTERS]>,
    handles: RefCell<[Option<Handle>; ROUTERS]>,
    ended: RefCell<Vec<(usize, Duration, usize)>>,
    trace: RefCell<Vec<(Duration, usize, String)>>,
}

async fn worker(index: usize, shared: Rc<SimulationState>) -> Result<(), Failure> {
    let incarnation = shared.incarnations.replace(shared.incarnations.get() + 1);
    let drain = CancellationToken::new();
    shared.workers.borrow_mut()[index] = drain.clone();
    let family = Family::Llama3;
    let files = [
        ("tokenizer.json", family.tokenizer_json()),
        ("tokenizer_config.json", family.tokenizer_config_json()),
    ];
    let served = Served {
        runtime: Box::new(device::ContextHashRuntime::new()),
        prior: Some(CostPrior::default()),
        self_test_interval: None,
        name: "tiny".to_owned(),
        aliases: Vec::new(),
        architecture: "LlamaForCausalLM".to_owned(),
        eos_token_ids: device::EOS.to_vec(),
        bundle: Bundle::new(files.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec())).to_vec()),
    };
    let options = inflight_worker::Options {
        worker_id: Some(format!("worker-{index}")),
        heartbeat: Duration::from_millis(100),
        compute: ComputeOptions { max_sequences: 8, max_batch_tokens: 64, ..ComputeOptions::default() },
        drain_timeout: Duration::from_secs(3),
        ..inflight_worker::Options::default()
    };
    let core = inflight_worker::Core::new(&options, served, format!("incarnation-{incarnation}"))?;
    Ok(core.serve(network::incoming(PORT).await?, EngineExecution::Task, drain).await?)
}

async fn router(index: usize, shared: Rc<SimulationState>) -> Result<(), Failure> {
    let incarnation = shared.incarnations.replace(shared.incarnations.get() + 1);
    let drain = CancellationToken::new();
    shared.routers.borrow_mut()[index] = drain.clone();
    let options = inflight_router::Options {
        workers: (0..WORKERS).map(|worker| format!("worker-{worker}:{PORT}")).collect(),
        router_id: Some(format!("router-{index}")),
        incarnation: format!("router-incarnation-{incarnation}"),
        connect_timeout: Duration::from_secs(1),
        reconnect_backoff_max: Duration::from_millis(400),
        dispatcher: DispatcherOptions {
            no_worker_timeout: END,
            drain_grace: Duration::from_millis(300),
            ..DispatcherOptions::default()
        },
        reflection: false,
        ..inflight_router::Options::default()
    };
    let core = inflight_router::Core::new(options)?
        .with_connector(Connector::new(network::open))
        .with_bundle_load(BundleLoad::Task);
    shared.handles.borrow_mut()[index] = Some(core.handle());
    Ok(core.serve(network::incoming(PORT).await?, drain).await?)
}

/// Returns the expected tokens of a choice and the stop token that ends it, if one does.
fn expected_output(call: &ClientCall, choice: u32) -> (Vec<u32>, Option<u32>) {
    let mut context = call.prompt.clone();
    let mut stop = None;
    while stop.is_none() && context.len() < call.prompt.len() + call.max_tokens as usize {
        let token = device::next_token(&context, call.seed, choice);
        context.push(token);
        let ends = call.stop_ids.contains(&token) || (!call.ignore_eos && device::EOS.contains(&token));
        stop = ends.then_some(token);
    }
    (context.split_off(call.prompt.len()), stop)
}

/// Makes a call and checks its output; while it is rejected before its first message, it is retried on the
/// other router. Returns the number of tokens received. `record` is called with each message.
async fn run_call(call: &ClientCall, channels: &[Channel], record: impl Fn(String)) -> usize {
    let request = v1::GenerateRequest {
        request_id: format!("call-{}", call.id),
        input: Some(Input::TokenIds(v1::TokenIds { ids: call.prompt.clone() })),
        sampling: Some(v1::SamplingParams {
            n: Some(call.n),
            seed: Some(call.seed),
            prompt_logprobs: call.prompt_logprobs,
            ..Default::default()
        }),
        stop: Some(v1::StopConditions {
            max_tokens: Some(call.max_tokens),
            ignore_eos: call.ignore_eos,
            stop_token_ids: call.stop_ids.clone(),
            ..Default::default()
        }),
        return_token_ids: true,
        ..Default::default()
    };
    let mut choices = vec![Vec::new(); call.n as usize];
    let mut router = call.router;
    let mut stream = loop {
        let mut client = InferenceClient::new(channels[router].clone());
        match client.generate(request.clone()).await {
            Ok(response) => break response.into_inner(),
            // UNAVAILABLE from a draining router, or an error of the client's transport, which has a source.
            Err(status) => {
                let retriable = status.code() == Code::Unavailable || status.source().is_some();
                assert!(retriable, "call {}: {status}", call.id);
                record(format!("router {router}: {:?}", status.code()));
                router = (router + 1) % channels.len();
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    let (mut completed, mut ranks) = (None, Vec::new());
    let mut ends = vec![None; call.n as usize];
    let mut messages = 0;
    while let Some(message) = stream.message().await.unwrap_or_else(|s| panic!("call {}: {s}", call.id)) {
        let event = message.event.unwrap();
        // Without the timings of completed calls: they depend on the router's poll order.
        match &event {
            StreamEvent::Completed(end) => record(format!("{:?}", end.usage)),
            event => record(format!("{event:?}")),
        }
        match event {
            StreamEvent::Delta(delta) => choices[delta.choice as usize].extend(delta.token_ids),
            StreamEvent::PromptLogprobs(prompt) => {
                assert!(choices.iter().all(Vec::is_empty), "call {}: output before it", call.id);
                assert_eq!(prompt.first_position as usize, ranks.len() + 1, "call {}", call.id);
                assert!(
                    prompt.positions.iter().all(|one| Some(one.top.len() as u32) == call.prompt_logprobs)
                );
                ranks.extend(prompt.positions.iter().map(|one| one.rank));
            }
            StreamEvent::Completed(end) => completed = end.usage,
            StreamEvent::Finished(end) => {
                let before = ends[end.choice as usize].replace((end.reason(), end.stop_token_id));
                assert!(before.is_none(), "call {}, choice {} ended twice", call.id, end.choice);
            }
            StreamEvent::Started(_) => {}
            StreamEvent::FingerprintChanged(changed) => {
                panic!("all workers have one fingerprint: {changed:?}")
            }
        }
        messages += 1;
        if call.cancel_after.is_some_and(|most| messages > most) {
            break;
        }
    }
    let first = if call.prompt_logprobs.is_some() { 1 } else { call.prompt.len() };
    let scored = first..call.prompt.len();
    let expected: Vec<u32> = scored.map(|at| device::rank(&call.prompt[..at], call.prompt[at])).collect();
    assert!(expected.starts_with(&ranks), "call {}: ranks {ranks:?}, not {expected:?}", call.id);
    assert!(call.cancel_after.is_some() || ranks.len() == expected.len(), "call {}: {ranks:?}", call.id);
    for (choice, tokens) in choices.iter().enumerate() {
        let (expected, stop) = expected_output(call, choice as u32);
        let reason = if stop.is_some() { v1::FinishReason::Stop } else { v1::FinishReason::Length };
        assert!(
            ends[choice] == Some((reason, stop)) || (ends[choice].is_none() && call.cancel_after.is_some()),
            "call {}, choice {choice}: ended with {:?}, not {reason:?} by {stop:?}",
            call.id,
            ends[choice]
        );
        assert!(
            expected.starts_with(tokens),
            "call {}, choice {choice}: {tokens:?}, not {expected:?}",
            call.id
        );
        assert!(
            call.cancel_after.is_some() || tokens.len() == expected.len(),
            "call {} is incomplete",
            call.id
        );
    }
    if call.cancel_after.is_none() {
        let usage = completed.unwrap_or_else(|| panic!("call {} ended without usage", call.id));
        let completion: usize = (0..call.n).map(|choice| expected_output(call, choice).0.len()).sum();
        let counted = (usage.prompt_tokens as usize, usage.completion_tokens as usize);
        assert_eq!(counted, (call.prompt.len(), completion), "call {}", call.id);
    }
    choices.iter().map(Vec::len).sum()
}

/// Waits until no router or worker holds a request, sequence, block or grant in use.
async fn wait_until_idle(shared: &SimulationState) {
    for index in 0..ROUTERS {
        let handle = shared.handles.borrow()[index].clone().unwrap();
        while handle.stats() != RouterStats::default() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    for index in 0..WORKERS {
        let channel = network::channel(&format!("worker-{index}:{PORT}")).unwrap();
        let mut client = WorkerClient::new(channel);
        loop {
            let answer = client.diagnose(v1::DiagnoseRequest::default()).await;
            if let Ok(answer) = answer {
                let answer = answer.into_inner();
                let load = answer.load.unwrap();
                let idle = (
                    load.running_sequences,
                    load.waiting_sequences,
                    load.swapped_sequences,
                    load.kv_blocks_used,
                ) == (0, 0, 0, 0);
                if idle && answer.granted_in_use == Some(v1::Grant::default()) {
                    break;
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

async fn clients(calls: Vec<ClientCall>, shared: Rc<SimulationState>) -> Result<(), Failure> {
    let channels: Vec<Channel> = (0..ROUTERS)
        .map(|router| network::channel(&format!("router-{router}:{PORT}")))
        .collect::<Result<_, _>>()?;
    let start = tokio::time::Instant::now();
    let runs = calls.into_iter().map(|call| {
        let (channels, shared) = (&channels, &shared);
        async move {
            tokio::time::sleep(call.at).await;
            let record = |message| shared.trace.borrow_mut().push((start.elapsed(), call.id, message));
            let tokens = run_call(&call, channels, record).await;
            shared.ended.borrow_mut().push((call.id, start.elapsed(), tokens));
        }
    });
    futures::future::join_all(runs).await;
    tokio::time::sleep_until(start + FAULT_WINDOW + Duration::from_secs(4)).await;
    wait_until_idle(&shared).await;
    Ok(())
}

fn apply_event(sim: &mut turmoil::Sim<'_>, event: FaultEvent, shared: &SimulationState) {
    let worker = |index: usize| format!("worker-{index}");
    let router = |index: usize| format!("router-{index}");
    match event {
        FaultEvent::Crash(w) => sim.crash(worker(w)),
        FaultEvent::Start(w) => sim.bounce(worker(w)),
        FaultEvent::Drain(w) => shared.workers.borrow()[w].cancel(),
        FaultEvent::Partition(r, w) => sim.partition(router(r), worker(w)),
        FaultEvent::Repair(r, w) => sim.repair(router(r), worker(w)),
        FaultEvent::Hold(r, w) => sim.hold(router(r), worker(w)),
        FaultEvent::Release(r, w) => sim.release(router(r), worker(w)),
        FaultEvent::DrainRouter(r) => shared.routers.borrow()[r].cancel(),
        FaultEvent::StartRouter(r) => sim.bounce(router(r)),
    }
}

/// Spawns tasks until the next task id is a multiple of 64. Tokio keeps the tasks of a runtime in several lists, chosen by task
/// id, and drops them list by list when a host crashes; ids count over the whole process, so the order would differ between runs.
fn align_task_ids() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    loop {
        let id: u64 = runtime.spawn(std::future::ready(())).id().to_string().parse().unwrap();
        if id % 64 == 63 {
            return;
        }
    }
}

/// Serializes the runs: tokio counts task ids over the whole process, and their order must repeat.
static RUN: Mutex<()> = Mutex::new(());

fn run(seed: u64) -> RunReport {
    let _alone = RUN.lock().unwrap_or_else(PoisonError::into_inner);
    align_task_ids();
    let Scenario { calls, events } = Scenario::new(seed);
    let recorder = PrometheusBuilder::new().build_recorder();
    let rendered = recorder.handle();
    let shared = Rc::new(SimulationState::default());
    metrics::with_local_recorder(&recorder, || {
        let mut sim = turmoil::Builder::new()
            .rng_seed(seed)
            .tick_duration(TICK)
            .min_message_latency(Duration::from_micros(200))
            .max_message_latency(Duration::from_millis(3))
            .tcp_capacity(1 << 16)
            .simulation_duration(END)
            .build();
        for index in 0..WORKERS {
            let shared = shared.clone();
            sim.host(format!("worker-{index}"), move || worker(index, shared.clone()));
        }
        for index in 0..ROUTERS {
            let shared = shared.clone();
            sim.host(format!("router-{index}"), move || router(index, shared.clone()));
        }
        sim.client("clients", clients(calls, shared.clone()));
        let mut events = events.into_iter().peekable();
        loop {
            while let Some((_, event)) = events.next_if(|(at, _)| *at <= sim.elapsed()) {
                apply_event(&mut sim, event, &shared);
            }
            if sim.step().unwrap_or_else(|error| panic!("{error}")) {
                break;
            }
        }
    });
    let wanted = ["resubmissions_total", "suspects_total", "sessions_lost_total"];
    let rendered = rendered.render();
    let counted = rendered.lines().filter(|line| wanted.iter().any(|name| line.contains(name)));
    let mut counted: Vec<String> = counted.filter(|line| !line.starts_with('#')).map(str::to_owned).collect();
    // The exporter keeps labels in a hash map.
    counted.sort_unstable();
    RunReport { ended: shared.ended.take(), trace: shared.trace.take(), counted }
}

/// Returns the seeds to run: 0 to 15, or those of `INFLIGHT_SIMULATION_SEEDS=FIRST..END`.
fn seeds() -> Range<u64> {
    let given = std::env::var("INFLIGHT_SIMULATION_SEEDS").ok();
    given.map_or(0..16, |given| {
        let (first, end) = given.split_once("..").expect("INFLIGHT_SIMULATION_SEEDS is FIRST..END");
        first.parse().unwrap()..end.parse().unwrap()
    })
}

#[test]
fn every_stream_is_complete_under_any_faults_and_nothing_leaks() {
    let seeds = seeds();
    println!("seeds {seeds:?}");
    let (mut resubmissions, mut messages) = (0.0, 0);
    for seed in seeds {
        let report = std::panic::catch_unwind(|| run(seed)).unwrap_or_else(|cause| {
            eprintln!("INFLIGHT_SIMULATION_SEEDS={seed}..{} repeats this run", seed + 1);
            std::panic::resume_unwind(cause)
        });
        assert_eq!(report.ended.len(), Scenario::new(seed).calls.len(), "seed {seed}: a call is open");
        messages += report.trace.len();
        let counts = report.counted.iter().filter(|line| line.contains("resubmissions_total"));
        resubmissions += counts.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>();
    }
    println!("{messages} messages, {resubmissions} resubmissions");
    assert!(resubmissions > 0.0, "no fault interrupted a stream");
}

/// Calls, faults, network delays and the order of events at the same instant follow from the seed: no `select!` of the code under
/// test picks a branch at random.
#[test]
fn a_seed_repeats_its_run_to_the_time_of_every_message() {
    let mut before = None;
    for seed in seeds().take(if is_thorough() { 8 } else { 3 }) {
        let (first, second) = (run(seed), run(seed));
        let differs = first.trace.iter().zip(&second.trace).position(|(one, other)| one != other);
        if let Some(at) = differs {
            panic!("seed {seed}: message {at} is {:?} and then {:?}", first.trace[at], second.trace[at]);
        }
        assert_eq!(first, second, "seed {seed}");
        assert_ne!(Some(&first.trace), before.as_ref(), "another seed is another run");
        before = Some(first.trace);
    }
}
