//! Grammars of requests: compiled at admission, so that a worker gets none that it would refuse.

use std::sync::Arc;
use std::time::Duration;

use inflight_contract::{Constraint, Grammar};

use crate::clock;
use crate::dispatcher::ServedModel;
use crate::metrics as names;
use crate::outcome::{Outcome, Overload};
use crate::request::draft::{NamedConstraint, TOOLS};
use crate::request::tokenizing::{CHARGE_MAX, TokenizeTerms, Tokenizing};

/// Text of the token that ends reasoning, and of the one that begins it.
const REASONING_END: &str = "</think>";
const REASONING_BEGIN: &str = "<think>";

/// Grammar to be compiled.
pub(crate) struct GrammarCheck {
    served: ServedModel,
    constraint: Arc<Constraint>,
    /// Client's field that gives the grammar.
    field: &'static str,
    /// Grammar of an answer that it contains, by which a refusal names the field.
    answer: Option<NamedConstraint>,
}

impl GrammarCheck {
    /// Creates the work of a request.
    ///
    /// # Errors
    /// The grammar is too large.
    pub(crate) fn new(
        served: ServedModel,
        (field, constraint): NamedConstraint,
        answer: Option<NamedConstraint>,
    ) -> Result<Self, Outcome> {
        constraint.grammar.check().map_err(|error| Outcome::field(field, format!("{field}: {error}")))?;
        Ok(Self { served, constraint, field, answer })
    }

    /// Whether the outcome is known without compiling.
    pub(crate) fn is_known(&self) -> bool {
        self.served.model.grammars().is_checked(self.grammar())
    }

    /// Compiles the grammar, or takes the outcome from the cache. Returns the processor time that it took, and the outcome. Dropping the
    /// future ends the compilation.
    pub(crate) async fn run(&self) -> (Duration, Result<(), Outcome>) {
        let (grammars, known) = (self.served.model.grammars(), self.is_known());
        let begun = clock::now();
        let outcome = grammars.check(self.grammar()).await;
        let elapsed = || clock::now().saturating_duration_since(begun);
        if !known {
            metrics::histogram!(names::GRAMMAR_SECONDS).record(elapsed().as_secs_f64());
        }
        let label = if known { "hit" } else { "miss" };
        metrics::counter!(names::GRAMMAR_LOOKUPS, "outcome" => label).increment(1);
        metrics::gauge!(names::GRAMMARS).set(grammars.counters().entries as f64);
        match outcome {
            Ok(cpu) => (cpu, Ok(())),
            Err(error) if error.is_transient() => {
                let retry = Duration::from_secs(1);
                let full = Overload::of_router(error.to_string(), "grammar_processes", retry);
                // No tenant pays for what this machine lacks.
                (Duration::ZERO, Err(Outcome::Full(Box::new(full))))
            }
            Err(error) => {
                metrics::counter!(names::GRAMMARS_REFUSED).increment(1);
                let of_answer = match &self.answer {
                    Some((field, answer)) => {
                        let checked = grammars.check(&answer.grammar).await;
                        checked.err().filter(|error| !error.is_transient()).map(|error| (*field, error))
                    }
                    None => None,
                };
                let (field, error) = of_answer.unwrap_or((self.field, error));
                // The text of a grammar in Lark is the client's, but for that of tools.
                let is_own = field != TOOLS && matches!(self.grammar(), Grammar::Lark(_));
                let error = if is_own { error } else { error.without_place() };
                (elapsed().min(CHARGE_MAX), Err(Outcome::field(field, format!("{field}: {error}"))))
            }
        }
    }

    /// Compiles the grammar, in turns with other tenants, unless the outcome is known.
    pub(crate) async fn compile(self, compiling: &Tokenizing, terms: &TokenizeTerms) -> Result<(), Outcome> {
        if self.is_known() {
            return self.run().await.1;
        }
        let turn = compiling.turn(terms).await?;
        let (cpu, outcome) = match terms.deadline {
            None => self.run().await,
            Some(deadline) => {
                let run = tokio::time::timeout_at(deadline.into(), self.run()).await;
                run.map_err(|_| Outcome::DeadlineExceeded)?
            }
        };
        turn.finish(cpu);
        outcome
    }

    fn grammar(&self) -> &Grammar {
        &self.constraint.grammar
    }
}

/// Returns the token that ends the reasoning which a prompt has opened; `None` if the output begins with the answer.
pub(crate) fn reasoning_end(served: &ServedModel, prompt: &[u32]) -> Option<u32> {
    let tokenizer = &served.model.tokenizer;
    let (begin, end) = (tokenizer.token_id(REASONING_BEGIN)?, tokenizer.token_id(REASONING_END)?);
    let last = prompt.iter().rev().find(|token| **token == begin || **token == end)?;
    (*last == begin).then_some(end)
}
