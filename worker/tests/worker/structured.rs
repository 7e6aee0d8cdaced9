//! Outputs of a model with random weights under JSON schemas, at temperature 1: each that ends is valid under its schema, as
//! an independent validator says. The schemas are tool definitions and, where it is at hand, those of the JSON Schema Test
//! Suite; a schema that cannot be enforced is refused before it runs.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]
#![allow(clippy::disallowed_methods, reason = "the suite's place comes from the environment")]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use inflight_contract::{Constraint, FinishReason, Grammar, SamplingSpec, Weight};
use inflight_fixtures::{Arch, Checkpoint, Dtype, Family, cases, skipped};
use inflight_grammar::{MemoryBudget, Vocabulary};
use inflight_grammar_service::Grammars;
use inflight_models::{ModelDir, ModelSource};
use inflight_runtime_cpu::{CpuOptions, CpuRuntime};
use inflight_worker::engine::{
    Command, Engine, EngineOptions, Failure, Finish, Request, RequestKey, ResumedChoice, SessionId,
};
use inflight_worker_core::Time;
use serde_json::{Value, json};

/// Outputs to validate in a thorough run.
const OUTPUTS: u32 = 3000;
/// Maximum share of the suite's schemas that are refused, in percent; those that allow no value are among them.
const REFUSED_MAX: f64 = 27.0;
/// Sequences in a batch.
const SLOTS: u32 = 16;
const CONTEXT: u32 = 512;
const MAX_TOKENS: u32 = 400;
/// Folders of the suite, and the dialects of their schemas.
const DRAFTS: [(&str, &str); 5] = [
    ("draft4", "http://json-schema.org/draft-04/schema#"),
    ("draft6", "http://json-schema.org/draft-06/schema#"),
    ("draft7", "http://json-schema.org/draft-07/schema#"),
    ("draft2019-09", "https://json-schema.org/draft/2019-09/schema"),
    ("draft2020-12", "https://json-schema.org/draft/2020-12/schema"),
];
/// End tokens of the model's tokenizer.
const EOS: [u32; 2] = [281, 284];

/// Parameters of tools as agents define them.
fn tools() -> Vec<Value> {
    let object = |properties: Value, required: Value| {
        json!({
            "type": "object", "properties": properties, "required": required, "additionalProperties": false,
        })
    };
    let point = object(json!({"lat": {"type": "number"}, "lon": {"type": "number"}}), json!(["lat", "lon"]));
    vec![
        object(
            json!({
                "location": {"type": "string", "description": "City and country"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            }),
            json!(["location", "unit"]),
        ),
        object(
            json!({
                "query": {"type": "string", "minLength": 1, "maxLength": 40},
                "limit": {"type": "integer", "minimum": 1, "maximum": 50},
                "filters": {"type": "array", "maxItems": 3, "items": object(
                    json!({"field": {"enum": ["author", "year"]}, "value": {"type": ["string", "integer"]}}),
                    json!(["field", "value"]),
                )},
            }),
            json!(["query", "limit"]),
        ),
        object(
            json!({
                "path": {"type": "string", "pattern": "^/[a-z]{1,8}(/[a-z]{1,8}){0,3}$"},
                "edits": {"type": "array", "minItems": 1, "maxItems": 2, "items": object(
                    json!({"old": {"type": "string", "maxLength": 20}, "new": {"type": "string", "maxLength": 20}}),
                    json!(["old", "new"]),
                )},
                "dry_run": {"type": "boolean"},
            }),
            json!(["path", "edits", "dry_run"]),
        ),
        json!({"$defs": {"point": point}, "type": "object", "properties": {
            "from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"},
            "mode": {"anyOf": [{"const": "car"}, {"const": "train"}, {"type": "null"}]},
        }, "required": ["from", "to", "mode"], "additionalProperties": false}),
        object(
            json!({
                "date": {"type": "string", "format": "date"},
                "guests": {"type": "integer", "exclusiveMinimum": 0, "maximum": 20},
                "notes": {"anyOf": [{"type": "string", "maxLength": 30}, {"type": "null"}]},
            }),
            json!(["date", "guests", "notes"]),
        ),
    ]
}

