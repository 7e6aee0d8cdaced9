//! `inflight bench` as a process, against a real cluster and against scripted servers ([`TokenServer`]).

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use inflight_harness::{CommandOutput, Fault, LocalCluster, Script, TokenServer, run, scrape};
use serde_json::Value;

use crate::program;

async fn bench(arguments: &[&str]) -> Result<CommandOutput> {
    let mut all = vec!["bench"];
    all.extend_from_slice(arguments);
    run(program(), &all, "").await
}

fn json(finished: &CommandOutput) -> Result<Value> {
    ensure!(finished.code == Some(0), "{finished:?}");
    serde_json::from_str(&finished.stdout).with_context(|| format!("not JSON: {}", finished.stdout))
}

#[tokio::test(flavor = "multi_thread")]
async fn bench_measures_a_cluster_in_a_closed_and_an_open_loop() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--workers=1"]).await?;
    let lengths =
        ["--prompt-tokens=10..40", "--output-tokens=lognormal:mean=20,sigma=0.7,max=60", "--seed=7"];
    for load in ["--concurrency=3", "--rate=50"] {
        let mut arguments = vec!["--endpoint", &cluster.endpoint, load, "--requests=40", "--json=-"];
        arguments.extend_from_slice(&lengths);
        let report = json(&bench(&arguments).await?)?;
        let round = &report["points"][0]["endpoints"][0]["rounds"][0];
        ensure!(round["requests"]["completed"] == 40 && round["requests"]["short"] == 0, "{report:#}");
        let figure =
            |name: &str| round["figures"][name].as_f64().with_context(|| format!("no {name} in {report:#}"));
        ensure!(
            figure("output_tokens_per_s")? > 0.0
                && figure("total_tokens_per_s")? > figure("output_tokens_per_s")?
        );
        ensure!(
            figure("e2e_ms_p50")? >= figure("ttft_ms_p50")? && figure("itl_ms_p99")? >= figure("itl_ms_p50")?
        );
        ensure!(report["setting"]["endpoints"][0]["prompts"] == "token ids", "{report:#}");
    }
    let refused = bench(&["--endpoint", &cluster.endpoint, "--model=nobody"]).await?;
    ensure!(refused.code == Some(4) && refused.stderr.contains("serves no model \"nobody\""), "{refused:?}");
    let long = bench(&["--endpoint", &cluster.endpoint, "--prompt-tokens=1000000"]).await?;
    ensure!(long.code == Some(2) && long.stderr.contains("--max-prompt-tokens"), "{long:?}");
    Ok(())
}

