//! Whole steps on the kernels' CPU harness, from batch to sampled tokens, compared with the CPU runtime on
//! the same weights.

use std::sync::Arc;

use inflight_contract::{SamplingParams, SamplingSpec};
use inflight_fixtures::{Arch, Checkpoint, Dtype};
use inflight_kernel_harness::{Harness, HostMemory};
use inflight_kernels::cuda::{DeviceError, HalfDtype, KvStore, SamplingResult};
use inflight_kernels::philox4x32;
use inflight_models::{DeltaSpec, ModelConfig, ModelDir, ModelSource};
use inflight_runtime::{
    Batch, BlockCopy, Capabilities, Feedback, Runtime, RuntimeFacts, Sampled, SlotSetup, TokenMasks,
    recurrent,
};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime};
use inflight_worker_core::MemoryShape;
use proptest::prelude::*;

use super::buffers::StepBuffers;
use super::gemm::GemmKernel;
use super::gpu::{ColumnCopy, DeviceCollective, Gpu, GpuMemory, Matmul, bytes_of};
use super::kv_layers::KvLayers;
use super::model_runner::{ModelRunner, RunnerModes, check_model, sampled};
use super::shapes::BufferLimits;
use super::shard_model;
use super::shard_plan::ShardPlan;
use super::step_graph::StepGraphs;
use super::weights::find;

mod drafts;
mod gemm;
mod masks;
mod memory;
pub(super) mod models;
mod non_finite;
mod prompts;
mod ranks;
mod recording_device;

use models::{model, model_of};

impl GpuMemory for HostMemory {
    fn address(&self) -> u64 {
        HostMemory::address(self)
    }
}

impl Gpu for Harness {
    type Memory = HostMemory;

    fn alloc(&self, bytes: usize) -> Result<HostMemory, DeviceError> {
        Ok(Harness::alloc(self, bytes))
    }

    fn fill(&self, memory: &HostMemory, byte: u8) -> Result<(), DeviceError> {
        // SAFETY: the range is all of a live allocation, to which no reference exists.
        unsafe { std::ptr::write_bytes(memory.address() as *mut u8, byte, memory.bytes()) };
        Ok(())
    }

    fn upload(&self, to: &HostMemory, byte: usize, from: &[u8]) -> Result<(), DeviceError> {
        assert!(byte + from.len() <= to.bytes(), "more is uploaded than there is room for");
        // SAFETY: asserted to be within the allocation, to which no reference exists.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), (to.address() as *mut u8).add(byte), from.len());
        }
        Ok(())
    }

    unsafe fn matmul(&self, half: HalfDtype, matmul: &Matmul) -> Result<(), DeviceError> {
        // SAFETY: the caller guarantees that the addresses are of matrices with the given shapes.
        unsafe { GemmKernel::Tiled.launch(self, half, matmul) }
    }

    unsafe fn copy_columns(&self, columns: &ColumnCopy) -> Result<(), DeviceError> {
        let ColumnCopy { from, from_stride, to, to_stride, width, rows } = *columns;
        assert!(width <= from_stride && width <= to_stride, "rows overlap");
        for row in 0..rows {
            // SAFETY: the caller guarantees that both matrices are allocated with these strides and do not
            // overlap.
            unsafe {
                let from = (from as *const u8).add(row * from_stride);
                std::ptr::copy_nonoverlapping(from, (to as *mut u8).add(row * to_stride), width);
            }
        }
        Ok(())
    }

    fn collective(&self) -> Option<&dyn DeviceCollective> {
        None
    }
}

/// Returns the shard plan of a model on a single device.
fn unsharded(model: &ModelDir) -> ShardPlan {
    ShardPlan::for_ranks(shard_model(model, &find(model).unwrap(), 1, true).unwrap(), false).next().unwrap()
}

/// Returns the KV memory of a rank's shard of a model, whose windows release blocks.
fn kv_layers(
    model: &ModelDir,
    shard_plan: &ShardPlan,
    block_tokens: u32,
    store: KvStore,
    context: u32,
) -> KvLayers {
    let config = shard_plan.shard().config(model.config());
    KvLayers::new(&config, block_tokens, context, store, true).unwrap()
}

