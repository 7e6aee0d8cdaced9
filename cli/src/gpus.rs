//! Assignment of GPUs to the workers of `inflight up`.

use inflight_worker::Device;

/// Default number of workers without GPUs.
const WORKERS_DEFAULT: usize = 2;

/// Returns the GPU indices of each worker, none for a worker on another device. `usable` lists the indices of
/// the usable GPUs; each worker gets a group of `ranks` of them, and a remainder stays unused.
///
/// With the devices `auto` and `cuda`, workers are spread evenly over the groups, by default one per group.
/// With `cuda:N` all workers share GPU N and those after it.
pub fn assign(device: Device, workers: Option<usize>, usable: &[u32], ranks: usize) -> Vec<Vec<u32>> {
    let ranks = ranks.max(1);
    let groups: Vec<Vec<u32>> = match device {
        Device::Auto | Device::Cuda(None) => usable.chunks_exact(ranks).map(<[u32]>::to_vec).collect(),
        Device::Cuda(Some(first)) => vec![(first..=u32::MAX).take(ranks).collect()],
        Device::Cpu | Device::Sim(_) => Vec::new(),
    };
    let default = match (groups.is_empty(), device) {
        (false, _) => groups.len(),
        // One worker, which reports why there is no usable GPU.
        (true, Device::Cuda(_)) => 1,
        (true, _) => WORKERS_DEFAULT,
    };
    let workers = workers.unwrap_or(default);
    // Without groups, `max(1)` avoids a division by zero and `get` returns `None`.
    (0..workers).map(|worker| groups.get(worker % groups.len().max(1)).cloned().unwrap_or_default()).collect()
}

/// Returns a worker's fraction of its GPUs' memory: one over the number of workers on the same group.
pub fn share(assigned: &[Vec<u32>], worker: usize) -> f32 {
    let gpus = &assigned[worker];
    1.0 / assigned.iter().filter(|other| *other == gpus).count() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_default_each_gpu_group_gets_a_worker_and_a_machine_without_gpus_two() {
        let none: [u32; 0] = [];
        assert_eq!(assign(Device::Auto, None, &[], 1), [none, none]);
        assert_eq!(assign(Device::Auto, None, &[0], 1), [[0]]);
        assert_eq!(assign(Device::Auto, None, &[0, 2, 3], 1), [[0], [2], [3]]);
        assert_eq!(assign(Device::Cpu, None, &[0, 1], 1), [none, none]);
        assert_eq!(assign(Device::Cuda(Some(1)), None, &[0, 1], 1), [[1]]);
        assert_eq!(assign(Device::Cuda(None), None, &[0, 1], 1), [[0], [1]]);
        assert_eq!(assign(Device::Cuda(None), None, &[], 1), [none]);
        assert_eq!(assign(Device::Auto, None, &[0, 2, 3, 4, 7], 2), [[0, 2], [3, 4]]);
        assert_eq!(assign(Device::Auto, Some(3), &[0, 1, 2, 3], 2), [[0, 1], [2, 3], [0, 1]]);
        assert_eq!(assign(Device::Auto, None, &[0], 2), [none, none]);
        assert_eq!(assign(Device::Cuda(Some(2)), Some(2), &[], 4), [[2, 3, 4, 5]; 2]);
    }

    #[test]
    fn workers_are_spread_evenly_and_their_memory_fractions_add_up_to_one() {
        for (gpus, ranks) in (0..9u32).flat_map(|gpus| [1, 2, 3].map(|ranks| (gpus, ranks))) {
            // Indices with gaps: some GPUs of the machine are not usable.
            let usable: Vec<u32> = (0..gpus).map(|gpu| gpu * 2 + 1).collect();
            let groups: Vec<&[u32]> = usable.chunks_exact(ranks).collect();
            for workers in 1..40 {
                let assigned = assign(Device::Auto, Some(workers), &usable, ranks);
                assert_eq!(assigned.len(), workers);
                if groups.is_empty() {
                    assert!(assigned.iter().all(Vec::is_empty));
                    continue;
                }
                assert!(assigned.iter().all(|given| given.len() == ranks));
                let given_to = |group: &[u32]| assigned.iter().filter(|given| *given == group).count();
                let counts: Vec<usize> = groups.iter().map(|group| given_to(group)).collect();
                assert_eq!(counts.iter().sum::<usize>(), workers, "one that is not usable was given");
                let (min, max) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
                assert!(max - min <= 1, "{workers} workers on {gpus} GPUs: {counts:?}");
                for group in &groups {
                    let on: Vec<usize> = (0..workers).filter(|worker| assigned[*worker] == *group).collect();
                    let shares: f32 = on.iter().map(|worker| share(&assigned, *worker)).sum();
                    assert!(on.is_empty() || (shares - 1.0).abs() < 1e-5, "{shares}");
                }
            }
        }
        let named = assign(Device::Cuda(Some(3)), Some(4), &[0, 1], 1);
        assert_eq!(named, [[3]; 4]);
        assert!((share(&named, 2) - 0.25).abs() < 1e-6);
    }
}
