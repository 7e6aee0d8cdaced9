//! Workers of the models that `inflight up` serves: their number, their GPUs, and their shares of the memory.

use std::ffi::OsString;

use inflight_models::ModelDir;
use inflight_worker::{Device, HostMemory, MemoryNeeds, Readable};

use super::models::{ModelPlan, check_names, is_quantizable};
use super::options::{WORKERS_MAX, is_flag};
use crate::event::PlannedModel;
use crate::exit::{CommandError, Exit};
use crate::gpus::{self, WorkerRequest};
use crate::memory_plan::{self, MachineMemory, ModelDemand, PoolDemand, WorkerShare};
use crate::memory_share;

/// Model with its workers.
#[derive(Debug, Clone)]
pub(super) struct PlacedModel {
    /// Names under which it is served; of an only model those that were given.
    pub(super) names: Vec<String>,
    /// GPUs of each worker, and flags that give it these and its share of the memory.
    pub(super) workers: Vec<(Vec<u32>, Vec<OsString>)>,
    /// Memory of each worker, as far as it is planned: weights, KV cache and tokens that it holds.
    memory: Option<PlannedMemory>,
    /// Tokens of the longest sequence.
    context_tokens: Option<u32>,
}

/// Memory of each worker of a model.
#[derive(Debug, Clone, Copy)]
struct PlannedMemory {
    weight_bytes: u64,
    kv_bytes: u64,
    kv_tokens: u64,
}

impl PlacedModel {
    /// Returns the plan as an event, for workers that begin with number `first`.
    pub(super) fn event(&self, first: usize) -> PlannedModel {
        let name = |at: usize| format!("worker-{}", first + at);
        PlannedModel {
            name: self.names.first().cloned().unwrap_or_default(),
            aliases: self.names.iter().skip(1).cloned().collect(),
            workers: (0..self.workers.len()).map(name).collect(),
            weight_bytes: self.memory.map(|memory| memory.weight_bytes),
            kv_cache_bytes: self.memory.map(|memory| memory.kv_bytes),
            kv_cache_tokens: self.memory.map(|memory| memory.kv_tokens),
        }
    }

    /// Returns a line that says what the model takes.
    pub(super) fn line(&self) -> String {
        let names = self.names.join(", ");
        let number = self.workers.len();
        let (workers, with) = match number {
            1 => ("1 worker".to_owned(), " with"),
            _ => (format!("{number} workers"), ", each with"),
        };
        let mut gpus: Vec<u32> = self.workers.iter().flat_map(|(gpus, _)| gpus.iter().copied()).collect();
        gpus.sort_unstable();
        gpus.dedup();
        let list = gpus.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let place = match gpus.len() {
            0 => String::new(),
            1 => format!(" on GPU {list}"),
            _ => format!(" on GPUs {list}"),
        };
        let Some(PlannedMemory { weight_bytes, kv_bytes, kv_tokens }) = self.memory else {
            return format!("{names}: {workers}{place}");
        };
        let (weights, kv) = (Readable(weight_bytes), Readable(kv_bytes));
        let context = self.context_tokens.filter(|context| u64::from(*context) > kv_tokens);
        let context = context.map_or(String::new(), |context| format!(" of a context of {context}"));
        format!(
            "{names}: {workers}{place}{with} weights of {weights} and a KV cache of {kv}, {kv_tokens} tokens{context}"
        )
    }
}

/// Returns the workers of all models.
///
/// # Errors
/// Several models: one cannot be opened or run, two have a name in common, or they do not fit together.
pub(super) fn place(models: &[ModelPlan]) -> Result<Vec<PlacedModel>, CommandError> {
    // The driver is queried only where the assignment depends on it.
    let over_gpus = models.iter().any(|model| is_over_gpus(model.compute.device));
    let usable = if over_gpus { inflight_worker::usable_gpus() } else { Vec::new() };
    match models {
        [only] => Ok(vec![place_one(only, &usable)]),
        _ => place_several(models, &usable),
    }
}

/// Whether the workers of a device divide all GPUs.
fn is_over_gpus(device: Device) -> bool {
    matches!(device, Device::Auto | Device::Cuda(None))
}

/// Returns the flag that gives a worker its GPUs.
fn gpu_flag(model: &ModelPlan, gpus: &[u32]) -> Option<OsString> {
    let list = gpus.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    (is_over_gpus(model.compute.device) && !list.is_empty()).then(|| format!("--gpu={list}").into())
}

/// Returns the workers of the only model, whose files only they open.
fn place_one(model: &ModelPlan, usable: &[u32]) -> PlacedModel {
    let ModelPlan { compute, flags, workers, .. } = model;
    let assigned = gpus::assign(compute.device, *workers, usable, compute.tensor_parallel);
    let pools = memory_share::flags(compute, flags, assigned.len());
    let divide_memory = !flags.iter().any(|flag| is_flag(flag, "--gpu-memory-utilization"));
    let worker = |number: usize| {
        let utilization = compute.gpu_memory_utilization * gpus::share(&assigned, number);
        let memory_flag = divide_memory.then(|| format!("--gpu-memory-utilization={utilization}").into());
        let gpus = assigned[number].clone();
        let own = memory_flag.into_iter().chain(gpu_flag(model, &gpus));
        let flags: Vec<OsString> = pools.iter().cloned().chain(own).collect();
        (gpus, flags)
    };
    PlacedModel {
        names: compute.model_names.clone(),
        workers: (0..assigned.len()).map(worker).collect(),
        memory: None,
        context_tokens: None,
    }
}

