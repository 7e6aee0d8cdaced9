//! Parser of grammars in EBNF.

use std::collections::BTreeMap;

use super::{EbnfError, NESTING_MAX};

/// Part of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Node {
    /// Regular expression of a text or of a class of characters.
    Text(String),
    /// Rule.
    Name(usize),
    /// One after the other.
    All(Vec<Node>),
    /// One of them.
    Any(Vec<Node>),
    /// Number of times: at least, and at most.
    Repeat(Box<Node>, u32, Option<u32>),
}

impl Node {
    /// Returns the rules that it names.
    pub(super) fn names(&self) -> Vec<usize> {
        let (mut names, mut left) = (Vec::new(), vec![self]);
        while let Some(node) = left.pop() {
            match node {
                Self::Text(_) => {}
                Self::Name(rule) => names.push(*rule),
                Self::All(nodes) | Self::Any(nodes) => left.extend(nodes),
                Self::Repeat(node, ..) => left.push(node),
            }
        }
        names
    }
}

/// Rules of a grammar, by number.
#[derive(Debug)]
pub(super) struct Rules {
    numbers: BTreeMap<String, usize>,
    pub(super) names: Vec<String>,
    pub(super) nodes: Vec<Node>,
}

impl Rules {
    pub(super) fn number(&self, name: &str) -> Option<usize> {
        self.numbers.get(name).copied()
    }
}

/// Whether a character may be part of a rule's name.
pub(super) fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '_')
}

/// Parses a grammar, whose names are all defined.
pub(super) fn parse(text: &str) -> Result<Rules, EbnfError> {
    let mut parser =
        Parser { text, rest: text, numbers: BTreeMap::new(), names: Vec::new(), nodes: Vec::new() };
    parser.skip();
    while !parser.rest.is_empty() {
        let Some(name) = parser.defined() else {
            return Err(parser.wrong("has no rule where one must begin, `name ::= ...`"));
        };
        let name = name.to_owned();
        let rule = parser.number(&name);
        let node = parser.alternatives(0)?;
        if parser.rest.starts_with(')') {
            return Err(parser.wrong("closes a group that is not open"));
        }
        if parser.nodes[rule].replace(node).is_some() {
            return Err(EbnfError::Twice { rule: name });
        }
    }
    let Parser { numbers, names, nodes, .. } = parser;
    let defined = |(node, name): (Option<Node>, &String)| {
        node.ok_or_else(|| EbnfError::Undefined { rule: name.clone() })
    };
    let nodes = nodes.into_iter().zip(&names).map(defined).collect::<Result<_, _>>()?;
    Ok(Rules { numbers, names, nodes })
}

struct Parser<'a> {
    text: &'a str,
    rest: &'a str,
    numbers: BTreeMap<String, usize>,
    names: Vec<String>,
    nodes: Vec<Option<Node>>,
}

impl<'a> Parser<'a> {
    fn wrong(&self, reason: &str) -> EbnfError {
        let read = &self.text[..self.text.len() - self.rest.len()];
        EbnfError::Syntax { line: 1 + read.matches('\n').count(), reason: reason.to_owned() }
    }

    fn number(&mut self, name: &str) -> usize {
        if let Some(known) = self.numbers.get(name) {
            return *known;
        }
        self.numbers.insert(name.to_owned(), self.names.len());
        self.names.push(name.to_owned());
        self.nodes.push(None);
        self.names.len() - 1
    }

    /// Skips whitespace and comments.
    fn skip(&mut self) {
        loop {
            self.rest = self.rest.trim_start();
            if !self.rest.starts_with('#') {
                return;
            }
            self.rest = &self.rest[self.rest.find('\n').unwrap_or(self.rest.len())..];
        }
    }

    fn next(&mut self) -> Option<char> {
        let mut chars = self.rest.chars();
        let c = chars.next();
        self.rest = chars.as_str();
        c
    }

    fn eat(&mut self, text: &str) -> bool {
        let found = self.rest.strip_prefix(text);
        self.rest = found.unwrap_or(self.rest);
        found.is_some()
    }

