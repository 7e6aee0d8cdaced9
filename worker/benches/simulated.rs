//! CPU cost of a worker on a simulated device: `cargo bench -p inflight-worker --bench simulated --
//! [SEQUENCES [SECONDS]]`. One session keeps all sequences busy; CPU time is that of the engine thread and
//! the serving threads, without the client.

use std::time::{Duration, Instant};

use inflight_proto::v1;
use inflight_proto::v1::session_request::Message as Request;
use inflight_proto::v1::session_response::Message as Response;
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_worker::{ComputeOptions, Options, Worker};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;

type BenchResult<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const OUTPUT: u32 = 400;

fn submit(request: u64) -> v1::SessionRequest {
    let prompt = (0..64).map(|at| 300 + ((request as u32).wrapping_mul(31) + at * 7) % 400).collect();
    let submit = v1::Submit {
        submission_id: request,
        attempt: 1,
        request_id: format!("request-{request}"),
        prompt_token_ids: prompt,
        sampling: Some(v1::SamplingParams {
            seed: Some(request),
            n: Some(1),
            ..v1::SamplingParams::default()
        }),
        stop: Some(v1::StopConditions {
            max_tokens: Some(OUTPUT),
            ignore_eos: true,
            ..v1::StopConditions::default()
        }),
        tenant: "a".to_owned(),
        weight: 1.0,
        ..v1::Submit::default()
    };
    v1::SessionRequest { message: Some(Request::Submit(submit)) }
}

/// CPU seconds of this process's threads with one of these names.
fn cpu_seconds(names: &[&str]) -> BenchResult<f64> {
    let mut ticks = 0;
    for task in std::fs::read_dir("/proc/self/task")? {
        let stat = std::fs::read_to_string(task?.path().join("stat"))?;
        let (name, rest) = stat.split_once('(').and_then(|(_, rest)| rest.rsplit_once(") ")).ok_or("stat")?;
        if names.contains(&name) {
            // Fields 14 and 15 of the line: user and system time.
            ticks += rest.split(' ').skip(11).take(2).map(|field| field.parse().unwrap_or(0)).sum::<u64>();
        }
    }
    Ok(ticks as f64 / 100.0)
}

/// Opens a session, keeps `sequences` requests in flight, and prints the rates measured over `seconds`.
async fn drive(address: String, sequences: u64, seconds: f64) -> BenchResult<()> {
    let mut client =
        WorkerClient::connect(format!("http://{address}")).await?.max_decoding_message_size(64 << 20);
    let (commands, receiver) = mpsc::unbounded_channel();
    let open = v1::SessionOpen {
        protocol_version: inflight_proto::PROTOCOL_VERSION,
        router_id: "example".to_owned(),
        incarnation: String::new(),
    };
    commands.send(v1::SessionRequest { message: Some(Request::Open(open)) })?;
    let mut updates = client.session(UnboundedReceiverStream::new(receiver)).await?.into_inner();
    (0..sequences).try_for_each(|request| commands.send(submit(request)).map_err(Box::new))?;
    let (mut next, mut tokens, mut messages) = (sequences, 0usize, 0u64);
    let names = ["engine", "serve"];
    let mut begun: Option<(Instant, f64, usize, u64)> = None;
    loop {
        let message = updates.message().await?.and_then(|response| response.message).ok_or("it ended")?;
        let Response::Update(update) = message else { continue };
        messages += 1;
        for sequence in update.sequences {
            tokens += sequence.token_ids.len();
            if sequence.finish_reason != 0 {
                commands.send(submit(next))?;
                next += 1;
            }
        }
        match begun {
            // Warm-up: buffers grow during the first round.
            None if tokens > sequences as usize * OUTPUT as usize / 2 => {
                begun = Some((Instant::now(), cpu_seconds(&names)?, tokens, messages));
            }
            Some((at, cpu, before, sent)) if at.elapsed().as_secs_f64() >= seconds => {
                let (engine, serve) = (cpu_seconds(&["engine"])?, cpu_seconds(&["serve"])?);
                let (wall, cpu) = (at.elapsed().as_secs_f64(), engine + serve - cpu);
                let made = (tokens - before) as f64;
                println!(
                    "{sequences} sequences: {:.0} tokens/s, {:.0} messages/s, {:.2} cores, {:.0} tokens per CPU-second",
                    made / wall,
                    (messages - sent) as f64 / wall,
                    cpu / wall,
                    made / cpu
                );
                return Ok(());
            }
            _ => {}
        }
    }
}

fn main() -> BenchResult<()> {
    // `cargo bench` appends `--bench`.
    let arguments: Vec<f64> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .map(|text| text.parse())
        .collect::<Result<_, _>>()?;
    let argument = |index: usize, default: f64| arguments.get(index).copied().unwrap_or(default);
    let (sequences, seconds) = (argument(0, 256.0) as u32, argument(1, 4.0));
    let options = Options {
        listen: ([127, 0, 0, 1], 0).into(),
        compute: ComputeOptions {
            device: "sim:flat".parse()?,
            fingerprint_cache: Some("off".into()),
            max_sequences: sequences,
            max_batch_tokens: 2 * sequences.max(512),
            ..ComputeOptions::default()
        },
        ..Options::default()
    };
    let worker = Worker::load(&options, &|_, _| {})?;
    let address = worker.address().to_string();
    let serving = tokio::runtime::Builder::new_multi_thread().thread_name("serve").enable_all().build()?;
    let drain = CancellationToken::new();
    let served = serving.spawn(worker.serve(drain.clone()));
    let driving = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    driving.block_on(drive(address, sequences.into(), seconds))?;
    drain.cancel();
    serving.block_on(async { tokio::time::timeout(Duration::from_secs(10), served).await })???;
    Ok(())
}
