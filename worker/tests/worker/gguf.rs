//! GGUF files: bitwise equal to the directories that they were converted from; errors of unusable files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use inflight_contract::SamplingParams;
use inflight_fixtures::{Arch, Checkpoint, Dtype, Family, GgufTensor, GgufValue, TempDir, gguf};
use inflight_kernels::cpu::{RopeScaling, inverse_frequencies};
use inflight_kernels::{Encoding, philox4x32};
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::{Batch, Runtime, SlotSetup};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime};
use serde_json::Value;

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
    mtp: false,
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
    let shape = runtime.capabilities().shape;
    let blocks: Vec<u32> = (0..shape.whole_blocks(30)).collect();
    batch.push_whole(&(5..35).collect::<Vec<u32>>(), 0, &shape, &blocks);
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

/// The file has the value heads of recurrent layers in another order, so sums over them are rounded otherwise.
#[test]
fn a_converted_hybrid_computes_the_values_of_its_directory() {
    for dtype in Dtype::all() {
        let checkpoint = Checkpoint::new(Arch::Qwen35, *dtype);
        let (_folder, path) = written(&checkpoint.gguf().unwrap());
        let directory = checkpoint.write_temp().unwrap();
        let (theirs, ours) = (logits(directory.path()).unwrap(), logits(&path).unwrap());
        let size = theirs.iter().fold(0.0f32, |size, x| size.max(x.abs()));
        let off = theirs.iter().zip(&ours).fold(0.0f32, |off, (a, b)| off.max((a - b).abs())) / size;
        println!("{dtype}: off by {off:.1e} of the largest logit");
        assert!(off < if *dtype == Dtype::F32 { 1e-5 } else { 2e-2 }, "{dtype}: {off:e}");
        assert_eq!(open(&path).unwrap().config().layers, open(directory.path()).unwrap().config().layers);
        let refused = logits_of_ranks(&path, 2).unwrap_err();
        assert!(refused.contains("order of GGUF files") && refused.contains("1 would do"), "{refused}");
    }
}

/// Returns a small Llama file with matrices of random blocks in one encoding, or of the same values in f32 if
/// `widened`.
fn blocks(encoding: Encoding, widened: bool) -> Vec<u8> {
    let (metadata, tensors) = block_model(encoding, widened);
    gguf(&metadata, &tensors)
}

