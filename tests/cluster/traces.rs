//! Traces from the client through the router to the worker's engine, and metrics and logs beside them.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use inflight_harness::{Collector, LocalCluster, RecordedSpan, eventually, kill, scrape};
use tokio::net::TcpListener;
use tonic::Request;

use crate::program;
use crate::requests::{GenerationResult, sampled};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";
const PROMPT: &str = "a-prompt-that-no-span-may-show";

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_spans_client_router_and_worker_without_the_prompt() -> Result<()> {
    let collector = Collector::start().await?;
    let flag = format!("--otlp-endpoint=http://{}", collector.address);
    let mut cluster =
        LocalCluster::start(program(), &["--workers=1", "--log=debug", "--verbose", &flag]).await?;
    let mut client = cluster.client().await?;
    let mut request = Request::new(sampled(PROMPT, 5, 1));
    request.metadata_mut().insert("traceparent", format!("00-{TRACE}-{PARENT}-01").parse()?);
    let mut stream = client.generate(request).await?.into_inner();
    GenerationResult::default().read_rest(&mut stream).await?;
    drop((stream, client));
    // Shutdown flushes the recorded spans.
    cluster.signal(libc::SIGTERM)?;
    ensure!(cluster.wait().await?.success(), "it wrote:\n{}", cluster.log());

    let spans = collector.spans();
    let of = |service: &str| -> Vec<_> {
        spans.iter().filter(|span| span.service == service && span.trace == TRACE).collect()
    };
    let (router, worker) = (of("inflight-router"), of("inflight-worker"));
    ensure!(router.iter().any(|span| span.parent == PARENT), "no router span under the client's: {spans:?}");
    ensure!(!worker.is_empty(), "no worker span in the client's trace: {spans:?}");
    ensure!(
        worker.iter().any(|span| router.iter().any(|parent| parent.id == span.parent)),
        "no worker span hangs under a router span: {spans:?}"
    );
    ensure!(!format!("{spans:?}").contains(PROMPT), "a span shows the prompt: {spans:?}");
    ensure!(!cluster.log().contains(PROMPT), "a log shows the prompt");
    Ok(())
}

/// Returns the child spans of `parent` with this name, by their begin.
fn children<'a>(spans: &'a [RecordedSpan], parent: &RecordedSpan, name: &str) -> Vec<&'a RecordedSpan> {
    let mut found: Vec<_> =
        spans.iter().filter(|span| span.parent == parent.id && span.name == name).collect();
    found.sort_by_key(|span| span.time);
    found
}

fn attribute<'a>(attributes: &'a [(String, String)], name: &str) -> &'a str {
    attributes.iter().find(|(known, _)| known == name).map_or("", |(_, value)| value)
}

