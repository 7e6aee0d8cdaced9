//! Step metadata: tokens, positions, KV indices, sampling rows, attention plans and block tables, packed for
//! one upload.

use inflight_kernels::cuda::{
    AttentionItem, AttentionPlan, DeltaSequence, PlanShape, PlannedSequence, SamplingRow, ScoreRow,
    SplitKernels, as_bytes,
};
use inflight_runtime::{Batch, Error};

use super::gpu::bytes_of;
use super::kv_layers::{KvLayers, KvPart, KvWindow};
use super::step_graph::StepGraph;

/// Flag of a token id that stands for a sample index of the previous step.
const FEEDBACK: u32 = 1 << 31;
/// KV index of padding rows, which write no keys and values.
const PADDING_KV_INDEX: u32 = u32::MAX;
/// Sequence of padding rows, which recurrent layers leave out.
const PADDING_SEQUENCE: u32 = u32::MAX;
/// Maximum block copies of a launch: rows of its grid.
const COPIES_MAX: u32 = 65_535;
/// Byte alignment of sections.
const ALIGN: usize = 256;

/// Capacity of each section, in entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct MetadataCapacity {
    pub(super) rows: usize,
    /// Row indices of the samples.
    pub(super) sampled_rows: usize,
    pub(super) samples: usize,
    pub(super) scores: usize,
    /// Attention items per view.
    pub(super) items: usize,
    pub(super) copies: usize,
    /// Parts of a span of the KV pool, which have KV indices of their own.
    pub(super) parts: usize,
    /// Views of the KV pool, which have attention items of their own.
    pub(super) views: usize,
    /// Sequences, of which recurrent layers read the rows; 0 without those.
    pub(super) sequences: usize,
    /// Entries of all block tables.
    pub(super) table_entries: usize,
}

/// Byte offset of each section. Those that graphs read come first, so that their offsets depend on the graph alone; the last
/// of them are the block tables, whose length varies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MetadataLayout {
    pub(super) tokens: usize,
    pub(super) positions: usize,
    kv_indices: usize,
    kv_index_bytes: usize,
    pub(super) sampled_rows: usize,
    item_counts: usize,
    items: usize,
    item_bytes: usize,
    /// Number of sequences, and what recurrent layers read of each.
    pub(super) sequence_count: usize,
    pub(super) sequences: usize,
    /// Index of the sequence of each row, if there are recurrent layers.
    pub(super) row_sequences: usize,
    pub(super) tables: usize,
    pub(super) sampling: usize,
    pub(super) scored_rows: usize,
    pub(super) scores: usize,
    pub(super) copies: usize,
    /// Bytes of all sections.
    pub(super) bytes: usize,
}

impl MetadataLayout {
    pub(super) fn new(capacity: &MetadataCapacity) -> Self {
        let mut at = 0;
        let mut section = |bytes: usize| {
            let begin = at;
            at = (at + bytes).next_multiple_of(ALIGN);
            begin
        };
        let item_bytes = (capacity.items * size_of::<AttentionItem>()).next_multiple_of(ALIGN);
        let kv_index_bytes = (capacity.rows * 4).next_multiple_of(ALIGN);
        Self {
            tokens: section(capacity.rows * 4),
            positions: section(capacity.rows * 4),
            kv_indices: section(capacity.parts * kv_index_bytes),
            kv_index_bytes,
            sampled_rows: section(capacity.sampled_rows * 4),
            item_counts: section(capacity.views * 4),
            items: section(capacity.views * item_bytes),
            item_bytes,
            sequence_count: section(capacity.sequences.min(1) * 4),
            sequences: section(capacity.sequences * size_of::<DeltaSequence>()),
            row_sequences: section(if capacity.sequences > 0 { capacity.rows * 4 } else { 0 }),
            tables: section(capacity.table_entries * 4),
            sampling: section(capacity.samples * size_of::<SamplingRow>()),
            scored_rows: section(capacity.scores * 4),
            scores: section(capacity.scores * size_of::<ScoreRow>()),
            copies: section(capacity.copies * 8),
            bytes: at,
        }
    }