const CONTEXT: u32 = 600;
const BLOCKS: u32 = 240;
const SLOTS: u32 = 4;
const DRAFT_ROWS: u32 = 20;

/// Runs steps on the harness, as [`super::device_thread`] does on a GPU.
struct HarnessRunner<G: Gpu<Memory = HostMemory> = Harness> {
    harness: G,
    runner: ModelRunner<G>,
    buffers: StepBuffers<HostMemory>,
    packed: Vec<u8>,
}

impl HarnessRunner {
    fn new(model: &ModelDir, block_tokens: u32, deterministic: bool, graphs: bool) -> Self {
        Self::with_store(KvStore::Half, model, block_tokens, deterministic, graphs)
    }

    fn with_store(
        store: KvStore,
        model: &ModelDir,
        block_tokens: u32,
        deterministic: bool,
        graphs: bool,
    ) -> Self {
        let modes = RunnerModes { deterministic, graphs };
        HarnessRunner::load(Harness::new(), unsharded(model), model, block_tokens, store, modes)
    }
}

impl<G: Gpu<Memory = HostMemory>> HarnessRunner<G> {
    /// Loads a rank's shard of a model.
    fn load(
        harness: G,
        shard_plan: ShardPlan,
        model: &ModelDir,
        block_tokens: u32,
        store: KvStore,
        modes: RunnerModes,
    ) -> Self {
        Self::load_with(harness, shard_plan, model, block_tokens, store, modes, |_| {})
    }

    /// Loads a rank's shard; `on_weights_loaded` is called before buffers are allocated.
    fn load_with(
        harness: G,
        shard_plan: ShardPlan,
        model: &ModelDir,
        block_tokens: u32,
        store: KvStore,
        modes: RunnerModes,
        on_weights_loaded: impl FnOnce(&G),
    ) -> Self {
        let kv_layers = kv_layers(model, &shard_plan, block_tokens, store, CONTEXT);
        let tensors = find(model).unwrap();
        let weights = tensors.upload(&harness, shard_plan.shard(), &|_, _| {}).unwrap();
        on_weights_loaded(&harness);
        let capabilities = Capabilities {
            vocab_size: model.config().vocab_size as u32,
            context_tokens: CONTEXT,
            shape: kv_layers.plan().shape(),
            block_bytes: 0,
            blocks: BLOCKS,
            host_blocks: 0,
            slots: SLOTS,
            batch_tokens: 256,
            sample_rows: SLOTS + DRAFT_ROWS,
            snapshot: recurrent::snapshot(kv_layers.plan()),
            sequence_drafts: recurrent::sequence_drafts(kv_layers.plan()),
            predicted_drafts: 0,
            depth: 2,
            fingerprint: String::new(),
            facts: RuntimeFacts::default(),
        };
        let half = tensors.half();
        let graphs = StepGraphs { sample_rows: capabilities.sample_rows, batch_tokens: 256 };
        let limits = BufferLimits::new(graphs, SLOTS, CONTEXT, 1 << 20);
        let shapes = shard_plan.shapes(model.config());
        let config = model.config();
        let runner = ModelRunner::new(
            &harness,
            config,
            shard_plan,
            half,
            weights,
            capabilities,
            &limits,
            kv_layers,
            modes,
        )
        .unwrap();
        let buffers = StepBuffers::alloc(&harness, &shapes, &limits).unwrap();
        Self { harness, runner, buffers, packed: Vec::new() }
    }

    fn attach(&mut self, slot: u32, sampling: &SamplingParams, prompt: &[u32]) {
        let setup = SlotSetup {
            sampling: Arc::new(sampling.clone()),
            choice: slot,
            prompt,
            generated: &[],
            eos_token_ids: &[1],
        };
        self.runner.attach(&self.harness, slot, &setup).unwrap();
    }

    fn step(&mut self, batch: &Batch) -> (Vec<Sampled>, Vec<f32>) {
        self.try_step(batch).unwrap()
    }

    fn try_step(&mut self, batch: &Batch) -> Result<(Vec<Sampled>, Vec<f32>), DeviceError> {
        let none = TokenMasks::none(self.runner.capabilities.vocab_size);
        self.masked_step(batch, &none)
    }

