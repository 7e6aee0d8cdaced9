//! The gated delta rule against its recurrence in f64, in chunks, with drafts and beside other sequences.

use super::*;
use crate::test_size::size;
use proptest::prelude::*;

/// Weights of a layer.
#[derive(Clone)]
struct Weights {
    convolution: Vec<f32>,
    decay: Vec<f32>,
    decay_bias: Vec<f32>,
    norm: Vec<f32>,
    norm_eps: f32,
}

impl Weights {
    fn borrowed(&self) -> DeltaWeights<'_> {
        DeltaWeights {
            convolution: &self.convolution,
            decay: &self.decay,
            decay_bias: &self.decay_bias,
            norm: &self.norm,
            norm_eps: self.norm_eps,
        }
    }
}

/// Sequence of random inputs, and what the recurrence makes of them in f64.
struct Case {
    shape: DeltaShape,
    weights: Weights,
    qkv: Vec<f32>,
    gates: Vec<f32>,
    scalars: Vec<f32>,
    outputs: Vec<f64>,
}

fn random(seed: u32, count: usize) -> impl Iterator<Item = f32> {
    (0..count as u32).map(move |i| crate::philox4x32([i, 0, 0, 0], [seed, 7])[0] as f32 / 2f32.powi(31) - 1.0)
}

impl Case {
    fn new(seed: u32, shape: DeltaShape, rows: usize) -> Self {
        let heads = shape.value_heads;
        let weights = Weights {
            convolution: random(seed, shape.taps * shape.channels()).collect(),
            decay: random(seed ^ 1, heads).map(|x| (0.3 * x + 0.31).abs()).collect(),
            decay_bias: random(seed ^ 2, heads).collect(),
            norm: random(seed ^ 3, shape.value_dim).collect(),
            norm_eps: 1e-6,
        };
        let mut case = Self {
            shape,
            weights,
            qkv: random(seed ^ 4, rows * shape.channels()).collect(),
            gates: random(seed ^ 5, rows * shape.values()).collect(),
            scalars: random(seed ^ 6, rows * 2 * heads).map(|x| 3.0 * x).collect(),
            outputs: Vec::new(),
        };
        case.outputs = case.recurrence(rows);
        case
    }

    /// Computes the rule position by position, with the state at each.
    fn recurrence(&self, rows: usize) -> Vec<f64> {
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, taps, .. } = self.shape;
        let channels = self.shape.channels();
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let convolved = |row: usize, channel: usize| {
            let tap = |tap: usize| {
                let from = (row + tap).checked_sub(taps - 1)?;
                let weight = self.weights.convolution[tap * channels + channel];
                Some(f64::from(weight) * f64::from(self.qkv[from * channels + channel]))
            };
            silu((0..taps).filter_map(tap).sum())
        };
        let mut outputs = vec![0.0; rows * self.shape.values()];
        for head in 0..value_heads {
            let key_head = self.shape.key_head(head);
            let mut state = vec![0.0f64; key_dim * value_dim];
            for row in 0..rows {
                let unit = |first: usize, scale: f64| {
                    let x: Vec<f64> = (0..key_dim).map(|i| convolved(row, first + i)).collect();
                    let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    x.into_iter().map(|x| x / length * scale).collect::<Vec<_>>()
                };
                let query = unit(key_head * key_dim, 1.0 / (key_dim as f64).sqrt());
                let key = unit((key_heads + key_head) * key_dim, 1.0);
                let scalar = |at: usize| f64::from(self.scalars[row * 2 * value_heads + at]);
                let beta = 1.0 / (1.0 + (-scalar(head)).exp());
                let input = scalar(value_heads + head) + f64::from(self.weights.decay_bias[head]);
                let decay = (-f64::from(self.weights.decay[head]) * input.exp().ln_1p()).exp();
                let mut output = vec![0.0; value_dim];
                for (column, output) in output.iter_mut().enumerate() {
                    let value = convolved(row, 2 * key_heads * key_dim + head * value_dim + column);
                    let mut known = 0.0;
                    for i in 0..key_dim {
                        state[i * value_dim + column] *= decay;
                        known += state[i * value_dim + column] * key[i];
                    }
                    let update = beta * (value - known);
                    for i in 0..key_dim {
                        state[i * value_dim + column] += key[i] * update;
                        *output += state[i * value_dim + column] * query[i];
                    }
                }
                let mean = output.iter().map(|x| x * x).sum::<f64>() / value_dim as f64;
                let scale = 1.0 / (mean + f64::from(self.weights.norm_eps)).sqrt();
                for (column, output) in output.iter().enumerate() {
                    let at = row * self.shape.values() + head * value_dim + column;
                    let weight = f64::from(self.weights.norm[column]);
                    outputs[at] = output * scale * weight * silu(f64::from(self.gates[at]));
                }
            }
        }
        outputs
    }
}

