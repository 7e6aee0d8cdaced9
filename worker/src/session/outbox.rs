//! Outbox of a session: engine events and worker state, merged into one update until the session sends it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use inflight_contract::{FinishReason, ServiceCounter};
use inflight_proto::v1;
use inflight_worker_core::{BlockHash, CacheEvent, CacheTier, Grant};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::cache_feed::CacheFeed;
use crate::engine::{ChoiceEvent, Failure, Finish};

/// Maximum pending events of a session; a router that does not read and exceeds it loses the session, and
/// resubmits its requests to other workers.
const PENDING_MAX: usize = 1 << 20;
/// Maximum service counters of other incarnations in one update, beyond the first table.
const COUNTERS_PER_UPDATE: usize = 10_000;
/// Log probabilities of prompt tokens in one update, in positions, each with up to 21 tokens; the rest follows in the next ones, so
/// that tokens of other sequences do not wait until all of a long prompt's are read.
const PROMPT_POSITIONS_PER_UPDATE: usize = 1024;
/// Maximum tenants whose charges are pending; routers accept no more in one update.
const CHARGES_MAX: usize = 1 << 16;

/// Pending update of a session, written by the engine thread and taken by the session's response stream.
///
/// The engine never blocks on a router: events that a slow one has not read are merged by choice into one
/// larger update.
pub(crate) struct Outbox {
    state: Mutex<OutboxState>,
    wake: Notify,
    /// Cancelled when it is closed.
    closed: CancellationToken,
}

#[derive(Default)]
struct OutboxState {
    sequences: Vec<v1::SequenceUpdate>,
    /// Index in `sequences` by submission, attempt and choice.
    open: HashMap<(u64, u32, u32), usize>,
    /// Events merged since the last update was taken, and log probabilities of prompt tokens.
    pending: usize,
    cache: CacheFeed,
    /// Cost coefficients not sent yet.
    cost: Option<v1::CostCoefficients>,
    /// Submissions that reached the engine or were rejected before it.
    arrived: u64,
    reported_arrived: u64,
    /// Total charges of the tenants charged since the last update.
    charges: BTreeMap<String, ServiceCounter>,
    /// Service tables of other incarnations not sent yet.
    service_tables: VecDeque<v1::ServiceTable>,
    virtual_time: u64,
    /// Minimum virtual time of the tenants waiting at the router, as last reported by it.
    min_waiting_virtual_time: Option<u64>,
    routers: u32,
    iteration: u64,
    load: v1::Load,
    grant: v1::Grant,
    draining: bool,
    changed: bool,
    closed: bool,
}

/// State of the worker after a step, as reported to one session.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkerReport {
    pub iteration: u64,
    pub load: v1::Load,
    pub grant: Grant,
    /// Sequences beyond the grant that outrank a sequence of the session in flight.
    pub priority_sequences: u32,
    pub draining: bool,
    /// Virtual time of the worker, in thousandths of a token at weight 1.
    pub virtual_time: u64,
    /// Number of routers connected to the worker.
    pub routers: u32,
}

impl Outbox {
    pub fn new() -> Self {
        Self { state: Mutex::default(), wake: Notify::new(), closed: CancellationToken::new() }
    }

    fn state(&self) -> MutexGuard<'_, OutboxState> {
        // Every critical section leaves the state consistent, so poisoning can be ignored.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds one event without waking the session.
    pub fn push(&self, event: ChoiceEvent) {
        let mut state = self.state();
        state.extend(std::iter::once(event));
        self.notify_closed(&state);
    }

    /// Wakes the tasks that wait in [`Outbox::closed`], if it is closed.
    fn notify_closed(&self, state: &OutboxState) {
        if state.closed {
            self.closed.cancel();
        }
    }

