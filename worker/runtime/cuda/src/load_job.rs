//! Load job of a device thread: the GPU, and the shard to load on it.

use std::sync::Arc;

use inflight_models::ModelConfig;
use inflight_runtime as runtime;

use super::gpu_info::GpuInfo;
use super::kv_layers::KvLayers;
use super::nccl::NcclGroup;
use super::shard_plan::ShardPlan;
use super::{CudaOptions, Error as LoadError, weights};

/// Input of a device thread: the GPU, and what to load on it.
pub(super) struct LoadJob {
    pub(super) gpu_info: GpuInfo,
    /// Configuration of the unsharded model.
    pub(super) config: ModelConfig,
    pub(super) shard_plan: ShardPlan,
    pub(super) tensors: Arc<weights::SourceTensors>,
    pub(super) options: CudaOptions,
    pub(super) context_tokens: u32,
    /// KV memory of the shard.
    pub(super) kv_layers: KvLayers,
    /// Kernel images that files replace: families and digests; empty: none.
    pub(super) replaced_images: String,
    /// Communicators of the group; `None` without collectives.
    pub(super) group: Option<Arc<NcclGroup>>,
}

impl LoadJob {
    pub(super) fn rank(&self) -> usize {
        self.shard_plan.shard().rank
    }

    /// Fails the group, so that ranks waiting for this one stop.
    pub(super) fn fail(&self, reason: &str) {
        if let Some(group) = &self.group {
            group.fail(self.rank(), reason);
        }
    }

    /// Waits until all ranks have arrived, and returns the minimum of their values.
    pub(super) fn barrier_min(&self, value: u32) -> Result<u32, LoadError> {
        let min = self.group.as_ref().map_or(Ok(value), |group| group.barrier_min(value));
        min.map_err(|failure| LoadError::Device(failure.to_string()))
    }

    /// Returns the group's failure, if any.
    pub(super) fn failure(&self) -> Option<runtime::Error> {
        let failure = self.group.as_ref().and_then(|group| group.failure());
        failure.map(|failure| runtime::Error::Device(failure.to_string()))
    }
}
