//! Accepted connection with its idle limits, and the peer information that calls on it see.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tokio_rustls::server::TlsStream;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::transport::server::Connected;

use crate::connection_limits::ConnectionLimits;
use crate::frame_meter::FrameMeter;
use crate::identity::Identity;
use crate::metrics;
use crate::notice_interval::NoticeInterval;
use crate::plain_text;
use crate::registry::{Authentication, Registration};

/// Remote end of a connection; requests carry it in their extensions. Cheap to clone.
#[derive(Clone)]
pub struct Peer(Arc<PeerState>);

struct PeerState {
    address: Option<SocketAddr>,
    identity: Option<Identity>,
    /// Whether a call was ever made.
    used: AtomicBool,
    /// Whether a call has authenticated.
    authenticated: AtomicBool,
    /// Handle to the registry entry; absent where no limits apply.
    authentication: Option<Authentication>,
    open: Mutex<OpenCalls>,
    /// Named resources dropped when the connection ends.
    held: Mutex<Vec<(String, Box<dyn Send>)>>,
}

/// Open calls of a connection. Probes are those on paths that need no authentication (health, reflection).
#[derive(Debug, Default)]
struct OpenCalls {
    probes: u32,
    /// All but the probes.
    others: u32,
    /// Time at which the last call ended.
    idle_since: Option<Instant>,
    /// Time at which the last call ended that was no probe.
    others_ended: Option<Instant>,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer").field("address", &self.0.address).field("identity", &self.0.identity).finish()
    }
}

/// Guard that counts one call as open until it is dropped.
#[derive(Debug)]
pub struct OpenCall {
    peer: Peer,
    is_probe: bool,
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        let mut open = self.peer.0.open();
        match self.is_probe {
            true => open.probes -= 1,
            false => open.others -= 1,
        }
        if open.probes + open.others == 0 {
            open.idle_since = Some(Instant::now());
        }
        if !self.is_probe && open.others == 0 {
            open.others_ended = Some(Instant::now());
        }
    }
}

impl PeerState {
    fn open(&self) -> MutexGuard<'_, OpenCalls> {
        // Consistent at every call that could panic.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns since when no call is open; `None` while one is, and before the first call.
    fn idle_since(&self) -> Option<Instant> {
        let open = self.open();
        open.idle_since.filter(|_| open.probes + open.others == 0)
    }

    /// Returns since when no call is open but probes, as a watch of the health, which would otherwise keep a connection that is of no use
    /// from giving way at a limit; `None` while one is, and before the first such call.
    fn spare_since(&self) -> Option<Instant> {
        let open = self.open();
        open.others_ended.filter(|_| open.others == 0)
    }
}

impl Peer {
    fn new(
        address: Option<SocketAddr>,
        identity: Option<Identity>,
        authentication: Option<Authentication>,
    ) -> Self {
        Self(Arc::new(PeerState {
            address,
            identity,
            used: AtomicBool::new(false),
            authenticated: AtomicBool::new(false),
            authentication,
            open: Mutex::default(),
            held: Mutex::default(),
        }))
    }

    /// Remote address, if the socket reported one.
    pub fn address(&self) -> Option<SocketAddr> {
        self.0.address
    }

    /// Identity from the client certificate, if one was presented.
    pub fn identity(&self) -> Option<&Identity> {
        self.0.identity.as_ref()
    }

    /// Counts a new call as open until the returned guard is dropped.
    pub fn call(&self) -> OpenCall {
        self.0.used.store(true, Ordering::Release);
        self.0.open().others += 1;
        OpenCall { peer: self.clone(), is_probe: false }
    }

    /// Counts a new call on a path that needs no authentication, in [`Peer::calls`] and [`Peer::probes`], until the guard is dropped.
    pub fn probe(&self) -> OpenCall {
        self.0.used.store(true, Ordering::Release);
        self.0.open().probes += 1;
        OpenCall { peer: self.clone(), is_probe: true }
    }

    /// Returns the number of open calls on paths that need no authentication.
    pub fn probes(&self) -> u32 {
        self.0.open().probes
    }

    /// Returns the number of open calls.
    pub fn calls(&self) -> u32 {
        let open = self.0.open();
        open.probes + open.others
    }

