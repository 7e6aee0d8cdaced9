//! Packed batches, compared with what kernels read of them.

use inflight_kernels::cuda::{ATTENTION_KEY_TILE, KvStore};
use inflight_models::{DeltaForm, DeltaSpec, LayerSpec, Mixer};
use inflight_runtime::{BlockCopy, Feedback, ScoreRow};
use proptest::prelude::*;

use super::super::kv_layers::KvView;
use super::super::shapes::PARTIALS;
use super::super::step_graph::StepGraphs;
use super::super::tests::models::with_windows as layers;
use super::*;

/// Returns the configuration for layers with these windows and, if `recurrent`, two recurrent ones.
fn config_of(windows: &[Option<u32>], recurrent: bool) -> PackerConfig {
    let plan = PlanShape {
        group: 4,
        kv_heads: 2,
        head_dim: 64,
        window: None,
        deterministic: false,
        slots: 8,
        partials: PARTIALS,
    };
    let mut config = layers(windows);
    if recurrent {
        let form = DeltaForm::Checkpoint;
        config.delta =
            Some(DeltaSpec { key_heads: 2, value_heads: 4, key_dim: 64, value_dim: 32, taps: 4, form });
        config.layers.extend([LayerSpec { mixer: Mixer::Delta }; 2]);
    }
    let kv_layers = KvLayers::new(&config, 16, 1000, KvStore::Half, true).unwrap();
    PackerConfig { vocabulary: 1000, blocks: 64, kv_layers, plan }
}

fn config(windows: &[Option<u32>]) -> PackerConfig {
    config_of(windows, false)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// Returns the offsets of the metadata sections that a CUDA graph reads.
fn captured_offsets(layout: &MetadataLayout, kv_layers: &KvLayers) -> Vec<usize> {
    let mut offsets = vec![layout.tokens, layout.positions, layout.sampled_rows, layout.tables];
    offsets.extend([layout.sequence_count, layout.sequences, layout.row_sequences]);
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
        // A window that covers the maximum sequence length frees no block.
        Just(vec![None, Some(990)]),
    ]
}

/// Checks the KV index of each row and, of each attention item, the table entries that its kernel reads.
fn tables_lead_to_the_blocks(
    batch: &Batch,
    kv_layers: &KvLayers,
    step: &StepShape,
    out: &[u8],
) -> Result<(), TestCaseError> {
    let (shape, rows) = (kv_layers.plan().shape(), batch.rows());
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
            let index = word(out, step.layout.kv_indices(part) + 4 * row);
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
        for i in 0..word(out, step.layout.item_count(view)) as usize {
            let at = step.layout.items(view) + i * size_of::<AttentionItem>();
            // Row, tokens, position and table are its first fields.
            let [row, tokens, position, table] = [0, 4, 8, 12].map(|field| word(out, at + field));
            covered[row as usize..(row + tokens) as usize].fill(true);
            prop_assert_eq!(batch.positions[row as usize], position);
            let sight = window.map_or(0, |window| (position + 1).saturating_sub(window));
            for key in sight / ATTENTION_KEY_TILE * ATTENTION_KEY_TILE..position + tokens {
                let entry = table + key / 16;
                let block = word(out, step.layout.tables + 4 * entry as usize);
                prop_assert_eq!(Some(block), block_of(sequence_of(row as usize), part, key), "key {}", key);
            }
        }
        prop_assert!(covered.into_iter().all(|covered| covered), "a row has no item");
    }
    Ok(())
}

