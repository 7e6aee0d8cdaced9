//! Work decomposition of attention on a GPU: whole-range items for prefill, split-KV items for decoding.

use super::launch::{ATTENTION_SPLIT, ATTENTION_SPLIT_ROWS, whole_rows};
use super::params::AttentionItem;

/// Rows of a ragged batch that belong to one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedSequence {
    /// Index of the sequence's first row in the batch.
    pub row: u32,
    /// Number of rows; at least 1.
    pub tokens: u32,
    /// Position of the first row in the sequence.
    pub position: u32,
    /// Offset of the sequence's block table in the concatenated tables.
    pub table: u32,
    /// Whether the sequence uses the decode kernel whatever its number of rows, as a decode with drafts does.
    pub decode: bool,
}

/// Model shape and device limits of an attention plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanShape {
    /// Query heads that share a key head; at most 16.
    pub group: u32,
    /// Number of key heads.
    pub kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// Sliding window in positions, including the token's own; `None` is unlimited.
    pub window: Option<u32>,
    /// Whether every row takes the decode kernel, so that prefill chunking does not change a bit.
    pub deterministic: bool,
    /// Attention blocks that are resident at once on the device.
    pub slots: u32,
    /// Capacity for partial results, in splits.
    pub partials: u32,
}

impl PlanShape {
    /// Returns the maximum number of items of a plan for `rows` rows: one for each tile, of which there are no more than rows, and
    /// the further pieces of tiles with many keys.
    pub fn items_max(&self, rows: u32) -> u32 {
        // A piece has at least 1 / (2 * slots) of the splits of all key heads, but for the last of each tile.
        let pieces = 2 * self.slots.max(1) / self.kv_heads;
        rows.saturating_add(pieces.min(self.partials))
    }
}

/// Decomposition of a batch's attention into items, made once a step for all layers with one window.
///
/// Key splits start at absolute positions and are merged in order, so results depend on nothing but the length of
/// the splits: [`ATTENTION_SPLIT`] in the deterministic mode, and otherwise the one with the least estimated time.
#[derive(Debug, Default, Clone)]
pub struct AttentionPlan {
    items: Vec<AttentionItem>,
    mixed: bool,
    counters: u32,
    partials: u32,
}

impl AttentionPlan {
    /// Returns the items, longest first.
    pub fn items(&self) -> &[AttentionItem] {
        &self.items
    }

    /// Returns whether some items take their whole key range, which selects the mixed kernel.
    pub fn is_mixed(&self) -> bool {
        self.mixed
    }

    /// Returns the number of completion counters in use; at most one per partial result.
    pub fn counters(&self) -> u32 {
        self.counters
    }

    /// Plans a batch; reuses the item buffer.
    pub fn make(&mut self, sequences: &[PlannedSequence], shape: &PlanShape) {
        self.items.clear();
        (self.mixed, self.counters, self.partials) = (false, 0, 0);
        let split_tokens = (ATTENTION_SPLIT_ROWS / shape.group).max(1);
        let whole_tokens = (whole_rows(shape.head_dim) / shape.group).max(1);
        let whole = |sequence: &PlannedSequence| {
            sequence.tokens > split_tokens && !shape.deterministic && !sequence.decode
        };
        let decodes = || {
            let sequences = sequences.iter().filter(|sequence| !whole(sequence));
            sequences.flat_map(|sequence| tiles(sequence, split_tokens))
        };
        let (split_keys, each) = DecodeTiles::new(decodes, shape).division();
        for sequence in sequences {
            if whole(sequence) {
                self.mixed = true;
                let tiles = tiles(sequence, whole_tokens);
                self.items.extend(tiles.map(|tile| AttentionItem { split_keys: 0, pieces: 1, ..tile }));
            } else {
                for tile in tiles(sequence, split_tokens) {
                    self.push_split_items(AttentionItem { split_keys, ..tile }, shape, each);
                }
            }
        }
        let keys = |item: &AttentionItem| match item.split_keys {
            0 => u64::from(item.position + item.tokens) * u64::from(item.tokens.max(16)),
            keys => u64::from((item.split_end * keys).min(item.position + item.tokens) - item.split * keys),
        };
        self.items.sort_by_key(|item| (item.split_keys, std::cmp::Reverse(keys(item))));
    }

