//! Models by their names on the Hugging Face Hub: `org/name[@revision][:file]`.
//!
//! Files are kept in the cache of the Hub's own tools, with their layout and locks, so that each finds what another one has fetched.
//! Large files come in parts over several connections, are hashed while they arrive, and continue where an interrupted
//! download ended. Everything here blocks; callers with a runtime use a thread.

#![forbid(unsafe_code)]

mod blob;
mod cache;
mod error;
mod fetch;
mod journal;
mod listing;
mod name;
mod progress;
mod selection;
mod settings;
mod transport;

pub use cache::{Cache, CachedModel, CachedRevision};
pub use error::HubError;
pub use fetch::{Located, fetch, locate};
pub use name::ModelName;
pub use progress::{Progress, Quiet};
pub use selection::part_names;
pub use settings::Settings;
