//! TLS, client certificates, and the bounds of connections.

use std::path::PathBuf;
use std::time::Duration;

use inflight_proto::v1;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_router::Options;
use inflight_transport::{ClientTls, Limits, ServerTlsFiles};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request};

use crate::cluster::{Cluster, bounded, text};
use crate::tenants::{Folder, digest, with_key};
use crate::worker::{Profile, ScriptedWorker};

/// An authority that issues certificates.
struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in PEM.
struct Issued {
    certificate: String,
    key: String,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn pem(&self) -> String {
        self.0.pem()
    }

    /// For a host, or for a URI where it looks like one.
    fn issue(&self, name: &str) -> Issued {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        let name = name.try_into().unwrap();
        params.subject_alt_names.push(SanType::DnsName(name));
        self.sign(params)
    }

    fn issue_uri(&self, uri: &str) -> Issued {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.subject_alt_names.push(SanType::URI(uri.try_into().unwrap()));
        self.sign(params)
    }

    fn sign(&self, params: CertificateParams) -> Issued {
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap().pem();
        Issued { certificate, key: key.serialize_pem() }
    }
}

fn files(folder: &Folder, authority: &Authority, issued: &Issued) -> ServerTlsFiles {
    ServerTlsFiles {
        certificate: folder.write("tls.crt", &issued.certificate),
        key: folder.write("tls.key", &issued.key),
        client_ca: Some(folder.write("ca.crt", &authority.pem())),
        client_optional: true,
    }
}

async fn connect(
    cluster: &Cluster,
    trusted: &Authority,
    shown: Option<&Issued>,
) -> Result<Channel, tonic::transport::Error> {
    let ca = Certificate::from_pem(trusted.pem());
    let mut tls = ClientTlsConfig::new().ca_certificate(ca).domain_name("router.test");
    if let Some(issued) = shown {
        tls = tls.identity(Identity::from_pem(&issued.certificate, &issued.key));
    }
    let endpoint = Endpoint::from_shared(format!("https://{}", cluster.address)).unwrap();
    endpoint.tls_config(tls).unwrap().connect().await
}

/// What becomes of a call; TLS 1.3 lets a client see only then that its certificate was refused.
async fn call(channel: Channel, key: Option<&str>) -> Result<(), Code> {
    let mut client = InferenceClient::new(channel);
    let request = v1::ListModelsRequest {};
    let request = key.map_or_else(|| Request::new(request), |key| with_key(request, key));
    client.list_models(request).await.map(|_| ()).map_err(|status| status.code())
}

#[tokio::test]
async fn clients_come_by_tls_with_a_key_or_a_certificate_and_none_by_a_wrong_one() {
    bounded(async {
        let (authority, stranger, folder) = (Authority::new(), Authority::new(), Folder::new());
        let server = authority.issue("router.test");
        let tenants = format!(
            "[tenants.machine]\ncertificates = [\"spiffe://test/machine\"]\n[tenants.person]\nkeys = [{{ sha256 = \"{}\" }}]\n",
            digest("key")
        );
        let options = Options {
            tls: Some(files(&folder, &authority, &server)),
            tenants_file: Some(folder.write("tenants.toml", &tenants)),
            ..Options::default()
        };
        let mut worker = ScriptedWorker::start(Profile::default()).await;
        let cluster = Cluster::start(&[&worker], options).await;
        let mut session = worker.granted().await;
        cluster.handle.ready().await;
        let machine = authority.issue_uri("spiffe://test/machine");
        let unknown = authority.issue_uri("spiffe://test/else");
        let forged = stranger.issue_uri("spiffe://test/machine");

        let channel = connect(&cluster, &authority, Some(&machine)).await.unwrap();
        assert_eq!(call(channel.clone(), None).await, Ok(()));
        let _stream = InferenceClient::new(channel).generate(text("a")).await.unwrap();
        assert_eq!(session.submit().await.tenant, "machine");
        let channel = connect(&cluster, &authority, None).await.unwrap();
        assert_eq!(call(channel.clone(), Some("key")).await, Ok(()));
        assert_eq!(call(channel, None).await, Err(Code::Unauthenticated));
        let channel = connect(&cluster, &authority, Some(&unknown)).await.unwrap();
        assert_eq!(call(channel.clone(), None).await, Err(Code::Unauthenticated));
        assert_eq!(call(channel, Some("key")).await, Ok(()), "a key says more than a certificate");
        // An authority that is not known signed it: the handshake fails, whichever side sees it first.
        if let Ok(channel) = connect(&cluster, &authority, Some(&forged)).await {
            assert!(call(channel, Some("key")).await.is_err());
        }
        assert!(connect(&cluster, &stranger, Some(&machine)).await.is_err(), "the client trusts another");
        // In the clear nothing is said at all.
        assert!(call(cluster.channel.clone(), Some("key")).await.is_err());
    })
    .await;
}

