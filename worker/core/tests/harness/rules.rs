//! What every plan must keep, judged from outside, by the driver's own books: who gives way to whom and for what, who
//! is passed how often, and that the first in order gets on.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use inflight_contract::{Service, Tenant, TenantService, TokenCost, Weight};
use inflight_worker_core::policy::{PolicyKind, SequenceView};
use inflight_worker_core::{Iteration, SequenceId, Time};

use super::{Harness, Model};

/// As it was before a plan.
pub(super) struct Before {
    /// Those with a slot and blocks at hand, with the number of these.
    ran: BTreeMap<SequenceId, u32>,
    waiting: BTreeSet<SequenceId>,
    in_flight: BTreeSet<SequenceId>,
    services: BTreeMap<String, Service>,
    tenant: Tenant,
    free: u32,
    free_slots: u32,
    transfers: bool,
    ended: u64,
}

impl Harness {
    pub(super) fn look(&self) -> Before {
        let table = |id: SequenceId| self.scheduler.block_table(id).len() as u32;
        let running = self.live.iter().filter(|(id, model)| model.slot.is_some() && table(**id) > 0);
        let waiting = self.live.iter().filter(|(_, model)| model.slot.is_none() && !model.swapped);
        let chunks = self.in_flight.iter().flat_map(|running| &running.chunks);
        let load = self.scheduler.load();
        let tenants = self.scheduler.tenants().iter();
        Before {
            ran: running.map(|(id, _)| (*id, table(*id))).collect(),
            waiting: waiting.map(|(id, _)| *id).collect(),
            in_flight: chunks.map(|(chunk, _)| chunk.id).collect(),
            services: tenants.map(|(name, service, _)| (name.to_owned(), service)).collect(),
            // No policy looks at the name itself.
            tenant: TenantService::new(TokenCost::default(), 1).arrive("", Weight::default()),
            free: load.blocks - load.blocks_used,
            free_slots: self.scheduler.limits().running_max - self.slots.len() as u32,
            transfers: !self.transfers.is_empty(),
            ended: self.ended,
        }
    }

    /// Judges a plan. The books are still those from before it, less what ended in it.
    pub(super) fn judge(&mut self, before: &Before, plan: &Iteration) {
        if self.now > Time::from_nanos(5_000_000_000) {
            return; // ageing would begin, which these books do not keep
        }
        // Giving way may lift a tenant's counter in the middle of the plan, and change the order.
        if self.kind != PolicyKind::Fair || plan.preempted.is_empty() {
            self.check_passes(before, plan);
            self.check_first(before, plan);
        }
        self.check_victims(before, plan);
        let waits = before.waiting.iter().any(|id| self.live.contains_key(id));
        let starts = plan.admitted.iter().any(|(id, _)| before.waiting.contains(id));
        assert!(!waits || starts || plan.blocked.is_some(), "nobody starts, and the plan does not say why");
        for (id, model) in &mut self.live {
            model.marked &= before.in_flight.contains(id);
        }
    }

    fn compare(&self, before: &Before, a: &Model, b: &Model) -> Ordering {
        let view = |model: &Model| SequenceView {
            priority: model.priority,
            arrival: model.arrival,
            tokens: model.tokens.len() as u32 + model.remaining,
            tenant: before.tenant,
            service: before.services.get(&model.tenant.to_string()).copied().unwrap_or_default(),
            waited: Default::default(),
        };
        self.policy.compare(&view(a), &view(b))
    }

    /// The first of a lane is passed by at most `bypass_max` admissions, and by one where it waits to share a prefix.
    fn check_passes(&mut self, before: &Before, plan: &Iteration) {
        let most = self.scheduler.limits().bypass_max.max(1);
        let waiting = || before.waiting.iter().filter_map(|id| Some((*id, self.live.get(id)?)));
        let mut passed = Vec::new();
        for (id, model) in waiting() {
            let ahead_in_lane = |other: &Model| {
                (other.tenant, other.priority) == (model.tenant, model.priority)
                    && other.arrival < model.arrival
            };
            if waiting().any(|(_, other)| ahead_in_lane(other)) || plan.admitted.iter().any(|(a, _)| *a == id)
            {
                continue;
            }
            let admitted = plan.admitted.iter().filter(|(id, _)| before.waiting.contains(id));
            let later =
                admitted.filter(|(id, _)| self.compare(before, model, &self.live[id]).is_lt()).count();
            passed.push((id, later as u32));
        }
        for (id, times) in passed {
            let model = self.live.get_mut(&id).expect("it was there");
            model.passed += times;
            assert!(model.passed <= most, "{id:?} was passed {} times, more than {most}", model.passed);
        }
    }

