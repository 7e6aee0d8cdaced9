//! Device thread: owns a GPU, loads the model or its shard, and enqueues steps in the order of commands. It
//! never waits for a step; the receiver of its result does.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, sync_channel};

use inflight_runtime::{
    self as runtime, Batch, Capabilities, CommandQueue, CommandThread, CommandThreadOptions, DEVICE_COMMANDS,
    OwnedSlotSetup, Slot, TokenMasks,
};

use super::Error as LoadError;
use super::autotune::GemmTuning;
use super::device_state::DeviceState;
use super::gpu_paths::GpuPaths;
use super::load_job::LoadJob;
use super::shapes::DEPTH;
use super::step_slot::StepSlot;

/// Bound of the command queue: two steps, each attaching and detaching every slot at most.
const COMMANDS_MAX: usize = 1 << 14;

/// Command to a device thread.
#[derive(Clone)]
pub(super) enum DeviceCommand {
    Attach(Slot, OwnedSlotSetup),
    Detach(Slot),
    Step(Arc<Batch>),
    /// Fills the buffers that steps write before they read them with NaN and impossible tokens.
    Poison(SyncSender<Result<(), runtime::Error>>),
    /// Requests the logits of the last step.
    Logits(SyncSender<Result<Vec<f32>, runtime::Error>>),
}

/// Enqueued step, or the reason why it was not enqueued.
pub(super) struct LaunchedStep {
    pub(super) outcome: Result<(), runtime::Error>,
    /// Index of the step slot that this step writes to.
    pub(super) step_slot: usize,
    /// Whether log probabilities are requested, by sample.
    pub(super) logprobs: Vec<bool>,
    /// Number of scored rows.
    pub(super) scores: usize,
    /// The step's batch, returned so that its buffers can be reused once no rank holds it.
    pub(super) batch: Arc<Batch>,
}

/// Result of loading a rank's shard.
pub(super) struct LoadedRank {
    pub(super) capabilities: Capabilities,
    pub(super) step_slots: Arc<Vec<StepSlot>>,
    pub(super) context: Arc<cudarc::driver::CudaContext>,
    /// Address of the KV pool, and bytes per block.
    pub(super) pool: (u64, usize),
    pub(super) gemm_backend: &'static str,
    pub(super) weight_bytes: u64,
    pub(super) graphs: usize,
    pub(super) paths: GpuPaths,
    pub(super) tuned: Vec<GemmTuning>,
}

/// Load event of a rank.
pub(super) enum LoadEvent {
    /// Bytes copied so far, and total bytes.
    Progress(u64, u64),
    Done(Result<Box<LoadedRank>, LoadError>),
}

/// Sender of load events, tagged with the rank.
pub(super) type LoadEventSender = Sender<(usize, LoadEvent)>;

/// Handle to the device thread; its results are the launched steps, in order.
pub(super) type DeviceThread = CommandThread<DeviceCommand, LaunchedStep>;

/// Sender of the token masks of steps, in order, to a device thread. It is dropped before the thread is joined, which may wait
/// for masks.
pub(super) type MaskSender = SyncSender<Arc<TokenMasks>>;

/// Starts the thread, which loads the model and sends its progress to `events`.
pub(super) fn start(job: LoadJob, events: LoadEventSender) -> Result<(DeviceThread, MaskSender), LoadError> {
    let name = if job.shard_plan.world() == 1 { "gpu".to_owned() } else { format!("gpu-{}", job.rank()) };
    let options = CommandThreadOptions {
        name,
        commands_max: COMMANDS_MAX,
        results_max: DEPTH as usize,
        queued: metrics::gauge!(DEVICE_COMMANDS),
    };
    let (masks, supplied) = sync_channel(DEPTH as usize);
    let thread = CommandThread::start(options, move |commands, launched| {
        run(&job, &events, commands, &launched, &supplied);
    });
    Ok((thread?, masks))
}

/// Returns the error of calls after the device thread has ended.
pub(super) fn thread_ended() -> runtime::Error {
    runtime::Error::Device("the GPU's device thread has ended".to_owned())
}

/// Body of the device thread: loads the model, then serves commands.
fn run(
    job: &LoadJob,
    events: &LoadEventSender,
    inbox: CommandQueue<DeviceCommand>,
    outbox: &SyncSender<LaunchedStep>,
    supplied: &Receiver<Arc<TokenMasks>>,
) {
    // Dropped last: a communicator ends after the graphs captured with it.
    let nccl = job.group.as_ref().map(|group| Rc::new(group.rank(job.rank())));
    // The receiver is gone if the worker has aborted loading.
    let done = |outcome| events.send((job.rank(), LoadEvent::Done(outcome))).is_ok();
    let panicked = "the GPU's device thread panicked; see the log above";
    let loading = AssertUnwindSafe(|| DeviceState::load(job, events, nccl.clone()));
    let (mut state, loaded) = match catch_unwind(loading) {
        Ok(Ok(loaded)) => loaded,
        Ok(Err(error)) => {
            // In this order, so that the cause is reported before its consequences on other ranks.
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
    let serving = AssertUnwindSafe(|| serve(job, &mut state, inbox, outbox, supplied));
    if catch_unwind(serving).is_err() {
        // Before the device state is dropped, which waits for collectives of other ranks.
        job.fail(panicked);
    }
}

/// Serves commands until the queue is closed.
fn serve(
    job: &LoadJob,
    state: &mut DeviceState,
    inbox: CommandQueue<DeviceCommand>,
    outbox: &SyncSender<LaunchedStep>,
    supplied: &Receiver<Arc<TokenMasks>>,
) {
    let mut step_slot = 0;
    for command in inbox {
        match command {
            DeviceCommand::Attach(slot, setup) => {
                if let Err(error) = state.runner.attach(&state.device, slot, &setup.borrow()) {
                    // The slot stays free, so the step that samples from it fails with an error. Other ranks
                    // would run it.
                    tracing::error!(slot, %error, "cannot attach sequence to its slot");
                    job.fail(&error.to_string());
                }
            }
            DeviceCommand::Detach(slot) => state.runner.detach(slot),
            DeviceCommand::Step(batch) => {
                let mut logprobs = Vec::new();
                let mut lacks_masks = batch.masked_rows() > 0;
                let mut receive = || {
                    lacks_masks = false;
                    supplied.recv().map_err(|_| thread_ended())
                };
                let outcome = match job.failure() {
                    Some(failure) => Err(failure),
                    None => state.step(&batch, step_slot, &mut logprobs, &mut receive),
                };
                // After an error, too: the masks of this step are not those of the next.
                if lacks_masks && supplied.recv().is_err() {
                    return; // the runtime is gone
                }
                if let Err(error @ runtime::Error::Device(_)) = &outcome {
                    job.fail(&error.to_string());
                }
                let scores = batch.scores.len();
                if outbox.send(LaunchedStep { outcome, step_slot, logprobs, scores, batch }).is_err() {
                    return; // the runtime is gone
                }
                step_slot = (step_slot + 1) % state.step_slots.len();
            }
            DeviceCommand::Poison(reply) => {
                let _ = reply.send(state.poison());
            }
            DeviceCommand::Logits(reply) => {
                let _ = reply.send(state.logits());
            }
        }
    }
}
