//! Tables of outcomes and their statuses.

use super::*;

fn context() -> Outcome {
    Outcome::ContextExceeded(Box::new(ContextExcess {
        context_tokens: 9,
        prompt_tokens: 10,
        max_tokens: 0,
        reason: "why".to_owned(),
    }))
}

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
        (
            Outcome::UnknownVersion { model: text(), version: text(), served: "1" },
            Code::NotFound,
            "unknown_version",
        ),
        (Outcome::Undecodable { header: "x", reason: text() }, Code::InvalidArgument, "undecodable"),
        (
            Outcome::NoChatTemplate { model: text(), reason: None },
            Code::FailedPrecondition,
            "no_chat_template",
        ),
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
        (Outcome::UsageLogUnavailable, Code::Unavailable, "usage_log_unavailable"),
        (Outcome::AttemptsExhausted { attempts: 4 }, Code::Internal, "attempts_exhausted"),
        (Outcome::NonFinite { choice: 0, tokens: 3, attempts: 2 }, Code::Internal, "non_finite"),
        (Outcome::ClientStalled { waited: second }, Code::Aborted, "client_stalled"),
        (Outcome::DeadlineExceeded, Code::DeadlineExceeded, "deadline_exceeded"),
        (Outcome::Cancelled, Code::Cancelled, "cancelled"),
        (worker(Code::ResourceExhausted), Code::ResourceExhausted, "worker_error"),
        (worker(Code::InvalidArgument), Code::InvalidArgument, "worker_error"),
        (worker(Code::Unknown), Code::Internal, "worker_error"),
        (worker(Code::Ok), Code::Internal, "worker_error"),
        (Outcome::Internal(text()), Code::Internal, "internal"),
        (Outcome::field("top_p", "why"), Code::InvalidArgument, "invalid"),
        (context(), Code::InvalidArgument, "invalid"),
        (Outcome::ReceiveTimeout(text()), Code::DeadlineExceeded, "receive_timeout"),
        (Outcome::unknown_path(text()), Code::Unimplemented, "unknown_path"),
        (Outcome::WrongMethod { method: text(), path: text() }, Code::Unimplemented, "wrong_method"),
        (Outcome::WrongTransport("why"), Code::Unimplemented, "wrong_transport"),
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
            let context = matches!(outcome, Outcome::ContextExceeded(_));
            let reason = if context { "CONTEXT_EXCEEDED".to_owned() } else { label.to_ascii_uppercase() };
            assert_eq!(info.reason, reason);
        }
    }
}

#[test]
fn the_table_of_outcomes_and_http_statuses() {
    let text = || "why".to_owned();
    let second = Duration::from_secs(1);
    let overload = || Box::new(Overload::of_router(text(), "streams", 2 * second));
    let worker = |code| Outcome::WorkerError { code, message: text() };
    let invalid = "invalid_request_error";
    let table = [
        (Outcome::Invalid(text()), 400, invalid, None, invalid),
        (Outcome::field("top_p", "why"), 400, invalid, None, invalid),
        (Outcome::NoChatTemplate { model: text(), reason: None }, 400, invalid, None, invalid),
        (context(), 400, invalid, Some("context_length_exceeded"), invalid),
        (
            Outcome::UnknownFingerprint { required: text(), served: vec![] },
            409,
            invalid,
            Some("unknown_fingerprint"),
            invalid,
        ),
        (Outcome::WrongTransport("why"), 400, invalid, None, invalid),
        (Outcome::TooLarge(text()), 413, invalid, Some("request_too_large"), "request_too_large"),
        (Outcome::ReceiveTimeout(text()), 408, invalid, Some("request_timeout"), invalid),
        (Outcome::unknown_path(text()), 404, invalid, Some("unknown_url"), "not_found_error"),
        (
            Outcome::WrongMethod { method: text(), path: text() },
            405,
            invalid,
            Some("method_not_allowed"),
            invalid,
        ),
        (
            Outcome::UnknownModel { asked: text(), served: vec![] },
            404,
            invalid,
            Some("model_not_found"),
            "not_found_error",
        ),
        (
            Outcome::UnknownVersion { model: text(), version: text(), served: "1" },
            404,
            invalid,
            Some("model_not_found"),
            "not_found_error",
        ),
        (
            Outcome::Undecodable { header: "x", reason: text() },
            415,
            invalid,
            Some("unsupported_media_type"),
            invalid,
        ),
        (Outcome::Unauthenticated(text()), 401, invalid, Some("invalid_api_key"), "authentication_error"),
        (Outcome::Denied(text()), 403, "permission_error", None, "permission_error"),
        (
            Outcome::Limited(overload()),
            429,
            "rate_limit_error",
            Some("rate_limit_exceeded"),
            "rate_limit_error",
        ),
        (Outcome::Full(overload()), 503, "server_error", Some("overloaded"), "overloaded_error"),
        (Outcome::UsageLogUnavailable, 503, "server_error", Some("unavailable"), "overloaded_error"),
        (Outcome::Draining, 503, "server_error", Some("unavailable"), "overloaded_error"),
        (Outcome::DeadlineExceeded, 504, "server_error", Some("timeout"), "timeout_error"),
        (worker(Code::InvalidArgument), 400, invalid, None, invalid),
        (worker(Code::ResourceExhausted), 503, "server_error", Some("overloaded"), "overloaded_error"),
        (worker(Code::Unknown), 500, "server_error", None, "api_error"),
        (Outcome::AttemptsExhausted { attempts: 4 }, 500, "server_error", None, "api_error"),
        (
            Outcome::NonFinite { choice: 0, tokens: 3, attempts: 2 },
            422,
            "server_error",
            Some("non_finite"),
            "api_error",
        ),
        (Outcome::Internal(text()), 500, "server_error", None, "api_error"),
    ];
    for (outcome, status, openai_type, openai_code, anthropic_type) in table {
        let wanted = HttpError { status, openai_type, openai_code, anthropic_type };
        assert_eq!(outcome.http(), wanted, "{outcome:?}");
        let retry = match outcome {
            Outcome::Full(_) | Outcome::Limited(_) => Some(2 * second),
            _ if status == 503 => Some(second),
            _ => None,
        };
        assert_eq!(outcome.retry_after(), retry, "{outcome:?}");
    }
}
