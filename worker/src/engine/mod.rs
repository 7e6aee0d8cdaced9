//! Engine: runs the continuous-batching loop over scheduler and runtime.
//!
//! [`Engine::step`] is synchronous and takes the time as an argument, so both the engine thread (`session`)
//! and a deterministic simulation can drive it.

mod calibrate;
mod live_choice;
mod live_constraint;
mod mask_pool;
mod masks;
mod reports;
mod request;
mod submit;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{AdmissionCost, ModelLimits, TokenCost, VirtualTokenCounters};
use inflight_grammar::Grammars;
use inflight_runtime::{
    self as runtime, Batch, BlockCopy, PromptLogprobs, Runtime, SCORES_MAX, Sampled, ScoreRow, SlotSetup,
    TransferDone,
};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    CacheEvent, CacheTier, Capacity, Chunk, CostModel, CostPrior, DispatchAhead, Ended, Grant, Grants,
    History, Iteration, IterationOutcome, LimitsError, Load, Scheduler, SchedulerLimits, SequenceId,
    StepTarget, Time, TokenVerdict,
};

use live_choice::LiveChoice;
use live_constraint::{ConstraintEnd, Consumed};
use masks::{IterationMasks, MaskState};
pub use request::{ChoiceEvent, Command, Failure, Finish, Request, RequestKey, ResumedChoice, SessionId};

/// Engine configuration beyond the runtime's capabilities.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EngineOptions {
    /// Maximum waiting sequences.
    pub waiting_max: u32,
    /// Maximum sequences granted to routers beyond the running ones; [`DispatchAhead`] uses as few as hide the
    /// round trip between worker and router.
    pub queue_ahead: u32,
    /// Scheduling policy.
    pub policy: PolicyKind,
    /// Enables prefix caching.
    pub prefix_cache: bool,
    /// Bound of the duration of an iteration with decodes.
    pub step_target: StepTarget,
    /// Prior of the cost model.
    pub prior: CostPrior,
    /// Records all scheduler inputs for replay.
    pub record: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            waiting_max: 1024,
            queue_ahead: 16,
            policy: PolicyKind::default(),
            prefix_cache: true,
            step_target: StepTarget::Unbounded,
            prior: CostPrior::default(),
            record: false,
        }
    }
}

/// Result of [`Engine::step`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Tokens of the completed iteration; 0 if none completed.
    pub tokens: u32,
    /// Tokens sampled in the completed iteration.
    pub sampled: u32,
    /// Duration of the completed iteration.
    pub took: Duration,
    /// Sequences that the completed iteration has ended.
    pub ended: u32,
    /// No work is left until the next command.
    pub idle: bool,
}

/// Iteration launched on the runtime and not completed.
#[derive(Debug, Default)]
struct LaunchedIteration {
    number: u64,
    chunks: Vec<Chunk>,
    /// Number of scored positions by chunk; chunks behind the last scored one are left out.
    scored: Vec<u32>,
    masks: IterationMasks,
}

/// Fatal device failure: running sequences have ended with an error, and the engine can't be used any more.
#[derive(Debug, thiserror::Error)]
#[error("engine stopped: {0}")]
pub struct EngineFailed(String);

/// Scheduler, runtime and the tokens of all live choices.
pub struct Engine {
    scheduler: Scheduler,
    runtime: Box<dyn Runtime>,
    model: ModelLimits,
    eos_token_ids: Arc<[u32]>,
    grammars: Option<Arc<Grammars>>,
    masks: MaskState,
    grants: Grants<SessionId>,
    queue_ahead: DispatchAhead,
    /// Maximum priority sequences in flight beyond the grants.
    priority_sequences_max: u32,
    /// Sequences that ended since the last completed iteration.
    ended_since_completion: u32,
    /// Live choices by `SequenceId::index`.
    live: Vec<Option<LiveChoice>>,
    /// Sequence of each unfinished choice, by request.
    requests: BTreeMap<RequestKey, Vec<Option<SequenceId>>>,
    batch: Batch,
    /// Iterations launched and not completed, oldest first.
    launched: VecDeque<LaunchedIteration>,
    spare: Vec<LaunchedIteration>,
    /// Index of the sequence's sample in the batch launched last, by `SequenceId::index`.
    sample_of: Vec<u32>,
    sampled: Vec<Sampled>,
    scores: Vec<PromptLogprobs>,
    verdicts: Vec<TokenVerdict>,
    ended: Vec<Ended>,
    transfers_done: Vec<TransferDone>,
    transfers: usize,
    cache_events: Vec<(CacheTier, CacheEvent)>,
    /// Groups of choices that share a prefill, numbered from 1.
    groups: u64,
    draining: bool,
}

