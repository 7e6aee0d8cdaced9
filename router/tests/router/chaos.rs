use std::collections::{BTreeMap, BTreeSet};

use inflight_proto::v1;
use inflight_proto::v1::session_request::Message;
use inflight_router::{Command, DispatcherOptions, Options, WorkerCommand};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::cluster::{Cluster, Generated, bounded, metrics, queue_of, text, tokens};
use inflight_scripted::{ScriptedSession, ScriptedWorker, WorkerProfile, sequence};

/// Token id of `<|eot_id|>`.
const EOT: u32 = 284;
const CALLS: usize = 1000;

/// Output of every worker for a prompt, and so the expected output of every client.
fn answer(name: &str) -> String {
    format!("{name}: caf\u{e9} \u{1f642} {name}")
}

/// Requests of a session: the submission and its running choices, with the tokens left to send.
type Running = BTreeMap<u64, (v1::Submit, BTreeMap<u32, Vec<u32>>)>;

fn begin(submit: v1::Submit) -> (v1::Submit, BTreeMap<u32, Vec<u32>>) {
    let whole = [tokens(&answer(&submit.request_id)), vec![EOT]].concat();
    let n = submit.sampling.as_ref().unwrap().n.unwrap();
    let choices = (0..n).filter_map(|choice| {
        let resumed = submit.resumed.iter().find(|resumed| resumed.choice == choice);
        if resumed.is_some_and(|resumed| resumed.finished) {
            return None;
        }
        let had = resumed.map_or(&[][..], |resumed| &resumed.token_ids);
        assert!(whole.starts_with(had), "a worker resumes from what workers sent");
        Some((choice, whole[had.len()..].to_vec()))
    });
    let choices = choices.collect();
    (submit, choices)
}

fn cancel(session: &ScriptedSession, running: &mut Running, cancel: v1::Cancel) {
    // A cancel may cross with the end of its request.
    let Some((submit, choices)) = running.get_mut(&cancel.submission_id) else { return };
    let ended: Vec<u32> =
        choices.keys().copied().filter(|choice| cancel.choice.is_none_or(|only| only == *choice)).collect();
    for choice in ended {
        choices.remove(&choice);
        session.finish(submit, choice, &[], v1::FinishReason::Cancelled);
    }
    running.retain(|_, (_, choices)| !choices.is_empty());
}

/// Plays a worker until the test ends: generates, and at random breaks its session or shrinks its grant.
async fn play(mut worker: ScriptedWorker, seed: u64, quiet: tokio_util::sync::CancellationToken) {
    let mut random = StdRng::seed_from_u64(seed);
    'sessions: loop {
        let mut session = worker.session().await;
        session.grant(8, 64);
        let mut running = Running::new();
        loop {
            while let Some(command) = session.try_command() {
                match command {
                    Message::Submit(submit) => {
                        running.insert(submit.submission_id, begin(submit));
                    }
                    Message::Cancel(message) => cancel(&session, &mut running, message),
                    other => panic!("a session does not get {other:?}"),
                }
            }
            if !quiet.is_cancelled() && random.random_ratio(1, 300) {
                session.break_stream();
                continue 'sessions;
            }
            let mut update = v1::Update::default();
            for (submit, choices) in running.values_mut() {
                for (choice, left) in choices.iter_mut() {
                    let count = random.random_range(0..=3).min(left.len());
                    let now: Vec<u32> = left.drain(..count).collect();
                    let reason =
                        if left.is_empty() { v1::FinishReason::Stop } else { v1::FinishReason::Unspecified };
                    update.sequences.push(sequence(submit, *choice, &now, reason));
                }
                choices.retain(|_, left| !left.is_empty());
            }
            running.retain(|_, (_, choices)| !choices.is_empty());
            let (sequences, blocks) = if quiet.is_cancelled() {
                (8, 64)
            } else {
                (random.random_range(0..12), random.random_range(0..64))
            };
            update.grant = Some(v1::Grant { sequences, kv_blocks: blocks, priority_sequences: 0 });
            session.update(update);
            tokio::task::yield_now().await;
        }
    }
}

