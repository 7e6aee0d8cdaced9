//! Ragged batch: the input of one step.

use inflight_contract::LayerGroup;
use inflight_worker_core::{MemoryShape, Tables};

use super::{Block, Capabilities, Error, Sampled, Slot};

/// Row of the batch to compute logits for and to sample from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleRow {
    /// Index into [`Batch::tokens`].
    pub row: u32,
    /// Slot of the sequence.
    pub slot: Slot,
    /// Absolute position of the sampled token: that of the row, plus one. Part of the random key.
    pub position: u32,
    /// Whether the row waits for a token mask, which [`Runtime::supply_masks`](super::Runtime::supply_masks)
    /// gives after the launch.
    pub masked: bool,
    /// Set if the row's input token is a draft. The sample counts only if the slot's previous sample row in this
    /// batch sampled exactly that token and itself counted.
    pub drafted: bool,
}

/// Sample rows of a batch for drafts, beyond one for each slot.
pub const DRAFT_ROWS: u32 = 64;

/// Maximum rows of a batch to score.
pub const SCORES_MAX: u32 = 512;

/// Row of the batch whose logits give the log probability of a known token: the next one of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoreRow {
    /// Index into [`Batch::tokens`].
    pub row: u32,
    /// Token to score.
    pub token: u32,
    /// Number of top alternatives.
    pub top: u32,
}

/// Sequence of a batch for which the MTP layer drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prediction {
    /// Index of the sequence in the batch.
    pub sequence: u32,
    /// Slot of the sequence.
    pub slot: Slot,
    /// Number of tokens to predict behind the one that is sampled; 0 if the layer only sees the sequence's tokens.
    pub tokens: u32,
}

/// Row whose token is sampled by the previous step and filled in by the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Feedback {
    /// Index into [`Batch::tokens`], which holds an arbitrary valid token there.
    pub row: u32,
    /// Index into the samples of the previous batch.
    pub sample: u32,
}

/// Copy of one KV block to another, in all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// Source block.
    pub from: Block,
    /// Destination block.
    pub to: Block,
}

/// Input of one step: a ragged batch without padding, of prefill chunks and decodes in any mix.
///
/// Sequence `s` holds rows `starts[s]..starts[s + 1]`. The rows of a sequence have consecutive positions, and
/// keys and values of all positions before its first row that it sees are cached. In each group of layers, its block table
/// covers every position that its rows see, up to the last row. Buffers are reused from step to step.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    /// Token ids; [rows].
    pub tokens: Vec<u32>,
    /// Absolute position of each token in its sequence; [rows].
    pub positions: Vec<u32>,
    /// First row of each sequence, and the number of rows at the end; [sequences + 1].
    pub starts: Vec<u32>,
    /// Block tables by group of layers.
    pub tables: Vec<BatchTables>,
    /// Blocks of the recurrent layers' states; [sequences, blocks of a state].
    pub states: Vec<Block>,
    /// Number of drafts among the rows of each sequence, its last ones; [sequences].
    pub drafts: Vec<u32>,
    /// Rows to sample from, ascending; those of a slot are consecutive.
    pub samples: Vec<SampleRow>,
    /// Rows to score, ascending; at most [`SCORES_MAX`].
    pub scores: Vec<ScoreRow>,
    /// Block copies to make before the forward pass.
    pub copies: Vec<BlockCopy>,
    /// Rows whose tokens the device fills in.
    pub feedback: Vec<Feedback>,
    /// Sequences that the MTP layer sees, by ascending index; ignored by runtimes without one. It drafts well for sequences that are in
    /// all their batches here.
    pub predictions: Vec<Prediction>,
}

/// Block tables of a batch's sequences in a group of layers.
#[derive(Debug, Clone)]
pub struct BatchTables {
    /// Concatenated tables: the blocks of each sequence's spans, from the first one that it holds.
    pub blocks: Vec<Block>,
    /// First entry of each sequence's table in `blocks`, and the length at the end; [sequences + 1].
    pub starts: Vec<u32>,
    /// Index of the first span in each sequence's table; [sequences].
    pub first_spans: Vec<u32>,
}

impl BatchTables {
    fn new() -> Self {
        Self { blocks: Vec::new(), starts: vec![0], first_spans: Vec::new() }
    }

    fn clear(&mut self) {
        self.blocks.clear();
        self.starts.clear();
        self.starts.push(0);
        self.first_spans.clear();
    }

    fn push(&mut self, first_span: u32, blocks: &[Block]) {
        self.blocks.extend_from_slice(blocks);
        self.starts.push(self.blocks.len() as u32);
        self.first_spans.push(first_span);
    }