    pub(super) fn kv_indices(&self, part: usize) -> usize {
        self.kv_indices + part * self.kv_index_bytes
    }

    pub(super) fn item_count(&self, view: usize) -> usize {
        self.item_counts + view * 4
    }

    pub(super) fn items(&self, view: usize) -> usize {
        self.items + view * self.item_bytes
    }
}

/// Launch shape of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StepShape {
    pub(super) layout: MetadataLayout,
    /// Rows, including padding.
    pub(super) rows: u32,
    /// Rows of logits, including padding.
    pub(super) samples: u32,
    /// Rows to score.
    pub(super) scores: u32,
    /// Ranges (first, end) of block copies that are independent of each other.
    pub(super) copies: Vec<(u32, u32)>,
    /// Whether the attention kernel for prefill items, of many rows, runs.
    pub(super) mixed: bool,
    /// Whether some slots have drafts.
    pub(super) drafted: bool,
    /// Sampling kernels that run before `sample` if rows of logits are split over several thread blocks.
    pub(super) split_kernels: SplitKernels,
    /// CUDA graph that the step replays; the batch is padded to its rows. `None`: kernels are launched one by one.
    pub(super) graph: Option<StepGraph>,
}

/// Packs batches into metadata; reuses its buffers.
#[derive(Debug, Default)]
pub(super) struct MetadataPacker {
    plans: Vec<AttentionPlan>,
    sequences: Vec<PlannedSequence>,
    /// KV index of each row, for each part.
    kv_indices: Vec<Vec<u32>>,
    /// Block tables of all parts, and where those of each part begin.
    tables: Vec<u32>,
    table_starts: Vec<u32>,
    /// Where the blocks of the states begin in `tables`.
    states_start: u32,
    /// Last step that wrote to each block, by block.
    written: Vec<u64>,
    step: u64,
    /// Last group of block copies that read and that wrote each block, by block.
    copied: Vec<[u64; 2]>,
    copy_group: u64,
}

/// Model and device properties that packing depends on.
#[derive(Debug, Clone)]
pub(super) struct PackerConfig {
    /// Tokens of the vocabulary.
    pub(super) vocabulary: u32,
    pub(super) blocks: u32,
    pub(super) kv_layers: KvLayers,
    /// Plan parameters; `window` is replaced per plan.
    pub(super) plan: PlanShape,
}

impl PackerConfig {
    /// Returns the capacities of the metadata sections that a graph reads; those of the other sections are 0.
    fn graph_capacity(&self, graph: StepGraph) -> MetadataCapacity {
        MetadataCapacity {
            rows: graph.rows() as usize,
            // Every row may be sampled from.
            sampled_rows: graph.rows() as usize,
            samples: 0,
            scores: 0,
            items: self.plan.items_max(graph.rows()) as usize,
            copies: 0,
            parts: self.kv_layers.parts().len(),
            views: self.kv_layers.views().len(),
            sequences: self.kv_layers.sequences_max(graph.rows() as usize),
            table_entries: 0,
        }
    }

    /// Returns a step whose rows are all padding, and its metadata, to capture a graph from.
    pub(super) fn padding_step(&self, graph: StepGraph) -> (StepShape, Vec<u8>) {
        let samples = graph.logits_rows().unwrap_or(0);
        let capacity = MetadataCapacity { samples: samples as usize, ..self.graph_capacity(graph) };
        let layout = MetadataLayout::new(&capacity);
        let mut packed = vec![0u8; layout.bytes];
        let mut pad = |at: usize| packed[at..][..graph.rows() as usize * 4].fill(0xff);
        (0..capacity.parts).for_each(|part| pad(layout.kv_indices(part)));
        if capacity.sequences > 0 {
            pad(layout.row_sequences);
        }
        let step = StepShape {
            layout,
            rows: graph.rows(),
            samples,
            scores: 0,
            copies: Vec::new(),
            mixed: self.mixed(graph),
            // So that the kernels are loaded; padding has no drafts and draws no token.
            drafted: true,
            split_kernels: SplitKernels::ALL,
            graph: Some(graph),
        };
        (step, packed)
    }

