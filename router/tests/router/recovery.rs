use std::time::{Duration, Instant};

use inflight_proto::v1;
use inflight_router::{DispatcherOptions, Options};
use tonic::Code;

use crate::cluster::{Cluster, bounded, count, metrics, text, tokens};
use inflight_scripted::{ScriptedSession, ScriptedWorker, WorkerProfile, sequence};

const STOP: v1::FinishReason = v1::FinishReason::Stop;
const LENGTH: v1::FinishReason = v1::FinishReason::Length;
const MORE: v1::FinishReason = v1::FinishReason::Unspecified;
/// Token id of `<|eot_id|>`.
const EOT: u32 = 284;

async fn workers<const N: usize>(options: Options) -> (Cluster, [ScriptedWorker; N], Vec<ScriptedSession>) {
    let mut workers = Vec::new();
    for _ in 0..N {
        workers.push(ScriptedWorker::start(WorkerProfile::default()).await);
    }
    let mut workers: [ScriptedWorker; N] = workers.try_into().unwrap_or_else(|_| panic!("{N} workers"));
    let cluster = Cluster::start(&workers.each_ref(), options).await;
    let mut sessions = Vec::new();
    for worker in &mut workers {
        sessions.push(worker.session().await);
    }
    cluster.handle.ready().await;
    (cluster, workers, sessions)
}

