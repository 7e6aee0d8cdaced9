//! Tensor parallelism of the CPU runtime: logits of mixed ragged batches agree with those of one rank, within
//! the rounding of another summation order, for every architecture that can be partitioned.

use std::sync::Arc;

use inflight_contract::SamplingParams;
use inflight_fixtures::{Arch, Checkpoint, Dtype, TempDir};
use inflight_kernels::cpu::Isa;
use inflight_kernels::philox4x32;
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::{Batch, Runtime, Sampled, SlotSetup};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime, Quantization};
use inflight_worker_core::{LayerGroup, MemoryShape};
use safetensors::tensor::{Dtype as TensorDtype, SafeTensors, TensorView};

const SEQUENCES: usize = 5;
const BLOCK_TOKENS: u32 = 8;

fn load(
    model: &ModelDir,
    isa: Isa,
    quantize: Option<Quantization>,
    ranks: usize,
    threads: usize,
) -> CpuRuntime {
    let options = CpuOptions {
        threads: Some(threads),
        kv_bytes: 16 << 20,
        host_bytes: 0,
        block_tokens: BLOCK_TOKENS,
        slots: SEQUENCES as u32,
        batch_tokens: 320,
        context_tokens: None,
        isa: Some(isa),
        quantize,
        kv_dtype: None,
        tensor_parallel: ranks,
        mtp: false,
    };
    let mut runtime = CpuRuntime::load(model, &options, &|_, _| {}).unwrap();
    for slot in 0..SEQUENCES as u32 {
        let setup = SlotSetup {
            sampling: Arc::new(SamplingParams::greedy()),
            choice: 0,
            prompt: &[],
            generated: &[],
            eos_token_ids: &[],
        };
        runtime.attach(slot, &setup).unwrap();
    }
    runtime
}

fn open(folder: &TempDir) -> ModelDir {
    ModelDir::open(&ModelSource::Directory(folder.path().to_path_buf())).unwrap()
}

/// Returns batches that mix prefill chunks of random sizes with decodes, of random tokens, with a sample of
/// each sequence in a batch, until every sequence has 100 tokens.
fn batches(vocab: u32, seed: u32, shape: MemoryShape) -> Vec<Batch> {
    let mut draws = 0;
    let mut below = |bound: usize| {
        draws += 1;
        philox4x32([draws, 0, 0, 0], [seed, 0])[0] as usize % bound
    };
    let longest = 100u32;
    let most_spans = shape.spans(longest);
    let per_sequence = most_spans * shape.span_blocks() + shape.state_blocks();
    let mut done = [0u32; SEQUENCES];
    let mut batches = Vec::new();
    while done.iter().any(|done| *done < longest) {
        let mut batch = Batch::default();
        batch.clear();
        for (sequence, done) in done.iter_mut().enumerate() {
            if *done == longest || below(4) == 0 {
                continue;
            }
            let most = if below(3) == 0 { 70 } else { 1 };
            let count = (1 + below(most) as u32).min(longest - *done);
            let tokens: Vec<u32> = (0..count).map(|_| below(vocab as usize) as u32).collect();
            // Block tables are interleaved and descending.
            let block = |i: u32| (per_sequence - 1 - i) * SEQUENCES as u32 + sequence as u32;
            let mut before = 0;
            let table = |group: &LayerGroup| {
                let first = before;
                before += most_spans * group.blocks;
                (first..first + shape.spans(*done + count) * group.blocks).map(block).collect()
            };
            let tables: Vec<Vec<u32>> = shape.groups().iter().map(table).collect();
            let state: Vec<u32> = (before..before + shape.state_blocks()).map(block).collect();
            batch.push_tables(&tokens, &[], *done, tables.iter().map(|table| (0, &table[..])), &state);
            batch.sample_last_row(sequence as u32);
            *done += count;
        }
        if batch.rows() > 0 {
            batches.push(batch);
        }
    }
    batches
}

