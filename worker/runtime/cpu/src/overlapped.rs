//! Asynchronous CPU runtime: steps on a dedicated thread, fed through a command queue.

use std::collections::VecDeque;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use inflight_runtime::{
    Batch, Capabilities, CommandThread, CommandThreadOptions, Error, NonFiniteRows, OwnedSlotSetup,
    Predictions, PromptLogprobs, Runtime, Sampled, Slot, SlotSetup, ThreadEnded, TokenMasks, TransferDone,
};
use inflight_worker_core::Transfer;
use metrics::Gauge;

use super::Compute;
use super::copy_thread::CopyThread;

/// Maximum steps launched and not completed.
const DEPTH: u32 = 2;
/// Capacity of the command queue: two steps, each of which attaches and detaches every slot at most.
const COMMANDS_MAX: usize = 1 << 14;

/// Command to the step thread.
enum StepCommand {
    Attach(Slot, OwnedSlotSetup),
    Detach(Slot),
    Step(Batch),
}

/// Result of a step, with the batch for reuse of its buffers.
struct StepResult {
    outcome: Result<Duration, Error>,
    sampled: Vec<Sampled>,
    scores: Vec<PromptLogprobs>,
    non_finite: NonFiniteRows,
    predictions: Predictions,
    batch: Batch,
}

/// CPU runtime whose steps run on a dedicated thread.
///
/// Commands are executed in order, so a slot detached after a launch is still attached in that step. A token
/// that one step samples and the next one needs does not leave the thread. Token masks have a channel of their own, as
/// later commands are queued before them.
pub struct Overlapped {
    capabilities: Capabilities,
    /// Before the thread, which may wait for masks until it is closed.
    masks: SyncSender<TokenMasks>,
    thread: CommandThread<StepCommand, StepResult>,
    copies: CopyThread,
    in_flight: u32,
    spare: Vec<Batch>,
    /// Scores of the step completed last.
    scores: Vec<PromptLogprobs>,
    /// Rows of the step completed last whose logits are not all finite.
    non_finite: NonFiniteRows,
    /// Tokens predicted in the step completed last.
    predictions: Predictions,
    /// Number of masked rows of each step in flight that lacks its masks, oldest step first; else `None`.
    unmasked: VecDeque<Option<usize>>,
}

impl Overlapped {
    pub(super) fn start(mut compute: Compute, copies: CopyThread) -> std::io::Result<Self> {
        let capabilities = Capabilities { depth: DEPTH, ..compute.capabilities.clone() };
        let options = CommandThreadOptions {
            name: "steps".to_owned(),
            commands_max: COMMANDS_MAX,
            results_max: DEPTH as usize,
            queued: Gauge::noop(),
        };
        let (masks, supplied) = sync_channel::<TokenMasks>(DEPTH as usize);
        let thread = CommandThread::start(options, move |commands, results| {
            let mut last = Vec::new();
            let none = TokenMasks::none(compute.capabilities.vocab_size);
            for command in commands {
                match command {
                    StepCommand::Attach(slot, setup) => {
                        // Fails only for a slot out of range, which the sender has checked.
                        let _ = compute.attach(slot, &setup.borrow());
                    }
                    StepCommand::Detach(slot) => compute.slots.detach(slot),
                    StepCommand::Step(mut batch) => {
                        let (mut scores, mut non_finite) = (Vec::new(), NonFiniteRows::default());
                        let forward = compute.forward(&mut batch, &mut last, &mut scores, &mut non_finite);
                        let step_masks = if batch.masked_rows() > 0 {
                            // Also after an error: the masks of this step are not those of the next.
                            let Ok(masks) = supplied.recv() else { return }; // the runtime was dropped
                            Some(masks)
                        } else {
                            None
                        };
                        let mut predictions = Predictions::default();
                        let outcome = forward.and_then(|forward| {
                            let masks = step_masks.as_ref().unwrap_or(&none);
                            let (last, rows) = (&mut last, &mut non_finite);
                            Ok(forward + compute.sample(&batch, masks, last, rows, &mut predictions)?)
                        });
                        let sampled = last.clone();
                        let done = StepResult { outcome, sampled, scores, non_finite, predictions, batch };
                        if results.send(done).is_err() {
                            return; // the runtime was dropped
                        }
                    }
                }
            }
        })?;
        let (spare, scores, non_finite) = (Vec::new(), Vec::new(), NonFiniteRows::default());
        let (predictions, unmasked) = (Predictions::default(), VecDeque::new());
        let in_flight = 0;
        Ok(Self {
            capabilities,
            masks,
            thread,
            copies,
            in_flight,
            spare,
            scores,
            non_finite,
            predictions,
            unmasked,
        })
    }

