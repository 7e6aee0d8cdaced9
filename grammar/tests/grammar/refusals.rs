//! Grammars that are refused, with the reason.

use inflight_contract::{Grammar, JsonWhitespace};
use inflight_grammar::{Compiler, GrammarError, Vocabulary};

use super::vocabulary::*;

fn reason(grammar: &Grammar) -> String {
    match compiler().compile(grammar) {
        Ok(_) => panic!("compiled: {grammar:?}"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn schemas_that_cannot_be_enforced_are_refused_with_the_reason() {
    let cases = [
        (r#"{"type": "string", "minLength": 3, "maxLength": 1}"#, "allows no value"),
        (r#"{"type": "integer", "minimum": 3, "maximum": 1}"#, "allows no value"),
        (r#"{"allOf": [{"type": "string"}, {"type": "number"}]}"#, "allows no value"),
        (r#"{"enum": []}"#, ""),
        (r#"{"$schema": "http://json-schema.org/draft-03/schema#"}"#, "draft-03"),
        (r#"{"$ref": "https://example.com/schema.json"}"#, "leads out of the schema"),
        (r##"{"$ref": "#/definitions/absent"}"##, "absent"),
        (r#"{"type": "strin"}"#, "strin"),
        (r#"{"not": {"pattern": "a"}}"#, "not"),
        (r#"{"contains": {"type": "string"}}"#, "contains"),
        (r#"{"allOf": [{"not": {}}]}"#, "allows no value"),
        (r#"{"type": "string", "pattern": "(("}"#, "the pattern (( cannot be used: unclosed group"),
        ("{", "not valid JSON"),
        ("7", "must be an object or a boolean"),
    ];
    for (text, part) in cases {
        let reason = reason(&schema(text));
        assert!(reason.contains(part), "{text}: {reason}");
        assert!(reason.len() <= 700 && !reason.contains("backtrace"), "{text}: {reason}");
    }
}

#[test]
fn explosions_are_refused_with_bounded_work() {
    let bombs = [
        Grammar::Regex("(a{1,500}){1,500}b".to_owned()),
        Grammar::Regex("(((a{1,100}){1,100}){1,100}){1,100}".to_owned()),
        Grammar::Regex("[ab]*a[ab]{400}".to_owned()),
        Grammar::Regex("(".repeat(100_000)),
        Grammar::Lark(format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000))),
        schema(&format!("{}true{}", r#"{"items":"#.repeat(120), "}".repeat(120))),
        schema(&format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000))),
    ];
    for bomb in bombs {
        let begun = std::time::Instant::now();
        let shown: String = format!("{bomb:?}").chars().take(60).collect();
        match compiler().compile(&bomb) {
            Err(error) => eprintln!("{shown}: {error} after {:?}", begun.elapsed()),
            // Lexers are built lazily: what compiles must have bounded masks.
            Ok(compiled) => {
                let mut matcher = compiled.matcher(None);
                for _ in 0..40 {
                    let mut mask = vec![0; inflight_grammar::Matcher::mask_words(VOCAB_SIZE as usize)];
                    if matcher.write_mask(&mut mask).is_err() || matcher.consume(b'a'.into()).is_err() {
                        break;
                    }
                }
                eprintln!("{shown}: compiled, {:?}", begun.elapsed());
            }
        }
    }
}

#[test]
fn wide_schemas_compile_and_endless_recursion_has_bounded_masks() {
    let properties: Vec<String> = (0..2000).map(|at| format!(r#""p{at}": {{"type": "integer"}}"#)).collect();
    let wide = format!(r#"{{"type": "object", "properties": {{{}}}}}"#, properties.join(","));
    compiler().compile(&schema(&wide)).map(|_| ()).unwrap_or_else(|error| eprintln!("wide: {error}"));
    let tree = r##"{"$defs": {"n": {"type": "object", "properties": {"l": {"$ref": "#/$defs/n"}, "v": {"type": "integer"}},
        "required": ["v"], "additionalProperties": false}}, "$ref": "#/$defs/n"}"##;
    let mut matcher = compiler().compile(&schema(tree)).unwrap().matcher(None);
    write(&mut matcher, &r#"{"l":"#.repeat(100));
    assert!(allowed(&mut matcher).contains(&b'{'.into()));
    // Refers to itself and nothing else: no finite text matches.
    let endless = r##"{"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}"##;
    eprintln!("endless: {}", reason(&schema(endless)));
}

#[test]
fn grammars_that_the_vocabulary_cannot_begin_and_empty_ones_are_refused() {
    let tokens = [(&b"a"[..], false), (b"<e>", true)];
    let vocabulary = Vocabulary::from_tokens(tokens);
    let compiler = Compiler::new(&vocabulary, 2, &[1]).unwrap();
    let outcome = |grammar: Grammar| compiler.compile(&grammar).map(|_| ());
    let unsatisfiable = outcome(Grammar::Regex("b+".to_owned()));
    assert!(matches!(unsatisfiable, Err(GrammarError::Unsatisfiable(_))), "{unsatisfiable:?}");
    assert!(outcome(Grammar::JsonObject(JsonWhitespace::OneLine)).is_err());
    assert_eq!(outcome(Grammar::Lark("start: \"\"".to_owned())), Err(GrammarError::Empty));
    // Its parser would predict a rule for each of 2^64 parameters.
    let counting = "start: p::0\np::_ : p::incr(_) \"b\" | \"a\"";
    assert_eq!(outcome(Grammar::Lark(counting.to_owned())), Err(GrammarError::Parameters));
    assert!(outcome(Grammar::Lark("start: \"a::b\"".to_owned())).is_ok());
    assert!(outcome(Grammar::Lark("start: a b".to_owned())).is_err());
    assert!(outcome(Grammar::Lark("%import common.X".to_owned())).is_err());
    assert_eq!(outcome(Grammar::Regex("a".to_owned())), Ok(()));
}
