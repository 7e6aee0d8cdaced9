//! Schemas as rules rewrite them. That a rewritten schema allows the same values is tested with the JSON Schema Test Suite
//! (`worker/tests/worker/structured.rs`).

use serde_json::{Value, json};

use super::negation::negate;
use super::{Dialect, apply_rules, rewrite};

fn rewritten(mut schema: Value) -> Value {
    apply_rules(schema.as_object_mut().unwrap(), true).unwrap();
    schema
}

/// Checks the constraints that replace a schema.
fn expect(schema: Value, all_of: Value) {
    assert_eq!(rewritten(schema.clone()), json!({"allOf": all_of}), "{schema}");
}

#[test]
fn conditions_become_alternatives() {
    expect(
        json!({"dependentRequired": {"a": ["b"], "c": []}}),
        json!([{"anyOf": [{"properties": {"a": false}}, {"required": ["b"]}]}]),
    );
    expect(
        json!({"dependentSchemas": {"a": {"minProperties": 2}}}),
        json!([{"anyOf": [{"properties": {"a": false}}, {"minProperties": 2}]}]),
    );
    expect(
        json!({"if": {"type": "string"}, "then": {"minLength": 2.0}, "else": {"const": 1}}),
        json!([{"anyOf": [
            {"allOf": [{"type": "string"}, {"minLength": 2}]},
            {"allOf": [{"type": ["null", "boolean", "number", "array", "object"]}, {"const": 1}]},
        ]}]),
    );
    expect(
        json!({"oneOf": [{"type": "string"}, {"maxLength": 3}, {"type": "null"}]}),
        json!([{"anyOf": [
            {"allOf": [{"type": "string"}, {"type": "string", "minLength": 4}]},
            {"allOf": [
                {"maxLength": 3},
                {"type": ["null", "boolean", "number", "array", "object"]},
                {"type": ["boolean", "number", "string", "array", "object"]},
            ]},
            {"allOf": [{"type": "null"}, {"type": "string", "minLength": 4}]},
        ]}]),
    );
    for unknown in [
        json!({"not": {"pattern": "a"}}),
        json!({"not": {"type": "integer"}}),
        json!({"if": {"format": "date"}, "then": {"const": 1}}),
        json!({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}),
        json!({"contains": {"type": "string"}}),
        json!({"uniqueItems": true}),
    ] {
        assert_eq!(rewritten(unknown.clone()), unknown, "what no rule covers stays");
    }
}

#[test]
fn negations_are_exact() {
    let not = |schema: Value| negate(&schema, Dialect::Draft2020);
    assert_eq!(
        not(json!({"enum": [1, null, true]})),
        Some(json!({"anyOf": [
            {"const": false},
            {"type": "number", "exclusiveMaximum": 1.0},
            {"type": "number", "exclusiveMinimum": 1.0},
            {"type": ["string", "array", "object"]},
        ]}))
    );
    assert_eq!(
        not(json!({"required": ["a"], "properties": {"a": {"minimum": 3}}, "title": "t"})),
        Some(json!({"anyOf": [
            {"type": "object", "properties": {"a": false}},
            {"type": "object", "required": ["a"], "properties": {"a": {"type": "number", "exclusiveMaximum": 3}}},
        ]}))
    );
    assert_eq!(not(json!({"minItems": 0})), Some(json!(false)));
    assert_eq!(not(json!({"not": {"$ref": "#"}})), Some(json!({"$ref": "#"})));
    assert_eq!(not(json!({"const": "a"})), None);
    // Of draft 4, exclusive bounds are flags.
    assert_eq!(negate(&json!({"minimum": 3, "exclusiveMinimum": true}), Dialect::Draft4), None);
}

#[test]
fn what_is_unevaluated_is_what_no_other_keyword_names() {
    expect(
        json!({"unevaluatedProperties": false, "allOf": [{"properties": {"a": true}, "patternProperties": {"^x": true}}]}),
        json!([
            {"properties": {"a": true}, "patternProperties": {"^x": true}},
            {"properties": {"a": true}, "patternProperties": {"^x": true}, "additionalProperties": false},
        ]),
    );
    expect(
        json!({"unevaluatedProperties": false, "anyOf": [{"properties": {"a": true}}, {"properties": {"b": true}}]}),
        json!([{"anyOf": [
            {"allOf": [{"properties": {"a": true}}, {"properties": {"a": true}, "additionalProperties": false}]},
            {"allOf": [{"properties": {"b": true}}, {"properties": {"b": true}, "additionalProperties": false}]},
            {"allOf": [
                {"properties": {"a": true}},
                {"properties": {"b": true}},
                {"properties": {"a": true, "b": true}, "additionalProperties": false},
            ]},
        ]}]),
    );
    expect(json!({"unevaluatedItems": false}), json!([{"items": false}]));
    let closed = json!({"items": true, "unevaluatedItems": false});
    assert_eq!(rewritten(closed), json!({"items": true}));
    let depends = json!({"if": {"properties": {"a": {"const": 1}}}, "unevaluatedProperties": false});
    assert_eq!(rewritten(depends)["unevaluatedProperties"], json!(false));
    let older = json!({"$schema": "http://json-schema.org/draft-07/schema#", "unevaluatedProperties": false});
    assert_eq!(rewritten(older.clone()), older, "an unknown keyword of an older dialect has no effect");
}

