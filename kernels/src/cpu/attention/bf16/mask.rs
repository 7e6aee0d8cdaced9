//! Causal and sliding-window masks of a span, as ranges of visible positions.

use super::super::super::kv::TILE;
use super::shape::{SPAN, SPAN_TILES};

/// Visible positions of a span or of a tile: start and exclusive end.
pub(super) type VisibleRange = (usize, usize);

/// Returns a bit mask of the visible positions of a span, lowest bit first.
#[inline(always)]
pub(super) fn visible_mask(visible: VisibleRange) -> u64 {
    let upto = |end: usize| if end == SPAN { u64::MAX } else { (1 << end) - 1 };
    upto(visible.1) & !upto(visible.0)
}

/// Ranges of position pairs of a tile, start and exclusive end, in the order of accumulation.
#[derive(Debug, Clone, Copy)]
pub(super) struct PairRanges {
    /// Pairs visible in part or to some queries, before `all`.
    pub before: (usize, usize),
    /// Pairs fully visible to all queries.
    pub all: (usize, usize),
    /// Pairs visible in part or to some queries, after `all`.
    pub after: (usize, usize),
}

impl PairRanges {
    pub const ALL: Self = Self { before: (0, 0), all: (0, TILE / 2), after: (0, 0) };
}

/// Returns, per tile of a span, the pairs visible to these queries. Visible ranges ascend, so positions
/// visible to the first and the last query are visible to all.
#[inline(always)]
pub(super) fn pair_ranges<const Q: usize>(visible: &[VisibleRange; Q]) -> [PairRanges; SPAN_TILES] {
    let (first, last) = (visible[0], visible[Q - 1]);
    let mut pair_ranges = [PairRanges::ALL; SPAN_TILES];
    for (t, pair_ranges) in pair_ranges.iter_mut().enumerate() {
        let (all, any) = (within((last.0, first.1), t), within((first.0, last.1), t));
        let any = (any.0 / 2, any.1.div_ceil(2));
        let (from, to) = (all.0.div_ceil(2), all.1 / 2);
        // Without common positions, every pair is in `before`.
        let all = if from < to { (from, to) } else { (TILE / 2, TILE / 2) };
        *pair_ranges = PairRanges { before: (any.0, all.0.min(any.1)), all, after: (all.1, any.1) };
    }
    pair_ranges
}

/// Returns the part of `visible` that lies in tile `t` of the span.
#[inline(always)]
fn within(visible: VisibleRange, t: usize) -> VisibleRange {
    let upto = |end: usize| end.saturating_sub(t * TILE).min(TILE);
    (upto(visible.0), upto(visible.1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const Q: usize = 5;

    proptest! {
        #[test]
        fn visible_positions_are_accumulated_once_and_in_order(
            low in 0..70usize,
            steps in prop::array::uniform5((0..20usize, 0..20usize)),
            window in 0..80usize,
        ) {
            // Neither end ever decreases; beyond the span, nothing is visible.
            let (mut from, mut to) = (low, low + window);
            let visible: [VisibleRange; Q] = steps.map(|(lows, highs)| {
                (from, to) = (from + lows, (to + highs).max(from + lows));
                (from.min(SPAN), to.min(SPAN))
            });
            for (t, pair_ranges) in pair_ranges(&visible).into_iter().enumerate() {
                let visible = visible.map(|visible| visible_mask(visible) >> (t * TILE) & 0xffff);
                let sees = |i: usize, pair: usize| visible[i] >> (2 * pair) & 3;
                for pair in pair_ranges.all.0..pair_ranges.all.1 {
                    prop_assert!((0..Q).all(|i| sees(i, pair) == 3), "{pair_ranges:?}: {pair} of {visible:x?}");
                }
                let accumulated: Vec<usize> =
                    [pair_ranges.before, pair_ranges.all, pair_ranges.after].into_iter().flat_map(|(from, to)| from..to).collect();
                prop_assert!(accumulated.is_sorted_by(|a, b| a < b), "{pair_ranges:?}");
                for pair in 0..TILE / 2 {
                    let needed = (0..Q).any(|i| sees(i, pair) != 0);
                    prop_assert!(!needed || accumulated.contains(&pair), "{pair_ranges:?}: {pair} of {visible:x?}");
                }
            }
        }
    }
}
