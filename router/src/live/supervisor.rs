//! Commands to the supervisor of `inflight up`, over its Unix socket: one line each way.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

/// Time for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest answer.
const ANSWER_BYTES_MAX: u64 = 1024;

/// Kills a worker process, which the supervisor starts again. Workers are numbered from 1.
///
/// # Errors
/// The supervisor of `inflight up` does not answer on its socket, or rejects the command.
pub(crate) async fn kill(socket: &Path, worker: usize) -> Result<(), String> {
    let answer = async {
        let stream = UnixStream::connect(socket).await?;
        let (reader, mut writer) = stream.into_split();
        writer.write_all(format!("kill {worker}\n").as_bytes()).await?;
        let mut line = String::new();
        BufReader::new(reader.take(ANSWER_BYTES_MAX)).read_line(&mut line).await?;
        Ok::<_, io::Error>(line)
    };
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, answer).await;
    let answer = answer.map_err(|_| "the supervisor does not answer".to_owned())?;
    match answer.map_err(|error| format!("the supervisor cannot be reached: {error}"))?.trim_end() {
        "ok" => Ok(()),
        refusal => Err(format!("the supervisor refused: {refusal}")),
    }
}
