use std::time::Duration;

use inflight_proto::v1;
use inflight_router::Options;
use tonic::Code;

use crate::cluster::{Cluster, Generated, bounded, metrics, text, tokens};
use inflight_scripted::{ScriptedSession, ScriptedWorker, WorkerProfile, sequence};

const STOP: v1::FinishReason = v1::FinishReason::Stop;
const LENGTH: v1::FinishReason = v1::FinishReason::Length;
const CANCELLED: v1::FinishReason = v1::FinishReason::Cancelled;
/// Token id of `<|eot_id|>`.
const EOT: u32 = 284;

async fn one(options: Options) -> (ScriptedWorker, ScriptedSession, Cluster) {
    one_of(WorkerProfile::default(), options).await
}

async fn one_of(profile: WorkerProfile, options: Options) -> (ScriptedWorker, ScriptedSession, Cluster) {
    let mut worker = ScriptedWorker::start(profile).await;
    let cluster = Cluster::start(&[&worker], options).await;
    let session = worker.granted().await;
    cluster.handle.ready().await;
    (worker, session, cluster)
}

fn stopping_at(stops: &[&str]) -> v1::GenerateRequest {
    let stop = stops.iter().map(|stop| (*stop).to_owned()).collect();
    let stop = v1::StopConditions { stop, ..Default::default() };
    v1::GenerateRequest { stop: Some(stop), return_token_ids: true, ..text("a") }
}

#[tokio::test]
async fn tokens_stream_as_complete_characters_and_the_stop_token_is_hidden() {
    bounded(async {
        let (_worker, session, mut cluster) = one(Options::default()).await;
        let mut session = session;
        let request = v1::GenerateRequest { return_token_ids: true, ..text("a") };
        let mut stream = cluster.generate(request).await.unwrap();
        let submit = session.submit().await;
        let output = tokens("h\u{e9} \u{1f642}!");
        assert!(output.len() > 6, "the characters are split over tokens");
        for token in &output {
            session.tokens(&submit, 0, &[*token]);
        }
        stream.until_text("h\u{e9} \u{1f642}!").await;
        session.finish(&submit, 0, &[EOT], STOP);
        stream.read_to_end().await.unwrap();
        assert_eq!(stream.text[0], "h\u{e9} \u{1f642}!");
        assert_eq!(stream.token_ids[0], [output.clone(), vec![EOT]].concat());
        let finished = &stream.finished[0];
        assert_eq!((finished.reason(), finished.stop_token_id), (STOP, Some(EOT)));
        let usage = stream.usage();
        assert_eq!(usage.completion_tokens as usize, output.len() + 1);
        assert_eq!(usage.prompt_tokens as usize, submit.prompt_token_ids.len());
        let timings = stream.completed.unwrap().timings.unwrap();
        assert!(timings.queue_seconds <= timings.time_to_first_token_seconds);
        assert!(timings.time_to_first_token_seconds <= timings.total_seconds);
        let spread = timings.total_seconds - timings.time_to_first_token_seconds;
        let between = timings.time_per_output_token_seconds * output.len() as f64;
        assert!((spread - between).abs() < 1e-9);
    })
    .await;
}

#[tokio::test]
async fn an_output_that_ends_within_a_character_ends_with_a_replacement() {
    bounded(async {
        let (_worker, mut session, mut cluster) = one(Options::default()).await;
        let mut stream = cluster.generate(text("a")).await.unwrap();
        let submit = session.submit().await;
        session.finish(&submit, 0, &tokens("x\u{1f642}")[..3], LENGTH);
        stream.read_to_end().await.unwrap();
        assert_eq!(stream.text[0], "x\u{fffd}");
        assert_eq!(stream.finished[0].reason(), LENGTH);
    })
    .await;
}

#[tokio::test]
async fn a_stop_string_across_token_boundaries_never_leaks_and_stops_the_worker() {
    bounded(async {
        let (_worker, mut session, mut cluster) = one(Options::default()).await;
        let mut stream = cluster.generate(stopping_at(&["END.", "zzz"])).await.unwrap();
        let submit = session.submit().await;
        assert!(submit.stop.as_ref().unwrap().stop.is_empty(), "stop strings stay on the router");
        let output = tokens("one EN two END. three");
        let until = tokens("one EN two END.").len();
        for token in &output {
            session.tokens(&submit, 0, &[*token]);
        }
        stream.read_to_end().await.unwrap();
        assert_eq!(stream.text[0], "one EN two ");
        assert_eq!((stream.finished[0].reason(), stream.finished[0].stop_string.as_str()), (STOP, "END."));
        assert_eq!(stream.token_ids[0].len(), stream.usage().completion_tokens as usize);
        assert!(stream.token_ids[0].len() <= until && output.starts_with(&stream.token_ids[0]));
        let cancel = session.cancel().await;
        assert_eq!((cancel.submission_id, cancel.choice), (submit.submission_id, Some(0)));
    })
    .await;
}

