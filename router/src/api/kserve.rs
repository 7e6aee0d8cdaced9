//! KServe v2 over the same core: tensors become a request, text becomes tensors.

mod tensors;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use inflight_proto::kserve::grpc_inference_service_server::GrpcInferenceService;
use inflight_proto::kserve::infer_parameter::ParameterChoice;
use inflight_proto::kserve::model_infer_response::InferOutputTensor;
use inflight_proto::kserve::model_metadata_response::TensorMetadata;
use inflight_proto::kserve::{
    InferParameter, ModelInferRequest, ModelInferResponse, ModelMetadataRequest, ModelMetadataResponse,
    ModelReadyRequest, ModelReadyResponse, ModelStreamInferResponse, ServerLiveRequest, ServerLiveResponse,
    ServerMetadataRequest, ServerMetadataResponse, ServerReadyRequest, ServerReadyResponse,
};
use inflight_proto::v1;
use inflight_proto::v1::generate_response::Event;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status, Streaming};

use crate::api::admission::Admission;
use crate::api::ingress::{Incoming, Ingress, refused};
use crate::api::response_stream::ResponseStream;
use crate::clock;
use crate::outcome::Outcome;
use tensors::{Ask, bytes_tensor};

/// Requests of one call to ModelStreamInfer that run at once; further ones wait to be read.
const STREAM_REQUESTS_MAX: usize = 64;
/// Answers of one call that may wait for their client.
const STREAM_ANSWERS_MAX: usize = 16;
/// The one version that a model has.
const VERSION: &str = "1";

/// What clients of KServe v2 call.
pub(crate) struct Kserve {
    ingress: Arc<Ingress>,
    admission: Admission,
    drain: CancellationToken,
}

type Answers = Pin<Box<dyn Stream<Item = Result<ModelStreamInferResponse, Status>> + Send>>;

impl Kserve {
    /// Once `drain` is cancelled, calls that are open take no further requests.
    pub(crate) fn new(ingress: Arc<Ingress>, admission: Admission, drain: CancellationToken) -> Self {
        Self { ingress, admission, drain }
    }
}

/// What a request came to.
#[derive(Default)]
struct Answer {
    model: String,
    seed: u64,
    /// Its tokens come from workers with more than one fingerprint.
    mixed: bool,
    texts: Vec<String>,
    finish: Vec<v1::FinishReason>,
    usage: v1::Usage,
}

impl Answer {
    /// Takes in a message; returns the text of a delta, where there is one.
    fn take(&mut self, message: v1::GenerateResponse) -> Option<(u32, String)> {
        match message.event? {
            Event::Started(started) => {
                (self.model, self.seed) = (started.model, started.seed);
                None
            }
            Event::Delta(delta) => Some((delta.choice, delta.text)),
            Event::Finished(finished) => {
                let choice = finished.choice as usize;
                self.choice(choice);
                self.finish[choice] = finished.reason();
                None
            }
            Event::FingerprintChanged(_) => {
                self.mixed = true;
                None
            }
            Event::Completed(completed) => {
                self.usage = completed.usage.unwrap_or_default();
                None
            }
        }
    }

    fn choice(&mut self, choice: usize) -> &mut String {
        if self.texts.len() <= choice {
            self.texts.resize(choice + 1, String::new());
            self.finish.resize(choice + 1, v1::FinishReason::Unspecified);
        }
        &mut self.texts[choice]
    }

    /// The last answer of a request.
    fn last(&self, id: &str) -> ModelInferResponse {
        let mut response = response(&self.model, id, &self.texts);
        let reasons: Vec<_> = self.finish.iter().map(|reason| reason_name(*reason)).collect();
        let set = [
            ("triton_final_response", ParameterChoice::BoolParam(true)),
            ("finish_reason", ParameterChoice::StringParam(reasons.join(","))),
            ("prompt_tokens", ParameterChoice::Int64Param(self.usage.prompt_tokens.into())),
            ("completion_tokens", ParameterChoice::Int64Param(self.usage.completion_tokens.into())),
            ("cached_prompt_tokens", ParameterChoice::Int64Param(self.usage.cached_prompt_tokens.into())),
            ("seed", ParameterChoice::Uint64Param(self.seed)),
            ("fingerprint", ParameterChoice::StringParam(self.usage.fingerprint.clone())),
            ("fingerprint_changed", ParameterChoice::BoolParam(self.mixed)),
        ];
        response.parameters.extend(set.map(parameter));
        response
    }
}

