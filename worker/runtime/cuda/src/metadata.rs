//! Step metadata: tokens, positions, KV indices, sampling rows, attention plans and block tables, packed for
//! one upload.

use inflight_kernels::cuda::{
    AttentionItem, AttentionPlan, PlanShape, PlannedSequence, SamplingRow, ScoreRow, SplitKernels, as_bytes,
};
use inflight_runtime::{Batch, Error};

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
    /// Attention items per plan.
    pub(super) items: usize,
    pub(super) copies: usize,
    /// Attention plans: one per distinct sliding window.
    pub(super) plans: usize,
    /// Entries of all block tables.
    pub(super) table_entries: usize,
}

/// Byte offset of each section. Those that graphs read come first, so that their offsets depend on the graph alone; the last
/// of them are the block tables, whose length varies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MetadataLayout {
    pub(super) tokens: usize,
    pub(super) positions: usize,
    pub(super) kv_indices: usize,
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
        Self {
            tokens: section(capacity.rows * 4),
            positions: section(capacity.rows * 4),
            kv_indices: section(capacity.rows * 4),
            sampled_rows: section(capacity.sampled_rows * 4),
            item_counts: section(capacity.plans * 4),
            items: section(capacity.plans * item_bytes),
            item_bytes,
            tables: section(capacity.table_entries * 4),
            sampling: section(capacity.samples * size_of::<SamplingRow>()),
            scored_rows: section(capacity.scores * 4),
            scores: section(capacity.scores * size_of::<ScoreRow>()),
            copies: section(capacity.copies * 8),
            bytes: at,
        }
    }

    pub(super) fn item_count(&self, plan: usize) -> usize {
        self.item_counts + plan * 4
    }

    pub(super) fn items(&self, plan: usize) -> usize {
        self.items + plan * self.item_bytes
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
    kv_indices: Vec<u32>,
    /// Last step that wrote to each block, by block.
    written: Vec<u64>,
    step: u64,
}

