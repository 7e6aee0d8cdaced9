//! Event loop of a single worker: arrivals, steps and transfers on a virtual clock.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use inflight_worker_core::{
    Anticipation, Chunk, CommitError, DraftKind, IterationOutcome, NewSequence, Preempted, Preemption,
    Scheduler, ScoredRange, SequenceId, Time, TokenVerdict, TransferId,
};

use crate::{AcceptanceTrace, BatchWork, Device, Observer, Request, RequestEvent, StepSample};

/// Reason why a simulation cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// The requests are not sorted by arrival.
    #[error("request {0} arrives before the one given ahead of it; sort them by arrival")]
    Unsorted(usize),
    /// `max_tokens` of a request is less than its output length, so it would end early.
    #[error("request {index} generates {output_tokens} tokens, but asks for at most {max_tokens}")]
    MaxTokensTooSmall {
        /// Position of the request.
        index: usize,
        /// Output length in tokens.
        output_tokens: u32,
        /// Given `max_tokens`.
        max_tokens: u32,
    },
    /// Requests are left, but nothing is in flight and none will arrive: a fault of the scheduler.
    #[error("{0} requests are left and nothing is in flight: the scheduler makes no progress")]
    Stalled(usize),
    /// The scheduler rejected a completion: a fault of the simulation.
    #[error(transparent)]
    Commit(#[from] CommitError),
}

/// Request held by the scheduler.
#[derive(Debug, Clone, Copy)]
struct LiveRequest {
    index: usize,
    /// Prompt tokens ever computed or found in the cache.
    charged_tokens: u32,
    output_tokens: u32,
    /// Tokens with KV on the device, including iterations in flight.
    stored_tokens: u32,
    /// Known tokens, for which it has blocks while it runs.
    known_tokens: u32,
    on_device: bool,
}

/// IterationOutcome of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PlanOutcome {
    /// A step was launched.
    Step,
    /// A sequence was preempted, so no sequence of its class was admitted; the next plan may admit one.
    Preempted,
    /// Nothing to do before the next event.
    Idle,
}

/// Step in flight on the device.
#[derive(Debug)]
struct SimulatedStep {
    number: u64,
    chunks: Vec<Chunk>,
    took: Duration,
    ends: Time,
}

/// Transfer in flight between device and host.
#[derive(Debug)]
struct SimulatedTransfer {
    id: TransferId,
    blocks: u64,
    took: Duration,
    ends: Time,
}

/// Wait for the requests that follow ended ones.
#[derive(Debug, Clone, Copy)]
struct SimulatedWait {
    began: Time,
    ends: Time,
    /// Requests that have not followed yet.
    awaited: u32,
    followed: bool,
}

/// Simulated worker: a scheduler and a device on a virtual clock.
#[derive(Debug)]
pub struct Simulation<D> {
    scheduler: Scheduler,
    device: D,
    now: Time,
    horizon: Option<Time>,
    /// `None`: the worker never waits.
    anticipation: Option<Anticipation>,
    wait: Option<SimulatedWait>,
    /// Live requests by [`SequenceId::index`].
    live: Vec<Option<LiveRequest>>,
    live_count: usize,
    /// Requests ended since a closed loop last looked.
    ended: usize,
    tenant_names: BTreeMap<u32, String>,
    steps: VecDeque<SimulatedStep>,
    recycled: Vec<Vec<Chunk>>,
    /// Transfers in order of completion: the copy engine runs one at a time.
    transfers: VecDeque<SimulatedTransfer>,
    verdicts: Vec<TokenVerdict>,
    accepted: Vec<u32>,
    /// `None`: no drafts.
    drafts: Option<AcceptanceTrace>,
    served: Vec<(usize, RequestEvent)>,
    /// Sums over the requests on the device.
    stored_tokens: u64,
    known_tokens: u64,
}

