use inflight_contract::CostCoefficients;

/// How busy a worker says it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WorkerLoad {
    ahead: f64,
    stretch: f64,
    decode_step: f64,
}

impl WorkerLoad {
    /// Seconds of prefill that it has taken on and not computed; by what factor a prefill takes longer because decodes
    /// run beside it; seconds of a step with its decodes alone. What can't be counts as idle.
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

/// How much of a prompt a worker can find again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cached {
    /// Tokens on its device, or on their way there for a request placed before.
    pub device_tokens: u32,
    /// Tokens behind them on its host.
    pub host_tokens: u32,
    /// Blocks of these.
    pub host_blocks: u32,
}

impl Cached {
    /// Tokens that need not be computed.
    pub fn tokens(&self) -> u32 {
        self.device_tokens + self.host_tokens
    }
}

/// What is known of a worker with a request in mind.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Estimate {
    /// How much of the prompt it has.
    pub cached: Cached,
    /// What things cost there.
    pub cost: CostCoefficients,
    /// How busy it said it is.
    pub load: WorkerLoad,
    /// Seconds of prefill that were handed to it after it said that.
    pub unseen: f64,
}

impl Estimate {
    /// Seconds of its own prefill, and of copying what the host has where that is cheaper than computing it.
    pub fn prefill(&self, prompt_tokens: u32) -> f64 {
        let computed = |cached: u32| {
            let cached = cached.min(prompt_tokens.saturating_sub(1));
            self.cost.prefill(cached, prompt_tokens - cached)
        };
        let copied = computed(self.cached.tokens()) + self.cost.copy(self.cached.host_blocks);
        copied.min(computed(self.cached.device_tokens))
    }

    /// Predicted seconds to the first token: everything ahead of it is computed first, beside the decodes that run.
    pub fn first_token(&self, prompt_tokens: u32) -> f64 {
        self.load.stretch * (self.load.ahead + self.unseen + self.prefill(prompt_tokens)) + self.cost.step_s
    }

    /// Predicted seconds to the end of a request with so many tokens to come: everything ahead of it is computed first,
    /// beside the decodes that run; then each of its tokens takes a step with these and itself.
    pub fn completion(&self, prompt_tokens: u32, output_tokens: u32) -> f64 {
        let prefill = self.load.ahead + self.unseen + self.prefill(prompt_tokens);
        let decode = self.load.decode_step.max(self.cost.step_s) + self.cost.decode(prompt_tokens);
        self.load.stretch * prefill + f64::from(output_tokens) * decode
    }

    /// Predicted seconds that its prefill takes from whoever comes next.
    pub fn burden(&self, prompt_tokens: u32) -> f64 {
        self.load.stretch * self.prefill(prompt_tokens)
    }
}
