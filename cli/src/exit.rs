//! Exit codes and errors of the command.

use std::fmt;
use std::process::ExitCode;

/// Exit code of the process, by kind of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// Failure without a code of its own.
    Failure = 1,
    /// Invalid flag, environment variable or configuration file.
    Usage = 2,
    /// The endpoint is unreachable or unavailable.
    Unavailable = 3,
    /// The server rejected the request as invalid.
    Refused = 4,
    /// A queue or limit of the server is full.
    Exhausted = 5,
    /// Deadline exceeded.
    Deadline = 6,
    /// Authentication or authorization failed.
    Denied = 7,
    /// Terminated by Ctrl-C or another signal.
    Interrupted = 130,
}

/// Prints a line on standard error. Unlike `eprintln!`, it does not panic when the pipe is closed.
pub fn print_stderr(text: fmt::Arguments<'_>) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Error that ends the command.
#[derive(Debug)]
pub enum CommandError {
    /// Exit code and message for the terminal.
    Message(Exit, String),
    /// Output of clap, including that of `--help` and `--version`.
    Clap(clap::Error),
    /// Exit code without a message; everything has been printed.
    Silent(Exit),
}

impl CommandError {
    /// Creates an error with an exit code and a message.
    pub fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self::Message(exit, message.into())
    }

    /// Creates an error with exit code 1 from `error` and its source chain, on one line after `context`.
    pub fn chain(context: &str, error: &dyn std::error::Error) -> Self {
        let mut message = String::from(context);
        let mut reported = String::new();
        let mut cause = Some(error);
        while let Some(error) = cause {
            let text = error.to_string();
            // Many errors repeat their source in their own text.
            if !reported.contains(&text) {
                message.push_str(": ");
                message.push_str(&text);
                reported.push_str(&text);
            }
            cause = error.source();
        }
        Self::Message(Exit::Failure, message.trim_start_matches(": ").to_owned())
    }

    /// Prints the message on the terminal and returns the exit code.
    pub fn report(self) -> ExitCode {
        match self {
            Self::Message(exit, message) => {
                print_stderr(format_args!("error: {message}"));
                ExitCode::from(exit as u8)
            }
            Self::Clap(error) => {
                // Fails only if the pipe is closed.
                let _ = error.print();
                ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(Exit::Usage as u8))
            }
            Self::Silent(exit) => ExitCode::from(exit as u8),
        }
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message(_, message) => out.write_str(message),
            Self::Clap(error) => error.fmt(out),
            Self::Silent(exit) => write!(out, "exit code {}", *exit as u8),
        }
    }
}
