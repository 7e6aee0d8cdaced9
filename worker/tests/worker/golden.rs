//! Golden bits: hashes of logits and tokens of the tiny checkpoints, for every instruction set, dtype,
//! quantization and KV cache dtype. Failover moves streams between workers with one numerics fingerprint in
//! mid-sentence, so changed bits under an unchanged version are an error.
//!
//! The first line of `golden/bits.txt` is the version of its hashes. After a change of arithmetic: raise
//! `inflight_kernels::VERSION`, then record on a machine of each instruction set with `INFLIGHT_GOLDEN=record
//! cargo test --workspace --test worker golden`.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use inflight_contract::SamplingSpec;
use inflight_fixtures::{Arch, BenchmarkShape, Checkpoint, Dtype, TempDir, skipped};
use inflight_kernels::cpu::{Isa, KvDtype};
use inflight_kernels::{VERSION, philox4x32};
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::{Batch, Runtime, SlotSetup};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime, Quantization};
use sha2::{Digest as _, Sha256};

/// Recorded instruction sets. A build has one of the first two, see [`Isa::name`].
const ISAS: [&str; 6] = ["portable", "portable-fma", "avx2", "avx512", "avx512-vnni", "avx512-bf16"];
/// Prompt and output tokens; the prompts end within the first attention tile and after several.
const PROMPTS: [(usize, usize); 2] = [(37, 24), (600, 4)];
/// Prompt and output tokens for a layer of real width, whose reductions span several cache blocks.
const WIDE_PROMPTS: [(usize, usize); 1] = [(37, 4)];

/// Storage and partitioning of a model.
#[derive(Debug, Clone, Copy)]
struct StorageFormat {
    dtype: Dtype,
    weights: Option<&'static str>,
    kv: Option<KvDtype>,
    ranks: usize,
}

const PLAIN: StorageFormat = StorageFormat { dtype: Dtype::Bf16, weights: None, kv: None, ranks: 1 };

/// Returns every combination that decides bits.
fn storage_formats() -> Vec<StorageFormat> {
    let int8_kv = StorageFormat { kv: Some(KvDtype::Int8), ..PLAIN };
    vec![
        PLAIN,
        StorageFormat { dtype: Dtype::F32, ..PLAIN },
        StorageFormat { dtype: Dtype::F16, ..PLAIN },
        StorageFormat { weights: Some("int8"), ..PLAIN },
        StorageFormat { weights: Some("int4"), ..PLAIN },
        int8_kv,
        StorageFormat { weights: Some("int8"), ..int8_kv },
        StorageFormat { weights: Some("int4"), ..int8_kv },
        StorageFormat { ranks: 2, ..PLAIN },
    ]
}

impl StorageFormat {
    fn name(&self) -> String {
        let kv = if self.kv.is_some() { "int8" } else { "auto" };
        let weights = self.weights.unwrap_or("none");
        format!("{} quantize={weights} kv={kv} ranks={}", self.dtype, self.ranks)
    }
}

fn load(path: &Path, isa: Isa, format: StorageFormat) -> CpuRuntime {
    let model = ModelDir::open(&ModelSource::Directory(path.to_path_buf())).unwrap();
    let options = CpuOptions {
        threads: Some(1),
        kv_bytes: 16 << 20,
        host_bytes: 0,
        block_tokens: 16,
        slots: 4,
        batch_tokens: 1024,
        context_tokens: None,
        isa: Some(isa),
        quantize: format.weights.map(|weights| weights.parse::<Quantization>().unwrap()),
        kv_dtype: format.kv,
        tensor_parallel: format.ranks,
        mtp: false,
    };
    CpuRuntime::load(&model, &options, &|_, _| {}).unwrap()
}

fn greedy() -> SamplingSpec {
    SamplingSpec { temperature: 0.0, ..SamplingSpec::default() }
}

/// Sampling parameters that enable every step of the sampler.
fn sampled() -> SamplingSpec {
    SamplingSpec {
        temperature: 1.1,
        top_k: 60,
        top_p: 0.97,
        min_p: 0.001,
        presence_penalty: 0.2,
        frequency_penalty: 0.1,
        repetition_penalty: 1.1,
        logit_bias: vec![(17, 1.5), (100, -3.0)],
        seed: 7,
        ..SamplingSpec::default()
    }
}

/// Runs a prompt in one chunk and generates; returns the hash of all sampled logits, and the tokens.
fn run(runtime: &mut CpuRuntime, spec: &SamplingSpec, prompt: usize, output: usize) -> (Sha256, Vec<u32>) {
    let vocab = runtime.capabilities().vocab_size;
    let mut tokens: Vec<u32> =
        (0..prompt as u32).map(|at| philox4x32([at, 7, 0, 0], [11, 1])[0] % vocab).collect();
    let sampling = Arc::new(spec.clone().validate().unwrap());
    let setup = SlotSetup { sampling, choice: 0, prompt: &tokens, generated: &[], eos_token_ids: &[] };
    runtime.attach(0, &setup).unwrap();
    let shape = runtime.capabilities().shape;
    let blocks: Vec<u32> = (0..shape.whole_blocks((prompt + output) as u32)).collect();
    let (mut batch, mut chosen, mut logits) = (Batch::default(), Vec::new(), Sha256::new());
    let mut fed = 0;
    while tokens.len() < prompt + output {
        batch.clear();
        batch.push_whole(&tokens[fed..], fed as u32, &shape, &blocks);
        batch.sample_last_row(0);
        fed = tokens.len();
        runtime.execute(&mut batch, &mut chosen).unwrap();
        for logit in &runtime.logits()[..vocab as usize] {
            logits.update(logit.to_bits().to_le_bytes());
        }
        tokens.push(chosen.pop().unwrap().token);
    }
    runtime.detach(0);
    (logits, tokens.split_off(prompt))
}

