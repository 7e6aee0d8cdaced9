//! Entry point for fuzzing: any bytes as the messages of a router.

use std::time::Duration;

use inflight_contract::SamplingSpec;
use inflight_proto::fuzz::decode_length_delimited;
use inflight_proto::v1::{self, session_request::Message};
use inflight_worker_core::Time;
use prost::Message as _;

use super::service_tables::ServiceTables;
use super::submission;
use crate::engine::{Finish, Request, SessionId};

const SESSION: SessionId = SessionId(1);

/// Decodes length-delimited session messages. Each takes at most the memory that the codec measures, and is the same after another
/// encoding; an accepted submission is within the documented limits, a rejected one ends each unfinished choice once; accepted
/// reports of service never shrink a counter. Returns whether there was a message.
///
/// # Panics
/// If one of these does not hold.
pub(crate) fn session(mut data: &[u8]) -> bool {
    let tables = ServiceTables::new("own");
    let (mut now, mut decoded) = (Time::ZERO, false);
    while let Some((request, bytes)) = decode_length_delimited::<v1::SessionRequest>(&mut data) {
        decoded = true;
        let heap = heap_bytes(&request);
        assert!(heap <= bytes, "{heap} bytes of memory, measured as {bytes}");
        let encoded = request.encode_to_vec();
        let again = v1::SessionRequest::decode(encoded.as_slice()).expect("an encoded message decodes");
        // As bytes, because NaN differs from itself.
        assert_eq!(again.encode_to_vec(), encoded);
        match request.message {
            Some(Message::Submit(submit)) => check_submission(submit, now),
            Some(Message::ServiceTable(report)) => {
                let served = |tables: &ServiceTables| -> Vec<_> {
                    let all = tables.all(now);
                    all.into_iter().flat_map(|table| table.tenants).map(|tenant| tenant.service).collect()
                };
                let before: u128 = served(&tables).into_iter().map(u128::from).sum();
                let accepted = tables.report(SESSION, &report, now).is_ok();
                let after: u128 = served(&tables).into_iter().map(u128::from).sum();
                assert!(if accepted { after >= before } else { after == before }, "{before}, {after}");
            }
            _ => {}
        }
        now = now.after(Duration::from_millis(10));
    }
    decoded
}

/// Heap memory of the repeated fields and the strings that a router sends in large numbers.
fn heap_bytes(request: &v1::SessionRequest) -> usize {
    match &request.message {
        Some(Message::Submit(submit)) => {
            let resumed = submit.resumed.iter().map(|choice| size_of_val(&*choice.token_ids));
            let prompt = size_of_val(&*submit.prompt_token_ids);
            prompt + size_of_val(&*submit.resumed) + resumed.sum::<usize>()
        }
        Some(Message::ServiceTable(report)) => {
            let names = report.tenants.iter().map(|tenant| tenant.tenant.len());
            size_of_val(&*report.tenants) + names.sum::<usize>()
        }
        _ => 0,
    }
}

fn check_submission(submit: v1::Submit, now: Time) {
    let wanted = submit.sampling.as_ref().and_then(|sampling| sampling.n).unwrap_or(1);
    let given = submit.clone();
    match submission::decode(submit, SESSION, now) {
        Ok(Request { sampling, choices, weight, prompt, deadline, .. }) => {
            assert_eq!((choices.len() as u32, sampling.n), (wanted, wanted));
            assert_eq!(*prompt, *given.prompt_token_ids);
            assert!(weight.get().is_finite() && weight.get() > 0.0, "{weight:?}");
            assert!(deadline.is_none_or(|deadline| deadline >= now));
            let resumed: usize = choices.iter().map(|choice| choice.tokens.len()).sum();
            assert!(resumed <= given.resumed.iter().map(|choice| choice.token_ids.len()).sum());
        }
        Err(rejections) => {
            let mut ended: Vec<_> = rejections.iter().map(|event| event.choice).collect();
            ended.dedup();
            assert_eq!(ended.len(), rejections.len(), "a choice is rejected twice");
            assert!(rejections.len() <= SamplingSpec::CHOICES_MAX as usize);
            assert!(rejections.iter().all(|event| matches!(event.finish, Some(Finish::Failed(_)))));
        }
    }
}
