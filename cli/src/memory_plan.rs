//! Division of a machine's memory among the workers of several models.
//!
//! The weights of each worker are known before it starts, and pools whose size was given stay. On the host, the other pools have their
//! default sizes, or less, so that all of them take at most half of what is left: the rest is for buffers and other processes. On a
//! GPU, workers divide what is left of `--gpu-memory-utilization`, model by model.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt;

use inflight_worker::{MemoryNeeds, Readable};

/// Part of what weights and given pools leave of the host that the other pools may take.
const POOLS_PART: u128 = 2;
/// Minimum size of a pool in bytes.
pub const POOL_BYTES_MIN: u64 = 16 << 20;
/// Granularity of allocations of a GPU in bytes.
const MAPPING_BYTES: u64 = 2 << 20;
/// Shares are divided in millionths.
const SHARE_UNIT: f64 = 1e6;

/// Pool of the host's memory that a worker has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolDemand {
    /// Given or default size in bytes.
    pub bytes: u64,
    /// Whether the user gave the size, which stays.
    pub given: bool,
}

/// Workers of a model, and what they need.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelDemand {
    /// First name of the model.
    pub name: String,
    /// Memory of each worker: of the host, or of each of its GPUs. `None`: it is not planned, as on a simulated device.
    pub needs: Option<MemoryNeeds>,
    /// GPUs of each worker; none: it computes on the host.
    pub workers: Vec<Vec<u32>>,
    /// KV cache of a worker on the host.
    pub kv: PoolDemand,
    /// Cache of preempted sequences in the host's memory.
    pub host: PoolDemand,
    /// Share of the memory that is divided, relative to the other models.
    pub share: Option<f64>,
    /// Part of a GPU's memory that all of its workers may take; of this model's workers alone if `is_own_utilization`.
    pub utilization: f64,
    /// Whether the part was given for this model.
    pub is_own_utilization: bool,
    /// Whether `--quantize` would make the weights smaller.
    pub is_quantizable: bool,
}

impl ModelDemand {
    fn is_on_gpus(&self) -> bool {
        self.workers.iter().any(|gpus| !gpus.is_empty())
    }

    /// Returns pools of a worker in the host's memory with their minimum sizes: at most the KV cache and the host cache, in this order.
    fn pools(&self) -> Vec<(PoolDemand, u64)> {
        let Some(needs) = self.needs else { return Vec::new() };
        let least = |pool: PoolDemand, min: u64| (pool, if pool.given { pool.bytes } else { min });
        let host = least(self.host, POOL_BYTES_MIN);
        if self.is_on_gpus() {
            return vec![host];
        }
        vec![least(self.kv, POOL_BYTES_MIN.max(needs.least_pool())), host]
    }

    /// Returns the bytes of the host's memory that weights take.
    fn host_weights(&self) -> u64 {
        self.needs.filter(|_| !self.is_on_gpus()).map_or(0, |needs| needs.weight_bytes)
    }

    fn share_units(&self) -> u128 {
        (self.share.unwrap_or(1.0) * SHARE_UNIT).clamp(1.0, 1e15) as u128
    }

    /// Returns the least that a worker needs of a GPU: weights, buffers and one KV block.
    fn gpu_least(&self) -> u64 {
        self.needs.map_or(0, |needs| {
            let block = needs.least_pool().next_multiple_of(MAPPING_BYTES);
            needs.weight_bytes.saturating_add(needs.buffer_bytes).saturating_add(block)
        })
    }
}

/// Memory of the machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachineMemory {
    /// Bytes that processes may use: the machine's or those of a control group.
    pub limit: u64,
    /// Bytes that are available now.
    pub available: u64,
    /// Bytes of each GPU.
    pub gpus: BTreeMap<u32, u64>,
}

/// Memory of a worker.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WorkerShare {
    /// Bytes of the KV cache over all ranks; `None`: not planned.
    pub kv_bytes: Option<u64>,
    /// Tokens that it holds.
    pub kv_tokens: u64,
    /// Flags that give the worker its share.
    pub flags: Vec<OsString>,
}

/// Where models do not fit.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Place {
    /// What the host's processes may use.
    Host,
    /// What is available of the host now.
    Available,
    /// A GPU of `total` bytes.
    Gpu { gpu: u32, total: u64 },
}

