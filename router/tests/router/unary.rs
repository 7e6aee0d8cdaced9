//! GenerateUnary, and the token counts of failed calls in either form of Generate.

use std::time::Duration;

use inflight_proto::v1;
use inflight_router::Options;
use tonic::{Code, Request, Status};
use tonic_types::StatusExt;

use crate::cluster::{Cluster, bounded, text, tokens};
use inflight_scripted::{ScriptedSession, ScriptedWorker, WorkerProfile, sequence};

const STOP: v1::FinishReason = v1::FinishReason::Stop;
const LENGTH: v1::FinishReason = v1::FinishReason::Length;
/// Token id of `<|eot_id|>`.
const EOT: u32 = 284;

async fn one(options: Options) -> (ScriptedWorker, ScriptedSession, Cluster) {
    let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
    let cluster = Cluster::start(&[&worker], options).await;
    let session = worker.granted().await;
    cluster.handle.ready().await;
    (worker, session, cluster)
}

fn unary(
    cluster: &Cluster,
    request: impl tonic::IntoRequest<v1::GenerateRequest> + Send + 'static,
) -> tokio::task::JoinHandle<Result<v1::GenerateUnaryResponse, Status>> {
    let mut client = cluster.client.clone();
    tokio::spawn(async move { client.generate_unary(request).await.map(tonic::Response::into_inner) })
}

/// Returns prompt, cached and completion tokens of a failed call.
fn counts(status: &Status) -> Option<[u32; 3]> {
    let info = status.get_details_error_info().unwrap().metadata;
    let fields = ["prompt_tokens", "cached_prompt_tokens", "completion_tokens"];
    let counts = fields.map(|field| info.get(field).map(|count| count.parse().unwrap()));
    assert_eq!(info.get("fingerprint").map(String::as_str), counts[0].map(|_: u32| "f1"), "{info:?}");
    let [prompt, cached, completion] = counts;
    Some([prompt?, cached?, completion?])
}

#[tokio::test]
async fn the_unary_response_holds_what_the_stream_delivers() {
    bounded(async {
        let (_worker, mut session, mut cluster) = one(Options::default()).await;
        let request = v1::GenerateRequest {
            sampling: Some(v1::SamplingParams { n: Some(2), seed: Some(7), ..Default::default() }),
            stop: Some(v1::StopConditions { stop: vec!["END.".to_owned()], ..Default::default() }),
            return_token_ids: true,
            request_id: "mine".to_owned(),
            ..text("a")
        };
        let mut stream = cluster.generate(request.clone()).await.unwrap();
        let first = session.submit().await;
        let response = unary(&cluster, request);
        let second = session.submit().await;
        for submit in [&first, &second] {
            session.tokens(submit, 1, &tokens("one \u{1f642} EN two END."));
            assert_eq!(session.cancel().await.choice, Some(1));
            session.tokens(submit, 0, &tokens("zero"));
            session.finish(submit, 0, &[EOT], STOP);
        }
        stream.read_to_end().await.unwrap();
        let response = response.await.unwrap().unwrap();
        let texts: Vec<_> = response.choices.iter().map(|choice| choice.text.as_str()).collect();
        assert_eq!(texts, ["zero", "one \u{1f642} EN two "]);
        let started = stream.started.clone().unwrap();
        assert_eq!((response.request_id.as_str(), response.seed), ("mine", 7));
        assert_eq!((&response.model, &response.fingerprint), (&started.model, &started.fingerprint));
        assert_eq!((response.usage.clone(), response.fingerprint_changes.len()), (Some(stream.usage()), 0));
        assert!(response.timings.unwrap().total_seconds > 0.0);
        for (index, choice) in response.choices.iter().enumerate() {
            let finished = stream.finished.iter().find(|finished| finished.choice as usize == index).unwrap();
            assert_eq!(choice.index as usize, index);
            assert_eq!((&choice.text, &choice.token_ids), (&stream.text[index], &stream.token_ids[index]));
            assert_eq!((choice.reason(), &choice.stop_string), (finished.reason(), &finished.stop_string));
            assert_eq!(choice.stop_token_id, finished.stop_token_id);
        }
    })
    .await;
}

#[tokio::test]
async fn a_cancelled_unary_call_cancels_its_request_and_frees_its_place() {
    bounded(async {
        let (_worker, mut session, mut cluster) = one(Options { streams_max: 1, ..Options::default() }).await;
        let call = unary(&cluster, text("a"));
        let submit = session.submit().await;
        session.tokens(&submit, 0, &tokens("x"));
        let refused = cluster.client.generate_unary(text("b")).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
        call.abort();
        assert_eq!(session.cancel().await.submission_id, submit.submission_id);
        session.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
        let next = unary(&cluster, text("c"));
        let submit = session.submit().await;
        session.finish(&submit, 0, &tokens("y"), LENGTH);
        assert_eq!(next.await.unwrap().unwrap().choices[0].text, "y");
    })
    .await;
}

