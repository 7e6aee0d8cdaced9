//! Requests and their results, shared by the tests.

use anyhow::{Context, Result, bail, ensure};
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::{
    FinishReason, GenerateRequest, GenerateResponse, ListModelsRequest, Model, SamplingParams,
    StopConditions, Usage,
};
use tonic::Streaming;
use tonic::transport::Channel;

/// Returns a request for exactly `tokens` output tokens, sampled with `seed`.
pub fn sampled(prompt: &str, tokens: u32, seed: u64) -> GenerateRequest {
    GenerateRequest {
        input: Some(Input::Text(prompt.to_owned())),
        sampling: Some(SamplingParams {
            temperature: Some(0.8),
            seed: Some(seed),
            ..SamplingParams::default()
        }),
        stop: Some(StopConditions {
            max_tokens: Some(tokens),
            ignore_eos: true,
            ..StopConditions::default()
        }),
        return_token_ids: true,
        ..GenerateRequest::default()
    }
}

/// Returns the only model of the cluster.
pub async fn model(client: &mut InferenceClient<Channel>) -> Result<Model> {
    let models = client.list_models(ListModelsRequest {}).await?.into_inner().models;
    ensure!(models.len() == 1, "one model was expected: {models:?}");
    models.into_iter().next().context("no model")
}

/// Output of a generation stream as far as received.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct GenerationResult {
    pub text: String,
    pub tokens: Vec<u32>,
    pub reasons: Vec<FinishReason>,
    pub usage: Option<Usage>,
}

impl GenerationResult {
    /// Adds an event.
    ///
    /// # Errors
    /// The event is not allowed at this point of the stream.
    pub fn add(&mut self, response: GenerateResponse) -> Result<()> {
        ensure!(self.usage.is_none(), "an event after `completed`: {response:?}");
        match response.event.context("an empty message")? {
            Event::Started(started) => ensure!(started.prompt_tokens > 0, "no prompt"),
            Event::Delta(delta) => {
                ensure!(self.reasons.is_empty(), "a delta after `finished`");
                self.text.push_str(&delta.text);
                self.tokens.extend(delta.token_ids);
            }
            Event::PromptLogprobs(_) => ensure!(self.text.is_empty(), "the prompt after its output"),
            Event::Finished(finished) => self.reasons.push(finished.reason()),
            Event::Completed(completed) => {
                let Usage { prompt_tokens, completion_tokens, .. } = completed.usage.context("no usage")?;
                // Other usage fields, such as cached tokens, may differ between runs.
                self.usage = Some(Usage { prompt_tokens, completion_tokens, ..Usage::default() });
            }
            Event::FingerprintChanged(changed) => bail!("workers of one build differ: {changed:?}"),
        }
        Ok(())
    }

    /// Reads the rest of a stream.
    pub async fn read_rest(mut self, stream: &mut Streaming<GenerateResponse>) -> Result<Self> {
        while let Some(response) = stream.message().await? {
            self.add(response)?;
        }
        ensure!(self.usage.is_some(), "the stream ended without `completed`");
        Ok(self)
    }

    /// Reads a stream until its first tokens.
    pub async fn until_first_tokens(stream: &mut Streaming<GenerateResponse>) -> Result<Self> {
        let mut answer = Self::default();
        while answer.tokens.is_empty() {
            answer.add(stream.message().await?.context("the stream ended before its first token")?)?;
        }
        Ok(answer)
    }
}

/// Generates, and reads the stream to its end.
pub async fn generate(
    client: &mut InferenceClient<Channel>,
    request: GenerateRequest,
) -> Result<GenerationResult> {
    let mut stream = client.generate(request).await?.into_inner();
    GenerationResult::default().read_rest(&mut stream).await
}
