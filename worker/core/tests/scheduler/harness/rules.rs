//! Properties of every plan, checked against the model: choice and need of preemptions, bounded bypass, and
//! progress of the first sequence in policy order.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use inflight_contract::{GROUPS_MAX, Service, Tenant, TokenCost, VirtualTokenCounters, Weight};
use inflight_worker_core::policy::{PolicyKind, SequenceView};
use inflight_worker_core::{Direction, Iteration, SequenceId, Time};

use super::{Harness, SequenceModel};

/// Snapshot of the model before a plan.
pub(super) struct ModelSnapshot {
    /// Sequences with a slot and blocks on the device, with the spans up to which their tables reach, by group.
    pub(super) ran: BTreeMap<SequenceId, Vec<u32>>,
    waiting: BTreeSet<SequenceId>,
    pub(super) in_flight: BTreeSet<SequenceId>,
    services: BTreeMap<String, Service>,
    tenant: Tenant,
    pub(super) free: u32,
    free_slots: u32,
    transfers: bool,
    ended: u64,
}

impl Harness {
    pub(super) fn snapshot(&self) -> ModelSnapshot {
        let running = self.live.iter().filter(|(id, model)| model.slot.is_some() && self.has_tables(**id));
        let waiting = self.live.iter().filter(|(_, model)| model.slot.is_none() && !model.swapped);
        let chunks = self.in_flight.iter().flat_map(|running| &running.chunks);
        let load = self.scheduler.load();
        let tenants = self.scheduler.tenants().iter();
        ModelSnapshot {
            ran: running.map(|(id, _)| (*id, self.ends(*id))).collect(),
            waiting: waiting.map(|(id, _)| *id).collect(),
            in_flight: chunks.map(|(chunk, _)| chunk.id).collect(),
            services: tenants.map(|(name, service, _)| (name.to_owned(), service)).collect(),
            // Policies do not use the name of a tenant.
            tenant: VirtualTokenCounters::new(TokenCost::default(), 1).arrive("", Weight::default()),
            free: load.blocks - load.blocks_used,
            free_slots: self.scheduler.limits().running_max - self.slots.len() as u32,
            transfers: !self.transfers.is_empty(),
            ended: self.ended,
        }
    }

    /// Checks a plan. The model is in the state before the plan, without the sequences that ended in it.
    pub(super) fn check_plan(&mut self, before: &ModelSnapshot, plan: &Iteration) {
        if self.now > Time::from_nanos(5_000_000_000) {
            return; // aging would begin, which the model does not implement
        }
        // A preemption may raise a tenant's virtual time within the plan, and so change the order.
        if self.kind != PolicyKind::Fair || plan.preempted.is_empty() {
            self.check_bypasses(before, plan);
            self.check_first(before, plan);
        }
        self.check_victims(before, plan);
        self.check_group_blocks();
        let waits = before.waiting.iter().any(|id| self.live.contains_key(id));
        let starts = plan.admitted.iter().any(|(id, _)| before.waiting.contains(id));
        assert!(!waits || starts || plan.blocked.is_some(), "no admission, and the plan gives no reason");
        for (id, model) in &mut self.live {
            model.marked &= before.in_flight.contains(id);
        }
    }

    /// Checks the reported blocks of each group: only running sequences have tables.
    fn check_group_blocks(&self) {
        let mut blocks = [0; GROUPS_MAX];
        for tables in self.live.keys().filter_map(|id| self.scheduler.tables(*id)) {
            let groups = tables.groups().iter().map(|table| table.blocks().len() as u32);
            blocks.iter_mut().zip(groups).for_each(|(sum, blocks)| *sum += blocks);
        }
        assert_eq!(self.scheduler.group_blocks(), blocks);
    }

    fn compare(&self, before: &ModelSnapshot, a: &SequenceModel, b: &SequenceModel) -> Ordering {
        let view = |model: &SequenceModel| SequenceView {
            priority: model.priority,
            arrival: model.arrival,
            tokens: model.tokens.len() as u32 + model.remaining,
            tenant: before.tenant,
            service: before.services.get(&model.tenant.to_string()).copied().unwrap_or_default(),
            waited: Default::default(),
        };
        self.policy.compare(&view(a), &view(b))
    }

