//! References: the compiler follows plain pointers only.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::{LISTS, MAPS, ONE, copy, push};
use crate::GrammarError;

/// References of a schema that is one resource.
pub(crate) struct References<'a> {
    root: &'a Map<String, Value>,
    /// Schemas by their anchors.
    anchors: HashMap<&'a str, &'a Value>,
    /// Whether a subschema has an `$id` of its own, to which references within it are relative.
    nested: bool,
    /// Targets that no plain pointer names, by their names among `$defs`.
    pub(super) hoisted: Map<String, Value>,
    /// Names of the hoisted targets.
    names: HashMap<String, String>,
}

impl<'a> References<'a> {
    pub(crate) fn new(root: &'a Map<String, Value>) -> Self {
        let mut references =
            Self { root, anchors: HashMap::new(), nested: false, hoisted: Map::new(), names: HashMap::new() };
        references.collect(root, true);
        references
    }

    fn collect(&mut self, object: &'a Map<String, Value>, is_root: bool) {
        let nested = |keyword: &str| object.get(keyword).is_some_and(|id| !is_root && id.is_string());
        self.nested |= nested("$id") || nested("id") || (!is_root && object.contains_key("$schema"));
        let subschemas = ONE.iter().filter_map(|keyword| object.get(*keyword));
        let lists = LISTS.iter().filter_map(|keyword| object.get(*keyword)?.as_array()).flatten();
        let maps = MAPS.iter().filter_map(|keyword| object.get(*keyword)?.as_object());
        for schema in subschemas.chain(lists).chain(maps.flat_map(Map::values)) {
            let Value::Object(inner) = schema else { continue };
            for keyword in ["$anchor", "$dynamicAnchor"] {
                if let Some(name) = inner.get(keyword).and_then(Value::as_str) {
                    self.anchors.insert(name, schema);
                }
            }
            self.collect(inner, false);
        }
    }

    /// Returns the schema that a reference names; `None` if it is not within the schema, or not known to be.
    pub(crate) fn resolve(&self, reference: &str) -> Option<&'a Value> {
        let pointer = decode(reference.strip_prefix('#')?)?;
        if self.nested {
            return None;
        }
        let Some(path) = pointer.strip_prefix('/') else {
            return self.anchors.get(pointer.as_str()).copied();
        };
        let mut segments = path.split('/').map(|segment| segment.replace("~1", "/").replace("~0", "~"));
        let first = self.root.get(&segments.next()?)?;
        segments.try_fold(first, |value, segment| match value {
            Value::Object(object) => object.get(&segment),
            Value::Array(values) => values.get(segment.parse::<usize>().ok()?),
            _ => None,
        })
    }

    /// Rewrites the references of an object to plain pointers; adds the size of copied targets to `copied`.
    ///
    /// # Errors
    /// [`GrammarError::Refused`] if the copies become too large.
    pub(super) fn rewrite(
        &mut self,
        object: &mut Map<String, Value>,
        copied: &mut usize,
    ) -> Result<(), GrammarError> {
        if self.nested {
            return Ok(());
        }
        // Within one resource, what is dynamic refers to that resource.
        for keyword in ["$dynamicRef", "$recursiveRef"] {
            let known = object.get(keyword).and_then(Value::as_str);
            let known = known.filter(|reference| *reference == "#" || self.resolve(reference).is_some());
            let Some(reference) = known.map(str::to_owned) else { continue };
            object.remove(keyword);
            if object.contains_key("$ref") {
                push(object, json!({"$ref": reference}));
            } else {
                object.insert("$ref".to_owned(), reference.into());
            }
        }
        object.remove("$dynamicAnchor");
        object.remove("$recursiveAnchor");
        let Some(reference) = object.get("$ref").and_then(Value::as_str) else { return Ok(()) };
        let plain = reference == "#" || (reference.starts_with("#/") && !reference.contains(['%', '~']));
        if plain {
            return Ok(());
        }
        if let Some(known) = self.names.get(reference) {
            let pointer = format!("#/$defs/{known}");
            object.insert("$ref".to_owned(), pointer.into());
            return Ok(());
        }
        let Some(target) = self.resolve(reference) else { return Ok(()) };
        let target = copy(target, copied)?;
        let taken =
            |name: &str| self.root.get("$defs").is_some_and(|definitions| definitions.get(name).is_some());
        let Some(name) = (self.names.len()..).map(|at| format!("reference-{at}")).find(|name| !taken(name))
        else {
            return Ok(());
        };
        self.hoisted.insert(name.clone(), target);
        self.names.insert(reference.to_owned(), name.clone());
        object.insert("$ref".to_owned(), format!("#/$defs/{name}").into());
        Ok(())
    }
}

/// Decodes the percent-encoded bytes of a fragment.
fn decode(fragment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.as_bytes();
    while let Some((byte, tail)) = rest.split_first() {
        rest = tail;
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let (hex, tail) = rest.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()?);
        rest = tail;
    }
    String::from_utf8(bytes).ok()
}
