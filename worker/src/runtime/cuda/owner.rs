//! The thread that owns a GPU: it loads the model, or its shard of one, and enqueues steps in the order of commands. It never
//! waits for a step; whoever wants its result does.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, sync_channel};
use std::thread::JoinHandle;

use inflight_contract::SamplingParams;
use inflight_kernels::cuda::{DeviceError, Half, SamplingResult};
use metrics::Gauge;

use super::catalog::catalog;
use super::compute::{Compute, Modes};
use super::division::Division;
use super::driver::{DeviceMemory, Driver, Event, Graph, PinnedMemory};
use super::forward::windows;
use super::found::Found;
use super::gpu::{Gpu, Memory};
use super::metadata::{Layout, Room, StepShape, bucket_layout};
use super::nccl::{End, Group};
use super::sizing::{
    Budget, Extent, PARTIALS, Part, PoolSize, RESERVE_BYTES, WORKSPACE_BYTES, buckets, largest_bucket,
    levers, pool_blocks, sum, table, taken_bytes,
};
use super::slots::device;
use super::trials::{Bench, Tuned};
use super::{CudaOptions, Error as LoadError, tuning, weights};
use crate::metrics::DEVICE_COMMANDS;
use crate::models::ModelConfig;
use crate::runtime::{self, Batch, Capabilities, Slot};

/// Steps launched and not completed.
pub(super) const DEPTH: u32 = 2;
/// Commands that may wait for the thread: those of two steps, of which each attaches and detaches every slot at most.
const COMMANDS_MAX: usize = 1 << 14;

#[derive(Clone)]
pub(super) enum Command {
    Attach {
        slot: Slot,
        sampling: Arc<SamplingParams>,
        choice: u32,
        prompt: Vec<u32>,
        generated: Vec<u32>,
        eos_token_ids: Vec<u32>,
    },
    Detach(Slot),
    Step(Arc<Batch>),
    /// The logits of the last step.
    Logits(SyncSender<Result<Vec<f32>, runtime::Error>>),
}

/// A step that was enqueued, or why not.
pub(super) struct Flight {
    pub(super) outcome: Result<(), runtime::Error>,
    /// Which of the ring's places it uses.
    pub(super) place: usize,
    /// For each sample: whether log probabilities are wanted.
    pub(super) wanted: Vec<bool>,
    /// Handed back, so that its buffers are filled again once no rank has it.
    pub(super) batch: Arc<Batch>,
}

/// What a step in flight shares with who waits for it.
pub(super) struct Place {
    pub(super) results: PinnedMemory,
    pub(super) begin: Event,
    pub(super) done: Event,
}

/// What is known once the model is loaded.
pub(super) struct Loaded {
    pub(super) capabilities: Capabilities,
    pub(super) places: Arc<Vec<Place>>,
    pub(super) context: Arc<cudarc::driver::CudaContext>,
    /// Where the KV pool begins, and bytes of a block.
    pub(super) pool: (u64, usize),
    pub(super) products: &'static str,
    pub(super) weight_bytes: u64,
    pub(super) graphs: usize,
    pub(super) tuned: Vec<Tuned>,
}

/// How far a rank's loading is.
pub(super) enum Loading {
    /// Bytes copied so far, and in all.
    Progress(u64, u64),
    Done(Result<Box<Loaded>, LoadError>),
}

/// Hears how far loading is, by rank.
pub(super) type News = Sender<(usize, Loading)>;

/// The thread, from outside.
pub(super) struct Owner {
    commands: Option<SyncSender<Command>>,
    /// Commands sent and not begun.
    queued: Gauge,
    pub(super) flights: Receiver<Flight>,
    thread: Option<JoinHandle<()>>,
}

/// All that loading needs.
pub(super) struct Job {
    pub(super) found: Found,
    /// Of the whole model.
    pub(super) config: ModelConfig,
    pub(super) division: Division,
    pub(super) tensors: Arc<weights::Found>,
    pub(super) options: CudaOptions,
    pub(super) context_tokens: u32,
    pub(super) fingerprint: String,
    /// By which ranks tell each other; none where the model is not divided.
    pub(super) group: Option<Arc<Group>>,
}

impl Job {
    fn rank(&self) -> usize {
        self.division.shard().rank
    }

