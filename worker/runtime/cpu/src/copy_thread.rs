//! Copy thread: asynchronous transfers between the KV block pool and the host pool.

use std::time::Instant;

use inflight_kernels::cpu::{KvCopier, KvDirection};
use inflight_runtime::{CommandThread, CommandThreadOptions, Error, ThreadEnded, TransferDone};
use inflight_worker_core::{Direction, Transfer};
use metrics::Gauge;

/// Maximum queued transfers. Each belongs to a sequence that was running, so there are never many.
const QUEUED_MAX: usize = 1024;

/// Handle of a thread that copies blocks between the KV block pool and the host pool while others compute.
pub(super) struct CopyThread {
    /// `None` without a host pool.
    thread: Option<CommandThread<Transfer, TransferDone>>,
    device_blocks: u32,
    host_blocks: u32,
    /// Transfers submitted and not reported.
    in_flight: usize,
    /// Finished transfers that were received but not reported.
    arrived: Vec<TransferDone>,
}

impl CopyThread {
    /// Starts the thread if there is a host pool. There is one copier per rank; each holds its shard of every
    /// block.
    ///
    /// # Errors
    /// Starting the thread failed.
    pub(super) fn start(
        mut copiers: Vec<KvCopier>,
        device_blocks: u32,
        host_blocks: u32,
    ) -> std::io::Result<Self> {
        let options = CommandThreadOptions {
            name: "kv-copies".to_owned(),
            commands_max: QUEUED_MAX,
            results_max: QUEUED_MAX,
            queued: Gauge::noop(),
        };
        let start = || {
            CommandThread::start(options, move |transfers, results| {
                for transfer in transfers {
                    if results.send(copy(&mut copiers, &transfer)).is_err() {
                        return; // the runtime was dropped
                    }
                }
            })
        };
        let thread = if host_blocks > 0 { Some(start()?) } else { None };
        Ok(Self { thread, device_blocks, host_blocks, in_flight: 0, arrived: Vec::new() })
    }

    /// Queues a transfer.
    pub(super) fn submit(&mut self, transfer: &Transfer) -> Result<(), Error> {
        let malformed = |what: &str| Err(Error::Malformed(what.to_owned()));
        let Some(thread) = &self.thread else { return malformed("there is no host pool to transfer to") };
        let within = |(device, host): &(u32, u32)| *device < self.device_blocks && *host < self.host_blocks;
        if !transfer.blocks.iter().all(within) {
            return malformed("a transferred block is out of its pool");
        }
        thread.send(transfer.clone()).map_err(|ThreadEnded| thread_ended())?;
        self.in_flight += 1;
        Ok(())
    }

    pub(super) fn finished(&mut self, finished: &mut Vec<TransferDone>) {
        self.arrived.extend(self.thread.iter().flat_map(|thread| thread.results().try_iter()));
        self.in_flight -= self.arrived.len();
        finished.append(&mut self.arrived);
    }

    /// Blocks until a transfer finishes, if one is in flight; [`Error::Device`] if the thread has panicked.
    pub(super) fn wait(&mut self) -> Result<(), Error> {
        if let Some(thread) = &self.thread
            && self.in_flight > 0
            && self.arrived.is_empty()
        {
            self.arrived.push(thread.results().recv().map_err(|_| thread_ended())?);
        }
        Ok(())
    }
}

fn thread_ended() -> Error {
    Error::Device("the thread that copies blocks to and from the host is gone".to_owned())
}

/// Copies the blocks of a transfer, each rank's shard of them.
fn copy(copiers: &mut [KvCopier], transfer: &Transfer) -> TransferDone {
    let begun = Instant::now();
    let direction = match transfer.direction {
        Direction::Out => KvDirection::Out,
        Direction::In => KvDirection::In,
    };
    for copier in copiers {
        // SAFETY: the scheduler starts no transfer of blocks that an iteration in flight writes, and reuses
        // the blocks only after the transfer is reported as finished; the indices were checked in `submit`,
        // and the calling thread owns the only copier of the pools.
        unsafe { copier.copy(direction, &transfer.blocks) };
    }
    TransferDone { id: transfer.id, succeeded: true, took: begun.elapsed() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_copy_of_a_dead_thread_fails() {
        let options = CommandThreadOptions {
            name: "dead".to_owned(),
            commands_max: 1,
            results_max: 1,
            queued: Gauge::noop(),
        };
        let mut copies = CopyThread {
            thread: Some(CommandThread::start(options, |_, _| {}).unwrap()),
            device_blocks: 4,
            host_blocks: 4,
            in_flight: 1,
            arrived: Vec::new(),
        };
        assert!(matches!(copies.wait(), Err(Error::Device(_))));
        copies.in_flight = 0;
        assert!(copies.wait().is_ok(), "with nothing in flight there is nothing to wait for");
    }
}