    /// Adds the events and the report of a step atomically: no update has a token without the end that came
    /// with it, or a rejection without the drain that caused it. Wakes the session if there is a change to
    /// send.
    pub fn deliver(&self, events: impl Iterator<Item = ChoiceEvent>, report: &WorkerReport) {
        let mut state = self.state();
        state.extend(events);
        state.iteration = report.iteration;
        state.reported_arrived = state.arrived;
        state.load = report.load;
        state.virtual_time = report.virtual_time;
        let Grant { sequences, blocks } = report.grant;
        let grant = v1::Grant { sequences, kv_blocks: blocks, priority_sequences: report.priority_sequences };
        // A changed load alone can wait for the heartbeat or the next token.
        state.changed |=
            state.grant != grant || state.draining != report.draining || state.routers != report.routers;
        state.grant = grant;
        state.draining = report.draining;
        state.routers = report.routers;
        self.notify_closed(&state);
        if state.changed || state.closed {
            drop(state);
            self.wake.notify_one();
        }
    }

    /// Queues prefix-cache events, the first of which is number `first`; see [`CacheFeed::push`].
    pub fn push_cache_events(&self, first: u64, events: &[(CacheTier, CacheEvent)]) {
        let mut state = self.state();
        state.cache.push(first, events);
        state.changed = true;
    }

    /// Starts a snapshot of the prefix cache; later events are numbered from `next`.
    pub fn start_cache_snapshot(&self, contents: impl Iterator<Item = (CacheTier, BlockHash)>, next: u64) {
        let mut state = self.state();
        state.cache.start_snapshot(contents, next);
        state.changed = true;
    }

    /// Requests a snapshot of the prefix cache on behalf of the router.
    pub fn request_cache_snapshot(&self) {
        self.state().cache.request_snapshot();
    }

    /// Returns whether [`Outbox::start_cache_snapshot`] must be called.
    pub fn needs_cache_snapshot(&self) -> bool {
        self.state().cache.needs_snapshot()
    }

    /// Sets the cost coefficients for the next update, without waking the session.
    pub fn set_cost(&self, cost: v1::CostCoefficients) {
        self.state().cost = Some(cost);
    }

    /// Counts a submission that reached the engine or was rejected before it.
    pub fn count_submission(&self) {
        self.state().arrived += 1;
    }

    /// Sets a tenant's total charges for the next update, without waking the session. Closes the outbox if there
    /// are too many.
    pub fn set_charged(&self, tenant: &str, charged: ServiceCounter) {
        let mut state = self.state();
        if state.closed {
            return; // no update is sent any more
        }
        match state.charges.get_mut(tenant) {
            Some(known) => *known = charged,
            None => {
                state.charges.insert(tenant.to_owned(), charged);
            }
        }
        if state.charges.len() > CHARGES_MAX {
            state.overflow();
            self.notify_closed(&state);
            drop(state);
            self.wake.notify_one();
        }
    }

    /// Queues service tables of other incarnations; they are sent in pieces, one per update.
    pub fn send_service_tables(&self, tables: Vec<v1::ServiceTable>) {
        self.state().service_tables.extend(tables);
    }

    /// Sets the minimum virtual time of the tenants waiting at the router, in thousandths of a token at
    /// weight 1; `None` if none wait.
    pub fn set_min_waiting_virtual_time(&self, min: Option<u64>) {
        self.state().min_waiting_virtual_time = min;
    }

    /// Minimum virtual time of the tenants waiting at the router, as last set.
    pub fn min_waiting_virtual_time(&self) -> Option<u64> {
        self.state().min_waiting_virtual_time
    }

    /// Wakes the session to take an update.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// Waits until the outbox is closed.
    pub async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// Closes the outbox: the session ends after it has sent the pending update.
    pub fn close(&self) {
        self.state().closed = true;
        self.closed.cancel();
        self.wake.notify_one();
    }

    /// Waits until there is an update to send or the outbox is closed.
    pub async fn changed(&self) {
        loop {
            let woken = self.wake.notified();
            {
                let state = self.state();
                if state.changed || state.closed {
                    return;
                }
            }
            woken.await;
        }
    }

