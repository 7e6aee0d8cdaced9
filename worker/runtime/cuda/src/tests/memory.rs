//! Actual allocations and GEMMs, compared with the memory plan and the list of model GEMMs.

use super::super::memory_plan::allocated_bytes;
use super::super::model_gemms::{ModelGemm, model_gemms};
use super::super::shapes::DEPTH;
use super::recording_device::RecordingDevice;
use super::*;

#[test]
fn every_device_allocation_is_in_the_memory_plan() {
    for (arch, cases) in [(Arch::Qwen2, 24), (Arch::Qwen35, 8)] {
        every_allocation_is_planned(&model(arch, Dtype::Bf16, 81), cases);
    }
}

fn every_allocation_is_planned(model: &ModelDir, cases: u32) {
    let (config, shard_plan, tensors) = (model.config(), unsharded(model), find(model).unwrap());
    let sizes = (1u32..600, prop_oneof![Just(0u32), 1u32..100], 1u32..3000);
    let strategy = (sizes, 2u32..1024, 1u32..300, 0u32..6, any::<bool>());
    let cases = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    type Case = ((u32, u32, u32), u32, u32, u32, bool);
    let test = |((slots, draft_rows, batch_tokens), context, blocks, block_bits, fp8): Case| {
        let gpu = RecordingDevice::new(Harness::new());
        let weights = tensors.upload(&gpu, shard_plan.shard(), &|_, _| {}).unwrap();
        let weight_bytes: u64 = gpu.allocated.take().into_iter().map(allocated_bytes).sum();
        let matrix_bytes = tensors.allocated_bytes(shard_plan.shard());
        // Norms and biases are small compared with matrices.
        prop_assert!(weight_bytes >= matrix_bytes && weight_bytes - matrix_bytes < 1 << 20);
        let store = if fp8 { KvStore::Fp8 } else { KvStore::Half };
        let kv = kv_layers(model, &shard_plan, 4 << block_bits, store, context);
        let block_bytes = kv.plan().block_bytes();
        let capabilities = Capabilities {
            vocab_size: config.vocab_size as u32,
            context_tokens: context,
            shape: kv.plan().shape(),
            block_bytes: 0,
            blocks,
            host_blocks: 0,
            slots,
            batch_tokens,
            sample_rows: slots + draft_rows,
            snapshot: recurrent::snapshot(kv.plan()),
            sequence_drafts: recurrent::sequence_drafts(kv.plan()),
            predicted_drafts: 0,
            depth: 2,
            fingerprint: String::new(),
            facts: RuntimeFacts::default(),
        };
        let modes = RunnerModes { deterministic: false, graphs: true };
        let half = tensors.half();
        let shapes = shard_plan.shapes(config);
        let graphs = StepGraphs { sample_rows: slots + draft_rows, batch_tokens };
        let limits = BufferLimits::new(graphs, slots, context, 5000);
        let plan = shard_plan.clone();
        let runner =
            ModelRunner::new(&gpu, config, plan, half, weights, capabilities, &limits, kv, modes).unwrap();
        let buffers: Vec<_> =
            (0..DEPTH).map(|_| StepBuffers::alloc(&gpu, &shapes, &limits).unwrap()).collect();
        let excluded = ["workspace", "driver"];
        let components = shapes.components(&limits).into_iter();
        let components = components.filter(|component| !excluded.contains(&component.name));
        let planned: u64 = components.map(|component| component.bytes).sum();
        let pool = allocated_bytes(u64::from(blocks) * block_bytes);
        let allocated: u64 = gpu.allocated.borrow().iter().map(|bytes| allocated_bytes(*bytes)).sum();
        prop_assert_eq!(allocated, planned + pool);
        drop((runner, buffers));
        Ok(())
    };
    proptest::test_runner::TestRunner::new(cases).run(&strategy, test).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn nothing_is_allocated_after_load_and_slot_histories_are_separate() {
    if !available() {
        return;
    }
    let model = model(Arch::Llama31, Dtype::Bf16, 83);
    let spec = SamplingSpec {
        repetition_penalty: 1.7,
        frequency_penalty: 0.9,
        temperature: 0.0,
        logit_bias: vec![(3, 1.0)],
        min_tokens: 2,
        ..SamplingSpec::default()
    };
    let (penalties, plain) = (spec.validate().unwrap(), SamplingParams::greedy());
    let modes = RunnerModes { deterministic: true, graphs: true };
    let run = |alone: Option<usize>| {
        let mut gpu = HarnessRunner::load(
            RecordingDevice::new(Harness::new()),
            unsharded(&model),
            &model,
            16,
            KvStore::Half,
            modes,
        );
        gpu.harness.allocated.take();
        let vocabulary = model.config().vocab_size as u32;
        let mut sequences = TestSequences::new(&[9, 30, 5, 14], vocabulary, 16, 7);
        let mut drawn = vec![Vec::new(); 4];
        // Slots are reused: the second sequence of a slot must not see the history of the first.
        for round in 0..2 {
            sequences.done.fill(0);
            for (slot, tokens) in sequences.tokens.iter_mut().enumerate() {
                tokens.truncate(5);
                let sampling = if (slot + round) % 4 == 3 { &plain } else { &penalties };
                gpu.attach(slot as u32, sampling, tokens);
            }
            for _ in 0..4 {
                let chunks: Vec<usize> =
                    (0..4).map(|slot| if alone.is_none_or(|alone| alone == slot) { 64 } else { 0 }).collect();
                let batch = sequences.batch(&chunks);
                for (sample, sampled) in batch.samples.iter().zip(gpu.step(&batch).0) {
                    drawn[sample.slot as usize].push(sampled.token);
                    sequences.tokens[sample.slot as usize].push(sampled.token);
                }
            }
            (0..4).for_each(|slot| gpu.runner.detach(slot));
        }
        assert_eq!(*gpu.harness.allocated.borrow(), [0u64; 0], "memory was allocated in service");
        drawn
    };
    let together = run(None);
    for (slot, drawn) in together.iter().enumerate() {
        assert_eq!(run(Some(slot))[slot], *drawn, "slot {slot} samples other tokens in a shared batch");
        assert_eq!(drawn.len(), 8);
    }
}

#[test]
fn the_model_gemms_are_exactly_those_of_the_forward_pass() {
    if !available() {
        return;
    }
    // Indices in the list of the GEMMs of two layers.
    let plain = vec![0, 1, 2, 3, 0, 1, 2, 3];
    let hybrid = vec![0, 1, 2, 3, 4, 5, 6, 2, 3];
    for (arch, tied, roles) in
        [(Arch::Qwen2, true, plain.clone()), (Arch::Llama31, false, plain), (Arch::Qwen35, false, hybrid)]
    {
        let model = model_of(arch, Dtype::Bf16, 85, 6, tied);
        let (shard_plan, config) = (unsharded(&model), model.config());
        let modes = RunnerModes { deterministic: false, graphs: true };
        let gpu = RecordingDevice::new(Harness::new());
        let weights = find(&model).unwrap().upload(&gpu, shard_plan.shard(), &|_, _| {}).unwrap();
        let listed = model_gemms(&weights, &shard_plan.shapes(config), &shard_plan, config.vocab_size);
        let shape = |gemm: &ModelGemm| (gemm.n, gemm.k, gemm.stride, gemm.f32_out);
        // Other addresses of the weights, but the same shapes.
        let mut runner = HarnessRunner::load(gpu, shard_plan, &model, 16, KvStore::Half, modes);
        let (vocabulary, memory) = (config.vocab_size as u32, runner.runner.capabilities.shape);
        let mut sequences = TestSequences::of_shape(&[21, 6], vocabulary, memory, 1);
        (0..2).for_each(|slot| {
            runner.attach(slot, &SamplingParams::greedy(), &sequences.tokens[slot as usize])
        });
        runner.harness.take_gemms();
        let batch = sequences.batch(&[21, 6]);
        runner.step(&batch);
        let run = runner.harness.take_gemms();
        let (layers, head) = run.split_at(run.len() - 1);
        let roles = roles.repeat(config.layers.len() / 2);
        assert_eq!(layers.len(), roles.len(), "{arch}");
        let last = listed.len() - 1;
        let mut seen = vec![0; listed.len()];
        for (i, (matmul, role)) in layers.iter().chain(head).zip(roles.into_iter().chain([last])).enumerate()
        {
            let gemm = &listed[role];
            assert_eq!(shape(gemm), (matmul.n, matmul.k, matmul.stride, matmul.f32_out), "{arch}: GEMM {i}");
            let expected = gemm.of_layer(seen[role], matmul.m, matmul.x, matmul.y);
            assert_eq!(expected.bias.is_some(), matmul.bias.is_some(), "{arch}: GEMM {i}");
            seen[role] += 1;
        }
        let operands: Vec<usize> = listed.iter().map(|gemm| gemm.operands.len()).collect();
        assert_eq!(operands, seen, "{arch}");
        let addresses: std::collections::BTreeSet<u64> =
            listed.iter().flat_map(|gemm| &gemm.operands).map(|operand| operand.weight).collect();
        assert_eq!(addresses.len(), run.len(), "{arch}: a matrix is listed twice");
        let head = &listed[last];
        assert_eq!(head.operands[0].weight, weights.head());
        assert_eq!(head.bytes(3), (3 * config.hidden_size as u64 * 2, 3 * u64::from(head.stride) * 4));
    }
}
