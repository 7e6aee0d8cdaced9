//! The filter `tojson`, with transformers' defaults: without HTML escapes and without escapes of other characters than ASCII.

use minijinja::Error;
use minijinja::value::{Kwargs, Rest, Value, ValueKind};

use super::template_options::options;
use super::template_values::{check_depth, invalid, is_namespace, write_number};

/// Maximum bytes of an indentation.
const INDENT_MAX: usize = 16;

/// Serializes a value, as Python's `json.dumps` does.
pub(super) fn tojson(value: &Value, args: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let [ascii, indent, separators, sort_keys] =
        options("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"], &args, &named)?;
    let indent = match (indent.as_str(), i64::try_from(indent.clone())) {
        _ if indent.is_none() || indent.is_undefined() => None,
        (Some(text), _) if text.len() <= INDENT_MAX => Some(text.to_owned()),
        (None, Ok(width)) => Some(" ".repeat(usize::try_from(width).unwrap_or(0).min(INDENT_MAX))),
        _ => return Err(invalid(format!("tojson: indent is {indent}, not a small number or a short text"))),
    };
    let (item, key) = match () {
        () if !separators.is_none() && !separators.is_undefined() => {
            let parts: Vec<Value> = separators.try_iter()?.collect();
            match &parts[..] {
                [item, key] if item.as_str().is_some() && key.as_str().is_some() => {
                    (item.to_string(), key.to_string())
                }
                _ => return Err(invalid("tojson: separators are not two texts")),
            }
        }
        () if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        () => (", ".to_owned(), ": ".to_owned()),
    };
    let json = Json { indent, item, key, ascii: ascii.is_true(), sort_keys: sort_keys.is_true() };
    let mut out = String::new();
    json.write(&mut out, value, 0)?;
    Ok(out.into())
}

/// Returns the JSON of a value on one line.
///
/// # Errors
/// It has none.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    let [item, key] = [", ", ": "].map(str::to_owned);
    let json = Json { indent: None, item, key, ascii: false, sort_keys: false };
    let mut out = String::new();
    json.write(&mut out, value, 0).map(|()| out)
}

/// How JSON is written.
struct Json {
    indent: Option<String>,
    /// Between items.
    item: String,
    /// Behind keys.
    key: String,
    ascii: bool,
    sort_keys: bool,
}

impl Json {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        check_depth(depth)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => write_number(out, value, "NaN", "Infinity"),
            ValueKind::String => self.write_text(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.write_items(out, ['[', ']'], &items, depth, |out, item| {
                    self.write(out, item, depth + 1)
                })?;
            }
            ValueKind::Map if !is_namespace(value) => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_items(out, ['{', '}'], &keys, depth, |out, key| {
                    self.write_key(out, key)?;
                    out.push_str(&self.key);
                    self.write(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            kind => return Err(invalid(format!("tojson: a value of type {kind} has no JSON"))),
        }
        Ok(())
    }

    fn write_items(
        &self,
        out: &mut String,
        brackets: [char; 2],
        items: &[Value],
        depth: usize,
        write: impl Fn(&mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(brackets[0]);
        for (at, item) in items.iter().enumerate() {
            out.push_str(if at > 0 { &self.item } else { "" });
            self.break_line(out, depth + 1);
            write(out, item)?;
        }
        if !items.is_empty() {
            self.break_line(out, depth);
        }
        out.push(brackets[1]);
        Ok(())
    }

    fn break_line(&self, out: &mut String, depth: usize) {
        let Some(indent) = &self.indent else { return };
        out.push('\n');
        (0..depth).for_each(|_| out.push_str(indent));
    }

    fn write_key(&self, out: &mut String, key: &Value) -> Result<(), Error> {
        let mut text = String::new();
        match key.kind() {
            ValueKind::String => {
                self.write_text(out, key.as_str().unwrap_or_default());
                return Ok(());
            }
            ValueKind::None | ValueKind::Bool | ValueKind::Number => self.write(&mut text, key, 0)?,
            kind => return Err(invalid(format!("tojson: a key of type {kind} has no JSON"))),
        }
        self.write_text(out, &text);
        Ok(())
    }

    fn write_text(&self, out: &mut String, text: &str) {
        out.push('"');
        let mut units = [0; 2];
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\x08' => out.push_str("\\b"),
                '\x0c' => out.push_str("\\f"),
                '\0'..' ' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
                '\x7f'.. if self.ascii => {
                    c.encode_utf16(&mut units)
                        .iter()
                        .for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

#[cfg(test)]
mod tests {
    use super::super::ChatTemplate;

    fn json(options: &str) -> Result<String, String> {
        let source = format!("{{{{ {{'b': [1, {{}}], 'a': 'é😀<', 'c': []}} | tojson({options}) }}}}");
        let template = ChatTemplate::new(&source, "", "").map_err(|error| error.to_string())?;
        template
            .render(&crate::text::Conversation::default(), time::OffsetDateTime::UNIX_EPOCH)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn an_indentation_is_bounded() {
        let deep = |indent: &str| {
            json(indent).map(|json| json.lines().map(|line| line.len() - line.trim_start().len()).max())
        };
        assert_eq!(deep("indent=5000"), Ok(Some(32)));
        assert_eq!(deep("indent=-1"), Ok(Some(0)));
        for wrong in
            ["indent=[]", "indent='                 '", "separators=[',']", "separators=1", "skipkeys=true"]
        {
            assert!(json(wrong).is_err(), "{wrong}");
        }
    }
}
