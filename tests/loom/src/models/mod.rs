//! The models. Each panics if one of its assertions fails in some interleaving, or if all threads of one wait for ever.

mod responses;
mod thread_pool;
mod watchdog;

pub use responses::responses;
pub use thread_pool::{concurrent_callers, thread_pool};
pub use watchdog::watchdog;

/// Runs `model` in all interleavings with at most this many preemptions.
fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}
