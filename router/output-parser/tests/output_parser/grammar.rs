//! Grammars of tool calls: random outputs that they allow are read back as calls, with arguments of the right types.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::sync::Arc;

use inflight_contract::Grammar;
use inflight_grammar::{Compiler, MaskOutcome, Matcher, Vocabulary};
use inflight_output_parser::{
    CallGrammar, CallGrammarError, CallIdStyle, CallIds, GrammarTool, MarkerToken, OutputEnd, OutputEvent,
    OutputFormat, OutputParser, ReasoningFormat, ToolCallFormat, ToolTypes,
};
use serde_json::{Value, json};

/// Special tokens behind the bytes.
pub(super) const SPECIAL: [&str; 4] = ["<|end|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"];
const END: u32 = 256;

pub(super) fn compiler() -> Compiler {
    let bytes: Vec<[u8; 1]> = (0..=255).map(|byte| [byte]).collect();
    let tokens = bytes.iter().map(|byte| (&byte[..], false));
    let special = SPECIAL.iter().map(|text| (text.as_bytes(), true));
    let vocabulary = Vocabulary::from_tokens(tokens.chain(special));
    Compiler::new(&vocabulary, 256 + SPECIAL.len() as u32, &[END]).unwrap()
}

/// SplitMix64.
pub(super) struct Random(pub(super) u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % most.max(1) as u64) as usize
    }
}

