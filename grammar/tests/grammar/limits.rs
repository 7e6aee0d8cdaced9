//! Bounds on the memory and the work of matchers.

use std::sync::Arc;

use inflight_contract::{Grammar, JsonWhitespace};
use inflight_grammar::{
    CompiledGrammar, Compiler, MaskOutcome, MatchError, Matcher, MemoryBudget, Vocabulary,
};

use super::vocabulary::schema;

const TOOL: &str = r#"{"type": "object", "additionalProperties": false, "required": ["query", "limit", "filters"], "properties": {
    "query": {"type": "string"}, "limit": {"type": "integer", "minimum": 1, "maximum": 50},
    "filters": {"type": "array", "minItems": 40, "items": {"type": "object", "additionalProperties": false,
        "required": ["field", "value"], "properties": {"field": {"enum": ["author", "year", "title"]},
        "value": {"type": ["string", "integer"]}}}}}}"#;
/// Its lexer has a state for each set of positions of the last 14 characters that hold a vowel: 2^14 states.
const HOSTILE: &str = r"[\x20-\x7e]*[aeiou][\x20-\x7e]{13}";
/// Tokens beside the single bytes: long ones, so that a mask looks far ahead.
const WORDS: u32 = 3000;
const END: u32 = 256 + WORDS;

fn vocabulary() -> Vocabulary {
    let mut random = 1;
    let mut word = || (0..9).map(|_| b'a' + (next(&mut random) % 26) as u8).collect();
    let words: Vec<Vec<u8>> = (0..WORDS).map(|_| word()).collect();
    let tokens: Vec<Vec<u8>> = (0..=u8::MAX).map(|byte| vec![byte]).chain(words).collect();
    Vocabulary::from_tokens(tokens.iter().map(|token| (&token[..], false)).chain([(&b"<end>"[..], true)]))
}

/// Xorshift random numbers.
fn next(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random
}

fn compiler(budget: &Arc<MemoryBudget>) -> Compiler {
    Compiler::new(&vocabulary(), END + 1, &[END]).unwrap().with_budget(Arc::clone(budget))
}

/// Output that draws its tokens from its masks, but those of its end.
struct Output {
    matcher: Matcher,
    seed: u64,
    random: u64,
}

impl Output {
    fn new(compiled: &CompiledGrammar, seed: u64) -> Self {
        Self { matcher: compiled.matcher(None), seed, random: seed * 7919 + 1 }
    }

    /// Draws a token. Returns its mask; `None`: the output is complete.
    fn step(&mut self) -> Result<Option<Vec<u32>>, MatchError> {
        let mut mask = vec![0; Matcher::mask_words(END as usize + 1)];
        if self.matcher.write_mask(&mut mask)? == MaskOutcome::Complete {
            return Ok(None);
        }
        let allowed: Vec<u32> = (0..END).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        let token = allowed[(next(&mut self.random) % allowed.len() as u64) as usize];
        self.matcher.consume(token)?;
        Ok(Some(mask))
    }
}

/// Runs an output alone, without a bound on its memory that it could reach.
fn alone(grammar: &Grammar, seed: u64, steps: usize) -> Vec<Vec<u32>> {
    let compiled = compiler(&Arc::default()).compile(grammar).unwrap();
    let mut output = Output::new(&compiled, seed);
    (0..steps).map_while(|_| output.step().unwrap_or_default()).collect()
}

#[test]
fn over_the_memory_budget_the_largest_sequences_end_and_the_others_keep_their_tokens() {
    const HOSTILE_COUNT: usize = 30;
    const STEPS: usize = 60;
    /// Bytes that a mask may add before they are counted.
    const MASK_BYTES: usize = 4 << 20;
    const BUDGET: usize = 16 << 20;
    let budget = Arc::new(MemoryBudget::new(BUDGET));
    let compiler = compiler(&budget);
    let (hostile, usual) = (Grammar::Regex(HOSTILE.to_owned()), schema(TOOL));
    let grammars = [vec![&hostile; HOSTILE_COUNT], vec![&usual; 4]].concat();
    let mut outputs: Vec<(Output, Vec<Vec<u32>>)> = grammars
        .iter()
        .zip(1..)
        .map(|(grammar, seed)| (Output::new(&compiler.compile(grammar).unwrap(), seed), Vec::new()))
        .collect();
    assert!(budget.used() > 0);
    let mut errors = Vec::new();
    for _ in 0..STEPS {
        let mut live = Vec::new();
        for (mut output, mut masks) in outputs {
            match output.step() {
                Ok(mask) => {
                    masks.extend(mask);
                    live.push((output, masks));
                }
                Err(error) => {
                    assert!(output.seed <= HOSTILE_COUNT as u64, "a usual sequence ends: {error}");
                    assert!(matches!(error, MatchError::Memory { .. } | MatchError::Work { .. }), "{error}");
                    errors.push(error.to_string());
                }
            }
            assert!(budget.used() <= BUDGET + MASK_BYTES, "{} bytes are held", budget.used());
        }
        outputs = live;
    }
    assert!(!errors.is_empty());
    println!("{} of {HOSTILE_COUNT} hostile sequences end: {errors:#?}", errors.len());
    for (output, masks) in &outputs {
        let expected = alone(grammars[output.seed as usize - 1], output.seed, STEPS);
        assert!(expected.starts_with(masks), "sequence {} has other masks than alone", output.seed);
    }
    drop(outputs);
    assert_eq!(budget.used(), 0);
}

