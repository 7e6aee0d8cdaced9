//! Time of token masks with a vocabulary of 128 Ki tokens and 16 streams: `cargo bench -p inflight-grammar --bench masks`.
//!
//! Each stream draws its tokens from its masks, with seeded random numbers. Prints the time of compiling each grammar, and of a
//! step: the masks of all streams and the consumption of their tokens, on one thread; and what the limits of structured output
//! count: memory of a stream, and work per token.
//!
//! With a folder as argument, it prints memory and work under the JSON schemas in its files instead, of which each is a schema or,
//! as in the JSON Schema Test Suite, an array of objects with a `schema`.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use std::time::{Duration, Instant};

use inflight_contract::{Grammar, JsonWhitespace};
use inflight_grammar::{Compiler, MaskOutcome, Matcher, Vocabulary};

const VOCAB_SIZE: u32 = 128 << 10;
const END: u32 = VOCAB_SIZE - 1;
const STREAMS: usize = 16;
const STEPS: usize = 200;

/// Xorshift random numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound.max(1) as u64) as usize
    }
}

/// Returns a vocabulary like those of byte-level BPE: all bytes, then words of 2 to 12 letters, half of them behind a space,
/// numbers of up to three digits, and runs of punctuation.
fn vocabulary() -> Vocabulary {
    const LETTERS: &[u8] = b"etaoinshrdlucmfwypvbgkjqxzETAOINS";
    const MARKS: &[u8] = b"\"{}[]:,.()<>=/\\\n\t -_#";
    let mut random = Random(1);
    let mut words: std::collections::BTreeSet<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).collect();
    words.extend((0..1000).map(|number: u32| number.to_string().into_bytes()));
    while words.len() < VOCAB_SIZE as usize - 1 {
        let kind = random.below(10);
        let (letters, most) = if kind == 0 { (MARKS, 3) } else { (LETTERS, 11) };
        let mut word = if kind > 5 { vec![b' '] } else { Vec::new() };
        // The first letters of the list are the most frequent ones.
        word.extend((0..2 + random.below(most)).map(|_| {
            let first = random.below(letters.len());
            letters[random.below(first + 1)]
        }));
        words.insert(word);
    }
    Vocabulary::from_tokens(words.iter().map(|word| (word.as_slice(), false)).chain([(&b"<end>"[..], true)]))
}

fn grammars() -> Vec<(&'static str, Grammar)> {
    let tool = r#"{"type": "object", "additionalProperties": false, "required": ["query", "limit", "filters"], "properties": {
        "query": {"type": "string"}, "limit": {"type": "integer", "minimum": 1, "maximum": 50},
        "filters": {"type": "array", "items": {"type": "object", "additionalProperties": false, "required": ["field", "value"],
            "properties": {"field": {"enum": ["author", "year", "title"]}, "value": {"type": ["string", "integer"]}}}}}}"#;
    // An array that is longer than the output of the benchmark.
    let records = r#"{"type": "array", "minItems": 400, "items": {"type": "object", "additionalProperties": false,
        "required": ["query", "limit", "field"], "properties": {"query": {"type": "string", "maxLength": 60},
        "limit": {"type": "integer", "minimum": 1, "maximum": 50}, "field": {"enum": ["author", "year", "title"]}}}}"#;
    vec![
        ("tool", Grammar::json_schema(tool)),
        ("records", Grammar::json_schema(records)),
        ("json object", Grammar::JsonObject(JsonWhitespace::OneLine)),
        ("regex", Grammar::Regex("([A-Z][a-z]+ ){2,400}[0-9]{4}-[0-9]{2}".to_owned())),
        // Its lexer has 2^14 states.
        ("costly regex", Grammar::Regex(r"[\x20-\x7e]*[aeiou][\x20-\x7e]{13}".to_owned())),
    ]
}

/// Returns the resident memory of the process; 0 where there is no /proc.
fn resident_mib() -> f64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    pages.split(' ').nth(1).and_then(|pages| pages.parse::<f64>().ok()).unwrap_or(0.0) / 256.0
}

/// What the limits count of the outputs of a grammar.
#[derive(Debug, Default)]
struct Usage {
    bytes: usize,
    work: u64,
    tokens: usize,
    /// Maximum share of the work that is allowed.
    share: f64,
}

impl Usage {
    fn add(&mut self, matcher: &Matcher) {
        self.bytes = self.bytes.max(matcher.bytes());
        self.share = self.share.max(matcher.work_debt() as f64 / Matcher::WORK_DEBT_MAX as f64);
    }

    fn end(&mut self, matcher: &Matcher, tokens: usize) {
        self.work += matcher.work();
        self.tokens += tokens;
    }

    fn per_token(&self) -> f64 {
        self.work as f64 / self.tokens.max(1) as f64
    }
}

