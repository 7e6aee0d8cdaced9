//! The `inflight.v1.Inference` service: protobuf messages to requests of the core, its events to messages.

pub(crate) mod admin;
pub(crate) mod tools;

use std::collections::{BTreeSet, HashMap};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::{Stream, StreamExt as _};
use inflight_contract::{RequestError, SamplingError, SamplingOverrides, StopConditions};
use inflight_proto::v1;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_server::Inference;
use prost::Message as _;
use tonic::{Request, Response, Status};

use crate::dispatcher::ServedModel;
use crate::outcome::Outcome;
use crate::output::collected::{Collected, CollectedCall, CollectedChoice};
use crate::output::event::{Completed, Delta, Finished, GenerationEvent, Started, Timings, Usage};
use crate::output::response_stream::{GenerationEvents, ResponseStream};
use crate::protocols::http::{SMALL_BODY_BYTES, read_aside};
use crate::request::context::RequestContext;
use crate::request::cursor::CursorTracker;
use crate::request::draft::{Draft, Input, OutputParsing, Resume};
use crate::request::ingress::Ingress;
use crate::request::ingress::rejected;
use tools::MessageParts;

/// Inference service of the router.
pub(crate) struct Grpc {
    ingress: Arc<Ingress>,
}

impl Grpc {
    pub(crate) fn new(ingress: Arc<Ingress>) -> Self {
        Self { ingress }
    }

    /// Validates and queues the request of either form of Generate; `whole` if its response is one message.
    async fn start(
        &self,
        request: Request<v1::GenerateRequest>,
        whole: bool,
    ) -> Result<ResponseStream, Status> {
        let incoming = RequestContext::new(request.extensions(), request.metadata().as_ref());
        let incoming = incoming.map_err(Outcome::into_status)?;
        let start = async {
            let (holder, message) = (incoming.caller.holder(), request.into_inner());
            let large = message.encoded_len() > SMALL_BODY_BYTES;
            let request = read_aside(holder, large, || generation_request(message, whole)).await?;
            self.ingress.start(request, incoming).await
        };
        start.await.map_err(|outcome| rejected(at_path(outcome)).into_status())
    }
}

/// Response stream as protobuf messages.
pub(crate) struct GenerateStream {
    stream: GenerationEvents,
    /// Cursor of a resumable stream.
    cursor: Option<CursorTracker>,
}

impl Stream for GenerateStream {
    type Item = Result<v1::GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        loop {
            let event = match ready!(Pin::new(&mut this.stream).poll_next(context)) {
                None => return Poll::Ready(None),
                Some(Err(outcome)) => return Poll::Ready(Some(Err(failed(outcome, &this.stream)))),
                Some(Ok(event)) => event,
            };
            if let Some(cursor) = &mut this.cursor {
                cursor.observe(&event);
            }
            let output = matches!(event, GenerationEvent::Delta(_) | GenerationEvent::Finished(_));
            if output && !event.is_new_output() {
                continue;
            }
            let cursor = this.cursor.as_mut().map(CursorTracker::sign).unwrap_or_default();
            return Poll::Ready(Some(Ok(message(event, cursor))));
        }
    }
}

/// Returns the status of a request that failed after it was queued: if it was dispatched, with its token
/// counts in the metadata of google.rpc.ErrorInfo, under the field names of `Usage`.
fn failed(outcome: Outcome, stream: &GenerationEvents) -> Status {
    let info = stream.usage().map_or_else(HashMap::new, |usage| {
        let counts = [
            ("prompt_tokens", usage.prompt_tokens),
            ("cached_prompt_tokens", usage.cached_prompt_tokens),
            ("completion_tokens", usage.completion_tokens),
        ];
        let counts = counts.map(|(name, tokens)| (name.to_owned(), tokens.to_string()));
        counts.into_iter().chain([("fingerprint".to_owned(), usage.fingerprint)]).collect()
    });
    outcome.into_status_with(info)
}

/// Names an invalid field by its path in `GenerateRequest`.
fn at_path(outcome: Outcome) -> Outcome {
    let Outcome::InvalidField { field, reason } = outcome else { return outcome };
    if field == RequestError::PROMPT {
        return Outcome::field("input", reason);
    }
    let parent = match field.as_str() {
        name if SamplingOverrides::FIELDS.contains(&name) => "sampling.",
        name if StopConditions::FIELDS.contains(&name) => "stop.",
        "cursor" => "resume.",
        _ => "",
    };
    Outcome::InvalidField { field: format!("{parent}{field}"), reason }
}

