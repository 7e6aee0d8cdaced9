//! Weighted fair queue of calls for a few execution slots, by holder (a tenant).

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::shared_pool::Holder;

/// Maximum holders that wait for nothing and whose service is remembered.
const IDLE_HOLDERS_MAX: usize = 10_000;

/// Name of a holder; `None` for callers without one, who share a place.
type Name = Option<Arc<str>>;

/// Start-time fair queue: a free slot goes to the holder with the least slot time for its weight. A holder has at most all slots but one, where
/// there are several.
pub struct Turns {
    slots: usize,
    state: Mutex<State>,
}

struct State {
    taken: usize,
    /// Slots of each holder that has one.
    held: BTreeMap<Name, usize>,
    /// Seconds for its weight that each holder has had, at least [`State::floor`].
    service: BTreeMap<Name, f64>,
    waiting: BTreeMap<Name, VecDeque<oneshot::Sender<()>>>,
    /// Service of the last holder that had a turn, from which one that comes anew starts.
    floor: f64,
}

/// Turn of a holder, until it is dropped.
#[must_use]
pub struct Turn<'a> {
    turns: &'a Turns,
    name: Name,
    weight: f64,
    begun: Instant,
}

impl Turns {
    /// Creates the queue of `slots` slots, at least one.
    pub const fn new(slots: usize) -> Self {
        let state = State {
            taken: 0,
            held: BTreeMap::new(),
            service: BTreeMap::new(),
            waiting: BTreeMap::new(),
            floor: 0.0,
        };
        Self { slots, state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Only a failed allocation can panic while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the turn of `holder`.
    pub async fn turn(&self, holder: Option<&Holder>) -> Turn<'_> {
        let name = holder.map(|holder| holder.name.clone());
        let weight = holder.map_or(1.0, |holder| holder.weight);
        let receiver = {
            let mut state = self.lock();
            match state.taken < self.slots && state.may_begin(&name, self.slots) {
                true => {
                    state.begin(&name);
                    None
                }
                false => {
                    let (sender, receiver) = oneshot::channel();
                    state.waiting.entry(name.clone()).or_default().push_back(sender);
                    Some(receiver)
                }
            }
        };
        // Made before the wait: if the call ends meanwhile, a turn that was just given passes on.
        let mut waiting = Waiting { turns: self, name: name.clone(), receiver };
        waiting.wait().await;
        Turn { turns: self, name, weight, begun: Instant::now() }
    }

    /// Ends a turn of a holder, charges it `seconds` for its weight, and gives free slots to those that wait.
    fn end(&self, name: &Name, seconds: f64) {
        let mut state = self.lock();
        state.give_back(name);
        if let Some(service) = state.service.get_mut(name) {
            *service += seconds;
        }
        while state.taken < self.slots {
            let Some(name) = state.next(self.slots) else { return };
            let Some(queue) = state.waiting.get_mut(&name) else { continue };
            let sender = queue.pop_front();
            if queue.is_empty() {
                state.waiting.remove(&name);
            }
            if let Some(sender) = sender {
                state.begin(&name);
                // A call that has gone away takes no turn; one that goes away from here on ends it.
                if sender.send(()).is_err() {
                    state.give_back(&name);
                }
            }
        }
    }
}

impl State {
    fn service(&self, name: &Name) -> f64 {
        self.service.get(name).copied().unwrap_or(self.floor).max(self.floor)
    }

    /// Returns whether a holder may have one of `slots` slots more.
    fn may_begin(&self, name: &Name, slots: usize) -> bool {
        self.held.get(name).copied().unwrap_or(0) < slots.saturating_sub(1).max(1)
    }

    /// Returns the holder with least service of those that wait and may begin.
    fn next(&self, slots: usize) -> Option<Name> {
        let waiting = self.waiting.keys().filter(|name| self.may_begin(name, slots));
        waiting.min_by(|a, b| self.service(a).total_cmp(&self.service(b))).cloned()
    }

    /// Frees a slot of a holder.
    fn give_back(&mut self, name: &Name) {
        self.taken -= 1;
        match self.held.get(name).map_or(0, |held| held - 1) {
            0 => self.held.remove(name),
            held => self.held.insert(name.clone(), held),
        };
    }