    /// Returns the blocks of a sequence.
    pub fn of(&self, sequence: usize) -> &[Block] {
        &self.blocks[self.starts[sequence] as usize..self.starts[sequence + 1] as usize]
    }

    fn is_sound(&self, sequences: usize) -> bool {
        self.starts.len() == sequences + 1
            && self.first_spans.len() == sequences
            && self.starts.first() == Some(&0)
            && self.starts.last() == Some(&(self.blocks.len() as u32))
            && self.starts.is_sorted()
    }

    /// Returns true if the table of a sequence has the blocks that its tokens from `position` on see, up to `context` tokens.
    fn covers(
        &self,
        sequence: usize,
        group: usize,
        position: u32,
        context: u32,
        shape: &MemoryShape,
    ) -> bool {
        let group = shape.groups()[group];
        let blocks = self.starts[sequence + 1] - self.starts[sequence];
        let first = self.first_spans[sequence];
        let end = first.saturating_add(blocks / group.blocks);
        blocks.is_multiple_of(group.blocks)
            && first <= group.first_span(position, shape.block_tokens())
            && end >= shape.spans(context)
    }
}

impl Batch {
    /// Empties the batch and keeps its buffers.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.starts.clear();
        self.starts.push(0);
        self.tables.iter_mut().for_each(BatchTables::clear);
        self.states.clear();
        self.drafts.clear();
        self.samples.clear();
        self.scores.clear();
        self.copies.clear();
        self.feedback.clear();
        self.predictions.clear();
    }

    /// Appends a sequence of a model with one group of layers: tokens from `position` on, and its block table.
    pub fn push_sequence(&mut self, tokens: &[u32], position: u32, blocks: &[Block]) {
        self.push_drafted(tokens, &[], position, blocks);
    }

    /// Appends a sequence of a model with any groups of layers, of which it holds all spans: tokens from `position` on, and its
    /// blocks, those of a group behind those of the group before, and those of its state behind them.
    pub fn push_whole(&mut self, tokens: &[u32], position: u32, shape: &MemoryShape, blocks: &[Block]) {
        self.push_spans(tokens, position, shape, blocks, |_| 0);
    }

    /// Appends a sequence as [`Batch::push_whole`], with only those of its blocks in the tables that the tokens see.
    pub fn push_seen(&mut self, tokens: &[u32], position: u32, shape: &MemoryShape, blocks: &[Block]) {
        self.push_spans(tokens, position, shape, blocks, |group| {
            group.first_span(position, shape.block_tokens())
        });
    }

    fn push_spans(
        &mut self,
        tokens: &[u32],
        position: u32,
        shape: &MemoryShape,
        blocks: &[Block],
        first_span: impl Fn(&LayerGroup) -> u32,
    ) {
        self.push_rows(tokens, &[], position);
        let of_groups = blocks.len() - shape.state_blocks() as usize;
        let spans = of_groups as u32 / shape.span_blocks();
        let (mut rest, state) = blocks.split_at(of_groups);
        self.states.extend_from_slice(state);
        for (index, group) in shape.groups().iter().enumerate() {
            let (own, first);
            (own, rest) = rest.split_at((spans * group.blocks) as usize);
            first = first_span(group);
            self.table(index).push(first, &own[(first * group.blocks) as usize..]);
        }
    }

    /// Appends a sequence as [`Batch::push_sequence`], with drafted tokens behind its own.
    pub fn push_drafted(&mut self, tokens: &[u32], drafts: &[u32], position: u32, blocks: &[Block]) {
        self.push_rows(tokens, drafts, position);
        self.table(0).push(0, blocks);
    }

    /// Appends a sequence: tokens from `position` on, drafted ones behind them, and its block tables.
    pub fn push(&mut self, tokens: &[u32], drafts: &[u32], position: u32, tables: &Tables) {
        let state = tables.state();
        let tables = tables.groups().iter().map(|table| (table.first_span(), table.blocks()));
        self.push_tables(tokens, drafts, position, tables, state);
    }

    /// Appends a sequence as [`Batch::push`]. A table consists of its first span and the blocks from there on; `state` are the blocks of
    /// the recurrent layers' state.
    pub fn push_tables<'t>(
        &mut self,
        tokens: &[u32],
        drafts: &[u32],
        position: u32,
        tables: impl IntoIterator<Item = (u32, &'t [Block])>,
        state: &[Block],
    ) {
        self.push_rows(tokens, drafts, position);
        self.states.extend_from_slice(state);
        for (group, (first_span, blocks)) in tables.into_iter().enumerate() {
            self.table(group).push(first_span, blocks);
        }
    }

    fn push_rows(&mut self, tokens: &[u32], drafts: &[u32], position: u32) {
        self.tokens.extend_from_slice(tokens);
        self.tokens.extend_from_slice(drafts);
        self.positions.extend((position..).take(tokens.len() + drafts.len()));
        self.starts.push(self.tokens.len() as u32);
        self.drafts.push(drafts.len() as u32);
    }

    /// Returns the blocks of the state of a sequence, of `count` blocks.
    pub fn state(&self, sequence: usize, count: usize) -> &[Block] {
        &self.states[sequence * count..(sequence + 1) * count]
    }

    /// Returns the tables of a group, empty ones if it has none yet.
    fn table(&mut self, group: usize) -> &mut BatchTables {
        if self.tables.len() <= group {
            self.tables.resize_with(group + 1, BatchTables::new);
        }
        &mut self.tables[group]
    }

    /// Requests a sample from the last row of the sequence pushed last.
    pub fn sample_last_row(&mut self, slot: Slot) {
        self.sample_with_drafts(slot, 0);
    }

    /// Makes the last `rows` sample rows wait for a token mask each.
    pub fn mask_last_samples(&mut self, rows: usize) {
        let first = self.samples.len().saturating_sub(rows);
        self.samples[first..].iter_mut().for_each(|sample| sample.masked = true);
    }

    /// Number of sample rows that wait for a token mask.
    pub fn masked_rows(&self) -> usize {
        self.samples.iter().filter(|sample| sample.masked).count()
    }

    /// Requests samples of the sequence pushed last, whose last `drafts` tokens are drafts: from the row before
    /// them and from each of them.
    pub fn sample_with_drafts(&mut self, slot: Slot, drafts: u32) {
        let end = self.tokens.len();
        let first = end - 1 - drafts as usize;
        let sample = |row: usize| {
            let position = self.positions[row] + 1;
            SampleRow { row: row as u32, slot, position, masked: false, drafted: row > first }
        };
        self.samples.extend((first..end).map(sample));
    }

    /// Returns true if the sample of row `next` counts, given that its slot's previous sample row counts and
    /// sampled `token`.
    pub fn counts(&self, next: &SampleRow, token: u32) -> bool {
        !next.drafted || self.tokens.get(next.row as usize) == Some(&token)
    }

    /// Lets the MTP layer see the sequence pushed last, and predict this number of tokens behind the one that is sampled.
    pub fn predict_last(&mut self, slot: Slot, tokens: u32) {
        let sequence = self.sequences() as u32 - 1;
        self.predictions.push(Prediction { sequence, slot, tokens });
    }

    /// Returns the last row of a sequence whose sample counts, with the token sampled there; `None` of a sequence without samples. `sampled`
    /// are the samples of the batch.
    pub fn last_counted(&self, sequence: usize, sampled: &[Sampled]) -> Option<(u32, u32)> {
        let rows = self.starts[sequence]..self.starts[sequence + 1];
        let first = self.samples.partition_point(|sample| sample.row < rows.start);
        let own =
            self.samples.iter().zip(sampled).skip(first).take_while(|(sample, _)| rows.contains(&sample.row));
        let mut last: Option<(u32, u32)> = None;
        for (sample, Sampled { token, .. }) in own {
            match last {
                Some((_, before)) if !self.counts(sample, before) => break,
                _ => last = Some((sample.row, *token)),
            }
        }
        last
    }

    /// Lets the device fill in the token of the last row, the only one of the sequence pushed last, from
    /// entry `sample` of the previous batch's samples.
    pub fn feed_last_row(&mut self, sample: u32) {
        let row = self.tokens.len() as u32 - 1;
        self.feedback.push(Feedback { row, sample });
    }

    /// Fills in the feedback tokens from the samples of the previous step.
    ///
    /// # Errors
    /// [`Error::Malformed`] if the previous step has no such sample.
    pub fn feed(&mut self, before: &[Sampled]) -> Result<(), Error> {
        for Feedback { row, sample } in self.feedback.drain(..) {
            let (Some(token), Some(sampled)) =
                (self.tokens.get_mut(row as usize), before.get(sample as usize))
            else {
                return Err(Error::Malformed(format!(
                    "row {row} waits for sample {sample}, which is not there"
                )));
            };
            *token = sampled.token;
        }
        Ok(())
    }

    /// Number of sequences.
    pub fn sequences(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// Number of tokens.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Checks every index against a runtime's bounds; kernels rely on it.
    ///
    /// # Errors
    /// [`Error::Malformed`] for the first violation.
    pub fn check(&self, bounds: &Capabilities) -> Result<(), Error> {
        let rows = self.tokens.len();
        let sequences = self.sequences();
        let ensure = |ok: bool, what: &str| {
            if ok { Ok(()) } else { Err(Error::Malformed(what.to_owned())) }
        };
        ensure(rows > 0, "it has no rows")?;
        ensure(rows <= bounds.batch_tokens as usize, "it has more rows than batch_tokens")?;
        ensure(self.positions.len() == rows, "positions and tokens differ in number")?;
        ensure(self.starts.first() == Some(&0), "starts do not begin at 0")?;
        ensure(self.starts.last() == Some(&(rows as u32)), "starts do not end at the number of rows")?;
        let groups = bounds.shape.groups().len();
        ensure(self.tables.len() == groups, "there are not as many block tables as groups of layers")?;
        for tables in &self.tables {
            ensure(tables.is_sound(sequences), "the starts of the block tables contradict each other")?;
            let within = tables.blocks.iter().all(|block| *block < bounds.blocks);
            ensure(within, "a block is out of the pool")?;
        }
        let states = sequences * bounds.shape.state_blocks() as usize;
        ensure(self.states.len() == states, "there are not as many states as sequences")?;
        ensure(
            self.states.iter().all(|block| *block < bounds.blocks),
            "a block of a state is out of the pool",
        )?;
        ensure(self.drafts.len() == sequences, "there are not as many numbers of drafts as sequences")?;
        ensure(
            self.tokens.iter().all(|token| *token < bounds.vocab_size),
            "a token is out of the vocabulary",
        )?;
        for s in 0..sequences {
            let (first, end) = (self.starts[s] as usize, self.starts[s + 1] as usize);
            ensure(first < end && end <= rows, "a sequence has no rows")?;
            ensure((self.drafts[s] as usize) < end - first, "all rows of a sequence are drafts")?;
            ensure(
                self.drafts[s] <= bounds.sequence_drafts,
                "a sequence has more drafts than sequence_drafts",
            )?;
            let positions = &self.positions[first..end];
            ensure(
                positions.windows(2).all(|pair| pair[1] == pair[0] + 1),
                "a sequence's positions are not consecutive",
            )?;
            let context = positions[positions.len() - 1] as usize + 1;
            ensure(context <= bounds.context_tokens as usize, "a position is beyond the context")?;
            let covers = |group: usize| {
                self.tables[group].covers(s, group, positions[0], context as u32, &bounds.shape)
            };
            ensure((0..groups).all(covers), "a block table is too short")?;
        }
        ensure(
            self.samples.len() <= bounds.sample_rows as usize,
            "it has more sample rows than sample_rows",
        )?;
        ensure(
            self.samples.iter().all(|s| (s.row as usize) < rows && s.slot < bounds.slots),
            "a sample row or slot is out of range",
        )?;
        let follows = |pair: &[SampleRow]| {
            !pair[1].drafted || pair[0].slot == pair[1].slot && pair[0].row + 1 == pair[1].row
        };
        ensure(
            self.samples.first().is_none_or(|first| !first.drafted) && self.samples.windows(2).all(follows),
            "a drafted row does not follow a sample row of its slot",
        )?;
        ensure(
            self.samples
                .iter()
                .filter(|sample| sample.drafted)
                .all(|draft| self.feedback.iter().all(|fed| fed.row != draft.row)),
            "a draft is to be filled in by the device",
        )?;
        let (most, in_order) =
            (bounds.predicted_drafts, |pair: &[Prediction]| pair[0].sequence < pair[1].sequence);
        ensure(
            self.predictions.iter().all(|p| {
                (p.sequence as usize) < sequences && p.slot < bounds.slots && (most == 0 || p.tokens <= most)
            }) && self.predictions.windows(2).all(in_order),
            "a sequence to predict, its slot or its number of tokens is out of range",
        )?;
        let predicted: u64 = self.predictions.iter().map(|prediction| u64::from(prediction.tokens)).sum();
        ensure(predicted <= u64::from(DRAFT_ROWS), "it has more tokens to predict than DRAFT_ROWS")?;
        ensure(self.scores.len() <= SCORES_MAX as usize, "it has more rows to score than SCORES_MAX")?;
        ensure(
            self.scores.iter().all(|s| (s.row as usize) < rows && s.token < bounds.vocab_size),
            "a scored row or token is out of range",
        )?;
        ensure(
            self.copies.iter().all(|c| c.from < bounds.blocks && c.to < bounds.blocks && c.from != c.to),
            "a block copy is out of the pool",
        )
    }
}
