//! Schemas of arrays and objects, combinations of schemas, and references.

use serde_json::{Map, Value, json};

use crate::Json;
use crate::case;
use crate::part::{Maker, Part};
use crate::scalars;

/// Names of properties.
const NAMES: [&str; 8] = ["a", "b", "kind", "x1", "c d", "é", "q\"k", "n_id"];
/// Names that no schema lists, some of them nearly.
const OTHERS: [&str; 7] = ["zz", "", "aa", "x9", "q", "\u{1b}", "n\n"];

/// Returns distinct names in a random order.
fn names(maker: &mut Maker, count: usize) -> Vec<&'static str> {
    let mut left = NAMES.to_vec();
    (0..count.min(NAMES.len())).map(|_| left.swap_remove(maker.random.below(left.len()))).collect()
}

/// Returns an object with one of its fields replaced, or without it.
fn with(fields: &[(String, Json)], at: usize, value: Option<Json>) -> Json {
    let mut fields = fields.to_vec();
    match value {
        Some(value) => fields[at].1 = value,
        None => _ = fields.remove(at),
    }
    Json::Object(fields)
}

/// Object with named properties, of which some are required.
pub(crate) fn properties(maker: &mut Maker) -> Part {
    let count = 1 + maker.random.below(3);
    let names = names(maker, count);
    let parts: Vec<Part> = names.iter().map(|_| case::any(maker)).collect();
    let required: Vec<&str> = names.iter().copied().filter(|_| !maker.once_in(3)).collect();
    let fields = |values: &mut dyn FnMut(&Part) -> Json| -> Vec<(String, Json)> {
        names.iter().zip(&parts).map(|(name, part)| ((*name).to_owned(), values(part))).collect()
    };
    let schemas: Map<String, Value> =
        names.iter().zip(&parts).map(|(name, part)| ((*name).to_owned(), part.schema.clone())).collect();
    let mut schema = json!({"type": "object", "properties": schemas, "required": required});
    let mut values = Vec::new();
    for _ in 0..3 {
        let full = fields(&mut |part| maker.value(part));
        let only = full.iter().filter(|(name, _)| required.contains(&name.as_str())).cloned();
        values.push(Json::object(only));
        for (at, part) in parts.iter().enumerate() {
            values.push(with(&full, at, None));
            for value in maker.some(part, 3) {
                values.push(with(&full, at, Some(value)));
            }
        }
        let mut more = full.clone();
        more.push((
            maker.pick(&OTHERS).to_owned(),
            maker.pick(&[Json::Null, Json::number(1), Json::text("x")]),
        ));
        values.extend([Json::Object(full), Json::object(more)]);
    }
    match maker.random.below(4) {
        0 => {}
        1 => schema["additionalProperties"] = true.into(),
        _ => schema["additionalProperties"] = false.into(),
    }
    if maker.once_in(6) {
        // A name that is required and has no schema stands behind those that have one.
        schema["required"].as_array_mut().unwrap().push("needed".into());
        for value in &mut values {
            let Json::Object(fields) = value else { continue };
            let at =
                fields.iter().position(|(name, _)| !names.contains(&name.as_str())).unwrap_or(fields.len());
            if !maker.once_in(4) {
                fields.insert(at, ("needed".to_owned(), Json::Null));
            }
        }
    }
    Part::new(schema, values)
}

/// Object whose other properties have a schema.
pub(crate) fn additional_properties(maker: &mut Maker) -> Part {
    let mut part = if maker.once_in(2) {
        properties(maker)
    } else {
        Part::new(json!({"type": "object"}), vec![Json::Object(Vec::new())])
    };
    let other = case::any(maker);
    part.schema["additionalProperties"] = other.schema.clone();
    for value in maker.some(&part, 6) {
        let Json::Object(mut fields) = value else { continue };
        for _ in 0..2 {
            fields.push((maker.pick(&OTHERS).to_owned(), maker.value(&other)));
            part.values.push(Json::object(fields.clone()));
        }
    }
    part
}

