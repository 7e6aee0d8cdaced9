//! `docs/tour.md`, command by command, as a reader runs it: server blocks start clusters, client blocks run to their end, and
//! comments below a block say what its output must show.
//!
//! - `sh server`: an `inflight up` line. The first one after a client block stops the clusters that run.
//! - `sh`: a client block, run by bash. Addresses of the text become those of the clusters.
//! - `sh stopped`: a client block that is run once the clusters have drained.
//! - `<!-- expect: text REGEX -->`: the output matches.
//! - `<!-- expect: FIGURE A < FACTOR * B -->`: a figure of `inflight bench` for one endpoint against another, or against a number.
//!
//! Tests start in alphabetical order, and this one takes minutes: late in the alphabet it would run alone at the end.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use inflight_fixtures::TempDir;
use inflight_harness::LocalCluster;
use regex::Regex;
use serde_json::Value;

use crate::program;

const TOUR: &str = include_str!("../../docs/tour.md");
/// Limit of a client block.
const BLOCK_TIME: Duration = Duration::from_secs(120);

/// Part of the tour, in its order.
#[derive(Debug, PartialEq)]
enum Step {
    /// Starts a cluster: its port in the text, and its flags.
    Server { port: u16, flags: Vec<String> },
    /// Runs a script.
    Client { script: String, is_stopped: bool },
    /// Judges the output of the script before.
    Expect(String),
}

/// Returns the steps of the tour; blocks before the first server are about the build.
fn steps() -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    let mut lines = TOUR.lines();
    while let Some(line) = lines.next() {
        if let Some(expectation) = line.strip_prefix("<!-- expect: ") {
            steps.push(Step::Expect(
                expectation.strip_suffix(" -->").context("no end of the comment")?.to_owned(),
            ));
        }
        let Some(info) = line.strip_prefix("```").filter(|info| info.starts_with("sh")) else { continue };
        let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
        if info == "sh server" {
            let [line] = block[..] else { bail!("a server block has one line: {block:?}") };
            steps.push(server(line)?);
        } else if steps.iter().any(|step| matches!(step, Step::Server { .. })) {
            steps.push(Step::Client { script: block.join("\n"), is_stopped: info == "sh stopped" });
        }
    }
    Ok(steps)
}

fn server(line: &str) -> Result<Step> {
    let mut words = line.strip_prefix("inflight up").context("a server is `inflight up`")?.split_whitespace();
    let (mut port, mut flags) = (8650, Vec::new());
    while let Some(word) = words.next() {
        if word == "--port" {
            port = words.next().context("no port")?.parse()?;
        } else {
            flags.push(word.to_owned());
        }
    }
    Ok(Step::Server { port, flags })
}

/// Clusters that run, with the port that the text gives each.
#[derive(Default)]
struct Running {
    clusters: Vec<(u16, LocalCluster)>,
    /// Whether a script has run since the last cluster was started.
    is_used: bool,
}

impl Running {
    async fn start(&mut self, port: u16, flags: &[String], folder: &Path) -> Result<()> {
        if std::mem::take(&mut self.is_used) {
            self.stop().await?;
        }
        // Of the flags, only the folder of recordings names a path.
        let flags: Vec<String> =
            flags
                .iter()
                .map(|flag| {
                    if flag == "recordings" { folder.join(flag).display().to_string() } else { flag.clone() }
                })
                .collect();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let cluster = match self.clusters.first() {
            Some((_, first)) => first.start_beside(program(), &flags).await?,
            None => LocalCluster::start(program(), &flags).await?,
        };
        self.clusters.push((port, cluster));
        Ok(())
    }

    async fn stop(&mut self) -> Result<()> {
        for (_, mut cluster) in self.clusters.drain(..) {
            cluster.signal(libc::SIGTERM)?;
            cluster.wait().await?;
        }
        Ok(())
    }

    /// Replaces the addresses of the text by those of the clusters.
    fn localize(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (port, cluster) in &self.clusters {
            let mut replace = |port: u16, address: &str| {
                text = text.replace(&format!("127.0.0.1:{port}"), address);
            };
            replace(*port, cluster.endpoint.trim_start_matches("http://"));
            replace(port - 10, cluster.http.trim_start_matches("http://"));
            replace(port + 1, &cluster.router.metrics.to_string());
            for (worker, number) in cluster.workers.iter().zip(2..) {
                replace(port + number, &worker.metrics.to_string());
            }
        }
        text
    }
}

