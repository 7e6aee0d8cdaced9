use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use inflight_worker_core::{
    Chunk, CommitError, NewSequence, Outcome, Preempted, Preemption, Scheduler, SequenceId, Time, TransferId,
    Verdict,
};

use crate::{BatchWork, Device, Event, Observer, Request, StepSample};

/// A simulation that can't go on.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// Requests must be given in order of arrival.
    #[error("request {0} arrives before the one given ahead of it; sort them by arrival")]
    Unsorted(usize),
    /// A request that asks for less than it generates would end early.
    #[error("request {index} generates {output_tokens} tokens, but asks for at most {max_tokens}")]
    AsksTooLittle {
        /// Its place among the requests.
        index: usize,
        /// What it generates.
        output_tokens: u32,
        /// What it asks for.
        max_tokens: u32,
    },
    /// Requests are left, but nothing is under way and nothing will arrive: a fault of the scheduler.
    #[error("{0} requests are left and nothing is under way: the scheduler makes no progress")]
    Stalled(usize),
    /// The scheduler did not recognise what it had planned: a fault of the simulation.
    #[error(transparent)]
    Commit(#[from] CommitError),
}

/// A request that the scheduler holds.
#[derive(Debug, Clone, Copy)]
struct Live {
    index: usize,
    /// Tokens of its prompt that were computed, or found, at some time.
    charged_tokens: u32,
    output_tokens: u32,
    /// Tokens whose keys and values are on the device, those of the iterations in flight included.
    stored_tokens: u32,
    /// Tokens that it has, and has blocks for while it runs.
    known_tokens: u32,
    on_device: bool,
}

/// What a plan came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Planned {
    /// A step for the device.
    Step,
    /// Somebody gave way and nobody of its class starts in the same plan: the next one may use the room.
    Room,
    /// Nothing until something happens.
    Nothing,
}

#[derive(Debug)]
struct Flight {
    number: u64,
    chunks: Vec<Chunk>,
    took: Duration,
    ends: Time,
}

#[derive(Debug)]
struct Moving {
    id: TransferId,
    blocks: u64,
    took: Duration,
    ends: Time,
}

/// A scheduler, a device and a virtual clock.
#[derive(Debug)]
pub struct Simulation<D> {
    scheduler: Scheduler,
    device: D,
    now: Time,
    horizon: Option<Time>,
    /// By [`SequenceId::index`].
    live: Vec<Option<Live>>,
    live_count: usize,
    tenant_names: BTreeMap<u32, String>,
    flights: VecDeque<Flight>,
    spare: Vec<Vec<Chunk>>,
    /// By the time of their ends: the copy engine makes one after the other.
    transfers: VecDeque<Moving>,
    verdicts: Vec<Verdict>,
    served: Vec<(usize, Event)>,
    /// Sums over what is on the device.
    stored_tokens: u64,
    known_tokens: u64,
}

impl<D: Device> Simulation<D> {
    /// An idle scheduler on a device, at the origin of time.
    pub fn new(scheduler: Scheduler, device: D) -> Self {
        Self {
            scheduler,
            device,
            now: Time::ZERO,
            horizon: None,
            live: Vec::new(),
            live_count: 0,
            tenant_names: BTreeMap::new(),
            flights: VecDeque::new(),
            spare: Vec::new(),
            transfers: VecDeque::new(),
            verdicts: Vec::new(),
            served: Vec::new(),
            stored_tokens: 0,
            known_tokens: 0,
        }
    }

    /// Ends the simulation at this time, whatever is left then.
    pub fn until(mut self, horizon: Time) -> Self {
        self.horizon = Some(horizon);
        self
    }

    /// The scheduler, for what it knows of itself.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// The virtual time reached.
    pub fn now(&self) -> Time {
        self.now
    }

