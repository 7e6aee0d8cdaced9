//! Workers: discovery, membership, sessions and model bundles.

pub(crate) mod bundle;
pub(crate) mod connector;
pub(crate) mod discovery;
pub(crate) mod membership;
mod wire;
mod worker_session;
