use std::time::Duration;

use inflight_proto::v1;
use inflight_router::{DispatcherOptions, HttpOptions, Options};
use serde_json::Value;
use tonic::Code;

use crate::cluster::{Cluster, bounded, text, tokens};
use crate::http_client::{Call, Event, parse_events, with_http};
use inflight_scripted::{ScriptedSession, ScriptedWorker, WorkerProfile, sequence};

const STOP: v1::FinishReason = v1::FinishReason::Stop;
const LENGTH: v1::FinishReason = v1::FinishReason::Length;
/// Token id of `<|eot_id|>`.
const EOT: u32 = 284;

/// Two workers, of which only the first has a grant.
async fn two(
    second: WorkerProfile,
    options: Options,
) -> (Cluster, [ScriptedWorker; 2], [ScriptedSession; 2]) {
    let mut workers =
        [ScriptedWorker::start(WorkerProfile::default()).await, ScriptedWorker::start(second).await];
    let cluster = Cluster::start(&[&workers[0], &workers[1]], options).await;
    let sessions = [workers[0].granted().await, workers[1].session().await];
    cluster.handle.ready().await;
    (cluster, workers, sessions)
}

#[tokio::test]
async fn a_lost_session_costs_no_byte_of_a_stream() {
    bounded(async {
        let (mut cluster, _workers, [mut first, mut second]) =
            two(WorkerProfile::default(), Options::default()).await;
        let request = v1::GenerateRequest {
            sampling: Some(v1::SamplingParams { n: Some(3), ..Default::default() }),
            stop: Some(v1::StopConditions { stop: vec!["#!".to_owned()], ..Default::default() }),
            return_token_ids: true,
            ..text("a")
        };
        let mut stream = cluster.generate(request).await.unwrap();
        let submit = first.submit().await;
        assert_eq!(submit.attempt, 1);
        // Break within a character, and within a stop string.
        let text = "caf\u{e9} \u{1f642} done #";
        let output = tokens(text);
        let cut = tokens("caf\u{e9} \u{1f642}").len() - 2;
        first.tokens(&submit, 0, &output[..cut]);
        first.finish(&submit, 1, &[tokens("b"), vec![EOT]].concat(), STOP);
        first.tokens(&submit, 2, &tokens("c#"));
        stream.until_text("caf\u{e9} ").await;
        first.break_stream();

        second.grant(64, 1000);
        let again = second.submit().await;
        assert_eq!(again.attempt, 2);
        assert_eq!(
            (&again.prompt_token_ids, &again.sampling, &again.stop),
            (&submit.prompt_token_ids, &submit.sampling, &submit.stop)
        );
        let resumed = |choice, token_ids, finished| v1::ResumedChoice { choice, token_ids, finished };
        let expected = [
            resumed(0, output[..cut].to_vec(), false),
            resumed(1, [tokens("b"), vec![EOT]].concat(), true),
            resumed(2, tokens("c#"), false),
        ];
        assert_eq!(again.resumed, expected);
        second.tokens(&again, 0, &output[cut..]);
        second.finish(&again, 0, &[EOT], STOP);
        second.tokens(&again, 2, &tokens("!"));
        stream.read_to_end().await.unwrap();
        assert_eq!(stream.text[..3], [text.to_owned(), "b".to_owned(), "c".to_owned()]);
        assert_eq!(stream.token_ids[0], [output.clone(), vec![EOT]].concat());
        assert_eq!(stream.finished.len(), 3);
        let counted = output.len() + 1 + tokens("b").len() + 1 + tokens("c#").len() + tokens("!").len();
        assert_eq!(stream.usage().completion_tokens as usize, counted, "each token counts once");
        assert_eq!(second.cancel().await.choice, Some(2));
    })
    .await;
}