/// Checks what recurrent layers read: the rows, drafts and blocks of each sequence, and the sequence of each row.
fn states_lead_to_the_blocks(
    batch: &Batch,
    kv_layers: &KvLayers,
    step: &StepShape,
    out: &[u8],
) -> Result<(), TestCaseError> {
    prop_assert_eq!(word(out, step.layout.sequence_count) as usize, batch.sequences());
    for row in 0..step.rows as usize {
        let sequence = word(out, step.layout.row_sequences + 4 * row);
        if row >= batch.rows() {
            prop_assert_eq!(sequence, u32::MAX);
            continue;
        }
        let s = sequence as usize;
        let at = step.layout.sequences + s * size_of::<DeltaSequence>();
        let [first, rows, position, drafts, table] = [0, 4, 8, 12, 16].map(|field| word(out, at + field));
        prop_assert!((first..first + rows).contains(&(row as u32)));
        prop_assert_eq!([first, first + rows], [batch.starts[s], batch.starts[s + 1]]);
        prop_assert_eq!((position, drafts), (batch.positions[first as usize], batch.drafts[s]));
        for (part, block) in batch.state(s, kv_layers.state_blocks()).iter().enumerate() {
            prop_assert_eq!(word(out, step.layout.tables + 4 * (table as usize + part)), *block);
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn a_batch_lies_where_its_graph_reads_it_with_each_section_in_its_own_place(
        lengths in prop::collection::vec((1u32..40, 0u32..400, any::<bool>()), 1..12),
        deterministic in any::<bool>(), scores in any::<bool>(), copies in 0u32..3, windows in windows(),
        (more, recurrent) in any::<(bool, bool)>(),
    ) {
        let mut config = config_of(&windows, recurrent);
        config.plan.deterministic = deterministic;
        let shape = config.kv_layers.plan().shape();
        config.blocks = 12 * (30 * shape.span_blocks() + shape.state_blocks());
        let mut free = (0..config.blocks).rev();
        let mut batch = Batch::default();
        batch.clear();
        for (slot, (tokens, position, decode)) in (0u32..).zip(lengths) {
            let tokens: Vec<u32> = (0..if decode { 1 } else { tokens }).map(|i| 1000 * slot + i).collect();
            // What the windows still see, and one span more.
            let end = (position + tokens.len() as u32 + 2).div_ceil(16);
            let tables: Vec<(u32, Vec<u32>)> = shape
                .groups()
                .iter()
                .map(|group| {
                    let first = group.first_span(position, 16).saturating_sub(u32::from(more));
                    (first, free.by_ref().take(((end - first) * group.blocks) as usize).collect())
                })
                .collect();
            let row = batch.rows() as u32;
            let state: Vec<u32> = free.by_ref().take(shape.state_blocks() as usize).collect();
            let tables = tables.iter().map(|(first, blocks)| (*first, blocks.as_slice()));
            let drafts = &[1, 2][..if decode { 2 } else { 0 }];
            batch.push_tables(&tokens, drafts, position, tables, &state);
            if scores {
                batch.scores.push(ScoreRow { row, token: slot, top: 1 });
            }
            if decode {
                batch.sample_with_drafts(slot, 2);
            } else if slot % 2 == 0 {
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
        tables_lead_to_the_blocks(&batch, kv_layers, &step, &out)?;
        if recurrent {
            states_lead_to_the_blocks(&batch, kv_layers, &step, &out)?;
        }
        let slots = batch.sequences() as u32;
        let entries = kv_layers.table_entries(slots, 448, rows as u32);
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
    // The window and its key tile cover the maximum sequence length, so no block is freed.
    let config = config(&[None, Some(950)]);
    let rows = vec![SamplingRow { rows: 1, ..SamplingRow::default() }; 3];
    let graph_for = |rows, decodes| StepGraphs { sample_rows: 8, batch_tokens: 64 }.for_batch(rows, decodes);
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
    let graph_for = |rows, decodes| StepGraphs { sample_rows: 16, batch_tokens: 8 }.for_batch(rows, decodes);
    let step = packer.pack(&batch, &config, &rows, 0, graph_for, &mut out).unwrap();
    assert_eq!((step.rows, step.samples, step.graph), (8, 8, Some(StepGraph::Decode(8))));
    assert!(step.drafted && !step.mixed);
    assert_eq!(word(&out, step.layout.item_count(0)), 3);

    // A prompt with the same number of rows, of which only the last is sampled.
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
    batch.copies = [(1, 2), (1, 3), (3, 4), (5, 6), (7, 5)].map(|(from, to)| BlockCopy { from, to }).to_vec();
    let mut packer = MetadataPacker { copied: vec![[0; 2]; 8], ..MetadataPacker::default() };
    // The groups of a step do not depend on those of the step before.
    for _ in 0..2 {
        assert_eq!(packer.copy_groups(&batch), [(0, 2), (2, 4), (4, 5)]);
    }
}
