//! Generated schemas with generated texts: what a grammar allows is valid, as validators say that share no code with it, what is valid in
//! the usual writing is allowed, and a schema that cannot be enforced is refused. `INFLIGHT_SCHEMA_PAIRS` is the number of pairs of a
//! schema and a text, `INFLIGHT_SCHEMA_SEED` the first seed.

#![allow(clippy::disallowed_methods, reason = "the number of cases comes from the environment")]

use inflight_contract::{Grammar, JsonWhitespace};
use inflight_fixtures::cases;
use inflight_grammar::{CompiledGrammar, Compiler, MaskOutcome, MatchError, Matcher, Vocabulary};
use inflight_schemas::{Case, Coverage, Json, Judge, Random, Verdict};

use super::vocabulary::schema;

/// End token, behind those of single bytes.
const END: u32 = 256;
const VOCAB_SIZE: usize = 257;
/// Pairs of a thorough run.
const PAIRS: u32 = 40_000;
/// Pairs of each kind, at least.
const LEAST: usize = 100;
/// Random texts for each schema.
const WALKS: usize = 3;
/// Maximum share of the schemas that are refused, in percent.
const REFUSED_MAX: f64 = 28.0;
/// Bytes that decide most about a text.
const DECISIVE: &[u8] = b"\"\\u006179{}[],:-.eEatrfn/ \n";

fn compiler() -> Compiler {
    let bytes: Vec<[u8; 1]> = (0..=u8::MAX).map(|byte| [byte]).collect();
    let tokens = bytes.iter().map(|byte| (&byte[..], false));
    let vocabulary = Vocabulary::from_tokens(tokens.chain([(&b"<end>"[..], true)]));
    Compiler::new(&vocabulary, VOCAB_SIZE as u32, &[END]).unwrap()
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap())
}

/// Whether a text is allowed as a whole; `None` if that takes too much work to find out.
fn takes(compiled: &CompiledGrammar, text: &str) -> Option<bool> {
    let mut matcher = compiled.matcher(None);
    for byte in text.bytes() {
        match matcher.consume(byte.into()) {
            Ok(()) => {}
            Err(MatchError::TokenRefused { .. }) => return Some(false),
            Err(_) => return None,
        }
    }
    matcher.is_accepting().ok()
}

/// Returns the texts of a value that a grammar of JSON on one line, or the grammar with any whitespace, treats wrongly: one line is allowed with
/// a space after each colon and comma, too, several lines are with any whitespace alone.
fn faults_of_whitespace(one_line: &CompiledGrammar, any: &CompiledGrammar, value: &Json) -> Vec<String> {
    let (compact, spaced, pretty) = (value.to_string(), value.spaced(), value.pretty());
    let has_lines = pretty != compact;
    let cases = [
        (one_line, &spaced, true),
        (one_line, &pretty, !has_lines),
        (any, &compact, true),
        (any, &spaced, true),
        (any, &pretty, true),
    ];
    let wrong = cases.into_iter().filter(|(grammar, text, allowed)| takes(grammar, text) == Some(!allowed));
    wrong
        .map(|(_, text, allowed)| format!("{text:?} is to be {}", if allowed { "taken" } else { "refused" }))
        .collect()
}

