//! Writer of the usage log: a thread with a bounded queue and group commit.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

use super::UsageRecord;
use super::files::{UsageFiles, UsageLogError, UsageStorage};
use crate::metrics as names;
use crate::options::{UsageLogOptions, UsageLogPolicy};
use crate::outcome::Outcome;

/// Maximum time from the write of a line to its sync.
const SYNC_INTERVAL: Duration = Duration::from_millis(100);
/// Pause between attempts to write after a failure.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Lines of ended requests in the queue beyond those of all open requests.
const QUEUE_LINES: usize = 4096;

/// Usage log of a router. Every admitted request holds a slot of its queue, so that there is room for its
/// line when it ends. Lines stay in the queue until they are synced; dropping the log writes the rest.
#[derive(Debug)]
pub(crate) struct UsageLog {
    lines: Option<Sender<Message>>,
    slots: Arc<Semaphore>,
    /// Whether the last write failed.
    failed: watch::Receiver<bool>,
    policy: UsageLogPolicy,
    writer: Option<JoinHandle<()>>,
}

/// Message to the writer.
enum Message {
    Line(Box<UsageRecord>, OwnedSemaphorePermit, oneshot::Sender<()>),
    /// Write and sync now, and answer.
    Flush(oneshot::Sender<()>),
}

/// Place of an admitted request in the queue of the usage log.
#[derive(Debug)]
pub(crate) struct UsageSlot {
    log: Arc<UsageLog>,
    /// `None` if the request was admitted while the log was unavailable.
    slot: Option<OwnedSemaphorePermit>,
}

impl UsageLog {
    /// Opens the log and starts its writer. `requests_max` is the maximum number of open requests.
    pub(crate) fn open(
        directory: &Path,
        options: UsageLogOptions,
        requests_max: usize,
    ) -> Result<Arc<Self>, UsageLogError> {
        let storage = Box::new(UsageFiles::open(directory, options)?);
        let slots = requests_max.saturating_add(QUEUE_LINES);
        let started = Self::start(storage, options.on_error, slots);
        started.map_err(|source| UsageLogError::Write { path: directory.to_owned(), source })
    }

    fn start(
        storage: Box<dyn UsageStorage>,
        policy: UsageLogPolicy,
        slots: usize,
    ) -> std::io::Result<Arc<Self>> {
        let (lines, receiver) = mpsc::channel();
        let (failing, failed) = watch::channel(false);
        let writer = Writer {
            storage,
            log: format!("{:016x}", rand::random::<u64>()),
            number: 0,
            queue: VecDeque::new(),
            appended: 0,
            sync_at: None,
            retry_at: None,
            failing,
        };
        let thread = std::thread::Builder::new().name("usage-log".to_owned());
        let writer = thread.spawn(move || writer.run(&receiver))?;
        let slots = Arc::new(Semaphore::new(slots.min(Semaphore::MAX_PERMITS)));
        Ok(Arc::new(Self { lines: Some(lines), slots, failed, policy, writer: Some(writer) }))
    }

    /// Admits a request.
    ///
    /// # Errors
    /// [`Outcome::UsageLogUnavailable`] if its line could not be written, unless the policy is to serve it.
    pub(crate) fn admit(self: &Arc<Self>) -> Result<UsageSlot, Outcome> {
        let slot = self.slots.clone().try_acquire_owned().ok();
        let available = slot.is_some() && !self.has_failed();
        if !available && self.policy == UsageLogPolicy::Refuse {
            return Err(Outcome::UsageLogUnavailable);
        }
        Ok(UsageSlot { log: self.clone(), slot })
    }

    fn has_failed(&self) -> bool {
        *self.failed.borrow() || self.writer.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Whether requests are refused now, as their lines cannot be written.
    pub(crate) fn refuses(&self) -> bool {
        self.policy == UsageLogPolicy::Refuse && self.has_failed()
    }

    /// Returns whether requests are refused, as it changes; `None` if the policy is to serve them.
    pub(crate) fn refusing(&self) -> Option<watch::Receiver<bool>> {
        (self.policy == UsageLogPolicy::Refuse).then(|| self.failed.clone())
    }

    /// Writes and syncs all lines so far, or tries to.
    pub(crate) async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        if let Some(lines) = &self.lines {
            // Fails if the writer has ended.
            let _ = lines.send(Message::Flush(done));
        }
        let _ = flushed.await;
    }
}

impl Drop for UsageLog {
    fn drop(&mut self) {
        self.lines = None;
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!("the writer of the usage log panicked");
        }
    }
}

impl UsageSlot {
    /// Writes the line of the ended request. The receiver resolves once it is written to the file, or the first
    /// attempt has failed.
    pub(crate) fn record(self, record: UsageRecord) -> oneshot::Receiver<()> {
        let (written, receiver) = oneshot::channel();
        match (self.slot, &self.log.lines) {
            (Some(slot), Some(lines)) => {
                let line = Message::Line(record.into(), slot, written);
                if let Err(mpsc::SendError(Message::Line(record, ..))) = lines.send(line) {
                    report_lost(&record);
                }
            }
            _ => report_lost(&record),
        }
        receiver
    }
}

