use inflight_kernels::cuda::{
    ATTENTION_KEY_TILE, AttentionParams, AttentionPlan, HalfDtype, KvStore, PlanShape, PlannedSequence,
    as_bytes, attention,
};
use proptest::prelude::*;

use crate::device::{Buffer, TestDevice};
use crate::tensor_cores::sum_error;
use crate::{SeededRng, e4m3, half, on_harness, store, unit};

/// Shape of a model's attention and of its KV pool, and of the attention plan.
#[derive(Debug, Clone)]
struct Shape {
    half: HalfDtype,
    store: KvStore,
    head_dim: usize,
    kv_heads: usize,
    group: usize,
    block_tokens: usize,
    window: Option<u32>,
    deterministic: bool,
    /// Whether sequences of several rows are decodes with drafts.
    decode: bool,
    /// Resident blocks of the plan, which decide how finely keys are split.
    slots: u32,
    partials: u32,
    /// Thread blocks of the grid.
    grid: u32,
    seed: u32,
}

/// Number of cached tokens and of new tokens of a sequence.
#[derive(Debug, Clone, Copy)]
struct Length {
    position: u32,
    tokens: u32,
}

fn shape() -> impl Strategy<Value = Shape> {
    let window = prop_oneof![2 => Just(None), 1 => (1u32..500).prop_map(Some)];
    let sizes = (prop::sample::select(vec![64usize, 128, 256]), 1usize..3, 1usize..=8, 0u32..7);
    let kernels = (any::<bool>(), any::<bool>());
    let plan = (kernels, prop::sample::select(vec![1u32, 3, 1000]), prop::sample::select(vec![0u32, 9, 64]));
    (half(), store(), sizes, window, plan, 1u32..12, any::<u32>()).prop_map(
        |(
            half,
            store,
            (head_dim, kv_heads, group, shift),
            window,
            ((deterministic, decode), slots, partials),
            grid,
            seed,
        )| {
            Shape {
                half,
                store,
                head_dim,
                kv_heads,
                group,
                block_tokens: (1 << shift).max(store.block_tokens_min() as usize),
                window,
                deterministic,
                decode,
                slots,
                partials,
                grid,
                seed,
            }
        },
    )
}

fn length() -> impl Strategy<Value = Length> {
    // Around the edges of blocks, tiles and splits, and up to eight splits.
    let edge = prop::sample::select(vec![0u32, 15, 16, 31, 32, 63, 64, 255, 256, 511, 512, 700, 1300, 2047]);
    let tokens = prop_oneof![4 => Just(1u32), 2 => 2u32..20, 1 => 20u32..70];
    (edge, 0u32..3, tokens).prop_map(|(edge, more, tokens)| Length { position: edge + more, tokens })
}

/// KV pool with some sequences, scattered over blocks; all other blocks are NaN.
struct Pool {
    shape: Shape,
    sequences: Vec<Vec<u32>>,
    /// Pool bytes; 0xff bytes are NaN as 16-bit elements and as scales.
    memory: Vec<u8>,
    layer_bytes: usize,
}

const LAYERS: usize = 2;
const LAYER: usize = 1;

impl Pool {
    fn new(shape: &Shape, lengths: &[Length], rng: &mut SeededRng) -> Self {
        let blocks_of = |l: &Length| (l.position + l.tokens).div_ceil(shape.block_tokens as u32) as usize;
        let needed: usize = lengths.iter().map(blocks_of).sum();
        let mut order = rng.shuffled(needed + 2).into_iter();
        let Shape { kv_heads, block_tokens, head_dim, store, half, .. } = *shape;
        let layer_bytes = store.layer_bytes(kv_heads as u64, block_tokens as u64, head_dim as u64) as usize;
        let mut pool = Self {
            shape: shape.clone(),
            sequences: lengths.iter().map(|l| order.by_ref().take(blocks_of(l)).collect()).collect(),
            memory: vec![0xff; (needed + 2) * LAYERS * layer_bytes],
            layer_bytes,
        };
        for (s, length) in lengths.iter().enumerate() {
            for position in 0..length.position + length.tokens {
                for head in 0..2 * kv_heads {
                    let (at, scale_at) = pool.at(s, position, head);
                    let line: Vec<u8> = match store {
                        KvStore::Half => rng
                            .halves(half, head_dim, 1.0)
                            .iter()
                            .flat_map(|bits| bits.to_ne_bytes())
                            .collect(),
                        KvStore::Fp8 => {
                            let scale = (0.2 + rng.value().abs()) / 448.0;
                            pool.memory[scale_at..scale_at + 4].copy_from_slice(&scale.to_ne_bytes());
                            // Random signs and mantissas, and exponents that matter beside the largest.
                            (0..head_dim)
                                .map(|_| (rng.word() % 0x7f) as u8 | (rng.word() >> 24) as u8 & 0x80)
                                .collect()
                        }
                    };
                    pool.memory[at..at + line.len()].copy_from_slice(&line);
                }
            }
        }
        pool
    }

