//! Outcome of a request, its gRPC status and its HTTP status.

mod context_excess;

use std::collections::HashMap;
use std::fmt::Display;
use std::time::Duration;

use inflight_router_core::{Failure, OverLimit, QueueFull};
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

pub(crate) use context_excess::ContextExcess;

/// Exceeded limit, with the time to retry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Overload {
    /// Description for people.
    what: String,
    /// Stable name of the limit.
    quota: &'static str,
    /// Owner of the limit: `router`, `address`, or `tenant:NAME`.
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

    /// Rate of failed API keys of a client address.
    pub(crate) fn of_address(what: String, quota: &'static str, retry: Duration) -> Self {
        Self { what, quota, subject: "address".to_owned(), retry }
    }

    /// Bound of the queue.
    pub(crate) fn of_queue(full: &QueueFull, retry: Duration) -> Self {
        let subject = full.tenant.as_ref().map_or("router".to_owned(), |tenant| format!("tenant:{tenant}"));
        Self { what: full.to_string(), quota: full.quota(), subject, retry }
    }

    /// Limit of a tenant.
    pub(crate) fn of_tenant(over: &OverLimit, tenant: &str) -> Self {
        let (quota, retry) = (over.quota(), over.wait().unwrap_or(Self::RETRY));
        let what = format!(
            "the tenant {tenant:?} may have no {over} ({quota} in the tenants file); try again in {} s",
            retry.as_secs_f64()
        );
        Self { what, quota, subject: format!("tenant:{tenant}"), retry }
    }
}

/// Maximum length of a message in bytes. In gRPC it travels in headers, percent-encoded and again in the details; many clients
/// accept 8 KiB of headers.
const MESSAGE_BYTES_MAX: usize = 1024;
/// Maximum length of the name of a field in bytes: a client chooses names of tensors and parameters.
const FIELD_BYTES_MAX: usize = 256;

/// Maximum length in bytes of a path that a message quotes before advice.
const PATH_BYTES_MAX: usize = 128;

/// Marks a text that was cut.
const ELLIPSIS: char = '\u{2026}';

/// Returns `text`, cut to `bytes_max` bytes with an ellipsis if it is longer.
fn shortened(mut text: String, bytes_max: usize) -> String {
    if text.len() > bytes_max {
        text.truncate(text.floor_char_boundary(bytes_max - ELLIPSIS.len_utf8()));
        text.push(ELLIPSIS);
    }
    text
}

/// HTTP status of an outcome, and its names in the error envelopes of OpenAI's and Anthropic's APIs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HttpError {
    pub(crate) status: u16,
    pub(crate) openai_type: &'static str,
    pub(crate) openai_code: Option<&'static str>,
    pub(crate) anthropic_type: &'static str,
}