/// Runs batches; returns logits and token of every sample.
fn run(runtime: &mut CpuRuntime, batches: &[Batch]) -> (Vec<Vec<f32>>, Vec<Sampled>) {
    let vocab = runtime.capabilities().vocab_size as usize;
    let (mut all, mut chosen, mut sampled) = (Vec::new(), Vec::new(), Vec::new());
    for batch in batches {
        runtime.execute(&mut batch.clone(), &mut sampled).unwrap();
        all.extend(runtime.logits().chunks_exact(vocab).map(<[f32]>::to_vec));
        chosen.append(&mut sampled);
    }
    (all, chosen)
}

/// Maximum difference of logits, relative to the largest absolute logit of the row.
fn deviation(whole: &[Vec<f32>], divided: &[Vec<f32>]) -> f32 {
    assert_eq!(whole.len(), divided.len());
    let rows = whole.iter().zip(divided).map(|(whole, divided)| {
        assert!(whole.len() == divided.len() && divided.iter().all(|logit| logit.is_finite()));
        let size = whole.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        whole.iter().zip(divided).fold(0.0f32, |most, (a, b)| most.max((a - b).abs())) / size
    });
    rows.fold(0.0, f32::max)
}

/// Writes a Llama checkpoint with all optional biases, including those of row-parallel projections.
fn biased(tied: bool) -> TempDir {
    let folder =
        Checkpoint::new(if tied { Arch::Llama32 } else { Arch::Llama31 }, Dtype::F32).write_temp().unwrap();
    let path = folder.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["attention_bias"] = true.into();
    config["mlp_bias"] = true.into();
    std::fs::write(&path, config.to_string()).unwrap();
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let biases: Vec<(String, Vec<u8>)> = file
        .iter()
        .filter(|(name, _)| name.ends_with("_proj.weight"))
        .enumerate()
        .map(|(which, (name, view))| {
            let element = |i: usize| philox4x32([i as u32, which as u32, 0, 0], [9, 0])[0] as f32 / 4e9 - 0.5;
            let elements = (0..view.shape()[0]).flat_map(|i| element(i).to_le_bytes()).collect();
            (name.replace(".weight", ".bias"), elements)
        })
        .collect();
    assert!(biases.iter().any(|(name, _)| name.ends_with("down_proj.bias")));
    let added = biases.iter().map(|(name, bytes)| {
        (name.clone(), TensorView::new(TensorDtype::F32, vec![bytes.len() / 4], bytes).unwrap())
    });
    let tensors = file.iter().map(|(name, view)| (name.to_owned(), view.clone()));
    let written = safetensors::serialize(tensors.chain(added), None).unwrap();
    drop(file);
    std::fs::write(path, written).unwrap();
    folder
}

#[test]
fn two_and_four_ranks_agree_with_one_within_1e_5_in_f32() {
    let of = |arch: &Arch| (arch.to_string(), Checkpoint::new(*arch, Dtype::F32).write_temp().unwrap());
    let mut models: Vec<(String, TempDir)> = Arch::all().iter().map(of).collect();
    models.push(("llama31 with biases".to_owned(), biased(false)));
    models.push(("llama32 with biases".to_owned(), biased(true)));
    let mut compared = 0;
    for (seed, (name, folder)) in models.iter().enumerate() {
        let model = open(folder);
        let (heads, kv_heads) = (model.config().heads, model.config().kv_heads);
        for isa in crate::instruction_sets("tensor parallelism") {
            let mut alone = load(&model, isa, None, 1, 2);
            // Of the same tokens; states take other numbers of blocks.
            let batches_of = |runtime: &CpuRuntime| {
                let capabilities = runtime.capabilities();
                batches(capabilities.vocab_size, seed as u32, capabilities.shape)
            };
            let batches = batches_of(&alone);
            let (whole, tokens) = run(&mut alone, &batches);
            assert!(whole.len() > 30 && batches.iter().any(|batch| batch.rows() > batch.sequences() + 20));
            let key_heads = model.config().delta.map_or(heads, |delta| delta.key_heads);
            let divides = |ranks: &usize| heads.is_multiple_of(*ranks) && key_heads.is_multiple_of(*ranks);
            for ranks in [2, 4].into_iter().filter(divides) {
                let mut runtime = load(&model, isa, None, ranks, 3);
                let batches = batches_of(&runtime);
                let (divided, same) = run(&mut runtime, &batches);
                let off = deviation(&whole, &divided);
                println!("{name}, {heads}/{kv_heads} heads, {}, {ranks} ranks: off by {off:.1e}", isa.name());
                assert!(off <= 1e-5, "{name} {} {ranks} ranks: logits are off by {off:e}", isa.name());
                assert_eq!(tokens, same, "{name} {} {ranks} ranks", isa.name());
                compared += 1;
            }
        }
    }
    assert!(compared >= 17, "only {compared} were compared");
}

