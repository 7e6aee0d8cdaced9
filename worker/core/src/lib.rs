//! The pure state machine of a worker: iteration scheduler and paged KV block manager.
