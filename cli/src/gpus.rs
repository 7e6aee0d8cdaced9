//! Which GPUs each worker of `inflight up` computes on.

use inflight_worker::Device;

/// Workers of a machine without GPUs, if no number is given.
const WORKERS: usize = 2;

/// The GPUs of each worker, none where it computes on something else. `usable` are the GPUs that there are, by their numbers;
/// a worker takes one for each of its `ranks`, and what is left over goes to nobody.
///
/// With the devices `auto` and `cuda` workers are spread over them, as evenly as can be, and their number is by default that of
/// the groups; with a GPU that was named, all workers share that one and those after it.
pub fn assign(device: Device, workers: Option<usize>, usable: &[u32], ranks: usize) -> Vec<Vec<u32>> {
    let ranks = ranks.max(1);
    let groups: Vec<Vec<u32>> = match device {
        Device::Auto | Device::Cuda(None) => usable.chunks_exact(ranks).map(<[u32]>::to_vec).collect(),
        Device::Cuda(Some(first)) => vec![(first..=u32::MAX).take(ranks).collect()],
        Device::Cpu | Device::Sim(_) => Vec::new(),
    };
    let default = match (groups.is_empty(), device) {
        (false, _) => groups.len(),
        // It will say what is wrong, once.
        (true, Device::Cuda(_)) => 1,
        (true, _) => WORKERS,
    };
    let workers = workers.unwrap_or(default);
    // Divided by none only where there are none, and then nobody gets one.
    (0..workers).map(|worker| groups.get(worker % groups.len().max(1)).cloned().unwrap_or_default()).collect()
}

/// Of the memory that workers on the GPUs of this one may use together, its part: all share equally.
pub fn share(assigned: &[Vec<u32>], worker: usize) -> f32 {
    let gpus = &assigned[worker];
    1.0 / assigned.iter().filter(|other| *other == gpus).count() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_group_of_gpus_gets_a_worker_and_a_machine_without_one_gets_two() {
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
    fn any_number_of_workers_is_spread_evenly_and_shares_memory_that_adds_up() {
        for (gpus, ranks) in (0..9u32).flat_map(|gpus| [1, 2, 3].map(|ranks| (gpus, ranks))) {
            // Numbers with gaps: some GPU of the machine can't be used.
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
                let (least, most) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
                assert!(most - least <= 1, "{workers} workers on {gpus} GPUs: {counts:?}");
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
