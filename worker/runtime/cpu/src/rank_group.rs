//! Tensor-parallel group of CPU ranks, each with its own threads.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use inflight_kernels::cpu::{Isa, KvPool, Pool, argmax};
use inflight_runtime::collective::{Collective, GroupFailed};
use inflight_runtime::{Batch, Capabilities, Error, Prediction, Predictions, PromptLogprobs, Sampled, Slot};

use super::forward::{Forward, RankDevice};
use super::mtp::PredictedRow;
use super::weights::Weights;

/// Tensor-parallel rank: a shard of the model and its threads.
pub(super) struct Rank {
    pub(super) pool: Pool,
    pub(super) isa: Isa,
    pub(super) weights: Weights,
    pub(super) kv: KvPool,
    pub(super) forward: Forward,
    pub(super) collective: Box<dyn Collective>,
    /// Block copies of a step.
    pub(super) copies: Vec<(u32, u32)>,
}

impl Rank {
    /// Runs block copies and the forward pass. The batch must be checked and placed.
    fn run(&mut self, batch: &Batch) -> Result<(), GroupFailed> {
        let Self { pool, isa, weights, kv, forward, collective, copies } = self;
        copies.clear();
        copies.extend(batch.copies.iter().map(|copy| (copy.from, copy.to)));
        kv.copy_blocks(pool, copies);
        forward.run(batch, weights, kv, RankDevice { pool, isa: *isa, collective: &**collective })
    }

    /// Runs the MTP layer on a row of each of some sequences of the batch computed last.
    fn predict(
        &mut self,
        batch: &Batch,
        rows: &[PredictedRow],
        bounds: &Capabilities,
    ) -> Result<(), GroupFailed> {
        let Self { pool, isa, weights, kv, forward, collective, .. } = self;
        forward.predict(
            batch,
            rows,
            bounds,
            weights,
            kv,
            RankDevice { pool, isa: *isa, collective: &**collective },
        )
    }
}

/// All ranks of a model, driven from one thread each.
pub(super) struct RankGroup {
    lead: Rank,
    rest: Vec<Mutex<Rank>>,
    /// One thread per rank; that of the lead is the caller's.
    threads: Pool,
}

impl RankGroup {
    /// Creates a group from its ranks in order; `threads` has one thread per rank.
    pub(super) fn new(lead: Rank, rest: Vec<Rank>, threads: Pool) -> Self {
        Self { lead, rest: rest.into_iter().map(Mutex::new).collect(), threads }
    }

    /// Runs `work` concurrently for each of `world` ranks. Ranks wait for each other, so `threads` must have
    /// exactly one thread per rank.
    pub(super) fn on_each(threads: &Pool, world: usize, work: &(dyn Fn(usize) + Sync)) {
        assert_eq!(threads.threads(), world, "a rank would wait for one that has no thread");
        threads.each(world, work);
    }

    /// Runs a step on all ranks: scores, logits of the sample rows, keys and values of all rows. The batch must be
    /// checked.
    ///
    /// # Errors
    /// [`Error::Malformed`] before anything runs; [`Error::Device`] if a rank fails, and on every later call.
    ///
    /// # Panics
    /// If a single rank panics; with several ranks, a panic fails the group instead.
    pub(super) fn step(&mut self, batch: &Batch, bounds: &Capabilities) -> Result<(), Error> {
        self.check()?;
        self.lead.forward.place(batch, bounds)?;
        self.on_ranks(&|rank| {
            if !rank.forward.leads() {
                rank.forward.place(batch, bounds).map_err(|error| error.to_string())?;
            }
            rank.run(batch).map_err(|failed| failed.reason)
        })
    }

