//! `%text {schema}` in Lark grammars: the strings of a JSON schema as they are, without quotes and escapes.
//!
//! It is one expression of terminals, `(/.../ & ~/.../ | "...")`. Every keyword about strings is kept, also within `not`, `oneOf` and
//! `if`, since the compiler's terminals have intersections and complements.

mod anchors;
mod formats;
mod set;

use serde_json::{Map, Value};

use crate::GrammarError;
use crate::error::shorten;
use crate::nesting;
use crate::rewrite::{Dialect, References, patterns};
use set::{Form, Texts};

/// Key of the options of a `%text`.
const OPTIONS: &str = "x-text";
/// Any text.
const ANY: &str = "/(?s:.)*/";
/// No text.
const NONE: &str = "/[a&&b]/";
/// Maximum schemas visited; references make a small schema a large tree.
const VISITED_MAX: u32 = 10_000;
/// Maximum schemas in one another, references followed.
const DEPTH_MAX: u32 = 100;

/// Returns the expression of a schema's strings. The object `x-text` in it has options: with `"null": true` the text `null` stands for
/// null where the schema allows null, and is no string; with `"empty": true` there may be no string at all.
///
/// # Errors
/// [`GrammarError::Refused`]: there is no such string, or a keyword cannot be kept, which the error names.
pub(crate) fn expression(schema: &Map<String, Value>) -> Result<String, GrammarError> {
    let option = |name: &str| schema.get(OPTIONS).and_then(|options| options[name].as_bool()) == Some(true);
    let references = References::new(schema);
    let dialect = Dialect::of(schema);
    let mut reader = Reader { root: schema, references, dialect, left: VISITED_MAX, depth: 0 };
    let Form { null, text } = reader.object(schema, true)?;
    let text = if option("null") {
        let spelled = Texts::matching(r"/\s*(null|None)\s*/".to_owned());
        let strings = text.and(&spelled.not())?;
        if null { strings.or(Texts::of(["null"]))? } else { strings }
    } else {
        text
    };
    if text.is_none() {
        return if option("empty") {
            Ok(NONE.to_owned())
        } else {
            Err(refused("the schema allows no string"))
        };
    }
    let Some(text) = text.expression() else { return Ok(ANY.to_owned()) };
    nesting::check(&text)?;
    // A complement has sequences of bytes that are no text.
    Ok(format!("({ANY} & {text})"))
}

fn refused(reason: impl Into<String>) -> GrammarError {
    GrammarError::Refused(reason.into())
}

struct Reader<'a> {
    root: &'a Map<String, Value>,
    references: References<'a>,
    dialect: Dialect,
    left: u32,
    depth: u32,
}

impl<'a> Reader<'a> {
    /// Reads a schema. One that is not `positive` stands under a negation, where formats, which are kept in part, cannot stand.
    fn schema(&mut self, schema: &'a Value, positive: bool) -> Result<Form, GrammarError> {
        match schema {
            Value::Bool(true) => Ok(Form::all()),
            Value::Bool(false) => Ok(Form::none()),
            Value::Object(object) => self.object(object, positive),
            _ => Err(GrammarError::NotASchema),
        }
    }

    fn object(&mut self, object: &'a Map<String, Value>, positive: bool) -> Result<Form, GrammarError> {
        self.left = self.left.checked_sub(1).ok_or_else(|| {
            refused(format!("the schema of a string has more than {VISITED_MAX} parts, references followed"))
        })?;
        if self.depth == DEPTH_MAX {
            return Err(refused(format!(
                "the schema of a string nests more than {DEPTH_MAX} schemas, references followed"
            )));
        }
        self.depth += 1;
        let form = self.keywords(object, positive);
        self.depth -= 1;
        form
    }

    fn keywords(&mut self, object: &'a Map<String, Value>, positive: bool) -> Result<Form, GrammarError> {
        if self.dialect <= Dialect::Draft7
            && let Some(Value::String(reference)) = object.get("$ref")
        {
            return self.reference(reference, positive);
        }
        let mut form = Form::all();
        for (keyword, value) in object {
            form = form.and(&self.keyword(keyword, value, object, positive)?)?;
        }
        Ok(form)
    }

    fn reference(&mut self, reference: &str, positive: bool) -> Result<Form, GrammarError> {
        // A cycle ends at the maximum depth.
        if reference == "#" {
            return self.object(self.root, positive);
        }
        let target = self.references.resolve(reference).ok_or_else(|| {
            refused(format!("$ref {} is not followed in the schema of a string", shorten(reference)))
        })?;
        self.schema(target, positive)
    }

