//! Matcher: the state of a grammar after the tokens of an output.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::earley::{BiasComputer, ParserRecognizer};
use llguidance::panic_utils::catch_unwind;
use toktrie::{SimpleVob, TokEnv, TokTrie};

use crate::budget::{Lease, MemoryBudget};
use crate::compiler::MaskShape;
use crate::error::shorten;
use crate::usage::{Counts, capture_bytes, grammar_bytes};
use crate::{MatchError, messages};

/// Maximum lexer fuel of a token mask: 100,000 units, about 7 ms. Common masks take some hundreds.
pub(crate) const STEP_FUEL: u64 = 100_000;
/// Maximum lexer states of a matcher; fewer if the grammar has many lexemes. A matcher with more than half of them is rebuilt, so
/// that a single mask can add the other half.
const LEXER_STATES_MAX: usize = 40_000;
/// Lower bound of the maximum lexer states, for grammars with thousands of lexemes.
const LEXER_STATES_MIN: usize = 2_000;
/// Maximum bytes of a matcher's lexer states, estimated as 256 bytes and 8 for each lexeme of the grammar per state.
const LEXER_BYTES_MAX: usize = 64 << 20;
/// Maximum bytes of a matcher. Beyond them it is rebuilt without its cached lexer states.
pub(crate) const MATCHER_BYTES_MAX: usize = 32 << 20;
/// Refill rate of the token bucket that limits work: units per token of the output, about 0.4 ms. Outputs under schemas of SchemaStore
/// use 130 units per token in the median (`cargo bench -p inflight-grammar --bench masks -- FOLDER`).
const WORK_PER_TOKEN: u64 = 4_000;
/// A parser is rebuilt again only after 1/32 more tokens, so rebuilds replay at most 32 tokens per token of the output (amortized).
const REBUILD_DIVISOR: usize = 32;
/// Maximum forced bytes (the only continuation that the grammar allows) that are proposed as draft tokens.
const FORCED_BYTES_MAX: usize = 512;

/// Returns the maximum states of a lexer with this many lexemes.
pub(crate) fn lexer_states_max(lexemes: usize) -> usize {
    (LEXER_BYTES_MAX / (8 * lexemes + 256)).clamp(LEXER_STATES_MIN, LEXER_STATES_MAX)
}

/// State at the beginning of an output, shared by the matchers of a grammar.
pub(crate) struct Start {
    parser: TokenParser,
    counts: Counts,
    lexemes: usize,
    shape: Arc<MaskShape>,
    budget: Arc<MemoryBudget>,
    own_bytes: usize,
    /// Bytes of this state and of the compiled grammar.
    bytes: usize,
}

impl Start {
    /// Begins the outputs of a grammar, and computes the mask of the first token: whether the grammar can begin.
    pub(crate) fn new(
        mut parser: TokenParser,
        shape: Arc<MaskShape>,
        budget: Arc<MemoryBudget>,
    ) -> Result<(Self, MaskOutcome), MatchError> {
        parser.start_without_prompt();
        let mut mask = vec![0; Matcher::mask_words(shape.vocab_size)];
        let outcome = attempt(&mut parser, |parser| compute_mask(parser, &shape, &mut mask));
        let outcome = outcome.map_err(|reason| MatchError::Stuck { consumed: 0, reason })?;
        let counts = Counts::of(&parser);
        let own_bytes = counts.bytes(&parser);
        let bytes = own_bytes + grammar_bytes(parser.parser.grammar());
        let lexemes = parser.parser.grammar().lexer_spec().lexemes.len();
        Ok((Self { parser, counts, lexemes, shape, budget, own_bytes, bytes }, outcome))
    }

    /// Bytes of the state.
    pub(crate) fn own_bytes(&self) -> usize {
        self.own_bytes
    }

