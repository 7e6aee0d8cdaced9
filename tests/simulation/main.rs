//! Routers and workers, whole but for network and device, in one deterministic simulation: connections are cut, held up
//! and restored, workers crash and drain, routers drain, and no client may notice.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

mod device;
mod network;
mod script;

use std::cell::{Cell, RefCell};
use std::error::Error as _;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use inflight_fixtures::Family;
use inflight_proto::v1;
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event as Said;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_router::{Connector, Handle, RouterStats};
use inflight_worker::{Bundle, Served, Turning};
use inflight_worker_core::CostPrior;
use metrics_exporter_prometheus::PrometheusBuilder;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::transport::Channel;

use script::{Call, Event, ROUTERS, Script, UNREST, WORKERS};

const PORT: u16 = 7000;
const TICK: Duration = Duration::from_millis(1);
/// Everything must be over by then.
const END: Duration = Duration::from_secs(60);

type Failure = Box<dyn std::error::Error>;

/// What a run has to show.
#[derive(Debug, Clone, PartialEq, Default)]
struct Report {
    /// When each call ended, in the run's own time, and with how many tokens.
    ended: Vec<(usize, Duration, usize)>,
    /// All that any client saw, and when.
    trace: Vec<(Duration, usize, String)>,
    /// Resubmissions, by reason, and what else was counted.
    counted: Vec<String>,
}

#[derive(Default)]
struct Shared {
    incarnations: Cell<u32>,
    workers: RefCell<[CancellationToken; WORKERS]>,
    routers: RefCell<[CancellationToken; ROUTERS]>,
    handles: RefCell<[Option<Handle>; ROUTERS]>,
    ended: RefCell<Vec<(usize, Duration, usize)>>,
    trace: RefCell<Vec<(Duration, usize, String)>>,
}

async fn worker(index: usize, shared: Rc<Shared>) -> Result<(), Failure> {
    let incarnation = shared.incarnations.replace(shared.incarnations.get() + 1);
    let drain = CancellationToken::new();
    shared.workers.borrow_mut()[index] = drain.clone();
    let family = Family::Llama3;
    let files = [
        ("tokenizer.json", family.tokenizer_json()),
        ("tokenizer_config.json", family.tokenizer_config_json()),
    ];
    let served = Served {
        runtime: Box::new(device::Remembering::new()),
        prior: Some(CostPrior::default()),
        name: "tiny".to_owned(),
        architecture: "LlamaForCausalLM".to_owned(),
        eos_token_ids: device::EOS.to_vec(),
        bundle: Bundle::new(files.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec())).to_vec()),
    };
    let options = inflight_worker::Options {
        worker_id: format!("worker-{index}"),
        heartbeat: Duration::from_millis(100),
        max_sequences: 8,
        max_batch_tokens: 64,
        drain_timeout: Duration::from_secs(3),
        ..inflight_worker::Options::default()
    };
    let core = inflight_worker::Core::new(&options, served, format!("incarnation-{incarnation}"))?;
    Ok(core.serve(network::incoming(PORT).await?, Turning::Task, drain).await?)
}

async fn router(index: usize, shared: Rc<Shared>) -> Result<(), Failure> {
    let incarnation = shared.incarnations.replace(shared.incarnations.get() + 1);
    let drain = CancellationToken::new();
    shared.routers.borrow_mut()[index] = drain.clone();
    let options = inflight_router::Options {
        workers: (0..WORKERS).map(|worker| format!("worker-{worker}:{PORT}")).collect(),
        router_id: format!("router-{index}"),
        incarnation: format!("router-incarnation-{incarnation}"),
        connect_timeout: Duration::from_secs(1),
        reconnect_backoff_max: Duration::from_millis(400),
        no_worker_timeout: END,
        drain_grace: Duration::from_millis(300),
        reflection: false,
        ..inflight_router::Options::default()
    };
    let core = inflight_router::Core::new(options)?.with_connector(Connector::new(network::open));
    shared.handles.borrow_mut()[index] = Some(core.handle());
    Ok(core.serve(network::incoming(PORT).await?, drain).await?)
}

