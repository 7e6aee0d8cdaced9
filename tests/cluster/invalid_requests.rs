//! Invalid requests, each rejected with its exact status.

use anyhow::{Context, Result, ensure};
use inflight_harness::{LocalCluster, eventually, run, send_raw};
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::{GenerateRequest, SamplingParams, StopConditions, TokenIds};
use tonic::Code;

use crate::program;
use crate::requests::{generate, model, sampled};

type Change = fn(&mut GenerateRequest, &mut SamplingParams, &mut StopConditions);

/// Name of the case, change to a valid request, expected status code, and a word in the status message.
const REFUSED: &[(&str, Change, Code, &str)] = &[
    ("no input", |r, _, _| r.input = None, Code::InvalidArgument, "input"),
    ("empty prompt", |r, _, _| r.input = ids(&[]), Code::InvalidArgument, "empty"),
    ("over the context", |_, _, s| s.max_tokens = Some(1 << 30), Code::InvalidArgument, "context"),
    ("no tokens", |_, _, s| s.max_tokens = Some(0), Code::InvalidArgument, "max_tokens"),
    ("unknown model", |r, _, _| r.model = "nobody".into(), Code::NotFound, "nobody"),
    ("negative temperature", |_, p, _| p.temperature = Some(-0.1), Code::InvalidArgument, "temperature"),
    (
        "temperature not a number",
        |_, p, _| p.temperature = Some(f32::NAN),
        Code::InvalidArgument,
        "temperature",
    ),
    ("negative top_p", |_, p, _| p.top_p = Some(-0.1), Code::InvalidArgument, "top_p"),
    ("top_p over one", |_, p, _| p.top_p = Some(1.1), Code::InvalidArgument, "top_p"),
    ("negative top_k", |_, p, _| p.top_k = Some(-1), Code::InvalidArgument, "top_k"),
    ("min_p not a number", |_, p, _| p.min_p = Some(f32::NAN), Code::InvalidArgument, "min_p"),
    ("seventeen choices", |_, p, _| p.n = Some(17), Code::InvalidArgument, "n is 17"),
    (
        "token out of the vocabulary",
        |r, _, _| r.input = ids(&[1, 1 << 24]),
        Code::InvalidArgument,
        "vocabulary",
    ),
    ("ten thousand stop strings", |_, _, s| s.stop = vec!["x".into(); 10_000], Code::InvalidArgument, "stop"),
    ("an empty stop string", |_, _, s| s.stop = vec![String::new()], Code::InvalidArgument, "stop"),
    ("a long tenant", |r, _, _| r.tenant = "t".repeat(129), Code::InvalidArgument, "tenant"),
    ("a weight of zero", |r, _, _| r.weight = Some(0.0), Code::InvalidArgument, "weight"),
    ("priority out of range", |r, _, _| r.priority = 101, Code::InvalidArgument, "priority"),
];

fn ids(ids: &[u32]) -> Option<Input> {
    Some(Input::TokenIds(TokenIds { ids: ids.to_vec() }))
}

#[tokio::test(flavor = "multi_thread")]
async fn every_invalid_request_gets_its_status_and_the_cluster_keeps_serving() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--workers=1"]).await?;
    let mut client = cluster.client().await?;
    model(&mut client).await?;
    for (what, change, code, word) in REFUSED {
        let mut request = sampled("Once upon a time", 4, 0);
        let mut sampling = request.sampling.take().unwrap_or_default();
        let mut stop = request.stop.take().unwrap_or_default();
        change(&mut request, &mut sampling, &mut stop);
        request.sampling = Some(sampling);
        request.stop = Some(stop);
        let status = match generate(&mut client, request).await {
            Ok(answer) => anyhow::bail!("{what}: answered {answer:?}"),
            Err(error) => error.downcast::<tonic::Status>().with_context(|| what.to_string())?,
        };
        ensure!(status.code() == *code, "{what}: {status:?}");
        ensure!(status.message().contains(word), "{what}: no {word:?} in {:?}", status.message());
    }
    let large = sampled(&"word ".repeat(2 << 20), 4, 0);
    let status = match client.generate(large).await {
        Ok(_) => anyhow::bail!("a message of 10 MiB was taken"),
        Err(status) => status,
    };
    ensure!(status.code() == Code::ResourceExhausted, "{status:?}");
    // Field 2, `text`: two bytes that are not UTF-8.
    let status =
        send_raw(&cluster.endpoint, "/inflight.v1.Inference/Generate", vec![0x12, 2, 0xc3, 0x28]).await?;
    let status = status.context("invalid UTF-8 was taken")?;
    ensure!(status.code() == Code::InvalidArgument, "{status:?}");
    ensure!(generate(&mut client, sampled("Once", 4, 0)).await?.tokens.len() == 4);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_without_reachable_workers_returns_unavailable() -> Result<()> {
    let free =
        || -> Result<String> { Ok(std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.to_string()) };
    let (listen, unreachable) = (free()?, free()?);
    let mut router = tokio::process::Command::new(program())
        .args(["router", "--metrics-listen=off", "--listen", &listen, "--workers", &unreachable])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let endpoint = format!("http://{listen}");
    let refused = eventually("the router listens", || async {
        // UNAVAILABLE is retried until the deadline.
        let generate = ["generate", "--endpoint", &endpoint, "--timeout=2s", "--raw", "Hello"];
        let refused = run(program(), &generate, "").await?;
        ensure!(!refused.stderr.contains("cannot connect to"), "{refused:?}");
        Ok(refused)
    })
    .await?;
    ensure!(refused.code == Some(3) && refused.stderr.contains("UNAVAILABLE"), "{refused:?}");
    router.kill().await?;
    Ok(())
}
