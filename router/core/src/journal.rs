//! Journal of a request: the tokens received so far, which failover resubmits.

use inflight_contract::{AdmissionCost, FinishReason, MemoryShape};

/// How a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChoiceEnd {
    /// Ended by the worker, with this reason.
    Worker(FinishReason),
    /// Ended by the router, for example at a stop string.
    Withdrawn,
}

/// Result of appending a worker's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AppendOutcome {
    /// Appended.
    Appended,
    /// Dropped: the router has withdrawn the choice.
    AfterEnd,
    /// Dropped: they belong to another attempt than the current one.
    Stale,
}

/// Protocol violation by a worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, serde::Serialize)]
pub enum JournalError {
    /// Choice index out of range.
    #[error("the worker sent choice {choice} of a request with {choices} choices")]
    UnknownChoice {
        /// Index of the choice.
        choice: u32,
        /// Number of choices of the request.
        choices: usize,
    },
    /// More tokens than max_tokens.
    #[error("the worker sent more than max_tokens = {max_tokens} tokens for choice {choice}")]
    TooManyTokens {
        /// Index of the choice.
        choice: u32,
        /// max_tokens of the request.
        max_tokens: u32,
    },
    /// Tokens after the end of the choice.
    #[error("the worker sent tokens for choice {choice} after it had ended it")]
    TokensAfterEnd {
        /// Index of the choice.
        choice: u32,
    },
    /// Different numbers of tokens and log probabilities.
    #[error("the worker sent {logprobs} log probabilities for {tokens} tokens of choice {choice}")]
    UnpairedLogprobs {
        /// Index of the choice.
        choice: u32,
        /// Tokens in the update.
        tokens: usize,
        /// Log probabilities in the update.
        logprobs: usize,
    },
    /// Log probabilities of more prompt tokens than requested, or output before they are complete.
    #[error(
        "the worker sent {received} log probabilities of the prompt of {expected} before the output of choice \
         {choice}"
    )]
    PromptLogprobs {
        /// Index of the choice.
        choice: u32,
        /// Log probabilities received, with this update.
        received: u32,
        /// Number of those requested.
        expected: u32,
    },
}

/// Output of earlier attempts of one choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resumed<'a> {
    /// Index of the choice.
    pub choice: u32,
    /// Its tokens so far.
    pub tokens: &'a [u32],
    /// Whether the choice has ended; an ended choice is not run again.
    pub finished: bool,
}

#[derive(Debug, Default)]
struct Choice {
    tokens: Vec<u32>,
    end: Option<ChoiceEnd>,
}

/// Journal of one request: every token received, by choice; the state that a new attempt resumes from.
///
/// Invariants: a choice holds at most `max_tokens` tokens, so the journal is bounded by n * max_tokens;
/// tokens of another attempt than the current one never enter; nothing enters a choice that has ended.
#[derive(Debug)]
pub struct Journal {
    attempt: u32,
    max_tokens: u32,
    with_logprobs: bool,
    /// Prompt tokens whose log probabilities are requested.
    scored_tokens: u32,
    /// Prompt tokens whose log probabilities were received.
    scored: u32,
    choices: Vec<Choice>,
}

impl Journal {
    /// Creates an empty journal at attempt 1; log probabilities of `scored_tokens` prompt tokens are requested.
    pub fn new(choices: u32, max_tokens: u32, with_logprobs: bool, scored_tokens: u32) -> Self {
        Self {
            attempt: 1,
            max_tokens,
            with_logprobs,
            scored_tokens,
            scored: 0,
            choices: (0..choices).map(|_| Choice::default()).collect(),
        }
    }

    /// Creates a journal at attempt 1 with the output that a client has received in an earlier call: tokens
    /// of each choice by index, at most `max_tokens` each. Further ones are dropped.
    pub fn resume(
        choices: u32,
        max_tokens: u32,
        with_logprobs: bool,
        scored_tokens: u32,
        resumed: &[Vec<u32>],
    ) -> Self {
        let mut journal = Self::new(choices, max_tokens, with_logprobs, scored_tokens);
        for (choice, tokens) in journal.choices.iter_mut().zip(resumed) {
            choice.tokens.extend(tokens.iter().take(max_tokens as usize));
        }
        journal
    }

    /// Returns the number of the current attempt.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Returns the number of prompt tokens whose log probabilities were received.
    pub fn scored(&self) -> u32 {
        self.scored
    }

