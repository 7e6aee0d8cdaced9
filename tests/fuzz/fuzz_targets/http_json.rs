//! Fuzz target `http_json`: see the function of that name.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    inflight_fuzz::http_json(data);
});