fn allowed(matcher: &mut Matcher) -> Vec<u32> {
    let size = 256 + SPECIAL.len();
    let mut mask = vec![0; Matcher::mask_words(size)];
    if matcher.write_mask(&mut mask).unwrap() == MaskOutcome::Complete {
        return Vec::new();
    }
    (0..size as u32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

/// Chooses tokens at random, printable ones rather than others, until the output ends.
pub(super) fn generate(compiler: &Compiler, lark: &str, random: &mut Random) -> Option<Vec<u32>> {
    let grammar = compiler.compile(&Grammar::Lark(lark.to_owned()));
    let mut matcher = grammar.unwrap_or_else(|error| panic!("{error}\n{lark}")).matcher(None);
    let mut output = Vec::new();
    for _ in 0..3000 {
        let tokens = allowed(&mut matcher);
        if tokens.is_empty() || tokens.contains(&END) {
            return Some(output);
        }
        // Closing characters end strings and texts soon.
        let closing: Vec<u32> =
            tokens.iter().copied().filter(|id| b"\"}]<\n".contains(&(*id as u8)) || *id > 255).collect();
        let pool = if !closing.is_empty() && random.below(2) == 0 { &closing } else { &tokens };
        let printable: Vec<u32> =
            pool.iter().copied().filter(|id| *id > 255 || *id == 10 || (32..127).contains(id)).collect();
        let pool = if printable.is_empty() { pool } else { &printable };
        let token = pool[random.below(pool.len())];
        matcher.consume(token).unwrap();
        output.push(token);
    }
    None
}

pub(super) fn schemas() -> [(&'static str, Value); 4] {
    [
        (
            "weather",
            json!({"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer",
            "minimum": 1, "maximum": 7}}, "required": ["city", "days"], "additionalProperties": false}),
        ),
        ("now", json!({"type": "object", "properties": {}, "additionalProperties": false})),
        (
            "note",
            json!({"type": "object", "properties": {"flag": {"type": "boolean"}, "at": {"$ref": "#/$defs/p"}},
            "required": ["flag"], "additionalProperties": false, "$defs": {"p": {"type": "object", "properties": {"x":
            {"type": "boolean"}}, "required": ["x"], "additionalProperties": false}}}),
        ),
        (
            // Types that other keywords than `type` say.
            "typed",
            json!({"type": "object", "properties": {"reference": {"$ref": "#/$defs/flag"}, "five": {"const": 5},
            "on": {"const": "on"}, "all": {"allOf": [{"$ref": "#/$defs/flag"}]},
            "mixed": {"enum": [1, "one", true, null]}, "unit": {"$ref": "#/$defs/unit"},
            "either": {"anyOf": [{"$ref": "#/$defs/flag"}, {"type": "null"}]},
            "chain": {"$ref": "#/$defs/chain"}, "nested": {"oneOf": [{"anyOf": [{"type": "boolean"}]}, {"const": 7}]}},
            "required": ["reference", "five", "on", "all", "mixed", "unit", "either", "chain", "nested"],
            "additionalProperties": false, "$defs": {"flag": {"type": "object", "properties": {"x": {"type": "boolean"}},
            "required": ["x"], "additionalProperties": false}, "unit": {"enum": ["C", "F"]},
            "chain": {"$ref": "#/$defs/flag"}}}),
        ),
    ]
}

/// Calls of an output, and its content. `spelt`: no marker is a token; `answer`: the output is calls or an answer.
pub(super) fn parsed(
    format: ToolCallFormat,
    output: &[u32],
    spelt: bool,
    answer: bool,
) -> (String, Vec<(String, Value)>) {
    let mut types = ToolTypes::default();
    schemas().iter().for_each(|(name, schema)| types.add(name, schema));
    let reasoning = ReasoningFormat::Think;
    let (mut tokens, mut texts) = (Vec::new(), reasoning.markers().to_vec());
    for (marker, text) in format.markers().iter().copied() {
        match SPECIAL.iter().position(|special| *special == text && !spelt) {
            Some(at) => tokens.push(MarkerToken { id: 256 + at as u32, marker, text: "" }),
            None => texts.push((marker, text)),
        }
    }
    let tools = Arc::new(types);
    let format = OutputFormat {
        calls: Some(format),
        reasoning: Some(reasoning),
        tokens,
        texts,
        tools,
        whole_calls: answer,
        constrained_answer: answer,
        ..OutputFormat::default()
    };
    let format = Arc::new(format);
    let mut parser = OutputParser::new(format.clone(), CallIds::new(1, 0, CallIdStyle::Prefixed));
    let (mut events, mut bytes) = (Vec::new(), Vec::new());
    for token in output {
        match format.marker(*token) {
            Some(marker) => {
                events.extend(parser.push_text(&String::from_utf8_lossy(&std::mem::take(&mut bytes))));
                events.extend(parser.push_marker(marker));
            }
            None => bytes.push(*token as u8),
        }
    }
    events.extend(parser.push_text(&String::from_utf8_lossy(&bytes)));
    events.extend(parser.finish(OutputEnd::Model));
    let (mut content, mut calls) = (String::new(), Vec::<(String, String)>::new());
    for event in events {
        match event {
            OutputEvent::Content(text) => content.push_str(&text),
            OutputEvent::CallBegin { name, .. } => calls.push((name, String::new())),
            OutputEvent::CallArguments { fragment, .. } => calls.last_mut().unwrap().1.push_str(&fragment),
            OutputEvent::Reasoning(_) | OutputEvent::CallEnd { .. } => {}
        }
    }
    (content, calls.into_iter().map(|(name, text)| (name, value(&text))).collect())
}

/// Returns the value of a JSON text; null for one whose numbers no type of Rust has.
pub(super) fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| {
        let is_json = serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok();
        assert!(is_json && error.to_string().contains("out of range"), "{error}: {text}");
        Value::Null
    })
}

pub(super) fn text(output: &[u32]) -> String {
    let piece = |id: &u32| match SPECIAL.get((*id as usize).wrapping_sub(256)) {
        Some(special) => special.as_bytes().to_vec(),
        None => vec![*id as u8],
    };
    String::from_utf8_lossy(&output.iter().flat_map(piece).collect::<Vec<u8>>()).into_owned()
}

