//! Real workers whose CUDA driver calls go to simulated GPUs ([`SimulatedGpu`]).

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use inflight_fixtures::{BenchmarkShape, TempDir};
use inflight_harness::{LocalCluster, SimulatedGpu, run_with_env, scrape};
use inflight_proto::v1::GenerateRequest;
use tokio::sync::OnceCell;

use crate::program;
use crate::requests::{GenerationResult, generate, sampled};

/// Writes a small model with a head size that the CUDA kernels support; returns folder and `--model` flag.
fn mini() -> Result<(TempDir, String)> {
    let folder = TempDir::new("inflight-mini")?;
    BenchmarkShape::Mini.write(folder.path())?;
    let flag = format!("--model={}", folder.path().display());
    Ok((folder, flag))
}

/// Worker flags that keep work on the slow simulated GPU small.
const SMALL: [&str; 3] = ["--max-sequences=6", "--max-batch-tokens=64", "--max-context-tokens=256"];

/// Generates all requests concurrently, then the first one alone, and checks that its results agree.
async fn generate_all(cluster: &LocalCluster, requests: &[GenerateRequest]) -> Result<Vec<GenerationResult>> {
    let client = cluster.client().await?;
    let generate_one = |request: &GenerateRequest| {
        let (mut client, request) = (client.clone(), request.clone());
        async move { generate(&mut client, request).await }
    };
    let mut answers = try_join_all(requests.iter().map(generate_one)).await?;
    answers.push(generate_one(&requests[0]).await?);
    ensure!(answers[0] == answers[requests.len()], "alone it is another answer: {answers:?}");
    Ok(answers)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes half a minute alone; the lane artefact of .ci/nightly runs it"]
async fn gpu_results_are_batch_invariant_with_and_without_launch_overlap_and_drafts() -> Result<()> {
    if !SimulatedGpu::AVAILABLE {
        inflight_fixtures::skipped(
            "the simulated GPU",
            "there was no C++ compiler to build the kernels with",
        );
        return Ok(());
    }
    let (_folder, model) = mini()?;
    let requests: Vec<_> = (0..4).map(|seed| sampled("Once upon a time", 10, seed)).collect();
    let mut expected = None;
    // Machine code without programmatic dependent launch (sm_80), with it (sm_90a), and PTX with a driver that rejects it.
    for (settings, drafts) in [
        ("memory=768,compute=8.0,checks=false", "--drafts=off"),
        ("memory=768,compute=9.0,checks=false", "--drafts=prompt-lookup"),
        ("memory=768,compute=10.0,overlap=false,checks=false", "--drafts=off"),
    ] {
        let gpu = SimulatedGpu::new(settings)?;
        let flags = ["--workers=1", "--device=cuda", "--deterministic", "--verbose", drafts, &model];
        let flags = [&flags, &SMALL[..]].concat();
        let cluster = LocalCluster::start_with_env(program(), &flags, &gpu.environment()).await?;
        let answers = generate_all(&cluster, &requests)
            .await
            .with_context(|| format!("{settings}: {}", cluster.log()))?;
        ensure!(
            *expected.get_or_insert_with(|| answers.clone()) == answers,
            "{settings}: other answers: {answers:?}"
        );
        let log = cluster.log();
        let paths = log
            .lines()
            .find(|line| line.contains("fast paths of the GPU"))
            .context("no line on fast paths")?;
        let (on, off) = paths.split_once(" off=").context("no paths that are off")?;
        ensure!(on.contains("overlapped_kernels") == settings.contains("compute=9.0"), "{settings}: {log}");
        ensure!(off.contains("cublaslt (--deterministic"), "{settings}: {log}");
        ensure!(
            log.contains("compiles PTX at every start") == settings.contains("compute=10.0"),
            "{settings}: {log}"
        );
        ensure!(
            log.contains("programmatic dependent launch is off") == settings.contains("overlap=false"),
            "{settings}: {log}"
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes half a minute alone; the lane artefact of .ci/nightly runs it"]
async fn a_tensor_parallel_gpu_group_is_batch_invariant_and_survives_a_fault() -> Result<()> {
    if !SimulatedGpu::AVAILABLE {
        inflight_fixtures::skipped(
            "the simulated GPU",
            "there was no C++ compiler to build the kernels with",
        );
        return Ok(());
    }
    let (_folder, model) = mini()?;
    let requests: Vec<_> = (0..3).map(|seed| sampled("Once upon a time", 12, seed)).collect();
    let gpu = SimulatedGpu::new("gpus=2,memory=768,ptx=90,checks=false")?;
    let group =
        ["--workers=1", "--device=cuda", "--deterministic", "--tensor-parallel=2", "--verbose", &model];
    let flags = [&group, &SMALL[..]].concat();
    let cluster = LocalCluster::start_with_env(program(), &flags, &gpu.environment()).await?;
    let shared = generate_all(&cluster, &requests).await.with_context(|| cluster.log())?;
    ensure!(cluster.log().contains("ranks=2"), "{}", cluster.log());
    ensure!(shared.iter().all(|answer| answer.tokens.len() == 12), "{shared:?}");
    // A rank that fails ends the whole group, and the supervisor restarts it.
    let mut cluster = cluster;
    gpu.fail(1, 700)?;
    let mut client = cluster.client().await?;
    let (again, healed) = tokio::join!(generate(&mut client, requests[0].clone()), async {
        let lost = cluster.event("lost").await?;
        gpu.heal()?;
        Ok::<_, anyhow::Error>(lost)
    });
    healed.and_then(|lost| exited_with_failure(&lost, "worker-0"))?;
    ensure!(again.as_ref().is_ok_and(|again| *again == shared[0]), "{again:?} {}", cluster.log());
    let log = cluster.log();
    ensure!(log.contains("an illegal memory access was encountered"), "{log}");
    Ok(())
}

/// Checks that the `lost` event names worker `name` and a nonzero exit code.
fn exited_with_failure(lost: &serde_json::Value, name: &str) -> Result<()> {
    let status = lost["status"].as_str().unwrap_or_default();
    ensure!(lost["name"] == name && status.starts_with("exit code") && status != "exit code 0", "{lost}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes half a minute alone; the lane artefact of .ci/nightly runs it"]
async fn a_gpu_failure_ends_its_worker_and_no_stream_loses_a_token() -> Result<()> {
    if !SimulatedGpu::AVAILABLE {
        inflight_fixtures::skipped(
            "the simulated GPU",
            "there was no C++ compiler to build the kernels with",
        );
        return Ok(());
    }
    let (_folder, model) = mini()?;
    let gpu = SimulatedGpu::new("gpus=2,memory=768,checks=false")?;
    let flags = ["--workers=2", "--device=cuda", "--deterministic", "--verbose", &model];
    let flags = [&flags, &SMALL[..]].concat();
    let mut cluster = LocalCluster::start_with_env(program(), &flags, &gpu.environment()).await?;
    let client = cluster.client().await?;
    let requests: Vec<_> = (0..4).map(|seed| sampled("Once upon a time", 48, seed)).collect();
    let baseline = generate_all(&cluster, &requests).await?;
    let failed = OnceCell::new();
    let interrupted = try_join_all(requests.iter().map(|request| {
        let (mut client, failed, workers, gpu) = (client.clone(), &failed, &cluster.workers, &gpu);
        async move {
            let mut stream = client.generate(request.clone()).await?.into_inner();
            let partial = GenerationResult::until_first_tokens(&mut stream).await?;
            let fail = || async {
                let running = async |index: usize| {
                    scrape(workers[index].metrics).await?.total("inflight_worker_running_sequences")
                };
                let busier = usize::from(running(1).await? > running(0).await?);
                gpu.fail(busier, 214).map(|()| busier)
            };
            failed.get_or_try_init(fail).await?;
            partial.read_rest(&mut stream).await
        }
    }))
    .await
    .with_context(|| cluster.log())?;
    let busier = failed.into_inner().context("nothing failed")?;
    let lost = cluster.event("lost").await?;
    gpu.heal()?;
    exited_with_failure(&lost, &format!("worker-{busier}"))?;
    for (request, (expected, got)) in baseline.iter().zip(&interrupted).enumerate() {
        ensure!(expected == got, "request {request} changed: expected {expected:?}, got {got:?}");
    }
    let moved = scrape(cluster.router.metrics).await?.total("inflight_router_resubmissions_total")?;
    ensure!(moved >= 1.0, "the failure interrupted no stream");
    ensure!(cluster.log().contains("uncorrectable ECC error"), "{}", cluster.log());
    // The restarted worker gets a healthy GPU.
    while cluster.event("restarted").await?["member"]["name"] != lost["name"] {}
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn logits_that_are_not_finite_on_a_gpu_never_become_a_token() -> Result<()> {
    if !SimulatedGpu::AVAILABLE {
        return Ok(());
    }
    let (_folder, model) = mini()?;
    let gpu = SimulatedGpu::new("memory=1600,checks=false,lie=nan")?;
    let small = ["--max-sequences=2", "--max-batch-tokens=16", "--max-context-tokens=64"];
    let flags = ["--workers=2", "--device=cuda", "--no-autotune", "--verbose", &model];
    let flags = [&flags, &small[..]].concat();
    let cluster = LocalCluster::start_with_env(program(), &flags, &gpu.environment()).await?;
    let mut client = cluster.client().await?;
    let refused = generate(&mut client, sampled("Once upon a time", 4, 7)).await;
    let error = refused.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(error.contains("infinite or NaN"), "{error:?}: {}", cluster.log());
    // It was tried on a second worker, too.
    ensure!(cluster.log().contains("non_finite"), "{}", cluster.log());
    Ok(())
}

#[tokio::test]
async fn an_unusable_gpu_is_rejected_with_a_reason_and_auto_uses_the_cpu() -> Result<()> {
    let (_folder, model) = mini()?;
    let refusals: [(&str, &str, &[&str]); 9] = [
        ("cuda=12.1", "--device=cuda", &["supports CUDA 12.1", "535 or later"]),
        ("compute=7.5", "--device=cuda", &["Simulated GPU", "capability 7.5", "8.0 (Ampere)"]),
        ("gpus=2", "--device=cuda:2", &["no GPU 2", "sees 2"]),
        ("gpus=2", "--gpu=7", &["no GPU 7", "sees 2"]),
        ("gpus=0", "--device=cuda", &["no CUDA-capable device is detected"]),
        ("memory=256", "--device=cuda", &["does not fit", "MiB are missing of the", "--max-sequences ("]),
        (
            "taken=700",
            "--device=cuda",
            &["does not fit", "MiB are missing of the", "end what else uses the GPU"],
        ),
        ("racing=960", "--device=cuda", &["MiB left", "lower --gpu-memory-utilization"]),
        ("gpus=1", "--device=cuda:1", &["no GPU 1", "sees 1"]),
    ];
    for (settings, flag, clues) in refusals {
        // Kernels are loaded before memory is sized, so these cases need them.
        if !SimulatedGpu::AVAILABLE && clues[0].contains("fit") | clues[0].contains("MiB") {
            continue;
        }
        let gpu = SimulatedGpu::new(settings)?;
        // Autotuning and large batches, whose products are run once at load, take half a minute of CPU time and decide nothing here.
        let small = ["--no-autotune", "--max-batch-tokens=64", "--max-sequences=4", &model, flag];
        let worker = [&["worker", "--listen=127.0.0.1:0", "--metrics-listen=off"], &small[..]].concat();
        let refused = run_with_env(program(), &worker, "", &gpu.environment()).await?;
        ensure!(refused.code == Some(1) && refused.stdout.is_empty(), "{settings}: {refused:?}");
        for clue in clues {
            ensure!(refused.stderr.contains(clue), "{settings}: no {clue:?} in {}", refused.stderr);
        }
    }
    let gpu = SimulatedGpu::new("cuda=12.1")?;
    let flags = [&["--workers=1", "--device=auto", "--verbose", &model], &SMALL[..]].concat();
    let cluster = LocalCluster::start_with_env(program(), &flags, &gpu.environment()).await?;
    let answer = generate(&mut cluster.client().await?, sampled("Once", 8, 0)).await?;
    ensure!(answer.tokens.len() == 8, "{answer:?}");
    let reasons = cluster.log().matches("supports CUDA 12.1").count();
    ensure!(reasons == 1, "the reason is there {reasons} times: {}", cluster.log());
    Ok(())
}
