//! Properties that hold for every placement policy.

use std::collections::{BTreeMap, VecDeque};

use inflight_contract::{CostCoefficients, MemoryShape};
use inflight_router_core::{
    BlockHashChain, Cached, Candidate, Credits, Estimate, Ledger, PlacementKind, PlacementRequest, Placer,
    Standing, SubmissionId, WorkerId, WorkerLoad, WorkerStates,
};
use proptest::prelude::*;

fn placer(kind: PlacementKind, seed: u64) -> Placer {
    Placer::new(kind.build(seed))
}

fn credits(most: u32) -> impl Strategy<Value = Credits> {
    (0..=most, 0..=most).prop_map(|(sequences, blocks)| Credits { sequences, blocks })
}

/// Any number a worker may report, invalid ones included.
fn number() -> impl Strategy<Value = f64> {
    prop_oneof![
        8 => 0.0..10.0f64,
        1 => prop_oneof![Just(f64::NAN), Just(f64::INFINITY), Just(-1.0), Just(1e300), Just(-0.0)],
    ]
}

/// Coefficients from an array, in the order of the formula.
fn coefficients(
    [step_s, token_s, prefill_key_s, decode_key_s, sequence_s, copy_s, copy_block_s]: [f64; 7],
) -> CostCoefficients {
    CostCoefficients { step_s, token_s, prefill_key_s, decode_key_s, sequence_s, copy_s, copy_block_s }
        .sanitized()
}

fn estimate() -> impl Strategy<Value = Estimate> {
    let cached = (0u32..5000, 0u32..500, 0u32..50);
    (cached, prop::array::uniform7(number()), (number(), number(), number()), 0.0..5.0f64).prop_map(
        |((device_tokens, host_tokens, host_blocks), cost, (ahead, stretch, step), unreported_prefill_s)| {
            Estimate {
                cached: Cached { device_tokens, host_tokens, host_blocks },
                cost: coefficients(cost),
                load: WorkerLoad::new(ahead, stretch, step),
                unreported_prefill_s,
            }
        },
    )
}

fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
    let standing = prop_oneof![
        3 => Just(Standing::Serving),
        1 => Just(Standing::Unfit),
        1 => Just(Standing::Draining),
        1 => Just(Standing::Ejected),
    ];
    let avoid = prop::bool::weighted(0.3);
    let priority_sequences = prop_oneof![3 => Just(0u32), 1 => 1u32..4];
    let one = (
        (0u32..40).prop_map(WorkerId),
        standing,
        credits(20),
        credits(20),
        priority_sequences,
        credits(4),
        avoid,
        estimate(),
    );
    prop::collection::vec(one, 0..9).prop_map(|ones| {
        let by_worker: BTreeMap<WorkerId, Candidate> = ones
            .into_iter()
            .map(|(worker, standing, grant, used, priority_sequences, need, avoid, estimate)| {
                (
                    worker,
                    Candidate { worker, standing, grant, used, priority_sequences, need, avoid, estimate },
                )
            })
            .collect();
        by_worker.into_values().collect()
    })
}

fn ask() -> impl Strategy<Value = PlacementRequest> {
    (0u32..6000, 0u32..500)
        .prop_map(|(prompt_tokens, output_tokens)| PlacementRequest { prompt_tokens, output_tokens })
}