impl Engine {
    /// Creates an idle engine.
    ///
    /// # Errors
    /// [`LimitsError`] if the runtime's capabilities and `options` contradict each other.
    pub fn new(
        runtime: Box<dyn Runtime>,
        eos_token_ids: &[u32],
        options: EngineOptions,
    ) -> Result<Self, LimitsError> {
        let capabilities = runtime.capabilities();
        let limits = SchedulerLimits {
            host_blocks: capabilities.host_blocks,
            depth: capabilities.depth,
            waiting_max: options.waiting_max,
            sequence_tokens: capabilities.context_tokens,
            prefix_cache: options.prefix_cache,
            step_target: options.step_target,
            iteration_scores: SCORES_MAX,
            ..SchedulerLimits::new(
                capabilities.block_tokens,
                capabilities.blocks,
                capabilities.slots,
                capabilities.batch_tokens,
            )
        };
        let tenants = VirtualTokenCounters::new(TokenCost::default(), Scheduler::TENANTS_MAX);
        let model = ModelLimits {
            vocab_size: capabilities.vocab_size,
            context_tokens: capabilities.context_tokens,
            kv_tokens: limits.pool_tokens(),
        };
        let capacity =
            Capacity { sequences: limits.running_max + 1, blocks: limits.blocks - limits.watermark_blocks };
        let cost = CostModel::new(options.prior);
        let mut scheduler = Scheduler::new(limits, options.policy.build(), cost, tenants)?;
        if options.record {
            scheduler.record(options.policy, &options.prior);
        }
        // Priority sequences need a policy that schedules by priority.
        let by_priority = matches!(options.policy, PolicyKind::Fair | PolicyKind::Priority);
        let priority_sequences_max = if by_priority { options.queue_ahead } else { 0 };
        Ok(Self {
            scheduler,
            runtime,
            model,
            eos_token_ids: eos_token_ids.into(),
            grammars: None,
            masks: MaskState::default(),
            grants: Grants::new(capacity),
            queue_ahead: DispatchAhead::new(options.queue_ahead),
            priority_sequences_max,
            ended_since_completion: 0,
            live: Vec::new(),
            requests: BTreeMap::new(),
            batch: Batch::default(),
            launched: VecDeque::new(),
            spare: Vec::new(),
            sample_of: Vec::new(),
            sampled: Vec::new(),
            scores: Vec::new(),
            verdicts: Vec::new(),
            ended: Vec::new(),
            transfers_done: Vec::new(),
            transfers: 0,
            cache_events: Vec::new(),
            groups: 0,
            draining: false,
        })
    }

    /// Limits that the model sets on requests.
    pub fn model_limits(&self) -> ModelLimits {
        self.model
    }

    /// Limits of the scheduler.
    pub fn limits(&self) -> &SchedulerLimits {
        self.scheduler.limits()
    }

    /// Load of the scheduler.
    pub fn load(&self) -> Load {
        self.scheduler.load()
    }

    /// Statistics of recent iterations.
    pub fn history(&self) -> &History {
        self.scheduler.history()
    }

    /// Number of the iteration planned last.
    pub fn iteration(&self) -> u64 {
        self.scheduler.iteration().number
    }

