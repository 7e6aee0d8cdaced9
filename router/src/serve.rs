//! The gRPC and the HTTP port of a router. Either takes gRPC and the HTTP APIs, with the same layers and limits; they differ in what they
//! serve beside the APIs of clients: the gRPC port the services of operators, the HTTP port the live view and metrics.

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
use tonic::codegen::http::{Request, Response};
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
use crate::layers::protocol::{CallService, GrpcTransport, ProtocolSwitch};
use crate::layers::refusal::{self, Refuse};
use crate::layers::request_id::RequestIds;
use crate::layers::sites::{SiteCheck, Sites};
use crate::options::Options;
use crate::outcome::Outcome;
use crate::protocols::grpc::Grpc;
use crate::protocols::grpc::admin::AdminService;
use crate::protocols::http::{self, HttpApi, RenderMetrics};
use crate::protocols::kserve::Kserve;
use crate::protocols::operations::Operations;
use crate::protocols::page::Ui;
use crate::protocols::routes::without_apis;
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
    /// Budget of the messages being received.
    pub(crate) budget: ReceiveBudget,
    /// Open API calls.
    pub(crate) open: TaskTracker,
    pub(crate) drain: CancellationToken,
}

/// What all calls of a port share, in either protocol.
struct Port {
    /// Value of the metrics' `listener` label.
    listener: &'static str,
    /// Connections, shared between tenants.
    connections: SharedPool,
    sites: Arc<Sites>,
    /// Response to a call whose layers panicked.
    fault: fn() -> Response<Body>,
}

/// Why a call failed whose handler panicked.
const FAULT: &str = "the call failed on a fault of the server";

