//! Memory amplification: gRPC messages that are small on the wire and large once decoded, and error statuses that quote the request.

use anyhow::{Context, Result, ensure};
use std::net::SocketAddr;

use inflight_harness::{LocalCluster, RoleProcess, eventually, exclusive, scrape, send_raw};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Code;

use crate::{program, short_request};

const MIB: f64 = (1 << 20) as f64;
const INFER: &str = "/inference.GRPCInferenceService/ModelInfer";
const GENERATE: &str = "/inflight.v1.Inference/Generate";

async fn resident(cluster: &LocalCluster) -> Result<f64> {
    Ok(scrape(cluster.router.metrics).await?.total("process_resident_memory_peak_bytes")? / MIB)
}

/// Field of a protobuf message: its key and the bytes of a message, a string or bytes.
fn field(key: u8, value: &[u8]) -> Vec<u8> {
    let mut bytes = vec![key];
    let mut len = value.len();
    while len >= 0x80 {
        bytes.push(len as u8 | 0x80);
        len >>= 7;
    }
    bytes.push(len as u8);
    [&bytes, value].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn elements_of_two_bytes_take_no_memory_of_hundreds() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--workers=1"]).await?;
    let before = resident(&cluster).await?;
    let empty = [0x2a, 0].repeat((4 << 20) / 2 - 16);
    // Key 0x2a: inputs of a ModelInferRequest; messages of a Chat are its field 1, and chat is the input 4 of a GenerateRequest.
    let messages = [0x0a, 0].repeat((4 << 20) / 2 - 16);
    for (path, message) in [(INFER, empty), (GENERATE, field(0x22, &messages))] {
        let bytes = message.len();
        let status = send_raw(&cluster.endpoint, path, message).await?.context("it was accepted")?;
        ensure!(status.code() == Code::InvalidArgument, "{path}: {status:?}");
        ensure!(
            status.message().contains(&format!("the message of {bytes} bytes would take")),
            "{path}: {status:?}"
        );
    }
    let after = resident(&cluster).await?;
    println!("the router's peak of memory went from {before:.1} to {after:.1} MiB");
    ensure!(after - before <= 64.0, "the router took {:.1} MiB", after - before);
    let mut stream = cluster.client().await?.generate(short_request()).await?.into_inner();
    while stream.message().await?.is_some() {}
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_fits_into_the_headers_of_common_clients_whatever_the_request_quotes() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--workers=1"]).await?;
    // Percent-encoding in `grpc-message` makes three bytes of each quotation mark.
    let name = "\"".repeat(3 << 20);
    let mut request = short_request();
    request.model = name.clone();
    let mut client = cluster.client().await?;
    let status = client.generate(request).await.err().context("the model does not exist")?;
    ensure!(status.code() == Code::NotFound, "{:?}", status.code());
    ensure!(
        status.message().len() <= 1024 && status.message().ends_with('\u{2026}'),
        "{}",
        status.message().len()
    );
    let details = status.details().len();
    ensure!(details <= 2048, "{details} bytes of details");
    // The name of a tensor is in the message and in the field of google.rpc.BadRequest.
    let tensor = field(0x0a, name.as_bytes());
    let status =
        send_raw(&cluster.endpoint, INFER, field(0x2a, &tensor)).await?.context("it was accepted")?;
    ensure!(status.message().len() <= 1024 && status.details().len() <= 2048, "{:?}", status.code());
    Ok(())
}

