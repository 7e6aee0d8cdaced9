//! Options of `inflight up` that are those of its router, names of models, and addresses of other ports.

use anyhow::{Context, Result, ensure};
use inflight_fixtures::TempDir;
use inflight_harness::{CommandOutput, LocalCluster, run};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::program;

fn check(finished: &CommandOutput, code: i32, pieces: &[&str]) -> Result<()> {
    let said = format!("{}{}", finished.stdout, finished.stderr);
    ensure!(finished.code == Some(code), "exit code {code} was expected: {finished:?}");
    for piece in pieces {
        ensure!(said.contains(piece), "{piece:?} was expected: {finished:?}");
    }
    Ok(())
}

/// Posts a body to `HOST:PORT`.
async fn post(address: &str, path: &str, body: &Value) -> Result<Value> {
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(format!("{head}{body}").as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let (_, body) = answer.split_once("\r\n\r\n").context("no body")?;
    serde_json::from_str(body).with_context(|| answer.clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn up_takes_options_of_its_router_and_commands_take_every_form_of_address() -> Result<()> {
    let flags = [
        "--workers=1",
        "--served-model-name=demo,gpt-4o",
        "--tool-call-format=hermes",
        "--default-max-tokens=3",
    ];
    let cluster = LocalCluster::start(program(), &flags).await?;
    let body = json!({
        "model": "gpt-4o",
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    });
    let http = cluster.http.strip_prefix("http://").context("no scheme")?;
    let answer = post(http, "/v1/chat/completions", &body).await?;
    ensure!(answer["model"] == "demo" && answer["usage"]["completion_tokens"] == 3, "{answer}");

    let grpc = cluster.endpoint.strip_prefix("http://").context("no scheme")?;
    let metrics = cluster.router.metrics.to_string();
    let connected = format!("{grpc}: router, 1 workers connected");
    for (words, code, pieces) in [
        (vec!["generate", "--endpoint", grpc, "-m", "gpt-4o", "Hello"], 0, vec!["3 output tokens"]),
        // The port of the HTTP APIs takes the gRPC calls of clients, too.
        (vec!["generate", "--endpoint", http, "Hello"], 0, vec!["3 output tokens"]),
        (vec!["diagnose", http], 3, vec!["this is the HTTP port"]),
        (vec!["top", "--once", "--router", http], 1, vec!["this is the HTTP port"]),
        (vec!["generate", "--endpoint", &metrics, "Hello"], 3, vec!["no gRPC port", "8650"]),
        (vec!["diagnose", grpc], 0, vec![&connected]),
        (vec!["diagnose", &cluster.endpoint], 0, vec!["router, 1 workers connected"]),
        (vec!["diagnose", "--router", grpc], 0, vec![&connected]),
        (vec!["ps", "--router", grpc], 0, vec!["worker-0"]),
    ] {
        check(&run(program(), &words, "").await?, code, &pieces).with_context(|| words.join(" "))?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn certificate_and_keys_that_up_is_given_are_those_of_its_router() -> Result<()> {
    let folder = TempDir::new("certificate")?;
    let path = |file: &str| folder.path().join(file);
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned(), "127.0.0.1".to_owned()])?;
    std::fs::write(path("cert.pem"), made.cert.pem())?;
    std::fs::write(path("key.pem"), made.signing_key.serialize_pem())?;
    let variables = [
        ("INFLIGHT_TLS_CERT", path("cert.pem").into()),
        ("INFLIGHT_TLS_KEY", path("key.pem").into()),
        ("INFLIGHT_UP_API_KEY", "first,second".into()),
    ];
    let cluster = LocalCluster::start_with_env(program(), &["--workers=1"], &variables).await?;
    ensure!(cluster.endpoint.starts_with("https://") && cluster.http.starts_with("https://"), "{cluster:?}");
    let authority = path("cert.pem").display().to_string();
    let plain = cluster.endpoint.replace("https://", "http://");
    let words = |endpoint, key| {
        ["generate", "--endpoint", endpoint, "--tls-ca", &authority, "--api-key", key, "Hello"]
    };
    check(&run(program(), &words(&cluster.endpoint, "second"), "").await?, 0, &["output tokens"])?;
    check(&run(program(), &words(&cluster.endpoint, "third"), "").await?, 7, &["API key"])?;
    let plaintext = run(program(), &words(&plain, "second"), "").await?;
    ensure!(plaintext.code != Some(0) && plaintext.stderr.contains("https://"), "{plaintext:?}");
    let both = ["up", "--port=0", "--api-key=a", "--tenants-file=b"];
    check(&run(program(), &both, "").await?, 2, &["--api-key and --tenants-file", "leave one out"])
}
