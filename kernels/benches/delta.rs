//! Decode steps of the gated delta rule beside its plain recurrence: `cargo bench -p inflight-kernels --bench delta -- [THREADS]`.
//!
//! The plain recurrence reads and writes the state of each head at each token. The rule of this crate reads it, writes a row of a log, and
//! writes the state at every sixteenth token. Both are computed over layers of the 9B shape of Qwen3.5 whose states exceed all caches, in
//! turns, with the convolution before and the norm and the gates behind.
//!
//! The rule's states are in huge pages. `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` puts those of the plain recurrence there, too.

use std::error::Error;
use std::time::{Duration, Instant};

use inflight_kernels::cpu::{
    CELL, DeltaInputs, DeltaPlace, DeltaSequence, DeltaShape, DeltaWeights, Isa, KvPool, Pool, delta_rule,
};

const LAYERS: usize = 24;
/// Steps of a measurement, of which one writes the states, and measurements of each.
const STEPS: usize = CELL;
const ROUNDS: usize = 12;
const SHAPE: DeltaShape = DeltaShape {
    key_heads: 16,
    value_heads: 32,
    tiled: false,
    key_dim: 128,
    value_dim: 128,
    taps: 4,
    drafts: 8,
};

/// e^x to some units in the last place, for x of moderate size; a loop over it is vectorized.
#[inline(always)]
fn exp(x: f32) -> f32 {
    let scaled = x * std::f32::consts::LOG2_E;
    // Adding and subtracting 1.5 * 2^23 rounds to an integer.
    let whole = (scaled + 12_582_912.0) - 12_582_912.0;
    let part = (scaled - whole) * std::f32::consts::LN_2;
    let polynomial = [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let value = polynomial.into_iter().fold(1.0 / 720.0, |sum, factor| sum * part + factor);
    f32::from_bits((value.to_bits() as i32 + ((whole as i32) << 23)) as u32)
}

#[inline(always)]
fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Convolution of `out.len()` channels with the inputs before, [taps - 1, channels], which move on by a position, and its activation.
#[inline(always)]
fn convolve(weights: &[f32], stride: usize, before: &mut [f32], input: &[f32], out: &mut [f32]) {
    let width = out.len();
    for (at, out) in out.iter_mut().enumerate() {
        let mut sum = weights[3 * stride + at] * input[at];
        for tap in 0..3 {
            sum += weights[tap * stride + at] * before[tap * width + at];
        }
        *out = silu(sum);
    }
    before.copy_within(width..3 * width, 0);
    before[2 * width..3 * width].copy_from_slice(&input[..width]);
}

#[inline(always)]
fn scale_to(x: &mut [f32], factor: f32, eps: f32) {
    // Eight sums, so that the loop is vectorized.
    let mut sums = [0.0f32; 8];
    for eight in x.chunks_exact(8) {
        for (sum, x) in sums.iter_mut().zip(eight) {
            *sum += x * x;
        }
    }
    let scale = factor / (sums.iter().sum::<f32>() + eps).sqrt();
    x.iter_mut().for_each(|x| *x *= scale);
}

/// Inputs and state of a value head, and of its key head's queries and keys.
struct PlainHead<'a> {
    state: &'a mut [f32],
    /// Kept inputs of the convolution of the value; [taps - 1, value_dim].
    before: &'a mut [f32],
    value: &'a [f32],
    queries: &'a [f32],
    keys: &'a [f32],
    gates: &'a [f32],
    output: &'a mut [f32],
}

/// One step of a head by the plain recurrence: S <- d S + k u^T with u = beta (v - d S^T k), o = S^T q, then norm and gate.
#[inline(always)]
fn plain_head(head: &mut PlainHead<'_>, convolution: &[f32], norm: &[f32], [decay, beta]: [f32; 2]) {
    let width = head.output.len();
    let (mut value, mut update) = ([0.0f32; 128], [0.0f32; 128]);
    convolve(convolution, SHAPE.channels(), head.before, head.value, &mut value[..width]);
    for (row, k) in head.state.chunks_exact(width).zip(head.keys) {
        for (known, s) in update[..width].iter_mut().zip(row) {
            *known += s * k;
        }
    }
    for (update, value) in update[..width].iter_mut().zip(&value[..width]) {
        *update = beta * (value - decay * *update);
    }
    head.output.fill(0.0);
    for ((row, k), q) in head.state.chunks_exact_mut(width).zip(head.keys).zip(head.queries) {
        for ((s, update), output) in row.iter_mut().zip(&update[..width]).zip(head.output.iter_mut()) {
            *s = decay * *s + k * update;
            *output += q * *s;
        }
    }
    scale_to(head.output, (width as f32).sqrt(), 1e-6);
    for ((output, norm), gate) in head.output.iter_mut().zip(norm).zip(head.gates) {
        *output *= norm * silu(*gate);
    }
}

