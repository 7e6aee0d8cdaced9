//! A viewer: what it has been sent, and what it gets next within its bytes a second.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_router_core::WorkerId;

use super::hub::{Hub, ViewerPlace};
use super::request::LiveRequest;
use super::sampler::{Snapshot, WorkerSample};
use super::view::{IterationView, RequestView, State, WatchUpdate, WorkerView};
use super::viewer_places::PlaceLost;
use crate::clock;
use crate::metrics as names;

/// Open requests that a viewer is told of.
const REQUESTS_MAX: usize = 10_000;
/// Iterations of a worker in one update.
const ITERATIONS_MAX: usize = 256;
/// Bytes of an update are bounded by those of a second, and by this: gRPC clients take 4 MiB.
const UPDATE_BYTES_MAX: u64 = 1 << 20;
/// Lower bound of that, so that an update says something.
const UPDATE_BYTES_MIN: u64 = 64 << 10;
/// Updates a second without and with a wish.
const RATE_DEFAULT: u32 = 4;
const RATE_MAX: u32 = 10;
/// Size of an iteration, of one slot's work and of a slot's state, about.
const ITERATION_BYTES: usize = 100;
const WORK_BYTES: usize = 60;
const SLOT_BYTES: usize = 100;

/// Viewer of the cluster. Dropping it gives its place to another one.
#[derive(Debug)]
pub(crate) struct Viewer {
    hub: Arc<Hub>,
    place: ViewerPlace,
    interval: Duration,
    iterations: bool,
    number: u64,
    /// Snapshot in which each request changed that was last sent, by number.
    known: BTreeMap<u64, u64>,
    /// Place of the next ended request among all that have ended; `None` before the first update.
    ended: Option<u64>,
    /// Place of the next iteration of each worker.
    cursors: BTreeMap<WorkerId, u64>,
    /// Time at which the next update is due.
    due: Instant,
    /// Time from which the bytes sent are within the bytes a second.
    paid: Instant,
    bytes: metrics::Counter,
}

impl Viewer {
    /// Creates a viewer of a tenant or address; `None` if there are as many as allowed. `rate`: updates a second, 0 for the default.
    pub(crate) fn enter(
        hub: &Arc<Hub>,
        whose: Arc<str>,
        rate: u32,
        iterations: bool,
        protocol: &'static str,
    ) -> Option<Self> {
        let place = hub.enter(whose, iterations, clock::now())?;
        let rate = if rate == 0 { RATE_DEFAULT } else { rate.min(RATE_MAX) };
        let now = clock::now();
        let mut cursors = BTreeMap::new();
        // It begins with the iterations to come.
        for worker in hub.all_workers() {
            let mut cursor = u64::MAX;
            worker.observed().iterations_since(&mut cursor, 0);
            cursors.insert(worker.id, cursor);
        }
        Some(Self {
            hub: hub.clone(),
            place,
            interval: Duration::from_secs(1) / rate,
            iterations,
            number: 0,
            known: BTreeMap::new(),
            ended: None,
            cursors,
            due: now,
            paid: now,
            bytes: metrics::counter!(names::VIEWER_BYTES, "protocol" => protocol),
        })
    }

    /// Waits until the next update is due.
    ///
    /// # Errors
    /// [`PlaceLost`].
    pub(crate) async fn wait(&self) -> Result<(), PlaceLost> {
        let due = self.due.max(self.paid);
        self.place.keep(due)?;
        tokio::time::sleep_until(due.into()).await;
        Ok(())
    }

    /// Returns the next update.
    pub(crate) fn update(&mut self) -> WatchUpdate {
        let now = clock::now();
        let late = now.saturating_duration_since(self.due).as_nanos() / self.interval.as_nanos().max(1);
        // An update that is late by less than an interval is the one that was due.
        let skipped = if self.number == 0 { 0 } else { u32::try_from(late).unwrap_or(u32::MAX) };
        if skipped > 0 {
            metrics::counter!(names::VIEWER_SKIPPED_UPDATES).increment(skipped.into());
        }
        let snapshot = self.hub.snapshot(now);
        let second = self.hub.bytes_per_second();
        let mut room = second.clamp(UPDATE_BYTES_MIN, UPDATE_BYTES_MAX) as usize;
        let requests = self.requests(&snapshot, &mut room, now);
        // What is left of this interval's share of a second is for iterations.
        let spent = (second.clamp(UPDATE_BYTES_MIN, UPDATE_BYTES_MAX) as usize).saturating_sub(room);
        let share = (second as f64 * self.interval.as_secs_f64()) as usize;
        let workers = self.workers(&snapshot, share.saturating_sub(spent));
        self.number += 1;
        self.due = now + self.interval;
        WatchUpdate {
            number: self.number,
            unix_ms: u64::try_from(clock::since_unix_epoch().as_millis()).unwrap_or(u64::MAX),
            cluster: snapshot.cluster.clone(),
            workers,
            tenants: snapshot.tenants.clone(),
            requests,
            skipped_updates: skipped,
            diagnosis: None,
        }
    }

