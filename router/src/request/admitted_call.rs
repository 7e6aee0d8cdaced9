//! Validated request with all that is needed to run and deliver it.

use std::time::{Duration, Instant};

use inflight_contract::{Priority, SamplingParams, Weight};
use inflight_router_core::{BlockHashChain, LaneId, QueueLimits, RequestSpec};

use crate::request::cursor::Cursor;
use crate::request::output_plan::OutputPlan;
use crate::trace::TraceContext;

/// Validated request with all that is needed to run and deliver it.
#[derive(Debug)]
pub(crate) struct AdmittedCall {
    pub(crate) request_id: String,
    pub(crate) model: String,
    pub(crate) lane: LaneId,
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampling: SamplingParams,
    pub(crate) max_tokens: u32,
    pub(crate) stop: Vec<String>,
    pub(crate) tenant: String,
    /// Id of the caller's key or certificate, for the usage log.
    pub(crate) key_id: String,
    pub(crate) weight: Weight,
    pub(crate) priority: Priority,
    /// Bounds on the waiting requests of its tenant.
    pub(crate) bounds: QueueLimits,
    pub(crate) arrived: Instant,
    pub(crate) deadline: Option<Instant>,
    pub(crate) return_token_ids: bool,
    /// Whether its output, of one token, is dropped: only the log probabilities of its prompt are wanted.
    pub(crate) discard_output: bool,
    /// The only numerics fingerprint it may run on, if requested.
    pub(crate) require_fingerprint: Option<String>,
    /// How its output is parsed; `None`: it is text as it is.
    pub(crate) output: Option<OutputPlan>,
    pub(crate) chat: bool,
    /// Start of a resumable stream, or the position that it is resumed from.
    pub(crate) cursor: Option<Cursor>,
    /// Whether it resumes the stream of an earlier call.
    pub(crate) resumes: bool,
    /// Tokens of each choice that workers continue from; empty for all but resumed requests.
    pub(crate) resumed: Vec<Vec<u32>>,
    pub(crate) trace: TraceContext,
}

impl AdmittedCall {
    /// Returns the maximum tokens of the request: prompt and output of all choices.
    pub(crate) fn tokens(&self) -> u64 {
        self.prompt.len() as u64 + u64::from(self.max_tokens) * u64::from(self.sampling.n)
    }

    /// Returns the tokens of prompt and output that an earlier call of a resumed stream was charged for.
    pub(crate) fn charged_tokens(&self) -> u64 {
        let received = self.cursor.as_ref().map_or(0, Cursor::tokens);
        if received > 0 { self.prompt.len() as u64 + received } else { 0 }
    }

    /// Returns what the dispatcher needs to know of the request.
    pub(crate) fn spec(
        &self,
        chains: Vec<BlockHashChain>,
        since_epoch: impl Fn(Instant) -> Duration,
    ) -> RequestSpec {
        RequestSpec {
            lane: self.lane,
            tenant: self.tenant.clone(),
            weight: self.weight,
            priority: self.priority,
            bounds: self.bounds,
            prompt_tokens: u32::try_from(self.prompt.len()).unwrap_or(u32::MAX),
            max_tokens: self.max_tokens,
            choices: self.sampling.n,
            logprobs: self.sampling.logprobs,
            prompt_logprobs: self.sampling.prompt_logprobs,
            deadline: self.deadline.map(since_epoch),
            require_fingerprint: self.require_fingerprint.clone(),
            resumed: self.resumed.clone(),
            chains,
        }
    }
}
