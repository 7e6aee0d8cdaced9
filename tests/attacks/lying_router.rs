//! Routers that know the secret and break the protocol: the worker ends their sessions and serves others meanwhile.

use anyhow::{Context, Result, ensure};
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_proto::v1::{self, session_request, session_response};
use inflight_proto::{PROTOCOL_VERSION, SESSION_PATH, prove};
use tokio::sync::mpsc;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::secrets::{OLD, Secrets};
use crate::worker_port::{serve, start_router, start_worker};

/// Session with a worker, by hand.
struct Session {
    requests: mpsc::Sender<v1::SessionRequest>,
    updates: Streaming<v1::SessionResponse>,
}

impl Session {
    async fn open(client: &mut WorkerClient<Channel>, router_id: &str) -> Result<Self> {
        let (requests, receiver) = mpsc::channel(16);
        let outgoing = futures::stream::unfold(receiver, async |mut receiver| {
            receiver.recv().await.map(|request| (request, receiver))
        });
        let open = v1::SessionOpen {
            protocol_version: PROTOCOL_VERSION,
            router_id: router_id.to_owned(),
            incarnation: router_id.to_owned(),
        };
        requests.send(message(session_request::Message::Open(open))).await?;
        let secret = [OLD.as_bytes().to_vec()];
        let (request, _) = prove(client, &secret, SESSION_PATH, outgoing).await?;
        let mut updates = client.session(request).await?.into_inner();
        let first = updates.message().await?.and_then(|response| response.message);
        ensure!(matches!(first, Some(session_response::Message::Hello(_))), "no hello: {first:?}");
        Ok(Self { requests, updates })
    }

    async fn send(&self, request: session_request::Message) -> Result<()> {
        Ok(self.requests.send(message(request)).await?)
    }

    /// Waits for the end of a choice.
    async fn end_of(&mut self, submission: u64) -> Result<v1::SequenceUpdate> {
        while let Some(response) = self.updates.message().await? {
            let Some(session_response::Message::Update(update)) = response.message else { continue };
            let mut ended = update.sequences.into_iter().filter(|sequence| sequence.finish_reason != 0);
            if let Some(end) = ended.find(|sequence| sequence.submission_id == submission) {
                return Ok(end);
            }
        }
        anyhow::bail!("the session ended before submission {submission}")
    }
}

fn message(message: session_request::Message) -> v1::SessionRequest {
    v1::SessionRequest { message: Some(message) }
}

fn submit(submission_id: u64, tenant: &str) -> session_request::Message {
    session_request::Message::Submit(v1::Submit {
        submission_id,
        attempt: 1,
        prompt_token_ids: vec![5, 6, 7],
        stop: Some(v1::StopConditions { max_tokens: Some(2), ignore_eos: true, ..Default::default() }),
        tenant: tenant.to_owned(),
        weight: 1.0,
        ..v1::Submit::default()
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn names_without_bound_and_reports_of_too_many_tenants_end_with_a_reason() -> Result<()> {
    let secrets = Secrets::new(&[OLD])?;
    let worker = start_worker(Some(&secrets)).await?;
    let router = start_router(&worker, Some(&secrets)).await?;
    let mut client = WorkerClient::connect(format!("http://{}", worker.address)).await?;
    let refused =
        Session::open(&mut client, &"r".repeat(513)).await.err().context("a long name was accepted")?;
    let refused = refused.downcast::<Status>()?;
    ensure!(refused.code() == Code::InvalidArgument && refused.message().contains("512"), "{refused:?}");

    let mut session = Session::open(&mut client, "liar").await?;
    session.send(submit(1, &"t".repeat(129))).await?;
    let end = session.end_of(1).await?;
    ensure!(end.error.contains("129 bytes") && end.error_code == Code::InvalidArgument as i32, "{end:?}");
    session.send(submit(2, &"t".repeat(128))).await?;
    let end = session.end_of(2).await?;
    ensure!(end.finish_reason() == v1::FinishReason::Length, "{end:?}");
    let report = |tenants: std::ops::Range<u32>| {
        let counter = |tenant: u32| v1::TenantServiceCounter {
            tenant: tenant.to_string(),
            service: 1 + u64::from(tenant),
            baseline: 0,
        };
        let tenants = tenants.map(counter).collect();
        session_request::Message::ServiceTable(v1::ServiceTable { incarnation: "gone".to_owned(), tenants })
    };
    // Every report displaces all tenants of the one before.
    for round in 0..10 {
        session.send(report(round * 10_000..(round + 1) * 10_000)).await?;
    }
    session.send(submit(3, "t")).await?;
    session.end_of(3).await?;
    session.send(report(0..10_001)).await?;
    while session.updates.message().await.is_ok_and(|message| message.is_some()) {}
    ensure!(worker.log().contains("10001 service counters"), "{}", worker.log());
    serve(&router).await
}