/// Sends a completions call with 128 prompts that share 65,536 allowed token ids, and does not read the answer.
async fn many_prompts(address: SocketAddr) -> Result<TcpStream> {
    let ids: Vec<String> = (0..65_536).map(|id: u32| id.to_string()).collect();
    let prompts = vec!["\"a\""; 128].join(",");
    let body = format!(
        r#"{{"model":"expected","prompt":[{prompts}],"max_tokens":1,"allowed_token_ids":[{}]}}"#,
        ids.join(",")
    );
    let mut stream = TcpStream::connect(address).await?;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    Ok(stream)
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_of_one_call_share_what_they_have_in_common() -> Result<()> {
    const CALLS: usize = 30;
    // A port that was free a moment ago.
    let http = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let flags = [
        format!("--http-listen={http}"),
        "--expect-models=expected".to_owned(),
        "--workers=127.0.0.1:1".to_owned(),
    ];
    let router = RoleProcess::start(program().to_owned(), "router", &flags).await?;
    let peak = || async {
        anyhow::Ok(scrape(router.metrics).await?.total("process_resident_memory_peak_bytes")? / MIB)
    };
    let before = peak().await?;
    let mut held = Vec::new();
    for _ in 0..CALLS {
        held.push(many_prompts(http).await?);
    }
    eventually("the calls are held", || async {
        let waiting = scrape(router.metrics).await?.total("inflight_router_cold_start_requests")?;
        ensure!(waiting >= CALLS as f64, "{waiting} requests are held");
        Ok(())
    })
    .await?;
    let grown = peak().await? - before;
    println!("{CALLS} calls of 128 prompts took {grown:.0} MiB");
    // Each would take 32 MiB with copies of its own.
    ensure!(grown < 128.0, "the router took {grown:.0} MiB");
    drop(held);
    Ok(())
}

/// Asks for log probabilities of a prompt over HTTP. Returns the status and the bytes of the answer.
async fn scored(address: SocketAddr, prompt: &[u32], key: &str) -> Result<(u16, usize)> {
    let body = format!(r#"{{"prompt":{prompt:?},"max_tokens":1,"prompt_logprobs":20,"model":""}}"#);
    let mut stream = TcpStream::connect(address).await?;
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    let status = answer.get(9..12).and_then(|status| std::str::from_utf8(status).ok()?.parse().ok());
    Ok((status.context("an answer without a status")?, answer.len()))
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_of_megabytes_delay_no_other_call() -> Result<()> {
    const ANSWERS: usize = 12;
    let flags = ["--workers=1", "--device=sim:flat,pool_tokens=300000", "--max-context-tokens=262144"];
    let cluster = LocalCluster::start_exclusive(program(), &flags, &[], exclusive().await).await?;
    let http: SocketAddr = cluster.http.trim_start_matches("http://").parse()?;
    let (status, _) = scored(http, &vec![7; 12_289], "").await?;
    ensure!(status == 400, "more log probabilities than a response has: {status}");
    let peak = || async {
        anyhow::Ok(scrape(cluster.router.metrics).await?.total("process_resident_memory_peak_bytes")? / MIB)
    };
    let before = peak().await?;
    let prompt: Vec<u32> = (0..12_000).map(|at| 7 + at % 90).collect();
    let answers = (0..ANSWERS).map(|_| {
        let prompt = prompt.clone();
        tokio::spawn(async move { scored(http, &prompt, "").await })
    });
    let answers: Vec<_> = answers.collect();
    let mut waits = Vec::new();
    while answers.iter().any(|answer| !answer.is_finished()) {
        let begun = std::time::Instant::now();
        let mut stream = cluster.client().await?.generate(short_request()).await?.into_inner();
        while stream.message().await?.is_some() {}
        waits.push(begun.elapsed());
    }
    let mut bytes = 0;
    for answer in answers {
        let (status, length) = answer.await??;
        ensure!(status == 200, "{status}");
        bytes = bytes.max(length);
    }
    waits.sort();
    let (median, most) = (waits[waits.len() / 2], waits[waits.len() - 1]);
    let grown = peak().await? - before;
    println!(
        "{ANSWERS} answers of {:.1} MiB; {} other calls took {median:?}, at most {most:?}; the router took {grown:.0} MiB",
        bytes as f64 / MIB,
        waits.len()
    );
    ensure!(bytes < 17 << 20, "an answer has {bytes} bytes");
    ensure!(median.as_millis() < 500, "the others took {median:?}");
    Ok(())
}
