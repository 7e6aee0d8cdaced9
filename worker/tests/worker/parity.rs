//! Parity with Hugging Face transformers, for every architecture, dtype and instruction set.

use std::sync::Arc;

use inflight_contract::SamplingParams;
use inflight_fixtures::{Arch, Checkpoint, ConfigStyle, Dtype, Reference, ReferenceRun};
use inflight_kernels::cpu::Isa;
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime::{Batch, Runtime, SlotSetup};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime};

const BLOCK_TOKENS: u32 = 16;

fn load(checkpoint: &Checkpoint, isa: Isa) -> CpuRuntime {
    load_on(checkpoint, isa, 1, None)
}

fn load_on(checkpoint: &Checkpoint, isa: Isa, ranks: usize, quantize: Option<&str>) -> CpuRuntime {
    let folder = checkpoint.write_temp().unwrap();
    let model = ModelDir::open(&ModelSource::Directory(folder.path().to_path_buf())).unwrap();
    let options = CpuOptions {
        threads: Some(2),
        kv_bytes: 16 << 20,
        host_bytes: 0,
        block_tokens: BLOCK_TOKENS,
        slots: 1,
        batch_tokens: 256,
        context_tokens: None,
        isa: Some(isa),
        quantize: quantize.map(|name| name.parse().unwrap()),
        kv_dtype: None,
        tensor_parallel: ranks,
        mtp: false,
    };
    // The directory is deleted here; mapped files stay readable.
    CpuRuntime::load(&model, &options, &|_, _| {}).unwrap()
}

/// Runs the prompt in chunks of at most `chunk` tokens, then single tokens: `next` returns the next input
/// from the step and the greedy token. Calls `on_logits` with each step and its logits.
fn decode(
    runtime: &mut CpuRuntime,
    run: &ReferenceRun,
    chunk: usize,
    mut next: impl FnMut(usize, u32) -> u32,
    mut on_logits: impl FnMut(usize, &[f32]),
) {
    let setup = SlotSetup {
        sampling: Arc::new(SamplingParams::greedy()),
        choice: 0,
        prompt: &run.prompt,
        generated: &[],
        eos_token_ids: &[],
    };
    runtime.attach(0, &setup).unwrap();
    let longest = (run.prompt.len() + ReferenceRun::STEPS) as u32;
    let shape = runtime.capabilities().shape;
    let blocks: Vec<u32> = (0..shape.whole_blocks(longest)).rev().collect();
    let (mut batch, mut sampled) = (Batch::default(), Vec::new());
    let mut feed = run.prompt.clone();
    let mut position = 0;
    for step in 0..ReferenceRun::STEPS {
        while !feed.is_empty() {
            let part: Vec<u32> = feed.drain(..chunk.min(feed.len())).collect();
            batch.clear();
            batch.push_whole(&part, position, &shape, &blocks);
            if feed.is_empty() {
                batch.sample_last_row(0);
            }
            runtime.execute(&mut batch, &mut sampled).unwrap();
            position += part.len() as u32;
        }
        on_logits(step, runtime.logits());
        feed.push(next(step, sampled[0].token));
    }
}

#[test]
fn f32_logits_agree_within_1e_4_and_greedy_tokens_are_identical() {
    for arch in Arch::all() {
        let reference = Reference::load(*arch, Dtype::F32).unwrap();
        for isa in crate::instruction_sets("parity") {
            let mut runtime = load(&Checkpoint::new(*arch, Dtype::F32), isa);
            for (run, chunk) in reference.runs().iter().zip([1, 64]) {
                let (mut tokens, mut apart) = (Vec::new(), Vec::new());
                let greedy = |_, token| {
                    tokens.push(token);
                    token
                };
                decode(&mut runtime, run, chunk, greedy, |step, logits| {
                    apart.extend(run.deviation(step, logits))
                });
                assert_eq!(apart.len(), run.steps().len());
                let worst = apart.iter().copied().fold(0.0, f32::max);
                println!("{arch} f32 {}: {} steps off by up to {worst:.1e}", isa.name(), apart.len());
                assert!(worst <= 1e-4, "{arch} {}: logits are off by {worst:e}", isa.name());
                assert_eq!(tokens, run.greedy, "{arch} {}: other tokens for {:?}", isa.name(), run.text);
            }
        }
    }
}

