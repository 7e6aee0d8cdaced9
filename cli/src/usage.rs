//! `inflight usage`: sums the usage logs of routers.

use std::io::Write as _;
use std::path::PathBuf;

use inflight_router::usage::{UsageGroup, UsageReading, UsageSince, UsageSummary, UsageTotals, read_usage};

use crate::exit::{CommandError, print_stderr};

/// Options of `inflight usage`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Directories of usage logs, written by `inflight router --usage-log DIR`. Name those of all routers in one
    /// call, so that a stream that moved between routers counts once
    #[arg(value_name = "DIR", required = true)]
    pub directories: Vec<PathBuf>,
    /// Requests that ended on this UTC day or later, or since a time: 2026-01-31 or 2026-01-31T12:00:00Z
    #[arg(long, value_name = "DATE")]
    pub since: Option<UsageSince>,
    /// Sum by tenant, model or day (UTC)
    #[arg(long, value_name = "NAME", default_value = "tenant")]
    pub by: UsageGroup,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Sums the logs and prints the sums.
///
/// # Errors
/// A log cannot be read, or standard output cannot be written.
pub fn run(args: &Args) -> Result<(), CommandError> {
    let mut summary = UsageSummary::new(args.by);
    let reading = read_usage(&args.directories, args.since.map(UsageSince::time), |record| {
        if args.since.is_none_or(|since| since.includes(&record)) {
            summary.add(&record);
        }
    });
    let reading = reading.map_err(|error| CommandError::chain("", &error))?;
    if reading.torn + reading.damaged > 0 {
        print_stderr(format_args!(
            "warning: not counted: {} incomplete lines at the end of files, {} damaged lines",
            reading.torn, reading.damaged
        ));
    }
    let text = if args.json { json(args.by, &summary, &reading) } else { table(args.by, &summary) };
    let written = std::io::stdout().lock().write_all(text.as_bytes());
    written.map_err(|error| CommandError::chain("cannot write", &error))
}

fn json(by: UsageGroup, summary: &UsageSummary, reading: &UsageReading) -> String {
    let value = serde_json::json!({
        "by": by.name(),
        "groups": summary.groups,
        "total": summary.total,
        "lines": reading.lines,
        "duplicates": reading.duplicates,
        "resumed": reading.resumed,
        "torn": reading.torn,
        "damaged": reading.damaged,
    });
    format!("{value}\n")
}

fn table(by: UsageGroup, summary: &UsageSummary) -> String {
    let names = summary.groups.keys().map(|name| name.chars().count());
    let width = names.chain([by.name().len(), "total".len()]).max().unwrap_or(0);
    let row = |name: &str, totals: &UsageTotals| {
        format!(
            "{name:<width$}  {:>10}  {:>15}  {:>15}  {:>15}\n",
            totals.requests, totals.prompt_tokens, totals.cached_prompt_tokens, totals.completion_tokens
        )
    };
    let mut text = format!(
        "{:<width$}  {:>10}  {:>15}  {:>15}  {:>15}\n",
        by.name(),
        "requests",
        "prompt tokens",
        "of them cached",
        "output tokens"
    );
    text.extend(summary.groups.iter().map(|(name, totals)| row(name, totals)));
    text + &row("total", &summary.total)
}

#[cfg(test)]
mod tests {
    use inflight_router::usage::UsageRecord;

    use super::*;

    #[test]
    fn the_table_and_the_json_have_the_sums_of_each_group() {
        let mut summary = UsageSummary::new(UsageGroup::Day);
        for (ended, tokens) in
            [("2026-01-30T23:59:59.9Z", 2), ("2026-01-31T00:00:00Z", 3), ("2026-01-31T01:00:00Z", 4)]
        {
            let ended = ended.to_owned();
            summary.add(&UsageRecord { ended, completion_tokens: tokens, ..UsageRecord::default() });
        }
        let rows: Vec<Vec<String>> = table(UsageGroup::Day, &summary)
            .lines()
            .skip(1)
            .map(|line| line.split_whitespace().map(str::to_owned).collect())
            .collect();
        assert_eq!(
            rows,
            [
                ["2026-01-30", "1", "0", "0", "2"],
                ["2026-01-31", "2", "0", "0", "7"],
                ["total", "3", "0", "0", "9"]
            ]
        );
        let value: serde_json::Value =
            serde_json::from_str(&json(UsageGroup::Day, &summary, &UsageReading::default())).unwrap();
        assert_eq!(value["groups"]["2026-01-31"]["completion_tokens"], 7);
        assert_eq!(value["total"]["requests"], 3);
    }
}