impl Shared {
    /// Serves the connections of the gRPC port until the drain has ended them; `apis` says whether the HTTP APIs are on.
    ///
    /// # Errors
    /// The API descriptors cannot be served by reflection.
    pub(crate) fn serve_grpc<I, S>(
        &self,
        incoming: I,
        mut services: Routes,
        apis: bool,
    ) -> Result<impl Future<Output = ()> + use<I, S>, tonic_reflection::server::Error>
    where
        I: Stream<Item = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        if let Some(operations) = &self.operations {
            services = services.add_service(AdminServer::new(AdminService(operations.clone())));
        }
        if self.options.reflection {
            let builder = || {
                tonic_reflection::server::Builder::configure()
                    .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
                    .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            };
            services = services.add_service(builder().build_v1()?).add_service(builder().build_v1alpha()?);
        }
        let fault = || Status::internal(FAULT).into_http();
        let port = self.port("grpc", fault);
        let router = if apis { self.api(None).client_routes() } else { without_apis() };
        let services = with_fallback(services, AT_THE_GRPC_PORT);
        let service = ProtocolSwitch::new(self.grpc(&port, services), self.http(&port, router));
        Ok(self.server(&port).serve(incoming, service, self.drain.clone()))
    }

    /// Serves the connections of the HTTP port until the drain has ended them.
    pub(crate) fn serve_http<I, S>(
        &self,
        incoming: I,
        services: Routes,
        metrics: Option<RenderMetrics>,
    ) -> impl Future<Output = ()> + use<I, S>
    where
        I: Stream<Item = io::Result<S>> + Send + 'static,
        S: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        // Of the layers outside of `Faults`.
        let fault = || http::refuse("", Outcome::Internal(FAULT.to_owned()));
        let port = self.port("http", fault);
        let router = self.api(metrics).with_ui(self.operations.clone().map(Ui::new)).routes();
        let services = with_fallback(services, AT_THE_HTTP_PORT);
        let service = ProtocolSwitch::new(self.grpc(&port, services), self.http(&port, router));
        self.server(&port).serve(incoming, service, self.drain.clone())
    }

    /// Returns the gRPC services of clients, whose limits both ports share.
    pub(crate) fn services<H: Health>(&self, health: HealthServer<H>) -> Routes {
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
        Routes::new(health).add_service(inference).add_service(kserve)
    }

    /// Returns the state of the HTTP APIs.
    fn api(&self, metrics: Option<RenderMetrics>) -> HttpApi {
        let drain = self.drain.clone();
        let draining = move || drain.is_cancelled();
        let (ingress, admission) = (self.ingress.clone(), self.admission.clone());
        HttpApi::new(ingress, admission, &self.options, &self.options.http, metrics, draining)
    }

    /// Returns gRPC services with their layers.
    fn grpc(&self, port: &Port, services: Routes) -> impl CallService + use<> {
        let refuse: Refuse = refusal::grpc;
        let receiving = self.options.clone();
        let limits = move |path: &str| receive_limits(path, &receiving, Framing::Grpc);
        ServiceBuilder::new()
            .layer(middleware(Faults { refuse }))
            .layer(ReceiveLayer::new(self.budget.clone(), limits))
            .layer(middleware(Arrivals { open: self.open.clone(), refuse }))
            .layer(middleware(GrpcTransport))
            .layer(middleware(self.authentication(port, Sites::check_browser, refuse)))
            .layer(middleware(AdmissionControl { admission: self.admission.clone(), refuse }))
            .service(services.prepare())
    }

    /// Returns routes of HTTP with their layers.
    fn http(&self, port: &Port, routes: axum::Router) -> impl CallService + use<> {
        let refuse: Refuse = http::refuse;
        let receiving = self.options.clone();
        let limits = move |path: &str| receive_limits(path, &receiving, Framing::Whole);
        ServiceBuilder::new()
            .layer(middleware(Cors { origins: self.options.http.cors_origins.clone().into() }))
            .layer(middleware(RequestIds))
            .layer(middleware(Faults { refuse }))
            .layer(ReceiveLayer::new(self.budget.clone(), limits))
            .layer(middleware(Arrivals { open: self.open.clone(), refuse }))
            .layer(middleware(self.authentication(port, Sites::check, refuse)))
            .layer(middleware(AdmissionControl { admission: self.admission.clone(), refuse }))
            .map_response(|response: Response<axum::body::Body>| response.map(Body::new))
            .service(routes)
    }

    fn authentication(&self, port: &Port, check_site: SiteCheck, refuse: Refuse) -> Authentication {
        Authentication {
            tenants: self.tenants.clone(),
            failures: self.key_failures.clone(),
            sites: port.sites.clone(),
            check_site,
            connections: port.connections.clone(),
            refuse,
        }
    }

    fn port(&self, listener: &'static str, fault: fn() -> Response<Body>) -> Port {
        let Options { connections, http, .. } = &self.options;
        let sites = Sites { origins: http.cors_origins.clone(), hosts: http.hosts.clone() };
        let connections = SharedPool::new(connections.connections_max as u64);
        Port { listener, connections, sites: Arc::new(sites), fault }
    }

    fn server(&self, port: &Port) -> HttpServer {
        let options = &self.options;
        HttpServer {
            listener: port.listener,
            protocols: Protocols::Any,
            keepalive_interval: options.keepalive_interval,
            header_bytes_max: options.header_bytes_max,
            streams_max: options.connection_streams_max,
            write_timeout: options.stall_timeout,
            unread: self.unread.clone(),
            fault: port.fault,
        }
    }
}

/// Advice to who calls an unknown method.
const AT_THE_GRPC_PORT: &str = "this is the gRPC port; Admin needs --admin, and reflection --reflection";
const AT_THE_HTTP_PORT: &str =
    "this is the HTTP port; inflight.v1.Admin and reflection are served at the gRPC port only";

/// Returns gRPC services that answer calls of unknown methods by advice.
fn with_fallback(services: Routes, advice: &'static str) -> Routes {
    let unknown = async move |request: Request<axum::body::Body>| {
        let path = request.uri().path().to_owned();
        let outcome = Outcome::UnknownPath { path, instead: Some(advice.to_owned()) };
        refusal::grpc("", outcome).map(axum::body::Body::new)
    };
    services.into_axum_router().fallback(unknown).into()
}
