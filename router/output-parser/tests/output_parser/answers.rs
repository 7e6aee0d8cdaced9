//! Grammars of calls or an answer in JSON: random outputs that they allow are whole calls or JSON of the schema, and never text.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use inflight_contract::{Grammar, JsonWhitespace};
use inflight_output_parser::{
    CallGrammar, GrammarAnswer, GrammarTool, ReasoningFormat, ToolCallFormat, may_look_like_call,
};
use serde_json::{Value, json};

use crate::grammar::{Random, SPECIAL, compiler, generate, parsed, schemas, text, value};

/// Schemas of answers; those of objects share keys with calls, and texts may have markers.
fn answers() -> Vec<Value> {
    let text = json!({"type": "string", "maxLength": 12});
    let closed = |properties: Value| {
        let required: Vec<String> = properties.as_object().unwrap().keys().cloned().collect();
        json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
    };
    vec![
        closed(json!({"y": {"type": "integer"}, "s": text})),
        closed(json!({"name": {"enum": ["weather", "Bob"]}})),
        closed(
            json!({"name": {"enum": ["weather", "nobody"]}, "parameters": {"type": "object"}, "z": {"type": "boolean"}}),
        ),
        // Rewritten by the compiler.
        closed(json!({"n": {"oneOf": [{"type": "number", "minimum": 5}, {"type": "number", "maximum": 6}]},
            "s": {"type": "string", "format": "password", "maxLength": 3}})),
        json!({"type": "array", "items": {"enum": ["<tool_call>", "[TOOL_CALLS]", "<function=now>"]}, "maxItems": 3}),
        json!({"enum": ["a", "<tool_call>\n<function=now>\n</function>\n</tool_call>"]}),
        json!({"type": "number"}),
    ]
}

#[test]
fn an_output_is_whole_calls_or_json_of_the_schema_and_never_text() {
    let compiler = compiler();
    let schemas = schemas();
    let special = |text: &str| SPECIAL.iter().position(|special| *special == text).map(|at| 256 + at as u32);
    let none = |_: &str| None;
    let (mut calls_seen, mut answers_seen) = (0, 0);
    for (number, answer) in answers().iter().enumerate() {
        for format in ToolCallFormat::ALL {
            for strict in [false, true] {
                let tools: Vec<_> = schemas
                    .iter()
                    .map(|(name, parameters)| GrammarTool { name, parameters, strict })
                    .collect();
                let whitespace = if number % 3 == 0 { JsonWhitespace::Any } else { JsonWhitespace::OneLine };
                let (special, spelt) = if strict {
                    (&special as &dyn Fn(&str) -> Option<u32>, false)
                } else {
                    (&none as _, true)
                };
                let grammar = CallGrammar {
                    format,
                    tools: &tools,
                    required: false,
                    answer: Some(GrammarAnswer { schema: answer, options: whitespace.compiler_options() }),
                    several: number % 2 == 0,
                    reasoning: None,
                    begins_in_reasoning: false,
                    special,
                };
                let lark = grammar.lark(Grammar::BYTES_MAX).unwrap();
                let (mut calls_here, mut answers_here) = (0, 0);
                for seed in 0..10 {
                    let Some(output) = generate(&compiler, &lark, &mut Random(seed)) else { continue };
                    let written = text(&output);
                    let place =
                        format!("answer {number}, {format}, strict {strict}, seed {seed}: {written}\n{lark}");
                    let (content, calls) = parsed(format, &output, spelt, true);
                    if calls.is_empty() {
                        let value = value(&content);
                        let invalid = jsonschema::validate(answer, &value).err();
                        assert!(value.is_null() || invalid.is_none(), "{}: {place}", invalid.unwrap());
                        answers_here += 1;
                        continue;
                    }
                    calls_here += 1;
                    assert_eq!(content, "", "{place}");
                    for (name, arguments) in calls {
                        let (_, schema) = schemas.iter().find(|(tool, _)| *tool == name).unwrap();
                        let invalid = jsonschema::validate(schema, &arguments).err();
                        assert!(!strict || invalid.is_none(), "{}: {place}", invalid.unwrap());
                    }
                }
                assert!(calls_here + answers_here > 2, "answer {number}, {format}: few outputs end\n{lark}");
                calls_seen += calls_here;
                answers_seen += answers_here;
            }
        }
    }
    assert!(calls_seen > 100 && answers_seen > 100, "{calls_seen} calls, {answers_seen} answers");
}

