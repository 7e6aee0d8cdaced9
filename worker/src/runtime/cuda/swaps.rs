//! The copy engines of all ranks: a block is copied when each rank has copied its part.

use std::time::Duration;

use inflight_worker_core::{Transfer, TransferId};

use crate::runtime::{Error, TransferDone};

/// The copy engine of one rank.
pub(super) trait CopyEngine {
    /// Starts a transfer.
    fn start(&mut self, transfer: &Transfer) -> Result<(), Error>;
    /// Appends what has finished since the last call.
    fn finished(&mut self, finished: &mut Vec<TransferDone>);
    /// Returns when some transfer has finished; at once if none is under way.
    fn wait(&mut self) -> Result<(), Error>;
}

/// A transfer that not every rank has finished.
struct Open {
    id: TransferId,
    /// Ranks that have not.
    missing: usize,
    succeeded: bool,
    /// How long the slowest rank took so far.
    took: Duration,
}

/// Those of all ranks, of which each copies its part of every block.
pub(super) struct Swaps<E> {
    engines: Vec<E>,
    /// At most as many as an engine has under way.
    open: Vec<Open>,
    /// Finished by all, and not reported.
    ready: Vec<TransferDone>,
    scratch: Vec<TransferDone>,
}

impl<E: CopyEngine> Swaps<E> {
    pub(super) fn new(engines: Vec<E>) -> Self {
        Self { engines, open: Vec::new(), ready: Vec::new(), scratch: Vec::new() }
    }

    /// Starts a transfer on every rank.
    pub(super) fn start(&mut self, transfer: &Transfer) -> Result<(), Error> {
        for (rank, engine) in self.engines.iter_mut().enumerate() {
            match engine.start(transfer) {
                Ok(()) => {}
                Err(refused) if rank == 0 => return Err(refused),
                // Some copy what others do not: nobody knows any more what is where.
                Err(refused) => return Err(Error::Device(format!("rank {rank}: {refused}"))),
            }
        }
        let missing = self.engines.len();
        self.open.push(Open { id: transfer.id, missing, succeeded: true, took: Duration::ZERO });
        Ok(())
    }

    /// Appends what has finished on every rank.
    pub(super) fn finished(&mut self, finished: &mut Vec<TransferDone>) {
        self.collect();
        finished.append(&mut self.ready);
    }

    fn collect(&mut self) {
        for engine in &mut self.engines {
            self.scratch.clear();
            engine.finished(&mut self.scratch);
            for done in &self.scratch {
                let Some(at) = self.open.iter().position(|open| open.id == done.id) else { continue };
                let open = &mut self.open[at];
                open.missing -= 1;
                open.succeeded &= done.succeeded;
                open.took = open.took.max(done.took);
                if open.missing == 0 {
                    let Open { id, succeeded, took, .. } = self.open.remove(at);
                    self.ready.push(TransferDone { id, succeeded, took });
                }
            }
        }
    }

    /// Returns when some transfer has finished on every rank; at once if none is under way.
    ///
    /// # Errors
    /// [`Error::Device`]: a device that has failed finishes nothing any more.
    pub(super) fn wait(&mut self) -> Result<(), Error> {
        loop {
            self.collect();
            if !self.ready.is_empty() || self.open.is_empty() {
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

    /// Finishes transfers in their order, one for each question that it is told to be ready for.
    #[derive(Default)]
    struct Scripted {
        under_way: VecDeque<TransferId>,
        ready: VecDeque<bool>,
        fails: Option<u64>,
    }

    impl CopyEngine for Scripted {
        fn start(&mut self, transfer: &Transfer) -> Result<(), Error> {
            self.under_way.push_back(transfer.id);
            Ok(())
        }

        fn finished(&mut self, finished: &mut Vec<TransferDone>) {
            while self.ready.pop_front().unwrap_or(true) {
                let Some(id) = self.under_way.pop_front() else { return };
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
        fn a_transfer_is_reported_once_and_only_after_every_rank(
            scripts in prop::collection::vec(prop::collection::vec(any::<bool>(), 0..40), 1..5),
            transfers in 1u64..20, fails in prop::option::of(0u64..20), rank in any::<prop::sample::Index>(),
        ) {
            let culprit = rank.index(scripts.len());
            let engines = scripts.into_iter().enumerate().map(|(rank, ready)| Scripted {
                ready: ready.into(),
                fails: fails.filter(|_| rank == culprit),
                ..Scripted::default()
            });
            let mut swaps = Swaps::new(engines.collect());
            let mut reported = Vec::new();
            for id in 0..transfers {
                let transfer = Transfer { id: TransferId(id), direction: Direction::Out, blocks: Vec::new() };
                swaps.start(&transfer).unwrap();
                let before = reported.len();
                swaps.finished(&mut reported);
                for done in &reported[before..] {
                    prop_assert!(swaps.engines.iter().all(|engine| !engine.under_way.contains(&done.id)));
                }
            }
            while reported.len() < transfers as usize {
                swaps.wait().unwrap();
                let before = reported.len();
                swaps.finished(&mut reported);
                prop_assert!(reported.len() > before, "nothing had finished");
            }
            swaps.wait().unwrap();
            for (id, done) in reported.iter().enumerate() {
                prop_assert_eq!(done.id, TransferId(id as u64));
                prop_assert_eq!(done.succeeded, fails != Some(done.id.0));
            }
        }
    }
}
