//! `inflight diagnose`: prints the bottlenecks that workers report.

mod cluster;

use std::io::Write as _;

use inflight_net::SecretFile;
use inflight_proto::v1::worker_client::WorkerClient;
use inflight_proto::v1::{DiagnoseRequest, DiagnoseResponse, Finding, IterationSummary, Load};
use inflight_proto::{ProveError, prove};
use serde_json::json;

use crate::exit::{self, CommandError, Exit};
use crate::generate::connect;
use crate::tls::ClientArgs;
use crate::worker_secret::WorkerSecretArgs;
use inflight_options::{ServerAddress, Span};

/// Path of the method that reports bottlenecks.
const DIAGNOSE_PATH: &str = "/inflight.v1.Worker/Diagnose";

/// Router of `inflight up`.
const DEFAULT_ROUTER: &str = "127.0.0.1:8650";

/// Options of `inflight diagnose`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Addresses of workers, such as 127.0.0.1:8652, to diagnose without a router; one of a router does the same as --router
    #[arg(value_name = "ADDRESS")]
    pub workers: Vec<ServerAddress>,
    /// Address of a router: diagnoses it and all workers that it is connected to. It must run with --admin, and
    /// --api-key must be an administrator's [default, without addresses of workers: 127.0.0.1:8650]
    #[arg(long, value_name = "ADDRESS", conflicts_with = "workers", env = "INFLIGHT_DIAGNOSE_ROUTER")]
    pub router: Option<ServerAddress>,
    /// Also print this many of the last iterations
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub iterations: u32,
    /// Queueing time in a worker beyond which a request counts as late
    #[arg(long, value_name = "DURATION", default_value = "1s")]
    pub slo_queue: Span,
    /// Print one JSON object per worker and line
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub secret: WorkerSecretArgs,
    #[command(flatten)]
    pub connection: ClientArgs,
}

/// Queries each worker in turn and prints its diagnosis.
///
/// # Errors
/// A worker did not answer; the others are queried nevertheless.
pub async fn run(args: Args) -> Result<(), CommandError> {
    let objective = u64::try_from(args.slo_queue.0.as_micros()).unwrap_or(u64::MAX);
    let request = DiagnoseRequest {
        iterations: args.iterations,
        queue_objective_us: objective,
        ..DiagnoseRequest::default()
    };
    if let Some(router) = &args.router {
        return cluster::run(router, request, &args).await;
    }
    if args.workers.is_empty() {
        let router =
            DEFAULT_ROUTER.parse().map_err(|error: String| CommandError::new(Exit::Failure, error))?;
        return cluster::run(&router, request, &args).await;
    }
    let secret = args.secret.open()?;
    let secrets = secret.as_ref().map(SecretFile::secrets).unwrap_or_default();
    let mut outcome = Ok(());
    for worker in &args.workers {
        match diagnose(worker, request, &secrets).await {
            // The service of workers is unknown there, so it is a router.
            Err(DiagnoseError::Unimplemented) => match cluster::run(worker, request, &args).await {
                Ok(()) => {}
                Err(failure @ CommandError::Silent(_)) => outcome = Err(failure),
                Err(failure) => {
                    exit::print_stderr(format_args!("{worker} is no worker: {failure}"));
                    outcome = Err(CommandError::Silent(Exit::Unavailable));
                }
            },
            Ok(answer) => {
                let name = worker.to_string();
                let text = if args.json { json_line(&name, &answer) } else { render(&name, &answer) };
                if std::io::stdout().lock().write_all(text.as_bytes()).is_err() {
                    return Ok(()); // the pipe is closed
                }
            }
            Err(DiagnoseError::Failure(failure)) => {
                exit::print_stderr(format_args!("{worker}: {failure}"));
                outcome = Err(CommandError::Silent(Exit::Unavailable));
            }
        }
    }
    outcome
}

/// Why a worker reported no diagnosis.
enum DiagnoseError {
    /// The server has no service of workers.
    Unimplemented,
    /// Any other reason.
    Failure(CommandError),
}

impl From<tonic::Status> for DiagnoseError {
    fn from(status: tonic::Status) -> Self {
        if status.code() == tonic::Code::Unimplemented {
            return Self::Unimplemented;
        }
        let message = format!("{:?}: {}", status.code(), status.message());
        Self::Failure(CommandError::new(Exit::Unavailable, message))
    }
}

async fn diagnose(
    worker: &ServerAddress,
    request: DiagnoseRequest,
    secrets: &[Vec<u8>],
) -> Result<DiagnoseResponse, DiagnoseError> {
    let channel = connect(worker.url()).await.map_err(DiagnoseError::Failure)?;
    let mut client = WorkerClient::new(channel);
    let request = prove(&mut client, secrets, DIAGNOSE_PATH, request).await;
    let (request, _) = request.map_err(|error| match error {
        ProveError::Challenge(status) if status.code() == tonic::Code::Unimplemented => {
            DiagnoseError::Unimplemented
        }
        error => DiagnoseError::Failure(CommandError::new(Exit::Unavailable, error.to_string())),
    })?;
    Ok(client.diagnose(request).await?.into_inner())
}