    /// Lets the MTP layer predict the tokens that follow those sampled in the batch computed last, as many as its predictions ask for.
    ///
    /// # Errors
    /// [`Error::Device`] if a rank fails, and on every later call.
    pub(super) fn predict(
        &mut self,
        batch: &Batch,
        sampled: &[Sampled],
        bounds: &Capabilities,
        predictions: &mut Predictions,
    ) -> Result<(), Error> {
        let (isa, vocab, context) = (self.lead.isa, bounds.vocab_size as usize, bounds.context_tokens);
        let first = |(index, prediction): (usize, &Prediction)| {
            let (row, token) = batch.last_counted(prediction.sequence as usize, sampled)?;
            Some(PredictedRow {
                index,
                token,
                position: batch.positions[row as usize] + 1,
                is_predicted: false,
            })
        };
        let mut rows: Vec<PredictedRow> = batch.predictions.iter().enumerate().filter_map(first).collect();
        let mut drafts = vec![Vec::new(); batch.predictions.len()];
        loop {
            rows.retain(|row| {
                let most = batch.predictions[row.index].tokens as usize;
                drafts[row.index].len() < most && row.position < context
            });
            if rows.is_empty() {
                break;
            }
            self.check()?;
            self.on_ranks(&|rank| rank.predict(batch, &rows, bounds).map_err(|failed| failed.reason))?;
            let logits = self.lead.forward.predicted_logits().chunks_exact(vocab);
            for (row, logits) in rows.iter_mut().zip(logits) {
                row.token = argmax(isa, logits);
                (row.position, row.is_predicted) = (row.position + 1, true);
                drafts[row.index].push(row.token);
            }
        }
        for (prediction, drafts) in batch.predictions.iter().zip(&drafts) {
            if !drafts.is_empty() {
                predictions.push(prediction.slot, drafts);
            }
        }
        Ok(())
    }

    /// Forgets what the MTP layer keeps of a slot's sequence.
    pub(super) fn forget(&mut self, slot: Slot) {
        self.lead.forward.forget(slot);
        self.rest.iter().for_each(|rank| lock(rank).forward.forget(slot));
    }

    /// Runs `work` on all ranks at once.
    ///
    /// # Errors
    /// [`Error::Device`] if a rank fails.
    fn on_ranks(&mut self, work: &(dyn Fn(&mut Rank) -> Result<(), String> + Sync)) -> Result<(), Error> {
        if self.rest.is_empty() {
            return work(&mut self.lead).map_err(|reason| device(GroupFailed { rank: 0, reason }));
        }
        let lead = Mutex::new(&mut self.lead);
        let rest = &self.rest;
        Self::on_each(&self.threads, rest.len() + 1, &|index| {
            let (mut first, mut other);
            let rank: &mut Rank = if index == 0 {
                first = lock(&lead);
                &mut first
            } else {
                other = lock(&rest[index - 1]);
                &mut other
            };
            let run = AssertUnwindSafe(|| work(rank));
            // Fail the group first, so that the other ranks do not wait for this one.
            match catch_unwind(run) {
                Ok(Ok(())) => {}
                Ok(Err(reason)) => rank.collective.fail(&reason),
                Err(panic) => rank.collective.fail(&panic_reason(&*panic)),
            }
        });
        self.check()
    }

    fn check(&self) -> Result<(), Error> {
        self.lead.collective.failure().map_or(Ok(()), |failed| Err(device(failed)))
    }

    /// Runs `unit` once for every index below `units`, on the threads of all ranks.
    pub(super) fn each(&self, units: usize, unit: &(dyn Fn(usize) + Sync)) {
        let (first, rest, world) = (&self.lead.pool, &self.rest, self.rest.len() + 1);
        if units <= 1 || rest.is_empty() {
            return first.each(units, unit);
        }
        Self::on_each(&self.threads, world, &|index| {
            let (start, end) = (units * index / world, units * (index + 1) / world);
            let shifted = |i: usize| unit(start + i);
            match index {
                0 => first.each(end - start, &shifted),
                _ => lock(&rest[index - 1]).pool.each(end - start, &shifted),
            }
        });
    }

    /// Logits of the last step; [samples, vocab_size].
    pub(super) fn logits(&self) -> &[f32] {
        self.lead.forward.logits()
    }

    /// Moves the scores of the last step to `scores`, and the places of rows whose logits are not all finite to `non_finite`.
    pub(super) fn take_scores(&mut self, scores: &mut Vec<PromptLogprobs>, non_finite: &mut Vec<u32>) {
        scores.append(&mut self.lead.forward.scores);
        non_finite.append(&mut self.lead.forward.non_finite);
    }

    /// Bytes of the packed weights of all ranks.
    pub(super) fn weight_bytes(&self) -> usize {
        let rest = self.rest.iter().map(|rank| lock(rank).weights.bytes()).sum::<usize>();
        self.lead.weights.bytes() + rest
    }

    /// Returns whether the threads of all ranks are pinned to CPUs.
    pub(super) fn is_pinned(&self) -> bool {
        self.lead.pool.is_pinned() && self.rest.iter().all(|rank| lock(rank).pool.is_pinned())
    }
}

fn device(failed: GroupFailed) -> Error {
    Error::Device(failed.to_string())
}

/// Returns the message of a panic.
fn panic_reason(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("it panicked: {}", text.as_deref().unwrap_or("the log above says where"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
