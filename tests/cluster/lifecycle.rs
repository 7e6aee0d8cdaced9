//! Life cycle of a cluster: start, serve, drain, stop.

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use inflight_harness::{LocalCluster, eventually, run};
use inflight_proto::v1::FinishReason;

use crate::program;
use crate::requests::{GenerationResult, generate, model, sampled};

/// The embedded model's answer to "What is continuous batching?", which it has learnt by heart: the greedy one on
/// every instruction set.
const ANSWER: &str = "With continuous batching, the scheduler builds a new batch before each forward pass: a sequence that \
                      has finished leaves immediately, and a waiting one takes its place. This keeps the hardware busy \
                      and the waiting short.";

#[tokio::test(flavor = "multi_thread")]
async fn up_starts_streams_and_stops() -> Result<()> {
    let mut cluster = LocalCluster::start(program(), &[]).await?;
    ensure!(cluster.workers.len() == 2, "two workers by default: {:?}", cluster.workers);
    let endpoint = cluster.endpoint.clone();

    let arguments = ["generate", "--endpoint", &endpoint, "--temperature=0", "What is continuous batching?"];
    let answer = run(program(), &arguments, "").await?;
    ensure!(answer.code == Some(0), "{answer:?}");
    ensure!(answer.stdout.trim() == ANSWER, "not the answer of the model's corpus: {answer:?}");
    ensure!(answer.stderr.contains("tokens/s") && answer.stderr.contains("first token after"), "{answer:?}");

    let mut client = cluster.client().await?;
    let context = model(&mut client).await?.context_tokens;
    let lengths = (0..64u32).map(|i| (1 + i * i % 97).min(context / 2));
    let calls = lengths.enumerate().map(|(i, tokens)| {
        let mut client = client.clone();
        async move {
            let prompt = "Once upon a time there was a cat. ".repeat(1 + i % 5);
            let answer = generate(&mut client, sampled(&prompt, tokens, i as u64)).await?;
            ensure!(
                answer.tokens.len() == tokens as usize,
                "call {i}: {} of {tokens} tokens",
                answer.tokens.len()
            );
            ensure!(answer.reasons == [FinishReason::Length], "call {i}: {:?}", answer.reasons);
            let usage = answer.usage.context("no usage")?;
            ensure!(usage.completion_tokens == tokens && usage.prompt_tokens > 0, "call {i}: {usage:?}");
            Ok(())
        }
    });
    try_join_all(calls).await?;

    // A stream in flight at SIGTERM completes.
    let tokens = context / 2;
    let mut stream = client.generate(sampled("Once upon a time", tokens, 1)).await?.into_inner();
    let partial = GenerationResult::until_first_tokens(&mut stream).await?;
    cluster.signal(libc::SIGTERM)?;
    cluster.event("stopping").await?;
    let answer = partial.read_rest(&mut stream).await?;
    ensure!(answer.tokens.len() == tokens as usize, "{} of {tokens} tokens", answer.tokens.len());
    drop((stream, client));

    let status = cluster.wait().await?;
    ensure!(status.success(), "{status}; it wrote:\n{}", cluster.log());
    cluster.tag.check_gone()
}

#[tokio::test(flavor = "multi_thread")]
async fn generate_writes_json_events_and_reads_standard_input() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--workers=1"]).await?;
    let endpoint = cluster.endpoint.as_str();
    let flags =
        ["generate", "--endpoint", endpoint, "--json", "--n=2", "--max-tokens=5", "--ignore-eos", "--seed=7"];
    let answer = run(program(), &flags, "Tell me a story.\n").await?;
    ensure!(answer.code == Some(0), "{answer:?}");
    let events: Vec<serde_json::Value> = answer
        .stdout
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()
        .context(answer.stdout.clone())?;
    let named = |name: &str| events.iter().filter(|event| event["event"] == name).count();
    ensure!(named("started") == 1 && named("finished") == 2 && named("completed") == 1, "{events:?}");
    ensure!(events.first().is_some_and(|event| event["seed"] == 7), "{events:?}");
    let completed = events.last().context("no events")?;
    ensure!(completed["usage"]["completion_tokens"] == 10, "{completed}");

    let refused =
        run(program(), &["generate", "--endpoint", endpoint, "--temperature=-1", "Hello"], "").await?;
    ensure!(refused.code == Some(4) && refused.stderr.contains("INVALID_ARGUMENT"), "{refused:?}");
    ensure!(refused.stderr.contains("temperature"), "{refused:?}");
    let unknown =
        run(program(), &["generate", "--endpoint", endpoint, "--model=nobody", "Hello"], "").await?;
    ensure!(unknown.code == Some(4) && unknown.stderr.contains("NOT_FOUND"), "{unknown:?}");
    let late = ["generate", "--endpoint", endpoint, "--timeout=1us", "--raw", "--ignore-eos", "Hello"];
    let late = run(program(), &late, "").await?;
    // Either the router rejects the deadline before queueing the request, or the deadline expires.
    let refused = late.code == Some(5) && late.stderr.contains("RESOURCE_EXHAUSTED");
    let exceeded = late.code == Some(6) && late.stderr.contains("DEADLINE_EXCEEDED");
    ensure!(refused || exceeded, "{late:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn child_processes_exit_with_up_even_after_sigkill() -> Result<()> {
    let mut cluster = LocalCluster::start(program(), &[]).await?;
    ensure!(
        cluster.tag.processes().len() == 4,
        "up, a router and two workers: {:?}",
        cluster.tag.processes()
    );
    cluster.signal(libc::SIGKILL)?;
    cluster.wait().await?;
    let tag = cluster.tag.clone();
    eventually("the children end", || async { tag.check_gone() }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_sigint_ends_the_drain_at_once() -> Result<()> {
    let mut cluster = LocalCluster::start(program(), &["--workers=1", "--drain-timeout=10m"]).await?;
    let mut client = cluster.client().await?;
    let tokens = model(&mut client).await?.context_tokens - 64;
    let mut streams = Vec::new();
    for seed in 0..32 {
        let mut stream = client.generate(sampled("Once upon a time", tokens, seed)).await?.into_inner();
        if seed == 0 {
            GenerationResult::until_first_tokens(&mut stream).await?;
        }
        streams.push(stream);
    }
    cluster.signal(libc::SIGINT)?;
    cluster.event("stopping").await?;
    cluster.signal(libc::SIGINT)?;
    let status = cluster.wait().await?;
    ensure!(status.code() == Some(130), "{status}; it wrote:\n{}", cluster.log());
    cluster.tag.check_gone()
}
