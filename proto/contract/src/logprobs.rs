//! Log probabilities of generated tokens.

/// Natural-log probability of one token.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TokenLogprob {
    /// Token id.
    pub token: u32,
    /// Log probability after penalties, bias and masks, before temperature and truncation.
    pub logprob: f32,
}

/// Log probabilities at one generated position.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct PositionLogprobs {
    /// The sampled token.
    pub chosen: TokenLogprob,
    /// The most probable tokens, most probable first, ties by lower id.
    pub top: Vec<TokenLogprob>,
}
