//! Strict calls of generated tools: the arguments that are parsed of what a grammar allows are valid, as validators say that share no
//! code with it, and valid arguments are allowed, as far as the format can say them. `INFLIGHT_SCHEMA_PAIRS` is the number of pairs of
//! a tool and a call, `INFLIGHT_SCHEMA_SEED` the first seed.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
#![allow(clippy::disallowed_methods, reason = "the number of cases comes from the environment")]

use std::sync::Arc;

use inflight_contract::Grammar;
use inflight_fixtures::cases;
use inflight_grammar::{CompiledGrammar, MaskOutcome, MatchError, Matcher};
use inflight_output_parser::{
    CallGrammar, CallIdStyle, CallIds, GrammarTool, OutputEnd, OutputEvent, OutputFormat, OutputParser,
    ToolCallFormat, ToolTypes,
};
use inflight_schemas::{Case, Coverage, Json, Judge, Random, Verdict};
use serde_json::Value;

use super::grammar::{SPECIAL, compiler};

/// Pairs of a thorough run.
const PAIRS: u32 = 12_000;
/// Random calls of each tool.
const WALKS: usize = 4;
/// End token.
const END: u32 = 256;
/// Texts in which a parser and a grammar may differ about the end of a value.
const FRAGMENTS: [&str; 16] = [
    "</parameter>",
    "\n</parameter>\n",
    "</function>",
    "</function>\n</tool_call>",
    "</function>\n<",
    "<parameter=p>\n",
    "<parameter=o>",
    "<parameter=x>",
    "</tool_call>",
    "null",
    "None",
    "True",
    "\\\"",
    "\n",
    "\"",
    "5",
];

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

/// Format of the calls of one tool, `t`.
struct Calls<'a> {
    format: Arc<OutputFormat>,
    lark: Result<String, String>,
    parameters: &'a Value,
}

impl<'a> Calls<'a> {
    fn new(calls: ToolCallFormat, parameters: &'a Value) -> Self {
        let mut tools = ToolTypes::default();
        tools.add("t", parameters);
        let special = |_: &str| None;
        let grammar = CallGrammar {
            format: calls,
            tools: &[GrammarTool { name: "t", parameters, strict: true }],
            required: true,
            answer: None,
            several: false,
            reasoning: None,
            begins_in_reasoning: false,
            special: &special,
        };
        let lark = grammar.lark(Grammar::BYTES_MAX).map_err(|error| error.to_string());
        let texts = calls.markers().to_vec();
        let format =
            OutputFormat { calls: Some(calls), texts, tools: Arc::new(tools), ..OutputFormat::default() };
        Self { format: Arc::new(format), lark, parameters }
    }

    /// Returns the arguments of an output that is one call; `None` for any other.
    fn arguments(&self, output: &str) -> Option<String> {
        let mut parser = OutputParser::new(self.format.clone(), CallIds::new(1, 0, CallIdStyle::Prefixed));
        let mut events = parser.push_text(output);
        events.extend(parser.finish(OutputEnd::Model));
        let (mut arguments, mut ends) = (Vec::<String>::new(), 0);
        for event in events {
            match event {
                OutputEvent::CallBegin { name, .. } if name == "t" => arguments.push(String::new()),
                OutputEvent::CallArguments { fragment, .. } => arguments.last_mut()?.push_str(&fragment),
                OutputEvent::CallEnd { whole: true, .. } => ends += 1,
                OutputEvent::Content(text) if text.trim().is_empty() => {}
                OutputEvent::CallEnd { .. }
                | OutputEvent::Reasoning(_)
                | OutputEvent::CallBegin { .. }
                | OutputEvent::Content(_) => {
                    return None;
                }
            }
        }
        (arguments.len() == 1 && ends == 1).then(|| arguments.remove(0))
    }
}

/// Whether an output is allowed; `None` if that takes too much work to find out.
fn takes(compiled: &CompiledGrammar, output: &str) -> Option<bool> {
    let mut matcher = compiled.matcher(None);
    for byte in output.bytes() {
        match matcher.consume(byte.into()) {
            Ok(()) => {}
            Err(MatchError::TokenRefused { .. }) => return Some(false),
            Err(_) => return None,
        }
    }
    matcher.is_accepting().ok()
}

