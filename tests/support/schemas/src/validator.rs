//! Validator of JSON values with exact numbers, for the keywords of draft 2020-12 that the generator writes. Formats are annotations.

use std::cell::RefCell;
use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::{Decimal, Json};

/// Validator of one schema.
#[derive(Debug)]
pub struct Validator {
    root: Value,
    /// Patterns, as the other validator understands them.
    patterns: RefCell<HashMap<String, jsonschema::Validator>>,
}

impl Validator {
    /// Creates the validator of a schema.
    pub fn new(root: Value) -> Self {
        Self { root, patterns: RefCell::default() }
    }

    /// Whether the schema allows a value.
    ///
    /// # Panics
    /// The schema has a keyword whose value is not what it must be.
    pub fn allows(&self, value: &Json) -> bool {
        self.is_valid(&self.root, value)
    }

    fn is_valid(&self, schema: &Value, value: &Json) -> bool {
        match schema {
            Value::Bool(allowed) => *allowed,
            Value::Object(schema) => {
                schema.iter().all(|(keyword, rule)| self.holds(keyword, rule, schema, value))
            }
            _ => panic!("{schema} is no schema"),
        }
    }

    fn holds(&self, keyword: &str, rule: &Value, schema: &Map<String, Value>, value: &Json) -> bool {
        let each = |value: &Json| {
            rule.as_array().unwrap().iter().filter(|schema| self.is_valid(schema, value)).count()
        };
        match keyword {
            "type" => match rule {
                Value::String(name) => is_type(value, name),
                names => names.as_array().unwrap().iter().any(|name| is_type(value, name.as_str().unwrap())),
            },
            "const" => value.equals(&rule.into()),
            "enum" => rule.as_array().unwrap().iter().any(|listed| value.equals(&listed.into())),
            "allOf" => each(value) == rule.as_array().unwrap().len(),
            "anyOf" => each(value) > 0,
            "oneOf" => each(value) == 1,
            "not" => !self.is_valid(rule, value),
            "if" => {
                let then = if self.is_valid(rule, value) { "then" } else { "else" };
                schema.get(then).is_none_or(|schema| self.is_valid(schema, value))
            }
            "$ref" => self.is_valid(self.target(rule.as_str().unwrap()), value),
            _ => match value {
                Json::Number(_) => holds_number(keyword, rule, &value.decimal().unwrap()),
                Json::Text(text) => self.holds_text(keyword, rule, text),
                Json::Array(items) => self.holds_array(keyword, rule, schema, items),
                Json::Object(fields) => self.holds_object(keyword, rule, schema, fields),
                Json::Null | Json::Bool(_) => true,
            },
        }
    }

    fn target(&self, reference: &str) -> &Value {
        let pointer = reference.strip_prefix('#').unwrap();
        let pointer = pointer.replace("%25", "%");
        let target = self.root.pointer(&pointer);
        target.unwrap_or_else(|| panic!("{reference} leads to nothing in {}", self.root))
    }

    fn matches(&self, pattern: &str, text: &str) -> bool {
        let mut patterns = self.patterns.borrow_mut();
        let matcher = patterns.entry(pattern.to_owned()).or_insert_with(|| {
            let schema = serde_json::json!({"pattern": pattern});
            jsonschema::validator_for(&schema).unwrap_or_else(|error| panic!("{pattern}: {error}"))
        });
        matcher.is_valid(&text.into())
    }

    fn holds_text(&self, keyword: &str, rule: &Value, text: &str) -> bool {
        match keyword {
            "minLength" => text.chars().count() as u64 >= count(rule),
            "maxLength" => text.chars().count() as u64 <= count(rule),
            "pattern" => self.matches(rule.as_str().unwrap(), text),
            _ => true,
        }
    }

    fn holds_array(&self, keyword: &str, rule: &Value, schema: &Map<String, Value>, items: &[Json]) -> bool {
        let prefix = schema.get("prefixItems").map_or(0, |prefix| prefix.as_array().unwrap().len());
        match keyword {
            "minItems" => items.len() as u64 >= count(rule),
            "maxItems" => items.len() as u64 <= count(rule),
            "prefixItems" => {
                rule.as_array().unwrap().iter().zip(items).all(|(schema, item)| self.is_valid(schema, item))
            }
            "items" => items.iter().skip(prefix).all(|item| self.is_valid(rule, item)),
            "uniqueItems" => {
                let repeated = |at: usize| items[..at].iter().any(|item| item.equals(&items[at]));
                *rule == false || !(0..items.len()).any(repeated)
            }
            "contains" => {
                let found = items.iter().filter(|item| self.is_valid(rule, item)).count() as u64;
                found >= schema.get("minContains").map_or(1, count)
                    && schema.get("maxContains").is_none_or(|most| found <= count(most))
            }
            _ => true,
        }
    }

    fn holds_object(
        &self,
        keyword: &str,
        rule: &Value,
        schema: &Map<String, Value>,
        fields: &[(String, Json)],
    ) -> bool {
        let has = |name: &str| fields.iter().any(|(other, _)| other == name);
        let names = |names: &Value| names.as_array().unwrap().iter().all(|name| has(name.as_str().unwrap()));
        let empty = Map::new();
        let map = |keyword: &str| schema.get(keyword).map_or(&empty, |value| value.as_object().unwrap());
        match keyword {
            "minProperties" => fields.len() as u64 >= count(rule),
            "maxProperties" => fields.len() as u64 <= count(rule),
            "required" => names(rule),
            "properties" => fields
                .iter()
                .all(|(name, value)| rule.get(name).is_none_or(|schema| self.is_valid(schema, value))),
            "patternProperties" => fields.iter().all(|(name, value)| {
                let mut rules = rule.as_object().unwrap().iter();
                rules.all(|(pattern, schema)| !self.matches(pattern, name) || self.is_valid(schema, value))
            }),
            "additionalProperties" => fields.iter().all(|(name, value)| {
                map("properties").contains_key(name)
                    || map("patternProperties").keys().any(|pattern| self.matches(pattern, name))
                    || self.is_valid(rule, value)
            }),
            "propertyNames" => fields.iter().all(|(name, _)| self.is_valid(rule, &Json::text(name))),
            "dependentRequired" => {
                rule.as_object().unwrap().iter().all(|(name, needed)| !has(name) || names(needed))
            }
            "dependentSchemas" => {
                let value = Json::Object(fields.to_vec());
                rule.as_object()
                    .unwrap()
                    .iter()
                    .all(|(name, schema)| !has(name) || self.is_valid(schema, &value))
            }
            _ => true,
        }
    }
}

fn count(rule: &Value) -> u64 {
    rule.as_u64().unwrap()
}

fn is_type(value: &Json, name: &str) -> bool {
    match (value, name) {
        (Json::Null, "null")
        | (Json::Bool(_), "boolean")
        | (Json::Number(_), "number")
        | (Json::Text(_), "string")
        | (Json::Array(_), "array")
        | (Json::Object(_), "object") => true,
        (Json::Number(_), "integer") => value.decimal().unwrap().is_integer(),
        _ => false,
    }
}

fn holds_number(keyword: &str, rule: &Value, number: &Decimal) -> bool {
    let bound = || Json::from(rule).decimal().unwrap();
    match keyword {
        "minimum" => *number >= bound(),
        "maximum" => *number <= bound(),
        "exclusiveMinimum" => *number > bound(),
        "exclusiveMaximum" => *number < bound(),
        "multipleOf" => number.is_multiple_of(&bound()),
        _ => true,
    }
}
