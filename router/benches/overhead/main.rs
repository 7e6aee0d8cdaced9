//! Overhead of the router in one run: CPU time per streamed token, time added to the first token, memory of
//! an idle stream; compared with a plain tonic proxy that opens one stream per request.
//!
//! `cargo bench -p inflight-router --bench overhead [MODE]`, where MODE is `relay`,
//! `relay STREAMS MICROSECONDS`, `latency`, `memory` or `http`, which compares the router's HTTP API with its
//! gRPC API; all without it. `source`, `router SOURCE` and `load ADDRESS STREAMS TOKENS MICROSECONDS` run one process of it, for instance
//! the router under a profiler.
//!
//! Router, proxy and token source are separate processes, so that each is measured alone. The source speaks
//! the session protocol with the router and `Generate` with the proxy; it computes nothing.

#![allow(clippy::unwrap_used, reason = "a measurement that cannot go on ends")]

mod client;
mod http;
mod process;
mod proxy;
mod source;

use std::time::Duration;

use client::Load;
use process::Child;

/// Rounds, whose medians are shown; router and proxy alternate in each.
const ROUNDS: usize = 5;
/// Streams, and microseconds between two tokens of each.
const SETTINGS: [(usize, u64); 5] =
    [(64, 10_000), (256, 10_000), (1024, 10_000), (256, 2_000), (1024, 2_000)];

#[tokio::main]
async fn main() {
    // `cargo bench` appends `--bench`.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["source"] => source::serve().await,
        ["router", address] => process::serve_router(address).await,
        ["proxy", address] => proxy::serve(address).await,
        [] => {
            let servers = Servers::start().await;
            relay(&servers, &SETTINGS).await;
            latency(&servers).await;
            memory(&servers).await;
            http_beside_grpc(&servers).await;
        }
        ["http"] => http_beside_grpc(&Servers::start().await).await,
        ["relay"] => relay(&Servers::start().await, &SETTINGS).await,
        ["relay", streams, pace] => match (streams.parse(), pace.parse()) {
            (Ok(streams), Ok(pace)) => relay(&Servers::start().await, &[(streams, pace)]).await,
            _ => eprintln!("relay takes a number of streams and microseconds between two tokens"),
        },
        ["latency"] => latency(&Servers::start().await).await,
        ["load", address, streams, tokens, pace] => match (streams.parse(), tokens.parse(), pace.parse()) {
            (Ok(streams), Ok(tokens), Ok(pace_us)) => {
                let done = client::run(address, Load { streams, tokens, pace_us, connections: 1 }).await;
                println!("{} tokens in {} messages", done.tokens, done.messages);
            }
            _ => eprintln!("load takes an address, streams, tokens of each and microseconds between two"),
        },
        ["memory"] => memory(&Servers::start().await).await,
        _ => eprintln!(
            "this benchmark takes: relay, relay STREAMS MICROSECONDS, latency, memory, http, or one process of it: source, router \
             SOURCE, load ADDRESS STREAMS TOKENS MICROSECONDS; nothing for all"
        ),
    }
}

/// Processes under comparison.
struct Servers {
    source: Child,
    router: Child,
    proxy: Child,
}

impl Servers {
    async fn start() -> Self {
        let source = Child::start(&["source"]).await;
        let router = Child::start(&["router", &source.address]).await;
        let proxy = Child::start(&["proxy", &source.address]).await;
        for address in [&router.address, &proxy.address, &source.address] {
            client::run(address, Load { streams: 8, tokens: 64, pace_us: 0, connections: 1 }).await;
        }
        Self { source, router, proxy }
    }
}

fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Measures CPU time per token, by streams and microseconds between two tokens of each.
async fn relay(servers: &Servers, settings: &[(usize, u64)]) {
    let Servers { router, proxy, .. } = servers;
    println!(
        "relay: tokens for each CPU-second of the process, in a message, and for each write to a socket"
    );
    println!(
        "| streams | between tokens | router | a message | a write | proxy | a message | a write | ratio |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for &(streams, pace_us) in settings {
        let tokens = (3_000_000 / pace_us).clamp(200, 2000) as u32;
        let load = Load { streams, tokens, pace_us, connections: 1 + streams / 128 };
        let (mut routed, mut proxied) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            for (child, results) in [(router, &mut routed), (proxy, &mut proxied)] {
                let (cpu, writes) = (child.cpu(), child.writes());
                let done = client::run(&child.address, load).await;
                let (cpu, writes) = ((child.cpu() - cpu).as_secs_f64(), child.writes() - writes);
                let tokens = done.tokens as f64;
                results.push([tokens / cpu, tokens / done.messages as f64, tokens / writes as f64]);
            }
        }
        let of = |results: &[[f64; 3]], which: usize| median(results.iter().map(|result| result[which]));
        let shown = |results: &[[f64; 3]]| {
            format!("{:.0} | {:.2} | {:.1}", of(results, 0), of(results, 1), of(results, 2))
        };
        let ratios = routed.iter().zip(&proxied).map(|(routed, proxied)| routed[0] / proxied[0]);
        println!(
            "| {streams} | {:.1} ms | {} | {} | {:.2} |",
            pace_us as f64 / 1e3,
            shown(&routed),
            shown(&proxied),
            median(ratios)
        );
    }
}

