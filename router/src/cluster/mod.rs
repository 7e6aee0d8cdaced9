//! Workers: discovery, membership, sessions and model bundles.

pub(crate) mod bundle;
pub(crate) mod connector;
pub(crate) mod discovery;
pub(crate) mod membership;
pub(crate) mod model_cache;
mod observer;
pub(crate) mod wire;
pub(crate) mod worker_calls;
mod worker_session;
