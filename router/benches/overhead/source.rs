//! Token source: a worker without computation.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use inflight_proto::v1;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_server::{Inference, InferenceServer};
use inflight_proto::v1::session_response::Message;
use inflight_proto::v1::worker_server::WorkerServer;
use inflight_scripted::{Command, Script, ScriptedSession, WorkerProfile, WorkerService, sequence};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep_until};
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

type Boxed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Token source that steps like a worker: all requests of one pace get their next token at the same moment,
/// and a router receives them in one update. The seed of a request is its step time in microseconds; with 0
/// all tokens are sent at once, with `IDLE` the first one is never sent.
#[derive(Clone)]
struct Source {
    epoch: Instant,
}

/// Seed of a request that gets no tokens.
pub const IDLE: u64 = u64::MAX;
/// Token id of "a".
const TOKEN: u32 = 64;

struct Running {
    submit: v1::Submit,
    sent: u32,
    most: u32,
}

/// Requests of one pace.
struct Batch {
    pace: Duration,
    /// End of the current step.
    next: Instant,
    running: Vec<Running>,
}

impl Batch {
    /// Runs a step: one token per request, in one update.
    fn step(&mut self) -> Vec<v1::SequenceUpdate> {
        self.next += self.pace;
        let mut sequences = Vec::with_capacity(self.running.len());
        self.running.retain_mut(|one| {
            let tokens = if self.pace.is_zero() { one.most } else { 1 };
            one.sent += tokens;
            let ends = one.sent == one.most;
            let reason = if ends { v1::FinishReason::Length } else { v1::FinishReason::Unspecified };
            sequences.push(sequence(&one.submit, 0, &vec![TOKEN; tokens as usize], reason));
            !ends
        });
        sequences
    }
}

fn pace(seed: u64) -> Option<Duration> {
    (seed != IDLE).then(|| Duration::from_micros(seed))
}

impl Source {
    /// Returns the end of the current step.
    fn next_step(&self, pace: Duration, now: Instant) -> Instant {
        if pace.is_zero() {
            return now;
        }
        let steps = (now - self.epoch).as_nanos() / pace.as_nanos() + 1;
        self.epoch + Duration::from_nanos((steps * pace.as_nanos()) as u64)
    }
}

impl Source {
    /// Runs the requests of a router.
    async fn run(self, mut session: ScriptedSession) {
        let grant = Some(v1::Grant { sequences: 1 << 16, kv_blocks: 1 << 24, priority_sequences: 0 });
        let mut batches: BTreeMap<Duration, Batch> = BTreeMap::new();
        let mut idle: BTreeMap<u64, v1::Submit> = BTreeMap::new();
        let mut heartbeat = Instant::now();
        loop {
            let steps = batches.values().map(|batch| batch.next).min();
            let wake = steps.map_or(heartbeat, |next| next.min(heartbeat));
            let command = tokio::select! {
                biased;
                () = sleep_until(wake) => None,
                command = session.next() => match command {
                    Some(command) => Some(command),
                    None => return,
                },
            };
            let now = Instant::now();
            let mut sequences = Vec::new();
            match command {
                Some(Command::Submit(submit)) => {
                    let seed = submit.sampling.as_ref().and_then(|s| s.seed).unwrap_or(0);
                    let most = submit.stop.as_ref().and_then(|stop| stop.max_tokens).unwrap_or(1);
                    match pace(seed) {
                        Some(pace) => {
                            let next = self.next_step(pace, now);
                            let batch = Batch { pace, next, running: Vec::new() };
                            let running = &mut batches.entry(pace).or_insert(batch).running;
                            running.push(Running { submit, sent: 0, most });
                        }
                        None => drop(idle.insert(submit.submission_id, submit)),
                    }
                }
                Some(Command::Cancel(cancel)) => {
                    let idle = idle.remove(&cancel.submission_id);
                    let mut running = batches.values_mut().flat_map(|batch| {
                        batch.running.extract_if(.., |one| one.submit.submission_id == cancel.submission_id)
                    });
                    if let Some(submit) = idle.or_else(|| running.next().map(|one| one.submit)) {
                        sequences.push(sequence(&submit, 0, &[], v1::FinishReason::Cancelled));
                    }
                }
                _ => {}
            }
            // A late step is still a step: its tokens do not share an update with the next one's.
            let mut late = Vec::new();
            for batch in batches.values_mut() {
                while batch.next <= now && !batch.running.is_empty() {
                    late.push(batch.step());
                }
            }
            batches.retain(|_, batch| !batch.running.is_empty());
            if now >= heartbeat || !sequences.is_empty() {
                late.push(sequences);
            }
            for sequences in late {
                heartbeat = now + Duration::from_millis(500);
                let update = v1::Update { grant, sequences, ..Default::default() };
                if !session.send(Message::Update(update)) {
                    return;
                }
            }
        }
    }
}

