//! GGUF files: bitwise equal to the directories that they were converted from; errors of unusable files.

use std::path::Path;
use std::sync::Arc;

use inflight_contract::SamplingParams;
use inflight_fixtures::{Arch, Checkpoint, Dtype, Family, GgufTensor, GgufValue, TempDir, gguf};
use inflight_kernels::{Encoding, philox4x32};
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::{Batch, Runtime, SlotSetup};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime};

const OPTIONS: CpuOptions = CpuOptions {
    threads: Some(1),
    kv_bytes: 1 << 20,
    host_bytes: 0,
    block_tokens: 16,
    slots: 1,
    batch_tokens: 64,
    context_tokens: None,
    isa: None,
    quantize: None,
    kv_dtype: None,
    tensor_parallel: 1,
};

fn open(path: &Path) -> Result<ModelDir, String> {
    ModelDir::open(&ModelSource::Directory(path.to_path_buf())).map_err(|error| error.to_string())
}

/// Logits after a fixed prompt.
fn logits(path: &Path) -> Result<Vec<f32>, String> {
    logits_of_ranks(path, 1)
}

fn logits_of_ranks(path: &Path, tensor_parallel: usize) -> Result<Vec<f32>, String> {
    let options = CpuOptions { tensor_parallel, ..OPTIONS };
    let mut runtime =
        CpuRuntime::load(&open(path)?, &options, &|_, _| {}).map_err(|error| error.to_string())?;
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
    batch.push_sequence(&(5..35).collect::<Vec<u32>>(), 0, &[0, 1]);
    batch.sample_last_row(0);
    runtime.execute(&mut batch, &mut sampled).unwrap();
    Ok(runtime.logits().to_vec())
}

/// Writes a GGUF file with a tokenizer.json in the same directory.
fn written(bytes: &[u8]) -> (TempDir, std::path::PathBuf) {
    let folder = TempDir::new("inflight-gguf").unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), Family::Llama3.tokenizer_json()).unwrap();
    let path = folder.path().join("tiny.gguf");
    std::fs::write(&path, bytes).unwrap();
    (folder, path)
}

#[test]
fn a_converted_checkpoint_computes_the_bits_of_its_directory() {
    for arch in [Arch::Llama2, Arch::Llama2Linear, Arch::Qwen2, Arch::Qwen25, Arch::Qwen3] {
        for dtype in Dtype::all() {
            let checkpoint = Checkpoint::new(arch, *dtype);
            let (_folder, path) = written(&checkpoint.gguf().unwrap());
            let directory = checkpoint.write_temp().unwrap();
            let (theirs, ours) = (logits(directory.path()).unwrap(), logits(&path).unwrap());
            assert!(theirs.iter().zip(&ours).all(|(a, b)| a.to_bits() == b.to_bits()), "{arch} {dtype}");
            assert_eq!(open(&path).unwrap().name(), "tiny");
            if arch != Arch::Qwen25 {
                let halves = |path: &Path| logits_of_ranks(path, 2).unwrap();
                let (theirs, ours) = (halves(directory.path()), halves(&path));
                let same = theirs.iter().zip(&ours).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{arch} {dtype}, two ranks");
            }
        }
    }
}

