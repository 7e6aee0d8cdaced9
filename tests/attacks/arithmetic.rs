//! Arithmetic that overflows or is broken: no token comes of it, a prompt that overflows everywhere removes no worker, and a worker whose
//! weights are damaged leaves.

use std::os::unix::fs::FileExt as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use inflight_fixtures::{Arch, Checkpoint, Dtype, set_element};
use inflight_harness::{DEADLINE, LocalCluster, eventually, exclusive, scrape};
use inflight_models::{ModelDir, ModelSource};
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::{GenerateRequest, ListModelsRequest, SamplingParams, StopConditions, TokenIds};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::program;

/// Token whose embedding overflows.
const OVERFLOWING: u32 = 9;

/// Completes a prompt greedily; returns the token ids of the output.
async fn complete(
    client: &mut InferenceClient<Channel>,
    input: Input,
    tokens: u32,
) -> Result<Vec<u32>, Status> {
    let request = GenerateRequest {
        input: Some(input),
        return_token_ids: true,
        sampling: Some(SamplingParams {
            temperature: Some(0.0),
            logit_bias: [(OVERFLOWING, -100.0)].into(),
            ..SamplingParams::default()
        }),
        stop: Some(StopConditions {
            max_tokens: Some(tokens),
            ignore_eos: true,
            ..StopConditions::default()
        }),
        ..GenerateRequest::default()
    };
    let mut stream = client.generate(request).await?.into_inner();
    let mut output = Vec::new();
    while let Some(response) = stream.message().await? {
        if let Some(Event::Delta(delta)) = response.event {
            output.extend(delta.token_ids);
        }
    }
    match output.len() == tokens as usize {
        true => Ok(output),
        false => Err(Status::data_loss(format!("{} tokens came", output.len()))),
    }
}

fn prompt(ids: &[u32]) -> Input {
    Input::TokenIds(TokenIds { ids: ids.to_vec() })
}

fn text(nth: usize) -> Input {
    Input::Text(format!("Number {nth}: a batch of requests"))
}

/// Sends a completions request over HTTP/1.1; returns the response.
async fn post(http: &str, body: &str) -> Result<String> {
    let address = http.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await?;
    let length = body.len();
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n");
    let head = format!("{head}content-type: application/json\r\ncontent-length: {length}\r\n\r\n");
    stream.write_all(format!("{head}{body}").as_bytes()).await?;
    let mut response = String::new();
    stream.read_to_string(&mut response).await?;
    Ok(response)
}