    /// Checks that the head of a flow is bypassed at most `max(bypass_max, 1)` times.
    fn check_bypasses(&mut self, before: &ModelSnapshot, plan: &Iteration) {
        let max = self.scheduler.limits().bypass_max.max(1);
        let waiting = || before.waiting.iter().filter_map(|id| Some((*id, self.live.get(id)?)));
        let mut bypassed = Vec::new();
        for (id, model) in waiting() {
            let ahead_in_flow = |other: &SequenceModel| {
                (other.tenant, other.priority) == (model.tenant, model.priority)
                    && other.arrival < model.arrival
            };
            if waiting().any(|(_, other)| ahead_in_flow(other)) || plan.admitted.iter().any(|(a, _)| *a == id)
            {
                continue;
            }
            let admitted = plan.admitted.iter().filter(|(id, _)| before.waiting.contains(id));
            let later =
                admitted.filter(|(id, _)| self.compare(before, model, &self.live[id]).is_lt()).count();
            bypassed.push((id, later as u32));
        }
        for (id, times) in bypassed {
            let model = self.live.get_mut(&id).expect("taken from `live` above");
            model.bypass_count += times;
            let count = model.bypass_count;
            assert!(count <= max, "{id:?} was bypassed {count} times, more than {max}");
        }
    }

    /// Checks that the first running sequence in policy order makes progress if nothing is in flight.
    fn check_first(&self, before: &ModelSnapshot, plan: &Iteration) {
        if before.transfers || !plan.transfers.is_empty() || !before.in_flight.is_empty() {
            return;
        }
        let running = before.ran.keys().filter_map(|id| Some((id, self.live.get(id)?)));
        let Some((first, _)) = running.min_by(|a, b| self.compare(before, a.1, b.1)) else { return };
        let preempted = plan.preempted.iter().any(|one| one.id == *first);
        let progresses = plan.chunks.iter().any(|chunk| chunk.id == *first);
        assert!(progresses || preempted, "{first:?} is the first in order and gets no token: {plan:?}");
    }