impl<D: Device> Simulation<D> {
    /// Creates a simulation with an idle scheduler, at time zero.
    pub fn new(scheduler: Scheduler, device: D) -> Self {
        Self {
            scheduler,
            device,
            now: Time::ZERO,
            horizon: None,
            anticipation: None,
            wait: None,
            live: Vec::new(),
            live_count: 0,
            ended: 0,
            tenant_names: BTreeMap::new(),
            steps: VecDeque::new(),
            recycled: Vec::new(),
            transfers: VecDeque::new(),
            verdicts: Vec::new(),
            accepted: Vec::new(),
            drafts: None,
            served: Vec::new(),
            stored_tokens: 0,
            known_tokens: 0,
        }
    }

    /// Sets the time at which the simulation ends even with requests left.
    pub fn until(mut self, horizon: Time) -> Self {
        self.horizon = Some(horizon);
        self
    }

    /// Waits for the requests that follow ended ones, as workers do.
    pub fn anticipating(mut self) -> Self {
        self.anticipation = Some(Anticipation::default());
        self
    }

    /// Drafts tokens for decodes; the limits of the scheduler bound their number.
    pub fn drafting(mut self, trace: AcceptanceTrace) -> Self {
        self.drafts = Some(trace);
        self
    }

    /// Returns the scheduler.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Returns the current virtual time.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Runs an open loop, in which each request arrives at its time, until all requests have ended or the
    /// horizon is reached. To be called once.
    ///
    /// # Errors
    /// [`SimulationError`]; the events reported before are valid.
    pub fn run(&mut self, requests: &[Request], observer: &mut impl Observer) -> Result<(), SimulationError> {
        check(requests, true)?;
        let arrivals = requests.iter().map(|request| request.arrival).zip(0..).collect();
        self.serve(requests, arrivals, None, observer)
    }

    /// Runs a closed loop of `streams` clients, each of which sends the next request of the list `think`
    /// after the end of its last one, until all requests have ended or the horizon is reached. Arrival times
    /// of the requests have no effect. To be called once.
    ///
    /// # Errors
    /// [`SimulationError`]; the events reported before are valid.
    pub fn run_closed(
        &mut self,
        requests: &[Request],
        streams: usize,
        think: Duration,
        observer: &mut impl Observer,
    ) -> Result<(), SimulationError> {
        check(requests, false)?;
        let arrivals = (0..requests.len().min(streams)).map(|index| (Time::ZERO, index)).collect();
        self.serve(requests, arrivals, Some(think), observer)
    }

    /// Serves the requests at `arrivals`; with a think time, each end is followed by the next request.
    fn serve(
        &mut self,
        requests: &[Request],
        mut arrivals: VecDeque<(Time, usize)>,
        think: Option<Duration>,
        observer: &mut impl Observer,
    ) -> Result<(), SimulationError> {
        let mut next_request = arrivals.len();
        loop {
            while let Some((_, index)) = arrivals.pop_front_if(|(arrival, _)| *arrival <= self.now) {
                self.submit(index, &requests[index], observer);
            }
            self.end_wait();
            while self.wait.is_none()
                && self.steps.len() < self.scheduler.limits().depth as usize
                && !self.awaits_drafts()
                && self.plan(requests, observer) != PlanOutcome::Idle
            {}
            if let Some(think) = think {
                let ended = std::mem::take(&mut self.ended);
                for index in (next_request..requests.len()).take(ended) {
                    arrivals.push_back((self.now.after(think), index));
                    next_request += 1;
                }
            }
            let arrival = arrivals.front().map(|(arrival, _)| *arrival);
            let step = self.steps.front().map(|step| step.ends);
            let transfer = self.transfers.front().map(|transfer| transfer.ends);
            let wait = self.wait.map(|wait| wait.ends);
            let Some(next) = [arrival, step, transfer, wait].into_iter().flatten().min() else {
                return if self.live_count == 0 {
                    Ok(())
                } else {
                    Err(SimulationError::Stalled(self.live_count))
                };
            };
            if self.horizon.is_some_and(|horizon| next > horizon) {
                return Ok(());
            }
            self.now = self.now.max(next);
            while self.transfers.front().is_some_and(|transfer| transfer.ends <= self.now) {
                let Some(transfer) = self.transfers.pop_front() else { break };
                self.scheduler.transfer_done(transfer.id, true, transfer.took, self.now)?;
            }
            while self.steps.front().is_some_and(|step| step.ends <= self.now) {
                let Some(step) = self.steps.pop_front() else { break };
                let (ended, took) = (self.ended, step.took);
                self.commit(step, requests, observer)?;
                self.begin_wait(took, self.ended - ended);
            }
        }
    }