    /// Grant of each open session.
    pub fn grants(&self) -> impl Iterator<Item = (SessionId, Grant)> + '_ {
        self.grants.divide(self.scheduler.load().blocks_used)
    }

    /// Priority sequences that each session may have in flight beyond its grant: such that outrank one in
    /// flight.
    pub fn priority_sequences(&self) -> impl Iterator<Item = (SessionId, u32)> + '_ {
        self.grants.priority_sequences(self.priority_sequences_max)
    }

    /// Number of iterations launched and not completed.
    pub fn in_flight(&self) -> usize {
        self.launched.len()
    }

    /// Preempts a choice as soon as possible if it runs; see [`Scheduler::preempt`].
    pub fn preempt(&mut self, key: RequestKey, choice: u32) {
        let ids = self.requests.get(&key);
        if let Some(Some(id)) = ids.and_then(|ids| ids.get(choice as usize)) {
            self.scheduler.preempt(*id);
        }
    }

    /// Sum of the grants in use over all sessions.
    pub fn granted_in_use(&self) -> Grant {
        self.grants.in_flight()
    }

    /// Rejects every new request from now on.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Iteration planned last.
    pub fn last_plan(&self) -> &Iteration {
        self.scheduler.iteration()
    }

    /// Executes one command and appends the resulting events to `events`.
    pub fn command(&mut self, command: Command, now: Time, events: &mut Vec<ChoiceEvent>) {
        match command {
            Command::Open(session) => self.grants.open(session),
            Command::Backlog { session, has_waiting } => self.grants.set_backlog(session, has_waiting),
            Command::Close(session) => {
                let of_session =
                    RequestKey { session, request: 0 }..=RequestKey { session, request: u64::MAX };
                let keys: Vec<_> = self.requests.range(of_session).map(|(key, _)| *key).collect();
                for key in keys {
                    self.cancel(key, None);
                }
                self.settle(events);
                self.grants.close(session);
            }
            Command::Submit(request) => self.submit(&request, now, events),
            Command::Cancel { key, choice } => self.cancel(key, choice),
        }
        self.settle(events);
    }

    /// Launches an iteration if fewer than `depth` are in flight. Then, if `depth` are in flight or nothing
    /// was launched, completes the oldest one.
    ///
    /// # Errors
    /// [`EngineFailed`] if the device failed; `events` then end every choice of the iterations in flight.
    pub fn step(&mut self, now: Time, events: &mut Vec<ChoiceEvent>) -> Result<StepReport, EngineFailed> {
        self.take_transfers(now)?;
        let depth = self.scheduler.limits().depth as usize;
        let has_launched = self.launched.len() < depth && self.launch(now, events)?;
        if has_launched && self.launched.len() < depth {
            return Ok(StepReport::default());
        }
        if !self.launched.is_empty() {
            return self.complete(events);
        }
        if self.transfers > 0 {
            // Wait for a transfer rather than spin.
            if let Err(error) = self.runtime.wait_for_transfer() {
                return Err(self.fail(&error, events));
            }
        }
        Ok(StepReport { idle: self.scheduler.is_idle(), ..StepReport::default() })
    }

    /// Plans an iteration and launches it. Returns false if there is nothing to compute.
    fn launch(&mut self, now: Time, events: &mut Vec<ChoiceEvent>) -> Result<bool, EngineFailed> {
        self.scheduler.plan(now);
        // `plan` ends sequences past their deadline: detach their slots before they are attached again.
        self.settle(events);
        let plan = self.scheduler.iteration();
        for preempted in &plan.preempted {
            live_mut(&mut self.live, preempted.id).requeue(preempted.kind);
        }
        let started = plan.transfers.iter().try_for_each(|transfer| self.runtime.start_transfer(transfer));
        self.transfers += plan.transfers.len();
        if let Err(error) = started {
            return Err(self.fail(&error, events));
        }
        for (id, slot) in &plan.admitted {
            let live = live_mut(&mut self.live, *id);
            live.start();
            let eos_token_ids: &[u32] = if live.sampling.ignore_eos { &[] } else { &self.eos_token_ids };
            let (prompt, generated) = live.tokens.split_at(live.prompt_len);
            let setup = SlotSetup {
                sampling: live.sampling.clone(),
                choice: live.choice,
                prompt,
                generated,
                eos_token_ids,
            };
            self.runtime.attach(*slot, &setup).map_err(|error| EngineFailed(error.to_string()))?;
        }
        if plan.chunks.is_empty() {
            return Ok(false);
        }
        self.batch.clear();
        let copies = plan.copies.iter().map(|copy| BlockCopy { from: copy.from, to: copy.to });
        self.batch.copies.extend(copies);
        let mut launched = self.spare.pop().unwrap_or_default();
        launched.scored.clear();
        launched.masks.clear();
        for (at, chunk) in plan.chunks.iter().enumerate() {
            let live = live_mut(&mut self.live, chunk.id);
            let scored = live.take_scored(chunk);
            if !scored.is_empty() {
                let first_row = self.batch.rows() as u32;
                let top = live.sampling.prompt_logprobs.unwrap_or(0);
                self.batch.scores.extend((scored.start..scored.end).map(|position| ScoreRow {
                    row: first_row + position - chunk.start,
                    token: live.tokens[position as usize + 1],
                    top,
                }));
                launched.scored.resize(at, 0);
                launched.scored.push(scored.len());
            }
            let (start, end) = (chunk.start as usize, (chunk.start + chunk.len) as usize);
            let table = self.scheduler.block_table(chunk.id);
            if end <= live.tokens.len() {
                self.batch.push_sequence(&live.tokens[start..end], chunk.start, table);
            } else {
                // The token is sampled by the iteration in flight and filled in by the device.
                self.batch.push_sequence(&[0], chunk.start, table);
                self.batch.feed_last_row(self.sample_of[chunk.id.index()]);
            }
            if chunk.samples {
                self.batch.sample_last_row(chunk.slot);
                if live.constraint.is_some() {
                    self.batch.mask_last_sample();
                    launched.masks.chunks.push(at);
                }
            }
        }
        if self.sample_of.len() < self.live.len() {
            self.sample_of.resize(self.live.len(), 0);
        }
        launched.number = plan.number;
        launched.chunks.clear();
        launched.chunks.extend_from_slice(&plan.chunks);
        for (sample, chunk) in launched.chunks.iter().filter(|chunk| chunk.samples).enumerate() {
            self.sample_of[chunk.id.index()] = sample as u32;
        }
        self.launched.push_back(launched);
        if self.launched.len() == 1 {
            self.start_masks();
        }
        match self.runtime.launch(&mut self.batch) {
            Ok(()) => Ok(true),
            Err(error) => Err(self.fail(&error, events)),
        }
    }

    /// Waits for the oldest launched iteration, appends its tokens and commits it.
    fn complete(&mut self, events: &mut Vec<ChoiceEvent>) -> Result<StepReport, EngineFailed> {
        let completed = self.supply_masks().and_then(|()| self.runtime.complete(&mut self.sampled));
        let took = match completed {
            Ok(took) => took,
            Err(error) => return Err(self.fail(&error, events)),
        };
        let Some(launched) = self.launched.pop_front() else { return Ok(StepReport::default()) };
        self.scores.clear();
        self.runtime.take_scores(&mut self.scores);
        let sampled = self.sampled.len() as u32;
        let tokens = launched.chunks.iter().map(|chunk| chunk.len).sum();
        self.take_samples(&launched, events);
        let outcome = IterationOutcome { verdicts: &self.verdicts, took };
        self.scheduler.commit(launched.number, outcome).map_err(|error| EngineFailed(error.to_string()))?;
        self.spare.push(launched);
        let before = self.ended_since_completion;
        self.settle(events);
        self.start_masks();
        let ended = self.ended_since_completion - before;
        self.queue_ahead.learn(took, std::mem::take(&mut self.ended_since_completion));
        self.grants.set_sequences(self.scheduler.limits().running_max + self.queue_ahead.depth());
        // Whether the engine is idle is known after the next plan, which may still offload cold blocks.
        Ok(StepReport { tokens, sampled, took, ended, idle: false })
    }

    /// Reports finished transfers to the scheduler.
    fn take_transfers(&mut self, now: Time) -> Result<(), EngineFailed> {
        self.runtime.finished_transfers(&mut self.transfers_done);
        for TransferDone { id, succeeded, took } in self.transfers_done.drain(..) {
            self.transfers -= 1;
            let known = self.scheduler.transfer_done(id, succeeded, took, now);
            known.map_err(|error| EngineFailed(error.to_string()))?;
        }
        Ok(())
    }

    /// Ends all choices of the iterations in flight with `error`.
    fn fail(&mut self, error: &runtime::Error, events: &mut Vec<ChoiceEvent>) -> EngineFailed {
        for chunk in self.launched.iter().flat_map(|launched| &launched.chunks) {
            if let Some(live) = &mut self.live[chunk.id.index()] {
                live.failure.get_or_insert(Failure::Device(error.to_string()));
            }
        }
        if let Some(oldest) = self.launched.front() {
            // The scheduler knows every iteration that is planned and not committed.
            let _ = self.scheduler.fail(oldest.number);
        }
        self.launched.clear();
        self.masks.forget();
        self.settle(events);
        EngineFailed(error.to_string())
    }

    /// Appends each sampled token to its choice, checks stop conditions and pushes an event; before it, one with
    /// the log probabilities of the prompt tokens that the chunk has scored.
    fn take_samples(&mut self, launched: &LaunchedIteration, events: &mut Vec<ChoiceEvent>) {
        self.verdicts.clear();
        let block_tokens = self.scheduler.limits().block_tokens as usize;
        let (mut sampled, mut scores) = (self.sampled.drain(..), self.scores.drain(..));
        for (at, chunk) in launched.chunks.iter().enumerate() {
            let sample = if chunk.samples { sampled.next() } else { None };
            let scored = launched.scored.get(at).map_or(0, |scored| *scored as usize);
            let prompt_logprobs: Vec<_> = scores.by_ref().take(scored).collect();
            // The index is not reused while the iteration is in flight: the entry is this sequence, or empty
            // if it has ended.
            let Some(live) = &mut self.live[chunk.id.index()] else {
                self.verdicts.extend(sample.map(|_| TokenVerdict::CONTINUE));
                continue;
            };
            live.computed_tokens += chunk.len;
            if !prompt_logprobs.is_empty() {
                events.push(ChoiceEvent { prompt_logprobs, ..live.event() });
            }
            let Some(Sampled { token, logprobs }) = sample else { continue };
            let consumed = live.consume(token);
            if let Consumed::Ended(end) = consumed {
                if let ConstraintEnd::Failed(reason) = end {
                    live.failure.get_or_insert(Failure::Constraint(reason));
                }
                self.verdicts.push(TokenVerdict { stop: true, hash: None });
                continue;
            }
            let hash = live.push(token, block_tokens);
            let stop = consumed == Consumed::Completes || live.ends_with(token, &self.eos_token_ids);
            self.verdicts.push(TokenVerdict { stop, hash });
            let computed_tokens = live.report_computed();
            let event = ChoiceEvent { token: Some(token), logprobs, computed_tokens, ..live.event() };
            events.push(event);
        }
    }

    /// Cost of requests against their sessions' grants.
    fn admission_cost(&self) -> AdmissionCost {
        AdmissionCost::new(self.scheduler.limits().block_tokens)
    }

    fn cancel(&mut self, key: RequestKey, choice: Option<u32>) {
        let Some(ids) = self.requests.get(&key) else { return };
        match choice {
            Some(choice) => {
                if let Some(Some(id)) = ids.get(choice as usize) {
                    self.scheduler.cancel(*id);
                }
            }
            None => ids.iter().flatten().for_each(|id| self.scheduler.cancel(*id)),
        }
    }

    /// Reports every ended sequence and frees its slot and its share of the grant.
    fn settle(&mut self, events: &mut Vec<ChoiceEvent>) {
        let mut ended = std::mem::take(&mut self.ended);
        ended.extend(self.scheduler.drain_ended());
        for slot in self.scheduler.drain_freed_slots() {
            self.runtime.detach(slot);
        }
        self.cache_events.extend(self.scheduler.drain_cache_events());
        for Ended { id, reason } in ended.drain(..) {
            let Some(mut live) = self.live[id.index()].take() else { continue };
            self.grants.release(live.key.session, live.cost);
            self.ended_since_completion += 1;
            if let Some(ids) = self.requests.get_mut(&live.key) {
                if let Some(entry) = ids.get_mut(live.choice as usize) {
                    *entry = None;
                }
                if ids.iter().all(Option::is_none) {
                    self.requests.remove(&live.key);
                    let blocks =
                        AdmissionCost::new(self.scheduler.limits().block_tokens).prompt(live.prompt_len);
                    self.grants.release(live.key.session, Grant { sequences: 0, blocks });
                }
            }
            metrics::counter!(crate::metrics::ENDED, "reason" => reason.label()).increment(1);
            let finish = live.failure.take().map_or(Finish::Ended(reason), Finish::Failed);
            events.push(ChoiceEvent { finish: Some(finish), ..live.event() });
        }
        self.ended = ended;
    }
}

fn live_mut(live: &mut [Option<LiveChoice>], id: SequenceId) -> &mut LiveChoice {
    // Planned sequences have not ended, and only `settle` removes entries.
    live[id.index()].as_mut().expect("a planned sequence is live")
}

fn empty_event(request: &Request, choice: u32) -> ChoiceEvent {
    ChoiceEvent {
        key: request.key,
        attempt: request.attempt,
        choice,
        token: None,
        logprobs: None,
        prompt_logprobs: Vec::new(),
        computed_tokens: 0,
        finish: None,
    }
}
