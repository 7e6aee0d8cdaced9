//! State of a choice while it waits or runs in the engine.

use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{BlockHash, SamplingParams};
use inflight_worker_core::{Chunk, DraftKind, DraftsWanted, Grant, Preemption, ScoredRange};
use tracing::Span;

use super::drafter::Drafter;
use super::live_constraint::{Consumed, LiveConstraint};
use super::{ChoiceEvent, Failure, Request, RequestKey};

/// Choice of a request, from submission to finish.
pub(super) struct LiveChoice {
    pub key: RequestKey,
    pub attempt: u32,
    pub choice: u32,
    /// Token ids of prompt and output.
    pub tokens: Vec<u32>,
    pub prompt_len: usize,
    pub sampling: Arc<SamplingParams>,
    /// State of the grammar that the output must match.
    pub constraint: Option<LiveConstraint>,
    /// Seed of the block hash chain, keyed per tenant; `None` if nothing of it is cached.
    root: Option<BlockHash>,
    /// Hashes of the full blocks.
    chain: Vec<BlockHash>,
    /// Share of the session's grant in use by this choice.
    pub cost: Grant,
    /// Positions of the prompt to score that no launched iteration has scored.
    pub scored: ScoredRange,
    /// Tokens computed since submission.
    pub computed_tokens: u32,
    /// Index of its sample in the batch launched last.
    pub sample: u32,
    /// Drafts of its next tokens.
    pub drafter: Drafter,
    /// Error to report at the end instead of the finish reason.
    pub failure: Option<Failure>,
    /// Whether it ends because its grammar allows nothing more.
    pub complete: bool,
    computed_reported: bool,
    /// Whether it has had a slot.
    pub has_run: bool,
    /// Time between the request's arrival at the router and its submission.
    pub queued: Option<Duration>,
    span: Span,
    /// Span of the current phase, a child of `span`; closed when replaced or dropped.
    phase: Span,
}

impl LiveChoice {
    /// Creates a waiting choice. `tokens` is prompt and resumed output, `chain` the hashes of its full blocks
    /// from `root`, `scored` the positions of the prompt to score.
    pub fn new(
        request: &Request,
        choice: u32,
        tokens: Vec<u32>,
        constraint: Option<LiveConstraint>,
        root: Option<BlockHash>,
        chain: Vec<BlockHash>,
        cost: Grant,
        scored: ScoredRange,
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
            constraint,
            root,
            chain,
            cost,
            scored,
            computed_tokens: 0,
            sample: 0,
            drafter: Drafter::default(),
            failure: None,
            complete: false,
            computed_reported: false,
            has_run: false,
            queued: request.queued,
            span,
            phase,
        }
    }

    /// Enters the prefill phase: the choice got a slot.
    pub fn start(&mut self) {
        let tokens = self.tokens.len();
        self.has_run = true;
        self.phase = tracing::info_span!(parent: &self.span, "prefill", choice = self.choice, tokens);
    }

    /// Enters the phase of a preempted choice.
    pub fn requeue(&mut self, kind: Preemption) {
        self.phase = match kind {
            Preemption::Recompute => {
                tracing::info_span!(parent: &self.span, "preempted", choice = self.choice)
            }
            Preemption::Swap => tracing::info_span!(parent: &self.span, "swapped", choice = self.choice),
        };
    }

    /// Takes the positions to score in a chunk, which is about to be launched.
    pub fn take_scored(&mut self, chunk: &Chunk) -> ScoredRange {
        let part = self.scored.within(chunk.start, chunk.len);
        self.scored.start = self.scored.start.max(chunk.start + chunk.len);
        part
    }

    /// Appends a token. Returns the block hash if the token completes a block.
    pub fn push(&mut self, token: u32, block_tokens: usize) -> Option<BlockHash> {
        self.tokens.push(token);
        let known = self.chain.len();
        BlockHash::extend_chain(&mut self.chain, self.root?, &self.tokens, block_tokens);
        self.chain.get(known).copied()
    }

    /// Lets the constraint consume a sampled token, before it is appended.
    pub fn consume(&mut self, token: u32) -> Consumed {
        self.constraint.as_mut().map_or(Consumed::Continues, |constraint| constraint.consume(token))
    }

    /// Returns whether `token`, the newest one, stops the choice.
    pub fn ends_with(&self, token: u32, eos_token_ids: &[u32]) -> bool {
        ends(&self.sampling, token, self.tokens.len() - self.prompt_len, eos_token_ids)
    }

    /// Returns the tokens computed before the first new token on the first call, then 0. Enters the decode
    /// phase.
    pub fn report_computed(&mut self) -> u32 {
        if std::mem::replace(&mut self.computed_reported, true) {
            return 0;
        }
        self.phase = tracing::info_span!(parent: &self.span, "decode", choice = self.choice);
        self.computed_tokens
    }

    /// Proposes tokens that follow, at most as many as are wanted, for [`Drafter::take`]: those that its
    /// grammar forces, else those that the MTP layer predicts or that are looked up, as long as its grammar allows them. Returns their kind,
    /// their number and the bytes that the lookup has grown by.
    pub fn propose_drafts(&mut self, wanted: DraftsWanted) -> (DraftKind, usize, usize) {
        let Self { drafter, constraint, tokens, .. } = self;
        if let Some(constraint) = constraint.as_mut().filter(|_| wanted.forced > 0) {
            let forced = constraint.forced_tokens(wanted.forced as usize);
            if !forced.is_empty() {
                let count = forced.len();
                drafter.set(forced);
                return (DraftKind::Forced, count, 0);
            }
        }
        let predicted = drafter.predicted(tokens.len(), wanted.predicted as usize);
        let (mut count, mut grown) = (0, 0);
        if wanted.guessed > 0 && (predicted == 0 || wanted.guessed_first) {
            (count, grown) = drafter.propose(tokens, wanted.guessed as usize);
        }
        let kind = if count == 0 && predicted > 0 {
            drafter.propose_predicted(predicted);
            count = predicted;
            DraftKind::Predicted
        } else {
            DraftKind::Guessed
        };
        let valid = match constraint {
            Some(constraint) if count > 0 => constraint.valid_drafts(drafter.take(count as u32)),
            _ => count,
        };
        (kind, valid, grown)
    }

    pub fn event(&self) -> ChoiceEvent {
        ChoiceEvent {
            key: self.key,
            attempt: self.attempt,
            choice: self.choice,
            token: None,
            logprobs: None,
            prompt_logprobs: Vec::new(),
            computed_tokens: 0,
            finish: None,
        }
    }
}

/// Returns whether `token` is an EOS or stop token that ends a choice with `generated` output tokens.
pub(super) fn ends(sampling: &SamplingParams, token: u32, generated: usize, eos_token_ids: &[u32]) -> bool {
    let is_end = (!sampling.ignore_eos && eos_token_ids.contains(&token))
        || sampling.stop_token_ids.binary_search(&token).is_ok();
    is_end && generated > sampling.min_tokens as usize
}
