//! Grammars of tool calls, in llguidance's dialect of Lark.

use std::collections::BTreeSet;
use std::fmt::{self, Write};

use serde_json::{Map, Value, json};

use crate::call_schema::call_schema;
use crate::tool_types::{ParameterKind, listed_values};
use crate::{Marker, ReasoningFormat, ToolCallFormat};

/// Whitespace between the parts of an answer in JSON: a space, or a line break with its indentation.
const WHITESPACE: &str = r" |\r?\n[ \t]{0,40}";

/// Tool in a grammar.
#[derive(Debug, Clone, Copy)]
pub struct GrammarTool<'a> {
    /// Name.
    pub name: &'a str,
    /// JSON schema of the arguments, an object.
    pub parameters: &'a Value,
    /// Whether arguments must match the schema; else they are any object.
    pub strict: bool,
}

/// Error: the grammar exceeds the maximum size. Its generation stopped there, so its full size is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the grammar of the tool calls has more than {most} bytes; send fewer tools, or shorter schemas")]
pub struct GrammarTooLarge {
    /// Maximum number of bytes.
    pub most: usize,
}

/// Grammar of an output that calls tools.
pub struct CallGrammar<'a> {
    /// Format of the calls.
    pub format: ToolCallFormat,
    /// Tools that may be called.
    pub tools: &'a [GrammarTool<'a>],
    /// Whether the output is a call, or several; else it is text with calls.
    pub required: bool,
    /// JSON schema of the answer, if the output is either calls or an answer in JSON.
    pub answer: Option<&'a Value>,
    /// Whether there may be several calls.
    pub several: bool,
    /// Format of the reasoning that may come first.
    pub reasoning: Option<ReasoningFormat>,
    /// Whether the prompt has opened that reasoning.
    pub begins_in_reasoning: bool,
    /// Returns the id of a marker that is a special token.
    pub special: &'a dyn Fn(&str) -> Option<u32>,
}