#[tokio::test]
async fn a_request_returned_by_its_worker_runs_on_another() {
    bounded(async {
        let (mut cluster, _workers, [mut first, mut second]) =
            two(WorkerProfile::default(), Options::default()).await;
        for give_back in [
            |session: &ScriptedSession, submit: &v1::Submit| session.fail(submit, 0, Code::Unavailable),
            |session: &ScriptedSession, submit: &v1::Submit| {
                session.finish(submit, 0, &[], v1::FinishReason::Cancelled);
            },
        ] {
            second.grant(0, 0);
            let mut stream = cluster.generate(text("a")).await.unwrap();
            let submit = first.submit().await;
            second.grant(64, 1000);
            first.tokens(&submit, 0, &tokens("x"));
            stream.until_text("x").await;
            give_back(&first, &submit);
            let again = second.submit().await;
            assert_eq!(again.resumed[0].token_ids, tokens("x"));
            second.finish(&again, 0, &tokens("y"), LENGTH);
            stream.read_to_end().await.unwrap();
            assert_eq!(stream.text[0], "xy");
        }
    })
    .await;
}

#[tokio::test]
async fn a_stream_changes_fingerprint_only_if_no_worker_has_its_own() {
    bounded(async {
        let other = WorkerProfile { fingerprint: "f2", ..WorkerProfile::default() };
        let (mut cluster, mut workers, [mut first, mut second]) = two(other, Options::default()).await;
        let mut third_worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut both = Cluster::start(
            &[&workers[0], &workers[1], &third_worker],
            Options { router_id: Some("second".to_owned()), ..Options::default() },
        )
        .await;
        let mut one = workers[0].granted().await;
        let two = workers[1].granted().await;
        let mut three = third_worker.session().await;
        let serving = |models: &[v1::Model]| models.iter().map(|model| model.workers).sum::<u32>();
        while serving(&both.client.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models)
            < 3
        {
            tokio::task::yield_now().await;
        }
        // All three are connected: the request waits for the equal one, though the other has room.
        two.grant(0, 0);
        let mut stream = both.generate(text("a")).await.unwrap();
        let submit = one.submit().await;
        one.tokens(&submit, 0, &tokens("x"));
        stream.until_text("x").await;
        two.grant(64, 1000);
        one.break_stream();
        three.grant(64, 1000);
        let again = three.submit().await;
        assert_eq!(again.resumed[0].token_ids, tokens("x"));
        three.finish(&again, 0, &[EOT], STOP);
        stream.read_to_end().await.unwrap();

        // The only other worker has another fingerprint.
        let mut stream = cluster.generate(text("a")).await.unwrap();
        let submit = first.submit().await;
        first.tokens(&submit, 0, &tokens("x"));
        stream.until_text("x").await;
        let [worker, _other] = workers;
        drop(worker);
        drop(first);
        second.grant(64, 1000);
        let again = second.submit().await;
        assert_eq!(again.attempt, 2);
        second.finish(&again, 0, &[EOT], STOP);
        stream.read_to_end().await.unwrap();
        assert_eq!(stream.text[0], "x");
    })
    .await;
}

#[tokio::test]
async fn a_request_that_loses_every_worker_without_a_token_is_rejected() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let mut stream = cluster.generate(text("a")).await.unwrap();
        for attempt in 1..=3 {
            assert_eq!(session.submit().await.attempt, attempt);
            session.break_stream();
            session = worker.granted().await;
            // A quarantined request is dispatched only after an update of its worker.
            session.grant(64, 1 << 16);
        }
        let status = stream.read_to_end().await.unwrap_err();
        assert_eq!(status.code(), Code::Internal);
        assert!(status.message().contains("3 workers in a row were lost"), "{status}");
    })
    .await;
}