    /// Runs until all requests are over, or the horizon. Call it once.
    ///
    /// # Errors
    /// [`SimulationError`]; what the observer was told until then has happened.
    pub fn run(&mut self, requests: &[Request], observer: &mut impl Observer) -> Result<(), SimulationError> {
        check(requests)?;
        let mut arrivals = requests.iter().enumerate().peekable();
        loop {
            while let Some((index, request)) = arrivals.next_if(|(_, request)| request.arrival <= self.now) {
                self.submit(index, request, observer);
            }
            while self.flights.len() < self.scheduler.limits().depth as usize
                && self.plan(requests, observer) != Planned::Nothing
            {}
            let arrival = arrivals.peek().map(|(_, request)| request.arrival);
            let flight = self.flights.front().map(|flight| flight.ends);
            let transfer = self.transfers.front().map(|moving| moving.ends);
            let Some(next) = [arrival, flight, transfer].into_iter().flatten().min() else {
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
            while self.transfers.front().is_some_and(|moving| moving.ends <= self.now) {
                let Some(moving) = self.transfers.pop_front() else { break };
                self.scheduler.transfer_done(moving.id, true, moving.took, self.now)?;
            }
            while self.flights.front().is_some_and(|flight| flight.ends <= self.now) {
                let Some(flight) = self.flights.pop_front() else { break };
                self.commit(flight, requests, observer)?;
            }
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
            order: None,
            charged_tokens: 0,
        };
        match self.scheduler.submit(new, self.now) {
            Ok(id) => {
                if self.live.len() <= id.index() {
                    self.live.resize(id.index() + 1, None);
                }
                self.live[id.index()] = Some(Live {
                    index,
                    charged_tokens: 0,
                    output_tokens: 0,
                    stored_tokens: 0,
                    known_tokens: request.prompt_tokens,
                    on_device: false,
                });
                self.live_count += 1;
                observer.request(self.now, index, request, &Event::Arrived);
            }
            Err(error) => observer.request(self.now, index, request, &Event::Refused(error)),
        }
    }

    /// Plans an iteration and starts what it holds.
    fn plan(&mut self, requests: &[Request], observer: &mut impl Observer) -> Planned {
        let plan = self.scheduler.plan(self.now);
        let mut chunks = self.spare.pop().unwrap_or_default();
        chunks.clear();
        chunks.extend_from_slice(&plan.chunks);
        let mut work = BatchWork::default();
        for (place, chunk) in chunks.iter().enumerate() {
            let part = if place < plan.decodes as usize { &mut work.decode } else { &mut work.prefill };
            part.add(chunk.start, chunk.len);
        }
        for Preempted { id, kind, .. } in &plan.preempted {
            if let Some(live) = self.live.get_mut(id.index()).and_then(Option::as_mut) {
                leave(live, &mut self.stored_tokens, &mut self.known_tokens);
                if *kind == Preemption::Recompute {
                    live.stored_tokens = 0;
                }
                observer.request(self.now, live.index, &requests[live.index], &Event::Preempted(*kind));
            }
        }
        let mut ends = self.transfers.back().map_or(self.now, |moving| moving.ends.max(self.now));
        for transfer in &plan.transfers {
            let blocks = transfer.blocks.len();
            let took = self.device.copy(blocks as u32);
            ends = ends.after(took);
            self.transfers.push_back(Moving { id: transfer.id, blocks: blocks as u64, took, ends });
        }
        for (id, _) in &plan.admitted {
            if let Some(live) = self.live.get_mut(id.index()).and_then(Option::as_mut) {
                observer.request(self.now, live.index, &requests[live.index], &Event::Started);
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
        self.settle(requests, observer);
        if chunks.is_empty() {
            self.spare.push(chunks);
            return if preempted { Planned::Room } else { Planned::Nothing };
        }
        // The device computes one step after the other.
        let began = self.flights.back().map_or(self.now, |flight| flight.ends);
        let took = self.device.step(&work);
        self.sample(began, took, work, blocked, observer);
        self.flights.push_back(Flight { number, chunks, took, ends: began.after(took) });
        Planned::Step
    }

    fn sample(
        &self,
        began: Time,
        took: Duration,
        work: BatchWork,
        blocked: Option<inflight_worker_core::BlockedBy>,
        observer: &mut impl Observer,
    ) {
        let load = self.scheduler.load();
        let limits = self.scheduler.limits();
        let moving: u64 = self.transfers.iter().map(|moving| moving.blocks).sum();
        let blocks = u64::from(load.blocks_used).saturating_sub(moving);
        observer.step(&StepSample {
            began,
            took,
            predicted: self.scheduler.cost().step(&work.total()),
            work,
            running: load.running,
            slots: limits.running_max,
            waiting: load.waiting,
            allocated_tokens: blocks * u64::from(limits.block_tokens),
            stored_tokens: self.stored_tokens,
            pending_tokens: self.known_tokens - self.stored_tokens,
            blocked,
        });
    }

    /// An iteration has run: each sampling chunk yields a token.
    fn commit(
        &mut self,
        flight: Flight,
        requests: &[Request],
        observer: &mut impl Observer,
    ) -> Result<(), SimulationError> {
        self.verdicts.clear();
        self.served.clear();
        for chunk in &flight.chunks {
            let live = self.live.get_mut(chunk.id.index()).and_then(Option::as_mut);
            // An iteration planned ahead may still compute a token of a request that is over.
            let Some(live) = live else {
                self.verdicts.extend(chunk.samples.then_some(Verdict::CONTINUE));
                continue;
            };
            let request = &requests[live.index];
            let until = (chunk.start + chunk.len).min(request.prompt_tokens);
            let prompt_tokens = until.saturating_sub(live.charged_tokens.max(chunk.start));
            live.charged_tokens = live.charged_tokens.max(until);
            live.output_tokens += u32::from(chunk.samples);
            if chunk.samples {
                let stop = live.output_tokens == request.output_tokens;
                self.verdicts.push(if stop { Verdict::STOP } else { Verdict::CONTINUE });
            }
            let event = Event::Served { prompt_tokens, output_tokens: u32::from(chunk.samples) };
            self.served.push((live.index, event));
        }
        let outcome = Outcome { verdicts: &self.verdicts, took: flight.took };
        self.scheduler.commit(flight.number, outcome)?;
        for (index, event) in &self.served {
            observer.request(self.now, *index, &requests[*index], event);
        }
        self.spare.push(flight.chunks);
        self.settle(requests, observer);
        Ok(())
    }

    /// Takes the ends that the scheduler has announced.
    fn settle(&mut self, requests: &[Request], observer: &mut impl Observer) {
        for ended in self.scheduler.drain_ended() {
            let entry = self.live.get_mut(SequenceId::index(ended.id));
            let Some(mut live) = entry.and_then(Option::take) else { continue };
            leave(&mut live, &mut self.stored_tokens, &mut self.known_tokens);
            self.live_count -= 1;
            let event = Event::Ended(ended.reason);
            observer.request(self.now, live.index, &requests[live.index], &event);
        }
        self.scheduler.drain_freed_slots().for_each(drop);
        self.scheduler.drain_cache_events().for_each(drop);
    }
}

/// Takes a sequence out of the sums of what is on the device.
fn leave(live: &mut Live, stored_tokens: &mut u64, known_tokens: &mut u64) {
    if std::mem::take(&mut live.on_device) {
        *stored_tokens -= u64::from(live.stored_tokens);
        *known_tokens -= u64::from(live.known_tokens);
    }
}

fn check(requests: &[Request]) -> Result<(), SimulationError> {
    for (index, request) in requests.iter().enumerate() {
        if index > 0 && request.arrival < requests[index - 1].arrival {
            return Err(SimulationError::Unsorted(index));
        }
        let Request { output_tokens, max_tokens, .. } = *request;
        if max_tokens < output_tokens {
            return Err(SimulationError::AsksTooLittle { index, output_tokens, max_tokens });
        }
    }
    Ok(())
}
