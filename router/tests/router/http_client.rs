//! HTTP/1.1 client on the bytes of the wire.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use inflight_router::{HttpOptions, Options};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

use crate::cluster::Cluster;
use inflight_scripted::{ScriptedSession, ScriptedWorker, WorkerProfile};

/// Options with the HTTP APIs on a free port.
pub fn with_http(http: HttpOptions) -> Options {
    let listen = "127.0.0.1:0".parse().unwrap();
    Options { http: HttpOptions { listen, ..http }, ..Options::default() }
}

/// A router that serves HTTP, its only worker and the session of the worker.
pub struct HttpCluster {
    pub cluster: Cluster,
    pub session: ScriptedSession,
    pub worker: ScriptedWorker,
    pub address: SocketAddr,
}

impl HttpCluster {
    pub async fn start(options: Options) -> Self {
        Self::over(WorkerProfile::default(), options).await
    }

    pub async fn over(profile: WorkerProfile, options: Options) -> Self {
        let http = Self::ungranted(profile, options).await;
        http.session.grant(64, 1 << 16);
        http
    }

    /// Starts a cluster whose worker grants nothing, so that requests queue.
    pub async fn ungranted(profile: WorkerProfile, options: Options) -> Self {
        let mut worker = ScriptedWorker::start(profile).await;
        let cluster = Cluster::start(&[&worker], options).await;
        let session = worker.session().await;
        cluster.handle.ready().await;
        let address = cluster.http.unwrap();
        Self { cluster, session, worker, address }
    }

    pub async fn post(&self, path: &str, body: &str) -> Call {
        Call::send(self.address, "POST", path, &[], body.as_bytes()).await
    }

    pub async fn get(&self, path: &str) -> Response {
        Call::send(self.address, "GET", path, &[], b"").await.response().await
    }

    /// Posts a body that is refused; returns the status and the error.
    pub async fn refused(&self, path: &str, body: &str) -> (u16, Value) {
        let response = self.post(path, body).await.response().await;
        (response.status, response.json()["error"].clone())
    }
}

/// Call whose response is read.
pub struct Call {
    connection: BufReader<TcpStream>,
}

/// Response in one piece.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    pub body: String,
}

