//! Grammars that would end, fill or stall the process that compiles them: they are refused, and everybody else is served meanwhile.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use inflight_fixtures::TempDir;
use inflight_harness::{LocalCluster, eventually, exclusive, is_alive, kill, scrape};
use inflight_proto::v1::constraint::Grammar;
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::generate_response::Event;
use inflight_proto::v1::inference_client::InferenceClient;
use inflight_proto::v1::{Constraint, GenerateRequest, SamplingParams, StopConditions};
use tokio::task::JoinSet;
use tonic::Code;
use tonic::transport::Channel;

use crate::{TENANTS, program, with_key};

const MIB: f64 = (1 << 20) as f64;
/// Adds a tenant with the SHA-256 of the API key `f`.
const FLOOD: &str = "[tenants.flood]\nkeys = [{ sha256 = \"252f10c83610ebca1a059c0bae8255eba2f95be4d1d7bcfa89d7248a82d9f111\" }]\n";

async fn start(workers: &str) -> Result<(LocalCluster, TempDir)> {
    start_with(&[workers], exclusive().await).await
}

/// Starts a cluster alone, with a hostile tenant of the key `f` and another one of the key `t`.
pub(crate) async fn start_with(
    flags: &[&str],
    guard: tokio::sync::RwLockWriteGuard<'static, ()>,
) -> Result<(LocalCluster, TempDir)> {
    let folder = TempDir::new("grammars")?;
    let file = folder.path().join("tenants.toml");
    std::fs::write(&file, format!("{TENANTS}{FLOOD}"))?;
    let tenants = format!("--tenants-file={}", file.display());
    let flags: Vec<&str> = flags.iter().copied().chain([tenants.as_str()]).collect();
    let cluster = LocalCluster::start_exclusive(program(), &flags, &[], guard).await?;
    Ok((cluster, folder))
}

/// Runs a request under a grammar. Returns its text.
pub(crate) async fn generate(
    client: &mut InferenceClient<Channel>,
    grammar: Option<Grammar>,
    key: &str,
) -> Result<String, tonic::Status> {
    let constraint = grammar.map(|grammar| Constraint { grammar: Some(grammar), ..Constraint::default() });
    let request = GenerateRequest {
        input: Some(Input::Text("Once upon a time".to_owned())),
        sampling: Some(SamplingParams { constraint, ..SamplingParams::default() }),
        stop: Some(StopConditions { max_tokens: Some(32), ..StopConditions::default() }),
        ..GenerateRequest::default()
    };
    let request = with_key(request, key).map_err(|error| tonic::Status::internal(error.to_string()))?;
    let mut stream = client.generate(request).await?.into_inner();
    let mut text = String::new();
    while let Some(response) = stream.message().await? {
        if let Some(Event::Delta(delta)) = response.event {
            text += &delta.text;
        }
    }
    Ok(text)
}

