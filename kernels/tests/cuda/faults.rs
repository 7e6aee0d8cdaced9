//! Tests that the harness detects races and invalid accesses.

use inflight_kernel_harness::Harness;
use inflight_kernels::cuda::{Device, Launch};

#[test]
fn the_harness_detects_races_and_invalid_addresses() {
    if !Harness::CHECKED {
        inflight_fixtures::skipped(
            "memory checks of CUDA kernels",
            "the compiler cannot instrument loads and stores",
        );
        return;
    }
    let harness = Harness::overlapping();
    let memory = harness.upload(&[7u32; 16]);
    let params = memory.address().to_ne_bytes();
    let run = |kernel| {
        let launch =
            Launch { kernel, grid: (2, 1), threads: 64, shared_bytes: 256, params: &params, overlaps: true };
        // SAFETY: the kernels are faulty, but the harness stops each invalid access.
        unsafe { harness.launch(&launch) }.map_err(|error| error.to_string())
    };
    for (kernel, clue) in [
        ("faulty_read_outside", "it reads 4 bytes outside of shared and global memory"),
        ("faulty_write_outside", "it writes 4 bytes outside of shared and global memory"),
        ("faulty_atomic_outside", "it writes 4 bytes outside of shared and global memory"),
        ("faulty_alignment", "not a multiple"),
        ("faulty_race_of_lanes", "a race in shared memory"),
        ("faulty_race_of_warps", "a race in shared memory"),
        ("faulty_race_of_a_copy", "a race in shared memory"),
        ("faulty_early_read", "a copy to it was not waited for"),
        ("faulty_kernel_wait", "a race in shared memory"),
    ] {
        let refused = run(kernel).expect_err(kernel);
        assert!(refused.contains(clue), "{kernel}: {refused}");
    }
    assert_eq!(run("faulty_not_at_all"), Ok(()));
    harness.keep(&memory);
    let refused = run("faulty_not_at_all").expect_err("memory that no kernel writes to");
    assert!(refused.contains("that no kernel writes to"), "{refused}");
}
