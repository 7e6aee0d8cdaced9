//! The engine: the only place where scheduler and runtime meet.
//!
//! [`Engine::turn`] is synchronous and takes the time as an argument; the thread that turns it is a shell (see
//! `session`), so that a deterministic simulation can turn it too.

mod calibrate;
mod live;
mod request;
mod submit;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use std::time::Duration;

use inflight_contract::{
    AdmissionCost, BlockHash, Charged, CostCoefficients, ModelLimits, Service, TenantService, TokenCost,
};
use inflight_worker_core::policy::PolicyKind;
use inflight_worker_core::{
    CacheEvent, CacheTier, Capacity, Chunk, CostModel, CostPrior, Ended, Grant, Grants, History, Iteration,
    Limits, LimitsError, Load, Outcome, PrefillOutlook, QueueAhead, Scheduler, SequenceId, Time, Verdict,
};

use crate::runtime::{self, Batch, BlockCopy, Runtime, Sampled, SlotSetup, TransferDone};
use live::Live;
pub use request::{Command, Event, Failure, Finish, Request, RequestKey, Resumed, SessionId};

/// How the engine is set up beyond its runtime's capabilities.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Sequences that wait at once.
    pub waiting_max: u32,
    /// Most sequences beyond the running ones that routers may have in flight here; as few of them as hide the way
    /// between worker and router, see [`QueueAhead`].
    pub queue_ahead: u32,
    /// Who goes first.
    pub policy: PolicyKind,
    /// Whether blocks whose content is known are shared and found again.
    pub prefix_cache: bool,
    /// How long a step with decodes in it should take at most.
    pub step_target: Option<Duration>,
    /// What the cost model knows before the first step.
    pub prior: CostPrior,
    /// Whether everything that reaches the scheduler is recorded.
    pub record: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            waiting_max: 1024,
            queue_ahead: 16,
            policy: PolicyKind::default(),
            prefix_cache: true,
            step_target: None,
            prior: CostPrior::default(),
            record: false,
        }
    }
}

/// What a turn did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Turn {
    /// Tokens that went through the model; 0 if nothing ran.
    pub tokens: u32,
    /// Tokens sampled.
    pub sampled: u32,
    /// How long the step took.
    pub took: Duration,
    /// Nothing is left to do until a command comes.
    pub idle: bool,
}

/// An iteration that the runtime works on.
#[derive(Debug, Default)]
struct Flight {
    number: u64,
    chunks: Vec<Chunk>,
}

/// The device failed: what ran has ended, and the engine can't go on.
#[derive(Debug, thiserror::Error)]
#[error("engine stopped: {0}")]
pub struct Fatal(String);

/// Scheduler, runtime and the tokens of all live sequences.
pub struct Engine {
    scheduler: Scheduler,
    runtime: Box<dyn Runtime>,
    model: ModelLimits,
    eos_token_ids: Arc<[u32]>,
    grants: Grants<SessionId>,
    ahead: QueueAhead,
    /// Most sequences in flight beyond what the grants divide.
    urgent_max: u32,
    /// Sequences that ended since the iteration completed last.
    ended_since: u32,
    /// Beside the scheduler's table: indexed by `SequenceId::index`.
    live: Vec<Option<Live>>,
    /// The sequence of each choice that still runs.
    requests: BTreeMap<RequestKey, Vec<Option<SequenceId>>>,
    batch: Batch,
    /// Iterations launched and not completed, oldest first.
    flights: VecDeque<Flight>,
    spare: Vec<Flight>,
    /// By `SequenceId::index`: which sample of the batch launched last is the sequence's.
    sample_of: Vec<u32>,
    sampled: Vec<Sampled>,
    verdicts: Vec<Verdict>,
    ended: Vec<Ended>,
    transfers_done: Vec<TransferDone>,
    transfers: usize,
    cache_events: Vec<(CacheTier, CacheEvent)>,
    groups: u64,
    draining: bool,
}

