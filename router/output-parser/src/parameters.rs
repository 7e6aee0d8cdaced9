//! Parameters of a tool, as the parser and the grammar of calls with a tag for each see them.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::tool_types::{Budget, ParameterKind};

/// Maximum parts of a schema that are looked at for its parameters.
const PARTS_MAX: u32 = 256;

/// Maximum further schemas of properties that several parts name.
const MERGES_MAX: u32 = 4096;
/// Maximum comparisons of names with the properties of several parts that have `additionalProperties`.
const COMPARISONS_MAX: usize = 100_000;
/// Maximum values and bytes in the schemas that are copied into an `allOf`.
const COPIED_MAX: usize = 1 << 18;

/// Keywords about an object as a whole, which tags for single parameters cannot keep.
const OF_THE_WHOLE: [&str; 15] = [
    "anyOf",
    "oneOf",
    "not",
    "if",
    "enum",
    "const",
    "patternProperties",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "minProperties",
    "maxProperties",
    "$dynamicRef",
    "$recursiveRef",
];

/// Returns the part of a document that a reference within it names.
pub(crate) fn resolved<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    let fragment = reference.strip_prefix('#')?;
    match root.pointer(fragment) {
        None if fragment.contains('%') => root.pointer(&decoded(fragment)?),
        target => target,
    }
}

/// Decodes the percent-encoded bytes of a fragment.
fn decoded(fragment: &str) -> Option<String> {
    let mut pieces = fragment.split('%');
    let mut bytes = pieces.next()?.as_bytes().to_vec();
    for piece in pieces {
        let (hex, rest) = piece.split_at_checked(2)?;
        bytes.push(u8::from_str_radix(hex, 16).ok()?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

/// Parameter of a tool.
#[derive(Debug)]
pub(crate) struct Parameter<'a> {
    pub(crate) name: &'a str,
    pub(crate) schema: Cow<'a, Value>,
    /// How its values are written between tags.
    pub(crate) kind: ParameterKind,
    /// Whether values of [JSON](ParameterKind::Json) may be text, too.
    pub(crate) has_texts: bool,
}

/// Parameters of a tool: the properties of its schema, those behind the schema's `$ref`, and those of `allOf`.
#[derive(Debug, Default)]
pub(crate) struct Parameters<'a> {
    /// In the order of the schema.
    pub(crate) all: Vec<Parameter<'a>>,
    /// Names of the required ones.
    pub(crate) required: BTreeSet<&'a str>,
    /// First keyword that cannot be enforced parameter by parameter, or whose schemas are too large to be combined.
    pub(crate) not_kept: Option<&'static str>,
}

impl<'a> Parameters<'a> {
    /// Reads the schema of a tool's parameters. The work is linear in the size of the schema: references and `allOf` combine a bounded number of schemas.
    pub(crate) fn of_schema(schema: &'a Value) -> Self {
        let mut reader = Reader { merges_left: MERGES_MAX, ..Reader::default() };
        reader.add(schema, schema, &mut { PARTS_MAX });
        for name in reader.required.clone() {
            if !reader.places.contains_key(name) {
                reader.property(name, &Value::Bool(true));
            }
        }
        reader.restrict();
        reader.parameters(schema)
    }
}

/// Reader of one schema.
#[derive(Default)]
struct Reader<'a> {
    /// Names in their order, each with the schemas that hold together.
    properties: Vec<(&'a str, Vec<&'a Value>)>,
    /// Indices of the names.
    places: BTreeMap<&'a str, usize>,
    required: BTreeSet<&'a str>,
    not_kept: Option<&'static str>,
    /// Names of the properties of a part, with its `additionalProperties`.
    others: Vec<(BTreeSet<&'a str>, &'a Value)>,
    /// Further schemas of properties that may still be added.
    merges_left: u32,
}

impl<'a> Reader<'a> {
    /// Adds a schema of a property; returns whether there was room for it.
    fn property(&mut self, name: &'a str, schema: &'a Value) -> bool {
        let Some(place) = self.places.get(name) else {
            self.places.insert(name, self.properties.len());
            self.properties.push((name, vec![schema]));
            return true;
        };
        let Some(left) = self.merges_left.checked_sub(1) else {
            self.not_kept = Some("allOf");
            return false;
        };
        self.merges_left = left;
        self.properties[*place].1.push(schema);
        true
    }

