//! Drafts, on the kernels' CPU harness: several rows of a slot in one step.

use super::*;

/// Generates `count` tokens from a prompt, with the drafts that `draft` returns for the output so far. Returns
/// tokens and bits of their logits, and the number of steps with samples.
fn generate(
    model: &ModelDir,
    count: usize,
    draft: impl Fn(&[u32]) -> Vec<u32>,
) -> (Vec<(Sampled, Vec<u32>)>, usize) {
    let spec = SamplingSpec {
        temperature: 0.9,
        frequency_penalty: 0.3,
        seed: 12,
        logprobs: Some(3),
        min_tokens: 9,
        stop_token_ids: (0..60).collect(),
        // Words of two tokens, masked by the tokens that the drafts add.
        bad_word_token_ids: (100..160).map(|token| vec![token, token + 1]).collect(),
        ..SamplingSpec::default()
    };
    let sampling = Arc::new(spec.validate().unwrap());
    let mut gpu = HarnessRunner::new(model, 16, true, true);
    let vocabulary = model.config().vocab_size as u32;
    // A second sequence decodes beside it without drafts.
    let mut sequences = TestSequences::new(&[21, 9], vocabulary, 16, 2);
    let prompts = sequences.tokens.clone();
    for (slot, prompt) in (0..).zip(&prompts) {
        let sampling = Arc::clone(&sampling);
        let setup = SlotSetup { sampling, choice: slot, prompt, generated: &[], eos_token_ids: &[1] };
        gpu.runner.attach(&gpu.harness, slot, &setup).unwrap();
    }
    let (mut output, mut steps) = (Vec::new(), 0);
    while output.len() < count {
        let first = sequences.done[0];
        let newest = sequences.tokens[0][first..].to_vec();
        let generated: Vec<u32> = output.iter().map(|(sampled, _): &(Sampled, _)| sampled.token).collect();
        let drafts = draft(&generated);
        let mut batch = Batch::default();
        batch.clear();
        batch.push_drafted(&newest, &drafts, first as u32, &sequences.tables[0]);
        batch.sample_with_drafts(0, drafts.len() as u32);
        sequences.done[0] += newest.len();
        let (at, other) = (sequences.done[1], sequences.tokens[1][sequences.done[1]..].to_vec());
        batch.push_sequence(&other, at as u32, &sequences.tables[1]);
        batch.sample_last_row(1);
        sequences.done[1] += other.len();
        let (sampled, logits) = gpu.step(&batch);
        steps += 1;
        let width = logits.len() / sampled.len();
        for nth in 0..=drafts.len() {
            let bits = logits[nth * width..][..width].iter().map(|logit| logit.to_bits()).collect();
            let token = sampled[nth].token;
            output.push((sampled[nth].clone(), bits));
            sequences.tokens[0].push(token);
            if drafts.get(nth) != Some(&token) {
                break;
            }
            sequences.done[0] += 1;
        }
        let other = sampled.last().unwrap().token;
        sequences.tokens[1].push(other);
    }
    output.truncate(count);
    (output, steps)
}

#[test]
fn tokens_and_logits_with_drafts_have_the_bits_of_those_without() {
    if !available() {
        return;
    }
    let model = model(Arch::Llama31, Dtype::Bf16, 17);
    let (expected, steps) = generate(&model, 24, |_| Vec::new());
    assert_eq!(steps, 24);
    let tokens: Vec<u32> = expected.iter().map(|(sampled, _)| sampled.token).collect();
    // The third draft of every other step is wrong, and so are some first ones.
    let draft = |generated: &[u32]| {
        let mut drafts: Vec<u32> = tokens.iter().skip(generated.len()).take(4).copied().collect();
        let wrong = if generated.len().is_multiple_of(3) { 0 } else { 2 };
        if let Some(draft) = drafts.get_mut(wrong) {
            *draft += 1;
        }
        drafts
    };
    let (drafted, fewer) = generate(&model, 24, draft);
    for (at, (got, expected)) in drafted.iter().zip(&expected).enumerate() {
        assert_eq!(got.0, expected.0, "token {at}");
        assert!(got.1 == expected.1, "logits of token {at}");
    }
    assert!(fewer < steps * 2 / 3, "{fewer} steps of {steps}");
}