#[tokio::test]
async fn requests_wait_for_a_lost_worker_up_to_a_timeout() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let wait = Duration::from_millis(300);
        let options = Options {
            dispatcher: DispatcherOptions { no_worker_timeout: wait, ..DispatcherOptions::default() },
            ..Options::default()
        };
        let mut cluster = Cluster::start(&[&worker], options).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let mut stream = cluster.generate(text("a")).await.unwrap();
        let submit = session.submit().await;
        session.tokens(&submit, 0, &tokens("x"));
        stream.until_text("x").await;
        session.break_stream();
        // The worker returns, and the stream continues.
        let mut session = worker.granted().await;
        let again = session.submit().await;
        session.tokens(&again, 0, &tokens("y"));
        stream.until_text("xy").await;
        // The worker is lost for good.
        drop(worker);
        session.break_stream();
        let status = stream.read_to_end().await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("\"tiny\""), "{status}");
        let late = cluster.generate(text("b")).await.err().unwrap();
        assert_eq!(late.code(), Code::Unavailable);
        let models = cluster.client.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
        assert!(models.is_empty());
    })
    .await;
}

#[tokio::test]
async fn a_session_without_heartbeats_is_lost() {
    bounded(async {
        let silent = WorkerProfile { heartbeat_interval_ms: 30, ..WorkerProfile::default() };
        let mut worker = ScriptedWorker::start(silent).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let mut stream = cluster.generate(text("a")).await.unwrap();
        // A session may time out before the request arrives; then the next one has it.
        let first = loop {
            match session.submit_or_close().await {
                Some(submit) => break submit,
                None => session = worker.granted().await,
            }
        };
        assert_eq!(first.attempt, 1);
        assert!(session.submit_or_close().await.is_none(), "nothing was said, so the session is given up");
        let mut session = worker.granted().await;
        let again = session.submit().await;
        assert_eq!(again.attempt, 2);
        session.finish(&again, 0, &[EOT], STOP);
        stream.read_to_end().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn streamed_chunks_have_the_fingerprint_at_the_start_at_a_change_and_at_the_end() {
    bounded(async {
        let other = WorkerProfile { fingerprint: "f2", ..WorkerProfile::default() };
        let (cluster, workers, [mut first, mut second]) = two(other, with_http(HttpOptions::default())).await;
        let body = br#"{"prompt":"abc","max_tokens":8,"stream":true}"#;
        let call = Call::send(cluster.http.unwrap(), "POST", "/v1/completions", &[], body);
        let mut call = call.await;
        let submit = first.submit().await;
        first.tokens(&submit, 0, &tokens("x"));
        assert_eq!(call.head().await.0, 200);
        let mut received = call.until("\"x\"").await;
        first.tokens(&submit, 0, &tokens("y"));
        received += &call.until("\"y\"").await;
        first.break_stream();
        drop(workers);
        second.grant(64, 1000);
        let again = second.submit().await;
        second.tokens(&again, 0, &tokens("z"));
        received += &call.until("\"z\"").await;
        second.finish(&again, 0, &tokens("w"), LENGTH);
        let mut events = parse_events(&received);
        events.extend(call.rest().await);
        let chunks = events[..events.len() - 1].iter().map(Event::json);
        let seen: Vec<(String, Option<String>)> = chunks
            .map(|chunk| {
                let text = |value: &Value| value.as_str().map(str::to_owned);
                (text(&chunk["choices"][0]["text"]).unwrap(), text(&chunk["system_fingerprint"]))
            })
            .collect();
        let expected = [("x", Some("f1")), ("y", None), ("z", Some("f2")), ("w", None), ("", Some("f2"))];
        assert_eq!(seen, expected.map(|(text, print)| (text.to_owned(), print.map(str::to_owned))));
    })
    .await;
}

#[tokio::test]
async fn responses_report_fingerprint_changes_and_cached_tokens() {
    bounded(async {
        let other = WorkerProfile { fingerprint: "f2", ..WorkerProfile::default() };
        let (mut cluster, workers, [mut first, mut second]) = two(other, Options::default()).await;
        let models = cluster.client.list_models(v1::ListModelsRequest {}).await.unwrap().into_inner().models;
        assert_eq!(models[0].fingerprints, ["f1", "f2"]);
        let request = v1::GenerateRequest {
            sampling: Some(v1::SamplingParams { n: Some(2), ..Default::default() }),
            return_token_ids: true,
            ..text("abcdef")
        };
        let mut stream = cluster.generate(request).await.unwrap();
        let submit = first.submit().await;
        let prompt = submit.prompt_token_ids.len() as u32;
        let computed = |tokens: &[u32], computed_tokens| v1::SequenceUpdate {
            computed_tokens,
            ..sequence(&submit, 0, tokens, v1::FinishReason::Unspecified)
        };
        // All but two tokens of the prompt were cached at the worker.
        first.sequence(computed(&tokens("a"), 2));
        first.tokens(&submit, 1, &tokens("bc"));
        while stream.token_ids[1].len() < tokens("bc").len() {
            assert!(stream.advance().await.unwrap());
        }
        assert_eq!(stream.started.as_ref().unwrap().fingerprint, "f1");
        assert!(stream.changes.is_empty());
        first.break_stream();
        drop(workers);
        second.grant(64, 1000);
        let again = second.submit().await;
        // Recomputed tokens do not count again: usage covers the first prefill only.
        second.sequence(v1::SequenceUpdate {
            computed_tokens: prompt + 3,
            ..sequence(&again, 0, &tokens("d"), LENGTH)
        });
        second.finish(&again, 1, &tokens("e"), LENGTH);
        stream.read_to_end().await.unwrap();
        let tokens = vec![tokens("a").len() as u32, tokens("bc").len() as u32];
        assert_eq!(stream.changes, [v1::FingerprintChanged { fingerprint: "f2".to_owned(), tokens }]);
        let usage = stream.usage();
        assert_eq!((usage.cached_prompt_tokens, &*usage.fingerprint), (prompt - 2, "f2"));
    })
    .await;
}

#[tokio::test]
async fn a_required_fingerprint_is_never_replaced_and_rejected_if_unknown() {
    bounded(async {
        let other = WorkerProfile { fingerprint: "f2", ..WorkerProfile::default() };
        let options = Options {
            dispatcher: DispatcherOptions {
                no_worker_timeout: Duration::from_secs(1),
                ..DispatcherOptions::default()
            },
            ..Options::default()
        };
        let (mut cluster, mut workers, [mut first, mut second]) = two(other, options).await;
        let require = |fingerprint: &str| v1::GenerateRequest {
            require_fingerprint: fingerprint.to_owned(),
            return_token_ids: true,
            ..text("a")
        };
        let refused = cluster.client.generate(require("f3")).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert_eq!(refused.message(), "no worker has the fingerprint \"f3\"; those connected have: f1, f2");
        // The worker with a grant has another fingerprint: the request waits for its own.
        let mut waiting = cluster.generate(require("f2")).await.unwrap();
        second.grant(64, 1000);
        let submit = second.submit().await;
        second.finish(&submit, 0, &tokens("x"), LENGTH);
        waiting.read_to_end().await.unwrap();

        let mut stream = cluster.generate(require("f1")).await.unwrap();
        let submit = first.submit().await;
        first.tokens(&submit, 0, &tokens("a"));
        stream.until_text("a").await;
        first.break_stream();
        // Its worker returns and the stream continues there, though the other had room all the time.
        let mut first = workers[0].granted().await;
        let again = first.submit().await;
        first.tokens(&again, 0, &tokens("b"));
        stream.until_text("ab").await;
        let [gone, _kept] = workers;
        drop((gone, first));
        let lost = stream.read_to_end().await.unwrap_err();
        assert_eq!(lost.code(), Code::FailedPrecondition);
        assert!(lost.message().contains("those connected have: f2"), "{}", lost.message());
        assert!(stream.changes.is_empty());
    })
    .await;
}
