//! The parser of model output: every format against what was written, and equal events however the output is divided.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::sync::Arc;

use inflight_output_parser::{
    CallIdStyle, CallIds, Marker, MarkerToken, OutputEnd, OutputEvent, OutputFormat, OutputParser,
    ReasoningFormat, ToolCallFormat, ToolTypes,
};
use proptest::prelude::*;
use serde_json::{Value, json};

/// Piece of output: text, or a token that is a marker.
#[derive(Debug, Clone, PartialEq)]
enum Piece {
    Text(String),
    Token(Marker),
}

fn text(text: &str) -> Piece {
    Piece::Text(text.to_owned())
}

fn tools() -> Arc<ToolTypes> {
    let mut tools = ToolTypes::default();
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"},
        "unit": {"type": ["string", "null"]}, "deep": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    }});
    tools.add("get_weather", &parameters);
    tools.add("search", &json!({"type": "object"}));
    Arc::new(tools)
}

/// Returns a format whose markers are all in the text.
fn format(calls: ToolCallFormat) -> OutputFormat {
    let reasoning = ReasoningFormat::Think;
    let texts = calls.markers().iter().chain(reasoning.markers()).copied().collect();
    OutputFormat {
        calls: Some(calls),
        reasoning: Some(reasoning),
        texts,
        tools: tools(),
        ..OutputFormat::default()
    }
}