/// Models that do not fit into one machine together.
#[derive(Debug, Clone, PartialEq)]
pub struct DoesNotFit {
    place: Place,
    limit: u64,
    needed: u128,
    /// Model, number of its workers, what each of them needs in words, and the sum in bytes.
    rows: Vec<(String, usize, String, u128)>,
    advice: Vec<&'static str>,
}

impl std::error::Error for DoesNotFit {}

impl fmt::Display for DoesNotFit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = |bytes: u128| Readable(u64::try_from(bytes).unwrap_or(u64::MAX));
        let (needed, limit) = (bytes(self.needed), Readable(self.limit));
        match self.place {
            Place::Host => write!(
                out,
                "the models need {needed} together, and this machine's processes may use {limit}"
            )?,
            Place::Available => {
                write!(
                    out,
                    "the weights of the models take {needed} together, and {limit} are available on this machine"
                )?;
            }
            Place::Gpu { gpu, total } => {
                let total = Readable(total);
                write!(out, "the models need {needed} of GPU {gpu}, and may use {limit} of its {total}")?;
            }
        }
        for (name, workers, what, sum) in &self.rows {
            let workers =
                if *workers == 1 { "1 worker".to_owned() } else { format!("{workers} workers, each") };
            write!(out, "\n  {name}: {} for {workers} with {what}", bytes(*sum))?;
        }
        write!(out, "\n{}", self.advice.join(", or "))
    }
}

/// Divides the memory; returns the shares of each model's workers.
///
/// # Errors
/// [`DoesNotFit`] if the least that all of them need exceeds a limit.
pub fn divide(models: &[ModelDemand], machine: &MachineMemory) -> Result<Vec<Vec<WorkerShare>>, DoesNotFit> {
    let host = divide_host(models, machine)?;
    let gpus = divide_gpus(models, machine)?;
    let shares = models.iter().zip(host).zip(gpus).map(|((model, host), fractions)| {
        let share = |fraction: Option<f64>| worker_share(model, &host, fraction, machine);
        fractions.into_iter().map(share).collect()
    });
    Ok(shares.collect())
}

/// Returns the share of a worker with these pools and this fraction of its GPUs' memory.
fn worker_share(
    model: &ModelDemand,
    host: &HostPools,
    fraction: Option<f64>,
    machine: &MachineMemory,
) -> WorkerShare {
    let mut share = WorkerShare { flags: host.flags.clone(), ..WorkerShare::default() };
    let Some(needs) = model.needs else { return share };
    match (model.is_on_gpus(), fraction) {
        (false, _) => {
            share.kv_bytes = Some(host.kv);
            share.kv_tokens = needs.tokens(host.kv);
        }
        (true, Some(fraction)) => {
            // Rounded up in the sixth digit, for the sum is below the whole.
            let fraction = (fraction * 1e6).ceil() / 1e6;
            share.flags.push(format!("--gpu-memory-utilization={}", fraction.min(1.0)).into());
            let of = |gpus: &Vec<u32>| gpus.iter().filter_map(|gpu| machine.gpus.get(gpu)).min().copied();
            let total = model.workers.iter().filter_map(of).min().unwrap_or(0);
            let rank = (total as f64 * fraction) as u64;
            let rank = rank.saturating_sub(needs.weight_bytes).saturating_sub(needs.buffer_bytes);
            let ranks = model.workers.first().map_or(1, Vec::len) as u64;
            share.kv_bytes = Some(rank.saturating_mul(ranks));
            share.kv_tokens = needs.tokens(rank);
        }
        (true, None) => {}
    }
    share
}

/// Pools of a worker in the host's memory.
#[derive(Debug, Clone, Default)]
struct HostPools {
    kv: u64,
    /// Sizes other than the default ones.
    flags: Vec<OsString>,
}