fn render(worker: &str, answer: &DiagnoseResponse) -> String {
    let DiagnoseResponse { findings, window_iterations, window_seconds, load, iterations, .. } = answer;
    let Load {
        running_sequences,
        waiting_sequences,
        swapped_sequences,
        kv_blocks_used,
        host_kv_blocks_used,
        ..
    } = load.unwrap_or_default();
    let mut text = format!(
        "{worker}: {running_sequences} running, {waiting_sequences} waiting, {swapped_sequences} swapped; {kv_blocks_used} KV \
         blocks in use, {host_kv_blocks_used} on the host; {window_iterations} iterations in {window_seconds:.1} s\n"
    );
    if findings.is_empty() {
        let what = if *window_iterations == 0 { "no iterations yet" } else { "no bottleneck found" };
        text.push_str(&format!("  {what}\n"));
    }
    findings.iter().for_each(|finding| text.push_str(&finding_lines(finding)));
    for step in iterations {
        text.push_str(&iteration_line(step));
    }
    text
}

fn finding_lines(finding: &Finding) -> String {
    format!(
        "  {:>3.0} %  {}: {}\n         → {}\n",
        finding.window_share * 100.0,
        finding.bottleneck.replace('_', " "),
        finding.evidence,
        finding.advice
    )
}

fn finding_json(finding: &Finding) -> serde_json::Value {
    json!({
        "bottleneck": finding.bottleneck,
        "window_share": finding.window_share,
        "evidence": finding.evidence,
        "advice": finding.advice,
    })
}

/// Returns a diagnosis as a JSON object and a newline.
fn json_line(worker: &str, answer: &DiagnoseResponse) -> String {
    let load = |load: Option<Load>| {
        let load = load.unwrap_or_default();
        json!({
            "running_sequences": load.running_sequences,
            "waiting_sequences": load.waiting_sequences,
            "swapped_sequences": load.swapped_sequences,
            "kv_blocks_used": load.kv_blocks_used,
            "host_kv_blocks_used": load.host_kv_blocks_used,
            "preemptions": load.preemptions,
        })
    };
    let findings = answer.findings.iter().map(finding_json);
    let iterations = answer.iterations.iter().map(|step| {
        json!({
            "iteration": step.iteration,
            "duration_us": step.duration_us,
            "predicted_us": step.predicted_us,
            "decodes": step.decodes,
            "prefills": step.prefills,
            "prefill_tokens": step.prefill_tokens,
            "max_queue_wait_us": step.max_queue_wait_us,
            "preempted_sequences": step.preempted_sequences,
            "stalled_decodes": step.stalled_decodes,
            "blocked_by": step.blocked_by,
            "load": load(step.load),
        })
    });
    let object = json!({
        "worker": worker,
        "window_iterations": answer.window_iterations,
        "window_seconds": answer.window_seconds,
        "load": load(answer.load),
        "findings": findings.collect::<Vec<_>>(),
        "iterations": iterations.collect::<Vec<_>>(),
    });
    format!("{object}\n")
}

fn iteration_line(step: &IterationSummary) -> String {
    let Load { running_sequences, waiting_sequences, kv_blocks_used, .. } = step.load.unwrap_or_default();
    let mut text = format!(
        "  #{:<8} {:>8} us (predicted {:>8})  {:>4} decodes  {:>3} prefills of {:>5} tokens  \
         {running_sequences:>4} running {waiting_sequences:>5} waiting  {kv_blocks_used:>6} blocks",
        step.iteration, step.duration_us, step.predicted_us, step.decodes, step.prefills, step.prefill_tokens
    );
    for (count, what) in [(step.preempted_sequences, "preempted"), (step.stalled_decodes, "stalled")] {
        if count > 0 {
            text.push_str(&format!("  {count} {what}"));
        }
    }
    if !step.blocked_by.is_empty() {
        text.push_str(&format!("  blocked by {}", step.blocked_by.replace('_', " ")));
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diagnosis_shows_evidence_and_advice_of_each_finding() {
        let finding = Finding {
            bottleneck: "queue_time".to_owned(),
            window_share: 0.42,
            evidence: "the longest wait was 3.0 s".to_owned(),
            advice: "add workers".to_owned(),
        };
        let answer =
            DiagnoseResponse { findings: vec![finding], window_iterations: 10, ..Default::default() };
        let text = render("w", &answer);
        assert!(
            text.contains("42 %  queue time: the longest wait was 3.0 s\n         → add workers\n"),
            "{text}"
        );
        let parsed: serde_json::Value = serde_json::from_str(&json_line("w", &answer)).unwrap();
        assert_eq!(parsed["findings"][0]["advice"], "add workers");
        assert_eq!((&parsed["worker"], &parsed["window_iterations"]), (&json!("w"), &json!(10)));
        assert!(render("w", &DiagnoseResponse::default()).contains("no iterations yet"));
    }
}