    /// Others wait for what this rank owes them: they must know.
    fn fail(&self, reason: &str) {
        if let Some(group) = &self.group {
            group.fail(self.rank(), reason);
        }
    }

    /// Waits until every rank has come so far, and returns the least of what they bring.
    fn meet(&self, brings: u32) -> Result<u32, LoadError> {
        let met = self.group.as_ref().map_or(Ok(brings), |group| group.meet(brings));
        met.map_err(|failure| LoadError::Device(failure.to_string()))
    }

    /// The failure of another rank, if there is one.
    fn failure(&self) -> Option<runtime::Error> {
        let failure = self.group.as_ref().and_then(|group| group.failure());
        failure.map(|failure| runtime::Error::Device(failure.to_string()))
    }
}

impl Owner {
    /// Starts the thread, which loads the model and tells `news` how far it is.
    pub(super) fn start(job: Job, news: News) -> Result<Self, LoadError> {
        let (commands, inbox) = sync_channel(COMMANDS_MAX);
        let (outbox, flights) = sync_channel(DEPTH as usize);
        let queued = metrics::gauge!(DEVICE_COMMANDS);
        queued.set(0.0);
        let taken = queued.clone();
        let name = if job.division.world() == 1 { "gpu".to_owned() } else { format!("gpu-{}", job.rank()) };
        let work = move || {
            run(&job, &news, inbox.iter().inspect(|_| taken.decrement(1.0)), &outbox);
        };
        let thread = std::thread::Builder::new().name(name).spawn(work)?;
        Ok(Self { commands: Some(commands), queued, flights, thread: Some(thread) })
    }

    pub(super) fn send(&self, command: Command) -> Result<(), runtime::Error> {
        let Some(commands) = &self.commands else { return Err(gone()) };
        self.queued.increment(1.0);
        commands.send(command).map_err(|_| gone())
    }

    /// Lets the thread end once it has done what it was told.
    pub(super) fn close(&mut self) {
        self.commands = None;
    }

    fn stop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            // It may wait to hand over a flight.
            while self.flights.recv().is_ok() {}
            // If it panicked, the panic hook has said so.
            let _ = thread.join();
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.stop();
    }
}

pub(super) fn gone() -> runtime::Error {
    runtime::Error::Device("the thread that owns the GPU is gone".to_owned())
}

/// The thread's whole life.
fn run(job: &Job, news: &News, inbox: impl Iterator<Item = Command>, outbox: &SyncSender<Flight>) {
    // Dropped last: a communicator ends after the graphs that were captured with it.
    let end = job.group.as_ref().map(|group| Rc::new(group.end(job.rank())));
    // Nobody listens if the worker has given up.
    let done = |outcome| news.send((job.rank(), Loading::Done(outcome))).is_ok();
    let panicked = "the thread that owns the GPU panicked; the log above says where";
    let loading = AssertUnwindSafe(|| Machine::load(job, news, end.clone()));
    let (mut machine, loaded) = match catch_unwind(loading) {
        Ok(Ok(loaded)) => loaded,
        Ok(Err(error)) => {
            // In this order, so that the cause is heard before what it leads to.
            let reason = error.to_string();
            done(Err(error));
            job.fail(&reason);
            return;
        }
        Err(_) => {
            done(Err(LoadError::Device(panicked.to_owned())));
            job.fail(panicked);
            return;
        }
    };
    if !done(Ok(Box::new(loaded))) {
        return;
    }
    let serving = AssertUnwindSafe(|| serve(job, &mut machine, inbox, outbox));
    if catch_unwind(serving).is_err() {
        // Told before the machine is taken apart, which waits for what others owe it.
        job.fail(panicked);
    }
}