/// Whether a grammar allows a text, whose special tokens are tokens.
fn accepts(compiler: &inflight_grammar::Compiler, lark: &str, output: &str) -> bool {
    let compiled = compiler.compile(&Grammar::Lark(lark.to_owned()));
    let mut matcher = compiled.unwrap_or_else(|error| panic!("{error}\n{lark}")).matcher(None);
    output.bytes().all(|byte| matcher.consume(byte.into()).is_ok()) && matcher.is_accepting().unwrap()
}

#[test]
fn calls_and_answers_that_begin_alike_are_both_allowed_and_told_apart() {
    let compiler = compiler();
    let schemas = schemas();
    let tools: Vec<_> =
        schemas.iter().map(|(name, parameters)| GrammarTool { name, parameters, strict: true }).collect();
    let format = ToolCallFormat::Llama3;
    let answer = json!({"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"},
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}, "required": ["name", "n"],
        "additionalProperties": false});
    assert!(!may_look_like_call(&answer, &["weather", "now", "note", "typed"]));
    let grammar = |reasoning, several, whitespace: JsonWhitespace| {
        let (required, begins_in_reasoning) = (false, false);
        let special = &|_: &str| None;
        let answer = Some(GrammarAnswer { schema: &answer, options: whitespace.compiler_options() });
        CallGrammar {
            format,
            tools: &tools,
            required,
            answer,
            several,
            reasoning,
            begins_in_reasoning,
            special,
        }
        .lark(Grammar::BYTES_MAX)
        .unwrap()
    };
    let lark = grammar(None, true, JsonWhitespace::OneLine);
    let any = grammar(None, true, JsonWhitespace::Any);
    let call = r#"{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}"#;
    for (output, calls) in [
        (call, 1),
        (&*format!("{call}; {call}"), 2),
        (r#"{"name":"now","parameters":{}}"#, 1),
        (r#"{"name": "a","n":1}"#, 0),
        (r#"{"name": "weather", "n": 1}"#, 0),
        (r#"{"name": "wea", "n": 1}"#, 0),
        (r#"{"name": "now", "n": 1, "parameters": {"a": 2}}"#, 0),
        (r#"{"name": "note", "n": 0}"#, 0),
    ] {
        for lark in [&lark, &any] {
            assert!(accepts(&compiler, lark, output), "{output}\n{lark}");
        }
        let tokens: Vec<u32> = output.bytes().map(u32::from).collect();
        let (content, found) = parsed(format, &tokens, true, true);
        assert_eq!((found.len(), &*content), (calls, if calls == 0 { output } else { "" }), "{output}");
    }
    for lines in ["{\n  \"name\" : \"a\",\n  \"n\": 1\n}", "{\n  \"name\": \"now\",\n  \"parameters\": {}\n}"]
    {
        assert!(accepts(&compiler, &any, lines) && !accepts(&compiler, &lark, lines), "{lines}");
    }
    assert!(!accepts(&compiler, &any, r#"{"name":  "a", "n": 1}"#), "whitespace is bounded: {any}");
    let mixed = format!("{call}; {}", r#"{"name": "a", "n": 1}"#);
    for output in
        ["text", "{", r#"{"name": "weather", "parameters": {"city": "Rome"}}"#, &mixed, r#"{"n": 1}"#]
    {
        assert!(!accepts(&compiler, &lark, output), "{output}\n{lark}");
    }
    assert!(!accepts(&compiler, &grammar(None, false, JsonWhitespace::OneLine), &format!("{call}; {call}")));
    let thinking = grammar(Some(ReasoningFormat::Think), false, JsonWhitespace::OneLine);
    for output in [call, r#"{"name": "a", "n": 1}"#] {
        assert!(
            accepts(&compiler, &thinking, &format!("<think>\nhm {{\n</think>\n\n{output}")),
            "{thinking}"
        );
        assert!(accepts(&compiler, &thinking, output), "{thinking}");
    }
}
