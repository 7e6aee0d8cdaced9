//! Sequences of a scheduler by index, with indices that are reused.

use std::ops::{Index, IndexMut};

use crate::SequenceId;
use crate::sequence::{Sequence, SequenceState};

/// Sequences that have not been removed. The scheduler's lists name them by index, which a sequence leaves before it is removed.
#[derive(Debug, Default)]
pub(super) struct Sequences {
    held: Vec<Option<Sequence>>,
    /// Number of sequences that had each index before.
    generations: Vec<u32>,
    free: Vec<u32>,
}

impl Sequences {
    /// Adds the sequence that `make` returns for its id. Returns its index.
    pub fn insert(&mut self, make: impl FnOnce(SequenceId) -> Sequence) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.held.push(None);
            self.generations.push(0);
            self.held.len() as u32 - 1
        });
        let id = SequenceId { index, generation: self.generations[index as usize] };
        self.held[index as usize] = Some(make(id));
        index
    }

    /// Returns a sequence that has not ended.
    pub fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.find(id.index)
            .filter(|held| held.id == id && !matches!(held.state, SequenceState::Leaving { .. }))
    }

    /// Returns the sequence with an index, also one that has ended and has not been removed.
    pub fn find(&self, index: u32) -> Option<&Sequence> {
        self.held.get(index as usize)?.as_ref()
    }

    /// Returns the sequence with an index, also one that has ended and has not been removed.
    pub fn find_mut(&mut self, index: u32) -> Option<&mut Sequence> {
        self.held.get_mut(index as usize)?.as_mut()
    }

    /// Removes a sequence; its index is free then.
    pub fn remove(&mut self, index: u32) -> Option<Sequence> {
        let removed = self.held.get_mut(index as usize)?.take()?;
        self.generations[index as usize] = self.generations[index as usize].wrapping_add(1);
        self.free.push(index);
        Some(removed)
    }

    /// Returns all sequences, by index.
    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.held.iter().flatten()
    }

    /// Returns true without sequences.
    pub fn is_empty(&self) -> bool {
        self.held.len() == self.free.len()
    }
}

impl Index<u32> for Sequences {
    type Output = Sequence;

    fn index(&self, index: u32) -> &Sequence {
        // Indices come from the scheduler's own lists, which a sequence leaves before it is removed.
        self.held[index as usize].as_ref().expect("a scheduled sequence exists")
    }
}

impl IndexMut<u32> for Sequences {
    fn index_mut(&mut self, index: u32) -> &mut Sequence {
        // Indices come from the scheduler's own lists, which a sequence leaves before it is removed.
        self.held[index as usize].as_mut().expect("a scheduled sequence exists")
    }
}
