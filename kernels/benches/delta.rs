//! Decode steps of the gated delta rule beside its plain recurrence: `cargo bench -p inflight-kernels --bench delta -- [THREADS]`.
//!
//! The plain recurrence reads and writes the state of each head at each token. The rule of this crate reads it, writes a row of a log, and
//! writes the state at every sixteenth token. Both are computed over layers of the 9B shape of Qwen3.5 whose states exceed all caches, in
//! turns; the plain one without convolution, norm and gates, which the rule includes.

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

/// One step of a head by the plain recurrence: S <- d S + k u^T with u = beta (v - d S^T k), o = S^T q.
#[inline(always)]
fn plain_head(
    state: &mut [f32],
    [query, key, value]: [&[f32]; 3],
    [decay, beta]: [f32; 2],
    output: &mut [f32],
) {
    let width = value.len();
    let mut update = [0.0f32; 128];
    for (row, k) in state.chunks_exact(width).zip(key) {
        for (known, s) in update[..width].iter_mut().zip(row) {
            *known += s * k;
        }
    }
    for (update, value) in update[..width].iter_mut().zip(value) {
        *update = beta * (value - decay * *update);
    }
    output.fill(0.0);
    for ((row, k), q) in state.chunks_exact_mut(width).zip(key).zip(query) {
        for ((s, update), output) in row.iter_mut().zip(&update[..width]).zip(output.iter_mut()) {
            *s = decay * *s + k * update;
            *output += q * *s;
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn plain_head_avx2(state: &mut [f32], inputs: [&[f32]; 3], scalars: [f32; 2], output: &mut [f32]) {
    plain_head(state, inputs, scalars, output);
}

fn plain(state: &mut [f32], inputs: [&[f32]; 3], scalars: [f32; 2], output: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has the features.
        return unsafe { plain_head_avx2(state, inputs, scalars, output) };
    }
    plain_head(state, inputs, scalars, output);
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

/// Seconds of a step of all layers by the plain recurrence.
fn run_plain(pool: &Pool, states: &mut [f32], sequences: usize) -> f64 {
    struct Shared(*mut f32, *mut f32);
    // SAFETY: each unit writes a state and an output of its own.
    unsafe impl Sync for Shared {}
    let (heads, size, width) = (SHAPE.value_heads, SHAPE.key_dim * SHAPE.value_dim, SHAPE.value_dim);
    let mut outputs = vec![0.0f32; sequences * SHAPE.values()];
    let begun = Instant::now();
    for step in 0..STEPS {
        let qkv = numbers(sequences * SHAPE.channels(), step);
        for layer in states.chunks_exact_mut(sequences * heads * size) {
            let shared = Shared(layer.as_mut_ptr(), outputs.as_mut_ptr());
            let shared = &shared;
            pool.split(sequences * heads, 1, &|units| {
                for unit in units {
                    // SAFETY: units are below the number of states and outputs, and each runs once.
                    let (state, output) = unsafe {
                        (
                            std::slice::from_raw_parts_mut(shared.0.add(unit * size), size),
                            std::slice::from_raw_parts_mut(shared.1.add(unit * width), width),
                        )
                    };
                    let row = &qkv[unit / heads * SHAPE.channels()..];
                    let inputs = [&row[..128], &row[128..256], &row[256..384]];
                    plain(state, inputs, [0.9, 0.5], output);
                }
            });
        }
    }
    begun.elapsed().as_secs_f64() / STEPS as f64
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let available = std::thread::available_parallelism()?.get();
    let threads = arguments.next().map_or(Ok(available), |threads| threads.parse())?;
    let (pool, isa) = (Pool::new(threads)?, Isa::detect());
    println!("{} threads, {}, {LAYERS} layers", threads, isa.name());
    for sequences in [1, 4, 16] {
        let mut rule = Rule::new(sequences)?;
        let mut states =
            vec![0.0f32; LAYERS * sequences * SHAPE.value_heads * SHAPE.key_dim * SHAPE.value_dim];
        let mut ratios = Vec::new();
        let (mut of_rule, mut of_plain) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let (rule, plain) = (rule.run(&pool, isa, sequences), run_plain(&pool, &mut states, sequences));
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
