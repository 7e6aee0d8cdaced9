//! Quick builds: what `cargo run` and `cargo test` compile (profile `dev`), most of it unoptimised. Artefacts are built with `--release`.

/// Returns what to print where speed matters, or `None` from an artefact. The factors are those of docs/benchmarks.md#quick-build.
pub(crate) fn notice() -> Option<&'static str> {
    const NOTICE: &str = "this is a quick build (cargo's profile dev): the same tokens as from cargo build --release, but 1.4 times the time \
                          between tokens of the demo model, and 3.3 times the processor time outside of the model";
    cfg!(debug_assertions).then_some(NOTICE)
}

/// Logs the notice at the start of a router or worker. `supervised` ones are silent: their `inflight up` prints it.
pub(crate) fn log(supervised: bool) {
    if let Some(notice) = notice().filter(|_| !supervised) {
        tracing::warn!("{notice}");
    }
}
