//! Grammars of tool calls, in llguidance's dialect of Lark.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use crate::tool_types::ParameterKind;
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

/// Grammar of an output that calls tools.
pub struct CallGrammar<'a> {
    /// Format of the calls.
    pub format: ToolCallFormat,
    /// Tools that may be called.
    pub tools: &'a [GrammarTool<'a>],
    /// Whether the output is a call, or several; else it is text with calls.
    pub required: bool,
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
    /// Returns the grammar's text.
    pub fn lark(&self) -> String {
        let mut rules = String::new();
        let several =
            |separator: &str| if self.several { format!(" ({separator}call)*") } else { String::new() };
        let begin = self.marker(Marker::CallBegin).unwrap_or_default();
        let start = match (self.format, self.required) {
            (ToolCallFormat::Mistral, _) if self.named_arguments() => self.free(&begin, &several("")),
            (ToolCallFormat::Mistral, _) => {
                let more = if self.several { " (\", \" tool)*" } else { "" };
                self.rule(&mut rules, "list", &format!("\"[\" tool{more} \"]\""));
                self.free(&begin, "")
            }
            // The object alone: any other text begins otherwise.
            (ToolCallFormat::Llama3, true) => format!("call{}", several("\"; \" ")),
            (ToolCallFormat::Llama3, false) => {
                rules.push_str("PLAIN: /[^{](.|\\n)*/\n");
                format!("PLAIN? | call{}", several("\"; \" "))
            }
            (ToolCallFormat::Hermes | ToolCallFormat::QwenXml, true) => {
                format!("call{}", several("\"\\n\" "))
            }
            (ToolCallFormat::Hermes | ToolCallFormat::QwenXml, false) => self.free(&begin, &several("")),
        };
        self.rule(&mut rules, "call", &self.call(&begin));
        let names: Vec<String> = (0..self.tools.len()).map(|at| format!("tool_{at}")).collect();
        self.rule(&mut rules, "tool", &names.join(" | "));
        for (at, tool) in self.tools.iter().enumerate() {
            match self.format {
                ToolCallFormat::QwenXml => self.xml_tool(&mut rules, at, tool),
                _ => self.json_tool(&mut rules, at, tool),
            }
        }
        let first = self.reasoning_rules(&mut rules);
        rules.push_str("GAP: /\\n{1,2}/\n");
        if !self.required && self.format != ToolCallFormat::Llama3 {
            rules.push_str("TEXT: /(.|\\n)+/\n");
        }
        if !self.required && begin.starts_with('"') && self.format != ToolCallFormat::Llama3 {
            let _ = writeln!(rules, "head[lazy]: /(.|\\n)*{}/", escaped(self.marker_text(Marker::CallBegin)));
        }
        format!("start: {first}{start}\n{rules}")
    }

    /// Whether calls are a name and its arguments, each behind a marker.
    fn named_arguments(&self) -> bool {
        (self.special)("[ARGS]").is_some()
    }

    fn rule(&self, rules: &mut String, name: &str, body: &str) {
        let _ = writeln!(rules, "{name}: {body}");
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
        if self.required {
            return format!("call{more}");
        }
        let call = if begin.starts_with('<') { "TEXT? call" } else { "call" };
        let repeat = if self.several { "*" } else { "?" };
        format!("({call}){repeat} TEXT?")
    }

    /// Returns the body of a call's rule.
    fn call(&self, begin: &str) -> String {
        // In free text, a marker of text ends what comes before it.
        let begin = if self.required || begin.starts_with('<') { begin } else { "head" };
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

    fn json_tool(&self, rules: &mut String, at: usize, tool: &GrammarTool<'_>) {
        let name = Value::from(tool.name).to_string();
        if self.format == ToolCallFormat::Mistral && self.named_arguments() {
            let arguments = self.marker(Marker::Arguments).unwrap_or_default();
            let _ = writeln!(rules, "tool_{at}: {} {arguments} args_{at}", literal(tool.name));
        } else {
            let key = if self.format == ToolCallFormat::Llama3 { "parameters" } else { "arguments" };
            let head = literal(&format!("{{\"name\": {name}, \"{key}\": "));
            let _ = writeln!(rules, "tool_{at}: {head} args_{at} \"}}\"");
        }
        let schema = if tool.strict { tool.parameters.clone() } else { json!({"type": "object"}) };
        let _ = writeln!(rules, "args_{at}: %json {}", compact(schema, None));
    }

    /// Writes the rules of a tool whose parameters are tags.
    fn xml_tool(&self, rules: &mut String, at: usize, tool: &GrammarTool<'_>) {
        let mut body = literal(&format!("<function={}>\n", tool.name));
        let none = Map::new();
        let properties = tool.parameters["properties"].as_object().unwrap_or(&none);
        let required: Vec<&str> = match tool.parameters["required"].as_array() {
            Some(names) => names.iter().filter_map(Value::as_str).collect(),
            None => Vec::new(),
        };
        for (index, (key, schema)) in properties.iter().enumerate() {
            let optional = if required.contains(&key.as_str()) { "" } else { "?" };
            let _ = write!(body, " param_{at}_{index}{optional}");
            let open = literal(&format!("<parameter={key}>\n"));
            let (value, close) = self.xml_value(schema, tool.parameters);
            let _ = writeln!(rules, "param_{at}_{index}: {open} value_{at}_{index}{close}");
            let _ = writeln!(rules, "value_{at}_{index}{value}");
        }
        if properties.is_empty() && !tool.strict {
            let _ = write!(body, " any_param*");
            if !rules.contains("\nany_param:") {
                rules.push_str("any_param: \"<parameter=\" KEY \">\\n\" any_value\n");
                rules
                    .push_str("any_value[lazy]: /(.|\\n)*\\n<\\/parameter>\\n/\nKEY: /[A-Za-z0-9_]{1,64}/\n");
            }
        }
        let _ = writeln!(rules, "tool_{at}: {body} \"</function>\"");
    }

    /// Returns the rest of a value's rule, and what follows the value.
    fn xml_value(&self, schema: &Value, root: &Value) -> (String, &'static str) {
        let close = " \"\\n</parameter>\\n\"";
        match ParameterKind::of_schema(schema) {
            ParameterKind::Json => (format!(": %json {}", compact(schema.clone(), Some(root))), close),
            ParameterKind::Text | ParameterKind::NullableText => match schema["enum"].as_array() {
                Some(values) if !values.is_empty() => {
                    let texts = values.iter().map(|value| match value {
                        Value::String(text) => literal(text),
                        other => literal(&other.to_string()),
                    });
                    (format!(": {}", texts.collect::<Vec<_>>().join(" | ")), close)
                }
                _ => ("[lazy]: /(.|\\n)*\\n<\\/parameter>\\n/".to_owned(), ""),
            },
        }
    }

    /// Writes the rules of reasoning; returns what the start begins with.
    fn reasoning_rules(&self, rules: &mut String) -> String {
        let Some(reasoning) = self.reasoning else { return "GAP? ".to_owned() };
        let text = |marker| {
            let found = reasoning.markers().iter().find(|(other, _)| *other == marker);
            found.map_or("", |(_, text)| text)
        };
        let (begin, end) = (text(Marker::ReasoningBegin), text(Marker::ReasoningEnd));
        match ((self.special)(begin), (self.special)(end)) {
            (Some(begin), Some(end)) => {
                let _ = writeln!(rules, "thought: <[{begin}]> THOUGHT? <[{end}]>\nTHOUGHT: /(.|\\n)+/");
            }
            _ => {
                let begin = if self.begins_in_reasoning { String::new() } else { escaped(begin) };
                let _ = writeln!(rules, "thought[lazy]: /{begin}(.|\\n)*{}/", escaped(end));
            }
        }
        let optional = if self.begins_in_reasoning { "" } else { "?" };
        format!("thought{optional} GAP? ")
    }
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

/// Returns a schema without freedom of whitespace, with the separators that models are trained on. `root` has the
/// definitions that a part of a schema refers to.
fn compact(mut schema: Value, root: Option<&Value>) -> Value {
    if let Value::Object(fields) = &mut schema {
        for key in ["$defs", "definitions"] {
            if let Some(definitions) = root.and_then(|root| root.get(key)) {
                fields.entry(key).or_insert_with(|| definitions.clone());
            }
        }
        let options = json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        fields.insert("x-guidance".to_owned(), options);
    }
    schema
}