    /// Marks the connection as authenticated: from now on `idle_max` applies, and the connection is not
    /// evicted while a call is open on it.
    pub fn set_authenticated(&self) {
        if !self.0.authenticated.swap(true, Ordering::AcqRel)
            && let Some(authentication) = &self.0.authentication
        {
            authentication.mark();
        }
    }

    /// Returns whether a call on the connection has authenticated.
    pub fn is_authenticated(&self) -> bool {
        self.0.authenticated.load(Ordering::Acquire)
    }

    /// Attaches a resource to the connection until it ends, once per name; `make` runs only for a new name.
    ///
    /// # Errors
    /// The error of `make`.
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

enum Socket {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Accepted connection. Reads fail once it exceeds a limit: no first call in time, idle for too long, more control frames
/// than its calls need, or evicted for another connection.
pub struct Connection {
    /// Value of the metrics' `listener` label.
    listener: &'static str,
    socket: Socket,
    peer: Peer,
    limits: ConnectionLimits,
    /// Of plain text, until the first bytes have come, which may be those of TLS.
    greeting: Option<Arc<NoticeInterval>>,
    frames: FrameMeter,
    opened: Instant,
    /// Timer of the next check of the idle limits.
    idle_check: Pin<Box<Sleep>>,
    evicted: Pin<Box<WaitForCancellationFutureOwned>>,
    _registration: Registration,
}

impl Connection {
    pub(crate) fn plain(
        listener: &'static str,
        stream: TcpStream,
        registration: Registration,
        limits: &ConnectionLimits,
        notices: Arc<NoticeInterval>,
    ) -> Self {
        let peer = Peer::new(stream.peer_addr().ok(), None, Some(registration.authentication()));
        let mut connection = Self::new(listener, Socket::Plain(stream), peer, registration, limits);
        connection.greeting = Some(notices);
        connection
    }

    pub(crate) fn tls(
        listener: &'static str,
        stream: TlsStream<TcpStream>,
        registration: Registration,
        limits: &ConnectionLimits,
    ) -> Self {
        let (tcp, session) = stream.get_ref();
        let certificate = session.peer_certificates().and_then(|chain| chain.first());
        let identity = certificate.map(Identity::of);
        let peer = Peer::new(tcp.peer_addr().ok(), identity, Some(registration.authentication()));
        Self::new(listener, Socket::Tls(Box::new(stream)), peer, registration, limits)
    }

    fn new(
        listener: &'static str,
        socket: Socket,
        peer: Peer,
        registration: Registration,
        limits: &ConnectionLimits,
    ) -> Self {
        let opened = Instant::now();
        let state = Arc::downgrade(&peer.0);
        registration.watch_idle(move || state.upgrade().and_then(|state| state.spare_since()));
        ::metrics::gauge!(metrics::CONNECTIONS, "listener" => listener).increment(1.0);
        Self {
            listener,
            socket,
            peer,
            limits: *limits,
            greeting: None,
            frames: FrameMeter::new(opened),
            opened,
            idle_check: Box::pin(tokio::time::sleep_until(opened + limits.first_call_max)),
            evicted: Box::pin(registration.evicted().clone().cancelled_owned()),
            _registration: registration,
        }
    }

    /// Counts the connection as closed for a reason, and returns the error of its next read.
    fn closed(&self, reason: &'static str) -> io::Error {
        metrics::closed(self.listener, reason);
        tracing::debug!(peer = ?self.peer.address(), reason, "connection closed");
        io::ErrorKind::TimedOut.into()
    }

    /// Logs that a client speaks TLS at this port, which has none. HTTP/1 answers 400 to what it says.
    fn check_greeting(&self, first: &[u8], notices: &NoticeInterval) {
        if plain_text::is_tls(first) && notices.is_due() {
            let (listener, peer) = (self.listener, self.peer.address());
            tracing::warn!(
                listener,
                ?peer,
                "client speaks TLS at a port without it; it needs http:// or a plain channel, or this server --tls-cert"
            );
        }
    }

