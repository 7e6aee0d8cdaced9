use std::collections::BTreeSet;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use inflight_proto::FILE_DESCRIPTOR_SET;
use inflight_proto::kserve::grpc_inference_service_server::GrpcInferenceServiceServer;
use inflight_proto::v1::inference_server::InferenceServer;
use inflight_transport::{Accept, ClientTls, Http2, ReceiveLayer, ServerTls, TlsError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::service::Routes;
use tonic::transport::server::Connected;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tower::ServiceBuilder;

use crate::api::admission::{Admission, AdmissionLayer};
use crate::api::arrival::{EdgeLayer, receive_budget, receive_limits};
use crate::api::auth::AuthLayer;
use crate::api::ingress::Ingress;
use crate::api::kserve::Kserve;
use crate::cluster::connector::Dial;
use crate::cluster::discovery::Source;
use crate::cluster::membership::Members;
use crate::dispatcher::Dispatch;
use crate::metrics as names;
use crate::options::{Options, OptionsError};
use crate::restart::restart_on_panic;
use crate::stats::RouterStats;
use crate::tenants::{Tenants, TenantsError};

/// Why a router could not start, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The options cannot work.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The address could not be bound.
    #[error("cannot listen on {address}: {source}; is another process using this port?")]
    Bind {
        /// Where the router was to listen.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// A certificate or key cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The tenants' file cannot be used.
    #[error(transparent)]
    Tenants(#[from] TenantsError),
    /// The descriptors compiled into the program do not load.
    #[error("reflection cannot be served: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// A router that is bound to its address.
pub struct Router {
    listener: TcpListener,
    address: SocketAddr,
    core: Core,
}

/// A router without a network.
pub struct Core {
    options: Options,
    dispatch: Arc<Dispatch>,
    sources: Vec<Source>,
    dial: Option<Dial>,
    tls: Option<ServerTls>,
    tenants: Option<Arc<Tenants>>,
}

/// A view of a running router.
#[derive(Debug, Clone)]
pub struct Handle {
    ready: watch::Receiver<bool>,
    dispatch: Weak<Dispatch>,
}

impl Handle {
    /// Resolves when at least one worker's session is open and its bundle is loaded; never, if the router ends
    /// before.
    pub async fn ready(&self) {
        let mut ready = self.ready.clone();
        if ready.wait_for(|ready| *ready).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// What the router holds now; nothing once it is gone.
    pub fn stats(&self) -> RouterStats {
        self.dispatch.upgrade().map(|dispatch| dispatch.stats()).unwrap_or_default()
    }

    /// Whether a request could be served now.
    pub fn is_ready(&self) -> bool {
        *self.ready.borrow()
    }
}

impl Router {
    /// Checks the options and takes the address.
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

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A view that stays valid while [`Router::serve`] runs.
    pub fn handle(&self) -> Handle {
        self.core.handle()
    }

    /// Serves until `drain` is cancelled and every open call has ended: from then on health says NOT_SERVING
    /// and no call is accepted, while those open go on to their end.
    ///
    /// # Errors
    /// [`Error::Reflection`] if the description of the API cannot be served.
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
    /// How long connections may take to send what they hold, once no call is open any more.
    const FLUSH_MAX: Duration = Duration::from_secs(1);

    /// Checks the options.
    ///
    /// # Errors
    /// [`Error::Options`].
    pub fn new(options: Options) -> Result<Self, Error> {
        options.validate()?;
        let sources = options.workers.iter().map(|worker| worker.parse::<Source>());
        let sources = sources.collect::<Result<_, _>>().map_err(OptionsError::from)?;
        let tls = options.tls.clone().map(ServerTls::load).transpose()?;
        // Read once now, so that a mistake is known at the start.
        options.worker_tls.as_ref().map(ClientTls::load).transpose()?;
        let tenants = options.tenants_file.as_deref().map(Tenants::load).transpose()?.map(Arc::new);
        let dispatch = Arc::new(Dispatch::new(&options));
        Ok(Self { options, dispatch, sources, dial: None, tls, tenants })
    }

    /// Reaches its workers another way than by TCP.
    #[must_use]
    pub fn with_dial(mut self, dial: Dial) -> Self {
        self.dial = Some(dial);
        self
    }

    /// A view that stays valid while [`Core::serve`] runs.
    pub fn handle(&self) -> Handle {
        Handle { ready: self.dispatch.ready(), dispatch: Arc::downgrade(&self.dispatch) }
    }

    /// Serves connections, as [`Router::serve`] does.
    ///
    /// # Errors
    /// As there.
    pub async fn serve<I, S>(self, incoming: I, drain: CancellationToken) -> Result<(), Error>
    where
        I: Stream<Item = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let Self { options, dispatch, sources, dial, tls: _, tenants } = self;
        names::describe();
        metrics::gauge!(names::WORKERS_CONNECTED).set(0.0);
        let open = TaskTracker::new();
        let (reporter, health) = tonic_health::server::health_reporter();
        set_health(&reporter, false).await;
        // For probes that ask whether the process lives, also while no worker is there.
        reporter.set_service_status("liveness", ServingStatus::Serving).await;

        // Dropped, and with it aborted, when this function returns.
        let mut tasks = JoinSet::new();
        let (members, of_members) = (options.clone(), dispatch.clone());
        tasks.spawn(restart_on_panic("membership", move || {
            Members::new(&members, of_members.clone(), dial.clone()).follow(sources.clone())
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
            InferenceServer::from_arc(ingress).max_decoding_message_size(options.message_bytes_max);
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
        let limits = move |path: &str| receive_limits(path, &receiving);
        let service = ServiceBuilder::new()
            .layer(ReceiveLayer::new(receive_budget(&options), limits))
            .layer(EdgeLayer { open: open.clone() })
            .layer(AuthLayer { tenants })
            .layer(AdmissionLayer { admission })
            .service(routes.prepare());
        let server = Http2 {
            keepalive_interval: options.keepalive_interval,
            header_bytes_max: options.header_bytes_max,
            streams_max: options.connection_streams_max,
        };
        let serving = server.serve(incoming, service, drain.clone());
        until_drained(serving, drain, open).await;
        Ok(())
    }
}

/// Has the dispatcher do what only time brings about.
async fn tick(dispatch: Arc<Dispatch>) {
    let mut ticks = tokio::time::interval(Dispatch::TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        dispatch.tick();
    }
}

/// Runs the server. A drained server waits for every stream, and a health watch never ends by itself: so when
/// the last call of ours has ended, connections get a moment to flush and the rest is cut.
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

/// Keeps the health service up to date: the router's own names, and one for each model that workers serve or served.
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
