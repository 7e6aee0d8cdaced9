//! Baseline: a plain tonic proxy.

use std::pin::Pin;

use futures::{Stream, StreamExt as _};
use inflight_proto::v1;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::inference_server::{Inference, InferenceServer};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

/// Proxy with one upstream call per call, whose messages it forwards one by one.
struct Proxy(InferenceClient<Channel>);

#[tonic::async_trait]
impl Inference for Proxy {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<v1::GenerateResponse, Status>> + Send>>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let stream = self.0.clone().generate(request.into_inner()).await?.into_inner();
        Ok(Response::new(stream.boxed()))
    }

    async fn generate_unary(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<v1::GenerateUnaryResponse>, Status> {
        self.0.clone().generate_unary(request.into_inner()).await
    }

    async fn list_models(
        &self,
        request: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        self.0.clone().list_models(request.into_inner()).await
    }

    async fn tokenize(
        &self,
        request: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        self.0.clone().tokenize(request.into_inner()).await
    }
}

pub async fn serve(source: &str) {
    let endpoint = Endpoint::from_shared(format!("http://{source}")).unwrap().tcp_nodelay(true);
    let endpoint = endpoint.initial_connection_window_size(64 << 20);
    let proxy = Proxy(InferenceClient::new(endpoint.connect().await.unwrap()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap());
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    Server::builder().add_service(InferenceServer::new(proxy)).serve_with_incoming(incoming).await.unwrap();
}