/// Outcome of a request. Every call ends in exactly one of these, and only they decide what a client sees.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Outcome {
    /// All choices ended and were delivered.
    Completed,
    /// Invalid request; the message names the field.
    Invalid(String),
    /// Invalid field of a request.
    InvalidField { field: String, reason: String },
    /// Prompt and output together exceed the model's context.
    ContextExceeded(Box<ContextExcess>),
    /// The request's message exceeds the size limit.
    TooLarge(String),
    /// The request's message did not arrive in time.
    ReceiveTimeout(String),
    /// The API has no such path; `instead` says where to go.
    UnknownPath { path: String, instead: Option<String> },
    /// A gRPC call in a form of HTTP that cannot carry it.
    WrongTransport(&'static str),
    /// The path does not take this method.
    WrongMethod { method: String, path: String },
    /// No worker serves the model.
    UnknownModel { asked: String, served: Vec<String> },
    /// The model has no such version.
    UnknownVersion { model: String, version: String, served: &'static str },
    /// The body of a request is encoded in a way that is not read; `header` says so.
    Undecodable { header: &'static str, reason: String },
    /// Chat input for a model without a chat template.
    NoChatTemplate { model: String, reason: Option<String> },
    /// No worker has the required fingerprint.
    UnknownFingerprint { required: String, served: Vec<String> },
    /// Cursor that is too old, or of another request.
    CursorRejected(String),
    /// A resumed stream whose worker generates other tokens than the client has received.
    ResumeDiverged { choice: u32 },
    /// Authentication failure: API key missing, malformed, unknown or expired, or certificate of no tenant.
    Unauthenticated(String),
    /// The caller lacks permission.
    Denied(String),
    /// A limit of the router or its queue is exceeded.
    Full(Box<Overload>),
    /// A limit of the tenant or of the client's address is exceeded.
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
    /// The usage log cannot be written, and requests that could not be billed are refused.
    UsageLogUnavailable,
    /// Several workers in a row were lost before the first token, the last while it ran alone.
    AttemptsExhausted { attempts: u32 },
    /// The model's logits were not finite on several attempts.
    NonFinite { choice: u32, tokens: u32, attempts: u32 },
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
                "prompt and n * max_tokens come to {tokens} tokens, more than the {most} that the router keeps for a request (--request-tokens-max); lower n or max_tokens"
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
            Failure::NonFinite { choice, tokens, attempts } => Self::NonFinite { choice, tokens, attempts },
            Failure::Worker { code, message } => Self::WorkerError { code: Code::from_i32(code), message },
            Failure::ClientStalled { waited } => Self::ClientStalled { waited },
        }
    }

    /// Returns the outcome of an invalid field.
    pub(crate) fn field(field: impl Into<String>, reason: impl Display) -> Self {
        Self::InvalidField { field: field.into(), reason: reason.to_string() }
    }

    /// Returns the outcome of a path behind which nothing is.
    pub(crate) fn unknown_path(path: impl Into<String>) -> Self {
        Self::UnknownPath { path: path.into(), instead: None }
    }

    /// Returns the gRPC status code.
    pub(crate) fn code(&self) -> Code {
        match self {
            Self::Completed => Code::Ok,
            Self::Invalid(_) | Self::InvalidField { .. } | Self::ContextExceeded(_) => Code::InvalidArgument,
            Self::TooLarge(_) => Code::ResourceExhausted,
            Self::UnknownPath { .. } | Self::WrongMethod { .. } | Self::WrongTransport(_) => {
                Code::Unimplemented
            }
            Self::UnknownModel { .. } | Self::UnknownVersion { .. } => Code::NotFound,
            Self::Undecodable { .. } => Code::InvalidArgument,
            Self::NoChatTemplate { .. }
            | Self::UnknownFingerprint { .. }
            | Self::CursorRejected(_)
            | Self::ResumeDiverged { .. } => Code::FailedPrecondition,
            Self::Unauthenticated(_) => Code::Unauthenticated,
            Self::Denied(_) => Code::PermissionDenied,
            Self::Full(_) | Self::Limited(_) | Self::Displaced { .. } | Self::Infeasible { .. } => {
                Code::ResourceExhausted
            }
            Self::NeverConnected { .. }
            | Self::Unserved { .. }
            | Self::Draining
            | Self::UsageLogUnavailable => Code::Unavailable,
            Self::ClientStalled { .. } => Code::Aborted,
            Self::DeadlineExceeded | Self::ReceiveTimeout(_) => Code::DeadlineExceeded,
            Self::Cancelled => Code::Cancelled,
            Self::WorkerError { code, .. } => match code {
                // Parameters were validated before, so this rejection by a worker is new information.
                Code::InvalidArgument | Code::ResourceExhausted | Code::FailedPrecondition => *code,
                Code::DeadlineExceeded => Code::DeadlineExceeded,
                _ => Code::Internal,
            },
            // Not UNAVAILABLE: clients would retry a request that may be the cause.
            Self::AttemptsExhausted { .. } | Self::NonFinite { .. } | Self::Internal(_) => Code::Internal,
        }
    }

    /// Returns the HTTP status with the error types of the APIs.
    pub(crate) fn http(&self) -> HttpError {
        const INVALID: &str = "invalid_request_error";
        let of = |status, openai_type, openai_code, anthropic_type| HttpError {
            status,
            openai_type,
            openai_code,
            anthropic_type,
        };
        match self {
            Self::Completed => of(200, "", None, ""),
            Self::Invalid(_)
            | Self::InvalidField { .. }
            | Self::NoChatTemplate { .. }
            | Self::WrongTransport(_) => of(400, INVALID, None, INVALID),
            Self::ContextExceeded(_) => of(400, INVALID, Some("context_length_exceeded"), INVALID),
            Self::UnknownFingerprint { .. } => of(409, INVALID, Some("unknown_fingerprint"), INVALID),
            Self::CursorRejected(_) => of(409, INVALID, Some("cursor_rejected"), INVALID),
            Self::ResumeDiverged { .. } => of(409, INVALID, Some("resume_diverged"), INVALID),
            Self::TooLarge(_) => of(413, INVALID, Some("request_too_large"), "request_too_large"),
            Self::ReceiveTimeout(_) => of(408, INVALID, Some("request_timeout"), INVALID),
            Self::UnknownPath { .. } => of(404, INVALID, Some("unknown_url"), "not_found_error"),
            Self::WrongMethod { .. } => of(405, INVALID, Some("method_not_allowed"), INVALID),
            Self::UnknownModel { .. } | Self::UnknownVersion { .. } => {
                of(404, INVALID, Some("model_not_found"), "not_found_error")
            }
            Self::Undecodable { .. } => of(415, INVALID, Some("unsupported_media_type"), INVALID),
            Self::Unauthenticated(_) => of(401, INVALID, Some("invalid_api_key"), "authentication_error"),
            Self::Denied(_) => of(403, "permission_error", None, "permission_error"),
            Self::Limited(_) => of(429, "rate_limit_error", Some("rate_limit_exceeded"), "rate_limit_error"),
            Self::Full(_) | Self::Displaced { .. } | Self::Infeasible { .. } => {
                of(503, "server_error", Some("overloaded"), "overloaded_error")
            }
            Self::NeverConnected { .. }
            | Self::Unserved { .. }
            | Self::Draining
            | Self::UsageLogUnavailable => of(503, "server_error", Some("unavailable"), "overloaded_error"),
            Self::ClientStalled { .. } => of(408, "server_error", Some("client_stalled"), "api_error"),
            Self::DeadlineExceeded => of(504, "server_error", Some("timeout"), "timeout_error"),
            // The client is gone; proxies log 499 for it.
            Self::Cancelled => of(499, "server_error", Some("cancelled"), "api_error"),
            Self::WorkerError { .. } => match self.code() {
                Code::InvalidArgument | Code::FailedPrecondition => of(400, INVALID, None, INVALID),
                Code::ResourceExhausted => of(503, "server_error", Some("overloaded"), "overloaded_error"),
                Code::DeadlineExceeded => of(504, "server_error", Some("timeout"), "timeout_error"),
                _ => of(500, "server_error", None, "api_error"),
            },
            // Not 500, which client libraries repeat: it has been tried on several workers.
            Self::NonFinite { .. } => of(422, "server_error", Some("non_finite"), "api_error"),
            Self::AttemptsExhausted { .. } | Self::Internal(_) => of(500, "server_error", None, "api_error"),
        }
    }

    /// Returns when an HTTP client may retry; `None` if a retry would not help.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        let unavailable = matches!(self.http().status, 429 | 503);
        self.overload().map(|(.., retry)| retry).or_else(|| unavailable.then_some(Overload::RETRY))
    }

    /// Returns the name of the invalid field, if one is at fault.
    pub(crate) fn invalid_field(&self) -> Option<String> {
        match self {
            Self::InvalidField { field, .. } => Some(shortened(field.clone(), FIELD_BYTES_MAX)),
            Self::UnknownModel { .. } => Some("model".to_owned()),
            Self::UnknownVersion { .. } => Some("model_version".to_owned()),
            Self::Undecodable { header, .. } => Some((*header).to_owned()),
            _ => None,
        }
    }

    /// Returns a stable, lower-case label for metrics and logs.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Invalid(_) | Self::InvalidField { .. } | Self::ContextExceeded(_) => "invalid",
            Self::TooLarge(_) => "too_large",
            Self::ReceiveTimeout(_) => "receive_timeout",
            Self::UnknownPath { .. } => "unknown_path",
            Self::WrongMethod { .. } => "wrong_method",
            Self::WrongTransport(_) => "wrong_transport",
            Self::UnknownModel { .. } => "unknown_model",
            Self::UnknownVersion { .. } => "unknown_version",
            Self::Undecodable { .. } => "undecodable",
            Self::NoChatTemplate { .. } => "no_chat_template",
            Self::UnknownFingerprint { .. } => "unknown_fingerprint",
            Self::CursorRejected(_) => "cursor_rejected",
            Self::ResumeDiverged { .. } => "resume_diverged",
            Self::Unauthenticated(_) => "unauthenticated",
            Self::Denied(_) => "denied",
            Self::Full(_) => "full",
            Self::Limited(_) => "limited",
            Self::Displaced { .. } => "displaced",
            Self::Infeasible { .. } => "deadline_infeasible",
            Self::NeverConnected { .. } => "never_connected",
            Self::Unserved { .. } => "unserved",
            Self::Draining => "draining",
            Self::UsageLogUnavailable => "usage_log_unavailable",
            Self::AttemptsExhausted { .. } => "attempts_exhausted",
            Self::NonFinite { .. } => "non_finite",
            Self::ClientStalled { .. } => "client_stalled",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Cancelled => "cancelled",
            Self::WorkerError { .. } => "worker_error",
            Self::Internal(_) => "internal",
        }
    }

    /// Returns the reason in `google.rpc.ErrorInfo`.
    fn reason(&self) -> String {
        match self {
            // A client can go on with a shorter prompt.
            Self::ContextExceeded(_) => "CONTEXT_EXCEEDED".to_owned(),
            _ => self.label().to_ascii_uppercase(),
        }
    }

    /// Returns the message for people, of at most [`MESSAGE_BYTES_MAX`] bytes.
    pub(crate) fn message(&self) -> String {
        shortened(self.text(), MESSAGE_BYTES_MAX)
    }

    /// Returns the message, which may quote the request.
    fn text(&self) -> String {
        match self {
            Self::Completed => String::new(),
            Self::Invalid(reason)
            | Self::InvalidField { reason, .. }
            | Self::TooLarge(reason)
            | Self::ReceiveTimeout(reason)
            | Self::CursorRejected(reason)
            | Self::Undecodable { reason, .. }
            | Self::Internal(reason) => reason.clone(),
            Self::ContextExceeded(excess) => excess.message(),
            Self::UnknownPath { path, instead: None } => format!("there is no {path:?} in this API"),
            Self::UnknownPath { path, instead: Some(instead) } => {
                // The advice is behind the path, whose rest would displace it.
                let path = shortened(path.clone(), PATH_BYTES_MAX);
                format!("there is no {path:?} in this API; {instead}")
            }
            Self::WrongTransport(reason) => (*reason).to_owned(),
            Self::WrongMethod { method, path } => format!("{path:?} does not take {method}"),
            Self::UnknownModel { asked, served } => {
                format!("no worker serves the model {asked:?}; served are: {}", served.join(", "))
            }
            Self::UnknownVersion { model, version, served } => {
                format!("the model {model:?} has no version {version:?}; its only version is {served}")
            }
            Self::NoChatTemplate { model, reason: None } => {
                format!("the model {model:?} has no chat template; send text or token ids")
            }
            Self::NoChatTemplate { model, reason: Some(reason) } => {
                format!("the model {model:?} cannot chat: {reason}; send text or token ids")
            }
            Self::UnknownFingerprint { required, served } => {
                let served = if served.is_empty() { "none".to_owned() } else { served.join(", ") };
                format!("no worker has the fingerprint {required:?}; those connected have: {served}")
            }
            Self::ResumeDiverged { choice } => format!(
                "the worker generates other tokens for choice {choice} than before, so the stream cannot be resumed; start over"
            ),
            Self::Unauthenticated(reason) | Self::Denied(reason) => reason.clone(),
            Self::Full(over) | Self::Limited(over) => over.what.clone(),
            Self::Displaced { .. } => {
                "evicted from the full queue (--queue-requests-max, --queue-tokens-max, or the tenant's bounds) by a request that goes first; try again later"
                    .to_owned()
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
                "no worker serving {model:?} is connected, and none came within {} s (--no-worker-timeout); try again later",
                waited.as_secs_f64()
            ),
            Self::Draining => "the router is draining; retry on another one".to_owned(),
            Self::UsageLogUnavailable => {
                "the router cannot write its usage log and refuses requests that it could not bill; retry later or on another router"
                    .to_owned()
            }
            Self::AttemptsExhausted { attempts } => {
                format!(
                    "{attempts} workers in a row were lost while running the request, the last one running nothing else: it may be the cause, so do not retry it"
                )
            }
            Self::NonFinite { choice, tokens, attempts } => {
                format!(
                    "the model's arithmetic gave infinite or NaN values in place of logits in {attempts} attempts, on other workers where there are \
                     any, in the last one after {tokens} output tokens of choice {choice}: the model overflows on this input, so do not retry it; if \
                     that happens with any input, weights or a device are damaged"
                )
            }
            Self::ClientStalled { waited } => {
                format!("the client read nothing of its stream for {} s (--stall-timeout)", waited.as_secs_f64())
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
        self.into_status_with(HashMap::new())
    }

    /// Returns the status with its details, and `info` as the metadata of google.rpc.ErrorInfo.
    pub(crate) fn into_status_with(self, info: HashMap<String, String>) -> Status {
        let (code, message) = (self.code(), self.message());
        let mut details = ErrorDetails::new();
        details.set_error_info(self.reason(), "inflight", info);
        if let Self::InvalidField { field, .. } = &self {
            let field = shortened(field.clone(), FIELD_BYTES_MAX);
            details.add_bad_request_violation(field, &message);
        }
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
mod tests;