/// First 8 bytes of a hash, in hex.
fn short(hash: Sha256) -> String {
    hash.finalize().iter().take(8).fold(String::new(), |mut text, byte| {
        // Writing to a string can't fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Hashes of one model: logits and tokens, greedy and sampled.
fn hashes(runtime: &mut CpuRuntime, prompts: &[(usize, usize)]) -> String {
    let mut parts = Vec::new();
    for spec in [greedy(), sampled()] {
        let (mut all_logits, mut all_tokens) = (Sha256::new(), Sha256::new());
        for (prompt, output) in prompts {
            let (logits, tokens) = run(runtime, &spec, *prompt, *output);
            all_logits.update(logits.finalize());
            tokens.iter().for_each(|token| all_tokens.update(token.to_le_bytes()));
        }
        parts.extend([short(all_logits), short(all_tokens)]);
    }
    parts.join(" ")
}

/// Hashes of an instruction set by model and storage format.
fn compute(isa: Isa, wide: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for arch in Arch::all() {
        for dtype in Dtype::all() {
            let folder = Checkpoint::new(*arch, *dtype).write_temp().unwrap();
            // A longer context, for prompts over several tiles.
            let path = folder.path().join("config.json");
            let mut config: serde_json::Value =
                serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
            config["max_position_embeddings"] = 1024.into();
            std::fs::write(&path, config.to_string()).unwrap();
            // The heads of these two are not divisible by two, and of divided recurrent layers no bits are recorded.
            let whole = [Arch::Llama2Linear, Arch::Qwen25].contains(arch) || arch.dims().delta.is_some();
            let divisible = !whole;
            let applies = |format: &StorageFormat| format.dtype == *dtype && (format.ranks == 1 || divisible);
            for format in storage_formats().into_iter().filter(applies) {
                let mut runtime = load(folder.path(), isa, format);
                found.insert(
                    format!("{} {} {}", isa.name(), arch.name(), format.name()),
                    hashes(&mut runtime, &PROMPTS),
                );
            }
        }
    }
    for weights in [None, Some("int8"), Some("int4")] {
        let format = StorageFormat { weights, ..PLAIN };
        let mut runtime = load(wide, isa, format);
        let key = format!("{} {} {}", isa.name(), BenchmarkShape::Layer.name(), format.name());
        found.insert(key, hashes(&mut runtime, &WIDE_PROMPTS));
    }
    found
}

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/bits.txt")
}

/// Reads version and hashes of the golden file.
fn read() -> (u32, BTreeMap<String, String>) {
    let text = std::fs::read_to_string(file()).unwrap_or_default();
    let mut lines = text.lines();
    let version = lines.next().and_then(|line| line.strip_prefix("version ")?.parse().ok()).unwrap_or(0);
    let entry = |line: &str| line.split_once(": ").map(|(key, hashes)| (key.to_owned(), hashes.to_owned()));
    (version, lines.filter_map(entry).collect())
}

fn write(hashes: &BTreeMap<String, String>) {
    let mut text = format!("version {VERSION}\n");
    for (key, hashes) in hashes {
        text += &format!("{key}: {hashes}\n");
    }
    std::fs::create_dir_all(file().parent().unwrap()).unwrap();
    std::fs::write(file(), text).unwrap();
}

#[test]
fn no_bit_changes_without_a_new_version() {
    let (version, mut golden) = read();
    let record = std::env::var("INFLIGHT_GOLDEN").is_ok_and(|value| value == "record");
    if version != VERSION {
        assert!(record, "golden/bits.txt is of version {version}, the kernels of {VERSION}: record it anew");
        // Hashes of an older version do not apply, those of other instruction sets included.
        golden.clear();
    }
    let wide = TempDir::new("golden").unwrap();
    BenchmarkShape::Layer.write(wide.path()).unwrap();
    let (mut compared, mut changed) = (0, Vec::new());
    for name in ISAS {
        let Some(isa) = Isa::by_name(name) else {
            let kept = golden.keys().filter(|key| key.starts_with(&format!("{name} "))).count();
            skipped(
                "golden bits",
                &format!("this build on this machine has no {name} ({kept} hashes not compared)"),
            );
            continue;
        };
        for (key, hashes) in compute(isa, wide.path()) {
            compared += 1;
            match golden.get(&key) {
                Some(known) if *known == hashes => {}
                Some(known) => changed.push(format!("{key}: {hashes}, recorded {known}")),
                None if record => _ = golden.insert(key, hashes),
                None => changed.push(format!("{key}: never recorded")),
            }
        }
    }
    println!("golden bits: {compared} hashes compared");
    assert!(
        changed.is_empty(),
        "{} of {compared} hashes differ under version {VERSION}: a stream that moved to this build would continue with other \
         tokens. Raise inflight_kernels::VERSION and record the hashes anew, or keep the arithmetic as it was:\n{}",
        changed.len(),
        changed.join("\n")
    );
    if record {
        write(&golden);
    }
}