/// Two runs with one seed must not share prompts, or the prefix cache of the server makes the second faster.
#[tokio::test(flavor = "multi_thread")]
async fn runs_share_cached_prompts_only_with_the_same_nonce() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--workers=1"]).await?;
    let metrics = cluster.workers.first().context("one was started")?.metrics;
    let cached = async || scrape(metrics).await?.total("inflight_worker_cached_tokens_total");
    let common = ["--endpoint", &cluster.endpoint, "--requests=8", "--seed=7", "--json=-"];
    let lengths = ["--prompt-tokens=64", "--output-tokens=2"];
    let mut nonces = Vec::new();
    for concurrency in ["--concurrency=1", "--concurrency=1", "--concurrency=2"] {
        let report = json(&bench(&[&common[..], &lengths, &[concurrency]].concat()).await?)?;
        nonces.push(report["setting"]["nonce"].as_u64().context("no nonce in the report")?);
        ensure!(cached().await? == 0.0, "{} tokens were cached", cached().await?);
    }
    let again = format!("--nonce={}", nonces[0]);
    bench(&[&common[..], &lengths, &["--concurrency=1", &again]].concat()).await?;
    ensure!(cached().await? > 0.0, "the same nonce sends the same prompts");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn bench_compares_two_servers_by_ratios() -> Result<()> {
    let gap = Duration::from_millis(10);
    let fast = TokenServer::new(Script { gap, ..Script::default() }).listen_grpc().await?;
    let slow = TokenServer::new(Script { gap: gap * 4, ..Script::default() }).listen_openai().await?;
    let (fast, slow) = (format!("fast=http://{fast}"), format!("slow=http://{slow}/v1"));
    let arguments =
        ["--endpoint", &fast, "--endpoint", &slow, "--concurrency=4", "--requests=8", "--output-tokens=10"];
    let shown = bench(&arguments).await?;
    ensure!(shown.code == Some(0) && shown.stdout.contains("fast / slow"), "{shown:?}");
    ensure!(shown.stdout.contains("closed loop, 4 streams; 3 rounds, medians"), "{}", shown.stdout);
    let report = json(&bench(&[&arguments[..], &["--json=-"]].concat()).await?)?;
    let ratio =
        report["points"][0]["ratios"][0]["ratios"]["itl_ms_p50"]["median"].as_f64().context("no ratio")?;
    // 0.25, with tolerance for a busy machine.
    ensure!((0.15..0.6).contains(&ratio), "{ratio}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes half a minute alone; the lane artefact of .ci/nightly runs it"]
async fn bench_finds_the_highest_rate_within_objectives() -> Result<()> {
    let search = async |endpoint: &str, arguments: &[&str]| -> Result<[Option<f64>; 2]> {
        let report = json(&bench(&[&["--endpoint", endpoint, "--json=-"], arguments].concat()).await?)?;
        let search = &report["search"];
        Ok([search["highest_met_per_s"].as_f64(), search["lowest_missed_per_s"].as_f64()])
    };
    // Gaps that do not depend on the rate.
    let script = Script { gap: Duration::from_millis(20), ..Script::default() };
    let steady = format!("http://{}", TokenServer::new(script).listen_grpc().await?);
    let short = ["--find-rate=20..40", "--requests=10", "--output-tokens=5"];
    let never = search(&steady, &[&short[..], &["--slo-tpot=10ms"]].concat()).await?;
    ensure!(never == [None, Some(20.0)], "{never:?}");
    let always = search(&steady, &[&short[..], &["--slo-tpot=10s"]].concat()).await?;
    ensure!(always == [Some(40.0), None], "{always:?}");
    // Four slots, half a second a request: 8 requests a second, fewer on a busy machine.
    let flags = ["--workers=1", "--device=sim:flat,step=0.02", "--max-sequences=4"];
    let cluster = LocalCluster::start(program(), &flags).await?;
    let load = [
        "--find-rate=1..32",
        "--slo-ttft=1s",
        "--slo-share=0.7",
        "--duration=3s",
        "--warmup=0",
        "--constant-rate",
    ];
    let [Some(met), Some(missed)] =
        search(&cluster.endpoint, &[&load[..], &["--output-tokens=25"]].concat()).await?
    else {
        anyhow::bail!("no rate was met, or all")
    };
    ensure!(met >= 2.0 && missed < 20.0 && missed / met < 1.11, "{met}, {missed}");
    // Refused before anything is sent.
    for (wrong, clue) in [
        (&["--find-rate=1..64"][..], "--slo-ttft"),
        (&["--find-rate=64..1", "--slo-ttft=1s"], "64 is more than 1"),
        (&["--find-rate=1..64", "--slo-ttft=1s", "--rate=1"], "--rate"),
        (&["--find-rate=1..64", "--slo-ttft=1s", "--endpoint=http://127.0.0.1:1"], "measures one server"),
    ] {
        let refused = bench(&[&["--endpoint", &steady], wrong].concat()).await?;
        ensure!(refused.code == Some(2) && refused.stderr.contains(clue), "{wrong:?}: {refused:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn bench_replays_a_trace_with_its_tenants() -> Result<()> {
    let server = TokenServer::new(Script::default());
    let endpoint = format!("http://{}", server.listen_grpc().await?);
    let path = std::env::temp_dir().join(format!("inflight-bench-{}.csv", std::process::id()));
    let trace = "req_time,adapter_dir,prompt_len,output_len,first_token_latency,request_latency\n\
                 0.0,a,13,5,1,1\n1.0,b,7,3,1,1\n9.0,a,8,4,1,1\n";
    std::fs::write(&path, trace)?;
    let path = path.to_str().context("a path that is no text")?;
    let report = json(&bench(&["--endpoint", &endpoint, "--trace", path, "--speed=100", "--json=-"]).await?)?;
    std::fs::remove_file(path)?;
    let served: Vec<(usize, u32, String)> = server
        .log()
        .into_iter()
        .map(|request| (request.prompt.len(), request.asked, request.tenant))
        .collect();
    let expected = [(13, 5, "tenant-0"), (7, 3, "tenant-1"), (8, 4, "tenant-0")];
    ensure!(
        served == expected.map(|(prompt, asked, tenant)| (prompt, asked, tenant.to_owned())),
        "{served:?}"
    );
    let tenants = &report["points"][0]["endpoints"][0]["rounds"][0]["tenants"];
    ensure!(tenants[0]["output_tokens"] == 9 && tenants[1]["output_tokens"] == 3, "{tenants}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn bench_fails_with_a_reason_where_it_cannot_measure() -> Result<()> {
    let free = std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?;
    for down in [format!("http://{free}"), format!("http://{free}/v1")] {
        let down = bench(&["--endpoint", &down]).await?;
        ensure!(down.code == Some(3) && down.stderr.contains("cannot connect to"), "{down:?}");
    }
    // Fault, exit code, text on stderr if all requests fail, and error kind if the first eight succeed.
    let faults = [
        (Fault::Error, 1, "500 Internal Server Error: out of order", "http_500"),
        (Fault::EndsEarly(3), 1, "ended before its completion did", "truncated"),
        (Fault::Refusal, 5, "too much to do", ""),
    ];
    for (fault, code, words, kind) in faults {
        let script = Script { fault: Some(fault), ..Script::default() };
        let endpoint = format!("http://{}/v1", TokenServer::new(script).listen_openai().await?);
        let failed = bench(&["--endpoint", &endpoint]).await?;
        ensure!(failed.code == Some(code) && failed.stderr.contains(words), "{failed:?}");
        if kind.is_empty() {
            continue;
        }
        let script = Script { healthy: 8, ..script };
        let endpoint = format!("http://{}/v1", TokenServer::new(script).listen_openai().await?);
        let failed = bench(&["--endpoint", &endpoint, "--requests=12", "--concurrency=1"]).await?;
        ensure!(failed.code == Some(1) && failed.stdout.contains("requests completed"), "{failed:?}");
        ensure!(
            failed.stderr.contains(" of 12 requests failed") && failed.stderr.contains(kind),
            "{failed:?}"
        );
    }
    let wrong = TokenServer::new(Script::default()).listen_openai().await?;
    let protocol = bench(&["--endpoint", &format!("http://{wrong}")]).await?;
    ensure!(protocol.code != Some(0) && protocol.stderr.contains("/v1"), "{protocol:?}");
    for (flags, words) in [
        (["--trace=/nowhere/trace.csv", "--speed=2"], "/nowhere/trace.csv"),
        (["--rate=0", "--seed=1"], "--rate"),
        (["--concurrency=2", "--rate=1"], "cannot be used with"),
        (["--endpoint=https://h/v1", "--seed=1"], "TLS"),
        (["--output-tokens=0", "--seed=1"], "from 1 to"),
    ] {
        let refused = bench(&flags).await?;
        ensure!(refused.code == Some(2) && refused.stderr.contains(words), "{flags:?}: {refused:?}");
    }
    Ok(())
}
