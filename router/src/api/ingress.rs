use std::collections::BTreeSet;
use std::sync::Arc;

use inflight_proto::v1;
use inflight_proto::v1::inference_server::Inference;
use inflight_proto::v1::tokenize_request::Input;
use inflight_transport::ReceivedBytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status};
use tracing::{Instrument, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::api::admission::{Admission, AdmissionGuard, AdmissionSlot};
use crate::api::arrival::Arrival;
use crate::api::request;
use crate::api::response_stream::ResponseStream;
use crate::call_guard::CallGuard;
use crate::clock;
use crate::dispatcher::{Dispatch, Served};
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::{Outcome, Overload};
use crate::tenants::Caller;
use crate::trace::{self, TraceContext};

/// What clients call.
pub(crate) struct Ingress {
    options: Options,
    dispatch: Arc<Dispatch>,
    streams: Arc<Semaphore>,
    /// Large prompts tokenized at a time.
    tokenizing: Arc<Semaphore>,
    open: TaskTracker,
}

/// What comes with a request beside its message.
pub(crate) struct Incoming {
    pub(crate) arrival: Arrival,
    pub(crate) context: opentelemetry::Context,
    pub(crate) caller: Caller,
    /// The guard of the tenant's limits, if they were applied already.
    pub(crate) entered: Option<AdmissionGuard>,
    /// Counts the message's bytes until the request is tokenized.
    pub(crate) received: Option<Arc<ReceivedBytes>>,
}

impl Incoming {
    pub(crate) fn of<T>(request: &Request<T>) -> Self {
        let extensions = request.extensions();
        Self {
            arrival: extensions.get::<Arrival>().copied().unwrap_or_else(Arrival::now),
            context: trace::extract(request.metadata()),
            caller: extensions.get::<Caller>().cloned().unwrap_or(Caller::Anyone),
            entered: extensions.get::<AdmissionSlot>().and_then(AdmissionSlot::take),
            received: extensions.get::<Arc<ReceivedBytes>>().cloned(),
        }
    }
}

impl Incoming {
    /// The same for another request of the same call, which is counted by itself.
    pub(crate) fn again(&self, admission: &Admission) -> Result<Self, Outcome> {
        let entered = admission.enter(&self.caller)?;
        let arrival = Arrival { at: clock::now(), ..self.arrival };
        let (context, caller) = (self.context.clone(), self.caller.clone());
        // Its message counts until the next one of the call comes.
        Ok(Self { arrival, context, caller, entered, received: None })
    }
}

/// Counts one that waits for a thread to tokenize; taken back also if its client leaves.
struct Waiting;

impl Drop for Waiting {
    fn drop(&mut self) {
        metrics::gauge!(names::TOKENIZE_WAITING).decrement(1.0);
    }
}

/// Counts an open call.
struct OpenStream;

impl OpenStream {
    fn new() -> Self {
        metrics::gauge!(names::STREAMS).increment(1.0);
        Self
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        metrics::gauge!(names::STREAMS).decrement(1.0);
    }
}

/// The status of a request that was refused, and its count.
pub(crate) fn refused(outcome: Outcome) -> Status {
    metrics::counter!(names::REQUESTS, "outcome" => outcome.label()).increment(1);
    tracing::debug!(outcome = outcome.label(), "request refused");
    outcome.into_status()
}

impl Ingress {
    pub(crate) fn new(options: &Options, dispatch: Arc<Dispatch>, open: TaskTracker) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            options: options.clone(),
            dispatch,
            streams: Arc::new(Semaphore::new(options.streams_max.min(Semaphore::MAX_PERMITS))),
            tokenizing: Arc::new(Semaphore::new(threads)),
            open,
        }
    }

    /// Runs work that takes long on a thread where it holds up no streams.
    async fn on_cpu<T, F>(&self, large: bool, work: F) -> Result<T, Outcome>
    where
        T: Send + 'static,
        F: FnOnce() -> Result<T, Outcome> + Send + 'static,
    {
        if !large {
            return work();
        }
        let internal = |what: &str| Outcome::Internal(what.to_owned());
        metrics::gauge!(names::TOKENIZE_WAITING).increment(1.0);
        let waiting = Waiting;
        let permit = Arc::clone(&self.tokenizing).acquire_owned().await;
        drop(waiting);
        let permit = permit.map_err(|_| internal("the router is shutting down"))?;
        let work = move || {
            // Held by the work itself, which goes on when the caller is gone.
            let _permit = permit;
            work()
        };
        tokio::task::spawn_blocking(work)
            .await
            .unwrap_or_else(|_| Err(internal("tokenizing failed on a fault of the tokenizer library")))
    }

    /// Whether at least one worker takes requests.
    pub(crate) fn is_ready(&self) -> bool {
        *self.dispatch.ready().borrow()
    }

    /// The models that a worker serves now, with the fingerprints of the workers of each.
    pub(crate) fn models(&self) -> Vec<(Served, Vec<String>)> {
        self.dispatch.models()
    }

    /// The model of this name.
    pub(crate) fn resolve(&self, name: &str) -> Result<Served, Outcome> {
        self.dispatch.resolve(name, None, clock::now())
    }

    /// Checks and queues a request.
    pub(crate) async fn start(
        &self,
        message: v1::GenerateRequest,
        incoming: Incoming,
    ) -> Result<ResponseStream, Outcome> {
        let permit = self.stream()?;
        let open = self.open.token();
        let Incoming { arrival, context, caller, entered, received } = incoming;
        let required = Some(message.require_fingerprint.as_str()).filter(|required| !required.is_empty());
        let served = self.dispatch.resolve(&message.model, required, arrival.at)?;
        let span = info_span!(
            "generate",
            otel.kind = "server",
            model = served.name,
            tenant = tracing::field::Empty,
            request_id = tracing::field::Empty,
            prompt_tokens = tracing::field::Empty,
            completion_tokens = tracing::field::Empty,
            outcome = tracing::field::Empty,
        );
        // Fails where no OpenTelemetry layer is installed; then there is nothing to join.
        let _ = span.set_parent(context.clone());
        let large = request::is_large(&message);
        let (prepared, options) = (served.clone(), self.options.clone());
        let prepare = move || {
            let (seed, name) = (rand::random(), format!("{:032x}", rand::random::<u128>()));
            request::prepare(message, &prepared, &options, arrival.at, arrival.deadline, seed, name, &caller)
        };
        let mut call = self.on_cpu(large, prepare).instrument(span.clone()).await?;
        drop(received);
        span.record("tenant", &call.tenant);
        span.record("request_id", &call.request_id);
        span.record("prompt_tokens", call.prompt.len());
        call.trace = TraceContext::of(&span, &context);
        let queue_span = info_span!(parent: &span, "queue");
        let Served { model, unserved, .. } = served;
        let charge = entered.as_ref().map(|entered| entered.take_tokens(call.tokens())).transpose()?;
        let guard = CallGuard::default().with(permit).with(open).with(OpenStream::new()).with(entered);
        let ticket = self.dispatch.submit(call, queue_span, guard)?;
        let wait = self.options.no_worker_timeout;
        Ok(ResponseStream::new(ticket, model, unserved, wait, span, charge))
    }

    /// Room for one more open call.
    fn stream(&self) -> Result<OwnedSemaphorePermit, Outcome> {
        self.streams.clone().try_acquire_owned().map_err(|_| {
            let what = format!("{} calls are open, the limit; try again later", self.options.streams_max);
            Outcome::Full(Box::new(Overload::of_router(what, "streams", self.options.retry_delay)))
        })
    }

    /// `incoming` is held as long as this goes on.
    async fn tokens(
        &self,
        request: v1::TokenizeRequest,
        _incoming: Incoming,
    ) -> Result<v1::TokenizeResponse, Outcome> {
        let (_permit, _open) = (self.stream()?, self.open.token());
        let served = self.dispatch.resolve(&request.model, None, clock::now())?;
        let large = match &request.input {
            Some(Input::Text(text)) => request::is_large_text(text),
            Some(Input::Chat(chat)) => request::is_large_chat(chat),
            None => return Err(Outcome::invalid("input is missing; give text or chat")),
        };
        let work = move || {
            let token_ids = match request.input {
                Some(Input::Text(text)) => request::encode_text(&served, &text)?,
                Some(Input::Chat(chat)) => request::encode_chat(&served, chat)?,
                None => Vec::new(),
            };
            let pieces = token_ids.iter().map(|id| served.model.tokenizer.piece(*id)).collect();
            Ok(v1::TokenizeResponse { token_ids, pieces })
        };
        self.on_cpu(large, work).await
    }
}

#[tonic::async_trait]
impl Inference for Ingress {
    type GenerateStream = ResponseStream;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<ResponseStream>, Status> {
        let incoming = Incoming::of(&request);
        let generation = self.start(request.into_inner(), incoming).await.map_err(refused)?;
        Ok(Response::new(generation))
    }

    async fn list_models(
        &self,
        _: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        let model = |(served, fingerprints): (Served, Vec<String>)| v1::Model {
            workers: fingerprints.len() as u32,
            fingerprints: fingerprints.into_iter().collect::<BTreeSet<_>>().into_iter().collect(),
            name: served.name,
            architecture: served.architecture,
            context_tokens: served.limits.sequence_tokens(),
            vocab_size: served.limits.vocab_size,
            has_chat_template: served.model.template.is_some(),
        };
        let models = self.dispatch.models().into_iter().map(model).collect();
        Ok(Response::new(v1::ListModelsResponse { models }))
    }

    async fn tokenize(
        &self,
        request: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        let incoming = Incoming::of(&request);
        let answer = self.tokens(request.into_inner(), incoming).await;
        answer.map(Response::new).map_err(Outcome::into_status)
    }
}
