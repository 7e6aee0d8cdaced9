//! Entry of every request: the steps from a draft to a queued request, and calls that only tokenize.

use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{Priority, Weight};
use inflight_router_core::TokenizePiece;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::clock;
use crate::dispatcher::model_counters::ModelCounters;
use crate::dispatcher::{ServedModel, SharedDispatcher};
use crate::layers::admission;
use crate::metrics as names;
use crate::options::Options;
use crate::outcome::Outcome;
use crate::output::response_stream::ResponseStream;
use crate::request::admitted::Admitted;
use crate::request::checked::Checked;
use crate::request::context::RequestContext;
use crate::request::cursor::{CursorTracker, unix_seconds};
use crate::request::draft::{Draft, Input};
use crate::request::limits;
use crate::request::prompt::{PromptJob, SpecialTokens};
use crate::request::resources::Resources;
use crate::request::tokenized::Tokenized;
use crate::request::tokenizing::TokenizeTerms;
use crate::tenants::TokenCharge;
use crate::usage::log::UsageLog;

/// Request path shared by gRPC, KServe and HTTP.
pub(crate) struct Ingress {
    resources: Resources,
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
        Self { resources: Resources::new(options, dispatch, open, usage, drain) }
    }

    /// Whether requests are served: at least one worker accepts them, and the usage log does not refuse them.
    pub(crate) fn is_ready(&self) -> bool {
        *self.resources.dispatch.ready().borrow() && !self.is_refused_by_usage_log()
    }

    fn is_refused_by_usage_log(&self) -> bool {
        self.resources.usage.as_ref().is_some_and(|usage| usage.refuses())
    }

    /// Returns the models with serving workers, with the fingerprint of each worker.
    pub(crate) fn models(&self) -> Vec<(ServedModel, Vec<String>)> {
        self.resources.dispatch.models()
    }

    /// Returns the further names of a model, sorted.
    pub(crate) fn aliases(&self, model: &str) -> Vec<String> {
        self.resources.dispatch.aliases(model)
    }

    /// Returns the counters of a model's ended requests.
    pub(crate) fn counters(&self, model: &str) -> ModelCounters {
        self.resources.dispatch.counters().of(model)
    }

    /// Resolves a model name.
    pub(crate) fn resolve(&self, name: &str) -> Result<ServedModel, Outcome> {
        self.resources.dispatch.resolve(name, None, clock::now())
    }

    /// Checks, tokenizes, admits and queues a request.
    pub(crate) async fn start(
        &self,
        draft: Draft,
        context: RequestContext,
    ) -> Result<ResponseStream, Outcome> {
        self.submit(self.prepare(draft, context).await?)
    }

    /// Checks, tokenizes and admits a request.
    pub(crate) async fn prepare(&self, draft: Draft, context: RequestContext) -> Result<Admitted, Outcome> {
        let checked = Checked::new(draft, context, &self.resources).await?;
        let tokenized = Tokenized::new(checked, &self.resources).await?;
        Admitted::new(tokenized, &self.resources)
    }

    /// Queues a request. Its response must then be read, or it ends after --stall-timeout.
    pub(crate) fn submit(&self, admitted: Admitted) -> Result<ResponseStream, Outcome> {
        admitted.submit(&self.resources.dispatch)
    }

    /// Returns the cursor of a stream, which follows its events; `None` if the stream cannot be resumed.
    pub(crate) fn track(&self, stream: &ResponseStream) -> Option<CursorTracker> {
        Some(CursorTracker::new(self.resources.cursors.clone(), stream.cursor()?))
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
        let Resources { options, dispatch, streams, tokenizing, open, .. } = &self.resources;
        let (_permit, _open) = (streams.take(&context.caller)?, open.token());
        let served = dispatch.resolve(model, None, clock::now())?;
        let (special, most) = (SpecialTokens::new(parse_special, options), options.tokenize_tokens_max);
        limits::check_input(&input)?;
        let time = self.resources.options.template_date.time(unix_seconds());
        let prompt = PromptJob::of_answer(served.clone(), input, special, most).at(time);
        let terms = self.terms_of(&context)?;
        // Each byte is at most one token; a template adds some that are not counted before.
        let charge = charge(&context, prompt.bytes().min(most))?;
        let done = prompt.charged_to(charge).tokenize(tokenizing, &terms).await;
        Ok((served, done?.into_tokens()))
    }

    /// Returns the text of tokens, special ones included, and charges the tokens like [`Ingress::tokens`].
    pub(crate) async fn decode(
        &self,
        served: &ServedModel,
        tokens: Vec<u32>,
        context: RequestContext,
    ) -> Result<String, Outcome> {
        let Resources { options, streams, tokenizing, open, .. } = &self.resources;
        let (_permit, _open) = (streams.take(&context.caller)?, open.token());
        let most = options.tokenize_tokens_max;
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
        let decoded = tokenizing.run(&terms, first, state, |(model, tokens, text, charge)| {
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
            self.resources.options.anonymous_weights,
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