    /// Returns whether a graph has the attention kernel that takes prefill items.
    fn mixed(&self, graph: StepGraph) -> bool {
        match graph {
            StepGraph::Decode(_) => false,
            // In the deterministic mode every row uses the split-KV decode kernel.
            StepGraph::Layers(_) => !self.plan.deterministic,
        }
    }
}

impl MetadataPacker {
    /// Computes the KV index of each row, for each part, and checks that no two sequences write to one block.
    fn assign_kv_indices(&mut self, batch: &Batch, config: &PackerConfig) -> Result<(), Error> {
        self.step += 1;
        self.written.resize(config.blocks as usize, 0);
        self.copied.resize(config.blocks as usize, [0; 2]);
        let shape = config.kv_layers.plan().shape();
        let block_tokens = shape.block_tokens();
        self.kv_indices.resize_with(config.kv_layers.parts().len(), Vec::new);
        for (KvPart { group, part }, indices) in config.kv_layers.parts().iter().zip(&mut self.kv_indices) {
            let (stride, tables) = (shape.groups()[*group].blocks, &batch.tables[*group]);
            indices.clear();
            for s in 0..batch.sequences() {
                let (table, first) = (tables.of(s), tables.first_spans[s]);
                let positions = &batch.positions[batch.starts[s] as usize..batch.starts[s + 1] as usize];
                for (i, position) in positions.iter().enumerate() {
                    let span = (position / block_tokens - first) * stride;
                    let (block, offset) = (table[span as usize + part], position % block_tokens);
                    if i == 0 || offset == 0 {
                        let written = &mut self.written[block as usize];
                        if *written == self.step {
                            return Err(Error::Malformed(format!(
                                "block {block} is written from two places"
                            )));
                        }
                        *written = self.step;
                    }
                    indices.push(block * block_tokens + offset);
                }
            }
        }
        let mut states = batch.states.iter();
        match states
            .find(|block| std::mem::replace(&mut self.written[**block as usize], self.step) == self.step)
        {
            Some(block) => {
                Err(Error::Malformed(format!("block {block} of a state is written from two places")))
            }
            None => Ok(()),
        }
    }

    /// Concatenates the block tables of all parts. Kernels index a sequence's table by absolute span, so an attention item points at the
    /// entry of span 0. Where a sliding window has freed the first spans, that entry lies before the table: unused entries in front of
    /// all tables keep it from being negative.
    fn concatenate_tables(&mut self, batch: &Batch, kv_layers: &KvLayers) {
        let shape = kv_layers.plan().shape();
        let (mut start, mut missing) = (0, 0);
        self.table_starts.clear();
        for KvPart { group, .. } in kv_layers.parts() {
            let (stride, tables) = (shape.groups()[*group].blocks, &batch.tables[*group]);
            self.table_starts.push(start);
            for (first, own) in tables.first_spans.iter().zip(&tables.starts) {
                missing = missing.max(first.saturating_sub(start + own / stride));
            }
            start += tables.blocks.len() as u32 / stride;
        }
        self.table_starts.iter_mut().for_each(|start| *start += missing);
        self.tables.clear();
        self.tables.resize(missing as usize, 0);
        for KvPart { group, part } in kv_layers.parts() {
            let (stride, tables) = (shape.groups()[*group].blocks, &batch.tables[*group]);
            match stride {
                1 => self.tables.extend_from_slice(&tables.blocks),
                _ => self.tables.extend(tables.blocks.iter().skip(*part).step_by(stride as usize)),
            }
        }
        self.states_start = self.tables.len() as u32;
        self.tables.extend_from_slice(&batch.states);
    }