/// Queries or keys of a key head: convolution, and division by their length.
#[inline(always)]
fn plain_keys(convolution: &[f32], before: &mut [f32], input: &[f32], out: &mut [f32]) {
    convolve(convolution, SHAPE.channels(), before, input, out);
    scale_to(out, 1.0, 1e-6);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn plain_head_avx2(head: &mut PlainHead<'_>, convolution: &[f32], norm: &[f32], scalars: [f32; 2]) {
    plain_head(head, convolution, norm, scalars);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn plain_keys_avx2(convolution: &[f32], before: &mut [f32], input: &[f32], out: &mut [f32]) {
    plain_keys(convolution, before, input, out);
}

fn has_avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 31 + seed * 17) % 61) as f32 * 0.01 - 0.3).collect()
}

/// Seconds of a step of all layers by this crate's rule, over STEPS of them.
struct Rule {
    pools: Vec<KvPool>,
    places: Vec<DeltaPlace>,
    blocks: usize,
    position: usize,
}

impl Rule {
    fn new(sequences: usize) -> Result<Self, Box<dyn Error>> {
        let pieces = [SHAPE.state_pieces(), SHAPE.log_pieces()].concat();
        let bytes = pieces.iter().copied().max().unwrap_or(0) as usize;
        let pools =
            (0..LAYERS).map(|_| KvPool::new(bytes, sequences * pieces.len())).collect::<Result<_, _>>()?;
        let places = (0..pieces.len()).map(|part| DeltaPlace { part, offset: 0 }).collect();
        Ok(Self { pools, places, blocks: pieces.len(), position: 0 })
    }

    fn run(&mut self, pool: &Pool, isa: Isa, sequences: usize) -> f64 {
        let (channels, values, heads) = (SHAPE.channels(), SHAPE.values(), SHAPE.value_heads);
        let [convolution, norm] = [numbers(SHAPE.taps * channels, 1), numbers(SHAPE.value_dim, 2)];
        let (decay, bias) = (vec![0.5; heads], vec![0.1; heads]);
        let weights = DeltaWeights {
            convolution: &convolution,
            decay: &decay,
            decay_bias: &bias,
            norm: &norm,
            norm_eps: 1e-6,
        };
        let (gates, scalars) = (numbers(sequences * values, 3), numbers(sequences * 2 * heads, 4));
        let blocks: Vec<u32> = (0..(sequences * self.blocks) as u32).collect();
        let mut outputs = vec![0.0; sequences * values];
        let begun = Instant::now();
        for step in 0..STEPS {
            let mut qkv = numbers(sequences * channels, step);
            for states in &mut self.pools {
                let rows: Vec<DeltaSequence<'_>> = (0..sequences)
                    .map(|nth| DeltaSequence {
                        rows: nth..nth + 1,
                        position: self.position,
                        drafts: 0,
                        blocks: &blocks[nth * self.blocks..(nth + 1) * self.blocks],
                    })
                    .collect();
                let mut inputs = DeltaInputs { qkv: &mut qkv, gates: &gates, scalars: &scalars };
                delta_rule(
                    pool,
                    isa,
                    &SHAPE,
                    &weights,
                    &mut inputs,
                    &rows,
                    states,
                    &self.places,
                    &mut outputs,
                );
            }
            self.position += 1;
        }
        begun.elapsed().as_secs_f64() / STEPS as f64
    }
}

/// Layers by the plain recurrence.
struct Plain {
    /// [layers, sequences, value_heads, key_dim, value_dim]
    states: Vec<f32>,
    /// Kept inputs of the convolution; [layers, sequences, taps - 1, channels], of each head together.
    before: Vec<f32>,
}

/// Pointer to memory of which each thread writes a part of its own.
struct Shared(*mut f32);
// SAFETY: each unit writes parts of its own.
unsafe impl Sync for Shared {}

impl Shared {
    /// # Safety
    /// The part is within the allocation, and no other thread uses it.
    #[allow(clippy::mut_from_ref, reason = "parts are disjoint")]
    unsafe fn part(&self, first: usize, count: usize) -> &mut [f32] {
        // SAFETY: as the caller guarantees.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(first), count) }
    }
}

impl Plain {
    fn new(sequences: usize) -> Self {
        let heads = sequences * SHAPE.value_heads;
        Self {
            states: vec![0.0; LAYERS * heads * SHAPE.key_dim * SHAPE.value_dim],
            before: vec![0.0; LAYERS * sequences * 3 * SHAPE.channels()],
        }
    }

