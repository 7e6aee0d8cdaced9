//! Step times of the CPU runtime without scheduler and router, for comparing two builds by running them alternately. Prints two numbers in
//! seconds: the prefill of four prompts of 512 tokens, and 40 decode steps of a batch of eight sequences with 512 cached tokens each.
//!
//! ```text
//! cargo run --release -p inflight-fixtures --example shape -- 135m /tmp/135m
//! cargo bench -p inflight-worker --bench steps -- /tmp/135m
//! ```

use std::sync::Arc;
use std::time::Instant;

use inflight_contract::SamplingParams;
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::{Batch, Runtime, SlotSetup};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime};

const PROMPT: u32 = 512;
const SEQUENCES: u32 = 8;
const STEPS: u32 = 40;
const BLOCK_TOKENS: u32 = 16;
/// Blocks of a sequence.
const BLOCKS: u32 = (PROMPT + STEPS).div_ceil(BLOCK_TOKENS);

type BenchResult<T> = Result<T, Box<dyn std::error::Error>>;

fn load(path: String) -> BenchResult<CpuRuntime> {
    let model = ModelDir::open(&ModelSource::Directory(path.into()))?;
    let options = CpuOptions {
        threads: None,
        kv_bytes: 1 << 30,
        host_bytes: 0,
        block_tokens: BLOCK_TOKENS,
        slots: SEQUENCES,
        batch_tokens: PROMPT,
        context_tokens: Some(2 * PROMPT),
        isa: None,
        quantize: None,
        kv_dtype: None,
        tensor_parallel: 1,
        mtp: false,
    };
    let mut runtime = CpuRuntime::load(&model, &options, &|_, _| {})?;
    for slot in 0..SEQUENCES {
        let sampling = Arc::new(SamplingParams::greedy());
        runtime.attach(
            slot,
            &SlotSetup { sampling, choice: 0, prompt: &[], generated: &[], eos_token_ids: &[] },
        )?;
    }
    Ok(runtime)
}

/// Computes the prompts of these sequences, one after the other.
fn prefill(runtime: &mut CpuRuntime, sequences: std::ops::Range<u32>) -> BenchResult<()> {
    let tokens: Vec<u32> = (0..PROMPT).map(|i| i * 7 % 400 + 3).collect();
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    for sequence in sequences {
        batch.clear();
        batch.push_sequence(&tokens, 0, &table(sequence));
        batch.sample_last_row(sequence);
        runtime.execute(&mut batch, &mut sampled)?;
    }
    Ok(())
}

fn table(sequence: u32) -> Vec<u32> {
    (sequence * BLOCKS..(sequence + 1) * BLOCKS).collect()
}

fn main() -> BenchResult<()> {
    let Some(path) = std::env::args().skip(1).find(|argument| argument != "--bench") else {
        println!("name a directory with a model");
        return Ok(());
    };
    let mut runtime = load(path)?;
    // Memory is mapped, and caches are filled, by a first time.
    prefill(&mut runtime, 0..SEQUENCES)?;
    let begun = Instant::now();
    prefill(&mut runtime, 0..4)?;
    let prompts = begun.elapsed();
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    let begun = Instant::now();
    for step in 0..STEPS {
        batch.clear();
        for sequence in 0..SEQUENCES {
            batch.push_sequence(&[step % 300 + 5], PROMPT + step, &table(sequence));
            batch.sample_last_row(sequence);
        }
        runtime.execute(&mut batch, &mut sampled)?;
    }
    println!("{:.4} {:.4}", prompts.as_secs_f64(), begun.elapsed().as_secs_f64());
    Ok(())
}
