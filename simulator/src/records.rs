//! Per-request records, latencies and KV memory use of a simulation.

use std::time::Duration;

use inflight_contract::FinishReason;
use inflight_traces::ServedRequest;
use inflight_worker_core::Time;

use crate::{Observer, Request, RequestEvent, StepSample};

/// IterationOutcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestRecord {
    /// Simulated request.
    pub request: Request,
    /// Time of the first slot.
    pub started: Option<Time>,
    /// Time of the first token.
    pub first_token: Option<Time>,
    /// Time of the end.
    pub ended: Option<Time>,
    /// Reason of the end.
    pub reason: Option<FinishReason>,
    /// Set if the scheduler rejected the request.
    pub refused: bool,
    /// Tokens generated.
    pub output_tokens: u32,
    /// Longest gap between two tokens.
    pub longest_gap: Duration,
    /// Number of preemptions.
    pub preemptions: u32,
    last_token: Option<Time>,
}

impl RequestRecord {
    /// Returns the times in seconds and the lengths; `None` if it generated no token or has not ended.
    pub fn served(&self) -> Option<ServedRequest> {
        let seconds = |at: Time| at.since(Time::ZERO).as_secs_f64();
        Some(ServedRequest {
            tenant: self.request.tenant,
            arrival_s: seconds(self.request.arrival),
            first_token_s: seconds(self.first_token?),
            end_s: seconds(self.ended?),
            prompt_tokens: self.request.prompt_tokens,
            output_tokens: self.output_tokens,
        })
    }

    /// Returns the TTFT.
    pub fn time_to_first_token(&self) -> Option<Duration> {
        self.first_token.map(|at| at.since(self.request.arrival))
    }

    /// Returns the time from arrival to end.
    pub fn latency(&self) -> Option<Duration> {
        self.ended.map(|at| at.since(self.request.arrival))
    }

    /// Returns the TPOT; `None` with fewer than two tokens.
    pub fn time_per_token(&self) -> Option<Duration> {
        let (first, last) = (self.first_token?, self.last_token?);
        (self.output_tokens > 1).then(|| last.since(first) / (self.output_tokens - 1))
    }
}

/// Use of the KV pool, integrated over the device's busy time; in unit-seconds unless stated.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct KvUsage {
    /// Busy time of the device in seconds.
    pub busy_s: f64,
    /// Busy time while requests were waiting, in seconds.
    pub backlogged_s: f64,
    /// Token capacity of the allocated blocks.
    pub allocated: f64,
    /// Subset of `allocated` that holds tokens.
    pub stored: f64,
    /// Subset of `allocated` reserved for known but uncomputed tokens.
    pub pending: f64,
    /// Sequences with a slot.
    pub running: f64,
    /// Sequences with a slot, while requests were waiting.
    pub running_backlogged: f64,
    /// Maximum number of sequences with a slot (not an integral).
    pub running_max: u32,
    /// Number of slots.
    pub slots: f64,
    /// Number of slots, while requests were waiting.
    pub slots_backlogged: f64,
}

impl KvUsage {
    /// Returns the share of the allocated token capacity that no known token will fill (internal
    /// fragmentation).
    pub fn waste(&self) -> f64 {
        (self.allocated - self.stored - self.pending) / self.allocated
    }

    /// Returns the share of the allocated token capacity that is empty, including capacity reserved for
    /// prefill.
    pub fn empty(&self) -> f64 {
        (self.allocated - self.stored) / self.allocated
    }

    /// Returns the share that is wasted if each sequence wastes half of its last block: (`block_tokens` - 1)
    /// / 2 tokens.
    pub fn waste_expected(&self, block_tokens: u32) -> f64 {
        f64::from(block_tokens - 1) / 2.0 * self.running / self.allocated
    }

    /// Returns the mean number of running sequences.
    pub fn concurrency(&self) -> f64 {
        self.running / self.busy_s
    }

    /// Returns the share of slots in use while requests were waiting.
    pub fn occupancy(&self) -> f64 {
        self.running_backlogged / self.slots_backlogged
    }
}