/// Number of connected workers.
async fn workers(client: &mut InferenceClient<Channel>) -> Result<u32> {
    let models = client.list_models(ListModelsRequest {}).await?.into_inner().models;
    Ok(models.first().map_or(0, |model| model.workers))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_overflows_on_every_worker_ends_itself_and_removes_none() -> Result<()> {
    const LOOPS: usize = 60;
    let arch = Arch::Llama31;
    let folder = Checkpoint::new(arch, Dtype::F32).write_temp()?;
    let width = arch.dims().hidden;
    set_element(folder.path(), "model.embed_tokens.weight", OVERFLOWING as usize * width, 1e30)?;
    let flag = format!("--model={}", folder.path().display());
    let cluster = LocalCluster::start(program(), &["--workers=2", "--model-name=tiny", &flag]).await?;
    let mut client = cluster.client().await?;
    let expected = complete(&mut client, prompt(&[3, 4, 5]), 24).await?;
    let mut others = client.clone();
    let served = tokio::spawn(async move {
        let mut outputs = Vec::new();
        for _ in 0..20 {
            outputs.push(complete(&mut others, prompt(&[3, 4, 5]), 24).await?);
        }
        anyhow::Ok(outputs)
    });
    for nth in 0..LOOPS as u32 {
        let input = prompt(&[3, 4, 10 + nth, OVERFLOWING, 5]);
        let refused =
            complete(&mut client, input, 8).await.err().context("a prompt that overflows was answered")?;
        ensure!(refused.code() == Code::Internal, "{refused:?}");
        ensure!(refused.message().contains("the model overflows on this input"), "{refused:?}");
        ensure!(refused.message().contains("in 2 attempts"), "{refused:?}");
    }
    for output in served.await?? {
        ensure!(output == expected, "{output:?} instead of {expected:?}");
    }
    // Client libraries do not repeat this status.
    let body = format!(r#"{{"model":"tiny","prompt":[3,{OVERFLOWING}],"max_tokens":4}}"#);
    let answer = post(&cluster.http, &body).await?;
    ensure!(answer.starts_with("HTTP/1.1 422") && answer.contains("non_finite"), "{answer}");
    let router = scrape(cluster.router.metrics).await?;
    ensure!(router.total("inflight_router_ejections_total").unwrap_or(0.0) == 0.0, "a worker was ejected");
    let resubmitted =
        router.series().filter(|(name, _)| name.contains("non_finite") && name.contains("resubmissions"));
    let resubmitted: f64 = resubmitted.map(|(_, count)| count).sum();
    ensure!(resubmitted >= LOOPS as f64, "{resubmitted} resubmissions");
    for worker in &cluster.workers {
        let samples = scrape(worker.metrics).await?;
        let failed = samples.total("inflight_worker_non_finite_sequences_total")?;
        ensure!(failed >= LOOPS as f64 / 2.0, "{failed} sequences on one worker");
        let tests = samples.total("inflight_worker_self_tests_total").unwrap_or(0.0);
        ensure!(tests <= 10.0, "{tests} self-tests");
    }
    ensure!(
        workers(&mut client).await? == 2 && !cluster.log().contains("the self-test gave"),
        "{}",
        cluster.log()
    );
    Ok(())
}

/// Replaces an element of the demo model's last norm in the memory of a worker. Returns how many copies there were.
fn damage(process: u32, change: impl Fn(f32) -> f32) -> Result<usize> {
    let model = ModelDir::open(&ModelSource::Embedded)?;
    let norm = model.decoder()?.norm.to_f32()?;
    let pattern: Vec<u8> = norm.iter().flat_map(|weight| weight.to_ne_bytes()).collect();
    let memory = std::fs::File::options().read(true).write(true).open(format!("/proc/{process}/mem"))?;
    let mut found = 0;
    for line in std::fs::read_to_string(format!("/proc/{process}/maps"))?.lines() {
        let mut fields = line.split_whitespace();
        let (range, access) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let Some((start, end)) = range.split_once('-').filter(|_| access.starts_with("rw")) else { continue };
        let (start, end) = (u64::from_str_radix(start, 16)?, u64::from_str_radix(end, 16)?);
        let mut bytes = vec![0; (end - start) as usize];
        if memory.read_exact_at(&mut bytes, start).is_err() {
            continue; // such as guard pages
        }
        for at in (0..bytes.len().saturating_sub(pattern.len())).step_by(4) {
            if bytes[at..at + pattern.len()] == pattern[..] {
                memory.write_all_at(&change(norm[0]).to_ne_bytes(), start + at as u64)?;
                found += 1;
            }
        }
    }
    Ok(found)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_weights_are_damaged_leaves_and_no_stream_has_a_wrong_token() -> Result<()> {
    let cluster = LocalCluster::start_exclusive(
        program(),
        &["--workers=2", "--self-test-interval=1h"],
        &[],
        exclusive().await,
    )
    .await?;
    let mut client = cluster.client().await?;
    let mut expected = Vec::new();
    for nth in 0..12 {
        expected.push(complete(&mut client, text(nth), 40).await?);
    }
    // Concurrent requests reach both workers; one after another may all go to the same.
    let serve = async || {
        let streams: Vec<_> = (0..12)
            .map(|nth| {
                let mut client = client.clone();
                tokio::spawn(async move { complete(&mut client, text(nth), 40).await })
            })
            .collect();
        for (stream, expected) in streams.into_iter().zip(&expected) {
            let output = stream.await??;
            ensure!(output == *expected, "{output:?} instead of {expected:?}");
        }
        anyhow::Ok(())
    };
    let pid = cluster.workers[0].pid;
    let damaged = tokio::task::spawn_blocking(move || damage(pid, |_| f32::NAN));
    serve().await?;
    ensure!(damaged.await?? > 0, "the norm is not in the worker's memory");
    let deadline = Instant::now() + DEADLINE;
    while !cluster.log().contains("the self-test gave") {
        ensure!(Instant::now() < deadline, "the self-test does not end the worker: {}", cluster.log());
        serve().await?;
    }
    eventually("another worker takes its place", || async {
        let mut client = cluster.client().await?;
        ensure!(workers(&mut client).await? == 2);
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finite_but_wrong_weight_is_noticed_at_the_next_self_test() -> Result<()> {
    let flags = ["--workers=1", "--self-test-interval=1s"];
    let cluster = LocalCluster::start_exclusive(program(), &flags, &[], exclusive().await).await?;
    let mut client = cluster.client().await?;
    let expected = complete(&mut client, text(0), 40).await?;
    // A few tests that pass.
    eventually("self-tests run", || async {
        let tests = scrape(cluster.workers[0].metrics).await?.total("inflight_worker_self_tests_total")?;
        ensure!(tests >= 2.0, "{tests} self-tests");
        Ok(())
    })
    .await?;
    ensure!(!cluster.log().contains("the self-test gave"), "{}", cluster.log());
    ensure!(
        damage(cluster.workers[0].pid, |weight| weight * 2.0 + 1.0)? > 0,
        "the norm is not in the worker's memory"
    );
    eventually("the self-test ends the worker", || async {
        ensure!(cluster.log().contains("the self-test gave token"), "{}", cluster.log());
        Ok(())
    })
    .await?;
    // `inflight up` starts another one.
    let output = tokio::time::timeout(Duration::from_secs(60), complete(&mut client, text(0), 40)).await??;
    ensure!(output == expected, "{output:?} instead of {expected:?}");
    Ok(())
}