/// Returns a format whose markers are all special tokens.
fn token_format(calls: ToolCallFormat) -> OutputFormat {
    let format = format(calls);
    let token = |(id, (marker, _)): (usize, &(Marker, &'static str))| MarkerToken {
        id: id as u32,
        marker: *marker,
        text: "",
    };
    let tokens = format.texts.iter().enumerate().map(token).collect();
    OutputFormat { tokens, texts: Vec::new(), ..format }
}

fn parser(format: &OutputFormat) -> OutputParser {
    OutputParser::new(Arc::new(format.clone()), CallIds::new(7, 0, CallIdStyle::Prefixed))
}

fn push(parser: &mut OutputParser, format: &OutputFormat, piece: &Piece) -> Vec<OutputEvent> {
    match piece {
        Piece::Text(text) => parser.push_text(text),
        Piece::Token(marker) => {
            let token = format.tokens.iter().find(|token| token.marker == *marker);
            token.map_or_else(Vec::new, |token| parser.push_marker(token))
        }
    }
}

fn parse(format: &OutputFormat, pieces: &[Piece], end: OutputEnd) -> Vec<OutputEvent> {
    let mut parser = parser(format);
    let mut events: Vec<_> = pieces.iter().flat_map(|piece| push(&mut parser, format, piece)).collect();
    events.extend(parser.finish(end));
    OutputEvent::merged(events)
}

/// Parsed output in short: content, reasoning, and calls with their arguments.
#[derive(Debug, Default, PartialEq)]
struct Parsed {
    content: String,
    reasoning: String,
    /// Those that were made.
    calls: Vec<(String, String)>,
    /// The others.
    cut: Vec<(String, String)>,
}

fn parsed(format: &OutputFormat, pieces: &[Piece]) -> Parsed {
    parsed_until(format, pieces, OutputEnd::Model)
}

fn parsed_until(format: &OutputFormat, pieces: &[Piece], end: OutputEnd) -> Parsed {
    let mut parsed = Parsed::default();
    let mut open: Option<(u32, String, String)> = None;
    for event in parse(format, pieces, end) {
        match event {
            OutputEvent::Content(text) => parsed.content.push_str(&text),
            OutputEvent::Reasoning(text) => parsed.reasoning.push_str(&text),
            OutputEvent::CallBegin { index, name, .. } => {
                assert!(
                    index as usize >= parsed.calls.len() + parsed.cut.len(),
                    "calls are numbered in order"
                );
                assert_eq!(open.replace((index, name, String::new())), None, "a call is open");
            }
            OutputEvent::CallArguments { index, fragment } => {
                let (at, _, arguments) = open.as_mut().expect("arguments belong to the open call");
                assert_eq!(*at, index, "arguments belong to the open call");
                arguments.push_str(&fragment);
            }
            OutputEvent::CallEnd { index, whole } => {
                let (at, name, arguments) = open.take().expect("a call that ends is open");
                assert_eq!(at, index);
                let is_object =
                    serde_json::from_str::<Value>(&arguments).is_ok_and(|value| value.is_object());
                assert_eq!(whole, is_object, "a call was made if its arguments are an object: {arguments}");
                assert!(whole || !format.whole_calls, "a call that was not made");
                if whole { &mut parsed.calls } else { &mut parsed.cut }.push((name, arguments));
            }
        }
    }
    assert_eq!(open, None, "every call ends");
    parsed
}

fn expect(calls: ToolCallFormat, output: &str, content: &str, expected: &[(&str, &str)]) {
    expect_cut(calls, output, content, expected, None);
}

/// Checks the calls that were made, and the last one, if it was not made.
fn expect_cut(
    calls: ToolCallFormat,
    output: &str,
    content: &str,
    expected: &[(&str, &str)],
    cut: Option<(&str, &str)>,
) {
    let found = parsed(&format(calls), &[text(output)]);
    let pairs = |calls: &[(String, String)]| -> Vec<(String, String)> { calls.to_vec() };
    let owned = |calls: &[(&str, &str)]| -> Vec<(String, String)> {
        calls.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    };
    assert_eq!((found.content.as_str(), pairs(&found.calls)), (content, owned(expected)), "{output}");
    assert_eq!(pairs(&found.cut), owned(cut.as_slice()), "{output}");
}

#[test]
fn hermes_calls_are_objects_between_markers() {
    let format = ToolCallFormat::Hermes;
    let call = r#"<tool_call>
{"name": "get_weather", "arguments": {"city": "Zürich", "n": [1, {"a": "}"}]}}
</tool_call>"#;
    let arguments = r#"{"city": "Zürich", "n": [1, {"a": "}"}]}"#;
    expect(format, call, "", &[("get_weather", arguments)]);
    expect(
        format,
        &format!("Let me look.\n{call}\n{call}\n"),
        "Let me look.",
        &[("get_weather", arguments); 2],
    );
    expect(format, &format!("{call}\n\nDone."), "\n\nDone.", &[("get_weather", arguments)]);
    let reversed = r#"<tool_call>{"arguments": {"a": 1}, "id": 3, "name": "x\u0041"}</tool_call>"#;
    expect(format, reversed, "", &[("xA", r#"{"a": 1}"#)]);
    expect(format, r#"<tool_call>{"name": "f"}</tool_call>"#, "", &[("f", "{}")]);
    expect(format, r#"<tool_call>{"name": "f", "arguments": null}"#, "", &[("f", "{}")]);
    expect(format, r#"<tool_call>{"name":"f","arguments":"{\"a\":\"\\n\"}"}"#, "", &[("f", r#"{"a":"\n"}"#)]);
    let quoted = r#"<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>"#;
    expect(format, quoted, "", &[("f", r#"{"a": "</tool_call><tool_call>"}"#)]);
    let cut = r#"<tool_call>{"name": "f", "arguments": {"a": "b"#;
    expect_cut(format, cut, "", &[], Some(("f", r#"{"a": "b"#)));
    // Nothing but the bracket of the call is missing.
    expect(format, r#"<tool_call>{"name": "f", "arguments": {"a": 1}"#, "", &[("f", r#"{"a": 1}"#)]);
    expect(
        format,
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}\n</tool_call>",
        "",
        &[("f", r#"{"a": 1}"#)],
    );
    let odd = r#"<tool_call>{"name": "f", "arguments": {"a": 1}, @"#;
    expect(format, odd, ", @", &[("f", r#"{"a": 1}"#)]);
}

#[test]
fn malformed_calls_are_content() {
    for output in [
        "<tool_call>hello</tool_call>",
        "a <tool_call>{\"name\": 3}</tool_call> b",
        "<tool_call>{\"name\": \"\", \"arguments\": {}}",
        "<tool_call>{\"arguments\": {\"a\": 1}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": 7}",
        "<tool_call>{\"name\": \"f\", ",
        "</tool_call> <tool_cal",
        "<tool_call>",
    ] {
        expect(ToolCallFormat::Hermes, output, output, &[]);
    }
    let late = r#"<tool_call>{"name": "f", "arguments": {"a": @ 1}}</tool_call>"#;
    expect_cut(ToolCallFormat::Hermes, late, "@ 1}}</tool_call>", &[], Some(("f", r#"{"a": "#)));
    let twice = r#"<tool_call>{"nam<tool_call>{"name": "f"}</tool_call>"#;
    expect(ToolCallFormat::Hermes, twice, "<tool_call>{\"nam<tool_call>{\"name\": \"f\"}</tool_call>", &[]);
    let twice = "<tool_call>\n<tool_call>\n{\"name\": \"f\"}\n</tool_call>";
    expect(ToolCallFormat::Hermes, twice, "<tool_call>\n", &[("f", "{}")]);
    expect(ToolCallFormat::QwenXml, "<tool_call>\n<func=a>", "<tool_call>\n<func=a>", &[]);
    expect(ToolCallFormat::Mistral, "[TOOL_CALLS]{x}", "[TOOL_CALLS]{x}", &[]);
    expect(ToolCallFormat::Mistral, "[TOOL_CALLS] add up", "[TOOL_CALLS] add up", &[]);
    let second = r#"[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": 1}]"#;
    expect(ToolCallFormat::Mistral, second, ", {\"name\": 1}]", &[("f", "{}")]);
    let deep = format!("<tool_call>{{\"name\": \"f\", \"arguments\": {{\"a\": {}", "[".repeat(100));
    assert_eq!(parsed(&format(ToolCallFormat::Hermes), &[text(&deep)]).cut.len(), 1, "ends at the bound");
    let name = format!("<tool_call>{{\"name\": \"{}\"}}", "f".repeat(300));
    expect(ToolCallFormat::Hermes, &name, &name, &[]);
    let many = r#"<tool_call>{"name": "f"}</tool_call>"#.repeat(200);
    let found = parsed(&format(ToolCallFormat::Hermes), &[text(&many)]);
    assert_eq!(found.calls.len(), OutputParser::CALLS_MAX as usize);
    assert_eq!(found.content.len(), (200 - 128) * r#"<tool_call>{"name": "f"}</tool_call>"#.len());
}

fn format_of(calls: ToolCallFormat) -> OutputFormat {
    format(calls)
}

#[test]
fn llama_calls_have_a_marker_or_are_the_whole_output() {
    let format = ToolCallFormat::Llama3;
    let call = r#"{"name": "get_weather", "parameters": {"city": "Oslo"}}"#;
    let expected = ("get_weather", r#"{"city": "Oslo"}"#);
    expect(format, call, "", &[expected]);
    expect(format, &format!("<|python_tag|>{call}"), "", &[expected]);
    expect(format, &format!("\n {call}; {call}\n"), "", &[expected; 2]);
    expect(format, r#"{"type": "function", "name": "search", "parameters": {}}"#, "", &[("search", "{}")]);
    for content in [
        r#"{"name": "Bob", "parameters": {}}"#,
        r#"{"name": "search", "age": 3}"#,
        r#"{"city": "Oslo"}"#,
        "{ a }",
        r#"See {"name": "search", "parameters": {}}"#,
        "<|python_tag|>print(1)",
        "  {",
    ] {
        expect(format, content, content, &[]);
    }
}

#[test]
fn mistral_calls_are_a_list_or_a_name_and_arguments() {
    let format = ToolCallFormat::Mistral;
    let two = [("add", r#"{"a": 3.5}"#), ("sub", "{}")];
    expect(format, r#"[TOOL_CALLS][{"name": "add", "arguments": {"a": 3.5}}, {"name": "sub"}]"#, "", &two);
    expect(
        format,
        r#"Yes.[TOOL_CALLS] [ {"name":"add","arguments":{"a": 3.5},"id":"x"} , {"name":"sub"} ] "#,
        "Yes.",
        &two,
    );
    expect(format, r#"[TOOL_CALLS]add[ARGS]{"a": 3.5}[TOOL_CALLS]sub[ARGS]{}"#, "", &two);
    expect(format, r#"[TOOL_CALLS]add{"a": 3.5}[TOOL_CALLS]sub {}"#, "", &two);
    expect(format, r#"[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 3.5}"#, "", &two[..1]);
    expect(format, r#"[TOOL_CALLS][{"name": "sub"}"#, "", &two[1..]);
}

#[test]
fn qwen_parameters_become_json_of_their_types() {
    let call = |parameters: &str| {
        format!("<tool_call>\n<function=get_weather>\n{parameters}</function>\n</tool_call>")
    };
    let parameter = |key: &str, value: &str| format!("<parameter={key}>\n{value}\n</parameter>\n");
    let one = |key: &str, value: &str, json: &str| {
        let expected = format!("{{\"{key}\": {json}}}");
        expect(ToolCallFormat::QwenXml, &call(&parameter(key, value)), "", &[("get_weather", &expected)]);
    };
    one("city", "New \"York\"\n\n2", r#""New \"York\"\n\n2""#);
    one("city", "</param", r#""</param""#);
    one("city", "7", r#""7""#);
    one("days", "7", "7");
    one("days", "soon", r#""soon""#);
    one("days", "True", "true");
    one("tags", "[1, {\"a\": 2}]", "[1, {\"a\": 2}]");
    one("unit", "null", "null");
    one("unit", "C", r#""C""#);
    one("deep", "{\"a\": null}", "{\"a\": null}");
    one("unknown", "7", r#""7""#);
    // A value without `</parameter>` ends at the next parameter or at the end of the call.
    let open = |key: &str, value: &str| format!("<parameter={key}>\n{value}\n");
    let both = r#"{"city": "x", "days": 3}"#;
    for end in ["</function>\n</tool_call>", "</function>", "</function>\n"] {
        let body = open("city", "x") + &open("days", "3");
        let output = format!("<tool_call>\n<function=get_weather>\n{body}{end}");
        expect(ToolCallFormat::QwenXml, &output, "", &[("get_weather", both)]);
    }
    let next = format!("<tool_call><function=search>{}</function>\n", open("a", "1"));
    expect(ToolCallFormat::QwenXml, &next.repeat(2), "", &[("search", r#"{"a": "1"}"#); 2]);
    // Closing tags within a value are text of the value.
    one("city", "a</function>b\n</function>\nc", r#""a</function>b\n</function>\nc""#);
    one("city", "</function>", r#""</function>""#);
    one(
        "city",
        "<parameter=x>\n<parameter=city>\n<parameter=",
        r#""<parameter=x>\n<parameter=city>\n<parameter=""#,
    );
    one("tags", "[\"</function>\"]", r#"["</function>"]"#);
    // Within the strings of JSON, any tag is; a line break ends such a string.
    let tags = r#"["</parameter>\n", "</function>\n</tool_call>", "\\\"<parameter=city>"]"#;
    one("tags", tags, tags);
    let broken = parameter("tags", "[\"a, 2]") + &parameter("days", "3");
    let expected = r#"{"tags": "[\"a, 2]", "days": 3}"#;
    expect(ToolCallFormat::QwenXml, &call(&broken), "", &[("get_weather", expected)]);
    // Without its marker, a call is one that names a tool.
    let body = parameter("city", "x") + &parameter("days", "3");
    let bare = format!("Yes.\n<function=get_weather>\n{body}</function>\n</tool_call>");
    expect(ToolCallFormat::QwenXml, &bare, "Yes.", &[("get_weather", both)]);
    for content in
        ["<function=unknown>\n</function>", "a <function=", "<function=get_weather", "a<function=\nb>"]
    {
        expect(ToolCallFormat::QwenXml, content, content, &[]);
    }
    let two = call(&(parameter("city", "x") + &parameter("days", "3")));
    expect(ToolCallFormat::QwenXml, &two, "", &[("get_weather", r#"{"city": "x", "days": 3}"#)]);
    expect(ToolCallFormat::QwenXml, &call(""), "", &[("get_weather", "{}")]);
    let odd = "<tool_call><function=search><parameter=a>1</parameter><odd></function>";
    expect_cut(ToolCallFormat::QwenXml, odd, "<odd></function>", &[], Some(("search", r#"{"a": "1""#)));
}

#[test]
fn reasoning_is_apart_from_content() {
    let thought = |output: &str| {
        let found = parsed(&format(ToolCallFormat::Hermes), &[text(output)]);
        (found.reasoning, found.content, found.calls.len())
    };
    let owned = |reasoning: &str, content: &str, calls| (reasoning.to_owned(), content.to_owned(), calls);
    assert_eq!(thought("<think>\nhm\n\nso\n</think>\n\nYes\n"), owned("hm\n\nso", "Yes\n", 0));
    assert_eq!(thought("\n<think></think>Yes"), owned("", "Yes", 0));
    assert_eq!(thought("<think>cut"), owned("cut", "", 0));
    assert_eq!(thought("a <think>b</think>"), owned("", "a <think>b</think>", 0));
    let call = "<think>I <tool_call>\n</think>\n<tool_call>{\"name\": \"f\"}</tool_call>";
    assert_eq!(thought(call), owned("I <tool_call>", "", 1));
    let begun = OutputFormat { begins_in_reasoning: true, ..format(ToolCallFormat::Hermes) };
    let found = parsed(&begun, &[text("hm</think>\nYes")]);
    assert_eq!((found.reasoning.as_str(), found.content.as_str()), ("hm", "Yes"));
    // As tokens, markers are recognised anywhere; what is spelt like one is text.
    let tokens = token_format(ToolCallFormat::Hermes);
    let pieces = [
        Piece::Token(Marker::ReasoningBegin),
        text("a</think>"),
        Piece::Token(Marker::ReasoningEnd),
        text("b"),
    ];
    let found = parsed(&tokens, &pieces);
    assert_eq!((found.reasoning.as_str(), found.content.as_str()), ("a</think>", "b"));
}

#[test]
fn calls_after_the_first_are_dropped_on_request() {
    let single = OutputFormat { single_call: true, ..format_of(ToolCallFormat::Hermes) };
    let output = r#"<tool_call>{"name": "f"}</tool_call>"#.repeat(3);
    let found = parsed(&single, &[text(&output)]);
    assert_eq!(found.calls, [("f".to_owned(), "{}".to_owned())]);
    assert_eq!(found.content, "");
    // The first one that was made, with no text of the others, streamed or at once.
    let made = r#"<tool_call>{"name": "f"}</tool_call>"#;
    let cut = r#"<tool_call>{"name": "g", "arguments": {"a": @"#;
    for whole_calls in [false, true] {
        let format = OutputFormat { whole_calls, ..single.clone() };
        let found = parsed(&format, &[text(&format!("{made}{cut}"))]);
        assert_eq!((found.calls.len(), found.cut.len(), &*found.content), (1, 0, ""), "{whole_calls}");
        let found = parsed(&format, &[text(&format!("{cut}\n{made}{made}"))]);
        assert_eq!((found.calls.len(), found.calls[0].0.as_str()), (1, "f"), "{whole_calls}");
    }
}

#[test]
fn ids_differ_between_calls_and_streams_and_repeat_for_the_same_stream() {
    let output = r#"[TOOL_CALLS]a{}[TOOL_CALLS]b{}"#;
    let ids = |stream: u128, choice: u32| -> Vec<String> {
        let format = Arc::new(format(ToolCallFormat::Mistral));
        let mut parser = OutputParser::new(format, CallIds::new(stream, choice, CallIdStyle::Nine));
        let id = |event| match event {
            OutputEvent::CallBegin { id, .. } => Some(id),
            _ => None,
        };
        parser.push_text(output).into_iter().filter_map(id).collect()
    };
    let mut all: Vec<String> = [ids(1, 0), ids(1, 1), ids(2, 0), ids(1 << 64, 0)].concat();
    assert!(all.iter().all(|id| id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric())));
    assert_eq!(ids(1, 0), all[..2]);
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 8);
}

/// Fragments of which outputs are made: whole calls, halves, markers, and text.
fn fragments() -> impl Strategy<Value = Vec<Piece>> {
    let parts = [
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<think>",
        "</think>",
        "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"é\"}}",
        "{\"name\": \"search\", \"parameters\": {}}",
        "{\"name\": \"f\", ",
        "\"arguments\": ",
        "{\"a\": [1, tru",
        "e, \"\\u00e9\\\"\"]}",
        "}",
        "]",
        "[",
        "{",
        ", ",
        "; ",
        "<function=get_weather>",
        "<function=",
        "</tool_call>\n",
        "<parameter=city>",
        "<parameter=days>",
        "\n",
        "</parameter>",
        "</function>",
        "12",
        "a b",
        " ",
        "é",
        "<",
        "\"",
        "\\",
        "get_weather",
        "null",
    ];
    let markers = [
        Marker::CallBegin,
        Marker::CallEnd,
        Marker::Arguments,
        Marker::CallId,
        Marker::ReasoningBegin,
        Marker::ReasoningEnd,
    ];
    let piece = prop_oneof![
        5 => prop::sample::select(parts.to_vec()).prop_map(text),
        1 => prop::sample::select(markers.to_vec()).prop_map(Piece::Token),
    ];
    prop::collection::vec(piece, 0..24)
}

/// Divides text into characters.
fn characters(pieces: &[Piece]) -> Vec<Piece> {
    let divide = |piece: &Piece| match piece {
        Piece::Text(text) => text.chars().map(|c| Piece::Text(c.to_string())).collect(),
        token @ Piece::Token(_) => vec![token.clone()],
    };
    pieces.iter().flat_map(divide).collect()
}

/// Joins neighbouring text where `cuts` does not cut.
fn joined(pieces: &[Piece], cuts: &[bool]) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::new();
    for (at, piece) in characters(pieces).into_iter().enumerate() {
        let cut = cuts.get(at % cuts.len().max(1)).copied().unwrap_or(true);
        match (joined.last_mut(), piece) {
            (Some(Piece::Text(last)), Piece::Text(text)) if !cut => last.push_str(&text),
            (_, piece) => joined.push(piece),
        }
    }
    joined
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn events_do_not_depend_on_how_the_output_is_divided(
        pieces in fragments(), cuts in prop::collection::vec(any::<bool>(), 1..40), pick in 0usize..4,
        as_tokens in any::<bool>(), begins_in_reasoning in any::<bool>(), single_call in any::<bool>(),
        whole_calls in any::<bool>(),
    ) {
        let calls = ToolCallFormat::ALL[pick];
        let format = if as_tokens { token_format(calls) } else { format(calls) };
        let format = OutputFormat { begins_in_reasoning, single_call, whole_calls, ..format };
        let whole = parse(&format, &joined(&pieces, &[false]), OutputEnd::Cut);
        prop_assert_eq!(&parse(&format, &characters(&pieces), OutputEnd::Cut), &whole);
        prop_assert_eq!(&parse(&format, &joined(&pieces, &cuts), OutputEnd::Cut), &whole);
        parsed(&format, &pieces);
        // What was emitted so far is the same, too, at every cut.
        let divided = joined(&pieces, &cuts);
        let (mut parser, mut by_character) = (parser(&format), parser(&format));
        for piece in &divided {
            let events = OutputEvent::merged(push(&mut parser, &format, piece));
            let same = characters(std::slice::from_ref(piece));
            let same = OutputEvent::merged(same.iter().flat_map(|piece| push(&mut by_character, &format, piece)));
            prop_assert_eq!(events, same);
        }
    }

    #[test]
    fn output_without_calls_is_not_lost(pieces in fragments(), pick in 0usize..4, whole_calls in any::<bool>()) {
        let format = OutputFormat { reasoning: None, whole_calls, ..format(ToolCallFormat::ALL[pick]) };
        let texts = format.texts.iter().filter(|(marker, _)| !matches!(marker, Marker::ReasoningBegin | Marker::ReasoningEnd));
        let format = OutputFormat { texts: texts.copied().collect(), ..format };
        let found = parsed(&format, &pieces);
        if found.calls.is_empty() && found.cut.is_empty() {
            let given: String = pieces.iter().map(|piece| if let Piece::Text(text) = piece { text } else { "" }).collect();
            prop_assert_eq!(found.content, given);
        }
    }

    #[test]
    fn calls_are_read_back_in_every_format(
        calls in prop::collection::vec(("[a-z_]{1,12}", prop::collection::btree_map("[a-z]{1,6}", "\\PC{0,12}", 0..4)), 1..4),
    ) {
        let value = |map: &std::collections::BTreeMap<String, String>| json!(map);
        let object = |name: &str, key: &str, map| json!({"name": name, key: value(map)}).to_string();
        for format in ToolCallFormat::ALL {
            let written: Vec<String> = calls.iter().map(|(name, map)| match format {
                ToolCallFormat::Llama3 => format!("<|python_tag|>{}", object(name, "parameters", map)),
                ToolCallFormat::Hermes => format!("<tool_call>\n{}\n</tool_call>\n", object(name, "arguments", map)),
                ToolCallFormat::Mistral => object(name, "arguments", map),
                ToolCallFormat::QwenXml => {
                    let parameter = |(key, value)| format!("<parameter={key}>\n{value}\n</parameter>\n");
                    let parameters: String = map.iter().map(parameter).collect();
                    format!("<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
                }
            }).collect();
            let output = match format {
                ToolCallFormat::Mistral => format!("[TOOL_CALLS][{}]", written.join(", ")),
                _ => written.concat(),
            };
            let found = parsed(&self::format(format), &[text(&output)]);
            let arguments = |(name, text): (String, String)| (name, serde_json::from_str::<Value>(&text).unwrap());
            let found: Vec<_> = found.calls.into_iter().map(arguments).collect();
            let expected: Vec<_> = calls.iter().map(|(name, map)| (name.clone(), value(map))).collect();
            prop_assert_eq!(found, expected, "{}", output);
        }
    }
}

/// Outputs with one or two calls in every spelling that a format has, with text around them.
fn scripted(calls: ToolCallFormat) -> Vec<String> {
    let object = |key: &str| {
        format!(
            r#"{{"name": "get_weather", "{key}": {{"city": "a\\"}}é", "days": -1.5e3, "tags": [{{}}, null]}}}}"#
        )
    };
    let quoted = r#"{"name": "f", "arguments": "{\"a\": \"b\"}"}"#;
    let early = r#"{"arguments": {"a": {"b": []}}, "id": "x", "name": "f"}"#;
    match calls {
        ToolCallFormat::Hermes => vec![
            format!(
                "Yes.\n<tool_call>\n{}\n</tool_call>\n<tool_call>{quoted}</tool_call> Done.",
                object("arguments")
            ),
            format!("<tool_call>{early}</tool_call>"),
        ],
        ToolCallFormat::Llama3 => vec![
            format!("<|python_tag|>{}; {}", object("parameters"), object("arguments")),
            format!("{}\n", object("parameters")),
        ],
        ToolCallFormat::Mistral => vec![
            format!("Yes.[TOOL_CALLS][{}, {quoted}]", object("arguments")),
            r#"[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 3.5}[TOOL_CALLS]sub{"b": [true]} "#.to_owned(),
        ],
        ToolCallFormat::QwenXml => {
            let parameters = "<parameter=city>\na \"b\"\n</parameter>\n<parameter=days>\n7\n</parameter>\n<parameter=deep>\n{\"a\": null}\n</parameter>\n";
            let call = format!("<tool_call>\n<function=get_weather>\n{parameters}</function>\n</tool_call>");
            let bare = format!("<function=get_weather>\n{parameters}</function>\n</tool_call>");
            let open = parameters.replace("</parameter>\n", "");
            vec![
                format!("Yes.\n{call}\n{call}"),
                bare,
                format!("<tool_call>\n<function=get_weather>\n{open}</function>\n</tool_call>"),
                // About this very format.
                "<tool_call>\n<function=get_weather>\n<parameter=city>\na</function>\n\nb</function>\n</parameter>\n</function>\n</tool_call>"
                    .to_owned(),
            ]
        }
    }
}

#[test]
fn of_every_prefix_of_a_call_only_the_calls_that_were_made_are_said_to_be() {
    let mut cut = 0;
    for calls in ToolCallFormat::ALL {
        for output in scripted(calls) {
            let all = parsed(&format(calls), &[text(&output)]).calls;
            assert!(!all.is_empty(), "{output}");
            for (at, _) in output.char_indices().chain([(output.len(), ' ')]) {
                let prefix = &output[..at];
                let streamed = parsed_until(&format(calls), &[text(prefix)], OutputEnd::Cut);
                assert_eq!(streamed.calls[..], all[..streamed.calls.len()], "{prefix}");
                cut += streamed.cut.len();
                // At once: the same calls, and the text of the other one is content.
                let format = OutputFormat { whole_calls: true, ..format(calls) };
                let whole = parsed_until(&format, &[text(prefix)], OutputEnd::Cut);
                assert_eq!((&whole.calls, whole.cut.len()), (&streamed.calls, 0), "{prefix}");
                let mut parser = parser(&format);
                parser.push_text(prefix);
                parser.finish(OutputEnd::Cut);
                let expected = (!whole.calls.is_empty(), !streamed.cut.is_empty());
                assert_eq!((parser.has_made_calls(), parser.has_cut_call()), expected, "{prefix}");
                if streamed.cut.is_empty() {
                    assert_eq!(whole.content, streamed.content, "{prefix}");
                }
                if whole.calls.is_empty() {
                    assert_eq!(whole.content, prefix, "the text of a call that was not made is content");
                }
            }
        }
    }
    assert!(cut > 100, "{cut} prefixes end in a call");
}

#[test]
fn formats_are_told_from_templates() {
    let of = ToolCallFormat::of_template;
    assert_eq!(of("{{ '<tool_call>\\n{\"name\": ' }}"), Some(ToolCallFormat::Hermes));
    assert_eq!(of("<tool_call>\\n<function=x><parameter=y>"), Some(ToolCallFormat::QwenXml));
    assert_eq!(of("[TOOL_CALLS]"), Some(ToolCallFormat::Mistral));
    assert_eq!(of("<|start_header_id|> {{ message.tool_calls[0] }}"), Some(ToolCallFormat::Llama3));
    assert_eq!(of("<|start_header_id|> {{ message.content }}"), None);
    assert_eq!(ReasoningFormat::of_template("'<think>' '</think>'"), Some(ReasoningFormat::Think));
    assert_eq!(ReasoningFormat::of_template("[THINK] [/THINK]"), Some(ReasoningFormat::Mistral));
    assert_eq!(ReasoningFormat::of_template("plain"), None);
    for format in ToolCallFormat::ALL {
        assert_eq!(format.to_string().parse(), Ok(format));
    }
    assert!("xml".parse::<ToolCallFormat>().unwrap_err().to_string().contains("qwen-xml"));
}
