use std::collections::HashMap;
use std::fmt::Display;
use std::time::Duration;

use tonic::metadata::MetadataMap;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// What became of a request: the closed list. Every call ends in exactly one of these, and what a client sees
/// is decided here alone.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Outcome {
    /// All choices ended and were delivered.
    Completed,
    /// The request breaks a rule; the message names the field.
    Invalid(String),
    /// No worker serves that model.
    UnknownModel { asked: String, served: Vec<String> },
    /// A chat was sent to a model without a chat template.
    NoChatTemplate { model: String },
    /// A bound of the router is reached.
    Full { what: String, retry: Duration },
    /// No worker has ever been reached.
    NeverConnected { workers: usize },
    /// All workers of the model are lost and none came back in time.
    Unserved { model: String, waited: Duration },
    /// The request was handed over as often as is allowed, and lost each time.
    AttemptsExhausted { attempts: u32 },
    /// The call's deadline passed.
    DeadlineExceeded,
    /// The client went away.
    Cancelled,
    /// A worker ended the request with an error of its own.
    WorkerError { code: Code, message: String },
    /// A worker broke the protocol, or the router itself failed.
    Internal(String),
}

impl Outcome {
    /// A request that breaks a rule.
    pub(crate) fn invalid(reason: impl Display) -> Self {
        Self::Invalid(reason.to_string())
    }

    /// The status a client sees.
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Completed => Code::Ok,
            Self::Invalid(_) => Code::InvalidArgument,
            Self::UnknownModel { .. } => Code::NotFound,
            Self::NoChatTemplate { .. } => Code::FailedPrecondition,
            Self::Full { .. } => Code::ResourceExhausted,
            Self::NeverConnected { .. } | Self::Unserved { .. } | Self::AttemptsExhausted { .. } => {
                Code::Unavailable
            }
            Self::DeadlineExceeded => Code::DeadlineExceeded,
            Self::Cancelled => Code::Cancelled,
            Self::WorkerError { code, .. } => match code {
                // Parameters were checked before, so a worker that still refuses them says something new.
                Code::InvalidArgument | Code::ResourceExhausted | Code::FailedPrecondition => *code,
                Code::DeadlineExceeded => Code::DeadlineExceeded,
                _ => Code::Internal,
            },
            Self::Internal(_) => Code::Internal,
        }
    }

    /// A stable, lower-case label for metrics and logs.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Invalid(_) => "invalid",
            Self::UnknownModel { .. } => "unknown_model",
            Self::NoChatTemplate { .. } => "no_chat_template",
            Self::Full { .. } => "full",
            Self::NeverConnected { .. } => "never_connected",
            Self::Unserved { .. } => "unserved",
            Self::AttemptsExhausted { .. } => "attempts_exhausted",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Cancelled => "cancelled",
            Self::WorkerError { .. } => "worker_error",
            Self::Internal(_) => "internal",
        }
    }

    fn message(&self) -> String {
        match self {
            Self::Completed => String::new(),
            Self::Invalid(reason) | Self::Internal(reason) => reason.clone(),
            Self::UnknownModel { asked, served } => {
                format!("no worker serves the model {asked:?}; served are: {}", served.join(", "))
            }
            Self::NoChatTemplate { model } => {
                format!("the model {model:?} has no chat template; send text or token ids")
            }
            Self::Full { what, .. } => what.clone(),
            Self::NeverConnected { workers } => {
                format!("none of the {workers} configured workers has been reached yet; try again later")
            }
            Self::Unserved { model, waited } => format!(
                "no worker serving {model:?} is connected, and none came back within {} s; try again later",
                waited.as_secs_f64()
            ),
            Self::AttemptsExhausted { attempts } => {
                format!("the request was handed to {attempts} workers and each was lost; try again later")
            }
            Self::DeadlineExceeded => "the call's deadline passed".to_owned(),
            Self::Cancelled => "the call was cancelled".to_owned(),
            Self::WorkerError { message, .. } => format!("the worker could not go on: {message}"),
        }
    }

    /// The status with its details: full queues say when to come back, both as google.rpc.RetryInfo and as
    /// gRPC's own pushback.
    pub(crate) fn into_status(self) -> Status {
        let (code, message) = (self.code(), self.message());
        let mut details = ErrorDetails::new();
        details.set_error_info(self.label().to_ascii_uppercase(), "inflight", HashMap::new());
        let mut metadata = MetadataMap::new();
        if let Self::Full { retry, .. } = self {
            details.set_retry_info(Some(retry));
            if let Ok(value) = retry.as_millis().to_string().parse() {
                metadata.insert("grpc-retry-pushback-ms", value);
            }
        }
        Status::with_error_details_and_metadata(code, message, details, metadata)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_outcomes_and_statuses() {
        let text = || "why".to_owned();
        let second = Duration::from_secs(1);
        let worker = |code| Outcome::WorkerError { code, message: text() };
        let table = [
            (Outcome::Completed, Code::Ok, "completed"),
            (Outcome::Invalid(text()), Code::InvalidArgument, "invalid"),
            (Outcome::UnknownModel { asked: text(), served: vec![] }, Code::NotFound, "unknown_model"),
            (Outcome::NoChatTemplate { model: text() }, Code::FailedPrecondition, "no_chat_template"),
            (Outcome::Full { what: text(), retry: second }, Code::ResourceExhausted, "full"),
            (Outcome::NeverConnected { workers: 2 }, Code::Unavailable, "never_connected"),
            (Outcome::Unserved { model: text(), waited: second }, Code::Unavailable, "unserved"),
            (Outcome::AttemptsExhausted { attempts: 4 }, Code::Unavailable, "attempts_exhausted"),
            (Outcome::DeadlineExceeded, Code::DeadlineExceeded, "deadline_exceeded"),
            (Outcome::Cancelled, Code::Cancelled, "cancelled"),
            (worker(Code::ResourceExhausted), Code::ResourceExhausted, "worker_error"),
            (worker(Code::InvalidArgument), Code::InvalidArgument, "worker_error"),
            (worker(Code::Unknown), Code::Internal, "worker_error"),
            (worker(Code::Ok), Code::Internal, "worker_error"),
            (Outcome::Internal(text()), Code::Internal, "internal"),
        ];
        for (outcome, code, label) in table {
            assert_eq!((outcome.code(), outcome.label()), (code, label));
            let status = outcome.clone().into_status();
            assert_eq!(status.code(), code);
            assert_eq!(status.message(), outcome.message());
            let retry = status.get_details_retry_info().and_then(|info| info.retry_delay);
            let pushback =
                status.metadata().get("grpc-retry-pushback-ms").map(|v| v.to_str().unwrap().to_owned());
            match outcome {
                Outcome::Full { .. } => {
                    assert_eq!((retry, pushback.as_deref()), (Some(second), Some("1000")));
                }
                _ => assert_eq!((retry, pushback), (None, None)),
            }
            if code != Code::Ok {
                let info = status.get_details_error_info().unwrap();
                assert_eq!(info.reason, label.to_ascii_uppercase());
            }
        }
    }
}
