//! Masks of tokens, on the kernels' CPU harness.

use super::*;

#[test]
fn bad_words_follow_the_tokens_on_the_device_and_those_of_earlier_attempts() {
    if !available() {
        return;
    }
    let model = model(Arch::Llama31, Dtype::Bf16, 31);
    // Of six tokens, each may be followed by the next one only.
    let (first, count) = (30, 6);
    let ids = first..first + count;
    let follows = |token: u32| first + (token - first + 1) % count;
    let pairs = ids.clone().flat_map(|a| (first..first + count).map(move |b| (a, b)));
    let words = pairs.filter(|(a, b)| follows(*a) != *b).map(|(a, b)| vec![a, b]);
    let spec = SamplingSpec {
        temperature: 0.8,
        logprobs: Some(2),
        allowed_token_ids: ids.collect(),
        bad_word_token_ids: words.collect(),
        ..SamplingSpec::default()
    };
    let sampling = Arc::new(spec.validate().unwrap());
    let mut gpu = HarnessRunner::new(&model, 16, false, true);
    let mut sequences = TestSequences::new(&[12], model.config().vocab_size as u32, 16, 9);
    let prompt = sequences.tokens[0].clone();
    // More generated tokens than the ring holds, the last of which is 32.
    let generated: Vec<u32> = (0..40).map(|i| if i == 39 { 32 } else { 7 }).collect();
    sequences.tokens[0].extend(&generated);
    let setup =
        SlotSetup { sampling, choice: 0, prompt: &prompt, generated: &generated, eos_token_ids: &[1] };
    // A sequence without masks had the slot before.
    gpu.attach(0, &SamplingParams::greedy(), &prompt);
    gpu.runner.attach(&gpu.harness, 0, &setup).unwrap();
    let mut last = 32;
    for _ in 0..40 {
        let (sampled, _) = gpu.step(&sequences.batch(&[64]));
        assert_eq!(sampled[0].token, follows(last));
        last = sampled[0].token;
        sequences.tokens[0].push(last);
        let logprobs = sampled[0].logprobs.as_ref().unwrap();
        assert_eq!((logprobs.chosen.logprob, logprobs.top[0].token), (0.0, last));
        assert_eq!(logprobs.top[1].logprob, f32::NEG_INFINITY, "masked tokens have no probability");
    }
}