    /// Returns the byte offsets of a position's elements and of its scale; key heads come before value heads.
    fn at(&self, sequence: usize, position: u32, head: usize) -> (usize, usize) {
        let Shape { block_tokens, head_dim, kv_heads, store, .. } = self.shape;
        let block = self.sequences[sequence][position as usize / block_tokens] as usize;
        let line = head * block_tokens + position as usize % block_tokens;
        let layer = (block * LAYERS + LAYER) * self.layer_bytes;
        let elements_bytes = 2 * kv_heads * block_tokens * head_dim;
        (layer + line * head_dim * store.unit() as usize, layer + elements_bytes + line * 4)
    }

    fn row(&self, sequence: usize, position: u32, head: usize) -> impl Iterator<Item = f64> + '_ {
        let (at, scale_at) = self.at(sequence, position, head);
        let Shape { half, store, .. } = self.shape;
        (0..self.shape.head_dim).map(move |i| match store {
            KvStore::Half => {
                let bytes = &self.memory[at + 2 * i..];
                f64::from(half.widen(u16::from_ne_bytes([bytes[0], bytes[1]])))
            }
            KvStore::Fp8 => {
                let scale = f32::from_ne_bytes(self.memory[scale_at..scale_at + 4].try_into().unwrap());
                let wide = e4m3::value(self.memory[at + i]) as f32 * scale;
                f64::from(half.widen(half.narrow(wide)))
            }
        })
    }

    /// Runs (sequence, first position, queries) as one batch and returns the bits of each row.
    fn run(&self, shape: &Shape, parts: &[(usize, u32, &[u16])]) -> Vec<Vec<u16>> {
        let device = TestDevice::new();
        let (heads, head_dim) = (shape.kv_heads * shape.group, shape.head_dim);
        let mut qkv = Vec::new();
        let mut tables = Vec::new();
        let mut sequences = Vec::new();
        let mut rows = 0;
        for (sequence, position, queries) in parts {
            let tokens = queries.len() / (heads * head_dim);
            sequences.push(PlannedSequence {
                row: rows,
                tokens: tokens as u32,
                position: *position,
                table: tables.len() as u32,
                decode: shape.decode,
            });
            rows += tokens as u32;
            // What a window has passed may be gone: nothing before the first tile of keys in sight is read.
            let low = shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
            let first = (low / ATTENTION_KEY_TILE * ATTENTION_KEY_TILE) as usize / shape.block_tokens;
            tables.extend(std::iter::repeat_n(u32::MAX >> 1, first));
            tables.extend_from_slice(&self.sequences[*sequence][first..]);
            for row in queries.chunks(heads * head_dim) {
                qkv.extend_from_slice(row);
                // Keys and values beside the queries must not be read.
                qkv.extend(std::iter::repeat_n(0xffff, 2 * shape.kv_heads * head_dim));
            }
        }
        let mut plan = AttentionPlan::default();
        let plan_shape = PlanShape {
            group: shape.group as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: head_dim as u32,
            window: shape.window,
            deterministic: shape.deterministic,
            slots: shape.slots,
            partials: shape.partials,
        };
        plan.make(&sequences, &plan_shape);
        let items: Vec<u8> = plan.items().iter().flat_map(as_bytes).copied().collect();
        let (qkv, kv, tables) = (device.upload(&qkv), device.upload(&self.memory), device.upload(&tables));
        let (items_at, count) =
            (device.upload_constant(&items), device.upload_constant(&[plan.items().len() as u32]));
        let out = device.alloc(rows as usize * heads * head_dim * 2);
        let partial_rows = shape.partials as usize * shape.kv_heads * 16;
        let (sums, tops) = (device.alloc(partial_rows * head_dim * 4), device.alloc(partial_rows * 8));
        let counters = device.upload(&vec![0u32; shape.partials as usize * shape.kv_heads]);
        let p = AttentionParams {
            qkv: qkv.address(),
            out: out.address(),
            kv: kv.address(),
            items: items_at.address(),
            item_count: count.address(),
            tables: tables.address(),
            partial_sums: sums.address(),
            partial_tops: tops.address(),
            counters: counters.address(),
            block_numbers: (LAYERS * self.layer_bytes) as u64 / shape.store.unit(),
            layer_offset: (LAYER * self.layer_bytes) as u64 / shape.store.unit(),
            heads: heads as u32,
            kv_heads: shape.kv_heads as u32,
            block_shift: shape.block_tokens.trailing_zeros(),
            window: shape.window.unwrap_or(0),
            stages: 0,
            scale: scale(head_dim) * std::f32::consts::LOG2_E,
        };
        unsafe {
            attention(&device, shape.half, shape.store, head_dim as u32, plan.is_mixed(), shape.grid, &p)
        }
        .unwrap();
        assert!(
            counters.read::<u32>(shape.partials as usize * shape.kv_heads).iter().all(|count| *count == 0)
        );
        bits_of(&out, rows as usize, heads * head_dim)
    }

    /// Returns the f64 reference of one query, and the error that tensor cores add to rounding.
    fn exact(
        &self,
        shape: &Shape,
        sequence: usize,
        position: u32,
        head: usize,
        query: &[u16],
    ) -> (Vec<f64>, f64) {
        let kv_head = head / shape.group;
        let low = shape.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let query: Vec<f64> = query.iter().map(|bits| f64::from(shape.half.widen(*bits))).collect();
        let scale = f64::from(scale(shape.head_dim));
        let mut largest_dot = 0.0f64;
        let scores: Vec<f64> = (low..=position)
            .map(|key| {
                let products: Vec<f64> =
                    self.row(sequence, key, kv_head).zip(&query).map(|(k, q)| k * q).collect();
                largest_dot = largest_dot.max(products.iter().map(|product| product.abs()).sum());
                products.iter().sum::<f64>() * scale
            })
            .collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|score| (score - top).exp()).sum();
        let mut out = vec![0.0; shape.head_dim];
        let mut largest_value = 0.0f64;
        for (key, score) in (low..=position).zip(&scores) {
            let weight = (score - top).exp() / total;
            let values = self.row(sequence, key, shape.kv_heads + kv_head);
            out.iter_mut().zip(values).for_each(|(out, value)| {
                *out += weight * value;
                largest_value = largest_value.max(value.abs());
            });
        }
        // An error of a score changes its weight, and the sum of all weights, by as much relatively.
        let of_scores = 2.0 * scale * sum_error(shape.head_dim, largest_dot) * largest_value;
        (out, of_scores + sum_error(scores.len(), largest_value))
    }
}

