//! Budget of the response data that clients do not read, over all connections.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use metrics::Gauge;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::shared_pool::Holder;
use crate::unread_eviction::{ConnectionLoad, ResponseLoad, evictions};

/// Interval of the checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Intervals without progress after which the data of a response counts as unread: 30 s.
const UNREAD_CHECKS: u64 = 30;
/// Intervals without progress after which it counts as unread while twice the budget is in use.
const UNREAD_CHECKS_MIN: u64 = 1;
/// Cost of a frame beside its data, in bytes: the state of its call and stream. A router takes 64 - 22 MiB more
/// with 5,000 streams whose clients do not read (docs/benchmarks.md, floods).
const FRAME_OVERHEAD_BYTES: u64 = 8 << 10;

/// Budget of the response data that waits for clients. Cheap to clone.
///
/// The response to a call that has ended, and so holds no permit, stays in h2's send buffer while the client answers
/// pings but grants no flow-control window. The server cannot reset that stream, because its body is not polled, so it
/// closes connections: of the tenant with most buffered data for its weight, above its share, the one in which most of it is unread.
#[derive(Clone)]
pub struct UnreadBudget(Arc<UnreadBudgetState>);

struct UnreadBudgetState {
    bytes_max: u64,
    gauge: Gauge,
    /// Number of checks so far; the time of a stream's progress is counted in checks.
    checks: AtomicU64,
    connections: Mutex<ConnectionTable>,
}

#[derive(Default)]
struct ConnectionTable {
    next_id: u64,
    entries: BTreeMap<u64, Arc<ConnectionUnread>>,
}

impl UnreadBudget {
    /// Creates a budget of `bytes_max` bytes; `gauge` exports their use.
    pub fn new(bytes_max: u64, gauge: Gauge) -> Self {
        gauge.set(0.0);
        let connections = Mutex::default();
        Self(Arc::new(UnreadBudgetState { bytes_max, gauge, checks: AtomicU64::new(0), connections }))
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionTable> {
        // Only a failed allocation can panic while the lock is held.
        self.0.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes connections beyond the budget until it is dropped.
    pub async fn enforce(self) {
        let mut checks = tokio::time::interval(CHECK_INTERVAL);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            checks.tick().await;
            self.check();
        }
    }

    /// Evicts connections until the rest is within the budget, see [`evictions`]: first those whose data has made no progress for 30 s.
    /// Beyond twice the budget, which data in progress may take, those without progress for 1 s, then any.
    fn check(&self) {
        let now = self.0.checks.fetch_add(1, Ordering::Relaxed) + 1;
        let connections: Vec<_> = self.lock().entries.values().cloned().collect();
        let open = || connections.iter().filter(|connection| !connection.evicted.is_cancelled());
        let total = || open().map(|connection| connection.bytes()).sum::<u64>();
        self.0.gauge.set(total() as f64);
        let (once, twice) = (self.0.bytes_max, self.0.bytes_max.saturating_mul(2));
        for (checks, limit) in [(UNREAD_CHECKS, once), (UNREAD_CHECKS_MIN, twice), (0, twice)] {
            if total() <= limit {
                continue;
            }
            let open: Vec<_> = open().collect();
            let loads: Vec<_> = open.iter().map(|connection| connection.load(now, checks)).collect();
            for index in evictions(&loads, limit) {
                open[index].evicted.cancel();
            }
        }
    }

    /// Registers a connection, whose responses count against the budget.
    pub(crate) fn connect(&self) -> UnreadConnection {
        let connection = Arc::new(ConnectionUnread {
            budget: self.clone(),
            bytes: AtomicU64::new(0),
            streams: Mutex::default(),
            evicted: CancellationToken::new(),
        });
        let mut table = self.lock();
        let id = table.next_id;
        table.next_id += 1;
        table.entries.insert(id, connection.clone());
        UnreadConnection { id, connection }
    }
}

/// Entry of a connection in the budget's table until the drop.
pub(crate) struct UnreadConnection {
    id: u64,
    connection: Arc<ConnectionUnread>,
}

impl UnreadConnection {
    /// Returns the account of its responses.
    pub(crate) fn account(&self) -> Arc<ConnectionUnread> {
        self.connection.clone()
    }

