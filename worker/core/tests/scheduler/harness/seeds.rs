//! Seeds of randomized tests.

use std::ops::Range;

/// Returns the seeds of `INFLIGHT_SEEDS=FIRST..END`, or two default seeds.
pub fn seeds() -> Range<u64> {
    let parse = |text: String| {
        let (first, end) = text.split_once("..")?;
        Some(first.parse().ok()?..end.parse().ok()?)
    };
    match std::env::var("INFLIGHT_SEEDS") {
        Ok(text) => {
            parse(text.clone()).unwrap_or_else(|| panic!("INFLIGHT_SEEDS={text}: write it as FIRST..END"))
        }
        Err(_) => 0..2,
    }
}
