//! Calls as JSON schemas: where calls are bare objects, calls and answers in JSON are one language, divided into the same terminals.

use serde_json::{Map, Value, json};

/// Keys of a bare call, with which an answer can be taken for one.
const NAME: &str = "name";
const ARGUMENTS: [&str; 2] = ["parameters", "arguments"];
const CALL_KEYS: [&str; 5] = [NAME, "parameters", "arguments", "type", "id"];
/// Maximum schemas that are looked at to find whether an answer can look like a call.
const SCHEMAS_MAX: u32 = 256;
/// Keywords whose values are data, not schemas.
const DATA: [&str; 5] = ["const", "enum", "default", "examples", "example"];

/// Returns the schema of the object that calls a tool, with its arguments under `key`.
pub(crate) fn call_schema(name: &str, key: &str, arguments: &Value) -> Value {
    let mut moved = arguments.clone();
    move_references(&mut moved, &format!("#/properties/{key}"));
    let mut schema = json!({
        "type": "object",
        "properties": {NAME: {"const": name}, key: moved},
        "required": [NAME, key],
        "additionalProperties": false,
    });
    if let (Some(dialect), Value::Object(fields)) = (arguments.get("$schema"), &mut schema) {
        fields.insert("$schema".to_owned(), dialect.clone());
    }
    schema
}

/// Moves the references of a schema to its root, which is now at `root`.
fn move_references(schema: &mut Value, root: &str) {
    match schema {
        Value::Object(fields) => {
            for (key, value) in fields.iter_mut() {
                match value {
                    Value::String(target) if matches!(&**key, "$ref" | "$dynamicRef" | "$recursiveRef") => {
                        if let Some(path) =
                            target.strip_prefix('#').filter(|path| path.is_empty() || path.starts_with('/'))
                        {
                            *target = format!("{root}{path}");
                        }
                    }
                    value if !DATA.contains(&&**key) => move_references(value, root),
                    _ => {}
                }
            }
        }
        Value::Array(values) => values.iter_mut().for_each(|value| move_references(value, root)),
        _ => {}
    }
}

/// Whether JSON that is valid under `schema` may look like a bare call of one of the tools. True if the schema does not show that it may not.
pub fn may_look_like_call(schema: &Value, tools: &[&str]) -> bool {
    Answer { root: schema, tools }.may_be_call(schema, &mut { SCHEMAS_MAX })
}

/// Schema of answers.
struct Answer<'a> {
    root: &'a Value,
    tools: &'a [&'a str],
}

impl Answer<'_> {
    fn may_be_call(&self, schema: &Value, left: &mut u32) -> bool {
        let Some(rest) = left.checked_sub(1) else { return true };
        *left = rest;
        let Value::Object(fields) = schema else { return *schema != Value::Bool(false) };
        if !has_type(fields, &["object"]) {
            return false;
        }
        if let Some(values) = listed(fields) {
            return values.iter().any(|value| self.is_call(value));
        }
        let reference =
            fields.get("$ref").and_then(Value::as_str).and_then(|reference| reference.strip_prefix('#'));
        if let Some(target) = reference.and_then(|pointer| self.root.pointer(pointer))
            && !self.may_be_call(target, left)
        {
            return false;
        }
        let parts = |key: &str| fields.get(key).and_then(Value::as_array);
        for key in ["anyOf", "oneOf"] {
            if parts(key).is_some_and(|parts| !parts.iter().any(|part| self.may_be_call(part, left))) {
                return false;
            }
        }
        if parts("allOf").is_some_and(|parts| !parts.iter().all(|part| self.may_be_call(part, left))) {
            return false;
        }
        !self.excludes_calls(fields)
    }

    /// Whether the keys of an object show that it is no call.
    fn excludes_calls(&self, fields: &Map<String, Value>) -> bool {
        let none = Map::new();
        let properties = fields.get("properties").and_then(Value::as_object).unwrap_or(&none);
        let is_closed = ["additionalProperties", "unevaluatedProperties"]
            .iter()
            .any(|key| fields.get(*key) == Some(&Value::Bool(false)))
            && !["patternProperties", "allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas"]
                .iter()
                .any(|key| fields.contains_key(*key));
        let may_have = |key: &str| match properties.get(key) {
            Some(schema) => *schema != Value::Bool(false),
            None => !is_closed,
        };
        let required = fields.get("required").and_then(Value::as_array).into_iter().flatten();
        let has_other = required.filter_map(Value::as_str).any(|key| !CALL_KEYS.contains(&key));
        let other_name = properties.get(NAME).is_some_and(|name| !self.may_name_tool(name));
        let no_arguments = |key: &&str| {
            let other_type = properties
                .get(*key)
                .and_then(Value::as_object)
                .is_some_and(|of| !has_type(of, &["object", "string"]));
            !may_have(key) || other_type
        };
        has_other || !may_have(NAME) || other_name || ARGUMENTS.iter().all(no_arguments)
    }

    /// Whether a value under a schema may be the name of a tool.
    fn may_name_tool(&self, schema: &Value) -> bool {
        let Value::Object(fields) = schema else { return *schema != Value::Bool(false) };
        let named = |value: &Value| value.as_str().is_some_and(|name| self.tools.contains(&name));
        has_type(fields, &["string"]) && listed(fields).is_none_or(|values| values.iter().any(named))
    }

    fn is_call(&self, value: &Value) -> bool {
        let keys = || value.as_object().into_iter().flat_map(Map::keys);
        value[NAME].as_str().is_some_and(|name| self.tools.contains(&name))
            && keys().any(|key| ARGUMENTS.contains(&&**key))
            && keys().all(|key| CALL_KEYS.contains(&&**key))
    }
}