/// Returns a small Llama file with matrices of random blocks in one encoding, or of the same values in f32 if
/// `widened`.
fn blocks(encoding: Encoding, widened: bool) -> Vec<u8> {
    let (hidden, inner, vocab, heads) = (256usize, 512usize, 64usize, 4usize);
    let count = |value: usize| GgufValue::U32(value as u32);
    let own = |name: &str, value| (format!("llama.{name}"), value);
    let metadata = [
        ("general.architecture".to_owned(), GgufValue::Text("llama".to_owned())),
        own("block_count", count(2)),
        own("embedding_length", count(hidden)),
        own("feed_forward_length", count(inner)),
        own("context_length", count(64)),
        own("attention.head_count", count(heads)),
        own("attention.head_count_kv", count(2)),
        own("attention.layer_norm_rms_epsilon", GgufValue::F32(1e-5)),
    ];
    let mut shapes = vec![("token_embd", vec![vocab, hidden]), ("output_norm", vec![hidden])];
    let layer = [
        ("attn_norm", vec![hidden]),
        ("ffn_norm", vec![hidden]),
        ("attn_q", vec![hidden, hidden]),
        ("attn_k", vec![hidden / 2, hidden]),
        ("attn_v", vec![hidden / 2, hidden]),
        ("attn_output", vec![hidden, hidden]),
        ("ffn_gate", vec![inner, hidden]),
        ("ffn_up", vec![inner, hidden]),
        ("ffn_down", vec![hidden, inner]),
    ];
    let names = ["blk.0.", "blk.1."];
    let mut tensors = Vec::new();
    let mut add = |name: String, shape: Vec<usize>| {
        let elements: usize = shape.iter().product();
        let seed = name.bytes().fold(7u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        if shape.len() == 1 {
            let bytes = vec![1.0f32; elements].iter().flat_map(|one| one.to_le_bytes()).collect();
            tensors.push(GgufTensor { name, shape, kind: 0, bytes });
            return;
        }
        let random = |i: usize| philox4x32([i as u32, 0, 0, 0], [seed, 0])[0] as u8;
        let mut bytes: Vec<u8> = (0..encoding.bytes(elements)).map(random).collect();
        let scale = |value: f32| half::f16::from_f32(value).to_le_bytes();
        for block in bytes.chunks_exact_mut(encoding.block_bytes()) {
            match encoding {
                Encoding::Q8_0 => block[..2].copy_from_slice(&scale(0.0007)),
                Encoding::Q4_0 => block[..2].copy_from_slice(&scale(0.011)),
                Encoding::Q4K => {
                    block[..2].copy_from_slice(&scale(0.0004));
                    block[2..4].copy_from_slice(&scale(0.003));
                }
                _ => block[208..].copy_from_slice(&scale(0.00004)),
            }
        }
        let kind = match encoding {
            Encoding::Q8_0 => 8,
            Encoding::Q4_0 => 2,
            Encoding::Q4K => 12,
            _ => 14,
        };
        let (kind, bytes) = match widened {
            false => (kind, bytes),
            true => {
                let mut wide = vec![0.0; elements];
                encoding.widen(&bytes, &mut wide);
                (0, wide.iter().flat_map(|x| x.to_le_bytes()).collect())
            }
        };
        tensors.push(GgufTensor { name, shape, kind, bytes });
    };
    for (name, shape) in shapes.drain(..) {
        add(format!("{name}.weight"), shape);
    }
    for prefix in names {
        for (name, shape) in &layer {
            add(format!("{prefix}{name}.weight"), shape.clone());
        }
    }
    gguf(&metadata, &tensors)
}

#[test]
fn quantized_files_compute_the_values_of_their_elements() {
    for encoding in [Encoding::Q8_0, Encoding::Q4_0, Encoding::Q4K, Encoding::Q6K] {
        let (_a, exact) = written(&blocks(encoding, true));
        let (_b, stored) = written(&blocks(encoding, false));
        let (exact, stored) = (logits(&exact).unwrap(), logits(&stored).unwrap());
        let size = (exact.iter().map(|x| x * x).sum::<f32>() / exact.len() as f32).sqrt();
        let off = exact.iter().zip(&stored).map(|(a, b)| (a - b).powi(2)).sum::<f32>() / exact.len() as f32;
        let off = off.sqrt() / size;
        println!("{encoding}: off by {off:.4} of {size:.3}");
        assert!(off < 0.05 && size > 1e-3, "{encoding}: off by {off} of {size}");
    }
}

#[test]
fn quantized_files_are_partitioned_at_block_boundaries_or_rejected() {
    for encoding in [Encoding::Q8_0, Encoding::Q4_0, Encoding::Q4K, Encoding::Q6K] {
        let (_folder, path) = written(&blocks(encoding, false));
        match (encoding, logits_of_ranks(&path, 2)) {
            (Encoding::Q8_0 | Encoding::Q4_0, divided) => {
                let (whole, divided) = (logits(&path).unwrap(), divided.unwrap());
                let size = whole.iter().fold(0.0f32, |most, x| most.max(x.abs()));
                let off = whole.iter().zip(&divided).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
                println!("{encoding}, two ranks: off by {off:e} of {size}");
                // Quantized activations may round the other way.
                assert!(off <= 0.01 * size, "{encoding}: off by {off} of {size}");
            }
            (_, refused) => {
                let message = refused.unwrap_err();
                for clue in ["--tensor-parallel 2", "128 of the 256 inputs of o_proj", "groups of 256"] {
                    assert!(message.contains(clue), "{message}");
                }
            }
        }
    }
}

#[test]
fn an_embedded_vocabulary_becomes_a_tokenizer_or_a_helpful_error() {
    let original: serde_json::Value = serde_json::from_str(Family::Llama3.tokenizer_json()).unwrap();
    let mut tokens: Vec<(u64, String)> = original["model"]["vocab"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(text, id)| (id.as_u64().unwrap(), text.clone()))
        .collect();
    let special: Vec<u64> = original["added_tokens"]
        .as_array()
        .unwrap()
        .iter()
        .map(|token| {
            tokens.push((token["id"].as_u64().unwrap(), token["content"].as_str().unwrap().to_owned()));
            token["id"].as_u64().unwrap()
        })
        .collect();
    tokens.sort();
    tokens.dedup();
    let merges = original["model"]["merges"].as_array().unwrap().iter().map(|merge| match merge {
        serde_json::Value::Array(pair) => {
            format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap())
        }
        merge => merge.as_str().unwrap().to_owned(),
    });
    let classes: Vec<i32> = tokens.iter().map(|(id, _)| if special.contains(id) { 3 } else { 1 }).collect();
    let inside = |model: &str| {
        let mut bytes = Vec::new();
        let entry = |name: &str, value| (format!("tokenizer.ggml.{name}"), value);
        let metadata = [
            ("general.architecture".to_owned(), GgufValue::Text("llama".to_owned())),
            entry("model", GgufValue::Text(model.to_owned())),
            entry("pre", GgufValue::Text("llama-bpe".to_owned())),
            entry("tokens", GgufValue::Texts(tokens.iter().map(|(_, text)| text.clone()).collect())),
            entry("merges", GgufValue::Texts(merges.clone().collect())),
            entry("token_type", GgufValue::Ints(classes.clone())),
            entry("add_bos_token", GgufValue::Bool(false)),
            ("llama.block_count".to_owned(), GgufValue::U32(1)),
            ("llama.embedding_length".to_owned(), GgufValue::U32(64)),
            ("llama.feed_forward_length".to_owned(), GgufValue::U32(64)),
            ("llama.context_length".to_owned(), GgufValue::U32(64)),
            ("llama.attention.head_count".to_owned(), GgufValue::U32(2)),
            ("llama.attention.layer_norm_rms_epsilon".to_owned(), GgufValue::F32(1e-5)),
        ];
        let embedding = GgufTensor {
            name: "token_embd.weight".to_owned(),
            shape: vec![tokens.len(), 64],
            kind: 0,
            bytes: vec![0; tokens.len() * 64 * 4],
        };
        bytes.extend(gguf(&metadata, &[embedding]));
        let (folder, path) = written(&bytes);
        std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
        (folder, path)
    };
    let (_folder, path) = inside("gpt2");
    let model = open(&path).unwrap();
    let (_, rebuilt) = model.bundle_files().iter().find(|(name, _)| name == "tokenizer.json").unwrap();
    let rebuilt = tokenizers::Tokenizer::from_bytes(rebuilt).unwrap();
    let theirs: tokenizers::Tokenizer = Family::Llama3.tokenizer_json().parse().unwrap();
    for text in ["Hello, world!", "  two  spaces and 12345 digits\n\n", "it's größer 漢字 🙂", ""] {
        let (ours, theirs) = (rebuilt.encode(text, false).unwrap(), theirs.encode(text, false).unwrap());
        assert_eq!(ours.get_ids(), theirs.get_ids(), "{text:?}");
        assert_eq!(rebuilt.decode(ours.get_ids(), false).unwrap(), text);
    }
    let message = open(&inside("bert").1).unwrap_err();
    assert!(message.contains("bert") && message.contains("tokenizer.json"), "{message}");
}

