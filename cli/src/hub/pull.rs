//! `inflight pull`: fetches a model from the Hub into the cache.

use std::io::Write as _;

use inflight_hub::{ModelName, Settings, fetch};

use super::Display;
use crate::exit::{CommandError, Exit};

/// Options of `inflight pull`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Model, as org/name, org/name@revision or org/name:Q4_K_M (a GGUF file or its quantization)
    #[arg(value_name = "MODEL")]
    pub model: String,
}

/// Fetches a model and prints its path.
///
/// # Errors
/// The text is no name, or the model cannot be fetched.
pub fn run(args: &Args) -> Result<(), CommandError> {
    let name = match ModelName::of_argument(&args.model) {
        Ok(Some(name)) => name,
        Ok(None) => {
            let message = format!(
                "{} is no model of the Hub, which is named org/name, org/name@revision or org/name:file",
                args.model
            );
            return Err(CommandError::new(Exit::Usage, message));
        }
        Err(error) => return Err(CommandError::new(Exit::Usage, error.to_string())),
    };
    let found = fetch(&name, &Settings::of_environment(), &Display::of_command())
        .map_err(|error| CommandError::chain("", &error))?;
    let written = writeln!(std::io::stdout().lock(), "{}", found.path.display());
    written.map_err(|error| CommandError::chain("cannot write", &error))
}
