//! Attention over KV pools of the sizes that GPUs have, with blocks in order and shuffled: decoding as a share of read
//! bandwidth, prefill in TFLOP/s.

use inflight_kernels::cuda::{
    AttentionParams, AttentionPlan, HalfDtype, KvStore, PlanShape, PlannedSequence, as_bytes, attention,
    attention_blocks,
};

use super::{Bench, Timing};
use crate::SeededRng;
use crate::device::Buffer;

const HEAD_DIM: u32 = 128;
const KV_HEADS: u32 = 8;
const BLOCK_TOKENS: u32 = 16;
/// Partial results, as many as the runtime has.
const PARTIALS: u32 = 1024;
/// Bytes that stay free for buffers beside the pool.
const RESERVE_BYTES: usize = 4 << 30;

/// Attention of a model.
#[derive(Clone, Copy)]
struct Model {
    name: &'static str,
    layers: u32,
    heads: u32,
}

const MODELS: [Model; 2] = [
    Model { name: "llama-3.1-8b", layers: 32, heads: 32 },
    Model { name: "qwen3-0.6b", layers: 28, heads: 16 },
];

impl Model {
    fn layer_bytes(self, store: KvStore) -> usize {
        store.layer_bytes(KV_HEADS.into(), BLOCK_TOKENS.into(), HEAD_DIM.into()) as usize
    }

    fn block_bytes(self, store: KvStore) -> usize {
        self.layers as usize * self.layer_bytes(store)
    }

    /// Elements of a row of queries, keys and values.
    fn row(self) -> usize {
        ((self.heads + 2 * KV_HEADS) * HEAD_DIM) as usize
    }
}

/// Batch of sequences of equal lengths.
#[derive(Clone, Copy)]
struct Batch {
    sequences: u32,
    /// Cached tokens of each.
    context: u32,
    /// New tokens of each.
    tokens: u32,
}

impl Batch {
    fn blocks(self) -> u32 {
        self.sequences * (self.context + self.tokens).div_ceil(BLOCK_TOKENS)
    }

    /// Operations of one layer: both products of every query with every key that it sees.
    fn flops(self, model: Model) -> f64 {
        let (tokens, context) = (f64::from(self.tokens), f64::from(self.context));
        let pairs = f64::from(self.sequences) * tokens * (context + (tokens + 1.0) / 2.0);
        4.0 * pairs * f64::from(model.heads * HEAD_DIM)
    }

    /// Bytes of keys and values of one layer that it must read.
    fn bytes(self, model: Model, store: KvStore) -> f64 {
        let per_token = model.layer_bytes(store) as f64 / f64::from(BLOCK_TOKENS);
        f64::from(self.sequences * (self.context + self.tokens)) * per_token
    }
}

/// Order in which sequences take blocks of the pool.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    Consecutive,
    Shuffled,
}

impl Order {
    fn name(self) -> &'static str {
        match self {
            Self::Consecutive => "consecutive",
            Self::Shuffled => "shuffled",
        }
    }
}

/// KV pool of a model in device memory.
struct Pool {
    model: Model,
    store: KvStore,
    memory: Buffer,
    blocks: u32,
    /// All blocks in random order.
    shuffled: Vec<u32>,
}

impl Pool {
    /// Allocates `bytes`, or what the GPU has free if that is less.
    fn new(bench: &Bench, model: Model, store: KvStore, bytes: usize) -> Self {
        let bytes = bytes.min(bench.free().saturating_sub(RESERVE_BYTES.min(bench.free() / 2)));
        let blocks = bytes / model.block_bytes(store);
        let memory = match store {
            KvStore::Half => bench.random(blocks * model.block_bytes(store), 1.0),
            // Small scales as well as elements: 0x3b bytes are 1.375 in e4m3 and 0.00286 in f32.
            KvStore::Fp8 => bench.tiled(blocks * model.block_bytes(store), &[0x3bu8; 1 << 16]),
        };
        let shuffled = SeededRng::new(11).shuffled(blocks);
        Self { model, store, memory, blocks: blocks as u32, shuffled }
    }