fn usage_message(usage: Usage) -> v1::Usage {
    let Usage { prompt_tokens, completion_tokens, cached_prompt_tokens, reasoning_tokens, fingerprint } =
        usage;
    v1::Usage { prompt_tokens, completion_tokens, cached_prompt_tokens, fingerprint, reasoning_tokens }
}

fn timings_message(timings: Timings) -> v1::Timings {
    v1::Timings {
        queue_seconds: timings.queue_seconds,
        time_to_first_token_seconds: timings.first_token_seconds,
        time_per_output_token_seconds: timings.per_token_seconds,
        total_seconds: timings.total_seconds,
    }
}

/// Returns the response in one piece.
fn unary(collected: Collected) -> v1::GenerateUnaryResponse {
    let Collected { choices, started, prompt_logprobs, changes, usage, timings } = collected;
    let change = |(fingerprint, tokens)| v1::FingerprintChanged { fingerprint, tokens };
    v1::GenerateUnaryResponse {
        request_id: started.request_id,
        model: started.model,
        seed: started.seed,
        fingerprint: started.fingerprint,
        choices: choices.into_iter().zip(0..).map(choice).collect(),
        usage: Some(usage_message(usage)),
        timings: Some(timings_message(timings)),
        fingerprint_changes: changes.into_iter().map(change).collect(),
        prompt_logprobs: prompt_logprobs.into_iter().map(Into::into).collect(),
    }
}

fn choice((choice, index): (CollectedChoice, u32)) -> v1::Choice {
    let reason = v1::FinishReason::from(choice.reason()).into();
    let call = |call: &CollectedCall| {
        let CollectedCall { id, name, arguments } = call.clone();
        v1::ToolCall { id, name, arguments }
    };
    let tool_calls = choice.calls().map(call).collect();
    let CollectedChoice { text, token_ids, logprobs, finished, reasoning, .. } = choice;
    let (stop_string, stop_token_id) =
        finished.map(|finished| (finished.stop_string, finished.stop_token_id)).unwrap_or_default();
    let logprobs = logprobs.into_iter().map(Into::into).collect();
    v1::Choice { index, text, token_ids, logprobs, reason, stop_string, stop_token_id, reasoning, tool_calls }
}

/// Returns the message of an event, with the cursor after it.
fn message(event: GenerationEvent, cursor: Vec<u8>) -> v1::GenerateResponse {
    let event = match event {
        GenerationEvent::Started(started) => {
            let Started { request_id, model, prompt_tokens, seed, fingerprint, .. } = started;
            Event::Started(v1::GenerationStarted {
                request_id,
                model,
                prompt_tokens,
                seed,
                fingerprint,
                cursor,
            })
        }
        GenerationEvent::PromptLogprobs { first, positions } => {
            let positions = positions.into_iter().map(Into::into).collect();
            Event::PromptLogprobs(v1::PromptLogprobs { first_position: first, positions })
        }
        GenerationEvent::Delta(Delta { choice, text, parts, token_ids, logprobs, .. }) => {
            let logprobs = logprobs.into_iter().map(Into::into).collect();
            // The text has the content among the parts.
            let MessageParts { reasoning, tool_calls, .. } = MessageParts::new(parts);
            Event::Delta(v1::GenerationDelta {
                choice,
                text,
                token_ids,
                logprobs,
                cursor,
                reasoning,
                tool_calls,
            })
        }
        GenerationEvent::Finished(Finished { choice, reason, parts, stop_string, stop_token_id, .. }) => {
            let reason = v1::FinishReason::from(reason).into();
            let MessageParts { text, reasoning, tool_calls } = MessageParts::new(parts);
            Event::Finished(v1::ChoiceFinished {
                choice,
                reason,
                stop_string,
                stop_token_id,
                cursor,
                text,
                reasoning,
                tool_calls,
            })
        }
        GenerationEvent::FingerprintChanged { fingerprint, tokens } => {
            Event::FingerprintChanged(v1::FingerprintChanged { fingerprint, tokens })
        }
        GenerationEvent::Completed(Completed { usage, timings }) => {
            let (usage, timings) = (Some(usage_message(usage)), Some(timings_message(timings)));
            Event::Completed(v1::GenerationCompleted { usage, timings })
        }
    };
    v1::GenerateResponse { event: Some(event) }
}

