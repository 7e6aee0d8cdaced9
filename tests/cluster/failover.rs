//! Streams with random sampling parameters and stop conditions on the real engine, while their workers are killed
//! at random points: each equals its undisturbed run in text, tokens, log probabilities, ends and usage.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use futures::future::try_join_all;
use inflight_fixtures::{Arch, BenchmarkShape, Checkpoint, Dtype, Mtp, TempDir, is_thorough};
use inflight_harness::{RoleProcess, exclusive, scrape};
use inflight_proto::v1::constraint::Grammar;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::{
    Constraint, FinishReason, GenerateRequest, JsonObject, SamplingParams, StopConditions, TokenLogprob,
    TokenSequence,
};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::transport::Channel;

use crate::program;
use crate::requests::{generate, sampled};
use crate::storm::{all_connected, flags, idle, worker_flags};

const WORKERS: usize = 3;
/// Streams of a thorough run, and of others.
const STREAMS: [usize; 2] = [64, 32];
const CONNECTIONS: usize = 8;
/// Streams that must have been moved to another worker, over all rounds, likewise.
const MOVED_MIN: [f64; 2] = [40.0, 20.0];
/// Repetitions of all streams, at most.
const ROUNDS_MAX: usize = 6;

/// Token id and the bits of its log probability.
type LogprobBits = (u32, u32);

/// Output of a choice.
#[derive(Debug, Default, PartialEq)]
struct ChoiceOutput {
    text: String,
    tokens: Vec<u32>,
    /// Chosen token, then the most probable ones, of each position.
    logprobs: Vec<Vec<LogprobBits>>,
    /// Finish reason, stop string and stop token.
    end: Option<(FinishReason, String, Option<u32>)>,
}

/// Everything of a stream that must not depend on where it runs.
#[derive(Debug, Default, PartialEq)]
struct StreamOutput {
    choices: BTreeMap<u32, ChoiceOutput>,
    /// Rank and log probabilities of each prompt token but the first.
    prompt: Vec<(u32, Vec<LogprobBits>)>,
    /// Prompt tokens and completion tokens.
    usage: Option<(u32, u32)>,
}

fn bits<'a>(
    chosen: Option<&'a TokenLogprob>,
    top: impl IntoIterator<Item = &'a TokenLogprob>,
) -> Vec<LogprobBits> {
    chosen.into_iter().chain(top).map(|one| (one.token_id, one.logprob.to_bits())).collect()
}

impl StreamOutput {
    /// Adds an event and returns its number of output tokens.
    fn add(&mut self, event: Event) -> Result<u64> {
        ensure!(self.usage.is_none(), "an event after `completed`: {event:?}");
        match event {
            Event::Started(_) => {}
            Event::Delta(delta) => {
                let choice = self.choices.entry(delta.choice).or_default();
                ensure!(choice.end.is_none(), "a delta after the end of choice {}", delta.choice);
                choice.text.push_str(&delta.text);
                let tokens = delta.token_ids.len() as u64;
                choice.tokens.extend(delta.token_ids);
                choice.logprobs.extend(delta.logprobs.iter().map(|one| bits(one.chosen.as_ref(), &one.top)));
                return Ok(tokens);
            }
            Event::PromptLogprobs(prompt) => {
                ensure!(prompt.first_position as usize == self.prompt.len() + 1, "positions are missing");
                let scored = prompt.positions.iter();
                self.prompt.extend(scored.map(|one| (one.rank, bits(one.token.as_ref(), &one.top))));
            }
            Event::Finished(end) => {
                let choice = self.choices.entry(end.choice).or_default();
                let reason = end.reason();
                let before = choice.end.replace((reason, end.stop_string, end.stop_token_id));
                ensure!(before.is_none(), "choice {} ended twice", end.choice);
            }
            Event::Completed(completed) => {
                let usage = completed.usage.context("no usage")?;
                self.usage = Some((usage.prompt_tokens, usage.completion_tokens));
            }
            Event::FingerprintChanged(changed) => bail!("workers of one build differ: {changed:?}"),
        }
        Ok(0)
    }
}

/// Reads a stream to its end; sends the number of tokens of each message to `received`.
async fn read(
    client: &mut InferenceClient<Channel>,
    request: GenerateRequest,
    received: &mpsc::UnboundedSender<u64>,
) -> Result<StreamOutput> {
    let mut stream = client.generate(request).await?.into_inner();
    let mut output = StreamOutput::default();
    while let Some(message) = stream.message().await? {
        let tokens = output.add(message.event.context("an empty message")?)?;
        // The receiver is gone once no more workers are killed.
        let _ = received.send(tokens);
    }
    ensure!(output.usage.is_some(), "the stream ended without `completed`");
    Ok(output)
}

