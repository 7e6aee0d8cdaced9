//! Fields of an API's request bodies: a table with the fate of each, and the reader that applies it.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

use crate::metrics as names;
use crate::outcome::Outcome;
use crate::protocols::http::integers::{TokenIds, integer};
use crate::request::escapes;

/// Fate of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It has its documented effect.
    Honoured,
    /// It is accepted without effect, and counted.
    Ignored,
    /// A request with it is refused, unless its value is null, false or empty.
    Refused,
}

/// Field of a request body.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Field {
    pub(crate) name: &'static str,
    pub(crate) fate: Fate,
    /// Range or deviation of an honoured field, reason of an ignored or refused one.
    pub(crate) note: &'static str,
}

/// Honoured field.
pub(crate) const fn honoured(name: &'static str, note: &'static str) -> Field {
    Field { name, fate: Fate::Honoured, note }
}

/// Ignored field.
pub(crate) const fn ignored(name: &'static str, note: &'static str) -> Field {
    Field { name, fate: Fate::Ignored, note }
}

/// Refused field.
pub(crate) const fn refused(name: &'static str, note: &'static str) -> Field {
    Field { name, fate: Fate::Refused, note }
}

/// Fields of an API.
#[derive(Debug)]
pub(crate) struct FieldTable {
    /// Name of the API in metrics and in the documentation.
    pub(crate) api: &'static str,
    pub(crate) fields: &'static [&'static [Field]],
    /// Fields of other APIs that would constrain the output, and are refused where this one does not have them.
    pub(crate) elsewhere: &'static [Field],
}

impl FieldTable {
    /// Returns all fields.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &'static Field> {
        self.fields.iter().flat_map(|part| part.iter())
    }

    /// Number of bytes of an invalid value that an error message quotes.
    const QUOTED_BYTES: usize = 40;

    /// Reads a body. Unknown fields are counted and skipped.
    ///
    /// # Errors
    /// The body is not a JSON object, has too many fields, or a refused one.
    pub(crate) fn read<'a>(&'static self, body: &'a [u8]) -> Result<Fields<'a>, Outcome> {
        let text = text_of(body)?;
        if text.is_empty() {
            return Err(Outcome::invalid("the request has no body; send a JSON object"));
        }
        let Object(entries) = serde_json::from_str(text).map_err(|error| {
            Outcome::Invalid(if error.is_data() {
                format!("the body must be a JSON object: {error}")
            } else {
                format!("the body is not valid JSON: {error}")
            })
        })?;
        let mut fields = Fields { values: Vec::new() };
        for (name, value) in entries {
            let known = self.iter().chain(self.elsewhere).find(|field| field.name == name);
            let Some(field) = known else {
                self.count("unknown");
                continue;
            };
            match field.fate {
                Fate::Honoured => fields.values.push((field.name, value)),
                Fate::Ignored if !is_empty(value) => self.count(field.name),
                Fate::Refused if !is_empty(value) => {
                    return Err(Outcome::field(field.name, format!("{name} is refused: {}", field.note)));
                }
                _ => {}
            }
        }
        Ok(fields)
    }

    /// Counts a field that has no effect.
    pub(crate) fn count(&self, field: &'static str) {
        metrics::counter!(names::HTTP_IGNORED_FIELDS, "api" => self.api, "field" => field).increment(1);
    }
}

/// Returns the text of a body, without a byte order mark.
fn text_of(body: &[u8]) -> Result<&str, Outcome> {
    let body = body.strip_prefix(b"\xef\xbb\xbf").unwrap_or(body);
    // JSON begins with an ASCII character, of which UTF-16 and UTF-32 have bytes that are zero.
    if matches!(body, [0xfe, 0xff, ..] | [0xff, 0xfe, ..] | [0, _, ..] | [_, 0, ..]) {
        return Err(Outcome::invalid("the body is encoded in UTF-16 or UTF-32; send it in UTF-8"));
    }
    std::str::from_utf8(body).map_err(|error| {
        let at = error.valid_up_to();
        Outcome::Invalid(format!("the body is not UTF-8: byte {at} is {:#04x}; send it in UTF-8", body[at]))
    })
}

