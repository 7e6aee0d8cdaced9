//! Scripted Admin service for tests of its clients: a first state, updates when the test sends them, lives of requests.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use futures::{Stream, StreamExt as _};
use inflight_proto::v1::admin_server::{Admin, AdminServer as AdminService};
use inflight_proto::v1::{
    DiagnoseClusterRequest, DiagnoseClusterResponse, GetRequestRequest, GetRequestResponse,
    ListRequestsRequest, ListRequestsResponse, WatchRequest, WatchResponse,
};
use tokio::net::TcpListener;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{BroadcastStream, TcpListenerStream};
use tonic::{Request, Response, Status};

/// Updates that wait for a viewer.
const UNREAD_MAX: usize = 256;

/// Script of the service, shared with its calls.
#[derive(Debug)]
struct Script {
    first: Mutex<WatchResponse>,
    lives: Mutex<BTreeMap<u64, GetRequestResponse>>,
    key: Option<String>,
    watches: Mutex<Vec<WatchRequest>>,
}

/// Server of the Admin service that a test stops and starts again.
#[derive(Debug)]
pub struct AdminServer {
    script: Arc<Script>,
    updates: broadcast::Sender<WatchResponse>,
    /// Address, the same after a restart.
    pub address: SocketAddr,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

impl AdminServer {
    /// Starts a server whose watches begin with `first`. With a `key`, calls need it as their bearer token.
    ///
    /// # Errors
    /// No port is free.
    pub async fn start(first: WatchResponse, key: Option<&str>) -> Result<Self> {
        let script = Arc::new(Script {
            first: Mutex::new(first),
            lives: Mutex::default(),
            key: key.map(str::to_owned),
            watches: Mutex::default(),
        });
        let updates = broadcast::Sender::new(UNREAD_MAX);
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let (stop, serving) = serve(listener, &script, &updates);
        Ok(Self { script, updates, address, stop, serving })
    }

    /// Sends an update to all watches.
    pub fn send(&self, update: WatchResponse) {
        // Without a watch, no update is due.
        let _ = self.updates.send(update);
    }

    /// Sets the first update of later watches.
    pub fn begin_with(&self, first: WatchResponse) {
        *self.script.first.lock().unwrap_or_else(PoisonError::into_inner) = first;
    }

    /// Sets the life of a request.
    pub fn set_life(&self, number: u64, life: GetRequestResponse) {
        self.script.lives.lock().unwrap_or_else(PoisonError::into_inner).insert(number, life);
    }

    /// Returns the parameters of the watches so far.
    pub fn watches(&self) -> Vec<WatchRequest> {
        self.script.watches.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends all watches, and listens no more.
    ///
    /// # Errors
    /// The server had panicked.
    pub async fn stop(&mut self) -> Result<()> {
        self.stop.send_replace(true);
        Ok((&mut self.serving).await?)
    }

    /// Listens again on the same address, after [`AdminServer::stop`].
    ///
    /// # Errors
    /// The address is taken.
    pub async fn restart(&mut self) -> Result<()> {
        let listener = TcpListener::bind(self.address).await?;
        (self.stop, self.serving) = serve(listener, &self.script, &self.updates);
        Ok(())
    }
}

fn serve(
    listener: TcpListener,
    script: &Arc<Script>,
    updates: &broadcast::Sender<WatchResponse>,
) -> (watch::Sender<bool>, JoinHandle<()>) {
    let (stop, stopped) = watch::channel(false);
    let calls = Calls { script: Arc::clone(script), updates: updates.clone(), stopped: stopped.clone() };
    let serving = tokio::spawn(async move {
        let served = tonic::transport::Server::builder()
            .add_service(AdminService::new(calls))
            .serve_with_incoming_shutdown(TcpListenerStream::new(listener), until(stopped));
        if let Err(error) = served.await {
            eprintln!("the Admin server ended: {error}");
        }
    });
    (stop, serving)
}

/// Waits until the server is to stop.
async fn until(mut stopped: watch::Receiver<bool>) {
    // An error: the sender is gone, and with it the test.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

/// Calls of one run of the server.
#[derive(Debug)]
struct Calls {
    script: Arc<Script>,
    updates: broadcast::Sender<WatchResponse>,
    stopped: watch::Receiver<bool>,
}

impl Calls {
    fn authorize<T>(&self, request: &Request<T>) -> Result<(), Status> {
        let Some(key) = &self.script.key else { return Ok(()) };
        let given = request.metadata().get("authorization").and_then(|value| value.to_str().ok());
        match given.and_then(|value| value.strip_prefix("Bearer ")) {
            Some(given) if given == key => Ok(()),
            Some(_) => Err(Status::permission_denied("not an administrator")),
            None => Err(Status::unauthenticated("no API key")),
        }
    }
}

#[tonic::async_trait]
impl Admin for Calls {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<WatchResponse, Status>> + Send>>;

    async fn list_requests(
        &self,
        request: Request<ListRequestsRequest>,
    ) -> Result<Response<ListRequestsResponse>, Status> {
        self.authorize(&request)?;
        let requests = self.script.first.lock().unwrap_or_else(PoisonError::into_inner).requests.clone();
        Ok(Response::new(ListRequestsResponse { requests, omitted: 0 }))
    }

    async fn get_request(
        &self,
        request: Request<GetRequestRequest>,
    ) -> Result<Response<GetRequestResponse>, Status> {
        self.authorize(&request)?;
        let number = request.into_inner().number;
        let lives = self.script.lives.lock().unwrap_or_else(PoisonError::into_inner);
        let life = lives.get(&number).cloned().ok_or_else(|| Status::not_found("no such request"))?;
        Ok(Response::new(life))
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        self.authorize(&request)?;
        let updates = BroadcastStream::new(self.updates.subscribe());
        let first = self.script.first.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.script.watches.lock().unwrap_or_else(PoisonError::into_inner).push(request.into_inner());
        let later = updates.map(|update| update.map_err(|_| Status::internal("the viewer reads too slowly")));
        let stream = futures::stream::iter([Ok(first)]).chain(later);
        Ok(Response::new(Box::pin(stream.take_until(Box::pin(until(self.stopped.clone()))))))
    }

    async fn diagnose_cluster(
        &self,
        request: Request<DiagnoseClusterRequest>,
    ) -> Result<Response<DiagnoseClusterResponse>, Status> {
        self.authorize(&request)?;
        Ok(Response::new(DiagnoseClusterResponse::default()))
    }
}
