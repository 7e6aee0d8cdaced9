//! Grammars of tool calls, in llguidance's dialect of Lark.

use std::fmt::{self, Write};

use serde_json::{Value, json};

use crate::call_schema::call_schema;
use crate::xml_grammar;
use crate::{Marker, ReasoningFormat, ToolCallFormat};

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

/// Answer in JSON that an output may be instead of calls.
#[derive(Debug, Clone, Copy)]
pub struct GrammarAnswer<'a> {
    /// JSON schema of the answer.
    pub schema: &'a Value,
    /// Options of llguidance's compiler for the whitespace of the answer, as a JSON object.
    pub options: &'a str,
}

/// Reason for which there is no grammar of the calls.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallGrammarError {
    /// The grammar exceeds the maximum size. Its generation stopped there, so its full size is unknown.
    #[error("the grammar of the tool calls has more than {most} bytes; send fewer tools, or shorter schemas")]
    TooLarge {
        /// Maximum number of bytes.
        most: usize,
    },
    /// A schema has what calls with a tag for each parameter cannot keep.
    #[error(
        "the parameters of {tool} have {keyword}, which cannot be enforced in this model's format of calls, where each parameter stands \
         between tags of its own; leave it out, or neither require the call nor make the tool strict"
    )]
    NotKept {
        /// Name of the tool.
        tool: String,
        /// Keyword, or what of it.
        keyword: String,
    },
}

impl From<fmt::Error> for CallGrammarError {
    /// Rules end where they become too large; [`CallGrammar::lark`] says the maximum.
    fn from(_: fmt::Error) -> Self {
        Self::TooLarge { most: 0 }
    }
}

/// Grammar of an output that calls tools.
pub struct CallGrammar<'a> {
    /// Format of the calls.
    pub format: ToolCallFormat,
    /// Tools that may be called.
    pub tools: &'a [GrammarTool<'a>],
    /// Whether the output is a call, or several; else it is text with calls.
    pub required: bool,
    /// The answer, if the output is either calls or an answer in JSON.
    pub answer: Option<GrammarAnswer<'a>>,
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
    /// The rules are longer, or a schema of a strict tool has what they cannot keep.
    pub fn lark(&self, most: usize) -> Result<String, CallGrammarError> {
        let mut rules = Rules { text: String::new(), most, has_any_param: false };
        let start = self.write_rules(&mut rules).map_err(|error| match error {
            CallGrammarError::TooLarge { .. } => CallGrammarError::TooLarge { most },
            error => error,
        })?;
        Ok(format!("start: {start}\n{}", rules.text))
    }

    /// Writes the rules; returns what the output is made of.
    fn write_rules(&self, rules: &mut Rules) -> Result<String, CallGrammarError> {
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
            rules.plain_json(answer.schema, answer.options)?;
        }
        writeln!(rules, "call: {}", self.call(&begin))?;
        let names: Vec<String> = (0..self.tools.len()).map(|at| format!("tool_{at}")).collect();
        writeln!(rules, "tool: {}", names.join(" | "))?;
        for (at, tool) in self.tools.iter().enumerate() {
            match self.format {
                ToolCallFormat::QwenXml => xml_grammar::write_tool(rules, at, tool)?,
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
        if let Some(answer) = self.answer.filter(|_| self.format == ToolCallFormat::Llama3) {
            // In the terminals of an answer, which begins with the same characters.
            write!(rules, "tool_{at}: ")?;
            return rules.plain_json(&call_schema(tool.name, "parameters", arguments), answer.options);
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
        rules.json(arguments, arguments)
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
pub(crate) struct Rules {
    text: String,
    most: usize,
    /// Whether the rules of parameters that no schema names are written.
    pub(crate) has_any_param: bool,
}

impl Rules {
    /// Writes the end of a rule: JSON of a schema without freedom of whitespace, with the separators that models are trained on. `root`
    /// is the document that its references are of.
    pub(crate) fn json(&mut self, schema: &Value, root: &Value) -> fmt::Result {
        let options = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        self.write_str("%json ")?;
        self.schema(schema, root, ("x-guidance", options))?;
        self.write_str("\n")
    }

    /// Writes a schema with options under a key. `root` is the document that its references are of.
    pub(crate) fn schema(
        &mut self,
        schema: &Value,
        root: &Value,
        (key, options): (&str, Value),
    ) -> fmt::Result {
        let is_whole = std::ptr::eq(schema, root);
        // Before anything is copied: what is counted here is written, or is the end of the grammar.
        let mut left = BytesLeft(self.most.saturating_sub(self.text.len()));
        write!(left, "{schema}")?;
        let refers = !is_whole && has_references(schema);
        if refers {
            write!(left, "{root}")?;
        }
        let mut schema = if refers { within(schema, root) } else { schema.clone() };
        if let (Value::Object(schema), Some(dialect)) = (&mut schema, root.get("$schema")) {
            schema.entry("$schema").or_insert_with(|| dialect.clone());
        }
        // `true` has no place for options.
        if schema == Value::Bool(true) {
            schema = json!({});
        }
        if let Value::Object(schema) = &mut schema {
            schema.insert(key.to_owned(), options);
        }
        write!(self, "{schema}")
    }
}

impl Rules {
    /// Writes the end of a rule: JSON of a schema, with the whitespace of an answer without tools.
    fn plain_json(&mut self, schema: &Value, options: &str) -> fmt::Result {
        write!(self, "%json {{\"x-guidance\":{options}")?;
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

/// Returns a text as a string of the grammar.
pub(crate) fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// Returns a text as a part of a regular expression.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        if !c.is_ascii_alphanumeric() && c != '_' && c != '<' && c != '>' {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// Whether a schema has references.
fn has_references(schema: &Value) -> bool {
    match schema {
        Value::Object(object) => object.iter().any(|(key, value)| {
            ["$ref", "$dynamicRef", "$recursiveRef"].contains(&key.as_str()) || has_references(value)
        }),
        Value::Array(values) => values.iter().any(has_references),
        _ => false,
    }
}

/// Returns a document of a part of another, whose references lead into that other. It stands among the definitions.
fn within(schema: &Value, root: &Value) -> Value {
    const NAME: &str = "parameters";
    let (mut schema, mut root) = (schema.clone(), root.clone());
    for document in [&mut schema, &mut root] {
        lead_into(document, &format!("#/$defs/{NAME}"));
    }
    if let Value::Object(root) = &mut root {
        root.shift_remove("$schema");
    }
    json!({"allOf": [schema], "$defs": {NAME: root}})
}

/// Lets the references to the root of a document, and to places by their path from there, lead to another place and on from there.
fn lead_into(schema: &mut Value, place: &str) {
    match schema {
        Value::Object(object) => {
            for (key, value) in object {
                match value {
                    Value::String(reference)
                        if key == "$ref" || key == "$dynamicRef" || key == "$recursiveRef" =>
                    {
                        if let Some(path) = reference
                            .strip_prefix('#')
                            .filter(|path| path.is_empty() || path.starts_with('/'))
                        {
                            *reference = format!("{place}{path}");
                        }
                    }
                    value => lead_into(value, place),
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| lead_into(value, place)),
        _ => {}
    }
}
