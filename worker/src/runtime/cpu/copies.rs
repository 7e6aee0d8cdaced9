use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use inflight_kernels::cpu::{KvCopier, KvDirection};
use inflight_worker_core::{Direction, Transfer};

use super::super::{Error, TransferDone};

/// Transfers that may wait for the thread. Each belongs to a sequence that was running, so there are never many.
const QUEUED_MAX: usize = 1024;

/// The copy engine: a thread that moves blocks between the KV pool and the host's while others compute.
pub(super) struct Copies {
    /// `None` where there is no host pool, and once the thread is told to end.
    jobs: Option<SyncSender<Transfer>>,
    done: Receiver<TransferDone>,
    thread: Option<JoinHandle<()>>,
    device_blocks: u32,
    host_blocks: u32,
    under_way: usize,
    /// Received while waiting, not reported yet.
    arrived: Vec<TransferDone>,
}

impl Copies {
    /// Starts the thread, if there is a host pool. A block has a part in each copier's pools, all of one number of blocks.
    ///
    /// # Errors
    /// The operating system refused the thread.
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
                    // SAFETY: the scheduler gives the blocks of a transfer to nobody else before it is reported as
                    // finished, and starts none while an iteration in flight writes to them; this is the only
                    // copier of its pools.
                    unsafe { copier.copy(direction, &transfer.blocks) };
                }
                let finished = TransferDone { id: transfer.id, succeeded: true, took: begun.elapsed() };
                if outbox.send(finished).is_err() {
                    return; // the runtime is gone
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
            under_way: 0,
            arrived: Vec::new(),
        })
    }

    pub(super) fn submit(&mut self, transfer: &Transfer) -> Result<(), Error> {
        let malformed = |what: &str| Err(Error::Malformed(what.to_owned()));
        let Some(jobs) = &self.jobs else { return malformed("there is no host pool to transfer to") };
        let within = |(device, host): &(u32, u32)| *device < self.device_blocks && *host < self.host_blocks;
        if !transfer.blocks.iter().all(within) {
            return malformed("a transferred block is out of its pool");
        }
        if jobs.send(transfer.clone()).is_err() {
            return Err(gone());
        }
        self.under_way += 1;
        Ok(())
    }

    pub(super) fn finished(&mut self, finished: &mut Vec<TransferDone>) {
        self.arrived.extend(self.done.try_iter());
        self.under_way -= self.arrived.len();
        finished.append(&mut self.arrived);
    }

    /// # Errors
    /// [`Error::Device`] if the thread is gone: it panicked.
    pub(super) fn wait(&mut self) -> Result<(), Error> {
        if self.under_way > 0 && self.arrived.is_empty() {
            self.arrived.push(self.done.recv().map_err(|_| gone())?);
        }
        Ok(())
    }
}

fn gone() -> Error {
    Error::Device("the thread that copies blocks to and from the host is gone".to_owned())
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It may wait to report a finished transfer.
            while self.under_way > self.arrived.len() {
                match self.done.recv() {
                    Ok(done) => self.arrived.push(done),
                    Err(_) => break,
                }
            }
            // If it panicked, the panic hook has said so.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_a_copy_of_a_dead_thread_fails_instead_of_returning() {
        let (_, done) = sync_channel(1);
        let mut copies = Copies {
            jobs: None,
            done,
            thread: None,
            device_blocks: 4,
            host_blocks: 4,
            under_way: 1,
            arrived: Vec::new(),
        };
        assert!(matches!(copies.wait(), Err(Error::Device(_))));
        copies.under_way = 0;
        assert!(copies.wait().is_ok(), "with nothing under way there is nothing to wait for");
    }
}
