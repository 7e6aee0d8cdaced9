//! Depth of a worker's waiting queue: how many sequences routers may dispatch beyond the running ones.

use std::time::Duration;

/// Estimator of the dispatch-ahead depth: the smallest waiting queue that keeps slots busy. Requests that
/// wait at the worker instead of at a router were placed with older information, so a shorter queue is
/// better.
///
/// A freed slot is refilled by a router one round trip after the end of the iteration, so the queue must
/// cover the sequences that end within an iteration and a round trip: their mean m, estimated from
/// iterations, plus 2 * sqrt(m), two standard deviations of a Poisson distribution.
#[derive(Debug, Clone)]
pub struct DispatchAhead {
    max: u32,
    /// Exponential moving average of the sequences that end in an iteration.
    ended: f64,
    /// Exponential moving average of the iteration time in seconds.
    step: f64,
}

impl DispatchAhead {
    /// Round trip to a router, including its decision.
    const HOP: Duration = Duration::from_millis(3);
    /// Time constant of the moving averages in iterations.
    const WINDOW: f64 = 64.0;

    /// Creates an estimator without observations, whose depth stays between 1 and `max`.
    pub fn new(max: u32) -> Self {
        Self { max: max.max(1), ended: 0.0, step: 0.0 }
    }

    /// Observes an iteration of duration `took` in which `ended` sequences ended.
    pub fn learn(&mut self, took: Duration, ended: u32) {
        let took = took.as_secs_f64();
        if self.step == 0.0 {
            self.step = took;
        }
        self.step += (took - self.step) / Self::WINDOW;
        self.ended += (f64::from(ended) - self.ended) / Self::WINDOW;
    }

    /// Returns the number of sequences that may wait at the worker.
    pub fn depth(&self) -> u32 {
        let steps = if self.step > 0.0 { 1.0 + Self::HOP.as_secs_f64() / self.step } else { 1.0 };
        let mean = self.ended * steps;
        let depth = (mean + 2.0 * mean.sqrt()).ceil().min(f64::from(self.max)) as u32;
        depth.clamp(1, self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a worker with iterations of `step` in which sequences end at random, and a router one round
    /// trip away that refills free slots. Returns the share of idle slots and the final depth.
    fn idle_share(step: Duration, end_in: u32, fixed: Option<u32>) -> (f64, u32) {
        const SLOTS: u32 = 256;
        let mut ahead = DispatchAhead::new(64);
        let mut random = 1u64;
        let (mut running, mut waiting, mut idle, mut seats) = (0u32, 0u32, 0u64, 0u64);
        let hop = DispatchAhead::HOP.as_nanos().div_ceil(step.as_nanos()) as usize;
        let mut underway = std::collections::VecDeque::from(vec![0u32; hop]);
        for nth in 0..20_000 {
            let depth = fixed.unwrap_or_else(|| ahead.depth());
            let known = running + waiting + underway.iter().sum::<u32>();
            underway.push_back((SLOTS + depth).saturating_sub(known));
            waiting += underway.pop_front().unwrap();
            let start = waiting.min(SLOTS - running);
            (running, waiting) = (running + start, waiting - start);
            if nth > 5_000 {
                idle += u64::from(SLOTS - running);
                seats += u64::from(SLOTS);
            }
            let mut ended = 0;
            for _ in 0..running {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ended += u32::from((random >> 33).is_multiple_of(u64::from(end_in)));
            }
            running -= ended;
            ahead.learn(step, ended);
        }
        (idle as f64 / seats as f64, ahead.depth())
    }

    #[test]
    fn a_queue_far_shorter_than_the_bound_keeps_the_slots_busy() {
        for (step, end_in) in [(20, 200), (5, 100), (1, 400), (30, 50)] {
            let step = Duration::from_millis(step);
            let (idle, depth) = idle_share(step, end_in, None);
            let (without, _) = idle_share(step, end_in, Some(0));
            assert!(idle < 0.002, "{idle} of the slots idle at {step:?} and one in {end_in}");
            assert!(idle < without / 2.0, "{idle} against {without} without a queue");
            assert!(depth <= 24, "{depth} wait at {step:?} and one in {end_in}");
        }
    }

    #[test]
    fn the_depth_is_one_where_no_sequence_ends_and_bounded_otherwise() {
        let mut ahead = DispatchAhead::new(32);
        (0..1000).for_each(|_| ahead.learn(Duration::from_millis(10), 0));
        assert_eq!(ahead.depth(), 1);
        (0..1000).for_each(|_| ahead.learn(Duration::from_millis(10), 1000));
        assert_eq!(ahead.depth(), 32);
    }
}
