//! Trace propagation from the client through the router to the worker's engine.

use anyhow::{Result, ensure};
use inflight_harness::{Collector, LocalCluster};
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