pub(crate) fn pattern_properties(maker: &mut Maker) -> Part {
    let patterns = [
        ("^x", &["x1", "x", "xy"][..]),
        ("^[0-9]+$", &["0", "12"]),
        ("^[^\"x0-9][^\"]*$", &["a", "zz"]),
        ("_id$", &["n_id", "_id"]),
        ("^\\s", &[" ", "\u{a0}b"]),
        ("^.{4}$", &["abcd", "😀😀😀😀"]),
    ];
    let mut part = if maker.once_in(2) {
        properties(maker)
    } else {
        Part::new(json!({"type": "object"}), vec![Json::Object(Vec::new())])
    };
    let count = 1 + maker.random.below(2);
    let chosen: Vec<_> = (0..count).map(|_| (maker.pick(&patterns), case::any(maker))).collect();
    let rules: Map<String, Value> =
        chosen.iter().map(|((pattern, _), part)| ((*pattern).to_owned(), part.schema.clone())).collect();
    part.schema["patternProperties"] = rules.into();
    match maker.random.below(3) {
        0 => part.schema["additionalProperties"] = case::any(maker).schema,
        1 => part.schema["additionalProperties"] = false.into(),
        _ => {}
    }
    for value in maker.some(&part, 5) {
        let Json::Object(fields) = value else { continue };
        for ((_, names), rule) in &chosen {
            let mut fields = fields.clone();
            fields.push((maker.pick(names).to_owned(), maker.value(rule)));
            part.values.push(Json::object(fields.clone()));
            fields.push((maker.pick(&OTHERS).to_owned(), maker.value(rule)));
            part.values.push(Json::object(fields));
        }
    }
    part
}

pub(crate) fn property_names(maker: &mut Maker) -> Part {
    let rule = maker.pick(&[
        json!({"pattern": "^[a-z]+$"}),
        json!({"enum": ["a", "zz"]}),
        json!({"const": "a"}),
        json!({"maxLength": 1}),
        json!({"minLength": 2}),
        json!(true),
        json!(false),
        json!({"pattern": "^x", "maxLength": 2}),
    ]);
    let mut part = if maker.once_in(3) { properties(maker) } else { additional_properties(maker) };
    part.schema["propertyNames"] = rule;
    for name in OTHERS.iter().chain(&NAMES) {
        part.values.push(Json::object([((*name).to_owned(), Json::number(1))]));
    }
    part
}

pub(crate) fn property_counts(maker: &mut Maker) -> Part {
    let mut part = if maker.once_in(2) { properties(maker) } else { additional_properties(maker) };
    let least = maker.random.below(3);
    if !maker.once_in(3) {
        part.schema["minProperties"] = least.into();
    }
    if maker.once_in(2) {
        part.schema["maxProperties"] = (least + maker.random.below(2)).into();
    }
    for count in 0..4 {
        part.values
            .push(Json::object(OTHERS.iter().take(count).map(|name| ((*name).to_owned(), Json::number(1)))));
    }
    part
}

pub(crate) fn dependencies(maker: &mut Maker) -> Part {
    let mut part = properties(maker);
    let name = maker.pick(&NAMES);
    if maker.once_in(2) {
        maker.kind("dependentRequired");
        let needed = names(maker, 1);
        part.schema["dependentRequired"] = json!({name: needed});
    } else {
        maker.kind("dependentSchemas");
        let rule = maker.pick(&[
            json!({"required": ["b"]}),
            json!({"properties": {"b": {"type": "integer"}}}),
            json!({"minProperties": 2}),
            json!(false),
            json!(true),
        ]);
        part.schema["dependentSchemas"] = json!({name: rule});
    }
    part
}

/// Returns arrays of up to `most` of the values of a part.
fn arrays(maker: &mut Maker, of: &Part, most: usize) -> Vec<Json> {
    (0..=most).map(|count| Json::Array((0..count).map(|_| maker.value(of)).collect())).collect()
}

pub(crate) fn items(maker: &mut Maker) -> Part {
    let item = case::any(maker);
    let mut schema = json!({"type": "array", "items": item.schema});
    let least = maker.random.below(3);
    if maker.once_in(2) {
        schema["minItems"] = if maker.once_in(3) { json!(least as f64) } else { json!(least) };
    }
    if maker.once_in(2) {
        schema["maxItems"] = (least + maker.random.below(2)).into();
    }
    let mut values = arrays(maker, &item, 4);
    values.extend(maker.some(&item, 8).into_iter().map(|value| Json::Array(vec![value])));
    Part::new(whole_counts(schema), values)
}

/// Counts as integers, which the validator reads.
fn whole_counts(mut schema: Value) -> Value {
    if let Some(count) = schema.get("minItems").and_then(Value::as_f64) {
        schema["minItems"] = (count as u64).into();
    }
    schema
}

