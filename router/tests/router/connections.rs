//! TLS, client certificates, and connection limits.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use inflight_net::{ClientTls, ServerTlsFiles};
use inflight_proto::v1;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_router::{ConnectionOptions, HttpOptions, Options};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::cluster::{Cluster, bounded, text};
use crate::http_client::with_http;
use crate::http2_client::{Frame, Frames, frame, headers};
use crate::tenants::{Folder, digest, with_key};
use inflight_scripted::{ScriptedWorker, WorkerProfile};

/// Certificate authority.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// Certificate and key in PEM.
pub struct Issued {
    certificate: String,
    key: String,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    /// Issues a certificate for a host name or a URI.
    pub fn issue(&self, name: &str) -> Issued {
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

pub fn files(folder: &Folder, authority: &Authority, issued: &Issued) -> ServerTlsFiles {
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

/// Returns the result of a call; with TLS 1.3 a rejected client certificate shows only then.
async fn call(channel: Channel, key: Option<&str>) -> Result<(), Code> {
    let mut client = InferenceClient::new(channel);
    let request = v1::ListModelsRequest {};
    let request = key.map_or_else(|| Request::new(request), |key| with_key(request, key));
    client.list_models(request).await.map(|_| ()).map_err(|status| status.code())
}

#[tokio::test]
async fn tls_clients_need_a_valid_key_or_certificate() {
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
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
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
        // Signed by an unknown authority: the handshake fails on either side.
        if let Ok(channel) = connect(&cluster, &authority, Some(&forged)).await {
            assert!(call(channel, Some("key")).await.is_err());
        }
        assert!(connect(&cluster, &stranger, Some(&machine)).await.is_err(), "the client trusts another");
        // Plaintext gets no response at all.
        assert!(call(cluster.channel.clone(), Some("key")).await.is_err());
    })
    .await;
}

#[tokio::test]
async fn a_renewed_certificate_is_served_and_an_invalid_one_is_not() {
    bounded(async {
        let (authority, renewed, folder) = (Authority::new(), Authority::new(), Folder::new());
        let options = Options {
            tls: Some(files(&folder, &authority, &authority.issue("router.test"))),
            ..Options::default()
        };
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let cluster = Cluster::start(&[&worker], options).await;
        let old = connect(&cluster, &authority, None).await.unwrap();
        assert_eq!(call(old.clone(), None).await, Ok(()));
        folder.write("tls.crt", "not a certificate");
        let rendered = || crate::cluster::metrics().render();
        let refused = "inflight_file_reloads_total{file=\"certificate\",result=\"error\"}";
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
        for purpose in ["server", "client_ca"] {
            let expiry =
                format!("inflight_tls_certificate_expiry_timestamp_seconds{{purpose=\"{purpose}\"}} ");
            assert!(rendered().contains(&expiry), "{expiry}");
        }
    })
    .await;
}

#[tokio::test]
async fn http_over_tls_has_the_version_that_alpn_selects() {
    bounded(async {
        let (authority, folder) = (Authority::new(), Folder::new());
        let tls = files(&folder, &authority, &authority.issue("router.test"));
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let options = Options { tls: Some(tls), ..with_http(HttpOptions::default()) };
        let cluster = Cluster::start(&[&worker], options).await;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
        for (offered, selected) in [
            (vec!["http/1.1"], Some("http/1.1")),
            (vec![], None),
            (vec!["h2", "http/1.1"], Some("h2")),
            (vec!["http/1.1", "h2"], Some("h2")),
        ] {
            let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
            let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
            let mut config = builder.unwrap().with_root_certificates(roots.clone()).with_no_client_auth();
            config.alpn_protocols = offered.iter().map(|name| name.as_bytes().to_vec()).collect();
            let stream = TcpStream::connect(cluster.http.unwrap()).await.unwrap();
            let name = ServerName::try_from("router.test").unwrap();
            let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
            let found = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
            assert_eq!(found.as_deref(), selected.map(str::as_bytes), "{offered:?}");
            let mut answer = vec![0; 9];
            if selected == Some("h2") {
                // The preface and empty settings; the server's first frame is its settings.
                let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
                stream.write_all(preface).await.unwrap();
                stream.read_exact(&mut answer).await.unwrap();
                assert_eq!(answer[3], 4, "{answer:?}");
            } else {
                stream.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
                stream.read_exact(&mut answer).await.unwrap();
                assert_eq!(answer, b"HTTP/1.1 ");
            }
        }
    })
    .await;
}

#[tokio::test]
async fn workers_authenticate_routers_by_tls_certificate() {
    bounded(async {
        let (authority, folder) = (Authority::new(), Folder::new());
        let Issued { certificate, key } = authority.issue("worker.test");
        let tls = Some([certificate, key, authority.pem()]);
        let mut worker = ScriptedWorker::start(WorkerProfile { tls, ..WorkerProfile::default() }).await;
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

/// Whether the other side closes the connection.
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
async fn excess_slow_and_idle_connections_are_closed() {
    bounded(async {
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let short = Duration::from_millis(100);
        let connections = ConnectionOptions {
            connections_max: 2,
            first_call_max: short,
            idle_max: short,
            handshake_max: short,
            ..ConnectionOptions::default()
        };
        let cluster = Cluster::start(&[&worker], Options { connections, ..Options::default() }).await;
        // The preface without headers: too slow, despite other traffic.
        let mut slow = TcpStream::connect(cluster.address).await.unwrap();
        slow.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
        let mut silent = TcpStream::connect(cluster.address).await.unwrap();
        assert!(ends(&mut slow).await && ends(&mut silent).await);
        // Over the limit, the oldest unauthenticated connection is closed.
        let mut first = TcpStream::connect(cluster.address).await.unwrap();
        let _second = TcpStream::connect(cluster.address).await.unwrap();
        let _third = TcpStream::connect(cluster.address).await.unwrap();
        assert!(ends(&mut first).await);
        // An idle connection is closed after its last call; one with an open call is not.
        let endpoint = Endpoint::from_shared(format!("http://{}", cluster.address)).unwrap();
        let mut client = InferenceClient::new(endpoint.connect().await.unwrap());
        client.list_models(v1::ListModelsRequest {}).await.unwrap();
        let closed = |reason: &str| {
            let line = format!("inflight_connections_closed_total{{listener=\"grpc\",reason=\"{reason}\"}}");
            crate::cluster::metrics().render().contains(&line)
        };
        while !closed("idle") {
            tokio::task::yield_now().await;
        }
        assert!(closed("slow") && closed("evicted"));
    })
    .await;
}

#[tokio::test]
async fn a_header_list_over_the_limit_is_rejected_and_the_next_call_is_not() {
    bounded(async {
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
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
async fn a_tenants_connections_are_limited() {
    bounded(async {
        let folder = Folder::new();
        let tenants = format!(
            "[tenants.t]\nlimits = {{ connections = 1 }}\nkeys = [{{ sha256 = \"{}\" }}]\n",
            digest("t")
        );
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
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
fn client_tls_files_are_validated_when_loaded() {
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

/// Tenants' file with the key `t`.
fn one_tenant(folder: &Folder) -> Option<PathBuf> {
    let tenants = format!("[tenants.t]\nkeys = [{{ sha256 = \"{}\" }}]\n", digest("t"));
    Some(folder.write("tenants.toml", &tenants))
}

async fn check_health(channel: Channel) -> Result<(), Code> {
    let mut health = tonic_health::pb::health_client::HealthClient::new(channel);
    let checked = health.check(tonic_health::pb::HealthCheckRequest::default()).await;
    checked.map(|_| ()).map_err(|status| status.code())
}

#[tokio::test]
async fn unauthenticated_connections_do_not_crowd_out_a_tenant() {
    bounded(async {
        let folder = Folder::new();
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let connections = ConnectionOptions { connections_max: 6, ..ConnectionOptions::default() };
        let tenants_file = one_tenant(&folder);
        let options = Options { connections, tenants_file, ..Options::default() };
        let cluster = Cluster::start(&[&worker], options).await;
        let endpoint = || Endpoint::from_shared(format!("http://{}", cluster.address)).unwrap();
        let mut strangers = Vec::new();
        for _ in 0..6 {
            let stranger = endpoint().connect().await.unwrap();
            check_health(stranger.clone()).await.unwrap();
            strangers.push(stranger);
        }
        let mut watching =
            tonic_health::pb::health_client::HealthClient::new(endpoint().connect().await.unwrap());
        let _watch = watching.watch(tonic_health::pb::HealthCheckRequest::default()).await.unwrap();
        // Its share of six: one more would leave too little to others.
        let tenants = [(); 4].map(|()| endpoint().connect_lazy());
        for tenant in &tenants {
            assert_eq!(call(tenant.clone(), Some("t")).await, Ok(()));
        }
        assert_eq!(call(endpoint().connect_lazy(), Some("t")).await, Err(Code::ResourceExhausted));
        // Probes and strangers replace each other, not the tenant.
        for _ in 0..8 {
            check_health(endpoint().connect().await.unwrap()).await.unwrap();
        }
        for tenant in tenants {
            assert_eq!(call(tenant, Some("t")).await, Ok(()));
        }
    })
    .await;
}

#[tokio::test]
async fn an_unauthenticated_connection_has_few_open_calls_and_small_messages() {
    bounded(async {
        let folder = Folder::new();
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let options = Options { tenants_file: one_tenant(&folder), ..Options::default() };
        let cluster = Cluster::start(&[&worker], options).await;
        let mut health = tonic_health::pb::health_client::HealthClient::new(cluster.channel.clone());
        let large = tonic_health::pb::HealthCheckRequest { service: "x".repeat(5000) };
        let refused = health.check(large).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert_eq!(refused.message(), "the message has 5003 bytes, more than the limit of 4096");
        let watch = || async {
            let request = tonic_health::pb::HealthCheckRequest::default();
            let mut health = tonic_health::pb::health_client::HealthClient::new(cluster.channel.clone());
            health.watch(request).await
        };
        let mut watches = Vec::new();
        let refused = loop {
            match watch().await {
                Ok(open) => watches.push(open),
                Err(refused) => break refused,
            }
        };
        assert_eq!((watches.len(), refused.code()), (32, Code::ResourceExhausted));
        assert_eq!(call(cluster.channel.clone(), Some("t")).await, Ok(()));
        // With a key, there is a higher limit of calls that need none, and other calls do not count for it.
        let refused = loop {
            match watch().await {
                Ok(open) => watches.push(open),
                Err(refused) => break refused,
            }
        };
        assert_eq!((watches.len(), refused.code()), (64, Code::ResourceExhausted));
        assert_eq!(call(cluster.channel.clone(), Some("t")).await, Ok(()));
    })
    .await;
}

/// Data of rejected calls that arrives after the response belongs to closed streams, of which a peer may send
/// only so much: a proxy with many clients must not lose its connection by it.
#[tokio::test]
async fn a_connection_survives_thousands_of_calls_rejected_before_their_messages() {
    bounded(async {
        let folder = Folder::new();
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let options = Options { tenants_file: one_tenant(&folder), ..Options::default() };
        let cluster = Cluster::start(&[&worker], options).await;
        let mut frames = Frames::connect(&cluster, &[]).await;
        let generate = headers("/inflight.v1.Inference/Generate");
        for round in 0..20 {
            let streams = (0..100).map(|call| 200 * round + 2 * call + 1);
            let calls = streams.clone().map(|id| frame(Frames::HEADERS, Frames::END_HEADERS, id, &generate));
            frames.write(&calls.collect::<Vec<_>>()).await.unwrap();
            let mut refused = 0;
            while refused < 100 {
                let Frame { kind, flags, .. } = frames.read().await.expect("the connection has ended");
                assert_ne!(kind, Frames::GOAWAY, "after {} calls", 100 * round);
                refused += u32::from(kind == Frames::HEADERS && flags & Frames::END_STREAM != 0);
            }
            let data = streams.map(|id| frame(Frames::DATA, Frames::END_STREAM, id, &[0; 16]));
            frames.write(&data.collect::<Vec<_>>()).await.unwrap();
        }
    })
    .await;
}

/// A client may make a server reset a stream by violating HTTP/2 on it (CVE-2025-8671): the call's work is
/// wasted without using up the client's limit of open calls.
#[tokio::test]
async fn a_client_that_makes_the_server_reset_streams_loses_its_connection() {
    bounded(async {
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let cluster = Cluster::start(&[&worker], Options::default()).await;
        let mut frames = Frames::connect(&cluster, &[]).await;
        let watch = headers("/grpc.health.v1.Health/Watch");
        let mut calls = 0;
        let ended = loop {
            let id = 2 * calls + 1;
            let call = frame(Frames::HEADERS, Frames::END_HEADERS, id, &watch);
            // Overflows the window.
            let window = frame(Frames::WINDOW_UPDATE, 0, id, &0x7fff_ffffu32.to_be_bytes());
            calls += 1;
            if frames.write(&[call, window]).await.is_err() || calls == 5000 {
                break calls < 5000;
            }
            // RST_STREAM of this stream.
            loop {
                match frames.read().await {
                    None | Some(Frame { kind: Frames::GOAWAY, .. }) => break,
                    Some(Frame { stream, .. }) if stream == id => break,
                    Some(_) => {}
                }
            }
        };
        assert!(ended, "the connection took {calls} such calls");
    })
    .await;
}

#[tokio::test]
async fn callers_of_the_anonymous_tenant_keep_no_connection_from_a_key() {
    bounded(async {
        let folder = Folder::new();
        let tenants = format!(
            "anonymous = \"guests\"\n[tenants.guests]\n[tenants.person]\nkeys = [{{ sha256 = \"{}\" }}]\n",
            digest("key")
        );
        let connections = ConnectionOptions { connections_max: 3, ..ConnectionOptions::default() };
        let tenants_file = Some(folder.write("tenants.toml", &tenants));
        let mut worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let options = Options { connections, tenants_file, ..Options::default() };
        let cluster = Cluster::start(&[&worker], options).await;
        let _session = worker.granted().await;
        cluster.handle.ready().await;
        let open = || async {
            let endpoint = Endpoint::from_shared(format!("http://{}", cluster.address)).unwrap();
            endpoint.connect().await.unwrap()
        };
        let mut watches = Vec::new();
        for _ in 0..3 {
            let channel = open().await;
            assert_eq!(call(channel.clone(), None).await, Ok(()), "it is a guest");
            let watch = HealthClient::new(channel).watch(HealthCheckRequest::default()).await;
            watches.push(watch.unwrap().into_inner());
        }
        for _ in 0..2 {
            assert_eq!(call(open().await, Some("key")).await, Ok(()));
        }
        // The oldest of them had to go, although it had a call.
        while watches[0].message().await.is_ok_and(|message| message.is_some()) {}
    })
    .await;
}
