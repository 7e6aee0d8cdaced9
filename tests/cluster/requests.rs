//! Requests, and what came of them.

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

/// Asks for exactly `tokens` tokens after `prompt`, sampled with `seed`.
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

/// The one model of the cluster.
pub async fn model(client: &mut InferenceClient<Channel>) -> Result<Model> {
    let models = client.list_models(ListModelsRequest {}).await?.into_inner().models;
    ensure!(models.len() == 1, "one model was expected: {models:?}");
    models.into_iter().next().context("no model")
}

/// A generation as far as it got.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct GenerationResult {
    pub text: String,
    pub tokens: Vec<u32>,
    pub reasons: Vec<FinishReason>,
    pub usage: Option<Usage>,
}

impl GenerationResult {
    /// Adds an event, checking that it may come now.
    pub fn add(&mut self, response: GenerateResponse) -> Result<()> {
        ensure!(self.usage.is_none(), "an event after `completed`: {response:?}");
        match response.event.context("an empty message")? {
            Event::Started(started) => ensure!(started.prompt_tokens > 0, "no prompt"),
            Event::Delta(delta) => {
                ensure!(self.reasons.is_empty(), "a delta after `finished`");
                self.text.push_str(&delta.text);
                self.tokens.extend(delta.token_ids);
            }
            Event::Finished(finished) => self.reasons.push(finished.reason()),
            Event::Completed(completed) => {
                let Usage { prompt_tokens, completion_tokens, .. } = completed.usage.context("no usage")?;
                // What was cached and where it ran may differ from one run to the next.
                self.usage = Some(Usage { prompt_tokens, completion_tokens, ..Usage::default() });
            }
            Event::FingerprintChanged(changed) => bail!("workers of one build differ: {changed:?}"),
        }
        Ok(())
    }

    /// Reads a stream to its end.
    pub async fn read(mut self, stream: &mut Streaming<GenerateResponse>) -> Result<Self> {
        while let Some(response) = stream.message().await? {
            self.add(response)?;
        }
        ensure!(self.usage.is_some(), "the stream ended without `completed`");
        Ok(self)
    }

    /// Reads until the first tokens are there.
    pub async fn begin(stream: &mut Streaming<GenerateResponse>) -> Result<Self> {
        let mut answer = Self::default();
        while answer.tokens.is_empty() {
            answer.add(stream.message().await?.context("the stream ended before its first token")?)?;
        }
        Ok(answer)
    }
}

/// Generates to the end.
pub async fn generate(client: &mut InferenceClient<Channel>, request: GenerateRequest) -> Result<GenerationResult> {
    let mut stream = client.generate(request).await?.into_inner();
    GenerationResult::default().read(&mut stream).await
}
