//! What queries see of a span, and how it is weighed.

use super::super::super::kv::TILE;
use super::{SPAN, SPAN_TILES};

/// The positions of a span, or of a tile, that a query sees: from and to.
pub(super) type Seen = (usize, usize);

/// A bit for each position of a span that is seen, the lowest one for the first.
#[inline(always)]
pub(super) fn bits(seen: Seen) -> u64 {
    let upto = |end: usize| if end == SPAN { u64::MAX } else { (1 << end) - 1 };
    upto(seen.1) & !upto(seen.0)
}

/// Ranges of pairs of a tile's positions, from and to, in the order in which they are weighed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ranges {
    /// Some queries may see something of these, and of those behind `all`.
    pub before: (usize, usize),
    /// All queries see all of these.
    pub all: (usize, usize),
    pub behind: (usize, usize),
}

impl Ranges {
    pub const ALL: Self = Self { before: (0, 0), all: (0, TILE / 2), behind: (0, 0) };
}

/// The pairs of each tile of a span of which these queries see something. What they see ascends, so that all see what the first and
/// the last one see.
#[inline(always)]
pub(super) fn ranges<const Q: usize>(seen: &[Seen; Q]) -> [Ranges; SPAN_TILES] {
    let (first, last) = (seen[0], seen[Q - 1]);
    let mut ranges = [Ranges::ALL; SPAN_TILES];
    for (t, ranges) in ranges.iter_mut().enumerate() {
        let (all, any) = (within((last.0, first.1), t), within((first.0, last.1), t));
        let any = (any.0 / 2, any.1.div_ceil(2));
        let (from, to) = (all.0.div_ceil(2), all.1 / 2);
        // Where they share nothing, everything is before it.
        let all = if from < to { (from, to) } else { (TILE / 2, TILE / 2) };
        *ranges = Ranges { before: (any.0, all.0.min(any.1)), all, behind: (all.1, any.1) };
    }
    ranges
}

/// The part of what is `seen` of a span that is in its tile `t`.
#[inline(always)]
fn within(seen: Seen, t: usize) -> Seen {
    let upto = |end: usize| end.saturating_sub(t * TILE).min(TILE);
    (upto(seen.0), upto(seen.1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const Q: usize = 5;

    proptest! {
        #[test]
        fn what_queries_see_is_weighed_once_and_in_order(
            low in 0..70usize,
            steps in prop::array::uniform5((0..20usize, 0..20usize)),
            window in 0..80usize,
        ) {
            // Neither end ever goes back; beyond the span, nothing is seen.
            let (mut from, mut to) = (low, low + window);
            let seen: [Seen; Q] = steps.map(|(lows, highs)| {
                (from, to) = (from + lows, (to + highs).max(from + lows));
                (from.min(SPAN), to.min(SPAN))
            });
            for (t, ranges) in ranges(&seen).into_iter().enumerate() {
                let seen = seen.map(|seen| bits(seen) >> (t * TILE) & 0xffff);
                let sees = |i: usize, pair: usize| seen[i] >> (2 * pair) & 3;
                for pair in ranges.all.0..ranges.all.1 {
                    prop_assert!((0..Q).all(|i| sees(i, pair) == 3), "{ranges:?}: {pair} of {seen:x?}");
                }
                let weighed: Vec<usize> =
                    [ranges.before, ranges.all, ranges.behind].into_iter().flat_map(|(from, to)| from..to).collect();
                prop_assert!(weighed.is_sorted_by(|a, b| a < b), "{ranges:?}");
                for pair in 0..TILE / 2 {
                    let needed = (0..Q).any(|i| sees(i, pair) != 0);
                    prop_assert!(!needed || weighed.contains(&pair), "{ranges:?}: {pair} of {seen:x?}");
                }
            }
        }
    }
}