/// Returns the position of the worker that runs a sequence.
async fn busy_worker(cluster: &LocalCluster) -> Result<usize> {
    eventually("a busy worker", || async {
        for (at, worker) in cluster.workers.iter().enumerate() {
            if scrape(worker.metrics).await?.total("inflight_worker_running_sequences")? > 0.0 {
                return Ok(at);
            }
        }
        anyhow::bail!("no worker is busy")
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_gets_the_spans_of_both_attempts_of_a_request_whose_worker_was_killed() -> Result<()> {
    let collector = Collector::start().await?;
    let endpoint = format!("--otlp-endpoint=http://{}", collector.address);
    // Steps of 25 ms, ten seconds in all: the worker is killed long before it has finished, on a busy machine too.
    let device = "--device=sim:flat,step=0.025";
    let flags = ["--workers=2", "--verbose", device, &endpoint, "--otlp-signals=traces,metrics,logs"];
    let mut cluster = LocalCluster::start(program(), &flags).await?;
    let mut client = cluster.client().await?;
    let mut request = Request::new(sampled(PROMPT, 400, 1));
    request.metadata_mut().insert("traceparent", format!("00-{TRACE}-{PARENT}-01").parse()?);
    let mut stream = client.generate(request).await?.into_inner();
    let begun = GenerationResult::until_first_tokens(&mut stream).await?;
    let killed = busy_worker(&cluster).await?;
    kill(cluster.workers[killed].pid, libc::SIGKILL)?;
    let whole = begun.read_rest(&mut stream).await?;
    ensure!(whole.tokens.len() == 400, "{} tokens", whole.tokens.len());
    drop((stream, client));
    cluster.event("restarted").await?;
    // Shutdown flushes what is left.
    cluster.signal(libc::SIGTERM)?;
    ensure!(cluster.wait().await?.success(), "it wrote:\n{}", cluster.log());

    let mut spans = collector.spans();
    spans.retain(|span| span.trace == TRACE);
    let root = spans.iter().find(|span| span.parent == PARENT).context("no span under the client's")?;
    ensure!(root.name == "generate" && root.service == "inflight-router", "{root:?}");
    let one = |name: &str| -> Result<&RecordedSpan> {
        let found = children(&spans, root, name);
        ensure!(found.len() == 1, "{name}: {found:?}");
        Ok(found[0])
    };
    let (queue, retry) = (one("queue")?, one("retry")?);
    let attempts = children(&spans, root, "attempt");
    ensure!(attempts.len() == 2, "{attempts:?}");
    let numbers: Vec<_> = attempts.iter().map(|span| attribute(&span.attributes, "attempt")).collect();
    ensure!(numbers == ["1", "2"], "{attempts:?}");
    let workers: Vec<_> = attempts.iter().map(|span| attribute(&span.attributes, "worker")).collect();
    let address = |at: usize| cluster.workers[at].address.to_string();
    ensure!(workers == [address(killed), address(1 - killed)], "{workers:?}");
    let phases = [queue, attempts[0], retry, attempts[1]];
    ensure!(phases.is_sorted_by(|before, after| before.time.1 <= after.time.0), "{phases:?}");
    ensure!(phases.iter().all(|span| root.time.0 <= span.time.0 && span.time.1 <= root.time.1), "{spans:?}");
    let runs = children(&spans, attempts[1], "run");
    ensure!(runs.len() == 1 && runs[0].service == "inflight-worker", "{spans:?}");
    for phase in ["wait", "prefill", "decode"] {
        ensure!(children(&spans, runs[0], phase).len() == 1, "{phase}: {spans:?}");
    }

    let metrics = collector.metrics();
    let value = |service: &str, name: &str| -> Result<f64> {
        let of_name = metrics
            .iter()
            .filter(|metric| (metric.service.as_str(), metric.name.as_str()) == (service, name));
        let values: Vec<f64> = of_name.map(|metric| metric.value).collect();
        ensure!(!values.is_empty(), "no metric {name} of {service}");
        Ok(values.iter().sum())
    };
    ensure!(value("inflight-router", "gen_ai.server.time_to_first_token")? == 1.0);
    ensure!(value("inflight-router", "inflight_router_resubmissions_total")? == 1.0);
    ensure!(value("inflight-router", "inflight_router_completion_tokens_total")? == 400.0);
    ensure!(value("inflight-worker", "inflight_worker_generated_tokens_total")? > 0.0);
    let durations = metrics.iter().find(|metric| metric.name == "gen_ai.server.request.duration");
    let durations = durations.context("no durations")?;
    ensure!(durations.unit == "s" && !attribute(&durations.attributes, "gen_ai.request.model").is_empty());
    let (bounds, counts) = durations.buckets.as_ref().context("no histogram")?;
    ensure!(counts.len() == bounds.len() + 1 && counts.iter().sum::<u64>() == 1, "{durations:?}");

    let logs = collector.logs();
    let ended = logs.iter().find(|log| log.body == "request ended").context("no log of the end")?;
    ensure!(ended.service == "inflight-router" && ended.severity == "INFO", "{ended:?}");
    ensure!(ended.trace == TRACE, "the end of a request is logged outside of its trace: {ended:?}");
    ensure!(attribute(&ended.attributes, "completion_tokens") == "400", "{ended:?}");
    ensure!(logs.iter().any(|log| log.service == "inflight-worker"), "no log of a worker");
    ensure!(!format!("{spans:?}{logs:?}").contains(PROMPT), "a span or a log shows the prompt");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_never_answers_delays_no_request() -> Result<()> {
    // Connections are accepted by the kernel, and nothing is read.
    let silent = TcpListener::bind(("127.0.0.1", 0)).await?;
    let endpoint = format!("--otlp-endpoint=http://{}", silent.local_addr()?);
    let flags = [
        "--workers=1",
        "--log=debug",
        &endpoint,
        "--otlp-signals=traces,metrics,logs",
        "--otlp-metrics-interval=1s",
    ];
    let mut cluster = LocalCluster::start(program(), &flags).await?;
    let mut client = cluster.client().await?;
    let answers = async {
        for seed in 0..50 {
            let mut stream = client.generate(sampled(PROMPT, 20, seed)).await?.into_inner();
            GenerationResult::default().read_rest(&mut stream).await?;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(Duration::from_secs(60), answers)
        .await
        .context("requests wait for the collector")??;
    drop(client);
    cluster.signal(libc::SIGTERM)?;
    ensure!(cluster.wait().await?.success(), "it wrote:\n{}", cluster.log());
    Ok(())
}

#[test]
fn otlp_signals_without_a_collector_and_collectors_over_tls_are_refused() -> Result<()> {
    for (flags, clue) in [
        (&["--otlp-signals=metrics"][..], "--otlp-signals needs --otlp-endpoint"),
        (&["--otlp-endpoint=https://collector:4317"], "TLS to a collector is not supported"),
        (&["--otlp-signals=spans"], "traces, metrics, logs"),
        (&["--otlp-metrics-interval=10ms"], "from 1 s to 1 h"),
        (&["--metrics-compat=sglang"], "vllm"),
    ] {
        let output = std::process::Command::new(program())
            .args(["router", "--workers=127.0.0.1:1"])
            .args(flags)
            .output()?;
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(2) && error.contains(clue), "{flags:?}: {error}");
    }
    Ok(())
}
