//! Whole steps with every built-in GEMM kernel, as autotuning may choose them on a GPU.

use super::recording_device::RecordingDevice;
use super::*;

#[test]
fn steps_with_skinny_gemms_yield_the_logits_of_the_cpu_runtime() {
    if !available() {
        return;
    }
    // With and without biases, in both types.
    for (arch, dtype) in [(Arch::Qwen2, Dtype::Bf16), (Arch::Llama31, Dtype::F16)] {
        let model = model(arch, dtype, 81);
        let modes = RunnerModes { deterministic: false, graphs: true };
        let device = RecordingDevice::new(Harness::new()).preferring(GemmKernel::Skinny);
        let gpu = HarnessRunner::load(device, unsharded(&model), &model, 16, KvStore::Half, modes);
        let gpu = yields_the_logits_of_the_cpu_runtime(gpu, &model, 16, KvStore::Half);
        let (run, layers) = (gpu.harness.gemms.take(), model.config().layers.len());
        // Two steps with prompts, three without, and the head in all of them.
        let count =
            |kernel, f32_out| run.iter().filter(|(by, p)| (*by, p.f32_out) == (kernel, f32_out)).count();
        assert_eq!(count(GemmKernel::Tiled, false), 2 * 4 * layers);
        assert_eq!(count(GemmKernel::Skinny, false), 3 * 4 * layers);
        assert_eq!((count(GemmKernel::Tiled, true), count(GemmKernel::Skinny, true)), (0, 5));
        assert!(run.iter().all(|(by, p)| (*by == GemmKernel::Skinny) == (p.m <= 8)));
    }
}

#[test]
fn overlapping_kernels_of_a_step_have_no_data_races() {
    if !available() {
        return;
    }
    let model = model(Arch::Qwen3, Dtype::Bf16, 4);
    let cases = [(KvStore::Half, GemmKernel::Tiled), (KvStore::Fp8, GemmKernel::Skinny)];
    for (store, preferred) in cases {
        let modes = RunnerModes { deterministic: false, graphs: true };
        let load = |device, on_weights_loaded: fn(&RecordingDevice)| {
            let device = RecordingDevice::new(device).preferring(preferred);
            HarnessRunner::load_with(device, unsharded(&model), &model, 16, store, modes, on_weights_loaded)
        };
        let mut plain = load(Harness::new(), |_| {});
        let mut overlapping = load(Harness::overlapping(), |recording| recording.device.freeze());
        // Metadata is uploaded before the first kernel starts, the RoPE table at load.
        overlapping.harness.device.keep(&overlapping.buffers.metadata);
        overlapping.harness.device.keep(&overlapping.runner.forward.buffers.angles);
        let mut steps = Vec::new();
        for gpu in [&mut plain, &mut overlapping] {
            let mut sequences = TestSequences::new(&[40, 3], model.config().vocab_size as u32, 16, 4);
            let sampling = SamplingParams::greedy();
            (0..2).for_each(|slot| gpu.attach(slot, &sampling, &[]));
            // A prompt beside a decode, then decodes padded to the rows of a graph.
            for chunks in [[39, 2], [1, 1]] {
                let (tokens, logits) = gpu.step(&sequences.batch(&chunks));
                let bits: Vec<u32> = logits.iter().map(|x| x.to_bits()).collect();
                steps.push((tokens.iter().map(|sampled| sampled.token).collect::<Vec<_>>(), bits));
            }
        }
        assert_eq!(steps[..2], steps[2..], "{store:?}, {preferred:?}");
    }
}

#[test]
fn a_gemm_is_supported_by_the_kernels_for_its_shape_and_alignment() {
    let few = Matmul { x: 64, weight: 128, bias: None, y: 3, m: 8, n: 5, k: 48, stride: 5, f32_out: false };
    let supporting = |p: Matmul| GemmKernel::supporting(&p).collect::<Vec<_>>();
    assert_eq!(supporting(few), [GemmKernel::Tiled, GemmKernel::Skinny]);
    for other in [
        Matmul { m: 9, ..few },
        Matmul { k: 44, ..few },
        Matmul { x: 72, ..few },
        Matmul { weight: 132, ..few },
    ] {
        assert_eq!(supporting(other), [GemmKernel::Tiled], "{other:?}");
    }
}
