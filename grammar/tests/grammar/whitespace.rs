//! Whitespace between the parts of JSON: on one line by default, free if the grammar says so.

use inflight_contract::{Grammar, JsonWhitespace};

use super::vocabulary::*;

const SCHEMA: &str = r#"{"type": "object", "additionalProperties": false, "required": ["a"], "properties": {
    "a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "object"}, "c": {"const": {"d": [1, null]}},
    "e": {"enum": ["x", 1, ["y", "z"]]}, "f": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}"#;

/// Texts on one line as models write it.
const ONE_LINE: [&str; 7] = [
    r#"{"a":[]}"#,
    r#"{"a": [1, 2], "b": {"x": {}, "y": [true, {"z": ": , "}]}}"#,
    r#"{"a":[1,2],"b":{"x":{},"y":[true,{"z":"\\n"}]}}"#,
    r#"{"a":[1, 2],"b": {"x":0.5, "y":-1}, "c":{"d": [1,null]}}"#,
    r#"{"a": [1], "c": {"d": [1, null]}, "e": ["y", "z"]}"#,
    r#"{"a":[1],"e":["y","z"],"f":null}"#,
    r#"{"a": [], "e": "x", "f": "{\"a\" : [ ]}"}"#,
];
/// Texts with whitespace elsewhere, or more of it.
const ELSEWHERE: [&str; 14] = [
    "{ \"a\": []}",
    "{\"a\": [] }",
    "{\"a\" : []}",
    "{\"a\": [ ]}",
    "{\"a\": [ 1]}",
    "{\"a\": [1 ]}",
    "{\"a\": [1 , 2]}",
    "{\"a\": [1,\n2]}",
    "{\"a\":\n[]}",
    "{\n  \"a\": []\n}",
    "{\"a\": [],\r\n\t\"b\": {}}",
    "{\"a\": [], \"b\": {\"x\" : 1}}",
    "{\"a\": [], \"b\": {\n}}",
    "{\"a\": [], \"c\": {\"d\": [ 1, null ]}}",
];
/// Texts that no grammar of this schema takes: whitespace around the whole, and more than one break or 40 columns at a place.
const NEVER: [&str; 7] = [
    " {\"a\": []}",
    "{\"a\": []} ",
    "{\"a\":  []}",
    "{\"a\":\t[]}",
    "{\"a\": [1,  2]}",
    "{\n\n\"a\": []}",
    "{\n                                         \"a\": []}",
];

fn takes(grammar: &Grammar, text: &str) -> bool {
    let mut matcher = compiler().compile(grammar).unwrap().matcher(None);
    text.bytes().all(|byte| matcher.consume(byte.into()).is_ok()) && matcher.is_accepting().unwrap_or(true)
}

#[test]
fn json_is_on_one_line_unless_the_grammar_says_any_whitespace() {
    let lark = |options: &str| Grammar::Lark(format!("start: %json {{{options}{}", &SCHEMA[1..]));
    let any = format!("\"x-guidance\": {},", JsonWhitespace::Any.compiler_options());
    let object = Grammar::JsonObject;
    for (grammar, is_any) in [
        (Grammar::json_schema(SCHEMA), false),
        (Grammar::JsonSchema(SCHEMA.to_owned(), JsonWhitespace::Any), true),
        (lark(""), false),
        (lark(&any), true),
        (object(JsonWhitespace::OneLine), false),
        (object(JsonWhitespace::Any), true),
    ] {
        for (texts, taken) in [(&ONE_LINE[..], true), (&ELSEWHERE, is_any), (&NEVER, false)] {
            texts.iter().for_each(|text| assert_eq!(takes(&grammar, text), taken, "{grammar:?}: {text:?}"));
        }
    }
    let flexible = lark(r#""x-guidance": {"whitespace_flexible": true},"#);
    assert!(takes(&flexible, NEVER[2]), "a Lark grammar keeps the whitespace that it gives itself");
    assert!(takes(&Grammar::Lark("start: %json true".to_owned()), "[1, 2]"));
    assert!(!takes(&Grammar::Lark("start: %json true".to_owned()), "[1 , 2]"));
}