pub(crate) fn prefix_items(maker: &mut Maker) -> Part {
    let count = 1 + maker.random.below(2);
    let parts: Vec<Part> = (0..count).map(|_| case::any(maker)).collect();
    let rest = case::any(maker);
    let schemas: Vec<&Value> = parts.iter().map(|part| &part.schema).collect();
    let mut schema = json!({"type": "array", "prefixItems": schemas});
    match maker.random.below(3) {
        0 => schema["items"] = false.into(),
        1 => schema["items"] = rest.schema.clone(),
        _ => {}
    }
    if maker.once_in(2) {
        schema["minItems"] = (1 + maker.random.below(2)).into();
    }
    if maker.once_in(3) {
        schema["maxItems"] = (2 + maker.random.below(2)).into();
    }
    let mut values = vec![Json::Array(Vec::new())];
    for length in [1, 2, 2, 3, 3, 4] {
        values.push(Json::Array((0..length).map(|at| maker.value(parts.get(at).unwrap_or(&rest))).collect()));
    }
    Part::new(schema, values)
}

pub(crate) fn unique_items(maker: &mut Maker) -> Part {
    let mut part = items(maker);
    part.schema["uniqueItems"] = (!maker.once_in(3)).into();
    if maker.once_in(3) {
        part.schema["maxItems"] = 1.into();
    }
    part.values.push(Json::Array(vec![Json::number(1), Json::number(1)]));
    part
}

pub(crate) fn contains(maker: &mut Maker) -> Part {
    let item = if maker.once_in(2) {
        Part::new(maker.pick(&[json!(true), json!(false)]), vec![Json::Null])
    } else {
        case::any(maker)
    };
    let mut schema = json!({"type": "array", "contains": item.schema});
    for (keyword, count) in [("minContains", 2), ("maxContains", 1)] {
        if maker.once_in(3) {
            schema[keyword] = maker.random.below(count + 1).into();
        }
    }
    Part::new(schema, arrays(maker, &item, 3))
}

/// Schemas that hold together.
pub(crate) fn all_of(maker: &mut Maker) -> Part {
    match maker.random.below(4) {
        0 => {
            let (one, two) = (scalars::number_bounds(maker), scalars::number_bounds(maker));
            let values = [one.values, two.values].concat();
            Part::new(json!({"allOf": [one.schema, two.schema]}), values)
        }
        1 => {
            let (one, two) = (scalars::lengths(maker), scalars::negated_classes(maker));
            let mut schema = one.schema;
            schema["allOf"] = json!([two.schema]);
            Part::new(schema, [one.values, two.values].concat())
        }
        2 => {
            let (one, two) = (case::any(maker), case::any(maker));
            Part::new(json!({"allOf": [one.schema, two.schema]}), [one.values, two.values].concat())
        }
        _ => {
            // A base and what is added to it.
            let base = properties(maker);
            let added = case::any(maker);
            let reference =
                if maker.once_in(2) { maker.define(base.schema.clone()) } else { base.schema.clone() };
            let schema =
                json!({"allOf": [reference, {"properties": {"added": added.schema}, "required": ["added"]}]});
            let mut values = Vec::new();
            for value in maker.some(&base, 8) {
                let Json::Object(mut fields) = value else { continue };
                let listed = base.schema["properties"].as_object().unwrap();
                let at =
                    fields.iter().position(|(name, _)| !listed.contains_key(name)).unwrap_or(fields.len());
                let value = maker.value(&added);
                fields.insert(at, ("added".to_owned(), value));
                values.push(Json::Object(fields));
            }
            Part::new(schema, [values, base.values].concat())
        }
    }
}

pub(crate) fn any_of(maker: &mut Maker) -> Part {
    let parts: Vec<Part> = (0..2 + maker.random.below(2)).map(|_| case::any(maker)).collect();
    let schemas: Vec<&Value> = parts.iter().map(|part| &part.schema).collect();
    let mut schema = json!({"anyOf": schemas});
    if maker.once_in(4) {
        schema["type"] =
            maker.pick(&[json!("string"), json!(["number", "null"]), json!(["object", "integer"])]);
    }
    Part::new(schema, parts.into_iter().flat_map(|part| part.values).collect())
}

/// Objects that a property tells apart, in place or behind references, and values of different types.
pub(crate) fn one_of_exclusive(maker: &mut Maker) -> Part {
    let (mut schemas, mut values) = (Vec::new(), Vec::new());
    for tag in ["cat", "dog", "cow"].into_iter().take(2 + maker.random.below(2)) {
        let other = case::any(maker);
        let schema = json!({"type": "object", "properties": {"kind": {"const": tag}, "v": other.schema}, "required": ["kind", "v"],
            "additionalProperties": maker.once_in(3)});
        schemas.push(if maker.once_in(2) { maker.define(schema) } else { schema });
        for value in maker.some(&other, 4) {
            values.push(Json::object([("kind".to_owned(), Json::text(tag)), ("v".to_owned(), value)]));
        }
    }
    if maker.once_in(2) {
        let scalar = maker.pick(&[
            json!({"type": "null"}),
            json!({"type": "string", "maxLength": 2}),
            json!({"type": "integer"}),
        ]);
        schemas.push(scalar);
        values.extend([
            Json::Null,
            Json::text("ab"),
            Json::text("abc"),
            Json::number(4),
            Json::number("4.5"),
        ]);
    }
    Part::new(json!({"oneOf": schemas}), values)
}

