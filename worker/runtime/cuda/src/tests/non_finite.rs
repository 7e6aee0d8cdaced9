//! A key, a value or a recurrent state that is NaN makes the logits of its sequence NaN, and of no other.

use super::*;

/// Bytes of the pool that make a head of a token NaN: its elements, or the scale of stored bytes.
fn damage(store: KvStore, head_dim: usize) -> Vec<u8> {
    vec![0xff; if store == KvStore::Half { 2 * head_dim } else { 4 }]
}

/// Offset of a token's first key head (`values`: value head) in the layer's part of a block.
fn offset(store: KvStore, (heads, head_dim): (usize, usize), token: usize, values: bool) -> usize {
    let line = if values { heads * 16 } else { 0 } + token;
    if store == KvStore::Half { line * 2 * head_dim } else { 2 * heads * 16 * head_dim + line * 4 }
}

#[test]
fn damaged_keys_and_values_reach_the_logits_of_their_sequence_alone() {
    if !available() {
        return;
    }
    let model = model(Arch::Llama2, Dtype::Bf16, 43);
    let config = model.config();
    let (heads, head_dim, layers) = (config.kv_heads, config.head_dim, config.layers.len());
    for (store, deterministic, values) in [
        (KvStore::Half, false, false),
        (KvStore::Half, true, true),
        (KvStore::Fp8, false, true),
        (KvStore::Fp8, true, false),
    ] {
        let mut gpu = HarnessRunner::with_store(store, &model, 16, deterministic, true);
        let mut sequences = TestSequences::new(&[310, 310], config.vocab_size as u32, 16, 5);
        (0..2).for_each(|slot| {
            gpu.attach(slot, &SamplingParams::greedy(), &sequences.tokens[slot as usize]);
        });
        for _ in 0..3 {
            gpu.step(&sequences.batch(&[100, 100]));
        }
        let layer_bytes = store.layer_bytes(heads as u64, 16, head_dim as u64) as usize;
        // The second block of the first sequence, far from its last tokens.
        let block = sequences.tables[0][1] as usize;
        for layer in 0..layers {
            let at = (block * layers + layer) * layer_bytes + offset(store, (heads, head_dim), 3, values);
            Gpu::upload(&gpu.harness, gpu.runner.forward.kv(), at, &damage(store, head_dim)).unwrap();
        }
        // The rest of the prompts, then a token each.
        for _ in 0..2 {
            let batch = sequences.batch(&[10, 10]);
            let (sampled, logits) = gpu.step(&batch);
            let results = gpu.buffers.results.read::<SamplingResult>(2);
            let case = format!("{store:?}, deterministic: {deterministic}, values: {values}");
            assert_eq!((results[0].non_finite, results[1].non_finite), (1, 0), "{case}");
            let (first, second) = logits.split_at(logits.len() / 2);
            assert!(first.iter().all(|x| x.is_nan()) && second.iter().all(|x| x.is_finite()), "{case}");
            for (tokens, sampled) in sequences.tokens.iter_mut().zip(&sampled) {
                tokens.push(sampled.token);
            }
        }
    }
}

/// What a state has become by overflow.
#[test]
fn damaged_recurrent_states_reach_the_logits_of_their_sequence_alone() {
    if !available() {
        return;
    }
    let model = model(Arch::Qwen35, Dtype::Bf16, 45);
    let delta = model.config().delta.unwrap();
    for deterministic in [false, true] {
        let mut gpu = HarnessRunner::new(&model, 16, deterministic, true);
        let shape = gpu.runner.capabilities.shape;
        let vocabulary = model.config().vocab_size as u32;
        let mut sequences = TestSequences::of_shape(&[60, 60], vocabulary, shape, 5);
        (0..2).for_each(|slot| {
            gpu.attach(slot, &SamplingParams::greedy(), &sequences.tokens[slot as usize]);
        });
        gpu.step(&sequences.batch(&[40, 40]));
        // An element of the first matrix of the first layer, for the first sequence.
        let kv = kv_layers(&model, &unsharded(&model), 16, KvStore::Half, CONTEXT);
        let place = kv.state_places()[0][delta.key_heads + delta.value_heads];
        let table = &sequences.tables[0];
        let block = table[table.len() - shape.state_blocks() as usize + place.part];
        let at = u64::from(block) * kv.plan().block_bytes() + place.offset;
        let overflow = f32::INFINITY.to_ne_bytes();
        Gpu::upload(&gpu.harness, gpu.runner.forward.kv(), at as usize, &overflow).unwrap();
        for _ in 0..2 {
            let batch = sequences.batch(&[20, 20]);
            let (sampled, logits) = gpu.step(&batch);
            let results = gpu.buffers.results.read::<SamplingResult>(2);
            assert_eq!((results[0].non_finite, results[1].non_finite), (1, 0));
            let (first, second) = logits.split_at(logits.len() / 2);
            assert!(first.iter().all(|x| x.is_nan()) && second.iter().all(|x| x.is_finite()));
            for (tokens, sampled) in sequences.tokens.iter_mut().zip(&sampled) {
                tokens.push(sampled.token);
            }
        }
    }
}