#[tokio::test]
async fn a_renewed_certificate_is_served_to_new_connections_and_a_broken_one_is_not() {
    bounded(async {
        let (authority, renewed, folder) = (Authority::new(), Authority::new(), Folder::new());
        let options = Options {
            tls: Some(files(&folder, &authority, &authority.issue("router.test"))),
            ..Options::default()
        };
        let worker = ScriptedWorker::start(Profile::default()).await;
        let cluster = Cluster::start(&[&worker], options).await;
        let old = connect(&cluster, &authority, None).await.unwrap();
        assert_eq!(call(old.clone(), None).await, Ok(()));
        folder.write("tls.crt", "not a certificate");
        let rendered = || crate::cluster::metrics().render();
        let refused = "inflight_reloads_total{what=\"certificate\",result=\"error\"}";
        while !rendered().contains(refused) {
            tokio::task::yield_now().await;
        }
        connect(&cluster, &authority, None).await.unwrap();
        let next = renewed.issue("router.test");
        folder.write("tls.key", &next.key);
        folder.write("tls.crt", &next.certificate);
        while connect(&cluster, &renewed, None).await.is_err() {
            tokio::task::yield_now().await;
        }
        assert_eq!(call(old, None).await, Ok(()), "connections that are there stay");
    })
    .await;
}

#[tokio::test]
async fn workers_are_reached_by_tls_and_know_their_routers_by_certificate() {
    bounded(async {
        let (authority, folder) = (Authority::new(), Folder::new());
        let Issued { certificate, key } = authority.issue("worker.test");
        let tls = Some([certificate, key, authority.pem()]);
        let mut worker = ScriptedWorker::start(Profile { tls, ..Profile::default() }).await;
        let own = authority.issue("router.test");
        let path = |name: &str, text: &str| -> PathBuf { folder.write(name, text) };
        let ca = path("ca.crt", &authority.pem());
        let identity = Some((path("router.crt", &own.certificate), path("router.key", &own.key)));
        let named = |name: &str, identity| {
            Some(ClientTls { ca: ca.clone(), identity, server_name: Some(name.to_owned()) })
        };
        let options = |worker_tls| Options { worker_tls, ..Options::default() };
        let cluster = Cluster::start(&[&worker], options(named("worker.test", identity.clone()))).await;
        let _session = worker.granted().await;
        cluster.handle.ready().await;
        for wrong in [named("other.test", identity), named("worker.test", None), None] {
            let cluster = Cluster::start(&[&worker], options(wrong)).await;
            let waited = tokio::time::timeout(Duration::from_millis(300), cluster.handle.ready()).await;
            assert!(waited.is_err(), "a session without the right certificates");
        }
    })
    .await;
}

/// Whether the other side ends the connection.
async fn ends(stream: &mut TcpStream) -> bool {
    let mut sink = [0; 1024];
    loop {
        match stream.read(&mut sink).await {
            Ok(0) | Err(_) => return true,
            Ok(_) => {}
        }
    }
}