/// Waits until the router has received a grant.
async fn wait_for_grant(worker: &ScriptedWorker, sequences: u32) {
    let (name, address) = ("inflight_router_worker_sequences_granted", worker.address);
    let line = format!("{name}{{worker=\"{address}\"}} {sequences}");
    while !metrics().render().lines().any(|rendered| rendered == line) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_quarantined_request_runs_alone_until_its_first_token() {
    bounded(async {
        let (mut cluster, [mut first, mut second], mut sessions) = workers::<2>(Options::default()).await;
        let mut two = sessions.pop().unwrap();
        let mut one = sessions.pop().unwrap();
        one.grant(8, 1000);
        let mut suspect = cluster.generate(text("suspect")).await.unwrap();
        one.submit().await;
        one.break_stream();
        two.grant(8, 1000);
        assert_eq!(two.submit().await.attempt, 2);
        two.break_stream();
        // Both workers are back. One must be reserved for the quarantined request.
        let (mut one, mut two) = (first.granted().await, second.granted().await);
        let mut others = Vec::new();
        let mut submits = Vec::new();
        for i in 0..4 {
            others.push(cluster.generate(text(&format!("other {i}"))).await.unwrap());
        }
        let (mut alone, mut shared) = loop {
            one.grant(8, 1000);
            two.grant(8, 1000);
            tokio::select! {
                submit = one.submit() => { submits.push(submit); }
                submit = two.submit() => { submits.push(submit); std::mem::swap(&mut one, &mut two); }
            }
            if submits.last().unwrap().attempt == 3 {
                break (one, two);
            }
            // Swap the worker with the other request to the front; the quarantined request's worker is the
            // other.
        };
        let suspected = submits.pop().unwrap();
        while submits.len() < 4 {
            submits.push(shared.submit().await);
        }
        assert!(submits.iter().all(|submit| submit.attempt == 1));
        assert!(alone.try_command().is_none(), "nothing else runs beside the suspect");
        alone.tokens(&suspected, 0, &tokens("x"));
        suspect.until_text("x").await;
        // The quarantine is over: its worker accepts others again, and the next loss is its first.
        shared.grant(0, 0);
        let mut late = cluster.generate(text("late")).await.unwrap();
        let submit = alone.submit().await;
        alone.finish(&submit, 0, &[EOT], STOP);
        late.read_to_end().await.unwrap();
        alone.break_stream();
        shared.grant(16, 1000);
        let again = shared.submit().await;
        assert_eq!((again.attempt, again.resumed[0].token_ids.clone()), (4, tokens("x")));
        submits.push(again);
        for submit in &submits {
            shared.finish(submit, 0, &tokens("y"), LENGTH);
        }
        for mut other in others {
            other.read_to_end().await.unwrap();
        }
        suspect.read_to_end().await.unwrap();
        assert_eq!(suspect.text[0], "xy");
    })
    .await;
}

fn charges(cost: u64) -> v1::Update {
    let charge = v1::TenantServiceCounter { tenant: "t".to_owned(), service: cost, baseline: 0 };
    v1::Update { services: vec![charge], ..Default::default() }
}

#[tokio::test]
async fn a_protocol_violation_closes_the_session_and_its_streams_fail_over() {
    bounded(async {
        type Lie = fn(&ScriptedSession, &v1::Submit);
        let lies: [(&str, Lie); 14] = [
            ("journal", |session, submit| session.tokens(submit, 0, &[1; 41])),
            ("unknown_request", |session, submit| session.tokens(submit, 9, &[1])),
            ("unknown_request", |session, submit| {
                let other = v1::Submit { submission_id: submit.submission_id + 7, ..submit.clone() };
                session.finish(&other, 0, &[], STOP);
            }),
            ("unknown_request", |session, submit| {
                session.finish(submit, 1, &[EOT], STOP);
                session.tokens(submit, 1, &tokens("after the end"));
            }),
            ("wrong_attempt", |session, submit| {
                let later = v1::Submit { attempt: submit.attempt + 7, ..submit.clone() };
                session.finish(&later, 0, &[EOT], STOP);
            }),
            ("wrong_attempt", |session, submit| {
                let earlier = v1::Submit { attempt: submit.attempt - 1, ..submit.clone() };
                session.tokens(&earlier, 0, &tokens("y"));
            }),
            ("unknown_token", |session, submit| session.tokens(submit, 0, &[1 << 30])),
            ("grant", |session, _| session.grant(8, u32::MAX)),
            ("grant", |session, _| session.grant(-1i32 as u32, 8)),
            ("service_counter", |session, _| session.update(charges(u64::MAX))),
            ("service_counter", |session, _| {
                session.update(charges(1_000));
                session.update(charges(1 << 40));
            }),
            ("router_count", |session, _| {
                session.update(v1::Update { router_count: 1 << 20, ..Default::default() })
            }),
            ("oversized", |session, submit| {
                let sequences = vec![sequence(submit, 0, &[], MORE); 100_000];
                session.update(v1::Update { sequences, ..Default::default() });
            }),
            ("flood", |session, _| {
                for _ in 0..100_000 {
                    session.update(v1::Update::default());
                }
            }),
        ];
        let (mut cluster, [honest, mut liar], mut sessions) = workers::<2>(Options::default()).await;
        let mut lying = sessions.pop().unwrap();
        let mut sound = sessions.pop().unwrap();
        for (kind, lie) in lies {
            let before = count("inflight_router_protocol_violations_total", &format!("kind=\"{kind}\""));
            sound.grant(0, 0);
            wait_for_grant(&honest, 0).await;
            lying.grant(8, 1000);
            let request = v1::GenerateRequest {
                sampling: Some(v1::SamplingParams { n: Some(2), ..Default::default() }),
                stop: Some(v1::StopConditions { max_tokens: Some(40), ..Default::default() }),
                ..text("a")
            };
            let mut stream = cluster.generate(request).await.unwrap();
            let submit = lying.submit().await;
            lying.tokens(&submit, 0, &tokens("x"));
            stream.until_text("x").await;
            lie(&lying, &submit);
            sound.grant(8, 1000);
            let again = sound.submit().await;
            assert_eq!(again.resumed[0].token_ids, tokens("x"), "{kind}");
            sound.finish(&again, 0, &tokens("y"), LENGTH);
            if !again.resumed.iter().any(|resumed| resumed.choice == 1 && resumed.finished) {
                sound.finish(&again, 1, &[EOT], STOP);
            }
            stream.read_to_end().await.unwrap();
            assert_eq!(stream.text[0], "xy", "{kind}");
            let after = count("inflight_router_protocol_violations_total", &format!("kind=\"{kind}\""));
            assert!(after > before, "{kind} is counted");
            lying = liar.session().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_client_too_far_behind_pauses_its_request_and_later_reads_the_rest() {
    bounded(async {
        let options = Options { client_buffer_tokens: 512, ..Options::default() };
        let profile = WorkerProfile { context_tokens: 1 << 20, ..WorkerProfile::default() };
        let mut worker = ScriptedWorker::start(profile).await;
        let mut cluster = Cluster::start(&[&worker], options).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let stop = v1::StopConditions { max_tokens: Some(900_000), ..Default::default() };
        let mut stalled = cluster
            .generate(v1::GenerateRequest { stop: Some(stop), return_token_ids: true, ..text("a") })
            .await
            .unwrap();
        let submit = session.submit().await;
        let piece = tokens("stall stall stall ");
        let mut rounds = 0;
        let cancel = loop {
            session.tokens(&submit, 0, &piece);
            rounds += 1;
            match session.try_command() {
                Some(command) => break command,
                None => tokio::task::yield_now().await,
            }
        };
        assert!(matches!(cancel, inflight_proto::v1::session_request::Message::Cancel(cancel)
            if cancel.submission_id == submit.submission_id && cancel.choice.is_none()));
        session.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
        // The client reads again: the request continues from where it was.
        let reading = tokio::spawn(async move {
            stalled.read_to_end().await.unwrap();
            stalled
        });
        let again = session.submit().await;
        let had = &again.resumed[0].token_ids;
        assert!(
            again.attempt == 2 && had.len().is_multiple_of(piece.len()) && had.len() <= rounds * piece.len()
        );
        session.finish(&again, 0, &tokens("end"), LENGTH);
        let stalled = reading.await.unwrap();
        assert_eq!(stalled.text[0], "stall stall stall ".repeat(had.len() / piece.len()) + "end");
    })
    .await;
}

#[tokio::test]
async fn a_request_resumed_without_workers_times_out_like_others() {
    bounded(async {
        let wait = Duration::from_millis(300);
        let options = Options {
            client_buffer_tokens: 512,
            dispatcher: DispatcherOptions { no_worker_timeout: wait, ..DispatcherOptions::default() },
            ..Options::default()
        };
        let profile = WorkerProfile { context_tokens: 1 << 20, ..WorkerProfile::default() };
        let mut worker = ScriptedWorker::start(profile).await;
        let mut cluster = Cluster::start(&[&worker], options).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let stop = v1::StopConditions { max_tokens: Some(900_000), ..Default::default() };
        let request = v1::GenerateRequest { stop: Some(stop), return_token_ids: true, ..text("a") };
        let mut stalled = cluster.generate(request).await.unwrap();
        let submit = session.submit().await;
        let piece = tokens("stall stall stall ");
        while session.try_command().is_none() {
            session.tokens(&submit, 0, &piece);
            tokio::task::yield_now().await;
        }
        session.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
        drop(worker);
        session.break_stream();
        let models = v1::ListModelsRequest {};
        while !cluster.client.list_models(models).await.unwrap().into_inner().models.is_empty() {
            tokio::task::yield_now().await;
        }
        let status = stalled.read_to_end().await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{status}");
    })
    .await;
}

#[tokio::test]
async fn the_call_of_a_stalled_client_is_ended() {
    bounded(async {
        let options = Options {
            client_buffer_tokens: 512,
            streams_max: 1,
            stall_timeout: Duration::from_millis(300),
            ..Options::default()
        };
        let profile = WorkerProfile { context_tokens: 1 << 20, ..WorkerProfile::default() };
        let mut worker = ScriptedWorker::start(profile).await;
        let mut cluster = Cluster::start(&[&worker], options).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let stop = v1::StopConditions { max_tokens: Some(900_000), ..Default::default() };
        let mut stalled = cluster
            .generate(v1::GenerateRequest { stop: Some(stop), return_token_ids: true, ..text("a") })
            .await
            .unwrap();
        let submit = session.submit().await;
        assert_eq!(cluster.generate(text("b")).await.err().unwrap().code(), Code::ResourceExhausted);
        let input = Some(v1::tokenize_request::Input::Text("b".to_owned()));
        let request = v1::TokenizeRequest { input, ..Default::default() };
        let status = cluster.client.tokenize(request).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "it is one more open call: {status}");
        let piece = tokens("stall stall stall ");
        while session.try_command().is_none() {
            session.tokens(&submit, 0, &piece);
            tokio::task::yield_now().await;
        }
        session.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
        let mut other = loop {
            match cluster.generate(text("b")).await {
                Ok(stream) => break stream,
                Err(status) => assert_eq!(status.code(), Code::ResourceExhausted),
            }
            tokio::task::yield_now().await;
        };
        let second = session.submit().await;
        session.finish(&second, 0, &tokens("quick"), LENGTH);
        other.read_to_end().await.unwrap();
        let status = stalled.read_to_end().await.unwrap_err();
        assert_eq!(status.code(), Code::Aborted, "{status}");
    })
    .await;
}

#[tokio::test]
async fn after_the_grace_period_a_draining_workers_streams_move() {
    bounded(async {
        let options = Options {
            dispatcher: DispatcherOptions { drain_grace: Duration::ZERO, ..DispatcherOptions::default() },
            ..Options::default()
        };
        let (mut cluster, [_first, _second], mut sessions) = workers::<2>(options).await;
        let mut two = sessions.pop().unwrap();
        let mut one = sessions.pop().unwrap();
        one.grant(8, 1000);
        let mut stream = cluster.generate(text("a")).await.unwrap();
        let submit = one.submit().await;
        one.tokens(&submit, 0, &tokens("x"));
        stream.until_text("x").await;
        one.update(v1::Update { draining: true, grant: Some(v1::Grant::default()), ..Default::default() });
        // No room elsewhere yet: the stream stays.
        one.tokens(&submit, 0, &tokens("y"));
        stream.until_text("xy").await;
        two.grant(8, 1000);
        let again = two.submit().await;
        assert_eq!((again.attempt, again.resumed[0].token_ids.clone()), (2, tokens("xy")));
        assert_eq!(one.cancel().await.submission_id, submit.submission_id);
        // Output of the old attempt is dropped.
        one.tokens(&submit, 0, &tokens("WRONG"));
        one.finish(&submit, 0, &[], v1::FinishReason::Cancelled);
        two.finish(&again, 0, &tokens("z"), LENGTH);
        stream.read_to_end().await.unwrap();
        assert_eq!(stream.text[0], "xyz");
    })
    .await;
}

#[tokio::test]
async fn resubmissions_beyond_the_retry_budget_wait_and_are_not_lost() {
    bounded(async {
        let options = Options {
            dispatcher: DispatcherOptions { retry_rate: 1, retry_burst: 1, ..DispatcherOptions::default() },
            ..Options::default()
        };
        let (mut cluster, [_first, _second], mut sessions) = workers::<2>(options).await;
        let mut two = sessions.pop().unwrap();
        let mut one = sessions.pop().unwrap();
        one.grant(8, 1000);
        let mut streams = Vec::new();
        for _ in 0..2 {
            let mut stream = cluster.generate(text("a")).await.unwrap();
            let submit = one.submit().await;
            one.tokens(&submit, 0, &tokens("x"));
            stream.until_text("x").await;
            streams.push(stream);
        }
        two.grant(8, 1000);
        one.break_stream();
        let first = two.submit().await;
        let at = Instant::now();
        // New requests do not wait behind them.
        let mut fresh = cluster.generate(text("fresh")).await.unwrap();
        let new = two.submit().await;
        assert_eq!(new.attempt, 1);
        two.finish(&new, 0, &[EOT], STOP);
        fresh.read_to_end().await.unwrap();
        let second = loop {
            match tokio::time::timeout(Duration::from_millis(20), two.submit()).await {
                Ok(submit) => break submit,
                Err(_) => two.grant(8, 1000),
            }
        };
        assert!(at.elapsed() >= Duration::from_millis(900), "one a second");
        for submit in [first, second] {
            assert_eq!(submit.attempt, 2);
            two.finish(&submit, 0, &tokens("y"), LENGTH);
        }
        for mut stream in streams {
            stream.read_to_end().await.unwrap();
            assert_eq!(stream.text[0], "xy");
        }
    })
    .await;
}

#[tokio::test]
async fn consecutive_worker_faults_eject_it_and_request_errors_do_not() {
    bounded(async {
        for (code, ejects) in [(Code::InvalidArgument, false), (Code::Internal, true)] {
            let (mut cluster, [_first, _second], mut sessions) = workers::<2>(Options::default()).await;
            let mut two = sessions.pop().unwrap();
            let mut one = sessions.pop().unwrap();
            one.grant(8, 1000);
            for _ in 0..5 {
                let mut stream = cluster.generate(text("a")).await.unwrap();
                let submit = one.submit().await;
                one.fail(&submit, 0, code);
                assert_eq!(stream.read_to_end().await.unwrap_err().code(), code);
            }
            two.grant(8, 1000);
            let mut streams = Vec::new();
            for _ in 0..4 {
                streams.push(cluster.generate(text("a")).await.unwrap());
            }
            let mut of_one = 0;
            for _ in 0..4 {
                tokio::select! {
                    submit = one.submit() => {
                        of_one += 1;
                        one.finish(&submit, 0, &[EOT], STOP);
                    }
                    submit = two.submit() => two.finish(&submit, 0, &[EOT], STOP),
                }
            }
            assert_eq!(of_one == 0, ejects, "{of_one} went to the worker that had failed");
            for mut stream in streams {
                stream.read_to_end().await.unwrap();
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_request_that_could_outgrow_the_journal_is_rejected_with_the_numbers() {
    bounded(async {
        let options = Options {
            dispatcher: DispatcherOptions { request_tokens_max: 100, ..DispatcherOptions::default() },
            ..Options::default()
        };
        let (mut cluster, [_worker], _sessions) = workers::<1>(options).await;
        let request = v1::GenerateRequest {
            sampling: Some(v1::SamplingParams { n: Some(4), ..Default::default() }),
            stop: Some(v1::StopConditions { max_tokens: Some(30), ..Default::default() }),
            ..text("a")
        };
        let status = cluster.generate(request).await.err().unwrap();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("more than the 100"), "{status}");
    })
    .await;
}
