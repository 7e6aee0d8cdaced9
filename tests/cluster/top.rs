//! `inflight top` in a pseudo-terminal: with a scripted Admin service, and with a real cluster.

use anyhow::{Context, Result, ensure};
use inflight_harness::{
    AdminServer, LocalCluster, PseudoTerminal, Script, TokenServer, eventually, kill, run,
};
use inflight_proto::v1::{
    ClusterView, GenerateRequest, GetRequestResponse, LifeEvent, RequestState, RequestView, TenantView,
    WatchResponse, WorkerView,
};

use crate::program;
use crate::requests::{GenerationResult, sampled};

fn request(number: u64, id: &str, tenant: &str, state: RequestState) -> RequestView {
    RequestView {
        number,
        request_id: id.to_owned(),
        tenant: tenant.to_owned(),
        state: state.into(),
        age_ms: 10_000u64.saturating_sub(1_000 * number),
        prompt_tokens: 100,
        output_tokens: 7,
        worker: "worker-1".to_owned(),
        attempts: 1,
        ..RequestView::default()
    }
}

fn update(number: u64, requests: Vec<RequestView>) -> WatchResponse {
    let cluster = ClusterView {
        router: "router-0".to_owned(),
        open_requests: requests.len() as u32,
        ..ClusterView::default()
    };
    let worker =
        WorkerView { name: "worker-1".to_owned(), state: "connected".to_owned(), ..WorkerView::default() };
    let tenant =
        TenantView { tenant: "acme".to_owned(), share: 1.0, fair_share: 1.0, ..TenantView::default() };
    WatchResponse {
        number,
        unix_ms: 1_764_079_402_000 + 1_000 * number,
        cluster: Some(cluster),
        workers: vec![worker],
        tenants: vec![tenant],
        requests,
        ..WatchResponse::default()
    }
}

/// Starts `inflight top` for a router in a terminal of 24 rows.
fn start(router: &str, columns: u16) -> Result<PseudoTerminal> {
    PseudoTerminal::start(program(), &["top", "--router", router, "--interval=100ms"], &[], 24, columns)
}

