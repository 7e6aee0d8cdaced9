//! Seeds of the replays: short recordings of a scheduler and of a dispatcher.

use std::time::Duration;

use inflight_contract::{
    BlockHash, FinishReason, ModelLimits, Priority, TokenCost, VirtualTokenCounters, Weight,
};
use inflight_router_core as router;
use inflight_worker_core as worker;
use slotmap::SlotMap;

use super::{Result, Seeds};

/// Recordings of each policy: plans, preemption with swaps, cancellation, a failed step.
pub fn worker() -> Result<Seeds> {
    let mut seeds = Seeds::new();
    for (at, policy) in ["fair", "fcfs", "priority", "static"].into_iter().enumerate() {
        let limits = worker::SchedulerLimits {
            host_blocks: 4 * (at as u32 % 2),
            depth: 1 + at as u32 / 2,
            drafts_max: at as u32,
            govern_drafts: false,
            ..worker::SchedulerLimits::new(4, 6, 3, 8)
        };
        seeds.push((policy.to_owned(), schedule(limits, policy.parse()?)?));
    }
    Ok(seeds)
}

fn schedule(limits: worker::SchedulerLimits, policy: worker::policy::PolicyKind) -> Result<Vec<u8>> {
    let prior = worker::CostPrior::default().with_copies(0.0, 1e-9);
    let tenants = VirtualTokenCounters::new(TokenCost::default(), 10);
    let cost = worker::CostModel::new(prior);
    let mut scheduler = worker::Scheduler::new(limits, policy.build(), cost, tenants)?;
    scheduler.record(policy, &prior);
    let mut ids = Vec::new();
    for at in 0..4u32 {
        let hashes = [BlockHash::from_raw(7), BlockHash::from_raw(8)];
        let new = worker::NewSequence {
            known_tokens: 5 + at,
            max_tokens: 6,
            priority: (at % 2) as i32,
            deadline: (at == 3).then(|| worker::Time::from_nanos(50_000_000)),
            tenant: ["a", "b"][at as usize % 2],
            weight: Weight::default(),
            hashes: &hashes[..1],
            group: None,
            virtual_start_time: None,
            charged_tokens: 0,
            scored: worker::ScoredRange { start: 0, end: at.min(1) },
        };
        ids.push(scheduler.submit(new, worker::Time::ZERO)?);
    }
    for step in 1..14u64 {
        let now = worker::Time::from_nanos(step * 1_000_000);
        ids.iter().for_each(|id| scheduler.draft(*id, 2, worker::DraftKind::Guessed));
        let plan = scheduler.plan(now);
        // One draft of each chunk stands.
        let counts = plan.chunks.iter().filter(|chunk| chunk.drafts > 0).map(|_| 2);
        let accepted: Vec<u32> = counts.collect();
        let samples = plan.chunks.iter().filter(|chunk| chunk.samples).count() + accepted.len();
        let number = plan.number;
        let (runs, transfers) = (!plan.chunks.is_empty(), plan.transfers.clone());
        let took = Duration::from_micros(500);
        for transfer in transfers {
            scheduler.transfer_done(transfer.id, true, took, now)?;
        }
        if runs && step == 9 {
            scheduler.fail(number)?;
        } else if runs {
            let mut verdicts = vec![worker::TokenVerdict::CONTINUE; samples];
            verdicts.last_mut().into_iter().for_each(|last| last.stop = step == 8);
            scheduler.commit(
                number,
                worker::IterationOutcome { verdicts: &verdicts, accepted: &accepted, took },
            )?;
        }
        if step == 5 {
            scheduler.cancel(ids[1]);
        }
        scheduler.drain_ended().for_each(drop);
        scheduler.drain_freed_slots().for_each(drop);
    }
    Ok(scheduler.take_log())
}

/// Recordings of each placement policy: two workers, requests, updates, a lost session.
pub fn router() -> Seeds {
    use router::PlacementKind as Kind;
    let kinds = [("cost", Kind::Cost), ("round-robin", Kind::RoundRobin), ("prefix", Kind::Prefix)];
    kinds.map(|(name, kind)| (name.to_owned(), dispatch(kind))).into()
}

