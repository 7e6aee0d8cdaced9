//! State of a constrained choice: its matcher after the committed tokens.

use inflight_grammar::{GrammarError, MatchError, Matcher};
use inflight_grammar_service::Grammars;

use super::request::{Failure, Request};

/// Minimum number of predicted tokens for which the engine completes the iteration in flight before it plans the next one: the
/// token that this iteration samples, and one draft.
pub(super) const PREDICTED_MIN: u32 = 2;

/// Constraint of a live choice.
pub(super) struct LiveConstraint {
    /// State after the committed tokens; away while a mask is computed.
    pub(super) matcher: Option<Box<Matcher>>,
    pub(super) ignore_eos: bool,
    /// Whether the matcher can roll back drafts that are not accepted.
    can_draft: bool,
    /// Forced tokens that follow the committed ones, computed before the matcher moves to the mask pool; empty without look-ahead.
    pub(super) predicted: Vec<u32>,
    /// End found while masks were computed, and the number of tokens before it.
    pub(super) end: Option<(usize, ConstraintEnd)>,
}

/// End of a constrained choice without another token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ConstraintEnd {
    /// The output matches as a whole, and nothing may follow.
    Complete,
    /// The grammar cannot go on.
    Failed(String),
}

/// Effect of a sampled token on a constrained choice.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Consumed {
    /// It is part of the output, which continues.
    Continues,
    /// It is part of the output, which is then complete.
    Completes,
    /// It is not part of the output, which has ended before it.
    Ended(ConstraintEnd),
}

impl LiveConstraint {
    /// Returns the constraint of a choice of `request` that has generated `tokens`, if it has one.
    ///
    /// # Errors
    /// The grammar is refused, does not allow the tokens, or there is no memory for its state.
    pub(super) fn new(
        request: &Request,
        tokens: &[u32],
        grammars: Option<&Grammars>,
    ) -> Result<Option<Self>, Failure> {
        let sampling = &request.sampling;
        let Some(constraint) = &sampling.constraint else { return Ok(None) };
        let refused = |error: GrammarError| match error.is_transient() {
            true => Failure::Overloaded(error.to_string()),
            false => Failure::Invalid(error.to_string()),
        };
        let grammars = grammars.ok_or_else(|| {
            Failure::Invalid("this worker has no vocabulary, which structured output needs".to_owned())
        })?;
        let compiled = request.grammar.clone().unwrap_or_else(|| grammars.compile(&constraint.grammar));
        let mut matcher = compiled.map_err(refused)?.matcher(constraint.begins_after);
        let checked = matcher.check_share();
        let consumed = checked.and_then(|()| tokens.iter().try_for_each(|token| matcher.consume(*token)));
        consumed.map_err(|error| Failure::Constraint(error.to_string()))?;
        Ok(Some(Self {
            can_draft: matcher.can_roll_back(),
            matcher: Some(Box::new(matcher)),
            ignore_eos: sampling.ignore_eos,
            predicted: Vec::new(),
            end: None,
        }))
    }

    /// Whether nothing may follow the tokens consumed.
    pub(super) fn is_complete(&self) -> bool {
        self.matcher.as_ref().is_some_and(|matcher| matcher.is_complete())
    }

    /// Consumes a sampled token.
    pub(super) fn consume(&mut self, token: u32) -> Consumed {
        match self.end.take() {
            Some((0, end)) => return Consumed::Ended(end),
            Some((tokens, end)) => self.end = Some((tokens - 1, end)),
            None => {}
        }
        // Without a matcher, its mask was never computed: the pool is gone.
        let Some(matcher) = &mut self.matcher else {
            return Consumed::Ended(ConstraintEnd::Failed("its masks could not be computed".to_owned()));
        };
        match matcher.consume(token) {
            Ok(()) if matcher.is_complete() => Consumed::Completes,
            Ok(()) => Consumed::Continues,
            Err(MatchError::TokenRefused { .. }) => Consumed::Ended(ConstraintEnd::Failed(
                "allowed_token_ids, bad_words or min_tokens leave none of the tokens that the grammar allows next"
                    .to_owned(),
            )),
            Err(error) => Consumed::Ended(ConstraintEnd::Failed(error.to_string())),
        }
    }

    /// Returns up to `max` tokens that the grammar forces next, as drafts. While the mask pool holds the matcher, these
    /// are the stored ones.
    pub(super) fn forced_tokens(&mut self, max: usize) -> Vec<u32> {
        if !self.can_draft {
            return Vec::new();
        }
        let Some(matcher) = &mut self.matcher else {
            return self.predicted.iter().copied().take(max).collect();
        };
        let mut forced = matcher.forced_tokens();
        forced.truncate(max);
        let valid = matcher.validate(&forced).unwrap_or(0);
        forced.truncate(valid);
        forced
    }

    /// Returns how many of these drafts the grammar allows, in order; all while a mask is computed.
    pub(super) fn valid_drafts(&mut self, drafts: &[u32]) -> usize {
        if !self.can_draft {
            return 0;
        }
        let Some(matcher) = &mut self.matcher else { return drafts.len() };
        matcher.validate(drafts).unwrap_or(0)
    }
}