    /// Appends the items of a decode tile, each of about `each` splits.
    fn push_split_items(&mut self, tile: AttentionItem, shape: &PlanShape, each: u32) {
        let (first, splits) = splits(&tile, shape.window, tile.split_keys);
        let mut pieces = splits.div_ceil(each);
        if pieces > 1 && shape.partials - self.partials < splits {
            pieces = 1;
        }
        let whole = AttentionItem { first_split: first, splits, pieces, ..tile };
        if pieces == 1 {
            self.items.push(AttentionItem { split: first, split_end: first + splits, ..whole });
            return;
        }
        for piece in 0..pieces {
            self.items.push(AttentionItem {
                split: first + splits * piece / pieces,
                split_end: first + splits * (piece + 1) / pieces,
                partial: self.partials,
                counter: self.counters,
                ..whole
            });
        }
        self.partials += splits;
        self.counters += 1;
    }
}

/// Nanoseconds in which a thread block begins and ends an item: plan, block table and first keys are loaded one after the other,
/// and the warps are merged. These times are of an H100, where the test below has what was measured; only their ratios matter.
const ITEM_NS: u64 = 2_400;
/// Nanoseconds that a block alone on its multiprocessor takes for a key.
const LONE_KEY_NS: u64 = 16;
/// Nanoseconds that a multiprocessor with several blocks takes for a key: its share of the memory's bandwidth.
const KEY_NS: u64 = 22;
/// Nanoseconds in which the last block of a tile takes in a partial result.
const PARTIAL_NS: u64 = 280;
/// Lengths of splits outside of the deterministic mode: a longer one has fewer partial results.
const SPLIT_LENGTHS: [u32; 7] = [4096, 2048, 1024, 512, 256, 128, 64];

/// Decode tiles of a batch, with the cost model that chooses their split length and splits per item.
struct DecodeTiles<'a, F> {
    tiles: F,
    shape: &'a PlanShape,
    /// Keys of all tiles, and of the longest.
    keys: (u64, u64),
}

impl<'a, I: Iterator<Item = AttentionItem>, F: Fn() -> I> DecodeTiles<'a, F> {
    fn new(tiles: F, shape: &'a PlanShape) -> Self {
        let keys = tiles().fold((0u64, 0u64), |(all, most), tile| {
            let keys = tile_keys(&tile, shape.window);
            (all + keys, most.max(keys))
        });
        Self { tiles, shape, keys }
    }

    fn slots(&self) -> u64 {
        self.shape.slots.max(1).into()
    }

    /// Returns the splits of each tile.
    fn splits(&self, split_keys: u32) -> impl Iterator<Item = u64> {
        (self.tiles)().map(move |tile| splits(&tile, self.shape.window, split_keys).1.into())
    }

    /// Returns the least splits of an item with which a plan has about `rounds` items for each block.
    fn splits_of_an_item(&self, split_keys: u32, rounds: u64) -> u64 {
        let all: u64 = self.splits(split_keys).sum();
        (all * u64::from(self.shape.kv_heads)).div_ceil(rounds * self.slots()).max(1)
    }

    /// Estimates the nanoseconds of attention with items of at most `each` splits.
    fn nanoseconds(&self, split_keys: u32, each: u64) -> u64 {
        let heads = u64::from(self.shape.kv_heads);
        let (items, most) = self
            .splits(split_keys)
            .fold((0, 0), |(items, most), splits| (items + splits.div_ceil(each) * heads, splits.max(most)));
        let rounds = items.div_ceil(self.slots());
        // Two blocks share a multiprocessor, or more.
        let processors = (self.slots() / 2).max(1);
        let (shared, item) = (items.div_ceil(processors), (each * u64::from(split_keys)).min(self.keys.1));
        // Items of one length end together; of many lengths, longest first, the last one ends at most an item later than the mean.
        let read = match shared {
            0 | 1 => item * LONE_KEY_NS,
            _ => (shared * item).min((self.keys.0 * heads).div_ceil(processors) + item) * KEY_NS,
        };
        let merged = if most > each { most * PARTIAL_NS } else { 0 };
        rounds * ITEM_NS + read + merged
    }

