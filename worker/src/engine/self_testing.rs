//! The first self-test, whose answer is recorded before a worker serves.

use inflight_worker_core::Time;

use super::{Command, Engine, EngineFailed};
use crate::self_test::{SelfTest, SelfTestFailed};

impl From<SelfTestFailed> for EngineFailed {
    fn from(failed: SelfTestFailed) -> Self {
        Self(failed.to_string())
    }
}

impl Engine {
    /// Runs a self-test while the engine has no other work, and records its answer.
    ///
    /// # Errors
    /// The device failed, or the test did.
    pub(crate) fn record_self_test(&mut self, test: &mut SelfTest) -> Result<(), EngineFailed> {
        let Some(request) = test.start(Time::ZERO) else { return Ok(()) };
        let mut events = Vec::new();
        self.command(Command::Submit(Box::new(request)), Time::ZERO, &mut events);
        loop {
            for event in events.drain(..) {
                if test.take(&event, Time::ZERO)?.is_some() {
                    return Ok(());
                }
            }
            if self.step(Time::ZERO, &mut events)?.idle && events.is_empty() {
                return Ok(());
            }
        }
    }
}
