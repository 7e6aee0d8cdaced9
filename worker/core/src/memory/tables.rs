//! Block tables of a sequence, one for each group of layers.

use inflight_contract::{GROUPS_MAX, MemoryShape};

use super::block_pool::Block;

/// Numbers of spans by group.
pub(crate) type Spans = [u32; GROUPS_MAX];

/// Blocks of a sequence in one group: of the spans from the first one on that is still seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GroupTable {
    first: u32,
    span_blocks: u32,
    blocks: Vec<Block>,
}

impl GroupTable {
    /// Returns the index of the first span.
    pub fn first_span(&self) -> u32 {
        self.first
    }

    /// Returns the blocks of the spans from the first one on, those of a span one after the other.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Returns the index behind the last span.
    pub fn end_span(&self) -> u32 {
        self.first + self.blocks.len() as u32 / self.span_blocks.max(1)
    }

    /// Returns the blocks of a span; none if it is not in the table.
    pub fn span(&self, index: u32) -> &[Block] {
        let blocks = self.span_blocks as usize;
        let at = index.checked_sub(self.first).map_or(usize::MAX, |at| at as usize * blocks);
        self.blocks.get(at..at.saturating_add(blocks)).unwrap_or_default()
    }
}

/// Block tables of a sequence, in the order of the groups; without any until the sequence holds blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tables {
    groups: Vec<GroupTable>,
    /// Index behind the last span that all groups have.
    end: u32,
    /// Blocks of the recurrent layers' state: all of them, or none.
    state: Vec<Block>,
    /// Number of blocks of a state.
    state_blocks: u32,
    /// Blocks of a snapshot from which the state is copied, or to which it is.
    snapshot: Vec<Block>,
}

impl Tables {
    /// Creates tables without blocks. They have room for those of a sequence of `tokens` tokens, at most `ahead` of which are computed
    /// together, so that nothing but a snapshot's list is allocated while it runs.
    pub(crate) fn new(shape: &MemoryShape, tokens: u32, ahead: u32) -> Self {
        let table = |group: &inflight_contract::LayerGroup| {
            let spans = group.spans(tokens, ahead, shape.block_tokens());
            GroupTable {
                first: 0,
                span_blocks: group.blocks,
                blocks: Vec::with_capacity((group.blocks * spans) as usize),
            }
        };
        let state_blocks = shape.state_blocks();
        Self {
            groups: shape.groups().iter().map(table).collect(),
            end: 0,
            state: Vec::with_capacity(state_blocks as usize),
            state_blocks,
            snapshot: Vec::new(),
        }
    }

    /// Returns the tables, in the order of the groups.
    pub fn groups(&self) -> &[GroupTable] {
        &self.groups
    }

    /// Returns the blocks of the recurrent layers' state; none without such layers.
    pub fn state(&self) -> &[Block] {
        &self.state
    }

    /// Returns the blocks of a snapshot from which the state is copied, or to which it is.
    pub fn snapshot(&self) -> &[Block] {
        &self.snapshot
    }