/// Returns the tokens of a mask.
fn allowed(mask: &[u32]) -> Vec<u32> {
    (0..VOCAB_SIZE).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

/// Prints the memory and the work of outputs under the schemas in a folder.
fn schemas(compiler: &Compiler, vocabulary: &Vocabulary, folder: &str) {
    let mut schemas = Vec::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read(file.unwrap().path()).unwrap_or_default();
        match serde_json::from_slice(&text) {
            Ok(serde_json::Value::Array(groups)) => {
                schemas.extend(groups.iter().map(|group| group["schema"].to_string()));
            }
            Ok(schema) => schemas.push(schema.to_string()),
            Err(_) => {}
        }
    }
    schemas.sort_unstable();
    let (mut usages, mut refused, mut errors) = (Vec::new(), 0, 0);
    for schema in &schemas {
        let Ok(compiled) = compiler.compile(&Grammar::json_schema(schema.clone())) else {
            refused += 1;
            continue;
        };
        let (mut usage, mut random) = (Usage::default(), Random(7));
        let (mut matcher, mut tokens) = (compiled.matcher(None), 0);
        let mut mask = vec![0u32; Matcher::mask_words(VOCAB_SIZE as usize)];
        for _ in 0..5 * STEPS {
            match matcher.write_mask(&mut mask) {
                Ok(MaskOutcome::Masked) => usage.add(&matcher),
                Ok(MaskOutcome::Complete) => break,
                Err(error) => {
                    println!("{error}: {:.100}", schema);
                    errors += 1;
                    break;
                }
            }
            // Random texts would seldom end.
            let ids = allowed(&mask);
            let ends = |id: &&u32| vocabulary.bytes(**id).iter().all(|byte| b"\"}],".contains(byte));
            let ending: Vec<u32> = ids.iter().filter(ends).copied().collect();
            let ids = if !ending.is_empty() && random.below(10) == 0 { &ending } else { &ids };
            if matcher.consume(ids[random.below(ids.len())]).is_err() || matcher.is_complete() {
                break;
            }
            tokens += 1;
        }
        usage.end(&matcher, tokens);
        usages.push(usage);
    }
    println!("{} schemas, {refused} refused, {errors} outputs ended with an error", schemas.len());
    let print = |what: &str, value: fn(&Usage) -> f64| {
        let mut values: Vec<f64> = usages.iter().map(value).collect();
        values.sort_unstable_by(f64::total_cmp);
        let at = |part: f64| values[(part * (values.len() - 1) as f64) as usize];
        println!("{what}: {:.1} median, {:.1} p99, {:.1} max", at(0.5), at(0.99), at(1.0));
    };
    print("KiB", |usage| usage.bytes as f64 / 1024.0);
    print("work per token", Usage::per_token);
    print("percent of the work allowed", |usage| 100.0 * usage.share);
}

fn main() {
    let vocabulary = vocabulary();
    let (begun, before) = (Instant::now(), resident_mib());
    let compiler = Compiler::new(&vocabulary, VOCAB_SIZE, &[END]).unwrap();
    let memory = resident_mib() - before;
    println!("vocabulary of {VOCAB_SIZE} tokens prepared in {:.0?}, {memory:.0} MiB", begun.elapsed());
    if let Some(folder) = std::env::args().skip(1).find(|argument| !argument.starts_with('-')) {
        return schemas(&compiler, &vocabulary, &folder);
    }
    for (name, grammar) in grammars() {
        let begun = Instant::now();
        let compiled = compiler.compile(&grammar).unwrap();
        let compile = begun.elapsed();
        let mut streams: Vec<(Matcher, usize)> = (0..STREAMS).map(|_| (compiled.matcher(None), 0)).collect();
        let mut usage = Usage::default();
        let (mut random, mut mask) = (Random(7), vec![0u32; Matcher::mask_words(VOCAB_SIZE as usize)]);
        let (mut steps, mut masks) = (Vec::with_capacity(STEPS), Vec::new());
        for _ in 0..STEPS {
            let mut step = Duration::ZERO;
            for (stream, tokens) in &mut streams {
                let begun = Instant::now();
                let outcome = stream.write_mask(&mut mask);
                let took = begun.elapsed();
                masks.push(took);
                step += took;
                usage.add(stream);
                if outcome != Ok(MaskOutcome::Masked) {
                    usage.end(stream, std::mem::take(tokens));
                    *stream = compiled.matcher(None);
                    continue;
                }
                // The drawing is a runtime's work.
                let allowed = allowed(&mask);
                let token = allowed[random.below(allowed.len())];
                let begun = Instant::now();
                let consumed = stream.consume(token);
                step += begun.elapsed();
                *tokens += 1;
                if consumed.is_err() || stream.is_complete() {
                    usage.end(stream, std::mem::take(tokens));
                    *stream = compiled.matcher(None);
                }
            }
            steps.push(step);
        }
        streams.iter().for_each(|(stream, tokens)| usage.end(stream, *tokens));
        steps.sort_unstable();
        masks.sort_unstable();
        let at = |sorted: &[Duration], part: f64| sorted[(part * (sorted.len() - 1) as f64) as usize];
        println!(
            "{name}: compiled in {compile:.1?}; a mask {:.0?} median, {:.0?} p99; a step of {STREAMS} streams {:.0?} median, {:.1?} p90",
            at(&masks, 0.5),
            at(&masks, 0.99),
            at(&steps, 0.5),
            at(&steps, 0.9),
        );
        println!(
            "  a stream holds {} KiB at most; {:.0} of work per token",
            usage.bytes >> 10,
            usage.per_token()
        );
    }
}