    /// Bytes of the state and of the compiled grammar.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Matcher of one output.
///
/// Its state is a pure function of the grammar and the tokens consumed: after a failover it is rebuilt by consuming
/// them again. What the library caches of its lexer grows with the masks, so a matcher that holds too much is rebuilt in the same
/// way, and one whose state needs too much without it, or whose masks need too much work, ends with an error.
pub struct Matcher {
    parser: TokenParser,
    /// Error after which the parser cannot be used.
    failed: Option<MatchError>,
    start: Arc<Start>,
    lease: Lease,
    /// Token after which the constraint begins.
    begins_after: Option<u32>,
    /// Whether the constraint has begun.
    begun: bool,
    /// Tokens consumed in all.
    consumed: usize,
    /// Tokens consumed by the grammar, and the bytes of the parser's rows for each.
    matched: Vec<(u32, usize)>,
    row_bytes: usize,
    captures: usize,
    capture_bytes: usize,
    /// Counts of the parser when its work was added last.
    counted: Counts,
    /// Work so far.
    work: u64,
    /// Level of the token bucket that limits work: work minus refills, at least 0.
    debt: u64,
    /// Lexer states beyond which the parser is rebuilt.
    states_max: usize,
    /// Number of tokens at the last rebuild of the parser.
    rebuilt_at: Option<usize>,
    /// Fuel spent when the lexer was refuelled.
    refuelled_at: u64,
}

/// What may follow an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskOutcome {
    /// The tokens of the mask.
    Masked,
    /// Nothing but the end.
    Complete,
}

impl Matcher {
    /// Begins an output. With `begins_after`, it is unconstrained until this token.
    pub(crate) fn new(start: &Arc<Start>, begins_after: Option<u32>) -> Self {
        let mut matcher = Self {
            parser: start.parser.deep_clone(),
            failed: None,
            start: Arc::clone(start),
            lease: Lease::new(&start.budget, 0),
            begins_after,
            begun: begins_after.is_none(),
            consumed: 0,
            matched: Vec::new(),
            row_bytes: 0,
            captures: 0,
            capture_bytes: 0,
            counted: start.counts,
            work: 0,
            debt: 0,
            states_max: lexer_states_max(start.lexemes) / 2,
            rebuilt_at: None,
            refuelled_at: 0,
        };
        matcher.count();
        matcher
    }

    /// Capacity of the token bucket that limits work, in units of about 100 ns: two of the largest masks.
    pub const WORK_DEBT_MAX: u64 = 200_000;

    /// Number of 32-bit words of a mask.
    pub fn mask_words(vocab_size: usize) -> usize {
        vocab_size.div_ceil(32)
    }