#[tokio::test]
async fn a_held_back_beginning_of_a_stop_string_is_released_at_the_end() {
    bounded(async {
        let (_worker, mut session, mut cluster) = one(Options::default()).await;
        let mut stream = cluster.generate(stopping_at(&["END."])).await.unwrap();
        let submit = session.submit().await;
        session.tokens(&submit, 0, &tokens("x END"));
        stream.until_text("x ").await;
        session.finish(&submit, 0, &[EOT], STOP);
        stream.read_to_end().await.unwrap();
        assert_eq!(stream.text[0], "x END");
        assert_eq!(
            (stream.finished[0].stop_string.as_str(), stream.finished[0].stop_token_id),
            ("", Some(EOT))
        );
    })
    .await;
}

#[tokio::test]
async fn no_stop_string_takes_effect_before_min_tokens() {
    bounded(async {
        let (_worker, mut session, mut cluster) = one(Options::default()).await;
        let mut request = stopping_at(&["!"]);
        request.stop.as_mut().unwrap().min_tokens = tokens("a!").len() as u32;
        let mut stream = cluster.generate(request).await.unwrap();
        let submit = session.submit().await;
        session.tokens(&submit, 0, &tokens("a!"));
        session.tokens(&submit, 0, &tokens("b!"));
        stream.read_to_end().await.unwrap();
        assert_eq!(stream.text[0], "a!b");
        assert_eq!(stream.finished[0].stop_string, "!");
    })
    .await;
}

#[tokio::test]
async fn choices_end_independently_and_usage_counts_them_all() {
    bounded(async {
        let (_worker, mut session, mut cluster) = one(Options::default()).await;
        let mut request = stopping_at(&["!"]);
        request.sampling = Some(v1::SamplingParams { n: Some(2), ..Default::default() });
        let mut stream = cluster.generate(request).await.unwrap();
        let submit = session.submit().await;
        session.tokens(&submit, 1, &tokens("bb!"));
        assert_eq!(session.cancel().await.choice, Some(1));
        session.finish(&submit, 1, &tokens("late"), CANCELLED);
        session.finish(&submit, 0, &tokens("aa"), LENGTH);
        stream.read_to_end().await.unwrap();
        assert_eq!(stream.text[..2], ["aa".to_owned(), "bb".to_owned()]);
        let ends: Vec<_> = stream.finished.iter().map(|end| (end.choice, end.reason())).collect();
        assert_eq!(ends, [(1, STOP), (0, LENGTH)]);
        let both = tokens("aa").len() + tokens("bb!").len();
        assert_eq!(stream.usage().completion_tokens as usize, both);
    })
    .await;
}