proptest! {
    #[test]
    fn an_accepting_worker_with_room_is_chosen_if_and_only_if_there_is_one(
        rounds in prop::collection::vec((ask(), candidates()), 1..8), seed in any::<u64>()
    ) {
        for kind in PlacementKind::ALL {
            let mut placer = placer(kind, seed);
            for (ask, candidates) in &rounds {
                let serving = |c: &&Candidate| c.standing == Standing::Serving;
                let others = candidates.iter().filter(serving).any(|c| !c.avoid);
                let may = |c: &&Candidate| serving(c) && c.has_room() && !(others && c.avoid);
                match placer.choose(ask, candidates) {
                    Some(worker) => {
                        let chosen = candidates.iter().find(|c| c.worker == worker);
                        prop_assert!(chosen.as_ref().is_some_and(may), "{kind} chose {chosen:?}");
                    }
                    None => prop_assert!(!candidates.iter().any(|c| may(&c)), "{kind} chose nobody"),
                }
            }
        }
    }

    #[test]
    fn choices_are_deterministic_and_independent_of_the_workers_order(
        rounds in prop::collection::vec((ask(), candidates()), 1..12), seed in any::<u64>()
    ) {
        for kind in PlacementKind::ALL {
            let (mut one, mut other) = (placer(kind, seed), placer(kind, seed));
            for (ask, candidates) in &rounds {
                let reversed: Vec<Candidate> = candidates.iter().rev().copied().collect();
                prop_assert_eq!(one.choose(ask, candidates), other.choose(ask, &reversed), "{}", kind);
            }
        }
    }

    #[test]
    fn a_worker_that_failed_the_request_is_chosen_only_if_it_is_the_last_one(
        (ask, mut candidates) in (ask(), candidates()), seed in any::<u64>(), dead in any::<prop::sample::Index>()
    ) {
        prop_assume!(!candidates.is_empty());
        let dead = dead.index(candidates.len());
        candidates.iter_mut().enumerate().for_each(|(place, c)| c.avoid = place == dead);
        let serving = candidates.iter().filter(|c| c.standing == Standing::Serving).count();
        for kind in PlacementKind::ALL {
            let chosen = placer(kind, seed).choose(&ask, &candidates);
            prop_assert!(chosen != Some(candidates[dead].worker) || serving == 1, "{kind}");
        }
    }

    #[test]
    fn no_worker_starves_while_others_are_busy_and_none_has_a_prefix(
        workers in 1usize..9, slots in 4u32..40, seed in any::<u64>(), prompt in 1u32..4000
    ) {
        let ask = PlacementRequest { prompt_tokens: prompt, output_tokens: 64 };
        for kind in PlacementKind::ALL {
            let mut cluster = Cluster::new(kind, seed, workers, slots);
            // About half of the capacity is in use at any time; the oldest request ends first.
            let most = (workers as u32 * slots).div_ceil(2).max(1) as usize;
            for _ in 0..400 {
                prop_assert!(cluster.place(&ask).is_some());
                while cluster.running.len() > most {
                    cluster.end_oldest();
                }
            }
            prop_assert!(cluster.placed.iter().all(|count| *count > 0), "{kind}: {:?}", cluster.placed);
        }
    }

    #[test]
    fn a_burst_is_spread_evenly_by_two_uncoordinated_routers(
        workers in 2usize..9, seeds in any::<[u64; 2]>(), prompt in 100u32..4000
    ) {
        let ask = PlacementRequest { prompt_tokens: prompt, output_tokens: 64 };
        // Forty requests per worker and router arrive before any worker reports.
        for kind in [PlacementKind::RoundRobin, PlacementKind::LeastLoaded, PlacementKind::Cost] {
            let mut total = vec![0u32; workers];
            for seed in seeds {
                let mut cluster = Cluster::new(kind, seed, workers, 1000);
                for _ in 0..40 * workers {
                    prop_assert!(cluster.place(&ask).is_some());
                }
                total.iter_mut().zip(&cluster.placed).for_each(|(sum, count)| *sum += count);
            }
            let most = f64::from(*total.iter().max().unwrap());
            prop_assert!(most / 80.0 <= 1.05, "{kind}: {total:?}");
        }
    }
}

/// Workers of one size as one router sees them, through its own ledgers and fleet, without reports.
struct Cluster {
    placer: Placer,
    fleet: WorkerStates,
    ledgers: Vec<Ledger>,
    placed: Vec<u32>,
    running: VecDeque<(WorkerId, SubmissionId)>,
    next: u64,
}

impl Cluster {
    fn new(kind: PlacementKind, seed: u64, workers: usize, slots: u32) -> Self {
        let mut fleet = WorkerStates::default();
        let mut ledgers: Vec<Ledger> = (0..workers).map(|_| Ledger::default()).collect();
        for (worker, ledger) in (0..).map(WorkerId).zip(&mut ledgers) {
            fleet.open(worker, MemoryShape::uniform(16), 1000);
            ledger.set_grant(Credits { sequences: slots, blocks: slots * 1000 });
        }
        let placed = vec![0; workers];
        Self { placer: placer(kind, seed), fleet, ledgers, placed, running: VecDeque::new(), next: 0 }
    }

    fn place(&mut self, ask: &PlacementRequest) -> Option<WorkerId> {
        // Every prompt is unique.
        let chains = [BlockHashChain::of_names([self.next << 20], 16)];
        let need = Credits { sequences: 1, blocks: 10 };
        let candidates: Vec<Candidate> = (0..)
            .map(WorkerId)
            .zip(&self.ledgers)
            .map(|(worker, ledger)| Candidate {
                worker,
                grant: ledger.grant(),
                used: ledger.used(),
                need,
                estimate: self.fleet.estimate(worker, ask.prompt_tokens, &chains),
                ..Candidate::default()
            })
            .collect();
        let worker = self.placer.choose(ask, &candidates)?;
        let submission = SubmissionId(self.next);
        self.next += 1;
        let at = worker.0 as usize;
        self.fleet.route(worker, submission, ask.prompt_tokens, &chains, &candidates[at].estimate);
        self.ledgers[at].charge(submission, 1, need.blocks);
        self.placed[at] += 1;
        self.running.push_back((worker, submission));
        Some(worker)
    }

