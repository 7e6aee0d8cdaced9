//! What matchers allow, and that their state depends on the tokens alone.

use inflight_contract::{Grammar, JsonWhitespace};
use inflight_grammar::{MaskOutcome, MatchError, Matcher, Vocabulary};
use proptest::prelude::*;

use super::vocabulary::*;

const PERSON: &str = r#"{
    "type": "object", "additionalProperties": false, "required": ["name", "age", "tags"],
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "maxItems": 2, "items": {"enum": ["a", "bc"]}}
    }
}"#;

#[test]
fn end_tokens_are_allowed_where_the_output_matches_and_a_finished_grammar_is_complete() {
    let compiler = compiler();
    let mut matcher = compiler.compile(&Grammar::Regex("ab*".to_owned())).unwrap().matcher(None);
    assert_eq!(allowed(&mut matcher), [u32::from(b'a')]);
    assert_eq!(matcher.is_accepting(), Ok(false));
    matcher.consume(b'a'.into()).unwrap();
    assert_eq!(allowed(&mut matcher), [u32::from(b'b'), END]);
    assert_eq!(matcher.is_accepting(), Ok(true));
    let mut mask = vec![0; Matcher::mask_words(VOCAB_SIZE as usize)];
    matcher.write_mask(&mut mask).unwrap();
    matcher.clear_end_tokens(&mut mask);
    assert_eq!(mask.iter().map(|word| word.count_ones()).sum::<u32>(), 1);
    matcher.consume(END).unwrap();
    assert!(matcher.is_complete());

    let mut matcher = compiler.compile(&schema(PERSON)).unwrap().matcher(None);
    write(&mut matcher, r#"{"name": "Ann","age":30, "tags": ["bc"]"#);
    assert!(!matcher.is_complete());
    write(&mut matcher, "}");
    assert!(matcher.is_complete());
    assert_eq!(matcher.write_mask(&mut mask), Ok(MaskOutcome::Complete));
    let refused = matcher.consume(b' '.into());
    assert!(refused.is_err(), "nothing may follow");
}

#[test]
fn a_token_that_does_not_match_is_refused() {
    let mut matcher =
        compiler().compile(&Grammar::Choice(vec!["yes".into(), "no".into()])).unwrap().matcher(None);
    write(&mut matcher, "ye");
    let refused = matcher.consume(b'n'.into());
    assert_eq!(refused, Err(MatchError::TokenRefused { token: b'n'.into(), consumed: 2 }));
    let mut matcher =
        compiler().compile(&Grammar::JsonObject(JsonWhitespace::OneLine)).unwrap().matcher(None);
    let refused = matcher.consume(END);
    assert_eq!(refused, Err(MatchError::TokenRefused { token: END, consumed: 0 }));
}

#[test]
fn as_many_choices_as_there_may_be_are_matched_each_and_nothing_else() {
    let most = Grammar::CHOICES_MAX;
    // Many begin alike, and some continue others.
    let choices: Vec<String> = (0..most).map(|nth| format!("choice {}", nth * 7919 % most)).collect();
    let grammar = compiler().compile(&Grammar::Choice(choices.clone())).unwrap();
    for choice in choices.iter().step_by(97).chain(&choices[most - 3..]) {
        let mut matcher = grammar.matcher(None);
        write(&mut matcher, choice);
        assert!(allowed(&mut matcher).contains(&END) || matcher.is_complete(), "{choice}");
    }
    let mut matcher = grammar.matcher(None);
    write(&mut matcher, "choice 40");
    assert!(matcher.consume(b'x'.into()).is_err());
}

#[test]
fn a_constraint_begins_after_its_token_and_control_tokens_match_no_text() {
    let grammar = compiler().compile(&Grammar::Regex(".*".to_owned())).unwrap();
    let mut matcher = grammar.matcher(Some(THOUGHT));
    assert_eq!(allowed(&mut matcher).len(), VOCAB_SIZE as usize);
    for token in [END, 3, 4] {
        matcher.consume(token).unwrap();
        assert!(!matcher.has_begun());
    }
    matcher.consume(THOUGHT).unwrap();
    assert!(matcher.has_begun());
    let ids = allowed(&mut matcher);
    assert!(ids.contains(&END) && !ids.contains(&THOUGHT) && ids.iter().all(|id| *id <= END));
    matcher.consume(b'x'.into()).unwrap();
    matcher.rollback(3).unwrap();
    assert!(!matcher.has_begun());
    assert_eq!(matcher.validate(&[1, 2, THOUGHT, 3]), Ok(2));
}

#[test]
fn forced_bytes_come_as_the_longest_tokens() {
    let word = |text: &str| (256..END).find(|id| vocabulary().bytes(*id) == text.as_bytes()).unwrap();
    let mut matcher = compiler().compile(&schema(PERSON)).unwrap().matcher(None);
    let name = ["{\"", "na", "me", "\":"].map(word);
    assert_eq!(matcher.forced_tokens(), name, "a space may follow the colon");
    let any = Grammar::JsonSchema(PERSON.to_owned(), JsonWhitespace::Any);
    let mut matcher = compiler().compile(&any).unwrap().matcher(None);
    assert_eq!(
        matcher.forced_tokens(),
        [0; 0],
        "a single byte at the end may be written with those behind it"
    );
    let before = allowed(&mut matcher);
    write(&mut matcher, "{");
    write(&mut matcher, "\"na");
    assert_eq!(matcher.forced_tokens(), [word("me")], "a space may follow the quote");
    matcher.rollback(4).unwrap();
    assert_eq!(allowed(&mut matcher), before, "asking for forced tokens changes no mask");
}

#[test]
fn a_vocabulary_that_cannot_go_on_is_an_error_and_one_without_end_tokens_ends() {
    let tokens = [(&b"a"[..], false), (b"b", false)];
    let small = Vocabulary::from_tokens(tokens);
    let compiler = inflight_grammar::Compiler::new(&small, 2, &[]).unwrap();
    let mut stuck = compiler.compile(&Grammar::Regex("ab*c".to_owned())).unwrap().matcher(None);
    let mut mask = [0];
    // The library allows a prefix of what it cannot finish: the grammar has no end, which max_tokens bounds.
    stuck.consume(0).unwrap();
    assert_eq!(stuck.write_mask(&mut mask), Ok(MaskOutcome::Masked));
    assert_eq!(mask, [0b10]);
    let mut stuck = compiler.compile(&Grammar::Regex("abc".to_owned())).unwrap().matcher(None);
    stuck.consume(0).unwrap();
    stuck.consume(1).unwrap();
    let error = stuck.write_mask(&mut mask).unwrap_err();
    assert!(error.to_string().contains("no token of the vocabulary may follow"), "{error}");
    let mut ends = compiler.compile(&Grammar::Regex("ab?".to_owned())).unwrap().matcher(None);
    ends.consume(0).unwrap();
    assert_eq!(ends.write_mask(&mut mask), Ok(MaskOutcome::Masked));
    ends.consume(1).unwrap();
    assert!(ends.is_complete());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Draws tokens from the masks; a matcher that replays them in one go, after masks or drafts or not, allows the same.
    #[test]
    fn the_state_is_a_function_of_the_tokens(draws in proptest::collection::vec(any::<u32>(), 1..60),
                                             cut in any::<prop::sample::Index>(), kind in 0..3) {
        let grammar = match kind {
            0 => schema(PERSON),
            1 => Grammar::JsonObject(JsonWhitespace::OneLine),
            _ => Grammar::Regex("(ab|[a-f]{1,20}|na?me)+,(12|[0-9])*".to_owned()),
        };
        let compiled = compiler().compile(&grammar).unwrap();
        let (mut matcher, mut tokens, mut masks) = (compiled.matcher(None), Vec::new(), Vec::new());
        for draw in draws {
            let ids = allowed(&mut matcher);
            if ids.is_empty() { break; }
            let token = ids[draw as usize % ids.len()];
            prop_assert_eq!(matcher.validate(&[token]).unwrap(), 1);
            masks.push(ids);
            matcher.consume(token).unwrap();
            tokens.push(token);
            if matcher.is_complete() { break; }
        }
        let cut = cut.index(tokens.len());
        let mut other = compiled.matcher(None);
        for token in &tokens[..cut] { other.consume(*token).unwrap(); }
        prop_assert_eq!(&allowed(&mut other), &masks[cut]);
        for token in &tokens[cut..] { other.consume(*token).unwrap(); }
        prop_assert_eq!(other.is_complete(), matcher.is_complete());
        if tokens.last() != Some(&END) {
            other.rollback(tokens.len() - cut).unwrap();
            prop_assert_eq!(&allowed(&mut other), &masks[cut]);
        }
    }
}

/// Whether a schema's grammar takes a text as a whole.
fn takes(json_schema: &serde_json::Value, text: &str) -> bool {
    let compiled = compiler().compile(&schema(&json_schema.to_string()));
    let mut matcher = compiled.unwrap_or_else(|error| panic!("{json_schema}: {error}")).matcher(None);
    text.bytes().all(|byte| matcher.consume(byte.into()).is_ok()) && matcher.is_accepting().unwrap_or(true)
}

#[test]
fn what_a_class_excludes_is_no_escape_either() {
    let pattern = |pattern: &str| serde_json::json!({"type": "string", "pattern": pattern});
    for (schema, right, wrong) in [
        (
            pattern(r#"^[^"]*$"#),
            &[r#""ok""#, r#""a\\b""#, r#""\n\t""#][..],
            &[r#""a\"b""#, r#""a\u0022b""#][..],
        ),
        (pattern(r"^[^\\]*$"), &[r#""ok""#, r#""a\"b""#], &[r#""a\\b""#, r#""a\u005cb""#]),
        (pattern(r#"^[^"\\]+$"#), &[r#""ok""#, r#""a\nb""#], &[r#""c\"d""#, r#""c\\d""#]),
        (pattern(r#"^[^"\n]*$"#), &[r#""a\\b""#], &[r#""a\"b""#, r#""a\nb""#]),
        (pattern(r"^[^\t]*$"), &[r#""ok""#, r#""\"""#], &[r#""a\tb""#]),
        (pattern("^[^a]*$"), &[r#""ok""#, r#""\"\\""#], &[r#""bab""#]),
    ] {
        right.iter().for_each(|text| assert!(takes(&schema, text), "{schema} takes {text}"));
        wrong.iter().for_each(|text| assert!(!takes(&schema, text), "{schema} does not take {text}"));
    }
    let names = serde_json::json!({"type": "object", "patternProperties": {"^[^\"]$": {"type": "null"}},
        "additionalProperties": false});
    assert!(takes(&names, r#"{"a":null}"#) && !takes(&names, r#"{"\"":null}"#));
}

#[test]
fn formats_that_are_no_rules_are_annotations() {
    for format in ["password", "binary", "byte", "regex", "uri-template", "int64", "phone", "unknown", ""] {
        assert!(takes(&serde_json::json!({"type": "string", "format": format}), r#""x y""#), "{format:?}");
    }
    let date = serde_json::json!({"type": "string", "format": "date"});
    assert!(takes(&date, r#""2026-11-29""#) && !takes(&date, r#""soon""#));
}

#[test]
fn integers_beyond_doubles_are_exact_or_narrowed_and_bounds_of_whole_ranges_are_none() {
    use serde_json::json;
    let large: i64 = 9_007_199_254_740_993;
    for (schema, right, wrong) in [
        (json!({"const": 1_i64 << 60}), &["1152921504606846976"][..], &["1152921504606846975"][..]),
        (json!({"type": "integer", "minimum": large}), &["9007199254740999"], &["9007199254740992"]),
        (json!({"type": "integer", "maximum": large}), &["9007199254740992", "-3"], &["9007199254740994"]),
        (
            json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}),
            &["1", "-9223372036854774784", "9223372036854775807"],
            &["9223372036854775808"],
        ),
        (
            json!({"type": "integer", "minimum": 0, "maximum": u64::MAX}),
            &["18446744073709551615", "0"],
            &["-1"],
        ),
        (
            json!({"type": "integer", "minimum": -(1_i64 << 53) + 1, "maximum": (1_i64 << 53) - 1}),
            &["6"],
            &["9007199254740992"],
        ),
        (
            json!({"type": "integer", "minimum": i32::MIN, "maximum": i32::MAX}),
            &["7", "-2147483648"],
            &["2147483648"],
        ),
        (
            json!({"type": "number", "minimum": i64::MIN, "maximum": i64::MAX}),
            &["3", "3.5"],
            &["9223372036854775808"],
        ),
        (
            json!({"type": "number", "minimum": -3.4028235e38, "maximum": 3.4028235e38}),
            &["4", "-1e30"],
            &["x"],
        ),
        (json!({"type": "number", "minimum": f64::MIN, "maximum": f64::MAX}), &["5.25"], &["x"]),
    ] {
        right.iter().for_each(|text| assert!(takes(&schema, text), "{schema} takes {text}"));
        wrong.iter().for_each(|text| assert!(!takes(&schema, text), "{schema} does not take {text}"));
    }
}