    fn add(&mut self, schema: &'a Value, root: &'a Value, left: &mut u32) {
        let (Some(object), Some(fewer)) = (schema.as_object(), left.checked_sub(1)) else {
            if *schema != Value::Bool(true) {
                self.not_kept = Some("allOf");
            }
            return;
        };
        *left = fewer;
        self.check(object);
        let properties = object.get("properties").and_then(Value::as_object);
        for (name, schema) in properties.into_iter().flatten() {
            if !self.property(name, schema) {
                *left = 0;
                return;
            }
        }
        let required = object.get("required").and_then(Value::as_array);
        self.required.extend(required.into_iter().flatten().filter_map(Value::as_str));
        let others = object.get("additionalProperties").filter(|others| **others != Value::Bool(true));
        if let Some(others) = others {
            let names = properties.into_iter().flat_map(Map::keys).map(String::as_str).collect();
            self.others.push((names, others));
        }
        if let Some(reference) = object.get("$ref").and_then(Value::as_str) {
            match resolved(root, reference) {
                Some(target) => self.add(target, root, left),
                None => self.not_kept = Some("$ref"),
            }
        }
        for part in object.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            self.add(part, root, left);
            if *left == 0 {
                self.not_kept = Some("allOf");
                return;
            }
        }
    }

    /// Notes the keywords that cannot be enforced parameter by parameter.
    fn check(&mut self, object: &Map<String, Value>) {
        let has = |keyword: &&&str| object.contains_key(**keyword);
        self.not_kept = self.not_kept.or(OF_THE_WHOLE.iter().find(has).copied());
        let is_object = match object.get("type") {
            None => true,
            Some(Value::Array(names)) => names.iter().any(|name| name == "object"),
            Some(name) => name == "object",
        };
        if !is_object {
            self.not_kept = Some("type");
        }
    }

    /// Adds the `additionalProperties` of each part to the properties that the part does not name.
    fn restrict(&mut self) {
        let names: Vec<&str> = self.properties.iter().map(|(name, _)| *name).collect();
        let others = std::mem::take(&mut self.others);
        if others.len() > 1 && others.len() * names.len() > COMPARISONS_MAX {
            self.not_kept = Some("additionalProperties");
            return;
        }
        for (named, schema) in others {
            for name in names.iter().filter(|name| !named.contains(*name)) {
                if !self.property(name, schema) {
                    return;
                }
            }
        }
    }

    fn parameters(mut self, root: &'a Value) -> Parameters<'a> {
        let (mut copies_left, mut budget) = (COPIED_MAX, Budget::default());
        let mut all = Vec::with_capacity(self.properties.len());
        for (name, schemas) in std::mem::take(&mut self.properties) {
            let Some(schema) = all_of(&schemas, &mut copies_left) else {
                self.not_kept = Some("allOf");
                continue;
            };
            if *schema == Value::Bool(false) && !self.required.contains(name) {
                continue;
            }
            let (kind, has_texts) = ParameterKind::of_schema(&schema, root, &mut budget);
            all.push(Parameter { name, schema, kind, has_texts });
        }
        if budget.is_exhausted() {
            self.not_kept = Some("enum");
        }
        Parameters { all, required: self.required, not_kept: self.not_kept }
    }
}

/// Returns the schema of what all of some schemas allow; `None` if they are too large to be copied.
fn all_of<'a>(schemas: &[&'a Value], left: &mut usize) -> Option<Cow<'a, Value>> {
    let rest: Vec<&'a Value> =
        schemas.iter().copied().filter(|schema| **schema != Value::Bool(true)).collect();
    match rest.as_slice() {
        [] => Some(Cow::Owned(Value::Bool(true))),
        [only] => Some(Cow::Borrowed(*only)),
        several if several.contains(&&Value::Bool(false)) => Some(Cow::Owned(Value::Bool(false))),
        several => {
            several.iter().all(|schema| takes(schema, left)).then(|| Cow::Owned(json!({"allOf": several})))
        }
    }
}

/// Subtracts the number of values in a schema and the bytes of its texts; returns whether there were as many left.
fn takes(schema: &Value, left: &mut usize) -> bool {
    let own = 1 + schema.as_str().map_or(0, str::len);
    let Some(fewer) = left.checked_sub(own) else { return false };
    *left = fewer;
    match schema {
        Value::Object(object) => object.iter().all(|(key, value)| {
            let fewer = left.checked_sub(key.len());
            *left = fewer.unwrap_or(0);
            fewer.is_some() && takes(value, left)
        }),
        Value::Array(values) => values.iter().all(|value| takes(value, left)),
        _ => true,
    }
}
