//! `unevaluatedProperties` and `unevaluatedItems`, where it is known which properties and items the other keywords evaluate.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::{Dialect, Rewriter, is_true, push};
use crate::GrammarError;

/// Maximum nesting of what is evaluated; references may be circular.
const DEPTH_MAX: usize = 32;
/// Maximum alternatives of an `anyOf` whose combinations are told apart.
const ALTERNATIVES_MAX: usize = 3;

/// Properties that a schema evaluates wherever it holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Properties {
    all: bool,
    names: BTreeSet<String>,
    patterns: BTreeSet<String>,
}

impl Properties {
    fn extend(&mut self, other: Self) {
        self.all |= other.all;
        self.names.extend(other.names);
        self.patterns.extend(other.patterns);
    }

    /// Returns a schema that allows the other properties by `rest` only.
    fn closed(&self, rest: &Value) -> Value {
        if self.all {
            return true.into();
        }
        let any = |keys: &BTreeSet<String>| -> Map<String, Value> {
            keys.iter().map(|key| (key.clone(), true.into())).collect()
        };
        let mut schema = json!({"properties": any(&self.names), "additionalProperties": rest});
        if !self.patterns.is_empty() {
            schema["patternProperties"] = any(&self.patterns).into();
        }
        schema
    }
}

/// Items that a schema evaluates wherever it holds: the first ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Items {
    all: bool,
    count: usize,
}