/// Whether a value is the same as an absent one: null, false, or an empty string, array or object.
pub(crate) fn is_empty(value: &RawValue) -> bool {
    let text = value.get();
    match text.as_bytes() {
        b"null" | b"false" | b"\"\"" => true,
        [b'[', inner @ .., b']'] | [b'{', inner @ .., b'}'] => inner.iter().all(u8::is_ascii_whitespace),
        _ => false,
    }
}

/// Object with the texts of its values.
pub(crate) struct Object<'a>(pub(crate) Vec<(Cow<'a, str>, &'a RawValue)>);

/// Maximum fields of a request body, the unknown ones included.
const FIELDS_MAX: usize = 256;

impl<'de: 'a, 'a> Deserialize<'de> for Object<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Object<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object<'de>, A::Error> {
                let mut entries = Vec::new();
                while let Some(key) = map.next_key::<Cow<'de, str>>()? {
                    if entries.len() == FIELDS_MAX {
                        return Err(A::Error::custom(format_args!(
                            "it may have at most {FIELDS_MAX} fields"
                        )));
                    }
                    entries.push((key, map.next_value()?));
                }
                Ok(Object(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Honoured fields of a request body; null is the same as absent.
#[derive(Debug)]
pub(crate) struct Fields<'a> {
    values: Vec<(&'static str, &'a RawValue)>,
}

impl<'a> Fields<'a> {
    /// Returns fields with their values.
    pub(crate) fn new(values: Vec<(&'static str, &'a RawValue)>) -> Self {
        Self { values }
    }

    /// Returns the text of a field. Of several with one name, the last counts, even if it is null.
    pub(crate) fn raw(&self, name: &str) -> Option<&'a RawValue> {
        let last = self.values.iter().rev().find(|(known, _)| *known == name);
        last.map(|(_, value)| *value).filter(|value| value.get() != "null")
    }

    /// Returns the value of a field; `expected` names its type.
    ///
    /// # Errors
    /// The value has another type.
    pub(crate) fn get<T: Deserialize<'a>>(&self, name: &str, expected: &str) -> Result<Option<T>, Outcome> {
        self.raw(name).map(|value| parse(name, value, expected)).transpose()
    }

    /// Returns the value of a field that is an object; `expected` names its type.
    ///
    /// # Errors
    /// The value has another type.
    pub(crate) fn object<T: Deserialize<'a>>(
        &self,
        name: &str,
        expected: &str,
    ) -> Result<Option<T>, Outcome> {
        self.raw(name).map(|value| parse_object(name, value, expected)).transpose()
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<String>, Outcome> {
        self.get(name, "a string")
    }

    pub(crate) fn flag(&self, name: &str) -> Result<bool, Outcome> {
        Ok(self.get(name, "true or false")?.unwrap_or(false))
    }

    pub(crate) fn number(&self, name: &str) -> Result<Option<f32>, Outcome> {
        // As f64: whether a number beyond f32 is one depends on features of the JSON library.
        Ok(self.get::<f64>(name, "a number")?.map(|value| value as f32))
    }

    /// Returns an integer, which may be written as a number of a whole value; `expected` names its type.
    ///
    /// # Errors
    /// The value is no integer of the type.
    pub(crate) fn integer<T: TryFrom<i128>>(&self, name: &str, expected: &str) -> Result<Option<T>, Outcome> {
        let read = |value: &RawValue| {
            let integer = integer(value.get()).and_then(|integer| T::try_from(integer).ok());
            integer.ok_or_else(|| wrong_type(name, value, expected))
        };
        self.raw(name).map(read).transpose()
    }

    /// Returns a count, at most `u32::MAX`.
    pub(crate) fn count(&self, name: &str) -> Result<Option<u32>, Outcome> {
        self.integer(name, "a non-negative integer")
    }

    /// Returns an array of token ids.
    pub(crate) fn token_ids(&self, name: &str) -> Result<Option<Vec<u32>>, Outcome> {
        self.raw(name).map(|value| parse_token_ids(name, value, "an array of token ids")).transpose()
    }

    /// Returns the model's name; empty if the field is absent.
    pub(crate) fn model(&self) -> Result<String, Outcome> {
        Ok(self.text("model")?.unwrap_or_default())
    }

    /// Returns a string or an array of strings, as an array.
    pub(crate) fn texts(&self, name: &str) -> Result<Vec<String>, Outcome> {
        let Some(value) = self.raw(name) else { return Ok(Vec::new()) };
        let expected = "a string or an array of strings";
        if value.get().starts_with('"') {
            return Ok(vec![parse(name, value, expected)?]);
        }
        parse(name, value, expected)
    }
}

