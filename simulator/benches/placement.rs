//! Comparison of placement policies: `cargo bench -p inflight-simulator --bench placement --
//! [REQUESTS [WORKERS [SPEED]]]`. Uses the Mooncake trace with `INFLIGHT_TRACES`, else similar generated
//! conversations.

use std::path::Path;

use inflight_router_core::{PlacementKind, Policy, Random};
use inflight_simulator::cluster::{ClusterOptions, ClusterRequest, conversations, read_mooncake, simulate};
use inflight_simulator::percentile;
use inflight_worker_core::{DeviceProfile, Time};

type MakePolicy = fn(u64) -> Box<dyn Policy>;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `cargo bench` appends `--bench`.
    let arguments: Vec<f64> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .map(|text| text.parse())
        .collect::<Result<_, _>>()?;
    let argument = |position: usize, default: f64| arguments.get(position).copied().unwrap_or(default);
    let (count, workers, speed) = (argument(0, 3000.0) as usize, argument(1, 4.0) as usize, argument(2, 1.0));
    let mut requests: Vec<ClusterRequest> = match std::env::var_os("INFLIGHT_TRACES") {
        Some(root) => {
            read_mooncake(&Path::new(&root).join("mooncake/conversation_trace.first45min.jsonl"), count, 1)?
        }
        None => conversations(count, 3.31, 1),
    };
    for request in &mut requests {
        request.arrival = Time::from_nanos((request.arrival.as_nanos() as f64 / speed) as u64);
    }
    let profile = DeviceProfile::built_in("h200-llama3-8b")?;
    let policies: [(&str, MakePolicy); 6] = [
        ("random", |seed| Box::new(Random::new(seed))),
        ("round-robin", |seed| PlacementKind::RoundRobin.build(seed)),
        ("power-of-two", |seed| PlacementKind::PowerOfTwo.build(seed)),
        ("least-loaded", |seed| PlacementKind::LeastLoaded.build(seed)),
        ("prefix", |seed| PlacementKind::Prefix.build(seed)),
        ("cost", |seed| PlacementKind::Cost.build(seed)),
    ];
    println!("{} requests, {workers} workers, arrivals {speed} times as fast", requests.len());
    println!("placement      TTFT mean      P50      P90      P99     hits    busy   max/mean busy");
    for (name, policy) in policies {
        let options = ClusterOptions::new(workers, profile, policy);
        let report = simulate(&options, &requests)?;
        let mut times = report.times_to_first_token(&requests);
        times.sort_by(f64::total_cmp);
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        let busy = report.busy_s.iter().sum::<f64>() / workers as f64;
        let max = report.busy_s.iter().fold(0.0, |max: f64, busy| max.max(*busy));
        println!(
            "{name:13} {mean:8.2} s {:6.2} s {:6.2} s {:6.2} s {:5.1} % {:5.1} % {:7.3}",
            percentile(&times, 0.5),
            percentile(&times, 0.9),
            percentile(&times, 0.99),
            100.0 * report.hit_rate(&requests),
            100.0 * busy / report.makespan.since(Time::ZERO).as_secs_f64(),
            max / busy,
        );
    }
    Ok(())
}
