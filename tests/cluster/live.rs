//! The live view of `inflight up`: a stream is watched while the page kills its worker.

use anyhow::{Context, Result, ensure};
use inflight_harness::{LocalCluster, eventually, run};
use inflight_proto::v1::admin_client::AdminClient;
use inflight_proto::v1::{GetRequestRequest, ListRequestsRequest, WatchRequest};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::program;
use crate::requests::{GenerationResult, generate, model, sampled};

/// Sends a call to the HTTP APIs and returns the response with its head.
pub(crate) async fn call(cluster: &LocalCluster, method: &str, path: &str, headers: &str) -> Result<String> {
    let address = cluster.http.strip_prefix("http://").context("not a URL")?;
    let mut stream = TcpStream::connect(address).await?;
    let head =
        format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: 0\r\n");
    stream.write_all(format!("{head}{headers}\r\n").as_bytes()).await?;
    let mut response = String::new();
    stream.read_to_string(&mut response).await?;
    Ok(response)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_watched_while_the_page_kills_its_worker() -> Result<()> {
    // Steps of 10 ms: the stream takes five seconds, so that its worker is killed in the middle of it.
    let flags = ["--workers=2", "--device=sim:flat,step=0.01"];
    let mut cluster = LocalCluster::start(program(), &flags).await?;
    let mut client = cluster.client().await?;
    let mut operator = AdminClient::connect(cluster.endpoint.clone()).await?;
    let page = call(&cluster, "GET", "/ui", "").await?;
    ensure!(page.starts_with("HTTP/1.1 200") && page.contains("<script"), "{page}");

    let tokens = model(&mut client).await?.context_tokens / 2;
    let expected = generate(&mut client, sampled("Once upon a time", tokens, 5)).await?;
    let mut watch =
        operator.watch(WatchRequest { updates_per_second: 10, ..Default::default() }).await?.into_inner();
    let mut update = watch.message().await?.context("a watch has no end")?;
    // The blocks of the first stream are cached, which shows that the workers are observed.
    while update.workers.iter().all(|worker| worker.kv_blocks_cached == 0) {
        update = watch.message().await?.context("a watch has no end")?;
    }
    let numbers: Vec<(&str, u32)> =
        update.workers.iter().map(|worker| (worker.name.as_str(), worker.up_number)).collect();
    ensure!(numbers == [("worker-0", 1), ("worker-1", 2)], "{numbers:?}");
    let devices =
        update.workers.iter().map(|worker| worker.facts.as_ref().map(|facts| facts.device.as_str()));
    ensure!(devices.eq([Some("simulated"); 2]), "{:?}", update.workers);

    let mut stream = client.generate(sampled("Once upon a time", tokens, 5)).await?.into_inner();
    let partial = GenerationResult::until_first_tokens(&mut stream).await?;
    let request = eventually("the stream is listed", || {
        let mut operator = operator.clone();
        async move {
            let open = operator.list_requests(ListRequestsRequest::default()).await?.into_inner().requests;
            open.into_iter().find(|request| !request.worker.is_empty()).context("no request runs")
        }
    })
    .await?;
    let number = numbers.iter().find(|(name, _)| *name == request.worker).context("its worker is known")?.1;
    let path = format!("/ui/workers/{}/kill", number - 1);
    let refused = call(&cluster, "POST", &path, "").await?;
    ensure!(refused.starts_with("HTTP/1.1 403"), "without the page's header: {refused}");
    let killed = call(&cluster, "POST", &path, "x-inflight-ui: 1\r\n").await?;
    ensure!(killed.starts_with("HTTP/1.1 204"), "{killed}");
    let answer = partial.read_rest(&mut stream).await?;
    ensure!(answer.tokens == expected.tokens, "the stream has the tokens of an undisturbed one");

    let get = GetRequestRequest { number: request.number, ..Default::default() };
    let life = operator.get_request(get).await?.into_inner();
    let moved = life.request.context("the request")?;
    ensure!(moved.attempts == 2 && moved.worker != request.worker, "{moved:?}");
    ensure!(life.events.iter().any(|event| event.kind == "lost"), "{:?}", life.events);
    // Its iterations on the second worker were seen, with all tokens that came from there.
    let mut generated = 0;
    while generated == 0 {
        let update = watch.message().await?.context("a watch has no end")?;
        let iterations = update.workers.iter().flat_map(|worker| &worker.iterations);
        let work = iterations.flat_map(|iteration| &iteration.work);
        generated +=
            work.filter(|work| work.request == request.number).map(|work| work.generated_tokens).sum::<u32>();
    }
    let restarted = cluster.event("restarted").await?;
    ensure!(restarted["member"]["name"] == request.worker.as_str(), "{restarted}");

    let router = cluster.endpoint.clone();
    let diagnosed = eventually("both workers are diagnosed", || async {
        let output = run(program(), &["diagnose", "--json", "--router", &router], "").await?;
        ensure!(output.code == Some(0) && output.stdout.lines().count() == 3, "{output:?}");
        Ok(output)
    })
    .await?;
    let lines: Vec<Value> = diagnosed.stdout.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    ensure!(lines[0]["router"] == router.as_str() && lines[1]["worker"] == "worker-0", "{lines:?}");
    let text = run(program(), &["diagnose", "--router", &router], "").await?;
    ensure!(
        text.stdout.contains("router, 2 workers connected") && text.stdout.contains("worker-1: "),
        "{text:?}"
    );
    Ok(())
}
