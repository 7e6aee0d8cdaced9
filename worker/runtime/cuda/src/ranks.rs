//! Device threads of a runtime: one, or those of a tensor-parallel group. All receive the same commands in
//! the same order and run the same steps, so all know the same tokens; rank 0's results are reported.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use inflight_runtime::{self as runtime, Batch, ThreadEnded, TokenMasks};

use super::Error;
use super::device_thread::{
    self, DeviceCommand, DeviceThread, LaunchedStep, LoadEvent, LoadedRank, MaskSender, thread_ended,
};
use super::load_job::LoadJob;
use super::nccl::NcclGroup;
use super::shapes::DEPTH;
use super::slots::device_error;
use super::step_slot::StepSlot;

/// Interval of polling communicators for asynchronous errors.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// `spin_loop` rounds between two yields while polling for results.
const SPINS: u32 = 64;

/// Completed step.
pub(super) struct CompletedStep {
    /// Index of the step slot with its results.
    pub(super) step_slot: usize,
    /// Whether log probabilities are requested, by sample.
    pub(super) logprobs: Vec<bool>,
    /// Number of scored rows.
    pub(super) scores: usize,
}

/// Handles to the device threads of all ranks.
pub(super) struct Ranks {
    threads: Vec<DeviceThread>,
    /// Senders of token masks, by rank.
    masks: Vec<MaskSender>,
    /// Number of masked rows of each step in flight that lacks its masks, oldest step first; else `None`.
    unmasked: VecDeque<Option<usize>>,
    /// Step slots, by rank.
    step_slots: Vec<Arc<Vec<StepSlot>>>,
    group: Option<Arc<NcclGroup>>,
    /// Batch buffers that no rank uses any more, for reuse.
    spare_batches: Vec<Arc<Batch>>,
    /// Launch outcomes of the step being completed, by rank.
    outcomes: Vec<Result<(), runtime::Error>>,
}

/// Load progress (done bytes, total bytes) by rank.
struct GroupLoadProgress {
    ranks: Vec<(u64, u64)>,
}

impl GroupLoadProgress {
    /// Records a rank's progress and returns done and total bytes over all ranks; ranks that have not
    /// reported are estimated.
    fn record(&mut self, rank: usize, done: u64, total: u64) -> (u64, u64) {
        self.ranks[rank] = (done, total);
        let unreported = self.ranks.iter().filter(|(_, total)| *total == 0).count() as u64;
        let sum = self.ranks.iter().fold((0, 0), |sum, rank| (sum.0 + rank.0, sum.1 + rank.1));
        // Shards have about the same size.
        (sum.0, sum.1 + unreported * total)
    }
}

