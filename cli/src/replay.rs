//! `inflight replay`: makes the plans of a recorded worker again.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

use inflight_worker::{Iteration, replay};

use crate::exit::{Exit, Failure};

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

/// Replays a recording and says whether every plan is the recorded one.
///
/// # Errors
/// A file that can't be read, is no recording, or whose plans come out otherwise.
pub fn run(args: &Args) -> Result<(), Failure> {
    let bytes = std::fs::read(&args.file).map_err(|error| {
        Failure::new(Exit::Failure, format!("can't read {}: {error}", args.file.display()))
    })?;
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let mut written = Ok(());
    let replayed = replay(&bytes, |plan, now| {
        if args.plans && written.is_ok() {
            written = writeln!(out, "{:>12.6} s  {}", now.as_nanos() as f64 * 1e-9, line(plan));
        }
    });
    let plans =
        replayed.map_err(|error| Failure::new(Exit::Failure, format!("{}: {error}", args.file.display())))?;
    // Whoever closed the pipe has seen enough.
    let _ = written.and_then(|()| writeln!(out, "{plans} plans replayed, each as it was recorded"));
    let _ = out.flush();
    Ok(())
}

fn line(plan: &Iteration) -> String {
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
        let _ = write!(text, "  {count} {what}"); // a String takes everything
    }
    if let Some(blocked) = plan.blocked {
        let _ = write!(text, "  blocked by {}", blocked.by.label().replace('_', " "));
    }
    text
}