    /// Returns the keys per split and the splits per item: [`ATTENTION_SPLIT`] keys in the deterministic mode, otherwise the
    /// pair with the least estimated time. There are at most about two items per resident block, which bounds the plan.
    fn division(&self) -> (u32, u32) {
        let narrow = |each: u64| u32::try_from(each).unwrap_or(u32::MAX);
        if self.shape.deterministic {
            return (ATTENTION_SPLIT, narrow(self.splits_of_an_item(ATTENTION_SPLIT, 2)));
        }
        // Of the lengths that leave all tiles whole, one is enough.
        let longest = SPLIT_LENGTHS.into_iter().rposition(|keys| u64::from(keys) >= self.keys.1).unwrap_or(0);
        let mut best = (u64::MAX, SPLIT_LENGTHS[0], 1);
        for split_keys in SPLIT_LENGTHS.into_iter().skip(longest) {
            for rounds in [1, 2] {
                let each = self.splits_of_an_item(split_keys, rounds);
                let time = self.nanoseconds(split_keys, each);
                if time < best.0 {
                    best = (time, split_keys, each);
                }
            }
        }
        (best.1, narrow(best.2))
    }
}

/// Yields the rows of a sequence in tiles of at most `tokens` tokens.
fn tiles(sequence: &PlannedSequence, tokens: u32) -> impl Iterator<Item = AttentionItem> + use<> {
    let PlannedSequence { row, tokens: all, position, table, .. } = *sequence;
    (0..all).step_by(tokens as usize).map(move |first| AttentionItem {
        row: row + first,
        tokens: tokens.min(all - first),
        position: position + first,
        table,
        ..AttentionItem::default()
    })
}

/// Returns the keys that some row of a tile sees.
fn tile_keys(tile: &AttentionItem, window: Option<u32>) -> u64 {
    let low = window.map_or(0, |window| (tile.position + 1).saturating_sub(window));
    u64::from(tile.position + tile.tokens - low)
}