/// Returns the groups of the JSON Schema Test Suite, whose folder of tests `INFLIGHT_JSON_SCHEMA_SUITE` names: a schema with
/// its dialect, and values that are valid or not.
fn suite() -> Vec<Value> {
    let Ok(folder) = std::env::var("INFLIGHT_JSON_SCHEMA_SUITE") else {
        skipped("schemas of the JSON Schema Test Suite", "INFLIGHT_JSON_SCHEMA_SUITE names no folder");
        return Vec::new();
    };
    let mut all = Vec::new();
    for (draft, dialect) in DRAFTS {
        for file in std::fs::read_dir(Path::new(&folder).join(draft)).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let groups: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
            for mut group in groups {
                if let Some(object) = group["schema"].as_object_mut() {
                    object.entry("$schema").or_insert_with(|| dialect.into());
                }
                all.push(group);
            }
        }
    }
    all
}

/// Returns the schemas of the suite, each once.
fn suite_schemas() -> Vec<Value> {
    let schemas = suite().into_iter().map(|mut group| group["schema"].take());
    let schemas: BTreeMap<String, Value> = schemas.map(|schema| (schema.to_string(), schema)).collect();
    schemas.into_values().collect()
}

/// Returns grammars over a vocabulary of single bytes.
fn byte_grammars() -> Grammars {
    let bytes: Vec<[u8; 1]> = (0..=u8::MAX).map(|byte| [byte]).collect();
    let tokens = bytes.iter().map(|byte| (&byte[..], false));
    let vocabulary = Arc::new(Vocabulary::from_tokens(tokens.chain([(&b"<end>"[..], true)])));
    Grammars::new(257, &[256], move || Ok(Arc::clone(&vocabulary)))
}

#[test]
fn no_value_that_the_test_suite_calls_invalid_is_allowed() {
    let grammars = byte_grammars();
    let (mut valid, mut refused, mut invalid, mut wrong) = (0, 0, 0, Vec::new());
    for group in suite() {
        let Ok(compiled) = grammars.compile(&Grammar::json_schema(group["schema"].to_string())) else {
            continue;
        };
        for case in group["tests"].as_array().unwrap() {
            let (mut matcher, text) = (compiled.matcher(None), case["data"].to_string());
            let matches = text.bytes().all(|byte| matcher.consume(byte.into()).is_ok());
            let allowed = matches && matcher.is_accepting().unwrap_or(false);
            match case["valid"] == true {
                true => (valid, refused) = (valid + 1, refused + usize::from(!allowed)),
                false => invalid += 1,
            }
            if allowed && case["valid"] == false {
                wrong.push(format!("{} allows {text}", group["schema"]));
            }
        }
    }
    println!(
        "{invalid} invalid values; of {valid} valid ones, {refused} are written otherwise, as with keys in another order"
    );
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(refused * 10 <= valid, "{refused} of {valid} valid values are refused");
}

fn engine() -> (Engine, Arc<Vocabulary>, Arc<Grammars>) {
    engine_within(MemoryBudget::DEFAULT_BYTES)
}

/// Returns an engine whose grammar states hold at most so many bytes.
fn engine_within(matcher_bytes: usize) -> (Engine, Arc<Vocabulary>, Arc<Grammars>) {
    let folder = Checkpoint::new(Arch::Llama31, Dtype::F32).write_temp().unwrap();
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["max_position_embeddings"] = CONTEXT.into();
    std::fs::write(&path, config.to_string()).unwrap();
    let model = ModelDir::open(&ModelSource::Directory(folder.path().to_owned())).unwrap();
    let options = CpuOptions {
        threads: Some(2),
        kv_bytes: 64 << 20,
        host_bytes: 0,
        block_tokens: 16,
        slots: SLOTS,
        batch_tokens: 256,
        context_tokens: None,
        isa: None,
        quantize: None,
        kv_dtype: None,
        tensor_parallel: 1,
        mtp: false,
    };
    let runtime = CpuRuntime::load(&model, &options, &|_, _| {}).unwrap().overlapped().unwrap();
    let mut engine = Engine::new(Box::new(runtime), &EOS, EngineOptions::default()).unwrap();
    let vocabulary = Arc::new(Vocabulary::from_json(Family::Llama3.tokenizer_json().as_bytes()).unwrap());
    let source = Arc::clone(&vocabulary);
    let grammars = Grammars::new(engine.model_limits().vocab_size, &EOS, move || Ok(Arc::clone(&source)));
    let grammars = Arc::new(grammars.with_matcher_bytes_max(matcher_bytes));
    engine.set_grammars(Arc::clone(&grammars));
    (engine, vocabulary, grammars)
}

