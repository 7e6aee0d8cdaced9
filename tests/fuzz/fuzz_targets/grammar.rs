//! libFuzzer target `grammar`: calls the parser of this kind of input, whose properties `inflight_fuzz` checks.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    inflight_fuzz::grammar(data);
});
