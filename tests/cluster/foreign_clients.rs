//! Third-party clients: Python's grpcio, with generated stubs and with reflection only, and tritonclient.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use inflight_harness::{LocalCluster, run};
use serde_json::Value;

use crate::program;
use crate::requests::{generate, sampled};

#[tokio::test(flavor = "multi_thread")]
async fn grpcio_gets_the_same_tokens_by_stubs_and_by_reflection() -> Result<()> {
    let Ok(python) = std::env::var("INFLIGHT_TEST_PYTHON") else {
        let needed = "tests/clients/python/requirements.txt";
        inflight_fixtures::skipped(
            "Python clients",
            &format!("INFLIGHT_TEST_PYTHON names no Python with {needed}"),
        );
        return Ok(());
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let cluster = LocalCluster::start(program(), &[]).await?;
    let expected = generate(&mut cluster.client().await?, sampled("Once upon a time", 24, 42)).await?;
    let address = cluster.endpoint.trim_start_matches("http://");
    let protos = root.join("proto").to_string_lossy().into_owned();
    for script in ["stubs.py", "reflection.py"] {
        let path = root.join("tests/clients/python").join(script).to_string_lossy().into_owned();
        let arguments = [
            path.as_str(),
            "--target",
            address,
            "--protos",
            &protos,
            "--prompt",
            "Once upon a time",
            "--seed",
            "42",
        ];
        let finished = run(Path::new(&python), &arguments, "").await?;
        ensure!(finished.code == Some(0), "{script}: {finished:?}");
        let answer: Value =
            serde_json::from_str(&finished.stdout).with_context(|| format!("{script}: {finished:?}"))?;
        ensure!(answer["text"] == expected.text.as_str(), "{script}: {answer}, expected {expected:?}");
        ensure!(answer["token_ids"] == serde_json::json!(expected.tokens), "{script}: {answer}");
        ensure!(answer["completion_tokens"] == 24, "{script}: {answer}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn tritonclient_gets_the_same_text_unary_and_streamed() -> Result<()> {
    let Ok(python) = std::env::var("INFLIGHT_TEST_PYTHON") else {
        let needed = "tests/clients/python/requirements.txt";
        inflight_fixtures::skipped(
            "Python clients",
            &format!("INFLIGHT_TEST_PYTHON names no Python with {needed}"),
        );
        return Ok(());
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let cluster = LocalCluster::start(program(), &["--model-name=demo"]).await?;
    let expected = generate(&mut cluster.client().await?, sampled("Once upon a time", 24, 42)).await?;
    let script = root.join("tests/clients/python/triton.py").to_string_lossy().into_owned();
    let address = cluster.endpoint.trim_start_matches("http://");
    let arguments = [
        script.as_str(),
        "--target",
        address,
        "--model=demo",
        "--prompt",
        "Once upon a time",
        "--seed",
        "42",
    ];
    let finished = run(Path::new(&python), &arguments, "").await?;
    ensure!(finished.code == Some(0), "{finished:?}");
    let answer: Value = serde_json::from_str(&finished.stdout).with_context(|| format!("{finished:?}"))?;
    for probe in ["live", "ready", "model_ready"] {
        ensure!(answer[probe] == true, "{probe}: {answer}");
    }
    ensure!(answer["server"] == "inflight" && answer["id"] == "one", "{answer}");
    ensure!(answer["text"] == expected.text.as_str(), "{answer}, expected {expected:?}");
    ensure!(answer["completion_tokens"] == 24, "{answer}");
    for id in ["a", "b"] {
        ensure!(answer["streamed"][id] == expected.text.as_str(), "{id}: {answer}, expected {expected:?}");
    }
    // How the text is cut into pieces depends on timing; each of the two streams has one at least.
    ensure!(answer["pieces"].as_u64() >= Some(2), "{answer}");
    let errors = answer["stream_errors"].as_array().context("stream_errors")?;
    ensure!(
        errors.len() == 1 && errors[0].as_str().is_some_and(|e| e.contains("InvalidArgument")),
        "{answer}"
    );
    for unknown in ["unknown_model", "unknown_version"] {
        ensure!(answer[unknown] == "StatusCode.NOT_FOUND", "{unknown}: {answer}");
    }
    ensure!(answer["other_version_ready"] == false && answer["decoupled"] == true, "{answer}");
    ensure!(answer["config_inputs"] == answer["inputs"], "{answer}");
    ensure!(answer["index"] == serde_json::json!([["demo", "1", "READY"]]), "{answer}");
    // The request over gRPC, one unary, and two streams.
    ensure!(answer["completed"] == 4 && answer["unknown_fields"] == 0, "{answer}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_python_example_runs_as_its_readme_says() -> Result<()> {
    let Ok(python) = std::env::var("INFLIGHT_TEST_PYTHON") else {
        inflight_fixtures::skipped(
            "the Python example",
            "INFLIGHT_TEST_PYTHON names no Python with grpcio-tools",
        );
        return Ok(());
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = inflight_fixtures::TempDir::new("inflight-python-example")?;
    let (stubs, protos) =
        (folder.path().to_string_lossy(), root.join("proto").to_string_lossy().into_owned());
    let script = folder.path().join("generate.py");
    std::fs::copy(root.join("examples/python/generate.py"), &script)?;
    let compiler = [
        "-m",
        "grpc_tools.protoc",
        "-I",
        &protos,
        &format!("--python_out={stubs}"),
        &format!("--grpc_python_out={stubs}"),
        "inflight/v1/inference.proto",
        "inflight/v1/sampling.proto",
    ];
    let compiled = run(Path::new(&python), &compiler, "").await?;
    ensure!(compiled.code == Some(0), "{compiled:?}");
    let cluster = LocalCluster::start(program(), &[]).await?;
    let address = cluster.endpoint.trim_start_matches("http://");
    let arguments =
        [script.to_string_lossy().into_owned(), "Once upon a time".to_owned(), address.to_owned()];
    let finished = run(Path::new(&python), &arguments.each_ref().map(String::as_str), "").await?;
    ensure!(finished.code == Some(0) && finished.stdout.contains("prompt tokens"), "{finished:?}");
    Ok(())
}