#[test]
fn sixteen_bit_and_quantized_models_agree_within_their_rounding() {
    for arch in [Arch::Llama31, Arch::Qwen2, Arch::Qwen3] {
        for (dtype, quantize, most) in [
            (Dtype::Bf16, None, 1e-2),
            (Dtype::F16, None, 2e-3),
            // Groups are those of the unsharded model, so only activations between two integers can round
            // differently, each by 1/127 of its group's maximum; how many do depends on the instruction set
            // (1.03e-2 on AVX2).
            (Dtype::F32, Some("int8:8"), 2e-2),
            (Dtype::F32, Some("int4:8"), 2e-2),
        ] {
            let folder = Checkpoint::new(arch, dtype).write_temp().unwrap();
            let model = open(&folder);
            let shape = MemoryShape::uniform(BLOCK_TOKENS);
            let batches = batches(model.config().vocab_size as u32, 77, shape);
            let quantize = quantize.map(|name| name.parse().unwrap());
            let (whole, _) = run(&mut load(&model, Isa::detect(), quantize, 1, 2), &batches);
            let (divided, _) = run(&mut load(&model, Isa::detect(), quantize, 2, 2), &batches);
            let off = deviation(&whole, &divided);
            println!("{arch} {dtype} {quantize:?}: off by {off:.1e}");
            assert!(off > 0.0 && off <= most, "{arch} {dtype} {quantize:?}: off by {off:e}");
        }
    }
}

#[test]
fn pools_and_progress_equal_those_of_the_unsharded_model() {
    let model = ModelDir::open(&ModelSource::Embedded).unwrap();
    let loaded = |ranks: usize| {
        let options = CpuOptions {
            threads: Some(2),
            kv_bytes: 8 << 20,
            host_bytes: 4 << 20,
            block_tokens: 16,
            slots: 1,
            batch_tokens: 16,
            context_tokens: None,
            isa: None,
            quantize: None,
            kv_dtype: None,
            tensor_parallel: ranks,
            mtp: false,
        };
        let most = std::sync::Mutex::new((0, 0));
        let progress = |done: u64, total: u64| {
            let mut most = most.lock().unwrap();
            *most = (most.0.max(done), total);
        };
        let runtime = CpuRuntime::load(&model, &options, &progress).unwrap();
        let capabilities = runtime.capabilities();
        let (done, total) = most.into_inner().unwrap();
        assert_eq!(done, total, "loading ends");
        (capabilities.blocks, capabilities.host_blocks, total)
    };
    // Two KV heads: one per rank.
    assert_eq!(loaded(1), loaded(2));
    // Four ranks hold two replicas of each.
    let (blocks, host_blocks, _) = loaded(1);
    let (fourth, host_fourth, _) = loaded(4);
    assert_eq!((fourth, host_fourth), (blocks / 2, host_blocks / 2));
}