impl Engine {
    /// An idle engine over a runtime.
    ///
    /// # Errors
    /// [`LimitsError`] if the runtime's capabilities and the settings contradict each other.
    pub fn new(
        runtime: Box<dyn Runtime>,
        eos_token_ids: &[u32],
        settings: Settings,
    ) -> Result<Self, LimitsError> {
        let has = runtime.capabilities();
        let limits = Limits {
            host_blocks: has.host_blocks,
            depth: has.depth,
            waiting_max: settings.waiting_max,
            sequence_tokens: has.context_tokens,
            prefix_cache: settings.prefix_cache,
            step_target: settings.step_target,
            ..Limits::new(has.block_tokens, has.blocks, has.slots, has.batch_tokens)
        };
        let tenants = TenantService::new(TokenCost::default(), Scheduler::TENANTS_MAX);
        let model = ModelLimits {
            vocab_size: has.vocab_size,
            context_tokens: has.context_tokens,
            kv_tokens: limits.pool_tokens(),
        };
        let capacity =
            Capacity { sequences: limits.running_max + 1, blocks: limits.blocks - limits.watermark_blocks };
        let cost = CostModel::new(settings.prior);
        let mut scheduler = Scheduler::new(limits, settings.policy.build(), cost, tenants)?;
        if settings.record {
            scheduler.record(settings.policy, &settings.prior);
        }
        // Only where the important overtake can what outranks something in flight do without a grant.
        let ranks = matches!(settings.policy, PolicyKind::Fair | PolicyKind::Priority);
        let urgent_max = if ranks { settings.queue_ahead } else { 0 };
        Ok(Self {
            scheduler,
            runtime,
            model,
            eos_token_ids: eos_token_ids.into(),
            grants: Grants::new(capacity),
            ahead: QueueAhead::new(settings.queue_ahead),
            urgent_max,
            ended_since: 0,
            live: Vec::new(),
            requests: BTreeMap::new(),
            batch: Batch::default(),
            flights: VecDeque::new(),
            spare: Vec::new(),
            sample_of: Vec::new(),
            sampled: Vec::new(),
            verdicts: Vec::new(),
            ended: Vec::new(),
            transfers_done: Vec::new(),
            transfers: 0,
            cache_events: Vec::new(),
            groups: 0,
            draining: false,
        })
    }

    /// What the model takes.
    pub fn model_limits(&self) -> ModelLimits {
        self.model
    }

    /// The scheduler's limits.
    pub fn limits(&self) -> &Limits {
        self.scheduler.limits()
    }

    /// How busy the scheduler is.
    pub fn load(&self) -> Load {
        self.scheduler.load()
    }

    /// What the last iterations did.
    pub fn history(&self) -> &History {
        self.scheduler.history()
    }

    /// Number of the iteration that ran last.
    pub fn iteration(&self) -> u64 {
        self.scheduler.iteration().number
    }