/// Runs one client, which leaves early or reads to the end.
async fn call(cluster: &Cluster, name: String, n: u32, leaves_after: Option<usize>) {
    let request = v1::GenerateRequest {
        request_id: name.clone(),
        sampling: Some(v1::SamplingParams { n: Some(n), ..Default::default() }),
        ..text(&name)
    };
    let stream = cluster.client.clone().generate(request).await.unwrap().into_inner();
    let mut generated = Generated::from(stream);
    if let Some(messages) = leaves_after {
        for _ in 0..messages {
            if !generated.advance().await.unwrap() {
                return;
            }
        }
        return;
    }
    generated.read_to_end().await.unwrap();
    let expected = answer(&name);
    for choice in 0..n as usize {
        assert_eq!(generated.text[choice], expected, "choice {choice} of {name}");
    }
    let each = tokens(&expected).len() as u32 + 1;
    assert_eq!(generated.usage().completion_tokens, n * each, "tokens of {name}");
}

#[tokio::test]
async fn streams_stay_complete_and_credits_return_under_losses_and_cancels() {
    for seed in [1, 2, 3] {
        println!("seed {seed}");
        bounded(one_run(seed)).await;
    }
}

async fn one_run(seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let workers = [
        ScriptedWorker::start(WorkerProfile::default()).await,
        ScriptedWorker::start(WorkerProfile::default()).await,
        ScriptedWorker::start(WorkerProfile::default()).await,
    ];
    let recording = std::env::temp_dir().join(format!("inflight-chaos-{}-{seed}", std::process::id()));
    let options = Options {
        dispatcher: DispatcherOptions { retry_burst: 1 << 20, ..queue_of(CALLS) },
        streams_max: CALLS,
        record: Some(recording.clone()),
        ..Options::default()
    };
    let cluster = Cluster::start(&[&workers[0], &workers[1], &workers[2]], options).await;
    let addresses: BTreeSet<String> = workers.iter().map(|worker| worker.address.to_string()).collect();
    let quiet = tokio_util::sync::CancellationToken::new();
    let mut players = tokio::task::JoinSet::new();
    for worker in workers {
        players.spawn(play(worker, random.random(), quiet.clone()));
    }
    cluster.handle.ready().await;
    let calls = (0..CALLS).map(|i| {
        let leaves_after = random.random_bool(0.4).then(|| random.random_range(0..8));
        call(&cluster, format!("call {i}"), random.random_range(1..4), leaves_after)
    });
    let calls: Vec<_> = calls.collect();
    tokio::select! {
        _ = futures::future::join_all(calls) => {}
        Some(played) = players.join_next() => panic!("a worker's script failed: {played:?}"),
    }
    quiet.cancel();
    let zero =
        |kind: &str, address: &String| format!("inflight_router_worker_{kind}{{worker=\"{address}\"}} 0");
    let settled = |rendered: &str| {
        addresses.iter().all(|address| {
            ["requests", "sequences", "blocks"]
                .iter()
                .all(|kind| rendered.lines().any(|line| line == zero(kind, address)))
        })
    };
    while !settled(&metrics().render()) {
        tokio::task::yield_now().await;
    }
    cluster.drain.cancel();
    cluster.serving.await.unwrap().unwrap();
    let log = std::fs::read(&recording).unwrap();
    std::fs::remove_file(&recording).unwrap();
    let mut submissions = 0;
    let replayed = inflight_router::replay(&log, |_, _, commands| {
        let submits =
            |command: &&Command| matches!(command, Command::Worker { command: WorkerCommand::Submit(_), .. });
        submissions += commands.iter().filter(submits).count();
    });
    assert!(matches!(replayed, Ok(events) if events > CALLS as u64), "{replayed:?}");
    // Some clients leave before their request is dispatched; others are dispatched several times.
    assert!(submissions > CALLS / 2, "{submissions}");
}
