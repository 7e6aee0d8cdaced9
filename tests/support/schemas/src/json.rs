//! JSON values with numbers of any size.

use std::fmt;

use serde_json::{Number, Value};

use crate::Decimal;

/// JSON value. Its display is its compact text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Json {
    /// Null.
    Null,
    /// Boolean.
    Bool(bool),
    /// Number, as it is written.
    Number(String),
    /// String.
    Text(String),
    /// Array.
    Array(Vec<Json>),
    /// Object: each name once, with its last value.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Reads a JSON text.
    pub fn parse(text: &str) -> Option<Self> {
        let mut reader = Reader(text);
        let value = reader.value()?;
        reader.space();
        reader.0.is_empty().then_some(value)
    }

    /// Returns an object.
    pub fn object(fields: impl IntoIterator<Item = (String, Json)>) -> Self {
        let mut object: Vec<(String, Self)> = Vec::new();
        for (name, value) in fields {
            object.retain(|(other, _)| *other != name);
            object.push((name, value));
        }
        Self::Object(object)
    }

    /// Returns a string.
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    /// Returns a number.
    pub fn number(number: impl fmt::Display) -> Self {
        Self::Number(number.to_string())
    }

    /// Returns the exact value of a number.
    pub fn decimal(&self) -> Option<Decimal> {
        match self {
            Self::Number(text) => Decimal::parse(text),
            _ => None,
        }
    }

    /// Whether two values are equal; numbers by value, names of objects in any order.
    pub fn equals(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Number(_), Self::Number(_)) => self.decimal() == other.decimal(),
            (Self::Array(one), Self::Array(two)) => {
                one.len() == two.len() && one.iter().zip(two).all(|(one, two)| one.equals(two))
            }
            (Self::Object(one), Self::Object(two)) => {
                let has = |name: &str, value: &Self| {
                    two.iter().any(|(other, found)| other == name && value.equals(found))
                };
                one.len() == two.len() && one.iter().all(|(name, value)| has(name, value))
            }
            _ => self == other,
        }
    }

    /// Returns its text on one line, with a space after each colon and comma.
    pub fn spaced(&self) -> String {
        let mut text = String::new();
        self.write(None, &mut text);
        text
    }

    /// Returns its text with each part on a line of its own, indented by two spaces.
    pub fn pretty(&self) -> String {
        let mut text = String::new();
        self.write(Some(0), &mut text);
        text
    }

    fn write(&self, depth: Option<usize>, out: &mut String) {
        let inner = depth.map(|depth| depth + 1);
        let line = |depth: Option<usize>| depth.map(|depth| format!("\n{}", "  ".repeat(depth)));
        let space = if depth.is_some() { "" } else { " " };
        let parts: Vec<(Option<&String>, &Self)> = match self {
            Self::Array(items) => items.iter().map(|item| (None, item)).collect(),
            Self::Object(fields) => fields.iter().map(|(name, value)| (Some(name), value)).collect(),
            _ => Vec::new(),
        };
        let [open, close] = if matches!(self, Self::Array(_)) { ["[", "]"] } else { ["{", "}"] };
        if parts.is_empty() {
            out.push_str(&self.to_string());
            return;
        }
        for (at, (name, value)) in parts.into_iter().enumerate() {
            out.push_str(if at == 0 { open } else { "," });
            out.push_str(line(inner).as_deref().unwrap_or(if at == 0 { "" } else { space }));
            if let Some(name) = name {
                out.push_str(&format!("{}: ", Self::text(name)));
            }
            value.write(inner, out);
        }
        out.push_str(&line(depth).unwrap_or_default());
        out.push_str(close);
    }

    /// Calls a function with all values in it, itself included, and the names of its objects as strings.
    pub fn visit(&self, visit: &mut dyn FnMut(&Self)) {
        visit(self);
        match self {
            Self::Array(items) => items.iter().for_each(|item| item.visit(visit)),
            Self::Object(fields) => fields.iter().for_each(|(name, value)| {
                visit(&Self::text(name));
                value.visit(visit);
            }),
            _ => {}
        }
    }
}

impl From<&Value> for Json {
    fn from(value: &Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(flag) => Self::Bool(*flag),
            Value::Number(number) => Self::Number(plain(number)),
            Value::String(text) => Self::text(text),
            Value::Array(items) => Self::Array(items.iter().map(Self::from).collect()),
            Value::Object(fields) => {
                Self::object(fields.iter().map(|(name, value)| (name.clone(), value.into())))
            }
        }
    }
}