/// Pieces of a state in blocks of one piece each, and the blocks of sequence `nth` of `count`.
fn places(shape: &DeltaShape) -> (usize, Vec<DeltaPlace>) {
    let pieces = [shape.state_pieces(), shape.log_pieces()].concat();
    let bytes = pieces.iter().copied().max().unwrap() as usize + 64;
    (bytes, (0..pieces.len()).map(|part| DeltaPlace { part, offset: 64 * (part % 2) }).collect())
}

/// Rows of a chunk of a sequence: tokens, and drafts of which some are accepted.
#[derive(Debug, Clone, Copy)]
struct Chunk {
    tokens: usize,
    drafts: usize,
    accepted: usize,
    /// Whether the sequence continues from a copy of its state, without the log behind it.
    resumes: bool,
}

/// Copies the state of a sequence to other blocks, whose log is of another one. Returns its position.
fn resume(states: &mut KvPool, shape: &DeltaShape, from: &[u32], to: &[u32]) -> usize {
    let (bytes, pieces) = (states.block_bytes(), shape.state_pieces().len());
    // SAFETY: the blocks are of the pool, and different ones; the first piece is at the start of its block and begins with its position.
    unsafe {
        let mut block = |block: u32| states.as_mut_ptr().add(block as usize * bytes);
        for (part, (from, to)) in from.iter().zip(to).enumerate() {
            block(*to).write_bytes(0x55, bytes);
            if part < pieces {
                std::ptr::copy_nonoverlapping(block(*from), block(*to), bytes);
            }
        }
        block(from[0]).cast::<u32>().read() as usize
    }
}

