//! Structured outputs while all workers are killed: with drafts, streams that are cut inside a string of JSON, inside
//! reasoning or inside the arguments of a call equal those of an undisturbed cluster without drafts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use inflight_fixtures::is_thorough;
use inflight_harness::{RoleProcess, exclusive, scrape};
use inflight_proto::v1::constraint::Grammar;
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::{
    Chat, ChatMessage, Constraint, FinishReason, GenerateRequest, SamplingParams, StopConditions, Tool,
    ToolCallDelta, ToolChoice, ToolUse,
};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::transport::Channel;

use crate::program;
use crate::storm::{all_connected, flags, idle, worker_flags};

const WORKERS: usize = 3;
/// Streams of a thorough run, and of others.
const STREAMS: [usize; 2] = [200, 64];
const CONNECTIONS: usize = 20;
/// Streams that are repeated one by one at the end.
const ALONE: usize = 12;
/// Repetitions of all streams, at most.
const ROUNDS_MAX: usize = 6;
/// Streams that must have been cut at each place, likewise.
const CUT_MIN: [usize; 2] = [20, 8];
/// Minimum messages with tokens that each open stream receives between two kills; the first can have been sent before the
/// earlier kill.
const PROGRESS_MIN: u8 = 3;
/// Places at which a stream can be cut, in the order of [`Place`].
const PLACES: [&str; 3] = ["a string of JSON", "reasoning", "arguments of a call"];

const STORY: &str = r#"{"type": "object", "additionalProperties": false, "required": ["title", "scenes"], "properties": {
    "title": {"type": "string", "minLength": 30, "maxLength": 120},
    "scenes": {"type": "array", "minItems": 2, "maxItems": 4, "items": {"type": "object", "additionalProperties": false,
        "required": ["place", "text"], "properties": {"place": {"enum": ["forest", "house"]},
            "text": {"type": "string", "minLength": 40, "maxLength": 200}}}}}}"#;

/// Where a stream is.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(u8)]
enum Place {
    Text,
    Reasoning,
    Arguments,
    /// Before the first token, or outside strings, reasoning and arguments.
    Elsewhere,
    Ended,
}

/// Everything of a stream that must not depend on where it runs.
#[derive(Debug, Default, PartialEq)]
struct Output {
    text: String,
    reasoning: String,
    /// Name and arguments of each call.
    calls: Vec<(String, String)>,
    tokens: Vec<u32>,
    end: Option<FinishReason>,
    /// Prompt tokens, completion tokens and reasoning tokens.
    usage: Option<(u32, u32, u32)>,
}

/// Whether a text that begins a JSON text ends inside a string.
fn is_in_string(json: &str) -> bool {
    let (mut inside, mut escaped) = (false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if inside => escaped = true,
            b'"' => inside = !inside,
            _ => {}
        }
    }
    inside
}

impl Output {
    fn extend(&mut self, text: &str, reasoning: &str, calls: Vec<ToolCallDelta>) -> Result<()> {
        self.text.push_str(text);
        self.reasoning.push_str(reasoning);
        for call in calls {
            let at = call.index as usize;
            if at == self.calls.len() {
                ensure!(!call.id.is_empty(), "a call has no id");
                self.calls.push((call.name, String::new()));
            }
            self.calls.get_mut(at).context("a call was left out")?.1.push_str(&call.arguments);
        }
        Ok(())
    }

    /// Adds an event and returns its number of output tokens.
    fn add(&mut self, event: Event) -> Result<u64> {
        ensure!(self.usage.is_none(), "an event after `completed`: {event:?}");
        match event {
            Event::Delta(delta) => {
                self.extend(&delta.text, &delta.reasoning, delta.tool_calls)?;
                let tokens = delta.token_ids.len() as u64;
                self.tokens.extend(delta.token_ids);
                return Ok(tokens);
            }
            Event::Finished(end) => {
                self.end = Some(end.reason());
                self.extend(&end.text, &end.reasoning, end.tool_calls)?;
            }
            Event::Completed(completed) => {
                let usage = completed.usage.context("no usage")?;
                self.usage = Some((usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens));
            }
            Event::Started(_) => {}
            other => anyhow::bail!("unexpected: {other:?}"),
        }
        Ok(0)
    }

