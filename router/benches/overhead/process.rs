//! Child processes of the measurement and their resource usage.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use inflight_options::ListenAt;
use inflight_router::{HttpOptions, Options, QueueLimits, Router};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

/// Child process running this program; killed on drop.
pub struct Child {
    pub address: String,
    /// Address of the HTTP APIs, of a router.
    pub http: String,
    pid: u32,
    _process: tokio::process::Child,
}

impl Child {
    pub async fn start(arguments: &[&str]) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(arguments)
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let address = lines.next_line().await.unwrap().expect("it says where it listens");
        let (address, http) = address.split_once(' ').unwrap_or((&address, ""));
        let (address, http) = (address.to_owned(), http.to_owned());
        Self { address, http, pid: process.id().unwrap(), _process: process }
    }

    /// Returns the CPU time of all its threads so far, system time included.
    pub fn cpu(&self) -> Duration {
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid)).unwrap();
        let nanos = threads.filter_map(|thread| {
            let text = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
            text.split(' ').next()?.parse::<u64>().ok()
        });
        Duration::from_nanos(nanos.sum())
    }

    /// Returns its write calls, to sockets and files.
    pub fn writes(&self) -> u64 {
        let io = fs::read_to_string(format!("/proc/{}/io", self.pid)).unwrap();
        io.lines().find_map(|line| line.strip_prefix("syscw: ")).unwrap().parse().unwrap()
    }

    /// Returns its resident memory in KiB.
    pub fn resident_kib(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }
}

pub async fn serve_router(source: &str) {
    // Metrics are recorded, as in production.
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    metrics::set_global_recorder(recorder).unwrap();
    let mut options = Options {
        listen: ([127, 0, 0, 1], 0).into(),
        http: HttpOptions { listen: ListenAt::Address(([127, 0, 0, 1], 0).into()), ..HttpOptions::default() },
        workers: vec![source.to_owned()],
        streams_max: 1 << 16,
        ..Options::default()
    };
    options.dispatcher.queue.limits = QueueLimits { requests: 1 << 16, tokens: 1 << 40 };
    let router = Router::bind(options).await.unwrap();
    let (address, handle) = (router.address(), router.handle());
    let http = router.http_address().unwrap();
    tokio::spawn(async move {
        handle.ready().await;
        println!("{address} {http}");
    });
    router.serve(CancellationToken::new()).await.unwrap();
}
