//! Streams a completion from a router:
//! `cargo run -p inflight-proto --example generate -- "Once upon a time" [http://HOST:PORT]`.

use std::io::Write as _;
use std::time::Duration;

use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::{GenerateRequest, SamplingParams, StopConditions};
use tonic::Request;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let prompt = arguments.next().unwrap_or_else(|| "Once upon a time".to_owned());
    let endpoint = arguments.next().unwrap_or_else(|| "http://127.0.0.1:8650".to_owned());

    let mut client = InferenceClient::connect(endpoint).await?;
    let mut request = Request::new(GenerateRequest {
        input: Some(Input::Text(prompt)),
        sampling: Some(SamplingParams { temperature: Some(0.8), seed: Some(7), ..Default::default() }),
        stop: Some(StopConditions { max_tokens: Some(64), ..Default::default() }),
        ..Default::default()
    });
    // The deadline travels with the call; dropping the stream cancels the request.
    request.set_timeout(Duration::from_secs(30));

    let mut responses = client.generate(request).await?.into_inner();
    while let Some(response) = responses.message().await? {
        match response.event {
            Some(Event::Delta(delta)) => {
                print!("{}", delta.text);
                std::io::stdout().flush()?;
            }
            Some(Event::Completed(completed)) => {
                let usage = completed.usage.unwrap_or_default();
                println!("\n{} prompt tokens, {} generated", usage.prompt_tokens, usage.completion_tokens);
            }
            // The start, the end of each choice, and events that a newer router adds.
            _ => {}
        }
    }
    Ok(())
}
