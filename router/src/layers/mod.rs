//! Layers that a call passes before its message is read.

pub(crate) mod admission;
pub(crate) mod arrival;
pub(crate) mod auth;
pub(crate) mod cors;
pub(crate) mod faults;
pub(crate) mod key_failures;
pub(crate) mod paths;
pub(crate) mod protocol;
pub(crate) mod refusal;
pub(crate) mod request_id;
pub(crate) mod sites;