/// Alternatives that overlap.
pub(crate) fn one_of(maker: &mut Maker) -> Part {
    let (one, two) = match maker.random.below(4) {
        0 => (scalars::number_bounds(maker), scalars::number_bounds(maker)),
        1 => (scalars::lengths(maker), scalars::lengths(maker)),
        2 => (scalars::types(maker), scalars::types(maker)),
        _ => (case::any(maker), case::any(maker)),
    };
    Part::new(json!({"oneOf": [one.schema, two.schema]}), [one.values, two.values].concat())
}

pub(crate) fn not(maker: &mut Maker) -> Part {
    let part = match maker.random.below(5) {
        0 => scalars::number_bounds(maker),
        1 => scalars::lengths(maker),
        2 => scalars::types(maker),
        3 => scalars::listed_values(maker),
        _ => properties(maker),
    };
    let mut schema = json!({"not": part.schema});
    if maker.once_in(2) {
        schema["type"] = maker.pick(&["number", "string", "object", "array"]).into();
    }
    let mut values = part.values;
    values.extend(scalars::types(maker).values);
    Part::new(schema, values)
}

pub(crate) fn conditional(maker: &mut Maker) -> Part {
    let condition = match maker.random.below(4) {
        0 => Part::new(
            json!({"properties": {"kind": {"const": 1}}, "required": ["kind"]}),
            vec![
                Json::object([("kind".to_owned(), Json::number(1))]),
                Json::object([("kind".to_owned(), Json::number(2))]),
            ],
        ),
        1 => scalars::types(maker),
        2 => scalars::number_bounds(maker),
        _ => scalars::lengths(maker),
    };
    let (then, otherwise) = (scalars::types(maker), case::any(maker));
    let mut schema = json!({"if": condition.schema});
    if !maker.once_in(4) {
        schema["then"] = then.schema;
    }
    if maker.once_in(2) {
        schema["else"] = otherwise.schema;
    }
    let mut values = [condition.values, then.values, otherwise.values].concat();
    for value in &mut values {
        // The condition names it first.
        if let Json::Object(fields) = value {
            fields.sort_by_key(|(name, _)| name != "kind");
        }
    }
    Part::new(schema, values)
}

/// Reference to a part, beside other keywords or not, over several steps or to where no keyword holds schemas.
pub(crate) fn reference(maker: &mut Maker) -> Part {
    let part = case::any(maker);
    let mut schema = match maker.random.below(3) {
        0 => {
            let first = maker.define(part.schema);
            maker.define(first)
        }
        _ => maker.define(part.schema),
    };
    if maker.once_in(3) {
        schema["description"] = "a part".into();
    }
    if maker.once_in(4) {
        let other = scalars::types(maker);
        schema["type"] = other.schema["type"].clone();
    }
    Part::new(schema, part.values)
}

/// Schema that refers to itself.
pub(crate) fn recursion(maker: &mut Maker) -> Part {
    let leaf = case::any(maker);
    let at = maker.definitions.len();
    let next = json!({"$ref": format!("#/$defs/node{at}")});
    let next = if maker.once_in(2) { json!({"anyOf": [next, {"type": "null"}]}) } else { next };
    let tree = json!({"type": "object", "properties": {"v": leaf.schema, "next": next, "all": {"type": "array", "items": next}},
        "required": ["v"], "additionalProperties": false});
    maker.definitions.push((format!("node{at}"), tree));
    let field = |name: &str, value: Json| (name.to_owned(), value);
    let mut values = Vec::new();
    for _ in 0..4 {
        let node = Json::object([field("v", maker.value(&leaf))]);
        let inner = Json::object([field("v", maker.value(&leaf)), field("next", node.clone())]);
        let outer = Json::object([
            field("v", maker.value(&leaf)),
            field("next", inner.clone()),
            field("all", Json::Array(vec![node.clone(), inner.clone()])),
        ]);
        values.extend([node, inner, outer]);
    }
    values.push(Json::object([field("v", maker.value(&leaf)), field("next", Json::Null)]));
    Part::new(json!({"$ref": format!("#/$defs/node{at}")}), values)
}
