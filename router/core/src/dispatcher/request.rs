//! An admitted request: its phase, its journal, and what sequence updates do to it.

use std::sync::Arc;
use std::time::Duration;

use inflight_contract::FinishReason;

use super::non_finite::{NonFiniteAttempts, Position};
use crate::{
    AppendOutcome, ChoiceOutput, ClientCommand, Command, Failure, FailureBlame, Journal, LaneId, LossStreak,
    Notice, QueuePosition, RequestId, RequestSpec, SequenceEnd, SequenceUpdate, SessionId, SubmissionId,
    Violation, WorkerId,
};

/// Phase of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// In the queue.
    Queued(QueuePosition<LaneId>),
    /// In the retry queue, after losing its worker.
    AwaitingRetry,
    /// In quarantine: waiting for a worker of its own, after losing two in a row.
    Quarantined,
    /// On no worker until its client reads again.
    Paused,
    /// On a worker, as this submission.
    Running { worker: WorkerId, session: SessionId, submission: SubmissionId },
    /// Ended.
    Ended,
}

/// Effect of a sequence update on its request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum UpdateEffect {
    /// None.
    None,
    /// New output for the client.
    Progress,
    /// Dropped: it belongs to an older attempt.
    Stale,
    /// The request has failed: cancel the submission. `fault` if the worker is at fault.
    Failed { fault: bool },
    /// The worker returned the request: cancel the submission and resubmit it elsewhere.
    Returned,
    /// The model's logits were not finite: cancel the submission and resubmit it elsewhere. Whose fault it is, that attempt shows.
    NonFinite,
}

/// Admitted request, until its client's call ends.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) id: RequestId,
    pub(super) spec: RequestSpec,
    phase: Phase,
    pub(super) journal: Journal,
    /// Worker that lost or returned the latest attempt.
    pub(super) avoid: Option<WorkerId>,
    /// Consecutive worker losses without progress.
    pub(super) losses: LossStreak,
    /// Attempts that ended because the model's logits were not finite.
    non_finite: NonFiniteAttempts,
    /// Whether the latest attempt is quarantined: alone on its worker.
    pub(super) alone: bool,
    /// Time since which no serving worker is large enough.
    pub(super) unfit_since: Option<Duration>,
    /// Fingerprint of the worker of the latest attempt.
    pub(super) fingerprint: Option<Arc<str>>,
    /// Queue position that it was last dispatched from; `None` before the first dispatch.
    pub(super) position: Option<QueuePosition<LaneId>>,
    /// Whether the client's stream knows how much of the prompt was found in a prefix cache.
    reported_cached: bool,
}

impl Request {
    pub(super) fn new(id: RequestId, spec: RequestSpec, position: QueuePosition<LaneId>) -> Self {
        let scored = spec.scored_tokens();
        let with_logprobs = spec.logprobs.is_some();
        let journal = Journal::resume(spec.choices, spec.max_tokens, with_logprobs, scored, &spec.resumed);
        Self {
            id,
            spec,
            phase: Phase::Queued(position),
            journal,
            avoid: None,
            losses: LossStreak::default(),
            non_finite: NonFiniteAttempts::default(),
            alone: false,
            unfit_since: None,
            fingerprint: None,
            position: None,
            reported_cached: false,
        }
    }

    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    /// Marks it as waiting in the queue.
    pub(super) fn set_queued(&mut self, position: QueuePosition<LaneId>) {
        self.enter(Phase::Queued(position));
    }

    /// Marks it as waiting to be submitted again.
    pub(super) fn set_awaiting_retry(&mut self) {
        self.enter(Phase::AwaitingRetry);
    }

    /// Marks it as waiting for a worker of its own.
    pub(super) fn set_quarantined(&mut self) {
        self.enter(Phase::Quarantined);
    }

    /// Marks it as waiting for its client to read.
    pub(super) fn set_paused(&mut self) {
        self.enter(Phase::Paused);
    }

    /// Marks it as running on a worker.
    pub(super) fn set_running(&mut self, worker: WorkerId, session: SessionId, submission: SubmissionId) {
        self.enter(Phase::Running { worker, session, submission });
    }

    /// Enters a phase; a request that has ended stays so.
    fn enter(&mut self, phase: Phase) {
        debug_assert!(self.phase != Phase::Ended, "a request that has ended enters {phase:?}");
        self.phase = phase;
    }

    /// Ends it. Returns its phase before. The caller removes it from the queue or its worker.
    pub(super) fn end(&mut self) -> Phase {
        std::mem::replace(&mut self.phase, Phase::Ended)
    }

    pub(super) fn expired(&self, now: Duration) -> bool {
        self.spec.deadline.is_some_and(|deadline| deadline <= now)
    }

    /// Whether it waits for a worker.
    pub(super) fn waits(&self) -> bool {
        matches!(self.phase, Phase::Queued(_) | Phase::AwaitingRetry | Phase::Quarantined)
    }

    /// Records a dispatch to a worker with this fingerprint. If the stream continues with another one,
    /// returns the tokens of each choice before the change.
    pub(super) fn set_fingerprint(&mut self, fingerprint: &Arc<str>) -> Option<Vec<u32>> {
        let before = self.fingerprint.replace(fingerprint.clone());
        let begun = self.journal.tokens() > 0 || self.journal.scored() > 0;
        let changed = begun && before.is_some_and(|before| before != *fingerprint);
        changed.then(|| self.journal.resumed().map(|choice| choice.tokens.len() as u32).collect())
    }

    /// Fails the request. The caller removes it from the queue or its worker.
    pub(super) fn fail(&mut self, failure: Failure, commands: &mut Vec<Command>) {
        let ended = self.end() == Phase::Ended;
        if !ended {
            self.send(ClientCommand::Fail(failure), commands);
        }
    }

