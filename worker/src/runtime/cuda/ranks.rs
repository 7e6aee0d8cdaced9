//! The threads that own the GPUs of a runtime: one, or those of a tensor-parallel group. Each gets the same commands in
//! the same order and runs the same steps, so each knows the same tokens; the first one's are reported.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::Error;
use super::nccl::Group;
use super::owner::{Command, DEPTH, Flight, Job, Loaded, Loading, Owner, Place, gone};
use super::slots::device;
use crate::runtime::{self, Batch};

/// How often communicators are asked whether something went wrong.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);
/// Rounds of `spin_loop` between two yields while results are waited for.
const SPINS: u32 = 64;

/// A step that is done.
pub(super) struct Done {
    /// Where its results are.
    pub(super) place: usize,
    /// For each sample: whether log probabilities are wanted.
    pub(super) wanted: Vec<bool>,
}

/// All ranks of a runtime, from outside.
pub(super) struct Ranks {
    owners: Vec<Owner>,
    /// Of each rank.
    places: Vec<Arc<Vec<Place>>>,
    group: Option<Arc<Group>>,
    /// Batches that no rank has any more.
    spare: Vec<Arc<Batch>>,
    /// What came of a step's launch, by rank.
    outcomes: Vec<Result<(), runtime::Error>>,
}

/// How far the loading of all ranks is.
struct Progress {
    ranks: Vec<(u64, u64)>,
}

impl Progress {
    /// Bytes of all ranks, done and in all, once one of them has told.
    fn after(&mut self, rank: usize, done: u64, total: u64) -> (u64, u64) {
        self.ranks[rank] = (done, total);
        let unheard = self.ranks.iter().filter(|(_, total)| *total == 0).count() as u64;
        let sum = self.ranks.iter().fold((0, 0), |sum, rank| (sum.0 + rank.0, sum.1 + rank.1));
        // Shards are about as large as each other.
        (sum.0, sum.1 + unheard * total)
    }
}