    /// Whether the constraint has begun; before, every token is allowed.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Consumes the next token of the output.
    ///
    /// # Errors
    /// [`MatchError`] if the grammar does not allow it; the matcher cannot be used any more.
    pub fn consume(&mut self, token: u32) -> Result<(), MatchError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if !self.begun {
            self.begun = self.begins_after == Some(token);
            self.consumed += 1;
            return Ok(());
        }
        let refused = MatchError::TokenRefused { token, consumed: self.consumed };
        if self.is_end(token) {
            // The library accepts an end token anywhere in an accepting state.
            let accepting = self.guarded(|parser| Ok(parser.is_accepting()))?;
            if !accepting {
                return Err(refused);
            }
        } else {
            self.refuel()?;
            let valid = self.guarded(|parser| validate(parser, &[token]))?;
            if valid == 0 {
                return Err(refused);
            }
        }
        self.advance(token)?;
        self.consumed += 1;
        Ok(())
    }

    /// Whether the output matches as a whole and nothing may follow it.
    pub fn is_complete(&self) -> bool {
        self.begun
            && self.failed.is_none()
            && matches!(
                self.parser.stop_reason(),
                StopReason::NoExtension | StopReason::NoExtensionBias | StopReason::EndOfSentence
            )
    }

    /// Whether the output matches as a whole, so that it may end.
    ///
    /// # Errors
    /// [`MatchError::Stuck`].
    pub fn is_accepting(&mut self) -> Result<bool, MatchError> {
        if !self.begun || self.is_complete() {
            return Ok(true);
        }
        self.guarded(|parser| Ok(parser.is_accepting()))
    }

    /// Writes the mask of the tokens that may follow: bit `i % 32` of word `i / 32` is token `i`. End tokens are allowed
    /// where the output matches as a whole. Before the constraint begins, all are allowed.
    ///
    /// # Errors
    /// [`MatchError::Stuck`] if nothing may follow although the output does not match as a whole, or the work of
    /// a mask is exhausted; [`MatchError::Work`] if that of the output is; [`MatchError::Memory`].
    pub fn write_mask(&mut self, mask: &mut [u32]) -> Result<MaskOutcome, MatchError> {
        if !self.begun {
            mask.fill(u32::MAX);
            return Ok(MaskOutcome::Masked);
        }
        if self.is_complete() {
            return Ok(MaskOutcome::Complete);
        }
        let shape = Arc::clone(&self.start.shape);
        let outcome = self.guarded(|parser| compute_mask(parser, &shape, mask))?;
        // A complete output needs no further mask, so its limits no longer matter.
        if outcome == MaskOutcome::Masked {
            self.settle()?;
        }
        Ok(outcome)
    }

    /// Removes the end tokens from a mask, for a sequence that ignores them.
    pub fn clear_end_tokens(&self, mask: &mut [u32]) {
        if !self.begun {
            return;
        }
        for id in &self.start.shape.eos_token_ids {
            if let Some(word) = mask.get_mut(*id as usize / 32) {
                *word &= !(1 << (id % 32));
            }
        }
    }

    /// Returns how many of the given tokens may follow, in order; for drafts. The state does not change. It stops
    /// before the token after which the constraint begins.
    ///
    /// # Errors
    /// [`MatchError::Stuck`].
    pub fn validate(&mut self, tokens: &[u32]) -> Result<usize, MatchError> {
        if !self.begun {
            let free = tokens.iter().position(|token| Some(*token) == self.begins_after);
            return Ok(free.unwrap_or(tokens.len()));
        }
        self.guarded(|parser| validate(parser, tokens))
    }

    /// Whether tokens can be rolled back without replaying the output: the library cannot under a grammar with `stop` or `max_tokens`,
    /// so outputs under such a grammar get no draft tokens.
    pub fn can_roll_back(&self) -> bool {
        self.start.parser.parser.grammar().lexer_spec().can_rollback()
    }

    /// Takes back the tokens consumed last; for drafts that were refused. Replays the output unless
    /// [`can_roll_back`](Self::can_roll_back).
    ///
    /// # Errors
    /// [`MatchError::Stuck`] if there are fewer.
    pub fn rollback(&mut self, tokens: usize) -> Result<(), MatchError> {
        if tokens > self.consumed {
            let reason = format!("{tokens} tokens were to be taken back");
            return Err(MatchError::Stuck { consumed: self.consumed, reason });
        }
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let kept = self.matched.len().saturating_sub(tokens);
        let of_grammar = self.matched.len() - kept;
        self.row_bytes -= self.matched.drain(kept..).map(|(_, bytes)| bytes).sum::<usize>();
        self.consumed -= tokens;
        if of_grammar > 0 {
            let taken_back = attempt(&mut self.parser, |parser| {
                parser.rollback(of_grammar).map_err(|error| error.to_string())
            });
            // See `can_roll_back`.
            if taken_back.is_err() {
                self.rebuild()?;
            }
        }
        if tokens > of_grammar && self.begins_after.is_some() {
            self.begun = false;
        }
        Ok(())
    }

    /// Returns tokens of the bytes that must follow, in the greedy tokenization of the vocabulary; none if several bytes may.
    /// As drafts they are guesses: the model may write the bytes in other tokens. A single byte at the end is left out: a quote
    /// that closes a string is usually written in one token with the punctuation behind it.
    pub fn forced_tokens(&mut self) -> Vec<u32> {
        if !self.begun || self.is_complete() {
            return Vec::new();
        }
        let before = Counts::of(&self.parser);
        let forced = self.guarded(|parser| {
            let mut bytes = parser.force_bytes();
            bytes.truncate(FORCED_BYTES_MAX);
            let trie = parser.token_env.tok_trie();
            let mut tokens = trie.greedy_tokenize(&bytes);
            if tokens.last().is_some_and(|last| trie.token_len(*last) <= 1) {
                tokens.pop();
            }
            Ok(tokens)
        });
        // The parser keeps the rows of forced bytes.
        self.row_bytes += Counts::of(&self.parser).row_bytes_since(&before);
        self.count();
        forced.unwrap_or_default()
    }

    /// Bytes held, estimated from the library's counts: those of the state and its part of what it shares with others.
    pub fn bytes(&self) -> usize {
        self.lease.bytes()
    }

    /// Work so far, in the library's units of about 100 ns.
    pub fn work(&self) -> u64 {
        self.work
    }

    /// Level of the token bucket that limits work: an output fails when it exceeds [`WORK_DEBT_MAX`](Self::WORK_DEBT_MAX).
    pub fn work_debt(&self) -> u64 {
        self.debt
    }

    /// Checks that the state holds no more than its share of the budget, which a new matcher may exceed.
    ///
    /// # Errors
    /// [`MatchError::Memory`].
    pub fn check_share(&mut self) -> Result<(), MatchError> {
        match self.lease.share() {
            Some(share) if self.lease.bytes() > share => self.fail_memory(),
            _ => Ok(()),
        }
    }

    fn is_end(&self, token: u32) -> bool {
        self.start.shape.eos_token_ids.contains(&token)
    }

    /// Lets the parser consume a token that it allows.
    fn advance(&mut self, token: u32) -> Result<(), MatchError> {
        let before = Counts::of(&self.parser);
        self.guarded(|parser| {
            let consumed = parser.consume_token(token).and_then(|_| parser.check_stop());
            consumed.map(|_| ()).map_err(|error| error.to_string())
        })?;
        let bytes = Counts::of(&self.parser).row_bytes_since(&before);
        self.matched.push((token, bytes));
        self.row_bytes += bytes;
        self.capture_bytes += capture_bytes(&self.parser, self.captures);
        self.captures = self.parser.captures().len();
        self.debt = self.debt.saturating_sub(WORK_PER_TOKEN);
        self.count();
        Ok(())
    }

    /// Gives the lexer the fuel of a step if it has spent half of it: the library does so before a mask, but tokens that are
    /// consumed anew have none.
    fn refuel(&mut self) -> Result<(), MatchError> {
        let spent = self.guarded(|parser| Ok(parser.parser.lexer_stats().total_fuel_spent as u64))?;
        if spent - self.refuelled_at >= STEP_FUEL / 2 {
            self.guarded(|parser| {
                let refuel = Refuel(parser.token_env.clone());
                // With a prefix, the result is not cached.
                parser.parser.compute_bias(&refuel, &[0]);
                Ok(())
            })?;
            self.refuelled_at = spent;
        }
        Ok(())
    }

    /// Updates the work and the bytes held.
    fn count(&mut self) {
        let counts = Counts::of(&self.parser);
        let work = counts.work_since(&self.counted, self.start.lexemes);
        self.counted = counts;
        self.work += work;
        self.debt += work;
        // One of the owners of what is shared is the compiled grammar.
        let shared = self.start.bytes / (Arc::strong_count(&self.start) - 1).max(1);
        let tokens = self.matched.capacity() * size_of::<(u32, usize)>();
        let own = counts.bytes(&self.parser) + self.row_bytes + self.capture_bytes + tokens;
        self.lease.set(shared + own);
    }

    /// Checks the work and the bytes after a mask.
    fn settle(&mut self) -> Result<(), MatchError> {
        self.count();
        if self.debt > Self::WORK_DEBT_MAX {
            let (consumed, work) = (self.consumed, self.debt);
            return self.fail(MatchError::Work { consumed, work, most: Self::WORK_DEBT_MAX });
        }
        let most = self.lease.share().unwrap_or(usize::MAX).min(MATCHER_BYTES_MAX);
        if self.holds_more_than(most) {
            let tokens = self.matched.len();
            if self.rebuilt_at.is_none_or(|at| tokens >= at + at / REBUILD_DIVISOR) {
                self.rebuilt_at = Some(tokens);
                self.rebuild()?;
            }
            if self.holds_more_than(most) {
                return self.fail_memory();
            }
        }
        Ok(())
    }

    fn holds_more_than(&self, bytes: usize) -> bool {
        self.lease.bytes() > bytes || self.counted.states > self.states_max
    }

    /// Rebuilds the parser by replaying the tokens, without cached lexer states. Not charged as work: the reason may be the memory of
    /// other sequences.
    fn rebuild(&mut self) -> Result<(), MatchError> {
        let (work, debt) = (self.work, self.debt);
        self.parser = self.start.parser.deep_clone();
        self.counted = self.start.counts;
        (self.refuelled_at, self.row_bytes, self.captures, self.capture_bytes) = (0, 0, 0, 0);
        for (token, _) in std::mem::take(&mut self.matched) {
            self.refuel()?;
            self.advance(token)?;
        }
        self.count();
        (self.work, self.debt) = (work, debt);
        Ok(())
    }

    fn fail_memory(&mut self) -> Result<(), MatchError> {
        let (kib, most_mib) = (self.lease.bytes() >> 10, self.lease.most() >> 20);
        self.fail(MatchError::Memory { consumed: self.consumed, kib, most_mib })
    }

    fn fail<T>(&mut self, error: MatchError) -> Result<T, MatchError> {
        self.failed = Some(error.clone());
        Err(error)
    }

    /// Runs an operation of the library and turns its errors and panics into one error, after which the matcher cannot be used.
    fn guarded<T>(
        &mut self,
        operation: impl FnOnce(&mut TokenParser) -> Result<T, String>,
    ) -> Result<T, MatchError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        attempt(&mut self.parser, operation)
            .or_else(|reason| self.fail(MatchError::Stuck { consumed: self.consumed, reason }))
    }
}