/// What the request yields if nothing ever goes wrong: its tokens, and the one that ends it, if one does.
fn undisturbed(call: &Call, choice: u32) -> (Vec<u32>, Option<u32>) {
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

/// Makes a call, and again as long as it is refused before anything came. Returns the tokens that came. `saw` hears of each
/// message.
async fn make(call: &Call, channels: &[Channel], saw: impl Fn(String)) -> usize {
    let request = v1::GenerateRequest {
        request_id: format!("call-{}", call.id),
        input: Some(Input::TokenIds(v1::TokenIds { ids: call.prompt.clone() })),
        sampling: Some(v1::SamplingParams { n: Some(call.n), seed: Some(call.seed), ..Default::default() }),
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
            // A router that drains, or is not there: its word is UNAVAILABLE. What the client's own transport says of a connection
            // that closes before the call has left has a cause, which no status from a server has.
            Err(status) => {
                let clean = status.code() == Code::Unavailable || status.source().is_some();
                assert!(clean, "call {}: {status}", call.id);
                saw(format!("router {router}: {:?}", status.code()));
                router = (router + 1) % channels.len();
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    let mut completed = None;
    let mut ends = vec![None; call.n as usize];
    let mut messages = 0;
    while let Some(message) = stream.message().await.unwrap_or_else(|s| panic!("call {}: {s}", call.id)) {
        let event = message.event.unwrap();
        // Times of completed calls are the router's own, down to the poll.
        match &event {
            Said::Completed(end) => saw(format!("{:?}", end.usage)),
            event => saw(format!("{event:?}")),
        }
        match event {
            Said::Delta(delta) => choices[delta.choice as usize].extend(delta.token_ids),
            Said::Completed(end) => completed = end.usage,
            Said::Finished(end) => {
                let before = ends[end.choice as usize].replace((end.reason(), end.stop_token_id));
                assert!(before.is_none(), "call {}, choice {} ended twice", call.id, end.choice);
            }
            Said::Started(_) => {}
            Said::FingerprintChanged(changed) => panic!("all workers are alike: {changed:?}"),
        }
        messages += 1;
        if call.leaves_after.is_some_and(|most| messages > most) {
            break;
        }
    }
    for (choice, tokens) in choices.iter().enumerate() {
        let (expected, stop) = undisturbed(call, choice as u32);
        let reason = if stop.is_some() { v1::FinishReason::Stop } else { v1::FinishReason::Length };
        assert!(
            ends[choice] == Some((reason, stop)) || (ends[choice].is_none() && call.leaves_after.is_some()),
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
            call.leaves_after.is_some() || tokens.len() == expected.len(),
            "call {} is not whole",
            call.id
        );
    }
    if call.leaves_after.is_none() {
        let usage = completed.unwrap_or_else(|| panic!("call {} ended without usage", call.id));
        let completion: usize = (0..call.n).map(|choice| undisturbed(call, choice).0.len()).sum();
        let counted = (usage.prompt_tokens as usize, usage.completion_tokens as usize);
        assert_eq!(counted, (call.prompt.len(), completion), "call {}", call.id);
    }
    choices.iter().map(Vec::len).sum()
}

/// Waits until neither routers nor workers hold anything.
async fn settled(shared: &Shared) {
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
            let answer = client.diagnose(v1::DiagnoseRequest { iterations: 0 }).await;
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

async fn clients(calls: Vec<Call>, shared: Rc<Shared>) -> Result<(), Failure> {
    let channels: Vec<Channel> = (0..ROUTERS)
        .map(|router| network::channel(&format!("router-{router}:{PORT}")))
        .collect::<Result<_, _>>()?;
    let began = tokio::time::Instant::now();
    let made = calls.into_iter().map(|call| {
        let (channels, shared) = (&channels, &shared);
        async move {
            tokio::time::sleep(call.at).await;
            let saw = |what| shared.trace.borrow_mut().push((began.elapsed(), call.id, what));
            let tokens = make(&call, channels, saw).await;
            shared.ended.borrow_mut().push((call.id, began.elapsed(), tokens));
        }
    });
    futures::future::join_all(made).await;
    tokio::time::sleep_until(began + UNREST + Duration::from_secs(4)).await;
    settled(&shared).await;
    Ok(())
}

fn happen(sim: &mut turmoil::Sim<'_>, event: Event, shared: &Shared) {
    let worker = |index: usize| format!("worker-{index}");
    let router = |index: usize| format!("router-{index}");
    match event {
        Event::Crash(w) => sim.crash(worker(w)),
        Event::Start(w) => sim.bounce(worker(w)),
        Event::Drain(w) => shared.workers.borrow()[w].cancel(),
        Event::Partition(r, w) => sim.partition(router(r), worker(w)),
        Event::Repair(r, w) => sim.repair(router(r), worker(w)),
        Event::Hold(r, w) => sim.hold(router(r), worker(w)),
        Event::Release(r, w) => sim.release(router(r), worker(w)),
        Event::DrainRouter(r) => shared.routers.borrow()[r].cancel(),
        Event::StartRouter(r) => sim.bounce(router(r)),
    }
}

fn run(seed: u64) -> Report {
    let Script { calls, events } = Script::new(seed);
    let recorder = PrometheusBuilder::new().build_recorder();
    let rendered = recorder.handle();
    let shared = Rc::new(Shared::default());
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
                happen(&mut sim, event, &shared);
            }
            if sim.step().unwrap_or_else(|error| panic!("{error}")) {
                break;
            }
        }
    });
    let wanted = ["resubmissions_total", "suspects_total", "sessions_lost_total"];
    let rendered = rendered.render();
    let counted = rendered.lines().filter(|line| wanted.iter().any(|name| line.contains(name)));
    let counted = counted.filter(|line| !line.starts_with('#')).map(str::to_owned).collect();
    Report { ended: shared.ended.take(), trace: shared.trace.take(), counted }
}

