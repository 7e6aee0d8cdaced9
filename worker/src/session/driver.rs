use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::sync::Arc;
use std::time::Duration;

use inflight_contract::CostCoefficients;
use inflight_proto::v1;
use inflight_worker_core::{CacheEvent, CacheTier, Grant, Load, Time};
use tokio::sync::{mpsc, oneshot};

use super::mailbox::{Mailbox, Report};
use super::pulse::Pulse;
use super::report;
use crate::engine::{Command, Engine, Event, Fatal, SessionId, Turn};
use crate::metrics::StepMetrics;

/// Commands that may wait for the engine; senders wait beyond it, which slows the router's stream down.
pub(crate) const COMMANDS_MAX: usize = 4096;

/// Which router is at the other end of a session.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RouterName {
    pub id: String,
    /// Different after each restart, and from every other router's; empty if it did not say.
    pub incarnation: String,
}

impl RouterName {
    fn is_process(&self, other: &Self) -> bool {
        !self.incarnation.is_empty() && self == other
    }
}

/// What the shell sends to the engine's thread.
pub(crate) enum Message {
    /// A session of this router begins, and hears from the engine through this mailbox.
    Open(SessionId, RouterName, Arc<Mailbox>),
    /// Anything else of a session.
    Command(Command),
    /// The session's router asks for all that the prefix cache holds.
    Resync(SessionId),
    /// Say what limits the worker.
    Diagnose {
        /// Iterations to tell of.
        iterations: u32,
        /// Where the answer goes.
        reply: oneshot::Sender<v1::DiagnoseResponse>,
    },
    /// Take nothing new, finish what runs, then return.
    Drain,
    /// Return now.
    Stop,
}

/// The clock of the engine: nanoseconds since it was made. In a simulation, the runtime's own.
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

/// The thread that turns the engine.
pub(crate) struct Driver {
    engine: Engine,
    messages: mpsc::Receiver<Message>,
    clock: Clock,
    mailboxes: BTreeMap<SessionId, Arc<Mailbox>>,
    routers: BTreeMap<SessionId, RouterName>,
    events: Vec<Event>,
    metrics: StepMetrics,
    step_us: u64,
    draining: bool,
    recording: Option<BufWriter<File>>,
    cache_events: Vec<(CacheTier, CacheEvent)>,
    /// Number of the next event of the prefix cache.
    cache_sequence: u64,
    seen: Load,
    pulse: Arc<Pulse>,
    /// What steps cost, as the routers were told.
    told_cost: CostCoefficients,
}

impl Driver {
    /// `recording` gets what the engine records.
    pub fn new(
        engine: Engine,
        messages: mpsc::Receiver<Message>,
        clock: Clock,
        recording: Option<File>,
        pulse: Arc<Pulse>,
    ) -> Self {
        let metrics = StepMetrics::new(engine.limits().blocks);
        Self {
            engine,
            messages,
            clock,
            mailboxes: BTreeMap::new(),
            routers: BTreeMap::new(),
            events: Vec::new(),
            metrics,
            step_us: 0,
            draining: false,
            recording: recording.map(BufWriter::new),
            cache_events: Vec::new(),
            cache_sequence: 0,
            seen: Load::default(),
            pulse,
            told_cost: CostCoefficients::default(),
        }
    }

    /// Turns the engine until it is told to stop, all senders are gone, or the device fails.
    ///
    /// # Errors
    /// [`Fatal`] if the device failed.
    pub fn run(mut self) -> Result<(), Fatal> {
        let outcome = self.drive();
        self.write_log(true);
        for mailbox in self.mailboxes.values() {
            mailbox.close();
        }
        outcome
    }

    fn drive(&mut self) -> Result<(), Fatal> {
        let mut idle = true;
        loop {
            if idle {
                if self.draining {
                    return Ok(());
                }
                let Some(message) = self.messages.blocking_recv() else { return Ok(()) };
                if !self.take(message) {
                    return Ok(());
                }
            }
            if !self.take_waiting() {
                return Ok(());
            }
            let now = self.clock.now();
            self.pulse.begin(now, self.engine.predict_largest_step());
            let turned = self.engine.turn(now, &mut self.events);
            self.pulse.end();
            idle = turned.as_ref().is_ok_and(|turn| turn.idle);
            self.after(turned)?;
        }
    }