fn divide_host(models: &[ModelDemand], machine: &MachineMemory) -> Result<Vec<HostPools>, DoesNotFit> {
    let number = |model: &ModelDemand| model.workers.len() as u128;
    let sum = |of: &dyn Fn(&ModelDemand) -> u128| -> u128 {
        models.iter().map(|model| number(model) * of(model)).sum()
    };
    let weights = sum(&|model| model.host_weights().into());
    let pools = |model: &ModelDemand, of: &dyn Fn(&PoolDemand, u64) -> u64| -> u128 {
        model.pools().iter().map(|(pool, least)| u128::from(of(pool, *least))).sum()
    };
    let given = sum(&|model| pools(model, &|pool, _| if pool.given { pool.bytes } else { 0 }));
    let minimum = sum(&|model| pools(model, &|pool, least| if pool.given { 0 } else { least }));
    let wanted =
        sum(&|model| pools(model, &|pool, least| if pool.given { 0 } else { pool.bytes.max(least) }));
    let (fixed, limit) = (weights + given, u128::from(machine.limit));
    if fixed + minimum > limit {
        return Err(host_refusal(models, Place::Host, machine.limit, fixed + minimum));
    }
    if weights > u128::from(machine.available) {
        return Err(host_refusal(models, Place::Available, machine.available, weights));
    }
    let budget = ((limit - fixed) / POOLS_PART).max(minimum);
    let has_shares = models.iter().any(|model| model.share.is_some());
    let units = |model: &&ModelDemand| pools(model, &|pool, _| u64::from(!pool.given)) > 0;
    let all_units: u128 = models.iter().filter(units).map(ModelDemand::share_units).sum();
    let size = |model: &ModelDemand, pool: &PoolDemand, least: u64| -> u64 {
        let wants = u128::from(pool.bytes.max(least));
        let least = u128::from(least);
        let extra = if pool.given {
            wants - least
        } else if has_shares {
            let of_model = (budget - minimum) * model.share_units() / all_units.max(1);
            let all = pools(model, &|pool, _| if pool.given { 0 } else { pool.bytes }).max(1);
            of_model / number(model).max(1) * u128::from(pool.bytes) / all
        } else if wanted <= budget {
            wants - least
        } else {
            (wants - least) * (budget - minimum) / (wanted - minimum).max(1)
        };
        u64::try_from(least + extra).unwrap_or(u64::MAX)
    };
    let of_model = |model: &ModelDemand| {
        let mut host = HostPools { kv: model.kv.bytes, flags: Vec::new() };
        let pools = model.pools();
        let names = ["--kv-cache-bytes", "--host-cache-bytes"];
        for ((pool, least), name) in pools.iter().zip(&names[names.len() - pools.len()..]) {
            let bytes = size(model, pool, *least);
            if *name == names[0] {
                host.kv = bytes;
            }
            if bytes != pool.bytes {
                host.flags.push(format!("{name}={bytes}").into());
            }
        }
        host
    };
    Ok(models.iter().map(of_model).collect())
}

fn host_refusal(models: &[ModelDemand], place: Place, limit: u64, needed: u128) -> DoesNotFit {
    let rows = models.iter().filter(|model| model.needs.is_some()).map(|model| {
        let (weights, pools) = (model.host_weights(), model.pools());
        let mut parts = vec![format!("weights of {}", Readable(weights))];
        let mut bytes = u128::from(weights);
        let names = ["KV cache", "host cache"];
        if place == Place::Host {
            for ((pool, least), name) in pools.iter().zip(&names[names.len() - pools.len()..]) {
                let at_least = if pool.given { "" } else { "at least " };
                parts.push(format!("{name} of {at_least}{}", Readable(*least)));
                bytes += u128::from(*least);
            }
        }
        (model.name.clone(), model.workers.len(), parts.join(", "), bytes * model.workers.len() as u128)
    });
    let on_host = |model: &&ModelDemand| !model.is_on_gpus() && model.needs.is_some();
    let any = |test: &dyn Fn(&ModelDemand) -> bool| models.iter().filter(on_host).any(test);
    let given = models.iter().flat_map(ModelDemand::pools).any(|(pool, _)| pool.given && pool.bytes > 0);
    let advice = [
        (any(&|model| model.workers.len() > 1), "start fewer workers (--workers 1)"),
        (any(&|model| model.is_quantizable), "store weights in fewer bits (--quantize int8 or int4)"),
        (given && place == Place::Host, "lower --kv-cache-bytes or --host-cache-bytes"),
        (place == Place::Available, "end what else uses memory"),
        (true, "serve fewer or smaller models here"),
    ];
    let advice = advice.into_iter().filter(|(applies, _)| *applies).map(|(_, advice)| advice);
    DoesNotFit { place, limit, needed, rows: rows.collect(), advice: advice.collect() }
}