    /// Takes the pending update; `None` once the outbox is closed and empty.
    pub fn take(&self) -> Option<v1::Update> {
        let mut state = self.state();
        if state.closed && !state.changed {
            return None;
        }
        let (kv_snapshot, kv_events) = state.cache.take();
        // The remaining tables are sent with the next updates.
        let mut service_tables: Vec<v1::ServiceTable> = Vec::new();
        let mut counters = 0;
        while let Some(table) = state.service_tables.front() {
            counters += table.tenants.len();
            if !service_tables.is_empty() && counters > COUNTERS_PER_UPDATE {
                break;
            }
            service_tables.extend(state.service_tables.pop_front());
        }
        let sequences = state.take_sequences();
        state.changed =
            !state.cache.is_empty() || !state.service_tables.is_empty() || !state.sequences.is_empty();
        Some(v1::Update {
            iteration: state.iteration,
            sequences,
            load: Some(state.load),
            grant: Some(state.grant),
            draining: state.draining,
            services: std::mem::take(&mut state.charges)
                .into_iter()
                .map(|(tenant, ServiceCounter { cost, base })| v1::TenantServiceCounter {
                    tenant,
                    service: cost,
                    baseline: base,
                })
                .collect(),
            service_tables,
            virtual_time: state.virtual_time,
            router_count: state.routers,
            kv_events,
            kv_snapshot,
            cost: state.cost.take(),
            submissions_received: state.reported_arrived,
        })
    }
}

impl OutboxState {
    /// Merges events; closes the outbox if too many are pending.
    fn extend(&mut self, events: impl Iterator<Item = ChoiceEvent>) {
        if self.closed {
            return; // no update is sent any more
        }
        events.for_each(|event| self.push(event));
        // Checked after all events, so that events of one step stay together.
        if self.pending > PENDING_MAX {
            self.overflow();
        }
    }

    /// Closes the outbox of a router that does not read, and drops the pending update.
    fn overflow(&mut self) {
        tracing::warn!("closing session: the router does not read its updates");
        *self = Self { closed: true, ..Self::default() };
    }

    /// Takes the pending events, but of log probabilities of prompt tokens no more than fit into an update, in equal parts; what such a
    /// sequence has beyond them stays, its tokens and its end included.
    fn take_sequences(&mut self) -> Vec<v1::SequenceUpdate> {
        let mut taken = std::mem::take(&mut self.sequences);
        self.open.clear();
        self.pending = 0;
        let scored = || taken.iter().map(|update| update.prompt_logprobs.len()).filter(|scored| *scored > 0);
        if scored().sum::<usize>() <= PROMPT_POSITIONS_PER_UPDATE {
            return taken;
        }
        let part = (PROMPT_POSITIONS_PER_UPDATE / scored().count()).max(1);
        for update in &mut taken {
            if update.prompt_logprobs.len() <= part {
                continue;
            }
            let rest = update.prompt_logprobs.split_off(part);
            let first = v1::SequenceUpdate {
                submission_id: update.submission_id,
                attempt: update.attempt,
                choice: update.choice,
                prompt_logprobs: std::mem::replace(&mut update.prompt_logprobs, rest),
                ..v1::SequenceUpdate::default()
            };
            let kept = std::mem::replace(update, first);
            self.pending += 1 + kept.token_ids.len() + kept.prompt_logprobs.len();
            self.open.insert((kept.submission_id, kept.attempt, kept.choice), self.sequences.len());
            self.sequences.push(kept);
        }
        taken
    }

    fn push(&mut self, event: ChoiceEvent) {
        let key = (event.key.request, event.attempt, event.choice);
        let index = match self.open.get(&key) {
            Some(&index) => index,
            None => {
                let index = self.sequences.len();
                self.sequences.push(v1::SequenceUpdate {
                    submission_id: event.key.request,
                    attempt: event.attempt,
                    choice: event.choice,
                    ..v1::SequenceUpdate::default()
                });
                self.open.insert(key, index);
                index
            }
        };
        self.pending += 1 + event.prompt_logprobs.len();
        self.changed = true;
        let update = &mut self.sequences[index];
        if let Some(token) = event.token {
            update.token_ids.push(token);
        }
        if let Some(logprobs) = event.logprobs {
            update.logprobs.push((*logprobs).into());
        }
        update.prompt_logprobs.extend(event.prompt_logprobs.into_iter().map(Into::into));
        update.computed_tokens += event.computed_tokens;
        match event.finish {
            None => {}
            Some(Finish::Ended(reason)) => {
                update.finish_reason = v1::FinishReason::from(reason).into();
                update.grammar_complete = reason == FinishReason::Complete;
            }
            Some(Finish::Failed(failure)) => {
                update.finish_reason = v1::FinishReason::Error.into();
                update.error_code = code(&failure).into();
                update.error = failure.to_string();
            }
        }
    }
}

