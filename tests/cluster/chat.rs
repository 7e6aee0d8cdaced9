//! `inflight chat` with messages from a pipe.

use anyhow::{Context, Result, ensure};
use inflight_harness::{LocalCluster, run};
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::{Chat, ChatMessage, GenerateRequest, SamplingParams, StopConditions};

use crate::program;
use crate::requests::{generate, model};

const MAX_TOKENS: u32 = 12;

/// Returns the request that the command sends for these messages.
fn request(messages: &[(&str, &str)]) -> GenerateRequest {
    let message = |(role, content): &(&str, &str)| ChatMessage {
        role: (*role).to_owned(),
        content: (*content).to_owned(),
        ..ChatMessage::default()
    };
    GenerateRequest {
        input: Some(Input::Chat(Chat {
            messages: messages.iter().map(message).collect(),
            ..Default::default()
        })),
        sampling: Some(SamplingParams { temperature: Some(0.0), ..SamplingParams::default() }),
        stop: Some(StopConditions { max_tokens: Some(MAX_TOKENS), ..StopConditions::default() }),
        ..GenerateRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_keeps_its_history_until_it_is_reset() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--workers=1"]).await?;
    let mut client = cluster.client().await?;
    let system = ("system", "Answer in one word.");
    let first = generate(&mut client, request(&[system, ("user", "Hello")])).await?.text;
    let messages = [system, ("user", "Hello"), ("assistant", &first), ("user", "And then?")];
    let second = generate(&mut client, request(&messages)).await?.text;
    ensure!(!first.is_empty() && first != second, "the answers tell nothing: {first:?}, {second:?}");
    let max_tokens = format!("--max-tokens={MAX_TOKENS}");
    let flags = [
        "chat",
        "--endpoint",
        &cluster.endpoint,
        "--temperature=0",
        &max_tokens,
        "--system=Answer in one word.",
    ];

    let typed = "Hello\n\n/help\nAnd then?\n/reset\nHello\n/exit\nnot sent\n";
    let finished = run(program(), &flags, typed).await?;
    ensure!(finished.code == Some(0), "{finished:?}");
    ensure!(finished.stdout == format!("{first}\n{second}\n{first}\n"), "{finished:?}, expected {second:?}");
    ensure!(finished.stderr.contains("/reset  forgets"), "{finished:?}");

    // Beyond the context the answer fails, and what was said before it stays.
    let context = model(&mut client).await?.context_tokens as usize;
    let long = "word ".repeat(context);
    let typed = format!("{long}\nHello\n{long}\nAnd then?\n/rest\n");
    let failed = run(program(), &flags, &typed).await?;
    ensure!(failed.code == Some(4), "{failed:?}");
    ensure!(failed.stdout == format!("{first}\n{second}\n"), "{}", failed.stdout);
    let errors: Vec<&str> = failed.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    let [alone, outgrown, unknown] = errors[..] else { anyhow::bail!("{errors:?}") };
    ensure!(alone.contains("too long") && !alone.contains("/reset"), "{alone}");
    ensure!(outgrown.contains("outgrown the model's context; /reset"), "{outgrown}");
    ensure!(unknown.contains("/rest is no command"), "{unknown}");

    let unknown = ["chat", "--endpoint", &cluster.endpoint, "--model=other"];
    let refused = run(program(), &unknown, "Hello\n").await?;
    let served = model(&mut client).await.context("the model")?.name;
    ensure!(refused.code == Some(4) && refused.stderr.contains(&served), "{refused:?}");
    Ok(())
}