#[tokio::test]
async fn a_failed_call_counts_its_tokens_if_it_was_dispatched() {
    bounded(async {
        let (_worker, mut session, mut cluster) = one(Options::default()).await;
        for streamed in [true, false] {
            let mut stream = None;
            let mut call = None;
            if streamed {
                stream = Some(cluster.generate(text("abc")).await.unwrap());
            } else {
                call = Some(unary(&cluster, text("abc")));
            }
            let submit = session.submit().await;
            let prompt = submit.prompt_token_ids.len() as u32;
            session.sequence(v1::SequenceUpdate {
                computed_tokens: prompt - 1,
                ..sequence(&submit, 0, &tokens("xyz"), v1::FinishReason::Unspecified)
            });
            session.fail(&submit, 0, Code::Internal);
            let status = match (stream, call) {
                (Some(mut stream), _) => stream.read_to_end().await.unwrap_err(),
                (_, call) => call.unwrap().await.unwrap().unwrap_err(),
            };
            assert_eq!(status.code(), Code::Internal, "{status}");
            let completion = tokens("xyz").len() as u32;
            assert_eq!(counts(&status), Some([prompt, 1, completion]), "streamed: {streamed}");
        }

        let limit = Duration::from_millis(200);
        let mut stream = cluster.generate_within(text("a"), limit).await;
        let submit = session.submit().await;
        session.tokens(&submit, 0, &tokens("x"));
        let status = stream.read_to_end().await.unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
        assert_eq!(counts(&status).map(|[.., completion]| completion), Some(1));

        session.cancel().await;
        session.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
        session.grant(0, 0);
        let mut waiting = cluster.generate_within(text("b"), limit).await;
        let status = waiting.read_to_end().await.unwrap_err();
        assert_eq!((status.code(), counts(&status)), (Code::DeadlineExceeded, None));
    })
    .await;
}

#[tokio::test]
async fn an_invalid_field_is_a_violation_at_its_path_in_the_request() {
    bounded(async {
        let (_worker, _session, mut cluster) = one(Options::default()).await;
        let sampling = |sampling| v1::GenerateRequest { sampling: Some(sampling), ..text("a") };
        let stop = |stop| v1::GenerateRequest { stop: Some(stop), ..text("a") };
        let logit_bias = [(9999, 1.0)].into();
        let outside = v1::generate_request::Input::TokenIds(v1::TokenIds { ids: vec![5, 9999] });
        let bad = vec![
            ("input", v1::GenerateRequest::default()),
            ("weight", v1::GenerateRequest { weight: Some(0.0), ..text("a") }),
            ("priority", v1::GenerateRequest { priority: 101, ..text("a") }),
            ("request_id", v1::GenerateRequest { request_id: "r".repeat(129), ..text("a") }),
            ("sampling.top_p", sampling(v1::SamplingParams { top_p: Some(1.1), ..Default::default() })),
            ("sampling.n", sampling(v1::SamplingParams { n: Some(17), ..Default::default() })),
            ("stop.max_tokens", stop(v1::StopConditions { max_tokens: Some(0), ..Default::default() })),
            ("stop.stop", stop(v1::StopConditions { stop: vec![String::new()], ..Default::default() })),
            (
                "stop.stop_token_ids",
                stop(v1::StopConditions { stop_token_ids: vec![1; 129], ..Default::default() }),
            ),
            (
                "stop.stop_token_ids",
                stop(v1::StopConditions { stop_token_ids: vec![9999], ..Default::default() }),
            ),
            ("sampling.logit_bias", sampling(v1::SamplingParams { logit_bias, ..Default::default() })),
            ("input", v1::GenerateRequest { input: Some(outside), ..text("a") }),
        ];
        for (path, request) in bad {
            let streamed = cluster.client.generate(request.clone()).await.unwrap_err();
            let whole = cluster.client.generate_unary(Request::new(request)).await.unwrap_err();
            for status in [streamed, whole] {
                let violations = status.get_details_bad_request().expect(path).field_violations;
                let fields: Vec<_> = violations.iter().map(|violation| violation.field.as_str()).collect();
                assert_eq!(fields, [path], "{status}");
                assert_eq!(violations[0].description, status.message());
                assert_eq!(status.get_details_error_info().unwrap().reason, "INVALID");
            }
        }
        let long = stop(v1::StopConditions { max_tokens: Some(1000), ..Default::default() });
        let status = cluster.client.generate(long).await.unwrap_err();
        assert_eq!(status.get_details_error_info().unwrap().reason, "CONTEXT_EXCEEDED");
    })
    .await;
}