    /// Begins to wait for the requests that follow `ended` ones, if that pays and there is work.
    fn begin_wait(&mut self, took: Duration, ended: usize) {
        let Some(anticipation) = &mut self.anticipation else { return };
        anticipation.observe_step(took);
        if !self.steps.is_empty() || self.live_count == 0 {
            return;
        }
        let awaited = u32::try_from(ended).unwrap_or(u32::MAX);
        let most = anticipation.wait(awaited);
        let ends = self.now.after(most);
        self.wait =
            (!most.is_zero()).then_some(SimulatedWait { began: self.now, ends, awaited, followed: false });
    }

    /// Ends a wait that is over.
    fn end_wait(&mut self) {
        let over = |wait: &mut SimulatedWait| wait.awaited == 0 || wait.ends <= self.now;
        if let (Some(wait), Some(anticipation)) = (self.wait.take_if(over), &mut self.anticipation) {
            anticipation.observe_wait(self.now.since(wait.began), wait.followed);
        }
    }

    fn submit(&mut self, index: usize, request: &Request, observer: &mut impl Observer) {
        let tenant =
            self.tenant_names.entry(request.tenant).or_insert_with(|| format!("tenant-{}", request.tenant));
        let new = NewSequence {
            known_tokens: request.prompt_tokens,
            max_tokens: request.max_tokens,
            priority: request.priority,
            deadline: None,
            tenant,
            weight: request.weight,
            hashes: &[],
            group: None,
            virtual_start_time: None,
            charged_tokens: 0,
            scored: ScoredRange::default(),
        };
        if let Some(wait) = &mut self.wait {
            (wait.awaited, wait.followed) = (wait.awaited.saturating_sub(1), true);
        }
        match self.scheduler.submit(new, self.now) {
            Ok(id) => {
                if self.live.len() <= id.index() {
                    self.live.resize(id.index() + 1, None);
                }
                self.live[id.index()] = Some(LiveRequest {
                    index,
                    charged_tokens: 0,
                    output_tokens: 0,
                    stored_tokens: 0,
                    known_tokens: request.prompt_tokens,
                    on_device: false,
                });
                self.live_count += 1;
                observer.request(self.now, index, request, &RequestEvent::Arrived);
            }
            Err(error) => {
                self.ended += 1;
                observer.request(self.now, index, request, &RequestEvent::Refused(error));
            }
        }
    }

    /// Returns true if the iteration in flight has drafts, or drafts are wanted behind it: like a worker, the
    /// simulation then plans the next one when it is completed.
    fn awaits_drafts(&self) -> bool {
        let Some(step) = self.steps.back().filter(|_| self.drafts.is_some()) else { return false };
        let mut chunks = step.chunks.iter().filter(|chunk| chunk.samples);
        chunks.any(|chunk| chunk.drafts > 0 || self.scheduler.drafts_wanted(chunk.id).guessed > 0)
    }

    /// Offers drafts for the decodes that the scheduler wants some for.
    fn offer_drafts(&mut self) {
        let Some(trace) = &mut self.drafts else { return };
        let requests: Vec<_> = self.scheduler.draft_requests().collect();
        for (id, wanted) in requests {
            if wanted.guessed > 0 && trace.proposes() {
                self.scheduler.draft(id, wanted.guessed, DraftKind::Guessed);
            }
        }
    }