    /// Returns the name here; empty if there is none.
    fn name(&self) -> &'a str {
        &self.rest[..self.rest.find(|c: char| !is_of_name(c)).unwrap_or(self.rest.len())]
    }

    /// Takes the begin of a rule, and returns its name.
    fn defined(&mut self) -> Option<&'a str> {
        let name = self.name();
        self.rest = self.rest[name.len()..].trim_start().strip_prefix("::=").filter(|_| !name.is_empty())?;
        Some(name)
    }

    /// Whether a rule begins here.
    fn begins_rule(&self) -> bool {
        let name = self.name();
        !name.is_empty() && self.rest[name.len()..].trim_start().starts_with("::=")
    }

    fn alternatives(&mut self, depth: usize) -> Result<Node, EbnfError> {
        if depth > NESTING_MAX {
            return Err(self.wrong("nests more than 100 groups"));
        }
        let mut alternatives = Vec::new();
        loop {
            alternatives.push(self.sequence(depth)?);
            if !self.eat("|") {
                break;
            }
        }
        Ok(if alternatives.len() == 1 { alternatives.swap_remove(0) } else { Node::Any(alternatives) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Node, EbnfError> {
        let mut nodes = Vec::new();
        loop {
            self.skip();
            if self.rest.is_empty() || self.rest.starts_with(['|', ')']) || (depth == 0 && self.begins_rule())
            {
                return Ok(Node::All(nodes));
            }
            let node = self.element(depth)?;
            nodes.push(self.repeated(node)?);
        }
    }

    fn element(&mut self, depth: usize) -> Result<Node, EbnfError> {
        let name = self.name();
        if !name.is_empty() {
            self.rest = &self.rest[name.len()..];
            return Ok(Node::Name(self.number(name)));
        }
        match self.next() {
            Some('"') => self.literal(),
            Some('[') => self.class(),
            Some('.') => Ok(Node::Text("(?s:.)".to_owned())),
            Some('(') if self.rest.starts_with('=') => {
                Err(self.wrong("has a lookahead, `(= ...)`, which is not supported"))
            }
            Some('(') => {
                let node = self.alternatives(depth + 1)?;
                if self.eat(")") { Ok(node) } else { Err(self.wrong("has a group that is not closed")) }
            }
            Some('<' | '!') => Err(self.wrong("names a token, which is not supported; write its text")),
            _ => Err(self.wrong("has a sign that begins no text, class, group or rule")),
        }
    }

    /// Returns the element before with its repetition.
    fn repeated(&mut self, node: Node) -> Result<Node, EbnfError> {
        self.rest = self.rest.trim_start_matches([' ', '\t']);
        let (least, most) = if self.eat("*") {
            (0, None)
        } else if self.eat("+") {
            (1, None)
        } else if self.eat("?") {
            (0, Some(1))
        } else if self.eat("{") {
            self.counts()?
        } else {
            return Ok(node);
        };
        if self.rest.starts_with(['*', '+', '?', '{']) {
            return Err(self.wrong("repeats a repetition; write it as a group"));
        }
        Ok(Node::Repeat(Box::new(node), least, most))
    }

    fn counts(&mut self) -> Result<(u32, Option<u32>), EbnfError> {
        let wrong = "has counts other than {N}, {N,}, {,N} and {N,M}";
        let Some((counts, rest)) = self.rest.split_once('}') else { return Err(self.wrong(wrong)) };
        let number = |text: &str| match text.trim() {
            "" => Ok(None),
            text => text.parse::<u32>().map(Some).map_err(|_| self.wrong(wrong)),
        };
        let (least, most) = match counts.split_once(',') {
            Some((least, most)) => (number(least)?, number(most)?),
            None => (number(counts)?, number(counts)?),
        };
        let least_or_none = least.unwrap_or(0);
        if (least, most) == (None, None) || most.is_some_and(|most| most < least_or_none) {
            return Err(self.wrong(wrong));
        }
        self.rest = rest;
        Ok((least_or_none, most))
    }

    fn literal(&mut self) -> Result<Node, EbnfError> {
        let mut text = String::new();
        loop {
            match self.next() {
                Some('"') => return Ok(Node::Text(regex_syntax::escape(&text))),
                Some('\\') => text.push(self.escape()?),
                Some(c) => text.push(c),
                None => return Err(self.wrong("has a text that is not closed")),
            }
        }
    }

    fn class(&mut self) -> Result<Node, EbnfError> {
        let mut class = String::from(if self.eat("^") { "[^" } else { "[" });
        let empty = class.len();
        loop {
            let first = match self.next() {
                Some(']') if class.len() > empty => {
                    class.push(']');
                    return Ok(Node::Text(class));
                }
                Some('\\') => self.escape()?,
                Some(c) if c != ']' => c,
                Some(_) => return Err(self.wrong("has an empty class of characters")),
                None => return Err(self.wrong("has a class of characters that is not closed")),
            };
            let mut last = first;
            if self.rest.starts_with('-') && !self.rest.starts_with("-]") {
                self.next();
                last = match self.next() {
                    Some('\\') => self.escape()?,
                    Some(c) => c,
                    None => return Err(self.wrong("has a class of characters that is not closed")),
                };
            }
            if last < first {
                return Err(self.wrong("has a range of characters whose last is before its first"));
            }
            class.push_str(&format!("\\x{{{:x}}}-\\x{{{:x}}}", u32::from(first), u32::from(last)));
        }
    }

    /// Returns the character of an escape.
    fn escape(&mut self) -> Result<char, EbnfError> {
        let c = self.next();
        let digits = match c {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some(c @ ('\\' | '"' | '\'' | '[' | ']' | '-' | '^' | '/')) => return Ok(c),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => {
                return Err(
                    self.wrong("has an unknown escape; known are \\n, \\r, \\t, \\x, \\u, \\U and signs")
                );
            }
        };
        let code = self.rest.get(..digits).filter(|code| code.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let found = code.and_then(|code| u32::from_str_radix(code, 16).ok()).and_then(char::from_u32);
        let Some(found) = found else { return Err(self.wrong("has an escape that is no character")) };
        self.rest = &self.rest[digits..];
        Ok(found)
    }
}