/// Does what it is told until nobody is left to tell it anything.
fn serve(
    job: &Job,
    machine: &mut Machine,
    inbox: impl Iterator<Item = Command>,
    outbox: &SyncSender<Flight>,
) {
    let mut place = 0;
    for command in inbox {
        match command {
            Command::Attach { slot, sampling, choice, prompt, generated, eos_token_ids } => {
                let setup = runtime::SlotSetup {
                    sampling,
                    choice,
                    prompt: &prompt,
                    generated: &generated,
                    eos_token_ids: &eos_token_ids,
                };
                if let Err(error) = machine.compute.attach(&machine.driver, slot, &setup) {
                    // The slot stays free, so the step that samples from it fails and says so. Other ranks would run it.
                    tracing::error!(slot, %error, "cannot attach sequence to its slot");
                    job.fail(&error.to_string());
                }
            }
            Command::Detach(slot) => machine.compute.detach(slot),
            Command::Step(batch) => {
                let mut wanted = Vec::new();
                let outcome = match job.failure() {
                    Some(failure) => Err(failure),
                    None => machine.step(&batch, place, &mut wanted),
                };
                if let Err(error @ runtime::Error::Device(_)) = &outcome {
                    job.fail(&error.to_string());
                }
                if outbox.send(Flight { outcome, place, wanted, batch }).is_err() {
                    return; // the runtime is gone
                }
                place = (place + 1) % machine.places.len();
            }
            Command::Logits(reply) => {
                let _ = reply.send(machine.logits());
            }
        }
    }
}

/// Has collectives of all sizes take their connections and buffers, which they do when they are first used: sums of up to so
/// many numbers, and parts of up to so many bytes.
fn connect(
    driver: &Driver,
    half: Half,
    room: &DeviceMemory,
    numbers: usize,
    part: usize,
) -> Result<(), DeviceError> {
    let Some(peers) = driver.peers() else { return Ok(()) };
    // The algorithm depends on the size.
    let sizes = |most: usize| {
        (4..).map(|bits| 1usize << (2 * bits)).take_while(move |size| *size < most).chain([most])
    };
    for numbers in sizes(numbers) {
        // SAFETY: there is room for so many.
        unsafe { peers.all_reduce(half, room.address(), numbers) }?;
    }
    for part in sizes(part) {
        // SAFETY: there is room for all ranks' parts.
        unsafe { peers.all_gather(room.address(), part) }?;
    }
    // Before the memory is freed.
    driver.stream.wait()
}

/// The GPU with a model on it.
struct Machine {
    // Fields are dropped in order: what lies on the device before the device.
    compute: Compute<Driver>,
    graphs: Vec<(u32, Graph)>,
    metadata: DeviceMemory,
    places: Arc<Vec<Place>>,
    packed: Vec<u8>,
    samples: usize,
    driver: Driver,
}

