//! Assignment of GPUs to the workers of `inflight up`.

use std::collections::BTreeMap;

use inflight_worker::Device;

/// Default number of workers without GPUs.
const WORKERS_DEFAULT: usize = 2;

/// Returns the GPU indices of each worker, none for a worker on another device. `usable` lists the indices of
/// the usable GPUs; each worker gets a group of `ranks` of them, and a remainder stays unused.
///
/// With the devices `auto` and `cuda`, workers are spread evenly over the groups, by default one per group.
/// With `cuda:N` all workers share GPU N and those after it.
pub fn assign(device: Device, workers: Option<usize>, usable: &[u32], ranks: usize) -> Vec<Vec<u32>> {
    let groups = groups(device, usable, ranks);
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

/// Returns the groups of `ranks` GPUs that workers on a device can have.
fn groups(device: Device, usable: &[u32], ranks: usize) -> Vec<Vec<u32>> {
    let ranks = ranks.max(1);
    match device {
        Device::Auto | Device::Cuda(None) => usable.chunks_exact(ranks).map(<[u32]>::to_vec).collect(),
        Device::Cuda(Some(first)) => vec![(first..=u32::MAX).take(ranks).collect()],
        Device::Cpu | Device::Sim(_) => Vec::new(),
    }
}

/// Workers of a model, to be assigned to GPUs.
#[derive(Debug, Clone, Copy)]
pub struct WorkerRequest {
    pub device: Device,
    /// Number of workers, if it was given.
    pub workers: Option<usize>,
    /// Tensor-parallel ranks of each.
    pub ranks: usize,
}

/// Returns the GPU indices of each worker of each model, none for a worker on another device. One model is assigned as by [`assign`].
///
/// Of several models each has one worker unless another number was given, and every worker takes the group of GPUs with the fewest
/// workers so far. GPUs that are free then get further workers of the models without a given number, in turn.
pub fn assign_all(requests: &[WorkerRequest], usable: &[u32]) -> Vec<Vec<Vec<u32>>> {
    if let [WorkerRequest { device, workers, ranks }] = *requests {
        return vec![assign(device, workers, usable, ranks)];
    }
    let mut assigned = vec![Vec::new(); requests.len()];
    let mut loads: BTreeMap<u32, usize> = BTreeMap::new();
    let load = |loads: &BTreeMap<u32, usize>, group: &[u32]| -> usize {
        group.iter().map(|gpu| loads.get(gpu).copied().unwrap_or(0)).sum()
    };
    let candidates = |model: usize| groups(requests[model].device, usable, requests[model].ranks);
    let mut place = |model: usize, only_free: bool| -> bool {
        let groups = candidates(model);
        let least = groups.into_iter().min_by_key(|group| load(&loads, group)).unwrap_or_default();
        if only_free && (least.is_empty() || load(&loads, &least) > 0) {
            return false;
        }
        for gpu in &least {
            *loads.entry(*gpu).or_insert(0) += 1;
        }
        assigned[model].push(least);
        true
    };
    // Those with a GPU of their own choice leave the others to the rest.
    let is_named = |model: &usize| matches!(requests[*model].device, Device::Cuda(Some(_)));
    let (named, others): (Vec<usize>, Vec<usize>) = (0..requests.len()).partition(is_named);
    for model in named.iter().chain(&others) {
        for _ in 0..requests[*model].workers.unwrap_or(1) {
            place(*model, false);
        }
    }
    let without_number: Vec<usize> =
        others.into_iter().filter(|model| requests[*model].workers.is_none()).collect();
    while without_number.iter().filter(|model| place(**model, true)).count() > 0 {}
    assigned
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

    fn request(device: Device, workers: Option<usize>, ranks: usize) -> WorkerRequest {
        WorkerRequest { device, workers, ranks }
    }

    #[test]
    fn several_models_take_the_gpus_in_turn() {
        type Case<'a> = (&'a [WorkerRequest], &'a [u32], Vec<Vec<Vec<u32>>>);
        let auto = |workers, ranks| request(Device::Auto, workers, ranks);
        let none = Vec::<u32>::new;
        let cases: [Case<'_>; 8] = [
            (&[auto(None, 1), auto(None, 1)], &[], vec![vec![none()], vec![none()]]),
            (&[auto(Some(2), 1), auto(None, 1)], &[], vec![vec![none(), none()], vec![none()]]),
            (&[auto(None, 1), auto(None, 1)], &[0], vec![vec![vec![0]], vec![vec![0]]]),
            (&[auto(None, 1), auto(None, 1)], &[0, 1, 2], vec![vec![vec![0], vec![2]], vec![vec![1]]]),
            (&[auto(Some(1), 1), auto(None, 1)], &[0, 1, 2], vec![vec![vec![0]], vec![vec![1], vec![2]]]),
            (&[auto(None, 2), auto(None, 1)], &[0, 1, 2, 3], vec![vec![vec![0, 1]], vec![vec![2], vec![3]]]),
            (
                &[auto(None, 1), request(Device::Cuda(Some(0)), None, 1)],
                &[0, 1],
                vec![vec![vec![1]], vec![vec![0]]],
            ),
            (&[request(Device::Cpu, None, 1), auto(None, 1)], &[0], vec![vec![none()], vec![vec![0]]]),
        ];
        for (requests, usable, expected) in cases {
            assert_eq!(assign_all(requests, usable), expected, "{requests:?} on {usable:?}");
        }
        assert_eq!(assign_all(&[auto(None, 1)], &[]), [[none(), none()]], "one model has two");
    }

    #[test]
    fn workers_of_several_models_are_spread_evenly_and_leave_no_gpu_free() {
        for gpus in 1..7u32 {
            let usable: Vec<u32> = (0..gpus).map(|gpu| gpu * 2 + 1).collect();
            for numbers in [[None, None, None], [Some(2), None, None], [Some(3), Some(1), Some(2)]] {
                let requests = numbers.map(|workers| request(Device::Auto, workers, 1));
                let assigned = assign_all(&requests, &usable);
                for (request, workers) in requests.iter().zip(&assigned) {
                    assert!(request.workers.is_none_or(|number| workers.len() == number));
                    assert!(!workers.is_empty());
                }
                let on = |gpu: &u32| assigned.iter().flatten().filter(|group| group.contains(gpu)).count();
                let counts: Vec<usize> = usable.iter().map(on).collect();
                let (min, max) = (counts.iter().min().unwrap(), counts.iter().max().unwrap());
                assert!(max - min <= 1, "{numbers:?}: {counts:?}");
                assert!(*min > 0 || numbers.iter().all(Option::is_some), "{numbers:?}: {counts:?}");
            }
        }
    }
}
