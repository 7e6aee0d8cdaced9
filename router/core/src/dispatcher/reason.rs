//! Reasons for resubmissions.

use serde::{Deserialize, Serialize};

use crate::SubmissionId;

/// Reason for a resubmission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ResubmissionReason {
    /// The session was lost or timed out.
    SessionLost,
    /// The session was closed for a protocol violation by the worker.
    ProtocolViolation {
        /// Submission that the violation was about, if any.
        about: Option<SubmissionId>,
    },
    /// The worker returned the request unasked.
    Returned,
    /// The worker drains.
    Drained,
    /// The worker is reserved for a quarantined request.
    Quarantine,
    /// Values that are not finite took the place of the model's logits.
    NonFinite,
}

impl ResubmissionReason {
    /// Returns a stable label for metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::SessionLost => "session_lost",
            Self::ProtocolViolation { .. } => "protocol_violation",
            Self::Returned => "returned",
            Self::Drained => "drained",
            Self::Quarantine => "quarantine",
            Self::NonFinite => "non_finite",
        }
    }

    /// Whether it counts against the retry budget, which protects workers from a flood of resubmissions.
    pub(super) fn is_loss(self) -> bool {
        matches!(self, Self::SessionLost | Self::ProtocolViolation { .. } | Self::Returned)
    }
}
