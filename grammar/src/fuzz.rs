//! Entry point for fuzzing: grammars, and matchers that walk through them.

use std::sync::OnceLock;

use inflight_contract::{Grammar, JsonWhitespace};

use crate::{Compiler, MaskOutcome, MatchError, Matcher, Vocabulary};

/// Control token that ends a text.
const END: u32 = 256;
/// Tokens of the model: single bytes, the end, and padding.
const VOCAB_SIZE: u32 = 270;
/// Bytes of a grammar up to which it is compiled in this process; of larger ones the bounds are checked, as compiling one may take
/// minutes where no process limits it.
const COMPILED_MAX: usize = 4096;
/// Maximum tokens of a walk.
const WALK_MAX: usize = 24;

/// Compiles a grammar and walks through it. The first byte is its kind: `o` any JSON object, `j` a schema, both on one line, `a` and `s` the
/// same with any whitespace, `r` a regular expression, `c` choices, one a line, `l` Lark. The rest is its text, which also
/// decides the steps of the walk. Returns whether the grammar compiles.
///
/// # Panics
/// A mask has a bit outside the vocabulary, refuses a token that may follow, or differs after drafts that were taken back.
pub fn grammar(data: &[u8]) -> bool {
    static COMPILER: OnceLock<Option<Compiler>> = OnceLock::new();
    let compiler = COMPILER.get_or_init(|| {
        let bytes: Vec<[u8; 1]> = (0..=u8::MAX).map(|byte| [byte]).collect();
        let tokens = bytes.iter().map(|byte| (&byte[..], false));
        let vocabulary = Vocabulary::from_tokens(tokens.chain([(&b"<end>"[..], true)]));
        Compiler::new(&vocabulary, VOCAB_SIZE, &[END]).ok()
    });
    let (Some(compiler), Some((kind, text))) = (compiler, data.split_first()) else { return false };
    let text = String::from_utf8_lossy(text).into_owned();
    let grammar = match kind {
        b'o' => Grammar::JsonObject(JsonWhitespace::OneLine),
        b'a' => Grammar::JsonObject(JsonWhitespace::Any),
        b'j' => Grammar::JsonSchema(text, JsonWhitespace::OneLine),
        b's' => Grammar::JsonSchema(text, JsonWhitespace::Any),
        b'r' => Grammar::Regex(text),
        b'c' => Grammar::Choice(text.lines().map(str::to_owned).collect()),
        b'l' => Grammar::Lark(text),
        _ => return false,
    };
    if grammar.check().is_err() {
        return false;
    }
    if data.len() > COMPILED_MAX {
        return Compiler::check(&grammar).is_ok();
    }
    let Ok(compiled) = compiler.compile(&grammar) else { return false };
    let mut matcher = compiled.matcher(None);
    let draws = data.iter().cycle().take(WALK_MAX);
    let mut last: Option<Vec<u32>> = None;
    for draw in draws {
        // Work is bounded: a mask that needs too much is an error, and the choice ends.
        let Ok(Some(allowed)) = allowed(&mut matcher) else { break };
        assert!(!allowed.is_empty(), "a mask of a matcher that may go on is empty");
        if let Some(before) = last.take() {
            assert!(matcher.rollback(1).is_ok(), "a token could not be taken back");
            match self::allowed(&mut matcher) {
                Err(MatchError::Work { .. } | MatchError::Memory { .. }) => break,
                again => {
                    assert_eq!(again, Ok(Some(before.clone())), "another mask after a token was taken back");
                }
            }
            let token = before[usize::from(*draw) % before.len()];
            if matcher.consume(token).is_err() || matcher.is_complete() {
                break;
            }
            continue;
        }
        let token = allowed[usize::from(*draw) % allowed.len()];
        assert!(matcher.consume(token).is_ok(), "token {token} of the mask was refused");
        if token == END || matcher.is_complete() {
            break;
        }
        last = Some(allowed);
    }
    true
}

/// Returns the tokens that may follow; `None` if the output is complete.
fn allowed(matcher: &mut Matcher) -> Result<Option<Vec<u32>>, MatchError> {
    let mut mask = vec![0; Matcher::mask_words(VOCAB_SIZE as usize)];
    if matcher.write_mask(&mut mask)? == MaskOutcome::Complete {
        return Ok(None);
    }
    let bits = mask.len() as u32 * 32;
    let set = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
    assert!(!(END + 1..bits).any(|id| set(&id)), "a token outside the vocabulary is allowed");
    Ok(Some((0..=END).filter(set).collect()))
}