#[test]
fn required_outputs_are_calls_of_the_tools_with_arguments_of_their_schemas() {
    let compiler = compiler();
    let schemas = schemas();
    let tools: Vec<_> =
        schemas.iter().map(|(name, parameters)| GrammarTool { name, parameters, strict: true }).collect();
    let special = |text: &str| SPECIAL.iter().position(|special| *special == text).map(|at| 256 + at as u32);
    let none = |_: &str| None;
    for format in ToolCallFormat::ALL {
        for several in [false, true] {
            for (special, spelt) in [(&special as &dyn Fn(&str) -> Option<u32>, false), (&none, true)] {
                let reasoning = None;
                let grammar = CallGrammar {
                    format,
                    tools: &tools,
                    required: true,
                    answer: None,
                    several,
                    reasoning,
                    begins_in_reasoning: false,
                    special,
                };
                let lark = grammar.lark(Grammar::BYTES_MAX).unwrap();
                let mut whole = 0;
                for seed in 0..12 {
                    let Some(output) = generate(&compiler, &lark, &mut Random(seed)) else { continue };
                    whole += 1;
                    let written = text(&output);
                    let (content, calls) = parsed(format, &output, spelt, false);
                    assert_eq!(content, "", "seed {seed}: {written}\n{lark}");
                    assert!(!calls.is_empty() && (several || calls.len() == 1), "seed {seed}: {written}");
                    for (name, arguments) in calls {
                        let (_, schema) = schemas.iter().find(|(tool, _)| *tool == name).unwrap();
                        let invalid = jsonschema::validate(schema, &arguments).err();
                        assert!(invalid.is_none(), "seed {seed}: {name} {arguments}: {}", invalid.unwrap());
                    }
                }
                assert!(whole > 6, "{format}: only {whole} outputs ended\n{lark}");
            }
        }
    }
}

#[test]
fn grammars_of_free_text_with_strict_calls_and_of_reasoning_compile_and_allow_both() {
    let compiler = compiler();
    let schemas = schemas();
    let tools: Vec<_> = schemas
        .iter()
        .map(|(name, parameters)| GrammarTool { name, parameters, strict: *name != "now" })
        .collect();
    let special = |text: &str| SPECIAL.iter().position(|special| *special == text).map(|at| 256 + at as u32);
    let accepts = |lark: &str, output: &str| {
        let mut matcher = compiler
            .compile(&Grammar::Lark(lark.to_owned()))
            .unwrap_or_else(|error| panic!("{error}\n{lark}"))
            .matcher(None);
        let mut rest = output;
        while !rest.is_empty() {
            let found = SPECIAL.iter().position(|special| rest.starts_with(special));
            let (token, length) =
                found.map_or((u32::from(rest.as_bytes()[0]), 1), |at| (256 + at as u32, SPECIAL[at].len()));
            if matcher.consume(token).is_err() {
                return false;
            }
            rest = &rest[length..];
        }
        matcher.is_accepting().unwrap()
    };
    let call = |format| match format {
        ToolCallFormat::Llama3 => r#"{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}"#,
        ToolCallFormat::Hermes => {
            "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 3}}\n</tool_call>"
        }
        ToolCallFormat::QwenXml => {
            "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
        }
        ToolCallFormat::Mistral => "[TOOL_CALLS]weather[ARGS]{\"city\": \"Oslo\", \"days\": 3}",
    };
    for format in ToolCallFormat::ALL {
        let grammar = |required, reasoning| {
            let tools = &tools;
            CallGrammar {
                format,
                tools,
                required,
                answer: None,
                several: true,
                reasoning,
                begins_in_reasoning: false,
                special: &special,
            }
            .lark(Grammar::BYTES_MAX)
            .unwrap()
        };
        let call = call(format);
        let free = grammar(false, None);
        assert!(accepts(&free, "Just text, 1 < 2."), "{free}");
        assert!(accepts(&free, call), "{free}");
        assert!(!accepts(&free, &call.replace("Oslo", "Paris")), "{free}");
        if format != ToolCallFormat::Llama3 {
            assert!(accepts(&free, &format!("Let me see.{call}{call}And so.")), "{free}");
        }
        let thinking = grammar(true, Some(ReasoningFormat::Think));
        assert!(accepts(&thinking, call), "{thinking}");
        assert!(accepts(&thinking, &format!("<think>\nhm\n</think>\n\n{call}")), "{thinking}");
        assert!(!accepts(&thinking, "text"), "{thinking}");
    }
}

