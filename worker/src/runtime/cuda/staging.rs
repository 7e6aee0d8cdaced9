//! Pinned memory that uploads go through. Copies run later, in the order of the stream, so what was written for one must
//! stay until it has run: each piece is held by a fence behind its copy, and given out again once that is passed.

use std::collections::VecDeque;
use std::ops::Range;

use inflight_kernels::cuda::DeviceError;

/// Pieces begin at multiples of it.
const ALIGN: usize = 256;
/// Pieces held at once, at most.
const HELD_MAX: usize = 256;

/// A point in the order of a stream.
pub(super) trait Fence {
    /// Whether all before it is done.
    fn is_passed(&self) -> Result<bool, DeviceError>;
    /// Returns when all before it is done.
    fn wait(&self) -> Result<(), DeviceError>;
}

/// Which parts of a ring of bytes may be written to. All copies from it run in one order.
pub(super) struct Ring<F> {
    bytes: usize,
    /// Where the next piece begins, if it fits there.
    next: usize,
    /// What copies may still read, in their order.
    held: VecDeque<(Range<usize>, F)>,
    spare: Vec<F>,
}

impl<F: Fence> Ring<F> {
    pub(super) fn new(bytes: usize) -> Self {
        Self { bytes, next: 0, held: VecDeque::new(), spare: Vec::new() }
    }

    /// Most bytes of a piece: several find room beside each other.
    pub(super) fn piece_max(&self) -> usize {
        self.bytes / 4
    }

    /// Room that no copy reads from; waits for those that do. `bytes` are at most [`Ring::piece_max`].
    pub(super) fn take(&mut self, bytes: usize) -> Result<Range<usize>, DeviceError> {
        let at = if self.next + bytes <= self.bytes { self.next } else { 0 };
        let room = at..at + bytes;
        while let Some((_, fence)) = self.held.front() {
            if !fence.is_passed()? {
                break;
            }
            self.release(1);
        }
        let overlaps = |held: &Range<usize>| held.start < room.end && room.start < held.end;
        // Fences are passed in their order.
        let last = self.held.iter().rposition(|(held, _)| overlaps(held));
        let last = last.or_else(|| self.held.len().checked_sub(HELD_MAX));
        if let Some(last) = last {
            self.held[last].1.wait()?;
            self.release(last + 1);
        }
        Ok(room)
    }

    /// Fences of the oldest may be used again.
    fn release(&mut self, count: usize) {
        self.spare.extend(self.held.drain(..count).map(|(_, fence)| fence));
    }

    /// A fence that nothing is behind, if there is one.
    pub(super) fn spare(&mut self) -> Option<F> {
        self.spare.pop()
    }

    /// A copy of what was taken last was enqueued, and this fence behind it.
    pub(super) fn hold(&mut self, piece: Range<usize>, fence: F) {
        self.next = piece.end.next_multiple_of(ALIGN);
        self.held.push_back((piece, fence));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::*;

    /// A device whose copies run when it pleases, in their order.
    #[derive(Default)]
    struct Lazy {
        memory: Vec<u8>,
        /// Which part is copied, and what was meant to be.
        enqueued: VecDeque<(Range<usize>, Vec<u8>)>,
        run: usize,
        spoilt: usize,
        waits: usize,
    }

    impl Lazy {
        fn run_one(&mut self) -> bool {
            let Some((part, meant)) = self.enqueued.pop_front() else { return false };
            self.spoilt += usize::from(self.memory[part] != meant);
            self.run += 1;
            true
        }
    }

    struct Behind {
        device: Rc<RefCell<Lazy>>,
        copies: usize,
    }

    impl Fence for Behind {
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

    /// Uploads of these sizes, the device running so many copies after each; what it comes to, and most pieces held.
    fn uploads(bytes: usize, steps: &[(usize, usize)]) -> (Lazy, usize) {
        let device = Rc::new(RefCell::new(Lazy { memory: vec![0; bytes], ..Lazy::default() }));
        let (mut ring, mut copies, mut held) = (Ring::new(bytes), 0, 0);
        for (i, (size, runs)) in steps.iter().enumerate() {
            let size = size % (ring.piece_max() + 1);
            let piece = ring.take(size).unwrap();
            assert!(piece.len() == size && piece.end <= bytes);
            let meant: Vec<u8> = (0..size).map(|j| (i * 31 + j * 7 + 1) as u8).collect();
            let mut lazy = device.borrow_mut();
            lazy.memory[piece.clone()].copy_from_slice(&meant);
            lazy.enqueued.push_back((piece.clone(), meant));
            drop(lazy);
            copies += 1;
            // One that is used again is recorded anew.
            let mut fence = ring.spare().unwrap_or_else(|| Behind { device: Rc::clone(&device), copies: 0 });
            fence.copies = copies;
            ring.hold(piece, fence);
            held = held.max(ring.held.len());
            (0..*runs).for_each(|_| _ = device.borrow_mut().run_one());
        }
        while device.borrow_mut().run_one() {}
        drop(ring);
        (Rc::into_inner(device).unwrap().into_inner(), held)
    }

    proptest! {
        #[test]
        fn every_copy_finds_what_was_written_for_it_however_late_it_runs(
            bytes in 1024usize..16_384, steps in prop::collection::vec((0usize..8192, 0usize..3), 1..200),
        ) {
            let (device, held) = uploads(bytes, &steps);
            prop_assert_eq!((device.run, device.spoilt), (steps.len(), 0));
            prop_assert!(held <= HELD_MAX);
        }

        #[test]
        fn nobody_waits_where_there_is_room_beside_what_two_steps_in_flight_use(
            sizes in prop::collection::vec(1usize..1024, 1..100),
        ) {
            // The device is two copies behind.
            let steps: Vec<_> = sizes.iter().enumerate().map(|(i, size)| (*size, usize::from(i > 1))).collect();
            prop_assert_eq!(uploads(16_384, &steps).0.waits, 0);
        }
    }

    #[test]
    fn so_many_pieces_are_held_and_no_more() {
        let (device, held) = uploads(1 << 20, &vec![(1, 0); 3 * HELD_MAX]);
        assert_eq!((held, device.spoilt), (HELD_MAX, 0));
    }
}
