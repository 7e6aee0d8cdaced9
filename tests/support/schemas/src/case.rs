//! Generated schemas with their values and texts.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::part::{Maker, Part};
use crate::{Json, containers, scalars};

/// Makes a part of one kind.
type Make = fn(&mut Maker) -> Part;

/// Kinds of schemas that have no other schemas in them.
const SCALARS: [(&str, Make); 17] = [
    ("integers", scalars::small_integers),
    ("integers around 2^31", scalars::integers_of_32_bits),
    ("integers around 2^53", scalars::integers_of_doubles),
    ("integers around 2^63", scalars::integers_of_64_bits),
    ("integers beyond 2^63", scalars::larger_integers),
    ("bounds of whole ranges", scalars::whole_ranges),
    ("bounds with decimals", scalars::number_bounds),
    ("multipleOf", scalars::multiples),
    ("minLength, maxLength", scalars::lengths),
    ("negated classes", scalars::negated_classes),
    ("patterns", scalars::other_patterns),
    ("known formats", scalars::known_formats),
    ("unknown formats", scalars::unknown_formats),
    ("listed strings", scalars::listed_strings),
    ("listed values", scalars::listed_values),
    ("types", scalars::types),
    ("any value", any_value),
];

/// Kinds of schemas that have others in them.
const CONTAINERS: [(&str, Make); 18] = [
    ("properties", containers::properties),
    ("additionalProperties", containers::additional_properties),
    ("patternProperties", containers::pattern_properties),
    ("propertyNames", containers::property_names),
    ("minProperties, maxProperties", containers::property_counts),
    ("dependencies", containers::dependencies),
    ("items", containers::items),
    ("prefixItems", containers::prefix_items),
    ("uniqueItems", containers::unique_items),
    ("contains", containers::contains),
    ("allOf", containers::all_of),
    ("anyOf", containers::any_of),
    ("oneOf, exclusive", containers::one_of_exclusive),
    ("oneOf", containers::one_of),
    ("not", containers::not),
    ("if", containers::conditional),
    ("$ref", containers::reference),
    ("$ref, recursive", containers::recursion),
];

/// Names of all kinds of schemas.
pub const KINDS: [&str; 39] = {
    let mut names = [""; 39];
    let mut at = 0;
    while at < SCALARS.len() {
        names[at] = SCALARS[at].0;
        at += 1;
    }
    while at < SCALARS.len() + CONTAINERS.len() {
        names[at] = CONTAINERS[at - SCALARS.len()].0;
        at += 1;
    }
    names[at] = "inclusive bound";
    names[at + 1] = "exclusive bound";
    names[at + 2] = "dependentRequired";
    names[at + 3] = "dependentSchemas";
    names
};