    /// Counts the bytes of an update: the next one waits until they are within the bytes a second.
    pub(crate) fn sent(&mut self, bytes: usize) {
        self.bytes.increment(bytes as u64);
        let seconds = bytes as f64 / self.hub.bytes_per_second().max(1) as f64;
        self.paid = self.paid.max(clock::now()) + Duration::from_secs_f64(seconds.min(3600.0));
    }

    /// Returns the requests that changed since they were last sent, as far as there is room: ended ones first. What finds
    /// no room is sent later, in its state of then.
    fn requests(&mut self, snapshot: &Snapshot, room: &mut usize, now: Instant) -> Vec<RequestView> {
        let mut views = Vec::new();
        let mut fits = |request: &LiveRequest| {
            let bytes = request.view_bytes();
            let fits = *room >= bytes;
            *room -= if fits { bytes } else { 0 };
            fits
        };
        let first = snapshot.ended_total - snapshot.ended.len() as u64;
        let begin = self.ended.unwrap_or(snapshot.ended_total);
        if begin < first {
            self.forget(snapshot, &mut views);
        }
        let mut next = begin.max(first);
        // One that came and went between two updates is sent too.
        for request in snapshot.ended.iter().skip((next - first) as usize) {
            if !fits(request) {
                break;
            }
            next += 1;
            self.known.remove(&request.number);
            views.push(request.view(&request.now(), now));
        }
        self.ended = Some(next);
        for sample in &snapshot.open {
            let number = sample.request.number;
            let news = match self.known.get(&number) {
                Some(changed) => sample.changed > *changed,
                None => self.known.len() < REQUESTS_MAX,
            };
            if news && fits(&sample.request) {
                self.known.insert(number, sample.changed);
                views.push(sample.request.view(&sample.now, now));
            }
        }
        views
    }

    /// Tells of known requests that have ended so long ago that the hub has forgotten them.
    fn forget(&mut self, snapshot: &Snapshot, views: &mut Vec<RequestView>) {
        let is_open =
            |number: u64| snapshot.open.binary_search_by_key(&number, |sample| sample.request.number).is_ok();
        let ended: BTreeSet<u64> = snapshot.ended.iter().map(|request| request.number).collect();
        self.known.retain(|number, _| {
            let kept = is_open(*number) || ended.contains(number);
            if !kept {
                views.push(RequestView { number: *number, state: State::Ended, ..RequestView::default() });
            }
            kept
        });
    }

    /// Returns the workers, with as many of their newest iterations as there is room for.
    fn workers(&mut self, snapshot: &Snapshot, room: usize) -> Vec<WorkerView> {
        let share = room / snapshot.workers.len().max(1);
        let iterations = self.iterations;
        let workers = snapshot.workers.iter();
        workers
            .map(|sample| if iterations { self.observed(sample, share) } else { sample.view.clone() })
            .collect()
    }

    fn observed(&mut self, sample: &WorkerSample, room: usize) -> WorkerView {
        let cursor = self.cursors.entry(sample.worker.id).or_default();
        let observed = sample.worker.observed();
        let (mut iterations, mut skipped) = observed.iterations_since(cursor, ITERATIONS_MAX);
        let (slots, kv_by_tenant) = (observed.slots(), observed.top_tenants());
        drop(observed);
        let room = room.saturating_sub(SLOT_BYTES * slots.len());
        let left_out = iterations.len() - fitting(&iterations, room);
        iterations.drain(..left_out);
        skipped += left_out as u64;
        WorkerView { slots, iterations, skipped_iterations: skipped, kv_by_tenant, ..sample.view.clone() }
    }
}

/// Returns the number of the newest iterations that fit.
fn fitting(iterations: &[Arc<IterationView>], room: usize) -> usize {
    let mut left = room;
    let fit = iterations.iter().rev().take_while(|iteration| {
        let bytes = ITERATION_BYTES + WORK_BYTES * iteration.work.len();
        let fits = left >= bytes;
        left = left.saturating_sub(bytes);
        fits
    });
    fit.count()
}
