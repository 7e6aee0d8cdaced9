//! Third-party HTTP clients: openai for Python and Node, anthropic, LangChain, LlamaIndex, LiteLLM's proxy, and
//! the `curl` line of `up`.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use inflight_harness::{LocalCluster, run};
use serde_json::{Value, json};

use crate::program;
use crate::requests::{generate, sampled};

const PROMPT: &str = "Once upon a time";

/// Runs a Python client against a cluster and returns what it printed; `None` if there is no Python for it.
async fn client(script: &str, cluster: &LocalCluster, more: &[&str]) -> Result<Option<Value>> {
    // LangChain and LlamaIndex need an older openai than the client that is tested on its own.
    let (variable, packages) = match script {
        "frameworks.py" => ("INFLIGHT_TEST_FRAMEWORKS_PYTHON", "requirements-frameworks.txt"),
        // Too large for every run: .ci/nightly installs it.
        "litellm_proxy.py" => ("INFLIGHT_TEST_LITELLM_PYTHON", "requirements-litellm.txt"),
        _ => ("INFLIGHT_TEST_PYTHON", "requirements.txt"),
    };
    let Ok(python) = std::env::var(variable) else {
        let reason = format!("{variable} names no Python with tests/clients/python/{packages}");
        inflight_fixtures::skipped("Python clients", &reason);
        return Ok(None);
    };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients/python").join(script);
    let path = path.to_string_lossy().into_owned();
    let mut arguments = vec![path.as_str(), "--url", &cluster.http, "--model=demo", "--prompt", PROMPT];
    arguments.extend(more);
    let finished = run(Path::new(&python), &arguments, "").await?;
    ensure!(finished.code == Some(0), "{script}: {finished:?}");
    let answer = serde_json::from_str(&finished.stdout);
    answer.map(Some).with_context(|| format!("{script}: {finished:?}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn openai_for_python_gets_the_same_text_from_every_endpoint() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--model-name=demo"]).await?;
    let expected = generate(&mut cluster.client().await?, sampled(PROMPT, 24, 42)).await?;
    let Some(answer) = client("openai_client.py", &cluster, &["--seed=42"]).await? else { return Ok(()) };
    ensure!(answer["models"] == json!(["demo"]) && answer["model"] == "demo", "{answer}");

    let completions = &answer["completions"];
    ensure!(completions["text"] == expected.text.as_str(), "{completions}, expected {expected:?}");
    ensure!(completions["streamed"] == expected.text.as_str(), "{completions}, expected {expected:?}");
    ensure!(completions["completion_tokens"] == 24 && completions["streamed_tokens"] == 24, "{completions}");
    ensure!(completions["finish_reason"] == "length" && completions["scored"] == 24, "{completions}");
    ensure!(completions["cached_tokens"].is_u64(), "{completions}");
    ensure!(completions["fingerprint"].as_str().is_some_and(|one| !one.is_empty()), "{completions}");
    ensure!(completions["indices"] == json!([0, 1, 2, 3]), "{completions}");
    let echoed = completions["echoed"].as_array().context("echoed")?;
    ensure!(echoed[0] == format!("{PROMPT}{}", expected.text), "{completions}");
    ensure!(echoed[0] == echoed[2] && echoed[1] == echoed[3] && echoed[0] != echoed[1], "{completions}");

    let chat = &answer["chat"];
    ensure!(chat["texts"] == chat["streamed"] && chat["reasons"] == chat["whole_reasons"], "{chat}");
    ensure!(chat["logprobs"] == true, "{chat}");
    let (whole, stop) = (chat["texts"][0].as_str().context("text")?, chat["stop"].as_str().context("stop")?);
    ensure!(chat["stopped"] == whole[..whole.find(stop).context("no stop")?], "{chat}");

    let responses = &answer["responses"];
    ensure!(responses["text"] == responses["streamed"], "{responses}");
    ensure!(responses["text"] == responses["final"], "{responses}");
    ensure!(responses["first"] == "response.created", "{responses}");
    let last = format!("response.{}", responses["status"].as_str().context("status")?);
    ensure!(responses["last"] == last.as_str(), "{responses}");

    let refusals = json!({
        "model": ["NotFoundError", 404, "model", "model_not_found"],
        "temperature": ["BadRequestError", 400, "temperature", null],
        "context": ["BadRequestError", 400, null, "context_length_exceeded"],
        "tools": ["BadRequestError", 400, "tools", null],
        "image": ["BadRequestError", 400, "messages", null],
        "state": ["BadRequestError", 400, "previous_response_id", null],
    });
    ensure!(answer["refusals"] == refusals, "{}", answer["refusals"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn openai_for_node_gets_the_same_text_whole_and_streamed() -> Result<()> {
    let Ok(modules) = std::env::var("INFLIGHT_TEST_NODE_MODULES") else {
        let reason = "INFLIGHT_TEST_NODE_MODULES names no folder with the package openai";
        inflight_fixtures::skipped("the Node client", reason);
        return Ok(());
    };
    let cluster = LocalCluster::start(program(), &["--model-name=demo"]).await?;
    let expected = generate(&mut cluster.client().await?, sampled(PROMPT, 24, 42)).await?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients/node/openai_client.cjs");
    let (modules, script) = (format!("NODE_PATH={modules}"), script.to_string_lossy().into_owned());
    let arguments = [&modules, "node", &script, &cluster.http, "demo", PROMPT, "42"];
    let finished = run(Path::new("env"), &arguments, "").await?;
    ensure!(finished.code == Some(0), "{finished:?}");
    let answer: Value = serde_json::from_str(&finished.stdout).with_context(|| format!("{finished:?}"))?;
    ensure!(answer["text"] == expected.text.as_str(), "{answer}, expected {expected:?}");
    ensure!(answer["streamed"] == expected.text.as_str(), "{answer}, expected {expected:?}");
    ensure!(answer["chat"] == answer["chat_streamed"] && answer["response"].is_string(), "{answer}");
    ensure!(answer["chat_tokens"][0] == answer["chat_tokens"][1], "{answer}");
    ensure!(answer["refused"] == json!(["NotFoundError", 404, "model", "model_not_found"]), "{answer}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn anthropic_for_python_gets_messages_whole_and_streamed() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--model-name=demo"]).await?;
    let Some(answer) = client("anthropic_client.py", &cluster, &[]).await? else { return Ok(()) };
    let text = answer["text"].as_str().context("text")?;
    ensure!(!text.is_empty() && answer["streamed"] == text && answer["final"] == text, "{answer}");
    let kinds: Vec<&str> =
        answer["kinds"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    ensure!(kinds.starts_with(&["message_start", "content_block_start", "content_block_delta"]), "{answer}");
    ensure!(kinds.ends_with(&["content_block_stop", "message_delta", "message_stop"]), "{answer}");
    let stop = answer["stop"].as_str().context("stop")?;
    let stopped = &text[..text.find(stop).context("no stop")?];
    ensure!(answer["stopped"] == json!([stopped, "stop_sequence", stop]), "{answer}");
    ensure!(answer["input_tokens"] == answer["counted"], "{answer}");
    let refused = json!({
        "model": ["NotFoundError", 404, "not_found_error"],
        "temperature": ["BadRequestError", 400, "invalid_request_error"],
        "tools": ["BadRequestError", 400, "invalid_request_error"],
    });
    ensure!(answer["refused"] == refused, "{answer}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes half a minute alone; the lane artefact of .ci/nightly runs it"]
async fn langchain_and_llamaindex_hold_a_conversation() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--model-name=demo"]).await?;
    let Some(answer) = client("frameworks.py", &cluster, &[]).await? else { return Ok(()) };
    let text = answer["langchain"].as_str().context("text")?;
    ensure!(!text.is_empty() && answer["langchain_streamed"] == text, "{answer}");
    ensure!(answer["llama_index"] == text && answer["llama_index_streamed"] == text, "{answer}");
    let tokens = &answer["langchain_tokens"];
    ensure!(tokens[0].is_u64() && tokens[0] == tokens[1], "{answer}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn litellm_as_a_proxy_in_front_changes_no_output_usage_or_status() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--model-name=demo"]).await?;
    let expected = generate(&mut cluster.client().await?, sampled(PROMPT, 24, 42)).await?;
    let Some(answer) = client("litellm_proxy.py", &cluster, &["--seed=42"]).await? else { return Ok(()) };
    let (proxied, direct) = (&answer["proxied"], &answer["direct"]);
    for part in ["chat", "completions", "messages", "refusals"] {
        ensure!(direct[part].is_object(), "no {part} in {answer}");
        ensure!(proxied[part] == direct[part], "{part}: {}, direct {}", proxied[part], direct[part]);
    }

    let completions = &proxied["completions"];
    ensure!(completions["text"] == expected.text.as_str(), "{completions}, expected {expected:?}");
    ensure!(completions["streamed"] == completions["text"], "{completions}");
    ensure!(
        completions["usage"] == completions["streamed_usage"] && completions["usage"][1] == 24,
        "{completions}"
    );

    let chat = &proxied["chat"];
    ensure!(chat["indices"] == json!([0, 1, 2]) && chat["ids"] == 1, "{chat}");
    ensure!(chat["streamed"] == chat["texts"][0] && chat["streamed_reason"] == chat["reasons"][0], "{chat}");
    ensure!(chat["streamed_usage"][0] == chat["usage"][0], "{chat}");
    let (whole, stop) = (chat["texts"][0].as_str().context("text")?, chat["stop"].as_str().context("stop")?);
    ensure!(chat["stopped"] == json!([whole[..whole.find(stop).context("no stop")?], "stop"]), "{chat}");

    let refused = json!({
        "model": ["NotFoundError", 404],
        "temperature": ["BadRequestError", 400],
        "streamed": ["BadRequestError", 400],
        "context": ["BadRequestError", 400],
    });
    ensure!(proxied["refusals"] == refused, "{}", proxied["refusals"]);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn generate_works_at_either_port_that_up_prints() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--workers=1"]).await?;
    let mut texts = Vec::new();
    for port in [&cluster.endpoint, &cluster.http] {
        let endpoint = format!("--endpoint={port}");
        let arguments = ["generate", &endpoint, "--max-tokens=8", "--temperature=0", PROMPT];
        let ended = run(program(), &arguments, "").await?;
        ensure!(ended.code == Some(0), "{port}: {ended:?}");
        texts.push(ended.stdout);
    }
    ensure!(!texts[0].trim().is_empty() && texts[0] == texts[1], "{texts:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_curl_line_of_up_works() -> Result<()> {
    let mut child = tokio::process::Command::new(program())
        .args(["up", "--port=0", "--workers=1", "--threads=1", "--kv-cache-bytes=64MiB"])
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let mut lines = {
        use tokio::io::AsyncBufReadExt as _;
        tokio::io::BufReader::new(child.stdout.take().context("no output")?).lines()
    };
    let found = async {
        while let Some(line) = lines.next_line().await? {
            if line.trim_start().starts_with("curl ") {
                return Ok(line.trim().to_owned());
            }
        }
        anyhow::bail!("it printed no curl line")
    };
    let line = tokio::time::timeout(inflight_harness::DEADLINE, found).await??;
    if run(Path::new("sh"), &["-c", "command -v curl"], "").await?.code != Some(0) {
        inflight_fixtures::skipped("the curl line of `up`", "there is no curl");
        return Ok(());
    }
    let finished = run(Path::new("sh"), &["-c", &line], "").await?;
    let answer: Value =
        serde_json::from_str(&finished.stdout).with_context(|| format!("{line}: {finished:?}"))?;
    ensure!(answer["choices"][0]["finish_reason"].is_string(), "{line}: {answer}");
    child.start_kill()?;
    child.wait().await?;
    Ok(())
}