/// Returns biases that let random texts end: for what closes strings, arrays and objects.
fn biases(vocabulary: &Vocabulary) -> Vec<(u32, f32)> {
    let ends = |id: &u32| matches!(vocabulary.bytes(*id), b"\"" | b"}" | b"]");
    (0..vocabulary.len() as u32).filter(ends).map(|id| (id, 3.0)).collect()
}

fn request(schema: &Value, id: u64, biases: &[(u32, f32)]) -> Request {
    let grammar = Grammar::json_schema(schema.to_string());
    let sampling = SamplingSpec {
        temperature: 1.0,
        seed: id,
        logit_bias: biases.to_vec(),
        constraint: Some(Arc::new(Constraint { grammar, begins_after: None })),
        ..SamplingSpec::default()
    };
    Request {
        key: RequestKey { session: SessionId(0), request: id },
        attempt: 1,
        prompt: (0..5).map(|at| 40 + at + (id % 100) as u32).collect(),
        max_tokens: MAX_TOKENS,
        sampling: Arc::new(sampling.validate().unwrap()),
        choices: vec![ResumedChoice::default()],
        prompt_logprobs_received: 0,
        tenant: "a".into(),
        weight: Weight::default(),
        virtual_start_time: None,
        priority: 0,
        deadline: None,
        queued: None,
        grammar: None,
        span: tracing::Span::none(),
    }
}

/// Runs requests for the given schemas, by index, and returns the output and the end of each.
fn generate(
    engine: &mut Engine,
    vocabulary: &Vocabulary,
    schemas: &[Value],
    work: &[usize],
) -> Vec<(Vec<u8>, Finish)> {
    let (mut events, biases) = (Vec::new(), biases(vocabulary));
    let mut outputs: Vec<(Vec<u8>, Option<Finish>)> = vec![(Vec::new(), None); work.len()];
    let (mut submitted, mut ended) = (0, 0);
    while ended < work.len() {
        while submitted < work.len() && submitted - ended < 2 * SLOTS as usize {
            let request = request(&schemas[work[submitted]], submitted as u64, &biases);
            engine.command(Command::Submit(Box::new(request)), Time::ZERO, &mut events);
            submitted += 1;
        }
        engine.step(Time::ZERO, &mut events).unwrap();
        for event in events.drain(..) {
            let (text, end) = &mut outputs[event.key.request as usize];
            let token = event.token.filter(|token| !vocabulary.is_special(*token));
            text.extend(token.iter().flat_map(|token| vocabulary.bytes(*token)));
            ended += usize::from(event.finish.is_some());
            *end = event.finish.or(end.take());
        }
    }
    outputs.into_iter().map(|(text, end)| (text, end.unwrap())).collect()
}

/// Whether a number of a JSON text has more digits than the validator's f64 holds.
fn has_inexact_number(text: &str) -> bool {
    text.split(|c: char| !c.is_ascii_digit()).any(|digits| digits.len() > 15)
}

