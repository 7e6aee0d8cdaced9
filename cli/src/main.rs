//! The `inflight` command.
fn main() {}
