//! One `inflight up` that serves several models.

use anyhow::{Context, Result, ensure};
use inflight_fixtures::{Arch, BenchmarkShape, Checkpoint, Dtype, TempDir};
use inflight_harness::{LocalCluster, SimulatedGpu, kill, run, run_with_env};
use inflight_hub_stand_in::StandIn;
use inflight_proto::v1::{GenerateRequest, ListModelsRequest};

use crate::hub::environment;
use crate::live::call;
use crate::program;
use crate::requests::{GenerationResult, generate, sampled};

/// Returns a request for a model.
fn of(model: &str, tokens: u32) -> GenerateRequest {
    GenerateRequest { model: model.to_owned(), ..sampled("Once upon a time", tokens, 3) }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_worker_of_one_model_leaves_the_others_serving() -> Result<()> {
    let (hub, cache) = (StandIn::start(), TempDir::new("hub")?);
    for (name, arch) in [("org/tiny", Arch::Qwen3), ("org/other", Arch::Llama31)] {
        let folder = Checkpoint::new(arch, Dtype::Bf16).sharded(2).write_temp()?;
        hub.add_directory(name, folder.path());
    }
    let variables = environment(&hub.endpoint(), cache.path());
    let flags = ["--model=demo,gpt-4o=inflight-demo", "--model=org/tiny", "--model=o=org/other"];
    let mut cluster = LocalCluster::start_with_env(program(), &flags, &variables).await?;
    ensure!(cluster.workers.len() == 3, "{:?}", cluster.workers);
    let mut client = cluster.client().await?;
    let models = client.list_models(ListModelsRequest {}).await?.into_inner().models;
    let mut names: Vec<(String, Vec<String>, u32)> =
        models.into_iter().map(|model| (model.name, model.aliases, model.workers)).collect();
    names.sort();
    let expected = [("demo", vec!["gpt-4o"], 1), ("o", vec![], 1), ("org/tiny", vec![], 1)];
    let expected = expected.map(|(name, aliases, workers)| {
        (name.to_owned(), aliases.into_iter().map(str::to_owned).collect(), workers)
    });
    ensure!(names == expected, "{names:?}");
    let listed = call(&cluster, "GET", "/v1/models", "").await?;
    for name in ["demo", "gpt-4o", "org/tiny", "o"] {
        ensure!(listed.contains(&format!("\"id\":\"{name}\"")), "no {name} in {listed}");
        let answer = generate(&mut client, of(name, 8)).await.with_context(|| name.to_owned())?;
        ensure!(answer.tokens.len() == 8, "{name}: {answer:?}");
    }
    // Commands ask for one of them.
    let endpoint = ["--endpoint", &cluster.endpoint];
    for command in [&["generate", "Hello"][..], &["chat"], &["bench", "--requests=1"]] {
        let asked = run(program(), &[command, &endpoint].concat(), "").await?;
        ensure!(asked.code != Some(0), "{asked:?}");
        for clue in ["demo", "org/tiny", "--model"] {
            ensure!(asked.stderr.contains(clue), "{command:?}: no {clue:?} in {asked:?}");
        }
    }
    let page = run(program(), &["top", "--once", endpoint[0], endpoint[1]], "").await?;
    ensure!(page.stdout.contains("demo") && page.stdout.contains("org/tiny"), "{page:?}");
    // The worker of the demo dies in the middle of a stream of another model.
    let before = generate(&mut client, of("org/tiny", 64)).await?;
    let mut stream = client.generate(of("org/tiny", 64)).await?.into_inner();
    let partial = GenerationResult::until_first_tokens(&mut stream).await?;
    kill(cluster.workers[0].pid, libc::SIGKILL)?;
    ensure!(partial.read_rest(&mut stream).await? == before);
    let lost = cluster.event("lost").await?;
    ensure!(lost["name"] == "worker-0", "{lost}");
    ensure!(generate(&mut client, of("o", 8)).await?.tokens.len() == 8);
    cluster.event("restarted").await?;
    ensure!(generate(&mut client, of("gpt-4o", 8)).await?.tokens.len() == 8);
    Ok(())
}

#[tokio::test]
async fn models_that_do_not_fit_together_are_refused_before_anything_starts() -> Result<()> {
    let folder = TempDir::new("models")?;
    let path = folder.path().join("cluster.toml");
    let config = format!("--config={}", path.display());
    let limit = inflight_worker::host_memory_limit().context("this is Linux")?;
    // One of them fits.
    let pool = format!("kv-cache-bytes = {}\n", limit / 5 * 3);
    let model = |names: &str| format!("[[model]]\nmodel = \"inflight-demo\"\nnames = [\"{names}\"]\n");
    std::fs::write(&path, format!("{}{pool}{}workers = 2\n{pool}", model("first"), model("second")))?;
    let refused = run(program(), &["up", "--port=0", "--device=cpu", &config], "").await?;
    ensure!(refused.code == Some(1) && refused.stdout.is_empty(), "{refused:?}");
    for clue in [
        "the models need",
        "first: ",
        "second: ",
        "2 workers, each",
        "fewer workers",
        "lower --kv-cache-bytes",
    ] {
        ensure!(refused.stderr.contains(clue), "no {clue:?} in {}", refused.stderr);
    }
    ensure!(!refused.stderr.contains("starting") && !refused.stderr.contains("worker-0"), "{refused:?}");
    refused.tag.check_gone()?;
    // Without names both would have the embedded model's.
    let twice = run(program(), &["up", "--port=0", "-m=inflight-demo", "-m=inflight-demo"], "").await?;
    ensure!(twice.code == Some(2), "{twice:?}");
    ensure!(twice.stderr.contains("inflight-demo would be the name of two models"), "{twice:?}");
    let missing = run(program(), &["up", "--port=0", "-m=a=inflight-demo", "-m=/no/such/model"], "").await?;
    ensure!(missing.code == Some(1) && missing.stderr.contains("/no/such/model"), "{missing:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_models_divide_the_memory_of_one_gpu() -> Result<()> {
    if !SimulatedGpu::AVAILABLE {
        return Ok(());
    }
    let folder = TempDir::new("mini")?;
    BenchmarkShape::Mini.write(folder.path())?;
    let models = ["a", "b"].map(|name| format!("--model={name}={}", folder.path().display()));
    let small = ["--max-sequences=2", "--max-batch-tokens=16", "--max-context-tokens=64"];
    let flags = ["--device=cuda", "--no-autotune", "--verbose", &models[0], &models[1]];
    let flags = [&flags, &small[..]].concat();
    let tight = SimulatedGpu::new("memory=768,checks=false")?;
    let up = [&["up", "--port=0"], &flags[..]].concat();
    let refused = run_with_env(program(), &up, "", &tight.environment()).await?;
    ensure!(refused.code == Some(1), "{refused:?}");
    for clue in ["of GPU 0, and may use", "a: ", "b: ", "--max-context-tokens", "fewer or smaller models"] {
        ensure!(refused.stderr.contains(clue), "no {clue:?} in {}", refused.stderr);
    }
    let roomy = SimulatedGpu::new("memory=1600,checks=false")?;
    let cluster = LocalCluster::start_with_env(program(), &flags, &roomy.environment()).await?;
    let mut client = cluster.client().await?;
    for name in ["a", "b"] {
        let answer = generate(&mut client, of(name, 4)).await.with_context(|| cluster.log())?;
        ensure!(answer.tokens.len() == 4, "{name}: {answer:?}");
    }
    Ok(())
}