#[tokio::test]
async fn connections_that_are_too_many_too_slow_or_idle_are_closed() {
    bounded(async {
        let worker = ScriptedWorker::start(Profile::default()).await;
        let short = Duration::from_millis(100);
        let connections =
            Limits { connections_max: 2, first_call_max: short, idle_max: short, handshake_max: short };
        let cluster = Cluster::start(&[&worker], Options { connections, ..Options::default() }).await;
        // The preface and no headers: slow, however lively otherwise.
        let mut slow = TcpStream::connect(cluster.address).await.unwrap();
        slow.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
        let mut silent = TcpStream::connect(cluster.address).await.unwrap();
        let mut third = TcpStream::connect(cluster.address).await.unwrap();
        assert!(ends(&mut third).await, "two are let in");
        assert!(ends(&mut slow).await && ends(&mut silent).await);
        // A connection that was used is closed when nothing is open on it; one with a call open is not.
        let endpoint = Endpoint::from_shared(format!("http://{}", cluster.address)).unwrap();
        let mut client = InferenceClient::new(endpoint.connect().await.unwrap());
        client.list_models(v1::ListModelsRequest {}).await.unwrap();
        let closed = |reason: &str| {
            let line = format!("inflight_connections_closed_total{{reason=\"{reason}\"}}");
            crate::cluster::metrics().render().contains(&line)
        };
        while !closed("idle") {
            tokio::task::yield_now().await;
        }
        assert!(closed("slow") && closed("full"));
    })
    .await;
}

#[tokio::test]
async fn a_list_of_headers_over_the_limit_is_refused_and_the_next_call_is_not() {
    bounded(async {
        let worker = ScriptedWorker::start(Profile::default()).await;
        let options = Options { header_bytes_max: 2048, ..Options::default() };
        let mut cluster = Cluster::start(&[&worker], options).await;
        let mut large = Request::new(v1::ListModelsRequest {});
        large.metadata_mut().insert("x-large", "x".repeat(4096).parse().unwrap());
        assert!(cluster.client.list_models(large).await.is_err());
        cluster.client.list_models(v1::ListModelsRequest {}).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn a_tenant_has_as_many_connections_as_it_may() {
    bounded(async {
        let folder = Folder::new();
        let tenants = format!(
            "[tenants.t]\nlimits = {{ connections = 1 }}\nkeys = [{{ sha256 = \"{}\" }}]\n",
            digest("t")
        );
        let worker = ScriptedWorker::start(Profile::default()).await;
        let tenants_file = Some(folder.write("tenants.toml", &tenants));
        let cluster = Cluster::start(&[&worker], Options { tenants_file, ..Options::default() }).await;
        let endpoint = || Endpoint::from_shared(format!("http://{}", cluster.address)).unwrap();
        let first = endpoint().connect().await.unwrap();
        assert_eq!(call(first.clone(), Some("t")).await, Ok(()));
        assert_eq!(call(first.clone(), Some("t")).await, Ok(()), "it is counted once");
        let second = endpoint().connect().await.unwrap();
        assert_eq!(call(second.clone(), Some("t")).await, Err(Code::ResourceExhausted));
        drop(first);
        while call(second.clone(), Some("t")).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[test]
fn a_clients_files_are_tried_when_they_are_read() {
    let folder = Folder::new();
    let authority = Authority::new();
    let (one, other) = (authority.issue("one"), authority.issue("other"));
    let ca = folder.write("ca.crt", &authority.pem());
    let load = |certificate: &str, key: &str| {
        let identity = Some((folder.write("c.crt", certificate), folder.write("c.key", key)));
        ClientTls { ca: ca.clone(), identity, server_name: None }.load().map(drop)
    };
    load(&one.certificate, &one.key).unwrap();
    for (certificate, key) in
        [(&*one.certificate, &*other.key), (&*one.certificate, "no key"), ("no certificate", &*one.key)]
    {
        load(certificate, key).unwrap_err();
    }
}
