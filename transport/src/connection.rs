use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep};
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;

use crate::identity::Identity;
use crate::metrics;

/// The other end of a connection, as requests see it: in their extensions.
#[derive(Clone)]
pub struct Peer(Arc<Shared>);

struct Shared {
    address: Option<SocketAddr>,
    identity: Option<Identity>,
    /// Calls open now.
    calls: AtomicU32,
    /// A call was made.
    used: AtomicBool,
    /// Given back when the connection ends.
    held: Mutex<Vec<(String, Box<dyn Send>)>>,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer").field("address", &self.0.address).field("identity", &self.0.identity).finish()
    }
}

/// Counts a call while it lives.
#[derive(Debug)]
pub struct OpenCall(Peer);

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.0.0.calls.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Peer {
    pub(crate) fn new(address: Option<SocketAddr>, identity: Option<Identity>) -> Self {
        Self(Arc::new(Shared {
            address,
            identity,
            calls: AtomicU32::new(0),
            used: AtomicBool::new(false),
            held: Mutex::default(),
        }))
    }

    /// Its address.
    pub fn address(&self) -> Option<SocketAddr> {
        self.0.address
    }

    /// Whom its certificate names, if it showed one.
    pub fn identity(&self) -> Option<&Identity> {
        self.0.identity.as_ref()
    }

    /// A call begins: the connection is not idle until the guard is dropped.
    pub fn call(&self) -> OpenCall {
        self.0.used.store(true, Ordering::Release);
        self.0.calls.fetch_add(1, Ordering::AcqRel);
        OpenCall(self.clone())
    }

    /// Keeps something for as long as the connection lives, once for each name. `make` makes it.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn hold<T, E>(&self, name: &str, make: impl FnOnce() -> Result<T, E>) -> Result<(), E>
    where
        T: Send + 'static,
    {
        let mut held = self.0.held.lock().unwrap_or_else(PoisonError::into_inner);
        if !held.iter().any(|(known, _)| known == name) {
            held.push((name.to_owned(), Box::new(make()?)));
        }
        Ok(())
    }

    fn release(&self) {
        let held = std::mem::take(&mut *self.0.held.lock().unwrap_or_else(PoisonError::into_inner));
        drop(held);
    }
}

enum Io {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// An accepted connection. It ends itself if no call is made within the time for the first one, or none is open for the
/// idle time.
pub struct Connection {
    io: Io,
    peer: Peer,
    idle_max: Duration,
    opened: Instant,
    /// When to look again.
    alarm: Pin<Box<Sleep>>,
    /// Since when no call is open.
    idle_since: Option<Instant>,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    pub(crate) fn plain(
        stream: TcpStream,
        permit: OwnedSemaphorePermit,
        first_call_max: Duration,
        idle_max: Duration,
    ) -> Self {
        let peer = Peer::new(stream.peer_addr().ok(), None);
        Self::new(Io::Plain(stream), peer, permit, first_call_max, idle_max)
    }

    pub(crate) fn tls(
        stream: TlsStream<TcpStream>,
        permit: OwnedSemaphorePermit,
        first_call_max: Duration,
        idle_max: Duration,
    ) -> Self {
        let (tcp, session) = stream.get_ref();
        let certificate = session.peer_certificates().and_then(|chain| chain.first());
        let peer = Peer::new(tcp.peer_addr().ok(), certificate.map(Identity::of));
        Self::new(Io::Tls(Box::new(stream)), peer, permit, first_call_max, idle_max)
    }

    fn new(
        io: Io,
        peer: Peer,
        permit: OwnedSemaphorePermit,
        first_call_max: Duration,
        idle_max: Duration,
    ) -> Self {
        let opened = Instant::now();
        ::metrics::gauge!(metrics::CONNECTIONS).increment(1.0);
        Self {
            io,
            peer,
            idle_max,
            opened,
            alarm: Box::pin(tokio::time::sleep_until(opened + first_call_max)),
            idle_since: None,
            _permit: permit,
        }
    }

    /// Whether its time is over.
    fn poll_over(&mut self, context: &mut Context<'_>) -> Poll<&'static str> {
        while self.alarm.as_mut().poll(context).is_ready() {
            let now = Instant::now();
            let shared = &self.peer.0;
            if !shared.used.load(Ordering::Acquire) {
                return Poll::Ready("slow");
            }
            let idle = shared.calls.load(Ordering::Acquire) == 0;
            let since = if idle { *self.idle_since.get_or_insert(now) } else { now };
            if !idle {
                self.idle_since = None;
            }
            if now >= since + self.idle_max {
                return Poll::Ready("idle");
            }
            // Looks often enough to see within a quarter of the time that nothing is open.
            let next =
                (since + self.idle_max).min(now + self.idle_max / 4).max(now + Duration::from_millis(1));
            self.alarm.as_mut().reset(next);
        }
        Poll::Pending
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        ::metrics::gauge!(metrics::CONNECTIONS).decrement(1.0);
        tracing::trace!(peer = ?self.peer.address(), seconds = self.opened.elapsed().as_secs_f64(), "connection ended");
        self.peer.release();
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Poll::Ready(reason) = this.poll_over(context) {
            metrics::closed(reason);
            tracing::debug!(peer = ?this.peer.address(), reason, "connection closed");
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        match &mut this.io {
            Io::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Io::Tls(stream) => Pin::new(stream.as_mut()).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().io {
            Io::Plain(stream) => Pin::new(stream).poll_write(context, buffer),
            Io::Tls(stream) => Pin::new(stream.as_mut()).poll_write(context, buffer),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().io {
            Io::Plain(stream) => Pin::new(stream).poll_write_vectored(context, buffers),
            Io::Tls(stream) => Pin::new(stream.as_mut()).poll_write_vectored(context, buffers),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            Io::Plain(stream) => stream.is_write_vectored(),
            Io::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(stream) => Pin::new(stream).poll_flush(context),
            Io::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().io {
            Io::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Io::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(context),
        }
    }
}
