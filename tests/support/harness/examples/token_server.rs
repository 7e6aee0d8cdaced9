//! Token server without a model, to measure the overhead and accuracy of a load generator:
//! `cargo run -p inflight-harness --example token_server -- FIRST_MS GAP_MS [TOKENS_PER_MESSAGE]`.

use std::time::Duration;

use anyhow::{Context, Result};
use inflight_harness::{Script, TokenServer};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut next = |default: f64| -> Result<f64> {
        let usage = "usage: token_server FIRST_MS GAP_MS [TOKENS_PER_MESSAGE]";
        arguments.next().map_or(Ok(default), |text| text.parse().context(usage))
    };
    let (first, gap, tokens) = (next(50.0)?, next(10.0)?, next(1.0)?);
    let script = Script {
        first: Duration::try_from_secs_f64(first / 1e3)?,
        gap: Duration::try_from_secs_f64(gap / 1e3)?,
        tokens_per_message: (tokens as u32).max(1),
        keeps_log: false,
        ..Script::default()
    };
    let server = TokenServer::new(script);
    println!("router: http://{}", server.listen_grpc().await?);
    println!("openai: http://{}/v1", server.listen_openai().await?);
    std::future::pending().await
}