#[test]
fn outputs_under_a_schema_are_valid_and_what_cannot_be_enforced_is_refused_before_it_runs() {
    let (mut engine, vocabulary, grammars) = engine();
    engine.command(Command::Open(SessionId(0)), Time::ZERO, &mut Vec::new());
    let wanted = cases(OUTPUTS) as usize;
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let tools = tools();
    let all: Vec<Value> = tools.iter().cloned().chain(suite_schemas()).collect();
    let mut refusals: BTreeMap<String, usize> = BTreeMap::new();
    let mut accepted = Vec::new();
    for (at, schema) in all.iter().enumerate() {
        match runtime.block_on(grammars.check(&Grammar::json_schema(schema.to_string()))) {
            Ok(_) => accepted.push(at),
            Err(error) => {
                assert!(at >= tools.len(), "a tool was refused: {schema}: {error}");
                let reason: String = error.to_string().chars().take(40).collect();
                *refusals.entry(reason).or_default() += 1;
            }
        }
    }
    let refused: usize = refusals.values().sum();
    let share = 100.0 * refused as f64 / all.len() as f64;
    println!("{} schemas, {refused} of them refused ({share:.1} %): {refusals:#?}", all.len());
    assert!(all.len() == tools.len() || share <= REFUSED_MAX, "{share:.1} % of the schemas are refused");
    // Half as many again, as random texts may reach `max_tokens`.
    let work: Vec<usize> = (0..wanted * 3 / 2).map(|nth| accepted[nth % accepted.len()]).collect();
    let outputs = generate(&mut engine, &vocabulary, &all, &work);
    let (mut valid, mut inexact, mut unfinished) = (0, 0, 0);
    let (mut stuck, mut invalid) = (BTreeMap::new(), Vec::new());
    for ((text, end), at) in outputs.iter().zip(&work) {
        let schema = &all[*at];
        match end {
            Finish::Ended(FinishReason::Stop | FinishReason::Complete) => {}
            Finish::Ended(_) => {
                unfinished += 1;
                continue;
            }
            Finish::Failed(Failure::Constraint(reason)) => {
                *stuck.entry((schema.to_string(), reason.clone())).or_insert(0) += 1;
                continue;
            }
            other => panic!("{schema}: {other:?}"),
        }
        let text = String::from_utf8_lossy(text);
        let value: Value = match serde_json::from_str(&text) {
            Ok(value) => value,
            // JSON has numbers of any size, the parser those of f64.
            Err(error) if error.to_string().contains("number out of range") => {
                inexact += 1;
                continue;
            }
            Err(error) => {
                invalid.push(format!("{schema}: {error}: {text}"));
                continue;
            }
        };
        if has_inexact_number(&text) {
            inexact += 1;
            continue;
        }
        // A format is an annotation; the grammar has it as a regular expression, wider than some validators'.
        let validator = jsonschema::options().should_validate_formats(false).build(schema);
        let validator = validator.unwrap_or_else(|error| panic!("{schema}: {error}"));
        if validator.is_valid(&value) {
            valid += 1;
        } else {
            invalid.push(format!("{schema} does not allow {text}"));
        }
    }
    println!(
        "{valid} outputs are valid, {unfinished} reached max_tokens, {inexact} have a number beyond f64"
    );
    assert!(invalid.is_empty(), "{invalid:#?}");
    assert!(stuck.is_empty(), "{stuck:#?}");
    assert!(valid >= wanted, "only {valid} outputs ended; {unfinished} reached max_tokens");
}

/// Runs a request alone and returns its tokens and its end.
fn alone(engine: &mut Engine, request: Request) -> (Vec<u32>, Finish) {
    let (mut events, mut tokens) = (Vec::new(), Vec::new());
    engine.command(Command::Submit(Box::new(request)), Time::ZERO, &mut events);
    loop {
        for event in events.drain(..) {
            tokens.extend(event.token);
            if let Some(end) = event.finish {
                return (tokens, end);
            }
        }
        engine.step(Time::ZERO, &mut events).unwrap();
    }
}

#[test]
fn a_choice_resumed_after_any_token_gets_the_tokens_of_an_uncut_one() {
    let (mut engine, vocabulary, _) = engine();
    engine.command(Command::Open(SessionId(0)), Time::ZERO, &mut Vec::new());
    let biases = biases(&vocabulary);
    for (nth, schema) in tools().iter().enumerate() {
        let request = || request(schema, nth as u64, &biases);
        let (tokens, end) = alone(&mut engine, request());
        for cut in (0..=tokens.len()).step_by(7).chain([tokens.len()]) {
            let resumed = ResumedChoice { tokens: tokens[..cut].to_vec(), finished: false };
            let (rest, found) = alone(&mut engine, Request { choices: vec![resumed], ..request() });
            assert_eq!((&rest[..], &found), (&tokens[cut..], &end), "{schema} after {cut} of {tokens:?}");
        }
        let mut other = tokens.clone();
        other[0] = u32::from(b'x');
        let resumed = ResumedChoice { tokens: other, finished: false };
        let (none, refused) = alone(&mut engine, Request { choices: vec![resumed], ..request() });
        assert!(none.is_empty() && matches!(refused, Finish::Failed(Failure::Constraint(_))), "{refused:?}");
    }
}

