//! Compares tool calls that Inflight reads in model output with those of SMG's `tool-parser`: outputs of one to three calls with
//! random arguments, in four formats, as one piece and in random pieces. `cargo run --release [OUTPUTS [SEED]]`. It fails if
//! Inflight parses other calls than those in the output, or if `tool-parser` does, given the output as one piece. Differences of
//! `tool-parser`'s streaming are counted and printed only.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;

use inflight_output_parser::{
    CallIdStyle, CallIds, OutputEvent, OutputFormat, OutputParser, ToolCallFormat, ToolTypes,
};
use openai_protocol::common::Tool;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Map, Value, json};
use tool_parser::ToolParser;
use tool_parser::parsers::{LlamaParser, MistralParser, QwenParser, QwenXmlParser};

/// Default number of outputs for each format.
const OUTPUTS: usize = 500;
/// Divisions of each output.
const DIVISIONS: usize = 8;

/// Name and arguments of a call.
type Call = (String, Value);

/// Returns the tools: names and schemas.
fn tools() -> Vec<(&'static str, Value)> {
    let properties = json!({
        "city": {"type": "string"}, "note": {"type": "string"}, "days": {"type": "integer"},
        "exact": {"type": "boolean"}, "tags": {"type": "array"}, "place": {"type": "object"},
    });
    let schema = json!({"type": "object", "properties": properties});
    vec![("get_weather", schema.clone()), ("search", schema.clone()), ("book-2", schema)]
}

/// Draws a text with what parsers trip over. With `;`, the other parser divides the calls of Llama within strings.
fn text(random: &mut StdRng, format: ToolCallFormat) -> String {
    const PARTS: [&str; 22] = [
        "Zürich", "a b", "{", "}", "[", "]", "\"", "\\", ", ", ": ", "日本", "🌧", "'", "\n", "\t", "null",
        "12", "<b>", "</", "]]", "}}", ";",
    ];
    let usable = match format {
        ToolCallFormat::Llama3 => PARTS.len() - 1,
        // Values are text between tags: their ends, and whitespace around them, are the format's.
        ToolCallFormat::QwenXml => 13,
        _ => PARTS.len(),
    };
    let parts: String =
        (0..random.random_range(1..6)).map(|_| PARTS[random.random_range(0..usable)]).collect();
    format!("x{parts}x")
}

/// Draws the value of a parameter.
fn value(random: &mut StdRng, name: &str, format: ToolCallFormat) -> Value {
    match name {
        "days" => random.random_range(-5i64..1000).into(),
        "exact" => random.random::<bool>().into(),
        "tags" => (0..random.random_range(0..4)).map(|_| Value::from(text(random, format))).collect(),
        "place" => {
            json!({"name": text(random, format), "at": [random.random_range(0..90), 7.5], "more": null})
        }
        _ => text(random, format).into(),
    }
}

fn calls(random: &mut StdRng, format: ToolCallFormat) -> Vec<Call> {
    let tools = tools();
    let call = |random: &mut StdRng| {
        let (name, schema) = &tools[random.random_range(0..tools.len())];
        let names = schema["properties"].as_object().into_iter().flat_map(Map::keys);
        let chosen: Vec<&String> = names.filter(|_| random.random()).collect();
        let arguments: Map<String, Value> =
            chosen.into_iter().map(|name| (name.clone(), value(random, name, format))).collect();
        ((*name).to_owned(), Value::Object(arguments))
    };
    (0..random.random_range(1..4)).map(|_| call(random)).collect()
}

/// Writes calls as a model does.
fn written(calls: &[Call], format: ToolCallFormat) -> String {
    let object = |key: &'static str| {
        calls.iter().map(move |(name, arguments)| json!({"name": name, key: arguments}).to_string())
    };
    match format {
        ToolCallFormat::Llama3 => {
            format!("<|python_tag|>{}", object("parameters").collect::<Vec<_>>().join("; "))
        }
        ToolCallFormat::Hermes => {
            let each = object("arguments").map(|call| format!("<tool_call>\n{call}\n</tool_call>"));
            each.collect::<Vec<_>>().join("\n")
        }
        ToolCallFormat::Mistral => {
            format!("[TOOL_CALLS] [{}]", object("arguments").collect::<Vec<_>>().join(", "))
        }
        ToolCallFormat::QwenXml => {
            let parameter = |(name, value): (&String, &Value)| {
                let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                format!("<parameter={name}>\n{value}\n</parameter>\n")
            };
            let each = calls.iter().map(|(name, arguments)| {
                let parameters: String = arguments.as_object().into_iter().flatten().map(parameter).collect();
                format!("<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
            });
            each.collect::<Vec<_>>().join("\n")
        }
    }
}

/// Divides a text at random places.
fn divided(random: &mut StdRng, text: &str) -> Vec<String> {
    let most = [2, 6, 40][random.random_range(0..3)];
    let mut pieces = vec![String::new()];
    let mut left = random.random_range(1..=most);
    for c in text.chars() {
        if left == 0 {
            pieces.push(String::new());
            left = random.random_range(1..=most);
        }
        left -= 1;
        pieces.last_mut().into_iter().for_each(|piece| piece.push(c));
    }
    pieces
}

