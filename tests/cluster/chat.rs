//! `inflight chat` with messages from a pipe, and in a pseudo-terminal.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use inflight_fixtures::TempDir;
use inflight_harness::{LocalCluster, PseudoTerminal, run};
use inflight_proto::v1::generate_request::Input;
use inflight_proto::v1::{Chat, ChatMessage, GenerateRequest, SamplingParams, StopConditions};

use crate::program;
use crate::requests::{generate, model};

const MAX_TOKENS: u32 = 12;

/// Returns the request that the command sends for these messages.
fn request(messages: &[(&str, &str)]) -> GenerateRequest {
    let message = |(role, content): &(&str, &str)| ChatMessage {
        role: (*role).to_owned(),
        content: (*content).to_owned(),
        ..ChatMessage::default()
    };
    GenerateRequest {
        input: Some(Input::Chat(Chat {
            messages: messages.iter().map(message).collect(),
            ..Default::default()
        })),
        sampling: Some(SamplingParams { temperature: Some(0.0), ..SamplingParams::default() }),
        stop: Some(StopConditions { max_tokens: Some(MAX_TOKENS), ..StopConditions::default() }),
        ..GenerateRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_keeps_its_history_until_it_is_reset() -> Result<()> {
    let cluster = LocalCluster::start(program(), &["--workers=1"]).await?;
    let mut client = cluster.client().await?;
    let system = ("system", "Answer in one word.");
    let first = generate(&mut client, request(&[system, ("user", "Hello")])).await?.text;
    let messages = [system, ("user", "Hello"), ("assistant", &first), ("user", "And then?")];
    let second = generate(&mut client, request(&messages)).await?.text;
    ensure!(!first.is_empty() && first != second, "the answers tell nothing: {first:?}, {second:?}");
    let max_tokens = format!("--max-tokens={MAX_TOKENS}");
    let flags = [
        "chat",
        "--endpoint",
        &cluster.endpoint,
        "--temperature=0",
        &max_tokens,
        "--system=Answer in one word.",
    ];

    let typed = "Hello\n\n/help\nAnd then?\n/reset\nHello\n/exit\nnot sent\n";
    let finished = run(program(), &flags, typed).await?;
    ensure!(finished.code == Some(0), "{finished:?}");
    ensure!(finished.stdout == format!("{first}\n{second}\n{first}\n"), "{finished:?}, expected {second:?}");
    ensure!(finished.stderr.contains("forgets the conversation"), "{finished:?}");
    ensure!(!finished.stderr.contains('\u{1b}') && !finished.stdout.contains('\u{1b}'), "{finished:?}");

    // Of a pipe each line is a message, whatever it ends in, and settings are those of the next answers.
    let typed = "/set max_tokens 1\nHello\\\n/undo\n/set max_tokens default\n/set\n/set max_tokens 12\nHello\n/retry\n";
    let settings = run(program(), &flags, typed).await?;
    ensure!(settings.code == Some(0), "{settings:?}");
    ensure!(settings.stdout.ends_with(&format!("\n{first}\n{first}\n")), "{settings:?}");
    ensure!(settings.stdout.lines().count() == 2 + first.lines().count() * 2 - 1, "{settings:?}");
    ensure!(settings.stderr.contains("max_tokens          default"), "{settings:?}");

    // Beyond the context the answer fails, and what was said before it stays.
    let context = model(&mut client).await?.context_tokens as usize;
    let long = "word ".repeat(context);
    let typed = format!("{long}\nHello\n{long}\nAnd then?\n/rest\n");
    let failed = run(program(), &flags, &typed).await?;
    ensure!(failed.code == Some(4), "{failed:?}");
    ensure!(failed.stdout == format!("{first}\n{second}\n"), "{}", failed.stdout);
    let errors: Vec<&str> = failed.stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    let [alone, outgrown, unknown] = errors[..] else { anyhow::bail!("{errors:?}") };
    ensure!(alone.contains("too long") && !alone.contains("/reset"), "{alone}");
    ensure!(outgrown.contains("outgrown the model's context; /reset"), "{outgrown}");
    ensure!(unknown.contains("/rest is no command"), "{unknown}");

    let unknown = ["chat", "--endpoint", &cluster.endpoint, "--model=other"];
    let refused = run(program(), &unknown, "Hello\n").await?;
    let served = model(&mut client).await.context("the model")?.name;
    ensure!(refused.code == Some(4) && refused.stderr.contains(&served), "{refused:?}");
    Ok(())
}

/// Types keys that show `echo` as the last line, then a line break, and waits for the next prompt.
async fn enter(terminal: &mut PseudoTerminal, keys: &str, echo: &str) -> Result<()> {
    terminal.type_keys(keys)?;
    last_line(terminal, echo).await?;
    terminal.type_keys("\r")?;
    last_line(terminal, ">").await
}

/// Waits until this is the last line on the screen.
async fn last_line(terminal: &PseudoTerminal, line: &str) -> Result<()> {
    let last = |screen: &str| screen.trim_end().lines().next_back().map(str::trim_end) == Some(line);
    terminal.wait_until(line, last).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_in_a_terminal_is_edited_recalled_stopped_and_saved() -> Result<()> {
    const LEFT: &str = "\u{1b}[D";
    const UP: &str = "\u{1b}[A";
    let cluster = LocalCluster::start(
        program(),
        &["--workers=1", "--device=sim:flat,step=0.02", "--max-context-tokens=65536"],
    )
    .await?;
    let folder = TempDir::new("inflight-chat")?;
    let environment = [("XDG_STATE_HOME", folder.path().as_os_str().to_owned())];
    let flags = ["chat", "--endpoint", &cluster.endpoint, "--max-tokens=3"];
    let start = || PseudoTerminal::start(program(), &flags, &environment, 60, 120);
    let mut terminal = start()?;
    last_line(&terminal, ">").await?;

    enter(&mut terminal, &format!("Helo{LEFT}l"), "> Hello").await?;
    enter(&mut terminal, &format!("{UP} again"), "> Hello again").await?;
    terminal.type_keys("one\\\r")?;
    last_line(&terminal, ".").await?;
    enter(&mut terminal, "two", ". two").await?;
    enter(&mut terminal, "\u{1b}[200~/pasted\\\r/lines\u{1b}[201~\u{1}\u{1b}[A ", "/lines").await?;

    enter(&mut terminal, "/set max_tokens 60000", "> /set max_tokens 60000").await?;
    enter(&mut terminal, "/set ignore_eos on", "> /set ignore_eos on").await?;
    enter(&mut terminal, "/set", "> /set").await?;
    terminal.wait_for("max_tokens          60000").await?;
    enter(&mut terminal, "/stats on", "> /stats on").await?;
    terminal.type_keys("long\r")?;
    terminal
        .wait_until("an answer", |screen| {
            screen.split_once("> long\n").is_some_and(|(_, answer)| !answer.trim().is_empty())
        })
        .await?;
    terminal.type_keys("\u{3}")?;
    terminal.wait_for("longest pause").await?;
    last_line(&terminal, ">").await?;
    enter(&mut terminal, "/set max_tokens 3", "> /set max_tokens 3").await?;
    enter(&mut terminal, "next", "> next").await?;
    terminal.wait_for("3 output tokens · longest pause").await?;

    enter(&mut terminal, "/unod", "> /unod").await?;
    terminal.wait_for("/unod is no command; the nearest one is /undo").await?;
    enter(&mut terminal, "/und\t", "> /undo").await?;
    terminal.wait_for("removed the last message").await?;
    let file = folder.path().join("chat.json");
    let save = format!("/save {}", file.display());
    enter(&mut terminal, &save, &format!("> {save}")).await?;
    let messages: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&file)?)?;
    let of_user = |message: &&serde_json::Value| message["role"] == "user";
    let typed: Vec<_> = messages.as_array().context("an array")?.iter().filter(of_user).collect();
    let typed: Vec<_> = typed.iter().filter_map(|message| message["content"].as_str()).collect();
    ensure!(typed == ["Hello", "Hello again", "one\ntwo", " /pasted\\\n/lines", "long"], "{messages}");
    terminal.type_keys("\u{3}")?;
    terminal.wait_for("Ctrl-D or /exit ends").await?;
    last_line(&terminal, ">").await?;
    terminal.type_keys("\u{4}")?;
    let status = terminal.wait().await?;
    ensure!(status.success(), "{status}:\n{}", terminal.contents());
    terminal.check_restored()?;

    let history = folder.path().join("inflight/chat-history");
    let mode = |path: &Path| anyhow::Ok(std::fs::metadata(path)?.permissions().mode() & 0o777);
    ensure!(
        mode(&history)? == 0o600 && mode(history.parent().context("a folder")?)? == 0o700,
        "others may read it"
    );
    let mut terminal = start()?;
    last_line(&terminal, ">").await?;
    terminal.type_keys(UP)?;
    last_line(&terminal, &format!("> {save}")).await?;
    // Control-R searches.
    terminal.type_keys("\u{12}again")?;
    terminal.wait_for("Hello again").await?;
    terminal.signal(libc::SIGTERM)?;
    let status = terminal.wait().await?;
    ensure!(status.code() == Some(130), "{status}:\n{}", terminal.contents());
    terminal.check_restored()
}
