//! Table of workers: its columns.

use inflight_proto::v1::WorkerFacts;

use super::state::{ClusterState, Worker};
use super::tables::{Column, Tone, plain};
use super::text::{bar, bytes, count, percent};

fn worker_tone(worker: &Worker) -> Tone {
    match worker.view.state.as_str() {
        "connected" => Tone::Plain,
        "draining" => Tone::Wait,
        _ => Tone::Bad,
    }
}

/// KV blocks of a worker's pool: in use by sequences, and cached beside them, as shares.
fn kv_shares(worker: &Worker) -> (f64, f64) {
    let blocks = f64::from(worker.limits().kv_blocks.max(1));
    let used = f64::from(worker.load().kv_blocks_used) / blocks;
    (used, f64::from(worker.view.kv_blocks_cached) / blocks)
}

fn kv_text(worker: &Worker, _: &ClusterState, width: usize) -> String {
    if worker.limits().kv_blocks == 0 {
        return "-".to_owned();
    }
    let (used, cached) = kv_shares(worker);
    let number = percent(used);
    let columns = width.saturating_sub(5);
    format!("{}{number:>5}", bar(&[(used, '█'), (cached, '▒')], '·', columns))
}

fn step_text(worker: &Worker, _: &ClusterState, _: usize) -> String {
    let millis = |us: f64| if us < 99_950.0 { format!("{:.1}", us / 1e3) } else { count((us / 1e3) as u64) };
    let step = worker.step_us().map_or_else(|| "-".to_owned(), millis);
    match worker.view.step_target_us {
        0 => format!("{step}ms"),
        target => format!("{step}/{}ms", millis(target as f64)),
    }
}

fn step_tone(worker: &Worker) -> Tone {
    let target = worker.view.step_target_us;
    let above = worker.step_us().is_some_and(|step| target > 0 && step > target as f64);
    if above { Tone::Wait } else { Tone::Plain }
}

/// Device of a worker, with the number of its ranks and the encoding of the weights.
fn device_text(worker: &Worker, _: &ClusterState, _: usize) -> String {
    let WorkerFacts { device, tensor_parallel, weight_encoding, .. } = worker.facts();
    let ranks = if tensor_parallel > 1 { format!("{tensor_parallel}x ") } else { String::new() };
    let encoding = if weight_encoding.is_empty() { String::new() } else { format!(", {weight_encoding}") };
    format!("{ranks}{device}{encoding}")
}

/// Bytes that weights and KV block pool take.
fn taken_bytes(worker: &Worker) -> u64 {
    let facts = worker.facts();
    facts.weight_bytes.saturating_add(facts.kv_cache_bytes)
}

/// Memory of weights and KV block pool, and of the device if it is known.
fn memory_text(worker: &Worker, _: &ClusterState, _: usize) -> String {
    let WorkerFacts { weight_bytes, kv_cache_bytes, memory_bytes, .. } = worker.facts();
    if weight_bytes == 0 && kv_cache_bytes == 0 {
        return String::new();
    }
    let taken = format!("{}+{}", bytes(weight_bytes), bytes(kv_cache_bytes));
    if memory_bytes == 0 { taken } else { format!("{taken}/{}", bytes(memory_bytes)) }
}

/// Columns of the table of workers.
pub static WORKERS: [Column<Worker>; 13] = [
    Column {
        title: "WORKER",
        width: 8,
        grows_to: 24,
        right: false,
        rank: 0,
        descending: false,
        text: |worker, _, _| worker.view.name.clone(),
        order: |a, b, _| a.view.name.cmp(&b.view.name),
        tone: plain,
    },
    Column {
        title: "STATE",
        width: 9,
        grows_to: 12,
        right: false,
        rank: 3,
        descending: false,
        text: |worker, _, _| worker.view.state.clone(),
        order: |a, b, _| a.view.state.cmp(&b.view.state),
        tone: worker_tone,
    },
    Column {
        title: "RUN",
        width: 4,
        grows_to: 4,
        right: true,
        rank: 1,
        descending: true,
        text: |worker, _, _| count(worker.load().running_sequences.into()),
        order: |a, b, _| a.load().running_sequences.cmp(&b.load().running_sequences),
        tone: plain,
    },
    Column {
        title: "WAIT",
        width: 5,
        grows_to: 5,
        right: true,
        rank: 2,
        descending: true,
        text: |worker, _, _| count(worker.load().waiting_sequences.into()),
        order: |a, b, _| a.load().waiting_sequences.cmp(&b.load().waiting_sequences),
        tone: |worker| if worker.load().waiting_sequences > 0 { Tone::Wait } else { Tone::Plain },
    },
    Column {
        title: "SWAP",
        width: 5,
        grows_to: 5,
        right: true,
        rank: 6,
        descending: true,
        text: |worker, _, _| count(worker.load().swapped_sequences.into()),
        order: |a, b, _| a.load().swapped_sequences.cmp(&b.load().swapped_sequences),
        tone: plain,
    },
    Column {
        title: "KV",
        width: 10,
        grows_to: 24,
        right: false,
        rank: 2,
        descending: true,
        text: kv_text,
        order: |a, b, _| kv_shares(a).0.total_cmp(&kv_shares(b).0),
        tone: plain,
    },
    Column {
        title: "STEP",
        width: 13,
        grows_to: 13,
        right: true,
        rank: 4,
        descending: true,
        text: step_text,
        order: |a, b, _| a.step_us().unwrap_or(0.0).total_cmp(&b.step_us().unwrap_or(0.0)),
        tone: step_tone,
    },
    Column {
        title: "PREEMPT",
        width: 8,
        grows_to: 8,
        right: true,
        rank: 5,
        descending: true,
        text: |worker, _, _| count(worker.load().preemptions),
        order: |a, b, _| a.load().preemptions.cmp(&b.load().preemptions),
        tone: plain,
    },
    Column {
        title: "REQS",
        width: 5,
        grows_to: 5,
        right: true,
        rank: 7,
        descending: true,
        text: |worker, _, _| count(worker.view.requests.into()),
        order: |a, b, _| a.view.requests.cmp(&b.view.requests),
        tone: plain,
    },
    Column {
        title: "MODEL",
        width: 10,
        grows_to: 30,
        right: false,
        rank: 8,
        descending: false,
        text: |worker, _, _| worker.view.model.clone(),
        order: |a, b, _| a.view.model.cmp(&b.view.model),
        tone: |_| Tone::Dim,
    },
    Column {
        title: "DEVICE",
        width: 12,
        grows_to: 44,
        right: false,
        rank: 9,
        descending: false,
        text: device_text,
        order: |a, b, _| a.facts().device.cmp(&b.facts().device),
        tone: |_| Tone::Dim,
    },
    Column {
        title: "WEIGHTS+KV",
        width: 18,
        grows_to: 18,
        right: true,
        rank: 10,
        descending: true,
        text: memory_text,
        order: |a, b, _| taken_bytes(a).cmp(&taken_bytes(b)),
        tone: |_| Tone::Dim,
    },
    Column {
        title: "VERSION",
        width: 8,
        grows_to: 10,
        right: false,
        rank: 11,
        descending: false,
        text: |worker, _, _| worker.facts().version,
        order: |a, b, _| a.facts().version.cmp(&b.facts().version),
        tone: |_| Tone::Dim,
    },
];
