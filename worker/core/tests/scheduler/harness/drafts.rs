//! Drafts of random schedules: which are offered, which stand, and what must hold for a plan with drafts and for
//! their roll-back.

use std::collections::BTreeMap;
use std::time::Duration;

use inflight_worker_core::{DraftKind, Iteration, IterationOutcome, SequenceId, TokenVerdict};

use super::rules::ModelSnapshot;
use super::{Harness, mix};

/// KV of a rejected draft.
const GARBAGE: u64 = 13;

/// Chunk with drafts.
pub(super) struct DraftedChunk {
    /// Number of drafts that stand.
    pub stand: u32,
    /// KV of the drafts: that of the sequence's next tokens where they stand, else garbage.
    pub contents: Vec<u64>,
    /// Spans up to which the sequence's tables would reach without the drafts, by group.
    undrafted: Vec<u32>,
}

impl Harness {
    /// Offers a random number of drafts for each live sequence, also where the scheduler must ignore them.
    pub(super) fn offer_drafts(&mut self) -> BTreeMap<SequenceId, u32> {
        let mut offered = BTreeMap::new();
        for (nth, id) in self.live.keys().copied().enumerate().collect::<Vec<_>>() {
            let count = (mix(self.now.as_nanos(), nth as u64) % 8) as u32;
            let wanted = self.scheduler.drafts_wanted(id);
            let limits = self.scheduler.limits();
            assert!(wanted.guessed.max(wanted.forced) <= limits.drafts_max);
            assert!(wanted.predicted <= limits.predicted_max);
            let kinds = [DraftKind::Forced, DraftKind::Guessed, DraftKind::Predicted];
            let kind = kinds[(mix(self.now.as_nanos(), nth as u64) / 8 % 3) as usize];
            self.scheduler.draft(id, count, kind);
            offered.insert(id, count);
        }
        offered
    }

    /// Checks the drafts of a plan, whose chunks the model has not taken over, and decides which of them stand.
    pub(super) fn check_drafts(
        &mut self,
        before: &ModelSnapshot,
        offered: &BTreeMap<SequenceId, u32>,
        plan: &Iteration,
    ) -> BTreeMap<SequenceId, DraftedChunk> {
        let limits = *self.scheduler.limits();
        let mut drafted_chunks = BTreeMap::new();
        let predicted: u32 = plan.chunks.iter().map(|chunk| chunk.predictions).sum();
        assert!(
            predicted <= limits.iteration_samples - limits.running_max,
            "more predictions than rows of drafts"
        );
        for chunk in plan.chunks.iter().filter(|chunk| chunk.predictions > 0) {
            let rest = self.live.get(&chunk.id).map_or(0, |model| model.remaining);
            assert!(chunk.samples && chunk.predictions <= limits.predicted_max && chunk.predictions < rest);
        }
        assert_eq!(plan.drafts, plan.chunks.iter().map(|chunk| chunk.drafts).sum::<u32>());
        for (at, chunk) in plan.chunks.iter().enumerate().filter(|(_, chunk)| chunk.drafts > 0) {
            let drafts = chunk.drafts;
            assert!(at < plan.decodes as usize && chunk.samples, "a prefill with drafts");
            assert_eq!(chunk.len, 1 + drafts);
            assert!(
                drafts <= limits.drafts_max.min(offered[&chunk.id]),
                "more drafts than offered or allowed"
            );
            assert!(!before.in_flight.contains(&chunk.id), "drafts behind a token that is not known");
            let model = self.live.get_mut(&chunk.id).expect("a planned sequence is live");
            assert_eq!(chunk.start + 1, model.tokens.len() as u32, "drafts do not follow the newest token");
            assert!(drafts < model.remaining, "drafts beyond the last token to generate");
            let own = limits.shape.spans(chunk.start + 1);
            let undrafted: Vec<u32> = before.ran[&chunk.id].iter().map(|held| own.max(*held)).collect();
            let with = limits.shape.spans(chunk.start + chunk.len);
            let drafted: Vec<u32> = undrafted.iter().map(|end| with.max(*end)).collect();
            let groups = self.scheduler.tables(chunk.id).unwrap().groups();
            let ends: Vec<u32> = groups.iter().map(|table| table.end_span()).collect();
            assert_eq!(ends, drafted, "not reserved");
            let stand = (mix(plan.number, model.seed) % u64::from(drafts + 1)) as u32;
            let (mut contents, mut last) = (Vec::new(), model.contents[chunk.start as usize]);
            for nth in 0..drafts {
                last = mix(last, mix(model.seed, u64::from(chunk.start + 1 + nth)) as u32 as u64);
                contents.push(if nth < stand { last } else { GARBAGE });
            }
            model.drafts = drafts;
            drafted_chunks.insert(chunk.id, DraftedChunk { stand, contents, undrafted });
        }
        drafted_chunks
    }

    /// Checks that numbers of accepted tokens that cannot be are rejected without effect.
    pub(super) fn reject_bad_counts(&mut self, number: u64, verdicts: &[TokenVerdict], accepted: &[u32]) {
        let mut rejects = |accepted: &[u32]| {
            let outcome = IterationOutcome { verdicts, accepted, took: Duration::ZERO };
            assert!(self.scheduler.commit(number, outcome).is_err(), "{accepted:?} was accepted");
        };
        let mut bad = accepted.to_vec();
        bad.push(1);
        rejects(&bad);
        for count in [0, 100] {
            if let Some(last) = accepted.len().checked_sub(1) {
                bad.truncate(last);
                bad.push(count);
                rejects(&bad);
                rejects(&bad[..last]);
            }
        }
    }

    /// Checks that after a commit each sequence holds the blocks of its tokens, and none for rejected drafts.
    pub(super) fn check_roll_back(&mut self, drafted: &BTreeMap<SequenceId, DraftedChunk>) {
        let limits = *self.scheduler.limits();
        for (id, chunk) in drafted {
            let Some(model) = self.live.get(id) else { continue };
            let held = self.ends(*id);
            let planned = limits.shape.spans(model.planned);
            let needed: Vec<u32> = chunk.undrafted.iter().map(|end| planned.max(*end)).collect();
            // A sequence that has ended is still in the model, without blocks.
            let ended = self.scheduler.tables(*id).is_none();
            assert!(held == needed || ended, "{id:?} holds spans up to {held:?}, not {needed:?}");
        }
    }
}