    /// As [`Driver::run`], but on the runtime's clock: what a step says it took is slept.
    ///
    /// # Errors
    /// [`Fatal`] if the device failed.
    pub async fn run_as_task(mut self) -> Result<(), Fatal> {
        let outcome = self.drive_as_task().await;
        self.mailboxes.values().for_each(|mailbox| mailbox.close());
        outcome
    }

    async fn drive_as_task(&mut self) -> Result<(), Fatal> {
        /// A turn that says that it took no time takes this long, so that a simulation gets on.
        const TURN_MIN: Duration = Duration::from_micros(10);
        let mut idle = true;
        loop {
            if idle {
                if self.draining {
                    return Ok(());
                }
                let Some(message) = self.messages.recv().await else { return Ok(()) };
                if !self.take(message) {
                    return Ok(());
                }
            }
            if !self.take_waiting() {
                return Ok(());
            }
            let now = self.clock.now();
            self.pulse.begin(now, self.engine.predict_largest_step());
            let turned = self.engine.turn(now, &mut self.events);
            self.pulse.end();
            idle = turned.as_ref().is_ok_and(|turn| turn.idle);
            if let Ok(turn) = &turned {
                tokio::time::sleep(turn.took.max(TURN_MIN)).await;
            }
            self.after(turned)?;
        }
    }

    /// Takes what waits: at most a queue's worth, so that a flood of commands can't keep the engine from running. Returns
    /// whether to go on.
    fn take_waiting(&mut self) -> bool {
        for _ in 0..COMMANDS_MAX {
            let Ok(message) = self.messages.try_recv() else { break };
            if !self.take(message) {
                return false;
            }
        }
        true
    }

    fn after(&mut self, turned: Result<Turn, Fatal>) -> Result<(), Fatal> {
        if let Ok(turn) = &turned {
            self.measure(turn);
        }
        self.deliver();
        self.write_log(turned.as_ref().map_or(true, |turn| turn.idle));
        turned.map(drop)
    }

    /// Returns whether to go on.
    fn take(&mut self, message: Message) -> bool {
        match message {
            Message::Open(session, router, mailbox) => {
                // A router has one session here: if it opens another, it has given the one before up.
                let same = self.routers.iter().filter(|(_, other)| router.is_process(other));
                let given_up: Vec<SessionId> = same.map(|(session, _)| *session).collect();
                for old in given_up {
                    tracing::info!(session = old.0, "closing session: its router has opened another one");
                    self.close(old);
                }
                self.routers.insert(session, router);
                self.tell_cache();
                mailbox.begin_cache(self.engine.cache_contents(), self.cache_sequence);
                mailbox.cost(self.engine.cost_coefficients().into());
                self.engine.charged().for_each(|(tenant, charged)| mailbox.charge(tenant, charged));
                self.mailboxes.insert(session, mailbox);
                self.engine.command(Command::Open(session), self.clock.now(), &mut self.events);
            }
            Message::Resync(session) => {
                if let Some(mailbox) = self.mailboxes.get(&session) {
                    mailbox.request_cache();
                }
            }
            Message::Command(command) => {
                if let Command::Submit(request) = &command
                    && let Some(mailbox) = self.mailboxes.get(&request.key.session)
                {
                    mailbox.arrive();
                }
                match command {
                    Command::Close(session) => self.close(session),
                    command => self.engine.command(command, self.clock.now(), &mut self.events),
                }
            }
            Message::Diagnose { iterations, reply } => {
                let (history, load, limits) =
                    (self.engine.history(), self.engine.load(), self.engine.limits());
                let held = self.engine.held();
                let held =
                    v1::Grant { sequences: held.sequences, kv_blocks: held.blocks, priority_sequences: 0 };
                let found = report::diagnosis(history, &load, limits, self.step_us, iterations);
                // Whoever asked may be gone.
                let _ = reply.send(v1::DiagnoseResponse { granted_in_use: Some(held), ..found });
            }
            Message::Drain => {
                self.draining = true;
                self.engine.drain();
            }
            Message::Stop => return false,
        }
        true
    }

    fn close(&mut self, session: SessionId) {
        self.routers.remove(&session);
        self.engine.command(Command::Close(session), self.clock.now(), &mut self.events);
        if let Some(mailbox) = self.mailboxes.remove(&session) {
            mailbox.close();
        }
    }

    /// Routers that share the worker: processes, as far as they say which they are, and not sessions.
    fn count_routers(&self) -> u32 {
        let named: BTreeSet<&RouterName> =
            self.routers.values().filter(|router| !router.incarnation.is_empty()).collect();
        let unnamed = self.routers.values().filter(|router| router.incarnation.is_empty()).count();
        (named.len() + unnamed) as u32
    }