/// Returns the workers of several models. Opens the files of each model to read its names and its memory needs.
fn place_several(models: &[ModelPlan], usable: &[u32]) -> Result<Vec<PlacedModel>, CommandError> {
    let refused = |model: &ModelPlan, error: &dyn std::error::Error| {
        CommandError::chain(&format!("--model {}", model.source), error)
    };
    let mut opened = Vec::new();
    for model in models {
        opened.push(ModelDir::open(&model.compute.source()).map_err(|error| refused(model, &error))?);
    }
    let names = models.iter().zip(&opened).map(|(model, opened)| {
        let given = model.compute.model_names.clone();
        if given.is_empty() { vec![opened.name().to_owned()] } else { given }
    });
    let names: Vec<Vec<String>> = names.collect();
    check_names(models.iter().map(|model| model.source.as_str()).zip(names.iter().cloned()))?;
    let requests = models.iter().zip(&opened).map(|(model, opened)| {
        let ModelPlan { compute, workers, .. } = model;
        let ranks = compute.tensor_parallel;
        // What its workers will decide, too.
        let on_cpu = compute.device == Device::Auto
            && !usable.is_empty()
            && inflight_worker::gpus_support(opened, compute).is_err();
        WorkerRequest { device: if on_cpu { Device::Cpu } else { compute.device }, workers: *workers, ranks }
    });
    let assigned = gpus::assign_all(&requests.collect::<Vec<_>>(), usable);
    let number: usize = assigned.iter().map(Vec::len).sum();
    if number > WORKERS_MAX as usize {
        let message = format!(
            "{number} workers of {} models are too many, {WORKERS_MAX} are the limit: --workers is the number of workers of each model",
            models.len()
        );
        return Err(CommandError::new(Exit::Usage, message));
    }
    let mut demands = Vec::new();
    for (((model, opened), names), workers) in models.iter().zip(&opened).zip(&names).zip(&assigned) {
        let needs = needs(model, opened, workers).map_err(|error| refused(model, &error))?;
        demands.push(demand(model, names, needs, workers));
    }
    let machine = machine_memory(&assigned);
    let shares = memory_plan::divide(&demands, &machine)
        .map_err(|refusal| CommandError::new(Exit::Failure, refusal.to_string()))?;
    let placed = models.iter().zip(names).zip(demands.iter().zip(shares));
    Ok(placed.map(|((model, names), (demand, shares))| placed_model(model, names, demand, shares)).collect())
}

/// Returns the memory that each worker of a model needs; `None` on a simulated device and where no GPU can be used, which the worker reports.
fn needs(
    model: &ModelPlan,
    opened: &ModelDir,
    workers: &[Vec<u32>],
) -> Result<Option<MemoryNeeds>, inflight_worker::Error> {
    let on_gpus = workers.iter().any(|gpus| !gpus.is_empty());
    match model.compute.device {
        Device::Sim(_) => Ok(None),
        Device::Cuda(_) if !on_gpus => Ok(None),
        Device::Auto | Device::Cpu | Device::Cuda(_) => {
            inflight_worker::memory_needs(opened, &model.compute, on_gpus).map(Some)
        }
    }
}

fn demand(
    model: &ModelPlan,
    names: &[String],
    needs: Option<MemoryNeeds>,
    workers: &[Vec<u32>],
) -> ModelDemand {
    let compute = &model.compute;
    let given = |flag: &str| model.flags.iter().any(|given| is_flag(given, flag));
    ModelDemand {
        name: names.first().cloned().unwrap_or_default(),
        needs,
        workers: workers.to_vec(),
        kv: PoolDemand { bytes: compute.kv_cache_bytes, given: given("--kv-cache-bytes") },
        host: PoolDemand { bytes: compute.host_cache_bytes, given: given("--host-cache-bytes") },
        share: model.memory_share,
        utilization: compute.gpu_memory_utilization.into(),
        is_own_utilization: model.has_own_utilization,
        is_quantizable: is_quantizable(compute),
    }
}

/// Reads the memory of the machine and of the GPUs that have workers.
fn machine_memory(assigned: &[Vec<Vec<u32>>]) -> MachineMemory {
    let (limit, available) =
        HostMemory::read().map_or((u64::MAX, u64::MAX), |host| (host.limit(), host.available));
    let gpus = assigned.iter().flatten().flatten();
    let gpus = gpus.filter_map(|gpu| Some((*gpu, inflight_worker::gpu_memory(*gpu)?)));
    MachineMemory { limit, available, gpus: gpus.collect() }
}

fn placed_model(
    model: &ModelPlan,
    names: Vec<String>,
    demand: &ModelDemand,
    shares: Vec<WorkerShare>,
) -> PlacedModel {
    let ranks = demand.workers.first().map_or(1, |gpus| gpus.len().max(1)) as u64;
    // The smallest, where workers have different shares.
    let smallest = shares.iter().min_by_key(|share| share.kv_bytes);
    let memory = demand.needs.zip(smallest).and_then(|(needs, share)| {
        let weight_bytes = needs.weight_bytes.saturating_mul(ranks);
        Some(PlannedMemory { weight_bytes, kv_bytes: share.kv_bytes?, kv_tokens: share.kv_tokens })
    });
    let workers = demand.workers.iter().zip(shares).map(|(gpus, share)| {
        let flags: Vec<OsString> = share.flags.into_iter().chain(gpu_flag(model, gpus)).collect();
        (gpus.clone(), flags)
    });
    PlacedModel {
        names,
        workers: workers.collect(),
        memory,
        context_tokens: demand.needs.map(|needs| needs.context_tokens),
    }
}
