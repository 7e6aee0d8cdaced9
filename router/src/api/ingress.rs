//! Core of every API: validates, tokenizes and queues requests.

use std::sync::Arc;
use std::time::Duration;

use inflight_net::ReservedBytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::TaskTracker;
use tonic::codegen::http::{Extensions, HeaderMap};
use tracing::{Instrument, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::api::admission::{Admission, AdmissionGuard, AdmissionSlot};
use crate::api::arrival::CallArrival;
use crate::api::cursor::{Cursor, CursorError, CursorKeys, CursorTracker};
use crate::api::generation::{GenerationRequest, Input};
use crate::api::request;
use crate::api::response_stream::ResponseStream;
use crate::call_guard::CallGuard;
use crate::clock;
use crate::dispatcher::{ServedModel, SharedDispatcher};
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::{Outcome, Overload};
use crate::tenants::Caller;
use crate::trace::{self, TraceContext};
use crate::usage::log::UsageLog;

/// Request path shared by gRPC, KServe and HTTP.
pub(crate) struct Ingress {
    options: Options,
    dispatch: Arc<SharedDispatcher>,
    streams: Arc<Semaphore>,
    /// Bounds the large prompts tokenized at once.
    tokenizing: Arc<Semaphore>,
    open: TaskTracker,
    usage: Option<Arc<UsageLog>>,
    cursors: CursorKeys,
}

/// Metadata of a request beside its message.
pub(crate) struct RequestContext {
    pub(crate) arrival: CallArrival,
    pub(crate) context: opentelemetry::Context,
    pub(crate) caller: Caller,
    /// Admission guard, if the layer has admitted the request.
    pub(crate) admission_guard: Option<AdmissionGuard>,
    /// Receive budget of the message, until the request is tokenized.
    pub(crate) received: Option<Arc<ReservedBytes>>,
}

impl RequestContext {
    pub(crate) fn new(extensions: &Extensions, headers: &HeaderMap) -> Self {
        Self {
            arrival: extensions.get::<CallArrival>().copied().unwrap_or_else(CallArrival::now),
            context: trace::extract(headers),
            caller: extensions.get::<Caller>().cloned().unwrap_or(Caller::Anyone),
            admission_guard: extensions.get::<AdmissionSlot>().and_then(AdmissionSlot::take),
            received: extensions.get::<Arc<ReservedBytes>>().cloned(),
        }
    }
}

impl RequestContext {
    /// Returns the context of another request in the same call, admitted on its own.
    pub(crate) fn for_next_request(&self, admission: &Admission) -> Result<Self, Outcome> {
        let admission_guard = admission.enter(&self.caller)?;
        let arrival = CallArrival { at: clock::now(), ..self.arrival };
        let (context, caller) = (self.context.clone(), self.caller.clone());
        // Its message counts until the next one of the call arrives.
        Ok(Self { arrival, context, caller, admission_guard, received: None })
    }
}

/// Counts a request that waits for a tokenizer thread; cancellation-safe.
struct TokenizeWait;

impl Drop for TokenizeWait {
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

/// Counts a rejected request and returns its outcome.
pub(crate) fn rejected(outcome: Outcome) -> Outcome {
    metrics::counter!(names::REQUESTS, "outcome" => outcome.label()).increment(1);
    tracing::debug!(outcome = outcome.label(), "request refused");
    outcome
}

impl Ingress {
    pub(crate) fn new(
        options: &Options,
        dispatch: Arc<SharedDispatcher>,
        open: TaskTracker,
        usage: Option<Arc<UsageLog>>,
    ) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            options: options.clone(),
            dispatch,
            streams: Arc::new(Semaphore::new(options.streams_max.min(Semaphore::MAX_PERMITS))),
            tokenizing: Arc::new(Semaphore::new(threads)),
            open,
            usage,
            cursors: CursorKeys::new(&options.resume_keys, options.resume_age_max),
        }
    }

    /// Runs CPU-bound work, on a blocking thread if it is `large`.
    async fn run_blocking<T, F>(&self, large: bool, work: F) -> Result<T, Outcome>
    where
        T: Send + 'static,
        F: FnOnce() -> Result<T, Outcome> + Send + 'static,
    {
        if !large {
            return work();
        }
        let internal = |what: &str| Outcome::Internal(what.to_owned());
        metrics::gauge!(names::TOKENIZE_WAITING).increment(1.0);
        let waiting = TokenizeWait;
        let permit = Arc::clone(&self.tokenizing).acquire_owned().await;
        drop(waiting);
        let permit = permit.map_err(|_| internal("the router is shutting down"))?;
        let work = move || {
            // Held by the work itself, which continues when the caller is gone.
            let _permit = permit;
            work()
        };
        tokio::task::spawn_blocking(work)
            .await
            .unwrap_or_else(|_| Err(internal("tokenizing failed on a fault of the tokenizer library")))
    }

    /// Whether at least one worker accepts requests.
    pub(crate) fn is_ready(&self) -> bool {
        *self.dispatch.ready().borrow()
    }

    /// Returns the models with serving workers, with the fingerprint of each worker.
    pub(crate) fn models(&self) -> Vec<(ServedModel, Vec<String>)> {
        self.dispatch.models()
    }

    /// Resolves a model name.
    pub(crate) fn resolve(&self, name: &str) -> Result<ServedModel, Outcome> {
        self.dispatch.resolve(name, None, clock::now())
    }

    /// Validates and queues a request.
    pub(crate) async fn start(
        &self,
        mut request: GenerationRequest,
        incoming: RequestContext,
    ) -> Result<ResponseStream, Outcome> {
        let permit = self.stream_permit()?;
        let open = self.open.token();
        let usage = self.usage.as_ref().map(UsageLog::admit).transpose()?;
        let RequestContext { arrival, context, caller, admission_guard, received } = incoming;
        let resumed = request.resume.as_ref().map(|resume| self.verify(&resume.cursor)).transpose()?;
        if let Some(cursor) = &resumed {
            request::continue_from(&mut request, cursor)?;
        }
        let required = Some(request.require_fingerprint.as_str()).filter(|required| !required.is_empty());
        let served = self.dispatch.resolve(&request.model, required, arrival.at)?;
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
        // Fails without an OpenTelemetry layer; then there is no parent to set.
        let _ = span.set_parent(context.clone());
        let large = request::is_large(&request.input);
        let (prepared, options) = (served.clone(), self.options.clone());
        let prepare = move || {
            let (seed, stream) = (rand::random(), rand::random());
            let arrived = (arrival.at, arrival.deadline);
            request::prepare(request, resumed, &prepared, &options, arrived, seed, stream, &caller)
        };
        let mut call = self.run_blocking(large, prepare).instrument(span.clone()).await?;
        drop(received);
        span.record("tenant", &call.tenant);
        span.record("request_id", &call.request_id);
        span.record("prompt_tokens", call.prompt.len());
        call.trace = TraceContext::of(&span, &context);
        let queue_span = info_span!(parent: &span, "queue");
        let model = served.model;
        let charge = admission_guard
            .as_ref()
            .map(|admission_guard| {
                admission_guard.take_tokens(call.tokens().saturating_sub(call.charged_tokens()))
            })
            .transpose()?;
        let guard =
            CallGuard::default().with(permit).with(open).with(OpenStream::new()).with(admission_guard);
        let ticket = self.dispatch.submit(call, queue_span, guard)?;
        Ok(ResponseStream::new(ticket, model, span, charge, usage))
    }

    /// Returns the cursor that a client gives.
    fn verify(&self, bytes: &[u8]) -> Result<Cursor, Outcome> {
        self.cursors.verify(bytes).map_err(|error| match error {
            CursorError::Signature => Outcome::field("cursor", error),
            CursorError::Stale { .. } => Outcome::CursorRejected(error.to_string()),
        })
    }

    /// Returns the cursor of a stream, which follows its events; `None` if the stream cannot be resumed.
    pub(crate) fn track(&self, stream: &ResponseStream) -> Option<CursorTracker> {
        Some(CursorTracker::new(self.cursors.clone(), stream.cursor()?))
    }

    /// Takes the permit of an open call.
    fn stream_permit(&self) -> Result<OwnedSemaphorePermit, Outcome> {
        self.streams.clone().try_acquire_owned().map_err(|_| {
            let what = format!("{} calls are open, the limit; try again later", self.options.streams_max);
            Outcome::Full(Box::new(Overload::of_router(what, "streams", self.options.retry_delay)))
        })
    }

    /// Tokenizes a prompt exactly as [`Ingress::start`] does. Holds `_context` until it returns.
    pub(crate) async fn tokens(
        &self,
        model: &str,
        input: Input,
        _context: RequestContext,
    ) -> Result<(ServedModel, Vec<u32>), Outcome> {
        let (_permit, _open) = (self.stream_permit()?, self.open.token());
        let served = self.dispatch.resolve(model, None, clock::now())?;
        let large = request::is_large(&input);
        let tokenized = served.clone();
        let tokens = self.run_blocking(large, move || request::encode(&tokenized, input)).await?;
        Ok((served, tokens))
    }

    /// Returns the text of tokens, special ones included.
    pub(crate) async fn decode(&self, served: &ServedModel, tokens: Vec<u32>) -> Result<String, Outcome> {
        let (_permit, _open) = (self.stream_permit()?, self.open.token());
        let model = served.model.clone();
        let decode = move || model.tokenizer.decode_all(&tokens).map_err(Outcome::invalid);
        self.run_blocking(true, decode).await
    }

    /// Returns the outcome of a readiness probe while no worker accepts requests.
    pub(crate) fn unready(&self) -> Outcome {
        match self.resolve("") {
            Ok(served) => Outcome::Unserved { model: served.name, waited: Duration::ZERO },
            Err(outcome @ (Outcome::NeverConnected { .. } | Outcome::Unserved { .. })) => outcome,
            Err(_) => Outcome::Unserved { model: String::new(), waited: Duration::ZERO },
        }
    }
}
