//! Tensor-parallel group of CPU ranks, each with its own threads.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use inflight_kernels::cpu::{Isa, KvPool, Pool};
use inflight_runtime::collective::{Collective, GroupFailed};
use inflight_runtime::{Batch, Capabilities, Error, PromptLogprobs};

use super::forward::Forward;
use super::weights::Weights;

/// Tensor-parallel rank: a shard of the model and its threads.
pub(super) struct Rank {
    pub(super) pool: Pool,
    pub(super) isa: Isa,
    pub(super) weights: Weights,
    pub(super) kv: KvPool,
    pub(super) forward: Forward,
    pub(super) collective: Box<dyn Collective>,
}

impl Rank {
    /// Runs block copies and the forward pass. The batch must be checked and placed.
    fn run(&mut self, batch: &Batch) -> Result<(), GroupFailed> {
        for copy in &batch.copies {
            self.kv.copy_block(copy.from, copy.to);
        }
        let Self { pool, isa, weights, kv, forward, collective } = self;
        forward.run(batch, weights, kv, pool, *isa, &**collective)
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
        if self.rest.is_empty() {
            return self.lead.run(batch).map_err(device);
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
            let run = AssertUnwindSafe(|| {
                if index > 0 {
                    rank.forward.place(batch, bounds).map_err(|error| error.to_string())?;
                }
                rank.run(batch).map_err(|failed| failed.reason)
            });
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
