//! One connection: requests one after the other.

use std::borrow::Cow;
use std::io::{BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};

use serde_json::json;

use super::{Fault, File, LARGE, Model, Seen, State};

struct Request {
    method: String,
    path: String,
    token: Option<String>,
    range: Option<(usize, usize)>,
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Arc<Vec<u8>>,
}

impl Answer {
    fn error(status: u16, code: &str, message: &str) -> Self {
        let headers = vec![("X-Error-Code", code.to_owned()), ("X-Error-Message", message.to_owned())];
        Self { status, headers, body: Arc::default() }
    }

    fn json(value: &serde_json::Value) -> Self {
        Self { status: 200, headers: Vec::new(), body: Arc::new(value.to_string().into_bytes()) }
    }
}

/// Serves a connection until it ends.
pub(super) fn serve(stream: &TcpStream, state: &Mutex<State>, elsewhere: bool) {
    let mut reader = BufReader::new(stream);
    while let Some(request) = read(&mut reader) {
        let fault = {
            let mut state = state.lock().unwrap();
            let line = format!("{} {}", request.method, request.path);
            let from = request.range.map(|(from, _)| from as u64);
            state.seen.push(Seen { elsewhere, line, has_token: request.token.is_some(), from });
            let is_hit = |(part, _, times): &&mut (String, Fault, u32)| {
                *times > 0 && request.path.contains(part.as_str())
            };
            let hit = state.faults.iter_mut().find(is_hit);
            hit.map(|(_, fault, times)| {
                *times -= 1;
                *fault
            })
        };
        let answer = match fault {
            Some(Fault::Status(status, pause)) => {
                let headers = pause.iter().map(|seconds| ("Retry-After", seconds.to_string())).collect();
                Answer { status, headers, body: Arc::default() }
            }
            Some(Fault::Expired) => Answer { status: 403, headers: Vec::new(), body: Arc::default() },
            _ => answer(&request, &state.lock().unwrap(), elsewhere),
        };
        if write(stream, &request, answer, fault).is_none() {
            _ = stream.shutdown(Shutdown::Both);
            return;
        }
    }
}

fn read(reader: &mut impl std::io::BufRead) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut request = Request { method, path, token: None, range: None };
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim().split_once(": ") else { return Some(request) };
        match name.to_ascii_lowercase().as_str() {
            "authorization" => request.token = value.strip_prefix("Bearer ").map(str::to_owned),
            "range" => {
                let (from, to) = value.strip_prefix("bytes=")?.split_once('-')?;
                request.range = Some((from.parse().ok()?, to.parse::<usize>().ok()? + 1));
            }
            _ => {}
        }
    }
}

fn answer(request: &Request, state: &State, elsewhere: bool) -> Answer {
    let path = request.path.trim_start_matches('/');
    if elsewhere {
        let wanted = path.split('?').next().unwrap_or_default();
        let mut files =
            state.models.values().flat_map(|model| model.commits.values()).flat_map(|files| files.values());
        return match files.find(|file| file.etag == wanted) {
            Some(File { bytes, .. }) => {
                let headers = vec![("ETag", "\"of-another-form\"".to_owned())];
                Answer { status: 200, headers, body: bytes.clone() }
            }
            None => Answer::error(404, "", ""),
        };
    }
    let is_api = path.starts_with("api/models/");
    let rest = path.strip_prefix("api/models/").unwrap_or(path);
    let mut parts = rest.splitn(4, '/');
    let mut next = || parts.next().unwrap_or_default();
    let repo = format!("{}/{}", next(), next());
    let (verb, rest) = (next().to_owned(), next().replace("%2F", "/"));
    // As the Hub does, which does not say which models there are.
    let hidden = || Answer::error(401, "RepoNotFound", "Repository not found");
    let Some(model) = state.models.get(&repo) else { return hidden() };
    if model.token.is_some() && model.token != request.token {
        return hidden();
    }
    if model.gated && !(is_api && verb == "refs") {
        return Answer::error(403, "GatedRepo", "Access to this model is restricted");
    }
    if is_api { listed(model, &verb, &rest) } else { resolved(model, &rest, &state.elsewhere) }
}

fn listed(model: &Model, verb: &str, rest: &str) -> Answer {
    if verb == "refs" {
        let names: Vec<_> = model
            .refs
            .keys()
            .map(|name| json!({"name": name, "ref": format!("refs/heads/{name}")}))
            .collect();
        return Answer::json(&json!({"branches": names, "tags": [], "converts": []}));
    }
    let rest = rest.split('?').next().unwrap_or_default();
    let commit = model.refs.get(rest).map_or(rest, String::as_str);
    let Some(files) = model.commits.get(commit) else {
        return Answer::error(404, "RevisionNotFound", "Invalid rev id");
    };
    if verb == "tree" {
        let file = |(path, file): (&String, &File)| json!({"type": "file", "path": path, "size": file.bytes.len(), "oid": file.etag});
        return Answer::json(&files.iter().map(file).collect());
    }
    let siblings: Vec<_> = files.keys().map(|path| json!({"rfilename": path})).collect();
    Answer::json(&json!({"id": "x", "sha": commit, "siblings": siblings, "gated": false}))
}

fn resolved(model: &Model, rest: &str, elsewhere: &str) -> Answer {
    let Some((commit, path)) = rest.split_once('/') else { return Answer::error(404, "", "") };
    let Some(File { etag, bytes }) = model.commits.get(commit).and_then(|files| files.get(path)) else {
        return Answer::error(404, "EntryNotFound", "Entry not found");
    };
    let mut headers = vec![("X-Repo-Commit", commit.to_owned())];
    if bytes.len() < LARGE {
        headers.push(("ETag", format!("\"{etag}\"")));
        return Answer { status: 200, headers, body: bytes.clone() };
    }
    headers.push(("X-Linked-ETag", format!("\"{etag}\"")));
    headers.push(("X-Linked-Size", bytes.len().to_string()));
    headers.push(("Location", format!("{elsewhere}/{etag}?signature=x")));
    Answer { status: 302, headers, body: Arc::default() }
}

/// Writes an answer; `None` if the connection ends with it.
fn write(mut stream: &TcpStream, request: &Request, answer: Answer, fault: Option<Fault>) -> Option<()> {
    let Answer { mut status, mut headers, body } = answer;
    let mut bytes = body.as_slice();
    if let (200, Some((from, to)), false) = (status, request.range, fault == Some(Fault::NoRanges)) {
        headers.push(("Content-Range", format!("bytes {from}-{}/{}", to - 1, bytes.len())));
        status = 206;
        bytes = bytes.get(from..to.min(bytes.len()))?;
    }
    let mut bytes = Cow::Borrowed(bytes);
    if fault == Some(Fault::Wrong)
        && let Some(byte) = bytes.to_mut().first_mut()
    {
        *byte ^= 1;
    }
    let mut head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n", bytes.len());
    headers.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
    stream.write_all(format!("{head}\r\n").as_bytes()).ok()?;
    if request.method == "HEAD" {
        return Some(());
    }
    if let Some(Fault::Cut(after)) = fault {
        stream.write_all(&bytes[..after.min(bytes.len())]).ok()?;
        return None;
    }
    if fault == Some(Fault::Stall) {
        // The client sends nothing more: its end is the end of this.
        _ = stream.read(&mut [0]);
        return None;
    }
    stream.write_all(&bytes).ok()
}