    /// Plans the attention of a batch for each distinct window. The items' table offsets are relative to the first table of a part.
    fn plan_attention(&mut self, batch: &Batch, config: &PackerConfig) {
        let windows = config.kv_layers.windows();
        self.plans.resize_with(windows.len(), AttentionPlan::default);
        for (plan, KvWindow { group, window }) in self.plans.iter_mut().zip(windows) {
            let stride = config.kv_layers.plan().shape().groups()[*group].blocks;
            let tables = &batch.tables[*group];
            self.sequences.clear();
            let mut samples = batch.samples.as_slice();
            for s in 0..batch.sequences() {
                let (row, end) = (batch.starts[s], batch.starts[s + 1]);
                let sampled = samples.iter().take_while(|sample| sample.row < end).count();
                samples = &samples[sampled..];
                self.sequences.push(PlannedSequence {
                    row,
                    tokens: end - row,
                    position: batch.positions[row as usize],
                    table: (tables.starts[s] / stride).wrapping_sub(tables.first_spans[s]),
                    decode: sampled == (end - row) as usize,
                });
            }
            plan.make(&self.sequences, &PlanShape { window: *window, ..config.plan });
        }
    }

    /// Groups block copies into ranges in which no copy reads or writes a block that another one writes, each of at most
    /// [`COPIES_MAX`] copies.
    fn copy_groups(&mut self, batch: &Batch) -> Vec<(u32, u32)> {
        let mut groups: Vec<(u32, u32)> = Vec::new();
        for (i, copy) in batch.copies.iter().enumerate() {
            let (i, [from, to]) = (i as u32, [copy.from, copy.to].map(|block| block as usize));
            let [[_, from_written], [to_read, to_written]] = [self.copied[from], self.copied[to]];
            let conflicts = [from_written, to_written, to_read].contains(&self.copy_group);
            match groups.last_mut() {
                Some(group) if !conflicts && i - group.0 < COPIES_MAX => group.1 = i + 1,
                _ => {
                    self.copy_group += 1;
                    groups.push((i, i + 1));
                }
            }
            self.copied[from][0] = self.copy_group;
            self.copied[to][1] = self.copy_group;
        }
        groups
    }

    /// Writes what recurrent layers read: the rows of each sequence, and the sequence of each row.
    fn put_sequences(
        &self,
        batch: &Batch,
        layout: &MetadataLayout,
        state_blocks: u32,
        padded_rows: usize,
        put: &mut impl FnMut(usize, &[u8]),
    ) {
        put(layout.sequence_count, &(batch.sequences() as u32).to_ne_bytes());
        for s in 0..batch.sequences() {
            let (row, end) = (batch.starts[s], batch.starts[s + 1]);
            let sequence = DeltaSequence {
                row,
                rows: end - row,
                position: batch.positions[row as usize],
                drafts: batch.drafts[s],
                table: self.states_start + s as u32 * state_blocks,
            };
            put(layout.sequences + s * size_of::<DeltaSequence>(), as_bytes(&sequence));
            for row in row..end {
                put(layout.row_sequences + row as usize * 4, &(s as u32).to_ne_bytes());
            }
        }
        for row in batch.rows()..padded_rows {
            put(layout.row_sequences + row * 4, &PADDING_SEQUENCE.to_ne_bytes());
        }
    }

