//! Tests of the division of memory: sums against a plain calculation, over random models and machines.

use inflight_contract::{LayerGroup, MemoryShape};

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Numbers of a linear congruential generator.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

fn model(name: &str, weight_bytes: u64, workers: Vec<Vec<u32>>) -> ModelDemand {
    let needs = MemoryNeeds {
        weight_bytes,
        buffer_bytes: 0,
        block_bytes: MIB,
        shape: MemoryShape::uniform(16),
        context_tokens: 4096,
    };
    ModelDemand {
        name: name.to_owned(),
        needs: Some(needs),
        workers,
        kv: PoolDemand { bytes: GIB, given: false },
        host: PoolDemand { bytes: 256 * MIB, given: false },
        share: None,
        utilization: 0.9,
        is_own_utilization: false,
        is_quantizable: true,
    }
}

fn on_host(number: usize) -> Vec<Vec<u32>> {
    vec![Vec::new(); number]
}

fn machine(limit: u64, gpus: &[(u32, u64)]) -> MachineMemory {
    MachineMemory { limit, available: limit, gpus: gpus.iter().copied().collect() }
}

/// Value of a flag of a worker.
fn value(share: &WorkerShare, flag: &str) -> Option<f64> {
    let mut values =
        share.flags.iter().filter_map(|given| given.to_str()?.strip_prefix(flag)?.strip_prefix('='));
    values.next_back().map(|value| value.parse().unwrap())
}

#[test]
fn a_pool_of_a_model_with_windows_holds_the_tokens_of_whole_sequences() {
    let mut windowed = model("a", GIB, on_host(1));
    let groups = [LayerGroup { blocks: 1, window: None }, LayerGroup { blocks: 6, window: Some(1024) }];
    let shape = MemoryShape::new(16, &groups).unwrap();
    windowed.needs = windowed.needs.map(|needs| MemoryNeeds { shape, ..needs });
    let tokens = |kv: u64| {
        let model = ModelDemand { kv: PoolDemand { bytes: kv, given: true }, ..windowed.clone() };
        divide(&[model], &machine(64 * GIB, &[])).unwrap()[0][0].kv_tokens
    };
    // A sequence of 4,096 tokens takes 256 blocks and 6 * 65.
    assert_eq!([tokens((256 + 6 * 65) * MIB), tokens(2 * (256 + 6 * 65) * MIB)], [4096, 8192]);
    assert_eq!(tokens(7 * MIB), 16);
    // The smallest pool holds a span: 7 blocks.
    windowed.needs = windowed.needs.map(|needs| MemoryNeeds { block_bytes: 4 * MIB, ..needs });
    let tight = divide(&[windowed], &machine(GIB, &[])).unwrap_err().to_string();
    assert!(tight.contains("KV cache of at least 28.0 MiB"), "{tight}");
}

#[test]
fn what_fits_keeps_its_default_pools_and_what_does_not_is_refused_with_the_sum() {
    let models = [model("a", 2 * GIB, on_host(2)), model("b", GIB, on_host(1))];
    // 5 GiB of weights, 3.75 GiB of pools.
    let roomy = divide(&models, &machine(16 * GIB, &[])).unwrap();
    for share in roomy.iter().flatten() {
        assert_eq!((share.kv_bytes, share.kv_tokens, share.flags.len()), (Some(GIB), 16 * 1024, 0));
    }
    // 1.875 GiB are left for pools, half of what is wanted.
    let tight = divide(&models, &machine(5 * GIB + 15 * GIB / 4, &[])).unwrap();
    for share in tight.iter().flatten() {
        assert!(share.kv_bytes.unwrap().abs_diff(GIB / 2) < 32 * MIB, "{share:?}");
        assert!(value(share, "--host-cache-bytes").is_some(), "{share:?}");
    }
    let refused = divide(&models, &machine(4 * GIB, &[])).unwrap_err().to_string();
    for clue in [
        "the models need 5.09 GiB together, and this machine's processes may use 4.00 GiB",
        "a: 4.06 GiB for 2 workers, each with weights of 2.00 GiB, KV cache of at least 16.0 MiB, host cache of at least 16.0 MiB",
        "b: 1.03 GiB for 1 worker with weights of 1.00 GiB",
        "fewer workers (--workers 1)",
        "--quantize int8",
    ] {
        assert!(refused.contains(clue), "no {clue:?} in {refused}");
    }
    let available = MachineMemory { available: 4 * GIB, ..machine(16 * GIB, &[]) };
    let refused = divide(&models, &available).unwrap_err().to_string();
    assert!(refused.contains("take 5.00 GiB together, and 4.00 GiB are available"), "{refused}");
}

