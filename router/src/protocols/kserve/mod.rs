//! KServe v2 inference API: tensors to requests, text to tensors.

mod constraints;
mod models;
mod stream_calls;
mod tensors;

use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::Stream;
use inflight_contract::FinishReason;
use inflight_proto::kserve::grpc_inference_service_server::GrpcInferenceService;
use inflight_proto::kserve::infer_parameter::ParameterChoice;
use inflight_proto::kserve::model_infer_response::InferOutputTensor;
use inflight_proto::kserve::{
    InferParameter, ModelConfigRequest, ModelConfigResponse, ModelInferRequest, ModelInferResponse,
    ModelMetadataRequest, ModelMetadataResponse, ModelReadyRequest, ModelReadyResponse,
    ModelStatisticsRequest, ModelStatisticsResponse, ModelStreamInferResponse, RepositoryIndexRequest,
    RepositoryIndexResponse, ServerLiveRequest, ServerLiveResponse, ServerMetadataRequest,
    ServerMetadataResponse, ServerReadyRequest, ServerReadyResponse,
};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tonic::{Request, Response, Status, Streaming};

use crate::clock;
use crate::dispatcher::ServedModel;
use crate::layers::admission::Admission;
use crate::outcome::{Outcome, Overload};
use crate::output::event::{GenerationEvent, Usage};
use crate::output::response_stream::GenerationEvents;
use crate::protocols::operations::Operations;
use crate::request::context::RequestContext;
use crate::request::draft::Input;
use crate::request::ingress::Ingress;
use crate::request::ingress::rejected;
use crate::tenants::{Caller, Tenants};
use models::{VERSION, check_version};
use stream_calls::StreamCalls;
pub(crate) use tensors::fuzz;
use tensors::{InferRequest, bytes_tensor};

/// Maximum concurrent requests of one ModelStreamInfer call; further ones are not read yet.
const STREAM_REQUESTS_MAX: usize = 64;
/// Maximum responses of one call that wait for the client.
const STREAM_RESPONSES_MAX: usize = 16;
/// Delay after which a caller with too many open calls may try again.
const RETRY: Duration = Duration::from_secs(1);
/// Maximum bytes of the inputs that a response repeats, one in each of its texts.
const ECHO_BYTES_MAX: usize = 16 << 20;

/// KServe v2 service of the router.
#[derive(Clone)]
pub(crate) struct Kserve {
    ingress: Arc<Ingress>,
    admission: Admission,
    tenants: Option<Arc<Tenants>>,
    drain: CancellationToken,
    streams: StreamCalls,
}

type InferStream = Pin<Box<dyn Stream<Item = Result<ModelStreamInferResponse, Status>> + Send>>;

impl Kserve {
    /// Creates the service. Once `drain` is cancelled, open calls accept no further requests. At most `streams_max` calls of
    /// ModelStreamInfer are open.
    pub(crate) fn new(
        ingress: Arc<Ingress>,
        admission: Admission,
        tenants: Option<Arc<Tenants>>,
        drain: CancellationToken,
        streams_max: usize,
    ) -> Self {
        Self { ingress, admission, tenants, drain, streams: StreamCalls::new(streams_max) }
    }

    /// Resolves the version of a model.
    fn resolve(&self, name: &str, version: &str) -> Result<ServedModel, Status> {
        let served = self.ingress.resolve(name).map_err(Outcome::into_status)?;
        check_version(&served.name, version).map_err(Outcome::into_status)?;
        Ok(served)
    }
}

/// Accumulated result of a request.
#[derive(Default)]
struct InferResult {
    model: String,
    seed: u64,
    /// Whether its tokens come from workers with different fingerprints.
    mixed: bool,
    texts: Vec<String>,
    finish: Vec<Option<FinishReason>>,
    usage: Usage,
    /// Input, which each text of the final response has before it.
    echoed: String,
}

