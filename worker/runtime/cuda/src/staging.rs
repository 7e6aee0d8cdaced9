//! Ring allocator of the pinned staging buffer for uploads. Copies run later, in stream order, so a written
//! range must stay until its copy has run: a fence behind each copy holds the range, which is reused once the
//! fence has passed.

use std::collections::VecDeque;
use std::ops::Range;

use inflight_kernels::cuda::DeviceError;

/// Byte alignment of ranges.
const ALIGN: usize = 256;
/// Maximum number of ranges in use.
const RANGES_MAX: usize = 256;

/// Point in a stream's order.
pub(super) trait Fence {
    /// Returns whether all work before it has completed.
    fn is_passed(&self) -> Result<bool, DeviceError>;
    /// Blocks until all work before it has completed.
    fn wait(&self) -> Result<(), DeviceError>;
}

/// Ring allocator of byte ranges that enqueued copies read. All copies run in one order.
pub(super) struct StagingRing<F> {
    bytes: usize,
    /// Offset of the next range, if it fits there.
    next: usize,
    /// Ranges that copies may still read, in copy order, with the fence behind each copy.
    in_use: VecDeque<(Range<usize>, F)>,
    unused_fences: Vec<F>,
}

impl<F: Fence> StagingRing<F> {
    pub(super) fn new(bytes: usize) -> Self {
        Self { bytes, next: 0, in_use: VecDeque::new(), unused_fences: Vec::new() }
    }

    /// Returns the maximum bytes of a range; several fit at once.
    pub(super) fn chunk_max(&self) -> usize {
        self.bytes / 4
    }

    /// Returns a range that no copy reads, waiting for copies that do. `bytes` is at most
    /// [`StagingRing::chunk_max`].
    pub(super) fn reserve(&mut self, bytes: usize) -> Result<Range<usize>, DeviceError> {
        let at = if self.next + bytes <= self.bytes { self.next } else { 0 };
        let range = at..at + bytes;
        while let Some((_, fence)) = self.in_use.front() {
            if !fence.is_passed()? {
                break;
            }
            self.release(1);
        }
        let overlaps = |used: &Range<usize>| used.start < range.end && range.start < used.end;
        // Fences pass in order.
        let last = self.in_use.iter().rposition(|(used, _)| overlaps(used));
        let last = last.or_else(|| self.in_use.len().checked_sub(RANGES_MAX));
        if let Some(last) = last {
            self.in_use[last].1.wait()?;
            self.release(last + 1);
        }
        Ok(range)
    }

    /// Frees the oldest `count` ranges and keeps their fences for reuse.
    fn release(&mut self, count: usize) {
        self.unused_fences.extend(self.in_use.drain(..count).map(|(_, fence)| fence));
    }

    /// Returns an unused fence, if there is one.
    pub(super) fn reuse_fence(&mut self) -> Option<F> {
        self.unused_fences.pop()
    }

    /// Marks a range as read by a copy that was enqueued before `fence`.
    pub(super) fn commit(&mut self, range: Range<usize>, fence: F) {
        self.next = range.end.next_multiple_of(ALIGN);
        self.in_use.push_back((range, fence));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::*;

    /// Fake device that runs copies in order but arbitrarily late.
    #[derive(Default)]
    struct LateDevice {
        memory: Vec<u8>,
        /// Enqueued copies: the source range and its expected content.
        enqueued: VecDeque<(Range<usize>, Vec<u8>)>,
        run: usize,
        corrupted: usize,
        waits: usize,
    }

    impl LateDevice {
        fn run_one(&mut self) -> bool {
            let Some((range, expected)) = self.enqueued.pop_front() else { return false };
            self.corrupted += usize::from(self.memory[range] != expected);
            self.run += 1;
            true
        }
    }

    /// Fence behind the first `copies` copies.
    struct LateFence {
        device: Rc<RefCell<LateDevice>>,
        copies: usize,
    }

    impl Fence for LateFence {
        fn is_passed(&self) -> Result<bool, DeviceError> {
            Ok(self.device.borrow().run >= self.copies)
        }

        fn wait(&self) -> Result<(), DeviceError> {
            let mut device = self.device.borrow_mut();
            device.waits += 1;
            while device.run < self.copies {
                assert!(device.run_one(), "nothing is left that could pass the fence");
            }
            Ok(())
        }
    }

    /// Runs uploads of the given sizes, with the given number of copies run after each; returns the device
    /// and the maximum number of ranges in use.
    fn uploads(bytes: usize, steps: &[(usize, usize)]) -> (LateDevice, usize) {
        let device = Rc::new(RefCell::new(LateDevice { memory: vec![0; bytes], ..LateDevice::default() }));
        let (mut ring, mut copies, mut in_use) = (StagingRing::new(bytes), 0, 0);
        for (i, (size, runs)) in steps.iter().enumerate() {
            let size = size % (ring.chunk_max() + 1);
            let range = ring.reserve(size).unwrap();
            assert!(range.len() == size && range.end <= bytes);
            let expected: Vec<u8> = (0..size).map(|j| (i * 31 + j * 7 + 1) as u8).collect();
            let mut late = device.borrow_mut();
            late.memory[range.clone()].copy_from_slice(&expected);
            late.enqueued.push_back((range.clone(), expected));
            drop(late);
            copies += 1;
            // A reused fence is recorded again.
            let mut fence =
                ring.reuse_fence().unwrap_or_else(|| LateFence { device: Rc::clone(&device), copies: 0 });
            fence.copies = copies;
            ring.commit(range, fence);
            in_use = in_use.max(ring.in_use.len());
            (0..*runs).for_each(|_| _ = device.borrow_mut().run_one());
        }
        while device.borrow_mut().run_one() {}
        drop(ring);
        (Rc::into_inner(device).unwrap().into_inner(), in_use)
    }

    proptest! {
        #[test]
        fn every_copy_reads_what_was_written_for_it_however_late_it_runs(
            bytes in 1024usize..16_384, steps in prop::collection::vec((0usize..8192, 0usize..3), 1..200),
        ) {
            let (device, in_use) = uploads(bytes, &steps);
            prop_assert_eq!((device.run, device.corrupted), (steps.len(), 0));
            prop_assert!(in_use <= RANGES_MAX);
        }

        #[test]
        fn uploads_do_not_wait_while_two_steps_in_flight_leave_room(
            sizes in prop::collection::vec(1usize..1024, 1..100),
        ) {
            // The device lags two copies behind.
            let steps: Vec<_> = sizes.iter().enumerate().map(|(i, size)| (*size, usize::from(i > 1))).collect();
            prop_assert_eq!(uploads(16_384, &steps).0.waits, 0);
        }
    }

    #[test]
    fn the_number_of_ranges_in_use_is_bounded() {
        let (device, in_use) = uploads(1 << 20, &vec![(1, 0); 3 * RANGES_MAX]);
        assert_eq!((in_use, device.corrupted), (RANGES_MAX, 0));
    }
}