impl Machine {
    fn load(job: &Job, news: &News, end: Option<Rc<End>>) -> Result<(Self, Loaded), LoadError> {
        let Job { found, config, division, tensors, options, context_tokens, fingerprint, .. } = job;
        let (rank, shard) = (job.rank(), division.shard());
        let device_error = |error: DeviceError| LoadError::of(error, found);
        let driver = Driver::open(found, options.deterministic, end).map_err(device_error)?;
        driver.overlap(options.overlap);
        let (half, shapes) = (tensors.half(), division.shapes(config));
        let weight_bytes = tensors.bytes(shard);
        let samples = options.slots.max(largest_bucket(options.slots));
        let rows = options.batch_tokens.max(samples);
        let entries =
            options.slots as usize * (*context_tokens as usize).div_ceil(options.block_tokens as usize);
        let room = Room {
            rows: rows as usize,
            samples: samples as usize,
            items: (rows + PARTIALS) as usize,
            copies: options.slots as usize,
            plans: windows(config).0.len(),
        };
        let metadata_bytes = Layout::new(&room).bytes(entries.min(1 << 24));
        let extent = Extent {
            rows: rows.into(),
            samples: samples.into(),
            slots: options.slots.into(),
            context: (*context_tokens).into(),
            metadata: metadata_bytes as u64,
        };
        let parts = shapes.parts(&extent);
        let block_bytes = shapes.block_bytes(options.block_tokens, options.kv_store);
        let (free, total) = driver.memory().map_err(device_error)?;
        let size_pool = |taken: u64| {
            let budget = Budget { total, free, taken };
            match pool_blocks(budget, options.utilization, &parts, block_bytes, options.kv_bytes) {
                PoolSize::Blocks(blocks) => Ok(blocks),
                PoolSize::Missing(missing) => {
                    let weights = Part { name: "weights", lever: "", bytes: taken };
                    let all: Vec<Part> = parts.iter().copied().chain([weights]).collect();
                    Err(LoadError::Memory {
                        name: found.name.clone(),
                        missing: super::mebibytes(missing),
                        allowed: super::mebibytes(budget.allowed(options.utilization)),
                        total: super::mebibytes(total),
                        parts: table(&all),
                        levers: levers(&parts),
                    })
                }
            }
        };
        // Known before minutes of loading.
        size_pool(tensors.taken_bytes(shard))?;
        let report = |done, total| {
            // Nobody listens if the worker has given up.
            let _ = news.send((rank, Loading::Progress(done, total)));
        };
        let weights = tensors.upload(&driver, shard, &report).map_err(device_error)?;
        driver.stream.wait().map_err(device_error)?;
        // What libraries take for themselves, they take before memory is divided.
        if driver.peers().is_some() {
            let numbers = rows as usize * shapes.hidden as usize;
            let gathered = samples as usize * shapes.gathered as usize * 4;
            let room = driver.alloc((numbers * 2).max(gathered)).map_err(device_error)?;
            driver.zero(&room).map_err(device_error)?;
            // Allocating may wait for every device of the process, and a rank for the others: not at the same time.
            job.meet(0)?;
            connect(&driver, half, &room, numbers, gathered / division.world()).map_err(device_error)?;
        }
        let catalog = catalog(&weights, &shapes, division, config.vocab_size);
        let tuned = match Bench::new(&driver, half, &catalog, rows, samples).map_err(device_error)? {
            Some(bench) => {
                let tuned = match options.autotune {
                    true => {
                        let agenda = tuning::agenda(buckets(options.slots), rows);
                        bench.tune(&catalog, &agenda, samples).map_err(device_error)?
                    }
                    false => Vec::new(),
                };
                bench.make_all(&catalog, rows, samples).map_err(device_error)?;
                tuned
            }
            None => Vec::new(),
        };
        let (left, _) = driver.memory().map_err(device_error)?;
        let taken = free.saturating_sub(left);
        let blocks = size_pool(taken)?;
        let blocks = job.meet(blocks)?;
        // Each rank's host pool has its part of every block.
        let host_bytes = options.host_bytes / division.world() as u64;
        let capabilities = Capabilities {
            vocab_size: config.vocab_size as u32,
            context_tokens: *context_tokens,
            block_tokens: options.block_tokens,
            blocks,
            host_blocks: u32::try_from(host_bytes / block_bytes).unwrap_or(u32::MAX),
            slots: options.slots,
            batch_tokens: options.batch_tokens,
            depth: DEPTH,
            fingerprint: fingerprint.clone(),
        };
        let modes =
            Modes { store: options.kv_store, deterministic: options.deterministic, buckets: options.graphs };
        let compute =
            Compute::new(&driver, config, division.clone(), half, weights, capabilities.clone(), modes)
                .map_err(device_error)?;
        let metadata = driver.alloc(metadata_bytes).map_err(device_error)?;
        let place = || -> Result<Place, DeviceError> {
            Ok(Place {
                results: PinnedMemory::new(&driver.context, samples as usize * size_of::<SamplingResult>())?,
                begin: Event::new(&driver.context)?,
                done: Event::new(&driver.context)?,
            })
        };
        let places = (0..=DEPTH).map(|_| place()).collect::<Result<Vec<_>, DeviceError>>();
        let places = Arc::new(places.map_err(device_error)?);
        let mut machine =
            Self { compute, graphs: Vec::new(), metadata, places, packed: Vec::new(), samples: 0, driver };
        // Allocating may wait for every device of the process, and a rank for the others: not at the same time.
        job.meet(0)?;
        if options.graphs {
            machine.capture(options.slots).map_err(device_error)?;
        }
        let (left, _) = machine.driver.memory().map_err(device_error)?;
        let pool = taken_bytes(u64::from(blocks) * block_bytes);
        // The workspace was there before memory was looked at, and the reserve is nobody's.
        let planned = taken + sum(&parts) + pool - RESERVE_BYTES - WORKSPACE_BYTES;
        let beyond = free.saturating_sub(left).saturating_sub(planned);
        tracing::info!(
            rank,
            total_mib = super::mebibytes(total),
            weights_mib = super::mebibytes(taken),
            pool_mib = super::mebibytes(pool),
            others_mib = table(&parts),
            driver_took_mib = super::mebibytes(beyond),
            "GPU memory allocated; nothing is allocated from here on"
        );
        if beyond > RESERVE_BYTES {
            tracing::warn!(
                rank,
                beyond_mib = super::mebibytes(beyond),
                reserve_mib = super::mebibytes(RESERVE_BYTES),
                "less free GPU memory than planned; lower --gpu-memory-utilization if no other process uses it"
            );
        }
        let loaded = Loaded {
            capabilities,
            places: Arc::clone(&machine.places),
            context: Arc::clone(&machine.driver.context),
            pool: (machine.compute.forward.kv().address(), block_bytes as usize),
            products: machine.driver.products(),
            weight_bytes,
            graphs: machine.graphs.len(),
            tuned,
        };
        Ok((machine, loaded))
    }