    /// Returns all blocks.
    pub fn blocks(&self) -> impl Iterator<Item = Block> + '_ {
        let of_groups = self.groups.iter().flat_map(|table| table.blocks.iter());
        of_groups.chain(&self.state).chain(&self.snapshot).copied()
    }

    /// Returns the number of blocks, without those of a snapshot.
    pub fn len(&self) -> u32 {
        self.groups.iter().map(|table| table.blocks.len() as u32).sum::<u32>() + self.state.len() as u32
    }

    /// Returns true without blocks.
    pub fn is_empty(&self) -> bool {
        self.state.is_empty() && self.groups.iter().all(|table| table.blocks.is_empty())
    }

    /// Returns the index of the first span, by group.
    pub(crate) fn firsts(&self) -> Spans {
        let mut firsts = [0; GROUPS_MAX];
        self.groups.iter().zip(&mut firsts).for_each(|(table, first)| *first = table.first);
        firsts
    }

    /// Returns tables without blocks that begin at the same spans.
    pub(crate) fn without_blocks(&self) -> Self {
        let empty = |table: &GroupTable| GroupTable {
            blocks: Vec::with_capacity(table.blocks.len()),
            first: table.first,
            span_blocks: table.span_blocks,
        };
        let mut tables = Self {
            groups: self.groups.iter().map(empty).collect(),
            end: 0,
            state: Vec::with_capacity(self.state.len()),
            state_blocks: self.state_blocks,
            snapshot: Vec::new(),
        };
        tables.find_end();
        tables
    }

    /// Returns the index behind the last span, by group.
    pub(crate) fn ends(&self) -> Spans {
        let mut ends = [0; GROUPS_MAX];
        self.groups.iter().zip(&mut ends).for_each(|(table, end)| *end = table.end_span());
        ends
    }

    /// Returns the index behind the last span that all groups have.
    pub(crate) fn end(&self) -> u32 {
        self.end
    }

    fn find_end(&mut self) {
        self.end = self.groups.iter().map(GroupTable::end_span).min().unwrap_or(0);
    }

    /// Returns the number of blocks to allocate until the tables end at these spans and have a state.
    pub(crate) fn lacking(&self, ends: &Spans) -> u32 {
        let lacks =
            |(table, end): (&GroupTable, &u32)| table.span_blocks * end.saturating_sub(table.end_span());
        self.groups.iter().zip(ends).map(lacks).sum::<u32>() + self.lacking_state()
    }

    /// Returns the number of blocks to allocate for the state.
    pub(crate) fn lacking_state(&self) -> u32 {
        self.state_blocks - self.state.len() as u32
    }

    /// Returns the index behind the last span that all groups can reach, up to `most`, with `blocks` more blocks.
    pub(crate) fn reachable(&self, most: u32, blocks: u32) -> u32 {
        let (mut end, mut left) = (self.end(), blocks.saturating_sub(self.lacking_state()));
        while end < most {
            // Up to the next span from which on another group needs blocks, all spans cost the same.
            let behind = self.groups.iter().map(GroupTable::end_span).filter(|other| *other > end);
            let stop = behind.min().unwrap_or(most).min(most);
            let each: u32 = self
                .groups
                .iter()
                .filter(|table| table.end_span() <= end)
                .map(|table| table.span_blocks)
                .sum();
            let spans = (stop - end).min(left / each.max(1));
            (end, left) = (end + spans, left - spans * each);
            if end < stop {
                break;
            }
        }
        end.min(most.max(self.end()))
    }

    /// Empties the tables, which then begin at these spans.
    pub(crate) fn begin(&mut self, firsts: &Spans) {
        for (table, first) in self.groups.iter_mut().zip(firsts) {
            debug_assert!(table.blocks.is_empty(), "a table with blocks was moved");
            table.first = *first;
        }
        self.find_end();
    }

    /// Appends a block to a group.
    pub(crate) fn push(&mut self, group: usize, block: Block) {
        self.groups[group].blocks.push(block);
        self.find_end();
    }

    /// Appends a block to the state.
    pub(crate) fn push_state(&mut self, block: Block) {
        debug_assert!(self.lacking_state() > 0, "the state has all its blocks");
        self.state.push(block);
    }

    /// Removes the last block of the state.
    pub(crate) fn pop_state(&mut self) -> Option<Block> {
        self.state.pop()
    }

    /// Appends a block to the snapshot that the sequence holds for a copy.
    pub(crate) fn push_snapshot(&mut self, block: Block) {
        self.snapshot.push(block);
    }

    /// Removes and returns the last block of the snapshot that the sequence holds for a copy.
    pub(crate) fn pop_snapshot(&mut self) -> Option<Block> {
        self.snapshot.pop()
    }

    /// Removes the last span of a group if it is behind `end`. Returns its blocks, the last one first.
    pub(crate) fn pop(&mut self, group: usize, end: u32) -> Option<Block> {
        let table = &mut self.groups[group];
        let held = table.first + (table.blocks.len() as u32).div_ceil(table.span_blocks.max(1));
        let popped = if held > end { table.blocks.pop() } else { None };
        self.find_end();
        popped
    }

    /// Removes the blocks of a group before the span `first`, and calls `each` with them in order.
    pub(crate) fn pass(&mut self, group: usize, first: u32, each: impl FnMut(Block)) {
        let table = &mut self.groups[group];
        let spans = first.min(table.end_span()).saturating_sub(table.first);
        table.blocks.drain(..(spans * table.span_blocks) as usize).for_each(each);
        table.first += spans;
    }
}
