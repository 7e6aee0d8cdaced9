//! Tests of the load generator on a paused clock, against a server that logs what it sent: both must agree.

use std::sync::Arc;
use std::time::Duration;

use inflight_harness::{Answered, Fault, Script, TOKEN_SERVER_MODEL, TokenServer};
use proptest::prelude::*;
use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::client::{BenchClient, Connector, GenerationSettings, PromptForm};
use crate::error::BenchError;
use crate::grpc::Grpc;
use crate::lengths::Lengths;
use crate::load::{self, BenchRound, LoadPattern};
use crate::measure::{LatencyHistogram, Meter, Quota, RoundMeasurements, Slo};
use crate::openai::OpenAi;
use crate::tenants::Tenant;
use crate::workload::{Arrivals, BenchWorkload, LengthSource, PromptKey};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Protocol {
    Grpc,
    OpenAi,
}

const BOTH: [Protocol; 2] = [Protocol::Grpc, Protocol::OpenAi];

/// Returns a client connected to the server in memory.
fn connect(server: &TokenServer, protocol: Protocol) -> BenchClient {
    let (listener, mut connections) = mpsc::unbounded_channel::<DuplexStream>();
    let (server, connector) = (server.clone(), Connector::Memory(listener));
    match protocol {
        Protocol::Grpc => {
            let incoming = futures::stream::poll_fn(move |context| {
                connections.poll_recv(context).map(|next| next.map(Ok))
            });
            tokio::spawn(server.serve_grpc(incoming));
            BenchClient::Grpc(Grpc::new(connector, "http://memory:1".to_owned(), false))
        }
        Protocol::OpenAi => {
            tokio::spawn(async move {
                while let Some(connection) = connections.recv().await {
                    tokio::spawn(server.clone().serve_openai(connection));
                }
            });
            BenchClient::OpenAi(OpenAi::new(connector, "memory:1".to_owned(), "/v1".to_owned()))
        }
    }
}

fn workload(seed: u64) -> BenchWorkload {
    BenchWorkload {
        seed,
        source: LengthSource::Drawn {
            prompt: Lengths::Uniform(3, 30),
            output: Lengths::Lognormal { mean: 12.0, sigma: 0.8, max: 60 },
        },
        caps: (u32::MAX, u32::MAX),
        tenants: vec![Tenant::named("a"), Tenant { share: 2.0, ..Tenant::named("b") }],
        shared_prefix: 0,
        ids: 100..5000,
    }
}

const KEY: PromptKey = PromptKey(3);

struct BenchRun {
    measured: Result<RoundMeasurements, BenchError>,
    log: Vec<Answered>,
}

async fn run(script: Script, protocol: Protocol, load: LoadPattern, warmup: u64, quota: Quota) -> BenchRun {
    let server = TokenServer::new(script);
    let mut client = connect(&server, protocol);
    client.probe(None, PromptForm::Auto).await.unwrap();
    let probes = server.log().len();
    let meter = Meter::new(warmup, quota, Slo::default(), 2);
    let round = BenchRound {
        client: Arc::new(client),
        workload: Arc::new(workload(5)),
        key: KEY,
        settings: GenerationSettings { temperature: 0.0, allow_eos: false },
        timeout: Duration::from_secs(1000),
        meter,
    };
    let measured = load::run(Arc::new(round), load, quota).await;
    BenchRun { measured, log: server.log().split_off(probes) }
}

/// Returns the quantile `share` in milliseconds, as defined by histograms.
fn quantile(times: &mut [Duration], share: f64) -> f64 {
    times.sort_unstable();
    let rank = ((share * times.len() as f64).ceil() as usize).clamp(1, times.len());
    times[rank - 1].as_secs_f64() * 1e3
}

fn check(what: &str, measured: &LatencyHistogram, truth: &mut [Duration]) {
    assert_eq!(measured.len(), truth.len() as u64, "{what}");
    for share in [0.01, 0.5, 0.9, 0.99, 1.0] {
        let (got, expected) = (measured.quantile_ms(share).unwrap_or(0.0), quantile(truth, share));
        // Rounding of histograms.
        assert!(
            (got - expected).abs() <= 0.002 + expected * 0.001,
            "{what} at {share}: {got} ms, and {expected} ms in truth"
        );
    }
}