/// Draws `Some` with the given probability.
fn maybe<T>(random: &mut StdRng, probability: f64, draw: impl FnOnce(&mut StdRng) -> T) -> Option<T> {
    random.random_bool(probability).then(|| draw(random))
}

/// Draws distinct tokens from `known`, at most `count`.
fn some_of(random: &mut StdRng, known: &[u32], count: usize) -> Vec<u32> {
    let mut drawn: Vec<u32> = (0..count).map(|_| known[random.random_range(0..known.len())]).collect();
    drawn.sort_unstable();
    drawn.dedup();
    drawn
}

/// Draws a grammar whose outputs are long.
fn grammar(random: &mut StdRng) -> Grammar {
    let schema = r#"{"type": "object", "additionalProperties": false, "required": ["title", "steps"], "properties": {
        "title": {"type": "string", "minLength": 20},
        "steps": {"type": "array", "minItems": 5, "items": {"type": "object", "additionalProperties": false,
            "required": ["n", "text"], "properties": {"n": {"type": "integer"}, "text": {"type": "string"}}}}}}"#;
    match random.random_range(0..4) {
        0 => Grammar::JsonObject(JsonObject {}),
        1 => Grammar::JsonSchema(schema.to_owned()),
        2 => Grammar::Regex("([A-Z][a-z]+( [a-z]+){3,9}[.!?] ){4,40}".to_owned()),
        _ => Grammar::Lark("start: line+\nline: /[a-z ]+/ \"=\" /[0-9]+/ \"\\n\"".to_owned()),
    }
}

/// Draws a request; its masks, biases and stop tokens are of `known`, tokens that the model generates.
fn request(random: &mut StdRng, known: &[u32]) -> GenerateRequest {
    const STOPS: [&str; 6] = [" the", "ing ", ".", "ed a", "!", " and "];
    const BAD_WORDS: [&str; 3] = ["cat", "happy", "was"];
    let max_tokens = random.random_range(60..300);
    let constraint = maybe(random, 0.4, grammar);
    // Either a few tokens only, or some tokens forbidden: a mask never excludes every token.
    let few = maybe(random, 0.15, |random| some_of(random, known, 40)).filter(|_| constraint.is_none());
    let allowed_token_ids = few.unwrap_or_default();
    let bad = allowed_token_ids.is_empty() && constraint.is_none() && random.random_bool(0.3);
    let sampling = SamplingParams {
        temperature: Some(if random.random_bool(0.2) { 0.0 } else { random.random_range(0.2..1.8) }),
        top_p: maybe(random, 0.4, |random| random.random_range(0.3..1.0)),
        top_k: maybe(random, 0.4, |random| random.random_range(1..100)),
        min_p: maybe(random, 0.3, |random| random.random_range(0.0..0.3)),
        presence_penalty: maybe(random, 0.4, |random| random.random_range(-1.0..1.5)),
        frequency_penalty: maybe(random, 0.4, |random| random.random_range(-0.5..1.5)),
        repetition_penalty: maybe(random, 0.4, |random| random.random_range(0.8..1.6)),
        logit_bias: maybe(random, 0.4, |random| {
            let biased = some_of(random, known, 6);
            biased.into_iter().map(|token| (token, random.random_range(-4.0..4.0))).collect()
        })
        .unwrap_or_default(),
        logprobs: maybe(random, 0.6, |random| random.random_range(0..=8)),
        seed: Some(random.random()),
        n: Some(random.random_range(1..=3)),
        allowed_token_ids,
        bad_words: BAD_WORDS
            .iter()
            .filter(|_| bad && random.random())
            .map(|word| (*word).to_owned())
            .collect(),
        bad_word_token_ids: (0..if bad { 3 } else { 0 })
            .map(|_| TokenSequence { token_ids: some_of(random, known, 2) })
            .collect(),
        prompt_logprobs: maybe(random, 0.25, |random| random.random_range(0..=5)),
        constraint: constraint.map(|grammar| Constraint { grammar: Some(grammar), ..Constraint::default() }),
    };
    let stop = StopConditions {
        max_tokens: Some(max_tokens),
        min_tokens: maybe(random, 0.5, |random| random.random_range(1..max_tokens)).unwrap_or(0),
        stop: STOPS.iter().filter(|_| random.random_bool(0.1)).map(|stop| (*stop).to_owned()).collect(),
        // Masked until `min_tokens`, they could be all that a grammar allows next.
        stop_token_ids: maybe(random, 0.4, |random| some_of(random, known, 2))
            .filter(|_| sampling.constraint.is_none())
            .unwrap_or_default(),
        ignore_eos: random.random_bool(0.7),
    };
    let prompt = "Once upon a time there was a cat. ".repeat(random.random_range(1..6));
    GenerateRequest { sampling: Some(sampling), stop: Some(stop), ..sampled(&prompt, max_tokens, 0) }
}