    /// Measures all layers' attention over a batch in one pass; the times of one layer. `None` if it does not fit.
    fn measure(&self, bench: &Bench, batch: Batch, order: Order, layers: u32) -> Option<Timing> {
        if batch.blocks() > self.blocks {
            return None;
        }
        let tables: Vec<u32> = match order {
            Order::Consecutive => (0..batch.blocks()).collect(),
            Order::Shuffled => self.shuffled[..batch.blocks() as usize].to_vec(),
        };
        let each = batch.blocks() / batch.sequences;
        let sequences: Vec<PlannedSequence> = (0..batch.sequences)
            .map(|s| PlannedSequence {
                row: s * batch.tokens,
                tokens: batch.tokens,
                position: batch.context,
                table: s * each,
                decode: false,
            })
            .collect();
        let stream = &bench.overlapping;
        let profile = bench.gpu.profile;
        let mut plan = AttentionPlan::default();
        let shape = PlanShape {
            group: self.model.heads / KV_HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            window: None,
            deterministic: false,
            slots: attention_blocks(&profile, HEAD_DIM, self.store, false),
            partials: PARTIALS,
        };
        plan.make(&sequences, &shape);
        let blocks = attention_blocks(&profile, HEAD_DIM, self.store, plan.is_mixed());
        let items: Vec<u8> = plan.items().iter().flat_map(as_bytes).copied().collect();
        let device = &bench.device;
        let rows = (batch.sequences * batch.tokens) as usize;
        let qkv = bench.random(rows * self.model.row() * 2, 1.0);
        let out = device.alloc(rows * (self.model.heads * HEAD_DIM) as usize * 2);
        let (items, tables) = (device.upload(&items), device.upload(&tables));
        let item_count = device.upload(&[plan.items().len() as u32]);
        let partial_rows = (PARTIALS * KV_HEADS * 16) as usize;
        let sums = device.alloc(partial_rows * HEAD_DIM as usize * 4);
        let tops = device.alloc(partial_rows * 8);
        let counters = device.upload(&vec![0u32; (PARTIALS * KV_HEADS) as usize]);
        let p = AttentionParams {
            qkv: qkv.address(),
            out: out.address(),
            kv: self.memory.address(),
            items: items.address(),
            item_count: item_count.address(),
            tables: tables.address(),
            partial_sums: sums.address(),
            partial_tops: tops.address(),
            counters: counters.address(),
            block_numbers: self.model.block_bytes(self.store) as u64 / self.store.unit(),
            layer_offset: 0,
            heads: self.model.heads,
            kv_heads: KV_HEADS,
            block_shift: BLOCK_TOKENS.trailing_zeros(),
            window: 0,
            stages: 0,
            scale: (1.0 / f64::from(HEAD_DIM).sqrt() * std::f64::consts::LOG2_E) as f32,
        };
        let layer = self.model.layer_bytes(self.store) as u64 / self.store.unit();
        let all = bench.measure(stream, || {
            for index in 0..layers {
                let p = AttentionParams { layer_offset: u64::from(index) * layer, ..p };
                let (half, mixed) = (HalfDtype::Bf16, plan.is_mixed());
                unsafe { attention(stream, half, self.store, HEAD_DIM, mixed, blocks, &p) }.unwrap();
            }
        });
        Some(Timing { median: all.median / f64::from(layers), ..all })
    }

    /// Returns the JSON fields that name a measurement.
    fn label(&self, kernel: &str, batch: Batch, order: Order) -> String {
        let pool = f64::from(self.blocks) * self.model.block_bytes(self.store) as f64 / 1e9;
        format!(
            "\"kernel\": \"{kernel}\", \"model\": \"{}\", \"fp8\": {}, \"pool_gb\": {pool:.0}, \"blocks\": \"{}\", \
             \"sequences\": {}, \"context\": {}",
            self.model.name,
            self.store == KvStore::Fp8,
            order.name(),
            batch.sequences,
            batch.context
        )
    }

    fn print_decode(&self, bench: &Bench, batch: Batch, order: Order) {
        let label = self.label("attention_decode", batch, order);
        // All layers, so that one's keys and values are no longer in the cache when it is its turn again.
        match self.measure(bench, batch, order, self.model.layers) {
            Some(timing) => println!(
                "{{{label}, {}, {}}}",
                timing.fields(1),
                bench.rate(batch.bytes(self.model, self.store), timing.median)
            ),
            None => println!("{{{label}, \"skipped\": \"it does not fit\"}}"),
        }
    }
}

#[test]
#[ignore = "measures a GPU; run by the GPU suite"]
fn decode_attention_as_a_share_of_bandwidth() {
    let Some(bench) = Bench::new() else { return };
    for (model, gigabytes) in [(MODELS[0], 20), (MODELS[0], 110), (MODELS[1], 20)] {
        let pool = Pool::new(&bench, model, KvStore::Half, gigabytes * 1_000_000_000);
        for context in [1024, 4096, 32_768] {
            for sequences in [1, 8, 64, 256] {
                for order in [Order::Consecutive, Order::Shuffled] {
                    pool.print_decode(&bench, Batch { sequences, context: context - 1, tokens: 1 }, order);
                }
            }
        }
    }
    let pool = Pool::new(&bench, MODELS[0], KvStore::Fp8, 20_000_000_000);
    for context in [1024, 4096] {
        pool.print_decode(&bench, Batch { sequences: 64, context: context - 1, tokens: 1 }, Order::Shuffled);
    }
}

#[test]
#[ignore = "measures a GPU; run by the GPU suite"]
fn prefill_attention_in_operations_per_second() {
    let Some(bench) = Bench::new() else { return };
    for model in MODELS {
        let pool = Pool::new(&bench, model, KvStore::Half, 8_000_000_000);
        // Whole prompts, and a chunk behind a long one.
        for (context, tokens) in [(0, 1024), (0, 8192), (0, 32_768), (24_576, 8192)] {
            let batch = Batch { sequences: 1, context, tokens };
            let label = pool.label("attention_prefill", batch, Order::Shuffled);
            match pool.measure(&bench, batch, Order::Shuffled, 2) {
                Some(timing) => println!(
                    "{{{label}, \"tokens\": {tokens}, {}, \"tflops\": {:.1}}}",
                    timing.fields(1),
                    batch.flops(model) / timing.median / 1e12
                ),
                None => println!("{{{label}, \"tokens\": {tokens}, \"skipped\": \"it does not fit\"}}"),
            }
        }
    }
}
