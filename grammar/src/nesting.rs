//! Bound on the nesting of a grammar's groups, which parsers descend into recursively.

use crate::GrammarError;

/// Maximum nested groups of a regular expression or a Lark grammar.
pub(crate) const NESTING_MAX: usize = 100;

/// Checks that no more than [`NESTING_MAX`] brackets of a text are open at once. Brackets in strings and comments count, too,
/// as it is only a bound.
///
/// # Errors
/// [`GrammarError::Nesting`].
pub(crate) fn check(text: &str) -> Result<(), GrammarError> {
    let (mut depth, mut deepest, mut escaped) = (0usize, 0, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'(' | b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    if deepest > NESTING_MAX {
        return Err(GrammarError::Nesting { depth: deepest, most: NESTING_MAX });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_in_a_row_pass_and_groups_in_one_another_do_not() {
        assert_eq!(check(&"(a)".repeat(1000)), Ok(()));
        assert_eq!(check(&"\\(".repeat(1000)), Ok(()));
        let deep = NESTING_MAX + 1;
        assert_eq!(check(&"(".repeat(deep)), Err(GrammarError::Nesting { depth: deep, most: NESTING_MAX }));
    }
}