fn scale(head_dim: usize) -> f32 {
    (1.0 / (head_dim as f64).sqrt()) as f32
}

fn bits_of(out: &Buffer, rows: usize, width: usize) -> Vec<Vec<u16>> {
    out.read::<u16>(rows * width).chunks(width).map(<[u16]>::to_vec).collect()
}

#[test]
pub(crate) fn attention_over_a_ragged_batch_is_exact_to_rounding() {
    let batch = prop::collection::vec(length(), 0..4);
    on_harness(40, (shape(), batch), |(shape, lengths)| {
        let mut rng = SeededRng::new(shape.seed);
        let pool = Pool::new(&shape, &lengths, &mut rng);
        let width = shape.kv_heads * shape.group * shape.head_dim;
        // Queries long enough that some keys dominate.
        let queries: Vec<Vec<u16>> =
            lengths.iter().map(|l| rng.halves(shape.half, l.tokens as usize * width, 6.0)).collect();
        let parts: Vec<_> =
            lengths.iter().enumerate().map(|(s, l)| (s, l.position, queries[s].as_slice())).collect();
        let rows = pool.run(&shape, &parts);
        let mut row = 0;
        for (s, length) in lengths.iter().enumerate() {
            for i in 0..length.tokens as usize {
                // All heads of the first and last row, and one random head of the others.
                let edge = i == 0 || i + 1 == length.tokens as usize;
                let picked = rng.below(shape.kv_heads * shape.group);
                for head in 0..shape.kv_heads * shape.group {
                    if edge || head == picked {
                        let query = &queries[s][i * width + head * shape.head_dim..][..shape.head_dim];
                        let position = length.position + i as u32;
                        let (exact, tensor_cores) = pool.exact(&shape, s, position, head, query);
                        let got = &rows[row][head * shape.head_dim..][..shape.head_dim];
                        for (bits, exact) in got.iter().zip(&exact) {
                            let value = f64::from(shape.half.widen(*bits));
                            let error = (value - exact).abs();
                            prop_assert!(
                                error <= 2.0 * unit(shape.half) + tensor_cores,
                                "sequence {s}, row {i}, head {head}: {value} is not {exact}"
                            );
                        }
                    }
                }
                row += 1;
            }
        }
        Ok(())
    });
}

