//! Outcome of a request, and its gRPC status.

use std::collections::HashMap;
use std::fmt::Display;
use std::time::Duration;

use inflight_router_core::{Failure, OverLimit, QueueFull};
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

/// Exceeded limit, with the time to retry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Overload {
    /// Description for people.
    what: String,
    /// Stable name of the limit.
    quota: &'static str,
    /// Owner of the limit: `router`, or `tenant:NAME`.
    subject: String,
    retry: Duration,
}

impl Overload {
    /// Retry delay if unknown.
    const RETRY: Duration = Duration::from_secs(1);

    /// Limit of the router.
    pub(crate) fn of_router(what: String, quota: &'static str, retry: Duration) -> Self {
        Self { what, quota, subject: "router".to_owned(), retry }
    }

    /// Bound of the queue.
    pub(crate) fn of_queue(full: &QueueFull, retry: Duration) -> Self {
        let subject = full.tenant.as_ref().map_or("router".to_owned(), |tenant| format!("tenant:{tenant}"));
        Self { what: full.to_string(), quota: full.quota(), subject, retry }
    }

    /// Limit of a tenant.
    pub(crate) fn of_tenant(over: &OverLimit, tenant: &str) -> Self {
        let retry = over.wait().unwrap_or(Self::RETRY);
        let what =
            format!("the tenant {tenant:?} may have no {over}; try again in {} s", retry.as_secs_f64());
        Self { what, quota: over.quota(), subject: format!("tenant:{tenant}"), retry }
    }
}

/// Outcome of a request. Every call ends in exactly one of these, and only they decide what a client sees.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Outcome {
    /// All choices ended and were delivered.
    Completed,
    /// Invalid request; the message names the field.
    Invalid(String),
    /// No worker serves the model.
    UnknownModel { asked: String, served: Vec<String> },
    /// Chat input for a model without a chat template.
    NoChatTemplate { model: String },
    /// No worker has the required fingerprint.
    UnknownFingerprint { required: String, served: Vec<String> },
    /// Unknown key or certificate.
    Unauthenticated(String),
    /// The caller lacks permission.
    Denied(String),
    /// A limit of the router or its queue is exceeded.
    Full(Box<Overload>),
    /// A limit of the tenant is exceeded.
    Limited(Box<Overload>),
    /// Displaced in a full queue by a request of a higher priority or of a tenant that holds less.
    Displaced { retry: Duration },
    /// The deadline would pass before the first token.
    Infeasible { predicted: Duration, left: Duration },
    /// No worker has ever been connected.
    NeverConnected { workers: usize },
    /// All workers of the model were lost and none returned in time.
    Unserved { model: String, waited: Duration },
    /// The router drains.
    Draining,
    /// Several workers in a row were lost before the first token, the last while it ran alone.
    AttemptsExhausted { attempts: u32 },
    /// The client left output unread for too long.
    ClientStalled { waited: Duration },
    /// The deadline has passed.
    DeadlineExceeded,
    /// The client has cancelled.
    Cancelled,
    /// Error of a worker.
    WorkerError { code: Code, message: String },
    /// Protocol violation by a worker, or an internal error of the router.
    Internal(String),
}

impl Outcome {
    /// Returns the outcome of an invalid request.
    pub(crate) fn invalid(reason: impl Display) -> Self {
        Self::Invalid(reason.to_string())
    }