/// Returns the fraction of its GPUs' memory of each worker of each model; `None` for a worker without known GPUs.
fn divide_gpus(models: &[ModelDemand], machine: &MachineMemory) -> Result<Vec<Vec<Option<f64>>>, DoesNotFit> {
    let mut fractions: Vec<Vec<Option<f64>>> =
        models.iter().map(|model| vec![None; model.workers.len()]).collect();
    let used: BTreeSet<u32> =
        models.iter().flat_map(|model| model.workers.iter().flatten().copied()).collect();
    for (gpu, total) in used.iter().filter_map(|gpu| Some((*gpu, *machine.gpus.get(gpu)?))) {
        let on = |model: &ModelDemand| model.workers.iter().filter(|gpus| gpus.contains(&gpu)).count();
        let own = |model: &ModelDemand| (total as f64 * model.utilization) as u64;
        let planned: Vec<&ModelDemand> =
            models.iter().filter(|model| model.needs.is_some() && on(model) > 0).collect();
        let (with_own, others): (Vec<&ModelDemand>, Vec<&ModelDemand>) =
            planned.iter().copied().partition(|model| model.is_own_utilization);
        let limit = others.iter().map(|model| own(model)).min().unwrap_or(total);
        let taken = |model: &ModelDemand| {
            if model.is_own_utilization { own(model) } else { model.gpu_least() }
        };
        let needed: u128 = planned.iter().map(|model| on(model) as u128 * u128::from(taken(model))).sum();
        if let Some(model) = with_own.iter().find(|model| model.gpu_least() > own(model)) {
            let needed = model.gpu_least().into();
            return Err(gpu_refusal(&[*model], (gpu, total), own(model), needed));
        }
        if needed > u128::from(limit) {
            return Err(gpu_refusal(&planned, (gpu, total), limit, needed));
        }
        let rest = u128::from(limit) - needed;
        let units: u128 = others.iter().map(|model| model.share_units()).sum();
        for (model, fractions) in models.iter().zip(&mut fractions) {
            if model.needs.is_none() {
                continue;
            }
            let extra = rest * model.share_units() / units.max(1) / on(model).max(1) as u128;
            let bytes = u128::from(model.gpu_least()) + extra;
            let fraction =
                if model.is_own_utilization { model.utilization } else { bytes as f64 / total as f64 };
            for (gpus, known) in model.workers.iter().zip(fractions) {
                if gpus.contains(&gpu) {
                    *known = Some(known.map_or(fraction, |known: f64| known.min(fraction)));
                }
            }
        }
    }
    Ok(fractions)
}

fn gpu_refusal(planned: &[&ModelDemand], (gpu, total): (u32, u64), limit: u64, needed: u128) -> DoesNotFit {
    let rows = planned.iter().filter_map(|model| {
        let needs = model.needs?;
        let workers = model.workers.iter().filter(|gpus| gpus.contains(&gpu)).count();
        let own = (total as f64 * model.utilization) as u64;
        let mut what = format!(
            "weights of {}, buffers of {}",
            Readable(needs.weight_bytes),
            Readable(needs.buffer_bytes)
        );
        let mut bytes = model.gpu_least();
        if model.is_own_utilization {
            what.push_str(&format!(", and --gpu-memory-utilization {}", model.utilization));
            bytes = bytes.max(own);
        }
        Some((model.name.clone(), workers, what, u128::from(bytes) * workers as u128))
    });
    let several = planned.iter().any(|model| model.workers.len() > 1);
    let advice = [
        (several, "start fewer workers (--workers 1)"),
        (true, "lower --max-context-tokens, --max-sequences or --max-batch-tokens, which size the buffers"),
        (true, "raise --gpu-memory-utilization"),
        (true, "split a model over GPUs (--tensor-parallel 2)"),
        (true, "serve fewer or smaller models here"),
    ];
    let advice = advice.into_iter().filter(|(applies, _)| *applies).map(|(_, advice)| advice);
    DoesNotFit {
        place: Place::Gpu { gpu, total },
        limit,
        needed,
        rows: rows.collect(),
        advice: advice.collect(),
    }
}

#[cfg(test)]
mod tests;
