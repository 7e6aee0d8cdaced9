//! Fuzz target `worker_session`: see the function of that name.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    inflight_fuzz::worker_session(data);
});