    fn masked_step(
        &mut self,
        batch: &Batch,
        masks: &TokenMasks,
    ) -> Result<(Vec<Sampled>, Vec<f32>), DeviceError> {
        let step = self.runner.prepare(batch, &mut self.packed).unwrap();
        // A step that reads what it has not written gives NaN or an impossible token.
        self.runner.poison(&self.harness)?;
        self.buffers.poison(&self.harness)?;
        self.harness.upload(&self.buffers.metadata, 0, &self.packed)?;
        let (forward, at) = (&self.runner.forward, self.buffers.addresses());
        forward.run(&self.harness, &step, at, |_| forward.captured(&self.harness, &step, at.metadata))?;
        if batch.masked_rows() > 0 {
            self.runner.upload_masks(&self.harness, batch, masks).unwrap();
        }
        self.runner.forward.sample(&self.harness, &step, at)?;
        let mut logprobs = Vec::new();
        self.runner.logprobs_requested(&mut logprobs);
        let results = self.buffers.results.read::<SamplingResult>(batch.samples.len());
        let tokens = results.iter().zip(&logprobs).map(|(result, wanted)| sampled(result, *wanted)).collect();
        let (logits, stride) = self.runner.forward.logits();
        let all = logits.read::<f32>(batch.samples.len() * stride);
        let vocabulary = self.runner.capabilities.vocab_size as usize;
        Ok((tokens, all.chunks(stride).flat_map(|row| row[..vocabulary].to_vec()).collect()))
    }
}

fn on_cpu(model: &ModelDir, block_tokens: u32) -> CpuRuntime {
    let options = CpuOptions {
        threads: Some(1),
        kv_bytes: 1 << 30,
        host_bytes: 0,
        block_tokens,
        slots: SLOTS,
        batch_tokens: 256,
        context_tokens: Some(CONTEXT),
        isa: None,
        quantize: None,
        kv_dtype: None,
        tensor_parallel: 1,
        mtp: false,
    };
    CpuRuntime::load(model, &options, &|_, _| {}).unwrap()
}

/// Test sequences with block tables scattered over the pool.
struct TestSequences {
    shape: MemoryShape,
    /// Blocks of each sequence, those of a group behind those of the group before, and those of its state behind them.
    tables: Vec<Vec<u32>>,
    tokens: Vec<Vec<u32>>,
    done: Vec<usize>,
}

impl TestSequences {
    fn new(lengths: &[usize], vocabulary: u32, block_tokens: u32, seed: u32) -> Self {
        Self::of_shape(lengths, vocabulary, MemoryShape::uniform(block_tokens), seed)
    }

    fn of_shape(lengths: &[usize], vocabulary: u32, shape: MemoryShape, seed: u32) -> Self {
        let word = |i: u32, j: u32| philox4x32([i, j, 0, 0], [seed, 3])[0];
        let (share, state) = (BLOCKS / SLOTS, shape.state_blocks());
        let spans = CONTEXT.div_ceil(shape.block_tokens()).min((share - state) / shape.span_blocks());
        let each = spans * shape.span_blocks() + state;
        // Every fourth block, in descending order.
        let table = |s: u32| (0..each).rev().map(|i| i * SLOTS + s).collect();
        Self {
            shape,
            tables: (0..lengths.len() as u32).map(table).collect(),
            tokens: lengths
                .iter()
                .enumerate()
                .map(|(s, n)| (0..*n as u32).map(|i| word(s as u32, i) % vocabulary).collect())
                .collect(),
            done: vec![0; lengths.len()],
        }
    }

    /// Builds a batch of the next chunk of each sequence; samples where the known tokens end.
    fn batch(&mut self, chunks: &[usize]) -> Batch {
        let mut batch = Batch::default();
        batch.clear();
        for (s, chunk) in chunks.iter().enumerate() {
            let chunk = (*chunk).min(self.tokens[s].len() - self.done[s]);
            if chunk > 0 {
                let (first, end) = (self.done[s], self.done[s] + chunk);
                batch.push_seen(&self.tokens[s][first..end], first as u32, &self.shape, &self.tables[s]);
                self.done[s] = end;
                if end == self.tokens[s].len() {
                    batch.sample_last_row(s as u32);
                }
            }
        }
        batch
    }
}