/// Runs an operation of the library and turns its errors and panics into reasons.
fn attempt<T>(
    parser: &mut TokenParser,
    operation: impl FnOnce(&mut TokenParser) -> Result<T, String>,
) -> Result<T, String> {
    // The library's own, which keeps the messages of panics, with parts of the output, out of the log.
    let outcome = catch_unwind(AssertUnwindSafe(|| Ok(operation(parser))));
    let outcome = outcome.unwrap_or_else(|_| Err("the grammar library failed".to_owned()));
    outcome.map_err(|reason| shorten(&messages::translated(&reason)))
}

/// Returns how many of the tokens may follow, in order.
fn validate(parser: &mut TokenParser, tokens: &[u32]) -> Result<usize, String> {
    let valid = parser.validate_tokens_raw(tokens).map_err(|error| error.to_string())?;
    // A lexer without fuel refuses every token.
    parser.parser.get_error().map_or(Ok(valid), |error| Err(error.message()))
}

/// Writes the mask of the tokens that may follow.
fn compute_mask(
    parser: &mut TokenParser,
    shape: &MaskShape,
    mask: &mut [u32],
) -> Result<MaskOutcome, String> {
    let allowed = parser.compute_mask().map_err(|error| {
        let reason = error.to_string();
        let dead_end = reason.starts_with(&StopReason::NoExtensionBias.to_string());
        if dead_end { "no token of the vocabulary may follow".to_owned() } else { reason }
    })?;
    let words = Matcher::mask_words(shape.vocab_size);
    for (at, word) in mask.iter_mut().enumerate() {
        *word = allowed.as_slice().get(at).copied().filter(|_| at < words).unwrap_or(0);
    }
    // The end token behind the vocabulary, and what pads the last word.
    if let Some(last) = mask.get_mut(words - 1)
        && !shape.vocab_size.is_multiple_of(32)
    {
        *last &= (1 << (shape.vocab_size % 32)) - 1;
    }
    let is_end_only = |at: usize, word: u32| {
        let ends = shape.eos_token_ids.iter().filter(|id| **id as usize / 32 == at);
        word & !ends.fold(0, |bits, id| bits | 1 << (id % 32)) == 0
    };
    let complete = mask.iter().enumerate().all(|(at, word)| *word == 0 || is_end_only(at, *word));
    Ok(if complete { MaskOutcome::Complete } else { MaskOutcome::Masked })
}

/// Mask of no token, whose computation gives the lexer the fuel of a step.
struct Refuel(TokEnv);

impl BiasComputer for Refuel {
    fn compute_bias(&self, _: &mut ParserRecognizer<'_>, _: &[u8]) -> SimpleVob {
        self.0.tok_trie().alloc_token_set()
    }

    fn trie(&self) -> &TokTrie {
        self.0.tok_trie()
    }
}
