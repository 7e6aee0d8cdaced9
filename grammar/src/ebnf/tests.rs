//! Random grammars in EBNF against a recognizer that follows their rules, and grammars as other servers' documentation has them.

use std::collections::BTreeSet;

use inflight_contract::Grammar;
use proptest::prelude::*;

use super::*;
use crate::{Compiler, Vocabulary};

const END: u32 = 256;

fn compiler() -> Compiler {
    let bytes: Vec<[u8; 1]> = (0..=u8::MAX).map(|byte| [byte]).collect();
    let tokens = bytes.iter().map(|byte| (&byte[..], false));
    let vocabulary = Vocabulary::from_tokens(tokens.chain([(&b"<end>"[..], true)]));
    Compiler::new(&vocabulary, 257, &[END]).unwrap()
}

/// Whether a grammar's regular expression matches each of the texts, as a matcher decides.
fn matches(compiler: &Compiler, regex: &str, texts: &[&str]) -> Vec<bool> {
    let compiled = compiler.compile(&Grammar::Regex(regex.to_owned()));
    let compiled = compiled.unwrap_or_else(|error| panic!("{regex}: {error}"));
    let one = |text: &&str| {
        let mut matcher = compiled.matcher(None);
        text.bytes().all(|byte| matcher.consume(byte.into()).is_ok()) && matcher.is_accepting().unwrap()
    };
    texts.iter().map(one).collect()
}

/// Ends of the texts that a node matches from a position of `text`, by the ends of rules found so far.
fn ends(node: &Node, text: &str, from: usize, rules: &[Vec<BTreeSet<usize>>]) -> BTreeSet<usize> {
    match node {
        // Texts of the random grammars have no signs of regular expressions.
        Node::Text(part) => {
            text[from..].starts_with(part.as_str()).then_some(from + part.len()).into_iter().collect()
        }
        Node::Name(rule) => rules[*rule][from].clone(),
        Node::All(nodes) => nodes.iter().fold(BTreeSet::from([from]), |starts, node| {
            starts.iter().flat_map(|start| ends(node, text, *start, rules)).collect()
        }),
        Node::Any(nodes) => nodes.iter().flat_map(|node| ends(node, text, from, rules)).collect(),
        Node::Repeat(node, least, most) => {
            let (mut found, mut starts) = (BTreeSet::new(), BTreeSet::from([from]));
            // Beyond the length of the text, more times add nothing but for the least number.
            let bound = most.unwrap_or(u32::MAX).min(least + text.len() as u32 + 1);
            for count in 0..=bound {
                if count >= *least {
                    found.extend(&starts);
                }
                starts = starts.iter().flat_map(|start| ends(node, text, *start, rules)).collect();
            }
            found
        }
    }
}

fn recognizes(rules: &parser::Rules, text: &str) -> bool {
    let mut found = vec![vec![BTreeSet::new(); text.len() + 1]; rules.nodes.len()];
    loop {
        let before = found.clone();
        for (rule, node) in rules.nodes.iter().enumerate() {
            for from in 0..=text.len() {
                found[rule][from] = ends(node, text, from, &before);
            }
        }
        if found == before {
            return found[rules.number("root").unwrap()][0].contains(&text.len());
        }
    }
}

/// Text of an expression over the letters and the rules `r0` to `r2`.
fn expression() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        3 => prop_oneof![Just("\"a\""), Just("\"b\""), Just("\"ab\""), Just("\"\"")].prop_map(str::to_owned),
        1 => (0..3usize).prop_map(|rule| format!("r{rule}")),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            3 => prop::collection::vec(inner.clone(), 1..3).prop_map(|all| all.join(" ")),
            2 => prop::collection::vec(inner.clone(), 2..3).prop_map(|any| format!("({})", any.join(" | "))),
            1 => (inner.clone(), prop_oneof![Just("*"), Just("+"), Just("?"), Just("{2}"), Just("{1,2}"), Just("{,2}")])
                .prop_map(|(one, count)| format!("({one}){count}")),
            // At the end of an alternative, a rule may name any.
            2 => (inner, 0..3usize).prop_map(|(before, rule)| format!("({before} r{rule} | \"b\")")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn regular_grammars_match_as_their_rules_say_and_others_are_refused(
        root in expression(), rules in prop::collection::vec(expression(), 3),
    ) {
        static COMPILER: std::sync::OnceLock<Compiler> = std::sync::OnceLock::new();
        let mut text = format!("root ::= {root}\n");
        for (rule, expression) in rules.iter().enumerate() {
            text.push_str(&format!("r{rule} ::= # a rule\n  {expression}\n"));
        }
        let parsed = parser::parse(&text).unwrap();
        let mut texts = vec![String::new()];
        for at in 0..31 {
            texts.extend(["a", "b"].map(|letter| format!("{}{letter}", texts[at])));
        }
        let expected: Vec<bool> = texts.iter().map(|one| recognizes(&parsed, one)).collect();
        match to_regex(&text) {
            // The empty text alone is refused by the compiler.
            Ok(regex) if !expected[1..].contains(&true) => prop_assert!(regex.len() < BYTES_MAX),
            Ok(regex) => {
                let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                let found = matches(COMPILER.get_or_init(compiler), &regex, &texts);
                prop_assert_eq!(found, expected, "{}\n{}", text, regex);
            }
            Err(EbnfError::Nested { .. }) => {}
            Err(EbnfError::Nothing) => prop_assert!(!expected.contains(&true), "{}", text),
            Err(error) => prop_assert!(false, "{text}: {error}"),
        }
    }
}