fn dispatch(placement: router::PlacementKind) -> Vec<u8> {
    let options = router::DispatcherOptions {
        queue: router::FairQueueOptions {
            limits: router::QueueLimits { requests: 24, tokens: 4000 },
            ..router::FairQueueOptions::default()
        },
        request_tokens_max: 1000,
        no_worker_timeout: Duration::from_secs(20),
        model_retention: Duration::from_secs(30),
        drain_grace: Duration::from_secs(1),
        retry_rate: 2,
        retry_burst: 3,
    };
    let mut recording = router::Recording::new(options, placement, 7);
    let mut dispatcher = router::Dispatcher::new(options, placement.build(7));
    let mut now = Duration::ZERO;
    let mut apply = |event: router::Event| {
        now += Duration::from_millis(20);
        let mut commands = Vec::new();
        recording.event(&event, now);
        dispatcher.apply(event, now, &mut commands);
        recording.commands(&commands);
        commands
    };
    let workers = [0, 1].map(router::WorkerId);
    for worker in workers {
        apply(router::Event::WorkerJoined { worker });
        let info = router::WorkerInfo {
            worker,
            model: "m".to_owned(),
            architecture: String::new(),
            bundle_digest: "d".to_owned(),
            fingerprint: "f".to_owned(),
            incarnation: format!("i{worker}"),
            limits: ModelLimits { vocab_size: 100, context_tokens: 64, kv_tokens: 640 },
            shape: inflight_contract::MemoryShape::uniform(16),
            capacity: router::Credits { sequences: 4, blocks: 40 },
            host_blocks: 2,
            heartbeat: Duration::from_secs(1),
        };
        let session = router::SessionId(worker.0.into());
        apply(router::Event::SessionOpened { session, worker: Box::new(info) });
    }
    let update = |worker: router::WorkerId, update: router::WorkerUpdate| router::Event::Updated {
        worker,
        session: router::SessionId(worker.0.into()),
        update: Box::new(update),
    };
    let credits = router::Credits { sequences: 4, blocks: 40 };
    let grant = Some(router::Grant { credits, priority_sequences: 1 });
    for worker in workers {
        apply(update(worker, router::WorkerUpdate { grant, ..router::WorkerUpdate::default() }));
    }
    let mut ids = SlotMap::<router::RequestId, ()>::with_key();
    let mut running = Vec::new();
    for at in 0..3u32 {
        let call = router::RequestSpec {
            lane: router::LaneId(0),
            tenant: ["a", "b"][at as usize % 2].to_owned(),
            weight: Weight::default(),
            priority: Priority::default(),
            bounds: router::QueueLimits::NONE,
            prompt_tokens: 5,
            max_tokens: 3,
            choices: 1 + at % 2,
            logprobs: None,
            prompt_logprobs: None,
            deadline: None,
            require_fingerprint: None,
            resumed: Vec::new(),
            chains: Vec::new(),
        };
        let request = ids.insert(());
        for command in apply(router::Event::Arrived { request, call: Box::new(call) }) {
            if let router::Command::Worker { worker, command: router::WorkerCommand::Submit(submission) } =
                command
            {
                running.push((worker, submission.id, submission.attempt));
            }
        }
    }
    for (worker, submission, attempt) in running.iter().copied().take(2) {
        let sequence = router::SequenceUpdate {
            submission,
            attempt,
            tokens: vec![1, 2, 3],
            end: Some(router::SequenceEnd::Finished(FinishReason::Length)),
            ..router::SequenceUpdate::default()
        };
        let message = router::WorkerUpdate { sequences: vec![sequence], ..router::WorkerUpdate::default() };
        apply(update(worker, message));
    }
    let lost = router::ResubmissionReason::SessionLost;
    apply(router::Event::SessionClosed { worker: workers[1], session: router::SessionId(1), reason: lost });
    apply(router::Event::Tick);
    ids.keys().for_each(|request| drop(apply(router::Event::Released { request })));
    recording.take()
}