/// Reads the calls with Inflight's parser; an error if arguments are no JSON.
fn ours(pieces: &[String], format: ToolCallFormat) -> Result<Vec<Call>, String> {
    let mut types = ToolTypes::default();
    tools().iter().for_each(|(name, schema)| types.add(name, schema));
    let format = OutputFormat {
        calls: Some(format),
        texts: format.markers().to_vec(),
        tools: Arc::new(types),
        ..OutputFormat::default()
    };
    let mut parser = OutputParser::new(Arc::new(format), CallIds::new(1, 0, CallIdStyle::Prefixed));
    let mut events: Vec<OutputEvent> = pieces.iter().flat_map(|piece| parser.push_text(piece)).collect();
    events.extend(parser.finish());
    let mut calls: Vec<(String, String)> = Vec::new();
    for event in OutputEvent::merged(events) {
        match event {
            OutputEvent::CallBegin { name, .. } => calls.push((name, String::new())),
            OutputEvent::CallArguments { index, fragment } => calls[index as usize].1.push_str(&fragment),
            _ => {}
        }
    }
    calls.into_iter().map(read).collect()
}

fn read((name, arguments): (String, String)) -> Result<Call, String> {
    let value = serde_json::from_str(&arguments).map_err(|error| format!("{name} {arguments}: {error}"))?;
    Ok((name, value))
}

fn peer(format: ToolCallFormat) -> Box<dyn ToolParser> {
    match format {
        ToolCallFormat::Llama3 => Box::new(LlamaParser::new()),
        ToolCallFormat::Hermes => Box::new(QwenParser::new()),
        ToolCallFormat::QwenXml => Box::new(QwenXmlParser::new()),
        ToolCallFormat::Mistral => Box::new(MistralParser::new()),
    }
}

async fn theirs_whole(text: &str, format: ToolCallFormat, tools: &[Tool]) -> Result<Vec<Call>, String> {
    let parsed = peer(format).parse_complete_with_tools(text, tools).await;
    let (_, calls) = parsed.map_err(|error| error.to_string())?;
    calls.into_iter().map(|call| read((call.function.name, call.function.arguments))).collect()
}

async fn theirs_divided(
    pieces: &[String],
    format: ToolCallFormat,
    tools: &[Tool],
) -> Result<Vec<Call>, String> {
    let mut parser = peer(format);
    let mut items = Vec::new();
    for piece in pieces {
        items.extend(parser.parse_incremental(piece, tools).await.map_err(|error| error.to_string())?.calls);
    }
    items.extend(parser.get_unstreamed_tool_args().unwrap_or_default());
    let mut calls: BTreeMap<usize, (String, String)> = BTreeMap::new();
    for item in items {
        let call = calls.entry(item.tool_index).or_default();
        item.name.into_iter().for_each(|name| call.0 = name);
        call.1.push_str(&item.parameters);
    }
    calls.into_values().map(read).collect()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let outputs = arguments.next().and_then(|count| count.parse().ok()).unwrap_or(OUTPUTS);
    let seed = arguments.next().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand::random);
    println!("{outputs} outputs of each format, seed {seed}");
    let schemas: Result<Vec<Tool>, _> = tools()
        .into_iter()
        .map(|(name, schema)| json!({"type": "function", "function": {"name": name, "parameters": schema}}))
        .map(serde_json::from_value)
        .collect();
    let schemas = match schemas {
        Ok(schemas) => schemas,
        Err(error) => {
            eprintln!("the tools cannot be read: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut random = StdRng::seed_from_u64(seed);
    let mut failures = 0;
    for format in ToolCallFormat::ALL {
        let (mut whole, mut divisions, mut differ, mut shown) = (0, 0, 0, 0);
        for _ in 0..outputs {
            let expected = calls(&mut random, format);
            let text = written(&expected, format);
            let theirs = theirs_whole(&text, format, &schemas).await;
            if theirs.as_ref() != Ok(&expected) {
                whole += 1;
                println!("{format}: whole: {text:?}: {theirs:?}");
            }
            for _ in 0..DIVISIONS {
                let pieces = divided(&mut random, &text);
                let found = ours(&pieces, format);
                if found.as_ref() != Ok(&expected) {
                    failures += 1;
                    println!("{format}: Inflight: {pieces:?}: {found:?}");
                }
                divisions += 1;
                let theirs = theirs_divided(&pieces, format, &schemas).await;
                if theirs != found {
                    differ += 1;
                    if shown < 2 {
                        shown += 1;
                        println!("{format}: divided: {pieces:?}: {theirs:?}");
                    }
                }
            }
        }
        failures += whole;
        println!(
            "{format}: tool-parser differs in {whole} of {outputs} whole outputs, in {differ} of {divisions} divided ones"
        );
    }
    if failures > 0 {
        eprintln!("{failures} outputs are read differently");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