    /// Counts the frames in what a write took of `buffers`.
    fn written(&mut self, written: &Poll<io::Result<usize>>, buffers: &[IoSlice<'_>]) {
        let Poll::Ready(Ok(written)) = written else { return };
        let mut left = *written;
        for buffer in buffers {
            let taken = left.min(buffer.len());
            self.frames.sent(&buffer[..taken]);
            left -= taken;
        }
    }

    /// Resolves to the value of the metrics' `reason` label once the connection must be closed.
    fn poll_limits(&mut self, context: &mut Context<'_>) -> Poll<&'static str> {
        if self.evicted.as_mut().poll(context).is_ready() {
            return Poll::Ready("evicted");
        }
        while self.idle_check.as_mut().poll(context).is_ready() {
            let now = Instant::now();
            let peer = &self.peer.0;
            if !peer.used.load(Ordering::Acquire) {
                return Poll::Ready("slow");
            }
            let authenticated = peer.authenticated.load(Ordering::Acquire);
            let idle_max =
                if authenticated { self.limits.idle_max } else { self.limits.unauthenticated_idle_max };
            match next_idle_check(peer.idle_since(), now, idle_max) {
                Some(next) => self.idle_check.as_mut().reset(next),
                None => return Poll::Ready("idle"),
            }
        }
        Poll::Pending
    }
}

/// Returns the time of the next idle check; `None` once the connection has been idle for `idle_max`.
fn next_idle_check(idle_since: Option<Instant>, now: Instant, idle_max: Duration) -> Option<Instant> {
    match idle_since {
        Some(since) if now >= since + idle_max => None,
        // The earliest time at which the limit can be reached, at least 1 ms away to bound the cost of checks.
        Some(since) => Some((since + idle_max).max(now + Duration::from_millis(1))),
        // A call is open; it may end right after this check.
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
        if let Poll::Ready(reason) = this.poll_limits(context) {
            return Poll::Ready(Err(this.closed(reason)));
        }
        let before = buffer.filled().len();
        let read = match &mut this.socket {
            Socket::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Socket::Tls(stream) => Pin::new(stream.as_mut()).poll_read(context, buffer),
        };
        let received = &buffer.filled()[before..];
        if !received.is_empty()
            && let Some(notices) = this.greeting.take()
        {
            this.check_greeting(received, &notices);
        }
        if !received.is_empty() && !this.frames.received(received, Instant::now()) {
            return Poll::Ready(Err(this.closed("control_frames")));
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = match &mut this.socket {
            Socket::Plain(stream) => Pin::new(stream).poll_write(context, buffer),
            Socket::Tls(stream) => Pin::new(stream.as_mut()).poll_write(context, buffer),
        };
        this.written(&written, &[IoSlice::new(buffer)]);
        written
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = match &mut this.socket {
            Socket::Plain(stream) => Pin::new(stream).poll_write_vectored(context, buffers),
            Socket::Tls(stream) => Pin::new(stream.as_mut()).poll_write_vectored(context, buffers),
        };
        this.written(&written, buffers);
        written
    }

    fn is_write_vectored(&self) -> bool {
        match &self.socket {
            Socket::Plain(stream) => stream.is_write_vectored(),
            Socket::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().socket {
            Socket::Plain(stream) => Pin::new(stream).poll_flush(context),
            Socket::Tls(stream) => Pin::new(stream.as_mut()).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().socket {
            Socket::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Socket::Tls(stream) => Pin::new(stream.as_mut()).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_calls_and_calls_between_two_idle_checks_keep_a_connection() {
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
        assert!(next_idle_check(None, start + 100 * IDLE, IDLE).is_some());
        drop(second);
        let later = peer.0.idle_since().unwrap();
        assert!(later >= since);

        // Others may take its place beside a probe, but not beside a call.
        let (probe, call) = (peer.probe(), peer.call());
        assert_eq!((peer.0.spare_since(), peer.0.idle_since()), (None, None));
        drop(call);
        assert!(peer.0.spare_since().unwrap() >= later && peer.0.idle_since().is_none());
        drop(probe);
        assert!(peer.0.spare_since().is_some() && peer.0.idle_since().is_some());

        // A call ends shortly before each check.
        let mut check = start + IDLE;
        for _ in 0..100 {
            let ended = check - IDLE / 8;
            let next = next_idle_check(Some(ended), check, IDLE).unwrap();
            assert_eq!(next, ended + IDLE, "exactly when the idle limit can be reached");
            check = next;
        }
        assert_eq!(next_idle_check(Some(check - IDLE), check, IDLE), None);
    }
}
