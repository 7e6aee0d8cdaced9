//! CUDA graphs of steps: which rows they are captured for, and which one a batch runs.
//!
//! A graph has fixed grids, so a batch is padded to the rows of the next larger graph. The graph of a decode step is its whole
//! forward pass. Other steps have any number of sampled and scored rows: their graph is embedding and layers, and the kernels of
//! their logits are launched after it. Steps of more than [`LAYER_ROWS_MAX`] rows run without a graph: a layer is expected to
//! take longer on the GPU than its launches on the CPU, so padding would cost more than a graph saves.

/// Row counts of the graphs of decode steps.
const DECODE_ROWS: [u32; 13] = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256];
/// Row counts of the graphs of other steps. From 64 rows on, at most a third of a padded batch is padding.
const LAYER_ROWS: [u32; 13] = [8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, LAYER_ROWS_MAX];
const LAYER_ROWS_MAX: u32 = 512;

/// Captured graph of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum StepGraph {
    /// The forward pass of this many decode rows, with the logits of each.
    Decode(u32),
    /// Embedding and layers of this many rows of any kind.
    Layers(u32),
}

impl StepGraph {
    /// Rows, including padding.
    pub(super) fn rows(self) -> u32 {
        match self {
            Self::Decode(rows) | Self::Layers(rows) => rows,
        }
    }

    /// Rows of logits, including padding, if the graph computes them.
    pub(super) fn logits_rows(self) -> Option<u32> {
        match self {
            Self::Decode(rows) => Some(rows),
            Self::Layers(_) => None,
        }
    }
}

/// Graphs of a model that is loaded with these limits.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepGraphs {
    /// Maximum sampled rows of a step.
    pub(super) sample_rows: u32,
    /// Maximum rows of a step.
    pub(super) batch_tokens: u32,
}

impl StepGraphs {
    /// Returns the graph for a batch of `rows` rows, the smallest that holds them; `decodes`: each is sampled from, and none
    /// takes the attention of prompts. `None` if no graph is that large.
    pub(super) fn for_batch(self, rows: u32, decodes: bool) -> Option<StepGraph> {
        let decode = smallest(&DECODE_ROWS, rows).filter(|rows| decodes && *rows <= self.decode_rows_max());
        let layers = || smallest(&LAYER_ROWS, rows).filter(|rows| *rows <= self.rows_max());
        decode.map(StepGraph::Decode).or_else(|| layers().map(StepGraph::Layers))
    }

    /// Returns the rows of the largest graph of decodes.
    pub(super) fn decode_rows_max(self) -> u32 {
        smallest(&DECODE_ROWS, self.sample_rows).unwrap_or(DECODE_ROWS[DECODE_ROWS.len() - 1])
    }

    /// Returns the maximum rows of a step, including padding.
    pub(super) fn rows_max(self) -> u32 {
        self.batch_tokens.max(self.logits_rows_max())
    }

    /// Returns the maximum rows of logits of a step, including padding.
    pub(super) fn logits_rows_max(self) -> u32 {
        self.sample_rows.max(self.decode_rows_max())
    }

    /// Returns all graphs, of each kind the largest first.
    pub(super) fn all(self) -> impl Iterator<Item = StepGraph> {
        let decodes = DECODE_ROWS.into_iter().rev().filter(move |rows| *rows <= self.decode_rows_max());
        let layers = LAYER_ROWS.into_iter().rev().filter(move |rows| *rows <= self.rows_max());
        decodes.map(StepGraph::Decode).chain(layers.map(StepGraph::Layers))
    }
}

/// Returns the smallest of the ascending row counts that is at least `rows`.
fn smallest(counts: &[u32], rows: u32) -> Option<u32> {
    counts.iter().copied().find(|count| *count >= rows)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_batch_runs_the_smallest_captured_graph_of_its_kind_that_holds_it(
            rows in 1u32..700, decodes in any::<bool>(), sample_rows in 1u32..4096, batch_tokens in 1u32..2048,
        ) {
            let graphs = StepGraphs { sample_rows, batch_tokens };
            let rows = rows.min(graphs.rows_max());
            let kind = |graph: &StepGraph| graph.logits_rows().is_some();
            match graphs.for_batch(rows, decodes) {
                Some(graph) => {
                    prop_assert!(graph.rows() >= rows && (decodes || !kind(&graph)));
                    prop_assert!(graphs.all().any(|captured| captured == graph), "{graph:?} is not captured");
                    let better = |other: &StepGraph| {
                        kind(other) == kind(&graph) && (rows..graph.rows()).contains(&other.rows())
                    };
                    prop_assert!(!graphs.all().any(|other| better(&other)));
                }
                None => prop_assert!(graphs.all().all(|graph| graph.rows() < rows || (kind(&graph) && !decodes))),
            }
            for graph in graphs.all() {
                prop_assert!(graph.rows() <= graphs.rows_max());
                prop_assert!(graph.logits_rows().is_none_or(|rows| rows <= graphs.logits_rows_max()));
            }
        }
    }
}