#[tokio::test]
async fn log_probabilities_are_delivered_with_their_tokens() {
    bounded(async {
        let (_worker, mut session, mut cluster) = one(Options::default()).await;
        let sampling = v1::SamplingParams { logprobs: Some(1), ..Default::default() };
        let request = v1::GenerateRequest { sampling: Some(sampling), ..text("a") };
        let mut stream = cluster.generate(request).await.unwrap();
        let submit = session.submit().await;
        let output = tokens("ab\u{1f642}");
        let position = |token: &u32| {
            let chosen = v1::TokenLogprob { token_id: *token, logprob: -(*token as f32) };
            v1::PositionLogprobs { chosen: Some(chosen), top: vec![chosen] }
        };
        for token in &output {
            session.sequence(v1::SequenceUpdate {
                logprobs: vec![position(token)],
                ..sequence(&submit, 0, &[*token], v1::FinishReason::Unspecified)
            });
        }
        session.finish(&submit, 0, &[], LENGTH);
        stream.read_to_end().await.unwrap();
        assert_eq!(stream.logprobs, output.iter().map(position).collect::<Vec<_>>());
        assert!(stream.token_ids[0].is_empty(), "ids were not asked for");
    })
    .await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_at_once_and_releases_its_credits() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.session().await;
        session.grant(1, 100);
        cluster.handle.ready().await;
        let mut stream = cluster.generate(text("first")).await.unwrap();
        let submit = session.submit().await;
        session.tokens(&submit, 0, &tokens("x"));
        stream.until_text("x").await;
        let _second = cluster.generate(text("second")).await.unwrap();
        drop(stream);
        let cancel = session.cancel().await;
        assert_eq!((cancel.submission_id, cancel.choice), (submit.submission_id, None));
        // Only the worker's report releases the credit.
        session.finish(&submit, 0, &[], CANCELLED);
        let second = session.submit().await;
        assert_eq!(second.prompt_token_ids[1..], tokens("second"));
        session.finish(&second, 0, &[EOT], STOP);
        let gauge = format!("inflight_router_worker_sequences{{worker=\"{}\"}} 0", worker.address);
        while !metrics().render().contains(&gauge) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_deadline_ends_a_stream_in_its_middle_and_a_wait_in_the_queue() {
    bounded(async {
        let (_worker, mut session, mut cluster) = one(Options::default()).await;
        let limit = Duration::from_millis(300);
        let mut stream = cluster.generate_within(text("a"), limit).await;
        let submit = session.submit().await;
        let left = Duration::from_micros(submit.deadline_us.unwrap());
        assert!(left <= limit && left > Duration::ZERO);
        session.tokens(&submit, 0, &tokens("x"));
        stream.until_text("x").await;
        let status = stream.read_to_end().await.unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
        assert_eq!(session.cancel().await.submission_id, submit.submission_id);
        session.finish(&submit, 0, &[], CANCELLED);

        session.grant(0, 0);
        let mut waiting = cluster.generate_within(text("b"), Duration::from_millis(100)).await;
        let status = waiting.read_to_end().await.unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
        assert!(waiting.started.is_none());
    })
    .await;
}

#[tokio::test]
async fn a_deadline_reported_by_the_worker_gives_the_same_status() {
    bounded(async {
        let (_worker, mut session, mut cluster) = one(Options::default()).await;
        let mut stream = cluster.generate_within(text("a"), Duration::from_secs(600)).await;
        let submit = session.submit().await;
        session.finish(&submit, 0, &tokens("x"), v1::FinishReason::Deadline);
        let status = stream.read_to_end().await.unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    })
    .await;
}

#[tokio::test]
async fn a_client_that_does_not_read_delays_no_other_and_loses_nothing() {
    bounded(async {
        let profile = WorkerProfile { context_tokens: 1 << 20, ..WorkerProfile::default() };
        let options = Options { client_buffer_tokens: 1 << 20, ..Options::default() };
        let (_worker, mut session, mut cluster) = one_of(profile, options).await;
        let stop = v1::StopConditions { max_tokens: Some(400_000), ..Default::default() };
        let large = v1::GenerateRequest { stop: Some(stop), return_token_ids: true, ..text("a") };
        let mut stalled = cluster.generate(large).await.unwrap();
        let submit = session.submit().await;
        // More than the connection's windows hold, all sent before the other request is answered.
        let piece = tokens(&"stall ".repeat(100));
        let rounds = 300_000 / piece.len();
        for _ in 0..rounds {
            session.tokens(&submit, 0, &piece);
        }
        let mut other = cluster.generate(text("b")).await.unwrap();
        let second = session.submit().await;
        session.finish(&second, 0, &tokens("quick"), LENGTH);
        other.read_to_end().await.unwrap();
        assert_eq!(other.text[0], "quick");
        session.finish(&submit, 0, &[], LENGTH);
        stalled.read_to_end().await.unwrap();
        assert_eq!(stalled.text[0], "stall ".repeat(100 * rounds));
        assert_eq!(stalled.token_ids[0].len(), rounds * piece.len());
    })
    .await;
}

#[tokio::test]
async fn a_workers_own_error_ends_the_request_and_not_the_session() {
    bounded(async {
        let (_worker, mut session, mut cluster) = one(Options::default()).await;
        for _ in 0..2 {
            let mut stream = cluster.generate(text("a")).await.unwrap();
            let submit = session.submit().await;
            session.fail(&submit, 0, Code::Internal);
            assert_eq!(stream.read_to_end().await.unwrap_err().code(), Code::Internal);
        }
        let names = metrics().render();
        let own = inflight_router::metrics::METRICS.iter().map(|metric| metric.name);
        let table: Vec<&str> = own.chain(inflight_net::metrics::METRICS.map(|(name, ..)| name)).collect();
        let known = |line: &str| table.iter().any(|name| line.starts_with(name));
        let unknown = names.lines().find(|line| !line.starts_with('#') && !line.is_empty() && !known(line));
        assert_eq!(unknown, None, "every metric is in the table");
    })
    .await;
}

#[tokio::test]
async fn many_calls_at_once_all_complete_within_the_grant() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.session().await;
        session.grant(4, 100);
        cluster.handle.ready().await;
        let calls: Vec<_> = (0..64)
            .map(|i| {
                let mut client = cluster.client.clone();
                tokio::spawn(async move {
                    let stream = client.generate(text(&format!("call {i}"))).await.unwrap().into_inner();
                    let mut generated = Generated::from(stream);
                    generated.read_to_end().await.unwrap();
                    assert_eq!(generated.text[0], format!("answer to call {i}"));
                })
            })
            .collect();
        let mut in_flight: Vec<v1::Submit> = Vec::new();
        for received in 1..=64 {
            in_flight.push(session.submit().await);
            assert!(in_flight.len() <= 4, "the grant is kept");
            if in_flight.len() == 4 || received == 64 {
                for submit in in_flight.drain(..) {
                    let answer = [tokens("answer to "), submit.prompt_token_ids[1..].to_vec()].concat();
                    session.finish(&submit, 0, &answer, LENGTH);
                }
            }
        }
        for call in calls {
            call.await.unwrap();
        }
    })
    .await;
}
