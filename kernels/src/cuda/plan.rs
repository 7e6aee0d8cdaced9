use super::launch::{ATTENTION_SPLIT, ATTENTION_SPLIT_ROWS, whole_rows};
use super::params::AttentionItem;

/// Rows of a batch that belong to one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedSequence {
    /// First row in the batch.
    pub row: u32,
    /// Number of rows; at least 1.
    pub tokens: u32,
    /// Position of the first row.
    pub position: u32,
    /// Where its block table begins.
    pub table: u32,
}

/// What a plan depends on beside the sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanShape {
    /// Query heads that share a key head; at most 16.
    pub group: u32,
    /// Key heads.
    pub kv_heads: u32,
    /// Numbers of a head.
    pub head_dim: u32,
    /// Positions up to its own that a token sees, if fewer than all.
    pub window: Option<u32>,
    /// Everything goes the way of decoding, so that how a prompt is chunked doesn't show in a single bit.
    pub deterministic: bool,
    /// Blocks that the device runs at once.
    pub slots: u32,
    /// Partial results that there is room for.
    pub partials: u32,
}

/// How a batch's attention is cut up: made once a step, used in every layer of one window.
///
/// Whatever the cut, results are the same: splits of keys lie at absolute positions and are merged in their order.
#[derive(Debug, Default, Clone)]
pub struct AttentionPlan {
    items: Vec<AttentionItem>,
    mixed: bool,
    counters: u32,
    partials: u32,
}

impl AttentionPlan {
    /// The items, those that take longest first.
    pub fn items(&self) -> &[AttentionItem] {
        &self.items
    }

    /// Whether some items are of many rows, which decides on the kernel.
    pub fn is_mixed(&self) -> bool {
        self.mixed
    }

    /// Counters in use; at most one for each partial result.
    pub fn counters(&self) -> u32 {
        self.counters
    }

    /// Plans a batch, keeping its buffers.
    pub fn make(&mut self, sequences: &[PlannedSequence], shape: &PlanShape) {
        self.items.clear();
        (self.mixed, self.counters, self.partials) = (false, 0, 0);
        let split_tokens = (ATTENTION_SPLIT_ROWS / shape.group).max(1);
        let whole_tokens = (whole_rows(shape.head_dim) / shape.group).max(1);
        let whole = |sequence: &PlannedSequence| sequence.tokens > split_tokens && !shape.deterministic;
        // Splits of all tiles of few rows: what there is to share out.
        let all: u64 = sequences
            .iter()
            .filter(|sequence| !whole(sequence))
            .flat_map(|sequence| tiles(sequence, split_tokens))
            .map(|tile| u64::from(splits(&tile, shape.window).1))
            .sum();
        // With two waves of items the device is busy to the end, and each is as long as can be.
        let each = (all * u64::from(shape.kv_heads)).div_ceil(u64::from(2 * shape.slots.max(1))).max(1);
        let each = u32::try_from(each).unwrap_or(u32::MAX);
        for sequence in sequences {
            if whole(sequence) {
                self.mixed = true;
                self.items.extend(tiles(sequence, whole_tokens).map(|tile| AttentionItem {
                    whole: 1,
                    pieces: 1,
                    ..tile
                }));
            } else {
                for tile in tiles(sequence, split_tokens) {
                    self.cut(tile, shape, each);
                }
            }
        }
        let keys = |item: &AttentionItem| match item.whole {
            1 => u64::from(item.position + item.tokens) * u64::from(item.tokens.max(16)),
            _ => u64::from(item.split_end - item.split) * u64::from(ATTENTION_SPLIT),
        };
        self.items.sort_by_key(|item| (1 - item.whole, std::cmp::Reverse(keys(item))));
    }

    /// Appends the items of a tile of few rows, of about `each` splits.
    fn cut(&mut self, tile: AttentionItem, shape: &PlanShape, each: u32) {
        let (first, splits) = splits(&tile, shape.window);
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

/// The rows of a sequence in tiles of so many tokens.
fn tiles(sequence: &PlannedSequence, tokens: u32) -> impl Iterator<Item = AttentionItem> + use<> {
    let PlannedSequence { row, tokens: all, position, table } = *sequence;
    (0..all).step_by(tokens as usize).map(move |first| AttentionItem {
        row: row + first,
        tokens: tokens.min(all - first),
        position: position + first,
        table,
        ..AttentionItem::default()
    })
}

/// The first split that a tile sees, and how many.
fn splits(tile: &AttentionItem, window: Option<u32>) -> (u32, u32) {
    let low = window.map_or(0, |window| (tile.position + 1).saturating_sub(window));
    let first = low / ATTENTION_SPLIT;
    (first, (tile.position + tile.tokens).div_ceil(ATTENTION_SPLIT) - first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shape() -> impl Strategy<Value = PlanShape> {
        let window = prop_oneof![Just(None), (1u32..3000).prop_map(Some)];
        (1u32..=16, 1u32..=8, 0usize..4, window, any::<bool>(), 1u32..400, 0u32..200).prop_map(
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

    proptest! {
        #[test]
        fn a_plan_treats_every_row_and_every_key_it_sees_exactly_once(
            shape in shape(), lengths in prop::collection::vec((1u32..600, 0u32..5000), 0..12),
        ) {
            let mut sequences = Vec::new();
            let (mut row, mut table) = (0, 0);
            for (tokens, position) in lengths {
                sequences.push(PlannedSequence { row, tokens, position, table });
                (row, table) = (row + tokens, table + (position + tokens).div_ceil(16));
            }
            let mut plan = AttentionPlan::default();
            plan.make(&sequences, &shape);
            let mut seen = vec![Vec::new(); row as usize];
            let mut counts = vec![(0u32, 0u32); plan.counters() as usize];
            for item in plan.items() {
                let sequence = sequences.iter().rfind(|s| s.row <= item.row).unwrap();
                prop_assert!(item.row + item.tokens <= sequence.row + sequence.tokens);
                prop_assert_eq!(item.position, sequence.position + item.row - sequence.row);
                prop_assert_eq!(item.table, sequence.table);
                let bound = if item.whole == 1 { whole_rows(shape.head_dim) } else { ATTENTION_SPLIT_ROWS };
                prop_assert!(item.tokens == 1 || item.tokens * shape.group <= bound);
                if item.whole == 1 {
                    prop_assert!(!shape.deterministic);
                    seen[item.row as usize..][..item.tokens as usize].iter_mut().for_each(|s| s.push((0, u32::MAX)));
                    continue;
                }
                prop_assert!(item.split < item.split_end);
                for r in item.row..item.row + item.tokens {
                    seen[r as usize].push((item.split * ATTENTION_SPLIT, item.split_end * ATTENTION_SPLIT));
                }
                if item.pieces > 1 {
                    prop_assert!(item.partial + item.splits <= shape.partials);
                    counts[item.counter as usize].0 += 1;
                    counts[item.counter as usize].1 = item.pieces;
                }
            }
            for (have, want) in counts {
                prop_assert_eq!(have, want, "the last of a tile's items is never known");
            }
            for sequence in &sequences {
                for i in 0..sequence.tokens {
                    let position = sequence.position + i;
                    let low = shape.window.map_or(0, |w| (position + 1).saturating_sub(w));
                    let ranges = &mut seen[(sequence.row + i) as usize];
                    ranges.sort_unstable();
                    prop_assert!(ranges[0].0 <= low && ranges[ranges.len() - 1].1 > position);
                    prop_assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0));
                }
            }
        }
    }
}