/// Returns the first visible key split of a tile and the number of visible splits.
fn splits(tile: &AttentionItem, window: Option<u32>, split_keys: u32) -> (u32, u32) {
    let low = window.map_or(0, |window| (tile.position + 1).saturating_sub(window));
    let first = low / split_keys;
    (first, (tile.position + tile.tokens).div_ceil(split_keys) - first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape() -> impl Strategy<Value = PlanShape> {
        let window = prop_oneof![Just(None), (1u32..3000).prop_map(Some)];
        (1u32..=16, 1u32..=8, 0usize..2, window, any::<bool>(), 1u32..400, 0u32..200).prop_map(
            |(group, kv_heads, head_dim, window, deterministic, slots, partials)| PlanShape {
                group,
                kv_heads,
                head_dim: super::super::HEAD_DIMS[head_dim],
                window,
                deterministic,
                slots,
                partials,
            },
        )
    }

    /// Microseconds of the attention of one layer of Llama-3.1-8B with 16-bit keys and values, measured on an H100 (2026-11-27).
    #[test]
    fn estimated_times_are_near_those_measured() {
        let shape = PlanShape {
            group: 4,
            kv_heads: 8,
            head_dim: 128,
            window: None,
            deterministic: false,
            slots: 264,
            partials: 1024,
        };
        for (sequences, keys, split_keys, measured) in [
            (1, 1024, 64, 7.8),
            (8, 1024, 256, 17.3),
            (64, 1024, 1024, 93.8),
            (256, 1024, 1024, 357.8),
            (1, 4096, 128, 13.4),
            (1, 32_768, 1024, 53.6),
        ] {
            let sequence = PlannedSequence { row: 0, tokens: 1, position: keys - 1, table: 0, decode: true };
            let decodes = || (0..sequences).flat_map(|_| tiles(&sequence, 4));
            let estimate = DecodeTiles::new(decodes, &shape).nanoseconds(split_keys, 1) as f64 / 1e3;
            let ratio: f64 = estimate / measured;
            assert!((0.75..1.3).contains(&ratio), "{sequences} x {keys}: {estimate} us, not {measured}");
        }
    }

    proptest! {
        #[test]
        fn where_blocks_are_many_each_has_few_keys_of_few_sequences(
            slots in 64u32..400, kv_heads in 1u32..=8, sequences in 1u32..=4,
            position in prop_oneof![4 => 0u32..4000, 1 => (6u32..12).prop_map(|power| 1 << power)],
        ) {
            let shape = PlanShape {
                group: 4, kv_heads, head_dim: 128, window: None, deterministic: false, slots, partials: 1024,
            };
            let sequences: Vec<_> = (0..sequences)
                .map(|row| PlannedSequence { row, tokens: 1, position, table: 0, decode: true })
                .collect();
            let mut plan = AttentionPlan::default();
            plan.make(&sequences, &shape);
            let keys = |item: &AttentionItem| (item.split_end * item.split_keys).min(position + 1) - item.split * item.split_keys;
            let share = (position + 1) * kv_heads * sequences.len() as u32 / slots;
            let longest = plan.items().iter().map(keys).max().unwrap();
            prop_assert!(longest <= 512 + 4 * share, "{} keys of {}, a share is {}", longest, position + 1, share);
        }

        #[test]
        fn a_plan_covers_every_row_and_every_visible_key_exactly_once(
            shape in shape(), lengths in prop::collection::vec((1u32..600, 0u32..5000, any::<bool>()), 0..12),
        ) {
            let mut sequences = Vec::new();
            let (mut row, mut table) = (0, 0);
            for (tokens, position, decode) in lengths {
                sequences.push(PlannedSequence { row, tokens, position, table, decode });
                (row, table) = (row + tokens, table + (position + tokens).div_ceil(16));
            }
            let mut plan = AttentionPlan::default();
            plan.make(&sequences, &shape);
            prop_assert!(plan.items().len() <= shape.items_max(row) as usize);
            let mut covered = vec![Vec::new(); row as usize];
            let mut counts = vec![(0u32, 0u32); plan.counters() as usize];
            for item in plan.items() {
                let sequence = sequences.iter().rfind(|s| s.row <= item.row).unwrap();
                prop_assert!(item.row + item.tokens <= sequence.row + sequence.tokens);
                prop_assert_eq!(item.position, sequence.position + item.row - sequence.row);
                prop_assert_eq!(item.table, sequence.table);
                let bound = if item.split_keys == 0 { whole_rows(shape.head_dim) } else { ATTENTION_SPLIT_ROWS };
                prop_assert!(item.tokens == 1 || item.tokens * shape.group <= bound);
                if item.split_keys == 0 {
                    prop_assert!(!shape.deterministic && !sequence.decode);
                    covered[item.row as usize..][..item.tokens as usize].iter_mut().for_each(|s| s.push((0, u32::MAX)));
                    continue;
                }
                prop_assert!(item.split < item.split_end);
                prop_assert!(SPLIT_LENGTHS.contains(&item.split_keys));
                prop_assert!(item.split_keys == ATTENTION_SPLIT || !shape.deterministic);
                for r in item.row..item.row + item.tokens {
                    covered[r as usize].push((item.split * item.split_keys, item.split_end * item.split_keys));
                }
                if item.pieces > 1 {
                    prop_assert!(item.partial + item.splits <= shape.partials);
                    counts[item.counter as usize].0 += 1;
                    counts[item.counter as usize].1 = item.pieces;
                }
            }
            for (have, want) in counts {
                prop_assert_eq!(have, want, "a tile's completion counter never reaches its pieces");
            }
            for sequence in &sequences {
                for i in 0..sequence.tokens {
                    let position = sequence.position + i;
                    let low = shape.window.map_or(0, |w| (position + 1).saturating_sub(w));
                    let ranges = &mut covered[(sequence.row + i) as usize];
                    ranges.sort_unstable();
                    prop_assert!(ranges[0].0 <= low && ranges[ranges.len() - 1].1 > position);
                    prop_assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0));
                }
            }
        }
    }
}
