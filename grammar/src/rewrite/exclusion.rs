//! Alternatives of a `oneOf` that exclude each other, also behind references, as generators write unions with a discriminating property.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::Rewriter;
use super::negation::type_names;

/// Maximum alternatives that are compared with each other.
const COMPARED_MAX: usize = 32;
/// Maximum schemas that hold together with an alternative.
const PARTS_MAX: usize = 16;

impl Rewriter<'_> {
    /// Returns the number of subschemas and names that a comparison of alternatives visits.
    pub(super) fn compared(&self, alternatives: &[Value]) -> usize {
        let required =
            |part: &Map<String, Value>| part.get("required").and_then(Value::as_array).map_or(0, Vec::len);
        alternatives.iter().flat_map(|schema| self.parts(schema)).map(|part| 1 + required(part)).sum()
    }

    /// Whether no value can match two of these schemas.
    pub(super) fn exclude_each_other(&self, alternatives: &[Value]) -> bool {
        let parts: Vec<Vec<&Map<String, Value>>> =
            alternatives.iter().map(|schema| self.parts(schema)).collect();
        if self.have_discriminator(&parts) {
            return true;
        }
        let pairs = || (0..parts.len()).flat_map(|at| (0..at).map(move |other| (at, other)));
        parts.len() <= COMPARED_MAX && pairs().all(|(at, other)| self.exclude(&parts[at], &parts[other]))
    }

    /// Returns the schemas that hold together where a schema holds: itself, what it refers to, and the parts of its `allOf`.
    fn parts<'a>(&'a self, schema: &'a Value) -> Vec<&'a Map<String, Value>> {
        let (mut parts, mut left) = (Vec::new(), vec![schema]);
        while let Some(schema) = left.pop().filter(|_| parts.len() < PARTS_MAX) {
            let Value::Object(object) = schema else { continue };
            parts.push(object);
            left.extend(
                object.get("$ref").and_then(Value::as_str).and_then(|name| self.references.resolve(name)),
            );
            left.extend(object.get("allOf").and_then(Value::as_array).into_iter().flatten());
        }
        parts
    }

    /// Whether all require a property whose constants differ.
    fn have_discriminator(&self, alternatives: &[Vec<&Map<String, Value>>]) -> bool {
        let Some((first, rest)) = alternatives.split_first() else { return false };
        let required = |parts: &[&Map<String, Value>]| -> BTreeSet<String> {
            all_required(parts).map(str::to_owned).collect()
        };
        let mut common = required(first);
        for parts in rest {
            common = &common & &required(parts);
        }
        let only_objects =
            alternatives.iter().all(|parts| all_types(parts).iter().all(|name| *name == "object"));
        only_objects
            && common.iter().any(|name| {
                let mut seen = BTreeMap::new();
                alternatives.iter().all(|parts| {
                    let listed = self.listed(&self.property(parts, name));
                    listed.is_some_and(|values| {
                        values.iter().all(|value| seen.insert(key(value), ()).is_none())
                    })
                })
            })
    }

    /// Whether no value can match both of two schemas, given by what holds together.
    fn exclude(&self, first: &[&Map<String, Value>], second: &[&Map<String, Value>]) -> bool {
        let common: Vec<&str> =
            all_types(first).into_iter().filter(|name| all_types(second).contains(name)).collect();
        if common.is_empty() || self.differ(first, second) {
            return true;
        }
        // An object that has the property matches one of them at most; one that lacks it fails the one that requires it.
        let names: BTreeSet<&str> = all_required(first).chain(all_required(second)).collect();
        common == ["object"]
            && names.into_iter().any(|name| {
                let (of_first, of_second) = (self.property(first, name), self.property(second, name));
                let excluded = |parts: &[&Map<String, Value>], of: &[&Map<String, Value>]| {
                    of.is_empty() && parts.iter().any(|part| is_closed(part, name))
                };
                let disjoint =
                    || all_types(&of_first).iter().all(|name| !all_types(&of_second).contains(name));
                excluded(first, &of_first)
                    || excluded(second, &of_second)
                    || disjoint()
                    || self.differ(&of_first, &of_second)
            })
    }

    /// Whether both list their values, and no common one.
    fn differ(&self, first: &[&Map<String, Value>], second: &[&Map<String, Value>]) -> bool {
        let (Some(first), Some(second)) = (self.listed(first), self.listed(second)) else { return false };
        let first: BTreeSet<String> = first.into_iter().map(key).collect();
        second.into_iter().all(|value| !first.contains(&key(value)))
    }

    /// Returns what holds for a property of a name.
    fn property<'a>(&'a self, parts: &[&'a Map<String, Value>], name: &str) -> Vec<&'a Map<String, Value>> {
        let of = parts.iter().filter_map(|part| part.get("properties")?.get(name));
        of.flat_map(|schema| self.parts(schema)).collect()
    }

    /// Returns the values that the first of these schemas with an `enum` or `const` lists.
    fn listed<'a>(&self, parts: &[&'a Map<String, Value>]) -> Option<Vec<&'a Value>> {
        parts.iter().find_map(|part| match (part.get("const"), part.get("enum")) {
            (Some(value), _) => Some(vec![value]),
            (None, Some(Value::Array(values))) => Some(values.iter().collect()),
            _ => None,
        })
    }
}

