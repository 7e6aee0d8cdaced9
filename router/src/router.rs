//! Router process: binding, background tasks, the gRPC server, health and drain.

use std::collections::BTreeSet;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use inflight_net::{Accept, ClientTls, Framing, HttpServer, Protocols, ReceiveLayer, ServerTls, TlsError};
use inflight_proto::FILE_DESCRIPTOR_SET;
use inflight_proto::kserve::grpc_inference_service_server::GrpcInferenceServiceServer;
use inflight_proto::v1::inference_server::InferenceServer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Status;
use tonic::service::Routes;
use tonic::transport::server::Connected;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tower::ServiceBuilder;

use crate::api::admission::{Admission, AdmissionLayer};
use crate::api::arrival::{ArrivalLayer, receive_budget, receive_limits};
use crate::api::auth::AuthLayer;
use crate::api::grpc::Grpc;
use crate::api::ingress::Ingress;
use crate::api::kserve::Kserve;
use crate::api::refusal;
use crate::cluster::connector::Connector;
use crate::cluster::discovery::Source;
use crate::cluster::membership::Membership;
use crate::dispatcher::Dispatcher;
use crate::metrics as names;
use crate::options::{Options, OptionsError};
use crate::restart::restart_on_panic;
use crate::stats::RouterStats;
use crate::tenants::{Tenants, TenantsError};

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
    /// Unusable certificate or key.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Invalid tenants' file.
    #[error(transparent)]
    Tenants(#[from] TenantsError),
    /// Invalid descriptors for reflection.
    #[error("reflection cannot be served: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// Router bound to its address.
pub struct Router {
    listener: TcpListener,
    address: SocketAddr,
    core: Core,
}

/// Router without a listener.
pub struct Core {
    options: Options,
    dispatch: Arc<Dispatcher>,
    sources: Vec<Source>,
    connector: Option<Connector>,
    tls: Option<ServerTls>,
    tenants: Option<Arc<Tenants>>,
}

/// Handle of a running router.
#[derive(Debug, Clone)]
pub struct Handle {
    ready: watch::Receiver<bool>,
    dispatch: Weak<Dispatcher>,
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
        let address = core.options.listen;
        let refused = |source| Error::Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        Ok(Self { listener, address, core })
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
        let Self { listener, address, core } = self;
        tracing::info!(%address, workers = core.options.workers.len(), "router is listening");
        let tls = core.tls.clone();
        let incoming = Accept::new("grpc", listener, tls, core.options.connections).incoming();
        let result =
            core.serve(incoming.map(|connection| connection.map_err(|never| match never {})), drain).await;
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
        let tls = options.tls.clone().map(ServerTls::load).transpose()?;
        // Read once at start-up, so that a mistake is reported there.
        options.worker_tls.as_ref().map(ClientTls::load).transpose()?;
        let tenants = options.tenants_file.as_deref().map(Tenants::load).transpose()?.map(Arc::new);
        let dispatch = Arc::new(Dispatcher::new(&options));
        Ok(Self { options, dispatch, sources, connector: None, tls, tenants })
    }

    /// Connects to workers by another transport than TCP.
    #[must_use]
    pub fn with_connector(mut self, connector: Connector) -> Self {
        self.connector = Some(connector);
        self
    }

    /// Returns a handle that stays valid while [`Core::serve`] runs.
    pub fn handle(&self) -> Handle {
        Handle { ready: self.dispatch.ready(), dispatch: Arc::downgrade(&self.dispatch) }
    }

    /// Serves accepted connections, with the drain of [`Router::serve`].
    ///
    /// # Errors
    /// [`Error::Reflection`] if the API descriptors cannot be served.
    pub async fn serve<I, S>(self, incoming: I, drain: CancellationToken) -> Result<(), Error>
    where
        I: Stream<Item = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let Self { options, dispatch, sources, connector, tls: _, tenants } = self;
        names::describe();
        metrics::gauge!(names::WORKERS_CONNECTED).set(0.0);
        let open = TaskTracker::new();
        let (reporter, health) = tonic_health::server::health_reporter();
        set_health(&reporter, false).await;
        // For liveness probes, independent of workers.
        reporter.set_service_status("liveness", ServingStatus::Serving).await;

        // Dropping it when this function returns aborts the tasks.
        let mut tasks = JoinSet::new();
        let (members, of_members) = (options.clone(), dispatch.clone());
        tasks.spawn(restart_on_panic("membership", move || {
            Membership::new(&members, of_members.clone(), connector.clone()).follow(sources.clone())
        }));
        let ticking = dispatch.clone();
        tasks.spawn(restart_on_panic("ticks", move || tick(ticking.clone())));
        let (reported, draining) = (dispatch.clone(), drain.clone());
        tasks.spawn(restart_on_panic("health", move || {
            report_health(reporter.clone(), reported.ready(), reported.served(), draining.clone())
        }));
        if let Some(tenants) = &tenants {
            let tenants = tenants.clone();
            tasks.spawn(restart_on_panic("tenants_file", move || tenants.clone().follow()));
        }

        let admission = Admission::new(dispatch.clone());
        let ingress = Arc::new(Ingress::new(&options, dispatch, open.clone()));
        let kserve =
            GrpcInferenceServiceServer::new(Kserve::new(ingress.clone(), admission.clone(), drain.clone()))
                .max_decoding_message_size(options.message_bytes_max);
        let inference =
            InferenceServer::new(Grpc::new(ingress)).max_decoding_message_size(options.message_bytes_max);
        let mut routes = Routes::new(health).add_service(inference).add_service(kserve);
        if options.reflection {
            let builder = || {
                tonic_reflection::server::Builder::configure()
                    .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
                    .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            };
            routes = routes.add_service(builder().build_v1()?).add_service(builder().build_v1alpha()?);
        }
        let receiving = options.clone();
        let limits = move |path: &str| receive_limits(path, &receiving, Framing::Grpc);
        let service = ServiceBuilder::new()
            .layer(ReceiveLayer::new(receive_budget(&options), limits))
            .layer(ArrivalLayer { open: open.clone(), refuse: refusal::grpc })
            .layer(AuthLayer { tenants, refuse: refusal::grpc })
            .layer(AdmissionLayer { admission, refuse: refusal::grpc })
            .service(routes.prepare());
        let server = HttpServer {
            protocols: Protocols::Http2,
            keepalive_interval: options.keepalive_interval,
            header_bytes_max: options.header_bytes_max,
            header_time_max: options.message_time_max,
            streams_max: options.connection_streams_max,
            write_timeout: options.stall_timeout,
            fault: || Status::internal("the call failed on a fault of the server").into_http(),
        };
        let serving = server.serve(incoming, service, drain.clone());
        until_drained(serving, drain, open).await;
        Ok(())
    }
}