#[test]
fn grammars_as_other_servers_document_them() {
    let compiler = compiler();
    let sql = r#"
        root ::= select_statement
        select_statement ::= "SELECT " column " from " table " where " condition
        column ::= "col_1 " | "col_2 "
        table ::= "table_1 " | "table_2 "
        condition ::= column "= " number
        number ::= "1 " | "2 "
    "#;
    let list = "root ::= item+\n# an item\nitem ::= \"- \" [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ \"\\n\"";
    let digits = "root ::= [+-]? digit{1,3} (\".\" digit+)? tail\ntail ::= \" \" tail | \"\\u20ac\" |\n \"[x]*\" .\ndigit ::= [0-9]";
    for (grammar, good, bad) in [
        (
            sql,
            &["SELECT col_1  from table_2  where col_2 = 1 "][..],
            &["SELECT col_3  from table_2  where col_2 = 1 ", "SELECT "][..],
        ),
        (list, &["- a\n", "- a\n- é]\n"], &["a\n", "- \n", "- a"]),
        (digits, &["1€", "-123.5  €", "0[x]*\n"], &["1234€", "1x*", "1.€", "1 "]),
        ("root ::= \"a\" [b-d^\\]-]", &["ac", "a^", "a]", "a-"], &["ae", "a["]),
    ] {
        assert!(is_ebnf(grammar), "{grammar}");
        let regex = to_regex(grammar).unwrap_or_else(|error| panic!("{grammar}: {error}"));
        assert!(matches(&compiler, &regex, good).iter().all(|found| *found), "{regex}");
        assert!(!matches(&compiler, &regex, bad).iter().any(|found| *found), "{regex}");
    }
    for lark in ["start: \"a\" // x ::= y", "start: /a::=/", "start: \"root ::= b\""] {
        assert!(!is_ebnf(lark), "{lark}");
    }
}

#[test]
fn what_cannot_be_converted_is_refused_with_its_place() {
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(200), ")".repeat(200));
    let doubled: Vec<String> = (0..40).map(|at| format!("r{at} ::= r{} r{}", at + 1, at + 1)).collect();
    let doubled = format!("root ::= r0\n{}\nr40 ::= \"a\"", doubled.join("\n"));
    let circle: Vec<String> = (0..300).map(|at| format!("r{at} ::= \"a\" r{}", (at + 1) % 300)).collect();
    let circle = format!("root ::= r0\n{}", circle.join("\n"));
    for (grammar, words) in [
        ("root ::= \"(\" root \")\" | \"x\"", "the rule `root` of the EBNF grammar contains itself"),
        ("root ::= root \"a\" | \"b\"", "contains itself"),
        ("root ::= \"a\" root", "matches no text"),
        ("root ::= a", "names the rule `a`"),
        ("main ::= \"a\"", "no rule `root`"),
        ("", "no rule `root`"),
        ("start: \"a\"", "line 1 of the EBNF grammar has no rule"),
        ("root ::= \"a\"\nroot ::= \"b\"", "defines the rule `root` twice"),
        ("root ::= \"a\"\n  b", "names the rule `b`"),
        ("root ::= \"a", "text that is not closed"),
        ("root ::=\n [a-", "line 2 of the EBNF grammar has a class"),
        ("root ::= [z-a]", "whose last is before its first"),
        ("root ::= []", "empty class"),
        ("root ::= (\"a\"", "group that is not closed"),
        ("root ::= \"a\")", "closes a group"),
        ("root ::= \"\\q\"", "unknown escape"),
        ("root ::= \"\\ud83d\"", "no character"),
        ("root ::= \"a\"**", "repeats a repetition"),
        ("root ::= \"a\"{2,1}", "counts other than"),
        ("root ::= <think> \"a\"", "names a token"),
        ("root ::= (= \"a\") \"b\"", "lookahead"),
        (&deep, "nests more than 100 groups"),
        (&doubled, "too large"),
        (&circle, "300 rules that lead back to themselves"),
    ] {
        let refused = to_regex(grammar).unwrap_err().to_string();
        assert!(refused.contains(words), "{grammar:.80}: {refused}");
    }
}