fn reason_name(reason: v1::FinishReason) -> &'static str {
    match reason {
        v1::FinishReason::Stop => "stop",
        v1::FinishReason::Length => "length",
        v1::FinishReason::Cancelled => "cancelled",
        v1::FinishReason::Deadline => "deadline",
        v1::FinishReason::Error => "error",
        v1::FinishReason::Unspecified => "",
    }
}

fn parameter((name, value): (&str, ParameterChoice)) -> (String, InferParameter) {
    (name.to_owned(), InferParameter { parameter_choice: Some(value) })
}

fn response(model: &str, id: &str, texts: &[String]) -> ModelInferResponse {
    ModelInferResponse {
        model_name: model.to_owned(),
        model_version: VERSION.to_owned(),
        id: id.to_owned(),
        parameters: Default::default(),
        outputs: vec![InferOutputTensor {
            name: "text_output".to_owned(),
            datatype: "BYTES".to_owned(),
            shape: vec![texts.len() as i64],
            ..InferOutputTensor::default()
        }],
        raw_output_contents: vec![bytes_tensor(texts)],
    }
}

async fn begin(ingress: &Ingress, ask: Ask, mut incoming: Incoming) -> Result<ResponseStream, Outcome> {
    if let Some(timeout) = ask.timeout_us {
        let until = clock::now().checked_add(Duration::from_micros(timeout));
        let earlier = [until, incoming.arrival.deadline].into_iter().flatten().min();
        incoming.arrival.deadline = earlier;
    }
    ingress.start(ask.request, incoming).await
}

/// Runs a request of a stream to its end, and sends what it brings.
async fn answer(
    ingress: Arc<Ingress>,
    request: ModelInferRequest,
    incoming: Incoming,
    answers: mpsc::Sender<Result<ModelStreamInferResponse, Status>>,
) {
    let id = request.id.clone();
    let (mut sum, gone) = (Answer::default(), ());
    let result: Result<Result<(), Status>, ()> = async {
        let ask = match Ask::read(request) {
            Ok(ask) => ask,
            Err(outcome) => return Ok(Err(refused(outcome))),
        };
        let stream = ask.stream;
        let mut generation = match begin(&ingress, ask, incoming).await {
            Ok(generation) => generation,
            Err(outcome) => return Ok(Err(refused(outcome))),
        };
        while let Some(message) = generation.next().await {
            let message = match message {
                Ok(message) => message,
                Err(status) => return Ok(Err(status)),
            };
            let Some((choice, text)) = sum.take(message) else { continue };
            if !stream {
                sum.choice(choice as usize).push_str(&text);
                continue;
            }
            sum.choice(choice as usize);
            let mut texts = vec![String::new(); sum.texts.len()];
            texts[choice as usize] = text;
            let mut new = response(&sum.model, &id, &texts);
            let last = parameter(("triton_final_response", ParameterChoice::BoolParam(false)));
            new.parameters.extend([last]);
            let new = ModelStreamInferResponse { error_message: String::new(), infer_response: Some(new) };
            answers.send(Ok(new)).await.map_err(|_| gone)?;
        }
        Ok(Ok(()))
    }
    .await;
    let last = match result {
        Err(()) => return,
        Ok(Ok(())) => {
            if sum.texts.is_empty() {
                sum.choice(0);
            }
            ModelStreamInferResponse { error_message: String::new(), infer_response: Some(sum.last(&id)) }
        }
        Ok(Err(status)) => ModelStreamInferResponse {
            error_message: format!("[{:?}] {}", status.code(), status.message()),
            infer_response: Some(ModelInferResponse { id, ..ModelInferResponse::default() }),
        },
    };
    // A client that is gone needs no answer.
    let _ = answers.send(Ok(last)).await;
}

/// Resolves once the router drains and none of the requests of a call runs any more.
async fn ended(drain: &CancellationToken, running: &mut JoinSet<()>) {
    drain.cancelled().await;
    while running.join_next().await.is_some() {}
}

#[tonic::async_trait]
impl GrpcInferenceService for Kserve {
    type ModelStreamInferStream = Answers;

    async fn server_live(
        &self,
        _: Request<ServerLiveRequest>,
    ) -> Result<Response<ServerLiveResponse>, Status> {
        Ok(Response::new(ServerLiveResponse { live: true }))
    }

    async fn server_ready(
        &self,
        _: Request<ServerReadyRequest>,
    ) -> Result<Response<ServerReadyResponse>, Status> {
        Ok(Response::new(ServerReadyResponse { ready: self.ingress.is_ready() }))
    }

