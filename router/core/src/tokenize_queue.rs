//! Queue of tokenizing work: weighted fair queueing of text pieces over tenants, beneath strict priorities.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use inflight_contract::{Service, Tenant, TokenCost, VirtualTokenCounters, Weight};

/// Bounds of a [`TokenizeQueue`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenizeQueueOptions {
    /// Maximum pieces tokenized at once.
    pub slots: usize,
    /// Maximum pieces of one tenant at once; at least 1. Fewer than `slots` keeps one free for the others, whatever it does.
    pub tenant_slots: usize,
    /// Maximum jobs, waiting and running.
    pub jobs_max: usize,
    /// Maximum idle tenants whose service is remembered.
    pub idle_tenants_max: usize,
}

/// Number of a tokenizing job, in order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TokenizeJobId(u64);

/// Job to be queued.
#[derive(Debug, Clone, Copy)]
pub struct TokenizeArrival<'a> {
    /// Name of the tenant.
    pub tenant: &'a str,
    /// Fair-share weight of the tenant.
    pub weight: Weight,
    /// Priority; higher goes first.
    pub priority: i32,
    /// Its first piece.
    pub piece: TokenizePiece,
}

/// Piece of a job: the unit in which tenants take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenizePiece {
    /// Size of its text in bytes, for which its tenant is charged.
    pub bytes: u64,
    /// Whether it is the last one of its job.
    pub last: bool,
}

/// Result of queueing a job.
#[derive(Debug, PartialEq, Eq)]
pub struct TokenizeAdmitted {
    /// Number of the job.
    pub job: TokenizeJobId,
    /// Job that it displaced, which has left the queue.
    pub displaced: Option<TokenizeJobId>,
}

/// The queue holds its maximum of jobs, none of which the new one may displace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{jobs_max} jobs are running or wait")]
pub struct TokenizeQueueFull {
    /// The limit.
    pub jobs_max: usize,
}

#[derive(Debug)]
struct Job {
    tenant: Tenant,
    priority: i32,
    /// Whether a piece of it was granted.
    started: bool,
    /// Piece that waits for a slot.
    waiting: Option<TokenizePiece>,
    /// Whether its tenant counts as backlogged for it: until its last piece is granted.
    backlogged: bool,
}

/// Jobs of a tenant; at least one.
#[derive(Debug)]
struct TenantJobs {
    name: Arc<str>,
    /// Jobs with a waiting piece, in the order of service.
    waiting: BTreeSet<(Reverse<i32>, TokenizeJobId)>,
    /// All jobs.
    jobs: usize,
    /// Number of the last grant.
    granted: u64,
}

/// Bounded queue of tokenizing jobs, each a sequence of pieces.
///
/// A slot goes to the highest priority, then to the tenant with the least virtual time (bytes over weight,
/// [`VirtualTokenCounters`]), then to the one whose last turn is longest ago; within a tenant, to the earliest
/// job. A job asks for its next piece in the same step in which it returns its slot
/// ([`TokenizeQueue::finish`]), so it competes for that slot, and weights hold for tenants with one job each.
///
/// Invariants: at most `slots` pieces are granted and not finished, at most `jobs_max` jobs have entered and not
/// left. A full queue displaces only jobs that have not started: of a lower priority, or of a tenant that holds
/// more jobs over its weight than the new one's would.
#[derive(Debug)]
pub struct TokenizeQueue {
    options: TokenizeQueueOptions,
    counters: VirtualTokenCounters,
    jobs: BTreeMap<TokenizeJobId, Job>,
    tenants: BTreeMap<Tenant, TenantJobs>,
    waiting: usize,
    /// Tenants of the jobs with a granted piece, also of those that have left.
    running: BTreeMap<TokenizeJobId, Arc<str>>,
    next_job: u64,
    grants: u64,
}

impl TokenizeQueue {
    /// Creates an empty queue.
    pub fn new(options: TokenizeQueueOptions) -> Self {
        Self {
            options,
            counters: VirtualTokenCounters::new(TokenCost::default(), options.idle_tenants_max),
            jobs: BTreeMap::new(),
            tenants: BTreeMap::new(),
            waiting: 0,
            running: BTreeMap::new(),
            next_job: 0,
            grants: 0,
        }
    }

    /// Queues a job with its first piece.
    ///
    /// # Errors
    /// [`TokenizeQueueFull`]; the queue is unchanged.
    pub fn enter(&mut self, arrival: TokenizeArrival<'_>) -> Result<TokenizeAdmitted, TokenizeQueueFull> {
        let jobs_max = self.options.jobs_max;
        let displaced = if self.jobs.len() < jobs_max {
            None
        } else {
            Some(self.victim(&arrival).ok_or(TokenizeQueueFull { jobs_max })?)
        };
        if let Some(victim) = displaced {
            self.leave(victim);
        }
        let job = TokenizeJobId(self.next_job);
        self.next_job += 1;
        let tenant = self.counters.arrive(arrival.tenant, arrival.weight);
        let entry =
            Job { tenant, priority: arrival.priority, started: false, waiting: None, backlogged: true };
        self.jobs.insert(job, entry);
        let jobs = self.tenants.entry(tenant).or_insert_with(|| TenantJobs {
            name: Arc::from(arrival.tenant),
            waiting: BTreeSet::new(),
            jobs: 0,
            granted: 0,
        });
        jobs.jobs += 1;
        self.request(job, arrival.piece);
        Ok(TokenizeAdmitted { job, displaced })
    }

