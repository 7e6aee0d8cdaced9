//! Choices from submission to finish, by sequence and by request.

use std::collections::BTreeMap;
use std::ops::{Index, IndexMut};

use inflight_worker_core::{DraftKind, DraftsWanted, SequenceId};

use super::live_choice::LiveChoice;
use super::{RequestKey, SessionId};

/// Choices that have not finished. A request is known while one of its choices is live.
#[derive(Default)]
pub(super) struct LiveChoices {
    /// By `SequenceId::index`.
    choices: Vec<Option<LiveChoice>>,
    /// Sequence of each unfinished choice, by request.
    requests: BTreeMap<RequestKey, Vec<Option<SequenceId>>>,
    /// Bytes of the draft sources of all choices.
    draft_bytes: usize,
}

impl LiveChoices {
    /// Adds the unfinished ones of a request's `count` choices.
    pub fn insert(&mut self, key: RequestKey, count: usize, choices: Vec<(SequenceId, LiveChoice)>) {
        let mut ids = vec![None; count];
        for (id, live) in choices {
            if self.choices.len() <= id.index() {
                self.choices.resize_with(id.index() + 1, || None);
            }
            ids[live.choice as usize] = Some(id);
            self.choices[id.index()] = Some(live);
        }
        self.requests.insert(key, ids);
    }

    /// Removes a choice. Returns it, and whether it was the last one of its request; `None` if it was never live.
    pub fn remove(&mut self, id: SequenceId) -> Option<(LiveChoice, bool)> {
        let mut live = self.choices.get_mut(id.index())?.take()?;
        self.draft_bytes -= live.drafter.clear();
        let Some(ids) = self.requests.get_mut(&live.key) else { return Some((live, false)) };
        if let Some(entry) = ids.get_mut(live.choice as usize) {
            *entry = None;
        }
        let is_last = ids.iter().all(Option::is_none);
        if is_last {
            self.requests.remove(&live.key);
        }
        Some((live, is_last))
    }

    /// Returns true if a choice of the request is live.
    pub fn contains(&self, key: RequestKey) -> bool {
        self.requests.contains_key(&key)
    }

    /// Returns the requests of a session.
    pub fn of_session(&self, session: SessionId) -> Vec<RequestKey> {
        let all = RequestKey { session, request: 0 }..=RequestKey { session, request: u64::MAX };
        self.requests.range(all).map(|(key, _)| *key).collect()
    }

    /// Returns the sequences of a request's live choices, or of the one with this index.
    pub fn sequences(
        &self,
        key: RequestKey,
        choice: Option<u32>,
    ) -> impl Iterator<Item = SequenceId> + use<'_> {
        let ids = self.requests.get(&key).map_or(&[][..], Vec::as_slice);
        let chosen = match choice {
            Some(choice) => ids.get(choice as usize).map_or(&[][..], std::slice::from_ref),
            None => ids,
        };
        chosen.iter().flatten().copied()
    }

    /// Returns the choice of a sequence; `None` if it has finished.
    pub fn get(&self, id: SequenceId) -> Option<&LiveChoice> {
        self.choices.get(id.index())?.as_ref()
    }

    /// Returns the choice of a sequence; `None` if it has finished.
    pub fn get_mut(&mut self, id: SequenceId) -> Option<&mut LiveChoice> {
        self.choices.get_mut(id.index())?.as_mut()
    }

    /// Proposes drafts for a choice, as many as are wanted; see [`LiveChoice::propose_drafts`]. Returns their kind and number.
    pub fn propose_drafts(&mut self, id: SequenceId, wanted: DraftsWanted) -> Option<(DraftKind, usize)> {
        let (kind, count, grown) = self.choices.get_mut(id.index())?.as_mut()?.propose_drafts(wanted);
        self.draft_bytes += grown;
        Some((kind, count))
    }

    /// Drops the draft source of a choice that does not run.
    pub fn clear_drafts(&mut self, id: SequenceId) {
        let cleared = self.get_mut(id).map_or(0, |live| live.drafter.clear());
        self.draft_bytes -= cleared;
    }

    /// Returns the bytes of the draft sources of all choices.
    pub fn draft_bytes(&self) -> usize {
        self.draft_bytes
    }
}

impl Index<SequenceId> for LiveChoices {
    type Output = LiveChoice;

    fn index(&self, id: SequenceId) -> &LiveChoice {
        // Planned sequences have not ended, and a choice is removed after its sequence has ended.
        self.get(id).expect("a planned sequence is live")
    }
}

impl IndexMut<SequenceId> for LiveChoices {
    fn index_mut(&mut self, id: SequenceId) -> &mut LiveChoice {
        // Planned sequences have not ended, and a choice is removed after its sequence has ended.
        self.get_mut(id).expect("a planned sequence is live")
    }
}