/// Writes an output of allowed bytes, chosen at random; `None` if it has no end soon.
fn walk(compiled: &CompiledGrammar, random: &mut Random) -> Option<String> {
    let size = 256 + SPECIAL.len();
    let mut matcher = compiled.matcher(None);
    let mut output = Vec::new();
    let mut mask = vec![0; Matcher::mask_words(size)];
    for step in 0..600 {
        let outcome = matcher.write_mask(&mut mask).ok()?;
        let allowed: Vec<u32> =
            (0..size as u32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        if outcome == MaskOutcome::Complete || allowed.contains(&END) {
            return String::from_utf8(output).ok();
        }
        if allowed.len() > 1 && random.once_in(6) {
            let fragment = random.pick(&FRAGMENTS);
            for byte in fragment.bytes() {
                if matcher.consume(byte.into()).is_err() {
                    break;
                }
                output.push(byte);
            }
            continue;
        }
        let closing = |id: &&u32| b"\"}]<\n".contains(&(**id as u8)) || (step > 100 && **id < 58);
        let some: Vec<u32> = allowed.iter().filter(closing).copied().collect();
        let pool = if some.is_empty() || (step < 40 && random.once_in(2)) { &allowed } else { &some };
        let token = random.pick(pool);
        matcher.consume(token).unwrap();
        output.push(token as u8);
    }
    None
}

/// Returns the possible spellings of a call with these arguments.
fn writings(format: ToolCallFormat, arguments: &Json) -> Vec<String> {
    // The separators of calls.
    let whole = arguments.spaced();
    if format == ToolCallFormat::Hermes {
        return vec![format!("<tool_call>\n{{\"name\": \"t\", \"arguments\": {whole}}}\n</tool_call>")];
    }
    let Json::Object(fields) = arguments else { return Vec::new() };
    let mut all = vec!["<tool_call>\n<function=t>\n".to_owned()];
    for (name, value) in fields {
        let mut texts = vec![value.spaced()];
        if let Json::Text(text) = value {
            texts.push(text.clone());
        }
        all = all
            .iter()
            .flat_map(|call| {
                texts.iter().map(move |text| format!("{call}<parameter={name}>\n{text}\n</parameter>\n"))
            })
            .collect();
    }
    all.iter().map(|call| format!("{call}</function>\n</tool_call>")).collect()
}

/// What happened to the pairs.
#[derive(Debug, Default)]
struct Counts {
    walks: usize,
    endless: usize,
    costly: usize,
    /// Valid arguments that are allowed, and those that the format cannot say.
    allowed: usize,
    unsayable: usize,
}

/// Judges `pairs` of a thorough run, each kind of schema at least `least` times.
fn judge(format: ToolCallFormat, pairs: u32, least: usize, refused_max: f64) {
    let wanted = variable("INFLIGHT_SCHEMA_PAIRS").unwrap_or_else(|| u64::from(cases(pairs))) as usize;
    let first = variable("INFLIGHT_SCHEMA_SEED").unwrap_or(0);
    let (compiler, mut coverage, mut counts) = (compiler(), Coverage::default(), Counts::default());
    let mut wrong = Vec::new();
    for seed in first.. {
        if coverage.pairs() >= wanted || wrong.len() >= 20 {
            break;
        }
        let case = Case::of_parameters(seed);
        let judge = Judge::new(&case.schema);
        let calls = Calls::new(format, &case.schema);
        let compiled = calls
            .lark
            .clone()
            .and_then(|lark| compiler.compile(&Grammar::Lark(lark)).map_err(|error| error.to_string()));
        let Ok(compiled) = compiled else {
            coverage.refused(&case);
            continue;
        };
        let mut random = Random::new(!seed);
        let written: Vec<Option<String>> = (0..WALKS).map(|_| walk(&compiled, &mut random)).collect();
        counts.walks += written.len();
        counts.endless += written.iter().filter(|output| output.is_none()).count();
        coverage.taken(&case, case.values.len() + written.len());
        for output in written.into_iter().flatten() {
            let arguments = calls.arguments(&output);
            let is_valid =
                arguments.as_deref().is_some_and(|text| judge.verdict(text, false) != Verdict::Forbidden);
            if !is_valid {
                wrong.push(format!("seed {seed}: {} allows {output:?}: {arguments:?}", calls.parameters));
            }
        }
        for value in &case.values {
            if judge.verdict(&value.to_string(), true) != Verdict::Required {
                continue;
            }
            let says = |output: &String| {
                let arguments = calls.arguments(output).and_then(|text| Json::parse(&text));
                arguments.is_some_and(|arguments| arguments.equals(value))
            };
            let sayings: Vec<String> = writings(format, value).into_iter().filter(says).collect();
            let taken: Vec<Option<bool>> = sayings.iter().map(|output| takes(&compiled, output)).collect();
            match taken.as_slice() {
                [] => counts.unsayable += 1,
                taken if taken.contains(&Some(true)) => counts.allowed += 1,
                taken if taken.contains(&None) => counts.costly += 1,
                _ => wrong.push(format!("seed {seed}: {} does not allow {:?}", calls.parameters, sayings[0])),
            }
        }
    }
    println!("{format}: {counts:?}; first seed {first}");
    assert!(wrong.is_empty(), "{} faults:\n{}", wrong.len(), wrong.join("\n"));
    assert!(counts.endless * 3 <= counts.walks && counts.costly * 500 <= coverage.pairs(), "{counts:?}");
    assert!(counts.unsayable <= counts.allowed, "{counts:?}");
    coverage.check(least, refused_max);
}

#[test]
fn strict_calls_with_tags_have_valid_arguments_and_valid_arguments_are_allowed() {
    judge(ToolCallFormat::QwenXml, PAIRS, 20, 50.0);
}

#[test]
fn strict_calls_in_json_have_valid_arguments_and_valid_arguments_are_allowed() {
    // Its schemas are judged by themselves, too.
    judge(ToolCallFormat::Hermes, PAIRS / 2, 5, 45.0);
}
