//! End of a request from outside: by its client, its deadline or the loss of its model.

use super::Dispatcher;
use super::request::Phase;
use crate::{ClientCommand, Command, Failure, RequestId};

impl Dispatcher {
    /// Ends a request with an error.
    pub(super) fn end(&mut self, request: RequestId, failure: Failure) {
        self.cancel_everywhere(request);
        self.commands.push(Command::Client { request, command: ClientCommand::Fail(failure) });
    }

    /// Removes a request from the queue or its worker.
    pub(super) fn cancel_everywhere(&mut self, request: RequestId) {
        let Some(request) = self.requests.get_mut(request) else { return };
        self.lanes.touch(request.spec.lane);
        match request.end() {
            Phase::Queued(position) => self.queue.remove(&position),
            Phase::Running { worker, session, submission } => {
                let session = self.sessions.session_mut(worker, session);
                if let Some(session) = session {
                    session.cancel(submission, &mut self.commands);
                }
            }
            // The retry queue and the quarantine skip ended requests.
            Phase::AwaitingRetry | Phase::Quarantined | Phase::Paused | Phase::Ended => {}
        }
        if let Some(position) = request.position.take() {
            self.queue.depart(&position);
        }
    }
}
