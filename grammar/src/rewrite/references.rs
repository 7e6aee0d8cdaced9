//! References: the compiler follows plain pointers only.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::{Dialect, LISTS, MAPS, ONE, copy, push};
use crate::GrammarError;

/// References of a schema that is one resource.
pub(crate) struct References<'a> {
    root: &'a Map<String, Value>,
    /// Schemas by their anchors.
    anchors: HashMap<&'a str, &'a Value>,
    /// Whether a subschema has an `$id` of its own, to which references within it are relative.
    nested: bool,
    /// First reference within such a subschema.
    relative: Option<&'a str>,
    /// Targets that no plain pointer names, by their names among `$defs`.
    pub(super) hoisted: Map<String, Value>,
    /// Names of the hoisted targets.
    names: HashMap<String, String>,
}

impl<'a> References<'a> {
    pub(crate) fn new(root: &'a Map<String, Value>) -> Self {
        let mut references = Self {
            root,
            anchors: HashMap::new(),
            nested: false,
            relative: None,
            hoisted: Map::new(),
            names: HashMap::new(),
        };
        references.collect(root, true, false);
        references
    }

    fn collect(&mut self, object: &'a Map<String, Value>, is_root: bool, is_nested: bool) {
        let nested = |keyword: &str| object.get(keyword).is_some_and(|id| !is_root && id.is_string());
        let is_draft4 = Dialect::of(self.root) == Dialect::Draft4;
        let is_nested = is_nested || nested("$id") || (nested("id") && is_draft4);
        self.nested |= is_nested || (!is_root && object.contains_key("$schema"));
        let reference = object.get("$ref").and_then(Value::as_str);
        self.relative = self.relative.or(reference.filter(|_| is_nested));
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
            self.collect(inner, false, is_nested);
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

    /// Whether a pointer leads over keywords that hold schemas, so that its target is rewritten in its place.
    fn is_within(&self, pointer: &str) -> bool {
        let mut segments = pointer.split('/');
        let mut place = self.root.get(segments.next().unwrap_or_default());
        let mut keyword = pointer.split('/').next().unwrap_or_default();
        loop {
            // A keyword, and what it holds.
            let schema = match place {
                Some(Value::Array(schemas)) if LISTS.contains(&keyword) => {
                    segments.next().and_then(|at| schemas.get(at.parse::<usize>().ok()?))
                }
                Some(Value::Object(schemas)) if MAPS.contains(&keyword) => {
                    segments.next().and_then(|name| schemas.get(name))
                }
                Some(schema) if ONE.contains(&keyword) => Some(schema),
                _ => return false,
            };
            let Some(next) = segments.next() else { return schema.is_some() };
            keyword = next;
            place = schema.and_then(|schema| schema.get(next));
        }
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
        if let Some(reference) = self.relative {
            return Err(GrammarError::Refused(format!(
                "$ref {reference} stands in a part of the schema with an $id of its own, to which it is relative; leave out that $id"
            )));
        }
        if self.nested {
            return Ok(());
        }
        // Within one resource, what is dynamic refers to that resource.
        for keyword in ["$dynamicRef", "$recursiveRef"] {
            let known = object.get(keyword).and_then(Value::as_str);
            let known = known.filter(|reference| *reference == "#" || self.resolve(reference).is_some());
            let Some(reference) = known.map(str::to_owned) else { continue };
            object.shift_remove(keyword);
            if object.contains_key("$ref") {
                push(object, json!({"$ref": reference}));
            } else {
                object.insert("$ref".to_owned(), reference.into());
            }
        }
        object.shift_remove("$dynamicAnchor");
        object.shift_remove("$recursiveAnchor");
        let Some(reference) = object.get("$ref").and_then(Value::as_str) else { return Ok(()) };
        let plain = |pointer: &str| !pointer.contains(['%', '~']) && self.is_within(pointer);
        if reference == "#" || reference.strip_prefix("#/").is_some_and(plain) {
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
