//! Entry point for fuzzing: any bytes as the messages of a router.

use crate::session;

/// Length-delimited messages of a router. Returns whether there was one.
///
/// # Panics
/// If a property of what was decoded does not hold.
pub fn router_session(data: &[u8]) -> bool {
    session::fuzz::session(data)
}
