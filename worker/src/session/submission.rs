//! Wire decoding of submissions: protobuf `Submit` to an engine request.

use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{SamplingOverrides, SamplingSpec, Service, StopConditions, Weight};
use inflight_proto::v1;
use inflight_worker_core::Time;
use opentelemetry::propagation::Extractor;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::engine::{ChoiceEvent, Failure, Finish, Request, RequestKey, ResumedChoice, SessionId};
use crate::self_test;

/// Maximum bytes of a tenant's name, as in the API. The engine stores each name, and reports its service to all routers.
const TENANT_BYTES_MAX: usize = 128;

/// Decodes a submission into a request of the engine.
///
/// # Errors
/// Rejection events, one for each unfinished choice, if the submission is invalid.
pub(crate) fn decode(submit: v1::Submit, session: SessionId, now: Time) -> Result<Request, Vec<ChoiceEvent>> {
    let key = RequestKey { session, request: submit.submission_id };
    let attempt = submit.attempt;
    let wanted = submit.sampling.as_ref().and_then(|sampling| sampling.n).unwrap_or(1);
    let finished: Vec<u32> = submit.resumed.iter().filter(|one| one.finished).map(|one| one.choice).collect();
    request(submit, key, now).map_err(|what| {
        let reject = |choice| ChoiceEvent {
            key,
            attempt,
            choice,
            token: None,
            logprobs: None,
            prompt_logprobs: Vec::new(),
            computed_tokens: 0,
            finish: Some(Finish::Failed(Failure::Invalid(what.clone()))),
        };
        let choices = 0..wanted.clamp(1, SamplingSpec::CHOICES_MAX);
        choices.filter(|choice| !finished.contains(choice)).map(reject).collect()
    })
}

fn request(submit: v1::Submit, key: RequestKey, now: Time) -> Result<Request, String> {
    if submit.tenant.len() > TENANT_BYTES_MAX {
        let bytes = submit.tenant.len();
        return Err(format!("the tenant's name has {bytes} bytes; at most {TENANT_BYTES_MAX} are allowed"));
    }
    if submit.tenant == self_test::TENANT {
        return Err("the tenant's name is that of the worker's self-tests".to_owned());
    }
    let span = span(&submit);
    let stop = StopConditions::from(submit.stop.unwrap_or_default());
    let sampling = SamplingOverrides::from(submit.sampling.unwrap_or_default());
    let sampling = sampling.apply(&stop, &SamplingSpec::default());
    let sampling = sampling.validate().map_err(|error| error.to_string())?;
    let mut choices = vec![ResumedChoice::default(); sampling.n as usize];
    for resumed in submit.resumed {
        let choice = resumed.choice as usize;
        let entry =
            choices.get_mut(choice).ok_or_else(|| format!("choice {choice} is resumed, but n is less"))?;
        *entry = ResumedChoice { tokens: resumed.token_ids, finished: resumed.finished };
    }
    Ok(Request {
        key,
        attempt: submit.attempt,
        prompt: submit.prompt_token_ids.into(),
        max_tokens: stop.max_tokens.unwrap_or(0),
        sampling: Arc::new(sampling),
        choices,
        prompt_logprobs_received: submit.prompt_logprobs_received,
        tenant: submit.tenant.into(),
        weight: Weight::try_from(submit.weight).map_err(|error| error.to_string())?,
        priority: submit.priority,
        virtual_start_time: submit.virtual_start_time.map(Service::from_thousandths),
        deadline: submit.deadline_us.map(|us| now.after(Duration::from_micros(us))),
        queued: submit.queued_us.map(Duration::from_micros),
        grammar: None,
        span,
    })
}

/// Creates the request's span on this worker; a child of the router's span if the submission carries one.
fn span(submit: &v1::Submit) -> tracing::Span {
    let span = tracing::info_span!(
        "run",
        otel.kind = "server",
        request_id = %submit.request_id,
        attempt = submit.attempt,
        prompt_tokens = submit.prompt_token_ids.len(),
    );
    if !submit.traceparent.is_empty() {
        let parent =
            opentelemetry::global::get_text_map_propagator(|propagator| propagator.extract(&Carrier(submit)));
        // Fails only without an OpenTelemetry layer, where there is no parent to set.
        let _ = span.set_parent(parent);
    }
    span
}

struct Carrier<'a>(&'a v1::Submit);

impl Extractor for Carrier<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        match key {
            "traceparent" => Some(&self.0.traceparent),
            "tracestate" => Some(&self.0.tracestate),
            _ => None,
        }
    }

    fn keys(&self) -> Vec<&str> {
        vec!["traceparent", "tracestate"]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_submission_with_an_invalid_weight_or_tenant_is_rejected_for_each_choice() {
        for weight in [0.0, -1.0, f32::NAN, f32::INFINITY, 1000.5] {
            let sampling = v1::SamplingParams { n: Some(2), ..v1::SamplingParams::default() };
            let submit = v1::Submit { weight, sampling: Some(sampling), ..v1::Submit::default() };
            let refused = decode(submit, SessionId(0), Time::ZERO).err().unwrap_or_default();
            let whys: Vec<_> = refused.iter().map(|event| format!("{:?}", event.finish)).collect();
            assert_eq!(whys.len(), 2);
            assert!(whys.iter().all(|why| why.contains("weight is")), "{whys:?}");
        }
        let submit = v1::Submit { weight: 1.0, tenant: "t".repeat(128), ..v1::Submit::default() };
        assert!(decode(submit.clone(), SessionId(0), Time::ZERO).is_ok());
        let longer = v1::Submit { tenant: "t".repeat(129), ..submit };
        let refused = decode(longer, SessionId(0), Time::ZERO).err().unwrap_or_default();
        assert!(refused.len() == 1 && format!("{:?}", refused[0].finish).contains("129 bytes"));
        let reserved =
            v1::Submit { weight: 1.0, tenant: self_test::TENANT.to_owned(), ..v1::Submit::default() };
        let refused = decode(reserved, SessionId(1), Time::ZERO).err().unwrap_or_default();
        assert!(refused.len() == 1 && format!("{:?}", refused[0].finish).contains("self-tests"));
    }
}