    /// Returns the outcome of a request that the dispatcher has failed. `waited` is the time that requests wait
    /// for a worker of their model, `retry` the delay after which a client may try a full queue again.
    pub(crate) fn of_failure(failure: Failure, model: &str, waited: Duration, retry: Duration) -> Self {
        match failure {
            Failure::TooManyTokens { tokens, most } => Self::Invalid(format!(
                "prompt and n * max_tokens come to {tokens} tokens, more than the {most} that the router keeps for a request; lower n or max_tokens"
            )),
            Failure::TooLongForWorkers { tokens } => Self::Invalid(format!(
                "prompt and max_tokens come to {tokens} tokens, more than the workers now connected can hold"
            )),
            Failure::Unserved => Self::Unserved { model: model.to_owned(), waited },
            Failure::UnknownFingerprint { required, served } => Self::UnknownFingerprint { required, served },
            Failure::QueueFull(full) => Self::Full(Box::new(Overload::of_queue(&full, retry))),
            Failure::Displaced => Self::Displaced { retry },
            Failure::Infeasible { predicted, left } => Self::Infeasible { predicted, left },
            Failure::DeadlineExceeded => Self::DeadlineExceeded,
            Failure::AttemptsExhausted { attempts } => Self::AttemptsExhausted { attempts },
            Failure::Worker { code, message } => Self::WorkerError { code: Code::from_i32(code), message },
            Failure::ClientStalled { waited } => Self::ClientStalled { waited },
        }
    }