    /// Records that a holder begins a turn.
    fn begin(&mut self, name: &Name) {
        self.taken += 1;
        *self.held.entry(name.clone()).or_default() += 1;
        let service = self.service(name);
        // What others had before counts no more.
        self.floor = service;
        if self.service.len() >= IDLE_HOLDERS_MAX {
            let (waiting, floor) = (&self.waiting, self.floor);
            self.service.retain(|name, service| *service > floor || waiting.contains_key(name));
        }
        self.service.insert(name.clone(), service);
    }
}

/// Place in the queue.
struct Waiting<'a> {
    turns: &'a Turns,
    name: Name,
    /// Absent once it has its turn.
    receiver: Option<oneshot::Receiver<()>>,
}

impl Waiting<'_> {
    async fn wait(&mut self) {
        if let Some(receiver) = &mut self.receiver {
            // A sender is never dropped without having sent while its receiver waits.
            _ = receiver.await;
            self.receiver = None;
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if let Some(mut receiver) = self.receiver.take() {
            receiver.close();
            if receiver.try_recv().is_ok() {
                self.turns.end(&self.name, 0.0);
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let seconds = self.begun.elapsed().as_secs_f64() / self.weight.max(f64::MIN_POSITIVE);
        self.turns.end(&self.name, seconds);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::FutureExt as _;

    use super::*;

    fn holder(name: &str) -> Holder {
        Holder { name: name.into(), weight: 1.0 }
    }

    #[tokio::test]
    async fn a_holder_waits_for_one_turn_of_another_however_many_of_its_calls_wait() {
        let turns = Turns::new(1);
        let (many, one) = (holder("many"), holder("one"));
        let first = turns.turn(Some(&many)).await;
        let mut waiting: Vec<_> = (0..50).map(|_| Box::pin(turns.turn(Some(&many)))).collect();
        assert!(waiting.iter_mut().all(|turn| turn.now_or_never().is_none()));
        let mut other = Box::pin(turns.turn(Some(&one)));
        assert!((&mut other).now_or_never().is_none());
        std::thread::sleep(Duration::from_millis(5));
        drop(first);
        let turn = (&mut other).now_or_never().unwrap();
        // Then the others, each of which may go away before or after it has its turn.
        let mut rest = waiting.split_off(2);
        drop(waiting);
        drop(turn);
        let second = (&mut rest[0]).now_or_never().unwrap();
        drop(second);
        drop(rest.remove(1));
        assert!((&mut rest[1]).now_or_never().is_some(), "a turn that was not taken has passed on");
        drop(rest);
        assert!(turns.turn(None).now_or_never().is_some(), "no call waits any more");
        assert!(turns.lock().waiting.is_empty() && turns.lock().held.is_empty());
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn calls_that_go_away_at_any_time_lose_no_slot() {
        static TURNS: Turns = Turns::new(2);
        let tasks = (0..8).map(|task: u64| {
            tokio::spawn(async move {
                let holder = holder(["a", "b", "c"][task as usize % 3]);
                for round in 0..20_000 {
                    let patience = async {
                        for _ in 0..(task * 7 + round * 13) % 5 {
                            tokio::task::yield_now().await;
                        }
                    };
                    tokio::select! {
                        biased;
                        turn = TURNS.turn(Some(&holder)) => {
                            tokio::task::yield_now().await;
                            drop(turn);
                        }
                        () = patience => {}
                    }
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        let both = [TURNS.turn(None).now_or_never(), TURNS.turn(Some(&holder("a"))).now_or_never()];
        assert!(both.iter().all(Option::is_some));
        drop(both);
        assert!(TURNS.lock().taken == 0 && TURNS.lock().held.is_empty());
    }

    #[tokio::test]
    async fn of_several_slots_one_is_free_for_another_holder() {
        let turns = Turns::new(3);
        let many = holder("many");
        let held = [turns.turn(Some(&many)).await, turns.turn(Some(&many)).await];
        let mut third = Box::pin(turns.turn(Some(&many)));
        assert!((&mut third).now_or_never().is_none());
        let other = turns.turn(Some(&holder("one"))).now_or_never().unwrap();
        drop(other);
        assert!((&mut third).now_or_never().is_none());
        drop(held);
        assert!((&mut third).now_or_never().is_some());
    }
}
