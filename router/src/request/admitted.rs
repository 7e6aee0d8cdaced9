//! An admitted request, ready to be queued.

use std::sync::Arc;

use inflight_contract::{RequestError, RequestShape};
use tracing::Span;

use crate::cluster::bundle::Model;
use crate::dispatcher::SharedDispatcher;
use crate::dispatcher::observer::Billing;
use crate::outcome::{ContextExcess, Outcome};
use crate::output::response_stream::ResponseStream;
use crate::request::admitted_call::AdmittedCall;
use crate::request::checked::ValidRequest;
use crate::request::cursor::{Cursor, stream_id};
use crate::request::grammar_check;
use crate::request::held::Held;
use crate::request::resources::Resources;
use crate::request::resumption;
use crate::request::tokenized::Tokenized;
use crate::trace::TraceContext;

/// Request that fits its model and is not queued yet.
pub(crate) struct Admitted {
    call: AdmittedCall,
    model: Arc<Model>,
    held: Held,
    span: Span,
}

impl Admitted {
    /// Checks the tokens of a request against the limits of its model, and those of a resumed stream against its cursor.
    pub(super) fn new(tokenized: Tokenized, resources: &Resources) -> Result<Self, Outcome> {
        let Tokenized { request, mut prompt } = tokenized;
        let ValidRequest {
            draft,
            served,
            terms,
            caller,
            arrival,
            mut sampling,
            output,
            truncation,
            chat,
            resumed,
            started_at,
            mut held,
            span,
            client,
        } = request;
        served.limits.check_tokens(&prompt, &sampling).map_err(invalid_request)?;
        let tokenized = prompt.len();
        if let Some(truncation) = truncation {
            truncation.apply(&mut prompt);
        }
        let dropped = tokenized.saturating_sub(prompt.len()) as u64;
        if let Some(end) = grammar_check::reasoning_end(&served, &prompt) {
            sampling.begin_constraint_after(end);
        }
        let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let room = served.limits.sequence_tokens().saturating_sub(prompt_tokens);
        let stop = draft.stop;
        // A prompt that leaves no room is rejected below.
        let max_tokens = stop.max_tokens.unwrap_or(resources.options.default_max_tokens.min(room)).max(1);
        let shape = RequestShape { prompt_tokens, max_tokens };
        let scores_only = stop.max_tokens == Some(0);
        served.limits.check_shape(shape).map_err(|error| invalid_shape(error, scores_only))?;
        if stop.min_tokens > max_tokens {
            let reason = format!("min_tokens is {}, more than max_tokens = {max_tokens}", stop.min_tokens);
            return Err(Outcome::field("min_tokens", reason));
        }
        let scored = sampling.prompt_logprobs.is_some();
        if scored && resumed.is_some() {
            let reason = "a stream with log probabilities of the prompt cannot be resumed; start over";
            return Err(Outcome::CursorRejected(reason.to_owned()));
        }
        let (resumable, resume) = (!scored && (draft.resumable || resumed.is_some()), draft.resume);
        let stream = resumed.as_ref().map_or_else(rand::random, |cursor| cursor.stream);
        let mut call = AdmittedCall {
            request_id: Some(draft.request_id)
                .filter(|id| !id.is_empty())
                .unwrap_or_else(|| stream_id(stream)),
            model: served.name,
            lane: served.lane,
            prompt,
            sampling,
            max_tokens,
            stop: stop.stop,
            tenant: terms.tenant,
            key_id: caller.key_id().to_owned(),
            weight: terms.weight,
            priority: terms.priority,
            bounds: terms.bounds,
            arrived: arrival.at,
            deadline: arrival.deadline,
            return_token_ids: draft.return_token_ids,
            discard_output: stop.max_tokens == Some(0),
            require_fingerprint: Some(draft.require_fingerprint).filter(|required| !required.is_empty()),
            output: output.map(|output| output.of_stream(stream)),
            chat,
            cursor: None,
            resumes: false,
            resumed: Vec::new(),
            trace: TraceContext::of(&span, &client),
        };
        if resumable {
            let digest = resumption::digest(&call, &draft.event_path);
            match resumed {
                Some(cursor) => {
                    let tokens = resume.and_then(|resume| resume.tokens);
                    resumption::resume_from(&mut call, cursor, digest, tokens)?;
                }
                None => {
                    call.cursor =
                        Some(Cursor::start(stream, call.sampling.seed, digest, call.sampling.n, started_at));
                }
            }
        }
        held.end_reception();
        // Tokens that truncation drops were computed, too: they count as those of a call that only tokenizes.
        held.charge_dropped(dropped)?;
        span.record("tenant", &call.tenant);
        span.record("request_id", &call.request_id);
        span.record("prompt_tokens", call.prompt.len());
        Ok(Self { call, model: served.model, held, span })
    }

    /// Queues the request. Its response must then be read, or it ends after --stall-timeout.
    pub(super) fn submit(self, dispatch: &Arc<SharedDispatcher>) -> Result<ResponseStream, Outcome> {
        let Self { call, model, held, span } = self;
        let charge = held.charge(call.tokens().saturating_sub(call.charged_tokens()))?;
        let (guard, usage, _cold_start) = held.into_guard();
        let ticket = dispatch.submit(call, span, guard, Billing { charge, usage })?;
        Ok(ResponseStream::new(ticket, model))
    }
}

/// Returns the outcome of a request whose prompt leaves no room; `scores_only` if it asks for no tokens.
fn invalid_shape(error: RequestError, scores_only: bool) -> Outcome {
    let RequestError::ContextExceeded { prompt_tokens, max_tokens, context_tokens } = error else {
        return invalid_request(error);
    };
    let reason = match scores_only {
        // Scoring computes the token behind the prompt, too, and drops it.
        true => format!(
            "the prompt has {prompt_tokens} tokens; with max_tokens = 0 it has at most {}, one less than the context of the model",
            context_tokens.saturating_sub(1)
        ),
        false => format!(
            "the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}, together {}; shorten the prompt or lower max_tokens",
            u64::from(prompt_tokens) + u64::from(max_tokens)
        ),
    };
    let prompt_tokens = u64::from(prompt_tokens);
    Outcome::ContextExceeded(Box::new(ContextExcess { context_tokens, prompt_tokens, max_tokens, reason }))
}

fn invalid_request(error: RequestError) -> Outcome {
    match error.field() {
        Some(field) => Outcome::field(field, error),
        None => Outcome::invalid(error),
    }
}
