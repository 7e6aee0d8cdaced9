//! Log probabilities of generated tokens and of prompt tokens.

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

/// Log probability of one prompt token, given the tokens before it: of the model's own distribution, without
/// penalties, bias and masks.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct PromptLogprobs {
    /// The prompt token.
    pub token: TokenLogprob,
    /// Its place among all tokens, the most probable first, ties by lower id; from 1.
    pub rank: u32,
    /// The most probable tokens, in the same order.
    pub top: Vec<TokenLogprob>,
}
