//! Predicted cost of a request at a worker, from the worker's cost model, load and prefix cache.

use inflight_contract::CostCoefficients;

/// Load that a worker reports.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct WorkerLoad {
    ahead: f64,
    stretch: f64,
    decode_step: f64,
}

impl WorkerLoad {
    /// Creates a load from the seconds of accepted, uncomputed prefill; the slowdown factor of a prefill
    /// beside the running decodes; and the seconds of a step with the decodes alone. Values out of range
    /// count as idle.
    pub fn new(ahead: f64, stretch: f64, decode_step: f64) -> Self {
        let stretch = if stretch.is_finite() { stretch.clamp(1.0, 100.0) } else { 1.0 };
        Self { ahead: seconds(ahead), stretch, decode_step: seconds(decode_step) }
    }
}

impl Default for WorkerLoad {
    fn default() -> Self {
        Self { ahead: 0.0, stretch: 1.0, decode_step: 0.0 }
    }
}

fn seconds(value: f64) -> f64 {
    if value.is_finite() { value.clamp(0.0, 1e6) } else { 0.0 }
}

/// Cached prefix of a prompt at a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cached {
    /// Tokens in the device pool, or about to be, by requests dispatched before.
    pub device_tokens: u32,
    /// Tokens after these in the host pool.
    pub host_tokens: u32,
    /// Blocks of `host_tokens`.
    pub host_blocks: u32,
}

impl Cached {
    /// Returns the tokens that need no prefill.
    pub fn tokens(&self) -> u32 {
        self.device_tokens + self.host_tokens
    }
}

/// Prediction for a request at a worker.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Estimate {
    /// Cached prefix of the prompt.
    pub cached: Cached,
    /// Cost model of the worker.
    pub cost: CostCoefficients,
    /// Last reported load of the worker.
    pub load: WorkerLoad,
    /// Seconds of prefill dispatched after that report.
    pub unreported_prefill_s: f64,
}

impl Estimate {
    /// Returns the seconds of prefill, with host blocks copied where that is cheaper than computing them.
    pub fn prefill(&self, prompt_tokens: u32) -> f64 {
        let computed = |cached: u32| {
            let cached = cached.min(prompt_tokens.saturating_sub(1));
            self.cost.prefill(cached, prompt_tokens - cached)
        };
        let copied = computed(self.cached.tokens()) + self.cost.copy(self.cached.host_blocks);
        copied.min(computed(self.cached.device_tokens))
    }

    /// Returns the predicted seconds to the first token, after the prefill backlog and beside the running
    /// decodes.
    pub fn first_token(&self, prompt_tokens: u32) -> f64 {
        self.load.stretch * (self.load.ahead + self.unreported_prefill_s + self.prefill(prompt_tokens))
            + self.cost.step_s
    }

    /// Returns the predicted seconds to the end of a request with `output_tokens` to generate: the prefill
    /// backlog and its own prefill beside the running decodes, then one step per token with these and itself.
    pub fn completion(&self, prompt_tokens: u32, output_tokens: u32) -> f64 {
        let prefill = self.load.ahead + self.unreported_prefill_s + self.prefill(prompt_tokens);
        let decode = self.load.decode_step.max(self.cost.step_s) + self.cost.decode(prompt_tokens);
        self.load.stretch * prefill + f64::from(output_tokens) * decode
    }

    /// Returns the predicted seconds by which its prefill delays the next request.
    pub fn delay_to_next(&self, prompt_tokens: u32) -> f64 {
        self.load.stretch * self.prefill(prompt_tokens)
    }
}
