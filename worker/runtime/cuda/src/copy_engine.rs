//! Swap of KV blocks between one GPU's pool and a pinned host pool, on the GPU's copy engines: one stream per
//! direction, so that both directions and computation overlap.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaContext;
use inflight_kernels::cuda::DeviceError;
use inflight_runtime::{Error, TransferDone};
use inflight_worker_core::{Direction, Transfer, TransferId};

use super::device_memory::PinnedMemory;
use super::driver_error::failed;
use super::group_swap::CopyEngine;
use super::slots::device_error;
use super::stream::{CudaEvent, CudaStream};

/// Maximum number of transfers in flight per direction; each belongs to a sequence that was running.
const IN_FLIGHT_MAX: usize = 1024;

/// Merges block pairs that are contiguous on both sides into copies (device, host, count).
pub(super) fn contiguous_runs(blocks: &[(u32, u32)]) -> impl Iterator<Item = (u32, u32, u32)> + '_ {
    let mut at = 0;
    std::iter::from_fn(move || {
        let (device, host) = *blocks.get(at)?;
        let next = |i: &u32| blocks.get(at + *i as usize) == Some(&(device + i, host + i));
        let count = (1..).take_while(next).count() as u32 + 1;
        at += count as usize;
        Some((device, host, count))
    })
}

struct InFlightTransfer {
    id: TransferId,
    begin: CudaEvent,
    done: CudaEvent,
}

/// Stream of one direction and its transfers in flight, which complete in order.
struct CopyQueue {
    stream: CudaStream,
    in_flight: VecDeque<InFlightTransfer>,
}

/// Swap of one GPU's KV blocks.
pub(super) struct GpuCopyEngine {
    context: Arc<CudaContext>,
    swap_out: CopyQueue,
    swap_in: CopyQueue,
    host: PinnedMemory,
    /// Device address of the KV pool.
    pool: u64,
    block_bytes: usize,
    blocks: u32,
    host_blocks: u32,
    /// Unused events.
    events: Vec<(CudaEvent, CudaEvent)>,
}

impl GpuCopyEngine {
    /// Allocates a host pool of `host_blocks` blocks for the GPU's pool of `blocks` blocks at `pool`, which
    /// must outlive it.
    pub(super) fn new(
        context: &Arc<CudaContext>,
        pool: u64,
        block_bytes: usize,
        blocks: u32,
        host_blocks: u32,
    ) -> Result<Self, DeviceError> {
        let queue = || -> Result<CopyQueue, DeviceError> {
            Ok(CopyQueue { stream: CudaStream::new(context)?, in_flight: VecDeque::new() })
        };
        Ok(Self {
            context: Arc::clone(context),
            swap_out: queue()?,
            swap_in: queue()?,
            host: PinnedMemory::new(context, host_blocks as usize * block_bytes)?,
            pool,
            block_bytes,
            blocks,
            host_blocks,
            events: Vec::new(),
        })
    }
}

impl CopyEngine for GpuCopyEngine {
    /// Starts a transfer. Its blocks must not be used until it is reported as finished.
    fn start(&mut self, transfer: &Transfer) -> Result<(), Error> {
        let malformed = |what: &str| Err(Error::Malformed(what.to_owned()));
        if self.host_blocks == 0 {
            return malformed("there is no host pool to transfer to");
        }
        let within = |(device, host): &(u32, u32)| *device < self.blocks && *host < self.host_blocks;
        if !transfer.blocks.iter().all(within) {
            return malformed("a transferred block is out of its pool");
        }
        if self.swap_out.in_flight.len() + self.swap_in.in_flight.len() >= 2 * IN_FLIGHT_MAX {
            return malformed("too many transfers in flight");
        }
        self.context.bind_to_thread().map_err(failed("copying blocks")).map_err(device_error)?;
        let (begin, done) = match self.events.pop() {
            Some(events) => events,
            None => {
                let event = || CudaEvent::new(&self.context).map_err(device_error);
                (event()?, event()?)
            }
        };
        let queue = match transfer.direction {
            Direction::Out => &mut self.swap_out,
            Direction::In => &mut self.swap_in,
        };
        begin.record(&queue.stream).map_err(device_error)?;
        for (block, host, count) in contiguous_runs(&transfer.blocks) {
            let bytes = count as usize * self.block_bytes;
            let on_device = self.pool + u64::from(block) * self.block_bytes as u64;
            let offset = host as usize * self.block_bytes;
            debug_assert!(offset + bytes <= self.host.bytes());
            // SAFETY: both ranges are within their pools, which outlive the copy (see `Drop`), and the
            // scheduler leaves the blocks of a transfer unused until it is finished.
            unsafe {
                let on_host = self.host.as_ptr().add(offset);
                match transfer.direction {
                    Direction::Out => queue.stream.copy_to_host(on_host, on_device, bytes),
                    Direction::In => queue.stream.copy_to_device(on_device, on_host, bytes),
                }
            }
            .map_err(device_error)?;
        }
        done.record(&queue.stream).map_err(device_error)?;
        queue.in_flight.push_back(InFlightTransfer { id: transfer.id, begin, done });
        Ok(())
    }

    fn finished(&mut self, finished: &mut Vec<TransferDone>) {
        for queue in [&mut self.swap_out, &mut self.swap_in] {
            while let Some(oldest) = queue.in_flight.front() {
                let succeeded = match oldest.done.is_done() {
                    Ok(false) => break,
                    Ok(true) => true,
                    Err(_) => false,
                };
                if let Some(InFlightTransfer { id, begin, done }) = queue.in_flight.pop_front() {
                    let milliseconds = if succeeded { done.milliseconds_since(&begin) } else { 0.0 };
                    let took = Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3);
                    finished.push(TransferDone { id, succeeded, took });
                    self.events.push((begin, done));
                }
            }
        }
    }

    fn wait(&mut self) -> Result<(), Error> {
        match (self.swap_out.in_flight.front(), self.swap_in.in_flight.front()) {
            (None, None) => Ok(()),
            (Some(oldest), None) | (None, Some(oldest)) => oldest.done.synchronize().map_err(device_error),
            (Some(out), Some(back)) => {
                while !out.done.is_done().map_err(device_error)?
                    && !back.done.is_done().map_err(device_error)?
                {
                    std::thread::yield_now();
                }
                Ok(())
            }
        }
    }
}

impl Drop for GpuCopyEngine {
    fn drop(&mut self) {
        // The host pool is freed only after all copies have completed.
        let _ = self.context.bind_to_thread();
        let _ = self.swap_out.stream.synchronize();
        let _ = self.swap_in.stream.synchronize();
    }
}

#[cfg(test)]
mod tests {
    use super::contiguous_runs;

    #[test]
    fn contiguous_blocks_are_merged_into_one_copy() {
        let of = |blocks: &[(u32, u32)]| contiguous_runs(blocks).collect::<Vec<_>>();
        assert_eq!(of(&[]), []);
        assert_eq!(of(&[(3, 9), (4, 10), (5, 12), (6, 13), (6, 14)]), [(3, 9, 2), (5, 12, 2), (6, 14, 1)]);
    }
}
