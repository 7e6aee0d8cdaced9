//! Engine thread: receives messages of sessions, steps the engine and publishes updates to the outboxes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::sync::Arc;
use std::time::Duration;

use inflight_contract::CostCoefficients;
use inflight_proto::v1;
use inflight_worker_core::{Anticipation, CacheEvent, CacheTier, Conditions, Grant, Load, Time};
use tokio::sync::{mpsc, oneshot};

use super::load_report;
use super::observation::{Collector, Feed};
use super::outbox::{Outbox, WorkerReport};
use super::permits::MeteredPermits;
use super::watchdog::Watchdog;
use crate::engine::{ChoiceEvent, Command, Engine, EngineFailed, Failure, Finish, SessionId, StepReport};
use crate::metrics::{GroupMetrics, StepMetrics, TenantMetrics};
use crate::self_test::{self, SelfTest};

/// Capacity of the engine's message queue; a full queue back-pressures the sessions' request streams.
pub(crate) const COMMANDS_MAX: usize = 4096;

/// Identity of the router at the other end of a session.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RouterName {
    pub id: String,
    /// Random id of the router process; empty if the router does not send one.
    pub incarnation: String,
}

impl RouterName {
    fn is_same_process(&self, other: &Self) -> bool {
        !self.incarnation.is_empty() && self == other
    }
}

/// Where the engine loop runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineExecution {
    /// On a dedicated thread, which steps block.
    Thread,
    /// On a tokio task that sleeps for the reported duration of each step, for simulations on a paused clock.
    Task,
}

/// Message to the engine thread.
pub(crate) enum Message {
    /// Session opened by this router; its updates go to the outbox.
    Open(SessionId, RouterName, Arc<Outbox>),
    /// Command of an open session, with the permits for its memory in the queue, released when the engine takes it.
    Command(Command, Vec<MeteredPermits>),
    /// The session's router requests a snapshot of the prefix cache.
    Resync(SessionId),
    /// Diagnose the worker's bottlenecks.
    Diagnose {
        /// Objectives, and the number of recent iterations to summarize.
        request: v1::DiagnoseRequest,
        /// Channel for the response.
        reply: oneshot::Sender<v1::DiagnoseResponse>,
    },
    /// Collect observations for this feed until it is closed.
    Observe(Arc<Feed>),
    /// A feed was closed.
    Unobserve,
    /// Reject new requests, finish running ones, then return.
    Drain,
    /// Return immediately.
    Stop,
}

/// Clock of the engine: time since its start. Follows tokio's clock, so simulations can pause it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock(tokio::time::Instant);

impl Clock {
    pub fn start() -> Self {
        Self(tokio::time::Instant::now())
    }