impl Ranks {
    /// Starts a thread per job and waits until all have loaded; each then has as many KV blocks as the rank
    /// with the least memory. `progress` is called with the bytes copied so far and the total.
    pub(super) fn start(
        jobs: Vec<LoadJob>,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(Self, Vec<LoadedRank>), Error> {
        let group = jobs.first().and_then(|job| job.group.clone());
        let (sender, events) = channel();
        let (mut threads, mut masks) = (Vec::new(), Vec::new());
        for job in jobs {
            match device_thread::start(job, sender.clone()) {
                Ok((thread, sender)) => {
                    threads.push(thread);
                    masks.push(sender);
                }
                Err(error) => {
                    // Ranks already started wait for it.
                    if let Some(group) = &group {
                        group.fail(threads.len(), &error.to_string());
                    }
                    return Err(error);
                }
            }
        }
        drop(sender);
        let loaded = wait_for_load(&events, threads.len(), progress)?;
        let step_slots = loaded.iter().map(|loaded| Arc::clone(&loaded.step_slots)).collect();
        let ranks = Self {
            threads,
            masks,
            unmasked: VecDeque::new(),
            step_slots,
            group,
            spare_batches: Vec::new(),
            outcomes: Vec::new(),
        };
        Ok((ranks, loaded))
    }

    /// Sends a command to every rank.
    pub(super) fn send(&self, command: DeviceCommand) -> Result<(), runtime::Error> {
        let Some((first, rest)) = self.threads.split_first() else { return Err(thread_ended()) };
        for thread in rest {
            thread.send(command.clone()).map_err(|ThreadEnded| thread_ended())?;
        }
        first.send(command).map_err(|ThreadEnded| thread_ended())
    }

    /// Sends a command to rank 0 only, for queries.
    pub(super) fn send_to_first(&self, command: DeviceCommand) -> Result<(), runtime::Error> {
        let sent = self.threads.first().ok_or(ThreadEnded).and_then(|thread| thread.send(command));
        sent.map_err(|ThreadEnded| thread_ended())
    }

    /// Sends a step to every rank, and replaces `batch` by buffers for reuse.
    pub(super) fn launch(&mut self, batch: &mut Batch) -> Result<(), runtime::Error> {
        let mut shared = self.spare_batches.pop().unwrap_or_default();
        match Arc::get_mut(&mut shared) {
            Some(spare) => std::mem::swap(spare, batch),
            None => shared = Arc::new(std::mem::take(batch)),
        }
        let masked = shared.masked_rows();
        self.send(DeviceCommand::Step(shared))?;
        self.unmasked.push_back((masked > 0).then_some(masked));
        Ok(())
    }

    /// Sends the token masks of the oldest step that lacks them to every rank.
    pub(super) fn supply_masks(&mut self, masks: TokenMasks) -> Result<(), runtime::Error> {
        let lacking = self.unmasked.iter_mut().find(|rows| rows.is_some());
        let lacking = lacking.ok_or_else(runtime::Error::no_step_lacks_masks)?;
        if *lacking != Some(masks.rows()) {
            let reason = format!("{} masks were supplied for {lacking:?} rows", masks.rows());
            return Err(runtime::Error::Malformed(reason));
        }
        *lacking = None;
        let masks = Arc::new(masks);
        self.masks.iter().try_for_each(|rank| rank.send(Arc::clone(&masks)).map_err(|_| thread_ended()))
    }

    /// Waits until every rank has completed the oldest step.
    pub(super) fn complete(&mut self) -> Result<CompletedStep, runtime::Error> {
        if self.unmasked.pop_front().is_some_and(|rows| rows.is_some()) {
            return Err(runtime::Error::Malformed("the step lacks its token masks".to_owned()));
        }
        let (mut first, mut last) = (None, None);
        self.outcomes.clear();
        for thread in &self.threads {
            let launched = self.receive_launched(thread)?;
            let LaunchedStep { outcome, step_slot, logprobs, scores, batch } = launched;
            self.outcomes.push(outcome);
            first.get_or_insert((step_slot, logprobs, scores));
            last = Some(batch);
        }
        // The references of the other ranks are dropped.
        self.spare_batches.extend(last.filter(|_| self.spare_batches.len() < DEPTH as usize));
        combine_outcomes(&mut self.outcomes, self.group.as_ref())?;
        let (step_slot, logprobs, scores) = first.ok_or_else(thread_ended)?;
        match &self.group {
            Some(group) => wait_for_step(&self.step_slots, step_slot, group)?,
            None => self.step_slots[0][step_slot].done.synchronize().map_err(device_error)?,
        }
        Ok(CompletedStep { step_slot, logprobs, scores })
    }

    /// Receives a rank's next launched step. It arrives even if other ranks fail, once the collectives it
    /// blocks on are aborted.
    fn receive_launched(&self, thread: &DeviceThread) -> Result<LaunchedStep, runtime::Error> {
        let Some(group) = &self.group else { return thread.results().recv().map_err(|_| thread_ended()) };
        loop {
            match thread.results().recv_timeout(CHECK_INTERVAL) {
                Ok(launched) => return Ok(launched),
                Err(RecvTimeoutError::Timeout) => {
                    is_step_done(&self.step_slots, 0, group);
                    group.check();
                }
                Err(RecvTimeoutError::Disconnected) => return Err(failure(group)),
            }
        }
    }

    /// Returns a step slot of rank 0.
    pub(super) fn step_slot(&self, index: usize) -> &StepSlot {
        &self.step_slots[0][index]
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        // A rank may wait for masks.
        self.masks.clear();
        // All before any is joined: a rank may wait for the others until it ends.
        self.threads.iter_mut().for_each(DeviceThread::close);
    }
}

/// Combines the ranks' launch outcomes: an error on only some ranks fails the group.
fn combine_outcomes(
    outcomes: &mut Vec<Result<(), runtime::Error>>,
    group: Option<&Arc<NcclGroup>>,
) -> Result<(), runtime::Error> {
    let failed = outcomes.iter().filter(|outcome| outcome.is_err()).count();
    match group {
        // A step that only some ranks run never completes.
        Some(group) if (1..outcomes.len()).contains(&failed) => {
            let rank = outcomes.iter().position(Result::is_err).unwrap_or(0);
            let reason = outcomes.swap_remove(rank).err().map(|error| error.to_string());
            group.fail(rank, &reason.unwrap_or_default());
            Err(failure(group))
        }
        _ => outcomes.drain(..).collect(),
    }
}

/// Waits until all ranks have loaded, forwarding progress; returns the first error.
fn wait_for_load(
    events: &Receiver<(usize, LoadEvent)>,
    world: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Vec<LoadedRank>, Error> {
    let mut total_progress = GroupLoadProgress { ranks: vec![(0, 0); world] };
    let mut loaded: Vec<Option<LoadedRank>> = (0..world).map(|_| None).collect();
    for (rank, event) in events {
        match event {
            LoadEvent::Progress(done, total) => {
                let (done, total) = total_progress.record(rank, done, total);
                progress(done, total);
            }
            LoadEvent::Done(Ok(done)) => {
                loaded[rank] = Some(*done);
                if loaded.iter().all(Option::is_some) {
                    return Ok(loaded.into_iter().flatten().collect());
                }
            }
            LoadEvent::Done(Err(error)) => return Err(error),
        }
    }
    Err(Error::Device("the GPU's device thread ended while loading the model".to_owned()))
}

/// Waits until a step has completed on every rank or the group has failed.
fn wait_for_step(
    step_slots: &[Arc<Vec<StepSlot>>],
    index: usize,
    group: &Arc<NcclGroup>,
) -> Result<(), runtime::Error> {
    let (mut checked, mut spins) = (Instant::now(), 0u32);
    loop {
        let done = is_step_done(step_slots, index, group);
        if checked.elapsed() > CHECK_INTERVAL {
            group.check();
            checked = Instant::now();
        }
        if group.failure().is_some() {
            return Err(failure(group));
        }
        if done {
            return Ok(());
        }
        spins = spins.wrapping_add(1);
        match spins % SPINS {
            0 => std::thread::yield_now(),
            _ => std::hint::spin_loop(),
        }
    }
}

/// Returns whether the step in this step slot has completed on every rank. Device errors fail the group.
fn is_step_done(step_slots: &[Arc<Vec<StepSlot>>], index: usize, group: &Arc<NcclGroup>) -> bool {
    let mut done = true;
    // Queries all ranks each time: an error on the last one would otherwise block the first forever.
    for (rank, slots) in step_slots.iter().enumerate() {
        match slots[index].done.is_done() {
            Ok(is_done) => done &= is_done,
            Err(error) => group.fail(rank, &error.to_string()),
        }
    }
    done
}

fn failure(group: &NcclGroup) -> runtime::Error {
    group.failure().map_or_else(thread_ended, |failure| runtime::Error::Device(failure.to_string()))
}

#[cfg(test)]
mod tests {
    use super::super::nccl::tests::fake_group;
    use super::*;

    #[test]
    fn load_progress_is_summed_over_ranks_and_loading_ends_with_the_first_error() {
        let (sender, events) = channel();
        for rank in [1, 0, 2] {
            sender.send((rank, LoadEvent::Progress(rank as u64, 10))).unwrap();
        }
        for words in ["the card is on fire", "rank 2 failed"] {
            sender.send((2, LoadEvent::Done(Err(Error::Device(words.to_owned()))))).unwrap();
        }
        let reported = std::sync::Mutex::new(Vec::new());
        let progress = |done, total| reported.lock().unwrap().push((done, total));
        // The other ranks' senders are alive, but are not waited for.
        let refused = wait_for_load(&events, 3, &progress).err().unwrap().to_string();
        assert!(refused.contains("on fire"), "{refused}");
        assert_eq!(*reported.lock().unwrap(), [(1, 30), (1, 30), (3, 30)]);
    }

    #[test]
    fn a_batch_refused_by_all_ranks_is_malformed_and_by_some_fails_the_group() {
        let malformed = || Err(runtime::Error::Malformed("it has no rows".to_owned()));
        assert!(combine_outcomes(&mut vec![Ok(())], None).is_ok());
        assert!(matches!(combine_outcomes(&mut vec![malformed()], None), Err(runtime::Error::Malformed(_))));
        let group = fake_group(3);
        assert!(combine_outcomes(&mut vec![Ok(()), Ok(()), Ok(())], Some(&group)).is_ok());
        let all = combine_outcomes(&mut vec![malformed(), malformed(), malformed()], Some(&group));
        assert!(matches!(all, Err(runtime::Error::Malformed(_))) && group.failure().is_none());
        let some = combine_outcomes(&mut vec![Ok(()), malformed(), Ok(())], Some(&group));
        let Err(runtime::Error::Device(words)) = some else { panic!("{some:?}") };
        assert!(words.contains("rank 1") && words.contains("it has no rows"), "{words}");
        assert_eq!(group.failure().unwrap().rank, 1);
    }
}
