//! Machines without a driver: `auto` falls back to the CPU, and `cuda` is rejected with the reason.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use inflight_runtime_cuda::{Unavailable, available};
use inflight_worker::{ComputeOptions, Device, Options, Worker};

#[test]
fn without_a_driver_cuda_is_rejected_and_auto_falls_back() {
    match available(&[0]) {
        Err(Unavailable::NoDriver) => {}
        other => {
            inflight_fixtures::skipped(
                "machines without a GPU",
                &format!("this one has a driver ({other:?})"),
            );
            return;
        }
    }
    let load = |device, tensor_parallel| {
        let off = Some("off".into());
        let compute =
            ComputeOptions { device, tensor_parallel, fingerprint_cache: off, ..ComputeOptions::default() };
        let listen = ([127, 0, 0, 1], 0).into();
        Worker::load(&Options { listen, compute, ..Options::default() }, &|_, _| {})
    };
    for ranks in [1, 2] {
        let refused = load(Device::Cuda(None), ranks).err().unwrap().to_string();
        assert!(refused.contains("no NVIDIA driver") && refused.contains("--device cpu"), "{refused}");
        assert!(load(Device::Auto, ranks).is_ok());
    }
}

#[test]
fn a_missing_gpu_is_rejected_by_its_ordinal() {
    if available(&[0]).is_ok() {
        let refused = available(&[0, 4096]).unwrap_err().to_string();
        assert!(refused.contains("4096"), "{refused}");
    }
}
