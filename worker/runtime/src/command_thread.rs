//! Command thread: a thread that executes commands in order and returns results, for devices that work while
//! the engine plans.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use metrics::Gauge;

/// Handle of a thread that receives commands `C` in order and sends results `R`.
///
/// Dropping the handle closes the command queue and waits for the thread, which executes what is queued.
pub struct CommandThread<C, R> {
    commands: Option<SyncSender<C>>,
    queued: Gauge,
    results: Receiver<R>,
    thread: Option<JoinHandle<()>>,
}

/// Configuration of a [`CommandThread`].
pub struct CommandThreadOptions {
    /// Name of the thread.
    pub name: String,
    /// Maximum queued commands; senders of more block.
    pub commands_max: usize,
    /// Maximum results that were not received; the thread blocks on more.
    pub results_max: usize,
    /// Gauge of the queued commands.
    pub queued: Gauge,
}

/// The command thread has ended: it panicked, or it stopped after an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the thread has ended")]
pub struct ThreadEnded;

/// Receiving end of a command queue; iteration ends when the handle is closed.
pub struct CommandQueue<C> {
    inbox: Receiver<C>,
    queued: Gauge,
}

impl<C> Iterator for CommandQueue<C> {
    type Item = C;

    fn next(&mut self) -> Option<C> {
        let command = self.inbox.recv().ok()?;
        self.queued.decrement(1.0);
        Some(command)
    }
}

impl<C: Send + 'static, R: Send + 'static> CommandThread<C, R> {
    /// Starts a thread that runs `body`.
    ///
    /// # Errors
    /// Starting the thread failed.
    pub fn start(
        options: CommandThreadOptions,
        body: impl FnOnce(CommandQueue<C>, SyncSender<R>) + Send + 'static,
    ) -> std::io::Result<Self> {
        let CommandThreadOptions { name, commands_max, results_max, queued } = options;
        let (commands, inbox) = sync_channel(commands_max);
        let (outbox, results) = sync_channel(results_max);
        queued.set(0.0);
        let inbox = CommandQueue { inbox, queued: queued.clone() };
        let thread = std::thread::Builder::new().name(name).spawn(move || body(inbox, outbox))?;
        Ok(Self { commands: Some(commands), queued, results, thread: Some(thread) })
    }
}

impl<C, R> CommandThread<C, R> {
    /// Queues a command; blocks while the queue is full.
    ///
    /// # Errors
    /// [`ThreadEnded`], also after [`CommandThread::close`].
    pub fn send(&self, command: C) -> Result<(), ThreadEnded> {
        let commands = self.commands.as_ref().ok_or(ThreadEnded)?;
        self.queued.increment(1.0);
        commands.send(command).map_err(|_| ThreadEnded)
    }

    /// Results in the order of the thread. Disconnected once the thread has ended.
    pub fn results(&self) -> &Receiver<R> {
        &self.results
    }

    /// Closes the command queue; the thread ends after the commands in it.
    pub fn close(&mut self) {
        self.commands = None;
    }
}

impl<C, R> Drop for CommandThread<C, R> {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            // Drain the results, as the thread may block on sending one.
            while self.results.recv().is_ok() {}
            // A panic was logged by the panic hook.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> CommandThreadOptions {
        CommandThreadOptions {
            name: "test".to_owned(),
            commands_max: 8,
            results_max: 1,
            queued: Gauge::noop(),
        }
    }

    #[test]
    fn commands_are_executed_in_order_and_dropping_the_handle_waits_for_all_of_them() {
        let (witness, executed) = std::sync::mpsc::channel();
        let thread = CommandThread::start(options(), move |commands, results| {
            for command in commands {
                // More results than the queue holds: dropping the handle must drain them.
                results.send(command * 2).unwrap();
                witness.send(command).unwrap();
            }
        });
        let thread = thread.unwrap();
        (0..8).for_each(|command| thread.send(command).unwrap());
        assert_eq!(thread.results().recv(), Ok(0));
        drop(thread);
        assert_eq!(executed.iter().collect::<Vec<i32>>(), (0..8).collect::<Vec<_>>());
    }

    #[test]
    fn a_thread_that_has_ended_takes_no_command_and_disconnects_its_results() {
        // The results disconnect last, so that the command queue is certainly closed by then.
        let ended = |commands: CommandQueue<()>, results: SyncSender<()>| {
            drop(commands);
            drop(results);
        };
        let thread = CommandThread::start(options(), ended).unwrap();
        assert!(thread.results().recv().is_err());
        assert_eq!(thread.send(()), Err(ThreadEnded));
        let mut closed =
            CommandThread::<(), ()>::start(options(), |commands, _| commands.for_each(drop)).unwrap();
        closed.close();
        assert_eq!(closed.send(()), Err(ThreadEnded));
    }
}
