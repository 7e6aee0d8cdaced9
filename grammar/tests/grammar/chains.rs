//! Chains of names at the maximum size of a grammar: parsers descend into a name as into a bracket, but no bracket shows it.
//!
//! An overflow of a stack ends the process, and this test with it.

use inflight_contract::Grammar;
use inflight_grammar::{CompiledGrammar, GrammarError, MaskOutcome, Matcher};

use super::vocabulary::*;

/// Repeats `link`, called with the numbers of a name and of the next one, `most` times or until a grammar of maximum size is full; `end`
/// is behind it.
fn chain(most: usize, begin: &str, end: &str, link: impl Fn(usize, usize) -> String) -> (String, usize) {
    let mut text = begin.to_owned();
    for number in 0.. {
        let next = link(number, number + 1);
        if number == most || text.len() + next.len() + end.len() + 64 > Grammar::BYTES_MAX {
            let last = end.replace("LAST", &number.to_string());
            return (text + &last, number);
        }
        text += &next;
    }
    unreachable!()
}

/// A chain of definitions of a JSON schema; `link` is the schema of the name `THIS` that leads to `NEXT`, or to the reference `REF`.
fn definitions(most: usize, link: &str) -> (String, usize) {
    chain(most, r##"{"$ref":"#/$defs/0","$defs":{"##, r#""LAST":{"type":"null"}}}"#, |this, next| {
        let link = link.replace("REF", r##"{"$ref":"#/$defs/NEXT"}"##);
        format!(r#""{this}":{},"#, link.replace("THIS", &this.to_string()).replace("NEXT", &next.to_string()))
    })
}

/// A chain of rules or terminals of a Lark grammar; `link` is the definition of a name that leads to `NEXT`.
fn rules(most: usize, name: &str, link: &str) -> (String, usize) {
    let start = format!("start: {name}0\n");
    chain(most, &start, &format!("{name}LAST: \"x\"\n"), |this, next| {
        format!("{name}{this}: {}\n", link.replace("NEXT", &format!("{name}{next}")))
    })
}

/// Builds a chain of at most so many links. Returns it with its number of links.
type Chain = Box<dyn Fn(usize) -> (Grammar, usize)>;

/// Every combinator through which a name leads to the next one.
fn chains() -> Vec<(String, Chain)> {
    let schemas = [
        "REF",
        r#"{"properties":{"a":REF}}"#,
        r#"{"properties":{"a":REF},"required":["a"],"additionalProperties":false}"#,
        r#"{"patternProperties":{"a":REF}}"#,
        r#"{"additionalProperties":REF}"#,
        r#"{"unevaluatedProperties":REF}"#,
        r#"{"items":REF}"#,
        r#"{"prefixItems":[REF]}"#,
        r#"{"unevaluatedItems":REF}"#,
        r#"{"anyOf":[REF,{"type":"string"}]}"#,
        r#"{"oneOf":[REF,{"type":"string"}]}"#,
        r#"{"allOf":[REF,{"maxLength":9}]}"#,
        r#"{"allOf":[REF],"unevaluatedProperties":false}"#,
        r#"{"not":REF}"#,
        r#"{"if":REF,"then":{"type":"null"}}"#,
        r#"{"type":"object","dependentSchemas":{"a":REF}}"#,
        r##"{"$dynamicRef":"#/$defs/NEXT"}"##,
        r##"{"$ref":"#/%24defs/NEXT"}"##,
        r##"{"$anchor":"aTHIS","items":{"$ref":"#aNEXT"}}"##,
        r#"{"items":REF,"$id":"http://a/"}"#,
    ];
    let lark = [
        ("a", "NEXT"),
        ("a", "NEXT | \"y\""),
        ("a", "\"y\" NEXT"),
        ("a", "NEXT?"),
        ("a", "(NEXT | \"z\")+"),
        ("a", "NEXT{0,2}"),
        ("a", "%lark { start: NEXT }"),
        ("A", "NEXT"),
        ("A", "NEXT | /y/"),
        ("A", "\"y\" NEXT"),
        ("A", "NEXT?"),
        ("A", "(NEXT /z/)+"),
        ("A", "NEXT & /[a-z]*/"),
        ("A", "~NEXT"),
    ];
    let mut chains: Vec<(String, Chain)> = Vec::new();
    for link in schemas {
        let build = move |most| {
            let (text, links) = definitions(most, link);
            (schema(&text), links)
        };
        chains.push((link.to_owned(), Box::new(build)));
    }
    for (name, link) in lark {
        let build = move |most| {
            let (text, links) = rules(most, name, link);
            (Grammar::Lark(text), links)
        };
        chains.push((format!("{name}: {link}"), Box::new(build)));
    }
    let nested = |most: usize| {
        let (text, links) = definitions(most.min(5_000), r#"{"items":REF}"#);
        (Grammar::Lark(format!("start: %json {text}")), links)
    };
    chains.push(("%json".to_owned(), Box::new(nested)));
    chains
}

#[test]
fn chains_of_names_at_the_maximum_size_are_refused_by_their_length() {
    let compiler = compiler();
    for (name, build) in chains() {
        let (grammar, links) = build(usize::MAX);
        assert!(links > 2_000, "{name}: {links} links");
        let error = compiler.compile(&grammar).expect_err(&name);
        assert!(matches!(error, GrammarError::Chain { .. }), "{name}, {links} links: {error}");
    }
}

#[test]
fn the_longest_permitted_chains_overflow_no_stack_when_they_compile_and_when_they_match() {
    let compiler = compiler();
    for (name, build) in chains() {
        let (longest, links) = build(usize::MAX);
        let Err(GrammarError::Chain { levels, most }) = compiler.compile(&longest) else { panic!("{name}") };
        // A little fewer links than are refused, half of them where rewriting doubles the levels, and few of the one whose work grows with
        // their square.
        let refused = (most - 50) * links / levels;
        let fewer = if name == "A: (NEXT /z/)+" { [200, 200] } else { [refused, refused / 2] };
        let mut compiled = fewer.into_iter().map(|links| (compiler.compile(&build(links).0), links));
        let permitted = |outcome: &Result<_, _>| !matches!(outcome, Err(GrammarError::Chain { .. }));
        let (outcome, links) = compiled.find(|(outcome, _)| permitted(outcome)).expect(&name);
        let shown = format!("{:?}", outcome.as_ref().map(CompiledGrammar::bytes));
        println!("{name}, {links} links: {}", &shown[..shown.len().min(150)]);
        let Ok(compiled) = outcome else { continue };
        // On a stack as small as those of the threads that compute masks.
        let matching = std::thread::Builder::new().stack_size(2 << 20).spawn(move || {
            let mut matcher = compiled.matcher(None);
            let mut mask = vec![0; Matcher::mask_words(VOCAB_SIZE as usize)];
            for _ in 0..20 {
                if !matches!(matcher.write_mask(&mut mask), Ok(MaskOutcome::Masked)) {
                    break;
                }
                let Some(token) = (0..VOCAB_SIZE).find(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1)
                else {
                    break;
                };
                if matcher.consume(token).is_err() {
                    break;
                }
            }
        });
        matching.unwrap().join().unwrap();
    }
}
