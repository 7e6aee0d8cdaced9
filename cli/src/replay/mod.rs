//! `inflight replay`: replays a recorded worker's scheduler or router's dispatcher and compares the decisions.

mod batch;
mod plan_lines;
mod slot_chart;

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use inflight_router::{Command, Event};
use inflight_worker::{FirstTokenParts, FirstTokens, Iteration, ReplayError, ReplayEvent, SchedulerLimits};

use self::batch::BatchTracker;
use self::slot_chart::SlotChart;
use crate::exit::{CommandError, Exit};

/// Width of a chart that is written to a file or pipe.
const WIDTH: u16 = 100;

/// Options of `inflight replay`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Recording written by `inflight worker --record FILE` or `inflight router --record FILE`
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// Print every plan of a worker with the sequences that joined, ran and left, or every event of a router with the
    /// number of its commands
    #[arg(long)]
    pub plans: bool,
    /// Draw a chart of a worker: a row for each slot, a column for each iteration, a letter for each request
    #[arg(long)]
    pub slots: bool,
    /// First iteration of the chart
    #[arg(long, value_name = "N", requires = "slots", default_value_t = 1)]
    pub from: u64,
    /// Last iteration of the chart, which then has as many lines as it takes [default: as many as fit in a line]
    #[arg(long, value_name = "N", requires = "slots")]
    pub to: Option<u64>,
    /// Width of the chart in characters [default: that of the terminal; 100 without one]
    #[arg(long, value_name = "N", requires = "slots", value_parser = clap::value_parser!(u16).range(20..))]
    pub width: Option<u16>,
    /// Print where the time to first token goes in a worker: mean, P50 and P90 of its parts
    #[arg(long)]
    pub first_tokens: bool,
}

impl Args {
    /// Returns the empty chart, if one is wanted.
    fn chart(&self) -> Result<Option<SlotChart>, CommandError> {
        if !self.slots {
            return Ok(None);
        }
        let refuse = |message: String| Err(CommandError::new(Exit::Usage, message));
        if let Some(to) = self.to {
            if to < self.from {
                return refuse(format!("--to {to} is before --from {}", self.from));
            }
            if to - self.from >= slot_chart::ITERATIONS_MAX {
                return refuse(format!("a chart has at most {} iterations", slot_chart::ITERATIONS_MAX));
            }
        }
        let terminal = || {
            let width = crossterm::terminal::size().ok().filter(|_| std::io::stdout().is_terminal());
            width.map_or(WIDTH, |(columns, _)| columns)
        };
        let width = self.width.unwrap_or_else(terminal);
        Ok(Some(SlotChart::new(self.from, self.to, width.into())))
    }
}

/// Replays a recording and prints the number of decisions, all of which equal the recorded ones.
///
/// # Errors
/// The file cannot be read or is no recording, or a decision differs from the recorded one.
pub fn run(args: &Args) -> Result<(), CommandError> {
    let chart = args.chart()?;
    let bytes = std::fs::read(&args.file).map_err(|error| {
        CommandError::new(Exit::Failure, format!("can't read {}: {error}", args.file.display()))
    })?;
    let failed = |error: &dyn std::fmt::Display| {
        CommandError::new(Exit::Failure, format!("{}: {error}", args.file.display()))
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let mut written = Ok(());
    let mut print = |text: &str| {
        if written.is_ok() {
            written = out.write_all(text.as_bytes());
        }
    };
    let total = if inflight_router::is_recording(&bytes) {
        if chart.is_some() {
            return Err(CommandError::new(
                Exit::Usage,
                "--slots is for recordings of workers; this is one of a router",
            ));
        }
        let replayed = inflight_router::replay(&bytes, |event, now, commands| {
            if args.plans {
                print(&format!("{}{}\n", moment(now), event_line(event, commands)));
            }
        });
        let events = replayed.map_err(|error| failed(&error))?;
        format!("{events} events replayed, each with the commands that were recorded\n")
    } else {
        let plans = replay_worker(args, &bytes, chart, &mut print).map_err(|error| failed(&error))?;
        format!("{plans} plans replayed, each as it was recorded\n")
    };
    print(&total);
    // A closed pipe is ignored.
    let _ = written.and_then(|()| out.flush());
    Ok(())
}

/// Replays a worker's recording and prints what was asked for. Returns the number of plans. After an error, what was
/// replayed before is printed.
fn replay_worker(
    args: &Args,
    bytes: &[u8],
    mut chart: Option<SlotChart>,
    print: &mut impl FnMut(&str),
) -> Result<u64, ReplayError> {
    let mut first_tokens = FirstTokens::default();
    let mut tracker = BatchTracker::default();
    let replayed = inflight_worker::replay(bytes, |event| {
        if args.first_tokens {
            first_tokens.observe(&event);
        }
        if !args.plans && chart.is_none() {
            return;
        }
        if let (true, ReplayEvent::Created { limits }) = (args.plans, &event) {
            print(&pool_line(limits));
        }
        let Some(changes) = tracker.observe(&event) else { return };
        if let Some(chart) = &mut chart {
            chart.add(&changes);
        }
        if let (true, ReplayEvent::Planned { plan, .. }) = (args.plans, event) {
            print(&format!("{}{}\n", moment(changes.at), summary_line(plan)));
            print(&plan_lines::changes(&changes));
        }
    });
    let after_last = tracker.into_ended();
    if args.plans {
        print(&plan_lines::rest(&after_last));
    }
    if let Some(mut chart) = chart {
        chart.end(&after_last);
        print(&chart.draw());
    }
    if args.first_tokens {
        print(&first_token_table(first_tokens.parts()));
    }
    replayed
}

/// Describes the KV pool of a worker with several groups of layers or a recurrent state; empty where a block holds a span of all layers.
fn pool_line(limits: &SchedulerLimits) -> String {
    if limits.shape.is_uniform() {
        return String::new();
    }
    let (blocks, tokens) = (limits.blocks, limits.block_tokens());
    format!(
        "pool of {blocks} KV blocks; blocks of a span of {tokens} tokens by group of layers: {}\n",
        limits.shape
    )
}

/// Writes the time of a plan or event.
fn moment(at: Duration) -> String {
    format!("{:>12.6} s  ", at.as_secs_f64())
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
    // A plan without work is not executed and has no number.
    let number = if plan.chunks.is_empty() { "-".to_owned() } else { format!("#{}", plan.number) };
    let mut text = format!(
        "{number:<9} {:>4} decodes  {prefills:>3} prefills of {:>5} tokens",
        plan.decodes,
        plan.tokens() - plan.decodes - plan.drafts
    );
    let counts = [
        (plan.drafts as usize, "drafts"),
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
