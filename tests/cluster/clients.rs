//! Clients that are not ours: Python's grpcio, with stubs and with reflection alone.

use std::io::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use inflight_tests::{Cluster, run};
use serde_json::Value;

use crate::program;
use crate::requests::{generate, sampled};

#[tokio::test(flavor = "multi_thread")]
async fn pythons_grpcio_gets_the_same_tokens_by_stubs_and_by_reflection() -> Result<()> {
    let Ok(python) = std::env::var("INFLIGHT_TEST_PYTHON") else {
        // Straight to the standard error, which the test runner does not hold back.
        let needed = "tests/clients/python/requirements.txt";
        let _ = writeln!(std::io::stderr(), "skipped: INFLIGHT_TEST_PYTHON names no Python with {needed}");
        return Ok(());
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let cluster = Cluster::start(program(), &[]).await?;
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
