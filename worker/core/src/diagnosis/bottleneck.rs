//! Kinds of bottlenecks, and findings.

use std::fmt;

/// Bottleneck of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bottleneck {
    /// The KV pool is full while the batch is far below its maximum.
    MemoryPressure,
    /// Sequences wait longer than the objective though blocks are free.
    AdmissionBlocked,
    /// Preemptions recompute or swap too much.
    Preemption,
    /// Preempted sequences wait long until they run again.
    PreemptionPauses,
    /// Queueing times exceed the objective, for want of blocks or of compute.
    QueueTime,
    /// Prefill chunks take too much time from decodes.
    PrefillStarvesDecode,
    /// Iterations take much longer than the cost model predicts.
    SlowIterations,
    /// Prefixes are evicted from the cache before they are used again.
    PrefixEvictions,
    /// The device is idle though there is work.
    DeviceIdle,
    /// Prefill chunks are too small.
    ChunkBudget,
    /// Decodes alone take longer than the objective for gaps.
    GapObjective,
    /// Prompts arrive faster than the objective for first tokens allows.
    FirstTokenObjective,
    /// Most drafted tokens are rejected, and they are a large part of the work.
    DraftsRejected,
    /// The recording of the scheduler's inputs has ended with an error.
    RecordingFailed,
}

impl Bottleneck {
    /// Returns the label used in reports; stable.
    pub fn label(self) -> &'static str {
        match self {
            Self::MemoryPressure => "memory_pressure",
            Self::AdmissionBlocked => "admission_blocked",
            Self::Preemption => "preemption",
            Self::PreemptionPauses => "preemption_pauses",
            Self::QueueTime => "queue_time",
            Self::PrefillStarvesDecode => "prefill_starves_decode",
            Self::SlowIterations => "slow_iterations",
            Self::PrefixEvictions => "prefix_evictions",
            Self::DeviceIdle => "device_idle",
            Self::ChunkBudget => "chunk_budget",
            Self::GapObjective => "slo_gap",
            Self::FirstTokenObjective => "slo_ttft",
            Self::DraftsRejected => "drafts_rejected",
            Self::RecordingFailed => "recording_failed",
        }
    }
}

/// Bottleneck with its evidence.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// Kind of bottleneck.
    pub limit: Bottleneck,
    /// Severity in (0, 1]: approximately the affected share of the window.
    pub weight: f64,
    /// Measurements that support the finding, as text.
    pub figure: String,
    /// Advised action: the option and its predicted effect.
    pub action: String,
}

impl Finding {
    /// Creates a finding whose weight is capped at 1; `None` if the weight is not above 0.
    pub(super) fn new(limit: Bottleneck, weight: f64, figure: String, action: String) -> Option<Self> {
        (weight > 0.0).then_some(Self { limit, weight: weight.min(1.0), figure, action })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}; {}", self.limit.label(), self.figure, self.action)
    }
}
