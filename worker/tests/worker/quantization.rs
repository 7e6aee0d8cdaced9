//! Quality of quantization: the demo model's perplexity with quantized weights or KV cache stays close to the
//! original.

use std::sync::Arc;

use half::bf16;
use inflight_contract::SamplingParams;
use inflight_fixtures::{Arch, Checkpoint, Dtype, TempDir, is_left_to_the_night};
use inflight_kernels::cpu::{Isa, KvDtype};
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::{Batch, Runtime, SampleRow, SlotSetup};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime, Quantization};
use safetensors::tensor::TensorView;
use tokenizers::Tokenizer;

/// Stories of the grammar that the demo model was trained on (`worker/demo/train/corpus/stories.py`).
const TEXT: &str = include_str!("../data/stories.txt");

fn load(model: &ModelDir, isa: Isa, quantize: Option<Quantization>, kv_dtype: Option<KvDtype>) -> CpuRuntime {
    let options = CpuOptions {
        threads: Some(2),
        kv_bytes: 64 << 20,
        host_bytes: 0,
        block_tokens: 16,
        // A sample row for each token of a story.
        slots: 512,
        batch_tokens: 512,
        context_tokens: None,
        isa: Some(isa),
        quantize,
        kv_dtype,
        tensor_parallel: 1,
        mtp: false,
    };
    CpuRuntime::load(model, &options, &|_, _| {}).unwrap()
}

/// Perplexity over all tokens but the first of each story; stories are independent.
fn perplexity(runtime: &mut CpuRuntime, stories: &[Vec<u32>]) -> f64 {
    let setup = SlotSetup {
        sampling: Arc::new(SamplingParams::greedy()),
        choice: 0,
        prompt: &[],
        generated: &[],
        eos_token_ids: &[],
    };
    runtime.attach(0, &setup).unwrap();
    let vocab = runtime.capabilities().vocab_size as usize;
    let blocks: Vec<u32> = (0..64).collect();
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    let (mut total, mut count) = (0.0, 0);
    for story in stories {
        batch.clear();
        batch.push_sequence(story, 0, &blocks[..story.len().div_ceil(16)]);
        let rows = 0..story.len() as u32 - 1;
        batch.samples.extend(rows.map(|row| SampleRow {
            row,
            slot: 0,
            position: row + 1,
            masked: false,
            drafted: false,
        }));
        runtime.execute(&mut batch, &mut sampled).unwrap();
        for (logits, next) in runtime.logits().chunks_exact(vocab).zip(&story[1..]) {
            let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = logits.iter().map(|logit| f64::from(logit - best).exp()).sum();
            total += f64::from(best) + sum.ln() - f64::from(logits[*next as usize]);
            count += 1;
        }
    }
    assert!(count > 5_000, "only {count} tokens");
    (total / f64::from(count)).exp()
}