/// Reads a request; `whole` if its response is one message.
fn generation_request(message: v1::GenerateRequest, whole: bool) -> Result<Draft, Outcome> {
    use v1::generate_request::Input as Prompt;
    let tools = message.tools.map(tools::tool_use).transpose()?.flatten();
    let parse_output = message.parse_output || tools.is_some();
    if parse_output && !matches!(message.input, Some(Prompt::Chat(_)) | None) {
        let field = if tools.is_some() { "tools" } else { "parse_output" };
        return Err(Outcome::field(field, format!("{field} needs chat input, not text or token_ids")));
    }
    let input = match message.input {
        None => return Err(Outcome::field("input", "input is missing; give text, token_ids or chat")),
        Some(Prompt::TokenIds(tokens)) => Input::TokenIds(tokens.ids),
        Some(Prompt::Text(text)) => Input::Text(text),
        Some(Prompt::Chat(chat)) => tools::conversation(chat, tools.as_ref())?,
    };
    let resumable = message.resumable || message.resume.is_some();
    Ok(Draft {
        model: message.model,
        input,
        truncate_prompt_tokens: message.truncate_prompt_tokens,
        parse_special: message.parse_special,
        sampling: message.sampling.unwrap_or_default().into(),
        stop: message.stop.unwrap_or_default().into(),
        tools,
        parsing: match (parse_output, whole) {
            (false, _) => OutputParsing::Off,
            (true, false) => OutputParsing::Fragments,
            (true, true) => OutputParsing::WholeCalls,
        },
        return_token_ids: message.return_token_ids || resumable,
        tenant: message.tenant,
        weight: message.weight,
        priority: message.priority,
        request_id: message.request_id,
        require_fingerprint: message.require_fingerprint,
        resumable,
        event_path: String::new(),
        resume: message.resume.map(resume),
        constraint_field: SamplingError::CONSTRAINT,
    })
}

fn resume(message: v1::Resume) -> Resume {
    let tokens = message.choices.into_iter().map(|choice| choice.ids).collect();
    Resume { cursor: message.cursor, tokens: Some(tokens) }
}

#[tonic::async_trait]
impl Inference for Grpc {
    type GenerateStream = GenerateStream;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<GenerateStream>, Status> {
        let stream = self.start(request, false).await?;
        let cursor = self.ingress.track(&stream);
        Ok(Response::new(GenerateStream { stream: stream.into_events(), cursor }))
    }

    /// Dropping the call drops its stream, which cancels the request.
    async fn generate_unary(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<v1::GenerateUnaryResponse>, Status> {
        if request.get_ref().resumable || request.get_ref().resume.is_some() {
            let reason = "a response in one message cannot be resumed; call Generate";
            return Err(rejected(Outcome::field("resume", reason)).into_status());
        }
        let mut stream = self.start(request, true).await?.into_events();
        let mut collected = Collected::default();
        while let Some(event) = stream.next().await {
            collected.add(event.map_err(|outcome| failed(outcome, &stream))?);
        }
        Ok(Response::new(unary(collected)))
    }

    async fn list_models(
        &self,
        _: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        let model = |(served, fingerprints): (ServedModel, Vec<String>)| v1::Model {
            workers: fingerprints.len() as u32,
            fingerprints: fingerprints.into_iter().collect::<BTreeSet<_>>().into_iter().collect(),
            aliases: self.ingress.aliases(&served.name),
            name: served.name,
            architecture: served.architecture,
            context_tokens: served.limits.sequence_tokens(),
            vocab_size: served.limits.vocab_size,
            has_chat_template: served.model.template.is_some(),
        };
        let models = self.ingress.models().into_iter().map(model).collect();
        Ok(Response::new(v1::ListModelsResponse { models }))
    }

    async fn tokenize(
        &self,
        request: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        use v1::tokenize_request::Input as Prompt;
        let incoming = RequestContext::new(request.extensions(), request.metadata().as_ref());
        let incoming = incoming.map_err(Outcome::into_status)?;
        let v1::TokenizeRequest { model, input, parse_special, omit_pieces } = request.into_inner();
        let input = match input {
            Some(Prompt::Text(text)) => Input::Text(text),
            Some(Prompt::Chat(chat)) => {
                tools::conversation(chat, None).map_err(|outcome| at_path(outcome).into_status())?
            }
            None => return Err(Outcome::field("input", "input is missing; give text or chat").into_status()),
        };
        let tokens = self.ingress.tokens(&model, input, parse_special, incoming).await;
        let (served, token_ids) = tokens.map_err(Outcome::into_status)?;
        let texts = || token_ids.iter().map(|id| served.model.tokenizer.piece(*id)).collect();
        let pieces = if omit_pieces { Vec::new() } else { texts() };
        Ok(Response::new(v1::TokenizeResponse { token_ids, pieces }))
    }
}
