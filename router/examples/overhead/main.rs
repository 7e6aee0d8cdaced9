//! What the router costs, in one run: CPU time for each token relayed, time added to the first token, memory of an idle
//! stream; and the same for a plain tonic proxy that opens one stream for each request.
//!
//! `cargo run --release -p inflight-router --example overhead`
//!
//! Router, proxy and the source of tokens are processes of their own, so that what is measured is one process and
//! nothing else. The source speaks the session protocol to the router and `Generate` to the proxy; it computes nothing.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on ends")]

mod client;
mod process;
mod proxy;
mod source;

use std::time::Duration;

use client::Load;
use process::Child;

/// Rounds, of which the medians are shown; in each, router and proxy take turns.
const ROUNDS: usize = 5;

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["source"] => source::serve().await,
        ["router", address] => process::serve_router(address).await,
        ["proxy", address] => proxy::serve(address).await,
        [] => measure().await,
        _ => eprintln!("this example takes no arguments"),
    }
}

fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

async fn measure() {
    let source = Child::start(&["source"]).await;
    let router = Child::start(&["router", &source.address]).await;
    let proxy = Child::start(&["proxy", &source.address]).await;
    let direct = &source.address;
    for address in [&router.address, &proxy.address, direct] {
        client::run(address, Load { streams: 8, tokens: 64, pace_us: 0, connections: 1 }).await;
    }

    println!("relay: tokens for each CPU-second of the process, and tokens in a message");
    println!("| streams | time between tokens | router | tokens/message | proxy | tokens/message | ratio |");
    println!("|---|---|---|---|---|---|---|");
    for (streams, pace_us) in [(64, 10_000), (256, 10_000), (256, 2_000), (256, 1_000), (1024, 2_000)] {
        let tokens = (3_000_000 / pace_us).clamp(200, 2000) as u32;
        let load = Load { streams, tokens, pace_us, connections: 1 + streams / 128 };
        let (mut routed, mut proxied) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            for (child, results) in [(&router, &mut routed), (&proxy, &mut proxied)] {
                let before = child.cpu();
                let done = client::run(&child.address, load).await;
                let used = (child.cpu() - before).as_secs_f64();
                results.push((done.tokens as f64 / used, done.tokens as f64 / done.messages as f64));
            }
        }
        let of = |results: &[(f64, f64)]| {
            (median(results.iter().map(|r| r.0)), median(results.iter().map(|r| r.1)))
        };
        let ratios = routed.iter().zip(&proxied).map(|(r, p)| r.0 / p.0);
        let ((router, share), (proxy, one)) = (of(&routed), of(&proxied));
        println!(
            "| {streams} | {:.1} ms | {router:.0} | {share:.2} | {proxy:.0} | {one:.2} | {:.2} |",
            pace_us as f64 / 1e3,
            median(ratios)
        );
    }

    println!(
        "\ntime to the first token at 200 calls a second, beside 32 streams of 100 tokens a second (ms)"
    );
    println!("| way | P50 | P99 |");
    println!("|---|---|---|");
    let mut ways: [(&str, &String, Vec<client::Latency>); 3] = [
        ("direct", direct, Vec::new()),
        ("proxy", &proxy.address, Vec::new()),
        ("router", &router.address, Vec::new()),
    ];
    for _ in 0..ROUNDS {
        for (_, address, results) in &mut ways {
            results.push(client::first_tokens(address, 600, Duration::from_millis(5)).await);
        }
    }
    let of = |results: &[client::Latency], pick: fn(&client::Latency) -> Duration| {
        median(results.iter().map(|latency| pick(latency).as_secs_f64() * 1e3))
    };
    for (name, _, results) in &ways {
        println!("| {name} | {:.3} | {:.3} |", of(results, |l| l.p50), of(results, |l| l.p99));
    }
    let added = ways[2]
        .2
        .iter()
        .zip(&ways[0].2)
        .map(|(routed, direct)| (routed.p99.as_secs_f64() - direct.p99.as_secs_f64()) * 1e3);
    println!("added by the router at P99, median of the rounds: {:.3} ms", median(added));

    println!("\nmemory of an idle stream (resident, KiB)");
    println!("| streams | router | proxy |");
    println!("|---|---|---|");
    for streams in [1000, 4000] {
        let mut grown = Vec::new();
        for child in [&router, &proxy] {
            let before = child.resident_kib();
            let held = client::hold(&child.address, streams).await;
            grown.push((child.resident_kib() - before) / streams as f64);
            drop(held);
            client::settle(&child.address).await;
        }
        println!("| {streams} | {:.1} | {:.1} |", grown[0], grown[1]);
    }
}
