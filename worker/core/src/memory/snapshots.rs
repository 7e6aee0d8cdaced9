//! Snapshots: kept states of recurrent layers, from which other sequences resume at the end of a cached span.

use super::block_pool::{Block, NONE};

/// What of a recurrent state is kept as a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotShape {
    /// Blocks of a snapshot, the first ones of a state.
    pub blocks: u32,
    /// Positions between two states that can be kept: a state is that after a multiple of this number of tokens.
    pub every: u32,
}

/// Where in its sequence a snapshot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SnapshotKind {
    /// At the end of the prefix that several prompts share.
    Junction,
    /// Shortly before the end of the prompt: the next turn of a conversation resumes there if the answer is not repeated as it was, such as without its
    /// reasoning.
    Prompt,
    /// At the end of the answer, or where the sequence was preempted.
    Output,
}

/// How many of the last snapshots of a kind were of use.
#[derive(Debug, Clone, Copy, Default)]
struct KindUse {
    stored: u32,
    hits: u32,
}

/// Number of snapshots of a kind from which on older ones count half.
const HALVED_AT: u32 = 128;
/// Number of snapshots of a kind before its use is judged.
const JUDGED_FROM: u32 = 16;
/// A kind is demoted if one of its snapshots is hit less often than one of another kind by this factor.
const DEMOTED_BY: u64 = 4;
/// One in this many snapshots of a demoted kind is evicted in normal order, so that hits of the kind are still observed.
const TRIED_ONE_IN: u32 = 8;

/// Blocks of the snapshots in a pool, by the leader of the span at whose end they are. Nothing is allocated after creation.
#[derive(Debug)]
pub(crate) struct Snapshots {
    /// Blocks of a snapshot; 0 if none are kept.
    each: usize,
    /// Blocks by place; [places, each].
    blocks: Vec<Block>,
    /// Place of each leader's snapshot, else `NONE`; empty if none are kept.
    places: Vec<u32>,
    free: Vec<u32>,
    /// Kind of each snapshot, and whether a sequence has resumed from it; indexed by place.
    kinds: Vec<(SnapshotKind, bool)>,
    uses: [KindUse; 3],
}

impl Snapshots {
    /// Allocates the tables for as many snapshots as a pool of `total` blocks can hold.
    pub fn new(shape: Option<SnapshotShape>, total: u32) -> Self {
        let each = shape.map_or(0, |shape| shape.blocks);
        let count = total.checked_div(each).unwrap_or(0);
        Self {
            each: each as usize,
            blocks: vec![NONE; (count * each) as usize],
            places: if each > 0 { vec![NONE; total as usize] } else { Vec::new() },
            free: (0..count).rev().collect(),
            kinds: vec![(SnapshotKind::Output, false); count as usize],
            uses: [KindUse::default(); 3],
        }
    }

    /// Returns the number of snapshots.
    pub fn len(&self) -> u32 {
        (self.kinds.len() - self.free.len()) as u32
    }

    /// Returns the blocks of the snapshot at the end of a leader's span; none if there is none.
    pub fn of(&self, leader: Block) -> &[Block] {
        match self.places.get(leader as usize) {
            Some(place) if *place != NONE => {
                let start = *place as usize * self.each;
                &self.blocks[start..start + self.each]
            }
            _ => &[],
        }
    }

    /// Adds the snapshot of a leader that has none. Returns false and adds nothing if these are not the blocks of one, or if all places are
    /// taken, which blocks of one pool cannot do.
    pub fn insert(&mut self, leader: Block, blocks: &[Block], kind: SnapshotKind) -> bool {
        let place = if self.each > 0 && blocks.len() == self.each { self.free.pop() } else { None };
        let Some(place) = place else { return false };
        let start = place as usize * self.each;
        self.blocks[start..start + self.each].copy_from_slice(blocks);
        self.places[leader as usize] = place;
        self.kinds[place as usize] = (kind, false);
        let used = &mut self.uses[kind as usize];
        if used.stored == HALVED_AT {
            (used.stored, used.hits) = (used.stored / 2, used.hits / 2);
        }
        used.stored += 1;
        true
    }

    /// Returns the kind of a leader's snapshot; `None` if there is none.
    pub fn kind(&self, leader: Block) -> Option<SnapshotKind> {
        let place = self.places.get(leader as usize).filter(|place| **place != NONE)?;
        Some(self.kinds[*place as usize].0)
    }

    /// Notes that a sequence resumes from the snapshot of a leader. Returns true if a later one of that sequence would make it superfluous:
    /// from where a second one resumes, prompts part.
    pub fn hit(&mut self, leader: Block) -> bool {
        let place = self.places.get(leader as usize).filter(|place| **place != NONE);
        let Some((kind, is_hit)) = place.and_then(|place| self.kinds.get_mut(*place as usize)) else {
            return false;
        };
        if std::mem::replace(is_hit, true) {
            *kind = SnapshotKind::Junction;
        } else {
            // Once for each snapshot, so that one that is hit often says nothing about others.
            self.uses[*kind as usize].hits += 1;
        }
        *kind != SnapshotKind::Junction
    }

    /// Returns true if snapshots of this kind are hit so rarely that they are to be evicted before others.
    pub fn is_demoted(&self, kind: SnapshotKind) -> bool {
        let own = self.uses[kind as usize];
        if own.stored < JUDGED_FROM || own.stored.is_multiple_of(TRIED_ONE_IN) {
            return false;
        }
        let beats = |other: &KindUse| {
            let [own_rate, other_rate] = [
                u64::from(own.hits) * u64::from(other.stored),
                u64::from(other.hits) * u64::from(own.stored),
            ];
            other.stored >= JUDGED_FROM && own_rate * DEMOTED_BY < other_rate
        };
        self.uses.iter().any(beats)
    }

    /// Gives the snapshot of a leader, if there is one, to another block that leads its span now. Calls `each` with the snapshot's blocks.
    pub fn rename(&mut self, from: Block, to: Block, each: impl FnMut(Block)) {
        self.of(from).iter().copied().for_each(each);
        if let Some(place) = self.places.get_mut(from as usize) {
            let place = std::mem::replace(place, NONE);
            self.places[to as usize] = place;
        }
    }

    /// Removes the snapshot of a leader, if there is one, and calls `each` with its blocks.
    pub fn remove(&mut self, leader: Block, each: impl FnMut(Block)) {
        self.of(leader).iter().copied().for_each(each);
        if let Some(place) = self.places.get_mut(leader as usize).filter(|place| **place != NONE) {
            self.free.push(std::mem::replace(place, NONE));
        }
    }
}
