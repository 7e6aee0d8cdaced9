//! Asynchronous CPU runtime: steps on a dedicated thread, fed through a command queue.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use inflight_contract::SamplingParams;
use inflight_worker_core::Transfer;

use super::super::{Batch, Capabilities, Error, Runtime, Sampled, Slot, SlotSetup, TransferDone};
use super::Compute;
use super::copy_thread::CopyThread;

/// Maximum steps launched and not completed.
const DEPTH: u32 = 2;
/// Capacity of the command queue: two steps, each of which attaches and detaches every slot at most.
const COMMANDS_MAX: usize = 1 << 14;

/// Command to the step thread.
enum StepCommand {
    Attach {
        slot: Slot,
        sampling: Arc<SamplingParams>,
        choice: u32,
        prompt: Vec<u32>,
        generated: Vec<u32>,
        eos_token_ids: Vec<u32>,
    },
    Detach(Slot),
    Step(Batch),
}

/// Result of a step, with the batch for reuse of its buffers.
struct StepResult {
    outcome: Result<Duration, Error>,
    sampled: Vec<Sampled>,
    batch: Batch,
}

/// CPU runtime whose steps run on a dedicated thread.
///
/// Commands are executed in order, so a slot detached after a launch is still attached in that step. A token
/// that one step samples and the next one needs does not leave the thread.
pub struct Overlapped {
    capabilities: Capabilities,
    commands: Option<SyncSender<StepCommand>>,
    done: Receiver<StepResult>,
    thread: Option<JoinHandle<()>>,
    copies: CopyThread,
    in_flight: u32,
    spare: Vec<Batch>,
}

impl Overlapped {
    pub(super) fn start(mut compute: Compute, copies: CopyThread) -> std::io::Result<Self> {
        let capabilities = Capabilities { depth: DEPTH, ..compute.capabilities.clone() };
        let (commands, inbox) = sync_channel(COMMANDS_MAX);
        let (outbox, done) = sync_channel(DEPTH as usize);
        let work = move || {
            let mut last = Vec::new();
            for command in inbox {
                match command {
                    StepCommand::Attach { slot, sampling, choice, prompt, generated, eos_token_ids } => {
                        let (prompt, generated) = (&prompt, &generated);
                        let eos_token_ids = &eos_token_ids;
                        let setup = SlotSetup { sampling, choice, prompt, generated, eos_token_ids };
                        // Fails only for a slot out of range, which the sender has checked.
                        let _ = compute.slots.attach(slot, &setup);
                    }
                    StepCommand::Detach(slot) => compute.slots.detach(slot),
                    StepCommand::Step(mut batch) => {
                        let outcome = compute.step(&mut batch, &mut last);
                        let done = StepResult { outcome, sampled: last.clone(), batch };
                        if outbox.send(done).is_err() {
                            return; // the runtime was dropped
                        }
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("steps".to_owned()).spawn(work)?;
        Ok(Self {
            capabilities,
            commands: Some(commands),
            done,
            thread: Some(thread),
            copies,
            in_flight: 0,
            spare: Vec::new(),
        })
    }

    fn send(&self, command: StepCommand) -> Result<(), Error> {
        let sent = self.commands.as_ref().is_some_and(|commands| commands.send(command).is_ok());
        if sent { Ok(()) } else { Err(thread_ended()) }
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
        if slot >= self.capabilities.slots {
            let slots = self.capabilities.slots;
            return Err(Error::Malformed(format!("slot {slot} is out of range: there are {slots}")));
        }
        self.send(StepCommand::Attach {
            slot,
            sampling: setup.sampling.clone(),
            choice: setup.choice,
            prompt: setup.prompt.to_vec(),
            generated: setup.generated.to_vec(),
            eos_token_ids: setup.eos_token_ids.to_vec(),
        })
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
        let StepResult { outcome, sampled: mut got, batch } = self.done.recv().map_err(|_| thread_ended())?;
        self.in_flight -= 1;
        self.spare.push(batch);
        sampled.clear();
        sampled.append(&mut got);
        outcome
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

impl Drop for Overlapped {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            // Drain the results, as the thread may block on sending one.
            while self.done.recv().is_ok() {}
            // A panic was logged by the panic hook.
            let _ = thread.join();
        }
    }
}
