use std::sync::Arc;

use super::sizing::Shapes;
use crate::models::ModelConfig;
use crate::runtime::sharding::Shard;

/// A rank's part of a model, among those of all ranks.
#[derive(Debug, Clone)]
pub(super) struct Division {
    shards: Arc<[Shard]>,
    rank: usize,
    /// What ranks compute is brought together; a single one may do without.
    grouped: bool,
}

impl Division {
    /// The parts of all ranks, by rank.
    pub(super) fn of(shards: Vec<Shard>, grouped: bool) -> impl Iterator<Item = Self> {
        let shards: Arc<[Shard]> = shards.into();
        (0..shards.len()).map(move |rank| Self { shards: Arc::clone(&shards), rank, grouped })
    }

    /// This rank's part.
    pub(super) fn shard(&self) -> &Shard {
        &self.shards[self.rank]
    }

    /// The parts of all ranks, if what they compute is brought together.
    pub(super) fn group(&self) -> Option<&[Shard]> {
        self.grouped.then_some(&*self.shards)
    }

    /// Number of ranks.
    pub(super) fn world(&self) -> usize {
        self.shards.len()
    }

    /// Shapes of what this rank computes.
    pub(super) fn shapes(&self, whole: &ModelConfig) -> Shapes {
        Shapes::of(&self.shard().config(whole), self.group())
    }
}