#[test]
fn a_matcher_with_more_than_its_share_is_built_anew_and_allows_the_same() {
    let counted = schema(r#"{"type": "string", "minLength": 900, "maxLength": 1000}"#);
    let budget = Arc::new(MemoryBudget::new(1 << 20));
    let mut output = Output::new(&compiler(&budget).compile(&counted).unwrap(), 3);
    let (mut bytes, mut smaller, mut masks) = (0, 0, Vec::new());
    while let Some(mask) = output.step().unwrap() {
        masks.push(mask);
        smaller += usize::from(budget.used() < bytes);
        bytes = budget.used();
    }
    println!("built anew {smaller} times in {} tokens", masks.len());
    assert!(smaller > 0 && output.matcher.is_complete());
    assert_eq!(masks, alone(&counted, 3, usize::MAX));
}

#[test]
fn new_sequences_are_refused_where_the_memory_is_used_up() {
    let budget = Arc::new(MemoryBudget::new(2 << 20));
    let compiler = compiler(&budget);
    let mut usual = compiler.compile(&Grammar::Choice(vec!["yes".into()])).unwrap().matcher(None);
    let compiled = compiler.compile(&Grammar::Regex(HOSTILE.to_owned())).unwrap();
    let mut accepted = Vec::new();
    let error = (0..100).find_map(|_| {
        let mut matcher = compiled.matcher(None);
        let refused = matcher.check_share().err();
        accepted.push(matcher);
        refused
    });
    assert!(matches!(error, Some(MatchError::Memory { consumed: 0, .. })), "{error:?}");
    assert!((2..50).contains(&accepted.len()), "{} sequences", accepted.len());
    assert_eq!(usual.check_share(), Ok(()));
    drop((usual, accepted));
    assert_eq!(budget.used(), 0);
}

#[test]
fn masks_that_need_too_much_work_end_the_output_and_usual_ones_need_a_twentieth() {
    let compiler = compiler(&Arc::default());
    let costly = compiler.compile(&Grammar::Regex(r"[\x20-\x7e]*[aeiou][\x20-\x7e]{18}".to_owned())).unwrap();
    let mut output = Output::new(&costly, 3);
    let error = (0..100).find_map(|_| output.step().err()).unwrap();
    assert!(matches!(error, MatchError::Work { .. }), "{error}");
    println!("{error}");
    assert_eq!(output.matcher.write_mask(&mut [0]), Err(error), "the matcher goes on");
    for grammar in [
        schema(TOOL),
        Grammar::JsonObject(JsonWhitespace::OneLine),
        Grammar::Choice(vec!["yes".into(), "no".into()]),
    ] {
        let mut output = Output::new(&compiler.compile(&grammar).unwrap(), 3);
        for _ in 0..200 {
            let (debt, most) = (output.matcher.work_debt(), Matcher::WORK_DEBT_MAX);
            assert!(20 * debt <= most, "{grammar:?} needs {debt} of {most}");
            if output.step().unwrap().is_none() {
                break;
            }
        }
    }
}

#[test]
fn tokens_consumed_again_without_masks_have_the_fuel_of_many() {
    let costly = ["aeiou", "xyzt", "klm"].map(|set| format!(r"[\x20-\x7e]*[{set}][\x20-\x7e]{{12}}"));
    let grammar = Grammar::Regex(format!("({})!", costly.join("|")));
    let mut matcher = compiler(&Arc::default()).compile(&grammar).unwrap().matcher(None);
    for at in 0..2500 {
        matcher.consume(256 + at * 7 % WORDS).unwrap();
    }
    assert!(matcher.work() > 200_000, "{} of work would be that of one mask", matcher.work());
}

#[test]
fn an_ambiguous_grammar_ends_before_its_rows_are_long() {
    let ambiguous = Grammar::Lark("start: start start | \"a\"".to_owned());
    let mut matcher = compiler(&Arc::default()).compile(&ambiguous).unwrap().matcher(None);
    let mut mask = vec![0; Matcher::mask_words(END as usize + 1)];
    let error = (0..500)
        .find_map(|_| matcher.write_mask(&mut mask).err().or_else(|| matcher.consume(b'a'.into()).err()));
    let error = error.expect("an end");
    println!("{error}");
    assert!(matches!(error, MatchError::Work { .. } | MatchError::Stuck { .. }), "{error}");
}

#[test]
fn work_is_not_saved_up_by_cheap_tokens() {
    let late = Grammar::Regex(r"a*b[\x20-\x7e]*[aeiou][\x20-\x7e]{18}".to_owned());
    let compiled = compiler(&Arc::default()).compile(&late).unwrap();
    let mut output = Output::new(&compiled, 3);
    for _ in 0..3_000 {
        output.matcher.consume(b'a'.into()).unwrap();
    }
    output.matcher.consume(b'b'.into()).unwrap();
    let error = (0..100).find_map(|_| output.step().err()).unwrap();
    assert!(matches!(error, MatchError::Work { .. }), "{error}");
    assert!(output.matcher.work() < 500_000, "{} of work", output.matcher.work());
}

#[test]
fn tokens_are_taken_back_under_a_grammar_with_a_stop() {
    let text = "start: body \"!\"\nbody[stop=\"x\"]: /[a-z]*/";
    let mut matcher =
        compiler(&Arc::default()).compile(&Grammar::Lark(text.to_owned())).unwrap().matcher(None);
    let mask = |matcher: &mut Matcher| {
        let mut mask = vec![0; Matcher::mask_words(END as usize + 1)];
        assert_eq!(matcher.write_mask(&mut mask), Ok(MaskOutcome::Masked));
        mask
    };
    assert!(!matcher.can_roll_back());
    matcher.consume(b'a'.into()).unwrap();
    let before = mask(&mut matcher);
    b"bcx".iter().for_each(|byte| matcher.consume((*byte).into()).unwrap());
    assert_ne!(mask(&mut matcher), before);
    matcher.rollback(3).unwrap();
    assert_eq!(mask(&mut matcher), before);
}
