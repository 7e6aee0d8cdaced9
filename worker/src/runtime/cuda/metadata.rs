//! What a step needs beside weights and buffers, packed so that it goes to the device in one copy.

use inflight_kernels::cuda::{
    AttentionItem, AttentionPlan, PlanShape, PlannedSequence, SamplingRow, as_bytes,
};

use super::sizing::PARTIALS;
use crate::runtime::{Batch, Error};

/// A token that the step before samples is named by its sample, with this bit.
const FEEDBACK: u32 = 1 << 31;
/// The place of a row that is padding.
const NO_PLACE: u32 = u32::MAX;
/// Sections begin at multiples of it.
const ALIGN: usize = 256;

/// How many of everything there is room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Room {
    pub(super) rows: usize,
    pub(super) samples: usize,
    /// Of each plan.
    pub(super) items: usize,
    pub(super) copies: usize,
    /// One for each window that some layer has.
    pub(super) plans: usize,
}

/// Where each section begins, in bytes. The block tables come last and are as long as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) tokens: usize,
    pub(super) positions: usize,
    pub(super) places: usize,
    pub(super) pick: usize,
    pub(super) sampling: usize,
    pub(super) copies: usize,
    item_counts: usize,
    items: usize,
    item_bytes: usize,
    pub(super) tables: usize,
}

impl Layout {
    pub(super) fn new(room: &Room) -> Self {
        let mut at = 0;
        let mut section = |bytes: usize| {
            let begin = at;
            at = (at + bytes).next_multiple_of(ALIGN);
            begin
        };
        let item_bytes = (room.items * size_of::<AttentionItem>()).next_multiple_of(ALIGN);
        Self {
            tokens: section(room.rows * 4),
            positions: section(room.rows * 4),
            places: section(room.rows * 4),
            pick: section(room.samples * 4),
            sampling: section(room.samples * size_of::<SamplingRow>()),
            copies: section(room.copies * 8),
            item_counts: section(room.plans * 4),
            items: section(room.plans * item_bytes),
            item_bytes,
            tables: section(0),
        }
    }

    pub(super) fn item_count(&self, plan: usize) -> usize {
        self.item_counts + plan * 4
    }

    pub(super) fn items(&self, plan: usize) -> usize {
        self.items + plan * self.item_bytes
    }

    /// Bytes of all, with block tables of so many entries.
    pub(super) fn bytes(&self, table_entries: usize) -> usize {
        self.tables + table_entries * 4
    }
}

/// What a step launches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StepShape {
    pub(super) layout: Layout,
    /// Rows, padding included.
    pub(super) rows: u32,
    /// Rows of logits, padding included.
    pub(super) samples: u32,
    /// Ranges of copies that may run at once.
    pub(super) copies: Vec<(u32, u32)>,
    /// Whether some plan has items of many rows.
    pub(super) mixed: bool,
    /// Decoding alone, in this bucket.
    pub(super) bucket: Option<u32>,
    pub(super) bytes: usize,
}

/// Packs batches; keeps its buffers.
#[derive(Debug, Default)]
pub(super) struct Packer {
    plans: Vec<AttentionPlan>,
    sequences: Vec<PlannedSequence>,
    places: Vec<u32>,
    /// Per block, the last step that wrote to it.
    written: Vec<u64>,
    step: u64,
}

/// What packing needs to know beside the batch.
#[derive(Debug, Clone)]
pub(super) struct PackerShape {
    pub(super) block_tokens: u32,
    pub(super) blocks: u32,
    /// The windows that layers have, each once.
    pub(super) windows: Vec<Option<u32>>,
    /// Of the first window; others differ in it alone.
    pub(super) plan: PlanShape,
}

impl Packer {
    /// Where rows go, checked: no two sequences write to one block.
    fn place(&mut self, batch: &Batch, shape: &PackerShape) -> Result<(), Error> {
        self.step += 1;
        self.written.resize(shape.blocks as usize, 0);
        self.places.clear();
        for s in 0..batch.sequences() {
            let table = &batch.blocks[batch.block_starts[s] as usize..batch.block_starts[s + 1] as usize];
            let positions = &batch.positions[batch.starts[s] as usize..batch.starts[s + 1] as usize];
            for (i, position) in positions.iter().enumerate() {
                let block = table[(position / shape.block_tokens) as usize];
                let offset = position % shape.block_tokens;
                if i == 0 || offset == 0 {
                    let written = &mut self.written[block as usize];
                    if *written == self.step {
                        return Err(Error::Malformed(format!("block {block} is written from two places")));
                    }
                    *written = self.step;
                }
                self.places.push(block * shape.block_tokens + offset);
            }
        }
        Ok(())
    }