    fn send(&self, command: StepCommand) -> Result<(), Error> {
        self.thread.send(command).map_err(|ThreadEnded| thread_ended())
    }
}

fn thread_ended() -> Error {
    Error::Device("the thread that runs the steps is gone".to_owned())
}

impl Runtime for Overlapped {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn attach(&mut self, slot: Slot, setup: &SlotSetup<'_>) -> Result<(), Error> {
        self.capabilities.check_slot(slot)?;
        self.send(StepCommand::Attach(slot, setup.into()))
    }

    fn detach(&mut self, slot: Slot) {
        // If the thread has ended, the next step reports it.
        let _ = self.send(StepCommand::Detach(slot));
    }

    fn launch(&mut self, batch: &mut Batch) -> Result<(), Error> {
        batch.check(&self.capabilities)?;
        if self.in_flight == DEPTH {
            return Err(Error::Malformed("as many steps are launched as there may be".to_owned()));
        }
        let masked = batch.masked_rows();
        let launched = std::mem::replace(batch, self.spare.pop().unwrap_or_default());
        self.send(StepCommand::Step(launched))?;
        self.in_flight += 1;
        self.unmasked.push_back((masked > 0).then_some(masked));
        Ok(())
    }

    fn supply_masks(&mut self, masks: &mut TokenMasks) -> Result<(), Error> {
        let lacking = self.unmasked.iter_mut().find(|rows| rows.is_some());
        let lacking = lacking.ok_or_else(Error::no_step_lacks_masks)?;
        if *lacking != Some(masks.rows()) {
            let reason = format!("{} masks were supplied for {lacking:?} rows", masks.rows());
            return Err(Error::Malformed(reason));
        }
        *lacking = None;
        self.masks.send(std::mem::take(masks)).map_err(|_| thread_ended())
    }

    fn complete(&mut self, sampled: &mut Vec<Sampled>) -> Result<Duration, Error> {
        if self.in_flight == 0 {
            return Err(Error::Malformed("no step was launched".to_owned()));
        }
        if self.unmasked.front().is_some_and(Option::is_some) {
            return Err(Error::Malformed("the step lacks its token masks".to_owned()));
        }
        let done = self.thread.results().recv().map_err(|_| thread_ended())?;
        let StepResult { outcome, sampled: mut got, scores, non_finite, predictions, batch } = done;
        (self.scores, self.non_finite, self.predictions) = (scores, non_finite, predictions);
        self.in_flight -= 1;
        self.unmasked.pop_front();
        self.spare.push(batch);
        sampled.clear();
        sampled.append(&mut got);
        outcome
    }

    fn take_scores(&mut self, scores: &mut Vec<PromptLogprobs>) {
        scores.append(&mut self.scores);
    }

    fn take_non_finite(&mut self, rows: &mut NonFiniteRows) {
        rows.clear();
        std::mem::swap(rows, &mut self.non_finite);
    }

    fn take_predictions(&mut self, predictions: &mut Predictions) {
        predictions.clear();
        std::mem::swap(predictions, &mut self.predictions);
    }

    fn start_transfer(&mut self, transfer: &Transfer) -> Result<(), Error> {
        self.copies.submit(transfer)
    }

    fn finished_transfers(&mut self, finished: &mut Vec<TransferDone>) {
        self.copies.finished(finished);
    }

    fn wait_for_transfer(&mut self) -> Result<(), Error> {
        self.copies.wait()
    }
}
