//! How the command ends: a message and an exit code.

use std::fmt;
use std::process::ExitCode;

/// What went wrong, as the process's exit code tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Anything without a code of its own.
    Failure = 1,
    /// Flags, environment or configuration file.
    Usage = 2,
    /// Nobody answers at the endpoint, or it cannot serve now.
    Unavailable = 3,
    /// The request was refused for what it asks.
    Refused = 4,
    /// A queue or limit is full.
    Exhausted = 5,
    /// The deadline passed.
    Deadline = 6,
    /// Not allowed.
    Denied = 7,
    /// Ended by Ctrl-C or another signal.
    Interrupted = 130,
}

/// Says it on standard error, to whoever still reads: unlike `eprintln!`, a closed pipe is no panic.
pub fn say(text: fmt::Arguments<'_>) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Ends the command.
#[derive(Debug)]
pub enum Failure {
    /// A message for the terminal and a code.
    Message(Exit, String),
    /// What clap has to say, `--help` and `--version` included.
    Clap(clap::Error),
    /// A code alone: all was said.
    Silent(Exit),
}

impl Failure {
    /// A failure with a code of its own.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self::Message(exit, message.into())
    }

    /// The same with where it happened in front.
    #[must_use]
    pub fn at(self, place: &str) -> Self {
        match self {
            Self::Message(exit, message) => Self::Message(exit, format!("{place}: {message}")),
            other => other,
        }
    }

    /// An error and its causes, on one line.
    pub fn chain(context: &str, error: &dyn std::error::Error) -> Self {
        let mut message = String::from(context);
        let mut said = String::new();
        let mut cause = Some(error);
        while let Some(error) = cause {
            let text = error.to_string();
            // Many errors repeat their source in their own text.
            if !said.contains(&text) {
                message.push_str(": ");
                message.push_str(&text);
                said.push_str(&text);
            }
            cause = error.source();
        }
        Self::Message(Exit::Failure, message.trim_start_matches(": ").to_owned())
    }

    /// Says it on the terminal and yields the exit code.
    pub fn report(self) -> ExitCode {
        match self {
            Self::Message(exit, message) => {
                say(format_args!("error: {message}"));
                ExitCode::from(exit as u8)
            }
            Self::Clap(error) => {
                // A closed pipe is the only way this fails; nobody is left to tell.
                let _ = error.print();
                ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(Exit::Usage as u8))
            }
            Self::Silent(exit) => ExitCode::from(exit as u8),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message(_, message) => out.write_str(message),
            Self::Clap(error) => error.fmt(out),
            Self::Silent(exit) => write!(out, "exit code {}", *exit as u8),
        }
    }
}