    /// Resolves to the bytes of its responses once it must be closed.
    pub(crate) async fn evicted(&self) -> u64 {
        self.connection.evicted.cancelled().await;
        self.connection.bytes()
    }
}

impl Drop for UnreadConnection {
    fn drop(&mut self) {
        self.connection.budget.lock().entries.remove(&self.id);
    }
}

/// Responses of one connection.
pub(crate) struct ConnectionUnread {
    budget: UnreadBudget,
    /// Bytes of all responses.
    bytes: AtomicU64,
    streams: Mutex<StreamTable>,
    evicted: CancellationToken,
}

#[derive(Default)]
struct StreamTable {
    next_id: u64,
    entries: BTreeMap<u64, Weak<UnreadStream>>,
}

impl ConnectionUnread {
    fn lock(&self) -> MutexGuard<'_, StreamTable> {
        // Only a failed allocation can panic while the lock is held.
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a response, whose frames count against the budget.
    pub(crate) fn open(self: &Arc<Self>) -> Arc<UnreadStream> {
        let mut table = self.lock();
        let id = table.next_id;
        table.next_id += 1;
        let progressed = AtomicU64::new(self.budget.0.checks.load(Ordering::Relaxed));
        let connection = self.clone();
        let (holder, bytes) = (OnceLock::new(), AtomicU64::new(0));
        let stream = Arc::new(UnreadStream { connection, id, holder, bytes, progressed });
        table.entries.insert(id, Arc::downgrade(&stream));
        stream
    }

    /// Returns the bytes of all responses.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns its responses; those without progress for more than `checks` checks are unread.
    fn load(&self, now: u64, checks: u64) -> ConnectionLoad {
        // Dropped after the lock, which their drops take.
        let streams: Vec<_> = self.lock().entries.values().filter_map(Weak::upgrade).collect();
        let age = |stream: &UnreadStream| now.saturating_sub(stream.progressed.load(Ordering::Relaxed));
        let response = |stream: &Arc<UnreadStream>| ResponseLoad {
            holder: stream.holder.get().cloned(),
            bytes: stream.bytes.load(Ordering::Relaxed),
            is_unread: age(stream) > checks,
        };
        ConnectionLoad { responses: streams.iter().map(response).collect() }
    }
}

/// Account of the response to a call, in the extensions of its request. Cheap to clone.
#[derive(Clone)]
pub struct ResponseAccount(Arc<UnreadStream>);

impl ResponseAccount {
    /// Opens the account of a call on a connection.
    pub(crate) fn open(connection: &Arc<ConnectionUnread>) -> Self {
        Self(connection.open())
    }

    /// Names the caller, whose share of the budget the response counts in. The first name is kept.
    pub fn name(&self, holder: Holder) {
        // An error means that it has a name.
        _ = self.0.holder.set(holder);
    }

    /// The response that frames count in.
    pub(crate) fn stream(&self) -> Arc<UnreadStream> {
        self.0.clone()
    }
}

/// Data of one response that waits for the client; held by the body and its frames.
pub(crate) struct UnreadStream {
    connection: Arc<ConnectionUnread>,
    id: u64,
    holder: OnceLock<Holder>,
    bytes: AtomicU64,
    /// Check after which the client last read.
    progressed: AtomicU64,
}

impl UnreadStream {
    /// Records that the transport has room for more.
    pub(crate) fn progress(&self) {
        let now = self.connection.budget.0.checks.load(Ordering::Relaxed);
        self.progressed.store(now, Ordering::Relaxed);
    }

    /// Counts a frame of `bytes`.
    pub(crate) fn add(&self, bytes: usize) {
        self.change(bytes as u64 + FRAME_OVERHEAD_BYTES, AtomicU64::fetch_add);
    }

    /// Counts bytes of a frame that were written.
    pub(crate) fn written(&self, bytes: usize) {
        self.progress();
        self.change(bytes as u64, AtomicU64::fetch_sub);
    }

    /// Counts a frame of which `unwritten` bytes are left as dropped.
    pub(crate) fn remove(&self, unwritten: usize) {
        self.change(unwritten as u64 + FRAME_OVERHEAD_BYTES, AtomicU64::fetch_sub);
    }