#[test]
fn truncated_or_inconsistent_files_are_rejected_with_the_reason() {
    let whole = Checkpoint::new(Arch::Llama2, Dtype::F16).gguf().unwrap();
    let message = |bytes: &[u8]| {
        let (_folder, path) = written(bytes);
        let message = logits(&path).unwrap_err();
        assert!(message.contains("tiny.gguf"), "{message}");
        message
    };
    // Densely truncated in the header, then sparsely: never a panic, never a model.
    for end in (0..2000.min(whole.len())).step_by(3).chain((2000..whole.len()).step_by(4999)) {
        let message = message(&whole[..end]);
        assert!(message.contains("truncated") || message.contains("GGUF"), "{end}: {message}");
    }
    let with = |at: usize, bytes: &[u8]| {
        let mut lying = whole.clone();
        lying[at..at + bytes.len()].copy_from_slice(bytes);
        message(&lying)
    };
    assert!(with(0, b"GGML").contains("no GGUF file"));
    assert!(with(4, &99u32.to_le_bytes()).contains("version 99"));
    assert!(with(8, &u64::MAX.to_le_bytes()).contains("truncated"));
    assert!(with(16, &u64::MAX.to_le_bytes()).contains("truncated"));
    assert!(with(24, &u64::MAX.to_le_bytes()).contains("truncated"));
    // The first tensor's entry: name, dimensions, shape, type, offset.
    let name = b"token_embd.weight";
    let entry = whole.windows(name.len()).position(|window| window == name).unwrap() + name.len();
    assert!(with(entry, &9u32.to_le_bytes()).contains("9 dimensions"));
    assert!(with(entry + 4, &(1u64 << 62).to_le_bytes()).contains("claims the shape"));
    assert!(with(entry + 20, &99u32.to_le_bytes()).contains("type 99"));
    assert!(with(entry + 24, &(1u64 << 40).to_le_bytes()).contains("past the end"));
    assert!(with(entry + 24, &u64::MAX.to_le_bytes()).contains("past the end"));
    let text = String::from_utf8_lossy(&whole).into_owned();
    let family = text.find("llama").unwrap();
    assert!(with(family, b"bloom").contains("bloom"));
    let missing = open(Path::new("/nowhere/model.gguf")).unwrap_err();
    assert!(missing.contains("/nowhere/model.gguf"), "{missing}");
}