/// transformers computes the same of both: `tests/support/fixtures/reference/fused.py` compares them.
#[test]
fn qwen3_next_computes_what_qwen3_5_does_with_the_same_weights_to_the_bit() {
    let int8 = Some("int8:8");
    for (dtype, ranks, quantize) in
        [(Dtype::F32, 1, None), (Dtype::F32, 2, None), (Dtype::Bf16, 1, None), (Dtype::Bf16, 2, int8)]
    {
        let reference = Reference::load(Arch::Qwen35, dtype).unwrap();
        let bits = |checkpoint: &Checkpoint| {
            let mut runtime = load_on(checkpoint, Isa::detect(), ranks, quantize);
            let mut bits = Vec::new();
            for (run, chunk) in reference.runs().iter().zip([1, 64]) {
                let on_logits = |_, logits: &[f32]| bits.extend(logits.iter().map(|logit| logit.to_bits()));
                decode(&mut runtime, run, chunk, |step, _| run.greedy[step], on_logits);
            }
            bits
        };
        let plain = Checkpoint::new(Arch::Qwen35, dtype);
        let (expected, got) = (bits(&plain), bits(&plain.clone().fused()));
        assert!(expected == got, "{dtype}, {ranks} ranks: other logits");
    }
}

#[test]
fn sixteen_bit_logits_agree_within_2e_2_and_top_tokens_beyond_that_margin() {
    const TOLERANCE: f32 = 2e-2;
    let all = Arch::all().iter().flat_map(|arch| [(*arch, Dtype::Bf16), (*arch, Dtype::F16)]);
    let isas = crate::instruction_sets("parity");
    let mut compared = 0;
    for (arch, dtype) in all.filter(|(arch, dtype)| *dtype == Dtype::Bf16 || *arch == Arch::Llama31) {
        let reference = Reference::load(arch, dtype).unwrap();
        for isa in isas.iter().copied() {
            let mut runtime = load(&Checkpoint::new(arch, dtype), isa);
            for run in reference.runs() {
                let (mut tops, mut apart) = (Vec::new(), Vec::new());
                let teacher = |step: usize, token| {
                    tops.push(token);
                    run.greedy[step]
                };
                decode(&mut runtime, run, 16, teacher, |step, logits| {
                    apart.extend(run.deviation(step, logits))
                });
                assert_eq!(apart.len(), run.steps().len());
                let (worst, torch) = (apart.iter().copied().fold(0.0, f32::max), reference.rounding);
                println!("{arch} {dtype} {}: off by up to {worst:.1e}, torch by {torch:.1e}", isa.name());
                // No further than transformers' own arithmetic in this type.
                let tolerance = TOLERANCE.max(torch);
                assert!(worst <= tolerance, "{arch} {dtype} {}: logits are off by {worst:e}", isa.name());
                for step in 0..ReferenceRun::STEPS {
                    if run.margin[step] > TOLERANCE {
                        compared += 1;
                        assert_eq!(tops[step], run.top[step], "{arch} {dtype} {} step {step}", isa.name());
                    }
                }
            }
        }
    }
    assert!(compared > 900 * isas.len(), "only {compared} steps have a margin worth comparing");
}

#[test]
fn sharded_files_and_the_newer_config_style_change_no_bit() {
    for arch in [Arch::Llama31, Arch::Llama2Linear, Arch::Qwen3] {
        let reference = Reference::load(arch, Dtype::Bf16).unwrap();
        let plain = Checkpoint::new(arch, Dtype::Bf16);
        let other = Checkpoint::new(arch, Dtype::Bf16).sharded(3).styled(ConfigStyle::Transformers5);
        let (mut a, mut b) = (load(&plain, Isa::detect()), load(&other, Isa::detect()));
        assert_eq!(a.capabilities().fingerprint, b.capabilities().fingerprint, "{arch}");
        let (mut first, mut second) = (Vec::new(), Vec::new());
        decode(&mut a, reference.short(), 64, |_, token| token, |_, logits| first.extend_from_slice(logits));
        decode(&mut b, reference.short(), 64, |_, token| token, |_, logits| second.extend_from_slice(logits));
        assert!(first == second, "{arch}");
    }
}
