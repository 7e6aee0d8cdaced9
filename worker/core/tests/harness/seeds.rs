use std::ops::Range;

/// `INFLIGHT_SEEDS=FIRST..END` asks for other seeds than the two that every run tries.
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
