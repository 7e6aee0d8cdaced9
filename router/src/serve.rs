//! The gRPC and the HTTP server of a router: the same layers, limits and core under both.

use std::future::Future;
use std::io;
use std::sync::Arc;

use futures::Stream;
use inflight_net::{
    Framing, HttpServer, Protocols, ReceiveBudget, ReceiveLayer, SharedPool, UnreadBudget, middleware,
};
use inflight_proto::FILE_DESCRIPTOR_SET;
use inflight_proto::kserve::grpc_inference_service_server::GrpcInferenceServiceServer;
use inflight_proto::v1::admin_server::AdminServer;
use inflight_proto::v1::inference_server::InferenceServer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::Response;
use tonic::service::Routes;
use tonic::transport::server::Connected;
use tonic_health::pb::health_server::{Health, HealthServer};
use tower::ServiceBuilder;

use crate::layers::admission::{Admission, AdmissionControl};
use crate::layers::arrival::{Arrivals, receive_limits};
use crate::layers::auth::Authentication;
use crate::layers::cors::Cors;
use crate::layers::faults::Faults;
use crate::layers::key_failures::KeyFailures;
use crate::layers::refusal::{self, Refuse};
use crate::layers::request_id::RequestIds;
use crate::layers::sites::Sites;
use crate::options::{HttpOptions, Options};
use crate::outcome::Outcome;
use crate::protocols::grpc::Grpc;
use crate::protocols::grpc::admin::AdminService;
use crate::protocols::http::{self, HttpApi, RenderMetrics};
use crate::protocols::kserve::Kserve;
use crate::protocols::operations::Operations;
use crate::protocols::page::Ui;
use crate::request::ingress::Ingress;
use crate::tenants::Tenants;

/// What the servers of a router share.
pub(crate) struct Shared {
    pub(crate) options: Options,
    pub(crate) tenants: Option<Arc<Tenants>>,
    pub(crate) key_failures: Arc<KeyFailures>,
    pub(crate) admission: Admission,
    pub(crate) ingress: Arc<Ingress>,
    /// The service for operators, if it is served.
    pub(crate) operations: Option<Operations>,
    /// Budget of the response data that clients do not read.
    pub(crate) unread: UnreadBudget,
    /// Open API calls.
    pub(crate) open: TaskTracker,
    pub(crate) drain: CancellationToken,
}

impl Shared {
    /// Serves gRPC connections until the drain has ended them.
    ///
    /// # Errors
    /// The API descriptors cannot be served by reflection.
    pub(crate) fn serve_grpc<I, S, H>(
        &self,
        incoming: I,
        health: HealthServer<H>,
        budget: ReceiveBudget,
    ) -> Result<impl Future<Output = ()> + use<I, S, H>, tonic_reflection::server::Error>
    where
        I: Stream<Item = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
        H: Health,
    {
        let (options, ingress) = (&self.options, &self.ingress);
        let kserve = Kserve::new(
            ingress.clone(),
            self.admission.clone(),
            self.tenants.clone(),
            self.drain.clone(),
            options.streams_max,
        );
        let kserve =
            GrpcInferenceServiceServer::new(kserve).max_decoding_message_size(options.message_bytes_max);
        let inference = InferenceServer::new(Grpc::new(ingress.clone()));
        let inference = inference.max_decoding_message_size(options.message_bytes_max);
        let mut routes = Routes::new(health).add_service(inference).add_service(kserve);
        if let Some(operations) = &self.operations {
            routes = routes.add_service(AdminServer::new(AdminService(operations.clone())));
        }
        if options.reflection {
            let builder = || {
                tonic_reflection::server::Builder::configure()
                    .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
                    .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            };
            routes = routes.add_service(builder().build_v1()?).add_service(builder().build_v1alpha()?);
        }
        let fault = || Status::internal("the call failed on a fault of the server").into_http();
        let server = self.server("grpc", Protocols::Http2, fault);
        let receiving = options.clone();
        let limits = move |path: &str| receive_limits(path, &receiving, Framing::Grpc);
        let refuse: Refuse = refusal::grpc;
        let service = ServiceBuilder::new()
            .layer(ReceiveLayer::new(budget, limits))
            .layer(middleware(Arrivals { open: self.open.clone(), refuse }))
            .layer(middleware(self.authentication(None, refuse)))
            .layer(middleware(AdmissionControl { admission: self.admission.clone(), refuse }))
            .service(routes.prepare());
        Ok(server.serve(incoming, service, self.drain.clone()))
    }

    /// Serves connections of the HTTP APIs until the drain has ended them.
    pub(crate) fn serve_http<I, S>(
        &self,
        incoming: I,
        http: &HttpOptions,
        budget: ReceiveBudget,
        metrics: Option<RenderMetrics>,
    ) -> impl Future<Output = ()> + use<I, S>
    where
        I: Stream<Item = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        let (ingress, admission, drain) = (self.ingress.clone(), self.admission.clone(), self.drain.clone());
        let draining = move || drain.is_cancelled();
        let api = HttpApi::new(ingress, admission, &self.options, http, metrics, draining)
            .with_ui(self.operations.clone().map(Ui::new));
        // Of the layers outside of `Faults`.
        let fault =
            || http::refuse("", Outcome::Internal("the call failed on a fault of the server".to_owned()));
        let server = self.server("http", Protocols::Any, fault);
        let receiving = self.options.clone();
        let limits = move |path: &str| receive_limits(path, &receiving, Framing::Whole);
        let refuse: Refuse = http::refuse;
        let sites = Sites { origins: http.cors_origins.clone(), hosts: http.hosts.clone() };
        let service = ServiceBuilder::new()
            .layer(middleware(Cors { origins: http.cors_origins.clone().into() }))
            .layer(middleware(RequestIds))
            .layer(middleware(Faults { refuse }))
            .layer(ReceiveLayer::new(budget, limits))
            .layer(middleware(Arrivals { open: self.open.clone(), refuse }))
            .layer(middleware(self.authentication(Some(Arc::new(sites)), refuse)))
            .layer(middleware(AdmissionControl { admission: self.admission.clone(), refuse }))
            .map_response(|response: Response<axum::body::Body>| response.map(Body::new))
            .service(api.routes());
        server.serve(incoming, service, self.drain.clone())
    }

    fn authentication(&self, sites: Option<Arc<Sites>>, refuse: Refuse) -> Authentication {
        let connections = SharedPool::new(self.options.connections.connections_max as u64);
        Authentication {
            tenants: self.tenants.clone(),
            failures: self.key_failures.clone(),
            sites,
            connections,
            refuse,
        }
    }

    fn server(
        &self,
        listener: &'static str,
        protocols: Protocols,
        fault: fn() -> Response<Body>,
    ) -> HttpServer {
        let options = &self.options;
        HttpServer {
            listener,
            protocols,
            keepalive_interval: options.keepalive_interval,
            header_bytes_max: options.header_bytes_max,
            streams_max: options.connection_streams_max,
            write_timeout: options.stall_timeout,
            unread: self.unread.clone(),
            fault,
        }
    }
}