fn max_abs_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn max_abs(x: &[f32]) -> f32 {
    x.iter().map(|x| x.abs()).fold(0.0, f32::max)
}

fn available() -> bool {
    if !Harness::AVAILABLE {
        inflight_fixtures::skipped("the CUDA runtime", "there was no C++ compiler to build the harness with");
    }
    Harness::AVAILABLE
}

#[test]
fn steps_on_the_harness_yield_the_logits_of_the_cpu_runtime() {
    if !available() {
        return;
    }
    let archs = [Arch::Llama31, Arch::Mistral, Arch::Qwen2, Arch::Qwen3, Arch::Gemma3, Arch::Qwen35];
    for (i, arch) in archs.into_iter().enumerate() {
        let dtype = [Dtype::Bf16, Dtype::F16, Dtype::Bf16, Dtype::F16, Dtype::F16, Dtype::F16][i];
        let block_tokens = [16, 4, 32, 16, 8, 16][i];
        let model = model(arch, dtype, i as u32);
        let (half, fp8) = (KvStore::Half, KvStore::Fp8);
        for (deterministic, store) in [(false, half), (true, half), (false, fp8)] {
            let gpu = HarnessRunner::with_store(store, &model, block_tokens, deterministic, true);
            yields_the_logits_of_the_cpu_runtime(gpu, &model, block_tokens, store);
        }
    }
}

/// Runs the same steps on the GPU runtime and on the CPU runtime and compares logits and tokens.
fn yields_the_logits_of_the_cpu_runtime<G: Gpu<Memory = HostMemory>>(
    mut gpu: HarnessRunner<G>,
    model: &ModelDir,
    block_tokens: u32,
    store: KvStore,
) -> HarnessRunner<G> {
    let (arch, vocabulary) = (model.config().architecture.name(), model.config().vocab_size);
    let mut cpu = on_cpu(model, block_tokens);
    let shape = gpu.runner.capabilities.shape;
    // The runtimes may divide their memory in different ways.
    let of_shape = |shape| TestSequences::of_shape(&[70, 1, 33], vocabulary as u32, shape, 5);
    let (mut sequences, mut sequences_on_cpu) = (of_shape(shape), of_shape(cpu.capabilities().shape));
    for (slot, tokens) in sequences.tokens.iter().enumerate() {
        gpu.attach(slot as u32, &SamplingParams::greedy(), tokens);
        let setup = SlotSetup {
            sampling: Arc::new(SamplingParams::greedy()),
            choice: slot as u32,
            prompt: tokens,
            generated: &[],
            eos_token_ids: &[1],
        };
        cpu.attach(slot as u32, &setup).unwrap();
    }
    // Chunked prefills beside decodes, then decodes alone.
    for (step, chunks) in [[40, 1, 7], [30, 1, 26], [1, 1, 1], [1, 1, 1], [1, 0, 1]].iter().enumerate() {
        let mut batch = sequences.batch(chunks);
        if step == 2 {
            batch.copies.push(BlockCopy {
                from: sequences.tables[0][0],
                to: sequences.tables[0].len() as u32 * 4 - 1,
            });
        }
        let (tokens, logits) = gpu.step(&batch);
        let mut batch = sequences_on_cpu.batch(chunks);
        let slots: Vec<u32> = batch.samples.iter().map(|sample| sample.slot).collect();
        let mut reference = Vec::new();
        cpu.execute(&mut batch, &mut reference).unwrap();
        let exact = cpu.logits();
        let difference = max_abs_difference(&logits, exact);
        // 8-bit keys and values have a relative error of up to 2^-4.
        let tolerance = match (store, model.config().head_dim) {
            (KvStore::Half, _) => 2e-2,
            (KvStore::Fp8, ..=128) => 1e-1,
            // Scores are sums over a head.
            (KvStore::Fp8, _) => 2e-1,
        };
        let bound = tolerance * max_abs(exact);
        assert!(difference <= bound, "{arch}, step {step}: logits differ by {difference}, more than {bound}");
        for (i, slot) in slots.iter().enumerate() {
            let row = &exact[i * vocabulary..(i + 1) * vocabulary];
            let best = row[reference[i].token as usize];
            assert!(row[tokens[i].token as usize] >= best - 2.0 * bound, "{arch}, step {step}");
            sequences.tokens[*slot as usize].push(reference[i].token);
            sequences_on_cpu.tokens[*slot as usize].push(reference[i].token);
        }
    }
    gpu
}