#[test]
fn a_choice_whose_masks_leave_no_token_of_the_grammar_ends_with_the_reason() {
    let (mut engine, vocabulary, _) = engine();
    engine.command(Command::Open(SessionId(0)), Time::ZERO, &mut Vec::new());
    let letters = (0..vocabulary.len() as u32).filter(|id| vocabulary.bytes(*id) == b"a");
    let sampling = SamplingSpec {
        allowed_token_ids: letters.collect(),
        constraint: Some(Arc::new(Constraint {
            grammar: Grammar::Regex("aa[0-9]".to_owned()),
            begins_after: None,
        })),
        ..SamplingSpec::default()
    };
    let sampling = Arc::new(sampling.validate().unwrap());
    let request = Request { sampling, ..request(&json!({}), 0, &[]) };
    let (tokens, end) = alone(&mut engine, request);
    assert_eq!(tokens.len(), 2, "{tokens:?}");
    let Finish::Failed(Failure::Constraint(reason)) = end else { panic!("{end:?}") };
    assert!(reason.contains("allowed_token_ids, bad_words or min_tokens leave none"), "{reason}");
}

#[test]
fn the_engine_compiles_no_grammar_that_its_request_holds_though_the_cache_has_evicted_it() {
    let (mut engine, vocabulary, grammars) = engine();
    engine.command(Command::Open(SessionId(0)), Time::ZERO, &mut Vec::new());
    let request = request(&tools()[0], 0, &biases(&vocabulary));
    let grammar = &request.sampling.constraint.as_ref().unwrap().grammar;
    let held = Request { grammar: Some(grammars.compile(grammar)), ..request.clone() };
    for other in 0..64 {
        grammars.compile(&Grammar::Regex(format!("a{{{other}}}b"))).unwrap();
    }
    assert!(grammars.compiled(grammar).is_none(), "the cache keeps more than 64 grammars");
    let before = grammars.counters().misses;
    let output = alone(&mut engine, held);
    assert!(!output.0.is_empty(), "{output:?}");
    assert_eq!(grammars.counters().misses, before);
    assert_eq!(alone(&mut engine, request), output);
    assert_eq!(grammars.counters().misses, before + 1);
}

#[test]
fn grammar_states_are_released_when_their_choices_end() {
    const BUDGET: usize = 6 << 20;
    /// Bytes that a mask may add before they are counted.
    const MASK_BYTES: usize = 4 << 20;
    let costly = |id: u64| {
        let grammar = Grammar::Regex(r"[\x20-\x7e]*[aeiou][\x20-\x7e]{13}".to_owned());
        let sampling = SamplingSpec {
            temperature: 1.0,
            seed: id,
            ignore_eos: true,
            constraint: Some(Arc::new(Constraint { grammar, begins_after: None })),
            ..SamplingSpec::default()
        };
        Request { sampling: Arc::new(sampling.validate().unwrap()), ..request(&json!({}), id, &[]) }
    };
    let (mut engine, vocabulary, grammars) = engine_within(BUDGET);
    let tool = request(&tools()[0], 0, &biases(&vocabulary));
    let mut events = Vec::new();
    engine.command(Command::Open(SessionId(0)), Time::ZERO, &mut events);
    for request in std::iter::once(tool.clone()).chain((1..9).map(costly)) {
        engine.command(Command::Submit(Box::new(request)), Time::ZERO, &mut events);
    }
    assert!(grammars.matcher_bytes() > 0);
    let (mut tokens, mut ends, mut steps) = (Vec::new(), BTreeMap::new(), 0);
    while ends.len() < 9 {
        engine.step(Time::ZERO, &mut events).unwrap();
        steps += 1;
        if steps == 20 {
            // Their masks are being computed.
            for request in 1..4 {
                let key = RequestKey { session: SessionId(0), request };
                engine.command(Command::Cancel { key, choice: None }, Time::ZERO, &mut events);
            }
        }
        for event in events.drain(..) {
            tokens.extend(event.token.filter(|_| event.key.request == 0));
            ends.extend(event.finish.map(|finish| (event.key.request, finish)));
        }
        let bytes = grammars.matcher_bytes();
        assert!(bytes <= BUDGET + MASK_BYTES, "{bytes} bytes are held");
    }
    while !engine.step(Time::ZERO, &mut events).unwrap().idle {}
    assert_eq!(grammars.matcher_bytes(), 0, "{ends:?}");
    let (mut unbounded, _, _) = self::engine();
    unbounded.command(Command::Open(SessionId(0)), Time::ZERO, &mut Vec::new());
    assert_eq!((tokens, ends.remove(&0).unwrap()), alone(&mut unbounded, tool), "another tenant's choice");
}