    /// Returns the job that a new one displaces from a full queue.
    fn victim(&self, arrival: &TokenizeArrival<'_>) -> Option<TokenizeJobId> {
        let displaceable = || self.jobs.iter().filter(|(_, job)| !job.started);
        let least = displaceable().map(|(id, job)| (job.priority, Reverse(*id))).min();
        if let Some((_, Reverse(id))) = least.filter(|(priority, _)| *priority < arrival.priority) {
            return Some(id);
        }
        let own = self.tenants.values().find(|tenant| &*tenant.name == arrival.tenant);
        let share = (own.map_or(0, |own| own.jobs) + 1) as f64 / arrival.weight.get();
        let share_of = |job: &Job| {
            let held = self.tenants.get(&job.tenant).map_or(0, |tenant| tenant.jobs);
            held as f64 / self.counters.weight(job.tenant).get()
        };
        let greedy = displaceable().filter(|(_, job)| job.priority <= arrival.priority);
        let greedy = greedy.filter(|(_, job)| share_of(job) > share);
        let most = greedy.max_by(|(a, left), (b, right)| {
            share_of(left).total_cmp(&share_of(right)).then(right.priority.cmp(&left.priority)).then(a.cmp(b))
        });
        most.map(|(id, _)| *id)
    }

    /// Asks for a slot for the next piece of a job; ignored if the job has left.
    fn request(&mut self, id: TokenizeJobId, piece: TokenizePiece) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        debug_assert!(job.waiting.is_none(), "one piece of a job at a time");
        if job.waiting.replace(piece).is_none() {
            self.waiting += 1;
        }
        if let Some(tenant) = self.tenants.get_mut(&job.tenant) {
            tenant.waiting.insert((Reverse(job.priority), id));
        }
    }

    /// Gives a free slot to the next piece, charges its tenant, and returns its job.
    pub fn grant(&mut self) -> Option<TokenizeJobId> {
        if self.running.len() >= self.options.slots {
            return None;
        }
        let running = |name: &str| self.running.values().filter(|tenant| &***tenant == name).count();
        let may_run = |jobs: &TenantJobs| running(&jobs.name) < self.options.tenant_slots.max(1);
        let firsts = self.tenants.iter().filter(|(_, jobs)| may_run(jobs)).filter_map(|(tenant, jobs)| {
            let (priority, job) = *jobs.waiting.first()?;
            Some(((priority, self.counters.service(*tenant), jobs.granted, job), *tenant))
        });
        let ((priority, _, _, id), tenant) = firsts.min_by_key(|(key, _)| *key)?;
        self.grants += 1;
        let jobs = self.tenants.get_mut(&tenant)?;
        jobs.waiting.remove(&(priority, id));
        jobs.granted = self.grants;
        let name = jobs.name.clone();
        let job = self.jobs.get_mut(&id)?;
        let piece = job.waiting.take()?;
        job.started = true;
        self.waiting -= 1;
        self.running.insert(id, name.clone());
        // Not `charge_cost`, whose charges wait to be drained.
        self.counters.charge_elsewhere(&name, piece.bytes);
        // What was announced as the last piece may be followed by another.
        if piece.last && job.backlogged {
            job.backlogged = false;
            self.counters.start(tenant);
        }
        Some(id)
    }

    /// Returns the slot of a granted piece and asks for the job's next piece. A job that has left asks for
    /// nothing.
    pub fn finish(&mut self, job: TokenizeJobId, next: Option<TokenizePiece>) {
        let granted = self.running.remove(&job);
        debug_assert!(granted.is_some(), "a piece finished that was not granted");
        if let Some(piece) = next {
            self.request(job, piece);
        }
    }

    /// Charges a tenant for work of a granted piece beyond its size.
    pub fn charge(&mut self, tenant: &str, bytes: u64) {
        self.counters.charge_elsewhere(tenant, bytes);
    }

    /// Removes a job. A granted piece of it keeps its slot until [`TokenizeQueue::finish`].
    pub fn leave(&mut self, id: TokenizeJobId) {
        let Some(job) = self.jobs.remove(&id) else { return };
        if job.waiting.is_some() {
            self.waiting -= 1;
        }
        if let Some(jobs) = self.tenants.get_mut(&job.tenant) {
            jobs.waiting.remove(&(Reverse(job.priority), id));
            jobs.jobs -= 1;
            if jobs.jobs == 0 {
                self.tenants.remove(&job.tenant);
            }
        }
        if job.backlogged {
            self.counters.start(job.tenant);
        }
        self.counters.depart(job.tenant);
    }

    /// Whether a piece of a job waits for a slot.
    pub fn is_waiting(&self, job: TokenizeJobId) -> bool {
        self.jobs.get(&job).is_some_and(|job| job.waiting.is_some())
    }

    /// Returns the number of jobs with a waiting piece.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Returns the number of pieces that are being tokenized.
    pub fn busy(&self) -> usize {
        self.running.len()
    }

    /// Returns the virtual time of a tenant, in bytes over weight.
    pub fn service(&self, tenant: &str) -> Option<Service> {
        self.counters.iter().find(|(name, ..)| *name == tenant).map(|(_, service, _)| service)
    }
}
