//! Slots of the runtime, each of which at most one sequence has.

use crate::Slot;

/// Free slots, and those freed since the driver asked last.
#[derive(Debug)]
pub(super) struct Slots {
    total: u32,
    /// The last one is taken first.
    free: Vec<Slot>,
    freed: Vec<Slot>,
}

impl Slots {
    /// Creates `total` free slots, of which the lowest are taken first.
    pub fn new(total: u32) -> Self {
        Self { total, free: (0..total).rev().collect(), freed: Vec::new() }
    }

    /// Takes a free slot.
    pub fn take(&mut self) -> Option<Slot> {
        self.free.pop()
    }

    /// Frees the slot of a sequence, if it has one.
    pub fn release(&mut self, slot: Option<Slot>) {
        self.free.extend(slot);
        self.freed.extend(slot);
    }

    /// Returns the number of free slots.
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Returns true if no slot is free.
    pub fn are_taken(&self) -> bool {
        self.free.is_empty()
    }

    /// Returns the number of slots that sequences have.
    pub fn used(&self) -> u32 {
        self.total - self.free()
    }

    /// Drains the slots freed since the last call.
    pub fn drain_freed(&mut self) -> impl Iterator<Item = Slot> + '_ {
        self.freed.drain(..)
    }

    /// Checks that each slot is free or is one of `taken`, for tests.
    ///
    /// # Panics
    /// If a slot is neither, or both.
    pub fn assert_conserved(&self, taken: impl Iterator<Item = Slot>) {
        let mut slots: Vec<Slot> = self.free.iter().copied().chain(taken).collect();
        slots.sort_unstable();
        assert!(slots.iter().copied().eq(0..self.total), "slots are not conserved: {slots:?}");
    }
}
