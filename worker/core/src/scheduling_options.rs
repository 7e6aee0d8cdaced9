//! Options of the scheduler.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use inflight_options::{Span, duration};

use crate::drafts::Drafts;
use crate::policy::Policy;
use crate::{LatencyObjectives, SchedulerLimits, StepTarget};

/// Value of `--step-target`: `auto`, `off` or a duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepTargetOption {
    /// A multiple of the decodes' time.
    Auto,
    /// No target.
    Off,
    /// A duration.
    Fixed(Duration),
}

impl FromStr for StepTargetOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "off" => Ok(Self::Off),
            _ => duration(text).map(Self::Fixed).map_err(|error| format!("{error}, or auto, or off")),
        }
    }
}

impl fmt::Display for StepTargetOption {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => out.write_str("auto"),
            Self::Off => out.write_str("off"),
            Self::Fixed(target) => Span(*target).fmt(out),
        }
    }
}

/// Options of the scheduler. Its limits follow from them and from what the device can do.
#[derive(Debug, Clone, Copy, PartialEq, clap::Args)]
pub struct SchedulingOptions {
    /// Which sequences go first.
    #[command(flatten)]
    pub policy: Policy,
    /// Disable prefix caching
    #[arg(long, env = "INFLIGHT_WORKER_NO_PREFIX_CACHE")]
    pub no_prefix_cache: bool,
    /// Target duration of an iteration with decodes, which bounds the prefill chunks beside them and so
    /// inter-token latency: auto (follows the decodes' time and the prefill load), a duration, or off
    #[arg(
        long,
        value_name = "auto|off|DURATION",
        default_value_t = StepTargetOption::Auto,
        env = "INFLIGHT_WORKER_STEP_TARGET"
    )]
    pub step_target: StepTargetOption,
    /// Objective for the time to first token: prefill gets more time while its backlog would exceed it
    #[arg(long, value_name = "DURATION", value_parser = duration, env = "INFLIGHT_WORKER_SLO_TTFT")]
    pub slo_ttft: Option<Duration>,
    /// Objective for the gap between tokens: bounds iterations with decodes and prefill; takes precedence over --slo-ttft
    #[arg(long, value_name = "DURATION", value_parser = duration, env = "INFLIGHT_WORKER_SLO_GAP")]
    pub slo_gap: Option<Duration>,
    /// Source of drafted tokens (speculative decoding): off; prompt-lookup, which drafts what followed the last
    /// tokens where they occurred before; mtp, the model's own layer for it (on CPUs); or auto, the better of both for each
    /// sequence. Drafts are verified, so the output is the same
    #[arg(
        long,
        value_name = "off|prompt-lookup|mtp|auto",
        default_value_t = Drafts::default(),
        env = "INFLIGHT_WORKER_DRAFTS"
    )]
    pub drafts: Drafts,
    /// Maximum tokens drafted for a sequence and iteration
    #[arg(long, value_name = "K", default_value_t = 8, env = "INFLIGHT_WORKER_DRAFTS_MAX")]
    pub drafts_max: u32,
    /// Output tokens for which a sequence reserves KV blocks at admission [default: one block]
    #[arg(long, value_name = "N", env = "INFLIGHT_WORKER_DECODE_RESERVE_TOKENS")]
    pub decode_reserve_tokens: Option<u32>,
    /// Share of the KV blocks that admission keeps free for the growth of running sequences, from 0 to 0.5: more
    /// means fewer preemptions and fewer sequences at once
    #[arg(
        long,
        value_name = "PART",
        default_value_t = SchedulerLimits::WATERMARK_SHARE,
        env = "INFLIGHT_WORKER_KV_WATERMARK"
    )]
    pub kv_watermark: f64,
    /// Minimum difference of priorities for a waiting request to preempt a running one, at least 1: more means fewer
    /// preemptions and longer waits of important requests
    #[arg(
        long,
        value_name = "LEVELS",
        default_value_t = SchedulerLimits::PREEMPTION_THRESHOLD,
        env = "INFLIGHT_WORKER_PREEMPTION_THRESHOLD"
    )]
    pub preemption_threshold: u32,
    /// Maximum number of sequences admitted past a waiting one for which too few KV blocks are free, at most 10000;
    /// fewer means shorter waits of large requests and longer ones of small requests
    #[arg(
        long,
        value_name = "N",
        default_value_t = SchedulerLimits::BYPASS_MAX,
        env = "INFLIGHT_WORKER_BYPASS_MAX"
    )]
    pub bypass_max: u32,
    /// Maximum sequences waiting in the worker
    #[arg(long, value_name = "N", default_value_t = 1024, env = "INFLIGHT_WORKER_MAX_WAITING")]
    pub max_waiting: u32,
}

impl Default for SchedulingOptions {
    fn default() -> Self {
        inflight_options::defaults()
    }
}

impl SchedulingOptions {
    /// Returns the objectives of the adaptive step target.
    pub fn objectives(&self) -> LatencyObjectives {
        LatencyObjectives { first_token: self.slo_ttft, gap: self.slo_gap }
    }

    /// Returns the step target. Objectives beside one that is not adaptive have no effect.
    pub fn step_target(&self) -> StepTarget {
        match self.step_target {
            StepTargetOption::Auto => StepTarget::Adaptive(self.objectives()),
            StepTargetOption::Off => StepTarget::Unbounded,
            StepTargetOption::Fixed(target) => StepTarget::Fixed(target),
        }
    }

    /// Returns the maximum tokens drafted for a sequence and iteration; 0 without drafts.
    pub fn drafted_tokens_max(&self) -> u32 {
        match self.drafts {
            Drafts::Off => 0,
            Drafts::PromptLookup | Drafts::Mtp | Drafts::Auto => self.drafts_max,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_target_is_auto_off_or_a_duration() {
        for text in ["auto", "off", "250ms"] {
            assert_eq!(text.parse::<StepTargetOption>().unwrap().to_string(), text);
        }
        assert!("fast".parse::<StepTargetOption>().unwrap_err().contains("auto"));
    }
}
