//! Core of every API: validates, tokenizes and queues requests.

use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{Priority, Weight};
use inflight_net::{PoolFull, PoolShare, ReservedBytes, SharedPool};
use inflight_router_core::TokenizePiece;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tonic::codegen::http::{Extensions, HeaderMap};
use tracing::{Instrument, Span, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::call_guard::CallGuard;
use crate::clock;
use crate::cluster::bundle::Model;
use crate::dispatcher::request::AdmittedCall;
use crate::dispatcher::{ServedModel, SharedDispatcher};
use crate::layers::admission::{self, Admission, AdmissionGuard, AdmissionSlot, TokenCharge};
use crate::layers::arrival::CallArrival;
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::{Outcome, Overload};
use crate::output::response_stream::ResponseStream;
use crate::request::bad_words::BadWords;
use crate::request::checked;
use crate::request::cold_start::ColdStart;
use crate::request::cursor::{Cursor, CursorError, CursorKeys, CursorTracker};
use crate::request::draft::{GenerationRequest, Input};
use crate::request::grammar_check::GrammarCheck;
use crate::request::output_plan::OutputPlan;
use crate::request::prompt::{PromptJob, SpecialTokens};
use crate::request::tokenizing::{TokenizeTerms, Tokenizing};
use crate::tenants::Caller;
use crate::trace::{self, TraceContext};
use crate::usage::log::{UsageLog, UsageSlot};

/// Request path shared by gRPC, KServe and HTTP.
pub(crate) struct Ingress {
    options: Options,
    dispatch: Arc<SharedDispatcher>,
    streams: SharedPool,
    tokenizing: Tokenizing,
    compiling: Tokenizing,
    open: TaskTracker,
    usage: Option<Arc<UsageLog>>,
    cursors: CursorKeys,
    cold_start: ColdStart,
}

/// Metadata of a request beside its message.
pub(crate) struct RequestContext {
    pub(crate) arrival: CallArrival,
    pub(crate) context: opentelemetry::Context,
    pub(crate) caller: Caller,
    /// Admission guard, if the layer has admitted the request.
    pub(crate) admission_guard: Option<AdmissionGuard>,
    /// Receive budget of the message, until all of its requests are tokenized.
    pub(crate) received: Option<Arc<ReservedBytes>>,
    /// Whether an earlier request of the call has the same message.
    pub(crate) shares_message: bool,
}

impl RequestContext {
    /// Returns the context of a call.
    ///
    /// # Errors
    /// The call has not passed the authentication layer.
    pub(crate) fn new(extensions: &Extensions, headers: &HeaderMap) -> Result<Self, Outcome> {
        let unknown = || Outcome::Unauthenticated("the caller is not known".to_owned());
        Ok(Self {
            arrival: extensions.get::<CallArrival>().copied().unwrap_or_else(CallArrival::now),
            context: trace::extract(headers),
            caller: extensions.get::<Caller>().cloned().ok_or_else(unknown)?,
            admission_guard: extensions.get::<AdmissionSlot>().and_then(AdmissionSlot::take),
            received: extensions.get::<Arc<ReservedBytes>>().cloned(),
            shares_message: false,
        })
    }

    /// Returns the context of the request in the next message of the call, admitted on its own. It takes over what that
    /// message has reserved of the receive budget.
    pub(crate) fn for_next_message(&self, admission: &Admission) -> Result<Self, Outcome> {
        let received = self.received.as_ref().map(|received| Arc::new(received.split()));
        Ok(Self { received, shares_message: false, ..self.for_next_request(admission)? })
    }

    /// Returns the context of another request in the same message, admitted on its own.
    pub(crate) fn for_next_request(&self, admission: &Admission) -> Result<Self, Outcome> {
        let admission_guard = admission.enter(&self.caller)?;
        let arrival = CallArrival { at: clock::now(), ..self.arrival };
        let (context, caller) = (self.context.clone(), self.caller.clone());
        let received = self.received.clone();
        Ok(Self { arrival, context, caller, admission_guard, received, shares_message: true })
    }
}

/// Bytes that a request may keep without a reservation.
const KEPT_FREE: usize = 16 << 10;

/// Counts an open call.
struct OpenStream;

/// Request that was validated and tokenized, but not queued.
pub(crate) struct PreparedRequest {
    call: AdmittedCall,
    model: Arc<Model>,
    span: Span,
    permit: PoolShare,
    open: TaskTrackerToken,
    admission_guard: Option<AdmissionGuard>,
    /// Receive budget of what it keeps of its message until it ends.
    kept: Option<ReservedBytes>,
    usage: Option<UsageSlot>,
    /// Permit of a request that waited for a cold start, held until it is submitted.
    _held: Option<OwnedSemaphorePermit>,
}

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
        drain: CancellationToken,
    ) -> Self {
        Self {
            options: options.clone(),
            dispatch,
            streams: SharedPool::new(options.streams_max as u64),
            tokenizing: Tokenizing::new(options),
            compiling: Tokenizing::of_grammars(options),
            open,
            usage,
            cold_start: ColdStart::new(options, drain),
            cursors: CursorKeys::new(&options.resume_keys, options.resume_age_max),
        }
    }

    /// Whether requests are served: at least one worker accepts them, and the usage log does not refuse them.
    pub(crate) fn is_ready(&self) -> bool {
        *self.dispatch.ready().borrow() && !self.is_refused_by_usage_log()
    }

    fn is_refused_by_usage_log(&self) -> bool {
        self.usage.as_ref().is_some_and(|usage| usage.refuses())
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
        request: GenerationRequest,
        incoming: RequestContext,
    ) -> Result<ResponseStream, Outcome> {
        let prepared = self.prepare(request, incoming).await?;
        self.submit(prepared)
    }

    /// Validates a request and tokenizes its prompt.
    pub(crate) async fn prepare(
        &self,
        mut request: GenerationRequest,
        incoming: RequestContext,
    ) -> Result<PreparedRequest, Outcome> {
        checked::check_input(&request.input)?;
        let permit = self.stream_permit(&incoming.caller)?;
        let open = self.open.token();
        let usage = self.usage.as_ref().map(UsageLog::admit).transpose()?;
        let RequestContext { arrival, context, caller, admission_guard, received, shares_message } = incoming;
        let resumed = request.resume.as_ref().map(|resume| self.verify(&resume.cursor)).transpose()?;
        if let Some(cursor) = &resumed {
            checked::continue_from(&mut request, cursor)?;
        }
        let terms = checked::terms(&mut request, &self.options, &caller)?;
        let decoded = self.reserve(request.decoded_json_bytes(), received.as_deref())?;
        let bytes = received.as_ref().filter(|_| !shares_message).map_or(0, |received| received.bytes());
        let served = self.dispatch.served();
        let holder = caller.holder();
        let held = self.cold_start.served(&request, holder.as_ref(), bytes, arrival, served).await?;
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
        let (seed, stream) = (rand::random(), rand::random());
        let tokenize = TokenizeTerms::new(&terms, arrival.deadline);
        let words = std::mem::take(&mut request.sampling.bad_words);
        let words = BadWords::new(served.clone(), words)?;
        let words = self.tokenize_words(words, &tokenize).instrument(span.clone()).await?;
        request.sampling.bad_word_token_ids.extend(words);
        let kept = self.keep(&request, received.as_deref(), shares_message)?;
        let output = OutputPlan::new(&mut request, (&served.name, &served.model), &self.options)?;
        if let Some(constraint) = request.sampling.constraint.clone() {
            let check = GrammarCheck::new(served.clone(), constraint, request.constraint_field)?;
            self.check_grammar(check, &tokenize).instrument(span.clone()).await?;
        }
        let mut checked = checked::check(request, terms, output, &served, seed)?;
        let prompt = checked.take_prompt(&served, &self.options);
        let prompt = self.tokenize(prompt, &tokenize).instrument(span.clone()).await;
        let prompt = prompt?.into_tokens();
        let tokenized = prompt.len();
        let arrived = (arrival.at, arrival.deadline);
        let mut call = checked.admit(prompt, resumed, &served, &self.options, arrived, stream, &caller)?;
        drop((received, decoded));
        // Tokens that truncation drops were computed, too: they count as those of a call that only tokenizes.
        let dropped = tokenized.saturating_sub(call.prompt.len()) as u64;
        if let Some(guard) = admission_guard.as_ref().filter(|_| dropped > 0) {
            guard.take_tokens(dropped)?.used(dropped);
        }
        span.record("tenant", &call.tenant);
        span.record("request_id", &call.request_id);
        span.record("prompt_tokens", call.prompt.len());
        call.trace = TraceContext::of(&span, &context);
        let model = served.model;
        Ok(PreparedRequest { call, model, span, permit, open, admission_guard, kept, usage, _held: held })
    }

    /// Queues a request. Its response must then be read, or it ends after --stall-timeout.
    pub(crate) fn submit(&self, prepared: PreparedRequest) -> Result<ResponseStream, Outcome> {
        let PreparedRequest { call, model, span, permit, open, admission_guard, kept, usage, _held } =
            prepared;
        let charge = admission_guard
            .as_ref()
            .map(|admission_guard| {
                admission_guard.take_tokens(call.tokens().saturating_sub(call.charged_tokens()))
            })
            .transpose()?;
        let guard = CallGuard::default()
            .with(permit)
            .with(open)
            .with(OpenStream::new())
            .with(admission_guard)
            .with(kept);
        let ticket = self.dispatch.submit(call, span.clone(), guard)?;
        Ok(ResponseStream::new(ticket, model, span, charge, usage))
    }

    /// Reserves the receive budget of what a request keeps until it ends beside its prompt, which the queue counts.
    fn keep(
        &self,
        request: &GenerationRequest,
        received: Option<&ReservedBytes>,
        shares_message: bool,
    ) -> Result<Option<ReservedBytes>, Outcome> {
        let stops: usize = request.stop.stop.iter().map(String::len).sum();
        self.reserve(request.sampling.list_bytes(!shares_message) + stops, received)
    }

    /// Reserves `bytes` more of the receive budget than the message has, unless they are few.
    fn reserve(
        &self,
        bytes: usize,
        received: Option<&ReservedBytes>,
    ) -> Result<Option<ReservedBytes>, Outcome> {
        let Some(received) = received.filter(|_| bytes > KEPT_FREE) else { return Ok(None) };
        received.another(bytes as u64).map(Some).map_err(|status| {
            let what = status.message().to_owned();
            Outcome::Full(Box::new(Overload::of_router(what, "receive_bytes", self.options.retry_delay)))
        })
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

    /// Takes the place of an open call of a caller.
    fn stream_permit(&self, caller: &Caller) -> Result<PoolShare, Outcome> {
        let holder = caller.holder();
        self.streams.take(holder.as_ref(), 1).map_err(|full| {
            let (most, open) = (self.options.streams_max, self.streams.held());
            let what = match full {
                PoolFull::Pool => format!("{most} calls are open, the limit (--streams-max)"),
                PoolFull::Share => format!(
                    "{open} calls of {most} are open (--streams-max), and the tenant's are as many as its share of what is left"
                ),
            };
            let what = format!("{what}; try again later");
            Outcome::Full(Box::new(Overload::of_router(what, "streams", self.options.retry_delay)))
        })
    }

    /// Tokenizes a prompt, in turns with other tenants if it is large.
    async fn tokenize(&self, mut prompt: PromptJob, terms: &TokenizeTerms) -> Result<PromptJob, Outcome> {
        if prompt.is_large() {
            return self.tokenizing.run(terms, prompt.first(), prompt, PromptJob::step).await;
        }
        prompt.run()?;
        Ok(prompt)
    }

    /// Returns the tokens of bad words, in turns with other tenants if they are many.
    async fn tokenize_words(
        &self,
        mut words: BadWords,
        terms: &TokenizeTerms,
    ) -> Result<Vec<Vec<u32>>, Outcome> {
        if words.are_many() {
            let done = self.tokenizing.run(terms, words.piece(), words, BadWords::run).await;
            return Ok(done?.into_tokens());
        }
        words.run()?;
        Ok(words.into_tokens())
    }

    /// Compiles a grammar, in turns with other tenants, unless the outcome is known.
    async fn check_grammar(&self, check: GrammarCheck, terms: &TokenizeTerms) -> Result<(), Outcome> {
        if check.is_known() {
            return check.run().await.1;
        }
        let turn = self.compiling.turn(terms).await?;
        let (cpu, outcome) = match terms.deadline {
            None => check.run().await,
            Some(deadline) => {
                let run = tokio::time::timeout_at(deadline.into(), check.run()).await;
                run.map_err(|_| Outcome::DeadlineExceeded)?
            }
        };
        turn.finish(cpu);
        outcome
    }

    /// Tokenizes a prompt exactly as [`Ingress::start`] does, and charges its tokens to the tenant's rate and daily
    /// budget, also if it is refused or cancelled on the way. Holds the receive budget until it returns.
    pub(crate) async fn tokens(
        &self,
        model: &str,
        input: Input,
        parse_special: Option<bool>,
        context: RequestContext,
    ) -> Result<(ServedModel, Vec<u32>), Outcome> {
        let (_permit, _open) = (self.stream_permit(&context.caller)?, self.open.token());
        let served = self.dispatch.resolve(model, None, clock::now())?;
        let (special, most) =
            (SpecialTokens::new(parse_special, &self.options), self.options.tokenize_tokens_max);
        checked::check_input(&input)?;
        let prompt = PromptJob::of_answer(served.clone(), input, special, most);
        let terms = self.terms_of(&context)?;
        // Each byte is at most one token; a template adds some that are not counted before.
        let charge = charge(&context, prompt.bytes().min(most))?;
        let done = self.tokenize(prompt.charged_to(charge), &terms).await;
        Ok((served, done?.into_tokens()))
    }

    /// Returns the text of tokens, special ones included, and charges the tokens like [`Ingress::tokens`].
    pub(crate) async fn decode(
        &self,
        served: &ServedModel,
        tokens: Vec<u32>,
        context: RequestContext,
    ) -> Result<String, Outcome> {
        let (_permit, _open) = (self.stream_permit(&context.caller)?, self.open.token());
        let most = self.options.tokenize_tokens_max;
        if tokens.len() > most {
            let reason = format!(
                "tokens has {} token ids, more than {most}, the limit of --tokenize-tokens-max; send them in parts",
                tokens.len()
            );
            return Err(Outcome::field("tokens", reason));
        }
        let terms = self.terms_of(&context)?;
        let charge = charge(&context, tokens.len())?;
        let first = TokenizePiece { bytes: 4 * tokens.len() as u64, last: true };
        let state = (served.model.clone(), tokens, String::new(), charge);
        let decoded = self.tokenizing.run(&terms, first, state, |(model, tokens, text, charge)| {
            if let Some(charge) = charge {
                charge.used(tokens.len() as u64);
            }
            *text = model.tokenizer.decode_all(tokens).map_err(Outcome::invalid)?;
            Ok(None)
        });
        let (_, _, text, _) = decoded.await?;
        Ok(text)
    }

    /// Returns the terms on which the text of a call without terms of its own is tokenized.
    fn terms_of(&self, context: &RequestContext) -> Result<TokenizeTerms, Outcome> {
        let (weight, priority) = (Weight::default(), Priority::default());
        let terms = admission::terms(
            &context.caller,
            String::new(),
            weight,
            priority,
            self.options.anonymous_weights,
        )?;
        Ok(TokenizeTerms::new(&terms, context.arrival.deadline))
    }

    /// Returns the outcome of a readiness probe while no request is served.
    pub(crate) fn unready(&self) -> Outcome {
        if self.is_refused_by_usage_log() {
            return Outcome::UsageLogUnavailable;
        }
        match self.resolve("") {
            Ok(served) => Outcome::Unserved { model: served.name, waited: Duration::ZERO },
            Err(outcome @ (Outcome::NeverConnected { .. } | Outcome::Unserved { .. })) => outcome,
            Err(_) => Outcome::Unserved { model: String::new(), waited: Duration::ZERO },
        }
    }
}

/// Charges up to `tokens` to the tenant of a call.
fn charge(context: &RequestContext, tokens: usize) -> Result<Option<TokenCharge>, Outcome> {
    let guard = context.admission_guard.as_ref();
    guard.map(|guard| guard.take_tokens(tokens as u64)).transpose()
}