/// Counts and logs a line that is not in the usage log.
fn report_lost(record: &UsageRecord) {
    metrics::counter!(names::USAGE_LINES_LOST).increment(1);
    let line = serde_json::to_string(record).unwrap_or_default();
    tracing::error!(line, "usage line lost");
}

/// Line in the queue, until it is synced.
struct QueuedLine {
    record: Box<UsageRecord>,
    bytes: Vec<u8>,
    /// `None` once the writer has tried to write it.
    written: Option<oneshot::Sender<()>>,
    _slot: OwnedSemaphorePermit,
}

/// State of the writer thread.
struct Writer {
    storage: Box<dyn UsageStorage>,
    /// Random id of the log.
    log: String,
    /// Number of the next line.
    number: u64,
    /// Lines that are not synced.
    queue: VecDeque<QueuedLine>,
    /// Lines at the front of the queue that are written.
    appended: usize,
    /// Time of the next sync, while written lines wait for it.
    sync_at: Option<Instant>,
    /// Time of the next attempt after a failure.
    retry_at: Option<Instant>,
    failing: watch::Sender<bool>,
}

impl Writer {
    fn run(mut self, messages: &Receiver<Message>) {
        loop {
            let wake_at = self.retry_at.or(self.sync_at);
            let received = match wake_at {
                Some(at) => messages.recv_timeout(at.saturating_duration_since(Instant::now())),
                None => messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            if matches!(received, Err(RecvTimeoutError::Disconnected)) {
                break;
            }
            let mut waiting = Vec::new();
            for message in received.into_iter().chain(messages.try_iter()) {
                match message {
                    Message::Line(record, slot, written) => self.enqueue(record, slot, written),
                    Message::Flush(done) => waiting.push(done),
                }
            }
            self.advance(Instant::now(), !waiting.is_empty());
            // Fails if the waiting task was dropped.
            for done in waiting {
                let _ = done.send(());
            }
        }
        self.advance(Instant::now(), true);
        self.queue.iter().for_each(|line| report_lost(&line.record));
    }

    fn enqueue(
        &mut self,
        mut record: Box<UsageRecord>,
        slot: OwnedSemaphorePermit,
        written: oneshot::Sender<()>,
    ) {
        record.id = format!("{}-{}", self.log, self.number);
        self.number += 1;
        match serde_json::to_vec(&record) {
            Ok(mut bytes) => {
                bytes.push(b'\n');
                self.queue.push_back(QueuedLine { record, bytes, written: Some(written), _slot: slot });
            }
            Err(_) => report_lost(&record),
        }
    }

    /// Writes and syncs what is due; all of it if `now_all`.
    fn advance(&mut self, now: Instant, now_all: bool) {
        metrics::gauge!(names::USAGE_QUEUE).set(self.queue.len() as f64);
        if self.queue.is_empty() || (!now_all && self.retry_at.is_some_and(|at| now < at)) {
            self.report_written();
            return;
        }
        let was_failed = self.retry_at.is_some();
        match self.write(now, now_all || was_failed) {
            Ok(()) => {
                self.retry_at = None;
                if was_failed {
                    tracing::info!("usage log is written again");
                }
            }
            Err(error) => {
                // What was written since the last sync is written again.
                (self.appended, self.sync_at) = (0, None);
                self.retry_at = Some(now + RETRY_INTERVAL);
                metrics::counter!(names::USAGE_ERRORS).increment(1);
                if !was_failed {
                    tracing::error!(%error, lines = self.queue.len(), "cannot write the usage log; retrying");
                }
            }
        }
        self.report_written();
        let failing = self.retry_at.is_some();
        self.failing.send_if_modified(|was| std::mem::replace(was, failing) != failing);
        metrics::gauge!(names::USAGE_QUEUE).set(self.queue.len() as f64);
    }

    /// Reports the lines that were written or could not be.
    fn report_written(&mut self) {
        let unreported = self.queue.iter_mut().rev().map_while(|line| line.written.take());
        // Fails for lines that nothing waits for.
        unreported.for_each(|written| _ = written.send(()));
    }

    fn write(&mut self, now: Instant, sync: bool) -> std::io::Result<()> {
        if self.appended < self.queue.len() {
            let lines = self.queue.range(self.appended..);
            let lines: Vec<u8> = lines.flat_map(|line| line.bytes.iter().copied()).collect();
            self.storage.append(&lines)?;
            self.appended = self.queue.len();
            self.sync_at.get_or_insert(now + SYNC_INTERVAL);
        }
        if sync || self.sync_at.is_some_and(|at| at <= now) {
            self.storage.sync()?;
            metrics::counter!(names::USAGE_LINES).increment(self.queue.len() as u64);
            self.report_written();
            self.queue.clear();
            (self.appended, self.sync_at) = (0, None);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::io;

    use std::sync::Mutex;

    use proptest::prelude::*;

    use super::*;
    use crate::usage::{UsageGroup, UsageSummary};

    /// Disk that fails when told to, and keeps of unsynced lines what it likes.
    #[derive(Debug, Default)]
    struct Disk {
        synced: Vec<u8>,
        unsynced: Vec<u8>,
        /// Results of the next calls; all succeed afterwards.
        failures: VecDeque<bool>,
        full: bool,
    }

    #[derive(Debug, Clone, Default)]
    struct SharedDisk(Arc<Mutex<Disk>>);

    impl UsageStorage for SharedDisk {
        fn append(&mut self, lines: &[u8]) -> io::Result<()> {
            let mut disk = self.0.lock().unwrap();
            if disk.full || disk.failures.pop_front() == Some(true) {
                disk.unsynced.clear();
                return Err(io::ErrorKind::StorageFull.into());
            }
            disk.unsynced.extend(lines);
            Ok(())
        }

        fn sync(&mut self) -> io::Result<()> {
            let mut disk = self.0.lock().unwrap();
            let unsynced = std::mem::take(&mut disk.unsynced);
            if disk.full || disk.failures.pop_front() == Some(true) {
                // Half of the lines survive a failed sync.
                let lines: Vec<&[u8]> = unsynced.split_inclusive(|byte| *byte == b'\n').collect();
                let kept = lines[..lines.len() / 2].concat();
                disk.synced.extend(kept);
                return Err(io::ErrorKind::StorageFull.into());
            }
            disk.synced.extend(unsynced);
            Ok(())
        }
    }

    fn record(request: u64, tokens: u64) -> UsageRecord {
        UsageRecord {
            tenant: format!("t{}", request % 3),
            request: request.to_string(),
            completion_tokens: tokens,
            ..UsageRecord::default()
        }
    }

    fn block_on(future: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future);
    }

    proptest! {
        /// Whatever the disk does, every request has exactly one line, and the sums are those of the requests.
        #[test]
        fn each_request_has_one_line_and_the_sums_are_equal(
            requests in proptest::collection::vec((0u64..1000, any::<bool>()), 1..60),
            failures in proptest::collection::vec(any::<bool>(), 0..40),
        ) {
            let disk = SharedDisk::default();
            disk.0.lock().unwrap().failures = failures.into();
            let log = UsageLog::start(Box::new(disk.clone()), UsageLogPolicy::Serve, 1000).unwrap();
            let mut expected: BTreeMap<String, u64> = BTreeMap::new();
            for (number, (tokens, flushes)) in (0..).zip(&requests) {
                let record = record(number, *tokens);
                *expected.entry(record.tenant.clone()).or_default() += tokens;
                drop(log.admit().unwrap().record(record));
                if *flushes {
                    block_on(log.flush());
                }
            }
            while !disk.0.lock().unwrap().failures.is_empty() {
                block_on(log.flush());
                disk.0.lock().unwrap().failures.pop_front();
            }
            drop(log);
            let mut summary = UsageSummary::new(UsageGroup::Tenant);
            let mut ids = BTreeSet::new();
            let written = disk.0.lock().unwrap().synced.clone();
            for line in written.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
                let record: UsageRecord = serde_json::from_slice(line).unwrap();
                if ids.insert(record.id.clone()) {
                    summary.add(&record);
                }
            }
            let sums = summary.groups.into_iter().map(|(tenant, totals)| (tenant, totals.completion_tokens));
            prop_assert_eq!(sums.collect::<BTreeMap<_, _>>(), expected);
            prop_assert_eq!(summary.total.requests, requests.len() as u64);
        }
    }

    #[test]
    fn a_full_disk_refuses_requests_until_it_has_room_or_serves_them_by_option() {
        for policy in [UsageLogPolicy::Refuse, UsageLogPolicy::Serve] {
            let disk = SharedDisk::default();
            let log = UsageLog::start(Box::new(disk.clone()), policy, 2).unwrap();
            let [first, second] = [log.admit().unwrap(), log.admit().unwrap()];
            let third = log.admit();
            assert_eq!(third.is_err(), policy == UsageLogPolicy::Refuse, "the queue is full");
            drop(third);
            disk.0.lock().unwrap().full = true;
            drop(first.record(record(1, 1)));
            block_on(log.flush());
            drop(second);
            let during = log.admit();
            assert_eq!(during.is_err(), policy == UsageLogPolicy::Refuse, "the disk is full");
            assert_eq!(log.refuses(), policy == UsageLogPolicy::Refuse);
            drop(during);
            disk.0.lock().unwrap().full = false;
            block_on(log.flush());
            assert!(log.admit().is_ok());
            let written = String::from_utf8(disk.0.lock().unwrap().synced.clone()).unwrap();
            assert_eq!(written.lines().count(), 1, "the line of the request that ended on the full disk");
        }
    }
}
