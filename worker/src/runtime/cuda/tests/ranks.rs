//! Tensor-parallel groups on the harness: each rank is a thread with a device of its own, and what NCCL does between GPUs
//! is done through the host's shared memory.

use std::thread;

use super::super::catalog::catalog;
use super::watched::Watched;
use super::*;
use crate::runtime::collective::{Collective, GroupFailed, host_group};

/// What a rank tells the others by.
pub(super) struct End(Box<dyn Collective>);

fn failed(failed: GroupFailed) -> DeviceError {
    DeviceError::Failed { what: "telling the others".to_owned(), reason: failed.to_string() }
}

impl Peers for End {
    unsafe fn all_reduce(&self, half: Half, at: u64, numbers: usize) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller; the harness does nothing meanwhile.
        let numbers = unsafe { std::slice::from_raw_parts_mut(at as *mut u16, numbers) };
        let mut wide: Vec<f32> = numbers.iter().map(|bits| half.widen(*bits)).collect();
        self.0.all_reduce(&mut wide).map_err(failed)?;
        numbers.iter_mut().zip(wide).for_each(|(to, sum)| *to = half.narrow(sum));
        Ok(())
    }

    unsafe fn all_gather(&self, at: u64, bytes: usize) -> Result<(), DeviceError> {
        let count = bytes / 4;
        // SAFETY: as above.
        let all = unsafe { std::slice::from_raw_parts_mut(at as *mut f32, count * self.0.world()) };
        let own = all[self.0.rank() * count..][..count].to_vec();
        self.0.gather(&own, 1, Some(all)).map_err(failed)
    }
}

/// A rank's end of its group.
fn end(rank: &OnHarness<Watched>) -> &dyn Collective {
    rank.harness.end.as_ref().unwrap().0.as_ref()
}