    /// Packs a checked batch into `out`. `sampling` has a row for each sample; `graphs` says which bucket, if any, has
    /// room for so many rows that only decode.
    ///
    /// # Errors
    /// [`Error::Malformed`] if two sequences write to one block or feedback is out of range.
    pub(super) fn pack(
        &mut self,
        batch: &Batch,
        shape: &PackerShape,
        sampling: &[SamplingRow],
        previous_samples: usize,
        graphs: impl Fn(u32) -> Option<u32>,
        out: &mut Vec<u8>,
    ) -> Result<StepShape, Error> {
        self.place(batch, shape)?;
        let rows = batch.rows();
        self.sequences.clear();
        for s in 0..batch.sequences() {
            let row = batch.starts[s];
            self.sequences.push(PlannedSequence {
                row,
                tokens: batch.starts[s + 1] - row,
                position: batch.positions[row as usize],
                table: batch.block_starts[s],
            });
        }
        self.plans.resize_with(shape.windows.len(), AttentionPlan::default);
        for (plan, window) in self.plans.iter_mut().zip(&shape.windows) {
            plan.make(&self.sequences, &PlanShape { window: *window, ..shape.plan });
        }
        let decodes = batch.sequences() == rows
            && batch.samples.len() == rows
            && batch.copies.is_empty()
            && batch.samples.iter().enumerate().all(|(i, sample)| sample.row as usize == i);
        let bucket = if decodes { graphs(rows as u32) } else { None };
        let (padded, samples) = match bucket {
            Some(bucket) => (bucket as usize, bucket as usize),
            None => (rows, batch.samples.len()),
        };
        let items = match bucket {
            // What a graph reads from must not move.
            Some(bucket) => bucket_items(bucket),
            None => self.plans.iter().map(|plan| plan.items().len()).max().unwrap_or(0),
        };
        let room =
            Room { rows: padded, samples, items, copies: batch.copies.len(), plans: shape.windows.len() };
        let layout = Layout::new(&room);
        let bytes = layout.bytes(batch.blocks.len());
        out.clear();
        out.resize(bytes, 0);
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
        for i in 0..padded {
            let place = self.places.get(i).copied().unwrap_or(NO_PLACE);
            put(layout.places + i * 4, &place.to_ne_bytes());
        }
        for i in 0..samples {
            let row = batch.samples.get(i).map_or(i as u32, |sample| sample.row);
            put(layout.pick + i * 4, &row.to_ne_bytes());
        }
        for (i, row) in sampling.iter().enumerate() {
            put(layout.sampling + i * size_of::<SamplingRow>(), as_bytes(row));
        }
        for (i, copy) in batch.copies.iter().enumerate() {
            put(layout.copies + i * 8, &copy.from.to_ne_bytes());
            put(layout.copies + i * 8 + 4, &copy.to.to_ne_bytes());
        }
        for (i, plan) in self.plans.iter().enumerate() {
            put(layout.item_count(i), &(plan.items().len() as u32).to_ne_bytes());
            for (j, item) in plan.items().iter().enumerate() {
                put(layout.items(i) + j * size_of::<AttentionItem>(), as_bytes(item));
            }
        }
        for (i, block) in batch.blocks.iter().enumerate() {
            put(layout.tables + i * 4, &block.to_ne_bytes());
        }
        Ok(StepShape {
            layout,
            rows: padded as u32,
            samples: samples as u32,
            copies: copy_groups(batch),
            mixed: self.plans.iter().any(AttentionPlan::is_mixed),
            bucket,
            bytes,
        })
    }
}

/// The layout that a bucket's graph reads from.
pub(super) fn bucket_layout(bucket: u32, plans: usize) -> Layout {
    let rows = bucket as usize;
    Layout::new(&Room { rows, samples: rows, items: bucket_items(bucket), copies: 0, plans })
}

