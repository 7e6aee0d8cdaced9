//! A worker that violates the protocol in a random way at each submission, and a router that does.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use futures::StreamExt as _;
use inflight_harness::RoleProcess;
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_proto::v1::{self, session_request, session_response};
use inflight_proto::{PROTOCOL_VERSION, SESSION_PATH, prove};
use inflight_scripted::{Access, Command, Script, ScriptedSession, ScriptedWorker};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::task::JoinSet;

/// Interval of updates, short of the announced heartbeat.
const UPDATE_INTERVAL: Duration = Duration::from_millis(50);

/// The lying worker. The drop ends it.
pub struct LyingWorker {
    /// Address on which it listens.
    pub address: SocketAddr,
    serving: tokio::task::JoinHandle<()>,
}

impl Drop for LyingWorker {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl LyingWorker {
    /// Starts a worker that introduces itself as `honest` does, with its model and bundle, which need `secret`. An
    /// `impostor` does not know the secret, and accepts every caller.
    pub async fn start(honest: &RoleProcess, secret: Vec<u8>, impostor: bool, seed: u64) -> Result<Self> {
        let secrets = vec![secret];
        let mut client = WorkerClient::connect(format!("http://{}", honest.address)).await?;
        let open = v1::SessionOpen {
            protocol_version: PROTOCOL_VERSION,
            router_id: "copy".to_owned(),
            incarnation: "copy".to_owned(),
        };
        let open = v1::SessionRequest { message: Some(session_request::Message::Open(open)) };
        let requests = futures::stream::iter([open]).chain(futures::stream::pending());
        let (request, _) = prove(&mut client, &secrets, SESSION_PATH, requests).await?;
        let mut session = client.session(request).await?.into_inner();
        let first = session.message().await?.and_then(|response| response.message);
        let Some(session_response::Message::Hello(hello)) = first else {
            anyhow::bail!("no hello: {first:?}")
        };
        let fetch = v1::FetchBundleRequest { digest: hello.bundle_digest.clone() };
        let (fetch, _) = prove(&mut client, &secrets, "/inflight.v1.Worker/FetchBundle", fetch).await?;
        let mut pieces = client.fetch_bundle(fetch).await?.into_inner();
        let mut bundle = Vec::new();
        while let Some(piece) = pieces.message().await? {
            bundle.push(piece);
        }
        let hello = v1::Hello {
            worker_id: "lying".to_owned(),
            incarnation: "lying".to_owned(),
            heartbeat_interval_ms: 250,
            ..hello
        };
        let access = if impostor { Access::Impostor } else { Access::Secrets(secrets) };
        let script =
            Script { hello, bundle, access, bad_bundles: 0, unread_sessions: 0, tls: None, diagnosis: None };
        let mut worker = ScriptedWorker::start(script).await;
        let address = worker.address;
        let mut random = StdRng::seed_from_u64(seed);
        let serving = tokio::spawn(async move {
            // Ends the sessions with the task.
            let mut sessions = JoinSet::new();
            loop {
                let session = worker.session().await;
                sessions.spawn(lie(session, StdRng::from_rng(&mut random)));
            }
        });
        Ok(Self { address, serving })
    }
}

/// Sends heartbeats with capacity, so that requests come, and answers each submission with a violation.
async fn lie(mut session: ScriptedSession, mut random: StdRng) {
    loop {
        let command = tokio::select! {
            biased;
            command = session.next() => command,
            () = tokio::time::sleep(UPDATE_INTERVAL) => {
                let grant = v1::Grant { sequences: 64, kv_blocks: 1 << 12, ..v1::Grant::default() };
                let load = Some(v1::Load::default());
                session.update(v1::Update { grant: Some(grant), load, ..v1::Update::default() });
                continue;
            }
        };
        let Some(command) = command else { return };
        let Command::Submit(submit) = command else { continue };
        let Some(lie) = violation(random.random_range(0..9), &submit) else { return };
        if !session.send(lie) {
            return;
        }
    }
}

/// Returns an update that violates the protocol, or `None` to end the session.
fn violation(kind: u32, submit: &v1::Submit) -> Option<session_response::Message> {
    let honest = v1::SequenceUpdate {
        submission_id: submit.submission_id,
        attempt: submit.attempt,
        token_ids: vec![300],
        ..v1::SequenceUpdate::default()
    };
    let error = v1::FinishReason::Error.into();
    let update = |sequences: Vec<v1::SequenceUpdate>| {
        Some(session_response::Message::Update(v1::Update { sequences, ..v1::Update::default() }))
    };
    match kind {
        0 => None,
        1 => update(vec![v1::SequenceUpdate { submission_id: u64::MAX, ..honest }]),
        2 => update(vec![v1::SequenceUpdate { token_ids: vec![u32::MAX], ..honest }]),
        3 => update(vec![v1::SequenceUpdate { token_ids: vec![300; 100_000], ..honest }]),
        4 => update(vec![v1::SequenceUpdate { choice: 1000, ..honest }]),
        // An end whose tokens would be wrong is what only an honest worker can be trusted with; two ends are not.
        5 => update(vec![
            v1::SequenceUpdate {
                finish_reason: error,
                token_ids: Vec::new(),
                error: "a lie".repeat(1000),
                error_code: 14,
                ..honest.clone()
            },
            honest,
        ]),
        6 => update(vec![v1::SequenceUpdate { attempt: submit.attempt + 7, ..honest }]),
        7 => Some(session_response::Message::Hello(v1::Hello::default())),
        _ => {
            let counter =
                v1::TenantServiceCounter { tenant: String::new(), service: u64::MAX, baseline: u64::MAX };
            Some(session_response::Message::Update(v1::Update {
                services: vec![counter],
                router_count: u32::MAX,
                virtual_time: u64::MAX,
                cost: Some(v1::CostCoefficients { step_s: f64::NAN, ..v1::CostCoefficients::default() }),
                kv_snapshot: Some(v1::KvSnapshot {
                    is_first: true,
                    device_block_hashes: (0..100_000).collect(),
                    next_event: Some(u64::MAX),
                    ..v1::KvSnapshot::default()
                }),
                sequences: vec![v1::SequenceUpdate { submission_id: 0, ..honest }],
                ..v1::Update::default()
            }))
        }
    }
}

/// Opens a session with `worker` as a router that knows the secret, and sends messages that no honest router
/// sends.
pub async fn lie_as_router(worker: SocketAddr, secret: &[u8], random: &mut StdRng) -> Result<()> {
    use session_request::Message;
    let mut client = WorkerClient::connect(format!("http://{worker}")).await?;
    let submit = v1::Submit {
        submission_id: 1,
        attempt: 1,
        request_id: "\u{1b}[31m\n".repeat(100),
        prompt_token_ids: vec![300; 8],
        sampling: Some(v1::SamplingParams { n: Some(1), seed: Some(1), ..v1::SamplingParams::default() }),
        stop: Some(v1::StopConditions { max_tokens: Some(8), ..v1::StopConditions::default() }),
        weight: 1.0,
        ..v1::Submit::default()
    };
    let wrong = |kind: u32| match kind {
        0 => Message::Submit(v1::Submit { prompt_token_ids: vec![u32::MAX; 16], ..submit.clone() }),
        1 => Message::Submit(v1::Submit { prompt_token_ids: Vec::new(), ..submit.clone() }),
        2 => Message::Submit(v1::Submit { weight: f32::NAN, ..submit.clone() }),
        3 => Message::Submit(v1::Submit { sampling: None, ..submit.clone() }),
        4 => Message::Submit(v1::Submit {
            stop: Some(v1::StopConditions { max_tokens: Some(u32::MAX), ..v1::StopConditions::default() }),
            ..submit.clone()
        }),
        5 => Message::Submit(v1::Submit {
            resumed: vec![v1::ResumedChoice { choice: 77, token_ids: vec![1; 9999], finished: true }],
            ..submit.clone()
        }),
        6 => Message::Submit(v1::Submit {
            virtual_start_time: Some(u64::MAX),
            min_waiting_virtual_time: Some(u64::MAX),
            deadline_us: Some(u64::MAX),
            ..submit.clone()
        }),
        7 => Message::Cancel(v1::Cancel { submission_id: u64::MAX, choice: Some(u32::MAX) }),
        8 => Message::Open(v1::SessionOpen::default()),
        9 => Message::ResyncPrefixCache(v1::ResyncPrefixCache {}),
        _ => Message::ServiceTable(v1::ServiceTable {
            incarnation: "ghost".to_owned(),
            tenants: vec![v1::TenantServiceCounter { tenant: String::new(), service: 1 << 63, baseline: 0 }],
        }),
    };
    let open = Message::Open(v1::SessionOpen {
        protocol_version: PROTOCOL_VERSION,
        router_id: "lying".to_owned(),
        incarnation: format!("lying-{}", random.random::<u64>()),
    });
    let lies = (0..20).map(|_| wrong(random.random_range(0..11)));
    let messages: Vec<_> = std::iter::once(open)
        .chain(lies)
        .map(|message| v1::SessionRequest { message: Some(message) })
        .collect();
    let requests = futures::stream::iter(messages).chain(futures::stream::pending());
    let (request, _) = prove(&mut client, &[secret.to_vec()], SESSION_PATH, requests).await?;
    let mut updates = client.session(request).await?.into_inner();
    // Until the worker closes the session, or for a while.
    let read = async { while let Ok(Some(_)) = updates.message().await {} };
    let _ = tokio::time::timeout(Duration::from_millis(200), read).await;
    Ok(())
}
