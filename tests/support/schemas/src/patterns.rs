//! Patterns of strings, with strings that match and strings that barely do not.

use crate::Json;
use crate::part::Maker;
use crate::scalars::CHARACTERS;

/// Returns a character as an element of a class.
fn in_class(maker: &mut Maker, c: char) -> String {
    match c {
        '\\' | ']' => format!("\\{c}"),
        '"' | '/' | '^' | '-' if maker.once_in(2) => format!("\\{c}"),
        '^' | '-' => format!("\\{c}"),
        '\n' => maker.pick(&["\\n", "\\x0a", "\\u000A", "\\cJ"]).to_owned(),
        '\t' => "\\t".to_owned(),
        '\u{8}' => "\\x08".to_owned(),
        c if c.is_control() || c == '\u{2028}' || c == '\u{feff}' => format!("\\u{:04x}", c as u32),
        c => c.to_string(),
    }
}

/// Returns strings of characters, some of which have one of the others.
fn strings(maker: &mut Maker, from: &[char], with: &[char], lengths: &[usize]) -> Vec<Json> {
    let mut strings = Vec::new();
    for length in lengths {
        let mut text: Vec<char> = (0..*length).map(|_| maker.pick(from)).collect();
        strings.push(Json::Text(text.iter().collect()));
        if !with.is_empty() && !text.is_empty() {
            let at = maker.random.below(text.len());
            text[at] = maker.pick(with);
            strings.push(Json::Text(text.iter().collect()));
        }
    }
    strings
}

/// Returns a pattern of a class that excludes some characters, and strings.
pub(crate) fn negated_class(maker: &mut Maker) -> (String, Vec<Json>) {
    let mut excluded: Vec<char> = (0..1 + maker.random.below(3)).map(|_| maker.pick(&CHARACTERS)).collect();
    if maker.once_in(2) {
        excluded[0] = maker.pick(&['"', '\\']);
    }
    let mut items: String = excluded.clone().into_iter().map(|c| in_class(maker, c)).collect();
    if maker.once_in(4) {
        items.push_str("\\s");
        excluded.extend([' ', '\n', '\t', '\r', '\u{a0}', '\u{feff}', '\u{2028}']);
    }
    let allowed: Vec<char> = CHARACTERS.into_iter().filter(|c| !excluded.contains(c)).collect();
    let class = format!("[^{items}]");
    let (pattern, lengths) = match maker.random.below(5) {
        0 => (format!("^{class}*$"), [0, 1, 2, 5]),
        1 => (format!("^{class}+$"), [0, 1, 2, 5]),
        2 => (format!("^{class}{{1,2}}$"), [0, 1, 2, 3]),
        // Alternatives of one character are merged with the class.
        3 => (format!("^(?:\\n|{class}|[\\x00-\\x1f])*$"), [0, 1, 3, 4]),
        _ => (class, [0, 1, 2, 3]),
    };
    let values = strings(maker, &allowed, &excluded, &lengths);
    (pattern, values)
}

