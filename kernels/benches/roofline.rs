//! Roofline of this machine: `cargo bench -p inflight-kernels --bench roofline`.
//!
//! Kernels are compared with these figures. Run it on an idle machine.

use std::error::Error;
use std::time::Duration;

use inflight_kernels::cpu::roofline::{Arithmetic, Memory, arithmetic};
use inflight_kernels::cpu::{Isa, Pool};

const BYTES: usize = 512 << 20;
const TIME: Duration = Duration::from_millis(400);

fn main() -> Result<(), Box<dyn Error>> {
    let all = std::thread::available_parallelism()?.get();
    let isa = Isa::detect();
    println!("{}, best of what fits into {TIME:?}", isa.name());
    println!("| | 1 thread | {all} threads |");
    println!("|---|---|---|");
    let (single, many) = (Pool::new(1)?, Pool::new(all)?);
    for (name, huge) in [("read, 2 MiB pages, GB/s", true), ("read, 4 KiB pages, GB/s", false)] {
        let memory = Memory::new(BYTES, huge)?;
        let rate = |pool| memory.read(pool, isa, TIME) / 1e9;
        println!("| {name} | {:.1} | {:.1} |", rate(&single), rate(&many));
    }
    let kinds = [
        ("f32, GFLOP/s", Arithmetic::F32),
        ("bf16 dot, GFLOP/s", Arithmetic::Bf16),
        ("int8 dot, GOP/s", Arithmetic::Int8),
    ];
    for (name, kind) in kinds {
        let rate = |pool| arithmetic(pool, isa, kind, TIME) / 1e9;
        println!("| {name} | {:.0} | {:.0} |", rate(&single), rate(&many));
    }
    Ok(())
}
