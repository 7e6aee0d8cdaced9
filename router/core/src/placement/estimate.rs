/// A worker's cost model as it reports it: seconds, each of a size that can be.
///
/// A step takes `step + token * tokens + key * keys + decode_key * decode_keys + sequence * sequences`, where the keys of a
/// token are the positions up to its own, and those of decodes count apart; copying n blocks from the host takes `copy + copy_block * n`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostCoefficients {
    step: f64,
    token: f64,
    key: f64,
    decode_key: f64,
    sequence: f64,
    copy: f64,
    copy_block: f64,
}

impl CostCoefficients {
    /// From what a worker said, in the order of the formula; what can't be a cost counts as none.
    pub fn new([step, token, key, decode_key, sequence, copy, copy_block]: [f64; 7]) -> Self {
        Self {
            step: seconds(step),
            token: seconds(token),
            key: seconds(key),
            decode_key: seconds(decode_key),
            sequence: seconds(sequence),
            copy: seconds(copy),
            copy_block: seconds(copy_block),
        }
    }

    /// What computing `tokens` from position `start` on adds to steps that run anyway.
    pub fn prefill(&self, start: u32, tokens: u32) -> f64 {
        let (start, tokens) = (f64::from(start), f64::from(tokens));
        self.token * tokens + self.key * tokens * (start + (tokens + 1.0) / 2.0)
    }

    /// What copying so many blocks from the host takes.
    pub fn copy(&self, blocks: u32) -> f64 {
        if blocks == 0 { 0.0 } else { self.copy + self.copy_block * f64::from(blocks) }
    }

    /// What one more decoding sequence with this context adds to a step.
    pub fn decode(&self, context: u32) -> f64 {
        self.token + self.sequence + self.decode_key * f64::from(context)
    }
}

impl Default for CostCoefficients {
    /// A guess for workers that have not said anything: relations are what counts.
    fn default() -> Self {
        Self {
            step: 1e-2,
            token: 1e-4,
            key: 1e-8,
            decode_key: 2e-8,
            sequence: 1e-4,
            copy: 1e-4,
            copy_block: 1e-4,
        }
    }
}

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
        self.load.stretch * (self.load.ahead + self.unseen + self.prefill(prompt_tokens)) + self.cost.step
    }

    /// Predicted seconds to the end of a request with so many tokens to come: everything ahead of it is computed first,
    /// beside the decodes that run; then each of its tokens takes a step with these and itself.
    pub fn completion(&self, prompt_tokens: u32, output_tokens: u32) -> f64 {
        let prefill = self.load.ahead + self.unseen + self.prefill(prompt_tokens);
        let decode = self.load.decode_step.max(self.cost.step) + self.cost.decode(prompt_tokens);
        self.load.stretch * prefill + f64::from(output_tokens) * decode
    }

    /// Predicted seconds that its prefill takes from whoever comes next.
    pub fn burden(&self, prompt_tokens: u32) -> f64 {
        self.load.stretch * self.prefill(prompt_tokens)
    }
}