    /// Appends a worker's output of one choice, which came with `logprobs` log probabilities, and with those of
    /// `scored` prompt tokens.
    ///
    /// # Errors
    /// [`JournalError`] for a protocol violation; the journal is unchanged.
    pub fn append(
        &mut self,
        attempt: u32,
        choice: u32,
        tokens: &[u32],
        logprobs: usize,
        scored: usize,
        finish: Option<FinishReason>,
    ) -> Result<AppendOutcome, JournalError> {
        if attempt != self.attempt {
            return Ok(AppendOutcome::Stale);
        }
        let choices = self.choices.len();
        let max_tokens = self.max_tokens;
        let Some(entry) = self.choices.get_mut(choice as usize) else {
            return Err(JournalError::UnknownChoice { choice, choices });
        };
        match entry.end {
            Some(ChoiceEnd::Withdrawn) => return Ok(AppendOutcome::AfterEnd),
            Some(ChoiceEnd::Worker(_)) => return Err(JournalError::TokensAfterEnd { choice }),
            None => {}
        }
        if entry.tokens.len() + tokens.len() > max_tokens as usize {
            return Err(JournalError::TooManyTokens { choice, max_tokens });
        }
        if self.with_logprobs && logprobs != tokens.len() {
            return Err(JournalError::UnpairedLogprobs { choice, tokens: tokens.len(), logprobs });
        }
        let received = self.scored.saturating_add(u32::try_from(scored).unwrap_or(u32::MAX));
        let incomplete = received < self.scored_tokens && scored > 0 && !tokens.is_empty();
        if received > self.scored_tokens || incomplete {
            return Err(JournalError::PromptLogprobs { choice, received, expected: self.scored_tokens });
        }
        self.scored = received;
        entry.tokens.extend_from_slice(tokens);
        entry.end = finish.map(ChoiceEnd::Worker);
        Ok(AppendOutcome::Appended)
    }

    /// Ends a choice on the router's side. Returns whether it was still running.
    pub fn withdraw(&mut self, choice: u32) -> bool {
        match self.choices.get_mut(choice as usize) {
            Some(entry) if entry.end.is_none() => {
                entry.end = Some(ChoiceEnd::Withdrawn);
                true
            }
            _ => false,
        }
    }

    /// Whether the router has ended this choice.
    pub fn withdrawn(&self, choice: u32) -> bool {
        self.choices.get(choice as usize).is_some_and(|entry| entry.end == Some(ChoiceEnd::Withdrawn))
    }

    /// Returns the number of tokens received over all choices.
    pub fn tokens(&self) -> usize {
        self.choices.iter().map(|choice| choice.tokens.len()).sum()
    }

    /// Returns the number of tokens of a choice; 0 for one that does not exist.
    pub fn tokens_of(&self, choice: u32) -> usize {
        self.choices.get(choice as usize).map_or(0, |choice| choice.tokens.len())
    }

    /// Whether every choice has ended.
    pub fn ended(&self) -> bool {
        self.choices.iter().all(|choice| choice.end.is_some())
    }

    /// Returns the running choices as a bit mask.
    pub fn running(&self) -> u32 {
        let open = self.choices.iter().enumerate().filter(|(_, choice)| choice.end.is_none());
        open.fold(0, |mask, (i, _)| mask | 1 << i)
    }

    /// Starts the next attempt; output of the previous one is stale from then on. Ends choices that already
    /// hold max_tokens, whose end was lost with the worker, and returns these as a bit mask.
    pub fn next_attempt(&mut self) -> u32 {
        self.attempt += 1;
        let mut complete = 0;
        for (i, choice) in self.choices.iter_mut().enumerate() {
            if choice.end.is_none() && choice.tokens.len() == self.max_tokens as usize {
                choice.end = Some(ChoiceEnd::Worker(FinishReason::Length));
                complete |= 1 << i;
            }
        }
        complete
    }

