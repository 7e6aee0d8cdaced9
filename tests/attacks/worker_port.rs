//! Strangers at the port of a worker, and workers that do not belong to the cluster.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use inflight_fixtures::TempDir;
use inflight_harness::{RoleProcess, eventually, run, scrape};
use inflight_proto::v1::session_request::Message;
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_proto::v1::{
    ChallengeRequest, DiagnoseRequest, FetchBundleRequest, ListModelsRequest, ObserveRequest, SessionOpen,
    SessionRequest,
};
use inflight_proto::{CHALLENGE_AGE_MAX, CallProof, PROTOCOL_VERSION, SESSION_PATH, prove};
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::lying_worker::LyingWorker;
use crate::secrets::{NEW, OLD, Secrets};
use crate::{program, short_request};

pub async fn start_worker(secrets: Option<&Secrets>) -> Result<RoleProcess> {
    let mut flags =
        ["--threads=1", "--kv-cache-bytes=16MiB", "--host-cache-bytes=0"].map(str::to_owned).to_vec();
    flags.extend(secrets.map(|secrets| secrets.flag("secret-file")));
    RoleProcess::start(program().to_owned(), "worker", &flags).await
}

pub async fn start_router(worker: &RoleProcess, secrets: Option<&Secrets>) -> Result<RoleProcess> {
    let mut flags = vec![format!("--workers={}", worker.address)];
    flags.extend(secrets.map(|secrets| secrets.flag("worker-secret-file")));
    RoleProcess::start(program().to_owned(), "router", &flags).await
}

async fn connect(worker: &RoleProcess) -> Result<WorkerClient<Channel>> {
    Ok(WorkerClient::connect(format!("http://{}", worker.address)).await?)
}

fn open() -> impl futures::Stream<Item = SessionRequest> + Send + 'static {
    let open = SessionOpen {
        protocol_version: PROTOCOL_VERSION,
        router_id: "stranger".to_owned(),
        incarnation: "stranger".to_owned(),
    };
    futures::StreamExt::chain(
        futures::stream::iter([SessionRequest { message: Some(Message::Open(open)) }]),
        futures::stream::pending(),
    )
}

/// Waits until the router has a worker, and completes a request.
pub async fn serve(router: &RoleProcess) -> Result<()> {
    eventually("a worker is connected", || async {
        let models = router.client()?.list_models(ListModelsRequest {}).await?.into_inner().models;
        ensure!(!models.is_empty(), "the router has no models");
        Ok(())
    })
    .await?;
    let mut stream = router.client()?.generate(short_request()).await?.into_inner();
    while stream.message().await?.is_some() {}
    Ok(())
}

