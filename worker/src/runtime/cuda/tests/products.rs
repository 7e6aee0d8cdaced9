//! Whole steps in which each product is made by any of our own kernels that takes it, as trials may choose on a GPU.

use std::cell::RefCell;

use inflight_kernels::cuda::{Device, Launch, Profile};

use super::*;

/// A device whose products are made by one of our own kernels wherever that takes them, and else by the one that takes all.
struct Choosing {
    device: Harness,
    choice: OwnProduct,
    /// Who made them: rows, and whether it is the head.
    made: RefCell<Vec<(OwnProduct, u32, bool)>>,
}

impl Choosing {
    fn new(device: Harness, choice: OwnProduct) -> Self {
        Self { device, choice, made: RefCell::default() }
    }
}

impl Device for Choosing {
    fn profile(&self) -> Profile {
        self.device.profile()
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller.
        unsafe { self.device.launch(launch) }
    }
}

impl Gpu for Choosing {
    type Memory = HostMemory;

    fn alloc(&self, bytes: usize) -> Result<HostMemory, DeviceError> {
        Gpu::alloc(&self.device, bytes)
    }

    fn zero(&self, memory: &HostMemory) -> Result<(), DeviceError> {
        self.device.zero(memory)
    }

    fn upload(&self, to: &HostMemory, byte: usize, from: &[u8]) -> Result<(), DeviceError> {
        Gpu::upload(&self.device, to, byte, from)
    }

    unsafe fn matmul(&self, half: Half, matmul: &Matmul) -> Result<(), DeviceError> {
        let own = OwnProduct::taking(matmul).find(|own| *own == self.choice).unwrap_or(OwnProduct::Tiled);
        self.made.borrow_mut().push((own, matmul.m, matmul.wide));
        // SAFETY: passed on to the caller.
        unsafe { own.make(&self.device, half, matmul) }
    }

    unsafe fn copy_columns(&self, columns: &Columns) -> Result<(), DeviceError> {
        // SAFETY: passed on to the caller.
        unsafe { self.device.copy_columns(columns) }
    }

    fn peers(&self) -> Option<&dyn Peers> {
        None
    }
}

fn whole(model: &ModelDir) -> Division {
    let shards = divide(model, &find(model).unwrap(), 1).unwrap();
    Division::of(shards, false).next().unwrap()
}

#[test]
fn steps_whose_products_of_few_rows_are_skinny_yield_the_logits_of_the_cpu_runtime() {
    if !available() {
        return;
    }
    // With biases and without, in either type.
    for (arch, dtype) in [(Arch::Qwen2, Dtype::Bf16), (Arch::Llama31, Dtype::F16)] {
        let model = model(arch, dtype, 81);
        let modes = Modes { store: KvStore::Half, deterministic: false, buckets: true };
        let device = Choosing::new(Harness::new(), OwnProduct::Skinny);
        let gpu = OnHarness::over(device, whole(&model), &model, 16, modes);
        let gpu = yields_the_logits_of_the_cpu_runtime(gpu, &model, 16, modes.store);
        let (made, layers) = (gpu.harness.made.take(), model.config().layers);
        // Two steps with prompts, three without, and the head of all of them.
        let count = |own, wide| made.iter().filter(|made| (made.0, made.2) == (own, wide)).count();
        assert_eq!(count(OwnProduct::Tiled, false), 2 * 4 * layers);
        assert_eq!(count(OwnProduct::Skinny, false), 3 * 4 * layers);
        assert_eq!((count(OwnProduct::Tiled, true), count(OwnProduct::Skinny, true)), (0, 5));
        assert!(made.iter().all(|(own, rows, _)| (*own == OwnProduct::Skinny) == (*rows <= 8)));
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
        let over = |device, loaded: fn(&Choosing)| {
            let device = Choosing::new(device, choice);
            OnHarness::with(device, whole(&model), &model, 16, modes, loaded)
        };
        let mut plain = over(Harness::new(), |_| {});
        let mut overlapping = over(Harness::overlapping(), |choosing| choosing.device.freeze());
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
