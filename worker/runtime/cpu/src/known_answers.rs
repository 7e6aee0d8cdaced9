//! Known answers: hashes of the demo model's logits on each instruction set, recorded with the kernels' version. A processor on which other
//! bits come out is defective, or the program is not the one that was tested.

use std::sync::Arc;

use inflight_contract::SamplingParams;
use inflight_kernels::VERSION;
use inflight_kernels::cpu::{Isa, KvDtype};
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::{Batch, Runtime as _, SlotSetup};

use super::{CpuOptions, CpuRuntime, Error, Quantization};

/// A line for each instruction set, quantization and KV cache dtype, after one with the kernels' version.
const RECORDED: &str = include_str!("known_answers.txt");

/// Prompt and output tokens.
const PROMPT_TOKENS: u32 = 40;
const OUTPUT_TOKENS: usize = 3;

/// Bytes of the KV block pool.
const KV_BYTES: u64 = 16 << 20;

/// Difference between a known answer and the one that this processor gives.
#[derive(Debug, thiserror::Error)]
#[error(
    "this processor computes other bits than are recorded for {computation}: {found:016x} instead of {recorded}; it is defective, or this is \
     not the build that was tested"
)]
pub struct WrongAnswer {
    computation: String,
    found: u64,
    recorded: String,
}

