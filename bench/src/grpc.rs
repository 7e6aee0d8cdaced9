//! Client of the `inflight.v1` gRPC API.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use inflight_client::GenerateStream;
use inflight_net::code_name;
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::{
    FinishReason, GenerateRequest, GenerateResponse, ListModelsRequest, SamplingParams, StopConditions,
    TokenIds,
};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use crate::client::{CompletionRequest, Connector, GenerationSettings, PromptForm, ServerInfo};
use crate::error::{BenchError, ErrorKind};
use crate::measure::InFlightRequest;
use crate::outcome::{ReportedUsage, RequestOutcome};
use crate::workload::as_text;

/// Maximum streams on one connection. HTTP/2 servers allow about 100 or more; beyond their limit a request
/// would be sent only after another one has ended.
const STREAMS_PER_CONNECTION: usize = 64;
/// Timeout of connecting to the server.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Client of a router, with as many connections as the concurrent streams need.
#[derive(Debug)]
pub struct Grpc {
    url: String,
    connector: Connector,
    /// Connections; the strong count of a token is one more than the number of streams on its connection.
    connections: Mutex<Vec<(Arc<()>, InferenceClient<Channel>)>>,
    model: String,
    text: bool,
    /// Whether streams that break off are resumed.
    resume: bool,
}

/// Stream of a call.
enum CallStream {
    Plain(Box<Streaming<GenerateResponse>>),
    Resuming(Box<GenerateStream<Channel>>),
}

impl CallStream {
    async fn message(&mut self) -> Result<Option<GenerateResponse>, Status> {
        match self {
            Self::Plain(stream) => stream.message().await,
            Self::Resuming(stream) => stream.message().await,
        }
    }
}

impl Grpc {
    /// Creates a client of the router at `url`. With `resume`, it continues streams that break off.
    pub fn new(connector: Connector, url: String, resume: bool) -> Self {
        Self { url, connector, connections: Mutex::default(), model: String::new(), text: false, resume }
    }

    fn endpoint(&self) -> Result<Endpoint, BenchError> {
        let endpoint = Endpoint::from_shared(self.url.clone()).map_err(|error| {
            BenchError::new(ErrorKind::Usage, format!("--endpoint {:?}: {error}", self.url))
        })?;
        Ok(endpoint.connect_timeout(CONNECT_TIMEOUT).tcp_nodelay(true))
    }

    fn channel(&self) -> Result<Channel, BenchError> {
        let connector = self.connector.clone();
        let connector = tower::service_fn(move |_| {
            let connector = connector.clone();
            async move { connector.connect().await.map(TokioIo::new) }
        });
        Ok(self.endpoint()?.connect_with_connector_lazy(connector))
    }

    /// Lists the models and selects the one under test.
    ///
    /// # Errors
    /// The router is unreachable or does not serve the model, or the model is ambiguous.
    pub async fn probe(&mut self, model: Option<&str>, form: PromptForm) -> Result<ServerInfo, BenchError> {
        let mut client = InferenceClient::new(self.channel()?);
        let listed = client.list_models(ListModelsRequest {}).await.map_err(|status| {
            let text = status_text(&status);
            let message = match status.code() {
                Code::Unavailable => format!("cannot connect to {} ({text}); start a cluster with `inflight up`", self.url),
                _ => format!(
                    "{}: {text}; if it is an OpenAI-compatible server, give the base URL of its API, such as {}/v1",
                    self.url,
                    self.url.trim_end_matches('/')
                ),
            };
            BenchError::new(ErrorKind::Status(status.code()), message)
        })?;
        let models = listed.into_inner().models;
        let names = || models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>().join(", ");
        let chosen = match (model, models.as_slice()) {
            (_, []) => Err(BenchError::new(
                ErrorKind::Unavailable,
                format!("{} serves no model: no worker is connected", self.url),
            )),
            (Some(name), models) => models
                .iter()
                .find(|model| model.name == name || model.aliases.iter().any(|alias| alias == name))
                .ok_or_else(|| {
                    BenchError::new(
                        ErrorKind::Refused,
                        format!("{} serves no model {name:?}; it serves {}", self.url, names()),
                    )
                }),
            (None, [only]) => Ok(only),
            (None, _) => Err(BenchError::new(
                ErrorKind::Usage,
                format!("{} serves {}; name one with --model", self.url, names()),
            )),
        }?;
        self.model.clone_from(&chosen.name);
        self.text = form == PromptForm::Text;
        Ok(ServerInfo {
            model: chosen.name.clone(),
            vocab_size: Some(chosen.vocab_size),
            context_tokens: Some(chosen.context_tokens),
            text: self.text,
        })
    }

