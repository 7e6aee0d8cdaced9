//! Texts of workers, as they are shown to viewers.

use std::sync::Arc;

/// Stands for a character that is not shown.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// Returns a text in at most `bytes_max` bytes, in place of whose controls and formatting characters is a sign; what was cut
/// off ends in an ellipsis.
pub(crate) fn display_text(text: &str, bytes_max: usize) -> Arc<str> {
    let shown = |character| if is_shown(character) { character } else { REPLACEMENT };
    let mut made = String::new();
    for character in text.chars().map(shown) {
        if made.len() + character.len_utf8() > bytes_max {
            while made.len() + '…'.len_utf8() > bytes_max && made.pop().is_some() {}
            made.push('…');
            break;
        }
        made.push(character);
    }
    Arc::from(made)
}

/// Whether a character is neither a control nor one that changes the direction of text or has no width.
fn is_shown(character: char) -> bool {
    let formats = matches!(
        character,
        '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}'
    );
    !character.is_control() && !formats
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_short_and_have_nothing_that_a_terminal_or_a_page_obeys() {
        assert_eq!(&*display_text("Some GPU, 80 GB", 20), "Some GPU, 80 GB");
        assert_eq!(&*display_text("a\u{1b}[2J\nb\u{202e}c", 40), "a\u{fffd}[2J\u{fffd}b\u{fffd}c");
        for bytes_max in 3..40 {
            for text in ["abcdefghijklmnopqrstuvwxyz", "äöüäöüäöüäöü", "\u{0}\u{1}\u{2}\u{3}\u{4}", ""]
            {
                let shown = display_text(text, bytes_max);
                assert!(shown.len() <= bytes_max, "{shown:?} has more than {bytes_max} bytes");
                let whole = text.chars().count() == shown.chars().count() && !shown.ends_with('…');
                assert!(whole || shown.ends_with('…'), "{text:?} became {shown:?}");
            }
        }
    }
}