/// Returns a text that equal values share.
fn key(value: &Value) -> String {
    match value {
        Value::Number(number) => {
            number.as_f64().map_or_else(|| number.to_string(), |number| format!("{:?}", number + 0.0))
        }
        // Those of numbers within, and of keys in another order, differ for some equal values.
        Value::Array(_) | Value::Object(_) => "structure".to_owned(),
        other => other.to_string(),
    }
}

fn all_required<'a>(parts: &[&'a Map<String, Value>]) -> impl Iterator<Item = &'a str> {
    let lists: Vec<&Vec<Value>> = parts.iter().filter_map(|part| part.get("required")?.as_array()).collect();
    lists.into_iter().flatten().filter_map(Value::as_str)
}

fn all_types(parts: &[&Map<String, Value>]) -> Vec<&'static str> {
    let mut all = super::TYPES.to_vec();
    for part in parts {
        let of_part = type_names(part.get("type"));
        all.retain(|name| of_part.contains(name));
    }
    all
}

/// Whether an object may not have a property that no other keyword names.
fn is_closed(part: &Map<String, Value>, name: &str) -> bool {
    let names = |keyword: &str| part.get(keyword).and_then(Value::as_object);
    part.get("additionalProperties") == Some(&Value::Bool(false))
        && names("patternProperties").is_none_or(Map::is_empty)
        && names("properties").is_none_or(|listed| !listed.contains_key(name))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::rewrite::rewrite;

    fn excludes(schema: Value) -> bool {
        let mut schema = schema;
        rewrite(schema.as_object_mut().unwrap(), false).unwrap();
        schema.get("oneOf").is_none()
    }

    #[test]
    fn alternatives_exclude_each_other_by_constants_types_and_required_properties() {
        let kind = |constant: Value| json!({"type": "object", "properties": {"kind": {"const": constant}}, "required": ["kind"]});
        let defs =
            json!({"cat": kind("cat".into()), "dog": kind("dog".into()), "pet": {"$ref": "#/$defs/dog"}});
        let of = |alternatives: Value| json!({"oneOf": alternatives, "$defs": defs});
        let closed = |name: &str| json!({"type": "object", "properties": {name: true}, "required": [name], "additionalProperties": false});
        for schema in [
            of(json!([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/pet"}])),
            of(json!([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "null"}])),
            of(
                json!([{"allOf": [{"$ref": "#/$defs/cat"}, {"required": ["name"]}]}, {"$ref": "#/$defs/dog"}]),
            ),
            of(json!([{"const": 1}, {"enum": [2, "1"]}])),
            of(json!([{"type": "string"}, {"type": ["integer", "null"]}])),
            of(json!([closed("a"), closed("b")])),
            of(json!((0..200).map(|at| kind(at.into())).collect::<Vec<_>>())),
        ] {
            assert!(excludes(schema.clone()), "{schema}");
        }
        for schema in [
            of(json!([{"$ref": "#/$defs/dog"}, {"$ref": "#/$defs/pet"}])),
            of(json!([{"const": 1}, {"const": 1.0}])),
            of(json!([{"const": [1]}, {"const": [2]}])),
            of(
                json!([{"properties": {"kind": {"const": "a"}}, "required": ["kind"]}, {"properties": {"kind": {"const": "b"}}}]),
            ),
            of(json!([kind("a".into()), {"type": "object", "properties": {"kind": {"type": "string"}}}])),
            of(json!([closed("a"), {"type": "object", "required": ["a"]}])),
            of(json!([{"type": "integer"}, {"type": "number"}])),
        ] {
            assert!(!excludes(schema.clone()), "{schema}");
        }
    }
}
