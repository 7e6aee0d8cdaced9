//! Log probabilities of prompts, on the kernels' CPU harness.

use inflight_runtime::{PromptLogprobs, ScoreRow};

use super::super::model_runner::scored;
use super::*;

/// Scores all rows of a batch of one sequence, whose tokens are `tokens`.
fn score_all(batch: &mut Batch, tokens: &[u32]) {
    let rows = (0..batch.rows() as u32).zip(&batch.positions);
    let next = rows.filter_map(|(row, position)| Some((row, *tokens.get(*position as usize + 1)?)));
    batch.scores = next.map(|(row, token)| ScoreRow { row, token, top: 4 }).collect();
}

/// Returns the scores of a prompt computed in these chunks, beside decodes of another sequence.
fn scores(model: &ModelDir, chunks: &[usize]) -> (Vec<PromptLogprobs>, Vec<Sampled>) {
    let mut gpu = HarnessRunner::new(model, 16, true, true);
    let mut sequences = TestSequences::new(&[70, 9], model.config().vocab_size as u32, 16, 3);
    (0..2).for_each(|slot| gpu.attach(slot, &SamplingParams::greedy(), &sequences.tokens[slot as usize]));
    let (mut all, mut samples) = (Vec::new(), Vec::new());
    for chunk in chunks {
        let mut batch = sequences.batch(&[*chunk, 0]);
        score_all(&mut batch, &sequences.tokens[0]);
        let other = sequences.batch(&[0, 64]);
        batch.push_sequence(&other.tokens, other.positions[0], &sequences.tables[1]);
        batch.sample_last_row(1);
        let (sampled, _) = gpu.step(&batch);
        let results = gpu.buffers.scores.read::<SamplingResult>(batch.scores.len());
        all.extend(results.iter().map(scored));
        sequences.tokens[1].push(sampled[sampled.len() - 1].token);
        samples.extend(sampled);
    }
    (all, samples)
}

#[test]
fn prompts_are_scored_like_on_the_cpu_in_any_chunks() {
    if !available() {
        return;
    }
    let model = model(Arch::Qwen2, Dtype::Bf16, 41);
    let (whole, _) = scores(&model, &[70]);
    let mut cpu = on_cpu(&model, 16);
    let mut sequences = TestSequences::new(&[70], model.config().vocab_size as u32, 16, 3);
    let mut batch = sequences.batch(&[70]);
    batch.samples.clear();
    score_all(&mut batch, &sequences.tokens[0]);
    let mut expected = Vec::new();
    cpu.execute(&mut batch, &mut Vec::new()).unwrap();
    cpu.take_scores(&mut expected);
    assert_eq!((whole.len(), expected.len()), (69, 69));
    for (got, want) in whole.iter().zip(&expected) {
        assert_eq!((got.token.token, got.top.len()), (want.token.token, 4));
        assert!((got.token.logprob - want.token.logprob).abs() < 0.1, "{got:?} is not {want:?}");
        assert!((got.top[0].logprob - want.top[0].logprob).abs() < 0.1, "{got:?} is not {want:?}");
        let place = got.top.iter().position(|one| one.token == got.token.token);
        assert!(place.map_or(got.rank > 4, |place| place + 1 == got.rank as usize), "{got:?}");
    }
    for chunks in [vec![1; 70], vec![7; 10], vec![33, 37]] {
        assert_eq!(scores(&model, &chunks).0, whole, "{chunks:?}");
    }
}
