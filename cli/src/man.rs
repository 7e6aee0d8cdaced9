//! `inflight man`: manual pages.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::CommandFactory as _;
use clap_mangen::Man;

use crate::Cli;
use crate::exit::{CommandError, Exit};

/// Options of `inflight man`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Directory for the pages, one for each command, such as /usr/local/share/man/man1; it is created if it is missing
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}

/// Writes the pages, and prints their paths.
///
/// # Errors
/// A page cannot be written.
pub fn run(args: &Args) -> Result<(), CommandError> {
    let pages = write(&args.folder)?;
    let lines: String = pages.iter().map(|page| format!("{}\n", page.display())).collect();
    std::io::stdout()
        .lock()
        .write_all(lines.as_bytes())
        .map_err(|error| CommandError::chain("cannot write", &error))
}

/// Writes a page for the program and one for each command into `folder`.
fn write(folder: &Path) -> Result<Vec<PathBuf>, CommandError> {
    let failed = |path: &Path, error: &std::io::Error| {
        let message =
            format!("cannot write {}: {error}; name a directory that you may write to", path.display());
        CommandError::new(Exit::Failure, message)
    };
    fs::create_dir_all(folder).map_err(|error| failed(folder, &error))?;
    let mut program = Cli::command();
    program.build();
    let commands = program.get_subcommands().filter(|command| command.get_name() != "help");
    let commands = commands.map(|command| {
        let name = format!("inflight-{}", command.get_name());
        // As it is typed, and as the file is called.
        let command = command.clone().bin_name(name.replace('-', " ")).display_name(name.clone());
        (name, command)
    });
    let pages: Vec<_> = std::iter::once(("inflight".to_owned(), program.clone())).chain(commands).collect();
    let mut paths = Vec::new();
    for (name, command) in pages {
        let path = folder.join(format!("{name}.1"));
        let mut page = Vec::new();
        let rendered = Man::new(command).render(&mut page).and_then(|()| fs::write(&path, &page));
        rendered.map_err(|error| failed(&path, &error))?;
        paths.push(path);
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use inflight_fixtures::TempDir;

    use super::*;

    #[test]
    fn each_command_has_a_page_with_its_options_and_an_unwritable_directory_is_named() {
        let folder = TempDir::new("inflight-man").unwrap();
        let pages = write(folder.path()).unwrap();
        let commands = Cli::command().get_subcommands().count();
        assert_eq!(pages.len(), commands + 1);
        let worker = fs::read_to_string(folder.path().join("inflight-worker.1")).unwrap();
        assert!(worker.contains("tensor\\-parallel") && worker.contains("inflight worker"), "{worker}");
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let CommandError::Message(Exit::Failure, message) = write(&file).unwrap_err() else { panic!() };
        assert!(message.contains("/file") && message.contains("name a directory"), "{message}");
    }
}
