//! KV memory of the sequences: pools of the device and the host, prefix caches, block tables.

mod block_pool;
mod block_store;
mod chain;
mod prefix_cache;
mod snapshots;
mod tables;

pub use block_pool::Block;
pub(crate) use block_store::{BlockStore, FoundPrefix};
pub(crate) use prefix_cache::SealedSpan;
pub use prefix_cache::{CacheEvent, CacheTier};
pub(crate) use snapshots::SnapshotKind;
pub use snapshots::SnapshotShape;
pub(crate) use tables::Spans;
pub use tables::{GroupTable, Tables};
