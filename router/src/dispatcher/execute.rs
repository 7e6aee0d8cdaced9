//! Carrying out the dispatcher's commands.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Instant;

use inflight_router_core::{ClientCommand, Command, Event, Failure, RequestId, WorkerCommand, WorkerId};

use super::request::DeliveryEffect;
use super::state::DispatcherState;
use super::transition::Transition;
use super::{Aftermath, SharedDispatcher};
use crate::clock;
use crate::metrics as names;
use crate::outcome::Outcome;

impl SharedDispatcher {
    /// Applies an event and carries out its commands. A client whose buffer overflows becomes a further event.
    pub(super) fn apply(&self, state: &mut DispatcherState, event: Event) -> Aftermath {
        let now = clock::now();
        let mut aftermath = Aftermath::default();
        let updated = match &event {
            Event::Updated { worker, .. } => Some(*worker),
            _ => None,
        };
        let mut behind = self.apply_one(state, event, now, &mut aftermath);
        while let Some(request) = behind.pop() {
            tracing::debug!(
                request_id = state.request_id(request),
                "pausing request: the client is too far behind its stream"
            );
            let event = Event::ClientBehind { request };
            behind.extend(self.apply_one(state, event, now, &mut aftermath));
        }
        if let Some(worker) = updated {
            state.set_worker_gauges(worker);
        }
        state.set_queue_gauges();
        aftermath
    }

    /// Applies one event. Returns the requests whose clients are too far behind.
    fn apply_one(
        &self,
        state: &mut DispatcherState,
        event: Event,
        now: Instant,
        aftermath: &mut Aftermath,
    ) -> Vec<RequestId> {
        let mut behind = Vec::new();
        let mut commands = std::mem::take(&mut state.commands);
        let since = self.since_epoch(now);
        if let Some(recorder) = &mut state.recorder {
            recorder.log.event(&event, since);
        }
        state.core.apply(event, since, &mut commands);
        if let Some(recorder) = &mut state.recorder {
            recorder.log.commands(&commands);
        }
        for command in commands.drain(..) {
            match command {
                Command::Worker { worker, command } => Self::send(state, worker, command, now),
                Command::Client { request, command } => {
                    let effect = self.pass(state, request, command, now, aftermath);
                    if effect == DeliveryEffect::Overfull && !behind.contains(&request) {
                        behind.push(request);
                    }
                }
                Command::CloseSession { violation, .. } => {
                    aftermath.violation.get_or_insert(violation);
                }
                Command::TopologyChanged => self.publish(state),
                Command::LaneForgotten { lane } => {
                    state.models.remove(&lane);
                    let DispatcherState { core, aliases, .. } = &mut *state;
                    aliases.retain(|name| core.lane_loads().any(|(model, ..)| model == name));
                }
                Command::RoutersChanged { routers } => {
                    self.routers.store(routers, Ordering::Relaxed);
                    tracing::info!(routers, "router count changed; limits are divided among routers");
                    metrics::gauge!(names::ROUTERS).set(routers);
                }
                Command::Notice(notice) => state.report(notice, now),
            }
        }
        state.commands = commands;
        behind
    }

    fn send(state: &DispatcherState, worker: WorkerId, command: WorkerCommand, now: Instant) {
        let submits = matches!(command, WorkerCommand::Submit(_));
        if let WorkerCommand::Submit(submission) = &command
            && let Some(active) = state.requests.get(submission.request)
        {
            let (submission, attempt) = (submission.id, submission.attempt);
            active.observe(&Transition::Submitted { worker, submission, attempt }, now);
        }
        state.send(worker, command);
        if submits {
            state.set_worker_gauges(worker);
        }
    }

    /// Passes something to a client's stream.
    fn pass(
        &self,
        state: &mut DispatcherState,
        request: RequestId,
        command: ClientCommand,
        now: Instant,
        aftermath: &mut Aftermath,
    ) -> DeliveryEffect {
        let Some(active) = state.requests.get(request) else { return DeliveryEffect::Taken };
        let readers = &mut aftermath.readers;
        match command {
            ClientCommand::Reject(failure) => active.reject(self.outcome(failure, &active.call.model)),
            ClientCommand::Placed(placed) => {
                let address = state.address(placed.worker);
                active.place(placed, address, now, readers);
            }
            ClientCommand::Deliver(output) => {
                return active.deliver(output, self.options.client_buffer_tokens, now, readers);
            }
            ClientCommand::Pause => active.pause(now, readers),
            ClientCommand::Fail(failure) => {
                // The stream may not be polled: its client does not read.
                if matches!(failure, Failure::DeadlineExceeded | Failure::ClientStalled { .. }) {
                    state.ended.push(request);
                }
                active.fail(self.outcome(failure, &active.call.model), now, readers);
            }
        }
        DeliveryEffect::Taken
    }

    /// Returns the outcome of a request that has failed.
    fn outcome(&self, failure: Failure, model: &str) -> Outcome {
        Outcome::of_failure(
            failure,
            model,
            self.options.dispatcher.no_worker_timeout,
            self.options.retry_delay,
        )
    }

    /// Publishes whether the router is ready, and the names of the served models.
    fn publish(&self, state: &DispatcherState) {
        let (configured, connected) = state.core.workers();
        metrics::gauge!(names::WORKERS_CONFIGURED).set(configured as f64);
        metrics::gauge!(names::WORKERS_CONNECTED).set(connected as f64);
        let mixed: Vec<String> = state.core.mixed_lanes().map(str::to_owned).collect();
        metrics::gauge!(names::MIXED_FINGERPRINTS).set(mixed.len() as f64);
        let ready = state.core.is_ready();
        self.ready.send_if_modified(|now| std::mem::replace(now, ready) != ready);
        let names: BTreeSet<String> =
            state.core.served_lanes().map(|(_, lane)| lane.name().to_owned()).collect();
        let aliases = names.iter().flat_map(|name| state.aliases.aliases_of(name)).map(str::to_owned);
        let served: BTreeSet<String> = names.iter().cloned().chain(aliases).collect();
        if let Some(hub) = &self.live {
            hub.set_models(names.iter().cloned());
            hub.set_mixed_models(mixed);
        }
        self.served.send_if_modified(|now| {
            let changed = *now != served;
            *now = served;
            changed
        });
    }
}
