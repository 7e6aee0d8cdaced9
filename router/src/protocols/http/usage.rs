//! Token counts and timings in responses of OpenAI's chat and text completions.

use serde::Serialize;

use crate::output::event::{Timings, Usage};

/// Token counts of a call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct UsageBody {
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
struct PromptDetails {
    cached_tokens: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
struct CompletionDetails {
    reasoning_tokens: u32,
}

impl UsageBody {
    /// Counts without cached tokens, which are known at the end.
    pub(crate) fn so_far(prompt_tokens: u32, completion_tokens: u32) -> Self {
        let total_tokens = prompt_tokens.saturating_add(completion_tokens);
        Self { prompt_tokens, completion_tokens, total_tokens, ..Self::default() }
    }

    /// Adds the counts of a prompt.
    pub(crate) fn add(&mut self, usage: &Usage) {
        let sum = |count: &mut u32, more: u32| *count = count.saturating_add(more);
        sum(&mut self.prompt_tokens, usage.prompt_tokens);
        sum(&mut self.completion_tokens, usage.completion_tokens);
        sum(&mut self.total_tokens, usage.prompt_tokens.saturating_add(usage.completion_tokens));
        sum(&mut self.prompt_tokens_details.cached_tokens, usage.cached_prompt_tokens);
        sum(&mut self.completion_tokens_details.reasoning_tokens, usage.reasoning_tokens);
    }
}

/// Durations of a request, in seconds from its arrival at the router.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct TimingsBody {
    queue_seconds: f64,
    time_to_first_token_seconds: f64,
    time_per_output_token_seconds: f64,
    total_seconds: f64,
}

impl From<Timings> for TimingsBody {
    fn from(timings: Timings) -> Self {
        Self {
            queue_seconds: timings.queue_seconds,
            time_to_first_token_seconds: timings.first_token_seconds,
            time_per_output_token_seconds: timings.per_token_seconds,
            total_seconds: timings.total_seconds,
        }
    }
}