/// The definitions alone, once for each property, would be 20 GB.
#[test]
fn a_grammar_of_many_properties_with_large_definitions_ends_at_the_limit() {
    let definitions = json!({"p": {"enum": vec![7; 1 << 20]}});
    let names: Vec<String> = (0..10_000).map(|at| format!("p{at}")).collect();
    let properties: serde_json::Map<String, Value> =
        names.iter().map(|name| (name.clone(), json!({"type": "integer"}))).collect();
    let large = json!({"type": "object", "properties": properties, "required": names, "$defs": definitions});
    let small = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "$defs": {"p": true}});
    let special = |_: &str| None;
    for format in ToolCallFormat::ALL {
        let lark = |parameters: &Value, count: usize, most: usize| {
            let tools = vec![GrammarTool { name: "t", parameters, strict: true }; count];
            let (reasoning, begins_in_reasoning) = (None, false);
            let grammar = CallGrammar {
                format,
                tools: &tools,
                required: true,
                answer: None,
                several: true,
                reasoning,
                begins_in_reasoning,
                special: &special,
            };
            grammar.lark(most)
        };
        let most = Grammar::BYTES_MAX;
        assert_eq!(lark(&large, 512, most), Err(CallGrammarError::TooLarge { most }), "{format}");
        assert_eq!(lark(&small, 5000, most), Err(CallGrammarError::TooLarge { most }), "{format}");
        let whole = lark(&small, 1, most).unwrap();
        let rules = whole.len() - whole.find('\n').unwrap() - 1;
        assert_eq!(lark(&small, 1, rules), Ok(whole), "{format}");
        let most = rules - 1;
        assert_eq!(lark(&small, 1, most), Err(CallGrammarError::TooLarge { most }), "{format}");
    }
}

