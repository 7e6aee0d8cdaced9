//! Both ports take gRPC and the HTTP APIs, over HTTP/1.1 and HTTP/2, with TLS and without, under the same limits. What is for
//! operators, and what is no call of either protocol, stays out.

use std::net::SocketAddr;
use std::sync::Arc;

use http_body_util::BodyExt as _;
use inflight_proto::v1;
use inflight_proto::v1::admin_client::AdminClient;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_router::{Admin, HttpOptions, Options};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tonic::body::Body;
use tonic::codegen::Service as _;
use tonic::codegen::http::{Request, Response};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::cluster::{Cluster, Generated, bounded, text, tokens};
use crate::connections::{Authority, files};
use crate::http_client::{Call, HttpCluster, with_http};
use crate::tenants::{Folder, digest, with_key};
use inflight_scripted::{ScriptedSession, ScriptedWorker, WorkerProfile};

const LENGTH: v1::FinishReason = v1::FinishReason::Length;
const REFLECTION: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";

/// Port of a router, and who signed its certificate if it has TLS.
#[derive(Clone, Copy)]
struct Port<'a> {
    address: SocketAddr,
    trusted: Option<&'a Authority>,
    is_grpc: bool,
}

impl Port<'_> {
    async fn channel(self) -> Channel {
        let Some(authority) = self.trusted else {
            let endpoint = Endpoint::from_shared(format!("http://{}", self.address)).unwrap();
            return endpoint.connect().await.unwrap();
        };
        let ca = Certificate::from_pem(authority.pem());
        let tls = ClientTlsConfig::new().ca_certificate(ca).domain_name("router.test");
        let endpoint = Endpoint::from_shared(format!("https://{}", self.address)).unwrap();
        endpoint.tls_config(tls).unwrap().connect().await.unwrap()
    }

    /// Returns the response to a request of HTTP/1, status line and headers included.
    async fn http1(self, request: String) -> String {
        let stream = TcpStream::connect(self.address).await.unwrap();
        let Some(authority) = self.trusted else { return exchange(stream, request.as_bytes()).await };
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).unwrap()).unwrap();
        let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let mut config = builder.unwrap().with_root_certificates(roots).with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        let name = ServerName::try_from("router.test").unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
        exchange(stream, request.as_bytes()).await
    }
}

/// Sends bytes and reads what comes until the other side closes.
async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin, sent: &[u8]) -> String {
    stream.write_all(sent).await.unwrap();
    let mut received = Vec::new();
    // Some is there if the connection is reset behind it.
    let _ = stream.read_to_end(&mut received).await;
    String::from_utf8_lossy(&received).into_owned()
}

/// Request of HTTP/1.1 on a connection of its own.
fn http1_request(method: &str, path: &str, more: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n{more}\r\n{body}"
    )
}