    /// Captures a graph for each bucket, from a step in which every row is padding.
    fn capture(&mut self, slots: u32) -> Result<(), DeviceError> {
        let plans = self.compute.plans();
        for bucket in buckets(slots) {
            let layout = bucket_layout(bucket, plans);
            let bytes = layout.bytes(0);
            let mut padding = vec![0u8; bytes];
            let places = layout.places..layout.places + bucket as usize * 4;
            padding[places].fill(0xff);
            self.driver.upload(&self.metadata, 0, &padding)?;
            let step = StepShape {
                layout,
                rows: bucket,
                samples: bucket,
                copies: Vec::new(),
                mixed: false,
                bucket: Some(bucket),
                bytes,
            };
            let at = self.metadata.address();
            // Once for real, so that nothing is loaded or planned while capturing.
            self.compute.forward.run(&self.driver, &step, at)?;
            self.driver.stream.wait()?;
            let work = || self.compute.forward.run(&self.driver, &step, at);
            let graph = self.driver.capture(work)?;
            self.driver.replay(&graph)?;
            self.driver.stream.wait()?;
            self.graphs.push((bucket, graph));
        }
        Ok(())
    }

    /// Enqueues a step.
    fn step(&mut self, batch: &Batch, place: usize, wanted: &mut Vec<bool>) -> Result<(), runtime::Error> {
        let step = self.compute.prepare(batch, &mut self.packed)?;
        self.compute.wanted(wanted);
        let Place { results, begin, done } = &self.places[place];
        if step.bytes > self.metadata.bytes() {
            return Err(runtime::Error::Malformed(format!(
                "it needs {} bytes of metadata; there is room for {}",
                step.bytes,
                self.metadata.bytes()
            )));
        }
        let stream = &self.driver.stream;
        let at = self.metadata.address();
        let enqueue = || {
            begin.record(stream)?;
            self.driver.upload(&self.metadata, 0, &self.packed)?;
            let graph = step.bucket.and_then(|b| self.graphs.iter().find(|(bucket, _)| *bucket == b));
            match graph {
                Some((_, graph)) => self.driver.replay(graph)?,
                None => self.compute.forward.run(&self.driver, &step, at)?,
            }
            let bytes = batch.samples.len() * size_of::<SamplingResult>();
            if bytes > 0 {
                // SAFETY: within both allocations; it is read after `done`, and what the place's last step left there was
                // read before this one was launched, for no more steps are in flight than there are other places.
                unsafe {
                    stream.copy_out(results.as_ptr(), self.compute.forward.results().address(), bytes)
                }?;
            }
            done.record(stream)
        };
        enqueue().map_err(device)?;
        self.samples = batch.samples.len();
        Ok(())
    }

    fn logits(&self) -> Result<Vec<f32>, runtime::Error> {
        let (memory, stride) = self.compute.forward.logits();
        let bytes = self.samples * stride * 4;
        let pinned = PinnedMemory::new(&self.driver.context, bytes).map_err(device)?;
        let stream = &self.driver.stream;
        // SAFETY: within both allocations, and read only after the wait.
        unsafe { stream.copy_out(pinned.as_ptr(), memory.address(), bytes) }.map_err(device)?;
        stream.wait().map_err(device)?;
        let vocabulary = self.compute.capabilities.vocab_size as usize;
        // SAFETY: nothing is under way any more.
        let all = unsafe { pinned.as_slice() };
        let numbers = all[..bytes].chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
        let wide: Vec<f32> = numbers.collect();
        Ok(wide.chunks(stride).flat_map(|row| &row[..vocabulary]).copied().collect())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // What is freed next may still be in use.
        let _ = self.driver.stream.wait();
    }
}