/// Observer that records the outcome of each request and the use of KV memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Records {
    records: Vec<RequestRecord>,
    kv: KvUsage,
    /// Gaps between consecutive tokens of all requests.
    gaps: Vec<Duration>,
    steps: u64,
    makespan: Time,
    /// Sum of the relative prediction errors of all steps.
    prediction_error: f64,
}

impl Records {
    /// Creates empty records for these requests.
    pub fn new(requests: &[Request]) -> Self {
        let record = |request: &Request| RequestRecord {
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
            kv: KvUsage::default(),
            gaps: Vec::new(),
            steps: 0,
            makespan: Time::ZERO,
            prediction_error: 0.0,
        }
    }

    /// Returns the records, in order of arrival.
    pub fn iter(&self) -> impl Iterator<Item = &RequestRecord> {
        self.records.iter()
    }

    /// Returns the use of KV memory.
    pub fn kv(&self) -> &KvUsage {
        &self.kv
    }

    /// Returns the number of executed steps.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the end time of the last request.
    pub fn makespan(&self) -> Time {
        self.makespan
    }

    /// Returns the number of preemptions.
    pub fn preemptions(&self) -> u64 {
        self.records.iter().map(|record| u64::from(record.preemptions)).sum()
    }

    /// Returns the throughput in prompt and output tokens of ended requests per second, up to the makespan.
    pub fn tokens_per_second(&self) -> f64 {
        let over = self.records.iter().filter(|record| record.ended.is_some());
        let tokens: u64 =
            over.map(|record| u64::from(record.request.prompt_tokens + record.output_tokens)).sum();
        tokens as f64 / self.makespan.since(Time::ZERO).as_secs_f64()
    }

    /// Returns the mean relative error of the predicted step times.
    pub fn prediction_error(&self) -> f64 {
        self.prediction_error / self.steps as f64
    }

    /// Returns the TTFTs in seconds, ascending.
    pub fn times_to_first_token(&self) -> Vec<f64> {
        sorted(self.records.iter().filter_map(RequestRecord::time_to_first_token))
    }

    /// Returns the gaps between consecutive tokens of all requests in seconds, ascending.
    pub fn gaps(&self) -> Vec<f64> {
        sorted(self.gaps.iter().copied())
    }

    /// Returns the TPOTs in seconds, ascending.
    pub fn times_per_token(&self) -> Vec<f64> {
        sorted(self.records.iter().filter_map(RequestRecord::time_per_token))
    }
}

fn sorted(durations: impl Iterator<Item = Duration>) -> Vec<f64> {
    let mut seconds: Vec<f64> = durations.map(|duration| duration.as_secs_f64()).collect();
    seconds.sort_by(f64::total_cmp);
    seconds
}

/// Returns the quantile `p` (0 to 1) of ascending values by nearest rank; 0 without values.
pub fn percentile(ascending: &[f64], p: f64) -> f64 {
    let rank = (p * ascending.len() as f64).ceil() as usize;
    ascending.get(rank.saturating_sub(1)).or(ascending.last()).copied().unwrap_or(0.0)
}

impl Observer for Records {
    fn request(&mut self, at: Time, index: usize, _: &Request, event: &RequestEvent) {
        let record = &mut self.records[index];
        match event {
            // In a closed loop the time is not known before.
            RequestEvent::Arrived => record.request.arrival = at,
            RequestEvent::Served { output_tokens: 0, .. } => {}
            RequestEvent::Refused(_) => record.refused = true,
            RequestEvent::Started => {
                record.started.get_or_insert(at);
            }
            RequestEvent::Preempted(_) => record.preemptions += 1,
            RequestEvent::Served { output_tokens, .. } => {
                record.first_token.get_or_insert(at);
                if let Some(last) = record.last_token.replace(at) {
                    let gap = at.since(last);
                    record.longest_gap = record.longest_gap.max(gap);
                    self.gaps.push(gap);
                }
                record.output_tokens += output_tokens;
            }
            RequestEvent::Ended(reason) => {
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