    fn place(&self) -> Place {
        match (self.end, self.calls.last()) {
            (Some(_), _) => Place::Ended,
            (None, Some((_, arguments))) if is_in_string(arguments) => Place::Arguments,
            (None, None) if is_in_string(&self.text) => Place::Text,
            (None, None) if self.text.is_empty() && !self.reasoning.is_empty() => Place::Reasoning,
            (None, _) => Place::Elsewhere,
        }
    }
}

/// Checks that an output that ended because its grammar was complete is valid JSON to its last brace.
fn check_whole(request: &GenerateRequest, output: &Output) -> Result<()> {
    if output.end != Some(FinishReason::Stop) {
        return Ok(());
    }
    for (_, arguments) in &output.calls {
        serde_json::from_str::<Value>(arguments).with_context(|| format!("arguments: {output:?}"))?;
        ensure!(output.text.is_empty(), "a call has text beside it: {output:?}");
    }
    let constraint = request.sampling.as_ref().and_then(|sampling| sampling.constraint.as_ref());
    if let Some(Grammar::JsonSchema(_)) = constraint.and_then(|constraint| constraint.grammar.as_ref()) {
        serde_json::from_str::<Value>(&output.text).with_context(|| format!("{output:?}"))?;
    }
    Ok(())
}

/// Draws a request for JSON under a schema, for a required call, or for reasoning with an answer or a call behind it.
fn request(random: &mut StdRng) -> GenerateRequest {
    let tool = |name: &str, parameters: &str| Tool {
        name: name.to_owned(),
        parameters: parameters.to_owned(),
        ..Tool::default()
    };
    let tools = vec![tool("save_story", STORY), tool("stop", r#"{"type": "object", "properties": {}}"#)];
    let schema = || Grammar::JsonSchema(STORY.to_owned());
    let thought = r"<think>[a-z ,.']{80,300}</think>\n";
    let call = r#"<tool_call>\n\{"name": "save_story", "arguments": \{"title": "[A-Za-z ,.]{80,200}"\}\}\n</tool_call>"#;
    let (grammar, choice) = match random.random_range(0..4) {
        0 => (Some(schema()), ToolChoice::None),
        1 => (None, ToolChoice::Required),
        2 => (Some(Grammar::Regex(format!("{thought}[A-Z][a-z ]{{20,100}}[.]"))), ToolChoice::None),
        _ => (Some(Grammar::Regex(format!("{thought}{call}"))), ToolChoice::Unspecified),
    };
    let name = if choice == ToolChoice::Required { "save_story".to_owned() } else { String::new() };
    let content = "Once upon a time there was a cat. ".repeat(random.random_range(1..5));
    let message = ChatMessage { role: "user".to_owned(), content, ..ChatMessage::default() };
    let choice = if name.is_empty() { choice } else { ToolChoice::Unspecified };
    GenerateRequest {
        input: Some(Input::Chat(Chat { messages: vec![message], ..Default::default() })),
        sampling: Some(SamplingParams {
            temperature: Some(if random.random_bool(0.3) { 0.0 } else { random.random_range(0.3..1.2) }),
            top_p: Some(random.random_range(0.7..=1.0)),
            frequency_penalty: Some(random.random_range(0.0..0.5)),
            seed: Some(random.random()),
            constraint: grammar.map(|grammar| Constraint { grammar: Some(grammar), ..Constraint::default() }),
            ..SamplingParams::default()
        }),
        stop: Some(StopConditions { max_tokens: Some(300), ..StopConditions::default() }),
        return_token_ids: true,
        tools: Some(ToolUse { tools, choice: choice.into(), name, single_call: false }),
        parse_output: true,
        ..GenerateRequest::default()
    }
}

/// Requests of a run, and the place of each of their streams.
struct Requests {
    all: Vec<GenerateRequest>,
    places: Vec<AtomicU8>,
    /// Messages with tokens of each stream since the last kill; [`PROGRESS_MIN`] if it has ended.
    progress: Vec<AtomicU8>,
}

fn stream_count() -> usize {
    STREAMS[usize::from(!is_thorough())]
}

fn cut_min() -> usize {
    CUT_MIN[usize::from(!is_thorough())]
}

impl Requests {
    fn draw(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let all: Vec<_> = (0..stream_count()).map(|_| request(&mut random)).collect();
        let places = (0..stream_count()).map(|_| AtomicU8::new(Place::Elsewhere as u8)).collect();
        Self { all, places, progress: (0..stream_count()).map(|_| AtomicU8::new(0)).collect() }
    }

    /// Reads a stream to its end; sends the number of tokens of each message to `received`.
    async fn read(
        &self,
        nth: usize,
        mut client: InferenceClient<Channel>,
        received: &mpsc::UnboundedSender<u64>,
    ) -> Result<Output> {
        let mut stream = client.generate(self.all[nth].clone()).await?.into_inner();
        let mut output = Output::default();
        while let Some(message) = stream.message().await? {
            let tokens = output.add(message.event.context("an empty message")?)?;
            self.places[nth].store(output.place() as u8, Ordering::Relaxed);
            if output.usage.is_some() {
                self.progress[nth].store(PROGRESS_MIN, Ordering::Relaxed);
            } else if tokens > 0 && self.progress[nth].load(Ordering::Relaxed) < PROGRESS_MIN {
                self.progress[nth].fetch_add(1, Ordering::Relaxed);
            }
            // The receiver is gone once no more workers are killed.
            let _ = received.send(tokens);
        }
        ensure!(output.usage.is_some(), "the stream ended without `completed`");
        Ok(output)
    }

    /// Whether every open stream has progressed since the last kill. The router quarantines requests that lose two workers
    /// in a row without a token, and fails them if the next worker is lost, too.
    fn all_progressed(&self) -> bool {
        self.progress.iter().all(|progress| progress.load(Ordering::Relaxed) >= PROGRESS_MIN)
    }

    /// Begins to wait for progress, of all streams or of those that have not ended.
    fn await_progress(&self, of_all: bool) {
        for (place, progress) in self.places.iter().zip(&self.progress) {
            let open = of_all || place.load(Ordering::Relaxed) != Place::Ended as u8;
            progress.store(if open { 0 } else { PROGRESS_MIN }, Ordering::Relaxed);
        }
    }

    /// Number of streams at each place.
    fn count(&self) -> [usize; PLACES.len()] {
        let mut counts = [0; PLACES.len()];
        for place in &self.places {
            if let Some(count) = counts.get_mut(usize::from(place.load(Ordering::Relaxed))) {
                *count += 1;
            }
        }
        counts
    }
}

/// Workers with a router.
struct Cluster {
    workers: Vec<RoleProcess>,
    router: RoleProcess,
    clients: Vec<InferenceClient<Channel>>,
}

impl Cluster {
    async fn start(workers: usize, drafts: &str) -> Result<Self> {
        let worker = [worker_flags(), flags(&[&format!("--drafts={drafts}")])].concat();
        let starting = (0..workers).map(|_| RoleProcess::start(program().to_owned(), "worker", &worker));
        let workers = try_join_all(starting).await?;
        let addresses: Vec<String> = workers.iter().map(|worker| worker.address.to_string()).collect();
        let router = flags(&[
            &format!("--workers={}", addresses.join(",")),
            "--reconnect-backoff-max=500ms",
            "--connect-timeout=2s",
            "--no-worker-timeout=60s",
            "--tool-call-format=hermes",
            "--reasoning-format=think",
        ]);
        let router = RoleProcess::start(program().to_owned(), "router", &router).await?;
        all_connected(&router).await?;
        let clients = (0..CONNECTIONS).map(|_| router.client()).collect::<Result<_>>()?;
        Ok(Self { workers, router, clients })
    }

    fn client(&self, nth: usize) -> InferenceClient<Channel> {
        self.clients[nth % CONNECTIONS].clone()
    }

    /// Kills all workers at once, so that every stream that has not ended is cut.
    async fn kill_workers(&mut self) -> Result<()> {
        for worker in &mut self.workers {
            worker.signal(libc::SIGKILL)?;
        }
        try_join_all(self.workers.iter_mut().map(async |worker| {
            worker.wait().await?;
            worker.restart().await
        }))
        .await?;
        Ok(())
    }

    async fn drafts(&self) -> Result<[f64; 2]> {
        let mut sums = [0.0; 2];
        for worker in &self.workers {
            let samples = scrape(worker.metrics).await?;
            sums[0] += samples.total("inflight_worker_drafted_tokens_total")?;
            sums[1] += samples.total("inflight_worker_accepted_drafts_total")?;
        }
        Ok(sums)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn structured_streams_with_drafts_that_are_cut_anywhere_equal_undisturbed_ones_without() -> Result<()> {
    let seed =
        std::env::var("INFLIGHT_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(rand::random);
    failover(seed).await.with_context(|| format!("INFLIGHT_TEST_SEED={seed} repeats the requests"))
}

async fn failover(seed: u64) -> Result<()> {
    let _exclusive = exclusive().await;
    let requests = Arc::new(Requests::draw(seed));
    let undisturbed = {
        let cluster = Cluster::start(1, "off").await?;
        let (ignored, _) = mpsc::unbounded_channel();
        let reads = (0..stream_count()).map(async |nth| {
            let output = requests.read(nth, cluster.client(nth), &ignored).await;
            let output = output.with_context(|| format!("request {nth}: {:?}", requests.all[nth]))?;
            check_whole(&requests.all[nth], &output)?;
            anyhow::Ok(output)
        });
        Arc::new(try_join_all(reads).await?)
    };
    let mut cluster = Cluster::start(WORKERS, "prompt-lookup").await?;
    let mut random = StdRng::seed_from_u64(seed ^ 1);
    let (mut cut, mut kills, mut drafts) = ([0; PLACES.len()], 0, [0.0; 2]);
    for _ in 0..ROUNDS_MAX {
        let (sender, mut received) = mpsc::unbounded_channel();
        let mut streams = JoinSet::new();
        requests.await_progress(true);
        for nth in 0..stream_count() {
            let (requests, undisturbed) = (Arc::clone(&requests), Arc::clone(&undisturbed));
            let (client, sender) = (cluster.client(nth), sender.clone());
            streams.spawn(async move {
                let output = requests.read(nth, client, &sender).await?;
                let (request, expected) = (&requests.all[nth], &undisturbed[nth]);
                ensure!(output == *expected, "{request:?}: expected {expected:?}, got {output:?}");
                Ok(())
            });
        }
        drop(sender);
        let mut left: u64 = random.random_range(stream_count() as u64 * 10..stream_count() as u64 * 50);
        while let Some(tokens) = received.recv().await {
            left -= tokens.min(left);
            if left > 0 || !requests.all_progressed() {
                continue;
            }
            for (sum, count) in cut.iter_mut().zip(requests.count()) {
                *sum += count;
            }
            for (sum, count) in drafts.iter_mut().zip(cluster.drafts().await?) {
                *sum += count;
            }
            cluster.kill_workers().await?;
            kills += 1;
            // What arrived meanwhile does not count.
            while received.try_recv().is_ok() {}
            requests.await_progress(false);
            left = random.random_range(stream_count() as u64 * 10..stream_count() as u64 * 50);
        }
        while let Some(ended) = streams.join_next().await {
            ended??;
        }
        if cut.iter().all(|count| *count >= cut_min()) {
            break;
        }
    }
    // One stream alone, as drafts are worth most then.
    let (ignored, _) = mpsc::unbounded_channel();
    for (nth, expected) in undisturbed.iter().enumerate().take(ALONE) {
        let output = requests.read(nth, cluster.client(nth), &ignored).await?;
        ensure!(output == *expected, "{:?}: expected {expected:?}, got {output:?}", requests.all[nth]);
    }
    for (sum, count) in drafts.iter_mut().zip(cluster.drafts().await?) {
        *sum += count;
    }
    report(&undisturbed, kills, cut, drafts);
    for (place, count) in PLACES.iter().zip(cut) {
        ensure!(count >= cut_min(), "only {count} streams were cut in {place}");
    }
    ensure!(drafts[1] > 0.0, "no draft was accepted");
    all_connected(&cluster.router).await?;
    idle(&cluster.workers, &cluster.router).await
}

/// Prints what was compared.
fn report(outputs: &[Output], kills: u32, cut: [usize; PLACES.len()], [drafted, accepted]: [f64; 2]) {
    let count = |kind: fn(&Output) -> bool| outputs.iter().filter(|output| kind(output)).count();
    println!(
        "{} requests: {} with reasoning, {} with calls, {} ended by their grammar; {kills} kills of all workers; cut \
         in {PLACES:?}: {cut:?} streams; {accepted} of {drafted} drafts accepted",
        outputs.len(),
        count(|output| !output.reasoning.is_empty()),
        count(|output| !output.calls.is_empty()),
        count(|output| output.end != Some(FinishReason::Length)),
    );
}
