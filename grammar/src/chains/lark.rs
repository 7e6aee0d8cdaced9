//! Names of a Lark grammar in the compiler's dialect.
//!
//! This is no parser. A name that could begin a definition counts as named there and as a definition, which can only make chains longer,
//! and names of nested grammars count as those of the outer one.

use serde_json::{Deserializer, Value};

use super::{Names, SchemaNames};

/// Keywords that a JSON value follows.
pub(crate) const JSON_KEYWORDS: [&str; 4] = ["%json", "%text", "%regex", "%llguidance"];

/// Adds the names of a grammar.
pub(super) fn add(text: &str, names: &mut Names) {
    // What comes before the first definition.
    let mut definition = names.add();
    let mut depth: usize = 0;
    // Whether a name here could begin a definition: at the begin of a line or of a nested grammar.
    let mut may_begin = true;
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let mut begins = false;
        let length = match first {
            '\n' | '{' | '}' => {
                begins = true;
                1
            }
            _ if first.is_whitespace() => {
                begins = may_begin;
                first.len_utf8()
            }
            '"' => delimited(rest, '"'),
            '#' => line(rest),
            '/' if rest[1..].starts_with('/') => line(rest),
            '/' => delimited(rest, '/'),
            '<' => special_token(rest),
            '@' => 1 + name_length(&rest[1..]),
            '!' | '?' => {
                begins = may_begin;
                1
            }
            '%' if let Some(keyword) =
                JSON_KEYWORDS.into_iter().find(|keyword| rest.starts_with(keyword)) =>
            {
                let mut values = Deserializer::from_str(&rest[keyword.len()..]).into_iter::<Value>();
                if let Some(Ok(Value::Object(schema))) = values.next() {
                    let number = SchemaNames::new(&schema, names).add(&schema);
                    names.leads_to[definition].push(number);
                }
                keyword.len() + values.byte_offset()
            }
            _ => name_length(rest),
        };
        if length == 0 {
            // A sign that is part of no name.
            rest = &rest[first.len_utf8()..];
            may_begin = false;
            continue;
        }
        let is_name = first.is_ascii_alphabetic() || first == '_';
        if is_name {
            let number = names.number(&rest[..length]);
            names.leads_to[definition].push(number);
            if may_begin || is_definition(&rest[length..]) {
                definition = number;
                depth = 0;
            }
        }
        match first {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        names.nests(definition, depth + 1);
        may_begin = begins;
        rest = &rest[length..];
    }
}

/// Whether what follows a name makes it a definition: a colon, or what may stand between.
fn is_definition(rest: &str) -> bool {
    let rest = rest.trim_start_matches([' ', '\t']);
    rest.starts_with(':') && !rest.starts_with("::") || rest.starts_with('[') || rest.starts_with('.')
}

/// Length of the name, number or bracket at the begin of a text: of a rule in small letters, or of a terminal in capitals.
fn name_length(text: &str) -> usize {
    let first = text.trim_start_matches('_').chars().next().unwrap_or('_');
    let inner = |letter: char| match letter {
        '_' | '-' | '0'..='9' => true,
        'a'..='z' => !first.is_ascii_uppercase(),
        'A'..='Z' => first.is_ascii_uppercase(),
        _ => false,
    };
    match text.chars().next() {
        Some('(' | ')' | '[' | ']') => 1,
        Some(letter) if inner(letter) && letter != '-' => {
            text.find(|letter| !inner(letter)).unwrap_or(text.len())
        }
        _ => 0,
    }
}

/// Length of a text in delimiters, which backslashes escape.
pub(crate) fn delimited(text: &str, delimiter: char) -> usize {
    let mut escaped = false;
    for (at, letter) in text.char_indices().skip(1) {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if letter == delimiter => return at + 1,
            _ => {}
        }
    }
    1
}

/// Length of a comment, without the end of its line.
pub(crate) fn line(text: &str) -> usize {
    text.find('\n').unwrap_or(text.len())
}

/// Length of `<token>`.
pub(crate) fn special_token(text: &str) -> usize {
    match text[1..].find(|letter: char| matches!(letter, '<' | '>') || letter.is_whitespace()) {
        Some(end) if text[1 + end..].starts_with('>') => end + 2,
        _ => 1,
    }
}
