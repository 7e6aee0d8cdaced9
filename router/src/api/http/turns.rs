//! Turns of work on one resource: the holder that has had least of it for its weight comes next.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use inflight_net::Holder;
use tokio::sync::oneshot;

/// Maximum holders that wait for nothing and whose service is remembered.
const IDLE_HOLDERS_MAX: usize = 10_000;

/// Name of a holder; `None` for callers without one, who share a place.
type Name = Option<Arc<str>>;

/// Queue of work that one at a time does, in start-time fair order between holders, as each is charged the time for which it held its turn.
pub(super) struct Turns(Mutex<State>);

struct State {
    taken: bool,
    /// Seconds for its weight that each holder has had, at least [`State::floor`].
    service: BTreeMap<Name, f64>,
    waiting: BTreeMap<Name, VecDeque<oneshot::Sender<()>>>,
    /// Service of the last holder that had a turn, from which one that comes anew starts.
    floor: f64,
}

/// Turn of a holder, until it is dropped.
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    name: Name,
    weight: f64,
    begun: Instant,
}

impl Turns {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(State {
            taken: false,
            service: BTreeMap::new(),
            waiting: BTreeMap::new(),
            floor: 0.0,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Only a failed allocation can panic while the lock is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the turn of `holder`.
    pub(super) async fn turn(&self, holder: Option<&Holder>) -> Turn<'_> {
        let name = holder.map(|holder| holder.name.clone());
        let weight = holder.map_or(1.0, |holder| holder.weight);
        let receiver = {
            let mut state = self.lock();
            match state.taken {
                false => {
                    state.taken = true;
                    state.begin(&name);
                    None
                }
                true => {
                    let (sender, receiver) = oneshot::channel();
                    state.waiting.entry(name.clone()).or_default().push_back(sender);
                    Some(receiver)
                }
            }
        };
        // Made before the wait: if the call ends meanwhile, a turn that was just given passes on.
        let mut waiting = Waiting { turns: self, receiver };
        waiting.wait().await;
        Turn { turns: self, name, weight, begun: Instant::now() }
    }

    /// Gives the turn to the next; `charged`: the holder that had it, and its seconds for its weight.
    fn pass(&self, charged: Option<(&Name, f64)>) {
        let mut state = self.lock();
        if let Some((name, seconds)) = charged
            && let Some(service) = state.service.get_mut(name)
        {
            *service += seconds;
        }
        loop {
            let Some(name) = state.next() else {
                state.taken = false;
                return;
            };
            let Some(queue) = state.waiting.get_mut(&name) else { continue };
            let sender = queue.pop_front();
            if queue.is_empty() {
                state.waiting.remove(&name);
            }
            if let Some(sender) = sender
                && !sender.is_closed()
            {
                state.begin(&name);
                // One that goes away now passes it on.
                _ = sender.send(());
                return;
            }
        }
    }
}

impl State {
    fn service(&self, name: &Name) -> f64 {
        self.service.get(name).copied().unwrap_or(self.floor).max(self.floor)
    }

    /// Returns the holder with least service of those that wait.
    fn next(&self) -> Option<Name> {
        let waiting = self.waiting.keys();
        waiting.min_by(|a, b| self.service(a).total_cmp(&self.service(b))).cloned()
    }

    /// Records that a holder begins a turn.
    fn begin(&mut self, name: &Name) {
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
    /// Absent once it has its turn.
    receiver: Option<oneshot::Receiver<()>>,
}

impl Waiting<'_> {
    async fn wait(&mut self) {
        if let Some(receiver) = &mut self.receiver {
            // The sender is only dropped where this receiver is closed.
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
                self.turns.pass(None);
            }
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let seconds = self.begun.elapsed().as_secs_f64() / self.weight.max(f64::MIN_POSITIVE);
        self.turns.pass(Some((&self.name, seconds)));
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
        let turns = Turns::new();
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
        assert!(turns.lock().waiting.is_empty());
    }
}