/// Runs `work` with each rank of a group, on a thread of its own, and returns what came of it by rank.
fn on_ranks<T: Send>(
    model: &ModelDir,
    world: usize,
    block_tokens: u32,
    modes: Modes,
    work: impl Fn(OnHarness<Watched>) -> T + Sync,
) -> Vec<T> {
    let shards = divide(model, &find(model).unwrap(), world).unwrap();
    let work = &work;
    thread::scope(|scope| {
        let ranks = Division::of(shards, true).zip(host_group(world));
        let threads: Vec<_> = ranks
            .map(|(division, end)| {
                scope.spawn(move || {
                    let device = Watched::new(Harness::new()).among(End(end));
                    work(OnHarness::over(device, division, model, block_tokens, modes))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What steps yield, the tokens of `known` (by step and sample) being given where they are not known from the start.
type Yield = Vec<(Vec<Sampled>, Vec<f32>)>;

/// Prefills in chunks beside decodes, a copy of a block, then decodes alone, of which the last gets its tokens on the device.
fn steps<G: Gpu<Memory = HostMemory>>(
    gpu: &mut OnHarness<G>,
    sampling: &SamplingParams,
    known: Option<&Yield>,
) -> Yield {
    let vocabulary = gpu.compute.capabilities.vocab_size;
    let mut roster = Roster::new(&[70, 1, 33], vocabulary, gpu.compute.capabilities.block_tokens, 5);
    for (slot, tokens) in roster.tokens.iter().enumerate() {
        gpu.attach(slot as u32, sampling, tokens);
    }
    let mut all: Yield = Vec::new();
    for (step, chunks) in [[40, 1, 7], [30, 1, 26], [1, 1, 1], [1, 1, 1]].iter().enumerate() {
        let mut batch = roster.batch(chunks);
        if step == 2 {
            let (from, to) = (roster.tables[0][0], roster.tables[0].len() as u32 * 4 - 1);
            batch.copies.push(BlockCopy { from, to });
        }
        if step == 3 {
            batch.tokens.fill(0);
            batch.feedback = (0..3).map(|row| Feedback { row, sample: row }).collect();
        }
        let yielded = gpu.step(&batch);
        let tokens = known.map_or(&yielded, |known| &known[step]);
        for (sample, sampled) in batch.samples.iter().zip(&tokens.0) {
            roster.tokens[sample.slot as usize].push(sampled.token);
        }
        all.push(yielded);
    }
    all
}

#[test]
fn a_group_yields_the_tokens_and_the_logits_of_one_device_and_every_rank_the_same_bits() {
    if !available() {
        return;
    }
    // Four ranks hold each of the two key heads twice.
    let cases = [
        (Arch::Llama31, Dtype::Bf16, 6, false, 2, KvStore::Half, false),
        (Arch::Qwen2, Dtype::F16, 8, true, 4, KvStore::Half, true),
        (Arch::Qwen3, Dtype::Bf16, 6, true, 2, KvStore::Fp8, false),
        (Arch::Mistral, Dtype::Bf16, 6, false, 1, KvStore::Half, false),
    ];
    for (i, (arch, dtype, heads, tied, world, store, deterministic)) in cases.into_iter().enumerate() {
        let model = model_of(arch, dtype, 40 + i as u32, heads, tied);
        let block_tokens = [16, 4, 16, 32][i];
        let modes = Modes { store, deterministic, buckets: true };
        let mut alone = OnHarness::storing(store, &model, block_tokens, deterministic, true);
        let reference = steps(&mut alone, &SamplingParams::greedy(), None);
        let bits = |yielded: &Yield| {
            let of = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            yielded.iter().map(|(tokens, logits)| (tokens.clone(), of(logits))).collect::<Vec<_>>()
        };
        let ranks = on_ranks(&model, world, block_tokens, modes, |mut rank| {
            steps(&mut rank, &SamplingParams::greedy(), Some(&reference))
        });
        assert_eq!(ranks.len(), world);
        for rank in &ranks {
            assert!(bits(rank) == bits(&ranks[0]), "{arch}: ranks know different things");
        }
        if world == 1 {
            assert!(bits(&ranks[0]) == bits(&reference), "{arch}: a group of one changes bits");
        }
        // The last step goes on from tokens that only the device knows, so it is another one where logits were close.
        let fed = reference[2].0.iter().zip(&ranks[0][2].0).all(|(one, group)| one.token == group.token);
        let compared = if fed { 4 } else { 3 };
        for (step, (one, group)) in reference.iter().zip(&ranks[0]).take(compared).enumerate() {
            let apart = far_apart(&one.1, &group.1);
            let part = if store == KvStore::Half { 2e-2 } else { 1e-1 };
            let bound = part * largest(&one.1);
            assert!(apart <= bound, "{arch}, step {step}: logits are {apart} apart, more than {bound}");
            let vocabulary = one.1.len() / one.0.len();
            for (sample, sampled) in group.0.iter().enumerate() {
                let row = &one.1[sample * vocabulary..(sample + 1) * vocabulary];
                let best = row[one.0[sample].token as usize];
                assert!(row[sampled.token as usize] >= best - 2.0 * bound, "{arch}, step {step}");
            }
        }
    }
}

#[test]
fn ranks_draw_the_same_tokens_and_feed_them_back_without_a_host() {
    if !available() {
        return;
    }
    let model = model(Arch::Llama31, Dtype::Bf16, 51);
    let spec = SamplingSpec {
        temperature: 1.1,
        top_p: 0.95,
        frequency_penalty: 0.7,
        logprobs: Some(2),
        seed: 99,
        ..SamplingSpec::default()
    };
    let sampling = spec.validate().unwrap();
    let modes = Modes { store: KvStore::Half, deterministic: true, buckets: true };
    let drawn = on_ranks(&model, 2, 16, modes, |mut rank| steps(&mut rank, &sampling, None));
    assert!(drawn[0] == drawn[1], "ranks drew different tokens");
    // The third step's tokens reached the fourth on the device; now from the host.
    let told = on_ranks(&model, 2, 16, modes, |mut rank| {
        let mut roster = Roster::new(&[70, 1, 33], model.config().vocab_size as u32, 16, 5);
        for (slot, tokens) in roster.tokens.iter().enumerate() {
            rank.attach(slot as u32, &sampling, tokens);
        }
        let mut last = Vec::new();
        for (step, chunks) in [[40, 1, 7], [30, 1, 26], [1, 1, 1], [1, 1, 1]].iter().enumerate() {
            let batch = roster.batch(chunks);
            last = rank.step(&batch).0;
            for (sample, sampled) in batch.samples.iter().zip(&drawn[0][step].0) {
                roster.tokens[sample.slot as usize].push(sampled.token);
            }
        }
        last
    });
    assert!(told.iter().all(|told| *told == drawn[0][3].0), "a token fed back is another than one sent");
}

#[test]
fn the_catalog_of_a_rank_has_the_products_of_its_shard() {
    if !available() {
        return;
    }
    let model = model_of(Arch::Qwen2, Dtype::Bf16, 57, 8, true);
    let (config, found) = (model.config(), find(&model).unwrap());
    for world in [1, 2, 4] {
        let listed: Vec<_> = Division::of(divide(&model, &found, world).unwrap(), true)
            .map(|division| {
                let weights = found.upload(&Harness::new(), division.shard(), &|_, _| {}).unwrap();
                catalog(&weights, &division.shapes(config), &division, config.vocab_size)
            })
            .collect();
        let modes = Modes { store: KvStore::Half, deterministic: false, buckets: true };
        let made = on_ranks(&model, world, 16, modes, |mut rank| {
            let mut roster = Roster::new(&[9, 4], config.vocab_size as u32, 16, 1);
            (0..2).for_each(|slot| rank.attach(slot, &SamplingParams::greedy(), &[]));
            rank.step(&roster.batch(&[9, 4]));
            (end(&rank).rank(), rank.harness.take_products())
        });
        for (rank, made) in made {
            assert_eq!(made.len(), 4 * config.layers + 1);
            for (i, p) in made.iter().enumerate() {
                let product = &listed[rank][if p.wide { 4 } else { i % 4 }];
                let shape = (product.n, product.k, product.stride, product.wide);
                assert_eq!(shape, (p.n, p.k, p.stride, p.wide), "product {i} of rank {rank} of {world}");
                assert_eq!(product.at(0, p.m, p.x, p.y).bias.is_some(), p.bias.is_some());
            }
        }
    }
}

#[test]
fn a_rank_that_fails_within_a_step_ends_the_step_of_every_other() {
    if !available() {
        return;
    }
    let model = model(Arch::Qwen3, Dtype::Bf16, 61);
    let modes = Modes { store: KvStore::Half, deterministic: false, buckets: false };
    for culprit in 0..2 {
        let outcomes = on_ranks(&model, 2, 16, modes, |mut rank| {
            let mut roster = Roster::new(&[9], model.config().vocab_size as u32, 16, 1);
            rank.attach(0, &SamplingParams::greedy(), &roster.tokens[0].clone());
            rank.step(&roster.batch(&[5]));
            if end(&rank).rank() == culprit {
                end(&rank).fail("it fell off the bus");
            }
            rank.try_step(&roster.batch(&[4])).map(drop)
        });
        for outcome in outcomes {
            let error = outcome.unwrap_err().to_string();
            assert!(
                error.contains(&format!("rank {culprit}")) && error.contains("fell off the bus"),
                "{error}"
            );
        }
    }
}

#[test]
fn what_can_not_be_divided_among_gpus_is_refused_with_what_can() {
    let model = model(Arch::Qwen3, Dtype::Bf16, 71);
    let refused = |world| super::super::supports(&model, world).unwrap_err().to_string();
    assert!(super::super::supports(&model, 2).is_ok());
    // Four ranks share two key heads in pairs, but six heads do not divide by four.
    for clue in ["--tensor-parallel 4", "6 attention heads", "1, 2 would do"] {
        assert!(refused(4).contains(clue), "{}", refused(4));
    }
    let demo = ModelDir::open(&ModelSource::Embedded).unwrap();
    let refused = super::super::supports(&demo, 2).unwrap_err().to_string();
    assert!(refused.contains("head_dim"), "{refused}");
}

#[test]
fn gpus_given_twice_none_at_all_and_sums_that_depend_on_the_batch_are_refused() {
    use super::super::{CudaOptions, CudaRuntime};
    let model = ModelDir::open(&ModelSource::Embedded).unwrap();
    let refused = |gpus: &[usize], deterministic| {
        let options = CudaOptions {
            gpus: gpus.to_vec(),
            lone_communicator: false,
            utilization: 0.9,
            kv_bytes: None,
            host_bytes: 0,
            block_tokens: 16,
            slots: SLOTS,
            batch_tokens: 256,
            context_tokens: None,
            kv_store: KvStore::Half,
            deterministic,
            graphs: true,
            autotune: true,
            overlap: true,
        };
        CudaRuntime::load(&model, &options, &|_, _| {}).err().unwrap().to_string()
    };
    for (gpus, deterministic, clues) in [
        (&[][..], false, ["tensor_parallel is 0", "from 1 to 64"]),
        (&[3, 1, 3], false, ["gpu is GPU 3 twice", "different GPUs"]),
        (&[0, 1, 2], true, ["deterministic is on, with 3 ranks", "2 ranks at most"]),
    ] {
        for clue in clues {
            assert!(refused(gpus, deterministic).contains(clue), "{}", refused(gpus, deterministic));
        }
    }
}