    /// Plans an iteration and starts its step and transfers.
    fn plan(&mut self, requests: &[Request], observer: &mut impl Observer) -> PlanOutcome {
        self.offer_drafts();
        let plan = self.scheduler.plan(self.now);
        let mut chunks = self.recycled.pop().unwrap_or_default();
        chunks.clear();
        chunks.extend_from_slice(&plan.chunks);
        let mut work = BatchWork::default();
        for (position, chunk) in chunks.iter().enumerate() {
            let part = if position < plan.decodes as usize { &mut work.decode } else { &mut work.prefill };
            part.add(chunk.start, chunk.len);
        }
        for Preempted { id, kind, .. } in &plan.preempted {
            if let Some(live) = self.live.get_mut(id.index()).and_then(Option::as_mut) {
                leave(live, &mut self.stored_tokens, &mut self.known_tokens);
                if *kind == Preemption::Recompute {
                    live.stored_tokens = 0;
                }
                observer.request(
                    self.now,
                    live.index,
                    &requests[live.index],
                    &RequestEvent::Preempted(*kind),
                );
            }
        }
        let mut ends = self.transfers.back().map_or(self.now, |transfer| transfer.ends.max(self.now));
        for transfer in &plan.transfers {
            let blocks = transfer.blocks.len();
            let took = self.device.copy(blocks as u32);
            ends = ends.after(took);
            self.transfers.push_back(SimulatedTransfer {
                id: transfer.id,
                blocks: blocks as u64,
                took,
                ends,
            });
        }
        for (id, _) in &plan.admitted {
            if let Some(live) = self.live.get_mut(id.index()).and_then(Option::as_mut) {
                // It owns the blocks of its known tokens, also without a chunk in this step.
                if live.stored_tokens == 0 && !live.on_device {
                    live.on_device = true;
                    self.known_tokens += u64::from(live.known_tokens);
                }
                observer.request(self.now, live.index, &requests[live.index], &RequestEvent::Started);
            }
        }
        let preempted = !plan.preempted.is_empty();
        let (number, blocked) = (plan.number, plan.blocked.map(|blocked| blocked.by));
        for chunk in &chunks {
            if let Some(live) = self.live.get_mut(chunk.id.index()).and_then(Option::as_mut) {
                leave(live, &mut self.stored_tokens, &mut self.known_tokens);
                live.stored_tokens = chunk.start + chunk.len;
                live.known_tokens = live.known_tokens.max(live.stored_tokens);
                live.on_device = true;
                self.stored_tokens += u64::from(live.stored_tokens);
                self.known_tokens += u64::from(live.known_tokens);
            }
        }
        self.process_ended(requests, observer);
        if chunks.is_empty() {
            self.recycled.push(chunks);
            return if preempted { PlanOutcome::Preempted } else { PlanOutcome::Idle };
        }
        // The device runs one step at a time.
        let began = self.steps.back().map_or(self.now, |step| step.ends);
        let took = self.device.step(&work);
        self.report_step(began, took, work, blocked, observer);
        self.steps.push_back(SimulatedStep { number, chunks, took, ends: began.after(took) });
        PlanOutcome::Step
    }

    /// Reports the begin of a step.
    fn report_step(
        &self,
        began: Time,
        took: Duration,
        work: BatchWork,
        blocked: Option<inflight_worker_core::BlockedBy>,
        observer: &mut impl Observer,
    ) {
        let load = self.scheduler.load();
        let limits = self.scheduler.limits();
        let in_transfer: u64 = self.transfers.iter().map(|transfer| transfer.blocks).sum();
        let blocks = u64::from(load.blocks_used).saturating_sub(in_transfer);
        observer.step(&StepSample {
            began,
            took,
            predicted: self.scheduler.cost().step(&work.total()),
            work,
            running: load.running,
            slots: limits.running_max,
            waiting: load.waiting,
            allocated_tokens: blocks * u64::from(limits.block_tokens())
                / u64::from(limits.shape.span_blocks()),
            stored_tokens: self.stored_tokens,
            pending_tokens: self.known_tokens - self.stored_tokens,
            blocked,
        });
    }

