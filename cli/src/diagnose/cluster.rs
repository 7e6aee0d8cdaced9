//! `inflight diagnose --router`: a router and all workers that it is connected to.

use std::io::Write as _;

use inflight_options::ServerAddress;
use inflight_proto::v1::admin_client::AdminClient;
use inflight_proto::v1::{DiagnoseClusterRequest, DiagnoseClusterResponse, DiagnoseRequest};
use serde_json::json;

use super::{Args, finding_json, finding_lines, json_line, render};
use crate::exit::{self, CommandError, Exit};
use crate::generate::{ApiKey, connect_with, status_error};

/// Longest message: many workers with many iterations.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// Queries the router and prints its diagnosis and those of its workers.
///
/// # Errors
/// The router does not answer, or a worker did not answer it; the others are printed nevertheless.
pub(super) async fn run(
    router: &ServerAddress,
    request: DiagnoseRequest,
    args: &Args,
) -> Result<(), CommandError> {
    args.connection.warn_of_plaintext_key([router.url()]);
    let channel = connect_with(router.url(), &args.connection).await?;
    let key = ApiKey::new(args.connection.api_key.as_deref())?;
    let mut client = AdminClient::with_interceptor(channel, key).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let request = DiagnoseClusterRequest { worker: Some(request) };
    let answer = client.diagnose_cluster(request).await.map_err(|status| match status.code() {
        // Another port of the router, which says so.
        tonic::Code::Unimplemented if status.message().contains("HTTP port") => {
            CommandError::new(Exit::Refused, format!("{router}: {}", status.message()))
        }
        tonic::Code::Unimplemented => {
            let message = format!("{router} does not serve operators; start it with --admin read-only or on");
            CommandError::new(Exit::Refused, message)
        }
        _ => status_error(&status),
    })?;
    let answer = answer.into_inner();
    let name = router.to_string();
    let text = if args.json { json_lines(&name, &answer) } else { text(&name, &answer) };
    if std::io::stdout().lock().write_all(text.as_bytes()).is_err() {
        return Ok(()); // the pipe is closed
    }
    let failed = answer.workers.iter().filter(|worker| worker.diagnosis.is_none());
    let mut outcome = Ok(());
    for worker in failed {
        exit::print_stderr(format_args!("{}: {}", worker.worker, worker.error));
        outcome = Err(CommandError::Silent(Exit::Unavailable));
    }
    outcome
}

fn text(router: &str, answer: &DiagnoseClusterResponse) -> String {
    let mut text = format!("{router}: router, {} workers connected\n", answer.workers.len());
    if answer.findings.is_empty() {
        text.push_str("  no bottleneck found\n");
    }
    answer.findings.iter().for_each(|finding| text.push_str(&finding_lines(finding)));
    for worker in &answer.workers {
        if let Some(diagnosis) = &worker.diagnosis {
            text.push_str(&render(&worker.worker, diagnosis));
        }
    }
    text
}

/// Returns an object for the router and one for each worker, each on a line.
fn json_lines(router: &str, answer: &DiagnoseClusterResponse) -> String {
    let findings: Vec<_> = answer.findings.iter().map(finding_json).collect();
    let mut text = format!("{}\n", json!({ "router": router, "findings": findings }));
    for worker in &answer.workers {
        match &worker.diagnosis {
            Some(diagnosis) => text.push_str(&json_line(&worker.worker, diagnosis)),
            None => {
                text.push_str(&format!("{}\n", json!({ "worker": worker.worker, "error": worker.error })));
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight_proto::v1::{DiagnoseResponse, Finding, WorkerDiagnosis};

    #[test]
    fn a_cluster_is_printed_router_first_and_a_worker_that_failed_has_its_error() {
        let finding = |bottleneck: &str| Finding { bottleneck: bottleneck.to_owned(), ..Finding::default() };
        let diagnosis = DiagnoseResponse { findings: vec![finding("queue_time")], ..Default::default() };
        let worker = |name: &str, diagnosis, error: &str| WorkerDiagnosis {
            worker: name.to_owned(),
            diagnosis,
            error: error.to_owned(),
        };
        let answer = DiagnoseClusterResponse {
            workers: vec![worker("a", Some(diagnosis), ""), worker("b", None, "lost")],
            findings: vec![finding("retries")],
        };
        let text = text("r", &answer);
        let [retries, queue] = ["retries", "queue time"].map(|name| text.find(name).unwrap());
        assert!(text.starts_with("r: router, 2 workers connected\n") && retries < queue, "{text}");
        let lines: Vec<serde_json::Value> =
            json_lines("r", &answer).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines[0]["findings"][0]["bottleneck"], "retries");
        assert_eq!((&lines[1]["worker"], &lines[2]["error"]), (&json!("a"), &json!("lost")));
    }
}
