//! Patterns that may be found anywhere in a text, as expressions of the whole text.

use regex_syntax::ast::parse::Parser;
use regex_syntax::ast::{AssertionKind, Ast, GroupKind, Span};

/// Any text.
const ANY: &str = "(?s:.)*";

/// Returns the expression of the texts in which a pattern is found. `^` and `$` may stand at its ends and at the ends of alternatives
/// there.
///
/// # Errors
/// Why there is none.
pub(super) fn anchored(pattern: &str) -> Result<String, &'static str> {
    let parsed = Parser::new().parse(pattern).map_err(|_| "it is not understood")?;
    let mut writer = Writer { pattern, out: String::with_capacity(pattern.len() + 16) };
    writer.write(&parsed, true, true)?;
    Ok(writer.out)
}

/// Whether there is an assertion in an expression.
fn has_assertion(ast: &Ast) -> bool {
    match ast {
        Ast::Assertion(_) => true,
        Ast::Repetition(repetition) => has_assertion(&repetition.ast),
        Ast::Group(group) => has_assertion(&group.ast),
        Ast::Alternation(alternation) => alternation.asts.iter().any(has_assertion),
        Ast::Concat(concat) => concat.asts.iter().any(has_assertion),
        _ => false,
    }
}

/// Whether an expression is an assertion of this kind.
fn is_assertion(ast: &Ast, kind: &AssertionKind) -> bool {
    matches!(ast, Ast::Assertion(assertion) if assertion.kind == *kind)
}

struct Writer<'a> {
    pattern: &'a str,
    out: String,
}

impl Writer<'_> {
    /// Writes what is between two places of the pattern.
    fn copy(&mut self, span: &Span) {
        self.out.push_str(&self.pattern[span.start.offset..span.end.offset]);
    }

    /// Writes an expression. With `before` any text may come before it, unless it begins with `^`; with `after`, behind it.
    fn write(&mut self, ast: &Ast, before: bool, after: bool) -> Result<(), &'static str> {
        let inner = || "^ and $ stand at its ends only, and \\b and \\B nowhere";
        match ast {
            Ast::Flags(_) => return Err("it sets flags"),
            Ast::Alternation(alternation) => {
                self.out.push_str("(?:");
                for (at, ast) in alternation.asts.iter().enumerate() {
                    if at > 0 {
                        self.out.push('|');
                    }
                    self.write(ast, before, after)?;
                }
                self.out.push(')');
            }
            Ast::Group(group) => {
                let flags = match &group.kind {
                    GroupKind::NonCapturing(flags) => {
                        &self.pattern[flags.span.start.offset..flags.span.end.offset]
                    }
                    GroupKind::CaptureIndex(_) | GroupKind::CaptureName { .. } => "",
                };
                if flags.contains('m') {
                    return Err("it sets flags");
                }
                self.out.push_str("(?");
                self.out.push_str(flags);
                self.out.push(':');
                self.write(&group.ast, before, after)?;
                self.out.push(')');
            }
            Ast::Concat(concat) => self.concat(&concat.asts, before, after)?,
            Ast::Assertion(_) => self.concat(std::slice::from_ref(ast), before, after)?,
            _ if has_assertion(ast) => return Err(inner()),
            Ast::Repetition(_) => {
                self.any(before);
                self.copy(ast.span());
                self.any(after);
            }
            _ => {
                self.any(before);
                self.copy(ast.span());
                self.any(after);
            }
        }
        Ok(())
    }

    fn any(&mut self, wanted: bool) {
        if wanted {
            self.out.push_str(ANY);
        }
    }

    fn concat(&mut self, asts: &[Ast], mut before: bool, mut after: bool) -> Result<(), &'static str> {
        let mut asts = asts;
        while let Some((first, rest)) = asts.split_first()
            && before
            && is_assertion(first, &AssertionKind::StartLine)
        {
            (before, asts) = (false, rest);
        }
        while let Some((last, rest)) = asts.split_last()
            && after
            && is_assertion(last, &AssertionKind::EndLine)
        {
            (after, asts) = (false, rest);
        }
        if asts.iter().any(|ast| matches!(ast, Ast::Assertion(_))) {
            return Err("^ and $ stand at its ends only, and \\b and \\B nowhere");
        }
        self.out.push_str("(?:");
        if asts.is_empty() {
            self.any(before || after);
        }
        for (at, ast) in asts.iter().enumerate() {
            self.write(ast, before && at == 0, after && at + 1 == asts.len())?;
        }
        self.out.push(')');
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_become_expressions_of_whole_texts() {
        let any = ANY;
        for (pattern, expected) in [
            ("a", format!("{any}a{any}")),
            ("^ab$", "(?:ab)".to_owned()),
            ("^a|b$", format!("(?:(?:a{any})|(?:{any}b))")),
            ("(^a|b)c", format!("(?:(?:(?:(?:a)|{any}b))c{any})")),
            ("^", format!("(?:{any})")),
            ("^$", "(?:)".to_owned()),
            ("", format!("{any}{any}")),
        ] {
            assert_eq!(anchored(pattern).as_deref(), Ok(expected.as_str()), "{pattern}");
        }
        for pattern in ["a^b", "(a$)*", r"\ba", "(?m)^a", "a(?i)b"] {
            anchored(pattern).unwrap_err();
        }
    }
}
