//! Conditions: dependencies between properties, `if`, `not` and `oneOf`.

use serde_json::{Map, Value, json};

use super::negation::{negate, types};
use super::{Dialect, Rewriter, is_true, push};
use crate::GrammarError;

/// Maximum alternatives of a `oneOf` that is expanded.
const ALTERNATIVES_MAX: usize = 16;

impl Rewriter<'_> {
    /// A property that requires others, or another schema: it is absent, or they hold.
    pub(super) fn dependencies(&mut self, object: &mut Map<String, Value>) -> Result<(), GrammarError> {
        let keywords: &[&str] = match self.dialect {
            Dialect::Draft4 | Dialect::Draft6 | Dialect::Draft7 => &["dependencies"],
            Dialect::Draft2019 | Dialect::Draft2020 => &["dependentRequired", "dependentSchemas"],
        };
        for keyword in keywords {
            let Some(Value::Object(dependencies)) = object.get(*keyword) else { continue };
            if !dependencies.values().all(|value| value.is_object() || value.is_boolean() || is_texts(value))
            {
                continue;
            }
            let Some(Value::Object(dependencies)) = object.shift_remove(*keyword) else { continue };
            for (name, needed) in dependencies {
                let needed = match needed {
                    Value::Array(names) if names.is_empty() => continue,
                    Value::Array(names) => json!({"required": names}),
                    schema if is_true(&schema) => continue,
                    schema => schema,
                };
                push(object, json!({"anyOf": [{"properties": {name: false}}, needed]}));
            }
        }
        Ok(())
    }

    /// `if`: either it and `then` hold, or its negation and `else`.
    pub(super) fn conditional(&mut self, object: &mut Map<String, Value>) -> Result<(), GrammarError> {
        if self.dialect < Dialect::Draft7 {
            return Ok(());
        }
        let then = object.get("then").filter(|schema| !is_true(schema)).cloned();
        let otherwise = object.get("else").filter(|schema| !is_true(schema)).cloned();
        let replacement = match (object.get("if"), then, otherwise) {
            (None, ..) | (_, None, None) => None,
            (Some(condition), then, otherwise) if is_true(condition) || *condition == Value::Bool(false) => {
                if is_true(condition) {
                    then
                } else {
                    otherwise
                }
            }
            (Some(condition), then, otherwise) => {
                let Some(negated) = negate(condition, self.dialect) else { return Ok(()) };
                let condition = self.copy(condition)?;
                let negated = self.copy(&negated)?;
                let both = |first: Value, second: Option<Value>| match second {
                    Some(second) => json!({"allOf": [first, second]}),
                    None => first,
                };
                Some(json!({"anyOf": [both(condition, then), both(negated, otherwise)]}))
            }
        };
        for keyword in ["if", "then", "else"] {
            object.shift_remove(keyword);
        }
        replacement.into_iter().for_each(|schema| push(object, schema));
        Ok(())
    }

    /// `not`, by the negation of its schema.
    pub(super) fn negated(&mut self, object: &mut Map<String, Value>) -> Result<(), GrammarError> {
        let Some(negated) = object.get("not").and_then(|schema| negate(schema, self.dialect)) else {
            return Ok(());
        };
        object.shift_remove("not");
        let negated = self.copy(&negated)?;
        if !is_true(&negated) {
            push(object, negated);
        }
        Ok(())
    }

    /// `oneOf`: of alternatives that exclude each other, any holds; of others one, and the negations of the rest, if it is to be expanded.
    pub(super) fn one_of(&mut self, object: &mut Map<String, Value>) -> Result<(), GrammarError> {
        let Some(Value::Array(alternatives)) = object.get("oneOf") else { return Ok(()) };
        let alternatives: Vec<Value> =
            alternatives.iter().filter(|schema| **schema != Value::Bool(false)).cloned().collect();
        let may_compare = alternatives.len() > 1 && self.visit(self.compared(&alternatives)).is_some();
        if may_compare && self.exclude_each_other(&alternatives) {
            object.shift_remove("oneOf");
            push(object, json!({"anyOf": alternatives}));
            return Ok(());
        }
        if !self.expand_one_of || !(2..=ALTERNATIVES_MAX).contains(&alternatives.len()) {
            return Ok(());
        }
        let mut options = Vec::new();
        for (at, alternative) in alternatives.iter().enumerate() {
            let mut all = vec![self.copy(alternative)?];
            let of_types = types(alternative);
            for other in
                alternatives.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, other)| other)
            {
                if types(other).iter().all(|name| !of_types.contains(name)) {
                    continue;
                }
                let Some(negated) = negate(other, self.dialect) else { return Ok(()) };
                all.push(self.copy(&negated)?);
            }
            options.push(json!({"allOf": all}));
        }
        object.shift_remove("oneOf");
        push(object, json!({"anyOf": options}));
        Ok(())
    }
}

fn is_texts(value: &Value) -> bool {
    value.as_array().is_some_and(|values| values.iter().all(Value::is_string))
}
