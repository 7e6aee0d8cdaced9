//! Scorer: log probability and rank of given tokens, rows in parallel.

use std::sync::{Mutex, MutexGuard, PoisonError};

use inflight_kernels::cpu::{Isa, Pool, Score, Workspace, all_finite, mask_nan, score};
use inflight_runtime::{PromptLogprobs, ScoreRow, TokenLogprob};

/// Maximum rows whose logits are held at once.
pub(super) const SCORE_ROWS: usize = 32;

/// Scores tokens from logits.
#[derive(Default)]
pub(super) struct Scorer {
    /// Pool of scratch buffers, at most one per thread.
    scratch: Mutex<Vec<Scratch>>,
    /// Scores, and whether the row's logits are finite.
    outcomes: Vec<Mutex<Option<(PromptLogprobs, bool)>>>,
}

#[derive(Default)]
struct Scratch {
    row: Vec<f32>,
    workspace: Workspace,
}

impl Scorer {
    /// Appends the scores of `rows`, whose logits are `logits`; [rows, vocab_size]. Appends the places in `scores` of rows whose logits are
    /// not all finite to `non_finite`.
    pub(super) fn run(
        &mut self,
        pool: &Pool,
        isa: Isa,
        rows: &[ScoreRow],
        logits: &[f32],
        scores: &mut Vec<PromptLogprobs>,
        non_finite: &mut Vec<u32>,
    ) {
        let vocab = logits.len() / rows.len();
        self.outcomes.resize_with(rows.len().max(self.outcomes.len()), Mutex::default);
        let (scratch, outcomes) = (&self.scratch, &self.outcomes);
        pool.each(rows.len(), &|i| {
            let mut own = lock(scratch).pop().unwrap_or_default();
            let outcome = score_row(isa, &rows[i], &logits[i * vocab..(i + 1) * vocab], &mut own);
            lock(scratch).push(own);
            *lock(&outcomes[i]) = Some(outcome);
        });
        for (outcome, finite) in self.outcomes[..rows.len()].iter().filter_map(|outcome| lock(outcome).take())
        {
            non_finite.extend((!finite).then_some(scores.len() as u32));
            scores.push(outcome);
        }
    }
}

fn score_row(isa: Isa, row: &ScoreRow, logits: &[f32], scratch: &mut Scratch) -> (PromptLogprobs, bool) {
    let Scratch { row: cleaned, workspace } = scratch;
    cleaned.clear();
    cleaned.extend_from_slice(logits);
    mask_nan(cleaned);
    let Score { logprob, rank, top } = score(isa, cleaned, row.token, row.top as usize, workspace);
    let top = top.into_iter().map(|(token, logprob)| TokenLogprob { token, logprob }).collect();
    let scored = PromptLogprobs { token: TokenLogprob { token: row.token, logprob }, rank, top };
    (scored, all_finite(isa, logits))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
