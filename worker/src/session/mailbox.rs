use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use inflight_contract::Charged;
use inflight_proto::v1;
use inflight_worker_core::{BlockHash, CacheEvent, CacheTier, Grant};
use tokio::sync::Notify;

use super::cache_news::CacheNews;
use crate::engine::{Event, Failure, Finish};
use crate::runtime::{PositionLogprobs, TokenLogprob};

/// Tokens and ends that may wait for a router which does not read; past it the session is closed, and the router
/// resubmits elsewhere what it had.
const PENDING_MAX: usize = 1 << 20;
/// Counters of other incarnations in one update, beyond the first table.
const SERVICES_PIECE: usize = 10_000;

/// Where the engine's thread leaves what a session has to say.
///
/// The engine never waits for a router: what a slow one has not read yet is merged, sequence by sequence, into one
/// larger update.
pub(crate) struct Mailbox {
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Default)]
struct State {
    sequences: Vec<v1::SequenceUpdate>,
    /// Place in `sequences` of each choice that may still be added to.
    open: HashMap<(u64, u32, u32), usize>,
    pending: usize,
    cache: CacheNews,
    /// What steps cost, if it was not told yet.
    cost: Option<v1::CostCoefficients>,
    /// Submissions that have reached the engine or were refused before, now and at the last report.
    arrived: u64,
    taken: u64,
    /// What tenants had that were charged since the update before.
    charges: BTreeMap<String, Charged>,
    /// What is known of other incarnations and not told yet.
    services: VecDeque<v1::ServiceTable>,
    begun_order: u64,
    /// The least that a tenant with requests waiting at the router had, as it said last.
    least_waiting: Option<u64>,
    routers: u32,
    iteration: u64,
    load: v1::Load,
    grant: v1::Grant,
    draining: bool,
    changed: bool,
    closed: bool,
}

/// What a turn has to say of the worker to one session.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Report {
    pub iteration: u64,
    pub load: v1::Load,
    pub grant: Grant,
    /// Sequences beyond it, for what is more important than something else of the session.
    pub urgent: u32,
    pub draining: bool,
    /// How far service has got.
    pub begun_order: u64,
    /// Routers that share the worker.
    pub routers: u32,
}

