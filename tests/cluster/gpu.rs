//! Workers with GPUs, which are simulated ([`SimulatedGpu`]): all of the worker is real, its calls of the driver too.

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use inflight_fixtures::{Shape, TempDir};
use inflight_proto::v1::GenerateRequest;
use inflight_tests::{LocalCluster, SimulatedGpu, run_with_env, scrape};
use tokio::sync::OnceCell;

use crate::program;
use crate::requests::{GenerationResult, generate, sampled};

/// A model whose heads are as wide as the kernels want them, and the flag that names it.
fn mini() -> Result<(TempDir, String)> {
    let folder = TempDir::new("inflight-mini")?;
    Shape::Mini.write(folder.path())?;
    let flag = format!("--model={}", folder.path().display());
    Ok((folder, flag))
}

/// What a worker on a simulated GPU is started with: small, as everything there takes long.
const SMALL: [&str; 3] = ["--max-sequences=6", "--max-batch-tokens=64", "--max-context-tokens=256"];

/// Has the worker say whether its kernels overlap.
const OVERLAP_IS_LOGGED: &str = "--log=info,inflight_worker::runtime::cuda::driver=debug";

/// Answers to all requests at once, and after that to the first one alone.
async fn answers(cluster: &LocalCluster, requests: &[GenerateRequest]) -> Result<Vec<GenerationResult>> {
    let client = cluster.client().await?;
    let ask = |request: &GenerateRequest| {
        let (mut client, request) = (client.clone(), request.clone());
        async move { generate(&mut client, request).await }
    };
    let mut answers = try_join_all(requests.iter().map(ask)).await?;
    answers.push(ask(&requests[0]).await?);
    ensure!(answers[0] == answers[requests.len()], "alone it is another answer: {answers:?}");
    Ok(answers)
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_of_a_gpu_do_not_depend_on_the_crowd_and_launches_overlap_where_they_may() -> Result<()> {
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
    // Kernels one by one; overlapping; and refused to.
    for settings in ["memory=768,ptx=80", "memory=768,ptx=90", "memory=768,ptx=90,overlap=false"] {
        let gpu = SimulatedGpu::new(settings)?;
        let flags =
            ["--workers=1", "--device=cuda", "--deterministic", "--verbose", OVERLAP_IS_LOGGED, &model];
        let flags = [&flags, &SMALL[..]].concat();
        let cluster = LocalCluster::start_with_env(program(), &flags, &gpu.environment()).await?;
        let answers =
            answers(&cluster, &requests).await.with_context(|| format!("{settings}: {}", cluster.log()))?;
        ensure!(
            *expected.get_or_insert_with(|| answers.clone()) == answers,
            "{settings}: other answers: {answers:?}"
        );
        let log = cluster.log();
        ensure!(log.contains("overlap=true") == settings.contains("ptx=90"), "{settings}: {log}");
        ensure!(
            log.contains("programmatic dependent launch is off") == settings.contains("overlap=false"),
            "{settings}: {log}"
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn gpus_that_share_a_model_answer_alike_alone_and_in_a_crowd() -> Result<()> {
    if !SimulatedGpu::AVAILABLE {
        inflight_fixtures::skipped(
            "the simulated GPU",
            "there was no C++ compiler to build the kernels with",
        );
        return Ok(());
    }
    let (_folder, model) = mini()?;
    let requests: Vec<_> = (0..3).map(|seed| sampled("Once upon a time", 12, seed)).collect();
    let gpu = SimulatedGpu::new("gpus=2,memory=768,ptx=90")?;
    let group =
        ["--workers=1", "--device=cuda", "--deterministic", "--tensor-parallel=2", "--verbose", &model];
    let flags = [&group, &SMALL[..]].concat();
    let cluster = LocalCluster::start_with_env(program(), &flags, &gpu.environment()).await?;
    let shared = answers(&cluster, &requests).await.with_context(|| cluster.log())?;
    ensure!(cluster.log().contains("ranks=2"), "{}", cluster.log());
    ensure!(shared.iter().all(|answer| answer.tokens.len() == 12), "{shared:?}");
    // A rank that fails takes its group with it, and the supervisor starts both again.
    let mut cluster = cluster;
    gpu.fail(1, 700)?;
    let mut client = cluster.client().await?;
    let (again, healed) = tokio::join!(generate(&mut client, requests[0].clone()), async {
        let lost = cluster.event("lost").await?;
        gpu.heal()?;
        Ok::<_, anyhow::Error>(lost)
    });
    healed.and_then(|lost| lost_by_itself(&lost, "worker-0"))?;
    ensure!(again.as_ref().is_ok_and(|again| *again == shared[0]), "{again:?} {}", cluster.log());
    let log = cluster.log();
    ensure!(log.contains("an illegal memory access was encountered"), "{log}");
    Ok(())
}

/// Whether a worker ended by itself, and told of a failure.
fn lost_by_itself(lost: &serde_json::Value, name: &str) -> Result<()> {
    let status = lost["status"].as_str().unwrap_or_default();
    ensure!(lost["name"] == name && status.starts_with("exit code") && status != "exit code 0", "{lost}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_fails_ends_its_worker_and_no_stream_loses_a_token() -> Result<()> {
    if !SimulatedGpu::AVAILABLE {
        inflight_fixtures::skipped(
            "the simulated GPU",
            "there was no C++ compiler to build the kernels with",
        );
        return Ok(());
    }
    let (_folder, model) = mini()?;
    let gpu = SimulatedGpu::new("gpus=2,memory=768")?;
    let flags = ["--workers=2", "--device=cuda", "--deterministic", "--verbose", &model];
    let flags = [&flags, &SMALL[..]].concat();
    let mut cluster = LocalCluster::start_with_env(program(), &flags, &gpu.environment()).await?;
    let client = cluster.client().await?;
    let requests: Vec<_> = (0..4).map(|seed| sampled("Once upon a time", 48, seed)).collect();
    let undisturbed = answers(&cluster, &requests).await?;
    let failed = OnceCell::new();
    let disturbed = try_join_all(requests.iter().map(|request| {
        let (mut client, failed, workers, gpu) = (client.clone(), &failed, &cluster.workers, &gpu);
        async move {
            let mut stream = client.generate(request.clone()).await?.into_inner();
            let begun = GenerationResult::begin(&mut stream).await?;
            let fail = || async {
                let running = async |index: usize| {
                    scrape(workers[index].metrics).await?.total("inflight_worker_running_sequences")
                };
                let busier = usize::from(running(1).await? > running(0).await?);
                gpu.fail(busier, 214).map(|()| busier)
            };
            failed.get_or_try_init(fail).await?;
            begun.read(&mut stream).await
        }
    }))
    .await
    .with_context(|| cluster.log())?;
    let busier = failed.into_inner().context("nothing failed")?;
    let lost = cluster.event("lost").await?;
    gpu.heal()?;
    lost_by_itself(&lost, &format!("worker-{busier}"))?;
    for (request, (expected, got)) in undisturbed.iter().zip(&disturbed).enumerate() {
        ensure!(expected == got, "request {request} changed: expected {expected:?}, got {got:?}");
    }
    let moved = scrape(cluster.router.metrics).await?.total("inflight_router_resubmissions_total")?;
    ensure!(moved >= 1.0, "the failure disturbed no stream");
    ensure!(cluster.log().contains("uncorrectable ECC error"), "{}", cluster.log());
    // The one that is started again finds a GPU that works.
    while cluster.event("restarted").await?["member"]["name"] != lost["name"] {}
    Ok(())
}

#[tokio::test]
async fn what_keeps_a_gpu_from_being_used_is_said_and_auto_takes_the_cpu() -> Result<()> {
    let (_folder, model) = mini()?;
    let refusals: [(&str, &str, &[&str]); 9] = [
        ("cuda=12.8", "--device=cuda", &["supports CUDA 12.8", "580 or later"]),
        ("compute=7.5", "--device=cuda", &["Simulated GPU", "capability 7.5", "8.0 (Ampere)"]),
        ("gpus=2", "--device=cuda:2", &["no GPU 2", "sees 2"]),
        ("gpus=2", "--gpu=7", &["no GPU 7", "sees 2"]),
        ("gpus=0", "--device=cuda", &["no CUDA-capable device is detected"]),
        ("memory=256", "--device=cuda", &["does not fit", "MiB are missing of the", "lower --max-sequences"]),
        (
            "taken=700",
            "--device=cuda",
            &["does not fit", "MiB are missing of the", "end what else uses the GPU"],
        ),
        ("racing=960", "--device=cuda", &["MiB left", "lower --gpu-memory-utilization"]),
        ("gpus=1", "--device=cuda:1", &["no GPU 1", "sees 1"]),
    ];
    for (settings, flag, clues) in refusals {
        // Kernels are loaded before memory is looked at.
        if !SimulatedGpu::AVAILABLE && clues[0].contains("fit") | clues[0].contains("MiB") {
            continue;
        }
        let gpu = SimulatedGpu::new(settings)?;
        let worker = ["worker", "--listen=127.0.0.1:0", "--metrics-listen=off", &model, flag];
        let refused = run_with_env(program(), &worker, "", &gpu.environment()).await?;
        ensure!(refused.code == Some(1) && refused.stdout.is_empty(), "{settings}: {refused:?}");
        for clue in clues {
            ensure!(refused.stderr.contains(clue), "{settings}: no {clue:?} in {}", refused.stderr);
        }
    }
    let gpu = SimulatedGpu::new("cuda=12.8")?;
    let flags = [&["--workers=1", "--device=auto", "--verbose", &model], &SMALL[..]].concat();
    let cluster = LocalCluster::start_with_env(program(), &flags, &gpu.environment()).await?;
    let answer = generate(&mut cluster.client().await?, sampled("Once", 8, 0)).await?;
    ensure!(answer.tokens.len() == 8, "{answer:?}");
    let reasons = cluster.log().matches("supports CUDA 12.8").count();
    ensure!(reasons == 1, "the reason is there {reasons} times: {}", cluster.log());
    Ok(())
}
