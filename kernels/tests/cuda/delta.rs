//! The gated delta rule in chunks, with drafts and beside other sequences, against the CPU kernel over whole sequences.

use inflight_kernels::cpu::{
    DeltaInputs, DeltaPlace, DeltaSequence as CpuSequence, DeltaShape, DeltaWeights, Isa, KvPool, Pool,
    delta_rule,
};
use inflight_kernels::cuda::{
    CopyParams, DeltaParams, DeltaSequence, HalfDtype, OutputGateParams, as_bytes, copy_blocks, delta,
    output_gate,
};
use proptest::prelude::*;

use crate::device::{Buffer, TestDevice};
use crate::{SeededRng, half, on_harness, unit, widen};

const NORM_EPS: f32 = 1e-6;
/// Positions of a sequence.
const ROWS: usize = 45;

/// Layer and the outputs of its projections for some sequences.
struct Case {
    shape: DeltaShape,
    half: HalfDtype,
    convolution: Vec<f32>,
    decay: Vec<f32>,
    decay_bias: Vec<f32>,
    norm: Vec<f32>,
    /// Of each sequence: inputs of the convolution, gates, inputs of betas and decays; [ROWS, stride].
    projected: Vec<Vec<u16>>,
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

impl Case {
    fn new(seed: u32, half: HalfDtype, shape: DeltaShape, sequences: usize) -> Self {
        let mut rng = SeededRng::new(seed);
        let stride = stride(&shape);
        Self {
            shape,
            half,
            convolution: rng.values(shape.taps * shape.channels(), 1.0),
            decay: rng.values(shape.value_heads, 0.3).iter().map(|x| x.abs() + 0.01).collect(),
            decay_bias: rng.values(shape.value_heads, 1.0),
            norm: rng.values(shape.value_dim, 1.0),
            projected: (0..sequences).map(|_| rng.halves(half, ROWS * stride, 2.0)).collect(),
        }
    }

    /// Returns the outputs of a whole sequence by the CPU kernel.
    fn on_cpu(&self, sequence: usize) -> Vec<f32> {
        let shape = &self.shape;
        let (bytes, places) = places(shape);
        let mut states = KvPool::new(bytes, places.len()).unwrap();
        let blocks: Vec<u32> = (0..places.len() as u32).collect();
        let (mut qkv, mut gates, mut scalars) = (Vec::new(), Vec::new(), Vec::new());
        for row in self.projected[sequence].chunks(stride(shape)) {
            let row: Vec<f32> = row.iter().map(|bits| self.half.widen(*bits)).collect();
            let (inputs, rest) = row.split_at(shape.channels());
            qkv.extend(inputs);
            gates.extend(&rest[..shape.values()]);
            scalars.extend(&rest[shape.values()..]);
        }
        let weights = DeltaWeights {
            convolution: &self.convolution,
            decay: &self.decay,
            decay_bias: &self.decay_bias,
            norm: &self.norm,
            norm_eps: NORM_EPS,
        };
        let mut y = vec![0.0; ROWS * shape.values()];
        let mut inputs = DeltaInputs { qkv: &mut qkv, gates: &gates, scalars: &scalars };
        let sequences = [CpuSequence { rows: 0..ROWS, position: 0, drafts: 0, blocks: &blocks }];
        let (pool, isa) = (Pool::new(1).unwrap(), Isa::detect());
        delta_rule(&pool, isa, shape, &weights, &mut inputs, &sequences, &mut states, &places, &mut y);
        y
    }

