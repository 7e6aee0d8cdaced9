//! A request whose fields are valid.

use inflight_contract::{Constraint, Priority, SamplingError, SamplingParams, SamplingSpec, Weight};
use tracing::{Span, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::dispatcher::ServedModel;
use crate::layers::admission::{self, RequestTerms};
use crate::layers::arrival::CallArrival;
use crate::options::Options;
use crate::outcome::Outcome;
use crate::request::bad_words::BadWords;
use crate::request::context::RequestContext;
use crate::request::cursor::{Cursor, unix_seconds};
use crate::request::draft::{Draft, Input};
use crate::request::grammar_check::GrammarCheck;
use crate::request::held::Held;
use crate::request::limits;
use crate::request::output_plan::OutputPlan;
use crate::request::prompt::{PromptJob, SpecialTokens, Truncation};
use crate::request::resources::Resources;
use crate::request::resumption;
use crate::tenants::Caller;

/// Request whose fields are valid. Its texts are not tokenized, and its grammar is not compiled.
pub(super) struct Checked {
    pub(super) request: ValidRequest,
    pub(super) texts: Texts,
}

/// Texts of a request, to be tokenized, and its grammar, to be compiled.
pub(super) struct Texts {
    pub(super) words: BadWords,
    pub(super) grammar: Option<GrammarCheck>,
    pub(super) prompt: PromptJob,
}

/// Valid fields of a request, with what it holds of the router's limits.
pub(super) struct ValidRequest {
    /// Fields without the prompt and the sampling parameters; the limits of the output's length are checked with the prompt's.
    pub(super) draft: Draft,
    pub(super) served: ServedModel,
    pub(super) terms: RequestTerms,
    pub(super) caller: Caller,
    pub(super) arrival: CallArrival,
    /// Sampling parameters; the tokens of `bad_words` are added once they are tokenized.
    pub(super) sampling: SamplingParams,
    pub(super) output: Option<OutputPlan>,
    pub(super) truncation: Option<Truncation>,
    pub(super) chat: bool,
    /// Cursor of the stream that it resumes.
    pub(super) resumed: Option<Cursor>,
    /// Start of the stream, in seconds since the Unix epoch.
    pub(super) started_at: u32,
    pub(super) held: Held,
    pub(super) span: Span,
    /// The client's trace context.
    pub(super) client: opentelemetry::Context,
}

impl Checked {
    /// Checks a draft; waits for its model, if that is expected and not served yet.
    pub(super) async fn new(
        mut draft: Draft,
        context: RequestContext,
        resources: &Resources,
    ) -> Result<Self, Outcome> {
        let Resources { options, dispatch, cursors, .. } = resources;
        limits::check_input(&draft.input)?;
        let RequestContext { arrival, context: client, caller, .. } = &context;
        let (arrival, client, caller) = (*arrival, client.clone(), caller.clone());
        let mut held = Held::new(context, resources)?;
        let resumed = draft.resume.as_ref().map(|resume| resumption::verify(cursors, &resume.cursor));
        let resumed = resumed.transpose()?;
        if let Some(cursor) = &resumed {
            resumption::continue_from(&mut draft, cursor)?;
        }
        let terms = terms(&mut draft, options, &caller)?;
        held.reserve_decoded(draft.decoded_json_bytes(), options)?;
        held.wait_for_model(&draft, &caller, arrival, resources).await?;
        let required = Some(draft.require_fingerprint.as_str()).filter(|required| !required.is_empty());
        let served = dispatch.resolve(&draft.model, required, arrival.at)?;
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
        let _ = span.set_parent(client.clone());
        limits::check_stops("stop", &draft.stop.stop)?;
        let words = BadWords::new(served.clone(), std::mem::take(&mut draft.sampling.bad_words))?;
        if let Some(constraint) = &mut draft.sampling.constraint {
            Constraint::set_json_whitespace(constraint, options.json_whitespace);
        }
        let output = OutputPlan::new(&mut draft, (&served.name, &served.model), options)?;
        let constraint = draft.sampling.constraint.clone();
        let grammar = constraint.map(|constraint| {
            let answer = output.as_ref().and_then(OutputPlan::answer);
            GrammarCheck::new(served.clone(), (draft.constraint_field, constraint), answer)
        });
        let grammar = grammar.transpose()?;
        let defaults = SamplingSpec { seed: rand::random(), ..served.model.defaults.clone() };
        let sampling = std::mem::take(&mut draft.sampling).apply(&draft.stop, &defaults).validate();
        let sampling = sampling.map_err(|error| invalid_sampling(error, draft.constraint_field))?;
        if draft.stop.max_tokens == Some(0) && sampling.prompt_logprobs.is_none() {
            let reason =
                "max_tokens is 0; ask for at least one token, or for log probabilities of the prompt";
            return Err(Outcome::field("max_tokens", reason));
        }
        let truncation = draft.truncate_prompt_tokens;
        let truncation =
            truncation.map(|tokens| Truncation::new(tokens, draft.stop.max_tokens, &served)).transpose()?;
        let input = std::mem::replace(&mut draft.input, Input::TokenIds(Vec::new()));
        let chat = matches!(input, Input::Chat(_));
        let special = SpecialTokens::new(draft.parse_special, options);
        let started_at = resumed.as_ref().map_or_else(unix_seconds, |cursor| cursor.started_at);
        let time = options.template_date.time(started_at);
        let prompt = PromptJob::of_request(served.clone(), input, special, truncation).at(time);
        let request = ValidRequest {
            draft,
            served,
            terms,
            caller,
            arrival,
            sampling,
            output,
            truncation,
            chat,
            resumed,
            started_at,
            held,
            span,
            client,
        };
        Ok(Self { request, texts: Texts { words, grammar, prompt } })
    }
}

/// Returns the terms on which a request runs.
fn terms(draft: &mut Draft, options: &Options, caller: &Caller) -> Result<RequestTerms, Outcome> {
    limits::check_names(draft)?;
    let weight = draft.weight.map_or(Ok(Weight::default()), Weight::try_from);
    let weight = weight.map_err(|error| Outcome::field("weight", error))?;
    let priority = Priority::try_from(draft.priority).map_err(|error| Outcome::field("priority", error))?;
    let tenant = std::mem::take(&mut draft.tenant);
    admission::terms(caller, tenant, weight, priority, options.anonymous_weights)
}

/// Returns the refusal of a sampling parameter. `constraint_field` is the client's field of the constraint.
pub(super) fn invalid_sampling(error: SamplingError, constraint_field: &'static str) -> Outcome {
    match error {
        SamplingError::Constraint(error) => Outcome::field(constraint_field, error),
        error => Outcome::field(error.field(), &error),
    }
}