/// Calls the dispatcher's tick periodically.
async fn tick(dispatch: Arc<Dispatcher>) {
    let mut ticks = tokio::time::interval(Dispatcher::TICK);
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
        () = serving => {}
        () = drained => {}
    }
}

async fn set_health(reporter: &HealthReporter, serving: bool) {
    let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
    for name in Core::HEALTH_NAMES {
        reporter.set_service_status(name, status).await;
    }
}

/// Updates the health service: the router's names, and one per model that is or was served.
async fn report_health(
    reporter: HealthReporter,
    mut ready: watch::Receiver<bool>,
    mut served: watch::Receiver<BTreeSet<String>>,
    drain: CancellationToken,
) {
    let mut known = BTreeSet::new();
    loop {
        let serving = *ready.borrow_and_update() && !drain.is_cancelled();
        let models = served.borrow_and_update().clone();
        set_health(&reporter, serving).await;
        known.extend(models.iter().cloned());
        for model in &known {
            let serves = models.contains(model) && !drain.is_cancelled();
            let status = if serves { ServingStatus::Serving } else { ServingStatus::NotServing };
            reporter.set_service_status(format!("model/{model}"), status).await;
        }
        tokio::select! {
            () = drain.cancelled() => break,
            changed = ready.changed() => if changed.is_err() { break },
            changed = served.changed() => if changed.is_err() { break },
        }
    }
    set_health(&reporter, false).await;
    for model in known {
        reporter.set_service_status(format!("model/{model}"), ServingStatus::NotServing).await;
    }
}
