//! Router process: binding, background tasks, the gRPC and HTTP servers, health and drain.

use std::collections::BTreeSet;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::stream::Empty;
use futures::{Stream, StreamExt as _};
use inflight_net::{Acceptor, ClientTls, Protocols, ServerTls, TlsError, UnreadBudget};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::server::Connected;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::clock;
use crate::cluster::connector::Connector;
use crate::cluster::discovery::Source;
use crate::cluster::membership::Membership;
use crate::cluster::model_cache::BundleLoad;
use crate::cluster::worker_calls::WorkerCalls;
use crate::dispatcher::SharedDispatcher;
use crate::layers::admission::Admission;
use crate::layers::arrival::receive_budget;
use crate::layers::key_failures::KeyFailures;
use crate::metrics as names;
use crate::options::{Options, OptionsError};
use crate::protocols::diagnosis::ViewerDiagnosis;
use crate::protocols::http::RenderMetrics;
use crate::protocols::operations::Operations;
use crate::request::ingress::Ingress;
use crate::restart::restart_on_panic;
use crate::serve::Shared;
use crate::stats::RouterStats;
use crate::tenants::{Tenants, TenantsError};
use crate::usage::log::UsageLog;
use crate::usage::{UsageLogError, tokens_used_today};

/// Failure to start or run a router.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Invalid options.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// Bind failure.
    #[error("cannot listen on {address}: {source}; is another process using this port?")]
    Bind {
        /// Address to listen on.
        address: SocketAddr,
        /// I/O error.
        source: io::Error,
    },
    /// The recording can't be created.
    #[error("can't record to {}: {source}", path.display())]
    Record {
        /// Path of the recording.
        path: PathBuf,
        /// I/O error.
        source: io::Error,
    },
    /// Unusable certificate or key.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Invalid tenants' file.
    #[error(transparent)]
    Tenants(#[from] TenantsError),
    /// Unusable usage log.
    #[error(transparent)]
    UsageLog(#[from] UsageLogError),
    /// Invalid descriptors for reflection.
    #[error("reflection cannot be served: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// Router bound to its address.
pub struct Router {
    listener: TcpListener,
    address: SocketAddr,
    /// Listener of the HTTP APIs, and its address.
    http: Option<(TcpListener, SocketAddr)>,
    core: Core,
}

/// Router without a listener.
pub struct Core {
    options: Options,
    dispatch: Arc<SharedDispatcher>,
    sources: Vec<Source>,
    connector: Option<Connector>,
    bundle_load: BundleLoad,
    tls: Option<ServerTls>,
    tenants: Option<Arc<Tenants>>,
    metrics: Option<RenderMetrics>,
    usage: Option<Arc<UsageLog>>,
}

/// Handle of a running router.
#[derive(Debug, Clone)]
pub struct Handle {
    ready: watch::Receiver<bool>,
    dispatch: Weak<SharedDispatcher>,
}

impl Handle {
    /// Waits until at least one worker's session is open and its bundle is loaded; never resolves if the
    /// router ends before.
    pub async fn ready(&self) {
        let mut ready = self.ready.clone();
        if ready.wait_for(|ready| *ready).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Returns the current load; zero once the router has ended.
    pub fn stats(&self) -> RouterStats {
        self.dispatch.upgrade().map(|dispatch| dispatch.stats()).unwrap_or_default()
    }

    /// Whether a request could be served now.
    pub fn is_ready(&self) -> bool {
        *self.ready.borrow()
    }
}

impl Router {
    /// Validates the options and binds the address.
    ///
    /// # Errors
    /// [`Error::Options`] and [`Error::Bind`].
    pub async fn bind(options: Options) -> Result<Self, Error> {
        let core = Core::new(options)?;
        let (listener, address) = bind(core.options.listen).await?;
        let http = match core.options.http.listen.address() {
            Some(address) => Some(bind(address).await?),
            None => None,
        };
        Ok(Self { listener, address, http, core })
    }

    /// Serves these metrics over HTTP, if the options say so.
    #[must_use]
    pub fn with_metrics(mut self, render: RenderMetrics) -> Self {
        self.core.metrics = Some(render);
        self
    }

    /// Returns the address of the HTTP APIs, if they are served.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(|(_, address)| *address)
    }

    /// Returns the address that clients connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns a handle that stays valid while [`Router::serve`] runs.
    pub fn handle(&self) -> Handle {
        self.core.handle()
    }

    /// Serves until `drain` is cancelled and every open call has ended. During the drain, health reports
    /// NOT_SERVING and no call is accepted, while open ones continue to their end.
    ///
    /// # Errors
    /// [`Error::Reflection`] if the API descriptors cannot be served.
    pub async fn serve(self, drain: CancellationToken) -> Result<(), Error> {
        let Self { listener, address, http, core } = self;
        tracing::info!(%address, workers = core.options.workers.len(), "router is listening");
        let limits = core.options.connections.into();
        let incoming = Acceptor::new("grpc", listener, core.tls.clone(), limits).incoming();
        let http = http.map(|(listener, address)| {
            tracing::info!(%address, "HTTP APIs are listening");
            Acceptor::new("http", listener, core.tls.clone(), limits).incoming().map(infallible)
        });
        let result = Box::pin(core.serve_all(incoming.map(infallible), http, drain)).await;
        tracing::info!(%address, "router has stopped");
        result
    }
}

impl Core {
    /// Names of the health service: the whole router, and its services.
    const HEALTH_NAMES: [&'static str; 3] = ["", "inflight.v1.Inference", "inference.GRPCInferenceService"];
    /// Time for connections to flush after the last open call.
    const FLUSH_MAX: Duration = Duration::from_secs(1);

    /// Validates the options.
    ///
    /// # Errors
    /// [`Error::Options`].
    pub fn new(options: Options) -> Result<Self, Error> {
        options.validate()?;
        let sources = options.workers.iter().map(|worker| worker.parse::<Source>());
        let sources = sources.collect::<Result<_, _>>().map_err(OptionsError::from)?;
        let files = options.tls.clone();
        let tls = files.map(|files| ServerTls::load_for(files, Protocols::Any)).transpose()?;
        // Read once at start-up, so that a mistake is reported there.
        options.worker_tls.as_ref().map(ClientTls::load).transpose()?;
        let tenants = options.tenants_file.as_deref().map(Tenants::load).transpose()?.map(Arc::new);
        let dispatch = SharedDispatcher::new(&options)
            .map_err(|source| Error::Record { path: options.record.clone().unwrap_or_default(), source })?;
        let dispatch = Arc::new(dispatch);
        let usage = open_usage_log(&options, tenants.as_deref())?;
        Ok(Self {
            options,
            dispatch,
            sources,
            connector: None,
            bundle_load: BundleLoad::Thread,
            tls,
            tenants,
            metrics: None,
            usage,
        })
    }

    /// Connects to workers by another transport than TCP.
    #[must_use]
    pub fn with_connector(mut self, connector: Connector) -> Self {
        self.connector = Some(connector);
        self
    }

    /// Loads bundles elsewhere than on blocking threads.
    #[must_use]
    pub fn with_bundle_load(mut self, load: BundleLoad) -> Self {
        self.bundle_load = load;
        self
    }

    /// Returns a handle that stays valid while [`Core::serve`] runs.
    pub fn handle(&self) -> Handle {
        Handle { ready: self.dispatch.ready(), dispatch: Arc::downgrade(&self.dispatch) }
    }

    /// Serves accepted gRPC connections, with the drain of [`Router::serve`].
    ///
    /// # Errors
    /// [`Error::Reflection`] if the API descriptors cannot be served.
    pub async fn serve<I, S>(self, incoming: I, drain: CancellationToken) -> Result<(), Error>
    where
        I: Stream<Item = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        Box::pin(self.serve_all(incoming, None::<Empty<io::Result<S>>>, drain)).await
    }

    /// Serves accepted connections of gRPC and of the HTTP APIs.
    async fn serve_all<I, H, S>(
        self,
        incoming: I,
        http: Option<H>,
        drain: CancellationToken,
    ) -> Result<(), Error>
    where
        I: Stream<Item = io::Result<S>> + Send + 'static,
        H: Stream<Item = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let Self { options, dispatch, sources, connector, bundle_load, tls: _, tenants, metrics, usage } =
            self;
        names::describe();
        options.export_limits();
        metrics::gauge!(names::WORKERS_CONNECTED).set(0.0);
        let open = TaskTracker::new();
        let (reporter, health) = tonic_health::server::health_reporter();
        set_health(&reporter, false).await;
        // For liveness probes, independent of workers.
        reporter.set_service_status("liveness", ServingStatus::Serving).await;

        // Dropping it when this function returns aborts the tasks.
        let mut tasks = JoinSet::new();
        let calls = Arc::new(WorkerCalls::new(&options));
        let (members, of_members, of_calls) = (options.clone(), dispatch.clone(), calls.clone());
        tasks.spawn(restart_on_panic("membership", move || {
            Membership::new(&members, of_members.clone(), connector.clone(), of_calls.clone(), bundle_load)
                .follow(sources.clone())
        }));
        let ticking = dispatch.clone();
        tasks.spawn(restart_on_panic("ticks", move || tick(ticking.clone())));
        let (reported, draining) = (dispatch.clone(), drain.clone());
        let refusing = usage.as_ref().and_then(|usage| usage.refusing());
        tasks.spawn(restart_on_panic("health", move || {
            report_health(
                reporter.clone(),
                reported.ready(),
                reported.served(),
                refusing.clone(),
                draining.clone(),
            )
        }));
        if let Some(tls) = options.worker_tls.clone() {
            tasks.spawn(restart_on_panic("worker_certificates", move || tls.clone().follow()));
        }
        if let Some(tenants) = &tenants {
            let tenants = tenants.clone();
            tasks.spawn(restart_on_panic("tenants_file", move || tenants.clone().follow()));
        }

        let unread = UnreadBudget::new(options.unread_bytes_max, metrics::gauge!(names::UNREAD_BYTES));
        let enforced = unread.clone();
        tasks.spawn(restart_on_panic("unread_responses", move || enforced.clone().enforce()));

        let admission = Admission::new(dispatch.clone());
        let operations = dispatch.live().map(|hub| {
            let (hub, drain, tenants) = (hub.clone(), drain.clone(), tenants.clone());
            let diagnosis = ViewerDiagnosis::new(hub.clone(), calls.clone(), drain.clone());
            Operations { hub, calls, drain, tenants, diagnosis }
        });
        let ingress = Arc::new(Ingress::new(&options, dispatch, open.clone(), usage.clone(), drain.clone()));
        let key_failures = Arc::new(KeyFailures::new(&options));
        let budget = receive_budget(&options);
        let shared = Shared {
            options,
            tenants,
            key_failures,
            admission,
            ingress,
            operations,
            unread,
            budget,
            open,
            drain: drain.clone(),
        };
        let services = shared.services(health);
        let grpc = shared.serve_grpc(incoming, services.clone(), http.is_some())?;
        let http = http.map(|incoming| shared.serve_http(incoming, services, metrics));
        let serving = async {
            match http {
                Some(http) => drop(futures::join!(grpc, http)),
                None => grpc.await,
            }
        };
        until_drained(serving, drain, shared.open.clone()).await;
        if let Some(usage) = usage {
            usage.flush().await;
        }
        Ok(())
    }
}

/// Opens the usage log, if there is one, and counts today's usage in it against the tenants' daily budgets.
fn open_usage_log(
    options: &Options,
    tenants: Option<&Tenants>,
) -> Result<Option<Arc<UsageLog>>, UsageLogError> {
    let Some(directory) = &options.usage_log else { return Ok(None) };
    let log = UsageLog::open(directory, options.usage_files, options.streams_max)?;
    if let Some(tenants) = tenants {
        let now = clock::since_unix_epoch();
        tenants.count_used(&tokens_used_today(directory, now)?, now);
    }
    Ok(Some(log))
}

/// Calls the dispatcher's tick periodically.
async fn tick(dispatch: Arc<SharedDispatcher>) {
    let mut ticks = tokio::time::interval(SharedDispatcher::TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        dispatch.tick();
    }
}

/// Runs the server until it has drained. It would wait for every stream, and a health watch never ends: after
/// the last API call, connections may flush for a moment and the rest is closed.
async fn until_drained<F>(serving: F, drain: CancellationToken, open: TaskTracker)
where
    F: Future<Output = ()>,
{
    let drained = async {
        drain.cancelled().await;
        tracing::info!(calls = open.len(), "draining");
        open.close();
        open.wait().await;
        tokio::time::sleep(Core::FLUSH_MAX).await;
    };
    tokio::select! {
        biased;
        () = serving => {}
        () = drained => {}
    }
}

/// Binds an address.
async fn bind(address: SocketAddr) -> Result<(TcpListener, SocketAddr), Error> {
    let refused = |source| Error::Bind { address, source };
    let listener = TcpListener::bind(address).await.map_err(refused)?;
    let address = listener.local_addr().map_err(refused)?;
    Ok((listener, address))
}

fn infallible<T>(connection: Result<T, std::convert::Infallible>) -> io::Result<T> {
    connection.map_err(|never| match never {})
}

async fn set_health(reporter: &HealthReporter, serving: bool) {
    let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
    for name in Core::HEALTH_NAMES {
        reporter.set_service_status(name, status).await;
    }
}

/// Waits for a change of the usage log's state; for ever without one, or after its writer has ended.
async fn usage_changed(changes: &mut Option<watch::Receiver<bool>>) {
    let ended = match changes {
        Some(changes) => changes.changed().await.is_err(),
        None => true,
    };
    if ended {
        std::future::pending::<()>().await;
    }
}

/// Updates the health service: the router's names, and one per model that is or was served.
async fn report_health(
    reporter: HealthReporter,
    mut ready: watch::Receiver<bool>,
    mut served: watch::Receiver<BTreeSet<String>>,
    mut refusing: Option<watch::Receiver<bool>>,
    drain: CancellationToken,
) {
    let mut known = BTreeSet::new();
    loop {
        let refused = refusing.as_mut().is_some_and(|refusing| *refusing.borrow_and_update());
        let serving = *ready.borrow_and_update() && !refused && !drain.is_cancelled();
        let models = served.borrow_and_update().clone();
        set_health(&reporter, serving).await;
        known.extend(models.iter().cloned());
        for model in &known {
            let serves = models.contains(model) && !drain.is_cancelled();
            let status = if serves { ServingStatus::Serving } else { ServingStatus::NotServing };
            reporter.set_service_status(format!("model/{model}"), status).await;
        }
        tokio::select! {
            biased;
            () = drain.cancelled() => break,
            changed = ready.changed() => if changed.is_err() { break },
            changed = served.changed() => if changed.is_err() { break },
            () = usage_changed(&mut refusing) => {}
        }
    }
    set_health(&reporter, false).await;
    for model in known {
        reporter.set_service_status(format!("model/{model}"), ServingStatus::NotServing).await;
    }
}
