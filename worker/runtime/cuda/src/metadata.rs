//! Step metadata: tokens, positions, KV indices, sampling rows, attention plans and block tables, packed for
//! one upload.

use inflight_kernels::cuda::{
    AttentionItem, AttentionPlan, PlanShape, PlannedSequence, SamplingRow, ScoreRow, SplitKernels, as_bytes,
};
use inflight_runtime::{Batch, Error};

use super::kv_layers::{KvLayers, KvPart, KvWindow};
use super::step_graph::StepGraph;

/// Flag of a token id that stands for a sample index of the previous step.
const FEEDBACK: u32 = 1 << 31;
/// KV index of padding rows, which write no keys and values.
const PADDING_KV_INDEX: u32 = u32::MAX;
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
    /// Last step that wrote to each block, by block.
    written: Vec<u64>,
    step: u64,
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
            table_entries: 0,
        }
    }

    /// Returns a step whose rows are all padding, and its metadata, to capture a graph from.
    pub(super) fn padding_step(&self, graph: StepGraph) -> (StepShape, Vec<u8>) {
        let samples = graph.logits_rows().unwrap_or(0);
        let capacity = MetadataCapacity { samples: samples as usize, ..self.graph_capacity(graph) };
        let layout = MetadataLayout::new(&capacity);
        let mut packed = vec![0u8; layout.bytes];
        for part in 0..capacity.parts {
            packed[layout.kv_indices(part)..][..graph.rows() as usize * 4].fill(0xff);
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
        Ok(())
    }

    /// Concatenates the block tables of all parts. A kernel finds the block of a position by its span, counted from the sequence's
    /// first one; of a table that begins with a later span, that is an entry before its own ones, so each must have as many before it.
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
            self.tables.extend(tables.blocks.iter().skip(*part).step_by(stride as usize));
        }
    }

    /// Plans the attention of a batch, for each distinct window. The tables of the plans are those of a part whose tables begin at
    /// entry 0.
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
            table_entries: self.tables.len(),
        };
        // A captured graph reads from fixed offsets.
        let capacity = graph.map_or(counted, |graph| {
            let MetadataCapacity { rows, sampled_rows, items, .. } = config.graph_capacity(graph);
            let samples = graph.logits_rows().map_or(counted.samples, |rows| rows as usize);
            MetadataCapacity { rows, sampled_rows, items, samples, ..counted }
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
        for (i, block) in self.tables.iter().enumerate() {
            put(layout.tables + i * 4, &block.to_ne_bytes());
        }
        Ok(StepShape {
            layout,
            rows: padded_rows as u32,
            samples: samples as u32,
            scores: batch.scores.len() as u32,
            copies: copy_groups(batch),
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

/// Groups block copies into ranges in which no copy reads or writes a block that another one writes.
fn copy_groups(batch: &Batch) -> Vec<(u32, u32)> {
    let mut groups: Vec<(u32, u32)> = Vec::new();
    for (i, copy) in batch.copies.iter().enumerate() {
        let i = i as u32;
        let conflicts = groups.last().is_none_or(|(first, _)| {
            batch.copies[*first as usize..i as usize]
                .iter()
                .any(|earlier| [copy.from, copy.to].contains(&earlier.to) || earlier.from == copy.to)
        });
        match groups.last_mut() {
            Some(group) if !conflicts => group.1 = i + 1,
            _ => groups.push((i, i + 1)),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use inflight_kernels::cuda::{ATTENTION_KEY_TILE, KvStore};
    use inflight_runtime::{BlockCopy, Feedback, ScoreRow};
    use proptest::prelude::*;

    use super::super::kv_layers::KvView;
    use super::super::kv_layers::tests::config as layers;
    use super::super::shapes::PARTIALS;
    use super::super::step_graph::StepGraphs;
    use super::*;

    fn config(windows: &[Option<u32>]) -> PackerConfig {
        let plan = PlanShape {
            group: 4,
            kv_heads: 2,
            head_dim: 64,
            window: None,
            deterministic: false,
            slots: 8,
            partials: PARTIALS,
        };
        let kv_layers = KvLayers::new(&layers(windows), 16, 1000, KvStore::Half, true).unwrap();
        PackerConfig { vocabulary: 1000, blocks: 64, kv_layers, plan }
    }

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    /// Returns the offsets of the metadata sections that a CUDA graph reads.
    fn captured_offsets(layout: &MetadataLayout, kv_layers: &KvLayers) -> Vec<usize> {
        let mut offsets = vec![layout.tokens, layout.positions, layout.sampled_rows, layout.tables];
        offsets.extend((0..kv_layers.parts().len()).map(|part| layout.kv_indices(part)));
        let views = 0..kv_layers.views().len();
        offsets.extend(views.flat_map(|view| [layout.item_count(view), layout.items(view)]));
        offsets
    }

    /// Models with one group of layers, with and without a window, and with several, whose spans take one block or more.
    fn windows() -> impl Strategy<Value = Vec<Option<u32>>> {
        prop_oneof![
            Just(vec![None]),
            Just(vec![Some(24)]),
            Just(vec![Some(24), None]),
            Just(vec![Some(24), Some(24), None, Some(24), Some(24), Some(24)]),
            Just(vec![Some(9), Some(40), Some(9)]),
            // As many positions as a sequence may have.
            Just(vec![None, Some(990)]),
        ]
    }

    proptest! {
        #[test]
        fn a_batch_lies_where_its_graph_reads_it_with_each_section_in_its_own_place(
            lengths in prop::collection::vec((1u32..40, 0u32..100, any::<bool>()), 1..12),
            deterministic in any::<bool>(), scores in any::<bool>(), copies in 0u32..3, windows in windows(),
            more in any::<bool>(),
        ) {
            let mut config = config(&windows);
            config.plan.deterministic = deterministic;
            let shape = config.kv_layers.plan().shape();
            config.blocks = 12 * 10 * shape.span_blocks();
            let mut free = (0..config.blocks).rev();
            let mut batch = Batch::default();
            batch.clear();
            for (slot, (tokens, position, decode)) in (0u32..).zip(lengths) {
                let tokens: Vec<u32> = (0..if decode { 1 } else { tokens }).map(|i| 1000 * slot + i).collect();
                // What the windows still see, and one span more.
                let end = (position + tokens.len() as u32).div_ceil(16);
                let tables: Vec<(u32, Vec<u32>)> = shape
                    .groups()
                    .iter()
                    .map(|group| {
                        let first = group.first_span(position, 16).saturating_sub(u32::from(more));
                        (first, free.by_ref().take(((end - first) * group.blocks) as usize).collect())
                    })
                    .collect();
                let row = batch.rows() as u32;
                let tables = tables.iter().map(|(first, blocks)| (*first, blocks.as_slice()));
                batch.push_tables(&tokens, &[], position, tables);
                if scores {
                    batch.scores.push(ScoreRow { row, token: slot, top: 1 });
                }
                if decode || slot % 2 == 0 {
                    batch.sample_last_row(slot);
                }
            }
            batch.copies = (0..copies).map(|i| BlockCopy { from: i, to: i + 50 }).collect();
            let sampling = vec![SamplingRow { rows: 7, ..SamplingRow::default() }; batch.samples.len()];
            let graphs = StepGraphs { sample_rows: 16, batch_tokens: 512 };
            let (mut packer, mut out) = (MetadataPacker::default(), Vec::new());
            let graph_for = |rows, decodes| graphs.for_batch(rows, decodes);
            let step = packer.pack(&batch, &config, &sampling, 0, graph_for, &mut out).unwrap();
            let (rows, samples) = (batch.rows(), batch.samples.len());
            let graph = step.graph.expect("a graph for at most 480 rows");
            let (padding, packed) = config.padding_step(graph);
            let kv_layers = &config.kv_layers;
            prop_assert_eq!(
                captured_offsets(&step.layout, kv_layers), captured_offsets(&padding.layout, kv_layers)
            );
            prop_assert!(packed.len() <= out.len());
            prop_assert_eq!((step.rows, step.mixed), (padding.rows, padding.mixed));
            prop_assert_eq!(step.samples as usize, graph.logits_rows().map_or(samples, |rows| rows as usize));
            for row in 0..step.rows as usize {
                let token = batch.tokens.get(row).copied().unwrap_or(0);
                prop_assert_eq!(word(&out, step.layout.tokens + 4 * row), token);
            }
            for (i, sample) in batch.samples.iter().enumerate() {
                prop_assert_eq!(word(&out, step.layout.sampled_rows + 4 * i), sample.row);
                let row = &out[step.layout.sampling + i * size_of::<SamplingRow>()..];
                prop_assert_eq!(&row[..size_of::<SamplingRow>()], as_bytes(&sampling[i]));
            }
            for (i, score) in batch.scores.iter().enumerate() {
                prop_assert_eq!(word(&out, step.layout.scored_rows + 4 * i), score.row);
                prop_assert_eq!(word(&out, step.layout.scores + i * size_of::<super::ScoreRow>()), score.token);
            }
            for (i, copy) in batch.copies.iter().enumerate() {
                prop_assert_eq!(word(&out, step.layout.copies + 8 * i + 4), copy.to);
            }
            // The block of a position, by sequence and part; `None` once it is given up.
            let block_of = |sequence: usize, part: usize, position: u32| {
                let KvPart { group, part } = kv_layers.parts()[part];
                let span = (position / 16).checked_sub(batch.tables[group].first_spans[sequence])?;
                let stride = shape.groups()[group].blocks;
                batch.tables[group].of(sequence).get((span * stride) as usize + part).copied()
            };
            let sequence_of = |row: usize| batch.starts.iter().rposition(|start| *start as usize <= row).unwrap();
            for part in 0..kv_layers.parts().len() {
                for row in 0..step.rows as usize {
                    let index = word(&out, step.layout.kv_indices(part) + 4 * row);
                    prop_assert_eq!(row < rows, index != u32::MAX, "row {}", row);
                    if row < rows {
                        let position = batch.positions[row];
                        let block = block_of(sequence_of(row), part, position);
                        prop_assert_eq!(Some(index), block.map(|block| block * 16 + position % 16));
                    }
                }
            }
            for (view, KvView { part, plan }) in kv_layers.views().iter().copied().enumerate() {
                let KvWindow { window, .. } = kv_layers.windows()[plan];
                let mut covered = vec![false; rows];
                for i in 0..word(&out, step.layout.item_count(view)) as usize {
                    let at = step.layout.items(view) + i * size_of::<AttentionItem>();
                    // Row, tokens, position and table are its first fields.
                    let [row, tokens, position, table] = [0, 4, 8, 12].map(|field| word(&out, at + field));
                    covered[row as usize..(row + tokens) as usize].fill(true);
                    prop_assert_eq!(batch.positions[row as usize], position);
                    let sight = window.map_or(0, |window| (position + 1).saturating_sub(window));
                    for key in sight / ATTENTION_KEY_TILE * ATTENTION_KEY_TILE..position + tokens {
                        let entry = table + key / 16;
                        let block = word(&out, step.layout.tables + 4 * entry as usize);
                        prop_assert_eq!(Some(block), block_of(sequence_of(row as usize), part, key), "key {}", key);
                    }
                }
                prop_assert!(covered.into_iter().all(|covered| covered), "a row has no item");
            }
            let slots = batch.sequences() as u32;
            let entries = kv_layers.table_entries(slots, 160, rows as u32);
            prop_assert!(packer.tables.len() <= entries, "{} entries, not {entries}", packer.tables.len());
        }
    }

    #[test]
    fn decode_batches_run_a_graph_with_logits_and_others_one_of_their_layers() {
        let mut batch = Batch::default();
        batch.clear();
        for s in 0..3 {
            batch.push_sequence(&[7 + s], 20 + s, &[2 * s, 2 * s + 1]);
            batch.sample_last_row(s);
        }
        batch.feedback.push(Feedback { row: 1, sample: 2 });
        let (mut packer, mut out) = (MetadataPacker::default(), Vec::new());
        // The window keeps all blocks, as no sequence is longer than it and a tile of keys.
        let config = config(&[None, Some(950)]);
        let rows = vec![SamplingRow { rows: 1, ..SamplingRow::default() }; 3];
        let graph_for =
            |rows, decodes| StepGraphs { sample_rows: 8, batch_tokens: 64 }.for_batch(rows, decodes);
        let step = packer.pack(&batch, &config, &rows, 3, graph_for, &mut out).unwrap();
        assert_eq!((step.rows, step.samples, step.graph), (4, 4, Some(StepGraph::Decode(4))));
        assert_eq!(word(&out, step.layout.tokens), 7);
        assert_eq!(word(&out, step.layout.tokens + 4), 1 << 31 | 2);
        assert_eq!(word(&out, step.layout.kv_indices(0) + 8), 5 * 16 + 6);
        assert_eq!(word(&out, step.layout.kv_indices(0) + 12), u32::MAX);
        assert_eq!(word(&out, step.layout.item_count(1)), 3);
        assert_eq!(word(&out, step.layout.tables + 20), 5);
        // No more than the batch needs: the items are bounded by rows and device.
        assert!(out.len() < 8 << 10, "{} bytes", out.len());

        batch.push_sequence(&[1, 2, 3], 0, &[9]);
        let step = packer.pack(&batch, &config, &rows, 3, graph_for, &mut out).unwrap();
        assert_eq!((step.rows, step.samples, step.graph), (8, 3, Some(StepGraph::Layers(8))));
        let step = packer.pack(&batch, &config, &rows, 3, |_, _| None, &mut out).unwrap();
        assert_eq!((step.rows, step.samples, step.graph), (6, 3, None));
    }

    #[test]
    fn decodes_with_drafts_take_the_decode_kernel_and_graph() {
        let (mut packer, mut out, mut batch) = (MetadataPacker::default(), Vec::new(), Batch::default());
        let config = config(&[None]);
        batch.clear();
        // More rows than a split item takes in this group of heads.
        batch.push_drafted(&[7], &[8, 9, 10, 11, 12, 13], 20, &[0, 1]);
        batch.sample_with_drafts(0, 6);
        batch.push_sequence(&[5], 40, &[2, 3, 4]);
        batch.sample_last_row(1);
        let rows = vec![SamplingRow::default(); 8];
        let graph_for =
            |rows, decodes| StepGraphs { sample_rows: 16, batch_tokens: 8 }.for_batch(rows, decodes);
        let step = packer.pack(&batch, &config, &rows, 0, graph_for, &mut out).unwrap();
        assert_eq!((step.rows, step.samples, step.graph), (8, 8, Some(StepGraph::Decode(8))));
        assert!(step.drafted && !step.mixed);
        assert_eq!(word(&out, step.layout.item_count(0)), 3);

        // A prompt of as many rows, sampled from at its end.
        batch.clear();
        batch.push_sequence(&[7, 8, 9, 10, 11, 12, 13], 20, &[0, 1]);
        batch.sample_last_row(0);
        let step = packer.pack(&batch, &config, &rows[..1], 0, graph_for, &mut out).unwrap();
        assert_eq!((step.rows, step.samples, step.graph), (8, 1, Some(StepGraph::Layers(8))));
        assert!(step.mixed && !step.drafted);
    }

    #[test]
    fn feedback_of_missing_samples_and_blocks_written_twice_are_refused() {
        let (mut packer, mut out) = (MetadataPacker::default(), Vec::new());
        let mut batch = Batch::default();
        batch.clear();
        batch.push_sequence(&[1], 3, &[5]);
        batch.feedback.push(Feedback { row: 0, sample: 1 });
        let refused = packer.pack(&batch, &config(&[None]), &[], 1, |_, _| None, &mut out).unwrap_err();
        assert!(refused.to_string().contains("waits for sample 1"), "{refused}");
        batch.feedback.clear();
        batch.push_sequence(&[1], 4, &[5]);
        let refused = packer.pack(&batch, &config(&[None]), &[], 1, |_, _| None, &mut out).unwrap_err();
        assert!(refused.to_string().contains("block 5"), "{refused}");
    }

    #[test]
    fn dependent_block_copies_are_in_different_groups() {
        let mut batch = Batch::default();
        batch.clear();
        batch.copies =
            [(1, 2), (1, 3), (3, 4), (5, 6), (7, 5)].map(|(from, to)| BlockCopy { from, to }).to_vec();
        assert_eq!(copy_groups(&batch), [(0, 2), (2, 4), (4, 5)]);
    }
}
