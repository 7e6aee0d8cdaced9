//! What is read after the span at work, and is asked for meanwhile.

use super::super::super::kv::{Number, TILE};
use super::super::super::simd::{Avx512, Simd};
use super::super::{Attend, Then, lowest};
use super::source::PART;
use super::{BLOCK_QUERIES, SPAN, SPAN_TILES};

/// A tile that is read soon. Each step of the scores asks for a line of its keys, and each pair of values weighed for two lines of its
/// values, or for the same one twice where numbers are bytes.
#[derive(Clone, Copy)]
pub(super) struct Coming {
    keys: *const u8,
    /// Bytes from one step to the next; 0 where nothing comes.
    keys_step: usize,
    values: *const u8,
    values_step: usize,
}

impl Coming {
    /// A line that is there.
    pub const NONE: Self = Self {
        keys: (&raw const NOTHING).cast(),
        keys_step: 0,
        values: (&raw const NOTHING).cast(),
        values_step: 0,
    };

    /// What a step of the scores asks for.
    #[inline(always)]
    pub fn keys_of(&self, step: usize) -> *const u8 {
        self.keys.wrapping_add(step * self.keys_step)
    }

    /// What the pairs of positions ask for that are weighed with components from `d` on.
    #[inline(always)]
    pub fn values_of(&self, d: usize) -> (*const u8, usize) {
        (self.values.wrapping_add(d / PART * (TILE / 2) * self.values_step), self.values_step)
    }
}

static NOTHING: u64 = 0;

impl Attend<'_> {
    /// What is read after the queries before `first`: what the task's next ones see, or what comes after the task.
    pub(super) fn after(&self, first: usize) -> Option<Then<'_>> {
        let group = self.shape.heads / self.shape.kv_heads;
        let all = (self.task.end - self.task.first) as usize * group;
        if first >= all {
            return self.then;
        }
        let sees = |i: usize| self.positions[self.task.first as usize + i / group] as usize + 1;
        let (low, high) = (lowest(sees(first), self.window), sees(all.min(first + BLOCK_QUERIES) - 1));
        Some(Then { kv_head: self.kv_head, table: self.table, low, high })
    }

    /// The tiles of the span at `base`, if that is before `high`, and else the first ones of what is read `then`.
    #[inline(always)]
    pub(super) unsafe fn coming<N: Number>(
        &self,
        base: usize,
        high: usize,
        then: Option<Then<'_>>,
    ) -> [Coming; SPAN_TILES] {
        let (kv_head, table) = (self.kv_head, self.table);
        let (then, base) = match then {
            _ if base < high => (Then { kv_head, table, low: base, high }, base),
            Some(then) => (then, then.low / SPAN * SPAN),
            None => return [Coming::NONE; SPAN_TILES],
        };
        let (layout, tokens) = (&self.layout, self.layout.block_tokens);
        let mut coming = [Coming::NONE; SPAN_TILES];
        for (t, coming) in coming.iter_mut().enumerate() {
            let at = base + t * TILE;
            if tokens < TILE || at + TILE <= then.low || at >= then.high {
                continue;
            }
            let offset = at % tokens;
            // SAFETY: asking reads nothing.
            unsafe {
                let head = layout.keys(then.table[at / tokens], self.layer, then.kv_head);
                let head = self.kv.cast::<N>().wrapping_add(head);
                // Where blocks are larger than tiles, tiles share lines: one asks for the even rows of keys, the next for the odd ones.
                let keys = head.wrapping_add(offset / TILE % 2 * tokens + offset);
                let values = head.wrapping_add(layout.values_after_keys() + offset * layout.value_stride());
                *coming = Coming {
                    keys: keys.cast(),
                    keys_step: 2 * tokens * size_of::<N>(),
                    values: values.cast(),
                    values_step: 64 * size_of::<N>(),
                };
                if N::SCALED {
                    let scales = head.wrapping_add(layout.scales_after_keys()).cast::<f32>();
                    Avx512::prefetch(scales.wrapping_add(offset).cast());
                    Avx512::prefetch(scales.wrapping_add(tokens + offset).cast());
                }
            }
        }
        coming
    }
}