    fn change(&self, bytes: u64, change: fn(&AtomicU64, u64, Ordering) -> u64) {
        change(&self.bytes, bytes, Ordering::Relaxed);
        change(&self.connection.bytes, bytes, Ordering::Relaxed);
    }
}

impl Drop for UnreadStream {
    fn drop(&mut self) {
        self.connection.lock().entries.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures::stream;
    use http_body_util::Full;
    use hyper::body::Bytes;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
    use tokio::time::{Instant, sleep};
    use tonic::body::Body;
    use tonic::codegen::http::{Request, Response};

    use super::*;
    use crate::http::{HttpServer, Protocols};

    const ANSWER_BYTES: usize = 64 << 10;
    const HOUR: Duration = Duration::from_secs(3600);

    /// HTTP/2 client whose streams have no window but what it grants.
    struct Client(DuplexStream);

    impl Client {
        const DATA: u8 = 0;

        async fn write(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
            let [_, length @ ..] = u32::try_from(payload.len()).unwrap().to_be_bytes();
            let frame = [&length[..], &[kind, flags], &stream.to_be_bytes(), payload].concat();
            self.0.write_all(&frame).await.unwrap();
        }

        /// Makes calls without bodies, over streams 1, 3, 5, …
        async fn call(&mut self, calls: u32) {
            self.0.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
            // SETTINGS with an initial stream window of 0; the window of the connection grows by 1 MiB.
            self.write(4, 0, 0, &[0, 4, 0, 0, 0, 0]).await;
            self.grant(0, 1 << 20).await;
            for call in 0..calls {
                // POST, http, /, the authority `a`; the end of the headers and of the stream.
                self.write(1, 5, 2 * call + 1, &[0x83, 0x86, 0x84, 0x01, 1, b'a']).await;
            }
        }

        async fn grant(&mut self, stream: u32, bytes: u32) {
            self.write(8, 0, stream, &bytes.to_be_bytes()).await;
        }

        /// Reads up to `max` bytes of responses, or to the end of the connection.
        async fn read(&mut self, max: usize) -> usize {
            let mut received = 0;
            let mut head = [0; 9];
            while received < max && self.0.read_exact(&mut head).await.is_ok() {
                let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
                self.0.read_exact(&mut payload).await.unwrap();
                received += if head[3] == Self::DATA { payload.len() } else { 0 };
            }
            received
        }
    }

    #[tokio::test(start_paused = true)]
    async fn beyond_the_budget_a_connection_without_progress_for_30_s_is_closed_and_a_slow_reader_is_not() {
        let budget = UnreadBudget::new(200 << 10, Gauge::noop());
        let server = HttpServer {
            listener: "test",
            protocols: Protocols::Http2,
            keepalive_interval: HOUR,
            header_bytes_max: 16 << 10,
            streams_max: 8,
            write_timeout: HOUR,
            unread: budget.clone(),
            fault: || Response::new(Body::empty()),
        };
        let answer = tower::service_fn(|_: Request<Body>| async {
            let answer = Full::new(Bytes::from(vec![7; ANSWER_BYTES]));
            Ok::<_, Infallible>(Response::new(Body::new(answer)))
        });
        let (near, far): (Vec<_>, Vec<_>) = (0..2).map(|_| tokio::io::duplex(1 << 20)).unzip();
        let incoming = stream::iter(near.into_iter().map(Ok::<_, Infallible>));
        tokio::spawn(server.serve(incoming, answer, CancellationToken::new()));
        tokio::spawn(budget.enforce());
        let begun = Instant::now();
        let [mut stalled, mut slow]: [Client; 2] =
            far.into_iter().map(Client).collect::<Vec<_>>().try_into().ok().unwrap();
        stalled.call(1).await;
        let stalled = tokio::spawn(async move { (stalled.read(usize::MAX).await, begun.elapsed()) });
        // It holds most: 192 KiB, which it reads over five minutes.
        slow.call(3).await;
        for _ in 0..64 {
            sleep(Duration::from_secs(5)).await;
            for stream in [1, 3, 5] {
                slow.grant(stream, 1 << 10).await;
            }
        }
        assert_eq!(slow.read(3 * ANSWER_BYTES).await, 3 * ANSWER_BYTES);
        let (received, after) = stalled.await.unwrap();
        assert_eq!(received, 0);
        assert!((30..=32).contains(&after.as_secs()), "closed after {after:?}");
    }

    #[test]
    fn beyond_twice_the_budget_the_largest_connection_is_closed_even_if_its_client_reads() {
        let budget = UnreadBudget::new(100 << 10, Gauge::noop());
        let [small, large] = [budget.connect(), budget.connect()];
        let streams = [small.account().open(), large.account().open()];
        streams[0].add(50 << 10);
        streams[1].add(100 << 10);
        budget.check();
        let evicted = || [&small, &large].map(|connection| connection.connection.evicted.is_cancelled());
        assert_eq!(evicted(), [false, false], "within twice the budget, with progress");
        streams[1].add(80 << 10);
        streams.iter().for_each(|stream| stream.progress());
        budget.check();
        assert_eq!(evicted(), [false, true]);
    }

    #[test]
    fn a_tenant_with_many_connections_loses_them_before_another_one_loses_a_larger_one() {
        let budget = UnreadBudget::new(150 << 10, Gauge::noop());
        let holder = |name: &str| Holder { name: name.into(), weight: 1.0 };
        let answer = |name: &str, kib: usize| {
            let connection = budget.connect();
            let account = ResponseAccount::open(&connection.account());
            account.name(holder(name));
            account.stream().add(kib << 10);
            (connection, account)
        };
        let many: Vec<_> = (0..10).map(|_| answer("many", 12)).collect();
        let (one, _account) = answer("one", 60);
        (0..UNREAD_CHECKS + 1).for_each(|_| budget.check());
        assert!(!one.connection.evicted.is_cancelled());
        let closed = many.iter().filter(|(connection, _)| connection.connection.evicted.is_cancelled());
        // Ten times 20 KiB and once 68, with 8 KiB for each frame: 148 of 268 KiB are left.
        assert_eq!(closed.count(), 6);
    }
}
