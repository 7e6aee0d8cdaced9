use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use inflight_proto::v1;
use inflight_worker_core::{BlockHash, CacheEvent, CacheTier, Grant};
use tokio::sync::Notify;

use super::cache_news::CacheNews;
use crate::engine::{Event, Failure, Finish};
use crate::runtime::{PositionLogprobs, TokenLogprob};

/// Tokens and ends that may wait for a router which does not read; past it the session is closed, and the router
/// resubmits elsewhere what it had.
const PENDING_MAX: usize = 1 << 20;

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
    cost: Option<v1::CostModel>,
    /// Submissions that have reached the engine or were refused before, now and at the last report.
    arrived: u64,
    taken: u64,
    /// What tenants had that were charged since the update before.
    charges: BTreeMap<String, u64>,
    services: Vec<v1::ServiceTable>,
    begun_order: u64,
    routers: u32,
    iteration: u64,
    load: v1::Load,
    grant: v1::Grant,
    draining: bool,
    changed: bool,
    closed: bool,
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
        let mut state = self.state();
        if state.closed {
            return; // nobody will read it
        }
        let key = (event.key.request, event.attempt, event.choice);
        let place = match state.open.get(&key) {
            Some(&place) => place,
            None => {
                let place = state.sequences.len();
                state.sequences.push(v1::SequenceUpdate {
                    request: event.key.request,
                    attempt: event.attempt,
                    choice: event.choice,
                    ..v1::SequenceUpdate::default()
                });
                state.open.insert(key, place);
                place
            }
        };
        state.pending += 1;
        state.changed = true;
        if state.pending > PENDING_MAX {
            tracing::warn!("a router does not read its session; closing it");
            state.closed = true;
        }
        let update = &mut state.sequences[place];
        if let Some(token) = event.token {
            update.token_ids.push(token);
        }
        if let Some(logprobs) = event.logprobs {
            update.logprobs.push(position(&logprobs));
        }
        update.computed_tokens += event.computed_tokens;
        match event.finish {
            None => {}
            Some(Finish::Ended(reason)) => update.finish = v1::FinishReason::from(reason).into(),
            Some(Finish::Failed(failure)) => {
                update.finish = v1::FinishReason::Error.into();
                update.error_code = code(&failure).into();
                update.error = failure.to_string();
            }
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
    pub fn cost(&self, cost: v1::CostModel) {
        self.state().cost = Some(cost);
    }

    /// A submission of the session has reached the engine, or was refused on its way there.
    pub fn arrive(&self) {
        self.state().arrived += 1;
    }

    /// Notes what a tenant has had by now. It can wait for the heartbeat or the next token.
    pub fn charge(&self, tenant: &str, cost: u64) {
        let mut state = self.state();
        match state.charges.get_mut(tenant) {
            Some(known) => *known = cost,
            None => {
                state.charges.insert(tenant.to_owned(), cost);
            }
        }
    }

    /// Adds what is known of other incarnations.
    pub fn teach(&self, services: Vec<v1::ServiceTable>) {
        self.state().services.extend(services);
    }

    /// Sets how far service has got, and how many routers share the worker.
    pub fn share(&self, begun_order: u64, routers: u32) {
        let mut state = self.state();
        state.begun_order = begun_order;
        state.changed |= state.routers != routers;
        state.routers = routers;
    }

    /// Sets what an update says of the worker, and wakes the session if anything is worth sending.
    pub fn report(&self, iteration: u64, load: v1::Load, grant: Grant, draining: bool) {
        let mut state = self.state();
        state.iteration = iteration;
        state.taken = state.arrived;
        state.load = load;
        let grant = v1::Grant { sequences: grant.sequences, blocks: grant.blocks };
        // A changed load alone can wait for the heartbeat or the next token.
        state.changed |= state.grant != grant || state.draining != draining;
        state.grant = grant;
        state.draining = draining;
        if state.changed || state.closed {
            drop(state);
            self.wake.notify_one();
        }
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
        state.changed = !state.cache.is_empty();
        state.pending = 0;
        state.open.clear();
        Some(v1::Update {
            iteration: state.iteration,
            sequences: std::mem::take(&mut state.sequences),
            load: Some(state.load),
            grant: Some(state.grant),
            draining: state.draining,
            charges: std::mem::take(&mut state.charges)
                .into_iter()
                .map(|(tenant, cost)| v1::TenantCharge { tenant, cost })
                .collect(),
            services: std::mem::take(&mut state.services),
            begun_order: state.begun_order,
            routers: state.routers,
            kv_events,
            kv_snapshot,
            cost: state.cost.take(),
            submissions_taken: state.taken,
        })
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
        assert_eq!(update.sequences[0].finish(), v1::FinishReason::Length);
        assert_eq!(update.sequences[1].token_ids.len(), 100);
        mailbox.push(event(8, 1));
        assert_eq!(mailbox.take().unwrap().sequences.len(), 1, "what was taken is not sent again");
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