    /// Checks that each preemption has a valid victim and beneficiary, is needed, and lets the beneficiary
    /// proceed.
    fn check_victims(&self, before: &ModelSnapshot, plan: &Iteration) {
        let limits = self.scheduler.limits();
        let preempted = |id: &SequenceId| plan.preempted.iter().any(|one| one.id == *id);
        let planned = |id: &SequenceId| plan.chunks.iter().any(|chunk| chunk.id == *id);
        let order_holds = self.kind != PolicyKind::Fair || plan.preempted.len() == 1;
        for one in &plan.preempted {
            let (Some(victim), Some(beneficiary)) = (self.live.get(&one.id), self.live.get(&one.beneficiary))
            else {
                panic!("{one:?}: one of them has ended");
            };
            let goes_after = |other: &SequenceModel| self.compare(before, beneficiary, other).is_lt();
            let itself = one.id == one.beneficiary;
            if itself && victim.forced {
                continue;
            }
            assert!(
                itself || !order_holds || goes_after(victim),
                "{one:?}: the victim goes before the beneficiary"
            );
            let for_admission = before.waiting.contains(&one.beneficiary);
            let threshold = i64::from(limits.preemption_threshold);
            let outranked = |other: &SequenceModel| {
                i64::from(other.priority) <= i64::from(beneficiary.priority) - threshold
            };
            assert!(!for_admission || outranked(victim), "{one:?}: the victim's priority is not low enough");

            // The beneficiary really lacks blocks or a slot.
            let wants = |(id, ends): (&SequenceId, &Vec<u32>)| {
                let model = self.live.get(id).filter(|model| model.remaining > 0 && model.drafts == 0);
                let end = model.map_or(0, |model| limits.shape.spans(model.planned + 1));
                let groups = limits.shape.groups().iter().zip(ends);
                groups.map(|(group, held)| group.blocks * end.saturating_sub(*held)).sum::<u32>()
            };
            let wanted: u32 = before.ran.iter().map(wants).sum();
            // With windows a sequence with a cached prefix reserves more: what its next token sees, and a window ahead.
            let reserves = |model: &SequenceModel| match limits.shape.has_windows() {
                false => limits.admission_blocks(model.tokens.len() as u32, model.remaining),
                true => {
                    limits.shape.blocks(model.tokens.len() as u32 + model.remaining, limits.tokens_ahead())
                }
            };
            // Running prefills take blocks for their chunks before others are admitted, also those that are preempted then, whose
            // tables end where they began.
            let took = |(id, ends): (&SequenceId, &Vec<u32>)| {
                let groups = || limits.shape.groups().iter().zip(self.ends(*id)).zip(ends);
                match plan.preempted.iter().find(|other| other.id == *id) {
                    None => {
                        groups().map(|((group, end), held)| group.blocks * end.saturating_sub(*held)).sum()
                    }
                    Some(other) => {
                        let held =
                            groups().map(|((group, first), end)| group.blocks * end.saturating_sub(first));
                        other.blocks.saturating_sub(held.sum())
                    }
                }
            };
            let took: u32 = before.ran.iter().map(took).sum();
            let admitted = || plan.admitted.iter().filter_map(|(id, _)| self.live.get(id));
            // Others may have been admitted before it in this plan.
            let admission =
                reserves(beneficiary) + limits.watermark_blocks + admitted().map(reserves).sum::<u32>();
            let slots = before.free_slots.saturating_sub(admitted().count() as u32);
            let lacks = match for_admission {
                true => slots == 0 || took.max(wanted) + admission > before.free,
                false => wanted > before.free,
            };
            assert!(
                lacks || self.ended > before.ended,
                "{one:?}: the beneficiary lacks nothing, {} blocks are free",
                before.free
            );

            // The victim has made progress since its resumption, or there was no other candidate.
            let candidate = |(id, _): (&SequenceId, &Vec<u32>)| {
                let Some(other) = self.live.get(id) else { return false };
                let in_flight = before.in_flight.contains(id);
                let leaves = plan.marked.iter().any(|(marked, _)| marked == id)
                    || other.forced
                    || other.marked && in_flight;
                let no_progress = other.without_progress && !in_flight;
                let eligible = !for_admission || outranked(other);
                *id != one.beneficiary
                    && !preempted(id)
                    && !leaves
                    && !no_progress
                    && eligible
                    && goes_after(other)
            };
            let no_progress = victim.without_progress && !before.in_flight.contains(&one.id);
            if no_progress && order_holds {
                let other = before.ran.iter().find(|one| candidate(*one));
                assert!(other.is_none(), "{one:?}: no progress since its resumption, but {other:?} has");
            }

            // The beneficiary proceeds, unless a transfer or iteration is still in flight.
            let pending = before.transfers || !plan.transfers.is_empty() || !before.in_flight.is_empty();
            let served = planned(&one.beneficiary) || preempted(&one.beneficiary);
            assert!(served || for_admission || pending, "{one:?}: the beneficiary does not proceed");
        }
    }
}

impl Harness {
    /// Checks that nothing overwrites a block while a copy of an iteration that is not completed reads or writes it: no transfer from the
    /// host, which runs beside iterations, and no other copy of its plan.
    pub(super) fn check_copies(&self, plan: &Iteration) {
        let transfers = plan.transfers.iter().filter(|transfer| transfer.direction == Direction::In);
        let written: BTreeSet<u32> =
            transfers.flat_map(|transfer| &transfer.blocks).map(|(device, _)| *device).collect();
        let in_flight = self.in_flight.iter().flat_map(|running| &running.copies);
        for copy in in_flight.chain(&plan.copies) {
            assert!(
                !written.contains(&copy.from) && !written.contains(&copy.to),
                "{copy:?} beside a transfer"
            );
        }
        let targets: BTreeSet<u32> = plan.copies.iter().map(|copy| copy.to).collect();
        assert_eq!(targets.len(), plan.copies.len(), "two copies to one block");
        assert!(plan.copies.iter().all(|copy| !targets.contains(&copy.from)), "a copy of a copy: {plan:?}");
    }
}
