//! Submission: validates a request and submits a sequence per choice to the scheduler.

use inflight_contract::{BlockHash, FinishReason, Priority, RequestShape};
use inflight_worker_core::{Ended, NewSequence, ScoredRange, SequenceId, SubmitError, Time};

use super::live_choice::{self, LiveChoice};
use super::live_constraint::LiveConstraint;
use super::{ChoiceEvent, Engine, Failure, Finish, Request, ResumedChoice, SessionId, empty_event};

impl Engine {
    /// Submits a request, or pushes the events that reject it.
    pub(super) fn submit(&mut self, request: &Request, now: Time, events: &mut Vec<ChoiceEvent>) {
        if request.key.session != SessionId::SELF_TEST && !self.granting.is_open(request.key.session) {
            return; // the session was closed in the meantime, and with it the response stream
        }
        let outcome = match self.check(request) {
            Ok(()) => self.enqueue(request, now, events),
            Err(failure) => Err(failure),
        };
        if let Err(failure) = outcome {
            for (choice, _) in request.choices.iter().enumerate().filter(|(_, resumed)| !resumed.finished) {
                let finish = Some(Finish::Failed(failure.clone()));
                events.push(ChoiceEvent { finish, ..empty_event(request, choice as u32) });
            }
        }
    }

    fn check(&self, request: &Request) -> Result<(), Failure> {
        if self.draining {
            return Err(Failure::Draining);
        }
        let invalid = |what: String| Err(Failure::Invalid(what));
        if self.live.contains(request.key) {
            return invalid(format!("request {} is in flight already", request.key.request));
        }
        let shape =
            RequestShape { prompt_tokens: request.prompt.len() as u32, max_tokens: request.max_tokens };
        self.model.check_shape(shape).or_else(|error| invalid(error.to_string()))?;
        if let Err(error) = Priority::try_from(request.priority) {
            return invalid(error.to_string());
        }
        let checked = self.model.check_tokens(&request.prompt, &request.sampling);
        checked.or_else(|error| invalid(error.to_string()))?;
        if request.choices.len() != request.sampling.n as usize {
            return invalid(format!("{} choices came for n = {}", request.choices.len(), request.sampling.n));
        }
        for resumed in &request.choices {
            if resumed.tokens.len() > request.max_tokens as usize {
                return invalid(format!("{} tokens are resumed, beyond max_tokens", resumed.tokens.len()));
            }
            if let Some(id) = resumed.tokens.iter().find(|id| **id >= self.model.vocab_size) {
                return invalid(format!("resumed token {id} is outside the vocabulary"));
            }
        }
        Ok(())
    }

