//! Patterns of strings and of property names, from ECMA-262, the dialect of JSON Schema, to that of the compiler.
//!
//! - Within a class, `[`, `&&`, `--` and `~~` are characters in ECMA-262; the compiler has nested classes and operators.
//! - `.` excludes four line terminators, not one, and `\s` is the white space of ECMA-262. The compiler itself replaces `\d` and `\w`.
//! - Groups lose their names: the compiler takes what a group named `stop` matches for lookahead.
//! - The compiler writes characters as JSON does, with escapes. Of a set of characters that has all control characters it takes every
//!   escape, also that of a quote or a backslash which the set lacks, and it merges the classes of alternatives. So no class without a
//!   quote or a backslash has U+0000.

use std::convert::Infallible;
use std::ops::Range;

use regex_syntax::ast::parse::Parser;
use regex_syntax::ast::{self, Ast};
use regex_syntax::hir::{Class, Hir, HirKind};
use serde_json::{Map, Value};

use crate::GrammarError;
use crate::error::shorten;

/// White space of ECMA-262, as items of a class.
const SPACE: &str = r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}";
/// What `.` matches in ECMA-262.
const DOT: &str = r"[^\n\r\u{2028}\u{2029}]";
/// Class of no character.
const NONE: &str = "[a&&b]";
/// Class of all characters.
const ALL: &str = r"[\x00-\u{10FFFF}]";

/// Translates the patterns of a schema and of its property names.
///
/// # Errors
/// [`GrammarError::Refused`] for one that the compiler cannot parse.
pub(super) fn patterns(object: &mut Map<String, Value>) -> Result<(), GrammarError> {
    if let Some(Value::String(pattern)) = object.get_mut("pattern") {
        *pattern = translate(pattern)?;
    }
    if let Some(Value::Object(properties)) = object.get_mut("patternProperties") {
        for (pattern, schema) in std::mem::take(properties) {
            properties.insert(translate(&pattern)?, schema);
        }
    }
    Ok(())
}

/// Returns a pattern in the dialect of the compiler.
///
/// # Errors
/// [`GrammarError::Refused`] if it cannot be parsed, such as one with lookaround or references to groups.
pub(crate) fn translate(pattern: &str) -> Result<String, GrammarError> {
    translated(pattern, true)
}

/// Returns the pattern of a text that is written without escapes, in the dialect of the compiler: classes keep U+0000.
///
/// # Errors
/// [`GrammarError::Refused`] if it cannot be parsed.
pub(crate) fn translate_unescaped(pattern: &str) -> Result<String, GrammarError> {
    translated(pattern, false)
}

fn translated(pattern: &str, escaped: bool) -> Result<String, GrammarError> {
    let out = String::with_capacity(pattern.len());
    let mut translator = Translator { rest: pattern, out, flags: has_flags(pattern), escaped };
    while let Some(c) = translator.rest.chars().next() {
        translator.piece(c);
    }
    match Parser::new().parse(&translator.out) {
        Ok(_) => Ok(translator.out),
        Err(error) => {
            let (pattern, kind) = (shorten(pattern), error.kind());
            Err(GrammarError::Refused(format!("the pattern {pattern} cannot be used: {kind}")))
        }
    }
}

/// Whether JSON has no short escape for a control character, so that it stands in a text as `\\u` and its code only.
pub(super) fn needs_code(c: char) -> bool {
    (c < ' ' && !"\u{8}\t\n\u{c}\r".contains(c)) || c == '\u{7f}'
}

/// Returns a translated pattern without the strings of which a single character [needs its code](needs_code), which the compiler
/// would leave out where it has no such escapes.
pub(super) fn without_codes(pattern: &str) -> String {
    let Ok(parsed) = Parser::new().parse(pattern) else { return pattern.to_owned() };
    let found = ast::visit(&parsed, Codes { pattern, found: Vec::new() }).unwrap_or_default();
    let mut out = String::with_capacity(pattern.len());
    let mut written = 0;
    for Range { start, end } in found {
        out.push_str(&pattern[written..start]);
        out.push_str(NONE);
        written = end;
    }
    out + &pattern[written..]
}

/// Collects the characters of a pattern that need their code, in their order, and the classes of no others.
struct Codes<'a> {
    pattern: &'a str,
    found: Vec<Range<usize>>,
}