impl InferResult {
    /// Adds an event. Returns the choice and text of a delta.
    fn take(&mut self, event: GenerationEvent) -> Option<(u32, String)> {
        match event {
            GenerationEvent::Started(started) => {
                (self.model, self.seed) = (started.model, started.seed);
                None
            }
            GenerationEvent::Delta(delta) => Some((delta.choice, delta.text)),
            GenerationEvent::Finished(finished) => {
                let choice = finished.choice as usize;
                self.choice(choice);
                self.finish[choice] = Some(finished.reason);
                None
            }
            // No parameter of KServe asks for them.
            GenerationEvent::PromptLogprobs { .. } => None,
            GenerationEvent::FingerprintChanged { .. } => {
                self.mixed = true;
                None
            }
            GenerationEvent::Completed(completed) => {
                self.usage = completed.usage;
                None
            }
        }
    }

    fn choice(&mut self, choice: usize) -> &mut String {
        if self.texts.len() <= choice {
            self.texts.resize(choice + 1, String::new());
            self.finish.resize(choice + 1, None);
        }
        &mut self.texts[choice]
    }

    /// Returns the final response of a request.
    fn last(&self, id: &str) -> ModelInferResponse {
        let mut response = match &*self.echoed {
            "" => response(&self.model, id, &self.texts),
            input => {
                let texts: Vec<String> = self.texts.iter().map(|text| format!("{input}{text}")).collect();
                response(&self.model, id, &texts)
            }
        };
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

fn reason_name(reason: Option<FinishReason>) -> &'static str {
    match reason {
        Some(FinishReason::Stop | FinishReason::Complete) => "stop",
        Some(FinishReason::Length) => "length",
        Some(FinishReason::Cancelled) => "cancelled",
        Some(FinishReason::Deadline) => "deadline",
        Some(FinishReason::Error) => "error",
        None => "",
    }
}

/// Counts a rejected request and returns its status.
fn rejected_status(outcome: Outcome) -> Status {
    rejected(outcome).into_status()
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

/// Starts a request. Returns its events, and the input that its response repeats.
async fn begin(
    ingress: &Ingress,
    infer: InferRequest,
    mut incoming: RequestContext,
) -> Result<(GenerationEvents, String), Outcome> {
    if let Some(timeout) = infer.timeout_us {
        let until = clock::now().checked_add(Duration::from_micros(timeout));
        let earlier = [until, incoming.arrival.deadline].into_iter().flatten().min();
        incoming.arrival.deadline = earlier;
    }
    let given = match &infer.request.input {
        Input::Text(text) if infer.echo => Some(text.clone()),
        _ => None,
    };
    let stream = ingress.start(infer.request, incoming).await?;
    let call = stream.call();
    let echoed = match given {
        _ if !infer.echo => String::new(),
        Some(text) => text,
        None => stream.bundle().tokenizer.decode(&call.prompt).unwrap_or_default(),
    };
    let bytes = echoed.len() * call.sampling.n as usize;
    if bytes > ECHO_BYTES_MAX {
        let reason = format!(
            "exclude_input_in_output = false would return {bytes} bytes of input, those of n texts n times; at most {ECHO_BYTES_MAX} are returned"
        );
        return Err(Outcome::field("exclude_input_in_output", reason));
    }
    Ok((stream.into_events(), echoed))
}

/// Reads a request for the model's only version.
fn read(request: ModelInferRequest) -> Result<InferRequest, Outcome> {
    check_version(&request.model_name, &request.model_version)?;
    InferRequest::read(request)
}

/// Runs a request of a stream to its end and sends its responses.
async fn respond(
    ingress: Arc<Ingress>,
    request: ModelInferRequest,
    incoming: RequestContext,
    responses: mpsc::Sender<Result<ModelStreamInferResponse, Status>>,
) {
    let id = request.id.clone();
    let (mut sum, gone) = (InferResult::default(), ());
    let result: Result<Result<(), Status>, ()> = async {
        let infer = match read(request) {
            Ok(infer) => infer,
            Err(outcome) => return Ok(Err(rejected_status(outcome))),
        };
        let stream = infer.stream;
        let mut generation = match begin(&ingress, infer, incoming).await {
            Ok((generation, echoed)) => {
                sum.echoed = echoed;
                generation
            }
            Err(outcome) => return Ok(Err(rejected_status(outcome))),
        };
        while let Some(message) = generation.next().await {
            let message = match message {
                Ok(message) => message,
                Err(outcome) => return Ok(Err(outcome.into_status())),
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
            responses.send(Ok(new)).await.map_err(|_| gone)?;
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
    // The client may be gone.
    let _ = responses.send(Ok(last)).await;
}

/// Resolves when the router drains and no request of the call runs any more.
async fn ended(drain: &CancellationToken, running: &mut JoinSet<()>) {
    drain.cancelled().await;
    while running.join_next().await.is_some() {}
}

#[tonic::async_trait]
impl GrpcInferenceService for Kserve {
    type ModelStreamInferStream = InferStream;

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
        let ModelReadyRequest { name, version } = request.into_inner();
        let names = |model: &str| model == name || self.ingress.aliases(model).contains(&name);
        let ready = self.ingress.models().iter().any(|(served, _)| names(&served.name));
        if !ready {
            // A known model is not ready; any other is not found.
            match self.ingress.resolve(&name) {
                Ok(_) | Err(Outcome::Unserved { .. } | Outcome::NeverConnected { .. }) => {}
                Err(outcome) => return Err(outcome.into_status()),
            }
        }
        // As of Triton, a version that the model does not have is not ready.
        Ok(Response::new(ModelReadyResponse { ready: ready && models::has_version(&version) }))
    }

    async fn server_metadata(
        &self,
        _: Request<ServerMetadataRequest>,
    ) -> Result<Response<ServerMetadataResponse>, Status> {
        Ok(Response::new(ServerMetadataResponse {
            name: "inflight".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            extensions: ["model_configuration", "statistics"].map(str::to_owned).to_vec(),
        }))
    }

    async fn model_metadata(
        &self,
        request: Request<ModelMetadataRequest>,
    ) -> Result<Response<ModelMetadataResponse>, Status> {
        let ModelMetadataRequest { name, version } = request.into_inner();
        let served = self.resolve(&name, &version)?;
        Ok(Response::new(models::metadata(served)))
    }

    async fn model_config(
        &self,
        request: Request<ModelConfigRequest>,
    ) -> Result<Response<ModelConfigResponse>, Status> {
        let ModelConfigRequest { name, version } = request.into_inner();
        let served = self.resolve(&name, &version)?;
        Ok(Response::new(ModelConfigResponse { config: Some(models::config(served)) }))
    }

    async fn model_statistics(
        &self,
        request: Request<ModelStatisticsRequest>,
    ) -> Result<Response<ModelStatisticsResponse>, Status> {
        // They count the requests of all tenants.
        Operations::authorize(request.extensions().get::<Caller>()).map_err(Outcome::into_status)?;
        let ModelStatisticsRequest { name, version } = request.into_inner();
        let names = if name.is_empty() {
            check_version(&name, &version).map_err(Outcome::into_status)?;
            self.ingress.models().into_iter().map(|(served, _)| served.name).collect()
        } else {
            vec![self.resolve(&name, &version)?.name]
        };
        let of = |name: String| {
            let counters = self.ingress.counters(&name);
            models::statistics(name, &counters)
        };
        Ok(Response::new(ModelStatisticsResponse { model_stats: names.into_iter().map(of).collect() }))
    }

    async fn repository_index(
        &self,
        request: Request<RepositoryIndexRequest>,
    ) -> Result<Response<RepositoryIndexResponse>, Status> {
        let repository = request.into_inner().repository_name;
        if !repository.is_empty() {
            let reason = format!("there is no repository {repository:?}; leave repository_name empty");
            return Err(Outcome::field("repository_name", reason).into_status());
        }
        let models = self.ingress.models().into_iter().map(|(served, _)| models::index(served)).collect();
        Ok(Response::new(RepositoryIndexResponse { models }))
    }

    async fn model_infer(
        &self,
        request: Request<ModelInferRequest>,
    ) -> Result<Response<ModelInferResponse>, Status> {
        let incoming = RequestContext::new(request.extensions(), request.metadata().as_ref());
        let incoming = incoming.map_err(Outcome::into_status)?;
        let request = request.into_inner();
        let id = request.id.clone();
        let infer = read(request).map_err(rejected_status)?;
        let (mut generation, echoed) =
            begin(&self.ingress, infer, incoming).await.map_err(rejected_status)?;
        let mut answer = InferResult { echoed, ..InferResult::default() };
        while let Some(message) = generation.next().await {
            if let Some((choice, text)) = answer.take(message.map_err(Outcome::into_status)?) {
                answer.choice(choice as usize).push_str(&text);
            }
        }
        Ok(Response::new(answer.last(&id)))
    }

    async fn model_stream_infer(
        &self,
        request: Request<Streaming<ModelInferRequest>>,
    ) -> Result<Response<InferStream>, Status> {
        let shared = RequestContext::new(request.extensions(), request.metadata().as_ref());
        let shared = shared.map_err(Outcome::into_status)?;
        let mut requests = request.into_inner();
        let Self { ingress, admission, tenants, drain, streams } = self.clone();
        let open = streams.enter(shared.caller.tenant()).ok_or_else(|| {
            let what = "the caller has as many calls of ModelStreamInfer open as the router has free (--streams-max is the limit of all callers); end some".to_owned();
            rejected_status(Outcome::Full(Box::new(Overload::of_router(what, "kserve_streams", RETRY))))
        })?;
        let (responses, ready) = mpsc::channel(STREAM_RESPONSES_MAX);
        let reader = tokio::spawn(async move {
            let slots = Arc::new(Semaphore::new(STREAM_REQUESTS_MAX));
            // Dropping it with the call aborts the requests.
            let mut running = JoinSet::new();
            loop {
                while running.try_join_next().is_some() {}
                let next = async {
                    let slot = slots.clone().acquire_owned().await.ok()?;
                    // A broken stream ends like a finished one: requests received so far are completed.
                    requests.message().await.ok()?.map(|request| (slot, request))
                };
                let (slot, request) = tokio::select! {
                    biased;
                    () = ended(&drain, &mut running) => {
                        let _ = responses.send(Err(Outcome::Draining.into_status())).await;
                        break;
                    }
                    next = next => match next {
                        Some(next) => next,
                        None => break,
                    },
                };
                let known = tenants
                    .as_ref()
                    .is_none_or(|tenants| tenants.still_knows(&shared.caller, SystemTime::now()));
                let again = if drain.is_cancelled() {
                    Err(Outcome::Draining)
                } else if !known {
                    Err(Outcome::Unauthenticated("the API key or certificate is no longer valid".to_owned()))
                } else {
                    shared.for_next_message(&admission)
                };
                let incoming = match again {
                    Ok(incoming) => incoming,
                    Err(outcome) => {
                        let status = rejected_status(outcome);
                        let message = ModelStreamInferResponse {
                            error_message: format!("[{:?}] {}", status.code(), status.message()),
                            infer_response: Some(ModelInferResponse {
                                id: request.id,
                                ..ModelInferResponse::default()
                            }),
                        };
                        if responses.send(Ok(message)).await.is_err() || !known {
                            break;
                        }
                        continue;
                    }
                };
                let (ingress, responses) = (ingress.clone(), responses.clone());
                running.spawn(async move {
                    respond(ingress, request, incoming, responses).await;
                    drop(slot);
                });
            }
            while running.join_next().await.is_some() {}
        });
        let reader = AbortOnDropHandle::new(reader);
        let responses = ReceiverStream::new(ready).map(move |message| {
            let _held = (&reader, &open);
            message
        });
        Ok(Response::new(Box::pin(responses)))
    }
}
