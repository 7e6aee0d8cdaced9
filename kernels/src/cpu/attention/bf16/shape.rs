//! Sizes of spans and of query blocks.

use super::super::super::kv::TILE;

/// Positions of a span.
pub(super) const SPAN: usize = 64;
/// Tiles of a span.
pub(super) const SPAN_TILES: usize = SPAN / TILE;
/// Queries that pass over the keys together.
pub(super) const BLOCK_QUERIES: usize = 64;
const _: () = assert!(BLOCK_QUERIES.is_multiple_of(QUERIES));
/// Queries whose accumulators are in registers at once.
pub(super) const QUERIES: usize = 8;