/// Writes a text of allowed bytes, chosen at random; `None` if it has no end soon.
fn walk(compiled: &CompiledGrammar, random: &mut Random) -> Option<String> {
    let mut matcher = compiled.matcher(None);
    let mut text = Vec::new();
    let mut mask = vec![0; Matcher::mask_words(VOCAB_SIZE)];
    for step in 0..300 {
        // Bounds on work end a text, too.
        let outcome = matcher.write_mask(&mut mask).ok()?;
        let allowed: Vec<u32> =
            (0..VOCAB_SIZE as u32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        let ends = outcome == MaskOutcome::Complete || allowed == [END];
        if ends || (allowed.contains(&END) && random.once_in(2)) {
            return String::from_utf8(text).ok();
        }
        let closing = |byte: u8| b"\"}]".contains(&byte) || (step > 100 && b"0123456789".contains(&byte));
        // Late in a text, what closes it is wanted.
        let wanted =
            |id: &&u32| if step < 40 { DECISIVE.contains(&(**id as u8)) } else { closing(**id as u8) };
        let some: Vec<u32> = allowed.iter().filter(|id| **id != END).filter(wanted).copied().collect();
        let pool: Vec<u32> = if some.is_empty() || random.once_in(6) {
            allowed.iter().copied().filter(|id| *id != END).collect()
        } else {
            some
        };
        let token = random.pick(&pool);
        matcher.consume(token).unwrap();
        text.push(token as u8);
    }
    None
}

#[test]
fn what_grammars_allow_is_valid_and_what_is_valid_is_allowed() {
    let wanted = variable("INFLIGHT_SCHEMA_PAIRS").unwrap_or_else(|| u64::from(cases(PAIRS))) as usize;
    let first = variable("INFLIGHT_SCHEMA_SEED").unwrap_or(0);
    let (compiler, mut coverage) = (compiler(), Coverage::default());
    let (mut wrong, mut walks, mut endless, mut costly) = (Vec::new(), 0, 0, 0);
    for seed in first.. {
        // Some kinds are rare, and refused most often.
        let covered = coverage.least() >= LEAST || coverage.pairs() >= 3 * wanted;
        if (coverage.pairs() >= wanted && covered) || wrong.len() >= 20 {
            break;
        }
        let case = Case::new(seed);
        let judge = Judge::new(&case.schema);
        let plain: Vec<String> = case.values.iter().map(ToString::to_string).collect();
        let compiled = match compiler.compile(&schema(&case.schema.to_string())) {
            Ok(compiled) => compiled,
            Err(error) => {
                let error = error.to_string();
                let valid = plain.iter().find(|text| judge.verdict(text, true) == Verdict::Required);
                let refers = case.schema.to_string().contains("$ref");
                if let Some(text) = valid.filter(|_| error.contains("allows no value") && !refers) {
                    wrong.push(format!("seed {seed}: {} allows {text}: {error}", case.schema));
                }
                coverage.refused(&case);
                continue;
            }
        };
        let any = Grammar::JsonSchema(case.schema.to_string(), JsonWhitespace::Any);
        match compiler.compile(&any) {
            Ok(any) => {
                let required = case.values.iter().zip(&plain);
                let required = required.filter(|(_, text)| judge.verdict(text, true) == Verdict::Required);
                let faults = required.flat_map(|(value, _)| faults_of_whitespace(&compiled, &any, value));
                wrong.extend(faults.map(|fault| format!("seed {seed}: {}: {fault}", case.schema)));
            }
            Err(error) => wrong.push(format!("seed {seed}: {} with any whitespace: {error}", case.schema)),
        }
        let mut random = Random::new(!seed);
        let written: Vec<Option<String>> = (0..WALKS).map(|_| walk(&compiled, &mut random)).collect();
        walks += written.len();
        endless += written.iter().filter(|text| text.is_none()).count();
        let written: Vec<String> = written.into_iter().flatten().collect();
        coverage.taken(&case, plain.len() + case.texts.len() + written.len());
        for (texts, is_plain) in [(&plain, true), (&case.texts, false), (&written, false)] {
            for text in texts {
                let (verdict, taken) = (judge.verdict(text, is_plain), takes(&compiled, text));
                let fault = match (verdict, taken) {
                    (Verdict::Required, Some(false)) => "does not take",
                    (Verdict::Forbidden, Some(true)) => "takes",
                    (_, None) => {
                        costly += 1;
                        continue;
                    }
                    _ => continue,
                };
                wrong.push(format!("seed {seed}: {} {fault} {text}", case.schema));
            }
        }
    }
    println!(
        "{walks} random texts, {endless} of them without an end, {costly} texts take too much work; first seed {first}"
    );
    assert!(wrong.is_empty(), "{} faults:\n{}", wrong.len(), wrong.join("\n"));
    assert!(endless * 3 <= walks, "{endless} of {walks} random texts have no end");
    assert!(costly * 500 <= coverage.pairs(), "{costly} texts take too much work");
    coverage.check(LEAST, REFUSED_MAX);
}