    pub fn now(self) -> Time {
        Time::from_nanos(u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Engine loop with everything that it publishes to sessions.
pub(crate) struct EngineThread {
    engine: Engine,
    messages: mpsc::Receiver<Message>,
    clock: Clock,
    outboxes: BTreeMap<SessionId, Arc<Outbox>>,
    routers: BTreeMap<SessionId, RouterName>,
    events: Vec<ChoiceEvent>,
    metrics: StepMetrics,
    group_metrics: GroupMetrics,
    tenant_metrics: TenantMetrics,
    /// Exponential moving average of the step duration, in microseconds.
    step_us: u64,
    draining: bool,
    recording: Option<BufWriter<File>>,
    /// Whether the recording has ended with an error.
    recording_failed: bool,
    cache_events: Vec<(CacheTier, CacheEvent)>,
    /// Number of the next prefix-cache event.
    cache_sequence: u64,
    /// Load at the last metrics update.
    recorded_load: Load,
    watchdog: Arc<Watchdog>,
    anticipation: Anticipation,
    /// Cost coefficients last sent to the routers.
    last_sent_cost: CostCoefficients,
    /// Collects for observers; `None` without any.
    collector: Option<Box<Collector>>,
    /// `None` if they are off.
    self_test: Option<SelfTest>,
}

impl EngineThread {
    /// Creates the loop; the engine's recording is written to `recording`.
    pub fn new(
        engine: Engine,
        messages: mpsc::Receiver<Message>,
        clock: Clock,
        recording: Option<File>,
        watchdog: Arc<Watchdog>,
        self_test: Option<SelfTest>,
    ) -> Self {
        let metrics = StepMetrics::new(engine.limits(), engine.block_bytes());
        let group_metrics = GroupMetrics::new(engine.facts(), engine.limits().shape.state_blocks() > 0);
        crate::metrics::recording_failed(false);
        Self {
            engine,
            messages,
            clock,
            outboxes: BTreeMap::new(),
            routers: BTreeMap::new(),
            events: Vec::new(),
            metrics,
            group_metrics,
            tenant_metrics: TenantMetrics::new(),
            step_us: 0,
            draining: false,
            recording: recording.map(BufWriter::new),
            recording_failed: false,
            cache_events: Vec::new(),
            cache_sequence: 0,
            recorded_load: Load::default(),
            watchdog,
            anticipation: Anticipation::default(),
            last_sent_cost: CostCoefficients::default(),
            collector: None,
            self_test,
        }
    }

    /// Runs until it is drained or stopped, all senders are gone, or the device fails.
    ///
    /// # Errors
    /// [`EngineFailed`] if the device failed.
    pub async fn run(mut self, execution: EngineExecution) -> Result<(), EngineFailed> {
        let outcome = self.run_loop(execution).await;
        self.write_log(true);
        for outbox in self.outboxes.values() {
            outbox.close();
        }
        self.collector.iter().for_each(|collector| collector.close());
        outcome
    }

    async fn run_loop(&mut self, execution: EngineExecution) -> Result<(), EngineFailed> {
        /// Minimum sleep per step on a task, so that simulated time advances.
        const STEP_MIN: Duration = Duration::from_micros(10);
        let mut idle = true;
        loop {
            if idle {
                if self.draining {
                    return Ok(());
                }
                if let Some(message) = self.next_message().await
                    && !message.is_some_and(|message| self.handle(message))
                {
                    return Ok(());
                }
            }
            if !self.handle_queued() {
                return Ok(());
            }
            let now = self.clock.now();
            self.start_self_test(now);
            self.watchdog.begin(now, self.engine.predict_largest_step());
            let stepped = self.engine.step(now, &mut self.events);
            self.watchdog.end();
            idle = stepped.as_ref().is_ok_and(|step| step.idle);
            if let (Ok(step), EngineExecution::Task) = (&stepped, execution) {
                tokio::time::sleep(step.took.max(STEP_MIN)).await;
            }
            let ended = stepped.as_ref().map_or(0, |step| step.ended);
            let self_tested = self.end_self_test();
            self.finish_step(stepped)?;
            self_tested?;
            if !self.anticipate(ended).await {
                return Ok(());
            }
        }
    }

    /// Waits for the next message, `Some(None)` at the end of messages, or for the time of a self-test: `None`.
    async fn next_message(&mut self) -> Option<Option<Message>> {
        let due = self.self_test.as_ref().and_then(SelfTest::due);
        match due {
            Some(due) => {
                let wait = due.since(self.clock.now());
                tokio::time::timeout(wait, self.messages.recv()).await.ok()
            }
            None => Some(self.messages.recv().await),
        }
    }

    /// Starts a self-test if one is due.
    fn start_self_test(&mut self, now: Time) {
        let due = self.self_test.as_mut().filter(|_| !self.draining).and_then(|test| test.start(now));
        if let Some(request) = due {
            self.engine.command(Command::Submit(Box::new(request)), now, &mut self.events);
        }
    }

    /// Takes the events of the self-test out of the others.
    ///
    /// # Errors
    /// [`EngineFailed`]: the device is not to be trusted any more.
    fn end_self_test(&mut self) -> Result<(), EngineFailed> {
        let Some(test) = &mut self.self_test else { return Ok(()) };
        let now = self.clock.now();
        let non_finite = |event: &ChoiceEvent| {
            event.key.session != SessionId::SELF_TEST
                && matches!(event.finish, Some(Finish::Failed(Failure::NonFinite(_))))
        };
        if self.events.iter().any(non_finite) && test.suspect(now) {
            tracing::warn!("logits of a request are infinite or NaN: a self-test follows");
        }
        let mut outcome = Ok(None);
        self.events.retain(|event| {
            let own = event.key.session == SessionId::SELF_TEST;
            if own && let Ok(None) = outcome {
                outcome = test.take(event, now);
            }
            !own
        });
        match outcome {
            Ok(None) => Ok(()),
            Ok(Some(passed)) => {
                crate::metrics::self_test(if passed { "passed" } else { "unanswered" });
                Ok(())
            }
            Err(failed) => {
                crate::metrics::self_test("failed");
                Err(EngineFailed::from(failed))
            }
        }
    }

    /// Waits for the requests that follow `ended` sequences, if that pays and the device has work but none in
    /// flight. Returns false to stop.
    async fn anticipate(&mut self, ended: u32) -> bool {
        if self.engine.in_flight() > 0 || self.engine.load().running == 0 || self.draining {
            return true;
        }
        let most = self.anticipation.wait(ended);
        if most.is_zero() {
            return true;
        }
        let begin = tokio::time::Instant::now();
        let mut followed = 0;
        while followed < ended {
            let Ok(message) = tokio::time::timeout_at(begin + most, self.messages.recv()).await else {
                break;
            };
            let Some(message) = message else { return false };
            followed += u32::from(matches!(message, Message::Command(Command::Submit(_), _)));
            if !self.handle(message) {
                return false;
            }
        }
        self.anticipation.observe_wait(begin.elapsed(), followed > 0);
        self.metrics.anticipation(begin.elapsed(), followed > 0);
        true
    }

    /// Handles queued messages: at most a queue's length, so that a flood of commands can't starve the
    /// engine. Returns false to stop.
    fn handle_queued(&mut self) -> bool {
        for _ in 0..COMMANDS_MAX {
            let Ok(message) = self.messages.try_recv() else { break };
            if !self.handle(message) {
                return false;
            }
        }
        true
    }

    fn finish_step(&mut self, stepped: Result<StepReport, EngineFailed>) -> Result<(), EngineFailed> {
        if let Ok(step) = &stepped {
            self.measure(step);
            if let Some(collector) = &mut self.collector
                && !collector.step(&mut self.engine, &self.routers, step, self.clock.now())
            {
                self.end_observation();
            }
        }
        self.deliver();
        self.write_log(stepped.as_ref().map_or(true, |step| step.idle));
        stepped.map(drop)
    }

    /// Handles one message. Returns false to stop.
    fn handle(&mut self, message: Message) -> bool {
        match message {
            Message::Open(session, router, outbox) => {
                // A router process has one session per worker: opening another one abandons the first.
                let same = self.routers.iter().filter(|(_, other)| router.is_same_process(other));
                let abandoned: Vec<SessionId> = same.map(|(session, _)| *session).collect();
                for old in abandoned {
                    tracing::info!(session = old.0, "closing session: its router has opened another one");
                    self.close(old);
                }
                self.routers.insert(session, router);
                self.publish_cache_events();
                outbox.start_cache_snapshot(self.engine.cache_contents(), self.cache_sequence);
                outbox.set_cost(self.engine.cost_coefficients().into());
                let charged = self.engine.charged().filter(|(tenant, _)| *tenant != self_test::TENANT);
                charged.for_each(|(tenant, charged)| outbox.set_charged(tenant, charged));
                self.outboxes.insert(session, outbox);
                self.engine.command(Command::Open(session), self.clock.now(), &mut self.events);
            }
            Message::Resync(session) => {
                if let Some(outbox) = self.outboxes.get(&session) {
                    outbox.request_cache_snapshot();
                }
            }
            Message::Command(command, _queued) => {
                if let Command::Submit(request) = &command
                    && let Some(outbox) = self.outboxes.get(&request.key.session)
                {
                    outbox.count_submission();
                }
                match command {
                    Command::Close(session) => self.close(session),
                    command => self.engine.command(command, self.clock.now(), &mut self.events),
                }
            }
            Message::Diagnose { request, reply } => {
                let (history, load, limits) =
                    (self.engine.history(), self.engine.load(), self.engine.limits());
                let Grant { sequences, blocks } = self.engine.granted_in_use();
                let in_use = v1::Grant { sequences, kv_blocks: blocks, priority_sequences: 0 };
                let conditions = Conditions {
                    recording_failed: self.recording_failed,
                    block_bytes: self.engine.block_bytes(),
                };
                let (step_us, now) = (self.step_us, self.clock.now());
                let diagnosis =
                    load_report::diagnosis(history, &load, limits, step_us, &request, now, conditions);
                // The caller may have disconnected.
                let _ = reply.send(v1::DiagnoseResponse { granted_in_use: Some(in_use), ..diagnosis });
            }
            Message::Observe(feed) => {
                let block_bytes = self.engine.block_bytes();
                let collector = self.collector.get_or_insert_with(|| Box::new(Collector::new(block_bytes)));
                collector.add(feed);
                self.engine.observe(true);
                collector.state(&self.engine, &self.routers, self.clock.now());
            }
            Message::Unobserve => {
                if !self.collector.as_mut().is_some_and(|collector| collector.prune()) {
                    self.end_observation();
                }
            }
            Message::Drain => {
                self.draining = true;
                self.engine.drain();
            }
            Message::Stop => return false,
        }
        true
    }

    fn end_observation(&mut self) {
        self.collector = None;
        self.engine.observe(false);
    }

    fn close(&mut self, session: SessionId) {
        self.routers.remove(&session);
        self.engine.command(Command::Close(session), self.clock.now(), &mut self.events);
        if let Some(outbox) = self.outboxes.remove(&session) {
            outbox.close();
        }
    }

    /// Returns the number of router processes; sessions without an incarnation count as one process each.
    fn count_routers(&self) -> u32 {
        let named: BTreeSet<&RouterName> =
            self.routers.values().filter(|router| !router.incarnation.is_empty()).collect();
        let unnamed = self.routers.values().filter(|router| router.incarnation.is_empty()).count();
        (named.len() + unnamed) as u32
    }

    /// Writes the engine's new recording; with `flush`, through to the file.
    fn write_log(&mut self, flush: bool) {
        let log = self.engine.take_log(); // also without a file, or it would grow without bound
        let Some(file) = &mut self.recording else { return };
        let written = file.write_all(&log);
        let flushed = if flush { file.flush() } else { Ok(()) };
        if let Err(error) = written.and(flushed) {
            tracing::error!(%error, "recording stopped: cannot write the file");
            self.recording = None;
            self.recording_failed = true;
            crate::metrics::recording_failed(true);
        }
    }

    fn deliver(&mut self) {
        self.publish_cache_events();
        self.publish_cost();
        for charge in self.engine.drain_charged().filter(|charge| charge.tenant != self_test::TENANT) {
            self.outboxes.values().for_each(|outbox| outbox.set_charged(charge.tenant, charge.counter));
            self.tenant_metrics.charge(&charge);
        }
        // A tenant that becomes active again starts at the minimum virtual time of the tenants waiting at any
        // router, or, if none wait, at the maximum of those that ran (start-time fair queueing).
        let min_waiting = self.outboxes.values().filter_map(|outbox| outbox.min_waiting_virtual_time()).min();
        let virtual_time = min_waiting.unwrap_or_else(|| self.engine.virtual_time().thousandths());
        let routers = self.count_routers();
        let (load, iteration) = (self.engine.load(), self.engine.iteration());
        let first_token = self.engine.predict_first_token(load_report::TTFT_PROMPT_TOKENS);
        let estimate = self.engine.prefill_estimate();
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let reported_load = v1::Load {
            predicted_ttft_us: micros(first_token),
            prefill_backlog_us: micros(estimate.backlog),
            prefill_slowdown: estimate.slowdown as f32,
            decode_iteration_us: micros(estimate.decode_step),
            ..load_report::load(&load, self.step_us)
        };
        // The sort is stable: it groups by session and keeps each session's order.
        self.events.sort_by_key(|event| event.key.session);
        let mut events = self.events.drain(..).peekable();
        let priority_sequences = self.engine.priority_sequences();
        for ((session, grant), (_, priority_sequences)) in self.engine.grants().zip(priority_sequences) {
            // Drop the events of closed sessions.
            while events.next_if(|event| event.key.session < session).is_some() {}
            let Some(outbox) = self.outboxes.get(&session) else { continue };
            let report = WorkerReport {
                iteration,
                load: reported_load,
                // A draining worker grants nothing, whatever its free capacity.
                grant: if self.draining { Grant::default() } else { grant },
                priority_sequences: if self.draining { 0 } else { priority_sequences },
                draining: self.draining,
                virtual_time,
                routers,
            };
            let of_session = std::iter::from_fn(|| events.next_if(|event| event.key.session == session));
            outbox.deliver(of_session, &report);
        }
        drop(events);
        warn_of_unmet_objectives(&self.recorded_load, &load);
        self.metrics.record(&self.recorded_load, &load);
        self.group_metrics.record(|| self.engine.group_blocks());
        self.group_metrics.record_states(|| self.engine.state_use());
        for waited in self.engine.drain_queueing_times() {
            self.metrics.queueing_time(waited);
        }
        self.metrics.commands.set(self.messages.len() as f64);
        self.recorded_load = load;
    }

    /// Publishes prefix-cache events to all sessions, and starts snapshots for sessions that need one.
    fn publish_cache_events(&mut self) {
        self.cache_events.extend(self.engine.drain_cache_events());
        if !self.cache_events.is_empty() {
            for outbox in self.outboxes.values() {
                outbox.push_cache_events(self.cache_sequence, &self.cache_events);
            }
            self.cache_sequence += self.cache_events.len() as u64;
            self.cache_events.clear();
        }
        for outbox in self.outboxes.values().filter(|outbox| outbox.needs_cache_snapshot()) {
            outbox.start_cache_snapshot(self.engine.cache_contents(), self.cache_sequence);
        }
    }

    /// Publishes the cost coefficients if they changed by more than 3 % since the last time.
    fn publish_cost(&mut self) {
        let now = self.engine.cost_coefficients();
        if now.differs(&self.last_sent_cost, 0.03) {
            self.last_sent_cost = now;
            self.outboxes.values().for_each(|outbox| outbox.set_cost(now.into()));
        }
    }

    fn measure(&mut self, step: &StepReport) {
        if step.tokens == 0 {
            return;
        }
        let elapsed = step.took;
        let micros = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        // Exponential moving average with a window of about eight steps.
        self.step_us = if self.step_us == 0 { micros } else { (self.step_us * 7 + micros) / 8 };
        self.metrics.step(step);
        self.metrics.draft_index_bytes.set(self.engine.draft_index_bytes() as f64);
        self.anticipation.observe_step(elapsed);
        if let Some(blocked) = self.engine.last_plan().blocked {
            crate::metrics::blocked(blocked.by.label());
        }
    }
}

/// Warns once of each objective that cannot be met.
fn warn_of_unmet_objectives(before: &Load, now: &Load) {
    if before.gap_objective_unmet == 0 && now.gap_objective_unmet > 0 {
        tracing::warn!(
            "decodes alone take too long for --slo-gap; allow a longer gap, fewer --max-sequences, or add workers"
        );
    }
    if before.first_token_objective_unmet == 0 && now.first_token_objective_unmet > 0 {
        tracing::warn!("prompts arrive faster than --slo-ttft allows to compute them; add workers");
    }
}
