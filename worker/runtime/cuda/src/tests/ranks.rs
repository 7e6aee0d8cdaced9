//! Tensor-parallel groups on the harness: each rank is a thread with its own device, and collectives run
//! through shared host memory instead of NCCL.

use std::thread;

use inflight_runtime::collective::{Collective, GroupFailed, host_group};

use super::super::model_gemms::model_gemms;
use super::recording_device::RecordingDevice;
use super::*;

/// Collectives of a rank, through the host.
pub(super) struct HarnessCollective(Box<dyn Collective>);

fn failed(failed: GroupFailed) -> DeviceError {
    DeviceError::Failed { what: "running a collective".to_owned(), reason: failed.to_string() }
}

impl DeviceCollective for HarnessCollective {
    unsafe fn all_reduce(&self, half: HalfDtype, address: u64, elements: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller guarantees `elements` elements at `address`; the harness runs nothing
        // concurrently.
        let elements = unsafe { std::slice::from_raw_parts_mut(address as *mut u16, elements) };
        let mut sums: Vec<f32> = elements.iter().map(|bits| half.widen(*bits)).collect();
        self.0.all_reduce(&mut sums).map_err(failed)?;
        elements.iter_mut().zip(sums).for_each(|(to, sum)| *to = half.narrow(sum));
        Ok(())
    }

    unsafe fn all_gather(&self, address: u64, bytes: usize) -> Result<(), DeviceError> {
        let count = bytes / 4;
        // SAFETY: the caller guarantees `bytes` bytes per rank at `address`; the harness runs nothing
        // concurrently.
        let all = unsafe { std::slice::from_raw_parts_mut(address as *mut f32, count * self.0.world()) };
        let own = all[self.0.rank() * count..][..count].to_vec();
        self.0.gather(&own, 1, Some(all)).map_err(failed)
    }
}

/// Returns a rank's host collective.
fn host_collective(rank: &HarnessRunner<RecordingDevice>) -> &dyn Collective {
    rank.harness.collective.as_ref().unwrap().0.as_ref()
}

