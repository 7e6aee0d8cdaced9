//! `inflight replay`: replays a recorded worker's scheduler or router's dispatcher and compares the decisions.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use inflight_router::{Command, Event};
use inflight_worker::{FirstTokenParts, FirstTokens, Iteration, ReplayEvent};

use crate::exit::{CommandError, Exit};

/// Options of `inflight replay`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Recording written by `inflight worker --record FILE` or `inflight router --record FILE`
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Print every plan of a worker, or every event of a router with the number of its commands
    #[arg(long)]
    pub plans: bool,
    /// Print where the time to first token goes in a worker: mean, P50 and P90 of its parts
    #[arg(long)]
    pub first_tokens: bool,
}

/// Replays a recording and prints the number of decisions, all of which equal the recorded ones.
///
/// # Errors
/// The file cannot be read or is no recording, or a decision differs from the recorded one.
pub fn run(args: &Args) -> Result<(), CommandError> {
    let bytes = std::fs::read(&args.file).map_err(|error| {
        CommandError::new(Exit::Failure, format!("can't read {}: {error}", args.file.display()))
    })?;
    let failed = |error: &dyn std::fmt::Display| {
        CommandError::new(Exit::Failure, format!("{}: {error}", args.file.display()))
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let mut written = Ok(());
    let mut print = |at: Duration, text: String| {
        if args.plans && written.is_ok() {
            written = writeln!(out, "{:>12.6} s  {text}", at.as_secs_f64());
        }
    };
    let total = if inflight_router::is_recording(&bytes) {
        let replayed =
            inflight_router::replay(&bytes, |event, now, commands| print(now, event_line(event, commands)));
        let events = replayed.map_err(|error| failed(&error))?;
        format!("{events} events replayed, each with the commands that were recorded")
    } else {
        let mut first_tokens = FirstTokens::default();
        let replayed = inflight_worker::replay(&bytes, |event| {
            if args.first_tokens {
                first_tokens.observe(&event);
            }
            if let ReplayEvent::Planned { plan, at } = event {
                print(Duration::from_nanos(at.as_nanos()), summary_line(plan));
            }
        });
        let plans = replayed.map_err(|error| failed(&error))?;
        let table = if args.first_tokens { first_token_table(first_tokens.parts()) } else { String::new() };
        format!("{table}{plans} plans replayed, each as it was recorded")
    };
    // A closed pipe is ignored.
    let _ = written.and_then(|()| writeln!(out, "{total}"));
    let _ = out.flush();
    Ok(())
}

/// Describes an event of a router.
fn event_line(event: &Event, commands: &[Command]) -> String {
    let worker = |worker: &dyn std::fmt::Display| format!("worker {worker}");
    let what = match event {
        Event::WorkerJoined { worker: id } => format!("{} joined", worker(id)),
        Event::WorkerRetired { worker: id } => format!("{} retired", worker(id)),
        Event::WorkerLeft { worker: id } => format!("{} left", worker(id)),
        Event::SessionOpened { session, worker: info } => {
            format!("session {session} opened with {} for {}", worker(&info.worker), info.model)
        }
        Event::SessionClosed { worker: id, reason, .. } => {
            format!("session of {} closed: {}", worker(id), reason.label())
        }
        Event::Updated { worker: id, update, .. } => {
            format!("update of {} with {} sequences", worker(id), update.sequences.len())
        }
        Event::Arrived { call, .. } => {
            format!("request of tenant {:?} with {} prompt tokens", call.tenant, call.prompt_tokens)
        }
        Event::ChoiceWithdrawn { choice, .. } => format!("choice {choice} withdrawn"),
        Event::ClientBehind { .. } => "client behind".to_owned(),
        Event::ClientResumed { .. } => "client reads again".to_owned(),
        Event::ClientStalled { .. } => "client stalled".to_owned(),
        Event::Released { .. } => "request released".to_owned(),
        Event::Tick => "tick".to_owned(),
    };
    format!("{what}: {} commands", commands.len())
}

/// One part of a time to first token, or all of it.
type Part = fn(&FirstTokenParts) -> Duration;

/// Describes where the time to first token went.
fn first_token_table(parts: &[FirstTokenParts]) -> String {
    let columns: [(&str, Part); 4] = [
        ("iteration in flight", |parts| parts.iteration),
        ("waiting for tokens", |parts| parts.wait),
        ("computing", |parts| parts.compute),
        ("total", FirstTokenParts::total),
    ];
    let mut table =
        format!("first tokens of {} sequences, ms          mean       P50       P90\n", parts.len());
    for (name, part) in columns {
        let mut times: Vec<f64> = parts.iter().map(|parts| 1e3 * part(parts).as_secs_f64()).collect();
        times.sort_by(f64::total_cmp);
        let quantile = |p: f64| times.get((p * times.len() as f64) as usize).copied().unwrap_or_default();
        let mean = times.iter().sum::<f64>() / times.len().max(1) as f64;
        // Writing to a String cannot fail.
        let _ = writeln!(table, "  {name:36} {mean:9.1} {:9.1} {:9.1}", quantile(0.5), quantile(0.9));
    }
    table
}

fn summary_line(plan: &Iteration) -> String {
    let prefills = plan.chunks.len() as u32 - plan.decodes;
    let mut text = format!(
        "#{:<8} {:>4} decodes  {prefills:>3} prefills of {:>5} tokens",
        plan.number,
        plan.decodes,
        plan.tokens() - plan.decodes
    );
    let counts = [
        (plan.admitted.len(), "admitted"),
        (plan.preempted.len(), "preempted"),
        (plan.transfers.len(), "transfers"),
        (plan.stalled as usize, "stalled"),
    ];
    for (count, what) in counts.into_iter().filter(|(count, _)| *count > 0) {
        let _ = write!(text, "  {count} {what}"); // writing to a String cannot fail
    }
    if let Some(blocked) = plan.blocked {
        let _ = write!(text, "  blocked by {}", blocked.by.label().replace('_', " "));
    }
    text
}