    fn end_oldest(&mut self) {
        if let Some((worker, submission)) = self.running.pop_front() {
            self.ledgers[worker.0 as usize].settle(submission, 0);
            self.fleet.settle(worker, submission);
        }
    }
}

#[test]
fn a_request_larger_than_every_grant_runs_alone_on_an_idle_session() {
    for kind in PlacementKind::ALL {
        let mut placer = placer(kind, 7);
        let ask = PlacementRequest { prompt_tokens: 9000, output_tokens: 1 };
        let large = Candidate {
            grant: Credits { sequences: 8, blocks: 100 },
            need: Credits { sequences: 16, blocks: 900 },
            ..Candidate::default()
        };
        assert_eq!(placer.choose(&ask, &[large]), Some(WorkerId(0)));
        let busy = Candidate { used: Credits { sequences: 1, blocks: 1 }, ..large };
        assert_eq!(placer.choose(&ask, &[busy]), None);
        assert_eq!(placer.choose(&ask, &[Candidate { grant: Credits::default(), ..large }]), None);
        assert_eq!(placer.choose(&ask, &[]), None);
    }
}

fn with_prefix(worker: u32, device_tokens: u32, host_tokens: u32, ahead: f64) -> Candidate {
    let cost = coefficients([4e-3, 3e-5, 0.0, 0.0, 1e-5, 1e-4, 3e-5]);
    Candidate {
        worker: WorkerId(worker),
        grant: Credits { sequences: 64, blocks: 10_000 },
        need: Credits { sequences: 1, blocks: 300 },
        estimate: Estimate {
            cached: Cached { device_tokens, host_tokens, host_blocks: host_tokens / 16 },
            cost,
            load: WorkerLoad::new(ahead, 1.0, 4e-3),
            unreported_prefill_s: 0.0,
        },
        ..Candidate::default()
    }
}

#[test]
fn cost_follows_a_prefix_while_waiting_is_cheaper_than_recomputing() {
    let ask = PlacementRequest { prompt_tokens: 4096, output_tokens: 100 };
    let choose = |workers: &[Candidate]| placer(PlacementKind::Cost, 0).choose(&ask, workers);
    // 4,000 tokens take 120 ms to compute, from this request and from the next.
    assert_eq!(choose(&[with_prefix(0, 4000, 0, 0.230), with_prefix(1, 0, 0, 0.0)]), Some(WorkerId(0)));
    assert_eq!(choose(&[with_prefix(0, 4000, 0, 0.250), with_prefix(1, 0, 0, 0.0)]), Some(WorkerId(1)));
    // On the host they cost a copy: 7.6 ms, twice.
    assert_eq!(choose(&[with_prefix(0, 0, 4000, 0.0), with_prefix(1, 0, 0, 0.0)]), Some(WorkerId(0)));
    assert_eq!(choose(&[with_prefix(0, 0, 4000, 0.0), with_prefix(1, 4000, 0, 0.012)]), Some(WorkerId(1)));
    assert_eq!(choose(&[with_prefix(0, 0, 4000, 0.0), with_prefix(1, 4000, 0, 0.018)]), Some(WorkerId(0)));
}

#[test]
fn prefix_takes_the_longest_match_above_half_else_the_least_loaded() {
    let ask = PlacementRequest { prompt_tokens: 4000, output_tokens: 100 };
    let choose = |workers: &[Candidate]| placer(PlacementKind::Prefix, 0).choose(&ask, workers);
    let busy = |worker, tokens| {
        let used = Credits { sequences: 32, blocks: 100 };
        Candidate { used, ..with_prefix(worker, tokens, 0, 9.0) }
    };
    assert_eq!(
        choose(&[busy(0, 2400), with_prefix(1, 2000, 0, 0.0), with_prefix(2, 0, 0, 0.0)]),
        Some(WorkerId(0))
    );
    assert_eq!(choose(&[busy(0, 1900), busy(1, 1600), with_prefix(2, 0, 0, 0.0)]), Some(WorkerId(2)));
}

#[test]
fn load_is_relative_to_the_grant() {
    for kind in [PlacementKind::LeastLoaded, PlacementKind::PowerOfTwo] {
        let of = |worker, sequences, used| Candidate {
            worker: WorkerId(worker),
            grant: Credits { sequences, blocks: 1000 },
            used: Credits { sequences: used, blocks: 0 },
            need: Credits { sequences: 1, blocks: 1 },
            ..Candidate::default()
        };
        let ask = PlacementRequest { prompt_tokens: 10, output_tokens: 10 };
        assert_eq!(placer(kind, 3).choose(&ask, &[of(0, 64, 4), of(1, 4, 2)]), Some(WorkerId(0)), "{kind}");
    }
}
