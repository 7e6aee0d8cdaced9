//! Which GPU each worker of `inflight up` computes on.

use inflight_worker::Device;

/// Workers of a machine without GPUs, if no number is given.
const WORKERS: usize = 2;

/// The GPU of each worker, `None` where it computes on something else. `usable` are the GPUs that there are, by their numbers.
///
/// With the device `auto` workers are spread over them, as evenly as can be, and their number is by default that of the
/// GPUs; with a GPU that was named, all workers share that one.
pub fn assign(device: Device, workers: Option<usize>, usable: &[u32]) -> Vec<Option<u32>> {
    let on = match device {
        Device::Auto => usable,
        Device::Cuda(ordinal) => &[ordinal],
        Device::Cpu | Device::Sim(_) => &[],
    };
    let default = if on.is_empty() { WORKERS } else { on.len() };
    let workers = workers.unwrap_or(default);
    // Divided by none only where there are none, and then nobody gets one.
    (0..workers).map(|worker| on.get(worker % on.len().max(1)).copied()).collect()
}

/// Of the memory that workers on the GPU of this one may use together, its part: all share equally.
pub fn share(assigned: &[Option<u32>], worker: usize) -> f32 {
    let gpu = assigned[worker];
    1.0 / assigned.iter().filter(|other| **other == gpu).count() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_gpu_gets_a_worker_and_a_machine_without_one_gets_two() {
        assert_eq!(assign(Device::Auto, None, &[]), [None, None]);
        assert_eq!(assign(Device::Auto, None, &[0]), [Some(0)]);
        assert_eq!(assign(Device::Auto, None, &[0, 2, 3]), [Some(0), Some(2), Some(3)]);
        assert_eq!(assign(Device::Cpu, None, &[0, 1]), [None, None]);
        assert_eq!(assign(Device::Cuda(1), None, &[0, 1]), [Some(1)]);
    }

    #[test]
    fn any_number_of_workers_is_spread_evenly_and_shares_memory_that_adds_up() {
        for gpus in 0..9u32 {
            // Numbers with gaps: some GPU of the machine can't be used.
            let usable: Vec<u32> = (0..gpus).map(|gpu| gpu * 2 + 1).collect();
            for workers in 1..40 {
                let assigned = assign(Device::Auto, Some(workers), &usable);
                assert_eq!(assigned.len(), workers);
                if usable.is_empty() {
                    assert!(assigned.iter().all(Option::is_none));
                    continue;
                }
                let counts: Vec<usize> = usable
                    .iter()
                    .map(|gpu| assigned.iter().filter(|given| **given == Some(*gpu)).count())
                    .collect();
                assert_eq!(counts.iter().sum::<usize>(), workers, "one that is not usable was given");
                let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
                assert!(most - least <= 1, "{workers} workers on {gpus} GPUs: {counts:?}");
                for gpu in &usable {
                    let on: Vec<usize> =
                        (0..workers).filter(|worker| assigned[*worker] == Some(*gpu)).collect();
                    let shares: f32 = on.iter().map(|worker| share(&assigned, *worker)).sum();
                    assert!(on.is_empty() || (shares - 1.0).abs() < 1e-5, "{shares}");
                }
            }
        }
        let named = assign(Device::Cuda(3), Some(4), &[0, 1]);
        assert_eq!(named, [Some(3); 4]);
        assert!((share(&named, 2) - 0.25).abs() < 1e-6);
    }
}