    /// Each session's grant.
    pub fn grants(&self) -> impl Iterator<Item = (SessionId, Grant)> + '_ {
        self.grants.divide(self.scheduler.load().blocks_used)
    }

    /// What each session may have in flight beyond its grant, for what is more important than something else of it.
    pub fn urgent(&self) -> impl Iterator<Item = (SessionId, u32)> + '_ {
        self.grants.urgent(self.urgent_max)
    }

    /// Iterations launched and not completed.
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Makes a choice give way at the next moment it can, if it runs: see [`Scheduler::preempt`].
    pub fn preempt(&mut self, key: RequestKey, choice: u32) {
        let ids = self.requests.get(&key);
        if let Some(Some(id)) = ids.and_then(|ids| ids.get(choice as usize)) {
            self.scheduler.preempt(*id);
        }
    }

    /// What the sessions hold of their grants.
    pub fn held(&self) -> Grant {
        self.grants.held()
    }

    /// From now on every new request is refused.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// The iteration planned last, for metrics.
    pub fn last_plan(&self) -> &Iteration {
        self.scheduler.iteration()
    }

    /// Takes what was recorded since the last call; empty unless [`Settings::record`].
    pub fn take_log(&mut self) -> Vec<u8> {
        self.scheduler.take_log()
    }

    /// Takes the changes of the prefix cache since the last call, in order.
    pub fn drain_cache_events(&mut self) -> impl Iterator<Item = (CacheTier, CacheEvent)> + '_ {
        self.cache_events.extend(self.scheduler.drain_cache_events());
        self.cache_events.drain(..)
    }

    /// All that the prefix cache can find again, changes not taken yet included.
    pub fn cache_contents(&self) -> impl Iterator<Item = (CacheTier, BlockHash)> + '_ {
        self.scheduler.cache_contents()
    }

    /// The cost model's coefficients.
    pub fn cost_coefficients(&self) -> CostCoefficients {
        self.scheduler.cost().coefficients()
    }

    /// What a prompt that comes now has ahead of it.
    pub fn prefill_outlook(&self) -> PrefillOutlook {
        self.scheduler.prefill_outlook()
    }

    /// Takes the tenants charged since the last call, each with all it was charged since it is known.
    pub fn drain_charged(&mut self) -> impl Iterator<Item = (&str, Charged)> + '_ {
        self.scheduler.drain_charged()
    }

    /// All that each tenant was charged since it is known.
    pub fn charged(&self) -> impl Iterator<Item = (&str, Charged)> + '_ {
        self.scheduler.tenants().charged()
    }

    /// The highest order of the sequences that began to run.
    pub fn begun(&self) -> Service {
        self.scheduler.begun()
    }

    /// Predicted time to the first token of a new prompt with this many tokens to compute.
    pub fn predict_first_token(&self, tokens: u32) -> Duration {
        self.scheduler.predict_first_token(tokens)
    }

    /// Predicted duration of the largest step: a full batch of tokens, each at the end of the longest sequence.
    pub fn predict_largest_step(&self) -> Duration {
        let limits = self.scheduler.limits();
        let seconds = self.cost_coefficients().largest_step(
            limits.iteration_tokens,
            limits.running_max,
            limits.sequence_tokens,
        );
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// Takes one command. Events go to `events`.
    pub fn command(&mut self, command: Command, now: Time, events: &mut Vec<Event>) {
        match command {
            Command::Open(session) => self.grants.open(session),
            Command::Backlog { session, waits } => self.grants.set_backlog(session, waits),
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

    /// Plans and launches an iteration if there may be one more in flight, then waits for the oldest if there may
    /// not, or if nothing else is to be done.
    ///
    /// # Errors
    /// [`Fatal`] if the device failed; the events say so for every sequence that took part.
    pub fn turn(&mut self, now: Time, events: &mut Vec<Event>) -> Result<Turn, Fatal> {
        self.take_transfers(now)?;
        let depth = self.scheduler.limits().depth as usize;
        let launched = self.flights.len() < depth && self.launch(now, events)?;
        if launched && self.flights.len() < depth {
            return Ok(Turn::default());
        }
        if !self.flights.is_empty() {
            return self.complete(events);
        }
        if self.transfers > 0 {
            // Nothing else to do: wait for a fence rather than spin.
            if let Err(error) = self.runtime.wait_for_transfer() {
                return Err(self.fail(&error, events));
            }
        }
        Ok(Turn { idle: self.scheduler.is_idle(), ..Turn::default() })
    }

    /// Plans an iteration and launches it. Returns whether there was anything to compute.
    fn launch(&mut self, now: Time, events: &mut Vec<Event>) -> Result<bool, Fatal> {
        self.scheduler.plan(now);
        // Deadlines end sequences in `plan`: their slots must be free before others get them.
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
            self.runtime.attach(*slot, &setup).map_err(|error| Fatal(error.to_string()))?;
        }
        if plan.chunks.is_empty() {
            return Ok(false);
        }
        self.batch.clear();
        let copies = plan.copies.iter().map(|copy| BlockCopy { from: copy.from, to: copy.to });
        self.batch.copies.extend(copies);
        for chunk in &plan.chunks {
            let live = live_mut(&mut self.live, chunk.id);
            let (start, end) = (chunk.start as usize, (chunk.start + chunk.len) as usize);
            let table = self.scheduler.block_table(chunk.id);
            if end <= live.tokens.len() {
                self.batch.push_sequence(&live.tokens[start..end], chunk.start, table);
            } else {
                // Its token is sampled by the iteration in flight: the device fills it in.
                self.batch.push_sequence(&[0], chunk.start, table);
                self.batch.feed_last_row(self.sample_of[chunk.id.index()]);
            }
            if chunk.samples {
                self.batch.sample_last_row(chunk.slot);
            }
        }
        if self.sample_of.len() < self.live.len() {
            self.sample_of.resize(self.live.len(), 0);
        }
        let mut flight = self.spare.pop().unwrap_or_default();
        flight.number = plan.number;
        flight.chunks.clear();
        flight.chunks.extend_from_slice(&plan.chunks);
        for (sample, chunk) in flight.chunks.iter().filter(|chunk| chunk.samples).enumerate() {
            self.sample_of[chunk.id.index()] = sample as u32;
        }
        self.flights.push_back(flight);
        match self.runtime.launch(&mut self.batch) {
            Ok(()) => Ok(true),
            Err(error) => Err(self.fail(&error, events)),
        }
    }

    /// Waits for the oldest iteration in flight, takes its tokens and commits it.
    fn complete(&mut self, events: &mut Vec<Event>) -> Result<Turn, Fatal> {
        let took = match self.runtime.complete(&mut self.sampled) {
            Ok(took) => took,
            Err(error) => return Err(self.fail(&error, events)),
        };
        let Some(flight) = self.flights.pop_front() else { return Ok(Turn::default()) };
        let sampled = self.sampled.len() as u32;
        let tokens = flight.chunks.iter().map(|chunk| chunk.len).sum();
        self.take_samples(&flight, events);
        let outcome = Outcome { verdicts: &self.verdicts, took };
        self.scheduler.commit(flight.number, outcome).map_err(|error| Fatal(error.to_string()))?;
        self.spare.push(flight);
        self.settle(events);
        self.ahead.learn(took, std::mem::take(&mut self.ended_since));
        self.grants.set_sequences(self.scheduler.limits().running_max + self.ahead.depth());
        // The next plan finds out whether there is nothing left to do, cold blocks to keep included.
        Ok(Turn { tokens, sampled, took, idle: false })
    }

    /// Reports the transfers that reached their fences.
    fn take_transfers(&mut self, now: Time) -> Result<(), Fatal> {
        self.runtime.finished_transfers(&mut self.transfers_done);
        for TransferDone { id, succeeded, took } in self.transfers_done.drain(..) {
            self.transfers -= 1;
            let known = self.scheduler.transfer_done(id, succeeded, took, now);
            known.map_err(|error| Fatal(error.to_string()))?;
        }
        Ok(())
    }

    /// Ends all that takes part in any iteration in flight, and tells why.
    fn fail(&mut self, error: &runtime::Error, events: &mut Vec<Event>) -> Fatal {
        for chunk in self.flights.iter().flat_map(|flight| &flight.chunks) {
            if let Some(live) = &mut self.live[chunk.id.index()] {
                live.failure.get_or_insert(Failure::Device(error.to_string()));
            }
        }
        if let Some(oldest) = self.flights.front() {
            // It was planned and not committed, so it is known.
            let _ = self.scheduler.fail(oldest.number);
        }
        self.flights.clear();
        self.settle(events);
        Fatal(error.to_string())
    }

    /// Appends each sampled token to its sequence, judges it and reports it.
    fn take_samples(&mut self, flight: &Flight, events: &mut Vec<Event>) {
        self.verdicts.clear();
        let block_tokens = self.scheduler.limits().block_tokens as usize;
        let mut sampled = self.sampled.drain(..);
        for chunk in &flight.chunks {
            let sample = if chunk.samples { sampled.next() } else { None };
            // Its index is nobody else's while it is in flight, so what is here is the sequence itself, or nothing if
            // that has ended in the meantime.
            let Some(live) = &mut self.live[chunk.id.index()] else {
                self.verdicts.extend(sample.map(|_| Verdict::CONTINUE));
                continue;
            };
            live.computed_tokens += chunk.len;
            let Some(Sampled { token, logprobs }) = sample else { continue };
            let hash = live.push(token, block_tokens);
            let stop = live.ends_with(token, &self.eos_token_ids);
            self.verdicts.push(Verdict { stop, hash });
            let computed_tokens = live.report_computed();
            let event = Event { token: Some(token), logprobs, computed_tokens, ..live.event() };
            events.push(event);
        }
    }

    /// What requests count against their sessions' grants.
    fn cost(&self) -> AdmissionCost {
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

    /// Reports every ended sequence and frees what it held.
    fn settle(&mut self, events: &mut Vec<Event>) {
        let mut ended = std::mem::take(&mut self.ended);
        ended.extend(self.scheduler.drain_ended());
        for slot in self.scheduler.drain_freed_slots() {
            self.runtime.detach(slot);
        }
        self.cache_events.extend(self.scheduler.drain_cache_events());
        for Ended { id, reason } in ended.drain(..) {
            let Some(mut live) = self.live[id.index()].take() else { continue };
            self.grants.release(live.key.session, live.cost);
            self.ended_since += 1;
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
            events.push(Event { finish: Some(finish), ..live.event() });
        }
        self.ended = ended;
    }
}

fn live_mut(live: &mut [Option<Live>], id: SequenceId) -> &mut Live {
    // A planned sequence has not ended, and `settle` alone takes entries out.
    live[id.index()].as_mut().expect("a planned sequence is live")
}

fn bare_event(request: &Request, choice: u32) -> Event {
    Event {
        key: request.key,
        attempt: request.attempt,
        choice,
        token: None,
        logprobs: None,
        computed_tokens: 0,
        finish: None,
    }
}