/// Runs `work` with each rank of a group on its own thread, and returns the results by rank.
pub(super) fn on_ranks<T: Send>(
    model: &ModelDir,
    world: usize,
    block_tokens: u32,
    store: KvStore,
    modes: RunnerModes,
    work: impl Fn(HarnessRunner<RecordingDevice>) -> T + Sync,
) -> Vec<T> {
    let shards = shard_model(model, &find(model).unwrap(), world, true).unwrap();
    let work = &work;
    thread::scope(|scope| {
        let ranks = ShardPlan::for_ranks(shards, true).zip(host_group(world));
        let threads: Vec<_> = ranks
            .map(|(shard_plan, collective)| {
                scope.spawn(move || {
                    let collective = HarnessCollective(collective);
                    let device = RecordingDevice::new(Harness::new()).with_collective(collective);
                    work(HarnessRunner::load(device, shard_plan, model, block_tokens, store, modes))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Sampled tokens and logits of each step.
type StepOutputs = Vec<(Vec<Sampled>, Vec<f32>)>;

/// Runs chunked prefills beside decodes, a block copy, then decodes alone, the last with tokens fed back on
/// the device. Sequences continue with the tokens of `known` where given, else with their own.
fn steps<G: Gpu<Memory = HostMemory>>(
    gpu: &mut HarnessRunner<G>,
    sampling: &SamplingParams,
    known: Option<&StepOutputs>,
) -> StepOutputs {
    let vocabulary = gpu.runner.capabilities.vocab_size;
    let mut sequences = TestSequences::of_shape(&[70, 1, 33], vocabulary, gpu.runner.capabilities.shape, 5);
    for (slot, tokens) in sequences.tokens.iter().enumerate() {
        gpu.attach(slot as u32, sampling, tokens);
    }
    let mut all: StepOutputs = Vec::new();
    for (step, chunks) in [[40, 1, 7], [30, 1, 26], [1, 1, 1], [1, 1, 1]].iter().enumerate() {
        let mut batch = sequences.batch(chunks);
        if step == 2 {
            let (from, to) = (sequences.tables[0][0], sequences.tables[0].len() as u32 * 4 - 1);
            batch.copies.push(BlockCopy { from, to });
        }
        if step == 3 {
            batch.tokens.fill(0);
            batch.feedback = (0..3).map(|row| Feedback { row, sample: row }).collect();
        }
        let yielded = gpu.step(&batch);
        let tokens = known.map_or(&yielded, |known| &known[step]);
        for (sample, sampled) in batch.samples.iter().zip(&tokens.0) {
            sequences.tokens[sample.slot as usize].push(sampled.token);
        }
        all.push(yielded);
    }
    all
}

#[test]
fn a_group_yields_the_tokens_and_logits_of_one_device_on_every_rank() {
    if !available() {
        return;
    }
    // With four ranks, each of the two key heads is held twice.
    let cases = [
        (Arch::Llama31, Dtype::Bf16, 6, false, 2, KvStore::Half, false),
        (Arch::Qwen2, Dtype::F16, 8, true, 4, KvStore::Half, true),
        (Arch::Qwen3, Dtype::Bf16, 6, true, 2, KvStore::Fp8, false),
        (Arch::Mistral, Dtype::Bf16, 6, false, 1, KvStore::Half, false),
        (Arch::Gemma3, Dtype::Bf16, 4, true, 2, KvStore::Half, true),
        // Key heads of attention are held twice.
        (Arch::Qwen35, Dtype::F16, 4, false, 4, KvStore::Half, true),
    ];
    for (i, (arch, dtype, heads, tied, world, store, deterministic)) in cases.into_iter().enumerate() {
        let model = model_of(arch, dtype, 40 + i as u32, heads, tied);
        let block_tokens = [16, 4, 16, 32, 16, 16][i];
        let modes = RunnerModes { deterministic, graphs: true };
        let mut alone = HarnessRunner::with_store(store, &model, block_tokens, deterministic, true);
        let reference = steps(&mut alone, &SamplingParams::greedy(), None);
        let bits = |yielded: &StepOutputs| {
            let of = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            yielded.iter().map(|(tokens, logits)| (tokens.clone(), of(logits))).collect::<Vec<_>>()
        };
        let ranks = on_ranks(&model, world, block_tokens, store, modes, |mut rank| {
            steps(&mut rank, &SamplingParams::greedy(), Some(&reference))
        });
        assert_eq!(ranks.len(), world);
        for rank in &ranks {
            assert!(bits(rank) == bits(&ranks[0]), "{arch}: ranks have different bits");
        }
        if world == 1 {
            assert!(bits(&ranks[0]) == bits(&reference), "{arch}: a group of one changes bits");
        }
        // The last step uses tokens that only the device knows; it is comparable only if both runs sampled
        // the same ones.
        let same_tokens =
            reference[2].0.iter().zip(&ranks[0][2].0).all(|(one, group)| one.token == group.token);
        let compared = if same_tokens { 4 } else { 3 };
        for (step, (one, group)) in reference.iter().zip(&ranks[0]).take(compared).enumerate() {
            let difference = max_abs_difference(&one.1, &group.1);
            let tolerance = if store == KvStore::Half { 2e-2 } else { 1e-1 };
            let bound = tolerance * max_abs(&one.1);
            assert!(
                difference <= bound,
                "{arch}, step {step}: logits differ by {difference}, more than {bound}"
            );
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
fn ranks_sample_the_same_tokens_and_feed_them_back_on_the_device() {
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
    let modes = RunnerModes { deterministic: true, graphs: true };
    let sampled = on_ranks(&model, 2, 16, KvStore::Half, modes, |mut rank| steps(&mut rank, &sampling, None));
    assert!(sampled[0] == sampled[1], "ranks sampled different tokens");
    // The third step's tokens reached the fourth on the device; now they come from the host.
    let from_host = on_ranks(&model, 2, 16, KvStore::Half, modes, |mut rank| {
        let mut sequences = TestSequences::new(&[70, 1, 33], model.config().vocab_size as u32, 16, 5);
        for (slot, tokens) in sequences.tokens.iter().enumerate() {
            rank.attach(slot as u32, &sampling, tokens);
        }
        let mut last = Vec::new();
        for (step, chunks) in [[40, 1, 7], [30, 1, 26], [1, 1, 1], [1, 1, 1]].iter().enumerate() {
            let batch = sequences.batch(chunks);
            last = rank.step(&batch).0;
            for (sample, sampled) in batch.samples.iter().zip(&sampled[0][step].0) {
                sequences.tokens[sample.slot as usize].push(sampled.token);
            }
        }
        last
    });
    let last = &sampled[0][3].0;
    assert!(from_host.iter().all(|rank| rank == last), "a token fed back differs from one sent by the host");
}

#[test]
fn the_model_gemms_of_a_rank_are_those_of_its_shard() {
    if !available() {
        return;
    }
    let model = model_of(Arch::Qwen2, Dtype::Bf16, 57, 8, true);
    let (config, tensors) = (model.config(), find(&model).unwrap());
    for world in [1, 2, 4] {
        let listed: Vec<_> = ShardPlan::for_ranks(shard_model(&model, &tensors, world, false).unwrap(), true)
            .map(|shard_plan| {
                let weights = tensors.upload(&Harness::new(), shard_plan.shard(), &|_, _| {}).unwrap();
                model_gemms(&weights, &shard_plan.shapes(config), &shard_plan, config.vocab_size)
            })
            .collect();
        let modes = RunnerModes { deterministic: false, graphs: true };
        let run = on_ranks(&model, world, 16, KvStore::Half, modes, |mut rank| {
            let mut sequences = TestSequences::new(&[9, 4], config.vocab_size as u32, 16, 1);
            (0..2).for_each(|slot| rank.attach(slot, &SamplingParams::greedy(), &[]));
            rank.step(&sequences.batch(&[9, 4]));
            (host_collective(&rank).rank(), rank.harness.take_gemms())
        });
        for (rank, run) in run {
            assert_eq!(run.len(), 4 * config.layers.len() + 1);
            for (i, p) in run.iter().enumerate() {
                let gemm = &listed[rank][if p.f32_out { 4 } else { i % 4 }];
                let shape = (gemm.n, gemm.k, gemm.stride, gemm.f32_out);
                assert_eq!(shape, (p.n, p.k, p.stride, p.f32_out), "GEMM {i} of rank {rank} of {world}");
                assert_eq!(gemm.of_layer(0, p.m, p.x, p.y).bias.is_some(), p.bias.is_some());
            }
        }
    }
}

#[test]
fn a_rank_that_fails_within_a_step_fails_the_step_on_every_rank() {
    if !available() {
        return;
    }
    let model = model(Arch::Qwen3, Dtype::Bf16, 61);
    let modes = RunnerModes { deterministic: false, graphs: false };
    for culprit in 0..2 {
        let outcomes = on_ranks(&model, 2, 16, KvStore::Half, modes, |mut rank| {
            let mut sequences = TestSequences::new(&[9], model.config().vocab_size as u32, 16, 1);
            rank.attach(0, &SamplingParams::greedy(), &sequences.tokens[0].clone());
            rank.step(&sequences.batch(&[5]));
            if host_collective(&rank).rank() == culprit {
                host_collective(&rank).fail("it fell off the bus");
            }
            rank.try_step(&sequences.batch(&[4])).map(drop)
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
fn an_indivisible_model_is_refused_with_the_rank_counts_that_work() {
    let model = model(Arch::Qwen3, Dtype::Bf16, 71);
    let refused = |world| super::super::supports(&model, world, false).unwrap_err().to_string();
    assert!(super::super::supports(&model, 2, false).is_ok());
    // Four ranks share two key heads in pairs, but six query heads do not divide by four.
    for clue in ["--tensor-parallel 4", "6 attention heads", "1, 2 would do"] {
        assert!(refused(4).contains(clue), "{}", refused(4));
    }
    let folder = inflight_fixtures::Checkpoint::new(Arch::Qwen2, Dtype::Bf16).write_temp().unwrap();
    let narrow = ModelDir::open(&ModelSource::Directory(folder.path().to_path_buf())).unwrap();
    let refused = super::super::supports(&narrow, 2, false).unwrap_err().to_string();
    assert!(refused.contains("head_dim"), "{refused}");
    // What runs without a model of one's own runs on GPUs, too.
    let demo = ModelDir::open(&ModelSource::Embedded).unwrap();
    assert!(
        super::super::supports(&demo, 1, false).is_ok() && super::super::supports(&demo, 2, false).is_ok()
    );
}

#[test]
fn duplicate_gpus_no_gpu_and_batch_dependent_sums_are_refused() {
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
            draft_rows: 0,
            batch_tokens: 256,
            context_tokens: None,
            kv_store: KvStore::Half,
            deterministic,
            experimental: false,
            graphs: true,
            copy_streams: true,
            autotune: true,
            gemm_cache: None,
            overlap: true,
        };
        CudaRuntime::load(&model, &options, &|_, _| {}).err().unwrap().to_string()
    };
    for (gpus, deterministic, clues) in [
        (&[][..], false, ["--tensor-parallel is 0", "from 1 to 64"]),
        (&[3, 1, 3], false, ["gpu is GPU 3 twice", "different GPUs"]),
        (&[0, 1, 2], true, ["deterministic is on, with 3 ranks", "2 ranks at most"]),
    ] {
        for clue in clues {
            assert!(refused(gpus, deterministic).contains(clue), "{}", refused(gpus, deterministic));
        }
    }
}