/// Failure to check the known answers.
#[derive(Debug, thiserror::Error)]
pub enum KnownAnswersError {
    /// The answer is wrong.
    #[error(transparent)]
    Wrong(#[from] WrongAnswer),
    /// The demo model could not be loaded or run.
    #[error("the demo model, whose answers are known, does not run: {0}")]
    Run(String),
}

/// Compares the answer of the demo model, in the formats of a worker, with the recorded one. Returns whether one is recorded.
///
/// # Errors
/// [`KnownAnswersError`]
pub fn check_known_answer(
    isa: Isa,
    quantize: Option<Quantization>,
    kv_dtype: Option<KvDtype>,
) -> Result<bool, KnownAnswersError> {
    check(RECORDED, isa, quantize, kv_dtype)
}

fn check(
    recorded: &str,
    isa: Isa,
    quantize: Option<Quantization>,
    kv_dtype: Option<KvDtype>,
) -> Result<bool, KnownAnswersError> {
    let computation = computation(isa, quantize, kv_dtype);
    let mut lines = recorded.lines();
    let current = lines.next() == Some(format!("version {VERSION}").as_str());
    let known =
        lines.filter(|_| current).find_map(|line| line.strip_prefix(&computation)?.strip_prefix(": "));
    let Some(known) = known else { return Ok(false) };
    let found = answer(isa, quantize, kv_dtype).map_err(|error| KnownAnswersError::Run(error.to_string()))?;
    if known == format!("{found:016x}") {
        return Ok(true);
    }
    Err(WrongAnswer { computation, found, recorded: known.to_owned() }.into())
}

/// Returns the name of a computation; group sizes do not matter for it.
fn computation(isa: Isa, quantize: Option<Quantization>, kv_dtype: Option<KvDtype>) -> String {
    let weights = quantize.map_or("none".to_owned(), |quantize| base(quantize).to_string());
    format!(
        "{} quantize={weights} kv={}",
        isa.name(),
        if kv_dtype == Some(KvDtype::Int8) { "int8" } else { "auto" }
    )
}

/// Returns a quantization with its default group size.
fn base(quantize: Quantization) -> Quantization {
    let name = quantize.to_string();
    let name = name.split_once(':').map_or(name.as_str(), |(name, _)| name);
    name.parse().unwrap_or(quantize)
}

/// Runs a prompt greedily on one thread and hashes the logits of every output token.
fn answer(
    isa: Isa,
    quantize: Option<Quantization>,
    kv_dtype: Option<KvDtype>,
) -> Result<u64, Box<dyn std::error::Error>> {
    let model = ModelDir::open(&ModelSource::Embedded)?;
    let options = CpuOptions {
        threads: Some(1),
        kv_bytes: KV_BYTES,
        host_bytes: 0,
        block_tokens: 16,
        slots: 1,
        batch_tokens: 64,
        context_tokens: None,
        isa: Some(isa),
        quantize: quantize.map(base),
        kv_dtype: kv_dtype.filter(|dtype| *dtype == KvDtype::Int8),
        tensor_parallel: 1,
        mtp: false,
    };
    let mut runtime =
        CpuRuntime::load(&model, &options, &|_, _| {}).map_err(|error: Error| error.to_string())?;
    let vocab = runtime.capabilities().vocab_size;
    let mut tokens: Vec<u32> = (0..PROMPT_TOKENS).map(|at| (at * 2_654_435 + 17) % vocab).collect();
    let sampling = Arc::new(SamplingParams::greedy());
    let setup = SlotSetup { sampling, choice: 0, prompt: &tokens, generated: &[], eos_token_ids: &[] };
    runtime.attach(0, &setup)?;
    let blocks: Vec<u32> = (0..(PROMPT_TOKENS + OUTPUT_TOKENS as u32).div_ceil(16)).collect();
    let (mut batch, mut sampled, mut fed) = (Batch::default(), Vec::new(), 0);
    // FNV-1a.
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for _ in 0..OUTPUT_TOKENS {
        batch.clear();
        batch.push_sequence(&tokens[fed..], fed as u32, &blocks);
        batch.sample_last_row(0);
        fed = tokens.len();
        runtime.execute(&mut batch, &mut sampled)?;
        for byte in runtime.logits().iter().flat_map(|logit| logit.to_bits().to_le_bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        tokens.extend(sampled.first().map(|sampled| sampled.token));
    }
    Ok(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All computations of an instruction set.
    fn computations() -> impl Iterator<Item = (Option<Quantization>, Option<KvDtype>)> {
        let weights = [None, Some("int8"), Some("int4")];
        let weights = weights.map(|name| name.map(|name| name.parse::<Quantization>().unwrap()));
        weights.into_iter().flat_map(|weights| [(weights, None), (weights, Some(KvDtype::Int8))])
    }

    #[test]
    fn every_instruction_set_gives_its_recorded_answers_and_another_one_is_an_error() {
        let record = std::env::var("INFLIGHT_GOLDEN").is_ok_and(|value| value == "record");
        let mut lines = format!("version {VERSION}\n");
        let mut missing = Vec::new();
        let names = ["portable", "portable-fma", "avx2", "avx512", "avx512-vnni", "avx512-bf16"];
        for isa in names.into_iter().filter_map(Isa::by_name) {
            for (quantize, kv_dtype) in computations() {
                let name = computation(isa, quantize, kv_dtype);
                if record {
                    lines += &format!("{name}: {:016x}\n", answer(isa, quantize, kv_dtype).unwrap());
                    continue;
                }
                match check_known_answer(isa, quantize, kv_dtype) {
                    Ok(true) => {}
                    Ok(false) => missing.push(name),
                    Err(error) => panic!("{error}"),
                }
            }
        }
        if record {
            return std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/src/known_answers.txt"), lines)
                .unwrap();
        }
        assert!(
            missing.is_empty(),
            "run with INFLIGHT_GOLDEN=record, no answer is recorded for: {missing:?}"
        );
        let isa = Isa::detect();
        let wrong = format!("version {VERSION}\n{}: 0123456789abcdef\n", computation(isa, None, None));
        let error = check(&wrong, isa, None, None).unwrap_err().to_string();
        assert!(error.contains("instead of 0123456789abcdef") && error.contains("quantize=none"), "{error}");
        // Those of other kernels say nothing.
        assert!(!check(&wrong.replace(&format!("version {VERSION}"), "version 0"), isa, None, None).unwrap());
    }
}