/// Parses the value of `name`.
///
/// # Errors
/// The value has another type; the message quotes its beginning.
pub(crate) fn parse<'a, T: Deserialize<'a>>(
    name: &str,
    value: &'a RawValue,
    expected: &str,
) -> Result<T, Outcome> {
    serde_json::from_str(value.get()).map_err(|error| {
        let top = name.split(['.', '[']).next().unwrap_or(name);
        if let Some(reason) = escapes::refusal(name, value.get()) {
            return Outcome::field(top, reason);
        }
        // Of structs, the library says only so that a key is there twice.
        match error.to_string().strip_prefix("duplicate field ").and_then(|rest| rest.split_once(" at ")) {
            Some((key, _)) => Outcome::field(top, format!("{name} has the key {key} twice; give it once")),
            None => wrong_type(name, value, expected),
        }
    })
}

/// Parses the array of token ids `name`.
///
/// # Errors
/// The value has another type; the message quotes its beginning.
pub(crate) fn parse_token_ids(name: &str, value: &RawValue, expected: &str) -> Result<Vec<u32>, Outcome> {
    // Almost always they are written as integers, which the library reads several times as fast.
    let text = value.get();
    let ids = serde_json::from_str(text).or_else(|_| serde_json::from_str(text).map(|TokenIds(ids)| ids));
    ids.or_else(|_| parse(name, value, expected))
}

/// Parses the object `name` into a struct.
///
/// # Errors
/// The value has another type; the message quotes its beginning.
pub(crate) fn parse_object<'a, T: Deserialize<'a>>(
    name: &str,
    value: &'a RawValue,
    expected: &str,
) -> Result<T, Outcome> {
    // Derived readers of structs would take an array of their fields, too.
    if !value.get().starts_with('{') {
        return Err(wrong_type(name, value, expected));
    }
    parse(name, value, expected)
}

