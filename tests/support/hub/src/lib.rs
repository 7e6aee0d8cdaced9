//! Stand-in of the Hugging Face Hub on loopback: revisions, files, redirections of large files to another host, ranges, private and gated
//! models, and faults on demand.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

mod connection;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use inflight_hub::Settings;
use sha1::{Digest as _, Sha1};
use sha2::Sha256;

/// Files of at least so many bytes are kept elsewhere, and their etag is a SHA-256.
const LARGE: usize = 1000;

/// File of a model, with its etag.
#[derive(Debug, Clone)]
struct File {
    etag: String,
    bytes: Arc<Vec<u8>>,
}

/// Files by their paths.
type Files = BTreeMap<String, File>;

/// What happens to requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A status, and the seconds of its `Retry-After`.
    Status(u16, Option<u64>),
    /// The connection ends after so many bytes of the body.
    Cut(usize),
    /// No byte of the body comes until the client ends the connection.
    Stall,
    /// One byte of the body is another one.
    Wrong,
    /// Ranges are not known.
    NoRanges,
    /// The address of the bytes is not good any more.
    Expired,
}

/// Request that the stand-in has seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Whether it came to the host of large files.
    pub elsewhere: bool,
    /// Method and path.
    pub line: String,
    /// Whether it had a token.
    pub has_token: bool,
    /// First byte of its range.
    pub from: Option<u64>,
}

#[derive(Debug, Default)]
struct Model {
    refs: BTreeMap<String, String>,
    commits: BTreeMap<String, Files>,
    token: Option<String>,
    gated: bool,
}

#[derive(Debug, Default)]
struct State {
    models: BTreeMap<String, Model>,
    /// Faults with a part of the path, and how often they happen.
    faults: Vec<(String, Fault, u32)>,
    seen: Vec<Seen>,
    /// Address of the host of large files in redirections.
    elsewhere: String,
}

/// The stand-in; it ends with the value.
#[derive(Debug)]
pub struct StandIn {
    state: Arc<Mutex<State>>,
    hub: SocketAddr,
    elsewhere: SocketAddr,
    ended: Arc<AtomicBool>,
}

impl StandIn {
    /// Starts a stand-in without models.
    pub fn start() -> Self {
        let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (hub, elsewhere) = (listen(), listen());
        let address = format!("http://{}", elsewhere.local_addr().unwrap());
        let state = Arc::new(Mutex::new(State { elsewhere: address, ..State::default() }));
        let ended = Arc::new(AtomicBool::new(false));
        let this =
            Self { state, hub: hub.local_addr().unwrap(), elsewhere: elsewhere.local_addr().unwrap(), ended };
        for (listener, is_elsewhere) in [(hub, false), (elsewhere, true)] {
            let (state, ended) = (this.state.clone(), this.ended.clone());
            std::thread::spawn(move || {
                for stream in listener.incoming().map_while(Result::ok) {
                    if ended.load(Ordering::Relaxed) {
                        return;
                    }
                    let state = state.clone();
                    std::thread::spawn(move || connection::serve(&stream, &state, is_elsewhere));
                }
            });
        }
        this
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Address of the Hub.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.hub)
    }

    /// Addresses at which the Hub and the host of large files listen.
    pub fn addresses(&self) -> [SocketAddr; 2] {
        [self.hub, self.elsewhere]
    }

    /// Names the host of large files by another address in redirections, such as that of a relay with TLS in front of it.
    pub fn redirect_to(&self, base: &str) {
        base.clone_into(&mut self.lock().elsewhere);
    }

    /// Returns settings for this Hub, with a cache.
    pub fn settings(&self, cache: &Path) -> Settings {
        let settings = Settings::of_variables(|_| None);
        let (endpoint, cache) = (self.endpoint(), cache.to_owned());
        Settings {
            endpoint,
            token: None,
            cache,
            connections: 4,
            part_bytes: 10_000,
            retry_pause: Duration::from_millis(1),
            ..settings
        }
    }

    /// Adds a commit of a model, to which a revision leads. Returns the commit.
    pub fn add(&self, repo: &str, revision: &str, files: &[(&str, Vec<u8>)]) -> String {
        let files: Files =
            files.iter().map(|(path, bytes)| ((*path).to_owned(), File::new(bytes.clone()))).collect();
        let mut digest = Sha1::new();
        files.iter().for_each(|(path, file)| digest.update(format!("{path} {}", file.etag)));
        let commit = hex(&digest.finalize());
        let mut state = self.lock();
        let model = state.models.entry(repo.to_owned()).or_default();
        model.refs.insert(revision.to_owned(), commit.clone());
        model.commits.insert(commit.clone(), files);
        commit
    }

    /// Adds the files of a directory.
    pub fn add_directory(&self, repo: &str, directory: &Path) -> String {
        let files: Vec<(String, Vec<u8>)> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap())
            .filter(|entry| entry.path().is_file())
            .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
            .collect();
        let files: Vec<(&str, Vec<u8>)> =
            files.iter().map(|(path, bytes)| (path.as_str(), bytes.clone())).collect();
        self.add(repo, "main", &files)
    }

    /// Makes a model private: only a token has it.
    pub fn set_token(&self, repo: &str, token: &str) {
        self.lock().models.get_mut(repo).unwrap().token = Some(token.to_owned());
    }

    /// Makes a model gated.
    pub fn set_gated(&self, repo: &str) {
        self.lock().models.get_mut(repo).unwrap().gated = true;
    }

    /// Lets a fault happen to the next `times` requests whose path has a text in it.
    pub fn fault(&self, part: &str, fault: Fault, times: u32) {
        self.lock().faults.push((part.to_owned(), fault, times));
    }

    /// Ends all faults.
    pub fn heal(&self) {
        self.lock().faults.clear();
    }

    /// Returns the requests since the last call.
    pub fn seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.lock().seen)
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        // They wait for a connection.
        _ = TcpStream::connect(self.hub);
        _ = TcpStream::connect(self.elsewhere);
    }
}

/// Returns bytes in hexadecimal digits.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl File {
    fn new(bytes: Vec<u8>) -> Self {
        Self { etag: etag(&bytes), bytes: Arc::new(bytes) }
    }
}

/// Returns the etag of a file, as the Hub has it.
fn etag(bytes: &[u8]) -> String {
    if bytes.len() >= LARGE {
        return hex(&Sha256::digest(bytes));
    }
    hex(&Sha1::digest([format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat()))
}