/// Returns the server's log of the measured requests.
fn counted(run: &BenchRun, warmup: u64, count: u64) -> Vec<Answered> {
    let workload = workload(5);
    let find = |index| {
        let prompt = workload.prompt(index, KEY);
        run.log
            .iter()
            .find(|answered| answered.prompt == prompt)
            .expect("each request that counts was sent")
            .clone()
    };
    (warmup..warmup + count).map(find).collect()
}

fn gaps(answered: &[Answered]) -> Vec<Duration> {
    let mut gaps = Vec::new();
    for request in answered {
        gaps.extend(request.sent.windows(2).map(|two| two[1].0 - two[0].0));
        let companions = request.sent.iter().map(|(_, tokens)| tokens - 1).sum::<u32>();
        gaps.extend(std::iter::repeat_n(Duration::ZERO, companions as usize));
    }
    gaps
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_closed_loop_reports_what_the_server_did(
        openai: bool, streams in 1..9u32, warmup in 0..12u64, count in 1..40u64, tokens_per_message in 1..4u32,
        counts: bool, at_once in 1..9usize, first in 0..40u64, gap in 1..20u64,
    ) {
        let protocol = if openai { Protocol::OpenAi } else { Protocol::Grpc };
        let script = Script {
            first: Duration::from_millis(first), gap: Duration::from_millis(gap), tokens_per_message, counts, at_once,
            ..Script::default()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let run = runtime.block_on(run(script, protocol, LoadPattern::Closed { streams }, warmup, Quota::Requests(count)));
        let measured = run.measured.as_ref().unwrap();
        let counted = counted(&run, warmup, count);
        prop_assert_eq!((measured.started, measured.ended, measured.completed, measured.short), (count, count, count, 0));
        let mut ttft: Vec<Duration> = counted.iter().map(|request| request.sent[0].0 - request.arrived).collect();
        check("first token", &measured.ttft, &mut ttft);
        let mut e2e: Vec<Duration> =
            counted.iter().map(|request| request.sent.last().unwrap().0 - request.arrived).collect();
        // The server ends a stream with its last token.
        check("end to end", &measured.e2e, &mut e2e);
        check("gaps", &measured.itl, &mut gaps(&counted));
        // Output tokens in the window are those of all requests, from the sending of the first measured one
        // to the end of the last. Without token counts in messages, cancelled requests are counted by
        // message.
        let (opened, closed) = (measured.opened.unwrap(), measured.closed.unwrap());
        let in_window = |strictly: bool| -> u64 {
            let inside = |at: Instant| if strictly { at > opened && at < closed } else { at >= opened && at <= closed };
            run.log.iter().flat_map(|request| &request.sent).filter(|(at, _)| inside(*at)).map(|(_, tokens)| u64::from(*tokens)).sum()
        };
        if counts || !openai || tokens_per_message == 1 {
            let (least, most) = (in_window(true), in_window(false));
            prop_assert!((least..=most).contains(&measured.output_tokens), "{} not in {least}..={most}", measured.output_tokens);
        }
        // At most `streams` streams are concurrent.
        for request in &run.log {
            let overlapping = run.log.iter().filter(|other| {
                other.arrived <= request.arrived && other.sent.last().is_none_or(|last| last.0 > request.arrived)
            });
            prop_assert!(overlapping.count() as u64 <= u64::from(streams));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_open_loop_measures_latency_from_the_due_time_wherever_requests_wait() {
    // One request at a time, 20 ms and 5 ms for each further token: far slower than the arrivals. Requests
    // wait at the server or for a slot among those in flight.
    let arrivals = Arrivals::Poisson(50.0);
    for protocol in BOTH {
        for in_flight_max in [1, 1000] {
            let script = Script { at_once: 1, ..Script::default() };
            let load = LoadPattern::Open { arrivals, in_flight_max };
            let run = run(script, protocol, load, 0, Quota::Requests(30)).await;
            let measured = run.measured.as_ref().unwrap();
            let workload = workload(5);
            let (mut free, mut ttft) = (Duration::ZERO, Vec::new());
            for (index, due) in (0..30).zip(workload.arrivals(arrivals)) {
                let begins = free.max(due);
                ttft.push(begins + script.first - due);
                free = begins + script.first + script.gap * (workload.plan(index).output_tokens - 1);
            }
            assert_eq!(measured.completed, 30);
            for share in [0.1, 0.5, 0.9, 1.0] {
                let (got, expected) = (measured.ttft.quantile_ms(share).unwrap(), quantile(&mut ttft, share));
                // Timers have a resolution of 1 ms each, and the server may hold its slot for another gap.
                assert!(
                    (got - expected).abs() < 0.05 * expected + 5.0,
                    "{protocol:?} {in_flight_max} at {share}: {got}, {expected}"
                );
            }
            assert_eq!(measured.slot_wait_max > Duration::ZERO, in_flight_max == 1);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_quota_of_time_measures_requests_that_start_within_it() {
    for protocol in BOTH {
        let quota = Quota::Duration(Duration::from_secs(2));
        let run = run(Script::default(), protocol, LoadPattern::Closed { streams: 3 }, 3, quota).await;
        let measured = run.measured.unwrap();
        assert!(measured.completed > 30 && measured.completed == measured.started, "{}", measured.completed);
        let (opened, closed) = (measured.opened.unwrap(), measured.closed.unwrap());
        assert!(closed - opened >= Duration::from_secs(2) && closed - opened < Duration::from_secs(3));
    }
}

#[tokio::test(start_paused = true)]
async fn failures_are_reported_by_kind() {
    let faults = [
        (Fault::Error, "INTERNAL", "http_500", "out of order"),
        (Fault::EndsEarly(0), "truncated", "truncated", "stream ended"),
        (Fault::EndsEarly(2), "truncated", "truncated", "stream ended"),
        (Fault::ErrorAfter(2), "INTERNAL", "error_event", "lost the thread"),
    ];
    for (fault, grpc, openai, words) in faults {
        for (protocol, kind) in [(Protocol::Grpc, grpc), (Protocol::OpenAi, openai)] {
            // The first few requests succeed, later ones fail.
            let script = Script { fault: Some(fault), healthy: 6, ..Script::default() };
            let run = run(script, protocol, LoadPattern::Closed { streams: 1 }, 0, Quota::Requests(10)).await;
            let measured = run.measured.unwrap();
            let failed = measured.failed.get(kind).copied().unwrap_or(0);
            assert_eq!(failed + measured.completed, 10, "{fault:?} {protocol:?}: {:?}", measured.failed);
            assert!(failed >= 4 && measured.completed >= 5, "{fault:?} {protocol:?}");
            assert!(measured.examples[kind].contains(words), "{:?}", measured.examples);
            // A server on which every request fails is given up.
            let script = Script { healthy: 1, ..script };
            let run =
                self::run(script, protocol, LoadPattern::Closed { streams: 4 }, 0, Quota::Requests(10_000))
                    .await;
            let message = run.measured.unwrap_err().to_string();
            assert!(
                message.contains("gave up after 20 failures in a row") && message.contains(words),
                "{message}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_not_a_failure() {
    for protocol in BOTH {
        let script = Script { fault: Some(Fault::Refusal), healthy: 1, ..Script::default() };
        let run = run(script, protocol, LoadPattern::Closed { streams: 2 }, 0, Quota::Requests(50)).await;
        let measured = run.measured.unwrap();
        assert!(measured.failed.is_empty());
        let refused: u64 = measured.refused.values().sum();
        assert_eq!((refused + measured.completed, measured.ended), (50, 50));
    }
}

#[tokio::test(start_paused = true)]
async fn prompts_are_sent_as_text_if_token_ids_are_rejected() {
    let server = TokenServer::new(Script { fault: Some(Fault::NoTokenIds), ..Script::default() });
    let mut client = connect(&server, Protocol::OpenAi);
    assert!(
        client.probe(None, PromptForm::Ids).await.unwrap_err().to_string().contains("a prompt is a string")
    );
    let info = client.probe(None, PromptForm::Auto).await.unwrap();
    assert!(info.text && info.model == TOKEN_SERVER_MODEL);
    let mut client = connect(&server, Protocol::Grpc);
    assert!(!client.probe(Some(TOKEN_SERVER_MODEL), PromptForm::Auto).await.unwrap().text);
    let refused = client.probe(Some("nobody"), PromptForm::Auto).await.unwrap_err().to_string();
    assert!(refused.contains("serves no model \"nobody\"; it serves clockwork"), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn many_streams_spread_over_connections() {
    // More than an HTTP/2 server allows on one connection: on a shared one, later streams would wait for
    // earlier ones.
    let load = LoadPattern::Closed { streams: 500 };
    let run = run(Script::default(), Protocol::Grpc, load, 0, Quota::Requests(500)).await;
    let measured = run.measured.unwrap();
    let slowest = measured.ttft.quantile_ms(1.0).unwrap();
    assert!(slowest < 25.0, "the first token was due after 20 ms and came after {slowest}");
}