/// Pattern as a tree.
enum Node {
    Character(char),
    Class(String, Vec<char>),
    Sequence(Vec<Node>),
    Alternatives(Vec<Node>),
    Repeated(Box<Node>, usize, usize, &'static str),
}

impl Node {
    fn new(maker: &mut Maker, depth: u32) -> Self {
        match maker.random.below(if depth == 0 { 5 } else { 9 }) {
            0 | 1 => Self::Character(maker.pick(&CHARACTERS)),
            2 | 3 => {
                let all = |keep: fn(char) -> bool| {
                    CHARACTERS.into_iter().filter(|c| keep(*c)).collect::<Vec<char>>()
                };
                let (text, members) = maker.pick(&[
                    ("\\d", all(|c| c.is_ascii_digit())),
                    ("\\D", all(|c| !c.is_ascii_digit())),
                    ("\\w", all(|c| c.is_ascii_alphanumeric() || c == '_')),
                    ("\\W", all(|c| !(c.is_ascii_alphanumeric() || c == '_'))),
                    ("\\s", all(|c| c != '\u{85}' && (c.is_whitespace() || c == '\u{feff}'))),
                    ("\\S", all(|c| c == '\u{85}' || !(c.is_whitespace() || c == '\u{feff}'))),
                    (".", all(|c| !matches!(c, '\n' | '\r' | '\u{2028}'))),
                    ("[a-z]", vec!['a', 'b', 'x', 'z']),
                    ("[\\w.-]", vec!['a', '0', '_', '.', '-']),
                    ("[[&&~~]", vec!['[', '&', '~']),
                    (
                        "[^\\s\"]",
                        all(|c| c == '\u{85}' || !(c.is_whitespace() || c == '\u{feff}' || c == '"')),
                    ),
                    ("[\\s\\S]", CHARACTERS.to_vec()),
                    ("[ -~]", all(|c| (' '..='~').contains(&c))),
                    ("[^\\x00-\\x1f]", all(|c| c >= ' ')),
                ]);
                Self::Class(text.to_owned(), members)
            }
            4 => {
                let members: Vec<char> =
                    (0..1 + maker.random.below(3)).map(|_| maker.pick(&CHARACTERS)).collect();
                let items: String = members.clone().into_iter().map(|c| in_class(maker, c)).collect();
                Self::Class(format!("[{items}]"), members)
            }
            5 => {
                Self::Sequence((0..2 + maker.random.below(2)).map(|_| Self::new(maker, depth - 1)).collect())
            }
            6 => Self::Alternatives(
                (0..2 + maker.random.below(2)).map(|_| Self::new(maker, depth - 1)).collect(),
            ),
            _ => {
                let (least, most, text) = maker.pick(&[
                    (0, 3, "*"),
                    (1, 3, "+"),
                    (0, 1, "?"),
                    (2, 2, "{2}"),
                    (1, 3, "{1,3}"),
                    (2, 4, "{2,}"),
                    (0, 3, "*?"),
                ]);
                Self::Repeated(Box::new(Self::new(maker, depth - 1)), least, most, text)
            }
        }
    }

    fn write(&self, maker: &mut Maker, out: &mut String) {
        match self {
            Self::Character(c) => match c {
                '\n' => out.push_str("\\n"),
                '\0' => out.push_str("\\u0000"),
                c if c.is_control() => out.push_str(&format!("\\x{:02x}", *c as u32)),
                '\\' | '.' | '[' | ']' | '^' | '/' => out.extend(['\\', *c]),
                '"' | '-' | '&' | '~' if maker.once_in(2) => out.extend(['\\', *c]),
                c => out.push(*c),
            },
            Self::Class(text, _) => out.push_str(text),
            Self::Sequence(nodes) => nodes.iter().for_each(|node| node.write(maker, out)),
            Self::Alternatives(nodes) => {
                // A name may be used once.
                let named = if maker.kinds.insert("named group") { "(?<stop>" } else { "(" };
                out.push_str(maker.pick(&["(", "(?:", named]));
                for (at, node) in nodes.iter().enumerate() {
                    out.push_str(if at == 0 { "" } else { "|" });
                    node.write(maker, out);
                }
                out.push(')');
            }
            Self::Repeated(node, _, _, text) => {
                out.push_str("(?:");
                node.write(maker, out);
                out.push(')');
                out.push_str(text);
            }
        }
    }

    fn sample(&self, maker: &mut Maker, out: &mut String) {
        match self {
            Self::Character(c) => out.push(*c),
            Self::Class(_, members) => out.push(maker.pick(members)),
            Self::Sequence(nodes) => nodes.iter().for_each(|node| node.sample(maker, out)),
            Self::Alternatives(nodes) => {
                let at = maker.random.below(nodes.len());
                nodes[at].sample(maker, out);
            }
            Self::Repeated(node, least, most, _) => {
                let count = least + maker.random.below(most - least + 1);
                (0..count).for_each(|_| node.sample(maker, out));
            }
        }
    }
}

/// Returns a pattern and strings.
pub(crate) fn pattern(maker: &mut Maker) -> (String, Vec<Json>) {
    let node = Node::Sequence((0..1 + maker.random.below(3)).map(|_| Node::new(maker, 2)).collect());
    let mut pattern = String::new();
    node.write(maker, &mut pattern);
    if !maker.once_in(5) {
        pattern.insert(0, '^');
    }
    if !maker.once_in(5) {
        pattern.push('$');
    }
    let mut values = Vec::new();
    for _ in 0..5 {
        let mut text = String::new();
        node.sample(maker, &mut text);
        let mut characters: Vec<char> = text.chars().collect();
        values.push(Json::Text(text));
        let other = maker.pick(&CHARACTERS);
        match (maker.random.below(3), characters.len()) {
            (0, 1..) => {
                let at = maker.random.below(characters.len());
                characters[at] = other;
            }
            (1, 1..) => _ = characters.pop(),
            _ => characters.push(other),
        }
        values.push(Json::Text(characters.into_iter().collect()));
    }
    (pattern, values)
}