    /// Runs these sequences together, each in chunks of its own in turn, and returns their outputs.
    fn run(&self, sequences: &[usize], chunks: &[Vec<Chunk>]) -> Vec<Vec<u16>> {
        let shape = &self.shape;
        let parts = places(shape).1.len();
        let layer = Layer::new(self, parts * sequences.len() * 2);
        let table =
            |nth: usize| (0..parts).map(|part| (part * sequences.len() + nth) as u32).collect::<Vec<u32>>();
        let mut blocks: Vec<Vec<u32>> = (0..sequences.len()).map(table).collect();
        let others = (parts * sequences.len()) as u32;
        let spare = |blocks: &Vec<u32>| blocks.iter().map(|block| block + others).collect();
        let mut spare: Vec<Vec<u32>> = blocks.iter().map(spare).collect();
        let mut outputs = vec![vec![0u16; ROWS * shape.values()]; sequences.len()];
        let mut done = vec![0; sequences.len()];
        for step in 0.. {
            for (nth, chunks) in chunks.iter().enumerate() {
                // Each once, so that the sequence ends.
                if chunks.get(step).is_some_and(|chunk| chunk.resumes) && done[nth] > 0 {
                    done[nth] = layer.resume(&blocks[nth], &spare[nth]);
                    std::mem::swap(&mut blocks[nth], &mut spare[nth]);
                }
            }
            let (mut rows, mut tables): (Vec<u16>, Vec<u32>) = (Vec::new(), Vec::new());
            let (mut all, mut counted, mut first) = (Vec::new(), Vec::new(), 0);
            for (nth, sequence) in sequences.iter().enumerate() {
                let position = done[nth];
                let Chunk { tokens, drafts, accepted, .. } = chunks[nth][step % chunks[nth].len()];
                let tokens = tokens.clamp(1, ROWS - position.min(ROWS - 1));
                let drafts = drafts.min(ROWS.saturating_sub(position + tokens));
                if position == ROWS {
                    continue;
                }
                let accepted = accepted.min(drafts);
                let (count, known) = (tokens + drafts, position + tokens + accepted);
                for row in position..position + count {
                    // Rejected drafts are other tokens.
                    let at = if row < known { row } else { (row * 7 + 3) % ROWS };
                    let width = stride(shape);
                    rows.extend(&self.projected[*sequence][at * width..(at + 1) * width]);
                }
                counted.push((nth, first, position, tokens + accepted));
                all.push(DeltaSequence {
                    row: first as u32,
                    rows: count as u32,
                    position: position as u32,
                    drafts: drafts as u32,
                    table: tables.len() as u32,
                });
                tables.extend(&blocks[nth]);
                first += count;
                done[nth] = known;
            }
            if all.is_empty() {
                return outputs;
            }
            let (out, width) = (layer.step(&rows, &all, &tables), shape.values());
            for (nth, first, position, count) in counted {
                let to = &mut outputs[nth][position * width..(position + count) * width];
                to.copy_from_slice(&out[first * width..(first + count) * width]);
            }
        }
        unreachable!("the sequences end")
    }
}

/// Layer of a case on a device.
struct Layer<'a> {
    case: &'a Case,
    device: TestDevice,
    block_bytes: usize,
    pool: Buffer,
    places: Buffer,
    /// Convolution, decay, decay bias and norm.
    weights: [Buffer; 4],
}

impl<'a> Layer<'a> {
    fn new(case: &'a Case, blocks: usize) -> Self {
        let device = TestDevice::new();
        let (block_bytes, places) = places(&case.shape);
        let places: Vec<u32> =
            places.iter().flat_map(|place| [place.part as u32, place.offset as u32]).collect();
        Self {
            // Filled with NaN: what the blocks held before is of no effect.
            pool: device.alloc(block_bytes * blocks),
            places: device.upload_constant(&places),
            weights: [&case.convolution, &case.decay, &case.decay_bias, &case.norm]
                .map(|x| device.upload_constant(x)),
            case,
            device,
            block_bytes,
        }
    }

    /// Copies the state of a sequence to other blocks, whose log is of another one. Returns its position.
    fn resume(&self, from: &[u32], to: &[u32]) -> usize {
        let pieces = self.case.shape.state_pieces().len();
        let pairs: Vec<u32> = from.iter().zip(to).take(pieces).flat_map(|(from, to)| [*from, *to]).collect();
        let pairs = self.device.upload(&pairs);
        let p = CopyParams {
            pool: self.pool.address(),
            pairs: pairs.address(),
            block_bytes: self.block_bytes as u64,
        };
        unsafe { copy_blocks(&self.device, pieces as u32, &p) }.unwrap();
        // A piece begins with its position.
        let at = from[0] as usize * self.block_bytes / 4;
        self.pool.read::<u32>(at + 1)[at] as usize
    }