/// Runs the cases together in a pool, each in chunks of its own in turn, and returns their outputs.
fn run(isa: Isa, threads: usize, cases: &[Case], chunks: &[Vec<Chunk>], rows: usize) -> Vec<Vec<f32>> {
    let shape = cases[0].shape;
    let (bytes, places) = places(&shape);
    let parts = places.len();
    let mut states = KvPool::new(bytes, parts * cases.len() * 2).unwrap();
    // What the blocks held before is of no effect.
    // SAFETY: the pool has so many bytes.
    unsafe { states.as_mut_ptr().write_bytes(0xff, bytes * parts * cases.len() * 2) };
    let of = |nth: usize| (0..parts).map(|part| (part * cases.len() + nth) as u32).collect::<Vec<u32>>();
    let mut blocks: Vec<Vec<u32>> = (0..cases.len()).map(of).collect();
    let others = (parts * cases.len()) as u32;
    let mut spare: Vec<Vec<u32>> =
        blocks.iter().map(|blocks| blocks.iter().map(|block| block + others).collect()).collect();
    let pool = Pool::new(threads).unwrap();
    let mut outputs = vec![vec![0.0; rows * shape.values()]; cases.len()];
    let mut done = vec![0; cases.len()];
    for step in 0.. {
        let (mut qkv, mut gates, mut scalars) = (Vec::new(), Vec::new(), Vec::new());
        let (mut sequences, mut parts) = (Vec::new(), Vec::new());
        for (nth, chunks) in chunks.iter().enumerate() {
            // Each once, so that the sequence ends.
            if chunks.get(step).is_some_and(|chunk| chunk.resumes) && done[nth] > 0 {
                done[nth] = resume(&mut states, &shape, &blocks[nth], &spare[nth]);
                std::mem::swap(&mut blocks[nth], &mut spare[nth]);
            }
        }
        for (nth, case) in cases.iter().enumerate() {
            let position = done[nth];
            let Chunk { tokens, drafts, accepted, .. } = chunks[nth][step % chunks[nth].len()];
            let tokens = tokens.clamp(1, rows - position.min(rows - 1));
            let drafts = drafts.min(rows - position.min(rows) - tokens.min(rows - position.min(rows)));
            if position == rows {
                continue;
            }
            let accepted = accepted.min(drafts);
            let first = sequences.last().map_or(0, |sequence: &DeltaSequence<'_>| sequence.rows.end);
            let count = tokens + drafts;
            let known = position + tokens + accepted;
            for row in position..position + count {
                // Rejected drafts are other tokens.
                let at = if row < known { row } else { (row * 7 + 3) % rows };
                let of = |from: &[f32], width: usize| from[at * width..(at + 1) * width].to_vec();
                qkv.extend(of(&case.qkv, shape.channels()));
                gates.extend(of(&case.gates, shape.values()));
                scalars.extend(of(&case.scalars, 2 * shape.value_heads));
            }
            sequences.push(DeltaSequence {
                rows: first..first + count,
                position,
                drafts,
                blocks: &blocks[nth],
            });
            parts.push((nth, first, tokens + accepted));
            done[nth] = known;
        }
        if sequences.is_empty() {
            return outputs;
        }
        let all = sequences.last().unwrap().rows.end;
        let mut y = vec![f32::NAN; all * shape.values()];
        let mut inputs = DeltaInputs { qkv: &mut qkv, gates: &gates, scalars: &scalars };
        let weights = cases[0].weights.borrowed();
        delta_rule(&pool, isa, &shape, &weights, &mut inputs, &sequences, &mut states, &places, &mut y);
        for ((nth, first, count), sequence) in parts.into_iter().zip(&sequences) {
            let width = shape.values();
            let to = sequence.position * width;
            outputs[nth][to..to + count * width].copy_from_slice(&y[first * width..(first + count) * width]);
        }
    }
    unreachable!("the sequences end")
}

fn shapes() -> impl Strategy<Value = DeltaShape> {
    // Up to the largest head and convolution of a model; more than one strip of columns on every instruction set.
    let keys = prop_oneof![4 => 1usize..=3, 1 => Just(size(16, 2))];
    let values = prop_oneof![4 => 1usize..=3, 1 => Just(size(16, 2)), 1 => 4usize..=size(9, 4)];
    let taps = prop_oneof![4 => 2usize..=4, 1 => Just(16)];
    (1usize..=2, 1usize..=3, keys, values, taps, (0usize..=20, any::<bool>())).prop_map(
        |(key_heads, each, keys, values, taps, (drafts, tiled))| DeltaShape {
            key_heads,
            value_heads: key_heads * each,
            tiled,
            key_dim: 16 * keys,
            value_dim: 16 * values,
            taps,
            drafts,
        },
    )
}

fn chunks(drafts: usize) -> impl Strategy<Value = Vec<Chunk>> {
    let chunk = (prop_oneof![Just(1usize), 1usize..40], 0..=drafts, 0..=drafts, prop::bool::weighted(0.3));
    let chunk =
        chunk.prop_map(|(tokens, drafts, accepted, resumes)| Chunk { tokens, drafts, accepted, resumes });
    prop::collection::vec(chunk, 1..8)
}

/// Rounding errors of a slowly decaying state stay what they are: those of the last positions are not above those of the first ones by much.
#[test]
fn errors_do_not_grow_over_4096_positions() {
    let rows = size(4096, 64);
    let shape = DeltaShape {
        key_heads: 1,
        value_heads: 1,
        tiled: false,
        key_dim: size(64, 16),
        value_dim: size(64, 16),
        taps: 4,
        drafts: 0,
    };
    let mut case = Case::new(7, shape, rows);
    // A position is worth half after some thousand others.
    case.weights.decay = vec![2e-4];
    case.outputs = case.recurrence(rows);
    let chunks = [vec![Chunk { tokens: 100, drafts: 0, accepted: 0, resumes: false }]];
    for isa in Isa::tested() {
        let outputs = &run(isa, 1, std::slice::from_ref(&case), &chunks, rows)[0];
        let errors = outputs.iter().zip(&case.outputs);
        let errors: Vec<f64> = errors.map(|(a, b)| (f64::from(*a) - b).abs() / b.abs().max(1.0)).collect();
        let largest = |part: &[f64]| part.iter().copied().fold(0.0, f64::max);
        let quarters: Vec<f64> = errors.chunks(errors.len() / 4).map(largest).collect();
        let text: Vec<String> = quarters.iter().map(|error| format!("{error:.1e}")).collect();
        println!("{}: largest errors by quarter of {rows} positions: {}", isa.name(), text.join(", "));
        assert!(quarters[3] <= 4.0 * quarters[0] && quarters[3] < 2e-4, "{}: {quarters:?}", isa.name());
    }
}

proptest! {
    #![proptest_config(crate::test_size::cases(24))]

    #[test]
    fn bits_depend_on_no_chunk_draft_or_neighbour_and_agree_with_the_recurrence(
        (shape, chunkings) in shapes().prop_flat_map(|shape| {
            (Just(shape), prop::collection::vec(chunks(shape.drafts), 2..4))
        }),
        seed in any::<u32>(),
        threads in 1usize..3,
    ) {
        let rows = size(70, 20);
        let mut cases: Vec<Case> =
            (0..chunkings.len() as u32).map(|nth| Case::new(seed ^ nth << 8, shape, rows)).collect();
        // All of one model.
        let weights = cases[0].weights.clone();
        for case in &mut cases {
            case.weights = weights.clone();
            case.outputs = case.recurrence(rows);
        }
        let whole = [vec![Chunk { tokens: rows, drafts: 0, accepted: 0, resumes: false }]];
        for isa in Isa::tested() {
            let together = run(isa, threads, &cases, &chunkings, rows);
            for (case, outputs) in cases.iter().zip(&together) {
                let alone = run(isa, 1, std::slice::from_ref(case), &whole, rows);
                for (at, (output, alone)) in outputs.iter().zip(&alone[0]).enumerate() {
                    prop_assert_eq!(output.to_bits(), alone.to_bits(), "{} at {}", isa.name(), at);
                }
                for (output, exact) in outputs.iter().zip(&case.outputs) {
                    let error = (f64::from(*output) - exact).abs();
                    prop_assert!(error <= 2e-4 * exact.abs().max(1.0), "{}: {output}, not {exact}", isa.name());
                }
            }
        }
    }
}
