//! Input of `inflight chat`: the line editor on a terminal, else plain lines.

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};

use tokio::signal::unix::Signal;
use tokio::sync::mpsc;

use super::editor::Editor;

/// Values of TERM of terminals on which a line cannot be edited.
const SIMPLE_TERMINALS: [&str; 4] = ["", "dumb", "cons25", "emacs"];

/// What was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    /// Line, or several that were pasted.
    Text(String),
    /// Ctrl-C.
    Interrupted,
    /// End of the input, such as by Ctrl-D.
    End,
}

/// Source of lines.
pub enum Input {
    /// Line editor: the standard input and output are a terminal.
    Editor(Editor),
    /// Lines of the standard input, which is a pipe, a file or a simple terminal.
    Lines(mpsc::Receiver<io::Result<String>>),
}

impl Input {
    /// Opens the standard input. `options` and `models` are completed.
    ///
    /// # Errors
    /// The terminal cannot be used, or a thread cannot be started.
    pub fn open(options: Vec<String>, models: Vec<String>) -> io::Result<Self> {
        let simple = SIMPLE_TERMINALS.contains(&&*std::env::var("TERM").unwrap_or_default());
        if io::stdin().is_terminal() && io::stdout().is_terminal() && !simple {
            return Ok(Self::Editor(Editor::start(options, models)?));
        }
        read_lines().map(Self::Lines)
    }

    /// Reads a line. A terminal shows the prompt.
    ///
    /// # Errors
    /// The input cannot be read.
    pub async fn read(&mut self, prompt: &'static str, interrupts: &mut Signal) -> io::Result<Line> {
        match self {
            Self::Editor(editor) => {
                editor.prompt(prompt);
                loop {
                    tokio::select! {
                        biased;
                        line = editor.line() => return line,
                        // From before the prompt; the editor takes those after it.
                        _ = interrupts.recv() => {}
                    }
                }
            }
            Self::Lines(lines) => {
                if io::stdin().is_terminal() {
                    // Fails only if the terminal is gone; then so is its input.
                    let _ = write!(io::stderr(), "{prompt}");
                }
                tokio::select! {
                    line = lines.recv() => line.map_or(Ok(Line::End), |line| line.map(Line::Text)),
                    _ = interrupts.recv() => Ok(Line::Interrupted),
                }
            }
        }
    }

    /// Adds a message to the history, if there is one.
    pub fn remember(&self, text: &str) {
        if let Self::Editor(editor) = self {
            editor.remember(text);
        }
    }
}

/// Reads lines from the standard input on a thread of its own, which ends with the input or the process.
fn read_lines() -> io::Result<mpsc::Receiver<io::Result<String>>> {
    let (sender, lines) = mpsc::channel(1);
    std::thread::Builder::new().name("chat-input".to_owned()).spawn(move || {
        for line in io::stdin().lock().lines() {
            let last = line.is_err();
            if sender.blocking_send(line).is_err() || last {
                break;
            }
        }
    })?;
    Ok(lines)
}