/// Returns metadata and tensors of such a file.
fn block_model(encoding: Encoding, widened: bool) -> (Vec<(String, GgufValue)>, Vec<GgufTensor>) {
    let (hidden, inner, vocab, heads) = (256usize, 512usize, 64usize, 4usize);
    let count = |value: usize| GgufValue::U32(value as u32);
    let own = |name: &str, value| (format!("llama.{name}"), value);
    let metadata = vec![
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
            let halves: &[(usize, f32)] = match encoding {
                Encoding::Q8_0 => &[(0, 0.0007)],
                Encoding::Q4_0 => &[(0, 0.011)],
                Encoding::Q4_1 => &[(0, 0.011), (2, -0.08)],
                Encoding::Q5_0 => &[(0, 0.0055)],
                Encoding::Q5_1 => &[(0, 0.0055), (2, -0.08)],
                Encoding::Q2K => &[(80, 0.004), (82, 0.006)],
                Encoding::Q3K => &[(108, 0.0006)],
                Encoding::Q4K => &[(0, 0.0004), (2, 0.003)],
                Encoding::Q5K => &[(0, 0.0002), (2, 0.003)],
                Encoding::Iq4Nl => &[(0, 0.0007)],
                Encoding::Iq4Xs => &[(0, 0.00004)],
                Encoding::Q6K => &[(208, 0.00004)],
                Encoding::Mxfp4 | Encoding::Plain(_) => &[],
            };
            for (at, value) in halves {
                block[*at..at + 2].copy_from_slice(&scale(*value));
            }
            if encoding == Encoding::Mxfp4 {
                // Exponents of neighbouring blocks differ.
                block[0] = 121 + block[0] % 3;
            }
        }
        let (kind, bytes) = match widened {
            false => (encoding.ggml_type(), bytes),
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
    (metadata, tensors)
}

/// Writes a model in parts, as `llama-gguf-split` does. `change` may change metadata and tensors of a part.
fn in_parts(
    change: impl Fn(usize, &mut Vec<(String, GgufValue)>, &mut Vec<GgufTensor>),
) -> (TempDir, PathBuf) {
    let (metadata, tensors) = block_model(Encoding::Q8_0, false);
    let (folder, whole) = written(&gguf(&metadata, &tensors));
    std::fs::remove_file(whole).unwrap();
    let number = |value: usize| GgufValue::U32(value as u32);
    for part in 0..3 {
        // The first has no tensors.
        let mut own: Vec<GgufTensor> = match part {
            0 => Vec::new(),
            _ => tensors.iter().skip(part - 1).step_by(2).cloned().collect(),
        };
        let mut entries = if part == 0 { metadata.clone() } else { Vec::new() };
        entries.extend([
            ("split.no".to_owned(), number(part)),
            ("split.count".to_owned(), number(3)),
            ("split.tensors.count".to_owned(), number(tensors.len())),
        ]);
        change(part, &mut entries, &mut own);
        let file = folder.path().join(format!("m-00{:03}-of-00003.gguf", part + 1));
        std::fs::write(file, gguf(&entries, &own)).unwrap();
    }
    let first = folder.path().join("m-00001-of-00003.gguf");
    (folder, first)
}

#[test]
fn a_model_in_several_files_has_the_bits_of_one_in_one_file() {
    let (_a, whole) = written(&blocks(Encoding::Q8_0, false));
    let (_b, first) = in_parts(|_, _, _| {});
    assert_eq!(logits(&first).unwrap(), logits(&whole).unwrap());
    assert_eq!(open(&first).unwrap().name(), "m");
}

#[test]
fn parts_that_are_missing_or_of_other_models_are_named() {
    let refused = |path: &Path, clues: &[&str]| {
        let message = open(path).map(drop).unwrap_err();
        assert!(clues.iter().all(|clue| message.contains(clue)), "{message}");
    };
    let (folder, first) = in_parts(|_, _, _| {});
    refused(&folder.path().join("m-00002-of-00003.gguf"), &["part 2 of 3", "-00001-of-00003.gguf"]);
    std::fs::rename(folder.path().join("m-00003-of-00003.gguf"), folder.path().join("other.gguf")).unwrap();
    refused(&first, &["m-00003-of-00003.gguf", "was the download completed?"]);
    std::fs::rename(&first, folder.path().join("renamed.gguf")).unwrap();
    refused(&folder.path().join("renamed.gguf"), &["part 1 of 3", "-00001-of-00003.gguf"]);
    let (_folder, first) = in_parts(|part, entries, _| {
        if part == 2 {
            entries[0].1 = GgufValue::U32(1);
        }
    });
    refused(&first, &["m-00003-of-00003.gguf", "not part 3 of 3"]);
    let (_folder, first) = in_parts(|part, _, tensors| {
        if part == 2 {
            tensors.pop();
        }
    });
    refused(&first, &["parts have", "different models"]);
    let (_folder, first) = in_parts(|part, _, tensors| {
        if part == 2 {
            tensors[0].name = "token_embd.weight".to_owned();
        }
    });
    refused(&first, &["token_embd.weight is in another part", "different models"]);
}

#[test]
fn quantized_files_compute_the_values_of_their_elements() {
    for encoding in Encoding::blocks() {
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
    for encoding in Encoding::blocks() {
        let (_folder, path) = written(&blocks(encoding, false));
        match (encoding, logits_of_ranks(&path, 2)) {
            (_, divided) if encoding.block() == 32 => {
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

/// Vocabulary of a tokenizer.json in the form of GGUF files: tokens in the order of ids, classes, merges.
fn vocabulary(tokenizer: &str) -> (Vec<String>, Vec<i32>, Vec<String>) {
    let original: Value = serde_json::from_str(tokenizer).unwrap();
    let mut tokens: BTreeMap<u64, (String, i32)> = BTreeMap::new();
    for (text, id) in original["model"]["vocab"].as_object().unwrap() {
        let is_byte = text.len() == 6 && text.starts_with("<0x");
        tokens.insert(id.as_u64().unwrap(), (text.clone(), if is_byte { 6 } else { 1 }));
    }
    for token in original["added_tokens"].as_array().unwrap() {
        let text = token["content"].as_str().unwrap().to_owned();
        let class = if text == "<unk>" { 2 } else { 3 };
        tokens.insert(token["id"].as_u64().unwrap(), (text, class));
    }
    let merges = original["model"]["merges"].as_array().unwrap().iter().map(|merge| match merge {
        Value::Array(pair) => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
        merge => merge.as_str().unwrap().to_owned(),
    });
    let (texts, classes) = tokens.into_values().unzip();
    (texts, classes, merges.collect())
}

/// Writes a GGUF file with entries of `tokenizer.ggml` besides, and no tokenizer.json.
fn with_vocabulary(entries: &[(&str, GgufValue)]) -> (TempDir, std::path::PathBuf) {
    let own = |(name, value): &(&str, GgufValue)| (format!("tokenizer.ggml.{name}"), value.clone());
    let entries: Vec<_> = entries.iter().map(own).collect();
    let (folder, path) =
        written(&Checkpoint::new(Arch::Llama2, Dtype::F16).gguf_with(&entries, &[]).unwrap());
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    (folder, path)
}

/// Returns the tokenizer in a bundle.
fn rebuilt(path: &Path) -> tokenizers::Tokenizer {
    let model = open(path).unwrap();
    let (_, rebuilt) = model.bundle_files().iter().find(|(name, _)| name == "tokenizer.json").unwrap();
    tokenizers::Tokenizer::from_bytes(rebuilt).unwrap()
}

const TEXTS: [&str; 3] = ["Hello, world!", "  two  spaces and 12345 digits\n\n", "it's größer 漢字 🙂"];

#[test]
fn embedded_vocabularies_become_tokenizers_or_helpful_errors() {
    let (tokens, classes, merges) = vocabulary(Family::Llama3.tokenizer_json());
    let entries = |model: &str| {
        [
            ("model", GgufValue::Text(model.to_owned())),
            ("pre", GgufValue::Text("llama-bpe".to_owned())),
            ("tokens", GgufValue::Texts(tokens.clone())),
            ("merges", GgufValue::Texts(merges.clone())),
            ("token_type", GgufValue::Ints(classes.clone())),
        ]
    };
    let (_folder, path) = with_vocabulary(&entries("gpt2"));
    let rebuilt = rebuilt(&path);
    let theirs: tokenizers::Tokenizer = Family::Llama3.tokenizer_json().parse().unwrap();
    for text in TEXTS {
        let (ours, theirs) = (rebuilt.encode(text, false).unwrap(), theirs.encode(text, false).unwrap());
        assert_eq!(ours.get_ids(), theirs.get_ids(), "{text:?}");
        assert_eq!(rebuilt.decode(ours.get_ids(), false).unwrap(), text);
    }
    let message = open(&with_vocabulary(&entries("bert")).1).unwrap_err();
    assert!(message.contains("bert") && message.contains("tokenizer.json"), "{message}");
}

/// Tokens of a text by SentencePiece's rule: of all neighbours whose join is a token, those with the highest score are joined first, the
/// leftmost of equal ones; what is no token in the end is written in bytes.
fn sentencepiece_tokens(scores: &BTreeMap<&str, f32>, text: &str) -> Vec<String> {
    let text = format!("▁{}", text.replace(' ', "▁"));
    let mut symbols: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let joins = symbols.windows(2).enumerate().filter_map(|(at, pair)| {
            let score = scores.get(pair.concat().as_str())?;
            Some((at, *score))
        });
        let best = joins.reduce(|best, join| if join.1 > best.1 { join } else { best });
        let Some((at, _)) = best else { break };
        let right = symbols.remove(at + 1);
        symbols[at].push_str(&right);
    }
    let bytes = |symbol: String| match scores.contains_key(symbol.as_str()) {
        true => vec![symbol],
        false => symbol.bytes().map(|byte| format!("<0x{byte:02X}>")).collect(),
    };
    symbols.into_iter().flat_map(bytes).collect()
}

#[test]
fn sentencepiece_vocabularies_with_scores_join_by_the_highest_score() {
    let (tokens, classes, merges) = vocabulary(Family::SentencePiece.tokenizer_json());
    // SentencePiece numbers the results of merges downwards from 0, in the order of the merges.
    let rank = |token: &String| merges.iter().position(|merge| merge.replace(' ', "") == *token);
    let scores: Vec<f32> =
        tokens.iter().map(|token| rank(token).map_or(-1e9, |rank| -(rank as f32))).collect();
    let (_folder, path) = with_vocabulary(&[
        ("model", GgufValue::Text("llama".to_owned())),
        ("tokens", GgufValue::Texts(tokens.clone())),
        ("scores", GgufValue::Floats(scores.clone())),
        ("token_type", GgufValue::Ints(classes.clone())),
    ]);
    let rebuilt = rebuilt(&path);
    let normal = |at: &usize| classes[*at] == 1;
    let by_text = (0..tokens.len()).filter(normal).map(|at| (tokens[at].as_str(), scores[at])).collect();
    for text in TEXTS.iter().chain(&["in the ship, on a tall sea", "a  b\tc\n", "🙂é"]) {
        let encoded = rebuilt.encode(*text, false).unwrap();
        assert_eq!(encoded.get_tokens(), sentencepiece_tokens(&by_text, text), "{text:?}");
        assert_eq!(rebuilt.decode(encoded.get_ids(), false).unwrap(), *text);
    }
    // BOS comes first, and control tokens in a text are tokens.
    let encoded = rebuilt.encode("a</s>", true).unwrap();
    assert_eq!((encoded.get_ids()[0], encoded.get_ids().last()), (1, Some(&2)), "{:?}", encoded.get_tokens());
}

#[test]
fn digits_of_smollm_vocabularies_are_tokens_of_their_own() {
    let (tokens, classes, mut merges) = vocabulary(Family::Llama3.tokenizer_json());
    let mut tokens = tokens;
    tokens.push("12".to_owned());
    merges.insert(0, "1 2".to_owned());
    let (_folder, path) = with_vocabulary(&[
        ("model", GgufValue::Text("gpt2".to_owned())),
        ("pre", GgufValue::Text("smollm".to_owned())),
        ("tokens", GgufValue::Texts(tokens)),
        ("merges", GgufValue::Texts(merges)),
        ("token_type", GgufValue::Ints(classes)),
    ]);
    let encoded = rebuilt(&path).encode("a 1212 b", false).unwrap();
    let digits = encoded.get_tokens().iter().filter(|token| ["1", "2"].contains(&token.as_str())).count();
    assert_eq!(digits, 4, "{:?}", encoded.get_tokens());
}

/// Whether a prompt begins with BOS: as the file says, else as llama.cpp does for the kind of vocabulary.
#[test]
fn the_beginning_of_sequence_follows_the_file_or_the_kind_of_vocabulary() {
    let (tokens, classes, merges) = vocabulary(Family::Llama3.tokenizer_json());
    for (pre, add_bos, expected) in [
        ("llama-bpe", None, true),
        ("llama-bpe", Some(true), true),
        ("llama-bpe", Some(false), false),
        ("qwen2", None, false),
        ("qwen2", Some(true), true),
        ("gpt-2", None, false),
    ] {
        let mut entries = vec![
            ("model", GgufValue::Text("gpt2".to_owned())),
            ("pre", GgufValue::Text(pre.to_owned())),
            ("tokens", GgufValue::Texts(tokens.clone())),
            ("merges", GgufValue::Texts(merges.clone())),
            ("token_type", GgufValue::Ints(classes.clone())),
            ("bos_token_id", GgufValue::U32(280)),
        ];
        entries.extend(add_bos.map(|flag| ("add_bos_token", GgufValue::Bool(flag))));
        let (_folder, path) = with_vocabulary(&entries);
        let ids = rebuilt(&path).encode("Hello", true).unwrap().get_ids().to_vec();
        assert_eq!(ids.first() == Some(&280), expected, "{pre} {add_bos:?}: {ids:?}");
    }
}

#[test]
fn tokens_that_end_a_turn_are_found_by_key_and_by_text() {
    let text = |text: &str| text.to_owned();
    let tokens =
        ["<s>", "</s>", "a", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"];
    let ends = |classes: [i32; 9], keys: &[(&'static str, u32)]| {
        let mut entries = vec![
            ("model", GgufValue::Text(text("gpt2"))),
            ("pre", GgufValue::Text(text("llama-bpe"))),
            ("tokens", GgufValue::Texts(tokens.iter().map(|token| text(token)).collect())),
            ("merges", GgufValue::Texts(Vec::new())),
            ("token_type", GgufValue::Ints(classes.to_vec())),
            ("bos_token_id", GgufValue::U32(0)),
            ("eos_token_id", GgufValue::U32(2)),
        ];
        entries.extend(keys.iter().map(|(key, id)| (*key, GgufValue::U32(*id))));
        open(&with_vocabulary(&entries).1).unwrap().eos_token_ids().to_vec()
    };
    // Texts that are ordinary tokens end nothing.
    assert_eq!(ends([1; 9], &[]), [2]);
    assert_eq!(ends([1; 9], &[("eot_token_id", 3), ("eom_token_id", 4)]), [2, 3, 4]);
    assert_eq!(ends([3, 1, 1, 3, 3, 1, 1, 1, 1], &[]), [2, 3, 4]);
    assert_eq!(ends([3, 1, 1, 1, 1, 4, 3, 1, 1], &[]), [2, 5, 6]);
    // The end of a message of gpt-oss is not the end of the answer.
    assert_eq!(ends([3, 1, 1, 1, 1, 1, 3, 3, 3], &[]), [2, 7, 8]);
}

/// Llama 3.1 and later have the divisors of the rotary frequencies in a tensor, instead of the parameters of their formula.
#[test]
fn rotary_frequencies_of_a_file_give_the_bits_of_the_formula() {
    let checkpoint = Checkpoint::new(Arch::Llama31, Dtype::Bf16);
    let directory = checkpoint.write_temp().unwrap();
    let config =
        ModelDir::open(&ModelSource::Directory(directory.path().to_owned())).unwrap().config().clone();
    let frequencies = |scaling| inverse_frequencies(config.head_dim, config.ropes[0].theta, scaling);
    let (plain, scaled) = (frequencies(&RopeScaling::None), frequencies(&config.ropes[0].scaling));
    // A divisor that gives the scaled frequency exactly: the quotient, or a neighbour of it.
    let divisor = |(plain, scaled): (&f32, &f32)| {
        let quotient = plain / scaled;
        let near = (-4i32..=4).map(|step| f32::from_bits(quotient.to_bits().wrapping_add_signed(step)));
        near.into_iter().find(|divisor| plain / divisor == *scaled).unwrap_or(quotient)
    };
    let divisors: Vec<f32> = plain.iter().zip(&scaled).map(divisor).collect();
    assert!(divisors.iter().any(|divisor| *divisor > 1.5), "some are scaled: {divisors:?}");
    let tensor = |divisors: &[f32]| GgufTensor {
        name: "rope_freqs.weight".to_owned(),
        shape: vec![divisors.len()],
        kind: 0,
        bytes: divisors.iter().flat_map(|divisor| divisor.to_le_bytes()).collect(),
    };
    let file = |divisors: &[f32]| written(&checkpoint.gguf_with(&[], &[tensor(divisors)]).unwrap());
    let (_folder, path) = file(&divisors);
    let (theirs, ours) = (logits(directory.path()).unwrap(), logits(&path).unwrap());
    assert!(theirs.iter().zip(&ours).all(|(a, b)| a.to_bits() == b.to_bits()), "other bits");
    for wrong in
        [&divisors[1..], &[vec![0.0], divisors[1..].to_vec()].concat(), &[f32::NAN; 16], &[1.0; 4096]]
    {
        let message = logits(&file(wrong).1).unwrap_err();
        assert!(message.contains("divisors") || message.contains("rope_freqs"), "{message}");
    }
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