    fn keyword(
        &mut self,
        keyword: &str,
        value: &'a Value,
        object: &'a Map<String, Value>,
        positive: bool,
    ) -> Result<Form, GrammarError> {
        let schemas = || value.as_array().ok_or_else(|| refused(format!("{keyword} must be an array")));
        Ok(match keyword {
            "$ref" | "$dynamicRef" | "$recursiveRef" => {
                let reference =
                    value.as_str().ok_or_else(|| refused(format!("{keyword} must be a string")))?;
                self.reference(reference, positive)?
            }
            "type" => types(value)?,
            "const" if self.dialect >= Dialect::Draft6 => constants(std::slice::from_ref(value)),
            "enum" => constants(schemas()?),
            "pattern" => Form::strings(pattern(
                value.as_str().ok_or_else(|| refused("pattern must be a string".to_owned()))?,
            )?),
            "minLength" => Form::strings(format!("/(?s:.){{{},}}/", count(keyword, value)?)),
            "maxLength" => Form::strings(format!("/(?s:.){{0,{}}}/", count(keyword, value)?)),
            "format" => match value.as_str().and_then(formats::pattern) {
                None => Form::all(),
                Some(_) if !positive => {
                    return Err(refused(format!(
                        "format {value} cannot stand within not, oneOf and if of a string"
                    )));
                }
                Some(pattern) => Form::strings(format!("/{}/", in_lark(&pattern))),
            },
            "allOf" => {
                let mut form = Form::all();
                for schema in schemas()? {
                    form = form.and(&self.schema(schema, positive)?)?;
                }
                form
            }
            "anyOf" => {
                let mut form = Form::none();
                for schema in schemas()? {
                    form = form.or(self.schema(schema, positive)?)?;
                }
                form
            }
            "oneOf" => {
                // None so far, and exactly one so far.
                let (mut none, mut one) = (Form::all(), Form::none());
                for schema in schemas()? {
                    let this = self.schema(schema, false)?;
                    let first = this.clone().and(&none)?;
                    let others = this.not();
                    one = one.and(&others)?.or(first)?;
                    none = none.and(&others)?;
                }
                one
            }
            "not" => self.schema(value, false)?.not(),
            "if" if self.dialect >= Dialect::Draft7 => {
                let condition = self.schema(value, false)?;
                let mut branch = |keyword: &str| match object.get(keyword) {
                    Some(schema) => self.schema(schema, positive),
                    None => Ok(Form::all()),
                };
                let (then, other) = (branch("then")?, branch("else")?);
                condition.clone().and(&then)?.or(condition.not().and(&other)?)?
            }
            // What else there is says nothing of strings and null.
            _ => Form::all(),
        })
    }
}

/// Strings and null by a `type`.
fn types(value: &Value) -> Result<Form, GrammarError> {
    let names = match value {
        Value::String(name) => vec![name.as_str()],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => return Err(refused("type must be a string or an array of strings")),
    };
    let text = if names.contains(&"string") { Texts::any() } else { Texts::none() };
    Ok(Form { null: names.contains(&"null"), text })
}

/// Strings and null among listed values.
fn constants(values: &[Value]) -> Form {
    let text = Texts::of(values.iter().filter_map(Value::as_str));
    Form { null: values.iter().any(Value::is_null), text }
}

/// Returns a pattern of a schema, which may be found anywhere in a text.
fn pattern(pattern: &str) -> Result<String, GrammarError> {
    nesting::check(pattern)?;
    let whole = anchors::anchored(&patterns::translate_unescaped(pattern)?).map_err(|reason| {
        refused(format!("the pattern {} cannot be used for a text between tags: {reason}", shorten(pattern)))
    })?;
    set::bounded(format!("/{}/", in_lark(&whole)))
}

/// Writes an expression so that it can stand between slashes, with the classes `\d` and `\w` of ECMA-262.
fn in_lark(expression: &str) -> String {
    llguidance::regex_to_lark(expression, "dw")
}

/// Returns a count, which JSON may have as 2 or as 2.0.
fn count(keyword: &str, value: &Value) -> Result<u64, GrammarError> {
    let whole = value.as_f64().filter(|number| number.fract() == 0.0 && (0.0..=1e9).contains(number));
    whole
        .map(|number| number as u64)
        .ok_or_else(|| refused(format!("{keyword} must be an integer of 0 to 1000000000")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(schema: Value) -> Result<String, String> {
        expression(schema.as_object().unwrap()).map_err(|error| error.to_string())
    }

    #[test]
    fn strings_of_schemas_become_expressions_of_terminals() {
        for (schema, expected) in [
            (json!({}), ANY),
            (json!({"type": ["string", "null"], "title": "x"}), ANY),
            (json!({"const": "a"}), r#"(/(?s:.)*/ & "a")"#),
            (json!({"enum": ["a", 1], "not": {"const": "b"}}), r#"(/(?s:.)*/ & "a")"#),
            (json!({"minLength": 2.0, "maxLength": 3}), "(/(?s:.)*/ & (/(?s:.){2,}/ & /(?s:.){0,3}/))"),
            (json!({"not": {"not": {"pattern": "^a/b$"}}}), r"(/(?s:.)*/ & /(?:a\/b)/)"),
            (
                json!({"oneOf": [{"const": "a"}, {"const": "b"}, {"enum": ["a", "c"]}]}),
                r#"(/(?s:.)*/ & ("b" | "c"))"#,
            ),
            (json!({"allOf": [{"type": "integer"}], "x-text": {"empty": true}}), NONE),
            (
                json!({"type": ["string", "null"], "const": null, "x-text": {"null": true}}),
                r#"(/(?s:.)*/ & "null")"#,
            ),
            (
                json!({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"format": "x", "const": ""}}}),
                "(/(?s:.)*/ & /(?:)/)",
            ),
        ] {
            assert_eq!(of(schema.clone()).as_deref(), Ok(expected), "{schema}");
        }
        for (schema, words) in [
            (json!({"type": "integer"}), "allows no string"),
            (json!({"$ref": "#"}), "nests more than 100 schemas"),
            (json!({"$ref": "#/$defs/none"}), "$ref #/$defs/none is not followed"),
            (json!({"oneOf": [{"format": "date"}]}), "format \"date\" cannot stand within"),
            (json!({"minLength": -1}), "minLength must be an integer"),
            (json!({"anyOf": vec![json!({"pattern": "a".repeat(9000)}); 40]}), "more than 262144 bytes"),
            (json!({"allOf": vec![json!({}); 20_000]}), "more than 10000 parts"),
        ] {
            let error = of(schema).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
