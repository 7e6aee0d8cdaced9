//! Tools of a request: their definitions, and which of them the output may or must call.

use std::collections::BTreeSet;

use inflight_output_parser::ToolTypes;
use minijinja::value::Value as TemplateValue;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::outcome::Outcome;
use crate::request::escapes;

/// Tool that the model may call: a function.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    /// Definition as templates read it: OpenAI's object with type and function.
    pub(crate) definition: TemplateValue,
    /// JSON schema of its arguments, an object.
    pub(crate) parameters: Value,
    /// Whether the arguments must match the schema.
    pub(crate) strict: bool,
    /// JSON values of the schema, at most.
    values: usize,
}

/// Which tools the output calls.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// Any or none, as the model decides.
    #[default]
    Auto,
    /// None: the model does not see the tools.
    None,
    /// At least one of them.
    Required,
    /// This one.
    Named(String),
}

/// Tools of a request. All have different names, and the chosen one is among them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ToolUse {
    pub(crate) tools: Vec<Tool>,
    pub(crate) choice: ToolChoice,
    /// Names of the tools that the output may call; `None`: all.
    pub(crate) allowed: Option<BTreeSet<String>>,
    /// Whether the output may have several calls.
    pub(crate) parallel: bool,
}

/// Definition of a tool as its client gives it.
pub(crate) struct ToolDefinition<'a> {
    /// Place in the request, for error messages.
    pub(crate) place: &'a str,
    pub(crate) name: Option<String>,
    pub(crate) description: Option<String>,
    /// JSON schema of the arguments; absent: no arguments.
    pub(crate) parameters: Option<&'a RawValue>,
    pub(crate) strict: bool,
}

/// Maximum JSON values of all schemas of a request's tools, and of the arguments of all its calls. A value of two
/// bytes of text, a digit and a comma, takes 32 bytes as a schema and 24 for the template.
pub(crate) const JSON_VALUES_MAX: usize = 65_536;

/// Returns how many values a JSON text has at most: one more than its separators and openings.
pub(crate) fn json_values(text: &str) -> usize {
    let (mut count, mut quoted, mut escaped) = (1, false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = quoted,
            b'"' => quoted = !quoted,
            b',' | b':' | b'[' | b'{' if !quoted => count += 1,
            _ => {}
        }
    }
    count
}

impl Tool {
    /// Maximum bytes of a name.
    pub(crate) const NAME_BYTES_MAX: usize = 128;

    /// Checks a definition. Error messages name `field`.
    pub(crate) fn new(definition: ToolDefinition<'_>) -> Result<Self, Outcome> {
        let ToolDefinition { place, name, description, parameters, strict } = definition;
        let refused = |reason: String| Err(Outcome::field("tools", reason));
        let Some(name) = name.filter(|name| !name.is_empty()) else {
            return refused(format!("{place} has no name; name each tool"));
        };
        let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/');
        if name.len() > Self::NAME_BYTES_MAX || !name.chars().all(known) {
            return refused(format!(
                "{place} has a name that is not 1 to {} letters, digits and _ - . : /",
                Self::NAME_BYTES_MAX
            ));
        }
        let empty = r#"{"type": "object", "properties": {}}"#;
        let text = parameters.map(RawValue::get).filter(|text| *text != "null");
        let values = json_values(text.unwrap_or(empty));
        if values > JSON_VALUES_MAX {
            return refused(too_many_values(values));
        }
        let parsed =
            (serde_json::from_str(text.unwrap_or(empty)), serde_json::from_str(text.unwrap_or(empty)));
        let (Ok(parameters @ Value::Object(_)), Ok(template_parameters)) = parsed else {
            if let Some(reason) = text.and_then(|text| escapes::refusal(&format!("{place}.parameters"), text))
            {
                return refused(reason);
            }
            return refused(format!("{place} has parameters that are no JSON schema of type object"));
        };
        let kind = &parameters["type"];
        if !kind.is_null() && kind != "object" {
            return refused(format!("{place} has parameters of type {kind}; arguments are an object"));
        }
        let template_parameters: TemplateValue = template_parameters;
        let function = [
            ("name", Some(TemplateValue::from(name.as_str()))),
            ("description", description.map(TemplateValue::from)),
            ("parameters", Some(template_parameters)),
        ];
        let function = function.into_iter().filter_map(|(key, value)| Some((key, value?)));
        let definition = TemplateValue::from_pairs([
            ("type", TemplateValue::from("function")),
            ("function", TemplateValue::from_pairs(function)),
        ]);
        Ok(Self { name, definition, parameters, strict, values })
    }
}

fn too_many_values(values: usize) -> String {
    format!(
        "the schemas of tools have up to {values} JSON values; at most {JSON_VALUES_MAX} are allowed: send fewer tools or smaller schemas"
    )
}

impl ToolUse {
    /// Maximum tools of a request.
    pub(crate) const TOOLS_MAX: usize = 512;

