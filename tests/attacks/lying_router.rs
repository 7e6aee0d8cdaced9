//! Routers that know the secret and break the protocol: the worker ends their sessions and serves others meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail, ensure};
use inflight_harness::{RoleProcess, eventually, scrape};
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_proto::v1::{self, session_request, session_response};
use inflight_proto::{PROTOCOL_VERSION, SESSION_PATH, prove};
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::program;
use crate::secrets::{OLD, Secrets};
use crate::worker_port::{serve, start_router, start_worker};

/// Session with a worker, by hand.
struct Session {
    requests: mpsc::Sender<v1::SessionRequest>,
    updates: Streaming<v1::SessionResponse>,
    /// Incarnations whose service counters the worker has passed on.
    learnt: Vec<String>,
    bundle_digest: String,
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
        let Some(session_response::Message::Hello(hello)) = first else { bail!("no hello: {first:?}") };
        Ok(Self { requests, updates, learnt: Vec::new(), bundle_digest: hello.bundle_digest })
    }

    async fn send(&self, request: session_request::Message) -> Result<()> {
        Ok(self.requests.send(message(request)).await?)
    }

    /// Waits for the end of a choice.
    async fn end_of(&mut self, submission: u64) -> Result<v1::SequenceUpdate> {
        while let Some(response) = self.updates.message().await? {
            let Some(session_response::Message::Update(update)) = response.message else { continue };
            self.learnt.extend(update.service_tables.into_iter().map(|table| table.incarnation));
            let mut ended = update.sequences.into_iter().filter(|sequence| sequence.finish_reason != 0);
            if let Some(end) = ended.find(|sequence| sequence.submission_id == submission) {
                return Ok(end);
            }
        }
        bail!("the session ended before submission {submission}")
    }
}

/// Waits until the worker has logged `text`.
async fn logs(worker: &RoleProcess, text: &str) -> Result<()> {
    eventually("the worker has logged the reason", || async {
        ensure!(worker.log().contains(text), "{}", worker.log());
        Ok(())
    })
    .await
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
    logs(&worker, "10001 service counters").await?;
    serve(&router).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impossible_service_counter_ends_its_session_and_no_other_router_receives_it() -> Result<()> {
    let secrets = Secrets::new(&[OLD])?;
    let worker = start_worker(Some(&secrets)).await?;
    let router = start_router(&worker, Some(&secrets)).await?;
    let mut client = WorkerClient::connect(format!("http://{}", worker.address)).await?;
    let report = |incarnation: &str, service| {
        let tenants = vec![v1::TenantServiceCounter { tenant: "t".to_owned(), service, baseline: 0 }];
        let incarnation = incarnation.to_owned();
        session_request::Message::ServiceTable(v1::ServiceTable { incarnation, tenants })
    };
    let mut liar = Session::open(&mut client, "liar").await?;
    // A possible report first: others receive that one.
    liar.send(report("possible", 1000)).await?;
    liar.send(report("ghost", 1 << 63)).await?;
    while liar.updates.message().await.is_ok_and(|message| message.is_some()) {}
    logs(&worker, "service counter 9223372036854775808 of incarnation").await?;
    let violations = scrape(worker.metrics).await?.total("inflight_worker_protocol_violations_total")?;
    ensure!(violations == 1.0, "{violations} violations are counted");

    let mut next = Session::open(&mut client, "next").await?;
    for submission in 1..=3 {
        next.send(submit(submission, "t")).await?;
        next.end_of(submission).await?;
    }
    ensure!(next.learnt == ["possible"], "the next router received the counters of {:?}", next.learnt);
    serve(&router).await
}

#[tokio::test(flavor = "multi_thread")]
async fn submissions_that_the_engine_has_not_taken_hold_at_most_256_mib() -> Result<()> {
    const MIB: f64 = (1 << 20) as f64;
    let secrets = Secrets::new(&[OLD])?;
    // The engine takes submissions between steps, of which the first lasts until the test is over.
    let flags = [
        "--device=sim:flat,step=60,prompt_token=0,pool_tokens=300000",
        "--max-context-tokens=262144",
        &secrets.flag("secret-file"),
    ];
    // With a single malloc arena, threads reuse the memory that others have freed.
    let environment = [("MALLOC_ARENA_MAX".to_owned(), "1".to_owned())];
    let worker =
        RoleProcess::start_with_env(program().to_owned(), "worker", &flags.map(str::to_owned), &environment)
            .await?;
    let mut client = WorkerClient::connect(format!("http://{}", worker.address)).await?;
    let session = Session::open(&mut client, "eager").await?;
    let sample = |name: &'static str| {
        let metrics = worker.metrics;
        async move { anyhow::Ok(scrape(metrics).await?.total(name)? / MIB) }
    };
    let before = sample("process_resident_memory_peak_bytes").await?;
    // 512 KiB each in the worker.
    let prompt = vec![5; 128 << 10];
    let (requests, sent) = (session.requests.clone(), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&sent);
    let _submitting = AbortOnDropHandle::new(tokio::spawn(async move {
        for submission_id in 1.. {
            let session_request::Message::Submit(small) = submit(submission_id, "t") else { continue };
            let large = v1::Submit { prompt_token_ids: prompt.clone(), ..small };
            if requests.send(message(session_request::Message::Submit(large))).await.is_err() {
                break;
            }
            counted.fetch_add(1, Ordering::Relaxed);
        }
    }));
    let mut before_sample = 0;
    let (queued, peak) = eventually("the queue is full, and the worker reads no further", || {
        let (now, last) = (sent.load(Ordering::Relaxed), before_sample);
        before_sample = now;
        let sample = &sample;
        async move {
            let queued = sample("inflight_worker_queued_submission_bytes").await?;
            ensure!(queued > 255.0 && now == last, "{queued} MiB are queued after {now} submissions");
            Ok((queued, sample("process_resident_memory_peak_bytes").await?))
        }
    })
    .await?;
    let sent = sent.load(Ordering::Relaxed);
    println!(
        "{sent} submissions, {queued:.1} MiB queued; the worker's peak of memory was {before:.0}, {peak:.0} MiB"
    );
    ensure!(queued <= 256.0, "{queued} MiB are queued");
    ensure!(sent < 600, "{sent} submissions of 512 KiB were read");
    ensure!(peak - before < 2.0 * 256.0, "the worker took {:.0} MiB", peak - before);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_that_a_peer_does_not_read_is_counted_until_it_leaves() -> Result<()> {
    let secrets = Secrets::new(&[OLD])?;
    let worker = start_worker(Some(&secrets)).await?;
    // The bundle has some 50 KB, of which 1 KiB may be sent before it is read.
    let endpoint = Channel::from_shared(format!("http://{}", worker.address))?;
    let mut client = WorkerClient::new(endpoint.initial_stream_window_size(1 << 10).connect().await?);
    let session = Session::open(&mut client, "idle").await?;
    let fetch = v1::FetchBundleRequest { digest: session.bundle_digest.clone() };
    let (request, _) =
        prove(&mut client, &[OLD.as_bytes().to_vec()], "/inflight.v1.Worker/FetchBundle", fetch).await?;
    let unread = client.fetch_bundle(request).await?;
    let worker_metrics = worker.metrics;
    let counted = |expected: bool| {
        eventually("the response is counted while it is unread", move || async move {
            let unread = scrape(worker_metrics).await?.total("inflight_worker_unread_bytes")?;
            ensure!((unread > 0.0) == expected, "{unread} bytes are unread");
            Ok(())
        })
    };
    counted(true).await?;
    drop(unread);
    counted(false).await
}
