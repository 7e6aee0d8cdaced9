//! Negation of schemas.

use serde_json::{Map, Value, json};

use super::{Dialect, TYPES, except, is_true};

/// Keywords that describe and do not constrain.
const ANNOTATIONS: [&str; 11] = [
    "$comment",
    "$schema",
    "title",
    "description",
    "default",
    "examples",
    "readOnly",
    "writeOnly",
    "deprecated",
    "contentMediaType",
    "contentEncoding",
];

/// Largest integer up to which every integer is exact as f64.
const EXACT_MAX: f64 = 9_007_199_254_740_991.0;

/// Returns the types that a schema allows by its `type`; those of integers are numbers.
pub(super) fn types(schema: &Value) -> Vec<&'static str> {
    type_names(schema.get("type"))
}

/// Returns the types that the value of a `type` keyword names; all without one.
pub(super) fn type_names(keyword: Option<&Value>) -> Vec<&'static str> {
    let known = |name: &str| {
        let name = if name == "integer" { "number" } else { name };
        TYPES.iter().copied().find(|known| *known == name)
    };
    match keyword {
        Some(Value::String(name)) => known(name).into_iter().collect(),
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).filter_map(known).collect(),
        _ => TYPES.to_vec(),
    }
}

/// Returns a schema of exactly the values that a schema does not allow, if there is one without negations.
pub(super) fn negate(schema: &Value, dialect: Dialect) -> Option<Value> {
    let object = match schema {
        Value::Bool(allowed) => return Some((!allowed).into()),
        Value::Object(object) => object,
        _ => return None,
    };
    // A value violates a schema if it violates one of its keywords.
    let mut options = Vec::new();
    for (keyword, value) in object {
        if !ANNOTATIONS.contains(&keyword.as_str()) {
            options.extend(violations(keyword, value, object, dialect)?);
        }
    }
    Some(any_of(options))
}

fn any_of(mut options: Vec<Value>) -> Value {
    options.retain(|option| *option != Value::Bool(false));
    if options.iter().any(is_true) {
        return true.into();
    }
    match options.len() {
        0 => false.into(),
        1 => options.swap_remove(0),
        _ => json!({"anyOf": options}),
    }
}

/// Returns the schemas of the values that violate a keyword; `None` if it is not known how.
fn violations(
    keyword: &str,
    value: &Value,
    object: &Map<String, Value>,
    dialect: Dialect,
) -> Option<Vec<Value>> {
    let below = |kind: &str, most: &str, bound: u64| {
        if bound == 0 { Vec::new() } else { vec![json!({"type": kind, most: bound - 1})] }
    };
    let above = |kind: &str, least: &str, bound: u64| vec![json!({"type": kind, least: bound + 1})];
    // In draft 4, `exclusiveMinimum` and `exclusiveMaximum` are booleans.
    let bound = |keyword: &str| value.is_number().then(|| vec![json!({"type": "number", keyword: value})]);
    let numeric = dialect >= Dialect::Draft6;
    Some(match keyword {
        "type" => return not_types(value),
        "const" if dialect >= Dialect::Draft6 => return not_constants(std::slice::from_ref(value)),
        "enum" => return not_constants(value.as_array()?),
        "minimum" if numeric => return bound("exclusiveMaximum"),
        "maximum" if numeric => return bound("exclusiveMinimum"),
        "exclusiveMinimum" if numeric => return bound("maximum"),
        "exclusiveMaximum" if numeric => return bound("minimum"),
        "minLength" => below("string", "maxLength", value.as_u64()?),
        "maxLength" => above("string", "minLength", value.as_u64()?),
        "minItems" => below("array", "maxItems", value.as_u64()?),
        "maxItems" => above("array", "minItems", value.as_u64()?),
        "minProperties" => below("object", "maxProperties", value.as_u64()?),
        "maxProperties" => above("object", "minProperties", value.as_u64()?),
        "required" => {
            let names = value.as_array()?.iter().map(|name| name.as_str());
            names
                .map(|name| {
                    Some(json!({"type": "object", "properties": in_order(object, name?, false.into())}))
                })
                .collect::<Option<_>>()?
        }
        "properties" => {
            let mut options = Vec::new();
            for (name, schema) in value.as_object()? {
                let negated = negate(schema, dialect)?;
                if negated != Value::Bool(false) {
                    let properties = in_order(object, name, negated);
                    options.push(json!({"type": "object", "required": [name], "properties": properties}));
                }
            }
            options
        }
        "allOf" => value.as_array()?.iter().map(|schema| negate(schema, dialect)).collect::<Option<_>>()?,
        "anyOf" => {
            let all: Vec<Value> =
                value.as_array()?.iter().map(|schema| negate(schema, dialect)).collect::<Option<_>>()?;
            vec![json!({"allOf": all})]
        }
        "not" => vec![value.clone()],
        "then" | "else" if !object.contains_key("if") => Vec::new(),
        _ => return None,
    })
}

/// Returns the properties of a schema, of which one has a schema and the others have any value: a text has named properties in the
/// order of the schema, and before all others. Of very many properties, only the one.
fn in_order(object: &Map<String, Value>, name: &str, schema: Value) -> Map<String, Value> {
    const PROPERTIES_MAX: usize = 64;
    let all = object.get("properties").and_then(Value::as_object).filter(|all| all.len() <= PROPERTIES_MAX);
    let mut properties: Map<String, Value> =
        all.into_iter().flat_map(Map::keys).map(|name| (name.clone(), true.into())).collect();
    properties.insert(name.to_owned(), schema);
    properties
}

/// Returns schemas of the values whose type is none of those of a `type` keyword.
fn not_types(value: &Value) -> Option<Vec<Value>> {
    let names: Vec<&str> = match value {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().map(Value::as_str).collect::<Option<_>>()?,
        _ => return None,
    };
    // There is no schema of the numbers that are no integers.
    if names.contains(&"integer") && !names.contains(&"number") {
        return None;
    }
    let others = except(&names);
    Some(if others.is_empty() { Vec::new() } else { vec![json!({"type": others})] })
}

/// Returns the schemas of the values that differ from all of some constants: null, booleans and numbers.
fn not_constants(constants: &[Value]) -> Option<Vec<Value>> {
    let mut numbers = Vec::new();
    let (mut touched, mut flags) = (vec![], vec![]);
    for constant in constants {
        match constant {
            Value::Null => touched.push("null"),
            Value::Bool(flag) => flags.push(*flag),
            Value::Number(number) => {
                numbers.push(number.as_f64().filter(|number| number.abs() <= EXACT_MAX)?);
            }
            _ => return None,
        }
    }
    let mut options = Vec::new();
    if !flags.is_empty() {
        touched.push("boolean");
        options.extend(
            [true, false].iter().filter(|flag| !flags.contains(flag)).map(|flag| json!({"const": flag})),
        );
    }
    if !numbers.is_empty() {
        touched.push("number");
        numbers.sort_by(f64::total_cmp);
        numbers.dedup();
        let first = json!({"type": "number", "exclusiveMaximum": numbers[0]});
        let between = numbers
            .windows(2)
            .map(|pair| json!({"type": "number", "exclusiveMinimum": pair[0], "exclusiveMaximum": pair[1]}));
        let last = json!({"type": "number", "exclusiveMinimum": numbers[numbers.len() - 1]});
        options.extend(std::iter::once(first).chain(between).chain([last]));
    }
    let others = except(&touched);
    options.push(json!({"type": others}));
    Some(options)
}