#[test]
fn in_the_deterministic_mode_no_bit_depends_on_chunks_or_batch() {
    if !available() {
        return;
    }
    let models = [
        (Arch::Gemma3, KvStore::Half),
        (Arch::Qwen35, KvStore::Fp8),
        (Arch::Qwen3, KvStore::Fp8),
        (Arch::Qwen35, KvStore::Half),
        (Arch::Qwen3, KvStore::Half),
    ];
    for (arch, store) in models.into_iter().take(if inflight_fixtures::is_thorough() { 5 } else { 2 }) {
        no_bit_depends_on_chunks_or_batch(arch, store);
    }
}

fn no_bit_depends_on_chunks_or_batch(arch: Arch, store: KvStore) {
    let model = model(arch, Dtype::Bf16, 11);
    let vocabulary = model.config().vocab_size as u32;
    let logits_of = |chunks: &[[usize; 2]], graphs: bool| {
        let mut gpu = HarnessRunner::with_store(store, &model, 16, true, graphs);
        let mut sequences = TestSequences::of_shape(&[290, 40], vocabulary, gpu.runner.capabilities.shape, 8);
        for (slot, tokens) in sequences.tokens.iter().enumerate() {
            gpu.attach(slot as u32, &SamplingParams::greedy(), tokens);
        }
        let mut last = Vec::new();
        for chunks in chunks {
            let batch = sequences.batch(chunks);
            let (_, logits) = gpu.step(&batch);
            if let Some(i) = batch.samples.iter().position(|sample| sample.slot == 0) {
                let vocabulary = vocabulary as usize;
                last = logits[i * vocabulary..(i + 1) * vocabulary].iter().map(|x| x.to_bits()).collect();
            }
        }
        last
    };
    let reference: Vec<u32> = logits_of(&[[200, 0], [90, 0]], false);
    assert!(!reference.is_empty());
    assert_eq!(logits_of(&[[7, 40], [150, 0], [133, 0]], false), reference);
    // The last token alone, as a decode padded to the rows of a graph.
    assert_eq!(logits_of(&[[200, 13], [89, 26], [1, 1]], true), reference);
}