/// The hostile grammar with this number. Each takes seconds to minutes, or gigabytes, or overflows a stack, where nothing bounds it.
pub(crate) fn hostile(number: usize) -> Grammar {
    match number % 6 {
        0 => Grammar::JsonSchema(format!(r#"{{"type":"integer","multipleOf":{}}}"#, 1_299_709 + 2 * number)),
        1 => Grammar::Regex(".?".repeat(120_000 + number)),
        2 => Grammar::Regex(".?".repeat(4_000 + number)),
        3 => {
            let links: String =
                (0..1_900).map(|link| format!("A{link}: (A{} /z{number}/)+\n", link + 1)).collect();
            Grammar::Lark(format!("start: A0\n{links}A1900: \"x\"\n"))
        }
        4 => {
            let links: String = (0..15_000).map(|link| format!("a{link}: a{}\n", link + 1)).collect();
            Grammar::Lark(format!("start: a0\n{links}a15000: \"x{number}\"\n"))
        }
        _ => {
            let links: String =
                (0..5_000).map(|link| format!(r##""{link}":{{"$ref":"#/$defs/{}"}},"##, link + 1)).collect();
            Grammar::JsonSchema(format!(
                r##"{{"$ref":"#/$defs/0","$defs":{{{links}"5000":{{"const":{number}}}}}}}"##
            ))
        }
    }
}

/// Helper processes of a process, and the processes in which they compile.
pub(crate) fn helpers(process: u32) -> Vec<u32> {
    children(process).into_iter().flat_map(|child| std::iter::once(child).chain(helpers(child))).collect()
}

fn children(process: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let children = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    children
        .flat_map(|all| all.split_whitespace().filter_map(|child| child.parse().ok()).collect::<Vec<_>>())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_grammars_end_nothing_and_delay_nobody_else() -> Result<()> {
    const FLOODS: usize = 8;
    let (cluster, _folder) = start("--workers=1").await?;
    let mut tenant = cluster.client().await?;
    generate(&mut tenant, Some(Grammar::Regex("[a-c]{3}".to_owned())), "t").await?;
    let peak = || async {
        anyhow::Ok(scrape(cluster.router.metrics).await?.total("process_resident_memory_peak_bytes")? / MIB)
    };
    let before = peak().await?;
    let over = Arc::new(AtomicBool::new(false));
    let refused = Arc::new(AtomicUsize::new(0));
    let mut flood = JoinSet::new();
    for at in 0..FLOODS {
        let (mut client, over, refused) = (cluster.client().await?, over.clone(), refused.clone());
        flood.spawn(async move {
            for number in (at..).step_by(FLOODS) {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                let error = generate(&mut client, Some(hostile(number)), "f").await.err();
                let error = error.with_context(|| format!("hostile grammar {number} was served"))?;
                ensure!(error.code() == Code::InvalidArgument, "hostile grammar {number}: {error:?}");
                refused.fetch_add(1, Ordering::Relaxed);
            }
            anyhow::Ok(())
        });
    }
    eventually("the flood waits for its turns", || async {
        let waiting =
            scrape(cluster.router.metrics).await?.total("inflight_router_grammar_queue_requests")?;
        ensure!(waiting >= 2.0, "{waiting} wait");
        Ok(())
    })
    .await?;
    let mut waits = Vec::new();
    for number in 0..10 {
        generate(&mut tenant, None, "t").await?;
        // A new grammar each time, so that it is compiled.
        let begun = Instant::now();
        let text = generate(&mut tenant, Some(Grammar::Regex(format!("[a-c]{{3}}{number}"))), "t").await?;
        waits.push(begun.elapsed());
        ensure!(text.len() == 4 && text.ends_with(&number.to_string()), "{text:?}");
    }
    over.store(true, Ordering::Relaxed);
    while let Some(ended) = flood.join_next().await {
        ended??;
    }
    waits.sort();
    let grown = peak().await? - before;
    println!(
        "{} hostile grammars refused; the tenant's took {:?} in the median, {:?} at most; the router took {grown:.0} MiB",
        refused.load(Ordering::Relaxed),
        waits[waits.len() / 2],
        waits[waits.len() - 1]
    );
    ensure!(grown < 256.0, "the router took {grown:.0} MiB");
    let members = [&cluster.router, &cluster.workers[0]];
    for member in members {
        ensure!(is_alive(member.pid), "process {} has ended", member.pid);
    }
    // A slot is free for it, whatever the flood compiles.
    ensure!(waits[0] < Duration::from_secs(1), "the tenant waited {waits:?}");
    Ok(())
}

/// Bytes of memory that are less than any helper has.
const LITTLE_MEMORY: u64 = 16 << 20;

/// Lets every further allocation of a process fail that takes memory from the system.
fn limit_memory(pid: u32, bytes: u64) -> Result<()> {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: `limit` is valid during the call, and the old limits are not asked for.
    let set =
        unsafe { libc::prlimit(pid.cast_signed(), libc::RLIMIT_AS, &raw const limit, std::ptr::null_mut()) };
    ensure!(set == 0, "no limit of process {pid}: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Signals to the helper processes of some owners, in turns of 16: most kill, two take their memory, one stops.
#[derive(Default)]
struct Signals {
    sent: usize,
    seen: BTreeSet<u32>,
    /// A stopped helper, which its owner detects by the missing pongs.
    stopped: BTreeSet<u32>,
}

impl Signals {
    fn send(&mut self, owner: u32) {
        let direct = children(owner);
        for process in helpers(owner) {
            self.seen.insert(process);
            if self.stopped.contains(&process) {
                continue;
            }
            // A helper without room for more memory fails at its next allocation; a compilation without it would be refused, as one that
            // takes too much.
            let sent = match self.sent % 16 {
                15 => {
                    self.stopped.insert(process);
                    kill(process, libc::SIGSTOP).is_ok()
                }
                3 | 11 if direct.contains(&process) => limit_memory(process, LITTLE_MEMORY).is_ok(),
                _ => kill(process, libc::SIGKILL).is_ok(),
            };
            self.sent += usize::from(sent);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn helpers_that_are_killed_stopped_and_short_of_memory_lose_no_stream_and_change_no_verdict()
-> Result<()> {
    const CLIENTS: usize = 4;
    let seconds = if inflight_fixtures::is_thorough() { 60 } else { 5 };
    let (cluster, _folder) = start("--workers=2").await?;
    let over = Arc::new(AtomicBool::new(false));
    let answered: Arc<[AtomicUsize; CLIENTS]> = Arc::default();
    let mut clients = JoinSet::new();
    for at in 0..CLIENTS {
        let (mut client, over, answered) = (cluster.client().await?, over.clone(), answered.clone());
        clients.spawn(async move {
            let mut number = at;
            while !over.load(Ordering::Relaxed) {
                // One in four has no text that matches, which is the same verdict however often its compilation is cut off.
                let (regex, matches) = match number % 4 {
                    0 => (format!("{number}(?=a)"), false),
                    _ => (format!("[xyz]{{2}}{number}"), true),
                };
                let outcome = generate(&mut client, Some(Grammar::Regex(regex.clone())), "t").await;
                match outcome {
                    Ok(text) if matches => ensure!(text.ends_with(&number.to_string()), "{regex}: {text:?}"),
                    Err(status) if !matches && status.code() == Code::InvalidArgument => {}
                    other => anyhow::bail!("{regex}: {other:?}"),
                }
                answered[at].fetch_add(1, Ordering::Relaxed);
                number += 4;
            }
            anyhow::Ok(())
        });
    }
    let counts = || answered.each_ref().map(|count| count.load(Ordering::Relaxed));
    let owners: Vec<u32> =
        std::iter::once(&cluster.router).chain(&cluster.workers).map(|member| member.pid).collect();
    let (begun, mut signals, mut rounds) = (Instant::now(), Signals::default(), 0);
    while begun.elapsed() < Duration::from_secs(seconds) && clients.len() == CLIENTS {
        // Each round sends two signals; the second one may reach a helper that still loads its vocabulary. The next round starts once
        // every client has received another answer. A request is retried three times, so no request meets more signals than it has
        // retries, on a slow machine too.
        let before = counts();
        owners.iter().for_each(|owner| signals.send(*owner));
        tokio::time::sleep(Duration::from_millis(60 * (rounds % 6))).await;
        owners.iter().for_each(|owner| signals.send(*owner));
        rounds += 1;
        while clients.len() == CLIENTS && counts().iter().zip(&before).any(|(now, before)| now <= before) {
            tokio::select! {
                biased;
                Some(ended) = clients.join_next() => ended??,
                () = tokio::time::sleep(Duration::from_millis(20)) => {}
            }
        }
    }
    over.store(true, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended??;
    }
    let total: usize = counts().iter().sum();
    println!(
        "{total} streams and refusals while {} signals in {rounds} rounds hit {} helper processes",
        signals.sent,
        signals.seen.len()
    );
    ensure!(signals.sent > 10 && total > 10);
    for owner in owners {
        ensure!(is_alive(owner), "process {owner} has ended");
    }
    Ok(())
}
