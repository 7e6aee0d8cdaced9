//! Escapes in JSON that are no text: halves of surrogate pairs.

/// Returns the first escape of a half of a surrogate pair, whose other half is not beside it, and its offset in bytes.
fn lone_surrogate(json: &str) -> Option<(usize, &str)> {
    let code = |at: usize| {
        let digits = json.get(at..at + 6)?.strip_prefix("\\u")?;
        u16::from_str_radix(digits, 16).ok()
    };
    let bytes = json.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] != b'\\' {
            at += 1;
            continue;
        }
        match code(at) {
            Some(0xD800..=0xDBFF) if matches!(code(at + 6), Some(0xDC00..=0xDFFF)) => at += 12,
            Some(0xD800..=0xDFFF) => return json.get(at..at + 6).map(|escape| (at, escape)),
            Some(_) => at += 6,
            // Of two characters; the second may be a backslash.
            None => at += 2,
        }
    }
    None
}

/// Returns why the JSON at a place of a request has no text, if an escape in it is the reason.
pub(crate) fn refusal(place: &str, json: &str) -> Option<String> {
    lone_surrogate(json).map(|(at, escape)| {
        format!(
            "{place} has the escape {escape} at byte {at} of its JSON, one half of a surrogate pair without the other; send the character \
             itself, or both halves"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_halves_of_pairs_are_found() {
        for (json, found) in [
            (r#""a\ud83d""#, Some((2, r"\ud83d"))),
            (r#""\uDE00b""#, Some((1, r"\uDE00"))),
            (r#""\ud83d\ud83d\ude00""#, Some((1, r"\ud83d"))),
            (r#""\ud83d\n""#, Some((1, r"\ud83d"))),
            (r#"["é", "\\ud83d", "\ud83d\ude00", "\u00e9"]"#, None),
            (r#"["\\\ud83d"]"#, Some((4, r"\ud83d"))),
            (r#""\ud8"#, None),
            ("\"\\ué\"", None),
            ("\"\\", None),
        ] {
            assert_eq!(lone_surrogate(json), found, "{json}");
            let is_text = serde_json::from_str::<serde_json::Value>(json).is_ok();
            assert!(!is_text || found.is_none(), "{json}");
        }
    }
}
