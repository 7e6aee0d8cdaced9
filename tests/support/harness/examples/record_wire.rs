//! Records the wire messages of a release, for the compatibility test of later builds:
//! `cargo run -p inflight-harness --example record_wire -- BINARY FILE`.
//!
//! It starts a router and two workers of `BINARY` with a recording proxy in front of each, makes calls that
//! use every field a client can set, kills a worker, and writes up to 64 messages per method and direction.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use inflight_harness::{RecordedMessage, RoleProcess, WireTap};
use inflight_proto::v1;
use inflight_proto::v1::admin_client::AdminClient;
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::worker_client::WorkerClient;
use tonic::Request;
use tonic::transport::Channel;

/// Maximum size of a recorded message in bytes; larger ones are chunks of the model bundle.
const BYTES_MAX: usize = 4096;
/// Maximum recorded messages per method and direction.
const KEPT_MAX: usize = 64;

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let usage = "usage: record_wire BINARY FILE";
    let (program, file) = (arguments.next().context(usage)?, arguments.next().context(usage)?);

    let flags = ["--threads=1", "--kv-cache-bytes=8MiB", "--host-cache-bytes=8MiB"].map(str::to_owned);
    let mut workers = Vec::new();
    for _ in 0..2 {
        let worker = RoleProcess::start(program.clone(), "worker", &flags).await?;
        workers.push((WireTap::start(worker.address).await?, worker));
    }
    let mut flags: Vec<String> =
        workers.iter().map(|(tap, _)| format!("--workers={}", tap.address)).collect();
    flags.extend(["--placement=round-robin", "--admin=on", "--tool-call-format=hermes"].map(str::to_owned));
    let router = RoleProcess::start(program, "router", &flags).await?;
    let tap = WireTap::start(router.address).await?;
    let endpoint = format!("http://{}", tap.address);
    let channel = Channel::from_shared(endpoint.clone())?.connect().await?;
    let mut client = InferenceClient::new(channel);
    while client.list_models(v1::ListModelsRequest {}).await?.into_inner().models.is_empty() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    let chat = v1::Chat {
        messages: vec![v1::ChatMessage {
            role: "user".to_owned(),
            content: "What is a token?".to_owned(),
            ..Default::default()
        }],
        ..Default::default()
    };
    for input in [
        v1::tokenize_request::Input::Text("Grüße an 🦀".to_owned()),
        v1::tokenize_request::Input::Chat(chat.clone()),
    ] {
        client.tokenize(v1::TokenizeRequest { input: Some(input), ..Default::default() }).await?;
    }
    drain(&mut client, Request::new(every_field(Input::Text("Once upon a time".to_owned())))).await?;
    drain(&mut client, Request::new(every_field(Input::Chat(chat)))).await?;
    let ids = v1::TokenIds { ids: (1..40).collect() };
    let mut traced = Request::new(every_field(Input::TokenIds(ids)));
    traced.set_timeout(Duration::from_secs(60));
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    traced.metadata_mut().insert("traceparent", parent.parse()?);
    traced.metadata_mut().insert("tracestate", "vendor=1".parse()?);
    drain(&mut client, traced).await?;

    for request in [token_limits(), under_a_schema(), with_tools()] {
        drain(&mut client, Request::new(request.clone())).await?;
        client.generate_unary(request).await?;
    }
    resumed(&mut client).await?;
    administration(&mut client, AdminClient::connect(endpoint).await?).await?;

    // A cancelled call.
    let mut cancelled = client.generate(long_request()).await?.into_inner();
    cancelled.message().await?;
    drop(cancelled);
    let diagnosed = workers.first().context("two were started")?.0.address;
    let mut worker = WorkerClient::connect(format!("http://{diagnosed}")).await?;
    worker.diagnose(v1::DiagnoseRequest { iterations: 8, ..v1::DiagnoseRequest::default() }).await?;

    // A worker crash: one of two streams on two workers fails over to the other.
    let mut streams = Vec::new();
    for _ in 0..2 {
        let mut stream = client.generate(long_request()).await?.into_inner();
        for _ in 0..4 {
            stream.message().await?;
        }
        streams.push(stream);
    }
    workers.first().context("two were started")?.1.signal(9)?;
    for mut stream in streams {
        while stream.message().await?.is_some() {}
    }

    let mut lines = Vec::new();
    for (name, tap) in [("client", &tap), ("worker 0", &workers[0].0), ("worker 1", &workers[1].0)] {
        lines.push(format!("# {name}"));
        let recorded = tap.recorded();
        let methods: BTreeSet<(&str, bool)> =
            recorded.iter().map(|message| (message.method.as_str(), message.request)).collect();
        for (method, request) in methods {
            let of_kind = |m: &&RecordedMessage| {
                m.method == method && m.request == request && m.bytes.len() <= BYTES_MAX
            };
            lines.extend(recorded.iter().filter(of_kind).take(KEPT_MAX).map(RecordedMessage::line));
        }
    }
    std::fs::write(&file, lines.join("\n") + "\n")?;
    println!("{} lines in {}", lines.len(), file.display());
    Ok(())
}