/// Width of the longest line of a screen.
fn longest(screen: &str) -> usize {
    screen.lines().map(|line| line.chars().count()).max().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watched_router_may_go_away_and_come_back() -> Result<()> {
    let hostile = "\u{1b}]0;owned\u{7}\u{1b}[2J\u{202e}evil\r\n";
    let both = vec![
        request(1, "first", "acme", RequestState::Decode),
        request(2, hostile, "beta", RequestState::Queued),
    ];
    let mut server = AdminServer::start(update(1, both), None).await?;
    let events =
        vec![LifeEvent { kind: "arrived".to_owned(), detail: "at noon".to_owned(), ..LifeEvent::default() }];
    let life = |state, events| GetRequestResponse {
        request: Some(request(1, "first", "acme", state)),
        events,
        ..GetRequestResponse::default()
    };
    server.set_life(1, life(RequestState::Decode, events.clone()));
    let mut terminal = start(&server.address.to_string(), 80)?;
    terminal.wait_for("first").await?;
    // Controls are replaced, and the name is cut off at its column.
    terminal.wait_for("]0;owned").await?;
    let watched = server.watches();
    ensure!(watched.len() == 1 && watched[0].updates_per_second == 10, "{watched:?}");

    server.send(update(2, vec![request(3, "third", "acme", RequestState::Prefill)]));
    terminal.wait_for("third").await?;
    terminal.type_keys("/THIRD\r")?;
    terminal
        .wait_until("the filter", |screen| screen.contains("third") && screen.contains("1 of 3 requests"))
        .await?;
    terminal.type_keys("\u{1b}")?;
    terminal.wait_for("3 of 3 requests").await?;

    // Follow the first request: its life is read again while it is shown.
    terminal.type_keys("\r")?;
    terminal.wait_for("at noon").await?;
    let lost = LifeEvent {
        at_ms: 1_500,
        kind: "lost".to_owned(),
        detail: "killed".to_owned(),
        ..LifeEvent::default()
    };
    server.set_life(1, life(RequestState::Retry, [events, vec![lost]].concat()));
    terminal.wait_for("killed").await?;
    terminal.type_keys("\r")?;
    terminal.wait_for("third").await?;

    server.stop().await?;
    terminal.wait_for("DISCONNECTED").await?;
    terminal.wait_for("Connection refused").await?;
    let screen = terminal.contents();
    ensure!(screen.contains("third"), "the last state is gone:\n{screen}");
    server.begin_with(update(1, vec![request(1, "restarted", "acme", RequestState::Queued)]));
    server.restart().await?;
    terminal
        .wait_until("the new state", |screen| {
            screen.contains("restarted") && !screen.contains("third") && !screen.contains("DISCONNECTED")
        })
        .await?;

    terminal.type_keys("q")?;
    let status = terminal.wait().await?;
    ensure!(status.success(), "{status}:\n{}", terminal.contents());
    terminal.check_restored()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_terminal_is_restored_after_a_signal_and_after_an_error() -> Result<()> {
    let server = AdminServer::start(update(1, Vec::new()), None).await?;
    let router = format!("http://{}", server.address);
    for signal in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT] {
        let mut terminal = start(&router, 80)?;
        terminal.wait_for("no requests").await?;
        terminal.signal(signal)?;
        let status = terminal.wait().await?;
        ensure!(status.code() == Some(130), "signal {signal}: {status}:\n{}", terminal.contents());
        terminal.check_restored()?;
    }
    // The router comes back without the Admin service.
    let mut server = server;
    let mut terminal = start(&router, 40)?;
    terminal.wait_for("no requests").await?;
    server.stop().await?;
    terminal.wait_for("DISCONNECTED").await?;
    let listener = tokio::net::TcpListener::bind(server.address).await?;
    let incoming = tokio_stream_of(listener);
    let serving = tokio::spawn(TokenServer::new(Script::default()).serve_grpc(incoming));
    let status = terminal.wait().await?;
    serving.abort();
    ensure!(status.code() == Some(1), "{status}:\n{}", terminal.contents());
    terminal.wait_for("--admin read-only").await?;
    terminal.check_restored()
}

/// Connections of a listener.
fn tokio_stream_of(
    listener: tokio::net::TcpListener,
) -> impl futures::Stream<Item = std::io::Result<tokio::net::TcpStream>> {
    futures::stream::unfold(listener, |listener| async {
        let accepted = listener.accept().await.map(|(stream, _)| stream);
        Some((accepted, listener))
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn routers_that_cannot_be_watched_are_reported_without_a_terminal() -> Result<()> {
    let plain = TokenServer::new(Script::default()).listen_grpc().await?.to_string();
    let top = |router: &str, flags: &[&str]| {
        let arguments: Vec<String> =
            ["top", "--router", router].iter().chain(flags).map(|argument| (*argument).to_owned()).collect();
        async move {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            run(program(), &arguments, "").await
        }
    };
    let without = top(&plain, &["--once"]).await?;
    ensure!(without.code == Some(1) && without.stderr.contains("--admin"), "{without:?}");
    let closed = top("127.0.0.1:1", &["--json"]).await?;
    ensure!(
        closed.code == Some(3) && closed.stderr.contains("no connection to http://127.0.0.1:1"),
        "{closed:?}"
    );
    let piped = top(&plain, &[]).await?;
    ensure!(piped.code == Some(2) && piped.stderr.contains("--once"), "{piped:?}");

    let hostile = vec![request(1, "\u{1b}[2J", "acme", RequestState::Decode)];
    let server = AdminServer::start(update(1, hostile), Some("secret")).await?;
    let router = server.address.to_string();
    let anonymous = top(&router, &["--once"]).await?;
    ensure!(anonymous.code == Some(7) && anonymous.stderr.contains("--api-key"), "{anonymous:?}");
    let wrong = top(&router, &["--once", "--api-key=other"]).await?;
    ensure!(wrong.code == Some(7) && wrong.stderr.contains("admin = true"), "{wrong:?}");
    let once = top(&router, &["--once", "--api-key=secret", "--interval=100ms"]).await?;
    ensure!(once.code == Some(0) && once.stdout.contains("�[2J"), "{once:?}");
    ensure!(once.stdout.contains("worker-1") && once.stdout.contains("acme"), "{once:?}");
    // Of two routers, the one that can be watched is.
    let json = top(&format!("{plain},{router}"), &["--once", "--json", "--api-key=secret"]).await;
    let json = json?;
    ensure!(
        json.code == Some(1) && json.stderr.contains("--admin"),
        "a router without --admin is an error: {json:?}"
    );
    let json = top(&format!("127.0.0.1:1,{router}"), &["--once", "--json", "--api-key=secret"]).await?;
    let line: serde_json::Value = serde_json::from_str(&json.stdout).with_context(|| format!("{json:?}"))?;
    ensure!(line["requests"][0]["requestId"] == "\u{1b}[2J" && line["number"] == 1, "{line}");
    ensure!(!json.stdout.contains('\u{1b}'), "controls are escaped: {json:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_display_follows_the_size_of_its_terminal() -> Result<()> {
    let many = (1..200).map(|number| {
        request(number % 9 + 9 * (number / 9), &format!("id-{number}"), "acme", RequestState::Decode)
    });
    let server = AdminServer::start(update(1, many.collect()), None).await?;
    let mut terminal = start(&server.address.to_string(), 80)?;
    terminal.wait_for("TENANT").await?;
    for (rows, columns) in [(24, 40), (5, 20), (1, 1), (2, 3), (60, 200), (12, 40), (24, 80)] {
        terminal.resize(rows, columns)?;
        let drawn = terminal.written();
        eventually("a frame", || async {
            ensure!(terminal.written() > drawn, "nothing was drawn");
            Ok(())
        })
        .await?;
        if rows >= 12 {
            terminal.wait_for("REQUEST").await?;
            ensure!(longest(&terminal.contents()) <= usize::from(columns), "{}", terminal.contents());
        }
    }
    terminal.type_keys("?")?;
    terminal.wait_for("this help").await?;
    terminal.type_keys("q")?;
    ensure!(terminal.wait().await?.success(), "{}", terminal.contents());
    terminal.check_restored()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_is_shown_at_80_and_at_40_columns_while_a_worker_is_killed() -> Result<()> {
    // More than the test waits for, on any machine: the client ends the stream.
    const TOKENS: u32 = 60_000;
    let flags = ["--workers=2", "--device=sim:flat,step=0.02", "--max-context-tokens=65536"];
    let cluster = LocalCluster::start(program(), &flags).await?;
    let mut client = cluster.client().await?;
    let request =
        GenerateRequest { request_id: "watched".to_owned(), ..sampled("Once upon a time", TOKENS, 1) };
    let mut stream = client.generate(request).await?.into_inner();
    GenerationResult::until_first_tokens(&mut stream).await?;

    let mut terminals = Vec::new();
    for columns in [80, 40] {
        let mut terminal = start(&cluster.endpoint, columns)?;
        terminal
            .wait_until("the request", |screen| screen.contains("watched") && screen.contains("decode"))
            .await?;
        terminal
            .wait_until("the workers", |screen| screen.contains("worker-0") && screen.contains("worker-1"))
            .await?;
        // Its slot and blocks come with the first observed iterations.
        if columns == 80 {
            terminal.wait_until("a step time", |screen| screen.contains("0ms")).await?;
        }
        let screen = terminal.contents();
        ensure!(longest(&screen) <= usize::from(columns), "{screen}");
        terminal.type_keys("/no such request\r")?;
        terminal.wait_for("no request matches").await?;
        terminal.type_keys("\u{1b}")?;
        terminal.wait_for("watched").await?;
        terminal.resize(30, columns - 8)?;
        terminal
            .wait_until("the new size", |screen| {
                screen.contains("watched") && longest(screen) <= usize::from(columns - 8)
            })
            .await?;
        terminal.resize(24, columns)?;
        terminal.type_keys("\r")?;
        terminal.wait_for("first_token").await?;
        terminals.push(terminal);
    }

    let router = ["top", "--router", &cluster.endpoint, "--json", "--once"];
    let json = run(program(), &router, "").await?;
    let update: serde_json::Value =
        serde_json::from_str(&json.stdout).with_context(|| format!("{json:?}"))?;
    let view = &update["requests"][0];
    ensure!(view["requestId"] == "watched" && view["state"] == "decode", "{update}");
    let carrier = cluster.workers.iter().find(|worker| view["worker"] == worker.name.as_str());
    kill(carrier.with_context(|| format!("no worker of the request: {update}"))?.pid, libc::SIGKILL)?;
    for terminal in &mut terminals {
        terminal.wait_for("lost").await?;
        terminal.wait_for("resumed").await?;
    }
    drop(stream);
    for terminal in &mut terminals {
        terminal.wait_for("ended").await?;
        terminal.type_keys("\u{1b}")?;
        terminal.wait_for("no requests").await?;
        terminal.type_keys("e")?;
        terminal.wait_for("watched").await?;
        terminal.type_keys("q")?;
        ensure!(terminal.wait().await?.success(), "{}", terminal.contents());
        terminal.check_restored()?;
    }
    let once = run(program(), &["top", "--router", &cluster.endpoint, "--once"], "").await?;
    ensure!(once.code == Some(0) && once.stdout.contains("worker-1"), "{once:?}");
    Ok(())
}
