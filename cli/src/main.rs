//! The `inflight` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    inflight::main()
}