impl ast::Visitor for Codes<'_> {
    type Output = Vec<Range<usize>>;
    type Err = Infallible;

    fn finish(self) -> Result<Self::Output, Infallible> {
        Ok(self.found)
    }

    fn visit_pre(&mut self, ast: &Ast) -> Result<(), Infallible> {
        let span = ast.span().start.offset..ast.span().end.offset;
        let needs_codes = match ast {
            Ast::Literal(literal) => needs_code(literal.c),
            Ast::ClassBracketed(_) => match regex_syntax::parse(&self.pattern[span.clone()])
                .as_ref()
                .map(Hir::kind)
            {
                Ok(HirKind::Class(Class::Unicode(set))) => {
                    set.iter().all(|range| (range.start()..=range.end()).all(needs_code))
                }
                Ok(HirKind::Literal(literal)) => literal.0.iter().all(|byte| needs_code(char::from(*byte))),
                _ => false,
            },
            _ => false,
        };
        if needs_codes {
            self.found.push(span);
        }
        Ok(())
    }
}

/// Whether a pattern sets flags, which ECMA-262 mostly has not and which change what `.` matches.
fn has_flags(pattern: &str) -> bool {
    pattern.split("(?").skip(1).any(|rest| {
        let flags = rest.trim_start_matches(|c: char| c.is_ascii_alphabetic() || c == '-');
        flags.len() < rest.len() && flags.starts_with([':', ')'])
    })
}

/// Element of a class.
struct Atom {
    text: String,
    /// Whether it is one character, which may begin or end a range.
    single: bool,
}

struct Translator<'a> {
    rest: &'a str,
    out: String,
    flags: bool,
    /// Whether the text is written with escapes, as in JSON.
    escaped: bool,
}

impl<'a> Translator<'a> {
    /// Takes bytes of the pattern.
    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        taken
    }

    /// Translates what begins with `c` outside of classes.
    fn piece(&mut self, c: char) {
        match c {
            '[' => {
                let class = self.class();
                self.out.push_str(&if self.escaped { guarded(class) } else { class });
            }
            '\\' => {
                let Atom { text, .. } = self.escape();
                // A character, a class of Unicode, or an assertion.
                let is_nul = self.escaped && single_char(&text) == Some('\0');
                let text = if is_nul { NONE.to_owned() } else { text };
                self.out.push_str(&if self.escaped && (text.starts_with("\\p") || text.starts_with("\\P")) {
                    guarded(text)
                } else {
                    text
                });
            }
            '.' if !self.flags => {
                self.take(1);
                self.out.push_str(DOT);
            }
            '\0' if self.escaped => {
                self.take(1);
                self.out.push_str(NONE);
            }
            '(' if let Some(name) = group_name(self.rest) => {
                self.take(name);
                self.out.push_str("(?:");
            }
            _ => {
                let text = self.take(c.len_utf8());
                self.out.push_str(text);
            }
        }
    }

    /// Takes an escape.
    fn escape(&mut self) -> Atom {
        let mut chars = self.rest.chars().skip(1);
        let atom = |text: &str, single: bool| Atom { text: text.to_owned(), single };
        let Some(c) = chars.next() else { return atom(self.take(1), false) };
        let digits = |count: usize| {
            self.rest.as_bytes().get(2..2 + count).is_some_and(|all| all.iter().all(u8::is_ascii_hexdigit))
        };
        let bytes = match c {
            'x' if digits(2) => 4,
            'u' if digits(4) => 6,
            'u' | 'x' | 'p' | 'P' if self.rest[2..].starts_with('{') => {
                self.rest.find('}').map_or(2, |end| end + 1)
            }
            'p' | 'P' | 'c' => 2 + chars.next().map_or(0, char::len_utf8),
            c => 1 + c.len_utf8(),
        };
        let text = self.take(bytes);
        match c {
            's' => Atom { text: format!("[{SPACE}]"), single: false },
            'S' => Atom { text: format!("[^{SPACE}]"), single: false },
            'd' | 'D' | 'w' | 'W' | 'p' | 'P' => atom(text, false),
            // Elsewhere they are assertions of the compiler.
            '<' | '>' => atom(&text[1..], true),
            '0' => atom("\\x00", true),
            'c' if let Some(letter @ (b'a'..=b'z' | b'A'..=b'Z')) = text.as_bytes().get(2) => {
                Atom { text: format!("\\x{:02x}", letter % 32), single: true }
            }
            _ => atom(text, true),
        }
    }

    /// Takes a class; one without an end is what follows it.
    fn class(&mut self) -> String {
        let whole = self.rest;
        self.take(1);
        let negated = self.rest.starts_with('^');
        self.take(usize::from(negated));
        let mut items = String::new();
        while let Some(c) = self.rest.chars().next() {
            if c == ']' {
                self.take(1);
                return match (items.is_empty(), negated) {
                    (true, false) => NONE.to_owned(),
                    (true, true) => ALL.to_owned(),
                    (false, false) => format!("[{items}]"),
                    (false, true) => format!("[^{items}]"),
                };
            }
            let first = self.atom(c);
            items.push_str(&first.text);
            let mut after = self.rest.chars();
            let ranges = first.single && after.next() == Some('-');
            let Some(c) = after.next().filter(|c| ranges && *c != ']') else { continue };
            self.take(1);
            let last = self.atom(c);
            items.push_str(if last.single { "-" } else { "\\-" });
            items.push_str(&last.text);
        }
        whole.to_owned()
    }

    /// Takes an element of a class that begins with `c`.
    fn atom(&mut self, c: char) -> Atom {
        if c == '\\' {
            let atom = self.escape();
            // Within a class, it is the backspace.
            return if atom.text == "\\b" { Atom { text: "\\x08".to_owned(), single: true } } else { atom };
        }
        let text = self.take(c.len_utf8());
        let text = if "[&~-^".contains(c) { format!("\\{c}") } else { text.to_owned() };
        Atom { text, single: true }
    }
}