/// Model and device properties that packing depends on.
#[derive(Debug, Clone)]
pub(super) struct PackerConfig {
    /// Tokens of the vocabulary.
    pub(super) vocabulary: u32,
    pub(super) block_tokens: u32,
    pub(super) blocks: u32,
    /// Distinct sliding windows of the layers.
    pub(super) windows: Vec<Option<u32>>,
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
            plans: self.windows.len(),
            table_entries: 0,
        }
    }

    /// Returns a step whose rows are all padding, and its metadata, to capture a graph from.
    pub(super) fn padding_step(&self, graph: StepGraph) -> (StepShape, Vec<u8>) {
        let samples = graph.logits_rows().unwrap_or(0);
        let capacity = MetadataCapacity { samples: samples as usize, ..self.graph_capacity(graph) };
        let layout = MetadataLayout::new(&capacity);
        let mut packed = vec![0u8; layout.bytes];
        packed[layout.kv_indices..][..graph.rows() as usize * 4].fill(0xff);
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
    /// Computes the KV index of each row and checks that no two sequences write to one block.
    fn assign_kv_indices(&mut self, batch: &Batch, config: &PackerConfig) -> Result<(), Error> {
        self.step += 1;
        self.written.resize(config.blocks as usize, 0);
        self.kv_indices.clear();
        for s in 0..batch.sequences() {
            let table = batch.tables[0].of(s);
            let positions = &batch.positions[batch.starts[s] as usize..batch.starts[s + 1] as usize];
            for (i, position) in positions.iter().enumerate() {
                let block = table[(position / config.block_tokens) as usize];
                let offset = position % config.block_tokens;
                if i == 0 || offset == 0 {
                    let written = &mut self.written[block as usize];
                    if *written == self.step {
                        return Err(Error::Malformed(format!("block {block} is written from two places")));
                    }
                    *written = self.step;
                }
                self.kv_indices.push(block * config.block_tokens + offset);
            }
        }
        Ok(())
    }

    /// Plans the attention of a batch, for each distinct window.
    fn plan_attention(&mut self, batch: &Batch, config: &PackerConfig) {
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
                table: batch.tables[0].starts[s],
                decode: sampled == (end - row) as usize,
            });
        }
        self.plans.resize_with(config.windows.len(), AttentionPlan::default);
        for (plan, window) in self.plans.iter_mut().zip(&config.windows) {
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
            plans: config.windows.len(),
            table_entries: batch.tables[0].blocks.len(),
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
        for i in 0..padded_rows {
            let index = self.kv_indices.get(i).copied().unwrap_or(PADDING_KV_INDEX);
            put(layout.kv_indices + i * 4, &index.to_ne_bytes());
        }
        for i in 0..samples {
            let row = batch.samples.get(i).map_or(i as u32, |sample| sample.row);
            put(layout.sampled_rows + i * 4, &row.to_ne_bytes());
        }
        for (i, row) in sampling.iter().enumerate() {
            put(layout.sampling + i * size_of::<SamplingRow>(), as_bytes(row));
        }
        put_scores_and_copies(batch, &layout, &mut put);
        for (i, plan) in self.plans.iter().enumerate() {
            put(layout.item_count(i), &(plan.items().len() as u32).to_ne_bytes());
            for (j, item) in plan.items().iter().enumerate() {
                put(layout.items(i) + j * size_of::<AttentionItem>(), as_bytes(item));
            }
        }
        for (i, block) in batch.tables[0].blocks.iter().enumerate() {
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
    use inflight_runtime::{BlockCopy, Feedback, ScoreRow};
    use proptest::prelude::*;

    use super::super::shapes::PARTIALS;
    use super::super::step_graph::StepGraphs;
    use super::*;

    fn config(windows: Vec<Option<u32>>) -> PackerConfig {
        let plan = PlanShape {
            group: 4,
            kv_heads: 2,
            head_dim: 64,
            window: None,
            deterministic: false,
            slots: 8,
            partials: PARTIALS,
        };
        PackerConfig { vocabulary: 1000, block_tokens: 16, blocks: 64, windows, plan }
    }

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    /// Returns the offsets of the metadata sections that a CUDA graph reads.
    fn captured_offsets(layout: &MetadataLayout, plans: usize) -> Vec<usize> {
        let mut offsets =
            vec![layout.tokens, layout.positions, layout.kv_indices, layout.sampled_rows, layout.tables];
        offsets.extend((0..plans).flat_map(|plan| [layout.item_count(plan), layout.items(plan)]));
        offsets
    }

    proptest! {
        #[test]
        fn a_batch_lies_where_its_graph_reads_it_with_each_section_in_its_own_place(
            lengths in prop::collection::vec((1u32..40, 0u32..100, any::<bool>()), 1..12),
            deterministic in any::<bool>(), scores in any::<bool>(), copies in 0u32..3, windows in 1usize..3,
        ) {
            let mut config = config([None, Some(24)][..windows].to_vec());
            config.plan.deterministic = deterministic;
            config.blocks = 12 * 10;
            let mut batch = Batch::default();
            batch.clear();
            for (slot, (tokens, position, decode)) in (0u32..).zip(lengths) {
                let tokens: Vec<u32> = (0..if decode { 1 } else { tokens }).map(|i| 1000 * slot + i).collect();
                let blocks: Vec<u32> = (0..10).map(|block| 10 * slot + block).collect();
                let row = batch.rows() as u32;
                batch.push_sequence(&tokens, position, &blocks);
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
            prop_assert_eq!(
                captured_offsets(&step.layout, windows), captured_offsets(&padding.layout, windows)
            );
            prop_assert!(packed.len() <= out.len());
            prop_assert_eq!((step.rows, step.mixed), (padding.rows, padding.mixed));
            prop_assert_eq!(step.samples as usize, graph.logits_rows().map_or(samples, |rows| rows as usize));
            for row in 0..step.rows as usize {
                let index = word(&out, step.layout.kv_indices + 4 * row);
                prop_assert_eq!(row < rows, index != u32::MAX, "row {}", row);
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
            for (i, block) in batch.tables[0].blocks.iter().enumerate() {
                prop_assert_eq!(word(&out, step.layout.tables + 4 * i), *block);
            }
            for (i, plan) in packer.plans.iter().enumerate() {
                prop_assert_eq!(word(&out, step.layout.item_count(i)) as usize, plan.items().len());
                for (j, item) in plan.items().iter().enumerate() {
                    let at = step.layout.items(i) + j * size_of::<AttentionItem>();
                    prop_assert_eq!(&out[at..at + size_of::<AttentionItem>()], as_bytes(item));
                }
            }
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
        let config = config(vec![None, Some(8)]);
        let rows = vec![SamplingRow { rows: 1, ..SamplingRow::default() }; 3];
        let graph_for =
            |rows, decodes| StepGraphs { sample_rows: 8, batch_tokens: 64 }.for_batch(rows, decodes);
        let step = packer.pack(&batch, &config, &rows, 3, graph_for, &mut out).unwrap();
        assert_eq!((step.rows, step.samples, step.graph), (4, 4, Some(StepGraph::Decode(4))));
        assert_eq!(word(&out, step.layout.tokens), 7);
        assert_eq!(word(&out, step.layout.tokens + 4), 1 << 31 | 2);
        assert_eq!(word(&out, step.layout.kv_indices + 8), 5 * 16 + 6);
        assert_eq!(word(&out, step.layout.kv_indices + 12), u32::MAX);
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
        let config = config(vec![None]);
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
        let refused = packer.pack(&batch, &config(vec![None]), &[], 1, |_, _| None, &mut out).unwrap_err();
        assert!(refused.to_string().contains("waits for sample 1"), "{refused}");
        batch.feedback.clear();
        batch.push_sequence(&[1], 4, &[5]);
        let refused = packer.pack(&batch, &config(vec![None]), &[], 1, |_, _| None, &mut out).unwrap_err();
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