/// In deterministic mode a row has the same bits decoded, as a draft or as part of a chunk, alone or batched, with any key
/// splits. Outside of the deterministic mode the split length depends on the batch, and with it the bits.
#[test]
pub(crate) fn rows_have_the_same_bits_in_every_batch_and_split() {
    on_harness(20, (shape(), length(), length(), any::<u32>()), |(shape, length, other, key)| {
        let mut rng = SeededRng::new(shape.seed);
        let pool = Pool::new(&shape, &[length, other], &mut rng);
        let width = shape.kv_heads * shape.group * shape.head_dim;
        let queries = rng.halves(shape.half, length.tokens as usize * width, 6.0);
        let others = rng.halves(shape.half, other.tokens as usize * width, 6.0);
        let mut choose = SeededRng::new(key);
        let row = choose.below(length.tokens as usize);
        let query = &queries[row * width..(row + 1) * width];
        let position = length.position + row as u32;
        let alone = Shape { deterministic: true, slots: 1, partials: 0, grid: 1, ..shape.clone() };
        let reference = pool.run(&alone, &[(0, position, query)]).remove(0);
        let split = Shape { slots: 1000, partials: 64, deterministic: true, ..shape.clone() };
        let in_splits =
            pool.run(&split, &[(1, other.position, &others), (0, position, query)]).pop().unwrap();
        prop_assert_eq!(&in_splits, &reference, "with its keys in splits");
        let deterministic = Shape { deterministic: true, ..shape.clone() };
        let chunk = pool.run(&deterministic, &[(0, length.position, &queries), (1, other.position, &others)]);
        prop_assert_eq!(&chunk[row], &reference, "as part of a chunk");
        let decode = Shape { deterministic: true, decode: true, slots: 1, ..shape.clone() };
        let drafts = pool.run(&decode, &[(0, length.position, &queries), (1, other.position, &others)]);
        prop_assert_eq!(&drafts[row], &reference, "as a draft");
        // Prefill has its own reduction order, which chunking does not change.
        let plain = Shape { deterministic: false, decode: false, ..shape.clone() };
        let long = (16 / shape.group + 1) as u32;
        if length.tokens > 2 * long {
            let whole = pool.run(&plain, &[(0, length.position, &queries)]);
            let first = long + choose.below((length.tokens - 2 * long + 1) as usize) as u32;
            let tail = &queries[first as usize * width..];
            let chunk = pool.run(&plain, &[(1, other.position, &others), (0, length.position + first, tail)]);
            let chunk = &chunk[other.tokens as usize..];
            prop_assert_eq!(chunk, &whole[first as usize..], "as a chunk of a prefill");
        }
        Ok(())
    });
}

/// Many elements over many splits, as rounding hides most changes of the merge order.
#[test]
pub(crate) fn rows_have_the_same_bits_for_any_key_splits() {
    if !TestDevice::available() {
        return;
    }
    for seed in 0..4 {
        let shape = Shape {
            half: HalfDtype::F16,
            store: KvStore::Half,
            head_dim: 128,
            kv_heads: 4,
            group: 8,
            block_tokens: 16,
            window: None,
            deterministic: true,
            decode: false,
            slots: 1,
            partials: 0,
            grid: 3,
            seed,
        };
        let mut rng = SeededRng::new(seed);
        let pool = Pool::new(&shape, &[Length { position: 2047, tokens: 1 }], &mut rng);
        // Scores so close that all splits have similar weights.
        let query = rng.halves(shape.half, shape.kv_heads * shape.group * shape.head_dim, 1.0);
        let alone = pool.run(&shape, &[(0, 2047, &query)]);
        let split = Shape { slots: 1000, partials: 64, ..shape.clone() };
        assert_eq!(pool.run(&split, &[(0, 2047, &query)]), alone, "seed {seed}");
    }
}

#[test]
fn unwritten_keys_make_the_result_nan() {
    if !TestDevice::available() {
        return;
    }
    let shape = Shape {
        half: HalfDtype::Bf16,
        store: KvStore::Half,
        head_dim: 64,
        kv_heads: 1,
        group: 2,
        block_tokens: 16,
        window: None,
        deterministic: false,
        decode: false,
        slots: 1,
        partials: 0,
        grid: 1,
        seed: 5,
    };
    let mut rng = SeededRng::new(5);
    let mut pool = Pool::new(&shape, &[Length { position: 40, tokens: 1 }], &mut rng);
    let (at, _) = pool.at(0, 17, 0);
    pool.memory[at..at + 2].fill(0xff);
    let query = rng.halves(shape.half, 128, 1.0);
    let rows = pool.run(&shape, &[(0, 40, &query)]);
    assert!(rows[0].iter().any(|bits| shape.half.widen(*bits).is_nan()));
}
