//! Schemas of numbers, strings and constants.

use serde_json::{Map, Value, json};

use crate::part::{Maker, Part};
use crate::{Json, patterns};

/// Characters that JSON, patterns or white space treat apart, and others.
pub(crate) const CHARACTERS: [char; 38] = [
    'a', 'b', 'z', 'A', '0', '9', '_', '-', ' ', '"', '\\', '/', '\n', '\t', '\r', '\u{8}', '\u{c}', '\u{b}',
    '\u{1}', '\u{1b}', '\0', '\u{7f}', 'é', '€', '😀', '\u{2028}', '\u{a0}', '\u{feff}', '\u{85}', '[', ']',
    '&', '~', '^', '.', 'x', '<', '\'',
];

/// Returns a JSON number; beyond 64 bits, the nearest double.
fn number(value: i128) -> Value {
    match (i64::try_from(value), u64::try_from(value)) {
        (Ok(value), _) => value.into(),
        (_, Ok(value)) => value.into(),
        _ => (value as f64).into(),
    }
}

fn integers(maker: &mut Maker, base: i128) -> Part {
    let near = base + maker.random.below(5) as i128 - 2;
    let low = if maker.once_in(2) { near } else { -near };
    let high = low + [0, 1, 2, 9, 10, 99, 1000, base / 2][maker.random.below(8)];
    let mut schema = Map::new();
    match maker.random.below(8) {
        0 | 1 => schema.insert("type".to_owned(), "number".into()),
        2 => None,
        3 => schema.insert("type".to_owned(), json!(["integer", "null"])),
        _ => schema.insert("type".to_owned(), "integer".into()),
    };
    let (least, most) = maker.pick(&[
        ("minimum", "maximum"),
        ("exclusiveMinimum", "exclusiveMaximum"),
        ("minimum", "exclusiveMaximum"),
    ]);
    match maker.random.below(6) {
        0 => {
            maker.kind("constant number");
            schema.insert("const".to_owned(), number(low));
        }
        1 => {
            maker.kind("constant number");
            schema.insert("enum".to_owned(), [number(low), number(high), number(low + 1)].into());
        }
        form => {
            maker.kind(if least == "minimum" { "inclusive bound" } else { "exclusive bound" });
            if form != 2 {
                schema.insert(least.to_owned(), number(low));
            }
            if form != 3 {
                schema.insert(most.to_owned(), number(high));
            }
        }
    }
    let edges = [low, high].into_iter().flat_map(|edge| (-2..=2).map(move |step| edge + step));
    let others = [0, -low, (low + high) / 2, i128::from(i64::MAX), 1 << 53];
    let mut values: Vec<Json> = edges.chain(others).map(Json::number).collect();
    values.extend([Json::Null, Json::number(format!("{low}.5"))]);
    Part::new(schema.into(), values)
}

pub(crate) fn small_integers(maker: &mut Maker) -> Part {
    let base = maker.random.below(300) as i128;
    integers(maker, base)
}

pub(crate) fn integers_of_32_bits(maker: &mut Maker) -> Part {
    integers(maker, 1 << 31)
}

pub(crate) fn integers_of_doubles(maker: &mut Maker) -> Part {
    let scale = maker.random.below(3);
    integers(maker, 1 << (53 + scale))
}

pub(crate) fn integers_of_64_bits(maker: &mut Maker) -> Part {
    let base = maker.pick(&[1 << 63, 1 << 60, 10_i128.pow(18), 1 << 62]);
    integers(maker, base)
}

pub(crate) fn larger_integers(maker: &mut Maker) -> Part {
    let base = maker.pick(&[1 << 64, 10_i128.pow(19), 10_i128.pow(30)]);
    integers(maker, base)
}

/// Bounds that generators of schemas write for the range of a type.
pub(crate) fn whole_ranges(maker: &mut Maker) -> Part {
    let safe = (1_i64 << 53) - 1;
    let (least, most) = maker.pick(&[
        (json!(i32::MIN), json!(i32::MAX)),
        (json!(-safe), json!(safe)),
        (json!(i64::MIN), json!(i64::MAX)),
        (json!(0), json!(u32::MAX)),
        (json!(0), json!(u64::MAX)),
        (json!(f64::from(f32::MIN)), json!(f64::from(f32::MAX))),
        (json!(f64::MIN), json!(f64::MAX)),
    ]);
    let kind = maker.pick(&["integer", "number"]);
    let mut schema = json!({"type": kind, "minimum": least, "maximum": most});
    if maker.once_in(4) {
        let keyword = maker.pick(&["minimum", "maximum"]);
        schema.as_object_mut().unwrap().remove(keyword);
    }
    let edges = [
        i128::from(i32::MAX),
        i128::from(safe),
        i128::from(i64::MAX),
        i128::from(u32::MAX),
        i128::from(u64::MAX),
    ];
    let edges = edges.into_iter().flat_map(|edge| [edge, edge + 1, -edge, -edge - 1, -edge - 2]);
    let mut values: Vec<Json> = edges.chain([0, -1, 7]).map(Json::number).collect();
    values.push(Json::number("1.5"));
    Part::new(schema, values)
}