/// `INFLIGHT_SIMULATION_SEEDS=FIRST..END` names other seeds.
fn seeds() -> Range<u64> {
    let given = std::env::var("INFLIGHT_SIMULATION_SEEDS").ok();
    given.map_or(0..50, |given| {
        let (first, end) = given.split_once("..").expect("INFLIGHT_SIMULATION_SEEDS is FIRST..END");
        first.parse().unwrap()..end.parse().unwrap()
    })
}

#[test]
fn whatever_breaks_every_stream_is_whole_and_nothing_is_left_behind() {
    let seeds = seeds();
    println!("seeds {seeds:?}");
    let (mut moved, mut messages) = (0.0, 0);
    for seed in seeds {
        let report = std::panic::catch_unwind(|| run(seed)).unwrap_or_else(|cause| {
            eprintln!("INFLIGHT_SIMULATION_SEEDS={seed}..{} repeats this run", seed + 1);
            std::panic::resume_unwind(cause)
        });
        assert_eq!(report.ended.len(), Script::new(seed).calls.len(), "seed {seed}: a call is open");
        messages += report.trace.len();
        let counts = report.counted.iter().filter(|line| line.contains("resubmissions_total"));
        moved += counts.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>();
    }
    println!("{messages} messages, {moved} resubmissions");
    assert!(moved > 0.0, "the runs disturb nobody");
}

/// Calls, misfortunes and the network's delays follow from the seed. The order in which tokio polls what is ready at the same
/// instant does so only in a build with `--cfg tokio_unstable`: without it a run can't be repeated, and this test is not there.
#[cfg(tokio_unstable)]
#[test]
fn a_seed_repeats_its_run_to_the_moment_of_every_message() {
    let seed = seeds().start;
    let (first, second) = (run(seed), run(seed));
    let differs = first.trace.iter().zip(&second.trace).position(|(one, other)| one != other);
    if let Some(at) = differs {
        panic!("seed {seed}: message {at} is {:?} and then {:?}", first.trace[at], second.trace[at]);
    }
    assert_eq!(first, second, "seed {seed}");
    assert_ne!(first.trace, run(seed + 1).trace, "another seed is another run");
}