/// Writes the demo model's weights as a bf16 checkpoint.
fn widened_demo() -> TempDir {
    let demo = ModelDir::open(&ModelSource::Embedded).unwrap();
    let config = demo.config();
    let (hidden, heads, kv) = (config.hidden_size, config.heads, config.kv_heads * config.head_dim);
    let (inner, queries) = (config.intermediate_size, heads * config.head_dim);
    let mut shapes = vec![
        ("model.embed_tokens.weight".to_owned(), vec![config.vocab_size, hidden]),
        ("model.norm.weight".to_owned(), vec![hidden]),
    ];
    for layer in 0..config.layers.len() {
        let of_layer = [
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![queries, hidden]),
            ("self_attn.k_proj", vec![kv, hidden]),
            ("self_attn.v_proj", vec![kv, hidden]),
            ("self_attn.o_proj", vec![hidden, queries]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
        ];
        shapes.extend(of_layer.map(|(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape)));
    }
    let tensors: Vec<_> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let tensor = demo.tensors().get(&name, &shape).unwrap();
            let values = match shape[..] {
                [rows, columns] => {
                    // Row by row: those of query and key projections are interleaved in the file.
                    let (loaded, mut values) = (tensor.load().unwrap(), vec![0.0; rows * columns]);
                    for (row, out) in values.chunks_exact_mut(columns).enumerate() {
                        tensor.encoding.widen(loaded.columns_of_row(row, 0..columns), out);
                    }
                    values
                }
                _ => tensor.to_f32().unwrap(),
            };
            let bytes: Vec<u8> = values.into_iter().flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect();
            (name, shape, bytes)
        })
        .collect();
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name, TensorView::new(safetensors::Dtype::BF16, shape.clone(), bytes).unwrap())
    });
    let folder = TempDir::new("inflight-widened").unwrap();
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
    for (name, content) in demo.bundle_files() {
        std::fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

#[test]
fn perplexity_is_within_1_percent_with_8_bits_and_within_4_with_4() {
    if is_left_to_the_night("quantization::perplexity_is_within_1_percent_with_8_bits_and_within_4_with_4") {
        return;
    }
    let folder = widened_demo();
    let model = ModelDir::open(&ModelSource::Directory(folder.path().to_path_buf())).unwrap();
    let (_, tokenizer) = model.bundle_files().iter().find(|(name, _)| name == "tokenizer.json").unwrap();
    let tokenizer = Tokenizer::from_bytes(tokenizer).unwrap();
    let encode = |story: &str| tokenizer.encode(story, true).unwrap().get_ids().to_vec();
    let stories: Vec<Vec<u32>> =
        TEXT.split("***").map(str::trim).filter(|story| !story.is_empty()).map(encode).collect();
    assert!(stories.iter().all(|story| story.len() <= 512), "a story does not fit a batch");
    let isas = crate::instruction_sets("quantization");
    for isa in isas {
        let plain = perplexity(&mut load(&model, isa, None, None), &stories);
        let embedded = ModelDir::open(&ModelSource::Embedded).unwrap();
        let stored = perplexity(&mut load(&embedded, isa, None, None), &stories);
        assert!((stored / plain - 1.0).abs() < 0.01, "as it is stored: {stored}, widened: {plain}");
        let bytes = Some(KvDtype::Int8);
        for (quantization, kv, most) in [
            (Some("int8"), None, 1.0),
            (Some("int8:64"), None, 1.0),
            (Some("int8:128"), None, 1.0),
            (Some("int8:192"), None, 1.0),
            (Some("int4"), None, 4.0),
            (None, bytes, 1.0),
            (Some("int8"), bytes, 1.0),
        ] {
            let quantized = quantization.map(|name| name.parse().unwrap());
            let rounded = perplexity(&mut load(&model, isa, quantized, kv), &stories);
            let worse = (rounded / plain - 1.0) * 100.0;
            let what = format!("{} {}, keys and values {kv:?}", isa.name(), quantization.unwrap_or("bf16"));
            println!("{what}: {rounded:.4} against {plain:.4}, {worse:+.2} %");
            assert!(worse.abs() <= most, "{what}: perplexity {worse:+.2} %");
        }
    }
}

#[test]
fn padded_groups_work_and_formats_have_distinct_fingerprints() {
    let folder = Checkpoint::new(Arch::Llama31, Dtype::Bf16).write_temp().unwrap();
    let model = ModelDir::open(&ModelSource::Directory(folder.path().to_path_buf())).unwrap();
    let mut fingerprints = Vec::new();
    let groups = ["int8", "int8:64", "int4", "int8:40", "int4:136", "int8:256"];
    let weights = groups.map(|name| (Some(name.parse().unwrap()), None));
    for (quantize, kv) in [(None, None), (None, Some(KvDtype::Int8))].into_iter().chain(weights) {
        let mut runtime = load(&model, Isa::detect(), quantize, kv);
        fingerprints.push(runtime.capabilities().fingerprint.clone());
        let setup = SlotSetup {
            sampling: Arc::new(SamplingParams::greedy()),
            choice: 0,
            prompt: &[],
            generated: &[],
            eos_token_ids: &[],
        };
        runtime.attach(0, &setup).unwrap();
        let (mut batch, mut sampled) = (Batch::default(), Vec::new());
        batch.clear();
        batch.push_sequence(&[5, 6, 7], 0, &[0]);
        batch.sample_last_row(0);
        runtime.execute(&mut batch, &mut sampled).unwrap();
        assert!(runtime.logits().iter().all(|logit| logit.is_finite()), "{quantize:?}");
    }
    let kinds = fingerprints.len();
    fingerprints.sort();
    fingerprints.dedup();
    assert_eq!(fingerprints.len(), kinds);
}
