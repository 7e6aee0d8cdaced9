//! The helper process that compiles grammars: this program again, under a subcommand that help does not show, as users do not start it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use inflight_grammar_service::Confinement;
use inflight_sandbox::Program;

/// Its subcommand.
const SUBCOMMAND: &str = "grammar-helper";

/// This program. Unlike a path of the file system, it is the same program after an upgrade has replaced the file.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// Serves as a helper if the arguments say so.
pub fn run() -> Option<ExitCode> {
    (std::env::args_os().nth(1)? == SUBCOMMAND).then(inflight_grammar_service::serve)
}

/// Returns how a role compiles grammars within so many bytes.
pub fn confinement(memory_bytes: u64) -> Confinement {
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    let slots = usize::try_from(memory_bytes / Confinement::MEMORY_BYTES).unwrap_or(most);
    let path = if Path::new(THIS_PROGRAM).exists() {
        PathBuf::from(THIS_PROGRAM)
    } else {
        std::env::current_exe()
            .or_else(|_| std::env::args_os().next().map(PathBuf::from).ok_or(()))
            .unwrap_or_default()
    };
    Confinement {
        program: Program { path, name: "inflight".into(), arguments: vec![SUBCOMMAND.into()] },
        slots: slots.clamp(1, most),
    }
}
