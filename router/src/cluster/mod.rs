//! Workers: discovery, membership, sessions and model bundles.

pub(crate) mod bundle;
pub(crate) mod connector;
pub(crate) mod discovery;
pub(crate) mod membership;
pub(crate) mod wire;
mod worker_session;