#[test]
fn shares_divide_what_is_left_by_model() {
    let mut models = [model("a", GIB, on_host(1)), model("b", GIB, on_host(2))];
    models[0].share = Some(3.0);
    let shares = divide(&models, &machine(67 * GIB, &[])).unwrap();
    // 32 GiB: three quarters for the only worker of a, an eighth for each of b, a fifth of them for host caches.
    let kv = |model: usize, worker: usize| shares[model][worker].kv_bytes.unwrap() as f64 / GIB as f64;
    assert!((kv(0, 0) - 24.0 * 0.8).abs() < 0.1, "{shares:?}");
    assert!((kv(1, 0) - 4.0 * 0.8).abs() < 0.1 && shares[1][0] == shares[1][1], "{shares:?}");
    models[0].kv = PoolDemand { bytes: 5 * GIB, given: true };
    assert_eq!(divide(&models, &machine(67 * GIB, &[])).unwrap()[0][0].kv_bytes, Some(5 * GIB));
}

#[test]
fn pools_of_the_host_never_exceed_it_and_given_sizes_stay() {
    for seed in 0..3000 {
        let mut numbers = Numbers(seed);
        let models: Vec<ModelDemand> = (0..1 + numbers.below(4))
            .map(|at| {
                let weights = numbers.below(8 * 1024) * MIB;
                let mut model = model(&format!("m{at}"), weights, on_host(1 + numbers.below(3) as usize));
                let mut pool = |most: u64| PoolDemand {
                    bytes: (1 + numbers.below(most)) * MIB,
                    given: numbers.below(3) == 0,
                };
                model.kv = pool(4096);
                model.host = pool(512);
                model.share = (numbers.below(4) == 0).then(|| 0.5 + numbers.below(8) as f64);
                model
            })
            .collect();
        let limit = (1 + numbers.below(64 * 1024)) * MIB;
        let given_or = |pool: &PoolDemand, least: u64| if pool.given { pool.bytes } else { least };
        let number = |model: &ModelDemand| model.workers.len() as u64;
        let least: u64 = models
            .iter()
            .map(|model| {
                let pools = given_or(&model.kv, 16 * MIB) + given_or(&model.host, 16 * MIB);
                number(model) * (model.needs.unwrap().weight_bytes + pools)
            })
            .sum();
        let shares = match divide(&models, &machine(limit, &[])) {
            Ok(shares) => shares,
            Err(refusal) => {
                assert!(least > limit, "seed {seed}: {refusal}");
                assert_eq!(refusal.needed, u128::from(least), "seed {seed}");
                let rows: u128 = refusal.rows.iter().map(|(.., sum)| sum).sum();
                assert_eq!(rows, refusal.needed, "seed {seed}: {refusal}");
                continue;
            }
        };
        assert!(least <= limit, "seed {seed}");
        let mut sum = 0u64;
        for (model, shares) in models.iter().zip(&shares) {
            for share in shares {
                let host = value(share, "--host-cache-bytes").map_or(model.host.bytes, |bytes| bytes as u64);
                let kv = value(share, "--kv-cache-bytes").map_or(model.kv.bytes, |bytes| bytes as u64);
                assert_eq!(share.kv_bytes, Some(kv), "seed {seed}");
                for (pool, bytes) in [(&model.kv, kv), (&model.host, host)] {
                    assert!(!pool.given || pool.bytes == bytes, "seed {seed}: {pool:?} {bytes}");
                    assert!(pool.given || bytes >= 16 * MIB, "seed {seed}: {pool:?} {bytes}");
                    let capped = pool.bytes.max(16 * MIB) >= bytes;
                    assert!(capped || models.iter().any(|model| model.share.is_some()), "seed {seed}");
                }
                sum += model.needs.unwrap().weight_bytes + kv + host;
            }
        }
        assert!(sum <= limit, "seed {seed}: {sum} of {limit}");
    }
}

