//! Prefetching of the keys and values that are read after the current span.

use super::super::super::kv::{KvElement, TILE};
use super::super::super::simd::{Avx512, Simd};
use super::super::{AttentionTask, NextRange, window_start};
use super::shape::{BLOCK_QUERIES, SPAN, SPAN_TILES};
use super::source::COMPONENTS;

/// Prefetch addresses of a tile. Each step of the scores prefetches one cache line of its keys, and each pair
/// of positions two lines of its values, or one line twice for 8-bit elements.
#[derive(Clone, Copy)]
pub(super) struct TilePrefetch {
    keys: *const u8,
    /// Bytes between the steps' lines; 0 without a tile to prefetch.
    keys_step: usize,
    values: *const u8,
    values_step: usize,
}

impl TilePrefetch {
    /// Prefetch of a line that is always cached.
    pub const NONE: Self = Self {
        keys: (&raw const CACHED).cast(),
        keys_step: 0,
        values: (&raw const CACHED).cast(),
        values_step: 0,
    };

    /// Returns the address that step `step` of the scores prefetches.
    #[inline(always)]
    pub fn key_address(&self, step: usize) -> *const u8 {
        self.keys.wrapping_add(step * self.keys_step)
    }

    /// Returns the first address to prefetch while accumulating from component `d`, and the bytes per pair.
    #[inline(always)]
    pub fn value_addresses(&self, d: usize) -> (*const u8, usize) {
        (self.values.wrapping_add(d / COMPONENTS * (TILE / 2) * self.values_step), self.values_step)
    }
}

static CACHED: u64 = 0;

impl AttentionTask<'_> {
    /// Returns the range read from query `first` on: by the task's next queries, or by the next task.
    pub(super) fn range_after(&self, first: usize) -> Option<NextRange<'_>> {
        let group = self.shape.heads / self.shape.kv_heads;
        let all = (self.task.end - self.task.first) as usize * group;
        if first >= all {
            return self.next_range;
        }
        let visible_end = |i: usize| self.positions[self.task.first as usize + i / group] as usize + 1;
        let (low, high) =
            (window_start(visible_end(first), self.window), visible_end(all.min(first + BLOCK_QUERIES) - 1));
        Some(NextRange { kv_head: self.kv_head, table: self.table, low, high })
    }

    /// Returns the prefetches for the span at `base`, or for the start of `next_range` if `base >= high`.
    #[inline(always)]
    pub(super) unsafe fn span_prefetch<N: KvElement>(
        &self,
        base: usize,
        high: usize,
        next_range: Option<NextRange<'_>>,
    ) -> [TilePrefetch; SPAN_TILES] {
        let (kv_head, table) = (self.kv_head, self.table);
        let (next_range, base) = match next_range {
            _ if base < high => (NextRange { kv_head, table, low: base, high }, base),
            Some(next_range) => (next_range, next_range.low / SPAN * SPAN),
            None => return [TilePrefetch::NONE; SPAN_TILES],
        };
        let (layout, tokens) = (&self.layout, self.layout.block_tokens);
        let mut prefetches = [TilePrefetch::NONE; SPAN_TILES];
        for (t, prefetch) in prefetches.iter_mut().enumerate() {
            let at = base + t * TILE;
            if tokens < TILE || at + TILE <= next_range.low || at >= next_range.high {
                continue;
            }
            let offset = at % tokens;
            // SAFETY: AVX-512 is available in this kernel, and prefetching never faults.
            unsafe {
                let head = layout.keys(next_range.table.at(at / tokens), next_range.kv_head);
                let head = self.kv.wrapping_add(head).cast::<N>();
                // Tiles of one block share lines: one prefetches even rows of keys, the next odd ones.
                let keys = head.wrapping_add(offset / TILE % 2 * tokens + offset);
                let values = head.wrapping_add(layout.values_after_keys() + offset * layout.value_stride());
                *prefetch = TilePrefetch {
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
        prefetches
    }
}