/// Returns the refusal of a value of another type; the message quotes its beginning.
pub(crate) fn wrong_type(name: &str, value: &RawValue, expected: &str) -> Outcome {
    let text = value.get();
    let mut end = text.len().min(FieldTable::QUOTED_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let cut = if end < text.len() { "…" } else { "" };
    let top = name.split(['.', '[']).next().unwrap_or(name);
    Outcome::field(top, format!("{name} must be {expected}; it is {}{cut}", &text[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: FieldTable = FieldTable {
        api: "test",
        fields: &[&[
            honoured("temperature", ""),
            honoured("stop", ""),
            ignored("user", ""),
            refused("tools", "there are none"),
        ]],
        elsewhere: &[refused("grammar", "there are none")],
    };
    static FIELDS: FieldTable = TABLE;

    fn refusal(body: &str) -> String {
        FIELDS.read(body.as_bytes()).err().map(|outcome| outcome.message()).unwrap_or_default()
    }

    #[test]
    fn null_is_absent_the_last_of_two_counts_and_unknown_fields_pass() {
        let body =
            br#"{"temperature": 1, "temperature": 0.5, "stop": null, "user": 3, "x": [{}], "tools": [ ]}"#;
        let fields = FIELDS.read(body).unwrap();
        assert_eq!(fields.number("temperature").unwrap(), Some(0.5));
        assert_eq!(fields.texts("stop").unwrap(), Vec::<String>::new());
        let fields = FIELDS.read(br#"{"temperature": 1, "temperature": null}"#).unwrap();
        assert_eq!(fields.number("temperature").unwrap(), None, "the last of two is null");
        let fields = FIELDS.read(br#"{"stop": "a"}"#).unwrap();
        assert_eq!(fields.texts("stop").unwrap(), ["a"]);
        let fields = FIELDS.read(br#"{"temperature": "hot", "stop": [1]}"#).unwrap();
        let wrong = fields.number("temperature").unwrap_err();
        assert_eq!(wrong, Outcome::field("temperature", "temperature must be a number; it is \"hot\""));
        assert!(fields.texts("stop").is_err());
    }

    #[test]
    fn malformed_bodies_and_refused_fields_are_refused_by_a_sentence() {
        assert_eq!(refusal(""), "the request has no body; send a JSON object");
        assert!(refusal("{\"temperature\": ").starts_with("the body is not valid JSON"));
        assert!(refusal("[1]").starts_with("the body must be a JSON object"));
        assert!(refusal("3").starts_with("the body must be a JSON object"));
        assert_eq!(refusal(r#"{"tools": [1]}"#), "tools is refused: there are none");
        let deep = format!("{{\"x\": {}1{}}}", "[".repeat(1 << 20), "]".repeat(1 << 20));
        assert_eq!(refusal(&deep), "", "an unknown field is skipped, however deep");
        let deep = format!("{{\"stop\": {}1{}}}", "[".repeat(1 << 20), "]".repeat(1 << 20));
        let fields = FIELDS.read(deep.as_bytes()).unwrap();
        assert!(fields.texts("stop").unwrap_err().message().starts_with("stop must be a string or"));
        let many = |count: usize| {
            let fields: Vec<String> = (0..count).map(|at| format!("\"x{at}\": 1")).collect();
            refusal(&format!("{{{}}}", fields.join(", ")))
        };
        assert_eq!(many(FIELDS_MAX), "");
        assert!(many(FIELDS_MAX + 1).contains("at most 256 fields"), "{}", many(FIELDS_MAX + 1));
    }

    #[test]
    fn encodings_other_than_utf_8_and_halves_of_characters_are_named() {
        let refused =
            |body: &[u8]| FIELDS.read(body).err().map(|outcome| outcome.message()).unwrap_or_default();
        assert_eq!(refused(b"\xef\xbb\xbf{}"), "", "a byte order mark has no meaning in UTF-8");
        assert_eq!(refused(b"\xef\xbb\xbf"), "the request has no body; send a JSON object");
        let utf_16 = |order: fn(u16) -> [u8; 2], text: &str| -> Vec<u8> {
            text.encode_utf16().flat_map(order).collect()
        };
        for text in ["{}", "\u{feff}{}"] {
            for body in [utf_16(u16::to_le_bytes, text), utf_16(u16::to_be_bytes, text)] {
                assert!(refused(&body).contains("UTF-16"), "{body:?}");
            }
        }
        assert_eq!(
            refused(b"{\"stop\": \"\xff\"}"),
            "the body is not UTF-8: byte 10 is 0xff; send it in UTF-8"
        );
        assert!(refused(b"{\"x\": \"\\q\"}").contains("invalid escape at line 1 column 9"));
        let fields = FIELDS.read(br#"{"stop": ["ab", "c\ud83d"]}"#).unwrap();
        let wrong = fields.texts("stop").unwrap_err();
        assert!(
            matches!(&wrong, Outcome::InvalidField { field, reason } if field == "stop"
            && reason.starts_with("stop has the escape \\ud83d at byte 9 of its JSON")),
            "{wrong:?}"
        );
        #[derive(Debug, serde::Deserialize)]
        #[allow(dead_code, reason = "only read")]
        struct Nested {
            a: u32,
        }
        let fields = FIELDS.read(br#"{"stop": {"a": 1, "a": 2}}"#).unwrap();
        let wrong = fields.object::<Nested>("stop", "an object").unwrap_err();
        assert_eq!(wrong, Outcome::field("stop", "stop has the key `a` twice; give it once"));
    }

    #[test]
    fn a_constraint_of_another_api_is_refused_and_not_ignored() {
        assert_eq!(refusal(r#"{"grammar": "x"}"#), "grammar is refused: there are none");
        assert_eq!(refusal(r#"{"grammar": null, "grammar": ""}"#), "");
    }
}