    /// Returns the seconds of a step of all layers.
    fn run(&mut self, pool: &Pool, sequences: usize) -> f64 {
        let DeltaShape { key_heads, value_heads: heads, key_dim, value_dim: width, .. } = SHAPE;
        let (channels, values, size) = (SHAPE.channels(), SHAPE.values(), key_dim * width);
        let [convolution, norm] = [numbers(SHAPE.taps * channels, 1), numbers(width, 2)];
        let (gates, scalars) = (numbers(sequences * values, 3), numbers(sequences * 2 * heads, 4));
        let mut outputs = vec![0.0f32; sequences * values];
        let mut keys = vec![0.0f32; sequences * 2 * key_heads * key_dim];
        let avx2 = has_avx2();
        let begun = Instant::now();
        for step in 0..STEPS {
            let qkv = numbers(sequences * channels, step);
            let of_layers = self.states.chunks_exact_mut(sequences * heads * size);
            for (layer, before) in of_layers.zip(self.before.chunks_exact_mut(sequences * 3 * channels)) {
                let [states, before, outputs, keys] =
                    [layer, before, &mut outputs[..], &mut keys[..]].map(|all| Shared(all.as_mut_ptr()));
                let (states, before, outputs, keys) = (&states, &before, &outputs, &keys);
                let (qkv, gates, scalars) = (&qkv, &gates, &scalars);
                pool.split(sequences * 2 * key_heads, 1, &|units| {
                    for unit in units {
                        let (sequence, first) = (unit / (2 * key_heads), unit % (2 * key_heads) * key_dim);
                        let input = &qkv[sequence * channels + first..][..key_dim];
                        // SAFETY: each unit has its own part.
                        unsafe {
                            let before = before.part(3 * (sequence * channels + first), 3 * key_dim);
                            let out = keys.part(unit * key_dim, key_dim);
                            if avx2 {
                                #[cfg(target_arch = "x86_64")]
                                plain_keys_avx2(&convolution[first..], before, input, out);
                            } else {
                                plain_keys(&convolution[first..], before, input, out);
                            }
                        }
                    }
                });
                pool.split(sequences * heads, 1, &|units| {
                    for unit in units {
                        let (sequence, head) = (unit / heads, unit % heads);
                        let first = 2 * key_heads * key_dim + head * width;
                        let key_head = head / (heads / key_heads);
                        let key = |nth: usize| (sequence * 2 * key_heads + nth) * key_dim;
                        // SAFETY: each unit has its own part; queries and keys are complete, and only read.
                        unsafe {
                            let mut head_of = PlainHead {
                                state: states.part(unit * size, size),
                                before: before.part(3 * (sequence * channels + first), 3 * width),
                                value: &qkv[sequence * channels + first..][..width],
                                queries: std::slice::from_raw_parts(keys.0.add(key(key_head)), key_dim),
                                keys: std::slice::from_raw_parts(
                                    keys.0.add(key(key_heads + key_head)),
                                    key_dim,
                                ),
                                gates: &gates[unit * width..][..width],
                                output: outputs.part(unit * width, width),
                            };
                            let of_row = &scalars[sequence * 2 * heads..];
                            let beta = 1.0 / (1.0 + exp(-of_row[head]));
                            let decay = exp(-0.5 * exp(of_row[heads + head]).ln_1p());
                            if avx2 {
                                #[cfg(target_arch = "x86_64")]
                                plain_head_avx2(&mut head_of, &convolution[first..], &norm, [decay, beta]);
                            } else {
                                plain_head(&mut head_of, &convolution[first..], &norm, [decay, beta]);
                            }
                        }
                    }
                });
            }
        }
        begun.elapsed().as_secs_f64() / STEPS as f64
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let available = std::thread::available_parallelism()?.get();
    let threads = arguments.next().map_or(Ok(available), |threads| threads.parse())?;
    let (pool, isa) = (Pool::new(threads)?, Isa::detect());
    println!("{} threads, {}, {LAYERS} layers", threads, isa.name());
    for sequences in [1, 4, 16] {
        let mut rule = Rule::new(sequences)?;
        let mut plain = Plain::new(sequences);
        let mut ratios = Vec::new();
        let (mut of_rule, mut of_plain) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let (rule, plain) = (rule.run(&pool, isa, sequences), plain.run(&pool, sequences));
            // The first round touches the memory.
            if round > 0 {
                ratios.push(rule / plain);
                of_rule.push(rule);
                of_plain.push(plain);
            }
        }
        [&mut ratios, &mut of_rule, &mut of_plain].into_iter().for_each(|all| all.sort_by(f64::total_cmp));
        let ms = |all: &[f64]| Duration::from_secs_f64(all[ROUNDS / 2]).as_secs_f64() * 1e3;
        println!(
            "{sequences} sequences: {:.2} ms a step, plain recurrence {:.2} ms, ratio {:.2} ({:.2} to {:.2})",
            ms(&of_rule),
            ms(&of_plain),
            ratios[ROUNDS / 2],
            ratios[0],
            ratios[ROUNDS - 1]
        );
    }
    Ok(())
}
