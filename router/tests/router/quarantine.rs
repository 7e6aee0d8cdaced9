//! Quarantine: requests that may cause the loss of their workers, and requests beside them.

use std::time::Duration;

use inflight_proto::v1;
use inflight_router::{DispatcherOptions, Options};
use tonic::Code;

use crate::cluster::{Cluster, bounded, metrics, text, tokens};
use inflight_scripted::{Command, ScriptedSession, ScriptedWorker, WorkerProfile, sequence};

const STOP: v1::FinishReason = v1::FinishReason::Stop;
/// Token id of `<|eot_id|>`.
const EOT: u32 = 284;

async fn started(
    profiles: Vec<WorkerProfile>,
    options: Options,
) -> (Cluster, Vec<ScriptedWorker>, Vec<ScriptedSession>) {
    let mut workers = Vec::new();
    for profile in profiles {
        workers.push(ScriptedWorker::start(profile).await);
    }
    let cluster = Cluster::start(&workers.iter().collect::<Vec<_>>(), options).await;
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
async fn a_request_that_causes_protocol_violations_is_rejected_alone() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let mut neighbour = cluster.generate(text("neighbour")).await.unwrap();
        session.submit().await;
        let mut poison = cluster.generate(text("poison")).await.unwrap();
        let mut poisonous = session.submit().await;
        let prompt = poisonous.prompt_token_ids.clone();
        for attempt in 1..=3 {
            while poisonous.prompt_token_ids != prompt || poisonous.attempt != attempt {
                poisonous = session.submit().await;
            }
            session.tokens(&poisonous, 0, &[1 << 30]);
            session = worker.granted().await;
            session.grant(64, 1 << 16);
        }
        let status = poison.read_to_end().await.unwrap_err();
        assert_eq!(status.code(), Code::Internal);
        assert!(status.message().contains("3 workers in a row were lost"), "{status}");
        let other = session.submit().await;
        assert_ne!(other.prompt_token_ids, prompt);
        session.finish(&other, 0, &[EOT], STOP);
        neighbour.read_to_end().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_waiting_quarantined_request_is_reported_as_backlog() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let mut suspect = cluster.generate(text("suspect")).await.unwrap();
        session.submit().await;
        session.break_stream();
        let mut session = worker.granted().await;
        session.submit().await;
        session.break_stream();
        let mut session = worker.session().await;
        // Nothing waits in the queue, and the other router's requests fill the worker.
        assert_eq!(session.backlogs.recv().await, Some(true));
        session.grant(1, 1);
        let alone = session.submit().await;
        assert_eq!(alone.attempt, 3);
        assert_eq!(session.backlogs.recv().await, Some(false), "it has what it waited for");
        session.finish(&alone, 0, &[EOT], STOP);
        suspect.read_to_end().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_stream_waits_for_an_equal_worker_reserved_for_quarantine() {
    bounded(async {
        // Too small for the quarantined request, so that it is not reserved for it.
        let other = WorkerProfile { fingerprint: "f2", context_tokens: 64, ..WorkerProfile::default() };
        let of = |prompt: &str, max_tokens| v1::GenerateRequest {
            stop: Some(v1::StopConditions { max_tokens: Some(max_tokens), ..Default::default() }),
            ..text(prompt)
        };
        let profiles = vec![WorkerProfile::default(), WorkerProfile::default(), other];
        let (mut cluster, mut workers, mut sessions) = started(profiles, Options::default()).await;
        let mut unequal = sessions.pop().unwrap();
        let mut two = sessions.pop().unwrap();
        let mut one = sessions.pop().unwrap();
        one.grant(8, 1000);
        let mut suspect = cluster.generate(of("suspect", 100)).await.unwrap();
        one.submit().await;
        one.break_stream();
        // The worker is back, but has failed this request before: used only if there is no other.
        let mut one = workers[0].session().await;
        one.grant(7, 1000);
        wait_for_grant(&workers[0], 7).await;
        two.grant(8, 1000);
        assert_eq!(two.submit().await.attempt, 2);
        one.grant(0, 0);
        wait_for_grant(&workers[0], 0).await;
        two.break_stream();
        // The first worker is reserved for the quarantined request, but has no room for it yet.
        let mut two = workers[1].granted().await;
        let mut stream = cluster.generate(of("stream", 20)).await.unwrap();
        let submit = two.submit().await;
        two.tokens(&submit, 0, &tokens("x"));
        stream.until_text("x").await;
        unequal.grant(8, 1000);
        wait_for_grant(&workers[2], 8).await;
        drop(workers.remove(1));
        two.break_stream();
        tokio::time::sleep(Duration::from_millis(250)).await;
        one.grant(8, 1000);
        let alone = one.submit().await;
        assert_eq!(alone.attempt, 3);
        one.tokens(&alone, 0, &tokens("y"));
        suspect.until_text("y").await;
        let again = one.submit().await;
        assert_eq!((again.attempt, again.resumed[0].token_ids.clone()), (2, tokens("x")));
        one.finish(&again, 0, &[EOT], STOP);
        one.finish(&alone, 0, &[EOT], STOP);
        stream.read_to_end().await.unwrap();
        suspect.read_to_end().await.unwrap();
        assert!(unequal.try_command().is_none(), "its tokens would have differed");
    })
    .await;
}

#[tokio::test]
async fn two_of_four_workers_can_be_reserved_for_quarantine_at_once() {
    bounded(async {
        let (mut cluster, mut workers, mut sessions) =
            started(vec![WorkerProfile::default(); 4], Options::default()).await;
        sessions[0].grant(8, 1000);
        let mut suspects = Vec::new();
        for _ in 0..2 {
            suspects.push(cluster.generate(text("suspect")).await.unwrap());
            sessions[0].submit().await;
        }
        sessions[1].grant(8, 1000);
        sessions.remove(0).break_stream();
        sessions.insert(0, workers[0].session().await);
        for _ in 0..2 {
            assert_eq!(sessions[1].submit().await.attempt, 2);
        }
        sessions.remove(1).break_stream();
        sessions.insert(1, workers[1].session().await);
        // Both are running and neither has a token yet.
        let mut running = Vec::new();
        while running.len() < 2 {
            for (at, session) in sessions.iter_mut().enumerate() {
                session.grant(8, 1000);
                if let Some(Command::Submit(submit)) = session.try_command() {
                    assert_eq!(submit.attempt, 3);
                    running.push((at, submit));
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_ne!(running[0].0, running[1].0, "each alone");
        for (at, submit) in &running {
            sessions[*at].finish(submit, 0, &[EOT], STOP);
        }
        for mut suspect in suspects {
            suspect.read_to_end().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn a_request_that_only_the_larger_worker_can_hold_goes_there() {
    bounded(async {
        let large = WorkerProfile { context_tokens: 1024, ..WorkerProfile::default() };
        let (mut cluster, workers, mut sessions) =
            started(vec![WorkerProfile::default(), large], Options::default()).await;
        sessions[0].grant(8, 1000);
        wait_for_grant(&workers[0], 8).await;
        let stop = Some(v1::StopConditions { max_tokens: Some(600), ..Default::default() });
        let mut stream =
            cluster.generate(v1::GenerateRequest { stop, ..text("long") }).await.expect("one can hold it");
        sessions[1].grant(8, 1000);
        let submit = sessions[1].submit().await;
        sessions[1].finish(&submit, 0, &[EOT], STOP);
        stream.read_to_end().await.unwrap();
        assert!(sessions[0].try_command().is_none());
    })
    .await;
}

#[tokio::test]
async fn a_returned_request_with_many_choices_is_one_failure_of_its_worker() {
    bounded(async {
        let (mut cluster, workers, mut sessions) =
            started(vec![WorkerProfile::default(); 2], Options::default()).await;
        let mut two = sessions.pop().unwrap();
        let mut one = sessions.pop().unwrap();
        one.grant(16, 1000);
        let sampling = Some(v1::SamplingParams { n: Some(8), ..Default::default() });
        let mut stream = cluster.generate(v1::GenerateRequest { sampling, ..text("many") }).await.unwrap();
        let submit = one.submit().await;
        let back = |choice| sequence(&submit, choice, &[], v1::FinishReason::Cancelled);
        one.update(v1::Update { sequences: (0..8).map(back).collect(), ..Default::default() });
        two.grant(16, 1000);
        let again = two.submit().await;
        for choice in 0..8 {
            two.finish(&again, choice, &[EOT], STOP);
        }
        stream.read_to_end().await.unwrap();
        two.grant(0, 0);
        wait_for_grant(&workers[1], 0).await;
        one.grant(16, 1000);
        let mut next = cluster.generate(text("next")).await.unwrap();
        let submit = tokio::time::timeout(Duration::from_secs(2), async {
            loop {
                if let Command::Submit(submit) = one.command().await {
                    break submit;
                }
            }
        });
        let submit = submit.await.expect("one failure ejects nobody");
        one.finish(&submit, 0, &[EOT], STOP);
        next.read_to_end().await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_stream_that_cannot_move_does_not_keep_others_on_a_draining_worker() {
    bounded(async {
        let options = Options {
            dispatcher: DispatcherOptions { drain_grace: Duration::ZERO, ..DispatcherOptions::default() },
            ..Options::default()
        };
        let (mut cluster, workers, mut sessions) = started(vec![WorkerProfile::default(); 2], options).await;
        let mut two = sessions.pop().unwrap();
        let mut one = sessions.pop().unwrap();
        one.grant(8, 1000);
        let mut large = cluster.generate(text(&"large ".repeat(20))).await.unwrap();
        let of_large = one.submit().await;
        let mut small = cluster.generate(text("small")).await.unwrap();
        one.submit().await;
        one.grant(0, 0);
        wait_for_grant(&workers[0], 0).await;
        // The other worker is not idle, or it would accept a request of any size.
        two.grant(8, 1000);
        let mut other = cluster.generate(text("other")).await.unwrap();
        let of_other = two.submit().await;
        two.grant(7, 4);
        wait_for_grant(&workers[1], 7).await;
        one.update(v1::Update { draining: true, grant: Some(v1::Grant::default()), ..Default::default() });
        let moved = tokio::time::timeout(Duration::from_secs(5), two.submit());
        let moved = moved.await.expect("it has room elsewhere");
        assert_eq!(moved.attempt, 2);
        assert_ne!(moved.prompt_token_ids, of_large.prompt_token_ids);
        two.finish(&moved, 0, &[EOT], STOP);
        two.finish(&of_other, 0, &[EOT], STOP);
        one.finish(&of_large, 0, &[EOT], STOP);
        for stream in [&mut large, &mut small, &mut other] {
            stream.read_to_end().await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn oversized_updates_close_their_session() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let _cluster = Cluster::start(&[&worker], Options::default()).await;
        const MANY: usize = 1 << 19;
        let charge =
            |nth: usize| v1::TenantServiceCounter { tenant: nth.to_string(), service: 1, baseline: 0 };
        let tenants: Vec<_> = (0..MANY).map(charge).collect();
        let events = |count| v1::KvEvents { first_event: 0, events: vec![v1::KvEvent::default(); count] };
        let snapshot =
            v1::KvSnapshot { is_first: true, device_block_hashes: vec![1; MANY], ..Default::default() };
        let other = v1::ServiceTable { incarnation: "2".to_owned(), tenants: tenants.clone() };
        let lies = [
            v1::Update { services: tenants, ..Default::default() },
            v1::Update { service_tables: vec![other], ..Default::default() },
            v1::Update { service_tables: vec![v1::ServiceTable::default(); MANY], ..Default::default() },
            v1::Update { kv_snapshot: Some(snapshot), ..Default::default() },
            v1::Update { kv_events: Some(events(MANY)), ..Default::default() },
        ];
        for lie in lies {
            let mut session = worker.session().await;
            session.update(lie);
            session.ended().await;
        }
        // Each of these is within its own limit.
        let mut session = worker.session().await;
        for _ in 0..64 {
            session.update(v1::Update { kv_events: Some(events(1 << 16)), ..Default::default() });
        }
        session.ended().await;
    })
    .await;
}