/// Calls every method of the admin service while a request runs.
async fn administration(
    client: &mut InferenceClient<Channel>,
    mut admin: AdminClient<Channel>,
) -> Result<()> {
    let mut running = client.generate(long_request()).await?.into_inner();
    running.message().await?;
    let listed = admin.list_requests(v1::ListRequestsRequest::default()).await?.into_inner();
    let number = listed.requests.first().context("the running request is not listed")?.number;
    admin.get_request(v1::GetRequestRequest { number, ..Default::default() }).await?;
    while running.message().await?.is_some() {}
    admin.diagnose_cluster(v1::DiagnoseClusterRequest::default()).await?;
    let mut watched = admin.watch(v1::WatchRequest::default()).await?.into_inner();
    watched.message().await?;
    drain(client, Request::new(long_request())).await?;
    for _ in 0..3 {
        watched.message().await?;
    }
    Ok(())
}

/// Leaves a resumable stream after some tokens and resumes it.
async fn resumed(client: &mut InferenceClient<Channel>) -> Result<()> {
    let mut request = v1::GenerateRequest { resumable: true, return_token_ids: true, ..long_request() };
    let mut stream = client.generate(request.clone()).await?.into_inner();
    let (mut cursor, mut ids) = (Vec::new(), Vec::new());
    while ids.len() < 8 {
        let event = stream.message().await?.context("the stream ended early")?.event;
        match event.context("an empty event")? {
            Event::Started(started) => {
                request.request_id = started.request_id;
                cursor = started.cursor;
            }
            Event::Delta(delta) => {
                ids.extend(delta.token_ids);
                cursor = if delta.cursor.is_empty() { cursor } else { delta.cursor };
            }
            _ => {}
        }
    }
    drop(stream);
    request.resume = Some(v1::Resume { cursor, choices: vec![v1::TokenIds { ids }] });
    drain(client, Request::new(request)).await
}

async fn drain(client: &mut InferenceClient<Channel>, request: Request<v1::GenerateRequest>) -> Result<()> {
    let mut stream = client.generate(request).await?.into_inner();
    while stream.message().await?.is_some() {}
    Ok(())
}

fn long_request() -> v1::GenerateRequest {
    v1::GenerateRequest {
        input: Some(Input::Text("Once".to_owned())),
        stop: Some(v1::StopConditions {
            max_tokens: Some(400),
            ignore_eos: true,
            ..v1::StopConditions::default()
        }),
        ..v1::GenerateRequest::default()
    }
}

