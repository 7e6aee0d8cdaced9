use std::cmp::Ordering;

use super::{Policy, View};

/// First come, first served.
///
/// Trade-off: the simplest order, and no starvation; but a tenant with many requests gets as much more service,
/// priorities mean nothing, and short requests suffer behind long ones.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fcfs;

impl Policy for Fcfs {
    fn name(&self) -> &'static str {
        "fcfs"
    }

    fn compare(&self, a: &View, b: &View) -> Ordering {
        a.arrival.cmp(&b.arrival)
    }
}