    /// Commits a completed step: each sampling chunk generates a token.
    fn commit(
        &mut self,
        step: SimulatedStep,
        requests: &[Request],
        observer: &mut impl Observer,
    ) -> Result<(), SimulationError> {
        self.verdicts.clear();
        self.accepted.clear();
        self.served.clear();
        for chunk in &step.chunks {
            let live = self.live.get_mut(chunk.id.index()).and_then(Option::as_mut);
            // An iteration planned ahead may still compute a token of an ended request.
            let Some(live) = live else {
                self.verdicts.extend(chunk.samples.then_some(TokenVerdict::CONTINUE));
                self.accepted.extend((chunk.drafts > 0).then_some(1));
                continue;
            };
            let request = &requests[live.index];
            let until = (chunk.start + chunk.len).min(request.prompt_tokens);
            let prompt_tokens = until.saturating_sub(live.charged_tokens.max(chunk.start));
            live.charged_tokens = live.charged_tokens.max(until);
            let mut output_tokens = 0;
            if chunk.samples {
                let stand = self.drafts.as_mut().filter(|_| chunk.drafts > 0);
                let stand = stand.map_or(0, |trace| trace.stand(live.output_tokens, chunk.drafts));
                output_tokens = (1 + stand).min(request.output_tokens - live.output_tokens);
                live.output_tokens += output_tokens;
                let stop = live.output_tokens == request.output_tokens;
                let before = output_tokens as usize - 1;
                self.verdicts.extend(std::iter::repeat_n(TokenVerdict::CONTINUE, before));
                self.verdicts.push(if stop { TokenVerdict::STOP } else { TokenVerdict::CONTINUE });
                self.accepted.extend((chunk.drafts > 0).then_some(output_tokens));
            }
            let event = RequestEvent::Served { prompt_tokens, output_tokens };
            self.served.push((live.index, event));
        }
        let outcome =
            IterationOutcome { verdicts: &self.verdicts, accepted: &self.accepted, took: step.took };
        self.scheduler.commit(step.number, outcome)?;
        for (index, event) in &self.served {
            observer.request(self.now, *index, &requests[*index], event);
        }
        self.recycled.push(step.chunks);
        self.process_ended(requests, observer);
        Ok(())
    }

    /// Processes the terminal events of the scheduler.
    fn process_ended(&mut self, requests: &[Request], observer: &mut impl Observer) {
        for ended in self.scheduler.drain_ended() {
            let entry = self.live.get_mut(SequenceId::index(ended.id));
            let Some(mut live) = entry.and_then(Option::take) else { continue };
            leave(&mut live, &mut self.stored_tokens, &mut self.known_tokens);
            self.live_count -= 1;
            self.ended += 1;
            let event = RequestEvent::Ended(ended.reason);
            observer.request(self.now, live.index, &requests[live.index], &event);
        }
        self.scheduler.drain_freed_slots().for_each(drop);
        self.scheduler.drain_cache_events().for_each(drop);
    }
}

/// Removes a sequence from the sums of the requests on the device.
fn leave(live: &mut LiveRequest, stored_tokens: &mut u64, known_tokens: &mut u64) {
    if std::mem::take(&mut live.on_device) {
        *stored_tokens -= u64::from(live.stored_tokens);
        *known_tokens -= u64::from(live.known_tokens);
    }
}

fn check(requests: &[Request], by_arrival: bool) -> Result<(), SimulationError> {
    for (index, request) in requests.iter().enumerate() {
        if by_arrival && index > 0 && request.arrival < requests[index - 1].arrival {
            return Err(SimulationError::Unsorted(index));
        }
        let Request { output_tokens, max_tokens, .. } = *request;
        if max_tokens < output_tokens {
            return Err(SimulationError::MaxTokensTooSmall { index, output_tokens, max_tokens });
        }
    }
    Ok(())
}
