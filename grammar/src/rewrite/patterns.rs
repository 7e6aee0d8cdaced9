//! Classes of characters in patterns of strings.
//!
//! The compiler writes the characters of a class as JSON does, with escapes. Of a class that has every control character, it takes every
//! escape, also that of a quote or a backslash which the class excludes. Without one control character, each is looked at by itself: such a
//! class loses U+0000.

use std::convert::Infallible;
use std::ops::Range;

use regex_syntax::ast::parse::Parser;
use regex_syntax::ast::{self, Ast};
use regex_syntax::hir::{Class, HirKind};
use serde_json::{Map, Value};

/// Guards the patterns of a schema and of its property names.
pub(super) fn patterns(object: &mut Map<String, Value>) {
    if let Some(Value::String(pattern)) = object.get_mut("pattern") {
        *pattern = guarded(pattern);
    }
    if let Some(Value::Object(properties)) = object.get_mut("patternProperties") {
        let given = std::mem::take(properties);
        properties.extend(given.into_iter().map(|(pattern, schema)| (guarded(&pattern), schema)));
    }
}

/// Returns a pattern whose classes do not take the escapes of what they lack. One that does not parse stays: the compiler refuses it.
fn guarded(pattern: &str) -> String {
    let Ok(parsed) = Parser::new().parse(pattern) else { return pattern.to_owned() };
    let classes = ast::visit(&parsed, Classes(Vec::new())).unwrap_or_default();
    let mut out = String::with_capacity(pattern.len());
    let mut written = 0;
    for Range { start, end } in classes {
        let class = &pattern[start..end];
        if takes_other_escapes(class) {
            out.push_str(&pattern[written..start]);
            out.push_str(&format!("[{class}&&[^\\x00]]"));
            written = end;
        }
    }
    out + &pattern[written..]
}

/// Collects the classes of a pattern that are in no other class, in their order.
struct Classes(Vec<Range<usize>>);

impl ast::Visitor for Classes {
    type Output = Vec<Range<usize>>;
    type Err = Infallible;

    fn finish(self) -> Result<Self::Output, Infallible> {
        Ok(self.0)
    }

    fn visit_pre(&mut self, ast: &Ast) -> Result<(), Infallible> {
        if matches!(ast, Ast::ClassBracketed(_) | Ast::ClassPerl(_) | Ast::ClassUnicode(_)) {
            let span = ast.span();
            self.0.push(span.start.offset..span.end.offset);
        }
        Ok(())
    }
}

/// Whether a class has the control characters, but perhaps the line feed, and lacks a quote or a backslash.
fn takes_other_escapes(class: &str) -> bool {
    let Ok(parsed) = regex_syntax::parse(class) else { return false };
    let HirKind::Class(Class::Unicode(set)) = parsed.kind() else { return false };
    let has = |c: char| set.iter().any(|range| range.start() <= c && c <= range.end());
    let controls = ('\0'..' ').filter(|c| *c != '\n').all(has);
    controls && !(has('"') && has('\\'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_without_a_quote_or_a_backslash_lose_one_control_character() {
        for (pattern, expected) in [
            (r#"^[^"]*$"#, r#"^[[^"]&&[^\x00]]*$"#),
            (r"^[^\\]*$", r"^[[^\\]&&[^\x00]]*$"),
            (r#"[^"\\]+x[^\n"]"#, r#"[[^"\\]&&[^\x00]]+x[[^\n"]&&[^\x00]]"#),
            ("[^!-/]|a", "[[^!-/]&&[^\\x00]]|a"),
            (r"[^\x22]", r"[[^\x22]&&[^\x00]]"),
            (r"\P{Po}", r"[\P{Po}&&[^\x00]]"),
            (r"[\x00-!#-~]", r"[[\x00-!#-~]&&[^\x00]]"),
        ] {
            assert_eq!(guarded(pattern), expected);
        }
        for pattern in
            [r"^[^a]*$", r#"["\\]"#, r#"\[^"]*"#, r#"[^\t"]"#, r"\w+\\[a-z].", "[^]]", "[]a]", "[^", "a\\"]
        {
            assert_eq!(guarded(pattern), pattern);
        }
    }
}
