//! The workers: discovery, membership, one session with each, and their model bundles.

pub(crate) mod bundle;
pub(crate) mod connector;
pub(crate) mod discovery;
pub(crate) mod membership;
mod wire;
mod worker_session;
