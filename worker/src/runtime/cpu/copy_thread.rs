//! Copy thread: asynchronous transfers between the KV block pool and the host pool.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use inflight_kernels::cpu::{KvCopier, KvDirection};
use inflight_worker_core::{Direction, Transfer};

use super::super::{Error, TransferDone};

/// Maximum queued transfers. Each belongs to a sequence that was running, so there are never many.
const QUEUED_MAX: usize = 1024;

/// Handle of a thread that copies blocks between the KV block pool and the host pool while others compute.
pub(super) struct CopyThread {
    /// Queue of transfers; `None` without a host pool and after shutdown.
    jobs: Option<SyncSender<Transfer>>,
    done: Receiver<TransferDone>,
    thread: Option<JoinHandle<()>>,
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
        let (jobs, inbox) = sync_channel::<Transfer>(QUEUED_MAX);
        let (outbox, done) = sync_channel(QUEUED_MAX);
        let work = move || {
            for transfer in inbox {
                let begun = Instant::now();
                let direction = match transfer.direction {
                    Direction::Out => KvDirection::Out,
                    Direction::In => KvDirection::In,
                };
                for copier in &mut copiers {
                    // SAFETY: the scheduler starts no transfer of blocks that an iteration in flight writes,
                    // and reuses the blocks only after the transfer is reported as finished; the indices were
                    // checked in `submit`, and this thread owns the only copier of the pools.
                    unsafe { copier.copy(direction, &transfer.blocks) };
                }
                let finished = TransferDone { id: transfer.id, succeeded: true, took: begun.elapsed() };
                if outbox.send(finished).is_err() {
                    return; // the runtime was dropped
                }
            }
        };
        let thread = match host_blocks {
            0 => None,
            _ => Some(std::thread::Builder::new().name("kv-copies".to_owned()).spawn(work)?),
        };
        Ok(Self {
            jobs: thread.is_some().then_some(jobs),
            done,
            thread,
            device_blocks,
            host_blocks,
            in_flight: 0,
            arrived: Vec::new(),
        })
    }

    /// Queues a transfer.
    pub(super) fn submit(&mut self, transfer: &Transfer) -> Result<(), Error> {
        let malformed = |what: &str| Err(Error::Malformed(what.to_owned()));
        let Some(jobs) = &self.jobs else { return malformed("there is no host pool to transfer to") };
        let within = |(device, host): &(u32, u32)| *device < self.device_blocks && *host < self.host_blocks;
        if !transfer.blocks.iter().all(within) {
            return malformed("a transferred block is out of its pool");
        }
        if jobs.send(transfer.clone()).is_err() {
            return Err(thread_ended());
        }
        self.in_flight += 1;
        Ok(())
    }

    pub(super) fn finished(&mut self, finished: &mut Vec<TransferDone>) {
        self.arrived.extend(self.done.try_iter());
        self.in_flight -= self.arrived.len();
        finished.append(&mut self.arrived);
    }

    /// Blocks until a transfer finishes, if one is in flight; [`Error::Device`] if the thread has panicked.
    pub(super) fn wait(&mut self) -> Result<(), Error> {
        if self.in_flight > 0 && self.arrived.is_empty() {
            self.arrived.push(self.done.recv().map_err(|_| thread_ended())?);
        }
        Ok(())
    }
}

fn thread_ended() -> Error {
    Error::Device("the thread that copies blocks to and from the host is gone".to_owned())
}

impl Drop for CopyThread {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // Drain the results, as the thread may block on sending one.
            while self.in_flight > self.arrived.len() {
                match self.done.recv() {
                    Ok(done) => self.arrived.push(done),
                    Err(_) => break,
                }
            }
            // A panic was logged by the panic hook.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_copy_of_a_dead_thread_fails() {
        let (_, done) = sync_channel(1);
        let mut copies = CopyThread {
            jobs: None,
            done,
            thread: None,
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