fn any_value(maker: &mut Maker) -> Part {
    let schema = maker.pick(&[json!(true), json!({}), json!({"description": "anything"})]);
    let texts = ["null", "1e400", "-0.5", r#""\u001b""#, r#"{"a":[{}]}"#];
    Part::new(schema, texts.iter().filter_map(|text| Json::parse(text)).collect())
}

/// Makes a part of any kind.
pub(crate) fn any(maker: &mut Maker) -> Part {
    let (name, make) =
        if maker.depth > 0 && maker.once_in(4) { maker.pick(&CONTAINERS) } else { maker.pick(&SCALARS) };
    maker.kind(name);
    within(maker, make)
}

/// Makes a part one level deeper.
fn within(maker: &mut Maker, make: Make) -> Part {
    let depth = maker.depth;
    maker.depth = depth.saturating_sub(1);
    let part = make(maker);
    maker.depth = depth;
    part
}

/// Puts a part in the place of another schema.
fn wrapped(maker: &mut Maker, part: Part) -> Part {
    match maker.random.below(6) {
        0 => {
            let schema = json!({"type": "object", "properties": {"p": part.schema}, "required": ["p"], "additionalProperties": false});
            Part::new(
                schema,
                part.values.into_iter().map(|value| Json::object([("p".to_owned(), value)])).collect(),
            )
        }
        1 => {
            maker.kind("anyOf");
            let mut values = part.values;
            values.push(Json::Null);
            Part::new(json!({"anyOf": [part.schema, {"type": "null"}]}), values)
        }
        2 => Part::new(
            json!({"type": "array", "items": part.schema}),
            part.values.into_iter().map(|value| Json::Array(vec![value])).collect(),
        ),
        3 => {
            maker.kind("$ref");
            Part::new(maker.define(part.schema), part.values)
        }
        _ => part,
    }
}

/// Schema with values at its edges and texts.
#[derive(Debug, Clone)]
pub struct Case {
    /// Schema.
    pub schema: Value,
    /// Kinds of schemas in it.
    pub kinds: BTreeSet<&'static str>,
    /// Values, valid or not, with the names of objects in the order of the schema.
    pub values: Vec<Json>,
    /// Texts that say some of these values otherwise, or nearly.
    pub texts: Vec<String>,
}

impl Case {
    /// Values of a case.
    const VALUES_MAX: usize = 16;

    /// Returns the case of a seed. Seeds in a row take the kinds in turn.
    pub fn new(seed: u64) -> Self {
        let mut maker = Maker::new(seed);
        let at = (seed % (SCALARS.len() + CONTAINERS.len()) as u64) as usize;
        let (name, make) = SCALARS.get(at).copied().unwrap_or_else(|| CONTAINERS[at - SCALARS.len()]);
        maker.kind(name);
        let mut part = make(&mut maker);
        for _ in 0..maker.random.below(3) {
            part = wrapped(&mut maker, part);
        }
        let mut values: Vec<Json> = Vec::new();
        for value in maker.some(&part, 2 * Self::VALUES_MAX) {
            if values.len() < Self::VALUES_MAX && !values.contains(&value) {
                values.push(value);
            }
        }
        let texts = (0..4).map(|_| altered(&mut maker, &values)).collect();
        let Maker { kinds, definitions, .. } = maker;
        Self { schema: with_definitions(part.schema, definitions), kinds, values, texts }
    }

    /// Returns the case of a tool's parameters: an object with named properties.
    pub fn of_parameters(seed: u64) -> Self {
        let mut maker = Maker::new(seed);
        let at = (seed % (SCALARS.len() + CONTAINERS.len()) as u64) as usize;
        let (name, make) = SCALARS.get(at).copied().unwrap_or_else(|| CONTAINERS[at - SCALARS.len()]);
        maker.kind(name);
        let first = make(&mut maker);
        let second = any(&mut maker);
        let required = if maker.once_in(2) { json!(["p", "o"]) } else { json!(["p"]) };
        let schema = json!({"type": "object", "properties": {"p": first.schema, "o": second.schema}, "required": required,
            "additionalProperties": false});
        let mut values = Vec::new();
        for value in maker.some(&first, Self::VALUES_MAX) {
            let mut fields = vec![("p".to_owned(), value)];
            if maker.once_in(2) {
                fields.push(("o".to_owned(), maker.value(&second)));
            }
            values.push(Json::Object(fields));
        }
        let Maker { kinds, definitions, .. } = maker;
        Self { schema: with_definitions(schema, definitions), kinds, values, texts: Vec::new() }
    }
}

/// Returns a schema with the definitions that it refers to.
fn with_definitions(schema: Value, definitions: Vec<(String, Value)>) -> Value {
    let mut schema = match schema {
        Value::Object(object) => object,
        other => Map::from_iter([("allOf".to_owned(), json!([other]))]),
    };
    if !definitions.is_empty() {
        schema.insert("$defs".to_owned(), Value::Object(definitions.into_iter().collect()));
    }
    schema.into()
}

/// Returns the text of a value with something written otherwise, or changed.
fn altered(maker: &mut Maker, values: &[Json]) -> String {
    let text = if values.is_empty() { "null".to_owned() } else { maker.pick(values).to_string() };
    let characters: Vec<(usize, char)> = text.char_indices().collect();
    let (at, c) = characters[maker.random.below(characters.len())];
    let after = &text[at + c.len_utf8()..];
    let before = &text[..at];
    match maker.random.below(7) {
        // As an escape.
        0 | 1 if c as u32 > 31 && !"{}[],:".contains(c) => {
            format!("{before}\\u{:04x}{after}", c as u32 & 0xffff)
        }
        2 => format!(
            "{before}{}{after}",
            maker.pick(&["\\\"", "\\\\", "\\/", "\\u0022", "\\n", "0", " ", "é"])
        ),
        3 => format!("{before}{after}"),
        // Numbers in other forms.
        4 if c.is_ascii_digit() => {
            format!("{before}{c}{}{after}", maker.pick(&[".0", "e0", "E+1", "0", ".5"]))
        }
        // A repeated name.
        5 if text.starts_with('{') && text.len() > 2 => {
            let name = text[1..].split_once("\":").map_or("\"zz", |(name, _)| name);
            format!("{},{name}\":{}}}", &text[..text.len() - 1], maker.pick(&["null", "1", "\"x\"", "[]"]))
        }
        _ => {
            let end = maker.pick(&["", " ", "1", "}", "null"]);
            format!("{text}{end}")
        }
    }
}