/// Length of the beginning of a group with a name, at the beginning of a text.
fn group_name(text: &str) -> Option<usize> {
    let rest = text.strip_prefix("(?P<").or_else(|| text.strip_prefix("(?<"))?;
    if rest.starts_with(['=', '!']) {
        return None;
    }
    Some(text.len() - rest.len() + rest.find('>')? + 1)
}

/// Returns the character that an expression is.
fn single_char(text: &str) -> Option<char> {
    let parsed = regex_syntax::parse(text).ok()?;
    let HirKind::Literal(literal) = parsed.kind() else { return None };
    let text = std::str::from_utf8(&literal.0).ok()?;
    text.chars().next().filter(|c| c.len_utf8() == text.len())
}

/// Returns a class, without U+0000 if it lacks a quote or a backslash.
fn guarded(class: String) -> String {
    let Ok(parsed) = regex_syntax::parse(&class) else { return class };
    let has = |c: char| match parsed.kind() {
        HirKind::Class(Class::Unicode(set)) => set.iter().any(|range| range.start() <= c && c <= range.end()),
        HirKind::Literal(literal) => literal.0.first() == Some(&(c as u8)),
        _ => false,
    };
    if has('\0') && !(has('"') && has('\\')) { format!("[{class}&&[^\\x00]]") } else { class }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_ecma_262_become_those_of_the_compiler() {
        for (pattern, expected) in [
            (r#"^[^"]*$"#, r#"^[[^"]&&[^\x00]]*$"#),
            (r#"[^"\\]+x[^\n"]"#, r#"[[^"\\]&&[^\x00]]+x[[^\n"]&&[^\x00]]"#),
            ("[^!-/]|a", "[[^!-/]&&[^\\x00]]|a"),
            (r"\P{Po}", r"[\P{Po}&&[^\x00]]"),
            (r"[\x00-\x1f]|\x00|\0|\u0000", r"[[\x00-\x1f]&&[^\x00]]|[a&&b]|[a&&b]|[a&&b]"),
            (r"^[^a]*$", r"^[^a]*$"),
            (r"a.b\.", r"a[^\n\r\u{2028}\u{2029}]b\."),
            ("(?s:.)", "(?s:.)"),
            ("[[a]&&[~~b]", r"[\[a]&&[\~\~b]"),
            ("[a&&b][+--][a-][-a]", r"[a\&\&b][+-\-][a\-][\-a]"),
            (r"[\w-x][\b]\b", r"[\w\-x][\x08]\b"),
            ("[][^]", r"[a&&b][\x00-\u{10FFFF}]"),
            (r"(?<stop>a)(?P<b>\/)\<\cJ", r"(?:a)(?:\/)<\x0a"),
        ] {
            assert_eq!(translate(pattern).as_deref(), Ok(expected), "{pattern}");
        }
        assert_eq!(
            without_codes(r"a\x01|[\x0b]+[\x00-\x05]?[\n\x01]\n\x7f"),
            r"a[a&&b]|[a&&b]+[a&&b]?[\n\x01]\n[a&&b]"
        );
        assert_eq!(translate(r"\s").unwrap(), format!("[{SPACE}]"));
        assert_eq!(translate(r"[^\S]").unwrap(), format!("[^[^{SPACE}]]"));
        for pattern in ["(?=a)", "(?<!a)b", r"(a)\1", "[a", "a)", "(", "a\\", "[z-a]", "*"] {
            let refused = translate(pattern).unwrap_err().to_string();
            assert!(refused.starts_with("the pattern ") && !refused.contains('\n'), "{refused}");
        }
    }
}