    /// Computes rows, with some of padding behind them.
    fn step(&self, rows: &[u16], sequences: &[DeltaSequence], tables: &[u32]) -> Vec<u16> {
        let Self { case: Case { shape, half, .. }, device, block_bytes, pool, places, weights } = self;
        let mut of_rows: Vec<u32> = Vec::new();
        for (index, sequence) in sequences.iter().enumerate() {
            of_rows.extend(std::iter::repeat_n(index as u32, sequence.rows as usize));
        }
        of_rows.extend([u32::MAX; 3]);
        let rows = [rows, &vec![u16::MAX; 3 * stride(shape)]].concat();
        let count = of_rows.len();
        let encoded: Vec<u8> = sequences.iter().flat_map(|sequence| as_bytes(sequence).to_vec()).collect();
        let [projected, convolved, factors, out, sequence_count, sequences, of_rows, tables] = [
            device.upload_constant(&rows),
            device.alloc(count * shape.channels() * 4),
            device.alloc(count * 2 * shape.value_heads * 4),
            device.alloc(count * shape.values() * 2),
            device.upload_constant(&[sequences.len() as u32]),
            device.upload_constant(&encoded),
            device.upload_constant(&of_rows),
            device.upload_constant(tables),
        ];
        let p = DeltaParams {
            projected: projected.address(),
            convolved: convolved.address(),
            factors: factors.address(),
            out: out.address(),
            convolution: weights[0].address(),
            decay: weights[1].address(),
            decay_bias: weights[2].address(),
            norm: weights[3].address(),
            pool: pool.address(),
            sequences: sequences.address(),
            sequence_count: sequence_count.address(),
            row_sequences: of_rows.address(),
            tables: tables.address(),
            places: places.address(),
            block_bytes: *block_bytes as u64,
            rows: count as u32,
            stride: stride(shape) as u32,
            key_heads: shape.key_heads as u32,
            value_heads: shape.value_heads as u32,
            key_dim: shape.key_dim as u32,
            value_dim: shape.value_dim as u32,
            tiled: shape.tiled.into(),
            taps: shape.taps as u32,
            log: shape.log() as u32,
            inputs: shape.inputs() as u32,
            norm_eps: NORM_EPS,
            unused: 0,
        };
        unsafe { delta(device, *half, &p) }.unwrap();
        out.read(count * shape.values())
    }
}

/// Elements of a row of the projections' outputs.
fn stride(shape: &DeltaShape) -> usize {
    shape.channels() + shape.values() + 2 * shape.value_heads
}

/// Pieces of a state in blocks of one piece each.
fn places(shape: &DeltaShape) -> (usize, Vec<DeltaPlace>) {
    let pieces = [shape.state_pieces(), shape.log_pieces()].concat();
    let bytes = pieces.iter().copied().max().unwrap() as usize + 64;
    (bytes, (0..pieces.len()).map(|part| DeltaPlace { part, offset: 64 * (part % 2) }).collect())
}

fn shapes() -> impl Strategy<Value = DeltaShape> {
    let keys = prop_oneof![3 => Just(64usize), 1 => Just(128)];
    let taps = prop_oneof![4 => 2usize..=5, 1 => Just(16)];
    let sizes = (1usize..=2, 1usize..=2, keys, 1usize..=2, taps);
    (sizes, (0usize..=9, any::<bool>())).prop_map(
        |((key_heads, each, key_dim, slices, taps), (drafts, tiled))| DeltaShape {
            key_heads,
            value_heads: key_heads * each,
            tiled,
            key_dim,
            value_dim: 32 * slices,
            taps,
            drafts,
        },
    )
}

fn chunks(drafts: usize) -> impl Strategy<Value = Vec<Chunk>> {
    let chunk = (prop_oneof![Just(1usize), 1usize..30], 0..=drafts, 0..=drafts, prop::bool::weighted(0.3));
    let chunk =
        chunk.prop_map(|(tokens, drafts, accepted, resumes)| Chunk { tokens, drafts, accepted, resumes });
    prop::collection::vec(chunk, 1..8)
}