    /// Returns the output that a new attempt resumes from: choices with tokens or an end.
    pub fn resumed(&self) -> impl Iterator<Item = Resumed<'_>> {
        self.choices.iter().enumerate().filter_map(|(i, choice)| {
            let finished = choice.end.is_some();
            let touched = finished || !choice.tokens.is_empty();
            touched.then_some(Resumed { choice: i as u32, tokens: &choice.tokens, finished })
        })
    }

    /// Returns the KV blocks needed to admit the running choices, prompt included.
    pub fn blocks(&self, prompt_tokens: usize, shape: MemoryShape) -> u32 {
        let own = self.choice_blocks(prompt_tokens, shape).map(|(_, blocks)| blocks);
        own.fold(AdmissionCost::new(shape).prompt(prompt_tokens), u32::saturating_add)
    }

    /// Returns the running choices with the KV blocks that each needs for itself at admission.
    pub fn choice_blocks(
        &self,
        prompt_tokens: usize,
        shape: MemoryShape,
    ) -> impl Iterator<Item = (u32, u32)> + '_ {
        let cost = AdmissionCost::new(shape);
        let open = self.choices.iter().enumerate().filter(|(_, choice)| choice.end.is_none());
        open.map(move |(i, choice)| (i as u32, cost.choice(prompt_tokens, choice.tokens.len())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_journal_holds_the_tokens_of_the_current_attempts_once_and_in_order(
            steps in proptest::collection::vec((0u32..3, 0usize..4, 0u8..8), 0..80)) {
            let mut journal = Journal::new(3, 40, true, 0);
            let mut sent = vec![Vec::new(); 3];
            let mut next = 0;
            for (choice, count, action) in steps {
                let tokens: Vec<u32> = (next..next + count as u32).collect();
                next += count as u32;
                let at = choice as usize;
                match action {
                    0 => {
                        let running = journal.running();
                        let complete = journal.next_attempt();
                        let full = (0..3).filter(|i| sent[*i].len() == 40).fold(0, |mask, i| mask | 1 << i);
                        prop_assert_eq!(complete, running & full);
                    }
                    1 => {
                        let old = journal.append(journal.attempt() - 1, choice, &tokens, count, 0, None);
                        prop_assert_eq!(old, Ok(AppendOutcome::Stale));
                    }
                    2 if count > 0 => {
                        let unpaired = journal.append(journal.attempt(), choice, &tokens, count - 1, 0, None);
                        prop_assert!(unpaired.is_err(), "one log probability is missing");
                    }
                    _ => match journal.append(journal.attempt(), choice, &tokens, count, 0, None) {
                        Ok(_) => sent[at].extend(tokens),
                        Err(error) => {
                            let over = sent[at].len() + count > 40;
                            let ended = matches!(error, JournalError::TokensAfterEnd { choice: _ });
                            prop_assert!(over || ended);
                        }
                    },
                }
                for resumed in journal.resumed() {
                    prop_assert_eq!(resumed.tokens, &sent[resumed.choice as usize][..]);
                }
                prop_assert_eq!(journal.tokens(), sent.iter().map(Vec::len).sum::<usize>());
            }
        }
    }

    #[test]
    fn a_choice_ends_once_and_is_not_run_again() {
        let mut journal = Journal::new(2, 4, false, 0);
        assert_eq!(
            journal.append(1, 0, &[7, 8], 0, 0, Some(FinishReason::Stop)),
            Ok(AppendOutcome::Appended)
        );
        assert_eq!(journal.running(), 0b10);
        assert!(matches!(journal.append(1, 0, &[9], 0, 0, None), Err(JournalError::TokensAfterEnd { .. })));
        assert!(journal.withdraw(1) && !journal.withdraw(1) && journal.ended());
        assert_eq!(journal.append(1, 1, &[9], 0, 0, None), Ok(AppendOutcome::AfterEnd));
        let resumed: Vec<_> = journal.resumed().map(|r| (r.choice, r.tokens.to_vec(), r.finished)).collect();
        assert_eq!(resumed, [(0, vec![7, 8], true), (1, vec![], true)]);
    }

    #[test]
    fn log_probabilities_of_the_prompt_are_received_once_over_all_attempts() {
        let mut journal = Journal::new(2, 4, false, 5);
        assert_eq!(journal.append(1, 0, &[], 0, 3, None), Ok(AppendOutcome::Appended));
        assert!(journal.append(1, 0, &[7], 0, 1, None).is_err(), "output before they are complete");
        journal.next_attempt();
        assert_eq!(journal.append(1, 0, &[], 0, 2, None), Ok(AppendOutcome::Stale));
        assert_eq!(journal.scored(), 3);
        assert!(journal.append(2, 0, &[], 0, 3, None).is_err(), "more than there are");
        assert_eq!(journal.append(2, 0, &[7], 0, 2, None), Ok(AppendOutcome::Appended));
        assert_eq!((journal.scored(), journal.tokens()), (5, 1));
    }
}
