//! A client of our own protocol.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::{
    FinishReason, GenerateRequest, ListModelsRequest, SamplingParams, StopConditions, TokenIds,
};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

use super::client::{Call, Dial, Greeting, Manner, Outcome, PromptForm, Served};
use super::measure::Flight;
use super::workload::as_text;
use crate::exit::{Exit, Failure};
use crate::generate::{code_name, exit_of};

/// Streams on one connection. HTTP/2 servers allow about a hundred or more, and past their limit a request would wait for another's
/// end before it is even sent.
const STREAMS_PER_CONNECTION: usize = 64;
/// How long to try to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// A server and the connections to it: as many as the streams at once need.
#[derive(Debug)]
pub struct Grpc {
    url: String,
    dial: Dial,
    /// Connections; the strong count of the token says how many streams are on each.
    connections: Mutex<Vec<(Arc<()>, InferenceClient<Channel>)>>,
    model: String,
    text: bool,
}

impl Grpc {
    /// A client of the router at `url`.
    pub fn new(dial: Dial, url: String) -> Self {
        Self { url, dial, connections: Mutex::default(), model: String::new(), text: false }
    }

    fn endpoint(&self) -> Result<Endpoint, Failure> {
        let endpoint = Endpoint::from_shared(self.url.clone())
            .map_err(|error| Failure::new(Exit::Usage, format!("--endpoint {:?}: {error}", self.url)))?;
        Ok(endpoint.connect_timeout(CONNECT_TIMEOUT).tcp_nodelay(true))
    }

    fn channel(&self) -> Result<Channel, Failure> {
        let dial = self.dial.clone();
        let connector = tower::service_fn(move |_| {
            let dial = dial.clone();
            async move { dial.connect().await.map(TokioIo::new) }
        });
        Ok(self.endpoint()?.connect_with_connector_lazy(connector))
    }

    /// Asks which models there are.
    ///
    /// # Errors
    /// Nobody answers, or the model is not there.
    pub async fn greet(&mut self, model: Option<&str>, form: PromptForm) -> Result<Greeting, Failure> {
        let mut client = InferenceClient::new(self.channel()?);
        let listed = client.list_models(ListModelsRequest {}).await.map_err(|status| {
            let said = sentence(&status);
            let message = match status.code() {
                Code::Unavailable => format!("cannot connect to {} ({said}); start a cluster with `inflight up`", self.url),
                _ => format!(
                    "{}: {said}; if it is an OpenAI-compatible server, give the base URL of its API, such as {}/v1",
                    self.url,
                    self.url.trim_end_matches('/')
                ),
            };
            Failure::new(exit_of(status.code()), message)
        })?;
        let models = listed.into_inner().models;
        let names = || models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>().join(", ");
        let chosen = match (model, models.as_slice()) {
            (_, []) => Err(Failure::new(
                Exit::Unavailable,
                format!("{} serves no model: no worker is connected", self.url),
            )),
            (Some(name), models) => models.iter().find(|model| model.name == name).ok_or_else(|| {
                Failure::new(
                    Exit::Refused,
                    format!("{} serves no model {name:?}; it serves {}", self.url, names()),
                )
            }),
            (None, [only]) => Ok(only),
            (None, _) => Err(Failure::new(
                Exit::Usage,
                format!("{} serves {}; name one with --model", self.url, names()),
            )),
        }?;
        self.model.clone_from(&chosen.name);
        self.text = form == PromptForm::Text;
        Ok(Greeting {
            model: chosen.name.clone(),
            vocab_size: Some(chosen.vocab_size),
            context_tokens: Some(chosen.context_tokens),
            text: self.text,
        })
    }

    /// A connection with room for a stream, which it counts until the token is dropped.
    fn connection(&self) -> Result<(Arc<()>, InferenceClient<Channel>), Failure> {
        let mut connections = self.connections.lock().unwrap_or_else(PoisonError::into_inner);
        let free = connections.iter().find(|(token, _)| Arc::strong_count(token) <= STREAMS_PER_CONNECTION);
        if let Some((token, client)) = free {
            return Ok((Arc::clone(token), client.clone()));
        }
        let (token, client) = (Arc::new(()), InferenceClient::new(self.channel()?));
        connections.push((Arc::clone(&token), client.clone()));
        Ok((token, client))
    }

    /// Sends a request and follows its stream to the end.
    pub async fn generate(&self, call: &Call<'_>, manner: Manner, flight: &mut Flight) -> Outcome {
        let (_token, mut client) = match self.connection() {
            Ok(connection) => connection,
            Err(failure) => return Outcome::failed("connect", failure.to_string()),
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
                temperature: Some(manner.temperature),
                ..SamplingParams::default()
            }),
            stop: Some(StopConditions {
                max_tokens: Some(call.output_tokens),
                ignore_eos: !manner.allow_eos,
                ..StopConditions::default()
            }),
            return_token_ids: true,
            tenant: call.tenant.name.clone(),
            weight: call.tenant.weight,
            priority: call.tenant.priority,
            ..GenerateRequest::default()
        };
        let mut stream = match client.generate(request).await {
            Ok(response) => response.into_inner(),
            Err(status) => return outcome_of(&status),
        };
        let mut failure = None;
        loop {
            let event = match stream.message().await {
                Ok(Some(response)) => response.event,
                Ok(None) => return Outcome::failed("truncated", "the stream ended without `completed`"),
                Err(status) => return outcome_of(&status),
            };
            match event {
                Some(Event::Started(started)) => flight.has_prompt_of(started.prompt_tokens),
                Some(Event::Delta(delta)) => {
                    flight.arrived(u32::try_from(delta.token_ids.len()).unwrap_or(u32::MAX));
                }
                Some(Event::Finished(finished)) => {
                    if !matches!(finished.reason(), FinishReason::Stop | FinishReason::Length) {
                        let reason = finished.reason().as_str_name();
                        failure = Some(Outcome::failed(reason, format!("the choice ended with {reason}")));
                    }
                }
                Some(Event::Completed(completed)) => {
                    let usage = completed.usage.unwrap_or_default();
                    let served = Served {
                        prompt_tokens: Some(usage.prompt_tokens),
                        output_tokens: Some(usage.completion_tokens),
                    };
                    return failure.unwrap_or(Outcome::Completed(served));
                }
                Some(Event::FingerprintChanged(_)) => {}
                None => {
                    return Outcome::failed("protocol", "a message of the stream is empty");
                }
            }
        }
    }
}

fn outcome_of(status: &Status) -> Outcome {
    let (kind, message) = (code_name(status.code()).to_owned(), sentence(status));
    match status.code() {
        Code::ResourceExhausted => Outcome::Refused { kind, message },
        _ => Outcome::Failed { kind, message },
    }
}

/// A status in words, with what is at the bottom of it.
fn sentence(status: &Status) -> String {
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
