//! Client certificates: a worker and a router that require one serve nobody without it, and it does not replace the secret.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use futures::{StreamExt as _, stream};
use inflight_fixtures::TempDir;
use inflight_harness::RoleProcess;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::session_request::Message;
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_proto::v1::{ChallengeRequest, DiagnoseRequest, ListModelsRequest, SessionOpen, SessionRequest};
use inflight_proto::{PROTOCOL_VERSION, SESSION_PATH, prove};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request};

use crate::program;
use crate::secrets::{NEW, OLD, Secrets};
use crate::worker_port::serve;

/// Host name in all certificates.
const NAME: &str = "inflight.test";

/// Certificate authority with one certificate, and their files.
struct Authority {
    folder: TempDir,
    pem: String,
    certificate: String,
    key: String,
}

impl Authority {
    fn new() -> Result<Self> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(vec![NAME.to_owned()])?.signed_by(&key, &issuer)?;
        let authority = Self {
            folder: TempDir::new("certificates")?,
            pem: issuer.pem(),
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        };
        std::fs::write(authority.path("ca"), &authority.pem)?;
        std::fs::write(authority.path("certificate"), &authority.certificate)?;
        std::fs::write(authority.path("key"), &authority.key)?;
        Ok(authority)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    /// Flags of a server that requires certificates of this authority.
    fn server_flags(&self) -> Vec<String> {
        [("tls-cert", "certificate"), ("tls-key", "key"), ("tls-client-ca", "ca")]
            .map(|(name, file)| format!("--{name}={}", self.path(file).display()))
            .to_vec()
    }

    fn identity(&self) -> Identity {
        Identity::from_pem(&self.certificate, &self.key)
    }

    /// Returns a connection to a server of this authority that shows `identity`.
    async fn connect(&self, server: &RoleProcess, identity: Option<Identity>) -> Result<Channel> {
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&self.pem)).domain_name(NAME);
        let tls = match identity {
            Some(identity) => tls.identity(identity),
            None => tls,
        };
        let endpoint = Endpoint::from_shared(format!("https://{}", server.address))?.tls_config(tls)?;
        Ok(endpoint.connect().await?)
    }
}

fn open() -> impl futures::Stream<Item = SessionRequest> + Send + 'static {
    let open = SessionOpen {
        protocol_version: PROTOCOL_VERSION,
        router_id: "r".to_owned(),
        incarnation: "r".to_owned(),
    };
    stream::iter([SessionRequest { message: Some(Message::Open(open)) }]).chain(stream::pending())
}

/// Whether a worker answers the only call that needs no secret. With TLS 1.3, a refused certificate shows in the first call.
async fn answers(channel: Result<Channel>) -> bool {
    match channel {
        Ok(channel) => WorkerClient::new(channel).challenge(ChallengeRequest {}).await.is_ok(),
        Err(_) => false,
    }
}

async fn start_worker(flags: Vec<String>) -> Result<RoleProcess> {
    let small = ["--threads=1", "--kv-cache-bytes=16MiB", "--host-cache-bytes=0"].map(str::to_owned);
    RoleProcess::start(program().to_owned(), "worker", &[&small[..], &flags].concat()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_requires_certificates_opens_sessions_for_those_of_its_authority_alone() -> Result<()> {
    let (authority, foreign) = (Authority::new()?, Authority::new()?);
    let worker = start_worker(authority.server_flags()).await?;
    ensure!(!answers(authority.connect(&worker, None).await).await, "without a certificate");
    ensure!(
        !answers(authority.connect(&worker, Some(foreign.identity())).await).await,
        "of another authority"
    );
    let channel = authority.connect(&worker, Some(authority.identity())).await?;
    let mut updates = WorkerClient::new(channel).session(open()).await?.into_inner();
    ensure!(updates.message().await?.is_some(), "the worker said no hello");
    // As a router does.
    let flags = [("ca", "ca"), ("cert", "certificate"), ("key", "key")]
        .map(|(name, file)| format!("--worker-tls-{name}={}", authority.path(file).display()));
    let further = [format!("--worker-tls-name={NAME}"), format!("--workers={}", worker.address)];
    let router = RoleProcess::start(program().to_owned(), "router", &[&flags[..], &further].concat()).await?;
    serve(&router).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_does_not_replace_the_secret_of_a_worker_that_has_both() -> Result<()> {
    let (authority, secrets) = (Authority::new()?, Secrets::new(&[OLD])?);
    let worker = start_worker([authority.server_flags(), vec![secrets.flag("secret-file")]].concat()).await?;
    let channel = authority.connect(&worker, Some(authority.identity())).await?;
    let mut client = WorkerClient::new(channel);
    let unproved = client.diagnose(DiagnoseRequest::default()).await.err().context("it was answered")?;
    ensure!(unproved.code() == Code::Unauthenticated, "{unproved:?}");
    for (secret, accepted) in [(NEW, false), (OLD, true)] {
        let (request, _) = prove(&mut client, &[secret.as_bytes().to_vec()], SESSION_PATH, open()).await?;
        let session = client.session(request).await;
        ensure!(session.is_ok() == accepted, "{secret}: {:?}", session.err());
    }
    ensure!(
        !answers(authority.connect(&worker, None).await).await,
        "the secret does not replace the certificate"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_that_requires_certificates_serves_nobody_without_one() -> Result<()> {
    let (authority, foreign) = (Authority::new()?, Authority::new()?);
    let flags = [authority.server_flags(), vec!["--workers=127.0.0.1:9".to_owned()]].concat();
    let router = RoleProcess::start(program().to_owned(), "router", &flags).await?;
    let lists = async |identity: Option<Identity>| match authority.connect(&router, identity).await {
        Ok(channel) => {
            InferenceClient::new(channel).list_models(Request::new(ListModelsRequest {})).await.is_ok()
        }
        Err(_) => false,
    };
    ensure!(!lists(None).await && !lists(Some(foreign.identity())).await);
    ensure!(lists(Some(authority.identity())).await);
    Ok(())
}
