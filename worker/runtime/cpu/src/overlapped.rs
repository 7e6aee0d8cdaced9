//! Asynchronous CPU runtime: steps on a dedicated thread, fed through a command queue.

use std::time::Duration;

use inflight_runtime::{
    Batch, Capabilities, CommandThread, CommandThreadOptions, Error, OwnedSlotSetup, PromptLogprobs, Runtime,
    Sampled, Slot, SlotSetup, ThreadEnded, TransferDone,
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
    batch: Batch,
}

/// CPU runtime whose steps run on a dedicated thread.
///
/// Commands are executed in order, so a slot detached after a launch is still attached in that step. A token
/// that one step samples and the next one needs does not leave the thread.
pub struct Overlapped {
    capabilities: Capabilities,
    thread: CommandThread<StepCommand, StepResult>,
    copies: CopyThread,
    in_flight: u32,
    spare: Vec<Batch>,
    /// Scores of the step completed last.
    scores: Vec<PromptLogprobs>,
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
        let thread = CommandThread::start(options, move |commands, results| {
            let mut last = Vec::new();
            for command in commands {
                match command {
                    StepCommand::Attach(slot, setup) => {
                        // Fails only for a slot out of range, which the sender has checked.
                        let _ = compute.slots.attach(slot, &setup.borrow());
                    }
                    StepCommand::Detach(slot) => compute.slots.detach(slot),
                    StepCommand::Step(mut batch) => {
                        let mut scores = Vec::new();
                        let outcome = compute.step(&mut batch, &mut last, &mut scores);
                        let done = StepResult { outcome, sampled: last.clone(), scores, batch };
                        if results.send(done).is_err() {
                            return; // the runtime was dropped
                        }
                    }
                }
            }
        })?;
        Ok(Self { capabilities, thread, copies, in_flight: 0, spare: Vec::new(), scores: Vec::new() })
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
        let launched = std::mem::replace(batch, self.spare.pop().unwrap_or_default());
        self.send(StepCommand::Step(launched))?;
        self.in_flight += 1;
        Ok(())
    }

    fn complete(&mut self, sampled: &mut Vec<Sampled>) -> Result<Duration, Error> {
        if self.in_flight == 0 {
            return Err(Error::Malformed("no step was launched".to_owned()));
        }
        let done = self.thread.results().recv().map_err(|_| thread_ended())?;
        let StepResult { outcome, sampled: mut got, scores, batch } = done;
        self.scores = scores;
        self.in_flight -= 1;
        self.spare.push(batch);
        sampled.clear();
        sampled.append(&mut got);
        outcome
    }

    fn take_scores(&mut self, scores: &mut Vec<PromptLogprobs>) {
        scores.append(&mut self.scores);
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
