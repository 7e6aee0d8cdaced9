//! First-come-first-served policy.

use std::cmp::Ordering;

use super::{SchedulingPolicy, SequenceView};

/// Orders by arrival.
///
/// Trade-off: simple and free of starvation; but tenants with more requests get more service, priorities are
/// ignored, and short requests queue behind long ones (head-of-line blocking).
#[derive(Debug, Clone, Copy, Default)]
pub struct Fcfs;

impl SchedulingPolicy for Fcfs {
    fn name(&self) -> &'static str {
        "fcfs"
    }

    fn compare(&self, a: &SequenceView, b: &SequenceView) -> Ordering {
        a.arrival.cmp(&b.arrival)
    }
}
