use inflight_contract::Weight;
use inflight_worker_core::Time;

/// A request as it reaches the scheduler, with what only a simulation knows of it beforehand: its output's length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// When it arrives.
    pub arrival: Time,
    /// Whose it is: any number.
    pub tenant: u32,
    /// The tenant's share.
    pub weight: Weight,
    /// A higher number is more important.
    pub priority: i32,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens after which it stops.
    pub output_tokens: u32,
    /// Most tokens that it asks for: all that the scheduler is told.
    pub max_tokens: u32,
}

impl Request {
    /// A request that asks for exactly what it generates, of priority 0 and weight 1.
    pub fn new(arrival: Time, tenant: u32, prompt_tokens: u32, output_tokens: u32) -> Self {
        Self {
            arrival,
            tenant,
            weight: Weight::default(),
            priority: 0,
            prompt_tokens,
            output_tokens,
            max_tokens: output_tokens,
        }
    }

    /// Tokens that its keys and values take at its end; the last token's are never computed.
    pub fn tokens(&self) -> u32 {
        self.prompt_tokens + self.output_tokens
    }
}