#[test]
fn a_token_fed_back_on_the_device_equals_one_sent_by_the_host() {
    if !available() {
        return;
    }
    let model = model(Arch::Llama31, Dtype::Bf16, 3);
    let vocabulary = model.config().vocab_size as u32;
    let spec = SamplingSpec { temperature: 0.8, top_p: 0.9, seed: 77, ..SamplingSpec::default() };
    let sampling = spec.validate().unwrap();
    let run = |feed: bool| {
        let mut gpu = HarnessRunner::new(&model, 16, false, true);
        let mut sequences = TestSequences::new(&[20, 9], vocabulary, 16, 2);
        for (slot, tokens) in sequences.tokens.iter().enumerate() {
            gpu.attach(slot as u32, &sampling, tokens);
        }
        let (first, _) = gpu.step(&sequences.batch(&[20, 9]));
        for (s, sampled) in first.iter().enumerate() {
            sequences.tokens[s].push(sampled.token);
        }
        let mut batch = sequences.batch(&[1, 1]);
        if feed {
            batch.tokens.fill(0);
            batch.feedback = (0..2).map(|row| Feedback { row, sample: row }).collect();
        }
        gpu.step(&batch)
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn sampling_parameters_reach_the_kernel_and_history_stays_on_the_device() {
    if !available() {
        return;
    }
    let model = model(Arch::Qwen3, Dtype::F16, 21);
    let vocabulary = model.config().vocab_size as u32;
    let strategy = (0.0f32..1.5, 0i32..40, 0.3f32..1.0, any::<bool>(), any::<u64>());
    let config = ProptestConfig { cases: 6, failure_persistence: None, ..ProptestConfig::default() };
    let test = |(temperature, top_k, top_p, penalties, seed)| {
        let temperature = if temperature < 0.3 { 0.0 } else { temperature };
        let spec = SamplingSpec {
            temperature,
            top_k,
            top_p,
            frequency_penalty: if penalties { 1.5 } else { 0.0 },
            repetition_penalty: if penalties { 1.3 } else { 1.0 },
            logit_bias: vec![(4, 3.0), (9, -50.0)],
            logprobs: Some(3),
            min_tokens: 3,
            stop_token_ids: vec![2, 4],
            seed,
            ..SamplingSpec::default()
        };
        let sampling = spec.validate().unwrap();
        let mut cpu = on_cpu(&model, 16);
        let mut gpu = HarnessRunner::new(&model, 16, false, true);
        let mut sequences = TestSequences::new(&[12], vocabulary, 16, seed as u32);
        gpu.attach(0, &sampling, &sequences.tokens[0]);
        let setup = SlotSetup {
            sampling: Arc::new(sampling),
            choice: 0,
            prompt: &sequences.tokens[0].clone(),
            generated: &[],
            eos_token_ids: &[1],
        };
        cpu.attach(0, &setup).unwrap();
        for _ in 0..5 {
            let mut batch = sequences.batch(&[12]);
            let (tokens, _) = gpu.step(&batch);
            let mut reference = Vec::new();
            cpu.execute(&mut batch, &mut reference).unwrap();
            let (got, want) = (tokens[0].logprobs.as_ref().unwrap(), reference[0].logprobs.as_ref().unwrap());
            for (got, want) in got.top.iter().zip(&want.top) {
                prop_assert!((got.logprob - want.logprob).abs() < 0.1, "{got:?} is not {want:?}");
            }
            prop_assert_eq!(got.top.len(), 3);
            // Logits are close, not equal, so a draw near a boundary may differ; then the sequences diverge.
            if tokens[0].token != reference[0].token {
                return Ok(());
            }
            sequences.tokens[0].push(reference[0].token);
        }
        Ok(())
    };
    proptest::test_runner::TestRunner::new(config)
        .run(&strategy, test)
        .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_model_without_kernels_is_refused_with_the_supported_shapes() {
    let folder = Checkpoint::new(Arch::Llama2, Dtype::Bf16).write_temp().unwrap();
    let model = ModelDir::open(&ModelSource::Directory(folder.path().to_path_buf())).unwrap();
    let refused = check_model(model.config(), 1, false).unwrap_err().to_string();
    assert!(refused.contains("head_dim") && refused.contains("64, 128"), "{refused}");
    // Kernels that were tested in emulation only are an option.
    let model = self::model(Arch::Gemma3, Dtype::Bf16, 1);
    let refused = check_model(model.config(), 1, false).unwrap_err().to_string();
    assert!(refused.contains("Gemma3ForCausalLM") && refused.contains("--gpu-experimental"), "{refused}");
    assert!(check_model(model.config(), 1, true).is_ok());
    // Recurrent layers, some of whose sizes have no kernels.
    let model = self::model(Arch::Qwen35, Dtype::Bf16, 1);
    let refused = check_model(model.config(), 1, false).unwrap_err().to_string();
    assert!(refused.contains("Qwen3_5ForCausalLM") && refused.contains("--gpu-experimental"), "{refused}");
    assert!(check_model(model.config(), 1, true).is_ok());
    let delta = model.config().delta.unwrap();
    for (delta, clue) in [
        (DeltaSpec { key_dim: 96, ..delta }, ["linear_key_head_dim", "96", "[64, 128]"]),
        (DeltaSpec { value_dim: 48, ..delta }, ["linear_value_head_dim", "48", "multiples of 32"]),
    ] {
        let config = ModelConfig { delta: Some(delta), ..model.config().clone() };
        let refused = check_model(&config, 1, true).unwrap_err().to_string();
        assert!(clue.iter().all(|clue| refused.contains(clue)), "{refused}");
    }
}