    /// Checks the tools of a request; `None` if there are none.
    pub(crate) fn new(tools: Vec<Tool>, choice: ToolChoice, parallel: bool) -> Result<Option<Self>, Outcome> {
        let mut names = BTreeSet::new();
        if let Some(tool) = tools.iter().find(|tool| !names.insert(tool.name.as_str())) {
            return Err(Outcome::field("tools", format!("tools has two tools of the name {:?}", tool.name)));
        }
        let values = tools.iter().map(|tool| tool.values).sum();
        if values > JSON_VALUES_MAX {
            return Err(Outcome::field("tools", too_many_values(values)));
        }
        match &choice {
            ToolChoice::Named(name) if !names.contains(name.as_str()) => {
                return Err(Outcome::field(
                    "tool_choice",
                    format!("tool_choice names {name:?}, which is no tool in tools"),
                ));
            }
            ToolChoice::Required if tools.is_empty() => {
                return Err(Outcome::field("tool_choice", "tool_choice requires a call, but tools is empty"));
            }
            _ => {}
        }
        Ok((!tools.is_empty()).then_some(Self { tools, choice, allowed: None, parallel }))
    }

    /// Restricts the calls to tools of these names; the model sees the others, too.
    pub(crate) fn allow(self, names: BTreeSet<String>) -> Result<Self, Outcome> {
        let refused = |reason: String| Err(Outcome::field("tool_choice", reason));
        if names.is_empty() {
            return refused("tool_choice allows no tool; name at least one".to_owned());
        }
        let unknown = names.iter().find(|name| !self.tools.iter().any(|tool| tool.name == **name));
        if let Some(name) = unknown {
            return refused(format!("tool_choice allows {name:?}, which is no tool in tools"));
        }
        Ok(Self { allowed: Some(names), ..self })
    }

    /// Returns the tools that the output may call.
    pub(crate) fn callable(&self) -> impl Iterator<Item = &Tool> {
        self.tools.iter().filter(|tool| self.allowed.as_ref().is_none_or(|names| names.contains(&tool.name)))
    }

    /// Returns the number of JSON values of the tools' schemas, at most.
    pub(crate) fn values(&self) -> usize {
        self.tools.iter().map(|tool| tool.values).sum()
    }

    /// Checks the number of tools before they are read.
    pub(crate) fn check_count(count: usize) -> Result<(), Outcome> {
        if count <= Self::TOOLS_MAX {
            return Ok(());
        }
        let most = Self::TOOLS_MAX;
        Err(Outcome::field("tools", format!("tools has {count} tools; at most {most} are allowed")))
    }

    /// Whether the model sees the tools, and its calls are parsed.
    pub(crate) fn is_active(&self) -> bool {
        self.choice != ToolChoice::None
    }

    /// Returns the definitions that templates render.
    pub(crate) fn definitions(&self) -> Vec<TemplateValue> {
        let shown = self.tools.iter().filter(|_| self.is_active());
        shown.map(|tool| tool.definition.clone()).collect()
    }

    /// Returns the types of the tools' parameters.
    pub(crate) fn types(&self) -> ToolTypes {
        let mut types = ToolTypes::default();
        self.tools.iter().for_each(|tool| types.add(&tool.name, &tool.parameters));
        types
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tool(name: &str, parameters: &str) -> Result<Tool, Outcome> {
        let parameters = RawValue::from_string(parameters.to_owned()).unwrap();
        let name = Some(name.to_owned());
        Tool::new(ToolDefinition {
            place: "tools[0]",
            name,
            description: None,
            parameters: Some(&parameters),
            strict: false,
        })
    }

    #[test]
    fn schemas_of_many_small_values_are_refused_before_they_are_parsed_and_in_sum() {
        let of = |values: usize| format!(r#"{{"enum": [{}]}}"#, vec!["0"; values].join(","));
        assert!(tool("a", &of(JSON_VALUES_MAX)).is_err());
        let half = |name: &str| tool(name, &of(JSON_VALUES_MAX / 2 - 3)).unwrap();
        let use_of = |tools| ToolUse::new(tools, ToolChoice::Auto, true);
        assert!(use_of(vec![half("a"), half("b")]).is_ok());
        assert!(use_of(vec![half("a"), half("b"), half("c")]).is_err());
        // A long description is one value.
        let text = r#", \" [ {"#.repeat(1 << 17);
        assert!(tool("a", &format!(r#"{{"description": "{text}"}}"#)).is_ok());
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf =
            prop_oneof![any::<i32>().prop_map(Value::from), r#"[a-c,:{\["\\]{0,8}"#.prop_map(Value::from)];
        leaf.prop_recursive(4, 40, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::vec(("[a,\"]{0,4}", inner), 0..5)
                    .prop_map(|entries| Value::Object(entries.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_text_has_more_values_than_are_counted(value in json()) {
            fn values(value: &Value) -> usize {
                match value {
                    Value::Array(items) => 1 + items.iter().map(values).sum::<usize>(),
                    Value::Object(entries) => 1 + entries.values().map(|item| 1 + values(item)).sum::<usize>(),
                    _ => 1,
                }
            }
            let counted = json_values(&value.to_string());
            prop_assert!((values(&value)..=2 * values(&value)).contains(&counted), "{value} {counted}");
        }
    }
}