/// Adds a stop to every eighth request that its first choice reaches: in turn a string and a token from the middle of
/// what it generates without. Text of random weights seldom has any of the drawn ones.
async fn add_reached_stops(
    client: &mut InferenceClient<Channel>,
    requests: &mut [GenerateRequest],
) -> Result<()> {
    let (ignored, _) = mpsc::unbounded_channel();
    for (nth, request) in requests.iter_mut().step_by(8).enumerate() {
        request.stop.get_or_insert_default().min_tokens = 0;
        let output = read(client, request.clone(), &ignored).await?;
        let choice = output.choices.get(&0).context("no choice 0")?;
        let stop = request.stop.get_or_insert_default();
        if nth.is_multiple_of(2) {
            let characters: Vec<char> = choice.text.chars().collect();
            let mut pairs = characters[characters.len() / 2..].windows(2);
            let pair = pairs.find(|pair| pair.iter().all(char::is_ascii_graphic));
            stop.stop.extend(pair.map(String::from_iter));
        } else if request.sampling.as_ref().is_some_and(|sampling| sampling.constraint.is_none()) {
            stop.stop_token_ids.extend(choice.tokens.get(choice.tokens.len() / 2));
        }
    }
    Ok(())
}

/// Kills a random worker whenever the streams have received a random number of further tokens, until all have
/// ended; returns the number of kills.
async fn kill_at_random(
    workers: &mut [RoleProcess],
    received: &mut mpsc::UnboundedReceiver<u64>,
    random: &mut StdRng,
) -> Result<u32> {
    let (mut kills, mut left) = (0, random.random_range(1..1000));
    while let Some(tokens) = received.recv().await {
        left -= tokens.min(left);
        if left > 0 {
            continue;
        }
        let victim = &mut workers[random.random_range(0..WORKERS)];
        victim.signal(libc::SIGKILL)?;
        victim.wait().await?;
        victim.restart().await?;
        kills += 1;
        // What arrived meanwhile does not count.
        while received.try_recv().is_ok() {}
        left = random.random_range(1..1000);
    }
    Ok(kills)
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_any_parameters_that_are_cut_and_moved_equal_undisturbed_ones() -> Result<()> {
    let seed =
        std::env::var("INFLIGHT_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(rand::random);
    failover(seed, &[]).await.with_context(|| format!("INFLIGHT_TEST_SEED={seed} repeats the requests"))
}

/// Of a model whose layers with a window give up blocks while streams run.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "as long as that of recurrent layers; .ci/nightly runs it"]
async fn streams_of_a_model_with_windows_that_are_cut_and_moved_equal_undisturbed_ones() -> Result<()> {
    let folder = TempDir::new("inflight-windows")?;
    BenchmarkShape::MiniGemma.write(folder.path())?;
    let model = format!("--model={}", folder.path().display());
    let seed = rand::random();
    let windows = ["--block-tokens=4", "--max-context-tokens=2048"];
    failover(seed, &[&[model.as_str()], &windows[..]].concat()).await.with_context(|| format!("seed {seed}"))
}

/// Of a model with recurrent layers and an MTP layer, whose streams resume from snapshots of states where a worker has them.
#[tokio::test(flavor = "multi_thread")]
async fn streams_of_a_model_with_recurrent_layers_that_are_cut_and_moved_equal_undisturbed_ones() -> Result<()>
{
    let folder = TempDir::new("inflight-recurrent")?;
    let checkpoint = Checkpoint::new(Arch::Qwen35, Dtype::Bf16).with_mtp(Mtp::Random);
    checkpoint.write(folder.path())?;
    let path = folder.path().join("config.json");
    let mut config = checkpoint.config();
    config["max_position_embeddings"] = 2048.into();
    std::fs::write(&path, config.to_string())?;
    let seed = rand::random();
    failover(seed, &[&format!("--model={}", folder.path().display())])
        .await
        .with_context(|| format!("seed {seed}"))
}

async fn failover(seed: u64, model: &[&str]) -> Result<()> {
    let _exclusive = exclusive().await;
    let size = usize::from(!is_thorough());
    let (stream_count, moved_min) = (STREAMS[size], MOVED_MIN[size]);
    let mut workers = Vec::new();
    for nth in 0..WORKERS {
        // Streams move between workers with and without drafts.
        let drafts = if nth == 0 { "off" } else { "auto" };
        let worker = [worker_flags(), flags(&[&format!("--drafts={drafts}")]), flags(model)].concat();
        workers.push(RoleProcess::start(program().to_owned(), "worker", &worker).await?);
    }
    let addresses: Vec<String> = workers.iter().map(|worker| worker.address.to_string()).collect();
    let router = flags(&[
        &format!("--workers={}", addresses.join(",")),
        "--reconnect-backoff-max=500ms",
        "--connect-timeout=2s",
        "--no-worker-timeout=60s",
    ]);
    let router = RoleProcess::start(program().to_owned(), "router", &router).await?;
    all_connected(&router).await?;
    let clients: Vec<_> = (0..CONNECTIONS).map(|_| router.client()).collect::<Result<_>>()?;

    let mut random = StdRng::seed_from_u64(seed);
    let known = generate(&mut clients[0].clone(), sampled("Once upon a time", 300, seed)).await?.tokens;
    let mut requests: Vec<_> = (0..stream_count).map(|_| request(&mut random, &known)).collect();
    add_reached_stops(&mut clients[0].clone(), &mut requests).await?;
    let (ignored, _) = mpsc::unbounded_channel();
    let undisturbed = try_join_all(requests.iter().enumerate().map(|(nth, request)| {
        let (mut client, ignored) = (clients[nth % CONNECTIONS].clone(), &ignored);
        let output = async move { read(&mut client, request.clone(), ignored).await };
        async move { output.await.with_context(|| format!("request {nth}: {request:?}")) }
    }))
    .await?;
    idle(&workers, &router).await?;

    let (requests, undisturbed) = (Arc::new(requests), Arc::new(undisturbed));
    let (mut kills, mut moved) = (0, 0.0);
    for _ in 0..ROUNDS_MAX {
        let (sender, mut received) = mpsc::unbounded_channel();
        let mut streams = JoinSet::new();
        for nth in 0..stream_count {
            let (requests, undisturbed) = (Arc::clone(&requests), Arc::clone(&undisturbed));
            let (mut client, sender) = (clients[nth % CONNECTIONS].clone(), sender.clone());
            streams.spawn(async move {
                let (request, expected) = (&requests[nth], &undisturbed[nth]);
                let output = read(&mut client, request.clone(), &sender).await?;
                ensure!(output == *expected, "{request:?}: expected {expected:?}, got {output:?}");
                Ok(())
            });
        }
        drop(sender);
        kills += kill_at_random(&mut workers, &mut received, &mut random).await?;
        while let Some(ended) = streams.join_next().await {
            ended??;
        }
        all_connected(&router).await?;
        moved = scrape(router.metrics).await?.total("inflight_router_resubmissions_total")?;
        if moved >= moved_min {
            break;
        }
    }
    report(&undisturbed, kills, moved)?;
    ensure!(moved >= moved_min, "only {moved} streams were moved by {kills} kills");
    idle(&workers, &router).await
}

/// Prints how the undisturbed streams ended, and fails if a kind of end did not occur.
fn report(outputs: &[StreamOutput], kills: u32, moved: f64) -> Result<()> {
    let choices = || outputs.iter().flat_map(|output| output.choices.values());
    let ends = |kind: fn(&(FinishReason, String, Option<u32>)) -> bool| {
        choices().filter(|choice| choice.end.as_ref().is_some_and(kind)).count()
    };
    let occurred = [
        ("choices that end at a stop string", ends(|(_, stop, _)| !stop.is_empty())),
        ("choices that end at a stop token", ends(|(_, _, stop)| stop.is_some())),
        ("choices that end at their length", ends(|(reason, ..)| *reason == FinishReason::Length)),
        ("positions with log probabilities", choices().map(|choice| choice.logprobs.len()).sum()),
        ("prompt positions with log probabilities", outputs.iter().map(|output| output.prompt.len()).sum()),
    ];
    println!("{} choices; {occurred:?}; {moved} resubmissions after {kills} kills", choices().count());
    for (what, count) in occurred {
        ensure!(count > 0, "no {what}");
    }
    Ok(())
}