    /// Packs a validated batch into `out`. `sampling` has a row per sample; `graph_for` returns the graph, if any, for this
    /// many rows, and whether they are decodes.
    ///
    /// # Errors
    /// [`Error::Malformed`] if two sequences write to one block or feedback is out of range.
    pub(super) fn pack(
        &mut self,
        batch: &Batch,
        config: &PackerConfig,
        sampling: &[SamplingRow],
        previous_samples: usize,
        graph_for: impl Fn(u32, bool) -> Option<StepGraph>,
        out: &mut Vec<u8>,
    ) -> Result<StepShape, Error> {
        self.assign_kv_indices(batch, config)?;
        let rows = batch.rows();
        self.concatenate_tables(batch, &config.kv_layers);
        self.plan_attention(batch, config);
        // Every row is sampled from.
        let mixed = self.plans.iter().any(AttentionPlan::is_mixed);
        let decodes = batch.samples.len() == rows
            && !mixed
            && batch.copies.is_empty()
            && batch.scores.is_empty()
            && batch.samples.iter().enumerate().all(|(i, sample)| sample.row as usize == i);
        let graph = graph_for(rows as u32, decodes);
        let counted = MetadataCapacity {
            rows,
            sampled_rows: batch.samples.len(),
            samples: batch.samples.len(),
            scores: batch.scores.len(),
            items: self.plans.iter().map(|plan| plan.items().len()).max().unwrap_or(0),
            copies: batch.copies.len(),
            parts: config.kv_layers.parts().len(),
            views: config.kv_layers.views().len(),
            sequences: config.kv_layers.sequences_max(batch.sequences()),
            table_entries: self.tables.len(),
        };
        // A captured graph reads from fixed offsets.
        let capacity = graph.map_or(counted, |graph| {
            let MetadataCapacity { rows, sampled_rows, items, sequences, .. } = config.graph_capacity(graph);
            let samples = graph.logits_rows().map_or(counted.samples, |rows| rows as usize);
            MetadataCapacity { rows, sampled_rows, items, samples, sequences, ..counted }
        });
        let layout = MetadataLayout::new(&capacity);
        let (padded_rows, samples) = (capacity.rows, capacity.samples);
        out.clear();
        out.resize(layout.bytes, 0);
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        for (i, token) in batch.tokens.iter().enumerate() {
            put(layout.tokens + i * 4, &token.to_ne_bytes());
        }
        for feedback in &batch.feedback {
            if feedback.row as usize >= rows || feedback.sample as usize >= previous_samples {
                let (row, sample) = (feedback.row, feedback.sample);
                let reason = format!("row {row} waits for sample {sample}, which is not there");
                return Err(Error::Malformed(reason));
            }
            put(layout.tokens + feedback.row as usize * 4, &(FEEDBACK | feedback.sample).to_ne_bytes());
        }
        for (i, position) in batch.positions.iter().enumerate() {
            put(layout.positions + i * 4, &position.to_ne_bytes());
        }
        for (part, indices) in self.kv_indices.iter().enumerate() {
            for i in 0..padded_rows {
                let index = indices.get(i).copied().unwrap_or(PADDING_KV_INDEX);
                put(layout.kv_indices(part) + i * 4, &index.to_ne_bytes());
            }
        }
        for i in 0..samples {
            let row = batch.samples.get(i).map_or(i as u32, |sample| sample.row);
            put(layout.sampled_rows + i * 4, &row.to_ne_bytes());
        }
        for (i, row) in sampling.iter().enumerate() {
            put(layout.sampling + i * size_of::<SamplingRow>(), as_bytes(row));
        }
        put_scores_and_copies(batch, &layout, &mut put);
        for (i, view) in config.kv_layers.views().iter().enumerate() {
            let (items, start) = (self.plans[view.plan].items(), self.table_starts[view.part]);
            put(layout.item_count(i), &(items.len() as u32).to_ne_bytes());
            for (j, item) in items.iter().enumerate() {
                let item = AttentionItem { table: item.table.wrapping_add(start), ..*item };
                put(layout.items(i) + j * size_of::<AttentionItem>(), as_bytes(&item));
            }
        }
        if capacity.sequences > 0 {
            self.put_sequences(batch, &layout, config.kv_layers.state_blocks() as u32, padded_rows, &mut put);
        }
        put(layout.tables, bytes_of(&self.tables));
        Ok(StepShape {
            layout,
            rows: padded_rows as u32,
            samples: samples as u32,
            scores: batch.scores.len() as u32,
            copies: self.copy_groups(batch),
            mixed: graph.map_or(mixed, |graph| config.mixed(graph)),
            drafted: batch.samples.iter().any(|sample| sample.drafted),
            split_kernels: SplitKernels::of(sampling, config.vocabulary),
            graph,
        })
    }
}

/// Writes the rows to score and the block copies.
fn put_scores_and_copies(batch: &Batch, layout: &MetadataLayout, put: &mut impl FnMut(usize, &[u8])) {
    for (i, score) in batch.scores.iter().enumerate() {
        put(layout.scored_rows + i * 4, &score.row.to_ne_bytes());
        let row = ScoreRow { token: score.token, top: score.top };
        put(layout.scores + i * size_of::<ScoreRow>(), as_bytes(&row));
    }
    for (i, copy) in batch.copies.iter().enumerate() {
        put(layout.copies + i * 8, &copy.from.to_ne_bytes());
        put(layout.copies + i * 8 + 4, &copy.to.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests;