/// Sends a request of HTTP/2; returns the response and its body.
async fn http2(mut channel: Channel, request: Request<Body>) -> (Response<()>, String) {
    std::future::poll_fn(|context| channel.poll_ready(context)).await.unwrap();
    let (parts, body) = channel.call(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    (Response::from_parts(parts, ()), String::from_utf8_lossy(&body).into_owned())
}

fn body(text: &str) -> Body {
    Body::new(http_body_util::Full::new(bytes::Bytes::from(text.to_owned())))
}

/// Makes an empty gRPC call by hand; returns its status if it is refused before its headers.
async fn grpc(channel: Channel, path: &str, content_type: &str) -> Option<Status> {
    let request = Request::post(path).header("content-type", content_type).header("te", "trailers");
    let (response, _) = http2(channel, request.body(Body::empty()).unwrap()).await;
    Status::from_header_map(response.headers())
}

async fn check_grpc(port: Port<'_>, session: &mut ScriptedSession) {
    let channel = port.channel().await;
    let mut client = InferenceClient::new(channel.clone());
    client.list_models(v1::ListModelsRequest {}).await.unwrap();
    HealthClient::new(channel.clone()).check(HealthCheckRequest::default()).await.unwrap();
    let stream = client.generate(text("hello")).await.unwrap().into_inner();
    let submit = session.submit().await;
    session.finish(&submit, 0, &tokens("world"), LENGTH);
    let mut generated = Generated::from(stream);
    generated.read_to_end().await.unwrap();
    assert_eq!(generated.text[0], "world");

    let list = v1::ListRequestsRequest::default();
    let listed = AdminClient::new(channel.clone()).list_requests(list).await;
    let reflected = grpc(channel.clone(), REFLECTION, "application/grpc").await;
    if port.is_grpc {
        listed.unwrap();
        assert!(reflected.is_none_or(|status| status.code() != Code::Unimplemented));
    } else {
        for refused in [listed.err(), reflected] {
            let refused = refused.expect("operators' services are not at this port");
            assert_eq!(refused.code(), Code::Unimplemented);
            assert!(refused.message().contains("at the gRPC port only"), "{refused}");
        }
    }
    let unknown = grpc(channel.clone(), "/x.Y/Z", "application/grpc").await.unwrap();
    assert!(unknown.code() == Code::Unimplemented && unknown.message().contains("/x.Y/Z"), "{unknown}");
    let web = grpc(channel, "/inflight.v1.Inference/Generate", "application/grpc-web+proto").await.unwrap();
    assert!(web.code() == Code::Unimplemented && web.message().contains("gRPC-Web"), "{web}");
}

/// Returns the status and the body of a request.
async fn http(port: Port<'_>, is_http2: bool, method: &str, path: &str, sent: &str) -> (u16, String) {
    if is_http2 {
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        let (response, body) = http2(port.channel().await, request.body(body(sent)).unwrap()).await;
        return (response.status().as_u16(), body);
    }
    let answer = port.http1(http1_request(method, path, "content-type: application/json\r\n", sent)).await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

async fn check_http(port: Port<'_>, session: &mut ScriptedSession) {
    for is_http2 in [false, true] {
        let get = async |path: &str| http(port, is_http2, "GET", path, "").await;
        for path in ["/health", "/livez", "/v1/models"] {
            assert_eq!(get(path).await.0, 200, "{path}");
        }
        let completion = async {
            let sent = r#"{"prompt":"hello"}"#;
            http(port, is_http2, "POST", "/v1/completions", sent).await
        };
        let worker = async {
            let submit = session.submit().await;
            session.finish(&submit, 0, &tokens("world"), LENGTH);
        };
        let ((status, body), ()) = tokio::join!(completion, worker);
        assert!(status == 200 && body.contains(r#""text":"world""#), "{status} {body}");
        let (_, document) = get("/openapi.json").await;
        assert!(document.contains("/v1/chat/completions"), "{document}");
        assert_ne!(document.contains("\"/ui\""), port.is_grpc);
        for path in ["/chat", "/ui", "/metrics"] {
            let (status, body) = get(path).await;
            assert_eq!(status, if port.is_grpc { 404 } else { 200 }, "{path}");
            assert_eq!(body.contains("at the HTTP port only"), port.is_grpc, "{path}");
        }
        let (status, body) = http(port, is_http2, "POST", "/inflight.v1.Inference/Generate", "{}").await;
        assert!(status == 404 && body.contains("application/grpc"), "{status} {body}");
    }
}

#[tokio::test]
async fn each_port_takes_each_protocol_and_serves_operators_only_where_it_did() {
    bounded(async {
        let (authority, folder) = (Authority::new(), Folder::new());
        for tls in [None, Some(files(&folder, &authority, &authority.issue("router.test")))] {
            let trusted = tls.is_some().then_some(&authority);
            let http = HttpOptions { metrics: true, ..HttpOptions::default() };
            let options = Options { tls, admin: Admin::On, ..with_http(http) };
            let mut router = HttpCluster::start(options).await;
            for (address, is_grpc) in [(router.cluster.address, true), (router.address, false)] {
                let port = Port { address, trusted, is_grpc };
                check_grpc(port, &mut router.session).await;
                check_http(port, &mut router.session).await;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_client_of_another_protocol_gets_a_sentence_or_an_end() {
    bounded(async {
        const HELLO: &[u8] = b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03";
        let (authority, folder) = (Authority::new(), Folder::new());
        let plain = HttpCluster::start(with_http(HttpOptions::default())).await;
        for (address, is_grpc) in [(plain.cluster.address, true), (plain.address, false)] {
            let port = Port { address, trusted: None, is_grpc };
            let call = "/inflight.v1.Inference/ListModels";
            let grpc = http1_request("POST", call, "content-type: application/grpc\r\n", "");
            let answer = port.http1(grpc).await;
            assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("grpc-status: 12"), "{answer}");
            assert!(answer.contains("gRPC%20needs%20HTTP/2"), "{answer}");
            let old = port.http1("GET /health HTTP/1.0\r\n\r\n".to_owned()).await;
            assert!(old.starts_with("HTTP/1.0 200"), "{old}");
            let tls = exchange(TcpStream::connect(address).await.unwrap(), HELLO).await;
            assert!(tls.starts_with("HTTP/1.1 400"), "{tls:?}");
            let noise = exchange(TcpStream::connect(address).await.unwrap(), b"\0\0\0\0").await;
            assert!(noise.is_empty() || noise.starts_with("HTTP/1.1 400"), "{noise:?}");
            assert_eq!(http(port, false, "GET", "/health", "").await.0, 200);
        }
        // Plain text at ports with TLS.
        let tls = Some(files(&folder, &authority, &authority.issue("router.test")));
        let secure = HttpCluster::start(Options { tls, ..with_http(HttpOptions::default()) }).await;
        for (address, is_grpc) in [(secure.cluster.address, true), (secure.address, false)] {
            let port = Port { address, trusted: Some(&authority), is_grpc };
            for (sent, start) in [
                ("GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n", "HTTP/1.1 400 Bad Request\r\n"),
                ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\u{4}\0\0\0\0\0", "\0\0\0\u{4}"),
            ] {
                let answer = exchange(TcpStream::connect(address).await.unwrap(), sent.as_bytes()).await;
                assert!(answer.starts_with(start) && answer.contains("this port speaks TLS"), "{answer:?}");
            }
            let noise = exchange(TcpStream::connect(address).await.unwrap(), b"\x80\x01nothing").await;
            assert!(!noise.contains("HTTP"), "{noise:?}");
            assert_eq!(http(port, false, "GET", "/health", "").await.0, 200);
        }
        // HTTP APIs that are off stay off at the gRPC port.
        let worker = ScriptedWorker::start(WorkerProfile::default()).await;
        let cluster = Cluster::start(&[&worker], Options::default()).await;
        let port = Port { address: cluster.address, trusted: None, is_grpc: true };
        for path in ["/v1/models", "/health", "/openapi.json"] {
            let (status, body) = http(port, false, "GET", path, "").await;
            assert!(status == 404 && body.contains("--http-listen"), "{status} {body}");
        }
        let channel = port.channel().await;
        InferenceClient::new(channel).list_models(v1::ListModelsRequest {}).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn keys_sizes_and_connections_count_alike_in_each_protocol_at_each_port() {
    bounded(async {
        let folder = Folder::new();
        let file = format!(
            "[tenants.t]\nlimits = {{ connections = 1 }}\nkeys = [{{ sha256 = \"{}\" }}]\n",
            digest("t")
        );
        let tenants_file = Some(folder.write("tenants.toml", &file));
        let options =
            Options { message_bytes_max: 16 << 10, tenants_file, ..with_http(HttpOptions::default()) };
        let router = HttpCluster::start(options).await;
        for (address, is_grpc) in [(router.cluster.address, true), (router.address, false)] {
            let port = Port { address, trusted: None, is_grpc };
            assert_eq!(http(port, false, "GET", "/v1/models", "").await.0, 401);
            let mut client = InferenceClient::new(port.channel().await);
            let refused = client.list_models(v1::ListModelsRequest {}).await.unwrap_err();
            assert_eq!(refused.code(), Code::Unauthenticated);
            let keyed = async |method: &str, path: &str, sent: &str| {
                let headers = [("x-api-key", "t")];
                Call::send(address, method, path, &headers, sent.as_bytes()).await.response().await.status
            };
            let large = "x".repeat(20 << 10);
            // The tenant's only connection may still be that of the call before.
            while keyed("POST", "/v1/completions", &format!(r#"{{"prompt":"{large}"}}"#)).await != 413 {
                tokio::task::yield_now().await;
            }
            let refused = loop {
                let refused = client.generate_unary(with_key(text(&large), "t")).await.unwrap_err();
                if !refused.message().contains("connections") {
                    break refused;
                }
                tokio::task::yield_now().await;
            };
            assert_eq!(refused.code(), Code::ResourceExhausted);
            assert!(refused.message().contains("--message-bytes-max"), "{refused}");
            // The gRPC connection is open, and counts for HTTP too.
            assert_eq!(keyed("GET", "/v1/models", "").await, 429);
            drop(client);
            // Calls without a key on one connection count together.
            let (channel, mut watches) = (port.channel().await, Vec::new());
            for _ in 0..32 {
                let watch = HealthClient::new(channel.clone()).watch(HealthCheckRequest::default()).await;
                watches.push(watch.unwrap());
            }
            let request = || Request::get("/livez").body(Body::empty()).unwrap();
            let (response, body) = http2(channel.clone(), request()).await;
            assert!(response.status() == 503 && body.contains("32 calls are open"), "{body}");
            watches.pop();
            while http2(channel.clone(), request()).await.0.status() != 200 {
                tokio::task::yield_now().await;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn pages_of_other_sites_are_kept_out_in_each_protocol_at_each_port() {
    bounded(async {
        let cors_origins = vec!["https://chat.example".to_owned()];
        let router =
            HttpCluster::start(with_http(HttpOptions { cors_origins, ..HttpOptions::default() })).await;
        for (address, is_grpc) in [(router.cluster.address, true), (router.address, false)] {
            let port = Port { address, trusted: None, is_grpc };
            for (origin, allowed) in [("https://chat.example", true), ("https://evil.example", false)] {
                let more = format!("origin: {origin}\r\n");
                let answer = port.http1(http1_request("GET", "/v1/models", &more, "")).await;
                assert!(
                    answer.starts_with(if allowed { "HTTP/1.1 200" } else { "HTTP/1.1 403" }),
                    "{answer}"
                );
                assert_eq!(answer.contains("access-control-allow-origin"), allowed, "{answer}");
                let asking = format!("{more}access-control-request-method: POST\r\n");
                let preflight = port.http1(http1_request("OPTIONS", "/v1/completions", &asking, "")).await;
                assert_eq!(preflight.starts_with("HTTP/1.1 204"), allowed, "{preflight}");
                let mut client = InferenceClient::new(port.channel().await);
                let mut request = tonic::Request::new(v1::ListModelsRequest {});
                request.metadata_mut().insert("origin", origin.parse().unwrap());
                let code =
                    client.list_models(request).await.map_or_else(|status| status.code(), |_| Code::Ok);
                assert_eq!(code, if allowed { Code::Ok } else { Code::PermissionDenied }, "{origin}");
            }
            let rebound = "GET /v1/models HTTP/1.1\r\nhost: rebound.example\r\nconnection: close\r\n\r\n";
            let answer = port.http1(rebound.to_owned()).await;
            assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_drain_waits_for_calls_of_each_protocol_at_each_port() {
    bounded(async {
        let mut router = HttpCluster::start(with_http(HttpOptions::default())).await;
        let mut streams = Vec::new();
        let mut submits = Vec::new();
        for address in [router.cluster.address, router.address] {
            let body = br#"{"prompt":"a","stream":true}"#;
            let call = Call::send(address, "POST", "/v1/completions", &[], body).await;
            submits.push(router.session.submit().await);
            let port = Port { address, trusted: None, is_grpc: false };
            let stream = InferenceClient::new(port.channel().await).generate(text("a")).await.unwrap();
            submits.push(router.session.submit().await);
            streams.push((call, Generated::from(stream.into_inner())));
        }
        router.cluster.drain.cancel();
        assert_eq!(router.cluster.handle.stats().open, 4);
        submits.iter().for_each(|submit| router.session.finish(submit, 0, &tokens("b"), LENGTH));
        for (call, mut generated) in streams {
            assert_eq!(call.events().await.last().unwrap().data, "[DONE]");
            generated.read_to_end().await.unwrap();
        }
        router.cluster.serving.await.unwrap().unwrap();
    })
    .await;
}