/// Returns a number of ten thousandths without trailing zeros.
fn decimal(scaled: i64) -> String {
    let text = format!(
        "{}{}.{:04}",
        if scaled < 0 { "-" } else { "" },
        scaled.abs() / 10_000,
        scaled.abs() % 10_000
    );
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// Bounds with decimals, often with the same integer part.
pub(crate) fn number_bounds(maker: &mut Maker) -> Part {
    let edge = |maker: &mut Maker| {
        let unit = maker.pick(&[10_000, 1_000, 100, 10, 1]);
        (maker.random.below(60_000) as i64 - 30_000) / unit * unit
    };
    let low = edge(maker);
    let high = if maker.once_in(2) { low + maker.pick(&[1, 10, 25, 100, 5_000, 9_999]) } else { edge(maker) };
    let (low, high) = (low.min(high), low.max(high));
    let least = maker.pick(&["minimum", "exclusiveMinimum"]);
    let most = maker.pick(&["maximum", "exclusiveMaximum"]);
    let mut schema = Map::new();
    if !maker.once_in(4) {
        schema.insert("type".to_owned(), "number".into());
    }
    let form = maker.random.below(4);
    if form != 0 {
        schema.insert(least.to_owned(), parsed(&decimal(low)));
    }
    if form != 1 {
        schema.insert(most.to_owned(), parsed(&decimal(high)));
    }
    let mut schema = Value::Object(schema);
    if maker.once_in(4) {
        // The bounds stand in different schemas.
        let fields = schema.as_object().unwrap();
        let parts: Vec<Value> =
            fields.iter().map(|(keyword, value)| json!({keyword.as_str(): value})).collect();
        schema = json!({"allOf": parts});
    }
    let mut values = Vec::new();
    for edge in [low, high] {
        let steps = [0, 1, -1, 10, -10, 100, -100, 1_000, -1_000];
        values.extend(steps.iter().map(|step| Json::number(decimal(edge + step))));
        values.extend([10, 100, 1_000, 10_000].iter().map(|unit| Json::number(decimal(edge / unit * unit))));
    }
    values.extend([0, (low + high) / 2, -low].map(|edge| Json::number(decimal(edge))));
    Part::new(schema, values)
}

pub(crate) fn multiples(maker: &mut Maker) -> Part {
    let units = [
        10_000, 20_000, 30_000, 70_000, 150_000, 600_000, 40_960_000, 5_000, 2_500, 1_000, 100, 500, 25_000,
        15_000,
    ];
    let unit = maker.pick(&units);
    let mut schema = json!({"multipleOf": parsed(&decimal(unit))});
    if maker.once_in(2) {
        schema["type"] = maker.pick(&["integer", "number"]).into();
    }
    let low = maker.random.below(40) as i64 * unit - 20 * unit + maker.pick(&[0, 0, 1, 10_000]);
    if maker.once_in(2) {
        schema["minimum"] = parsed(&decimal(low));
    }
    if maker.once_in(3) {
        schema["exclusiveMaximum"] = parsed(&decimal(low + unit * 3));
    }
    let other = maker.pick(&units);
    if maker.once_in(4) {
        schema["allOf"] = json!([{"multipleOf": parsed(&decimal(other))}]);
    }
    let nth = low / unit;
    let mut values = Vec::new();
    for value in [low, nth * unit, (nth + 1) * unit, (nth + 2) * unit, 0, -unit, unit * other / 10_000, other]
    {
        values.extend([0, 1, -1, 10_000].iter().map(|step| Json::number(decimal(value + step))));
    }
    Part::new(schema, values)
}

/// Returns a string of a number of characters.
fn string(maker: &mut Maker, length: usize) -> String {
    (0..length).map(|_| maker.pick(&CHARACTERS)).collect()
}

pub(crate) fn lengths(maker: &mut Maker) -> Part {
    let low = maker.random.below(4);
    let high = low + maker.random.below(3);
    let mut schema = json!({"type": "string"});
    if !maker.once_in(3) {
        schema["minLength"] = low.into();
    }
    if !maker.once_in(3) {
        schema["maxLength"] = high.into();
    }
    let lengths = [low.saturating_sub(1), low, high, high + 1];
    let mut values: Vec<Json> = lengths.iter().map(|length| Json::Text(string(maker, *length))).collect();
    values.extend([Json::text("é".repeat(low)), Json::text("\"\\".repeat(high)), Json::text("")]);
    Part::new(schema, values)
}

pub(crate) fn negated_classes(maker: &mut Maker) -> Part {
    let (pattern, values) = patterns::negated_class(maker);
    Part::new(json!({"type": "string", "pattern": pattern}), values)
}

pub(crate) fn other_patterns(maker: &mut Maker) -> Part {
    let (pattern, values) = patterns::pattern(maker);
    let mut schema = json!({"type": "string", "pattern": pattern});
    if maker.once_in(4) {
        schema["maxLength"] = (2 + maker.random.below(4)).into();
    }
    Part::new(schema, values)
}

/// Formats with texts that have them.
pub(crate) const FORMATTED: [(&str, &[&str]); 12] = [
    ("date-time", &["2026-11-29T14:05:59Z", "2024-02-29T00:00:00.5+05:30"]),
    ("date", &["2026-11-29", "2024-02-29"]),
    ("time", &["14:05:59Z", "00:00:00+01:00"]),
    ("duration", &["P1DT12H", "PT5M", "P3W"]),
    ("email", &["a@example.com", "a.b+c@x-y.org"]),
    ("hostname", &["example.com", "xn--a.b"]),
    ("ipv4", &["127.0.0.1", "255.255.255.255"]),
    ("ipv6", &["::1", "2001:db8::8a2e:370:7334"]),
    ("uuid", &["123e4567-e89b-12d3-a456-426614174000"]),
    ("uri", &["https://example.com/a?b=c#d", "urn:isbn:1"]),
    ("json-pointer", &["/a/~0/b", "/"]),
    ("relative-json-pointer", &["1/a", "0#"]),
];

pub(crate) fn known_formats(maker: &mut Maker) -> Part {
    let (format, values) = maker.pick(&FORMATTED);
    Part::new(
        json!({"type": "string", "format": format}),
        values.iter().map(|text| Json::text(*text)).collect(),
    )
}

pub(crate) fn unknown_formats(maker: &mut Maker) -> Part {
    let format =
        maker.pick(&["password", "binary", "byte", "regex", "int64", "uri-template", "phone", "", "unknown"]);
    let mut schema = json!({"format": format});
    if !maker.once_in(3) {
        schema["type"] = "string".into();
    }
    Part::new(schema, vec![Json::text("secret"), Json::text("("), Json::text(""), Json::number(3)])
}

pub(crate) fn listed_strings(maker: &mut Maker) -> Part {
    let count = 1 + maker.random.below(3);
    let texts: Vec<String> = (0..count)
        .map(|_| {
            let length = maker.random.below(4);
            string(maker, length)
        })
        .collect();
    let mut schema = json!({"enum": texts});
    if maker.once_in(2) {
        schema["type"] = "string".into();
    }
    let mut values: Vec<Json> = texts.iter().map(Json::text).collect();
    values.extend([
        Json::text(format!("{}a", texts[0])),
        Json::text(texts[0].chars().skip(1).collect::<String>()),
        Json::Null,
    ]);
    Part::new(schema, values)
}

pub(crate) fn listed_values(maker: &mut Maker) -> Part {
    let all = [
        json!(null),
        json!(true),
        json!(false),
        json!(0),
        json!(1.5),
        json!(-3),
        json!(1e3),
        json!("a"),
        json!("1"),
        json!("null"),
        json!([]),
        json!({}),
        json!([1, "a"]),
        json!({"b": 1, "a": [null]}),
    ];
    let count = 1 + maker.random.below(4);
    let chosen: Vec<Value> = (0..count).map(|_| maker.pick(&all)).collect();
    let mut schema = if count == 1 { json!({"const": chosen[0]}) } else { json!({"enum": chosen}) };
    if maker.once_in(4) {
        schema["type"] =
            maker.pick(&[json!("string"), json!(["number", "null"]), json!("integer"), json!("object")]);
    }
    let mut values: Vec<Json> = chosen.iter().map(Json::from).collect();
    values.extend((0..4).map(|_| Json::from(&maker.pick(&all))));
    Part::new(schema, values)
}

/// Types, alone and in lists, with keywords for some of them.
pub(crate) fn types(maker: &mut Maker) -> Part {
    let all = ["null", "boolean", "integer", "number", "string", "array", "object"];
    let first = maker.pick(&all);
    let second = maker.pick(&all);
    let mut schema = if maker.once_in(2) || first == second {
        json!({"type": first})
    } else {
        json!({"type": [first, second]})
    };
    for (keyword, value) in [("minLength", 1), ("maxItems", 1), ("maxProperties", 1), ("minimum", 0)] {
        if maker.once_in(4) {
            schema[keyword] = value.into();
        }
    }
    let texts = [
        "null",
        "true",
        "0",
        "-1",
        "1.5",
        "\"\"",
        "\"a\"",
        "[]",
        "[1,2]",
        "{}",
        r#"{"a":1}"#,
        r#"{"a":1,"b":2}"#,
    ];
    Part::new(schema, texts.iter().filter_map(|text| Json::parse(text)).collect())
}
