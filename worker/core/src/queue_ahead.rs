use std::time::Duration;

/// How many sequences beyond those that can run a worker lets its routers hand over: just enough that a slot which falls
/// free is taken at once, for everything that waits here instead of at a router is decided with older knowledge.
///
/// A slot that falls free at the end of an iteration is seen by the router half a hop later, and the next request is here
/// after the whole hop, so what must wait here is what ends within an iteration and a hop: its mean m, learnt from the
/// iterations, and 2 * sqrt(m) more for its spread, as of arrivals that know nothing of each other (Poisson).
#[derive(Debug, Clone)]
pub struct QueueAhead {
    most: u32,
    /// Sequences that end in an iteration, smoothed.
    ended: f64,
    /// Seconds an iteration takes, smoothed.
    step: f64,
}

impl QueueAhead {
    /// The way to a router and back, its decision included.
    const HOP: Duration = Duration::from_millis(3);
    /// Iterations over which is smoothed.
    const WINDOW: f64 = 64.0;

    /// Nothing is known yet; never more than `most`, and never less than one.
    pub fn new(most: u32) -> Self {
        Self { most: most.max(1), ended: 0.0, step: 0.0 }
    }

    /// Learns from an iteration that took so long and in which so many sequences ended.
    pub fn learn(&mut self, took: Duration, ended: u32) {
        let took = took.as_secs_f64();
        if self.step == 0.0 {
            self.step = took;
        }
        self.step += (took - self.step) / Self::WINDOW;
        self.ended += (f64::from(ended) - self.ended) / Self::WINDOW;
    }

    /// Sequences that may wait here.
    pub fn depth(&self) -> u32 {
        let steps = if self.step > 0.0 { 1.0 + Self::HOP.as_secs_f64() / self.step } else { 1.0 };
        let mean = self.ended * steps;
        // At most `most`, so the conversion loses nothing that matters.
        let depth = (mean + 2.0 * mean.sqrt()).ceil().min(f64::from(self.most)) as u32;
        depth.clamp(1, self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker whose iterations take `step`, in which sequences end at random, and a router a hop away that refills
    /// what it sees free. Returns the share of slots that stood idle.
    fn idle_share(step: Duration, end_in: u32, fixed: Option<u32>) -> (f64, u32) {
        const SLOTS: u32 = 256;
        let mut ahead = QueueAhead::new(64);
        let mut random = 1u64;
        let (mut running, mut waiting, mut idle, mut seats) = (0u32, 0u32, 0u64, 0u64);
        let hop = QueueAhead::HOP.as_nanos().div_ceil(step.as_nanos()) as usize;
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
    fn slots_are_kept_busy_by_a_queue_far_shorter_than_the_bound() {
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
    fn a_worker_on_which_nothing_ends_lets_one_wait() {
        let mut ahead = QueueAhead::new(32);
        (0..1000).for_each(|_| ahead.learn(Duration::from_millis(10), 0));
        assert_eq!(ahead.depth(), 1);
        (0..1000).for_each(|_| ahead.learn(Duration::from_millis(10), 1000));
        assert_eq!(ahead.depth(), 32);
    }
}
