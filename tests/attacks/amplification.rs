//! Memory amplification: gRPC messages that are small on the wire and large once decoded, and error statuses that quote the request.

use anyhow::{Context, Result, ensure};
use inflight_harness::{LocalCluster, scrape, send_raw};
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