#[test]
fn workers_of_a_gpu_never_exceed_its_part_and_use_it_up() {
    for seed in 0..3000 {
        let mut numbers = Numbers(seed);
        let sizes: Vec<(u32, u64)> =
            (0..1 + numbers.below(3) as u32).map(|gpu| (gpu, (8 + numbers.below(72)) * GIB)).collect();
        let models: Vec<ModelDemand> = (0..1 + numbers.below(4))
            .map(|at| {
                let gpus = sizes.len() as u64;
                let workers = (0..1 + numbers.below(3)).map(|_| vec![numbers.below(gpus) as u32]);
                let workers: Vec<Vec<u32>> = workers.collect();
                let mut model = model(&format!("m{at}"), numbers.below(24 * 1024) * MIB, workers);
                model.host = PoolDemand { bytes: 0, given: true };
                if let Some(needs) = &mut model.needs {
                    needs.buffer_bytes = numbers.below(2048) * MIB;
                }
                model.share = (numbers.below(4) == 0).then(|| 0.5 + numbers.below(8) as f64);
                model
            })
            .collect();
        let needed = |gpu: u32| -> u64 {
            let on = |model: &ModelDemand| {
                let workers = model.workers.iter().filter(|gpus| gpus.contains(&gpu)).count() as u64;
                let needs = model.needs.unwrap();
                workers * (needs.weight_bytes + needs.buffer_bytes + 2 * MIB)
            };
            models.iter().map(on).sum()
        };
        let allowed = |total: u64| (total as f64 * 0.9) as u64;
        let fits = sizes.iter().all(|(gpu, total)| needed(*gpu) <= allowed(*total));
        let divided = divide(&models, &machine(1 << 40, &sizes));
        assert_eq!(divided.is_ok(), fits, "seed {seed}");
        let Ok(shares) = divided else { continue };
        for (gpu, total) in &sizes {
            let mut sum = 0.0;
            for (model, shares) in models.iter().zip(&shares) {
                for (gpus, share) in model.workers.iter().zip(shares) {
                    let fraction = value(share, "--gpu-memory-utilization").unwrap();
                    let needs = model.needs.unwrap();
                    let bytes = needs.weight_bytes + needs.buffer_bytes;
                    if gpus.contains(gpu) {
                        assert!(fraction * *total as f64 >= bytes as f64 + 1e6, "seed {seed}");
                        sum += fraction;
                    }
                }
            }
            // What is left goes to KV caches; fractions are rounded up in the sixth digit.
            assert!(sum == 0.0 || (sum - 0.9).abs() < 2e-5, "seed {seed}: {sum} of GPU {gpu}");
        }
    }
}

#[test]
fn a_part_of_a_gpu_that_was_given_for_a_model_is_its_own() {
    let mut models = [model("a", 8 * GIB, vec![vec![0]]), model("b", 2 * GIB, vec![vec![0]])];
    models[0].utilization = 0.5;
    models[0].is_own_utilization = true;
    let gpu = |total: u64| machine(1 << 40, &[(0, total)]);
    let shares = divide(&models, &gpu(40 * GIB)).unwrap();
    let part = |model: usize| value(&shares[model][0], "--gpu-memory-utilization").unwrap();
    assert!((part(0) - 0.5).abs() < 1e-5 && (part(1) - 0.4).abs() < 1e-5, "{shares:?}");
    assert!(shares[1][0].kv_bytes.unwrap().abs_diff(14 * GIB) < MIB, "{shares:?}");
    let refused = divide(&models, &gpu(12 * GIB)).unwrap_err().to_string();
    for clue in [
        "need 8.00 GiB of GPU 0, and may use 6.00 GiB of its 12.00 GiB",
        "a: ",
        "--gpu-memory-utilization 0.5",
    ] {
        assert!(refused.contains(clue), "no {clue:?} in {refused}");
    }
    // Both ranks of a tensor-parallel group take the part that the fuller GPU has.
    let models = [model("a", GIB, vec![vec![0, 1]]), model("b", 3 * GIB, vec![vec![1]])];
    let two = machine(1 << 40, &[(0, 10 * GIB), (1, 10 * GIB)]);
    let shares = divide(&models, &two).unwrap();
    // Of GPU 1: 9 GiB less 4 GiB of weights, by two models.
    assert!((value(&shares[0][0], "--gpu-memory-utilization").unwrap() - 0.35).abs() < 1e-3, "{shares:?}");
    assert!(shares[0][0].kv_bytes.unwrap().abs_diff(5 * GIB) < 8 * MIB, "two ranks: {shares:?}");
}
