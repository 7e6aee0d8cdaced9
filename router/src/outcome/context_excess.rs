//! Prompt that exceeds the model's context, in the words by which clients of each API recognise it.

/// Why a prompt, with the output that is asked for, exceeds the model's context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ContextExcess {
    /// Longest sequence of the model, prompt and output together, in tokens.
    pub(crate) context_tokens: u32,
    /// Tokens of the prompt; fewer than it has if it was not tokenized to its end.
    pub(crate) prompt_tokens: u64,
    /// Maximum output tokens that were asked for; 0 if the prompt alone is too long.
    pub(crate) max_tokens: u32,
    /// Sizes, and what to do.
    pub(crate) reason: String,
}

impl ContextExcess {
    /// Returns the message of gRPC and of OpenAI's APIs. Clients and gateways, such as LiteLLM, know an exceeded context by its
    /// beginning, up to "tokens".
    pub(crate) fn message(&self) -> String {
        let Self { context_tokens, reason, .. } = self;
        format!("This model's maximum context length is {context_tokens} tokens. However, {reason}")
    }

    /// Returns the message of Anthropic's API, whose clients know an exceeded context by its beginning, and read the numbers in it to
    /// shorten the conversation or to lower `max_tokens`.
    pub(crate) fn anthropic_message(&self) -> String {
        let Self { context_tokens, prompt_tokens, max_tokens, reason } = self;
        if *prompt_tokens < u64::from(*context_tokens) {
            return format!(
                "input length and `max_tokens` exceed context limit: {prompt_tokens} + {max_tokens} > {context_tokens}; {reason}"
            );
        }
        format!("prompt is too long: {prompt_tokens} tokens > {context_tokens} maximum; {reason}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_api_has_the_phrases_that_its_clients_look_for() {
        let excess = |prompt_tokens, max_tokens| ContextExcess {
            context_tokens: 256,
            prompt_tokens,
            max_tokens,
            reason: "shorten it".to_owned(),
        };
        let openai = "This model's maximum context length is 256 tokens. However, shorten it";
        for (prompt, max_tokens, anthropic) in [
            (300, 0, "prompt is too long: 300 tokens > 256 maximum; shorten it"),
            (256, 1, "prompt is too long: 256 tokens > 256 maximum; shorten it"),
            (250, 7, "input length and `max_tokens` exceed context limit: 250 + 7 > 256; shorten it"),
        ] {
            let excess = excess(prompt, max_tokens);
            assert_eq!((&*excess.message(), &*excess.anthropic_message()), (openai, anthropic));
        }
    }
}
