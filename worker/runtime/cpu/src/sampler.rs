//! Sampler: penalties, truncation and token choice per sample row, in parallel.

use std::sync::{Mutex, MutexGuard, PoisonError};

use inflight_contract::SamplingParams;
use inflight_kernels::RandomKey;
use inflight_kernels::cpu::{
    Isa, Truncation, Workspace, all_finite, argmax, log_sum_exp, logprob, mask_nan, sample, top,
};
use inflight_runtime::{Batch, PositionLogprobs, SampleRow, Sampled, TokenLogprob, TokenMasks};

use super::rank_group::RankGroup;
use super::sampling_slots::{SamplingSlots, SlotState};

/// Samples tokens from logits, rows in parallel on all threads.
#[derive(Default)]
pub(super) struct Sampler {
    /// Pool of scratch buffers, at most one per thread.
    scratch: Mutex<Vec<Scratch>>,
    /// Sampled tokens, and whether the row's logits are finite.
    outcomes: Vec<Mutex<Option<(Sampled, bool)>>>,
    /// Index of the token mask of each sample row; without meaning for rows that have none.
    mask_of: Vec<usize>,
    /// Index of the sample row of each slot that is sampled next.
    round: Vec<usize>,
}

#[derive(Default)]
struct Scratch {
    row: Vec<f32>,
    workspace: Workspace,
}

impl Sampler {
    /// Samples a token for each sample row that counts and adds it to its slot's history. All slots must be
    /// attached, and `masks` has a row for each masked one. Appends the sample rows that count and whose logits are not all finite to
    /// `non_finite`.
    pub(super) fn run(
        &mut self,
        batch: &Batch,
        masks: &TokenMasks,
        slots: &mut SamplingSlots,
        group: &RankGroup,
        isa: Isa,
        sampled: &mut Vec<Sampled>,
        non_finite: &mut Vec<u32>,
    ) {
        let samples = batch.samples.as_slice();
        if samples.is_empty() {
            return;
        }
        let logits = group.logits();
        let vocab = logits.len() / samples.len();
        self.mask_of.clear();
        self.mask_of.extend(samples.iter().scan(0, |next, sample| {
            *next += usize::from(sample.masked);
            Some(next.saturating_sub(1))
        }));
        self.outcomes.resize_with(samples.len().max(self.outcomes.len()), Mutex::default);
        // A slot's next row must see the token of its previous one, and counts only if that equals its draft:
        // the first row of each slot is sampled in parallel, then the second ones, and so on.
        let starts = |i: &usize| *i == 0 || samples[*i - 1].slot != samples[*i].slot;
        let mut round = std::mem::take(&mut self.round);
        round.clear();
        round.extend((0..samples.len()).filter(starts));
        while !round.is_empty() {
            let read: &SamplingSlots = slots;
            group.each(round.len(), &|nth| {
                let i = round[nth];
                let Some(state) = read.get(samples[i].slot) else { return };
                let mut scratch = lock(&self.scratch).pop().unwrap_or_default();
                let mask = samples[i].masked.then(|| masks.row(self.mask_of[i]));
                let row = &logits[i * vocab..(i + 1) * vocab];
                let token = choose(state, &samples[i], row, mask, isa, &mut scratch);
                lock(&self.scratch).push(scratch);
                *lock(&self.outcomes[i]) = Some((token, all_finite(isa, row)));
            });
            round.retain_mut(|i| {
                let slot = samples[*i].slot;
                let Some(token) = lock(&self.outcomes[*i]).as_ref().map(|(sampled, _)| sampled.token) else {
                    return false;
                };
                slots.count(slot, token);
                *i += 1;
                samples.get(*i).is_some_and(|next| next.slot == slot && batch.counts(next, token))
            });
        }
        self.round = round;
        for (nth, outcome) in self.outcomes[..samples.len()].iter().enumerate() {
            let (outcome, finite) = lock(outcome).take().unwrap_or((Sampled::REJECTED, true));
            sampled.push(outcome);
            non_finite.extend((!finite).then_some(nth as u32));
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn choose(
    state: &SlotState,
    row: &SampleRow,
    logits: &[f32],
    mask: Option<&[u32]>,
    isa: Isa,
    scratch: &mut Scratch,
) -> Sampled {
    let sampling = &*state.sampling;
    if sampling.is_greedy() && sampling.logprobs.is_none() && !state.adjusts() && mask.is_none() {
        return Sampled { token: argmax(isa, logits), logprobs: None };
    }
    let Scratch { row: adjusted, workspace } = scratch;
    adjusted.clear();
    adjusted.extend_from_slice(logits);
    mask_nan(adjusted);
    state.adjust(adjusted);
    if let Some(mask) = mask {
        apply_mask(mask, adjusted);
    }
    let fallback = state.fallback_token(adjusted.len(), mask.is_some());
    let fallback = fallback.filter(|_| adjusted.iter().all(|logit| *logit == f32::NEG_INFINITY));
    let token = if let Some(fallback) = fallback {
        fallback
    } else if sampling.is_greedy() {
        argmax(isa, adjusted)
    } else {
        let draw = RandomKey { seed: sampling.seed, choice: state.choice, position: row.position, draw: 0 };
        sample(isa, adjusted, &truncation(sampling), draw.uniform(), workspace)
    };
    let logprobs = sampling.logprobs.map(|count| {
        let total = log_sum_exp(isa, adjusted, workspace);
        let entry = |token: u32, logit: f32| TokenLogprob { token, logprob: logprob(logit, total) };
        let top =
            top(adjusted, count as usize, workspace).map(|(token, logit)| entry(token, logit)).collect();
        Box::new(PositionLogprobs { chosen: entry(token, adjusted[token as usize]), top })
    });
    Sampled { token, logprobs }
}

/// Masks the tokens whose bits are not set.
fn apply_mask(mask: &[u32], logits: &mut [f32]) {
    for (word, logits) in mask.iter().zip(logits.chunks_mut(32)) {
        match *word {
            u32::MAX => {}
            0 => logits.fill(f32::NEG_INFINITY),
            bits => {
                for (at, logit) in logits.iter_mut().enumerate() {
                    if bits >> at & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

fn truncation(sampling: &SamplingParams) -> Truncation {
    Truncation {
        temperature: sampling.temperature,
        top_k: sampling.top_k.max(0) as usize,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
    }
}