/// The status must reject for want of authentication, and say nothing about the worker.
fn rejected<T>(answer: Result<T, Status>, what: &str) -> Result<()> {
    let status = answer.err().with_context(|| format!("{what} was answered"))?;
    ensure!(status.code() == Code::Unauthenticated, "{what}: {status:?}");
    ensure!(status.message().contains("--worker-secret-file"), "{what} names no option: {status:?}");
    ensure!(!status.message().contains("inflight-demo"), "{what} names the model: {status:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_learns_the_protocol_version_and_nothing_else() -> Result<()> {
    let secrets = Secrets::new(&[OLD])?;
    let worker = start_worker(Some(&secrets)).await?;
    let router = start_router(&worker, Some(&secrets)).await?;
    serve(&router).await?;

    let mut stranger = connect(&worker).await?;
    let challenge = stranger.challenge(ChallengeRequest {}).await?.into_inner();
    ensure!(challenge.protocol_version == PROTOCOL_VERSION && challenge.challenge.len() == 40);
    rejected(stranger.session(open()).await, "a session")?;
    rejected(stranger.fetch_bundle(FetchBundleRequest::default()).await, "the bundle")?;
    rejected(stranger.diagnose(DiagnoseRequest::default()).await, "a diagnosis")?;
    rejected(stranger.observe(ObserveRequest::default()).await, "the observation of iterations")?;
    let channel = Channel::from_shared(format!("http://{}", worker.address))?.connect().await?;
    for path in [
        "/grpc.health.v1.Health/Check",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "/inflight.v1.Worker/Unknown",
    ] {
        let mut raw = tonic::client::Grpc::new(channel.clone());
        raw.ready().await?;
        let codec = inflight_proto::StrictCodec::<ChallengeRequest, ChallengeRequest>::default();
        let answer = raw.unary(Request::new(ChallengeRequest {}), path.parse()?, codec).await;
        rejected(answer, path)?;
    }
    // A guessed secret is no better.
    let guess = [NEW.as_bytes().to_vec()];
    let (request, _) = prove(&mut stranger, &guess, SESSION_PATH, open()).await?;
    rejected(stranger.session(request).await, "a session with a guessed secret")?;
    let rejections = scrape(worker.metrics).await?.total("inflight_worker_unauthenticated_calls_total")?;
    ensure!(rejections == 8.0, "{rejections} rejections were counted");
    serve(&router).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proof_is_valid_for_one_call_of_its_method() -> Result<()> {
    let secrets = Secrets::new(&[OLD])?;
    let worker = start_worker(Some(&secrets)).await?;
    let mut client = connect(&worker).await?;
    let secret = [OLD.as_bytes().to_vec()];
    let challenge = client.challenge(ChallengeRequest {}).await?.into_inner().challenge;
    let proof = CallProof::new(&secret, "/inflight.v1.Worker/Diagnose", &challenge);
    let proved = || {
        let mut request = Request::new(DiagnoseRequest::default());
        proof.insert(request.metadata_mut());
        request
    };
    let mut session = Request::new(open());
    proof.insert(session.metadata_mut());
    rejected(client.session(session).await, "a session with the proof of another method")?;
    client.diagnose(proved()).await?;
    rejected(client.diagnose(proved()).await, "a proof that was used")?;
    ensure!(CHALLENGE_AGE_MAX.as_secs() == 60, "the documents say a minute");

    // Both prove the secret: the router to open the session, the worker in its first message.
    let (request, proof) = prove(&mut client, &secret, SESSION_PATH, open()).await?;
    let mut updates = client.session(request).await?.into_inner();
    let hello = match updates.message().await?.and_then(|response| response.message) {
        Some(inflight_proto::v1::session_response::Message::Hello(hello)) => hello,
        other => anyhow::bail!("expected hello, got {other:?}"),
    };
    ensure!(proof.context("with a secret")?.verify_answer(&hello.secret_proof));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_serves_from_no_worker_that_does_not_know_the_secret() -> Result<()> {
    let (own, foreign) = (Secrets::new(&[OLD])?, Secrets::new(&[NEW])?);
    for (of_worker, of_router, clue) in [
        (None, Some(&own), "the worker has no secret"),
        (Some(&foreign), Some(&own), "different secrets"),
        (Some(&own), None, "no proof of the shared secret"),
    ] {
        let worker = start_worker(of_worker).await?;
        let router = start_router(&worker, of_router).await?;
        let logged = || async {
            ensure!(router.log().contains(clue), "{}", router.log());
            Ok(())
        };
        eventually("the log says why", logged).await?;
        let answer = router.client()?.list_models(ListModelsRequest {}).await?.into_inner();
        ensure!(answer.models.is_empty(), "{answer:?}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_sends_no_request_to_an_impostor_that_accepts_every_proof() -> Result<()> {
    let secrets = Secrets::new(&[OLD])?;
    let worker = start_worker(Some(&secrets)).await?;
    let impostor = LyingWorker::start(&worker, OLD.as_bytes().to_vec(), true, 0).await?;
    let flags = [format!("--workers={}", impostor.address), secrets.flag("worker-secret-file")];
    let router = RoleProcess::start(program().to_owned(), "router", &flags).await?;
    let logged = || async {
        ensure!(router.log().contains("did not prove it"), "{}", router.log());
        Ok(())
    };
    eventually("the log says why", logged).await?;
    let answer = router.client()?.list_models(ListModelsRequest {}).await?.into_inner();
    ensure!(answer.models.is_empty(), "{answer:?}");
    Ok(())
}

/// Whether `inflight diagnose` succeeds with the first secret of a file.
async fn diagnoses(worker: &RoleProcess, secret: &Path) -> Result<bool> {
    let flag = format!("--worker-secret-file={}", secret.display());
    let diagnosed = run(program(), &["diagnose", &flag, &worker.address.to_string()], "").await?;
    Ok(diagnosed.code == Some(0))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_replaced_while_everything_runs() -> Result<()> {
    let secrets = Secrets::new(&[OLD])?;
    let (old, new) = (Secrets::new(&[OLD])?, Secrets::new(&[NEW])?);
    let mut worker = start_worker(Some(&secrets)).await?;
    let router = start_router(&worker, Some(&secrets)).await?;
    let mut accepted = Vec::new();
    for lines in [&[OLD][..], &[OLD, NEW], &[NEW, OLD], &[NEW]] {
        secrets.write(lines)?;
        // A new session with the secrets of now; the processes that read them are the same.
        worker.signal(libc::SIGKILL)?;
        worker.wait().await?;
        worker.restart().await?;
        serve(&router).await?;
        accepted.push((diagnoses(&worker, &old.path()).await?, diagnoses(&worker, &new.path()).await?));
    }
    ensure!(accepted == [(true, false), (true, true), (true, true), (false, true)], "{accepted:?}");

    // The worker rereads the file, too; a broken file changes nothing.
    secrets.write(&[OLD])?;
    ensure!(diagnoses(&worker, &old.path()).await? && !diagnoses(&worker, &new.path()).await?);
    secrets.write(&["short"])?;
    ensure!(diagnoses(&worker, &old.path()).await?);
    serve(&router).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_without_authentication_listens_on_loopback_only() -> Result<()> {
    let everywhere = "--listen=0.0.0.0:0";
    let refused = run(program(), &["worker", everywhere, "--metrics-listen=off"], "").await?;
    ensure!(refused.code == Some(2) && refused.stdout.is_empty(), "{refused:?}");
    for clue in ["0.0.0.0:0", "--secret-file", "--tls-client-ca", "--insecure"] {
        ensure!(refused.stderr.contains(clue), "no {clue} in {}", refused.stderr);
    }
    let folder = TempDir::new("secrets")?;
    let short = folder.path().join("short");
    std::fs::write(&short, "secret")?;
    let flag = format!("--secret-file={}", short.display());
    let refused = run(program(), &["worker", everywhere, &flag], "").await?;
    ensure!(refused.code != Some(0) && refused.stderr.contains("it needs 32 or more"), "{refused:?}");
    Ok(())
}