    /// Writes what was recorded; to the file itself when there is time for it.
    fn write_log(&mut self, flush: bool) {
        let log = self.engine.take_log(); // taken also if it has nowhere to go, or it would grow
        let Some(file) = &mut self.recording else { return };
        let written = file.write_all(&log);
        let flushed = if flush { file.flush() } else { Ok(()) };
        if let Err(error) = written.and(flushed) {
            tracing::error!(%error, "recording stopped: cannot write the file");
            self.recording = None;
        }
    }

    fn deliver(&mut self) {
        self.tell_cache();
        self.tell_cost();
        for (tenant, charged) in self.engine.drain_charged() {
            self.mailboxes.values().for_each(|mailbox| mailbox.charge(tenant, charged));
        }
        // Whoever comes back starts where the least of those is that wait, at whichever router. Where nobody waits, that
        // is as far as anybody got.
        let least = self.mailboxes.values().filter_map(|mailbox| mailbox.least_waiting()).min();
        let begun = least.unwrap_or_else(|| self.engine.begun().thousandths());
        let routers = self.count_routers();
        let (load, iteration) = (self.engine.load(), self.engine.iteration());
        let first_token = self.engine.predict_first_token(report::PROMPT_TOKENS);
        let outlook = self.engine.prefill_outlook();
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let told = v1::Load {
            predicted_ttft_us: micros(first_token),
            prefill_backlog_us: micros(outlook.ahead),
            prefill_slowdown: outlook.stretch as f32,
            decode_iteration_us: micros(outlook.decode_step),
            ..report::load(&load, self.step_us)
        };
        // Session by session, in the order of each one's events.
        self.events.sort_by_key(|event| event.key.session);
        let mut events = self.events.drain(..).peekable();
        for ((session, grant), (_, urgent)) in self.engine.grants().zip(self.engine.urgent()) {
            // The events of a closed session have nobody to go to.
            while events.next_if(|event| event.key.session < session).is_some() {}
            let Some(mailbox) = self.mailboxes.get(&session) else { continue };
            let report = Report {
                iteration,
                load: told,
                // A draining worker takes nothing new, whatever room it has.
                grant: if self.draining { Grant::default() } else { grant },
                urgent: if self.draining { 0 } else { urgent },
                draining: self.draining,
                begun_order: begun,
                routers,
            };
            let of_session = std::iter::from_fn(|| events.next_if(|event| event.key.session == session));
            mailbox.deliver(of_session, &report);
        }
        drop(events);
        self.metrics.record(&self.seen, &load);
        self.metrics.commands.set(self.messages.len() as f64);
        self.seen = load;
    }

    /// Passes changes of the prefix cache on, and all of it to those that lost some.
    fn tell_cache(&mut self) {
        self.cache_events.extend(self.engine.drain_cache_events());
        if !self.cache_events.is_empty() {
            for mailbox in self.mailboxes.values() {
                mailbox.push_cache_events(self.cache_sequence, &self.cache_events);
            }
            self.cache_sequence += self.cache_events.len() as u64;
            self.cache_events.clear();
        }
        for mailbox in self.mailboxes.values().filter(|mailbox| mailbox.wants_cache()) {
            mailbox.begin_cache(self.engine.cache_contents(), self.cache_sequence);
        }
    }

    /// Says what steps cost once that has changed enough to matter.
    fn tell_cost(&mut self) {
        let now = self.engine.cost_coefficients();
        if now.differs(&self.told_cost, 0.03) {
            self.told_cost = now;
            self.mailboxes.values().for_each(|mailbox| mailbox.cost(now.into()));
        }
    }

    fn measure(&mut self, turn: &Turn) {
        if turn.tokens == 0 {
            return;
        }
        let elapsed = turn.took;
        let micros = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        // An exponential mean over about eight steps.
        self.step_us = if self.step_us == 0 { micros } else { (self.step_us * 7 + micros) / 8 };
        self.metrics.iterations.increment(1);
        self.metrics.step_seconds.record(elapsed.as_secs_f64());
        self.metrics.step_tokens.record(turn.tokens);
        self.metrics.tokens.increment(turn.tokens.into());
        self.metrics.sampled.increment(turn.sampled.into());
        if let Some(blocked) = self.engine.last_plan().blocked {
            crate::metrics::blocked(blocked.by.label());
        }
    }
}