    /// Where nothing is on its way, the first in order of those that run gets on.
    fn check_first(&self, before: &Before, plan: &Iteration) {
        if before.transfers || !plan.transfers.is_empty() || !before.in_flight.is_empty() {
            return;
        }
        let running = before.ran.keys().filter_map(|id| Some((id, self.live.get(id)?)));
        let Some((first, _)) = running.min_by(|a, b| self.compare(before, a.1, b.1)) else { return };
        let gave_way = plan.preempted.iter().any(|one| one.id == *first);
        let gets_on = plan.chunks.iter().any(|chunk| chunk.id == *first);
        assert!(gets_on || gave_way, "{first:?} is the first in order and gets nothing: {plan:?}");
    }

    fn check_victims(&self, before: &Before, plan: &Iteration) {
        let limits = self.scheduler.limits();
        let preempted = |id: &SequenceId| plan.preempted.iter().any(|one| one.id == *id);
        let planned = |id: &SequenceId| plan.chunks.iter().any(|chunk| chunk.id == *id);
        let order_holds = self.kind != PolicyKind::Fair || plan.preempted.len() == 1;
        for one in &plan.preempted {
            let (Some(victim), Some(beneficiary)) = (self.live.get(&one.id), self.live.get(&one.beneficiary))
            else {
                panic!("{one:?}: one of them has ended");
            };
            let goes_after = |other: &Model| self.compare(before, beneficiary, other).is_lt();
            let itself = one.id == one.beneficiary;
            if itself && victim.forced {
                continue;
            }
            assert!(
                itself || !order_holds || goes_after(victim),
                "{one:?}: it goes before whom it gives way to"
            );
            let displaced = before.waiting.contains(&one.beneficiary);
            let threshold = i64::from(limits.preemption_threshold);
            let displaceable =
                |other: &Model| i64::from(other.priority) <= i64::from(beneficiary.priority) - threshold;
            assert!(!displaced || displaceable(victim), "{one:?}: it is as important");

            // What it gives way for is really lacking.
            let block = limits.block_tokens;
            let grows = |(id, held): (&SequenceId, &u32)| {
                self.live.get(id).is_some_and(|model| model.remaining > 0 && model.planned + 1 > held * block)
            };
            let wanted = before.ran.iter().filter(|one| grows(*one)).count() as u32;
            let reserves =
                |model: &Model| limits.admission_blocks(model.tokens.len() as u32, model.remaining);
            let admitted = || plan.admitted.iter().filter_map(|(id, _)| self.live.get(id));
            // Others may have started ahead of it in this very plan.
            let admission =
                reserves(beneficiary) + limits.watermark_blocks + admitted().map(reserves).sum::<u32>();
            let slots = before.free_slots.saturating_sub(admitted().count() as u32);
            let lacks = match displaced {
                true => slots == 0 || wanted + admission > before.free,
                false => wanted > before.free,
            };
            assert!(
                lacks || self.ended > before.ended,
                "{one:?}: nothing is lacking, {} are free",
                before.free
            );

            // It has got on since it came back, or nobody else could give way.
            let candidate = |(id, _): (&SequenceId, &u32)| {
                let Some(other) = self.live.get(id) else { return false };
                let flying = before.in_flight.contains(id);
                let leaves = plan.marked.iter().any(|(marked, _)| marked == id)
                    || other.forced
                    || other.marked && flying;
                let idle = other.idle && !flying;
                let eligible = !displaced || displaceable(other);
                *id != one.beneficiary && !preempted(id) && !leaves && !idle && eligible && goes_after(other)
            };
            let idle = victim.idle && !before.in_flight.contains(&one.id);
            if idle && order_holds {
                let other = before.ran.iter().find(|one| candidate(*one));
                assert!(other.is_none(), "{one:?}: it has not got on since it came back, but {other:?} has");
            }

            // And not in vain: whom it gave way to gets on, unless something is still on its way.
            let on_its_way = before.transfers || !plan.transfers.is_empty() || !before.in_flight.is_empty();
            let served = planned(&one.beneficiary) || preempted(&one.beneficiary);
            assert!(served || displaced || on_its_way, "{one:?}: it gave way in vain");
        }
    }
}
