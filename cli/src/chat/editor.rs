//! Line editor of `inflight chat` on a terminal: editing keys, completion, and a history that is kept in a file.

use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{CompletionType, Config, Context, Helper};
use tokio::sync::mpsc;

use super::command::completions;
use super::input::Line;

/// Maximum entries of the history.
const HISTORY_ENTRIES_MAX: usize = 1000;
/// Maximum size of an entry, in bytes; longer messages are not kept.
const HISTORY_ENTRY_BYTES_MAX: usize = 64 << 10;
/// Requests that wait for the editor's thread: a message to keep and a prompt.
const REQUESTS_MAX: usize = 2;

/// Request to the editor's thread.
enum Request {
    /// Adds a message to the history.
    Remember(String),
    /// Reads a line behind a prompt.
    Read(&'static str),
}

/// Names that are completed.
struct Completions {
    options: Vec<String>,
    models: Vec<String>,
}

impl Completer for Completions {
    type Candidate = String;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        Ok(completions(&line[..at], &self.options, &self.models))
    }
}

impl Hinter for Completions {
    type Hint = String;
}

impl Highlighter for Completions {}
impl Validator for Completions {}
impl Helper for Completions {}

type LineEditor = rustyline::Editor<Completions, FileHistory>;

/// Line editor on a thread of its own. The terminal is in raw mode only while a line is read; the drop restores it.
pub struct Editor {
    requests: std::sync::mpsc::SyncSender<Request>,
    lines: mpsc::Receiver<io::Result<Line>>,
    /// Modes of the terminal outside of the editor.
    modes: Termios,
    /// Whether a line is being read.
    reading: bool,
}

impl Editor {
    /// Starts the editor on the standard input and output, which are a terminal. Names of options and models are completed.
    ///
    /// # Errors
    /// The terminal cannot be used, or the thread cannot be started.
    pub fn start(options: Vec<String>, models: Vec<String>) -> io::Result<Self> {
        let modes = tcgetattr(rustix::stdio::stdin())?;
        let config = Config::builder()
            .max_history_size(HISTORY_ENTRIES_MAX)
            .map_err(io_error)?
            .completion_type(CompletionType::List)
            .build();
        let mut editor = LineEditor::with_config(config).map_err(io_error)?;
        editor.set_helper(Some(Completions { options, models }));
        let history = history_file();
        if let Some(history) = &history {
            // There is none before the first message.
            let _ = editor.load_history(history);
        }
        let (requests, requested) = std::sync::mpsc::sync_channel(REQUESTS_MAX);
        let (sender, lines) = mpsc::channel(1);
        std::thread::Builder::new()
            .name("chat-editor".to_owned())
            .spawn(move || serve(editor, history, &requested, &sender))?;
        Ok(Self { requests, lines, modes, reading: false })
    }

    /// Adds a message to the history and its file.
    pub fn remember(&self, text: &str) {
        if !text.trim().is_empty() && text.len() <= HISTORY_ENTRY_BYTES_MAX {
            // The thread ends only after a failed read, which is reported there.
            let _ = self.requests.send(Request::Remember(text.to_owned()));
        }
    }

    /// Begins to read a line behind a prompt, unless that has begun.
    pub fn prompt(&mut self, prompt: &'static str) {
        if !self.reading {
            self.reading = self.requests.send(Request::Read(prompt)).is_ok();
        }
    }

    /// Waits for the line that is being read. Cancel safe.
    ///
    /// # Errors
    /// The terminal cannot be read.
    pub async fn line(&mut self) -> io::Result<Line> {
        let line = self.lines.recv().await;
        self.reading = false;
        line.unwrap_or(Ok(Line::End))
    }
}

impl Drop for Editor {
    fn drop(&mut self) {
        if self.reading {
            // The terminal may be gone; then there is nothing to restore.
            let _ = tcsetattr(rustix::stdio::stdin(), OptionalActions::Drain, &self.modes);
            // Bracketed paste off, and a line of its own for the shell.
            let _ = writeln!(io::stdout(), "\u{1b}[?2004l");
        }
    }
}

/// Serves requests until their sender is gone or a line cannot be read.
fn serve(
    mut editor: LineEditor,
    history: Option<PathBuf>,
    requests: &std::sync::mpsc::Receiver<Request>,
    lines: &mpsc::Sender<io::Result<Line>>,
) {
    // While there is a printer, the editor waits for signals, too: without, a new size of the terminal has no effect before the next key.
    let _printer = editor.create_external_printer();
    while let Ok(request) = requests.recv() {
        let line = match request {
            Request::Remember(text) => {
                let _ = editor.add_history_entry(text);
                if let Some(history) = &history {
                    // The history of this conversation remains in memory.
                    let _ = editor.append_history(history);
                }
                continue;
            }
            Request::Read(prompt) => match editor.readline(prompt) {
                Ok(text) => Ok(Line::Text(text)),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
                Err(error) => Err(io_error(error)),
            },
        };
        let last = line.is_err();
        if lines.blocking_send(line).is_err() || last {
            return;
        }
    }
}

fn io_error(error: ReadlineError) -> io::Error {
    match error {
        ReadlineError::Io(error) => error,
        error => io::Error::other(error),
    }
}

/// Returns the file of the history in the user's state directory, which is created; `None` if that is not possible.
fn history_file() -> Option<PathBuf> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    let folder = state.join("inflight");
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).ok()?;
    Some(folder.join("chat-history"))
}