    /// Starts the next attempt. Choices whose last tokens have arrived without their end are ended; if that
    /// ends the request, returns true.
    pub(super) fn next_attempt(&mut self, commands: &mut Vec<Command>) -> bool {
        let complete = self.journal.next_attempt();
        for choice in (0..self.spec.choices).filter(|choice| complete & (1 << choice) != 0) {
            let finish = Some(FinishReason::Length);
            let output = ChoiceOutput {
                choice,
                tokens: Vec::new(),
                logprobs: Vec::new(),
                prompt_logprobs: Vec::new(),
                finish,
                computed_prompt: None,
            };
            self.send(ClientCommand::Deliver(output), commands);
        }
        self.alone = false;
        if self.journal.ended() {
            self.phase = Phase::Ended;
        }
        self.journal.ended()
    }

    /// Applies a worker's update of `submission`.
    ///
    /// # Errors
    /// [`Violation`] for a protocol violation; the request is unchanged.
    pub(super) fn receive(
        &mut self,
        submission: SubmissionId,
        update: SequenceUpdate,
        vocab_size: u32,
        commands: &mut Vec<Command>,
    ) -> Result<UpdateEffect, Violation> {
        let in_force =
            matches!(self.phase, Phase::Running { submission: current, .. } if current == submission);
        if !in_force {
            return Ok(UpdateEffect::Stale);
        }
        let request = submission;
        let scored =
            update.prompt_logprobs.iter().flat_map(|one| std::iter::once(&one.token).chain(&one.top));
        let scored = scored.map(|one| one.token);
        if let Some(token) = update.tokens.iter().copied().chain(scored).find(|token| *token >= vocab_size) {
            return Err(Violation::UnknownToken { request, token, vocab_size });
        }
        let most = self.spec.logprobs.unwrap_or(0) as usize;
        if let Some(entries) = update.logprobs.iter().map(|one| one.top.len()).find(|top| *top > most) {
            return Err(Violation::Alternatives { request, entries, most });
        }
        let most = self.spec.prompt_logprobs.unwrap_or(0) as usize;
        if let Some(entries) = update.prompt_logprobs.iter().map(|one| one.top.len()).find(|top| *top > most)
        {
            return Err(Violation::Alternatives { request, entries, most });
        }
        if self.journal.withdrawn(update.choice) {
            self.count_unbilled(update.tokens.len(), commands);
            return Ok(UpdateEffect::None);
        }
        let finish = match update.end {
            Some(SequenceEnd::Failed { blame: FailureBlame::Returned, .. })
            // Not requested by the router: the worker drops its requests.
            | Some(SequenceEnd::Finished(FinishReason::Cancelled)) => return Ok(UpdateEffect::Returned),
            Some(SequenceEnd::Failed { blame: FailureBlame::NonFinite, .. }) => {
                return Ok(self.note_non_finite(update.choice, commands));
            }
            Some(SequenceEnd::Failed { blame, code, message }) => {
                self.fail(Failure::Worker { code, message }, commands);
                return Ok(UpdateEffect::Failed { fault: blame == FailureBlame::Worker });
            }
            Some(SequenceEnd::Finished(FinishReason::Deadline)) if self.spec.deadline.is_some() => {
                self.fail(Failure::DeadlineExceeded, commands);
                return Ok(UpdateEffect::Failed { fault: false });
            }
            Some(SequenceEnd::Finished(reason)) => Some(reason),
            None => None,
        };
        let SequenceUpdate { attempt, choice, tokens, logprobs, prompt_logprobs, computed_tokens, .. } =
            update;
        let scored = prompt_logprobs.len();
        let appended = self.journal.append(attempt, choice, &tokens, logprobs.len(), scored, finish);
        match appended.map_err(|error| Violation::Journal { request, error })? {
            AppendOutcome::Appended => {}
            AppendOutcome::AfterEnd | AppendOutcome::Stale => return Ok(UpdateEffect::Stale),
        }
        // One of several choices computes the prompt and the others share it.
        let first = !tokens.is_empty() && !std::mem::replace(&mut self.reported_cached, true);
        let computed_prompt = first.then_some(computed_tokens);
        if !tokens.is_empty() || scored > 0 {
            self.losses.record_token();
        }
        let logprobs = if self.spec.logprobs.is_some() { logprobs } else { Vec::new() };
        let output = ChoiceOutput { choice, tokens, logprobs, prompt_logprobs, finish, computed_prompt };
        self.send(ClientCommand::Deliver(output), commands);
        if self.journal.ended() {
            self.phase = Phase::Ended;
        }
        Ok(UpdateEffect::Progress)
    }

    /// Notes that the logits of a choice were not finite. Fails the request if it is the cause.
    fn note_non_finite(&mut self, choice: u32, commands: &mut Vec<Command>) -> UpdateEffect {
        let tokens = self.journal.tokens_of(choice) as u32;
        if self.non_finite.record(Position { choice, tokens, scored: self.journal.scored() }) {
            self.fail(Failure::NonFinite { choice, tokens, attempts: self.non_finite.count() }, commands);
            return UpdateEffect::Failed { fault: false };
        }
        UpdateEffect::NonFinite
    }

    /// Reports tokens that no client is billed for.
    fn count_unbilled(&self, tokens: usize, commands: &mut Vec<Command>) {
        if tokens > 0 {
            let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
            commands.push(Command::Notice(Notice::Unbilled { request: self.id, tokens }));
        }
    }

    /// Passes something to the client's stream.
    pub(super) fn send(&self, command: ClientCommand, commands: &mut Vec<Command>) {
        commands.push(Command::Client { request: self.id, command });
    }
}
