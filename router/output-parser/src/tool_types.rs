//! Types of tools' parameters, by which arguments without types of their own are written as JSON.

use std::collections::BTreeMap;

use serde_json::Value;

/// Type of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterKind {
    /// Text.
    Text,
    /// Text or null.
    NullableText,
    /// Any other JSON value.
    Json,
}

impl ParameterKind {
    /// Returns the kind that a JSON schema describes; text if it does not say.
    pub(crate) fn of_schema(schema: &Value) -> Self {
        let (mut text, mut null, mut other) = (false, false, false);
        let mut add = |name: &str| match name {
            "string" => text = true,
            "null" => null = true,
            _ => other = true,
        };
        let branches = ["anyOf", "oneOf"].into_iter().filter_map(|key| schema[key].as_array()).flatten();
        for schema in std::iter::once(schema).chain(branches) {
            match &schema["type"] {
                Value::String(name) => add(name),
                Value::Array(names) => names.iter().filter_map(Value::as_str).for_each(&mut add),
                _ => {}
            }
        }
        match (text, null, other) {
            (true, true, _) => Self::NullableText,
            (true, false, _) => Self::Text,
            (false, _, true) | (false, true, false) => Self::Json,
            (false, false, false) => {
                let typed = |value: &Value| !value.is_string();
                match schema["enum"].as_array() {
                    Some(values) if values.iter().all(typed) && !values.is_empty() => Self::Json,
                    _ => Self::Text,
                }
            }
        }
    }
}

/// Names of the tools of a request, with the types of their parameters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ToolTypes {
    tools: BTreeMap<String, BTreeMap<String, ParameterKind>>,
}

impl ToolTypes {
    /// Adds a tool with the JSON schema of its parameters.
    pub fn add(&mut self, name: &str, parameters: &Value) {
        let mut kinds = BTreeMap::new();
        if let Some(properties) = parameters["properties"].as_object() {
            for (key, schema) in properties {
                kinds.insert(key.clone(), ParameterKind::of_schema(schema));
            }
        }
        self.tools.insert(name.to_owned(), kinds);
    }

    /// Whether there is a tool of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.tools.contains_key(name)
    }

    /// Returns the kind of a parameter; text if it is unknown.
    pub(crate) fn kind(&self, tool: &str, parameter: &str) -> ParameterKind {
        let known = self.tools.get(tool).and_then(|parameters| parameters.get(parameter));
        known.copied().unwrap_or(ParameterKind::Text)
    }
}
