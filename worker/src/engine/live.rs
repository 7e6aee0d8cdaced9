use std::sync::Arc;

use inflight_contract::{BlockHash, SamplingParams};
use inflight_worker_core::{Grant, Preemption};
use tracing::Span;

use super::{Event, Failure, Request, RequestKey};

/// A choice from its submission to its end.
pub(super) struct Live {
    pub key: RequestKey,
    pub attempt: u32,
    pub choice: u32,
    /// Prompt and generated tokens.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    pub sampling: Arc<SamplingParams>,
    /// Where its block hashes start from.
    root: BlockHash,
    /// Hashes of its full blocks.
    chain: Vec<BlockHash>,
    /// What it counts against its session's grant.
    pub cost: Grant,
    /// Tokens computed since the submission.
    pub computed_tokens: u32,
    /// Why it is about to end with an error.
    pub failure: Option<Failure>,
    computed_reported: bool,
    span: Span,
    /// The phase it is in, a child of `span`; closed when replaced or dropped.
    phase: Span,
}

impl Live {
    /// `tokens` are all it has, `chain` the hashes of their full blocks, starting from `root`.
    pub fn new(
        request: &Request,
        choice: u32,
        tokens: Vec<u32>,
        root: BlockHash,
        chain: Vec<BlockHash>,
        cost: Grant,
    ) -> Self {
        let span = request.span.clone();
        let phase = tracing::info_span!(parent: &span, "wait", choice);
        Self {
            key: request.key,
            attempt: request.attempt,
            choice,
            tokens,
            prompt_len: request.prompt.len(),
            sampling: request.sampling.clone(),
            root,
            chain,
            cost,
            computed_tokens: 0,
            failure: None,
            computed_reported: false,
            span,
            phase,
        }
    }

    /// It was given a slot.
    pub fn start(&mut self) {
        let tokens = self.tokens.len();
        self.phase = tracing::info_span!(parent: &self.span, "prefill", choice = self.choice, tokens);
    }

    /// It was preempted and waits again.
    pub fn requeue(&mut self, kind: Preemption) {
        self.phase = match kind {
            Preemption::Recompute => {
                tracing::info_span!(parent: &self.span, "preempted", choice = self.choice)
            }
            Preemption::Swap => tracing::info_span!(parent: &self.span, "swapped", choice = self.choice),
        };
    }

    /// Appends a token. Returns the hash of the block that it fills, if it fills one.
    pub fn push(&mut self, token: u32, block_tokens: usize) -> Option<BlockHash> {
        self.tokens.push(token);
        let known = self.chain.len();
        BlockHash::extend_chain(&mut self.chain, self.root, &self.tokens, block_tokens);
        self.chain.get(known).copied()
    }

    /// Whether its newest token ends it.
    pub fn ends_with(&self, token: u32, eos_token_ids: &[u32]) -> bool {
        ends(&self.sampling, token, self.tokens.len() - self.prompt_len, eos_token_ids)
    }

    /// Tokens computed before its first new one: reported once, with that.
    pub fn report_computed(&mut self) -> u32 {
        if std::mem::replace(&mut self.computed_reported, true) {
            return 0;
        }
        self.phase = tracing::info_span!(parent: &self.span, "decode", choice = self.choice);
        self.computed_tokens
    }

    pub fn event(&self) -> Event {
        Event {
            key: self.key,
            attempt: self.attempt,
            choice: self.choice,
            token: None,
            logprobs: None,
            computed_tokens: 0,
            finish: None,
        }
    }
}

/// Whether a token, the last of so many generated, ends its choice.
pub(super) fn ends(sampling: &SamplingParams, token: u32, generated: usize, eos_token_ids: &[u32]) -> bool {
    let is_end = (!sampling.ignore_eos && eos_token_ids.contains(&token))
        || sampling.stop_token_ids.binary_search(&token).is_ok();
    is_end && generated > sampling.min_tokens as usize
}