impl Response {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl Call {
    /// Sends a request on a new connection.
    pub async fn send(
        address: SocketAddr,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Self {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let mut head =
            format!("{method} {path} HTTP/1.1\r\nhost: {address}\r\ncontent-length: {}\r\n", body.len());
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        // A server that refuses a large body may close before it has read it.
        let _ = stream.write_all(body).await;
        Self { connection: BufReader::new(stream) }
    }

    /// Returns a call over a connection on which the test has written the request.
    pub fn over(stream: TcpStream) -> Self {
        Self { connection: BufReader::new(stream) }
    }

    /// Reads the status and the headers.
    pub async fn head(&mut self) -> (u16, BTreeMap<String, String>) {
        let mut line = String::new();
        self.connection.read_line(&mut line).await.unwrap();
        let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no status in {line:?}"));
        let status = status.parse().unwrap();
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            self.connection.read_line(&mut line).await.unwrap();
            let Some((name, value)) = line.trim_end().split_once(": ") else { break };
            headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        (status, headers)
    }

    /// Reads the next chunk; `None` after the last.
    pub async fn chunk(&mut self) -> Option<String> {
        let mut line = String::new();
        self.connection.read_line(&mut line).await.unwrap();
        let size = usize::from_str_radix(line.trim_end(), 16).unwrap_or_else(|_| panic!("{line:?}"));
        let mut data = vec![0; size + 2];
        self.connection.read_exact(&mut data).await.unwrap();
        data.truncate(size);
        (size > 0).then(|| String::from_utf8(data).unwrap())
    }

    /// Reads the body until it contains `text`. Returns what it has read.
    pub async fn until(&mut self, text: &str) -> String {
        let mut received = String::new();
        while !received.contains(text) {
            received.push_str(&self.chunk().await.unwrap());
        }
        received
    }

    /// Reads chunks up to `count` keep-alive comments in a row, and returns what came before them.
    pub async fn until_comments(&mut self, count: usize) -> String {
        let (mut body, mut comments) = (String::new(), 0);
        while comments < count {
            let chunk = self.chunk().await.expect("the stream ended");
            comments = if chunk == KEEP_ALIVE { comments + 1 } else { 0 };
            if comments == 0 {
                body.push_str(&chunk);
            }
        }
        body
    }

    /// Reads the chunks up to the end of a stream whose headers were read.
    pub async fn rest(mut self) -> Vec<Event> {
        let mut body = String::new();
        while let Some(chunk) = self.chunk().await {
            body.push_str(&chunk);
        }
        parse_events(&body)
    }

    /// Reads a whole response.
    pub async fn response(mut self) -> Response {
        let (status, headers) = self.head().await;
        let mut body = String::new();
        match headers.get("content-length") {
            Some(length) => {
                let mut data = vec![0; length.parse().unwrap()];
                self.connection.read_exact(&mut data).await.unwrap();
                body = String::from_utf8(data).unwrap();
            }
            None if headers.contains_key("transfer-encoding") => {
                while let Some(chunk) = self.chunk().await {
                    body.push_str(&chunk);
                }
            }
            None => {}
        }
        Response { status, headers, body }
    }

    /// Reads a stream to its end, and checks that it is one.
    pub async fn events(self) -> Vec<Event> {
        let response = self.response().await;
        assert_eq!(response.status, 200, "{response:?}");
        assert_eq!(response.headers["content-type"], "text/event-stream; charset=utf-8");
        parse_events(&response.body)
    }
}

/// Server-sent event.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// Cursor.
    pub id: Option<String>,
    pub name: Option<String>,
    pub data: String,
}

impl Event {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Parses events strictly: an optional id and name, and one line of data each; comments are skipped.
pub fn parse_events(body: &str) -> Vec<Event> {
    let mut events = Vec::new();
    if body.is_empty() {
        return events;
    }
    for block in body.strip_suffix("\n\n").unwrap_or_else(|| panic!("cut: {body:?}")).split("\n\n") {
        if block.starts_with(':') {
            continue;
        }
        let (id, block) = match block.strip_prefix("id: ") {
            Some(rest) => {
                let (id, block) = rest.split_once('\n').unwrap();
                (Some(id.to_owned()), block)
            }
            None => (None, block),
        };
        let (name, data) = match block.strip_prefix("event: ") {
            Some(rest) => {
                let (name, data) = rest.split_once('\n').unwrap();
                (Some(name.to_owned()), data)
            }
            None => (None, block),
        };
        let data = data.strip_prefix("data: ").unwrap_or_else(|| panic!("{block:?}"));
        assert!(!data.contains('\n'), "{block:?}");
        events.push(Event { id, name, data: data.to_owned() });
    }
    events
}

/// Replaces the creation time in a response, which differs from run to run, by 0.
pub fn timeless(text: &str) -> String {
    ["\"created\":", "\"created_at\":"].iter().fold(text.to_owned(), |text, key| {
        let mut parts = text.split(key);
        let first = parts.next().unwrap_or_default().to_owned();
        parts.fold(first, |out, part| {
            format!("{out}{key}0{}", part.trim_start_matches(|c: char| c.is_ascii_digit()))
        })
    })
}

/// Returns a request on the bytes of the wire, to be sent over the test's own connection.
pub fn raw_post(path: &str, body: &str) -> Vec<u8> {
    format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}", body.len())
        .into_bytes()
}

/// Comment of a stream without output.
pub const KEEP_ALIVE: &str = ": keep-alive\n\n";

/// Generating endpoints with the beginning of their bodies.
pub const ENDPOINTS: [(&str, &str); 4] = [
    ("/v1/chat/completions", r#"{"messages":[{"role":"user","content":"a"}]"#),
    ("/v1/completions", r#"{"prompt":"a""#),
    ("/v1/responses", r#"{"input":"a""#),
    ("/v1/messages", r#"{"max_tokens":9,"messages":[{"role":"user","content":"a"}]"#),
];

/// A keep-alive interval that tests can wait for.
pub const SHORT: Duration = Duration::from_millis(30);
