//! Adapters between tonic and turmoil's simulated network.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::codegen::http::Uri;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint};
use turmoil::net::{TcpListener, TcpStream};

/// Connection of the simulated network, for tonic's server.
pub struct SimulatedConnection(TcpStream);

impl Connected for SimulatedConnection {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for SimulatedConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for SimulatedConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

/// Listens on a port of the calling host and returns its connections.
pub async fn incoming(port: u16) -> io::Result<impl Stream<Item = io::Result<SimulatedConnection>> + Send> {
    let listener = TcpListener::bind((IpAddr::from(Ipv4Addr::UNSPECIFIED), port)).await?;
    Ok(futures::stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(stream, _)| SimulatedConnection(stream));
        Some((accepted, listener))
    }))
}

/// Connects to the `host:port` of a URI.
pub async fn open(uri: Uri) -> io::Result<TcpStream> {
    let authority = uri.authority().ok_or_else(|| io::Error::other("no authority"))?.to_string();
    TcpStream::connect(authority).await
}

/// Returns a channel to `host:port` that connects at its first use and reconnects after a loss.
pub fn channel(address: &str) -> Result<Channel, tonic::transport::Error> {
    let connector = tower::service_fn(|uri| async move { open(uri).await.map(TokioIo::new) });
    Ok(Endpoint::from_shared(format!("http://{address}"))?.connect_with_connector_lazy(connector))
}