impl CallGrammar<'_> {
    /// Returns the grammar's text. Its rules have at most `most` bytes, as definitions of a schema that every parameter
    /// repeats could make gigabytes of a short request.
    ///
    /// # Errors
    /// The rules are longer.
    pub fn lark(&self, most: usize) -> Result<String, GrammarTooLarge> {
        let mut rules = Rules { text: String::new(), most, has_any_param: false };
        let start = self.write_rules(&mut rules).map_err(|fmt::Error| GrammarTooLarge { most })?;
        Ok(format!("start: {start}\n{}", rules.text))
    }

    /// Writes the rules; returns what the output is made of.
    fn write_rules(&self, rules: &mut Rules) -> Result<String, fmt::Error> {
        let several =
            |separator: &str| if self.several { format!(" ({separator}call)*") } else { String::new() };
        let begin = self.marker(Marker::CallBegin).unwrap_or_default();
        let mut start = match (self.format, self.is_free()) {
            (ToolCallFormat::Mistral, _) if self.named_arguments() => self.free(&begin, &several("")),
            (ToolCallFormat::Mistral, _) => {
                let more = if self.several { " (\", \" tool)*" } else { "" };
                writeln!(rules, "list: \"[\" tool{more} \"]\"")?;
                self.free(&begin, "")
            }
            // The object alone: any other text begins otherwise.
            (ToolCallFormat::Llama3, false) => format!("call{}", several("\"; \" ")),
            (ToolCallFormat::Llama3, true) => {
                rules.write_str("PLAIN: /[^{](.|\\n)*/\n")?;
                format!("(PLAIN? | call{})", several("\"; \" "))
            }
            (ToolCallFormat::Hermes | ToolCallFormat::QwenXml, false) => {
                format!("call{}", several("\"\\n\" "))
            }
            (ToolCallFormat::Hermes | ToolCallFormat::QwenXml, true) => self.free(&begin, &several("")),
        };
        if let Some(answer) = self.answer {
            start = format!("({start} | answer)");
            rules.write_str("answer: ")?;
            rules.plain_json(answer)?;
        }
        writeln!(rules, "call: {}", self.call(&begin))?;
        let names: Vec<String> = (0..self.tools.len()).map(|at| format!("tool_{at}")).collect();
        writeln!(rules, "tool: {}", names.join(" | "))?;
        for (at, tool) in self.tools.iter().enumerate() {
            match self.format {
                ToolCallFormat::QwenXml => self.xml_tool(rules, at, tool)?,
                _ => self.json_tool(rules, at, tool)?,
            }
        }
        let first = self.reasoning_rules(rules)?;
        rules.write_str("GAP: /\\n{1,2}/\n")?;
        if self.is_free() && self.format != ToolCallFormat::Llama3 {
            rules.write_str("TEXT: /(.|\\n)+/\n")?;
        }
        if self.is_free() && begin.starts_with('"') && self.format != ToolCallFormat::Llama3 {
            writeln!(rules, "head[lazy]: /(.|\\n)*{}/", escaped(self.marker_text(Marker::CallBegin)))?;
        }
        Ok(format!("{first}{start}"))
    }

    /// Whether the output may have any text.
    fn is_free(&self) -> bool {
        !self.required && self.answer.is_none()
    }

    /// Whether calls are a name and its arguments, each behind a marker.
    fn named_arguments(&self) -> bool {
        (self.special)("[ARGS]").is_some()
    }

    fn marker_text(&self, marker: Marker) -> &'static str {
        self.format.markers().iter().find(|(other, _)| *other == marker).map_or("", |(_, text)| text)
    }

    /// Returns a marker as a special token or as text.
    fn marker(&self, marker: Marker) -> Option<String> {
        let text = self.marker_text(marker);
        (!text.is_empty()).then(|| match (self.special)(text) {
            Some(id) => format!("<[{id}]>"),
            None => literal(text),
        })
    }

    /// Returns the start of an output of calls, or of text with calls.
    fn free(&self, begin: &str, more: &str) -> String {
        if !self.is_free() {
            return format!("call{more}");
        }
        let call = if begin.starts_with('<') { "TEXT? call" } else { "call" };
        let repeat = if self.several { "*" } else { "?" };
        format!("({call}){repeat} TEXT?")
    }

    /// Returns the body of a call's rule.
    fn call(&self, begin: &str) -> String {
        // In free text, a marker of text ends what comes before it.
        let begin = if !self.is_free() || begin.starts_with('<') { begin } else { "head" };
        match self.format {
            ToolCallFormat::Llama3 => "tool".to_owned(),
            ToolCallFormat::Mistral if self.named_arguments() => format!("{begin} tool"),
            ToolCallFormat::Mistral => format!("{begin} list"),
            ToolCallFormat::Hermes | ToolCallFormat::QwenXml => {
                let end = self.marker(Marker::CallEnd).unwrap_or_default();
                format!("{begin} \"\\n\" tool \"\\n\" {end}")
            }
        }
    }

    fn json_tool(&self, rules: &mut Rules, at: usize, tool: &GrammarTool<'_>) -> fmt::Result {
        let any = json!({"type": "object"});
        let arguments = if tool.strict { tool.parameters } else { &any };
        if self.format == ToolCallFormat::Llama3 && self.answer.is_some() {
            // In the terminals of an answer, which begins with the same characters.
            write!(rules, "tool_{at}: ")?;
            return rules.plain_json(&call_schema(tool.name, "parameters", arguments));
        }
        let name = Value::from(tool.name).to_string();
        if self.format == ToolCallFormat::Mistral && self.named_arguments() {
            let arguments = self.marker(Marker::Arguments).unwrap_or_default();
            writeln!(rules, "tool_{at}: {} {arguments} args_{at}", literal(tool.name))?;
        } else {
            let key = if self.format == ToolCallFormat::Llama3 { "parameters" } else { "arguments" };
            let head = literal(&format!("{{\"name\": {name}, \"{key}\": "));
            writeln!(rules, "tool_{at}: {head} args_{at} \"}}\"")?;
        }
        write!(rules, "args_{at}: ")?;
        rules.json(arguments, None)
    }

    /// Writes the rules of a tool whose parameters are tags.
    fn xml_tool(&self, rules: &mut Rules, at: usize, tool: &GrammarTool<'_>) -> fmt::Result {
        let mut body = literal(&format!("<function={}>\n", tool.name));
        let none = Map::new();
        let properties = tool.parameters["properties"].as_object().unwrap_or(&none);
        let required = tool.parameters["required"].as_array();
        let required: BTreeSet<&str> = required.into_iter().flatten().filter_map(Value::as_str).collect();
        for (index, (key, schema)) in properties.iter().enumerate() {
            let optional = if required.contains(key.as_str()) { "" } else { "?" };
            write!(body, " param_{at}_{index}{optional}")?;
            let open = literal(&format!("<parameter={key}>\n"));
            let close = if is_any_text(schema, tool.parameters) { "" } else { " \"\\n</parameter>\\n\"" };
            writeln!(rules, "param_{at}_{index}: {open} value_{at}_{index}{close}")?;
            write!(rules, "value_{at}_{index}")?;
            write_xml_value(rules, schema, tool.parameters)?;
        }
        if properties.is_empty() && !tool.strict {
            body.push_str(" any_param*");
            if !std::mem::replace(&mut rules.has_any_param, true) {
                rules.write_str("any_param: \"<parameter=\" KEY \">\\n\" any_value\n")?;
                rules.write_str(
                    "any_value[lazy]: /(.|\\n)*\\n<\\/parameter>\\n/\nKEY: /[A-Za-z0-9_]{1,64}/\n",
                )?;
            }
        }
        writeln!(rules, "tool_{at}: {body} \"</function>\"")
    }

    /// Writes the rules of reasoning; returns what the start begins with.
    fn reasoning_rules(&self, rules: &mut Rules) -> Result<String, fmt::Error> {
        let Some(reasoning) = self.reasoning else { return Ok("GAP? ".to_owned()) };
        let text = |marker| {
            let found = reasoning.markers().iter().find(|(other, _)| *other == marker);
            found.map_or("", |(_, text)| text)
        };
        let (begin, end) = (text(Marker::ReasoningBegin), text(Marker::ReasoningEnd));
        match ((self.special)(begin), (self.special)(end)) {
            (Some(begin), Some(end)) => {
                writeln!(rules, "thought: <[{begin}]> THOUGHT? <[{end}]>\nTHOUGHT: /(.|\\n)+/")?;
            }
            _ => {
                let begin = if self.begins_in_reasoning { String::new() } else { escaped(begin) };
                writeln!(rules, "thought[lazy]: /{begin}(.|\\n)*{}/", escaped(end))?;
            }
        }
        let optional = if self.begins_in_reasoning { "" } else { "?" };
        Ok(format!("thought{optional} GAP? "))
    }
}

