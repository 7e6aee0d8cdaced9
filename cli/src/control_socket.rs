//! Socket of `inflight up`, over which its router has workers killed: one line each way.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};

use crate::supervisor::Killer;

/// Time that a connection may take.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest command.
const COMMAND_BYTES_MAX: u64 = 64;
/// Pause after a failure to accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Socket in a folder that only this user can enter; both are removed on drop.
#[derive(Debug)]
pub struct ControlSocket {
    folder: PathBuf,
    path: PathBuf,
}

impl ControlSocket {
    /// Creates the folder of the socket.
    ///
    /// # Errors
    /// I/O error.
    pub fn create() -> io::Result<Self> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
        let folders = runtime.into_iter().map(PathBuf::from).chain([std::env::temp_dir()]);
        let name = format!("inflight-up-{:016x}", rand::random::<u64>());
        let mut failure = io::Error::other("no folder for temporary files");
        for parent in folders {
            let folder = parent.join(&name);
            match DirBuilder::new().mode(0o700).create(&folder) {
                Ok(()) => return Ok(Self { path: folder.join("control"), folder }),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Listens on the socket.
    ///
    /// # Errors
    /// I/O error.
    pub fn listen(&self) -> io::Result<UnixListener> {
        UnixListener::bind(&self.path)
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        // What is left behind does no harm.
        let _ = fs::remove_file(&self.path);
        let _ = fs::remove_dir(&self.folder);
    }
}

/// Carries out commands, one connection after the other, while polled. Killers are by number of the worker, from 1.
pub async fn serve(listener: UnixListener, killers: BTreeMap<usize, Killer>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Only the router connects; what it asks for has been done or refused then.
                let _ = tokio::time::timeout(CONNECTION_TIMEOUT, answer(stream, &killers)).await;
            }
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn answer(stream: UnixStream, killers: &BTreeMap<usize, Killer>) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut line = String::new();
    BufReader::new(reader.take(COMMAND_BYTES_MAX)).read_line(&mut line).await?;
    let number = line.trim_end().strip_prefix("kill ").and_then(|number| number.parse::<usize>().ok());
    let answer = match number.and_then(|number| killers.get(&number)) {
        Some(killer) if killer.kill().await => "ok\n",
        Some(_) => "the worker does not run now\n",
        None => "unknown command\n",
    };
    writer.write_all(answer.as_bytes()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_known_commands_are_carried_out_and_the_socket_is_private_and_removed() {
        use std::os::unix::fs::PermissionsExt as _;
        let socket = ControlSocket::create().unwrap();
        let listener = socket.listen().unwrap();
        assert_eq!(fs::metadata(&socket.folder).unwrap().permissions().mode() & 0o777, 0o700);
        let (killer, mut kills) = Killer::new();
        let serving = tokio::spawn(serve(listener, BTreeMap::from([(1, killer)])));
        let path = socket.path().to_owned();
        let ask = |command: &'static str| {
            let path = path.clone();
            async move {
                let mut stream = UnixStream::connect(&path).await.unwrap();
                stream.write_all(command.as_bytes()).await.unwrap();
                let mut answer = String::new();
                stream.read_to_string(&mut answer).await.unwrap();
                answer
            }
        };
        for wrong in ["kill 2\n", "kill\n", "kill -1\n", "stop 1\n", "\n"] {
            assert_eq!(ask(wrong).await, "unknown command\n", "{wrong:?}");
        }
        for (runs, wanted) in [(true, "ok\n"), (false, "the worker does not run now\n")] {
            let asked = tokio::spawn(ask("kill 1\n"));
            kills.recv().await.unwrap().send(runs).unwrap();
            assert_eq!(asked.await.unwrap(), wanted);
        }
        drop(kills);
        assert_eq!(ask("kill 1\n").await, "the worker does not run now\n");
        serving.abort();
        let folder = socket.folder.clone();
        drop(socket);
        assert!(!folder.exists());
    }
}
