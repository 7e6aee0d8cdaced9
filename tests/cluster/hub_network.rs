//! Downloads over TLS with the certificates of a company, and through its proxy.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use inflight_fixtures::TempDir;
use inflight_harness::run_with_env;
use inflight_hub_stand_in::StandIn;
use tokio::io::{
    AsyncBufReadExt as _, AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader, copy_bidirectional,
};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

use crate::hub::environment;
use crate::program;

/// Names that no resolver knows: the proxy alone finds them.
const HUB: &str = "hub.inflight.invalid";
const FILES: &str = "files.inflight.invalid";

/// Copies bytes both ways until one side ends.
async fn relay(mut stream: impl AsyncRead + AsyncWrite + Unpin, to: SocketAddr) -> Result<()> {
    let mut other = TcpStream::connect(to).await?;
    // An end without TLS's own is one too.
    let _ = copy_bidirectional(&mut stream, &mut other).await;
    Ok(())
}

/// Listens with TLS in front of an address without. Returns where.
async fn with_tls(acceptor: TlsAcceptor, to: SocketAddr) -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            // A client that does not trust the certificate ends the handshake.
            tokio::spawn(async move { relay(acceptor.accept(stream).await?, to).await });
        }
    });
    Ok(address)
}

/// HTTP CONNECT proxy that resolves a fixed list of hosts.
struct Proxy {
    address: SocketAddr,
    /// Hosts and ports that clients asked for.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    async fn start(hosts: Vec<(String, SocketAddr)>) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (address, asked) = (listener.local_addr()?, Arc::<Mutex<Vec<String>>>::default());
        let (seen, hosts) = (asked.clone(), Arc::new(hosts));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (seen, hosts) = (seen.clone(), hosts.clone());
                tokio::spawn(async move {
                    let mut stream = BufReader::new(stream);
                    let mut head = String::new();
                    while !head.ends_with("\r\n\r\n") && stream.read_line(&mut head).await? > 0 {}
                    let wanted = head.strip_prefix("CONNECT ").and_then(|rest| rest.split(' ').next());
                    let wanted = wanted.context("not CONNECT")?.to_owned();
                    let found = hosts.iter().find(|(host, _)| *host == wanted).map(|(_, to)| *to);
                    seen.lock().map_err(|_| anyhow::anyhow!("poisoned"))?.push(wanted);
                    let Some(to) = found else {
                        return Ok(stream
                            .write_all(b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")
                            .await?);
                    };
                    stream.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await?;
                    relay(stream, to).await
                });
            }
        });
        Ok(Self { address, asked })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_fetched_over_tls_and_through_a_proxy() -> Result<()> {
    let folder = TempDir::new("hub-network")?;
    let made = rcgen::generate_simple_self_signed([HUB, FILES, "localhost"].map(str::to_owned))?;
    let authority = folder.path().join("company.pem");
    std::fs::write(&authority, made.cert.pem())?;
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).map_err(anyhow::Error::msg)?;
    let config =
        ServerConfig::builder().with_no_client_auth().with_single_cert(vec![made.cert.der().clone()], key)?;
    let acceptor = TlsAcceptor::from(Arc::new(config));

    let hub = StandIn::start();
    let weights: Vec<u8> = (0..3 << 20).map(|at: usize| ((at * at) >> 5) as u8).collect();
    hub.add("org/g", "main", &[("m.gguf", weights.clone())]);
    let [plain_hub, plain_files] = hub.addresses();
    let tls_hub = with_tls(acceptor.clone(), plain_hub).await?;
    let tls_files = with_tls(acceptor, plain_files).await?;
    let pull = async |endpoint: String, more: &[(&'static str, OsString)]| {
        let cache = TempDir::new("hub")?;
        // Those of the machine that runs the tests are none of theirs.
        let mut variables = environment(&endpoint, cache.path());
        variables.extend(
            ["HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"].map(|name| (name, OsString::new())),
        );
        variables.extend(more.iter().cloned());
        let done = run_with_env(program(), &["pull", "org/g"], "", &variables).await?;
        let found =
            std::fs::read_dir(cache.path().join("models--org--g/snapshots")).into_iter().flatten().flatten();
        let file = found.map(|entry| entry.path().join("m.gguf")).find_map(|path| std::fs::read(path).ok());
        anyhow::Ok((done, file))
    };
    let trusted = ("SSL_CERT_FILE", OsString::from(&authority));

    // Directly, with and without the company's certificate.
    let direct = format!("https://localhost:{}", tls_hub.port());
    hub.redirect_to(&format!("https://localhost:{}", tls_files.port()));
    let (done, file) = pull(direct.clone(), std::slice::from_ref(&trusted)).await?;
    ensure!(done.code == Some(0) && file.as_ref() == Some(&weights), "{done:?}");
    let (done, file) = pull(direct.clone(), &[]).await?;
    ensure!(done.code != Some(0) && file.is_none(), "{done:?}");
    ensure!(done.stderr.contains("certificate") && done.stderr.contains("SSL_CERT_FILE"), "{done:?}");
    // An address of a file without TLS is not followed.
    hub.redirect_to(&format!("http://{plain_files}"));
    let (done, file) = pull(direct, std::slice::from_ref(&trusted)).await?;
    ensure!(done.stderr.contains("redirects to an address without TLS") && file.is_none(), "{done:?}");

    // Through the proxy, by names that it alone knows.
    hub.redirect_to(&format!("https://{FILES}:8443"));
    let hosts = vec![(format!("{HUB}:443"), tls_hub), (format!("{FILES}:8443"), tls_files)];
    let proxy = Proxy::start(hosts).await?;
    let through = ("HTTPS_PROXY", OsString::from(format!("http://{}", proxy.address)));
    let (done, file) = pull(format!("https://{HUB}"), &[trusted.clone(), through.clone()]).await?;
    ensure!(done.code == Some(0) && file.as_ref() == Some(&weights), "{done:?}");
    let asked = std::mem::take(&mut *proxy.asked.lock().map_err(|_| anyhow::anyhow!("poisoned"))?);
    ensure!(asked.iter().any(|host| *host == format!("{HUB}:443")), "{asked:?}");
    ensure!(asked.iter().any(|host| *host == format!("{FILES}:8443")), "{asked:?}");
    // A host that it does not know.
    let (done, _) = pull("https://other.inflight.invalid".to_owned(), &[trusted, through]).await?;
    ensure!(done.code != Some(0) && done.stderr.contains("502"), "{done:?}");
    Ok(())
}