/// Measures the time from a call to its first token.
async fn latency(servers: &Servers) {
    println!("\ntime to the first token at 200 calls a second, beside streams of 100 tokens a second (ms)");
    println!(
        "| streams | direct P50 | P99 | proxy P50 | P99 | router P50 | P99 | added by the router at P50 (least, most) | at P99 |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for streams in [1, 64] {
        let beside = Load { streams, ..client::BESIDE };
        let ways = [&servers.source.address, &servers.proxy.address, &servers.router.address];
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            let mut round = Vec::new();
            for address in ways {
                let latency = client::first_tokens(address, beside, 600, Duration::from_millis(5)).await;
                round.push([latency.p50, latency.p99].map(|time| time.as_secs_f64() * 1e3));
            }
            rounds.push(round);
        }
        print!("| {streams} |");
        for way in 0..ways.len() {
            let of = |pick: usize| median(rounds.iter().map(|round| round[way][pick]));
            print!(" {:.2} | {:.2} |", of(0), of(1));
        }
        for pick in [0, 1] {
            let mut added: Vec<f64> = rounds.iter().map(|round| round[2][pick] - round[0][pick]).collect();
            added.sort_by(f64::total_cmp);
            print!(" {:.2} ({:.2}, {:.2}) |", added[added.len() / 2], added[0], added[added.len() - 1]);
        }
        println!();
    }
}

/// Compares server-sent events with gRPC at the same router: CPU time per token and time to first token.
async fn http_beside_grpc(servers: &Servers) {
    let router = &servers.router;
    println!("\nHTTP beside gRPC: tokens for each CPU-second of the router");
    println!("| streams | between tokens | gRPC | HTTP/2 | ratio | HTTP/1.1 | ratio (median, least, most) |");
    println!("|---|---|---|---|---|---|---|");
    for (streams, pace_us) in SETTINGS {
        let tokens = (3_000_000 / pace_us).clamp(200, 2000) as u32;
        let load = Load { streams, tokens, pace_us, connections: 1 + streams / 128 };
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            let mut round = [0.0; 3];
            for (way, rate) in round.iter_mut().enumerate() {
                let before = router.cpu();
                let done = match way {
                    0 => client::run(&router.address, load).await,
                    1 => http::run_http2(&router.http, load).await,
                    _ => http::run(&router.http, load).await,
                };
                *rate = done.tokens as f64 / (router.cpu() - before).as_secs_f64();
            }
            rounds.push(round);
        }
        let rate = |way: usize| median(rounds.iter().map(|round| round[way]));
        let ratio = |way: usize| {
            let mut ratios: Vec<f64> = rounds.iter().map(|round| round[way] / round[0]).collect();
            ratios.sort_by(f64::total_cmp);
            format!("{:.2} ({:.2}, {:.2})", ratios[ratios.len() / 2], ratios[0], ratios[ratios.len() - 1])
        };
        println!(
            "| {streams} | {:.1} ms | {:.0} | {:.0} | {} | {:.0} | {} |",
            pace_us as f64 / 1e3,
            rate(0),
            rate(1),
            ratio(1),
            rate(2),
            ratio(2),
        );
    }
    let (mut grpc, mut http) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let interval = Duration::from_millis(5);
        grpc.push(client::first_tokens(&router.address, client::BESIDE, 600, interval).await);
        http.push(http::first_tokens(&router.http, &router.address, 600, interval).await);
    }
    let added = |pick: fn(&client::Latency) -> Duration| {
        let pairs = http.iter().zip(&grpc);
        median(pairs.map(|(http, grpc)| (pick(http).as_secs_f64() - pick(grpc).as_secs_f64()) * 1e3))
    };
    println!(
        "time to the first token that HTTP adds to gRPC, median of the rounds: P50 {:.3} ms, P99 {:.3} ms",
        added(|latency| latency.p50),
        added(|latency| latency.p99)
    );
}

/// Measures the memory of a stream before its first token.
async fn memory(servers: &Servers) {
    let Servers { router, proxy, .. } = servers;
    println!("\nmemory of an idle stream (resident, KiB)");
    println!("| streams | router | proxy |");
    println!("|---|---|---|");
    for streams in [1000, 4000] {
        let mut grown = Vec::new();
        for child in [router, proxy] {
            let before = child.resident_kib();
            let held = client::hold(&child.address, streams).await;
            grown.push((child.resident_kib() - before) / streams as f64);
            drop(held);
            client::settle(&child.address).await;
        }
        println!("| {streams} | {:.1} | {:.1} |", grown[0], grown[1]);
    }
}
