use std::time::Duration;

use inflight_contract::FinishReason;
use inflight_worker_core::Time;

use crate::{Event, Observer, Request, StepSample};

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// The request.
    pub request: Request,
    /// When it first got a slot.
    pub started: Option<Time>,
    /// When its first token was there.
    pub first_token: Option<Time>,
    /// When it was over.
    pub ended: Option<Time>,
    /// Why.
    pub reason: Option<FinishReason>,
    /// Whether the scheduler did not take it.
    pub refused: bool,
    /// Tokens generated.
    pub output_tokens: u32,
    /// The longest time between two of them.
    pub longest_gap: Duration,
    /// Times it lost its slot.
    pub preemptions: u32,
    last_token: Option<Time>,
}

impl Record {
    /// From its arrival to its first token.
    pub fn time_to_first_token(&self) -> Option<Duration> {
        self.first_token.map(|at| at.since(self.request.arrival))
    }

    /// From its arrival to its end.
    pub fn latency(&self) -> Option<Duration> {
        self.ended.map(|at| at.since(self.request.arrival))
    }

    /// Mean time between its tokens; `None` with fewer than two.
    pub fn time_per_token(&self) -> Option<Duration> {
        let (first, last) = (self.first_token?, self.last_token?);
        (self.output_tokens > 1).then(|| last.since(first) / (self.output_tokens - 1))
    }
}

/// What the KV pool held, as integrals over the time in which the device computed.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct KvUse {
    /// Seconds in which the device computed.
    pub busy_s: f64,
    /// Of these, seconds while requests were waiting, too.
    pub backlogged_s: f64,
    /// Token slots allocated.
    pub allocated: f64,
    /// Of these, slots that hold a token.
    pub stored: f64,
    /// Slots promised to known tokens of prompts whose prefill is under way.
    pub pending: f64,
    /// Sequences with a slot.
    pub running: f64,
    /// The same while requests were waiting.
    pub running_backlogged: f64,
    /// The most sequences at once.
    pub running_max: u32,
    /// Slots there are.
    pub slots: f64,
    /// The same while requests were waiting.
    pub slots_backlogged: f64,
}

impl KvUse {
    /// Share of the allocated token slots that no known token will fill: what paging wastes.
    pub fn waste(&self) -> f64 {
        (self.allocated - self.stored - self.pending) / self.allocated
    }

    /// Share of the allocated token slots that are empty for whatever reason, prefills under way included.
    pub fn empty(&self) -> f64 {
        (self.allocated - self.stored) / self.allocated
    }

    /// The share that would be wasted if each sequence wasted half of its last block: (`block_tokens` - 1) / 2 slots.
    pub fn waste_expected(&self, block_tokens: u32) -> f64 {
        f64::from(block_tokens - 1) / 2.0 * self.running / self.allocated
    }

    /// Sequences at once, on average.
    pub fn concurrency(&self) -> f64 {
        self.running / self.busy_s
    }

    /// Share of the slots in use while requests were waiting.
    pub fn occupancy(&self) -> f64 {
        self.running_backlogged / self.slots_backlogged
    }
}

/// Keeps what became of each request, and what the memory held.
#[derive(Debug, Clone, PartialEq)]
pub struct Records {
    records: Vec<Record>,
    kv: KvUse,
    steps: u64,
    makespan: Time,
    /// Sum over the steps of the relative error of the prediction.
    prediction_error: f64,
}

impl Records {
    /// For these requests.
    pub fn new(requests: &[Request]) -> Self {
        let record = |request: &Request| Record {
            request: *request,
            started: None,
            first_token: None,
            ended: None,
            reason: None,
            refused: false,
            output_tokens: 0,
            longest_gap: Duration::ZERO,
            preemptions: 0,
            last_token: None,
        };
        Self {
            records: requests.iter().map(record).collect(),
            kv: KvUse::default(),
            steps: 0,
            makespan: Time::ZERO,
            prediction_error: 0.0,
        }
    }

