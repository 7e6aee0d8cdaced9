//! What an observer sees of the engine. Without one, nothing is kept for it.

use inflight_contract::Tenant;
use inflight_worker_core::{Chunk, Preempted, Scheduler, SequenceId, SequenceStatus, Time};

use super::Engine;
use super::chunk_owner::ChunkOwner;
use super::live_choice::LiveChoice;
use super::live_choices::LiveChoices;

/// Work of one sequence in a completed iteration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletedWork {
    /// The sequence.
    pub id: SequenceId,
    /// Request and choice that own the sequence.
    pub owner: ChunkOwner,
    /// Slot of the sequence.
    pub slot: u32,
    /// Known tokens computed; 0 for a decode.
    pub prefill_tokens: u32,
    /// Drafted tokens.
    pub drafted_tokens: u32,
    /// Tokens generated.
    pub generated_tokens: u32,
}

/// Sequence that has not ended, with its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveSequence {
    /// State of the sequence.
    pub status: SequenceStatus,
    /// Request and choice that own the sequence.
    pub owner: ChunkOwner,
}

/// Admission or preemption of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceChange {
    /// The sequence.
    pub id: SequenceId,
    /// Request and choice that own the sequence.
    pub owner: ChunkOwner,
    /// Number of the iteration before which it happened.
    pub iteration: u64,
    /// Time of the plan.
    pub at: Time,
    /// What happened.
    pub kind: ChangeKind,
}

/// What happened to a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// It received a slot.
    Admitted {
        /// The slot.
        slot: u32,
        /// Its tokens that are in the KV cache.
        cached_tokens: u32,
        /// Whether it ran before and was preempted.
        resumed: bool,
    },
    /// It lost its slot and blocks.
    Preempted {
        /// How, and what it costs.
        preempted: Preempted,
        /// Owner of the sequence that it was preempted for, unless that has ended.
        beneficiary: Option<ChunkOwner>,
    },
}

fn owner(live: &LiveChoice, tenant: Option<Tenant>) -> ChunkOwner {
    ChunkOwner { key: live.key, attempt: live.attempt, choice: live.choice, tenant }
}

/// Returns the owners of chunks that are about to be launched.
pub(super) fn owners<'a>(
    chunks: &'a [Chunk],
    live: &'a LiveChoices,
    scheduler: &'a Scheduler,
) -> impl Iterator<Item = ChunkOwner> + 'a {
    let owner_of =
        |chunk: &Chunk| live.get(chunk.id).map(|choice| owner(choice, scheduler.tenant_of(chunk.id)));
    // Every planned sequence is live, so that the owners stay in the order of the chunks.
    chunks.iter().filter_map(owner_of)
}

impl Engine {
    /// Starts or ends keeping what [`Engine::completed_work`] and [`Engine::take_changes`] return.
    pub fn observe(&mut self, observed: bool) {
        self.observed = observed;
        self.changes.clear();
    }

    /// Takes the admissions and preemptions since the last call, in their order; nothing unless the engine is observed.
    pub fn take_changes(&mut self) -> Vec<SequenceChange> {
        std::mem::take(&mut self.changes)
    }

    /// Keeps the admissions and preemptions of the last plan, if the engine is observed. To be called before the choices take them up.
    pub(super) fn keep_changes(&mut self, now: Time) {
        if !self.observed {
            return;
        }
        let plan = self.scheduler.iteration();
        // A plan without work has no iteration of its own: what it decides comes before the next one.
        let iteration = if plan.chunks.is_empty() { plan.number + 1 } else { plan.number };
        let owner_of = |id: SequenceId| {
            let live = self.live.get(id)?;
            Some(owner(live, self.scheduler.tenant_of(id)))
        };
        let change = |id: SequenceId, kind: ChangeKind| {
            Some(SequenceChange { id, owner: owner_of(id)?, iteration, at: now, kind })
        };
        let preempted = plan.preempted.iter().filter_map(|preempted| {
            let beneficiary = owner_of(preempted.beneficiary);
            change(preempted.id, ChangeKind::Preempted { preempted: *preempted, beneficiary })
        });
        let admitted = plan.admitted.iter().filter_map(|(id, slot)| {
            let cached_tokens = self.scheduler.committed_tokens_of(*id);
            let resumed = self.live.get(*id)?.has_run;
            change(*id, ChangeKind::Admitted { slot: *slot, cached_tokens, resumed })
        });
        let changes: Vec<SequenceChange> = preempted.chain(admitted).collect();
        self.changes.extend(changes);
    }

    /// Returns the number of the iteration that the last step has completed, and the sequences preempted before it: by
    /// recompute, and by swap. Only valid after a step that completed one.
    pub fn completed_iteration(&self) -> Option<(u64, (u32, u32))> {
        self.launches.completed().map(|completed| (completed.number, completed.preempted))
    }

    /// Returns the work of the iteration that the last step has completed; nothing if the engine was not observed when it
    /// was launched. Only valid after a step that completed one.
    pub fn completed_work(&self) -> impl Iterator<Item = CompletedWork> + '_ {
        let completed = self.launches.completed();
        let mut accepted = self.results.accepted().iter().copied();
        let work = completed.into_iter().flat_map(|completed| {
            completed
                .chunks
                .iter()
                .zip(&completed.owners)
                .zip(0..)
                .map(|(work, at)| (work, at < completed.decodes))
        });
        work.map(move |((chunk, owner), decodes)| CompletedWork {
            id: chunk.id,
            owner: *owner,
            slot: chunk.slot,
            prefill_tokens: if decodes { 0 } else { chunk.len },
            drafted_tokens: chunk.drafts,
            generated_tokens: match (chunk.samples, chunk.drafts) {
                (false, _) => 0,
                (true, 0) => 1,
                (true, _) => accepted.next().unwrap_or(1),
            },
        })
    }

    /// Returns every sequence that has not ended.
    pub fn live_sequences(&self) -> impl Iterator<Item = LiveSequence> + '_ {
        self.scheduler.roster().filter_map(|status| {
            let live = self.live.get(status.id)?;
            Some(LiveSequence { status, owner: owner(live, Some(status.tenant)) })
        })
    }

    /// Returns the name of a tenant; empty if the scheduler has forgotten it.
    pub fn tenant_name(&self, tenant: Tenant) -> &str {
        self.scheduler.tenants().name(tenant)
    }

    /// Returns the number of device blocks in the prefix cache that no sequence uses.
    pub fn cold_blocks(&self) -> u32 {
        self.scheduler.cold_blocks()
    }
}