    /// Submits every unfinished choice, or none of them on failure.
    fn enqueue(
        &mut self,
        request: &Request,
        now: Time,
        events: &mut Vec<ChoiceEvent>,
    ) -> Result<(), Failure> {
        let block_tokens = self.scheduler.limits().block_tokens() as usize;
        let root = BlockHash::root(&request.tenant);
        // Without hashes, nothing of a self-test comes from the prefix cache or enters it.
        let root = (request.key.session != SessionId::SELF_TEST).then_some(root);
        let extend = |chain: &mut Vec<BlockHash>, tokens: &[u32]| {
            root.into_iter().for_each(|root| BlockHash::extend_chain(chain, root, tokens, block_tokens));
        };
        let mut chain = Vec::new();
        extend(&mut chain, &request.prompt);
        // Choices without resumed tokens share the prefill of the prompt.
        let fresh =
            request.choices.len() > 1 && request.choices.iter().all(|resumed| resumed.tokens.is_empty());
        self.groups += u64::from(fresh);
        let group = fresh.then_some(self.groups);
        let mut finished = Vec::new();
        let mut lives: Vec<(SequenceId, LiveChoice)> = Vec::with_capacity(request.choices.len());
        for (choice, resumed) in request.choices.iter().enumerate().filter(|(_, resumed)| !resumed.finished) {
            let remaining = request.max_tokens - resumed.tokens.len() as u32;
            let (ended, constraint) = match self.resume(request, resumed) {
                Ok(resumed) => resumed,
                Err(failure) => {
                    self.withdraw(&lives);
                    return Err(failure);
                }
            };
            let ended = ended.or((remaining == 0).then_some(FinishReason::Length));
            if let Some(reason) = ended {
                let finish = Some(Finish::Ended(reason));
                finished.push(ChoiceEvent { finish, ..empty_event(request, choice as u32) });
                continue;
            }
            // The lowest unfinished choice delivers the log probabilities of the prompt.
            let scored = if lives.is_empty() { scored_range(request) } else { ScoredRange::default() };
            let mut tokens = Vec::with_capacity(request.prompt.len() + request.max_tokens as usize);
            tokens.extend_from_slice(&request.prompt);
            tokens.extend_from_slice(&resumed.tokens);
            let mut chain = chain.clone();
            extend(&mut chain, &tokens);
            let submitted = self.scheduler.submit(
                NewSequence {
                    known_tokens: tokens.len() as u32,
                    max_tokens: remaining,
                    priority: request.priority,
                    deadline: request.deadline,
                    tenant: &request.tenant,
                    weight: request.weight,
                    hashes: &chain,
                    group,
                    virtual_start_time: request.virtual_start_time,
                    // A resumed choice was charged for its prompt by the worker that generated its tokens.
                    charged_tokens: if resumed.tokens.is_empty() { 0 } else { tokens.len() as u32 },
                    scored,
                },
                now,
            );
            match submitted {
                Ok(id) => {
                    let cost = self.granting.cost_of_choice(request.prompt.len(), resumed.tokens.len());
                    let choice = choice as u32;
                    let live =
                        LiveChoice::new(request, choice, tokens, constraint, root, chain, cost, scored);
                    lives.push((id, live));
                }
                Err(error) => {
                    self.withdraw(&lives);
                    return Err(refusal(error));
                }
            }
        }
        events.append(&mut finished);
        if lives.is_empty() {
            return Ok(());
        }
        let costs = lives.iter().map(|(_, live)| live.cost);
        self.granting.charge(request.key.session, request.prompt.len(), costs);
        self.live.insert(request.key, request.choices.len(), lives);
        Ok(())
    }
}

impl Engine {
    /// Returns the end of a resumed choice that has ended, and else the state of its constraint.
    fn resume(
        &self,
        request: &Request,
        resumed: &ResumedChoice,
    ) -> Result<(Option<FinishReason>, Option<LiveConstraint>), Failure> {
        // The previous worker may have generated the last token without reporting the end.
        let ended = resumed.tokens.last().is_some_and(|last| {
            live_choice::ends(&request.sampling, *last, resumed.tokens.len(), &self.eos_token_ids)
        });
        if ended {
            return Ok((Some(FinishReason::Stop), None));
        }
        let grammars = self.grammars.as_deref();
        let constraint = LiveConstraint::new(request, &resumed.tokens, grammars)?;
        let complete = constraint.as_ref().is_some_and(LiveConstraint::is_complete);
        Ok((complete.then_some(FinishReason::Complete), constraint))
    }

    /// Takes back the choices of a request whose submission fails. They were never live, so `settle` must not report their ends; it reports
    /// those of all other sequences.
    fn withdraw(&mut self, lives: &[(SequenceId, LiveChoice)]) {
        lives.iter().for_each(|(id, _)| self.scheduler.cancel(*id));
        let is_foreign = |ended: &Ended| lives.iter().all(|(id, _)| *id != ended.id);
        self.ended.extend(self.scheduler.drain_ended().filter(is_foreign));
    }
}

/// Returns the failure of a request that the scheduler rejects.
fn refusal(error: SubmitError) -> Failure {
    match error {
        SubmitError::QueueFull { .. } => Failure::Overloaded(error.to_string()),
        SubmitError::Empty | SubmitError::TooLong { .. } => Failure::Invalid(error.to_string()),
    }
}

/// Returns the positions of a request's prompt to score: each gives the log probability of the token behind
/// it.
fn scored_range(request: &Request) -> ScoredRange {
    let end = request.prompt.len() as u32 - 1;
    match request.sampling.prompt_logprobs {
        Some(_) => ScoredRange { start: request.prompt_logprobs_received.min(end), end },
        None => ScoredRange::default(),
    }
}