    /// The requests, in order of arrival.
    pub fn iter(&self) -> impl Iterator<Item = &Record> {
        self.records.iter()
    }

    /// What the memory held.
    pub fn kv(&self) -> &KvUse {
        &self.kv
    }

    /// Steps executed.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// When the last request was over.
    pub fn makespan(&self) -> Time {
        self.makespan
    }

    /// Times that a request lost its slot.
    pub fn preemptions(&self) -> u64 {
        self.records.iter().map(|record| u64::from(record.preemptions)).sum()
    }

    /// Prompt and output tokens of the requests that are over, each second up to the end of the last.
    pub fn tokens_per_second(&self) -> f64 {
        let over = self.records.iter().filter(|record| record.ended.is_some());
        let tokens: u64 =
            over.map(|record| u64::from(record.request.prompt_tokens + record.output_tokens)).sum();
        tokens as f64 / self.makespan.since(Time::ZERO).as_secs_f64()
    }

    /// How far the scheduler's cost model was off, relative to the step, on average.
    pub fn prediction_error(&self) -> f64 {
        self.prediction_error / self.steps as f64
    }

    /// Seconds to the first token of each request that has one, ascending.
    pub fn times_to_first_token(&self) -> Vec<f64> {
        sorted(self.records.iter().filter_map(Record::time_to_first_token))
    }

    /// Mean seconds between the tokens of each request that has two, ascending.
    pub fn times_per_token(&self) -> Vec<f64> {
        sorted(self.records.iter().filter_map(Record::time_per_token))
    }
}

fn sorted(durations: impl Iterator<Item = Duration>) -> Vec<f64> {
    let mut seconds: Vec<f64> = durations.map(|duration| duration.as_secs_f64()).collect();
    seconds.sort_by(f64::total_cmp);
    seconds
}

/// The value below which a share `p` (0 to 1) of these ascending values lies; the nearest rank, and 0 of none.
pub fn percentile(ascending: &[f64], p: f64) -> f64 {
    let rank = (p * ascending.len() as f64).ceil() as usize;
    ascending.get(rank.saturating_sub(1)).or(ascending.last()).copied().unwrap_or(0.0)
}

impl Observer for Records {
    fn request(&mut self, at: Time, index: usize, _: &Request, event: &Event) {
        let record = &mut self.records[index];
        match event {
            Event::Arrived | Event::Served { output_tokens: 0, .. } => {}
            Event::Refused(_) => record.refused = true,
            Event::Started => {
                record.started.get_or_insert(at);
            }
            Event::Preempted(_) => record.preemptions += 1,
            Event::Served { output_tokens, .. } => {
                record.first_token.get_or_insert(at);
                if let Some(last) = record.last_token.replace(at) {
                    record.longest_gap = record.longest_gap.max(at.since(last));
                }
                record.output_tokens += output_tokens;
            }
            Event::Ended(reason) => {
                record.ended = Some(at);
                record.reason = Some(*reason);
                self.makespan = at;
            }
        }
    }

    fn step(&mut self, step: &StepSample) {
        let seconds = step.took.as_secs_f64();
        let (running, slots) = (f64::from(step.running) * seconds, f64::from(step.slots) * seconds);
        let kv = &mut self.kv;
        kv.busy_s += seconds;
        kv.allocated += step.allocated_tokens as f64 * seconds;
        kv.stored += step.stored_tokens as f64 * seconds;
        kv.pending += step.pending_tokens as f64 * seconds;
        kv.running += running;
        kv.slots += slots;
        kv.running_max = kv.running_max.max(step.running);
        if step.waiting > 0 {
            kv.backlogged_s += seconds;
            kv.running_backlogged += running;
            kv.slots_backlogged += slots;
        }
        self.steps += 1;
        if seconds > 0.0 {
            self.prediction_error += (step.predicted.as_secs_f64() / seconds - 1.0).abs();
        }
    }
}