#[test]
fn names_and_anchors_and_escaped_pointers_are_followed() {
    expect(
        json!({"propertyNames": {"enum": ["a", 1]}}),
        json!([{"properties": {"a": true}, "additionalProperties": false}]),
    );
    expect(json!({"propertyNames": false}), json!([{"maxProperties": 0}]));
    let schema = json!({"$defs": {"a/b": {"type": "null"}, "c": {"$anchor": "here", "$ref": "#/$defs/a~1b"}},
        "properties": {"x": {"$ref": "#here"}, "y": {"$recursiveRef": "#"}}});
    let found = rewritten(schema);
    let target_in = |found: &Value, reference: &Value| {
        let name = reference.as_str().unwrap().strip_prefix("#/$defs/").unwrap();
        found["$defs"][name].clone()
    };
    let target = |reference: &Value| target_in(&found, reference);
    let anchored = target(&found["properties"]["x"]["$ref"]);
    assert_eq!(anchored["$anchor"], "here");
    assert_eq!(target(&anchored["$ref"]), json!({"type": "null"}));
    assert_eq!(found["properties"]["y"], json!({"$ref": "#"}));
    let mut nested = json!({"properties": {"x": {"$id": "other", "$ref": "#/$defs/a"}}});
    let refused = rewrite(nested.as_object_mut().unwrap(), true).unwrap_err();
    assert!(refused.to_string().contains("an $id of its own"), "{refused}");
    // What stands under keywords of others is rewritten, too.
    let schema = json!({"components": {"schemas": {"a": {"format": "x", "minLength": 1.0}}}, "$ref": "#/components/schemas/a"});
    let found = rewritten(schema);
    assert_eq!(target_in(&found, &found["$ref"]), json!({"minLength": 1}));
}

#[test]
fn nested_conditions_are_bounded() {
    let mut schema = json!({"required": ["a"]});
    for _ in 0..40 {
        schema = json!({"if": schema, "then": {"required": ["b"]}});
        schema = json!({"not": {"not": {"allOf": [{"if": {"required": ["c"]}, "else": schema}]}}});
    }
    let _ = rewrite(schema.as_object_mut().unwrap(), true);
    let mut schema = json!({"type": "string"});
    for _ in 0..30 {
        schema = json!({"oneOf": [{"anyOf": [schema, {"minLength": 3}]}, {"maxLength": 3}]});
        schema = json!({"oneOf": [{"required": ["a"]}, {"properties": {"a": schema}}]});
    }
    let _ = rewrite(schema.as_object_mut().unwrap(), true);
    let wide: Vec<Value> = (0..16)
        .map(|at| json!({"required": (0..200).map(|name| format!("{at}-{name}")).collect::<Vec<_>>()}))
        .collect();
    let refused = rewrite(json!({"oneOf": wide}).as_object_mut().unwrap(), true).unwrap_err();
    assert!(refused.to_string().contains("expand"), "{refused}");
}

#[test]
fn references_that_expand_to_a_large_tree_are_given_up_after_bounded_work() {
    // Level `n` refers eight times to level `n + 1`: 8^30 paths.
    let level =
        |keyword: &str, next: u32| json!({keyword: vec![json!({"$ref": format!("#/$defs/{next}")}); 8]});
    let levels = |keyword: &str| -> Value {
        let mut levels: serde_json::Map<_, _> =
            (0..30).map(|n| (n.to_string(), level(keyword, n + 1))).collect();
        levels.insert("30".to_owned(), json!({"properties": {"a": true}}));
        levels.into()
    };
    for (closed, keyword) in [
        ("unevaluatedProperties", "allOf"),
        ("unevaluatedProperties", "anyOf"),
        ("unevaluatedItems", "allOf"),
    ] {
        let schema = json!({"$defs": levels(keyword), "$ref": "#/$defs/0", closed: false});
        assert_eq!(
            rewritten(schema)[closed],
            json!(false),
            "{closed} {keyword}: the compiler refuses what is left"
        );
    }
}

#[test]
fn targets_of_references_that_are_copied_are_bounded() {
    let large: Vec<Value> = (0..500).map(|n| json!({"const": n})).collect();
    // 500 spellings of one pointer.
    let spelled = |n: u32| -> String {
        let name = b"abcdefghij".iter().enumerate();
        let letter = |(at, c): (usize, &u8)| {
            if n >> at & 1 == 1 { format!("%{c:x}") } else { char::from(*c).to_string() }
        };
        format!("#/$defs/{}", name.map(letter).collect::<String>())
    };
    let uses: Vec<Value> = (1..500).map(|n| json!({"$ref": spelled(n)})).collect();
    let mut schema = json!({"$defs": {"abcdefghij": {"anyOf": large}}, "prefixItems": uses});
    let error = rewrite(schema.as_object_mut().unwrap(), false).unwrap_err();
    assert!(error.to_string().contains("references expand"), "{error}");
}