    async fn model_ready(
        &self,
        request: Request<ModelReadyRequest>,
    ) -> Result<Response<ModelReadyResponse>, Status> {
        let name = request.into_inner().name;
        let ready = self.ingress.models().iter().any(|(served, _)| served.name == name);
        if !ready {
            // A model that is known says that it is not ready; any other is not found.
            match self.ingress.resolve(&name) {
                Ok(_) | Err(Outcome::Unserved { .. } | Outcome::NeverConnected { .. }) => {}
                Err(outcome) => return Err(outcome.into_status()),
            }
        }
        Ok(Response::new(ModelReadyResponse { ready }))
    }

    async fn server_metadata(
        &self,
        _: Request<ServerMetadataRequest>,
    ) -> Result<Response<ServerMetadataResponse>, Status> {
        Ok(Response::new(ServerMetadataResponse {
            name: "inflight".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            extensions: Vec::new(),
        }))
    }

    async fn model_metadata(
        &self,
        request: Request<ModelMetadataRequest>,
    ) -> Result<Response<ModelMetadataResponse>, Status> {
        let served = self.ingress.resolve(&request.into_inner().name).map_err(Outcome::into_status)?;
        let tensor = |(name, datatype): (&str, &str)| TensorMetadata {
            name: name.to_owned(),
            datatype: datatype.to_owned(),
            shape: vec![-1],
        };
        Ok(Response::new(ModelMetadataResponse {
            name: served.name,
            versions: vec![VERSION.to_owned()],
            platform: served.architecture,
            inputs: tensors::INPUTS.into_iter().map(tensor).collect(),
            outputs: [("text_output", "BYTES")].into_iter().map(tensor).collect(),
        }))
    }

    async fn model_infer(
        &self,
        request: Request<ModelInferRequest>,
    ) -> Result<Response<ModelInferResponse>, Status> {
        let incoming = Incoming::of(&request);
        let request = request.into_inner();
        let id = request.id.clone();
        let ask = Ask::read(request).map_err(refused)?;
        let mut generation = begin(&self.ingress, ask, incoming).await.map_err(refused)?;
        let mut answer = Answer::default();
        while let Some(message) = generation.next().await {
            if let Some((choice, text)) = answer.take(message?) {
                answer.choice(choice as usize).push_str(&text);
            }
        }
        Ok(Response::new(answer.last(&id)))
    }

    async fn model_stream_infer(
        &self,
        request: Request<Streaming<ModelInferRequest>>,
    ) -> Result<Response<Answers>, Status> {
        let shared = Incoming::of(&request);
        let mut requests = request.into_inner();
        let (ingress, admission, drain) = (self.ingress.clone(), self.admission.clone(), self.drain.clone());
        let (answers, ready) = mpsc::channel(STREAM_ANSWERS_MAX);
        let reader = tokio::spawn(async move {
            let slots = Arc::new(Semaphore::new(STREAM_REQUESTS_MAX));
            // Dropped, and with it aborted, when the call is.
            let mut running = JoinSet::new();
            loop {
                while running.try_join_next().is_some() {}
                let next = async {
                    let slot = slots.clone().acquire_owned().await.ok()?;
                    // A broken stream ends like one that is done: what was asked for is answered as far as it goes.
                    requests.message().await.ok()?.map(|request| (slot, request))
                };
                let (slot, request) = tokio::select! {
                    next = next => match next {
                        Some(next) => next,
                        None => break,
                    },
                    () = ended(&drain, &mut running) => {
                        let _ = answers.send(Err(Outcome::Draining.into_status())).await;
                        break;
                    }
                };
                let again =
                    if drain.is_cancelled() { Err(Outcome::Draining) } else { shared.again(&admission) };
                let incoming = match again {
                    Ok(incoming) => incoming,
                    Err(outcome) => {
                        let status = refused(outcome);
                        let message = ModelStreamInferResponse {
                            error_message: format!("[{:?}] {}", status.code(), status.message()),
                            infer_response: Some(ModelInferResponse {
                                id: request.id,
                                ..ModelInferResponse::default()
                            }),
                        };
                        if answers.send(Ok(message)).await.is_err() {
                            break;
                        }
                        continue;
                    }
                };
                let (ingress, answers) = (ingress.clone(), answers.clone());
                running.spawn(async move {
                    answer(ingress, request, incoming, answers).await;
                    drop(slot);
                });
            }
            while running.join_next().await.is_some() {}
        });
        let reader = AbortOnDropHandle::new(reader);
        let answers = ReceiverStream::new(ready).map(move |message| {
            let _held = &reader;
            message
        });
        Ok(Response::new(Box::pin(answers)))
    }
}