/// Runs a script in `folder`, where `inflight bench` also writes its report. Returns its output.
async fn run(script: &str, folder: &Path, endpoint: Option<&str>) -> Result<String> {
    let folder_of_program = program().parent().context("the program is in a folder")?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut paths = OsString::from(folder_of_program);
    paths.push(":");
    paths.push(path);
    // The only bench of a script also reports as JSON, for the expectations.
    let script = match script.matches("inflight bench").count() {
        1 => script.replace("inflight bench", "inflight bench --json report.json"),
        _ => script.to_owned(),
    };
    let mut command = tokio::process::Command::new("bash");
    command
        .args(["-euo", "pipefail", "-c", &script])
        .current_dir(folder)
        .env("PATH", paths)
        .kill_on_drop(true);
    if let Some(endpoint) = endpoint {
        command.env("INFLIGHT_ENDPOINT", endpoint);
    }
    let output = tokio::time::timeout(BLOCK_TIME, command.output());
    let output =
        output.await.with_context(|| format!("it did not end within {BLOCK_TIME:?}: {script}"))??;
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{script}\nended with {}:\n{text}", output.status);
    Ok(text)
}

/// Checks an expectation against the output of a script, and the report that it may have written to `folder`.
fn check(expectation: &str, output: &str, folder: &Path) -> Result<()> {
    if let Some(pattern) = expectation.strip_prefix("text ") {
        ensure!(Regex::new(pattern)?.is_match(output), "{pattern:?} does not match:\n{output}");
        return Ok(());
    }
    let words: Vec<&str> = expectation.split(' ').collect();
    let (figure, left, relation, factor, right) = match words[..] {
        [figure, left, relation, factor, "*", right] => (figure, left, relation, factor, Some(right)),
        [figure, left, relation, number] => (figure, left, relation, number, None),
        _ => bail!("not an expectation: {expectation}"),
    };
    let report: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("report.json"))?)?;
    let endpoints = report["points"][0]["endpoints"].as_array().context("no endpoints")?;
    let value = |name: &str| -> Result<f64> {
        let endpoint = match &endpoints[..] {
            [only] => Some(only),
            several => several.iter().find(|endpoint| endpoint["name"] == name),
        };
        let value = endpoint.and_then(|endpoint| endpoint["median"][figure].as_f64());
        value.with_context(|| format!("no {figure} of {name} in {report:#}"))
    };
    let factor: f64 = factor.parse()?;
    let (left, right) = (value(left)?, right.map_or(Ok(1.0), value)? * factor);
    let holds = match relation {
        "<" => left < right,
        ">" => left > right,
        _ => bail!("not a relation: {relation}"),
    };
    ensure!(holds, "{expectation}: {left} against {right}\n{output}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes five minutes; the lane artefact of .ci/nightly runs it"]
async fn the_commands_of_the_tour_show_what_it_says() -> Result<()> {
    let folder = TempDir::new("tour")?;
    let mut running = Running::default();
    let mut output = String::new();
    for step in steps()? {
        match step {
            Step::Server { port, flags } => running.start(port, &flags, folder.path()).await?,
            Step::Client { script, is_stopped } => {
                if is_stopped {
                    running.stop().await?;
                }
                let script = running.localize(&script);
                let endpoint = running.clusters.first().map(|(_, cluster)| cluster.endpoint.clone());
                println!("{script}");
                output = run(&script, folder.path(), endpoint.as_deref()).await?;
                println!("{output}");
                running.is_used = true;
            }
            Step::Expect(expectation) => check(&expectation, &output, folder.path())?,
        }
    }
    running.stop().await
}

#[test]
fn every_client_block_of_the_tour_has_a_server_and_every_section_an_expectation() -> Result<()> {
    let steps = steps()?;
    let count = |of: fn(&Step) -> bool| steps.iter().filter(|step| of(step)).count();
    ensure!(count(|step| matches!(step, Step::Server { .. })) >= 14);
    let sections =
        TOUR.lines().filter(|line| line.starts_with("## ") && line.as_bytes()[3].is_ascii_digit()).count();
    ensure!(count(|step| matches!(step, Step::Expect(_))) >= sections, "a section without an expectation");
    Ok(())
}