impl Mailbox {
    pub fn new() -> Self {
        Self { state: Mutex::default(), wake: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every critical section leaves the state whole, so a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds one event.
    pub fn push(&self, event: Event) {
        self.state().extend(std::iter::once(event));
    }

    /// Adds all that a turn brought and says how the worker is, both at once: so no update has a token without the end
    /// that came with it, or a refusal without saying that the worker drains. Wakes the session if anything is worth
    /// sending.
    pub fn deliver(&self, events: impl Iterator<Item = Event>, report: &Report) {
        let mut state = self.state();
        state.extend(events);
        state.iteration = report.iteration;
        state.taken = state.arrived;
        state.load = report.load;
        state.begun_order = report.begun_order;
        let Grant { sequences, blocks } = report.grant;
        let grant = v1::Grant { sequences, kv_blocks: blocks, priority_sequences: report.urgent };
        // A changed load alone can wait for the heartbeat or the next token.
        state.changed |=
            state.grant != grant || state.draining != report.draining || state.routers != report.routers;
        state.grant = grant;
        state.draining = report.draining;
        state.routers = report.routers;
        if state.changed || state.closed {
            drop(state);
            self.wake.notify_one();
        }
    }

    /// Adds changes of the prefix cache, the first of which has this number. What a router does not read is dropped in
    /// the end, and it gets the whole cache once it reads again.
    pub fn push_cache_events(&self, first: u64, events: &[(CacheTier, CacheEvent)]) {
        let mut state = self.state();
        state.cache.push(first, events);
        state.changed = true;
    }

    /// Tells all that the prefix cache holds, before the changes that are numbered from `next` on.
    pub fn begin_cache(&self, contents: impl Iterator<Item = (CacheTier, BlockHash)>, next: u64) {
        let mut state = self.state();
        state.cache.begin(contents, next);
        state.changed = true;
    }

    /// The router asks for all that the prefix cache holds.
    pub fn request_cache(&self) {
        self.state().cache.request();
    }

    /// Whether the router is to be told all that the prefix cache holds.
    pub fn wants_cache(&self) -> bool {
        self.state().cache.is_wanted()
    }

    /// Says what steps cost; it can wait for the heartbeat or the next token.
    pub fn cost(&self, cost: v1::CostCoefficients) {
        self.state().cost = Some(cost);
    }

    /// A submission of the session has reached the engine, or was refused on its way there.
    pub fn arrive(&self) {
        self.state().arrived += 1;
    }

    /// Notes what a tenant has had by now. It can wait for the heartbeat or the next token.
    pub fn charge(&self, tenant: &str, charged: Charged) {
        let mut state = self.state();
        match state.charges.get_mut(tenant) {
            Some(known) => *known = charged,
            None => {
                state.charges.insert(tenant.to_owned(), charged);
            }
        }
    }

    /// Adds what is known of other incarnations. It goes in pieces, one with each update.
    pub fn teach(&self, services: Vec<v1::ServiceTable>) {
        self.state().services.extend(services);
    }

    /// Notes the least that a tenant with requests waiting at the router had, in thousandths of a token of weight 1;
    /// `None`: nothing waits there.
    pub fn set_least_waiting(&self, least: Option<u64>) {
        self.state().least_waiting = least;
    }

    /// As noted last.
    pub fn least_waiting(&self) -> Option<u64> {
        self.state().least_waiting
    }

    /// Tells the session that there is something to take.
    pub fn wake(&self) {
        self.wake.notify_one();
    }

    /// Whether the session is over.
    pub fn is_closed(&self) -> bool {
        self.state().closed
    }

    /// No more will come: the session ends once it has sent what is there.
    pub fn close(&self) {
        self.state().closed = true;
        self.wake.notify_one();
    }

    /// Waits until there is something to take.
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

    /// Takes everything; `None` once the mailbox is closed and empty.
    pub fn take(&self) -> Option<v1::Update> {
        let mut state = self.state();
        if state.closed && !state.changed {
            return None;
        }
        let (kv_snapshot, kv_events) = state.cache.take();
        // The next piece goes with the next update.
        let mut services: Vec<v1::ServiceTable> = Vec::new();
        let mut counters = 0;
        while let Some(table) = state.services.front() {
            counters += table.tenants.len();
            if !services.is_empty() && counters > SERVICES_PIECE {
                break;
            }
            services.extend(state.services.pop_front());
        }
        state.changed = !state.cache.is_empty() || !state.services.is_empty();
        state.pending = 0;
        state.open.clear();
        Some(v1::Update {
            iteration: state.iteration,
            sequences: std::mem::take(&mut state.sequences),
            load: Some(state.load),
            grant: Some(state.grant),
            draining: state.draining,
            services: std::mem::take(&mut state.charges)
                .into_iter()
                .map(|(tenant, Charged { cost, base })| v1::TenantServiceCounter {
                    tenant,
                    service: cost,
                    baseline: base,
                })
                .collect(),
            service_tables: services,
            virtual_time: state.begun_order,
            router_count: state.routers,
            kv_events,
            kv_snapshot,
            cost: state.cost.take(),
            submissions_received: state.taken,
        })
    }
}

impl State {
    fn extend(&mut self, events: impl Iterator<Item = Event>) {
        if self.closed {
            return; // nobody will read them
        }
        events.for_each(|event| self.push(event));
        // Only now, so that what came together goes together.
        if self.pending > PENDING_MAX {
            tracing::warn!("closing session: the router does not read its updates");
            self.closed = true;
        }
    }

    fn push(&mut self, event: Event) {
        let key = (event.key.request, event.attempt, event.choice);
        let place = match self.open.get(&key) {
            Some(&place) => place,
            None => {
                let place = self.sequences.len();
                self.sequences.push(v1::SequenceUpdate {
                    submission_id: event.key.request,
                    attempt: event.attempt,
                    choice: event.choice,
                    ..v1::SequenceUpdate::default()
                });
                self.open.insert(key, place);
                place
            }
        };
        self.pending += 1;
        self.changed = true;
        let update = &mut self.sequences[place];
        if let Some(token) = event.token {
            update.token_ids.push(token);
        }
        if let Some(logprobs) = event.logprobs {
            update.logprobs.push(position(&logprobs));
        }
        update.computed_tokens += event.computed_tokens;
        match event.finish {
            None => {}
            Some(Finish::Ended(reason)) => update.finish_reason = v1::FinishReason::from(reason).into(),
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
        Failure::Overloaded(_) => tonic::Code::ResourceExhausted,
        Failure::Draining | Failure::Device(_) => tonic::Code::Unavailable,
    }
}

fn position(logprobs: &PositionLogprobs) -> v1::PositionLogprobs {
    let token = |one: &TokenLogprob| v1::TokenLogprob { token_id: one.token, logprob: one.logprob };
    v1::PositionLogprobs {
        chosen: Some(token(&logprobs.chosen)),
        top: logprobs.top.iter().map(token).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{RequestKey, SessionId};
    use inflight_contract::FinishReason;

    fn event(request: u64, token: u32) -> Event {
        Event {
            key: RequestKey { session: SessionId(1), request },
            attempt: 1,
            choice: 0,
            token: Some(token),
            logprobs: None,
            computed_tokens: 0,
            finish: None,
        }
    }

    #[test]
    fn what_a_slow_router_has_not_read_is_merged_by_sequence_in_order() {
        let mailbox = Mailbox::new();
        for token in 0..100 {
            mailbox.push(event(7, token));
            mailbox.push(event(8, token + 1000));
        }
        let finish = Some(Finish::Ended(FinishReason::Length));
        mailbox.push(Event { finish, token: None, ..event(7, 0) });
        let update = mailbox.take().unwrap();
        assert_eq!(update.sequences.len(), 2);
        assert_eq!(update.sequences[0].token_ids, (0..100).collect::<Vec<_>>());
        assert_eq!(update.sequences[0].finish_reason(), v1::FinishReason::Length);
        assert_eq!(update.sequences[1].token_ids.len(), 100);
        mailbox.push(event(8, 1));
        assert_eq!(mailbox.take().unwrap().sequences.len(), 1, "what was taken is not sent again");
    }

    #[test]
    fn what_is_known_of_other_incarnations_goes_in_pieces_that_fit_a_message() {
        let mailbox = Mailbox::new();
        let table = |number: usize| {
            let charge = |tenant| v1::TenantServiceCounter {
                tenant: format!("{tenant:0128}"),
                service: 1,
                baseline: 0,
            };
            let tenants = (0..10_000).map(charge).collect();
            v1::ServiceTable { incarnation: number.to_string(), tenants }
        };
        mailbox.teach((0..48).map(table).collect());
        let mut told = Vec::new();
        while told.len() < 48 {
            let update = mailbox.take().unwrap();
            let counters: usize = update.service_tables.iter().map(|table| table.tenants.len()).sum();
            assert!(counters <= SERVICES_PIECE);
            told.extend(update.service_tables.into_iter().map(|table| table.incarnation));
            assert_eq!(mailbox.state().changed, told.len() < 48, "the next piece is sent by itself");
        }
        assert_eq!(told, (0..48).map(|number| number.to_string()).collect::<Vec<_>>());
    }

    #[test]
    fn a_reader_at_any_moment_finds_a_last_token_with_its_end_and_a_refusal_with_the_drain() {
        const TURNS: u64 = 20_000;
        let mailbox = Mailbox::new();
        let report = Report {
            iteration: 0,
            load: v1::Load::default(),
            grant: Grant::default(),
            urgent: 0,
            draining: false,
            begun_order: 0,
            routers: 1,
        };
        let stop = Some(Finish::Ended(FinishReason::Stop));
        let refusal = Some(Finish::Failed(Failure::Draining));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 0..TURNS {
                    let ending =
                        [event(turn, 1), Event { finish: stop.clone(), token: None, ..event(turn, 0) }];
                    mailbox.deliver(ending.into_iter(), &report);
                }
                let refused = Event { finish: refusal.clone(), token: None, ..event(TURNS, 0) };
                mailbox.deliver(std::iter::once(refused), &Report { draining: true, ..report });
                mailbox.close();
            });
            let mut seen = 0;
            while let Some(update) = mailbox.take() {
                for sequence in &update.sequences {
                    seen += 1;
                    match sequence.submission_id {
                        TURNS => assert!(update.draining, "it is refused because the worker drains"),
                        _ => assert_eq!(
                            (sequence.token_ids.len(), sequence.finish_reason()),
                            (1, v1::FinishReason::Stop)
                        ),
                    }
                }
            }
            assert_eq!(seen, TURNS + 1);
        });
    }

    #[test]
    fn a_router_that_never_reads_loses_its_session_and_not_the_worker() {
        let mailbox = Mailbox::new();
        for token in 0..=PENDING_MAX as u32 {
            mailbox.push(event(7, token));
        }
        assert!(mailbox.take().is_some());
        assert!(mailbox.take().is_none(), "the session is over");
    }
}
