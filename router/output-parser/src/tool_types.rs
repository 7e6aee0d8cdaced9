//! Types of tools' parameters, by which arguments without types of their own are written as JSON.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::parameters::{Parameters, resolved};

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

/// Work that the kinds of one tool's parameters may take: references let a short schema name a large one many times.
#[derive(Debug)]
pub(crate) struct Budget {
    /// Schemas of the present parameter.
    schemas: u32,
    /// Listed values and names of types of all parameters, with the bytes of their texts.
    listed: usize,
    exhausted: bool,
}

impl Default for Budget {
    fn default() -> Self {
        Self { schemas: 0, listed: 1 << 18, exhausted: false }
    }
}

impl Budget {
    /// Whether the listed values were more than may be looked at.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.exhausted
    }

    /// Takes the work of some listed values.
    fn list(&mut self, values: &[Value]) -> Option<()> {
        for value in values {
            let work = 1 + value.as_str().map_or(0, str::len);
            self.exhausted |= self.listed < work;
            self.listed = self.listed.saturating_sub(work);
            if self.exhausted {
                return None;
            }
        }
        Some(())
    }
}

/// Types that a schema allows, as far as they matter between tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Types {
    text: bool,
    null: bool,
    other: bool,
    /// Strings that cannot be taken for other values, beside those.
    some_texts: bool,
}

impl Types {
    const NONE: Self = Self { text: false, null: false, other: false, some_texts: false };

    fn of_name(name: &str) -> Self {
        match name {
            "string" => Self { text: true, ..Self::NONE },
            "null" => Self { null: true, ..Self::NONE },
            _ => Self { other: true, ..Self::NONE },
        }
    }

    fn of_value(value: &Value) -> Self {
        let (text, null) = (value.is_string(), value.is_null());
        Self { text, null, other: !text && !null, some_texts: false }
    }

    /// Returns the types of the values of an `enum`. Of mixed ones, those that are JSON are written as such, and the rest as text.
    fn of_values(values: &[Value]) -> Option<Self> {
        let types = values.iter().map(Self::of_value).reduce(Self::or)?;
        let is_json = |text: &str| {
            let text = text.trim();
            // In the spelling of Python, too.
            matches!(text, "True" | "False" | "None")
                || serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
        };
        let ambiguous = || values.iter().filter_map(Value::as_str).any(is_json);
        let is_mixed = types.text && types.other && !ambiguous();
        Some(if is_mixed { Self { text: false, some_texts: true, ..types } } else { types })
    }

    fn or(self, other: Self) -> Self {
        Self {
            text: self.text || other.text,
            null: self.null || other.null,
            other: self.other || other.other,
            some_texts: self.some_texts || other.some_texts,
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            text: self.text && other.text,
            null: self.null && other.null,
            other: self.other && other.other,
            some_texts: (self.some_texts && (other.some_texts || other.text))
                || (self.text && other.some_texts),
        }
    }

    /// Returns the types that are left by a schema which is not allowed, if that is a type, or several.
    fn but_types(excluded: &Value) -> Option<Self> {
        let object = excluded.as_object().filter(|object| object.len() == 1)?;
        let names: Vec<&str> = match object.get("type")? {
            Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
            name => vec![name.as_str()?],
        };
        let other = ["boolean", "number", "array", "object"].iter().any(|name| !names.contains(name));
        Some(Self {
            text: !names.contains(&"string"),
            null: !names.contains(&"null"),
            other,
            some_texts: false,
        })
    }

    /// Returns the types that a schema allows; `None` if it does not restrict them. `root` resolves its references. Keywords of a schema, and the parts
    /// of `allOf`, hold together; of `anyOf` and `oneOf` one part does.
    fn of_schema(schema: &Value, root: &Value, budget: &mut Budget) -> Option<Self> {
        // References may be cycles, and name the same part many times over.
        budget.schemas = budget.schemas.checked_sub(1)?;
        let all = |types: Vec<Option<Self>>| types.into_iter().flatten().reduce(Self::and);
        let union = |types: Option<Vec<Self>>| {
            types.filter(|types| !types.is_empty()).map(|types| types.into_iter().fold(Self::NONE, Self::or))
        };
        for listed in [&schema["type"], &schema["enum"]].into_iter().filter_map(Value::as_array) {
            budget.list(listed)?;
        }
        let mut found = vec![
            match &schema["type"] {
                Value::String(name) => Some(Self::of_name(name)),
                Value::Array(names) => {
                    union(names.iter().map(|name| name.as_str().map(Self::of_name)).collect())
                }
                _ => None,
            },
            schema.get("const").map(Self::of_value),
            schema["enum"].as_array().and_then(|values| Self::of_values(values)),
        ];
        if let Some(target) = schema["$ref"].as_str().and_then(|reference| resolved(root, reference)) {
            found.push(Self::of_schema(target, root, budget));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(parts) = schema[key].as_array() {
                let types = parts.iter().map(|part| Self::of_schema(part, root, budget)).collect();
                found.push(union(types));
            }
        }
        found.push(schema.get("not").and_then(Self::but_types));
        for part in schema["allOf"].as_array().into_iter().flatten() {
            found.push(Self::of_schema(part, root, budget));
            if budget.schemas == 0 {
                break;
            }
        }
        let has = |keys: &[&str]| keys.iter().any(|key| schema.get(key).is_some());
        all(found).or_else(|| {
            // Keywords that mean something for one type only.
            has(&["properties", "additionalProperties", "items", "prefixItems"])
                .then(|| Self::of_name("object"))
        })
    }
}

impl ParameterKind {
    /// Maximum schemas that are looked at for the kind of one parameter.
    const SCHEMAS_MAX: u32 = 256;

    /// Returns the kind of parameter that a JSON schema describes, text if the schema does not restrict its type; and whether a parameter of
    /// [JSON](Self::Json) allows strings, too, which an `enum` lists beside other values. `root` is the document in which references are resolved.
    pub(crate) fn of_schema(schema: &Value, root: &Value, budget: &mut Budget) -> (Self, bool) {
        budget.schemas = Self::SCHEMAS_MAX;
        match Types::of_schema(schema, root, budget) {
            Some(Types { text: true, null: true, .. }) => (Self::NullableText, false),
            Some(Types { text: false, other, null, some_texts }) if other || null => (Self::Json, some_texts),
            Some(_) | None => (Self::Text, false),
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
        for parameter in Parameters::of_schema(parameters).all {
            kinds.insert(parameter.name.to_owned(), parameter.kind);
        }
        self.tools.insert(name.to_owned(), kinds);
    }

    /// Whether there is a tool of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.tools.contains_key(name)
    }

    /// Whether a tool has a parameter of this name.
    pub(crate) fn has_parameter(&self, tool: &str, parameter: &str) -> bool {
        self.tools.get(tool).is_some_and(|parameters| parameters.contains_key(parameter))
    }

    /// Returns the kind of a parameter; text if it is unknown.
    pub(crate) fn kind(&self, tool: &str, parameter: &str) -> ParameterKind {
        let known = self.tools.get(tool).and_then(|parameters| parameters.get(parameter));
        known.copied().unwrap_or(ParameterKind::Text)
    }
}
