//! Swap over all ranks of a group: a transfer is finished once every rank has copied its shard of the blocks.

use std::time::Duration;

use inflight_runtime::{Error, TransferDone};
use inflight_worker_core::{Transfer, TransferId};

/// Copy engine of one rank.
pub(super) trait CopyEngine {
    /// Starts a transfer.
    fn start(&mut self, transfer: &Transfer) -> Result<(), Error>;
    /// Appends the transfers finished since the last call.
    fn finished(&mut self, finished: &mut Vec<TransferDone>);
    /// Blocks until some transfer has finished; returns at once if none is in flight.
    fn wait(&mut self) -> Result<(), Error>;
}

/// Transfer that some rank has not finished.
struct PendingTransfer {
    id: TransferId,
    /// Number of ranks that have not finished it.
    missing: usize,
    succeeded: bool,
    /// Duration of the slowest rank so far.
    took: Duration,
}

/// Copy engines of all ranks, each of which copies its shard of every block.
pub(super) struct GroupSwap<E> {
    engines: Vec<E>,
    /// Started and not finished by all ranks; bounded by an engine's limit.
    pending: Vec<PendingTransfer>,
    /// Finished by all ranks and not yet reported.
    ready: Vec<TransferDone>,
    scratch: Vec<TransferDone>,
}

impl<E: CopyEngine> GroupSwap<E> {
    pub(super) fn new(engines: Vec<E>) -> Self {
        Self { engines, pending: Vec::new(), ready: Vec::new(), scratch: Vec::new() }
    }

    /// Starts a transfer on every rank.
    pub(super) fn start(&mut self, transfer: &Transfer) -> Result<(), Error> {
        for (rank, engine) in self.engines.iter_mut().enumerate() {
            match engine.start(transfer) {
                Ok(()) => {}
                Err(refused) if rank == 0 => return Err(refused),
                // Some ranks copy and others do not, so the content of the blocks is undefined.
                Err(refused) => return Err(Error::Device(format!("rank {rank}: {refused}"))),
            }
        }
        let missing = self.engines.len();
        self.pending.push(PendingTransfer {
            id: transfer.id,
            missing,
            succeeded: true,
            took: Duration::ZERO,
        });
        Ok(())
    }

    /// Appends the transfers finished by every rank.
    pub(super) fn finished(&mut self, finished: &mut Vec<TransferDone>) {
        self.collect();
        finished.append(&mut self.ready);
    }

    fn collect(&mut self) {
        for engine in &mut self.engines {
            self.scratch.clear();
            engine.finished(&mut self.scratch);
            for done in &self.scratch {
                let Some(at) = self.pending.iter().position(|pending| pending.id == done.id) else {
                    continue;
                };
                let pending = &mut self.pending[at];
                pending.missing -= 1;
                pending.succeeded &= done.succeeded;
                pending.took = pending.took.max(done.took);
                if pending.missing == 0 {
                    let PendingTransfer { id, succeeded, took, .. } = self.pending.remove(at);
                    self.ready.push(TransferDone { id, succeeded, took });
                }
            }
        }
    }

    /// Blocks until some transfer has finished on every rank; returns at once if none is in flight.
    ///
    /// # Errors
    /// [`Error::Device`]: a failed device finishes no transfer.
    pub(super) fn wait(&mut self) -> Result<(), Error> {
        loop {
            self.collect();
            if !self.ready.is_empty() || self.pending.is_empty() {
                return Ok(());
            }
            for engine in &mut self.engines {
                engine.wait()?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use inflight_worker_core::Direction;
    use proptest::prelude::*;

    use super::*;

    /// Copy engine that finishes transfers in order, as scripted: one per `true`.
    #[derive(Default)]
    struct ScriptedEngine {
        in_flight: VecDeque<TransferId>,
        ready: VecDeque<bool>,
        fails: Option<u64>,
    }

    impl CopyEngine for ScriptedEngine {
        fn start(&mut self, transfer: &Transfer) -> Result<(), Error> {
            self.in_flight.push_back(transfer.id);
            Ok(())
        }

        fn finished(&mut self, finished: &mut Vec<TransferDone>) {
            while self.ready.pop_front().unwrap_or(true) {
                let Some(id) = self.in_flight.pop_front() else { return };
                let succeeded = self.fails != Some(id.0);
                finished.push(TransferDone { id, succeeded, took: Duration::from_millis(id.0) });
            }
        }

        fn wait(&mut self) -> Result<(), Error> {
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn a_transfer_is_reported_once_and_only_after_every_rank_finished(
            scripts in prop::collection::vec(prop::collection::vec(any::<bool>(), 0..40), 1..5),
            transfers in 1u64..20, fails in prop::option::of(0u64..20), rank in any::<prop::sample::Index>(),
        ) {
            let culprit = rank.index(scripts.len());
            let engines = scripts.into_iter().enumerate().map(|(rank, ready)| ScriptedEngine {
                ready: ready.into(),
                fails: fails.filter(|_| rank == culprit),
                ..ScriptedEngine::default()
            });
            let mut swap = GroupSwap::new(engines.collect());
            let mut reported = Vec::new();
            for id in 0..transfers {
                let transfer = Transfer { id: TransferId(id), direction: Direction::Out, blocks: Vec::new() };
                swap.start(&transfer).unwrap();
                let before = reported.len();
                swap.finished(&mut reported);
                for done in &reported[before..] {
                    prop_assert!(swap.engines.iter().all(|engine| !engine.in_flight.contains(&done.id)));
                }
            }
            while reported.len() < transfers as usize {
                swap.wait().unwrap();
                let before = reported.len();
                swap.finished(&mut reported);
                prop_assert!(reported.len() > before, "nothing had finished");
            }
            swap.wait().unwrap();
            for (id, done) in reported.iter().enumerate() {
                prop_assert_eq!(done.id, TransferId(id as u64));
                prop_assert_eq!(done.succeeded, fails != Some(done.id.0));
            }
        }
    }
}
