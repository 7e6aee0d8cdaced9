//! Worker side of a session with a router, and of an observation.

pub use inflight_proto::v1::session_request::Message as Command;
use inflight_proto::v1::{self, session_response::Message};
use tokio::sync::mpsc;
use tonic::Status;

/// Worker side of an observation.
pub struct ScriptedObservation {
    pub(crate) responses: mpsc::UnboundedSender<Result<v1::ObserveResponse, Status>>,
}

impl ScriptedObservation {
    /// Sends a response to the observer.
    pub fn send(&self, response: v1::ObserveResponse) {
        self.responses.send(Ok(response)).unwrap();
    }

    /// Waits until the router observes no more.
    pub async fn ended(&self) {
        self.responses.closed().await;
    }
}

/// Worker side of a session. Dropping it breaks the stream.
pub struct ScriptedSession {
    /// First message of the router.
    pub open: v1::SessionOpen,
    pub(crate) commands: mpsc::UnboundedReceiver<Command>,
    /// Received service counters of other incarnations.
    pub services: mpsc::UnboundedReceiver<v1::ServiceTable>,
    /// Received backlog reports.
    pub backlogs: mpsc::UnboundedReceiver<bool>,
    pub(crate) updates: mpsc::UnboundedSender<Result<v1::SessionResponse, Status>>,
}

impl ScriptedSession {
    /// Receives the next command.
    pub async fn command(&mut self) -> Command {
        self.commands.recv().await.expect("the router ended the session")
    }

    /// Receives the next command; `None` if the router ends the session first.
    pub async fn next(&mut self) -> Option<Command> {
        self.commands.recv().await
    }

    /// Returns a command that has already arrived.
    pub fn try_command(&mut self) -> Option<Command> {
        self.commands.try_recv().ok()
    }

    /// Receives the next command, which is a submission.
    pub async fn submit(&mut self) -> v1::Submit {
        match self.command().await {
            Command::Submit(submit) => submit,
            other => panic!("expected a submission, got {other:?}"),
        }
    }

    /// Receives the next submission; `None` if the router ends the session first.
    pub async fn submit_or_close(&mut self) -> Option<v1::Submit> {
        match self.commands.recv().await? {
            Command::Submit(submit) => Some(submit),
            other => panic!("expected a submission, got {other:?}"),
        }
    }

    /// Receives the next command, which is a cancellation.
    pub async fn cancel(&mut self) -> v1::Cancel {
        match self.command().await {
            Command::Cancel(cancel) => cancel,
            other => panic!("expected a cancel, got {other:?}"),
        }
    }

    /// Waits until the router ends the session, ignoring commands.
    pub async fn ended(&mut self) {
        while self.commands.recv().await.is_some() {}
    }

    /// Whether the router has ended the session.
    pub async fn closed(&mut self) -> bool {
        self.commands.recv().await.is_none()
    }

    /// Sends an update.
    pub fn update(&self, update: v1::Update) {
        // Fails if the router has closed the session.
        self.send(Message::Update(update));
    }

    /// Sends any message. Returns whether the session is open.
    pub fn send(&self, message: Message) -> bool {
        self.updates.send(Ok(v1::SessionResponse { message: Some(message) })).is_ok()
    }

    /// Grants credits.
    pub fn grant(&self, sequences: u32, blocks: u32) {
        self.update(v1::Update {
            grant: Some(v1::Grant { sequences, kv_blocks: blocks, priority_sequences: 0 }),
            ..Default::default()
        });
    }

    /// Sends an update of one sequence.
    pub fn sequence(&self, sequence: v1::SequenceUpdate) {
        self.update(v1::Update { sequences: vec![sequence], ..Default::default() });
    }

    /// Sends tokens of a choice.
    pub fn tokens(&self, submit: &v1::Submit, choice: u32, tokens: &[u32]) {
        self.sequence(sequence(submit, choice, tokens, v1::FinishReason::Unspecified));
    }

    /// Sends the last tokens of a choice.
    pub fn finish(&self, submit: &v1::Submit, choice: u32, tokens: &[u32], reason: v1::FinishReason) {
        self.sequence(sequence(submit, choice, tokens, reason));
    }

    /// Ends a choice with an error.
    pub fn fail(&self, submit: &v1::Submit, choice: u32, code: tonic::Code) {
        self.sequence(v1::SequenceUpdate {
            error: "scripted".to_owned(),
            error_code: code as i32,
            ..sequence(submit, choice, &[], v1::FinishReason::Error)
        });
    }

    /// Ends the session with an error.
    pub fn break_stream(self) {
        let _ = self.updates.send(Err(Status::unknown("scripted")));
    }
}

/// Returns the update of a choice.
pub fn sequence(
    submit: &v1::Submit,
    choice: u32,
    tokens: &[u32],
    reason: v1::FinishReason,
) -> v1::SequenceUpdate {
    v1::SequenceUpdate {
        submission_id: submit.submission_id,
        attempt: submit.attempt,
        choice,
        token_ids: tokens.to_vec(),
        finish_reason: reason.into(),
        ..Default::default()
    }
}