/// Items there may be in a bucket: one a row, and those of rows whose keys are cut.
fn bucket_items(bucket: u32) -> usize {
    (bucket + PARTIALS) as usize
}

/// Cuts the copies such that within a range none reads or writes what another one writes.
fn copy_groups(batch: &Batch) -> Vec<(u32, u32)> {
    let mut groups: Vec<(u32, u32)> = Vec::new();
    for (i, copy) in batch.copies.iter().enumerate() {
        let i = i as u32;
        let clash = groups.last().is_none_or(|(first, _)| {
            batch.copies[*first as usize..i as usize]
                .iter()
                .any(|earlier| [copy.from, copy.to].contains(&earlier.to) || earlier.from == copy.to)
        });
        match groups.last_mut() {
            Some(group) if !clash => group.1 = i + 1,
            _ => groups.push((i, i + 1)),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::{BlockCopy, Feedback};

    fn shape(windows: Vec<Option<u32>>) -> PackerShape {
        let plan = PlanShape {
            group: 4,
            kv_heads: 2,
            head_dim: 64,
            window: None,
            deterministic: false,
            slots: 8,
            partials: PARTIALS,
        };
        PackerShape { block_tokens: 16, blocks: 64, windows, plan }
    }

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn a_decode_batch_is_padded_to_its_bucket_and_a_mixed_one_is_not() {
        let mut batch = Batch::default();
        batch.clear();
        for s in 0..3 {
            batch.push_sequence(&[7 + s], 20 + s, &[2 * s, 2 * s + 1]);
            batch.sample_last_row(s);
        }
        batch.feedback.push(Feedback { row: 1, sample: 2 });
        let (mut packer, mut out) = (Packer::default(), Vec::new());
        let shape = shape(vec![None, Some(8)]);
        let rows = vec![SamplingRow { active: 1, ..SamplingRow::default() }; 3];
        let step = packer.pack(&batch, &shape, &rows, 3, |_| Some(8), &mut out).unwrap();
        assert_eq!((step.rows, step.samples, step.bucket), (8, 8, Some(8)));
        assert_eq!(step.layout, bucket_layout(8, 2));
        assert_eq!(word(&out, step.layout.tokens), 7);
        assert_eq!(word(&out, step.layout.tokens + 4), 1 << 31 | 2);
        assert_eq!(word(&out, step.layout.places + 8), 5 * 16 + 6);
        assert_eq!(word(&out, step.layout.places + 12), u32::MAX);
        assert_eq!(word(&out, step.layout.item_count(1)), 3);
        assert_eq!(word(&out, step.layout.tables + 20), 5);
        assert_eq!(out.len(), step.layout.bytes(6));

        batch.push_sequence(&[1, 2, 3], 0, &[9]);
        let step = packer.pack(&batch, &shape, &rows, 3, |_| Some(8), &mut out).unwrap();
        assert_eq!((step.rows, step.samples, step.bucket), (6, 3, None));
    }

    #[test]
    fn feedback_of_a_sample_that_was_not_and_blocks_written_twice_are_refused() {
        let (mut packer, mut out) = (Packer::default(), Vec::new());
        let mut batch = Batch::default();
        batch.clear();
        batch.push_sequence(&[1], 3, &[5]);
        batch.feedback.push(Feedback { row: 0, sample: 1 });
        let refused = packer.pack(&batch, &shape(vec![None]), &[], 1, |_| None, &mut out).unwrap_err();
        assert!(refused.to_string().contains("waits for sample 1"), "{refused}");
        batch.feedback.clear();
        batch.push_sequence(&[1], 4, &[5]);
        let refused = packer.pack(&batch, &shape(vec![None]), &[], 1, |_| None, &mut out).unwrap_err();
        assert!(refused.to_string().contains("block 5"), "{refused}");
    }

    #[test]
    fn copies_that_depend_on_each_other_are_not_in_one_group() {
        let mut batch = Batch::default();
        batch.clear();
        batch.copies =
            [(1, 2), (1, 3), (3, 4), (5, 6), (7, 5)].map(|(from, to)| BlockCopy { from, to }).to_vec();
        assert_eq!(copy_groups(&batch), [(0, 2), (2, 4), (4, 5)]);
    }
}
