//! The swap engine: whole KV blocks between the GPU's pool and pinned memory of the host, by the copy engines, one stream
//! a direction, so that both directions run at once and computation goes on beside them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaContext;
use inflight_kernels::cuda::DeviceError;
use inflight_worker_core::{Direction, Transfer, TransferId};

use super::driver::{Event, PinnedMemory, Stream, failed};
use super::slots::device;
use super::swaps::CopyEngine;
use crate::runtime::{Error, TransferDone};

/// Transfers that may be under way in one direction. Each belongs to a sequence that was running.
const UNDER_WAY_MAX: usize = 1024;

/// Neighbouring blocks that one copy takes: (device, host, count).
pub(super) fn runs(blocks: &[(u32, u32)]) -> impl Iterator<Item = (u32, u32, u32)> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        let (device, host) = *blocks.get(at)?;
        let next = |i: &u32| blocks.get(at + *i as usize) == Some(&(device + i, host + i));
        let count = (1..).take_while(next).count() as u32 + 1;
        at += count as usize;
        Some((device, host, count))
    })
}

struct UnderWay {
    id: TransferId,
    begin: Event,
    done: Event,
}

/// One direction: its copies end in the order in which they began.
struct Way {
    stream: Stream,
    under_way: VecDeque<UnderWay>,
}

/// The copy engine of a worker.
pub(super) struct Swap {
    context: Arc<CudaContext>,
    out: Way,
    back: Way,
    host: PinnedMemory,
    pool: u64,
    block_bytes: usize,
    blocks: u32,
    host_blocks: u32,
    spare: Vec<(Event, Event)>,
}

impl Swap {
    /// A host pool of so many blocks behind the pool at `pool`. The GPU's pool outlives it.
    pub(super) fn new(
        context: &Arc<CudaContext>,
        pool: u64,
        block_bytes: usize,
        blocks: u32,
        host_blocks: u32,
    ) -> Result<Self, DeviceError> {
        let way = || -> Result<Way, DeviceError> {
            Ok(Way { stream: Stream::new(context)?, under_way: VecDeque::new() })
        };
        Ok(Self {
            context: Arc::clone(context),
            out: way()?,
            back: way()?,
            host: PinnedMemory::new(context, host_blocks as usize * block_bytes)?,
            pool,
            block_bytes,
            blocks,
            host_blocks,
            spare: Vec::new(),
        })
    }
}

impl CopyEngine for Swap {
    /// Until it is reported, nobody else touches its blocks.
    fn start(&mut self, transfer: &Transfer) -> Result<(), Error> {
        let malformed = |what: &str| Err(Error::Malformed(what.to_owned()));
        if self.host_blocks == 0 {
            return malformed("there is no host pool to transfer to");
        }
        let within = |(device, host): &(u32, u32)| *device < self.blocks && *host < self.host_blocks;
        if !transfer.blocks.iter().all(within) {
            return malformed("a transferred block is out of its pool");
        }
        if self.out.under_way.len() + self.back.under_way.len() >= 2 * UNDER_WAY_MAX {
            return malformed("more transfers are under way than there may be");
        }
        self.context.bind_to_thread().map_err(failed("copying blocks")).map_err(device)?;
        let (begin, done) = match self.spare.pop() {
            Some(events) => events,
            None => {
                let event = || Event::new(&self.context).map_err(device);
                (event()?, event()?)
            }
        };
        let way = match transfer.direction {
            Direction::Out => &mut self.out,
            Direction::In => &mut self.back,
        };
        begin.record(&way.stream).map_err(device)?;
        for (block, host, count) in runs(&transfer.blocks) {
            let bytes = count as usize * self.block_bytes;
            let on_device = self.pool + u64::from(block) * self.block_bytes as u64;
            let offset = host as usize * self.block_bytes;
            debug_assert!(offset + bytes <= self.host.bytes());
            // SAFETY: the blocks are within the pools, and the scheduler gives those of a transfer to nobody else.
            unsafe {
                let on_host = self.host.as_ptr().add(offset);
                match transfer.direction {
                    Direction::Out => way.stream.copy_out(on_host, on_device, bytes),
                    Direction::In => way.stream.copy_in(on_device, on_host, bytes),
                }
            }
            .map_err(device)?;
        }
        done.record(&way.stream).map_err(device)?;
        way.under_way.push_back(UnderWay { id: transfer.id, begin, done });
        Ok(())
    }

    fn finished(&mut self, finished: &mut Vec<TransferDone>) {
        for way in [&mut self.out, &mut self.back] {
            while let Some(oldest) = way.under_way.front() {
                let succeeded = match oldest.done.is_done() {
                    Ok(false) => break,
                    Ok(true) => true,
                    Err(_) => false,
                };
                if let Some(UnderWay { id, begin, done }) = way.under_way.pop_front() {
                    let milliseconds = if succeeded { done.since(&begin) } else { 0.0 };
                    let took = Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3);
                    finished.push(TransferDone { id, succeeded, took });
                    self.spare.push((begin, done));
                }
            }
        }
    }

    fn wait(&mut self) -> Result<(), Error> {
        match (self.out.under_way.front(), self.back.under_way.front()) {
            (None, None) => Ok(()),
            (Some(oldest), None) | (None, Some(oldest)) => oldest.done.wait().map_err(device),
            (Some(out), Some(back)) => {
                while !out.done.is_done().map_err(device)? && !back.done.is_done().map_err(device)? {
                    std::thread::yield_now();
                }
                Ok(())
            }
        }
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // The host pool is freed only when no copy writes to it any more.
        let _ = self.context.bind_to_thread();
        let _ = self.out.stream.wait();
        let _ = self.back.stream.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::runs;

    #[test]
    fn neighbouring_blocks_go_in_one_copy() {
        let of = |blocks: &[(u32, u32)]| runs(blocks).collect::<Vec<_>>();
        assert_eq!(of(&[]), []);
        assert_eq!(of(&[(3, 9), (4, 10), (5, 12), (6, 13), (6, 14)]), [(3, 9, 2), (5, 12, 2), (6, 14, 1)]);
    }
}
