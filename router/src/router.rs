use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use inflight_proto::FILE_DESCRIPTOR_SET;
use inflight_proto::v1::inference_server::InferenceServer;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::dispatch::Dispatch;
use crate::edge::EdgeLayer;
use crate::ingress::Ingress;
use crate::metrics as names;
use crate::options::{Options, OptionsError};
use crate::session::{Keeper, Models};

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
    /// The server failed.
    #[error("the server failed: {0}")]
    Serve(#[from] tonic::transport::Error),
    /// The descriptors compiled into the program do not load.
    #[error("reflection cannot be served: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// A router that is bound to its address.
pub struct Router {
    options: Options,
    listener: TcpListener,
    address: SocketAddr,
    dispatch: Arc<Dispatch>,
}

/// A view of a running router.
#[derive(Debug, Clone)]
pub struct Handle {
    ready: watch::Receiver<bool>,
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

    /// Whether a request could be served now.
    pub fn is_ready(&self) -> bool {
        *self.ready.borrow()
    }
}

impl Router {
    /// Names of the health service: the whole router, and its one service.
    const HEALTH_NAMES: [&'static str; 2] = ["", "inflight.v1.Inference"];
    /// How long connections may take to send what they hold, once no call is open any more.
    const FLUSH_MAX: Duration = Duration::from_secs(1);

    /// Checks the options and takes the address.
    ///
    /// # Errors
    /// [`Error::Options`] and [`Error::Bind`].
    pub async fn bind(options: Options) -> Result<Self, Error> {
        options.validate()?;
        let address = options.listen;
        let refused = |source| Error::Bind { address, source };
        let listener = TcpListener::bind(address).await.map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        let dispatch = Arc::new(Dispatch::new(&options));
        Ok(Self { options, listener, address, dispatch })
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A view that stays valid while [`Router::serve`] runs.
    pub fn handle(&self) -> Handle {
        Handle { ready: self.dispatch.ready() }
    }

    /// Serves until `drain` is cancelled and every open call has ended: from then on health says NOT_SERVING
    /// and no call is accepted, while those open go on to their end.
    ///
    /// # Errors
    /// [`Error::Serve`] if the server fails, [`Error::Reflection`] if it cannot be set up.
    pub async fn serve(self, drain: CancellationToken) -> Result<(), Error> {
        let Self { options, listener, address, dispatch } = self;
        tracing::info!(%address, workers = options.workers.len(), "router is listening");
        metrics::gauge!(names::WORKERS_CONFIGURED).set(options.workers.len() as f64);
        metrics::gauge!(names::WORKERS_CONNECTED).set(0.0);
        let open = TaskTracker::new();
        let (reporter, health) = tonic_health::server::health_reporter();
        set_health(&reporter, false).await;
        // For probes that ask whether the process lives, also while no worker is there.
        reporter.set_service_status("liveness", ServingStatus::Serving).await;

        // Dropped, and with it aborted, when this function returns.
        let mut tasks = JoinSet::new();
        let models = Arc::new(Models::default());
        for (worker, address) in options.workers.iter().enumerate() {
            let keeper = Keeper {
                worker,
                address: address.clone(),
                options: options.clone(),
                dispatch: dispatch.clone(),
                models: models.clone(),
            };
            tasks.spawn(keeper.keep());
        }
        tasks.spawn(report_health(reporter, dispatch.ready(), drain.clone()));

        let ingress = Ingress::new(&options, dispatch, open.clone());
        let inference = InferenceServer::new(ingress).max_decoding_message_size(options.message_bytes_max);
        let server = Server::builder()
            .http2_keepalive_interval(Some(options.keepalive_interval))
            .http2_keepalive_timeout(Some(options.keepalive_interval))
            .layer(EdgeLayer)
            .add_service(health)
            .add_service(inference);
        let server = if options.reflection {
            let builder = || {
                tonic_reflection::server::Builder::configure()
                    .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
                    .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            };
            server.add_service(builder().build_v1()?).add_service(builder().build_v1alpha()?)
        } else {
            server
        };
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        let serving = server.serve_with_incoming_shutdown(incoming, drain.clone().cancelled_owned());
        let result = until_drained(serving, drain, open).await;
        tracing::info!(%address, "router has stopped");
        result
    }
}

/// Runs the server. A drained server waits for every stream, and a health watch never ends by itself: so when
/// the last call of ours has ended, connections get a moment to flush and the rest is cut.
async fn until_drained<F>(serving: F, drain: CancellationToken, open: TaskTracker) -> Result<(), Error>
where
    F: Future<Output = Result<(), tonic::transport::Error>>,
{
    let drained = async {
        drain.cancelled().await;
        tracing::info!(calls = open.len(), "draining");
        open.close();
        open.wait().await;
        tokio::time::sleep(Router::FLUSH_MAX).await;
    };
    tokio::select! {
        result = serving => result.map_err(Error::from),
        () = drained => Ok(()),
    }
}

async fn set_health(reporter: &HealthReporter, serving: bool) {
    let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
    for name in Router::HEALTH_NAMES {
        reporter.set_service_status(name, status).await;
    }
}

async fn report_health(reporter: HealthReporter, mut ready: watch::Receiver<bool>, drain: CancellationToken) {
    loop {
        let serving = *ready.borrow_and_update();
        set_health(&reporter, serving && !drain.is_cancelled()).await;
        tokio::select! {
            () = drain.cancelled() => break,
            changed = ready.changed() => if changed.is_err() { break },
        }
    }
    set_health(&reporter, false).await;
}
