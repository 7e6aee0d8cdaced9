//! `inflight replay`: replays a recorded worker's scheduler and compares the plans.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

use inflight_worker::{Iteration, replay};

use crate::exit::{CommandError, Exit};

/// Options of `inflight replay`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Recording written by `inflight worker --record FILE`
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Print every plan
    #[arg(long)]
    pub plans: bool,
}

/// Replays a recording and prints the number of plans, all of which equal the recorded ones.
///
/// # Errors
/// The file cannot be read or is no recording, or a plan differs from the recorded one.
pub fn run(args: &Args) -> Result<(), CommandError> {
    let bytes = std::fs::read(&args.file).map_err(|error| {
        CommandError::new(Exit::Failure, format!("can't read {}: {error}", args.file.display()))
    })?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let mut written = Ok(());
    let replayed = replay(&bytes, |plan, now| {
        if args.plans && written.is_ok() {
            written = writeln!(out, "{:>12.6} s  {}", now.as_nanos() as f64 * 1e-9, summary_line(plan));
        }
    });
    let plans = replayed
        .map_err(|error| CommandError::new(Exit::Failure, format!("{}: {error}", args.file.display())))?;
    // A closed pipe is ignored.
    let _ = written.and_then(|()| writeln!(out, "{plans} plans replayed, each as it was recorded"));
    let _ = out.flush();
    Ok(())
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