/// Rules of a grammar, up to a number of bytes.
struct Rules {
    text: String,
    most: usize,
    /// Whether the rules of parameters that no schema names are written.
    has_any_param: bool,
}

impl Rules {
    /// Writes the end of a rule: JSON of a schema. `root` has the definitions that a part of a schema refers to.
    fn json(&mut self, schema: &Value, root: Option<&Value>) -> fmt::Result {
        // Before anything is copied: what is counted here is written, or is the end of the grammar.
        let mut left = BytesLeft(self.most.saturating_sub(self.text.len()));
        write!(left, "{schema}")?;
        for (_, shared) in definitions(schema, root) {
            write!(left, "{shared}")?;
        }
        writeln!(self, "%json {}", compact(schema.clone(), root))
    }
}

impl Rules {
    /// Writes the end of a rule: JSON of a schema, with the whitespace of a format without tools.
    fn plain_json(&mut self, schema: &Value) -> fmt::Result {
        write!(self, "%json {{\"x-guidance\":{}", json!({"whitespace_pattern": WHITESPACE}))?;
        for (key, value) in schema.as_object().into_iter().flatten().filter(|(key, _)| *key != "x-guidance") {
            write!(self, ",{}:{value}", Value::from(key.as_str()))?;
        }
        self.write_str("}\n")
    }
}

impl Write for Rules {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.text.len() + text.len() > self.most {
            return Err(fmt::Error);
        }
        self.text.push_str(text);
        Ok(())
    }
}

/// Counts down bytes; an error once there are none left.
struct BytesLeft(usize);

impl Write for BytesLeft {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0 = self.0.checked_sub(text.len()).ok_or(fmt::Error)?;
        Ok(())
    }
}

/// Whether a value between tags is any text, up to the tag that closes it.
fn is_any_text(schema: &Value, root: &Value) -> bool {
    ParameterKind::of_schema(schema, root) != ParameterKind::Json && listed_values(schema, root).is_none()
}

/// Writes the rest of the rule of a value between tags.
fn write_xml_value(rules: &mut Rules, schema: &Value, root: &Value) -> fmt::Result {
    if is_any_text(schema, root) {
        return rules.write_str("[lazy]: /(.|\\n)*\\n<\\/parameter>\\n/\n");
    }
    rules.write_str(": ")?;
    let kind = ParameterKind::of_schema(schema, root);
    let listed = listed_values(schema, root).filter(|values| {
        // Text stands between tags without quotes.
        kind != ParameterKind::Json || values.iter().any(Value::is_string)
    });
    let Some(listed) = listed else { return rules.json(schema, Some(root)) };
    for (at, value) in listed.iter().enumerate() {
        rules.write_str(if at == 0 { "" } else { " | " })?;
        match value {
            Value::String(text) => rules.write_str(&literal(text))?,
            other => rules.write_str(&literal(&other.to_string()))?,
        }
    }
    rules.write_str("\n")
}

/// Returns a text as a string of the grammar.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// Returns a text as a part of a regular expression.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        if !c.is_ascii_alphanumeric() && c != '_' && c != '<' && c != '>' {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// Returns the definitions of `root` that a part of it refers to and has not itself, with their keys.
fn definitions<'a>(
    schema: &'a Value,
    root: Option<&'a Value>,
) -> impl Iterator<Item = (&'static str, &'a Value)> {
    let missing = ["$defs", "definitions"].into_iter().filter(|key| schema.get(key).is_none());
    missing.filter_map(move |key| Some((key, root?.get(key)?)))
}

/// Returns a schema without freedom of whitespace, with the separators that models are trained on. `root` has the
/// definitions that a part of a schema refers to.
fn compact(mut schema: Value, root: Option<&Value>) -> Value {
    let definitions: Vec<_> =
        definitions(&schema, root).map(|(key, value)| (key.to_owned(), value.clone())).collect();
    if let Value::Object(fields) = &mut schema {
        fields.extend(definitions);
        let options = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        fields.insert("x-guidance".to_owned(), options);
    }
    schema
}