#[test]
pub(crate) fn bits_depend_on_no_chunk_draft_or_neighbour_and_agree_with_the_cpu() {
    let strategy = (any::<u32>(), half(), shapes()).prop_flat_map(|(seed, half, shape)| {
        (Just((seed, half, shape)), prop::collection::vec(chunks(shape.drafts), 2..4))
    });
    on_harness(8, strategy, |((seed, half, shape), chunkings)| {
        let case = Case::new(seed, half, shape, chunkings.len());
        let sequences: Vec<usize> = (0..chunkings.len()).collect();
        let together = case.run(&sequences, &chunkings);
        let whole = [vec![Chunk { tokens: ROWS, drafts: 0, accepted: 0, resumes: false }]];
        for (sequence, outputs) in sequences.iter().zip(&together) {
            let alone = &case.run(&[*sequence], &whole)[0];
            for (at, (output, alone)) in outputs.iter().zip(alone).enumerate() {
                let row = at / shape.values();
                prop_assert_eq!(output, alone, "sequence {} at row {}", sequence, row);
            }
            let expected = case.on_cpu(*sequence);
            for (output, expected) in alone.iter().zip(&expected) {
                let error = (half.widen(*output) - expected).abs();
                let bound = 1.1 * unit(half) as f32 * expected.abs() + 3e-4;
                prop_assert!(error <= bound, "{} is not {expected}", half.widen(*output));
            }
        }
        Ok(())
    });
}

#[test]
fn a_state_that_does_not_precede_the_rows_makes_outputs_that_are_not_finite() {
    on_harness(2, any::<u32>(), |seed| {
        let shape = DeltaShape {
            key_heads: 1,
            value_heads: 1,
            tiled: false,
            key_dim: 64,
            value_dim: 32,
            taps: 4,
            drafts: 2,
        };
        let case = Case::new(seed, HalfDtype::Bf16, shape, 1);
        let tables: Vec<u32> = (0..places(&shape).1.len() as u32).collect();
        // The position of the state has the bits of NaN.
        let layer = Layer::new(&case, 2 * tables.len());
        let width = stride(&shape);
        let step = |position: usize, count: usize, tables: &[u32]| {
            let (rows, first) = (count as u32, position as u32);
            let sequence = DeltaSequence { row: 0, rows, position: first, drafts: 0, table: 0 };
            let projected = &case.projected[0][position * width..(position + count) * width];
            let out = layer.step(projected, &[sequence], tables);
            let out = out[..count * shape.values()].iter();
            out.map(|bits| HalfDtype::Bf16.widen(*bits)).collect::<Vec<f32>>()
        };
        prop_assert!(step(0, 21, &tables).iter().all(|x| x.is_finite()));
        // The state is at 16, and the log reaches 18 positions behind it.
        let out = step(40, 2, &tables);
        prop_assert!(out.iter().all(|x| x.is_nan()), "{:?}", out);
        // Nor is what is left there a state to resume from.
        let copy: Vec<u32> = tables.iter().map(|block| block + tables.len() as u32).collect();
        let position = layer.resume(&tables, &copy);
        prop_assert_eq!(position, 32);
        prop_assert!(step(position, 1, &copy).iter().all(|x| x.is_nan()));
        Ok(())
    });
}

#[test]
fn output_gates_multiply_with_their_sigmoid() {
    on_harness(8, (any::<u32>(), half(), 1usize..700), |(seed, half, eights)| {
        let (device, mut rng) = (TestDevice::new(), SeededRng::new(seed));
        let (x, gates) = (rng.halves(half, eights * 8, 3.0), rng.halves(half, eights * 8, 9.0));
        let (x_at, gates_at) = (device.upload(&x), device.upload_constant(&gates));
        let elements = (eights * 8) as u64;
        let p = OutputGateParams { x: x_at.address(), gates: gates_at.address(), elements };
        unsafe { output_gate(&device, half, &p) }.unwrap();
        for ((got, x), gate) in widen(half, &x_at, x.len()).iter().zip(&x).zip(&gates) {
            let exact = f64::from(half.widen(*x)) / (1.0 + (-f64::from(half.widen(*gate))).exp());
            let error = (f64::from(*got) - exact).abs();
            prop_assert!(error <= 1.1 * unit(half) * exact.abs() + 1e-7, "{got} is not {exact}");
        }
        Ok(())
    });
}
