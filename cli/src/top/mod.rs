//! `inflight top`: what a cluster does now, in the terminal, as one snapshot of text, or as JSON lines.
//!
//! The pure part: updates and keys change [`model::Model`], which [`draw`] shows. The shell: [`feed`] watches a router,
//! [`terminal`] reads keys and writes frames.

mod draw;
mod feed;
mod findings;
mod header;
mod json;
mod life;
mod model;
mod plain;
mod state;
mod tables;
mod terminal;
#[cfg(test)]
mod tests;
mod text;
mod worker_table;

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use inflight_proto::v1::WatchRequest;

use self::feed::{FeedEvent, Source};
use self::model::Model;
use crate::exit::{self, CommandError, Exit};
use crate::generate::EXIT_CODES;
use crate::tls::ClientArgs;
use inflight_options::{ServerAddress, Span};

/// Width of a snapshot that is written to a file or pipe.
const SNAPSHOT_WIDTH: usize = 160;
/// Minimum and maximum of --interval, the refresh interval of the display.
const INTERVAL_MIN: Duration = Duration::from_millis(100);
const INTERVAL_MAX: Duration = Duration::from_secs(60);

/// Options of `inflight top`.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXIT_CODES)]
pub struct Args {
    /// Addresses of routers that serve the Admin service (`--admin`), separated by commas; the next one is watched when
    /// one goes away
    #[arg(
        long,
        visible_alias = "endpoint",
        value_name = "ADDRESS",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:8650",
        env = "INFLIGHT_ENDPOINT"
    )]
    pub router: Vec<ServerAddress>,
    /// Time between two updates of the display, 100ms to 1m; routers send 1 to 10 updates a second
    #[arg(long, value_name = "DURATION", default_value = "500ms", value_parser = interval)]
    pub interval: Span,
    /// Print one snapshot as plain text, and end
    #[arg(long)]
    pub once: bool,
    /// Print every update as a JSON line; with --once, only the first one
    #[arg(long)]
    pub json: bool,
    /// Do not observe the workers: saves bandwidth, but KV blocks of requests, computed prompt tokens and step times are
    /// unknown
    #[arg(long)]
    pub omit_iterations: bool,
    #[command(flatten)]
    pub connection: ClientArgs,
}

fn interval(text: &str) -> Result<Span, String> {
    let span: Span = text.parse()?;
    if (INTERVAL_MIN..=INTERVAL_MAX).contains(&span.0) {
        Ok(span)
    } else {
        Err("not from 100ms to 1m".to_owned())
    }
}

/// Updates a second for a time between two of them.
fn updates_per_second(interval: Duration) -> u32 {
    (1.0 / interval.as_secs_f64()).ceil().clamp(1.0, 10.0) as u32
}

impl Args {
    fn source(&self) -> Source {
        let updates_per_second = updates_per_second(self.interval.0);
        let watch = WatchRequest { updates_per_second, omit_iterations: self.omit_iterations };
        Source {
            routers: self.router.iter().map(|router| router.url().to_owned()).collect(),
            connection: self.connection.clone(),
            watch,
        }
    }
}

/// Watches a router and shows its cluster.
///
/// # Errors
/// The router is unreachable or cannot be watched, there is no terminal, or a signal ended the display.
pub async fn run(args: Args) -> Result<(), CommandError> {
    if !args.once && !args.json && !std::io::stdout().is_terminal() {
        let message =
            "the standard output is no terminal; print a snapshot with --once, or updates with --json";
        return Err(CommandError::new(Exit::Usage, message));
    }
    let source = args.source();
    args.connection.warn_of_plaintext_key(source.routers.iter().map(String::as_str));
    let events = feed::start(source)?;
    if !args.once && !args.json {
        return Box::pin(terminal::run(events, args.interval.0)).await;
    }
    let printed = async {
        if args.json {
            print_updates(events, args.once).await
        } else {
            print_snapshot(events, args.interval.0).await
        }
    };
    tokio::select! {
        printed = printed => printed,
        _ = tokio::signal::ctrl_c() => Err(CommandError::Silent(Exit::Interrupted)),
    }
}

/// Receiver of the events of a feed.
type Events = tokio::sync::mpsc::Receiver<FeedEvent>;

/// Error reported when the task that watches the router ends unexpectedly.
fn feed_ended() -> CommandError {
    CommandError::new(Exit::Failure, "the watch ended")
}

async fn print_updates(mut events: Events, once: bool) -> Result<(), CommandError> {
    loop {
        match events.recv().await.ok_or_else(feed_ended)? {
            FeedEvent::Watching(_) => {}
            FeedEvent::Lost(why) => exit::print_stderr(format_args!("{why}; connecting again")),
            FeedEvent::Failed(failure) => return Err(failure),
            FeedEvent::Update(update, _) => {
                let line = format!("{}\n", json::update(&update));
                let mut output = std::io::stdout().lock();
                let written = output.write_all(line.as_bytes()).and_then(|()| output.flush());
                if once || written.is_err() {
                    return Ok(()); // or the pipe is closed
                }
            }
        }
    }
}

/// Prints the state after the updates of one interval: rates, step times and blocks are known only once workers are
/// observed.
async fn print_snapshot(mut events: Events, interval: Duration) -> Result<(), CommandError> {
    let mut model = Model::new();
    let mut deadline = None;
    loop {
        let until = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let event = tokio::select! {
            () = until => break,
            event = events.recv() => event.ok_or_else(feed_ended)?,
        };
        match event {
            FeedEvent::Watching(_) => {}
            FeedEvent::Update(update, first) => {
                model.update(*update, first);
                deadline.get_or_insert_with(|| tokio::time::Instant::now() + interval);
            }
            FeedEvent::Lost(_) if deadline.is_some() => break,
            FeedEvent::Lost(_) => {}
            FeedEvent::Failed(failure) => return Err(failure),
        }
    }
    let terminal = crossterm::terminal::size().ok().filter(|_| std::io::stdout().is_terminal());
    let columns = terminal.map_or(SNAPSHOT_WIDTH, |(columns, _)| columns.into());
    // A closed pipe is ignored.
    let _ = std::io::stdout().lock().write_all(plain::snapshot(&model, columns).as_bytes());
    Ok(())
}
