//! Tensor-parallel shard plan: which part of the model each rank holds.

use std::sync::Arc;

use inflight_models::ModelConfig;
use inflight_runtime::sharding::Shard;

use super::shapes::ModelShapes;

/// Shards of all ranks, from the view of one of them.
#[derive(Debug, Clone)]
pub(super) struct ShardPlan {
    shards: Arc<[Shard]>,
    rank: usize,
    /// Whether the ranks run collectives; a single rank may run without.
    collective: bool,
}

impl ShardPlan {
    /// Returns one plan per rank, in rank order. `collective`: whether the ranks run collectives.
    pub(super) fn for_ranks(shards: Vec<Shard>, collective: bool) -> impl Iterator<Item = Self> {
        let shards: Arc<[Shard]> = shards.into();
        (0..shards.len()).map(move |rank| Self { shards: Arc::clone(&shards), rank, collective })
    }

    /// Returns this rank's shard.
    pub(super) fn shard(&self) -> &Shard {
        &self.shards[self.rank]
    }

    /// Returns all shards by rank, or `None` if the single rank runs without collectives.
    pub(super) fn collective_shards(&self) -> Option<&[Shard]> {
        self.collective.then_some(&*self.shards)
    }

    /// Number of ranks.
    pub(super) fn world(&self) -> usize {
        self.shards.len()
    }

    /// Returns the shapes of this rank's shard of a model.
    pub(super) fn shapes(&self, unsharded: &ModelConfig) -> ModelShapes {
        ModelShapes::new(&self.shard().config(unsharded), self.collective_shards())
    }
}