impl Ranks {
    /// Starts a thread for each job and waits until all have loaded: each then has as many blocks as the one with the least
    /// room. `progress` hears the bytes copied so far and in all.
    pub(super) fn start(
        jobs: Vec<Job>,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(Self, Vec<Loaded>), Error> {
        let group = jobs.first().and_then(|job| job.group.clone());
        let (news, loading) = channel();
        let mut owners = Vec::new();
        for job in jobs {
            match Owner::start(job, news.clone()) {
                Ok(owner) => owners.push(owner),
                Err(error) => {
                    // The others wait for it.
                    if let Some(group) = &group {
                        group.fail(owners.len(), &error.to_string());
                    }
                    return Err(error);
                }
            }
        }
        drop(news);
        let loaded = loaded(&loading, owners.len(), progress);
        let places = |loaded: &[Loaded]| loaded.iter().map(|loaded| Arc::clone(&loaded.places)).collect();
        loaded.map(|loaded| {
            let ranks =
                Self { owners, places: places(&loaded), group, spare: Vec::new(), outcomes: Vec::new() };
            (ranks, loaded)
        })
    }

    /// Tells every rank.
    pub(super) fn send(&self, command: Command) -> Result<(), runtime::Error> {
        let Some((first, rest)) = self.owners.split_first() else { return Err(gone()) };
        for owner in rest {
            owner.send(command.clone())?;
        }
        first.send(command)
    }

    /// Tells the first rank alone, for questions that one can answer for all.
    pub(super) fn ask(&self, command: Command) -> Result<(), runtime::Error> {
        self.owners.first().map_or_else(|| Err(gone()), |owner| owner.send(command))
    }

    /// Has every rank enqueue a step; the caller gets buffers to fill again.
    pub(super) fn launch(&mut self, batch: &mut Batch) -> Result<(), runtime::Error> {
        let mut shared = self.spare.pop().unwrap_or_default();
        match Arc::get_mut(&mut shared) {
            Some(spare) => std::mem::swap(spare, batch),
            None => shared = Arc::new(std::mem::take(batch)),
        }
        self.send(Command::Step(shared))
    }

    /// Waits until every rank has run the oldest step.
    pub(super) fn complete(&mut self) -> Result<Done, runtime::Error> {
        let (mut first, mut last) = (None, None);
        self.outcomes.clear();
        for owner in &self.owners {
            let Flight { outcome, place, wanted, batch } = self.flight(owner)?;
            self.outcomes.push(outcome);
            first.get_or_insert((place, wanted));
            last = Some(batch);
        }
        // The others' are dropped.
        self.spare.extend(last.filter(|_| self.spare.len() < DEPTH as usize));
        judge(&mut self.outcomes, self.group.as_ref())?;
        let (place, wanted) = first.ok_or_else(gone)?;
        match &self.group {
            Some(group) => wait(&self.places, place, group)?,
            None => self.places[0][place].done.wait().map_err(device)?,
        }
        Ok(Done { place, wanted })
    }

    /// A rank's next flight. It hands it over whatever becomes of the others, once what holds it up has been ended.
    fn flight(&self, owner: &Owner) -> Result<Flight, runtime::Error> {
        let Some(group) = &self.group else { return owner.flights.recv().map_err(|_| gone()) };
        loop {
            match owner.flights.recv_timeout(CHECK_INTERVAL) {
                Ok(flight) => return Ok(flight),
                Err(RecvTimeoutError::Timeout) => {
                    probe(&self.places, 0, group);
                    group.check();
                }
                Err(RecvTimeoutError::Disconnected) => return Err(failure(group)),
            }
        }
    }

    /// What the first rank shares of a step.
    pub(super) fn place(&self, place: usize) -> &Place {
        &self.places[0][place]
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        // All at once: a rank may wait for the others until its own end.
        self.owners.iter_mut().for_each(Owner::close);
    }
}

/// What came of a step's launch on all ranks.
fn judge(
    outcomes: &mut Vec<Result<(), runtime::Error>>,
    group: Option<&Arc<Group>>,
) -> Result<(), runtime::Error> {
    let refused = outcomes.iter().filter(|outcome| outcome.is_err()).count();
    match group {
        // What some run and some do not has no end.
        Some(group) if (1..outcomes.len()).contains(&refused) => {
            let rank = outcomes.iter().position(Result::is_err).unwrap_or(0);
            let reason = outcomes.swap_remove(rank).err().map(|error| error.to_string());
            group.fail(rank, &reason.unwrap_or_default());
            Err(failure(group))
        }
        _ => outcomes.drain(..).collect(),
    }
}

/// Hears of every rank's loading.
fn loaded(
    loading: &Receiver<(usize, Loading)>,
    world: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Vec<Loaded>, Error> {
    let mut told = Progress { ranks: vec![(0, 0); world] };
    let mut loaded: Vec<Option<Loaded>> = (0..world).map(|_| None).collect();
    for (rank, news) in loading {
        match news {
            Loading::Progress(done, total) => {
                let (done, total) = told.after(rank, done, total);
                progress(done, total);
            }
            Loading::Done(Ok(done)) => {
                loaded[rank] = Some(*done);
                if loaded.iter().all(Option::is_some) {
                    return Ok(loaded.into_iter().flatten().collect());
                }
            }
            Loading::Done(Err(error)) => return Err(error),
        }
    }
    Err(Error::Device("the thread that owns the GPU ended while it loaded the model".to_owned()))
}

/// Waits until a step has run on every rank, or the group has failed.
fn wait(places: &[Arc<Vec<Place>>], place: usize, group: &Arc<Group>) -> Result<(), runtime::Error> {
    let (mut asked, mut spins) = (Instant::now(), 0u32);
    loop {
        let done = probe(places, place, group);
        if asked.elapsed() > CHECK_INTERVAL {
            group.check();
            asked = Instant::now();
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

/// Whether a step that uses this place has run on every rank. Any error of any device is found, and fails the group.
fn probe(places: &[Arc<Vec<Place>>], place: usize, group: &Arc<Group>) -> bool {
    let mut done = true;
    // All of them every time: an error of the last would keep the first waiting for ever.
    for (rank, places) in places.iter().enumerate() {
        match places[place].done.is_done() {
            Ok(is_done) => done &= is_done,
            Err(error) => group.fail(rank, &error.to_string()),
        }
    }
    done
}

fn failure(group: &Group) -> runtime::Error {
    group.failure().map_or_else(gone, |failure| runtime::Error::Device(failure.to_string()))
}

#[cfg(test)]
mod tests {
    use super::super::nccl::tests::fake_group;
    use super::*;

    #[test]
    fn loading_is_told_for_all_ranks_together_and_ends_with_the_first_that_can_not() {
        let (news, loading) = channel();
        for rank in [1, 0, 2] {
            news.send((rank, Loading::Progress(rank as u64, 10))).unwrap();
        }
        for words in ["the card is on fire", "rank 2 failed"] {
            news.send((2, Loading::Done(Err(Error::Device(words.to_owned()))))).unwrap();
        }
        let told = std::sync::Mutex::new(Vec::new());
        let progress = |done, total| told.lock().unwrap().push((done, total));
        // The senders of the other ranks are alive: nobody waits for them.
        let refused = loaded(&loading, 3, &progress).err().unwrap().to_string();
        assert!(refused.contains("on fire"), "{refused}");
        assert_eq!(*told.lock().unwrap(), [(1, 30), (1, 30), (3, 30)]);
    }

    #[test]
    fn a_batch_that_all_refuse_is_malformed_and_one_that_some_refuse_is_the_end_of_the_group() {
        let malformed = || Err(runtime::Error::Malformed("it has no rows".to_owned()));
        assert!(judge(&mut vec![Ok(())], None).is_ok());
        assert!(matches!(judge(&mut vec![malformed()], None), Err(runtime::Error::Malformed(_))));
        let group = fake_group(3);
        assert!(judge(&mut vec![Ok(()), Ok(()), Ok(())], Some(&group)).is_ok());
        let all = judge(&mut vec![malformed(), malformed(), malformed()], Some(&group));
        assert!(matches!(all, Err(runtime::Error::Malformed(_))) && group.failure().is_none());
        let some = judge(&mut vec![Ok(()), malformed(), Ok(())], Some(&group));
        let Err(runtime::Error::Device(words)) = some else { panic!("{some:?}") };
        assert!(words.contains("rank 1") && words.contains("it has no rows"), "{words}");
        assert_eq!(group.failure().unwrap().rank, 1);
    }
}