/// Returns a request with log probabilities of its prompt and restrictions of its tokens.
fn token_limits() -> v1::GenerateRequest {
    v1::GenerateRequest {
        input: Some(Input::Text("Once upon a time there was".to_owned())),
        sampling: Some(v1::SamplingParams {
            allowed_token_ids: (0..400).collect(),
            bad_words: vec!["dragon".to_owned()],
            prompt_logprobs: Some(2),
            ..v1::SamplingParams::default()
        }),
        stop: Some(v1::StopConditions { max_tokens: Some(12), ..v1::StopConditions::default() }),
        truncate_prompt_tokens: Some(4),
        parse_special: Some(false),
        ..v1::GenerateRequest::default()
    }
}

/// Returns a request whose output is constrained by a JSON schema.
fn under_a_schema() -> v1::GenerateRequest {
    let schema = r#"{"type":"object","properties":{"moon":{"type":"boolean"}},"required":["moon"]}"#;
    v1::GenerateRequest {
        input: Some(Input::Text("Is there a moon?".to_owned())),
        sampling: Some(v1::SamplingParams {
            constraint: Some(v1::Constraint {
                grammar: Some(v1::constraint::Grammar::JsonSchema(schema.to_owned())),
                ..v1::Constraint::default()
            }),
            ..v1::SamplingParams::default()
        }),
        stop: Some(v1::StopConditions { max_tokens: Some(40), ..v1::StopConditions::default() }),
        ..v1::GenerateRequest::default()
    }
}

/// Returns a conversation with a tool that the model must call.
fn with_tools() -> v1::GenerateRequest {
    let message = |role: &str, content: &str| v1::ChatMessage {
        role: role.to_owned(),
        content: content.to_owned(),
        ..Default::default()
    };
    let called = v1::ChatMessage {
        tool_calls: vec![v1::ToolCall {
            id: "call_1".to_owned(),
            name: "weather".to_owned(),
            arguments: r#"{"city":"Paris"}"#.to_owned(),
        }],
        ..message("assistant", "")
    };
    let answer = v1::ChatMessage { tool_call_id: "call_1".to_owned(), ..message("tool", "Rain.") };
    let messages =
        vec![message("user", "The weather in Paris?"), called, answer, message("user", "And in Rome?")];
    v1::GenerateRequest {
        input: Some(Input::Chat(v1::Chat { messages, ..Default::default() })),
        stop: Some(v1::StopConditions { max_tokens: Some(60), ..v1::StopConditions::default() }),
        tools: Some(v1::ToolUse {
            tools: vec![v1::Tool {
                name: "weather".to_owned(),
                description: "The weather of a city".to_owned(),
                parameters: r#"{"type":"object","properties":{"city":{"type":"string"}}}"#.to_owned(),
                strict: true,
            }],
            choice: v1::ToolChoice::Required.into(),
            name: String::new(),
            single_call: true,
        }),
        parse_output: true,
        ..v1::GenerateRequest::default()
    }
}

/// Returns a request with every field of 0.1.0 set except `model`.
fn every_field(input: Input) -> v1::GenerateRequest {
    v1::GenerateRequest {
        model: String::new(),
        input: Some(input),
        sampling: Some(v1::SamplingParams {
            temperature: Some(0.9),
            top_p: Some(0.95),
            top_k: Some(50),
            min_p: Some(0.01),
            presence_penalty: Some(0.1),
            frequency_penalty: Some(0.2),
            repetition_penalty: Some(1.1),
            logit_bias: [(17, -1.5)].into(),
            logprobs: Some(2),
            seed: Some(7),
            n: Some(2),
            ..v1::SamplingParams::default()
        }),
        stop: Some(v1::StopConditions {
            max_tokens: Some(24),
            min_tokens: 2,
            stop: vec!["###".to_owned()],
            stop_token_ids: vec![1000],
            ignore_eos: true,
        }),
        return_token_ids: true,
        tenant: "acme".to_owned(),
        weight: Some(2.0),
        priority: 3,
        request_id: "recorded".to_owned(),
        require_fingerprint: String::new(),
        ..v1::GenerateRequest::default()
    }
}