    /// Returns a connection with capacity for a stream; the stream counts until the token is dropped.
    fn connection(&self) -> Result<(Arc<()>, InferenceClient<Channel>), BenchError> {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        let free = connections.iter().find(|(token, _)| Arc::strong_count(token) <= STREAMS_PER_CONNECTION);
        if let Some((token, client)) = free {
            return Ok((Arc::clone(token), client.clone()));
        }
        let (token, client) = (Arc::new(()), InferenceClient::new(self.channel()?));
        connections.push((Arc::clone(&token), client.clone()));
        Ok((token, client))
    }

    /// Sends a request and reads its stream to the end, recording tokens as they arrive.
    pub async fn generate(
        &self,
        call: &CompletionRequest<'_>,
        settings: GenerationSettings,
        in_flight: &mut InFlightRequest,
    ) -> RequestOutcome {
        let (_token, mut client) = match self.connection() {
            Ok(connection) => connection,
            Err(failure) => return RequestOutcome::failed("connect", failure.to_string()),
        };
        let input = if self.text {
            Input::Text(as_text(&call.prompt))
        } else {
            Input::TokenIds(TokenIds { ids: call.prompt.clone() })
        };
        let request = GenerateRequest {
            model: self.model.clone(),
            input: Some(input),
            sampling: Some(SamplingParams {
                temperature: Some(settings.temperature),
                ..SamplingParams::default()
            }),
            stop: Some(StopConditions {
                max_tokens: Some(call.output_tokens),
                ignore_eos: !settings.allow_eos,
                ..StopConditions::default()
            }),
            return_token_ids: true,
            tenant: call.tenant.name.clone(),
            weight: call.tenant.weight,
            priority: call.tenant.priority,
            ..GenerateRequest::default()
        };
        let mut stream = match self.resume {
            true => CallStream::Resuming(Box::new(GenerateStream::new(vec![client], request))),
            false => match client.generate(request).await {
                Ok(response) => CallStream::Plain(Box::new(response.into_inner())),
                Err(status) => return outcome_from_status(&status),
            },
        };
        let mut failure = None;
        loop {
            let event = match stream.message().await {
                Ok(Some(response)) => response.event,
                Ok(None) => {
                    return RequestOutcome::failed("truncated", "the stream ended without `completed`");
                }
                Err(status) => return outcome_from_status(&status),
            };
            match event {
                Some(Event::Started(started)) => in_flight.set_prompt_tokens(started.prompt_tokens),
                Some(Event::Delta(delta)) => {
                    in_flight.record_tokens(u32::try_from(delta.token_ids.len()).unwrap_or(u32::MAX));
                }
                Some(Event::Finished(finished)) => {
                    if !matches!(finished.reason(), FinishReason::Stop | FinishReason::Length) {
                        let reason = finished.reason().as_str_name();
                        failure =
                            Some(RequestOutcome::failed(reason, format!("the choice ended with {reason}")));
                    }
                }
                Some(Event::Completed(completed)) => {
                    let usage = completed.usage.unwrap_or_default();
                    let served = ReportedUsage {
                        prompt_tokens: Some(usage.prompt_tokens),
                        output_tokens: Some(usage.completion_tokens),
                    };
                    return failure.unwrap_or(RequestOutcome::Completed(served));
                }
                Some(Event::FingerprintChanged(_) | Event::PromptLogprobs(_)) => {}
                None => {
                    return RequestOutcome::failed("protocol", "a message of the stream is empty");
                }
            }
        }
    }
}

fn outcome_from_status(status: &Status) -> RequestOutcome {
    let (kind, message) = (code_name(status.code()).to_owned(), status_text(status));
    match status.code() {
        Code::ResourceExhausted => RequestOutcome::Refused { kind, message },
        _ => RequestOutcome::Failed { kind, message },
    }
}

/// Formats a status with its root cause.
fn status_text(status: &Status) -> String {
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(status);
    while let Some(deeper) = cause.and_then(std::error::Error::source) {
        cause = Some(deeper);
    }
    let name = code_name(status.code());
    match cause.map(ToString::to_string) {
        Some(cause) if !status.message().contains(&cause) => format!("{name}: {}: {cause}", status.message()),
        _ => format!("{name}: {}", status.message()),
    }
}
