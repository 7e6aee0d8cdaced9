//! Models by their names on the Hugging Face Hub.

pub mod models;
mod progress;
pub mod pull;
pub mod rm;

use inflight_hub::{Located, Settings, locate};
use inflight_worker::{ComputeOptions, ModelSource};

use crate::exit::CommandError;
pub use progress::Display;

/// Replaces the model in the options by the path of its files. A model of the Hub is downloaded if the cache lacks it, and is served under its
/// name on the Hub unless the options have another one.
///
/// # Errors
/// There is no such path and no such model, or it cannot be fetched.
pub fn resolve(compute: &mut ComputeOptions, display: &Display) -> Result<(), CommandError> {
    let Some(model) = compute.model.as_ref() else { return Ok(()) };
    // A path need not be text, a name is.
    let Some(argument) = model.to_str() else { return Ok(()) };
    if compute.source() == ModelSource::Embedded {
        return Ok(());
    }
    let Located { path, name, .. } = locate(argument, &Settings::of_environment(), display)
        .map_err(|error| CommandError::chain("--model", &error))?;
    compute.model = Some(path);
    if let (Some(name), true) = (name, compute.model_names.is_empty()) {
        compute.model_names.push(name.repo().to_owned());
    }
    Ok(())
}
