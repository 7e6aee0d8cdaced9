//! Metrics of the groups of layers that keep the same positions, and of recurrent states.

use inflight_runtime::{GroupMemory, RuntimeFacts};
use inflight_worker_core::LayerGroup;
use metrics::Gauge;

use super::{GROUP_BLOCKS, GROUP_LAYERS, GROUP_SPAN_BLOCKS, GROUP_UNUSED, SNAPSHOTS, STATE_BLOCKS};

/// Handles of the metrics of each group; none for a model whose layers all keep all positions.
pub(crate) struct GroupMetrics {
    groups: Vec<Gauge>,
    /// Blocks of states, and snapshots; `None` for a model without recurrent layers.
    states: Option<(Gauge, Gauge)>,
}

impl GroupMetrics {
    /// Creates the handles, and sets the gauges of the memory plan.
    pub fn new(facts: &RuntimeFacts, has_states: bool) -> Self {
        let handle = |memory: &GroupMemory| {
            let group = label(memory.group);
            metrics::gauge!(GROUP_LAYERS, "group" => group.clone()).set(memory.layers as f64);
            metrics::gauge!(GROUP_SPAN_BLOCKS, "group" => group.clone()).set(memory.group.blocks);
            let unused = memory.unused * u64::from(facts.ranks);
            metrics::gauge!(GROUP_UNUSED, "group" => group.clone()).set(unused as f64);
            metrics::gauge!(GROUP_BLOCKS, "group" => group)
        };
        Self {
            groups: facts.groups.iter().map(handle).collect(),
            states: has_states.then(|| (metrics::gauge!(STATE_BLOCKS), metrics::gauge!(SNAPSHOTS))),
        }
    }

    /// Sets the gauges of the blocks in use, which are not counted for a model without groups.
    pub fn record<const N: usize>(&self, blocks: impl FnOnce() -> [u32; N]) {
        if !self.groups.is_empty() {
            self.groups.iter().zip(blocks()).for_each(|(gauge, blocks)| gauge.set(blocks));
        }
    }

    /// Sets the gauges of the blocks of states and of the snapshots, which are not counted for a model without recurrent layers.
    pub fn record_states(&self, used: impl FnOnce() -> (u32, u32)) {
        if let Some((blocks, snapshots)) = &self.states {
            let used = used();
            blocks.set(used.0);
            snapshots.set(used.1);
        }
    }
}

/// Returns the value of the label `group`.
fn label(group: LayerGroup) -> String {
    group.window.map_or_else(|| "all".to_owned(), |window| format!("window {window}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_group_and_states_have_their_gauges_and_a_model_without_them_none() {
        let group = |blocks, window| LayerGroup { blocks, window };
        let groups = vec![
            GroupMemory { layers: 4, group: group(1, None), bytes: 4096, unused: 0 },
            GroupMemory { layers: 22, group: group(6, Some(1024)), bytes: 22 * 1024, unused: 2048 },
        ];
        let rendered = |groups: Vec<GroupMemory>, has_states: bool| {
            let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
            metrics::with_local_recorder(&recorder, || {
                let facts = RuntimeFacts { ranks: 2, groups, ..RuntimeFacts::default() };
                let metrics = GroupMetrics::new(&facts, has_states);
                metrics.record(|| [40, 18, 0, 0]);
                metrics.record_states(|| (290, 7));
            });
            recorder.handle().render()
        };
        let text = rendered(groups, true);
        for line in [
            "inflight_worker_kv_group_layers{group=\"all\"} 4",
            "inflight_worker_kv_group_blocks{group=\"all\"} 40",
            "inflight_worker_kv_group_blocks{group=\"window 1024\"} 18",
            "inflight_worker_kv_group_span_blocks{group=\"window 1024\"} 6",
            "inflight_worker_kv_group_unused_bytes{group=\"window 1024\"} 4096",
            "inflight_worker_kv_state_blocks 290",
            "inflight_worker_kv_snapshots 7",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is not in:\n{text}");
        }
        assert_eq!(rendered(Vec::new(), false), "");
    }
}
