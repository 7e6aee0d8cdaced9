//! `inflight rm`: removes a model from the cache.

use std::io::Write as _;

use inflight_hub::{Cache, ModelName, Settings};

use super::models::gigabytes;
use crate::exit::{CommandError, Exit};

/// Options of `inflight rm`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Models, as org/name; all their revisions and files are removed
    #[arg(value_name = "MODEL", required = true)]
    pub models: Vec<String>,
}

/// Removes models.
///
/// # Errors
/// A model is not in the cache, or is being fetched.
pub fn run(args: &Args) -> Result<(), CommandError> {
    let settings = Settings::of_environment();
    let cache = Cache::new(settings.cache);
    for model in &args.models {
        let name: ModelName = model
            .parse()
            .map_err(|error: inflight_hub::HubError| CommandError::new(Exit::Usage, error.to_string()))?;
        if name.file().is_some() || name.to_string().contains('@') {
            let message = format!("{model}: a model is removed as a whole; write {}", name.repo());
            return Err(CommandError::new(Exit::Usage, message));
        }
        let Some(bytes) = cache.remove(name.repo()).map_err(|error| CommandError::chain("", &error))? else {
            let message = format!(
                "{model} is not in the cache {}; `inflight models` lists what is there",
                cache.directory().display()
            );
            return Err(CommandError::new(Exit::Failure, message));
        };
        let written = writeln!(std::io::stdout().lock(), "removed {model}, {}", gigabytes(bytes));
        written.map_err(|error| CommandError::chain("cannot write", &error))?;
    }
    Ok(())
}
