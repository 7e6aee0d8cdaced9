//! What is allocated, and which products are made, against what was said before anything ran.

use super::super::catalog::{Product, catalog};
use super::super::sizing::{Extent, largest_bucket, taken_bytes};
use super::watched::Watched;
use super::*;

#[test]
fn every_byte_on_the_device_is_one_that_sizing_knows_of() {
    let model = model(Arch::Qwen2, Dtype::Bf16, 81);
    let (config, division, found) = (model.config(), whole(&model), find(&model).unwrap());
    let strategy = (1u32..600, 1u32..3000, 2u32..1024, 1u32..300, 0u32..6, any::<bool>());
    let cases = ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() };
    let test = |(slots, batch_tokens, context, blocks, block_bits, fp8): (u32, u32, u32, u32, u32, bool)| {
        let gpu = Watched::new(Harness::new());
        let weights = found.upload(&gpu, division.shard(), &|_, _| {}).unwrap();
        let of_weights: u64 = gpu.allocated.take().into_iter().map(taken_bytes).sum();
        let matrices = found.taken_bytes(division.shard());
        // Norms and biases are small beside matrices.
        prop_assert!(of_weights >= matrices && of_weights - matrices < 1 << 20);
        let capabilities = Capabilities {
            vocab_size: config.vocab_size as u32,
            context_tokens: context,
            block_tokens: 4 << block_bits,
            blocks,
            host_blocks: 0,
            slots,
            batch_tokens,
            depth: 2,
            fingerprint: String::new(),
        };
        let store = if fp8 { KvStore::Fp8 } else { KvStore::Half };
        let modes = Modes { store, deterministic: false, buckets: true };
        let half = found.half();
        let compute =
            Compute::new(&gpu, config, division.clone(), half, weights, capabilities, modes).unwrap();
        let shapes = division.shapes(config);
        let samples = slots.max(largest_bucket(slots));
        let extent = Extent {
            rows: batch_tokens.max(samples).into(),
            samples: samples.into(),
            slots: slots.into(),
            context: context.into(),
            metadata: 0,
        };
        let beside = ["workspace", "driver"];
        let parts = shapes.parts(&extent).into_iter().filter(|part| !beside.contains(&part.name));
        let planned: u64 = parts.map(|part| part.bytes).sum();
        let pool = taken_bytes(u64::from(blocks) * shapes.block_bytes(4 << block_bits, store));
        let allocated: u64 = gpu.allocated.borrow().iter().map(|bytes| taken_bytes(*bytes)).sum();
        prop_assert!(
            allocated <= planned + pool,
            "{allocated} bytes are taken, {planned} and {pool} planned"
        );
        // Nor does it reserve what nobody takes: the padding of the vocabulary, rounded.
        prop_assert!(allocated + (4 << 20) > planned + pool, "{allocated} of {} bytes", planned + pool);
        drop(compute);
        Ok(())
    };
    proptest::test_runner::TestRunner::new(cases).run(&strategy, test).unwrap_or_else(|e| panic!("{e}"));
}

#[test]
fn once_loaded_nothing_is_allocated_any_more_and_histories_of_slots_are_their_own() {
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
    let modes = Modes { store: KvStore::Half, deterministic: true, buckets: true };
    let run = |alone: Option<usize>| {
        let mut gpu = OnHarness::over(Watched::new(Harness::new()), whole(&model), &model, 16, modes);
        gpu.harness.allocated.take();
        let vocabulary = model.config().vocab_size as u32;
        let mut roster = Roster::new(&[9, 30, 5, 14], vocabulary, 16, 7);
        let mut drawn = vec![Vec::new(); 4];
        // Slots change hands: the second sequence of a slot must not see the history of the first.
        for round in 0..2 {
            roster.done.fill(0);
            for (slot, tokens) in roster.tokens.iter_mut().enumerate() {
                tokens.truncate(5);
                let sampling = if (slot + round) % 4 == 3 { &plain } else { &penalties };
                gpu.attach(slot as u32, sampling, tokens);
            }
            for _ in 0..4 {
                let chunks: Vec<usize> =
                    (0..4).map(|slot| if alone.is_none_or(|alone| alone == slot) { 64 } else { 0 }).collect();
                let batch = roster.batch(&chunks);
                for (sample, sampled) in batch.samples.iter().zip(gpu.step(&batch).0) {
                    drawn[sample.slot as usize].push(sampled.token);
                    roster.tokens[sample.slot as usize].push(sampled.token);
                }
            }
            (0..4).for_each(|slot| gpu.compute.detach(slot));
        }
        assert_eq!(*gpu.harness.allocated.borrow(), [0u64; 0], "memory was allocated in service");
        drawn
    };
    let together = run(None);
    for (slot, drawn) in together.iter().enumerate() {
        assert_eq!(run(Some(slot))[slot], *drawn, "slot {slot} draws other tokens beside others");
        assert_eq!(drawn.len(), 8);
    }
}

#[test]
fn the_catalog_has_the_very_products_that_the_forward_pass_makes() {
    if !available() {
        return;
    }
    for (arch, tied) in [(Arch::Qwen2, true), (Arch::Llama31, false)] {
        let model = model_of(arch, Dtype::Bf16, 85, 6, tied);
        let (division, config) = (whole(&model), model.config());
        let modes = Modes { store: KvStore::Half, deterministic: false, buckets: true };
        let gpu = Watched::new(Harness::new());
        let weights = find(&model).unwrap().upload(&gpu, division.shard(), &|_, _| {}).unwrap();
        let of_weights = catalog(&weights, &division.shapes(config), &division, config.vocab_size);
        let shape = |product: &Product| (product.n, product.k, product.stride, product.wide);
        // Other weights, at other addresses, but the same shapes.
        let mut on = OnHarness::over(gpu, division, &model, 16, modes);
        let mut roster = Roster::new(&[21, 6], config.vocab_size as u32, 16, 1);
        (0..2).for_each(|slot| on.attach(slot, &SamplingParams::greedy(), &roster.tokens[slot as usize]));
        on.harness.take_products();
        let batch = roster.batch(&[21, 6]);
        on.step(&batch);
        let made = on.harness.take_products();
        let (layers, head) = made.split_at(made.len() - 1);
        assert_eq!((layers.len(), of_weights.len()), (4 * config.layers, 5));
        for (i, matmul) in layers.iter().chain(head).enumerate() {
            let which = if matmul.wide { 4 } else { i % 4 };
            let product = &of_weights[which];
            assert_eq!(
                shape(product),
                (matmul.n, matmul.k, matmul.stride, matmul.wide),
                "{arch}: product {i}"
            );
            let layer = if matmul.wide { 0 } else { i / 4 };
            let listed = product.at(layer, matmul.m, matmul.x, matmul.y);
            assert_eq!(listed.bias.is_some(), matmul.bias.is_some(), "{arch}: product {i}");
            assert_eq!(product.operands.len(), if matmul.wide { 1 } else { config.layers });
        }
        let addresses: std::collections::BTreeSet<u64> =
            of_weights.iter().flat_map(|product| &product.operands).map(|operand| operand.weight).collect();
        assert_eq!(addresses.len(), 4 * config.layers + 1, "{arch}: a matrix is listed twice");
        let head_of = &of_weights[4];
        assert_eq!(head_of.operands[0].weight, weights.head());
        assert_eq!(head_of.bytes(3), (3 * config.hidden_size as u64 * 2, 3 * u64::from(head_of.stride) * 4));
    }
}