/// Returns a number without an exponent, and without the fraction of an integer.
fn plain(number: &Number) -> String {
    let float = || number.as_f64().map(|float| float.to_string());
    if number.is_f64() { float().unwrap_or_default() } else { number.to_string() }
}

impl fmt::Display for Json {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => out.write_str("null"),
            Self::Bool(flag) => write!(out, "{flag}"),
            Self::Number(text) => out.write_str(text),
            Self::Text(text) => write!(out, "{}", Value::from(text.as_str())),
            Self::Array(items) => {
                out.write_str("[")?;
                for (at, item) in items.iter().enumerate() {
                    write!(out, "{}{item}", if at == 0 { "" } else { "," })?;
                }
                out.write_str("]")
            }
            Self::Object(fields) => {
                out.write_str("{")?;
                for (at, (name, value)) in fields.iter().enumerate() {
                    write!(out, "{}{}:{value}", if at == 0 { "" } else { "," }, Value::from(name.as_str()))?;
                }
                out.write_str("}")
            }
        }
    }
}

/// Rest of a text.
struct Reader<'a>(&'a str);

impl Reader<'_> {
    fn space(&mut self) {
        self.0 = self.0.trim_start_matches([' ', '\t', '\r', '\n']);
    }

    fn take(&mut self, text: &str) -> Option<()> {
        self.space();
        self.0 = self.0.strip_prefix(text)?;
        Some(())
    }

    fn string(&mut self) -> Option<String> {
        self.space();
        let mut escaped = true;
        let end = self.0.bytes().position(|byte| {
            let ends = byte == b'"' && !escaped;
            escaped = byte == b'\\' && !escaped;
            ends
        })?;
        let (text, rest) = self.0.split_at(end + 1);
        self.0 = rest;
        serde_json::from_str(text).ok()
    }

    fn value(&mut self) -> Option<Json> {
        self.space();
        match self.0.as_bytes().first()? {
            b'n' => self.take("null").map(|()| Json::Null),
            b't' => self.take("true").map(|()| Json::Bool(true)),
            b'f' => self.take("false").map(|()| Json::Bool(false)),
            b'"' => self.string().map(Json::Text),
            b'[' => {
                self.take("[")?;
                let mut items = Vec::new();
                if self.take("]").is_some() {
                    return Some(Json::Array(items));
                }
                loop {
                    items.push(self.value()?);
                    if self.take("]").is_some() {
                        return Some(Json::Array(items));
                    }
                    self.take(",")?;
                }
            }
            b'{' => {
                self.take("{")?;
                let mut fields = Vec::new();
                if self.take("}").is_some() {
                    return Some(Json::Object(fields));
                }
                loop {
                    let name = self.string()?;
                    self.take(":")?;
                    fields.push((name, self.value()?));
                    if self.take("}").is_some() {
                        return Some(Json::object(fields));
                    }
                    self.take(",")?;
                }
            }
            _ => {
                let end = self
                    .0
                    .find(|c: char| !matches!(c, '0'..='9' | '-' | '+' | '.' | 'e' | 'E'))
                    .unwrap_or(self.0.len());
                let (text, rest) = self.0.split_at(end);
                Decimal::parse(text)?;
                self.0 = rest;
                Some(Json::number(text))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_and_written() {
        for text in [
            "null",
            "true",
            "[]",
            "{}",
            r#"[1,2.50,-3e400,"a\"\\b"]"#,
            r#"{"a":{"b":[false]},"c":9007199254740993}"#,
            r#""\u0001""#,
        ] {
            assert_eq!(Json::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Json::parse(r#" { "a" : 1 , "\u0061" : 2 } "#).unwrap().to_string(), r#"{"a":2}"#);
        let value = Json::parse(r#"{"a":[1,[]],"b":{}}"#).unwrap();
        assert_eq!(value.spaced(), r#"{"a": [1, []], "b": {}}"#);
        assert_eq!(value.pretty(), "{\n  \"a\": [\n    1,\n    []\n  ],\n  \"b\": {}\n}");
        for wrong in ["", "01", "[1,]", "{\"a\"}", "\"a", "\"\u{1}\"", "nul", "1 2", r#""\ud800""#] {
            assert_eq!(Json::parse(wrong), None, "{wrong}");
        }
        assert!(
            Json::parse("[1.0,{\"a\":1,\"b\":2}]")
                .unwrap()
                .equals(&Json::parse("[1,{\"b\":2,\"a\":1}]").unwrap())
        );
    }
}