impl Rewriter<'_> {
    pub(super) fn unevaluated(&mut self, object: &mut Map<String, Value>) -> Result<(), GrammarError> {
        if let Some(rest) = object.shift_remove("unevaluatedProperties")
            && !is_true(&rest)
            && !self.close_properties(object, &rest)?
        {
            object.insert("unevaluatedProperties".to_owned(), rest);
        }
        if let Some(rest) = object.shift_remove("unevaluatedItems")
            && !is_true(&rest)
            && !self.close_items(object, &rest)
        {
            object.insert("unevaluatedItems".to_owned(), rest);
        }
        Ok(())
    }

    /// Constrains the properties that nothing evaluates. Returns false if it is not known which.
    fn close_properties(
        &mut self,
        object: &mut Map<String, Value>,
        rest: &Value,
    ) -> Result<bool, GrammarError> {
        let mut fixed = object.clone();
        let (any, one) = (fixed.shift_remove("anyOf"), fixed.shift_remove("oneOf"));
        let Some(base) = self.properties(&fixed, 0) else { return Ok(false) };
        if base.all {
            return Ok(true);
        }
        let mut of_all = base.clone();
        let mut varying = None;
        for (keyword, alternatives) in [("anyOf", any), ("oneOf", one)] {
            let Some(Value::Array(alternatives)) = alternatives else { continue };
            let evaluated: Option<Vec<Properties>> =
                alternatives.iter().map(|schema| self.properties_of(schema, 0)).collect();
            let Some(evaluated) = evaluated else { return Ok(false) };
            if evaluated.windows(2).all(|pair| pair[0] == pair[1]) {
                evaluated.into_iter().take(1).for_each(|one| of_all.extend(one));
            } else if varying.replace((keyword, alternatives, evaluated)).is_some() {
                return Ok(false);
            }
        }
        let Some((keyword, alternatives, evaluated)) = varying else {
            push(object, of_all.closed(rest));
            return Ok(true);
        };
        // Those of `oneOf` hold alone; of those of `anyOf`, any combination may. If more hold, more is evaluated, so the
        // constraint is weaker, and it suffices that the ones of a combination do.
        let combinations: Vec<usize> = match keyword {
            "oneOf" => (0..alternatives.len()).map(|at| 1 << at).collect(),
            _ if alternatives.len() > ALTERNATIVES_MAX => return Ok(false),
            _ => (1..1 << alternatives.len()).collect(),
        };
        let mut options = Vec::new();
        for combination in combinations {
            let (mut all, mut closed) = (Vec::new(), of_all.clone());
            for at in (0..alternatives.len()).filter(|at| combination >> at & 1 == 1) {
                all.push(self.copy(&alternatives[at])?);
                closed.extend(evaluated[at].clone());
            }
            all.push(self.copy(&closed.closed(rest))?);
            options.push(json!({"allOf": all}));
        }
        if keyword == "anyOf" {
            object.shift_remove("anyOf");
        }
        push(object, json!({"anyOf": options}));
        Ok(true)
    }

    fn properties_of(&self, schema: &Value, depth: usize) -> Option<Properties> {
        self.visit(1)?;
        match schema {
            Value::Bool(_) => Some(Properties::default()),
            Value::Object(object) if depth < DEPTH_MAX => {
                let evaluated = self.properties(object, depth + 1)?;
                // The caller merges them with its own.
                self.visit(evaluated.names.len() + evaluated.patterns.len())?;
                Some(evaluated)
            }
            _ => None,
        }
    }

    /// Returns the properties that an object evaluates; `None` if they depend on the value.
    fn properties(&self, object: &Map<String, Value>, depth: usize) -> Option<Properties> {
        let mut evaluated = Properties::default();
        let keys = |value: &Value| value.as_object().map(|map| map.keys().cloned().collect::<Vec<_>>());
        for (keyword, value) in object {
            match keyword.as_str() {
                "properties" => evaluated.names.extend(keys(value)?),
                "patternProperties" => evaluated.patterns.extend(keys(value)?),
                "additionalProperties" | "unevaluatedProperties" => evaluated.all = true,
                "$ref" => evaluated.extend(self.properties_of(self.target(value)?, depth)?),
                "$dynamicRef" | "$recursiveRef" => return None,
                "allOf" => {
                    for schema in value.as_array()? {
                        evaluated.extend(self.properties_of(schema, depth)?);
                    }
                }
                "anyOf" | "oneOf" => {
                    let each: Vec<Properties> = value
                        .as_array()?
                        .iter()
                        .map(|schema| self.properties_of(schema, depth))
                        .collect::<Option<_>>()?;
                    if each.windows(2).any(|pair| pair[0] != pair[1]) {
                        return None;
                    }
                    each.into_iter().take(1).for_each(|one| evaluated.extend(one));
                }
                "if" | "then" | "else" if self.properties_of(value, depth)? != Properties::default() => {
                    return None;
                }
                "dependentSchemas" => {
                    for schema in value.as_object()?.values() {
                        if self.properties_of(schema, depth)? != Properties::default() {
                            return None;
                        }
                    }
                }
                _ => {}
            }
        }
        Some(evaluated)
    }

    /// Constrains the items that nothing evaluates. Returns false if it is not known which.
    fn close_items(&self, object: &mut Map<String, Value>, rest: &Value) -> bool {
        let Some(Items { all, count }) = self.items(object, 0) else { return false };
        let any = vec![Value::Bool(true); count];
        match (all, count, self.dialect) {
            (true, ..) => {}
            (false, 0, _) => push(object, json!({"items": rest})),
            (false, _, Dialect::Draft2020) => push(object, json!({"prefixItems": any, "items": rest})),
            (false, ..) => push(object, json!({"items": any, "additionalItems": rest})),
        }
        true
    }

    fn items_of(&self, schema: &Value, depth: usize) -> Option<Items> {
        self.visit(1)?;
        match schema {
            Value::Bool(_) => Some(Items::default()),
            Value::Object(object) if depth < DEPTH_MAX => self.items(object, depth + 1),
            _ => None,
        }
    }

    /// Returns the items that an object evaluates; `None` if they depend on the value.
    fn items(&self, object: &Map<String, Value>, depth: usize) -> Option<Items> {
        let mut evaluated = Items::default();
        let mut extend = |other: Items| {
            evaluated.all |= other.all;
            evaluated.count = evaluated.count.max(other.count);
        };
        let first = |count| Items { all: false, count };
        for (keyword, value) in object {
            match keyword.as_str() {
                "prefixItems" if self.dialect == Dialect::Draft2020 => extend(first(value.as_array()?.len())),
                "items" => match value {
                    Value::Array(_) if self.dialect == Dialect::Draft2020 => return None,
                    Value::Array(schemas) => extend(first(schemas.len())),
                    _ => extend(Items { all: true, count: 0 }),
                },
                // Without items as a list, it has no effect.
                "additionalItems" if self.dialect == Dialect::Draft2020 => return None,
                "additionalItems" if matches!(object.get("items"), Some(Value::Array(_))) => {
                    extend(Items { all: true, count: 0 });
                }
                "unevaluatedItems" => extend(Items { all: true, count: 0 }),
                "$ref" => extend(self.items_of(self.target(value)?, depth)?),
                "contains" | "$dynamicRef" | "$recursiveRef" => return None,
                "allOf" => {
                    for schema in value.as_array()? {
                        extend(self.items_of(schema, depth)?);
                    }
                }
                "anyOf" | "oneOf" => {
                    let each: Vec<Items> = value
                        .as_array()?
                        .iter()
                        .map(|schema| self.items_of(schema, depth))
                        .collect::<Option<_>>()?;
                    if each.windows(2).any(|pair| pair[0] != pair[1]) {
                        return None;
                    }
                    each.into_iter().take(1).for_each(&mut extend);
                }
                "if" | "then" | "else" if self.items_of(value, depth)? != Items::default() => return None,
                "dependentSchemas" => {
                    for schema in value.as_object()?.values() {
                        if self.items_of(schema, depth)? != Items::default() {
                            return None;
                        }
                    }
                }
                _ => {}
            }
        }
        Some(evaluated)
    }

    fn target(&self, reference: &Value) -> Option<&Value> {
        self.references.resolve(reference.as_str()?)
    }
}