/// Returns the values that `enum` or `const` lists.
fn listed(fields: &Map<String, Value>) -> Option<&[Value]> {
    let one = || fields.get("const").map(std::slice::from_ref);
    fields.get("enum").and_then(Value::as_array).map(Vec::as_slice).or_else(one)
}

/// Whether the `type` of a schema allows one of the types.
fn has_type(fields: &Map<String, Value>, types: &[&str]) -> bool {
    match fields.get("type") {
        Some(Value::String(name)) => types.contains(&&**name),
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).any(|name| types.contains(&name)),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_objects_with_the_keys_of_a_call_look_like_one() {
        let closed = |properties: Value| json!({"type": "object", "properties": properties, "additionalProperties": false});
        let text = || json!({"type": "string"});
        for (schema, expected) in [
            (json!({}), true),
            (json!(true), true),
            (json!({"type": "object"}), true),
            (json!({"type": ["array", "null"]}), false),
            (closed(json!({"y": {"type": "integer"}})), false),
            (closed(json!({"name": text()})), false),
            (closed(json!({"name": text(), "parameters": {}})), true),
            (closed(json!({"name": text(), "arguments": text()})), true),
            (closed(json!({"name": text(), "arguments": {"type": "array"}})), false),
            (closed(json!({"name": {"enum": ["Bob"]}, "parameters": {}})), false),
            (closed(json!({"name": {"enum": ["Bob", "f"]}, "parameters": {}})), true),
            (json!({"type": "object", "required": ["name", "y"]}), false),
            (json!({"type": "object", "required": ["name", "type"]}), true),
            (json!({"type": "object", "properties": {"name": {"type": "integer"}}}), false),
            (json!({"const": {"name": "f", "parameters": {}}}), true),
            (json!({"const": {"name": "f", "parameters": {}, "y": 1}}), false),
            (json!({"anyOf": [{"type": "string"}, {"type": "number"}]}), false),
            (json!({"anyOf": [{"type": "string"}, {}]}), true),
            (json!({"allOf": [{}, {"type": "number"}]}), false),
            (json!({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}}), false),
            (json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), true),
        ] {
            assert_eq!(may_look_like_call(&schema, &["f"]), expected, "{schema}");
        }
    }

    #[test]
    fn references_of_arguments_follow_them() {
        let arguments = json!({"properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#"}, "$ref": {"enum": ["#/$defs/x"]}},
            "$defs": {"x": {"const": {"$ref": "#/y"}}}, "$schema": "http://json-schema.org/draft-07/schema#"});
        let schema = call_schema("f", "parameters", &arguments);
        let moved = &schema["properties"]["parameters"];
        assert_eq!(moved["properties"]["a"]["$ref"], "#/properties/parameters/$defs/x");
        assert_eq!(moved["properties"]["b"]["$ref"], "#/properties/parameters");
        assert_eq!(
            (&moved["$defs"], &moved["properties"]["$ref"]),
            (&arguments["$defs"], &arguments["properties"]["$ref"])
        );
        assert_eq!(schema["$schema"], arguments["$schema"]);
    }
}
