use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use inflight_kernels::cpu::{Isa, KvPool, Pool};

use super::super::collective::{Collective, GroupFailed};
use super::super::{Batch, Capabilities, Error};
use super::forward::Forward;
use super::weights::Weights;

/// One rank: a shard of the model, with the threads that compute it.
pub(super) struct Rank {
    pub(super) pool: Pool,
    pub(super) isa: Isa,
    pub(super) weights: Weights,
    pub(super) kv: KvPool,
    pub(super) forward: Forward,
    pub(super) collective: Box<dyn Collective>,
}

impl Rank {
    /// Block copies, then the forward pass. The batch was checked and placed.
    fn run(&mut self, batch: &Batch) -> Result<(), GroupFailed> {
        for copy in &batch.copies {
            self.kv.copy_block(copy.from, copy.to);
        }
        let Self { pool, isa, weights, kv, forward, collective } = self;
        forward.run(batch, weights, kv, pool, *isa, &**collective)
    }
}

/// The ranks that share a model, each on a thread of its own. A step of the group is one of every rank.
pub(super) struct Group {
    lead: Rank,
    rest: Vec<Mutex<Rank>>,
    /// A thread for each rank, that of the lead being the caller's.
    threads: Pool,
}

impl Group {
    /// A group of these ranks, in their order, over as many threads.
    pub(super) fn new(lead: Rank, rest: Vec<Rank>, threads: Pool) -> Self {
        Self { lead, rest: rest.into_iter().map(Mutex::new).collect(), threads }
    }

    /// Runs `work` for each of `world` ranks at once, each on a thread of its own, as ranks wait for each other. `threads`
    /// has as many: then each thread of the pool has one share of the job, and while it waits in it the others find theirs.
    pub(super) fn on_each(threads: &Pool, world: usize, work: &(dyn Fn(usize) + Sync)) {
        assert_eq!(threads.threads(), world, "a rank would wait for one that has no thread");
        threads.each(world, work);
    }

    /// Computes the logits of the batch's sample rows and writes all rows' keys and values. The batch was checked.
    ///
    /// # Errors
    /// [`Error::Malformed`] before anything ran, [`Error::Device`] if a rank fails, and ever after.
    ///
    /// # Panics
    /// A panic of a group of one is its caller's. That of one rank of several is the failure of the group.
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
            // Told before anything else, so that the others do not wait for this rank.
            match catch_unwind(run) {
                Ok(Ok(())) => {}
                Ok(Err(reason)) => rank.collective.fail(&reason),
                Err(panic) => rank.collective.fail(&words(&*panic)),
            }
        });
        self.check()
    }

    fn check(&self) -> Result<(), Error> {
        self.lead.collective.failure().map_or(Ok(()), |failed| Err(device(failed)))
    }

    /// Runs `unit` on every index below `units`, each once, on the threads of all ranks.
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

    /// The logits of the last step; [samples, vocab_size].
    pub(super) fn logits(&self) -> &[f32] {
        self.lead.forward.logits()
    }

    /// Bytes of the packed weights, all ranks together.
    pub(super) fn weight_bytes(&self) -> usize {
        let rest = self.rest.iter().map(|rank| lock(rank).weights.bytes()).sum::<usize>();
        self.lead.weights.bytes() + rest
    }

    /// Whether every rank's threads have CPUs of their own.
    pub(super) fn is_pinned(&self) -> bool {
        self.lead.pool.is_pinned() && self.rest.iter().all(|rank| lock(rank).pool.is_pinned())
    }
}

fn device(failed: GroupFailed) -> Error {
    Error::Device(failed.to_string())
}

/// What a panic said.
fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("it panicked: {}", text.as_deref().unwrap_or("the log above says where"))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
