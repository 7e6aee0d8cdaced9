//! Whole steps in which each product is made by any of our own kernels that takes it, as trials may choose on a GPU.

use super::watched::Watched;
use super::*;

#[test]
fn steps_whose_products_of_few_rows_are_skinny_yield_the_logits_of_the_cpu_runtime() {
    if !available() {
        return;
    }
    // With biases and without, in either type.
    for (arch, dtype) in [(Arch::Qwen2, Dtype::Bf16), (Arch::Llama31, Dtype::F16)] {
        let model = model(arch, dtype, 81);
        let modes = Modes { store: KvStore::Half, deterministic: false, buckets: true };
        let device = Watched::new(Harness::new()).choosing(OwnProduct::Skinny);
        let gpu = OnHarness::over(device, whole(&model), &model, 16, modes);
        let gpu = yields_the_logits_of_the_cpu_runtime(gpu, &model, 16, modes.store);
        let (made, layers) = (gpu.harness.products.take(), model.config().layers);
        // Two steps with prompts, three without, and the head of all of them.
        let count =
            |own, wide| made.iter().filter(|(by, product)| (*by, product.wide) == (own, wide)).count();
        assert_eq!(count(OwnProduct::Tiled, false), 2 * 4 * layers);
        assert_eq!(count(OwnProduct::Skinny, false), 3 * 4 * layers);
        assert_eq!((count(OwnProduct::Tiled, true), count(OwnProduct::Skinny, true)), (0, 5));
        assert!(made.iter().all(|(by, product)| (*by == OwnProduct::Skinny) == (product.m <= 8)));
    }
}

#[test]
fn no_kernel_of_a_step_touches_what_another_writes_before_that_one_is_complete() {
    if !available() {
        return;
    }
    let model = model(Arch::Qwen3, Dtype::Bf16, 4);
    let of = [(KvStore::Half, OwnProduct::Tiled), (KvStore::Fp8, OwnProduct::Skinny)];
    for (store, choice) in of {
        let modes = Modes { store, deterministic: false, buckets: true };
        let over = |device, loaded: fn(&Watched)| {
            let device = Watched::new(device).choosing(choice);
            OnHarness::with(device, whole(&model), &model, 16, modes, loaded)
        };
        let mut plain = over(Harness::new(), |_| {});
        let mut overlapping = over(Harness::overlapping(), |watched| watched.device.freeze());
        // Copied to the device before the first kernel begins.
        overlapping.harness.device.keep(&overlapping.metadata);
        let mut steps = Vec::new();
        for gpu in [&mut plain, &mut overlapping] {
            let mut roster = Roster::new(&[40, 3], model.config().vocab_size as u32, 16, 4);
            let sampling = SamplingParams::greedy();
            (0..2).for_each(|slot| gpu.attach(slot, &sampling, &[]));
            // A prompt beside a decode, then a bucket.
            for chunks in [[39, 2], [1, 1]] {
                let (tokens, logits) = gpu.step(&roster.batch(&chunks));
                let bits: Vec<u32> = logits.iter().map(|x| x.to_bits()).collect();
                steps.push((tokens.iter().map(|sampled| sampled.token).collect::<Vec<_>>(), bits));
            }
        }
        assert_eq!(steps[..2], steps[2..], "{store:?}, {choice:?}");
    }
}

#[test]
fn a_product_is_made_by_those_that_take_it() {
    let few = Matmul { x: 64, weight: 128, bias: None, y: 3, m: 8, n: 5, k: 48, stride: 5, wide: false };
    let taking = |p: Matmul| OwnProduct::taking(&p).collect::<Vec<_>>();
    assert_eq!(taking(few), [OwnProduct::Tiled, OwnProduct::Skinny]);
    for other in [
        Matmul { m: 9, ..few },
        Matmul { k: 44, ..few },
        Matmul { x: 72, ..few },
        Matmul { weight: 132, ..few },
    ] {
        assert_eq!(taking(other), [OwnProduct::Tiled], "{other:?}");
    }
}
