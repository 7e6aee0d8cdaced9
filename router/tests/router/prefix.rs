//! Prefix-cache events of workers and the placement that follows from them.

use inflight_contract::BlockHash;
use inflight_proto::v1;
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::kv_event::Event;
use inflight_router::{Options, PlacementKind};

use crate::cluster::{Cluster, bounded};
use inflight_scripted::{Command, ScriptedSession, ScriptedWorker, WorkerProfile};

const STOP: v1::FinishReason = v1::FinishReason::Stop;
/// Tokens per block of the scripted workers.
const BLOCK: usize = 16;

fn prompt() -> Vec<u32> {
    (0..200).map(|at| at % 250).collect()
}

fn request(tenant: &str) -> v1::GenerateRequest {
    v1::GenerateRequest {
        input: Some(Input::TokenIds(v1::TokenIds { ids: prompt() })),
        tenant: tenant.to_owned(),
        ..Default::default()
    }
}

fn chain(tenant: &str) -> Vec<u64> {
    let mut chain = Vec::new();
    BlockHash::extend_chain(&mut chain, BlockHash::root(tenant), &prompt(), BLOCK);
    chain.into_iter().map(BlockHash::short).collect()
}

fn stored(first: u64, blocks: impl IntoIterator<Item = u64>) -> v1::Update {
    let event = |block| v1::KvEvent { event: Some(Event::Stored(block)) };
    let events = blocks.into_iter().map(event).collect();
    v1::Update { kv_events: Some(v1::KvEvents { first_event: first, events }), ..Default::default() }
}

fn snapshot(first: bool, device: Vec<u64>, next: Option<u64>) -> v1::Update {
    let piece = v1::KvSnapshot {
        is_first: first,
        device_block_hashes: device,
        host_block_hashes: Vec::new(),
        next_event: next,
    };
    v1::Update { kv_snapshot: Some(piece), ..Default::default() }
}

/// Runs a request to its end. Returns the index of its worker.
async fn place(cluster: &mut Cluster, tenant: &str, sessions: &mut [ScriptedSession; 2]) -> usize {
    let mut stream = cluster.generate(request(tenant)).await.unwrap();
    let [first, second] = sessions;
    let (worker, submit) = tokio::select! {
        submit = first.submit() => (0, submit),
        submit = second.submit() => (1, submit),
    };
    sessions[worker].finish(&submit, 0, &[65, 284], STOP);
    stream.read_to_end().await.unwrap();
    worker
}

#[tokio::test]
async fn requests_are_placed_by_their_tenants_prefix() {
    bounded(async {
        for placement in [PlacementKind::Cost, PlacementKind::Prefix] {
            let mut workers = [
                ScriptedWorker::start(WorkerProfile::default()).await,
                ScriptedWorker::start(WorkerProfile::default()).await,
            ];
            let options = Options { placement, ..Options::default() };
            let mut cluster = Cluster::start(&[&workers[0], &workers[1]], options).await;
            let mut sessions = [workers[0].granted().await, workers[1].session().await];
            cluster.handle.ready().await;
            // The second worker reports its cache by snapshot and events before it has a grant.
            let chain = chain("a");
            sessions[1].update(snapshot(true, chain[..5].to_vec(), None));
            sessions[1].update(snapshot(false, chain[5..9].to_vec(), Some(40)));
            sessions[1].update(stored(40, chain[9..].to_vec()));
            sessions[1].grant(64, 1 << 16);
            while place(&mut cluster, "a", &mut sessions).await == 0 {}
            for _ in 0..5 {
                assert_eq!(
                    place(&mut cluster, "a", &mut sessions).await,
                    1,
                    "{placement}: it has the prefix"
                );
            }
            let mut others = Vec::new();
            for _ in 0..6 {
                others.push(place(&mut cluster, "b", &mut sessions).await);
            }
            assert!(others.contains(&0), "{placement}: the prefix is not theirs, {others:?}");
            // The second worker has evicted it, and the first has cached it.
            let removed = chain.iter().map(|block| v1::KvEvent { event: Some(Event::Removed(*block)) });
            let first = 40 + chain[9..].len() as u64;
            let events = v1::KvEvents { first_event: first, events: removed.collect() };
            sessions[1].update(v1::Update { kv_events: Some(events), ..Default::default() });
            sessions[0].update(snapshot(true, chain.clone(), Some(7)));
            while place(&mut cluster, "a", &mut sessions).await == 1 {}
            for _ in 0..5 {
                assert_eq!(
                    place(&mut cluster, "a", &mut sessions).await,
                    0,
                    "{placement}: now the first has it"
                );
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_gap_in_the_events_causes_one_snapshot_request() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        session.update(snapshot(true, vec![1, 2, 3], Some(3)));
        session.update(stored(3, [4]));
        session.update(stored(9, [5]));
        session.update(stored(14, [6]));
        assert!(matches!(session.command().await, Command::ResyncPrefixCache(_)));
        // Parts of a snapshot without its first part are dropped.
        session.update(snapshot(false, vec![7], Some(20)));
        session.update(snapshot(true, vec![1], Some(30)));
        session.update(stored(30, [8]));
        session.update(stored(40, [9]));
        assert!(matches!(session.command().await, Command::ResyncPrefixCache(_)), "once for each loss");
        // Requests are served meanwhile.
        let mut stream = cluster.generate(request("a")).await.unwrap();
        let submit = session.submit().await;
        session.finish(&submit, 0, &[65, 284], STOP);
        stream.read_to_end().await.unwrap();
        assert!(session.try_command().is_none());
    })
    .await;
}

#[tokio::test]
async fn a_worker_that_reports_too_many_blocks_keeps_its_requests() {
    bounded(async {
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let mut cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        session.update(snapshot(true, (0..(1 << 16) + 1).collect(), Some(3)));
        session.update(stored(3, [1 << 20]));
        session.update(stored(99, [1 << 20]));
        for _ in 0..3 {
            let mut stream = cluster.generate(request("a")).await.unwrap();
            let submit = session.submit().await;
            session.finish(&submit, 0, &[65, 284], STOP);
            stream.read_to_end().await.unwrap();
        }
        assert!(session.try_command().is_none(), "it is not asked again");
    })
    .await;
}