#[test]
fn what_calls_with_tags_cannot_keep_is_refused_by_name_if_they_are_strict() {
    let lark = |parameters: &Value, strict: bool| {
        let special = |_: &str| None;
        let tools = [GrammarTool { name: "look", parameters, strict }];
        let (answer, reasoning) = (None, None);
        let (format, required, several, begins_in_reasoning) = (ToolCallFormat::QwenXml, true, false, false);
        let special = &special;
        let grammar = CallGrammar {
            format,
            tools: &tools,
            required,
            answer,
            several,
            reasoning,
            begins_in_reasoning,
            special,
        };
        grammar.lark(Grammar::BYTES_MAX)
    };
    let compiler = compiler();
    let compiles =
        |lark: String| compiler.compile(&Grammar::Lark(lark)).map(drop).map_err(|error| error.to_string());
    let a = json!({"a": {"type": "string"}});
    for (parameters, keyword) in [
        (json!({"properties": a, "anyOf": [{"required": ["a"]}]}), "anyOf"),
        (json!({"allOf": [{"properties": a}, {"oneOf": [true]}]}), "oneOf"),
        (json!({"properties": a, "minProperties": 1}), "minProperties"),
        (json!({"properties": a, "dependentRequired": {"a": ["b"]}}), "dependentRequired"),
        (json!({"properties": a, "patternProperties": {"^a": {"maxLength": 3}}}), "patternProperties"),
        (json!({"type": "string"}), "type"),
        (json!({"$ref": "#/$defs/none"}), "$ref"),
        (json!({"properties": {"a>b": true}, "required": ["a>b"]}), "the required property \"a>b\""),
        (
            json!({"properties": a, "required": ["b"], "additionalProperties": false}),
            "the required property \"b\"",
        ),
    ] {
        let error = lark(&parameters, true).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("the parameters of look have {keyword}, which cannot")),
            "{error}"
        );
        compiles(lark(&parameters, false).unwrap()).unwrap();
    }
    for (schema, words) in [
        (json!({"type": "string", "pattern": "a(?=b)"}), "look-around"),
        (
            json!({"type": "string", "pattern": "a\\b"}),
            "the pattern a\\b cannot be used for a text between tags",
        ),
        (json!({"type": "string", "const": 3}), "allows no string"),
        (json!({"type": "string", "not": {"format": "date"}}), "within not"),
    ] {
        let parameters = json!({"properties": {"a": schema}, "required": ["a"]});
        let error = compiles(lark(&parameters, true).unwrap()).unwrap_err();
        assert!(error.contains(words), "{schema}: {error}");
        compiles(lark(&parameters, false).unwrap()).unwrap();
    }
    // References to the root, and properties behind a reference.
    let tree = json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"name": {"$ref": "#/$defs/name"},
        "child": {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": false}},
        "required": ["name"], "additionalProperties": false}, "name": {"type": "string", "pattern": "^[a-z]+$"}}});
    let grammar = compiler.compile(&Grammar::Lark(lark(&tree, true).unwrap())).unwrap();
    let accepts = |name: &str, child: &str| {
        let call = format!(
            "<tool_call>\n<function=look>\n<parameter=name>\n{name}\n</parameter>\n<parameter=child>\n{child}\n</parameter>\n</function>\n</tool_call>"
        );
        let mut matcher = grammar.matcher(None);
        call.bytes().all(|byte| matcher.consume(byte.into()).is_ok()) && matcher.is_accepting().unwrap()
    };
    assert!(accepts("ab", "{}"));
    assert!(accepts("ab", r#"{"next": {"name": "c", "child": {"next": {"name": "d"}}}}"#));
    assert!(!accepts("AB", "{}"));
    assert!(!accepts("ab", r#"{"next": {"name": "C"}}"#));
    assert!(!accepts("ab", r#"{"next": {"child": {}}}"#));
}

/// References and `allOf` let a short schema name a large one many times: the product would be minutes of work, or gigabytes.
#[test]
fn parameters_of_schemas_that_name_each_other_often_are_read_with_bounded_work() {
    let names: Vec<String> = (0..20_000).map(|at| format!("p{at}")).collect();
    let each = |schema: Value| -> Value {
        names.iter().map(|name| (name.clone(), schema.clone())).collect::<serde_json::Map<_, _>>().into()
    };
    let values: Vec<String> = names.iter().take(5_000).cloned().collect();
    let part = json!({"$ref": "#/$defs/part"});
    let closed = json!({"additionalProperties": {"enum": values}});
    for (parameters, keyword) in [
        (json!({"properties": each(json!({"$ref": "#/$defs/e"})), "$defs": {"e": {"enum": values}}}), "enum"),
        (json!({"properties": each(json!({"$ref": "#/$defs/e"})), "$defs": {"e": {"type": values}}}), "enum"),
        (
            json!({"allOf": vec![part; 200], "$defs": {"part": {"properties": each(json!({"type": "string"}))}}}),
            "allOf",
        ),
        (
            json!({"properties": each(json!(true)), "allOf": vec![closed.clone(); 100]}),
            "additionalProperties",
        ),
        (
            json!({"properties": {"a": {"minLength": 1}, "b": {"minLength": 1}}, "allOf": vec![closed; 100]}),
            "allOf",
        ),
    ] {
        let mut types = ToolTypes::default();
        types.add("look", &parameters);
        let special = |_: &str| None;
        let tools = [GrammarTool { name: "look", parameters: &parameters, strict: true }];
        let (format, required, several, begins_in_reasoning) = (ToolCallFormat::QwenXml, true, false, false);
        let (answer, reasoning, special, tools) =
            (None, None, &special as &dyn Fn(&str) -> Option<u32>, &tools[..]);
        let grammar =
            CallGrammar { format, tools, required, answer, several, reasoning, begins_in_reasoning, special };
        let error = grammar.lark(Grammar::BYTES_MAX).unwrap_err().to_string();
        assert!(error.contains(&format!("have {keyword}, which")), "{keyword}: {error}");
    }
}
