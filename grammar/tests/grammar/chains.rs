//! Chains of names at the maximum size of a grammar: parsers descend into a name as into a bracket, but no bracket shows it.
//!
//! An overflow of a stack ends the process, and this test with it.

use std::fmt::Write as _;

use inflight_contract::Grammar;

use super::vocabulary::*;

/// Repeats `link`, called with the numbers of a name and of the next one, until a grammar of maximum size is full; `end` is behind it.
fn chain(begin: &str, end: &str, link: impl Fn(usize, usize) -> String) -> (String, usize) {
    let mut text = begin.to_owned();
    for number in 0.. {
        let next = link(number, number + 1);
        if text.len() + next.len() + end.len() + 64 > Grammar::BYTES_MAX {
            let last = end.replace("LAST", &number.to_string());
            return (text + &last, number);
        }
        text += &next;
    }
    unreachable!()
}

/// A chain of definitions of a JSON schema; `link` is the schema of a name that leads to the reference `NEXT`.
fn definitions(link: &str) -> (Grammar, usize) {
    let (text, links) =
        chain(r##"{"$ref":"#/$defs/0","$defs":{"##, r#""LAST":{"type":"null"}}}"#, |name, next| {
            format!(r#""{name}":{},"#, link.replace("NEXT", &format!(r##"{{"$ref":"#/$defs/{next}"}}"##)))
        });
    (schema(&text), links)
}

/// A chain of rules or terminals of a Lark grammar; `link` is the definition of a name that leads to `NEXT`.
fn rules(name: &str, link: &str) -> (Grammar, usize) {
    let start = format!("start: {name}0\n");
    let (text, links) = chain(&start, &format!("{name}LAST: \"x\"\n"), |this, next| {
        format!("{name}{this}: {}\n", link.replace("NEXT", &format!("{name}{next}")))
    });
    (Grammar::Lark(text), links)
}

/// Every combinator through which a name leads to the next one.
fn chains() -> Vec<(String, Grammar, usize)> {
    let schemas = [
        "NEXT",
        r#"{"properties":{"a":NEXT}}"#,
        r#"{"properties":{"a":NEXT},"required":["a"],"additionalProperties":false}"#,
        r#"{"patternProperties":{"a":NEXT}}"#,
        r#"{"additionalProperties":NEXT}"#,
        r#"{"unevaluatedProperties":NEXT}"#,
        r#"{"items":NEXT}"#,
        r#"{"prefixItems":[NEXT]}"#,
        r#"{"unevaluatedItems":NEXT}"#,
        r#"{"anyOf":[NEXT,{"type":"string"}]}"#,
        r#"{"oneOf":[NEXT,{"type":"string"}]}"#,
        r#"{"allOf":[NEXT,{"maxLength":9}]}"#,
        r#"{"allOf":[NEXT],"unevaluatedProperties":false}"#,
        r#"{"not":NEXT}"#,
        r#"{"if":NEXT,"then":{"type":"null"}}"#,
        r#"{"type":"object","dependentSchemas":{"a":NEXT}}"#,
        r##"{"$dynamicRef":"#/$defs/NUMBER"}"##,
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
    let schemas = schemas.into_iter().map(|link| {
        let (grammar, links) = if link.contains("NUMBER") {
            let (text, links) =
                chain(r##"{"$ref":"#/$defs/0","$defs":{"##, r#""LAST":{"type":"null"}}}"#, |name, next| {
                    format!(r#""{name}":{},"#, link.replace("NUMBER", &next.to_string()))
                });
            (schema(&text), links)
        } else {
            definitions(link)
        };
        (link.to_owned(), grammar, links)
    });
    let lark = lark.into_iter().map(|(name, link)| {
        let (grammar, links) = rules(name, link);
        (format!("{name}: {link}"), grammar, links)
    });
    let anchors = {
        let (text, links) =
            chain(r##"{"$ref":"#a0","$defs":{"##, r##""d":{"$anchor":"aLAST"}}}"##, |name, next| {
                format!(r##""{name}":{{"$anchor":"a{name}","items":{{"$ref":"#a{next}"}}}},"##)
            });
        ("anchors".to_owned(), schema(&text), links)
    };
    let nested_json = {
        let Grammar::JsonSchema(text) = definitions("NEXT").0 else { unreachable!() };
        let text = &text[..text.len().min(Grammar::BYTES_MAX - 100)];
        let whole = text.rfind("},").unwrap();
        ("%json".to_owned(), Grammar::Lark(format!("start: %json {}}}}}}}", &text[..whole])), 1000)
    };
    schemas.chain(lark).chain([anchors, nested_json]).collect()
}

#[test]
fn chains_of_names_at_the_maximum_size_are_refused_by_their_length() {
    let compiler = compiler();
    for (name, grammar, links) in chains() {
        assert!(links > 500, "{name}: {links} links");
        let outcome = compiler.compile(&grammar).map(drop);
        let mut shown = String::new();
        let _ = write!(shown, "{name}, {links} links: {outcome:?}");
        shown.truncate(200);
        println!("{shown}");
        assert!(outcome.is_err(), "{name}");
    }
}