    /// Returns the gRPC status code.
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Completed => Code::Ok,
            Self::Invalid(_) => Code::InvalidArgument,
            Self::UnknownModel { .. } => Code::NotFound,
            Self::NoChatTemplate { .. } | Self::UnknownFingerprint { .. } => Code::FailedPrecondition,
            Self::Unauthenticated(_) => Code::Unauthenticated,
            Self::Denied(_) => Code::PermissionDenied,
            Self::Full(_) | Self::Limited(_) | Self::Displaced { .. } | Self::Infeasible { .. } => {
                Code::ResourceExhausted
            }
            Self::NeverConnected { .. } | Self::Unserved { .. } | Self::Draining => Code::Unavailable,
            Self::ClientStalled { .. } => Code::Aborted,
            Self::DeadlineExceeded => Code::DeadlineExceeded,
            Self::Cancelled => Code::Cancelled,
            Self::WorkerError { code, .. } => match code {
                // Parameters were validated before, so this rejection by a worker is new information.
                Code::InvalidArgument | Code::ResourceExhausted | Code::FailedPrecondition => *code,
                Code::DeadlineExceeded => Code::DeadlineExceeded,
                _ => Code::Internal,
            },
            // Not UNAVAILABLE: clients would retry a request that may be the cause.
            Self::AttemptsExhausted { .. } | Self::Internal(_) => Code::Internal,
        }
    }

    /// Returns a stable, lower-case label for metrics and logs.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Invalid(_) => "invalid",
            Self::UnknownModel { .. } => "unknown_model",
            Self::NoChatTemplate { .. } => "no_chat_template",
            Self::UnknownFingerprint { .. } => "unknown_fingerprint",
            Self::Unauthenticated(_) => "unauthenticated",
            Self::Denied(_) => "denied",
            Self::Full(_) => "full",
            Self::Limited(_) => "limited",
            Self::Displaced { .. } => "displaced",
            Self::Infeasible { .. } => "deadline_infeasible",
            Self::NeverConnected { .. } => "never_connected",
            Self::Unserved { .. } => "unserved",
            Self::Draining => "draining",
            Self::AttemptsExhausted { .. } => "attempts_exhausted",
            Self::ClientStalled { .. } => "client_stalled",
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
            Self::UnknownFingerprint { required, served } => {
                let served = if served.is_empty() { "none".to_owned() } else { served.join(", ") };
                format!("no worker has the fingerprint {required:?}; those connected have: {served}")
            }
            Self::Unauthenticated(reason) | Self::Denied(reason) => reason.clone(),
            Self::Full(over) | Self::Limited(over) => over.what.clone(),
            Self::Displaced { .. } => {
                "evicted from the full queue by a request that goes first; try again later".to_owned()
            }
            Self::Infeasible { predicted, left } => format!(
                "the first token would come in about {:.3} s, but the deadline is in {:.3} s; try again later or allow more time",
                predicted.as_secs_f64(),
                left.as_secs_f64()
            ),
            Self::NeverConnected { workers } => {
                format!("none of the {workers} configured workers is connected yet; try again later")
            }
            Self::Unserved { model, waited } => format!(
                "no worker serving {model:?} is connected, and none came back within {} s; try again later",
                waited.as_secs_f64()
            ),
            Self::Draining => "the router is draining; retry on another one".to_owned(),
            Self::AttemptsExhausted { attempts } => {
                format!(
                    "{attempts} workers in a row were lost while running the request, the last one running nothing else: it may be the cause, so do not retry it"
                )
            }
            Self::ClientStalled { waited } => {
                format!("the client read nothing of its stream for {} s", waited.as_secs_f64())
            }
            Self::DeadlineExceeded => "the call's deadline passed".to_owned(),
            Self::Cancelled => "the call was cancelled".to_owned(),
            Self::WorkerError { message, .. } => format!("worker failed: {message}"),
        }
    }

    /// Returns the exceeded limit, its owner and the retry delay, for overload outcomes.
    fn overload(&self) -> Option<(&'static str, &str, Duration)> {
        match self {
            Self::Full(over) | Self::Limited(over) => Some((over.quota, &over.subject, over.retry)),
            Self::Displaced { retry } => Some(("queue", "router", *retry)),
            Self::Infeasible { predicted, left } => {
                Some(("deadline", "router", predicted.saturating_sub(*left).max(Duration::from_millis(1))))
            }
            _ => None,
        }
    }

    /// Returns the status with its details. Overload names the exceeded limit (google.rpc.QuotaFailure) and
    /// the retry delay, both as google.rpc.RetryInfo and as gRPC's own pushback.
    pub(crate) fn into_status(self) -> Status {
        let (code, message) = (self.code(), self.message());
        let mut details = ErrorDetails::new();
        details.set_error_info(self.label().to_ascii_uppercase(), "inflight", HashMap::new());
        let mut metadata = MetadataMap::new();
        if let Some((quota, subject, retry)) = self.overload() {
            details.add_quota_failure_violation(subject, quota);
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
        let overload = || Box::new(Overload::of_router(text(), "streams", second));
        let worker = |code| Outcome::WorkerError { code, message: text() };
        let table = [
            (Outcome::Completed, Code::Ok, "completed"),
            (Outcome::Invalid(text()), Code::InvalidArgument, "invalid"),
            (Outcome::UnknownModel { asked: text(), served: vec![] }, Code::NotFound, "unknown_model"),
            (Outcome::NoChatTemplate { model: text() }, Code::FailedPrecondition, "no_chat_template"),
            (Outcome::Unauthenticated(text()), Code::Unauthenticated, "unauthenticated"),
            (Outcome::Denied(text()), Code::PermissionDenied, "denied"),
            (Outcome::Full(overload()), Code::ResourceExhausted, "full"),
            (Outcome::Limited(overload()), Code::ResourceExhausted, "limited"),
            (Outcome::Displaced { retry: second }, Code::ResourceExhausted, "displaced"),
            (
                Outcome::Infeasible { predicted: 2 * second, left: second },
                Code::ResourceExhausted,
                "deadline_infeasible",
            ),
            (Outcome::NeverConnected { workers: 2 }, Code::Unavailable, "never_connected"),
            (Outcome::Unserved { model: text(), waited: second }, Code::Unavailable, "unserved"),
            (Outcome::Draining, Code::Unavailable, "draining"),
            (Outcome::AttemptsExhausted { attempts: 4 }, Code::Internal, "attempts_exhausted"),
            (Outcome::ClientStalled { waited: second }, Code::Aborted, "client_stalled"),
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
            let quotas = status.get_details_quota_failure().map_or(0, |quota| quota.violations.len());
            if code == Code::ResourceExhausted && label != "worker_error" {
                assert_eq!((retry, pushback.as_deref(), quotas), (Some(second), Some("1000"), 1), "{label}");
            } else {
                assert_eq!((retry, pushback, quotas), (None, None, 0), "{label}");
            }
            if code != Code::Ok {
                let info = status.get_details_error_info().unwrap();
                assert_eq!(info.reason, label.to_ascii_uppercase());
            }
        }
    }
}