fn code(failure: &Failure) -> tonic::Code {
    match failure {
        Failure::Invalid(_) => tonic::Code::InvalidArgument,
        Failure::Constraint(_) => tonic::Code::FailedPrecondition,
        Failure::Overloaded(_) => tonic::Code::ResourceExhausted,
        // Routers resubmit it elsewhere, and end it if it fails there, too.
        Failure::NonFinite(_) => tonic::Code::DataLoss,
        Failure::Draining | Failure::Device(_) => tonic::Code::Unavailable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_runtime::{PromptLogprobs, TokenLogprob};

    use crate::engine::{RequestKey, SessionId};

    fn event(request: u64, token: u32) -> ChoiceEvent {
        ChoiceEvent {
            key: RequestKey { session: SessionId(1), request },
            attempt: 1,
            choice: 0,
            token: Some(token),
            logprobs: None,
            prompt_logprobs: Vec::new(),
            computed_tokens: 0,
            finish: None,
        }
    }

    #[test]
    fn unread_events_of_a_slow_router_are_merged_by_sequence_in_order() {
        let outbox = Outbox::new();
        for token in 0..100 {
            outbox.push(event(7, token));
            outbox.push(event(8, token + 1000));
        }
        let finish = Some(Finish::Ended(FinishReason::Length));
        outbox.push(ChoiceEvent { finish, token: None, ..event(7, 0) });
        let update = outbox.take().unwrap();
        assert_eq!(update.sequences.len(), 2);
        assert_eq!(update.sequences[0].token_ids, (0..100).collect::<Vec<_>>());
        assert_eq!(update.sequences[0].finish_reason(), v1::FinishReason::Length);
        assert_eq!(update.sequences[1].token_ids.len(), 100);
        outbox.push(event(8, 1));
        assert_eq!(outbox.take().unwrap().sequences.len(), 1, "taken events are not sent again");
    }

    #[test]
    fn log_probabilities_of_long_prompts_come_in_parts_before_their_tokens_and_delay_no_others() {
        let outbox = Outbox::new();
        let scored = |count: usize| {
            let token = TokenLogprob { token: 1, logprob: -1.0 };
            (0..count).map(|_| PromptLogprobs { token, rank: 1, top: Vec::new() }).collect::<Vec<_>>()
        };
        let finish = Some(Finish::Ended(FinishReason::Length));
        for request in [1, 2] {
            let prompt_logprobs = scored(5000);
            outbox.push(ChoiceEvent { token: None, prompt_logprobs, ..event(request, 0) });
            outbox.push(ChoiceEvent { finish: finish.clone(), ..event(request, 9) });
        }
        outbox.push(ChoiceEvent { prompt_logprobs: scored(100), finish: finish.clone(), ..event(3, 9) });
        outbox.push(ChoiceEvent { finish, ..event(4, 9) });
        let (mut updates, mut received, mut ended) = (0, BTreeMap::<u64, usize>::new(), BTreeMap::new());
        while outbox.state().changed {
            updates += 1;
            let update = outbox.take().unwrap();
            let positions: usize = update.sequences.iter().map(|one| one.prompt_logprobs.len()).sum();
            assert!(positions <= PROMPT_POSITIONS_PER_UPDATE, "{positions}");
            for one in update.sequences {
                assert!(!ended.contains_key(&one.submission_id));
                *received.entry(one.submission_id).or_default() += one.prompt_logprobs.len();
                if one.finish_reason() == v1::FinishReason::Length {
                    assert_eq!(one.token_ids, [9]);
                    ended.insert(one.submission_id, updates);
                }
            }
        }
        assert_eq!(received, [(1, 5000), (2, 5000), (3, 100), (4, 0)].into());
        assert_eq!((ended[&3], ended[&4]), (1, 1));
        assert_eq!((ended[&1], ended[&2]), (updates, updates));
        assert_eq!(outbox.state().pending, 0);
    }

    #[tokio::test]
    async fn the_outbox_of_a_router_that_does_not_read_is_bounded_and_closes() {
        let charged = ServiceCounter { cost: 1, base: 0 };
        let by_charges = Outbox::new();
        for tenant in 0..2 * CHARGES_MAX {
            by_charges.set_charged(&tenant.to_string(), charged);
        }
        let by_events = Outbox::new();
        for token in 0..PENDING_MAX as u32 + 2 {
            by_events.push(event(7, token));
        }
        for outbox in [by_charges, by_events] {
            outbox.closed().await;
            assert!(outbox.take().is_none(), "nothing is kept for it");
        }
        let read = Outbox::new();
        for tenant in 0..2 * CHARGES_MAX {
            read.set_charged(&tenant.to_string(), charged);
            if tenant % CHARGES_MAX == 0 {
                assert!(read.take().is_some());
            }
        }
        assert!(!read.state().closed);
    }

    #[test]
    fn service_tables_are_sent_in_pieces_that_fit_a_message() {
        let outbox = Outbox::new();
        let table = |number: usize| {
            let charge = |tenant| v1::TenantServiceCounter {
                tenant: format!("{tenant:0128}"),
                service: 1,
                baseline: 0,
            };
            let tenants = (0..10_000).map(charge).collect();
            v1::ServiceTable { incarnation: number.to_string(), tenants }
        };
        outbox.send_service_tables((0..48).map(table).collect());
        let mut sent = Vec::new();
        while sent.len() < 48 {
            let update = outbox.take().unwrap();
            let counters: usize = update.service_tables.iter().map(|table| table.tenants.len()).sum();
            assert!(counters <= COUNTERS_PER_UPDATE);
            sent.extend(update.service_tables.into_iter().map(|table| table.incarnation));
            assert_eq!(outbox.state().changed, sent.len() < 48, "the next piece is sent by itself");
        }
        assert_eq!(sent, (0..48).map(|number| number.to_string()).collect::<Vec<_>>());
    }

    #[test]
    fn a_last_token_comes_with_its_end_and_a_rejection_with_the_drain() {
        const STEPS: u64 = 20_000;
        let outbox = Outbox::new();
        let report = WorkerReport {
            iteration: 0,
            load: v1::Load::default(),
            grant: Grant::default(),
            priority_sequences: 0,
            draining: false,
            virtual_time: 0,
            routers: 1,
        };
        let stop = Some(Finish::Ended(FinishReason::Stop));
        let rejection = Some(Finish::Failed(Failure::Draining));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for step in 0..STEPS {
                    let ending =
                        [event(step, 1), ChoiceEvent { finish: stop.clone(), token: None, ..event(step, 0) }];
                    outbox.deliver(ending.into_iter(), &report);
                }
                let rejected = ChoiceEvent { finish: rejection.clone(), token: None, ..event(STEPS, 0) };
                outbox.deliver(std::iter::once(rejected), &WorkerReport { draining: true, ..report });
                outbox.close();
            });
            let mut received = 0;
            while let Some(update) = outbox.take() {
                for sequence in &update.sequences {
                    received += 1;
                    match sequence.submission_id {
                        STEPS => assert!(update.draining, "it is rejected because the worker drains"),
                        _ => assert_eq!(
                            (sequence.token_ids.len(), sequence.finish_reason()),
                            (1, v1::FinishReason::Stop)
                        ),
                    }
                }
            }
            assert_eq!(received, STEPS + 1);
        });
    }
}
