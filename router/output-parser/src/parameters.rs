//! Parameters of a tool, as the parser and the grammar of calls with a tag for each see them.

use std::borrow::Cow;
use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

/// Maximum parts of a schema that are looked at for its parameters.
const PARTS_MAX: u32 = 256;

/// Keywords about an object as a whole, which tags for single parameters cannot keep.
const OF_THE_WHOLE: [&str; 15] = [
    "anyOf",
    "oneOf",
    "not",
    "if",
    "enum",
    "const",
    "patternProperties",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "minProperties",
    "maxProperties",
    "$dynamicRef",
    "$recursiveRef",
];

/// Returns the part of a document that a reference within it names.
pub(crate) fn resolved<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    let fragment = reference.strip_prefix('#')?;
    match root.pointer(fragment) {
        None if fragment.contains('%') => root.pointer(&decoded(fragment)?),
        target => target,
    }
}

/// Decodes the percent-encoded bytes of a fragment.
fn decoded(fragment: &str) -> Option<String> {
    let mut pieces = fragment.split('%');
    let mut bytes = pieces.next()?.as_bytes().to_vec();
    for piece in pieces {
        let (hex, rest) = piece.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(hex, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

/// Properties of a tool's schema: its own, those behind its `$ref`, and those of `allOf`.
#[derive(Debug, Default)]
pub(crate) struct Parameters<'a> {
    /// Names and schemas, in their order.
    pub(crate) properties: Vec<(&'a str, Cow<'a, Value>)>,
    /// Names of those that every call has.
    pub(crate) required: BTreeSet<&'a str>,
    /// Keyword that restricts calls and says nothing of a single parameter.
    pub(crate) of_the_whole: Option<&'static str>,
    /// Names of the properties of a part, with the schema of any others there.
    others: Vec<(BTreeSet<&'a str>, &'a Value)>,
}

impl<'a> Parameters<'a> {
    /// Reads a schema.
    pub(crate) fn of_schema(schema: &'a Value) -> Self {
        let mut parameters = Self::default();
        parameters.add(schema, schema, &mut { PARTS_MAX });
        let named: BTreeSet<&str> = parameters.properties.iter().map(|(name, _)| *name).collect();
        for name in parameters.required.clone() {
            if !named.contains(name) {
                parameters.property(name, &Value::Bool(true));
            }
        }
        for (names, others) in std::mem::take(&mut parameters.others) {
            for (name, schema) in &mut parameters.properties {
                if !names.contains(name) {
                    *schema = both(schema, others);
                }
            }
        }
        let required = &parameters.required;
        parameters
            .properties
            .retain(|(name, schema)| required.contains(name) || **schema != Value::Bool(false));
        parameters
    }

    fn property(&mut self, name: &'a str, schema: &'a Value) {
        match self.properties.iter_mut().find(|(other, _)| *other == name) {
            Some((_, known)) => *known = both(known, schema),
            None => self.properties.push((name, Cow::Borrowed(schema))),
        }
    }

    fn add(&mut self, schema: &'a Value, root: &'a Value, left: &mut u32) {
        let (Some(object), Some(fewer)) = (schema.as_object(), left.checked_sub(1)) else {
            if *schema != Value::Bool(true) {
                self.of_the_whole = Some("allOf");
            }
            return;
        };
        *left = fewer;
        self.check(object);
        let properties = object.get("properties").and_then(Value::as_object);
        for (name, schema) in properties.into_iter().flatten() {
            self.property(name, schema);
        }
        let required = object.get("required").and_then(Value::as_array);
        self.required.extend(required.into_iter().flatten().filter_map(Value::as_str));
        if let Some(others) =
            object.get("additionalProperties").filter(|others| **others != Value::Bool(true))
        {
            let names = properties.into_iter().flat_map(Map::keys).map(String::as_str).collect();
            self.others.push((names, others));
        }
        if let Some(reference) = object.get("$ref").and_then(Value::as_str) {
            match resolved(root, reference) {
                Some(target) => self.add(target, root, left),
                None => self.of_the_whole = Some("$ref"),
            }
        }
        for part in object.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            self.add(part, root, left);
        }
    }

    /// Notes what restricts calls as a whole.
    fn check(&mut self, object: &Map<String, Value>) {
        let has = |keyword: &&&str| object.contains_key(**keyword);
        self.of_the_whole = self.of_the_whole.or(OF_THE_WHOLE.iter().find(has).copied());
        let is_object = match object.get("type") {
            None => true,
            Some(Value::Array(names)) => names.iter().any(|name| name == "object"),
            Some(name) => name == "object",
        };
        if !is_object {
            self.of_the_whole = Some("type");
        }
    }
}

/// Returns the schema of what two schemas allow.
fn both<'a>(schema: &Cow<'a, Value>, other: &'a Value) -> Cow<'a, Value> {
    match (&**schema, other) {
        (Value::Bool(true), other) => Cow::Borrowed(other),
        (_, Value::Bool(true)) => schema.clone(),
        (_, Value::Bool(false)) | (Value::Bool(false), _) => Cow::Owned(Value::Bool(false)),
        (schema, other) => Cow::Owned(json!({"allOf": [schema, other]})),
    }
}
