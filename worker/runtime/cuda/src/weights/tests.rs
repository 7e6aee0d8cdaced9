//! Uploaded shards, compared with the checkpoint.

use inflight_fixtures::{Arch, Checkpoint, Dtype, Family, TempDir};
use inflight_kernel_harness::{Harness, HostMemory};
use inflight_models::ModelSource;
use inflight_runtime::sharding::{Partition, shards};

use super::super::device_layer::LinearRole;

use super::*;

fn model(path: &std::path::Path) -> ModelDir {
    ModelDir::open(&ModelSource::Directory(path.to_owned())).unwrap()
}

fn words(memory: &HostMemory) -> Vec<u16> {
    memory.read::<u16>(memory.bytes() / 2)
}

/// Returns the elements of the head as GEMMs read them.
fn head(weights: &DeviceWeights<HostMemory>, elements: usize) -> Vec<u16> {
    let at = weights.head() as *const u16;
    // SAFETY: the head, or the embedding that serves as head, has this many elements from that address
    // on.
    unsafe { std::slice::from_raw_parts(at, elements) }.to_vec()
}

#[test]
fn every_element_of_every_shard_is_the_unsharded_one_and_biases_are_added_once() {
    let mut compared = 0;
    for (arch, dtype) in [
        (Arch::Llama2, Dtype::Bf16),
        (Arch::Llama32, Dtype::F16),
        (Arch::Qwen2, Dtype::F32),
        (Arch::Qwen3, Dtype::Bf16),
    ] {
        let folder = Checkpoint::new(arch, dtype).write_temp().unwrap();
        let model = model(folder.path());
        let tensors = find(&model).unwrap();
        let (config, harness) = (model.config(), Harness::new());
        let hidden = config.hidden_size;
        let sharded = |world| shards(config, world, &|_| tensors.alignment()).unwrap();
        let upload = |shard: &Shard| {
            let progress = std::cell::Cell::new((0, 0));
            let report = |done, total| progress.set((done, total));
            let weights = tensors.upload(&harness, shard, &report).unwrap();
            assert_eq!(progress.get(), (tensors.bytes(shard), tensors.bytes(shard)), "{arch}");
            weights
        };
        let whole = upload(&sharded(1)[0]);
        let all_of_head = head(&whole, config.vocab_size * hidden);
        for shard in [2, 4].into_iter().flat_map(sharded) {
            let part = upload(&shard);
            let rows = shard.vocabulary.clone();
            let expected = &all_of_head[rows.start * hidden..rows.end * hidden];
            assert!(head(&part, rows.len() * hidden) == expected, "{arch}: head of rank {}", shard.rank);
            assert!(part.head().is_multiple_of(16));
            for (index, layer) in tensors.decoder.layers.iter().enumerate() {
                let (of_whole, of_part) = (&whole.layers[index], &part.layers[index]);
                for (linear, (one, own)) in
                    layer.linears().iter().zip(of_whole.linears().into_iter().zip(of_part.linears()))
                {
                    let ((_, one), (_, own)) = (one, own);
                    let k = linear.matrices[0].shape[1];
                    let (outputs, inputs) = match shard.partition(linear.matrix) {
                        Partition::Inputs(inputs) => ((0..linear.matrices[0].shape[0]).collect(), inputs),
                        Partition::Outputs(ranges) => {
                            let mut first = 0;
                            let mut outputs: Vec<usize> = Vec::new();
                            for (matrix, ranges) in linear.matrices.iter().zip(ranges) {
                                outputs.extend(ranges.into_iter().flatten().map(|row| first + row));
                                first += matrix.shape[0];
                            }
                            (outputs, 0..k)
                        }
                    };
                    let elements = words(&one.matrix);
                    let row = |o: &usize| elements[o * k + inputs.start..o * k + inputs.end].to_vec();
                    let expected: Vec<u16> = outputs.iter().flat_map(row).collect();
                    assert!(words(&own.matrix) == expected, "{arch} {:?}", linear.matrix);
                    let has = one.f32_bias.is_some() && (inputs.len() == k || shard.rank == 0);
                    assert_eq!(own.f32_bias.is_some(), has, "{arch} {:?}", linear.matrix);
                    if let (Some(one), Some(own)) = (&one.half_bias, &own.half_bias) {
                        let elements = words(one);
                        let expected: Vec<u16> = outputs.iter().map(|o| elements[*o]).collect();
                        assert_eq!(words(own), expected, "{arch} {:?}", linear.matrix);
                    }
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 100, "only {compared} parts were compared");
}

#[test]
fn rows_that_are_interleaved_in_a_file_are_deinterleaved() {
    for arch in [Arch::Llama2, Arch::Llama2Linear] {
        let checkpoint = Checkpoint::new(arch, Dtype::F16);
        let directory = checkpoint.write_temp().unwrap();
        let folder = TempDir::new("inflight-cuda-gguf").unwrap();
        let file = folder.path().join("tiny.gguf");
        std::fs::write(folder.path().join("tokenizer.json"), Family::Llama3.tokenizer_json()).unwrap();
        std::fs::write(&file, checkpoint.gguf().unwrap()).unwrap();
        let harness = Harness::new();
        for world in [1, 2] {
            let of = |path: &std::path::Path, rank: usize| {
                let model = model(path);
                let tensors = find(&model).unwrap();
                let shards = shards(model.config(), world, &|_| tensors.alignment()).unwrap();
                let weights = tensors.upload(&harness, &shards[rank], &|_, _| {}).unwrap();
                weights.layers.iter().map(|layer| words(&layer.linears()[0].1.matrix)).collect::<Vec<_>>()
            };
            for rank in 0..world {
                assert!(of(directory.path(), rank) == of(&file, rank), "{arch}, rank {rank} of {world}");
            }
        }
    }
}
/// Rows of a matrix with `k` columns.
fn rows_of(memory: &HostMemory, k: usize) -> Vec<Vec<u16>> {
    words(memory).chunks(k).map(<[u16]>::to_vec).collect()
}

fn floats(memory: &HostMemory) -> Vec<f32> {
    memory.read::<f32>(memory.bytes() / 4)
}

/// Projections in one matrix, and the value heads of GGUF files, which have another order.
#[test]
fn recurrent_layers_of_all_forms_have_the_same_weights() {
    let checkpoint = Checkpoint::new(Arch::Qwen35, Dtype::F16);
    let plain = checkpoint.write_temp().unwrap();
    let fused = Checkpoint::new(Arch::Qwen35, Dtype::F16).fused().write_temp().unwrap();
    let folder = TempDir::new("inflight-cuda-gguf").unwrap();
    let file = folder.path().join("tiny.gguf");
    std::fs::write(folder.path().join("tokenizer.json"), Arch::Qwen35.family().tokenizer_json()).unwrap();
    std::fs::write(&file, checkpoint.gguf().unwrap()).unwrap();
    let harness = Harness::new();
    let upload = |path: &std::path::Path, world: usize, rank: usize| {
        let model = model(path);
        let tensors = find(&model).unwrap();
        let shards = shards(model.config(), world, &|_| tensors.alignment()).unwrap();
        let progress = std::cell::Cell::new((0, 0));
        let report = |done, total| progress.set((done, total));
        let weights = tensors.upload(&harness, &shards[rank], &report).unwrap();
        let bytes = tensors.bytes(&shards[rank]);
        assert_eq!(progress.get(), (bytes, bytes));
        weights
    };
    let pairs = |ours: &DeviceWeights<HostMemory>, theirs: &DeviceWeights<HostMemory>, in_order: bool| {
        let mut recurrent = 0;
        for (ours, theirs) in ours.layers.iter().zip(&theirs.layers) {
            for ((role, ours), (_, theirs)) in ours.linears().into_iter().zip(theirs.linears()) {
                let k = ours.k as usize;
                let (mut ours, mut theirs) = (rows_of(&ours.matrix, k), rows_of(&theirs.matrix, k));
                if !in_order {
                    // Value heads are rows of the inputs, and columns of the output.
                    [&mut ours, &mut theirs].into_iter().for_each(|rows| {
                        rows.iter_mut()
                            .filter(|_| role == LinearRole::DeltaOutput)
                            .for_each(|row| row.sort());
                        rows.sort();
                    });
                }
                assert!(ours == theirs, "{role:?}");
            }
            let (DeviceMixer::Delta(ours), DeviceMixer::Delta(theirs)) = (&ours.mixer, &theirs.mixer) else {
                continue;
            };
            recurrent += 1;
            for (ours, theirs) in [
                (&ours.convolution, &theirs.convolution),
                (&ours.decay, &theirs.decay),
                (&ours.decay_bias, &theirs.decay_bias),
                (&ours.norm, &theirs.norm),
            ] {
                let (mut ours, mut theirs) = (floats(ours), floats(theirs));
                if !in_order {
                    [&mut ours, &mut theirs].into_iter().for_each(|all| all.sort_by(f32::total_cmp));
                }
                // The file has rates of decays rounded to f16, the checkpoint their logarithms.
                let tolerance = if in_order { 0.0 } else { 1e-3 };
                let close = |(a, b): (&f32, &f32)| (a - b).abs() <= tolerance * b.abs();
                let same = ours.len() == theirs.len() && ours.iter().zip(&theirs).all(close);
                assert!(same, "{ours:?} are not {theirs:?}");
            }
        }
        assert!(recurrent > 0);
    };
    for (world, rank) in [(1, 0), (2, 0), (2, 1)] {
        pairs(&upload(fused.path(), world, rank), &upload(plain.path(), world, rank), true);
    }
    pairs(&upload(&file, 1, 0), &upload(plain.path(), 1, 0), false);
}