/// The tokens as text, one message each, for the proxy.
#[tonic::async_trait]
impl Inference for Source {
    type GenerateStream = Boxed<v1::GenerateResponse>;

    async fn generate(
        &self,
        request: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        let pace = pace(request.sampling.as_ref().and_then(|s| s.seed).unwrap_or(0));
        let most = request.stop.as_ref().and_then(|stop| stop.max_tokens).unwrap_or(1);
        let first = self.next_step(pace.unwrap_or_default(), Instant::now());
        let event = |event| Ok(v1::GenerateResponse { event: Some(event) });
        let tokens = futures::stream::iter(1..=most).then(move |nth| async move {
            match pace {
                None => std::future::pending::<()>().await,
                Some(pace) if pace.is_zero() => {}
                Some(pace) => sleep_until(first + pace * (nth - 1)).await,
            }
            event(Event::Delta(v1::GenerationDelta { text: "a".to_owned(), ..Default::default() }))
        });
        let usage = v1::Usage { prompt_tokens: 1, completion_tokens: most, ..v1::Usage::default() };
        let end =
            event(Event::Completed(v1::GenerationCompleted { usage: Some(usage), ..Default::default() }));
        let started = event(Event::Started(v1::GenerationStarted::default()));
        let stream = futures::stream::iter([started]).chain(tokens).chain(futures::stream::iter([end]));
        Ok(Response::new(Box::pin(stream)))
    }

    async fn generate_unary(
        &self,
        _: Request<v1::GenerateRequest>,
    ) -> Result<Response<v1::GenerateUnaryResponse>, Status> {
        Err(Status::unimplemented("only streams are measured"))
    }

    async fn list_models(
        &self,
        _: Request<v1::ListModelsRequest>,
    ) -> Result<Response<v1::ListModelsResponse>, Status> {
        Ok(Response::new(v1::ListModelsResponse::default()))
    }

    async fn tokenize(
        &self,
        _: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        Err(Status::unimplemented("nothing to tokenize with"))
    }
}

pub async fn serve() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap());
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let source = Source { epoch: Instant::now() };
    let (worker, mut sessions) = WorkerService::new(script());
    tokio::spawn({
        let source = source.clone();
        async move {
            while let Some(session) = sessions.next().await {
                tokio::spawn(source.clone().run(session));
            }
        }
    });
    Server::builder()
        .add_service(WorkerServer::new(worker))
        .add_service(InferenceServer::new(source))
        .serve_with_incoming(incoming)
        .await
        .unwrap();
}

/// A worker that accepts every submission.
fn script() -> Script {
    let profile = WorkerProfile {
        model: "source",
        fingerprint: "source",
        heartbeat_interval_ms: 1000,
        ..WorkerProfile::default()
    };
    let mut script = Script::from(profile);
    script.hello.limits = Some(v1::WorkerLimits {
        vocab_size: 285,
        context_tokens: 1 << 16,
        block_tokens: 16,
        kv_blocks: 1 << 24,
        max_sequences: 1 << 16,
        ..Default::default()
    });
    script
}
