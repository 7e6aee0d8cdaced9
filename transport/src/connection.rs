//! An accepted connection, and what calls on it know of its other end.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tokio_rustls::server::TlsStream;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::transport::server::Connected;

use crate::identity::Identity;
use crate::limits::Limits;
use crate::metrics;
use crate::registry::{Authentication, Registration};

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
    /// A call passed authentication.
    authenticated: AtomicBool,
    /// Absent where no limits apply.
    authentication: Option<Authentication>,
    /// When the last call ended that left none open.
    idle_since: Mutex<Option<Instant>>,
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
        let shared = &self.0.0;
        let mut idle_since = shared.idle_since.lock().unwrap_or_else(PoisonError::into_inner);
        if shared.calls.fetch_sub(1, Ordering::AcqRel) == 1 {
            *idle_since = Some(Instant::now());
        }
    }
}

impl Shared {
    /// Since when no call is open; `None` while one is, and before the first.
    fn idle_since(&self) -> Option<Instant> {
        let idle_since = *self.idle_since.lock().unwrap_or_else(PoisonError::into_inner);
        idle_since.filter(|_| self.calls.load(Ordering::Acquire) == 0)
    }
}

impl Peer {
    fn new(
        address: Option<SocketAddr>,
        identity: Option<Identity>,
        authentication: Option<Authentication>,
    ) -> Self {
        Self(Arc::new(Shared {
            address,
            identity,
            calls: AtomicU32::new(0),
            used: AtomicBool::new(false),
            authenticated: AtomicBool::new(false),
            authentication,
            idle_since: Mutex::default(),
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

    /// Calls open now.
    pub fn calls(&self) -> u32 {
        self.0.calls.load(Ordering::Acquire)
    }

    /// A call on the connection passed authentication: from now on the longer idle limit holds, and the connection is
    /// not closed for others while a call is open on it.
    pub fn set_authenticated(&self) {
        if !self.0.authenticated.swap(true, Ordering::AcqRel)
            && let Some(authentication) = &self.0.authentication
        {
            authentication.mark();
        }
    }

    /// Whether a call on the connection passed authentication.
    pub fn is_authenticated(&self) -> bool {
        self.0.authenticated.load(Ordering::Acquire)
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

/// An accepted connection. It ends itself when the limits say so: no first call in time, idle for too long, or evicted
/// for another connection.
pub struct Connection {
    /// Its listener's label in metrics.
    listener: &'static str,
    io: Io,
    peer: Peer,
    limits: Limits,
    opened: Instant,
    /// When to look again.
    alarm: Pin<Box<Sleep>>,
    evicted: Pin<Box<WaitForCancellationFutureOwned>>,
    _registration: Registration,
}

impl Connection {
    pub(crate) fn plain(
        listener: &'static str,
        stream: TcpStream,
        registration: Registration,
        limits: &Limits,
    ) -> Self {
        let peer = Peer::new(stream.peer_addr().ok(), None, Some(registration.authentication()));
        Self::new(listener, Io::Plain(stream), peer, registration, limits)
    }

    pub(crate) fn tls(
        listener: &'static str,
        stream: TlsStream<TcpStream>,
        registration: Registration,
        limits: &Limits,
    ) -> Self {
        let (tcp, session) = stream.get_ref();
        let certificate = session.peer_certificates().and_then(|chain| chain.first());
        let identity = certificate.map(Identity::of);
        let peer = Peer::new(tcp.peer_addr().ok(), identity, Some(registration.authentication()));
        Self::new(listener, Io::Tls(Box::new(stream)), peer, registration, limits)
    }

    fn new(listener: &'static str, io: Io, peer: Peer, registration: Registration, limits: &Limits) -> Self {
        let opened = Instant::now();
        let shared = Arc::downgrade(&peer.0);
        registration.watch(move || shared.upgrade().and_then(|shared| shared.idle_since()));
        ::metrics::gauge!(metrics::CONNECTIONS, "listener" => listener).increment(1.0);
        Self {
            listener,
            io,
            peer,
            limits: *limits,
            opened,
            alarm: Box::pin(tokio::time::sleep_until(opened + limits.first_call_max)),
            evicted: Box::pin(registration.evicted().clone().cancelled_owned()),
            _registration: registration,
        }
    }

    /// Resolves to a reason when the connection has to be closed.
    fn poll_over(&mut self, context: &mut Context<'_>) -> Poll<&'static str> {
        if self.evicted.as_mut().poll(context).is_ready() {
            return Poll::Ready("evicted");
        }
        while self.alarm.as_mut().poll(context).is_ready() {
            let now = Instant::now();
            let shared = &self.peer.0;
            if !shared.used.load(Ordering::Acquire) {
                return Poll::Ready("slow");
            }
            let authenticated = shared.authenticated.load(Ordering::Acquire);
            let idle_max =
                if authenticated { self.limits.idle_max } else { self.limits.unauthenticated_idle_max };
            match next_look(shared.idle_since(), now, idle_max) {
                Some(next) => self.alarm.as_mut().reset(next),
                None => return Poll::Ready("idle"),
            }
        }
        Poll::Pending
    }
}

/// When to look again at a connection on which no call is open since then; `None` once it was idle for long enough.
fn next_look(idle_since: Option<Instant>, now: Instant, idle_max: Duration) -> Option<Instant> {
    match idle_since {
        Some(since) if now >= since + idle_max => None,
        // Not later, though a call may come and go until then, and not so often that looking costs.
        Some(since) => Some((since + idle_max).max(now + Duration::from_millis(1))),
        // The call that is open may end right after this.
        None => Some(now + idle_max),
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        ::metrics::gauge!(metrics::CONNECTIONS, "listener" => self.listener).decrement(1.0);
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
            metrics::closed(this.listener, reason);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_begin_and_end_between_two_looks_keep_a_connection_and_open_ones_do() {
        const IDLE: Duration = Duration::from_secs(8);
        let peer = Peer::new(None, None, None);
        let start = Instant::now();
        assert_eq!(peer.0.idle_since(), None);
        drop(peer.call());
        let since = peer.0.idle_since().unwrap();
        assert!(since >= start);
        let (first, second) = (peer.call(), peer.call());
        drop(first);
        assert_eq!(peer.0.idle_since(), None, "one is open");
        assert!(next_look(None, start + 100 * IDLE, IDLE).is_some());
        drop(second);
        let later = peer.0.idle_since().unwrap();
        assert!(later >= since);

        // A call ends shortly before each look.
        let mut look = start + IDLE;
        for _ in 0..100 {
            let ended = look - IDLE / 8;
            let next = next_look(Some(ended), look, IDLE).unwrap();
            assert_eq!(next, ended + IDLE, "not before it can be idle for long enough, and not later");
            look = next;
        }
        assert_eq!(next_look(Some(look - IDLE), look, IDLE), None);
    }
}
