//! Compiler: from a grammar to what its matchers start from, with bounded work.

use std::sync::Arc;

use inflight_contract::Grammar;
use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::{Logger, ParserFactory};
use toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

use crate::budget::MemoryBudget;
use crate::error::shorten;
use crate::matcher::{MATCHER_BYTES_MAX, MaskOutcome, Matcher, STEP_FUEL, Start, lexer_states_max};
use crate::{GrammarError, Vocabulary, chains, json_in_lark, json_schema, messages, nesting};

/// Stack of the thread that compiles: grammars nest up to [`chains::LEVELS_MAX`] levels. What is not used takes no memory.
const STACK_BYTES: usize = 256 << 20;

/// Maximum size of a compiled grammar with its initial parser state: half of the maximum of a matcher.
const START_KIB_MAX: usize = MATCHER_BYTES_MAX >> 11;

/// Maximum Earley items in a row of the parser: rows under JSON schemas have tens, those of ambiguous grammars grow without bound.
const ROW_ITEMS_MAX: usize = 300;

/// Bounds on the work and the memory of one grammar, in the library's units of work.
fn limits() -> ParserLimits {
    ParserLimits {
        // About 10 ms.
        initial_lexer_fuel: 500_000,
        step_lexer_fuel: STEP_FUEL,
        // About 1 ms for a mask, unless rows are long.
        step_max_items: 20_000,
        max_items_in_row: ROW_ITEMS_MAX,
        max_lexer_states: lexer_states_max(0),
        max_grammar_size: 200_000,
        // Errors reach clients and logs, which hold no outputs.
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// Compiler of grammars for one vocabulary.
pub struct Compiler {
    factory: ParserFactory,
    shape: Arc<MaskShape>,
    budget: Arc<MemoryBudget>,
}

/// Layout of a vocabulary's masks.
#[derive(Debug)]
pub(crate) struct MaskShape {
    /// Tokens of the model.
    pub(crate) vocab_size: usize,
    /// End tokens, allowed where the output matches as a whole.
    pub(crate) eos_token_ids: Vec<u32>,
}

/// Grammar compiled for a vocabulary.
pub struct CompiledGrammar {
    start: Arc<Start>,
}

impl Compiler {
    /// Prepares a vocabulary. `vocab_size` is the model's number of tokens, which may exceed that of the tokenizer;
    /// `eos_token_ids` are its end tokens.
    ///
    /// # Errors
    /// [`GrammarError::Vocabulary`] or [`GrammarError::Unavailable`].
    pub fn new(
        vocabulary: &Vocabulary,
        vocab_size: u32,
        eos_token_ids: &[u32],
    ) -> Result<Self, GrammarError> {
        let mut words: Vec<Vec<u8>> = (0..vocab_size)
            .map(|id| {
                let bytes = vocabulary.bytes(id);
                if vocabulary.is_special(id) || eos_token_ids.contains(&id) {
                    // Control tokens are no text: their marker is no byte of UTF-8, so that no grammar of text matches it.
                    return [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat();
                }
                bytes.to_vec()
            })
            .collect();
        let mut eos_token_ids: Vec<u32> =
            eos_token_ids.iter().copied().filter(|id| *id < vocab_size).collect();
        let shape = Arc::new(MaskShape {
            vocab_size: vocab_size as usize,
            eos_token_ids: std::mem::take(&mut eos_token_ids),
        });
        // The library needs an end token: one behind the vocabulary, which no mask shows.
        words.push(b"\xff<end>".to_vec());
        let mut ends = shape.eos_token_ids.clone();
        if ends.is_empty() {
            ends.push(vocab_size);
        }
        let factory = guarded(move || {
            let info = TokRxInfo::new(words.len() as u32, ends[0]);
            let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
            let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let slices = SlicedBiasComputer::general_slices();
            let capabilities = InferenceCapabilities::default();
            ParserFactory::new(&environment, capabilities, &slices)
                .map_err(|error| GrammarError::Refused(error.to_string()))
        });
        let mut factory = factory.map_err(|error| match error {
            GrammarError::Refused(reason) => GrammarError::Vocabulary(reason),
            other => other,
        })?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { factory, shape, budget: Arc::default() })
    }

    /// Lets the matchers share a budget.
    pub fn with_budget(self, budget: Arc<MemoryBudget>) -> Self {
        Self { budget, ..self }
    }

    /// Checks what of a grammar is checked before the library runs: its nesting and its chains of names.
    ///
    /// # Errors
    /// [`GrammarError`].
    pub(crate) fn check(grammar: &Grammar) -> Result<(), GrammarError> {
        top_level(grammar, false).map(drop)
    }

    /// Compiles a grammar.
    ///
    /// # Errors
    /// [`GrammarError`]: the grammar is invalid, too large, or matches no text that the vocabulary can write.
    pub fn compile(&self, grammar: &Grammar) -> Result<CompiledGrammar, GrammarError> {
        guarded(|| self.compile_on_this_thread(grammar))
    }

    /// Compiles a grammar on the stack of the caller; a panic of the library continues.
    ///
    /// # Errors
    /// As [`Compiler::compile`].
    pub fn compile_on_this_thread(&self, grammar: &Grammar) -> Result<CompiledGrammar, GrammarError> {
        match (self.compile_as(grammar, false), grammar) {
            (Err(GrammarError::Refused(reason)), Grammar::JsonSchema(..) | Grammar::Lark(_))
                if reason == messages::ONE_OF =>
            {
                self.compile_as(grammar, true)
            }
            (compiled, _) => compiled,
        }
    }

    /// Compiles a grammar, with or without the `oneOf` of its schemas expanded.
    fn compile_as(&self, grammar: &Grammar, expand_one_of: bool) -> Result<CompiledGrammar, GrammarError> {
        let parser = || {
            let (mut logger, mut limits) = (Logger::new(0, 0), self.factory.limits().clone());
            let tokens = self.factory.tok_env();
            let grammar = top_level(grammar, expand_one_of)?;
            // Parametric rules are refused before the Earley parser is constructed, which would predict an item for each of 2^64
            // parameter values.
            let compiled = GrammarInit::Serialized(grammar.clone()).to_cgrammar(
                Some(tokens.clone()),
                &mut logger,
                limits.clone(),
                self.factory.extra_lexemes(),
            );
            let compiled = compiled.map_err(refused)?;
            if compiled.parametric() {
                return Err(GrammarError::Parameters);
            }
            limits.max_lexer_states = lexer_states_max(compiled.lexer_spec().lexemes.len());
            drop(compiled);
            let init = GrammarInit::Serialized(grammar);
            let capabilities = InferenceCapabilities::default();
            let parser = self.factory.create_parser_from_init_ext(init, logger, capabilities, limits);
            let parser = parser.map_err(refused)?;
            Start::new(parser, Arc::clone(&self.shape), Arc::clone(&self.budget))
                .map_err(|error| GrammarError::Unsatisfiable(error.to_string()))
        };
        let (start, outcome) = parser()?;
        let kib = (start.bytes() + start.own_bytes()) >> 10;
        if kib > START_KIB_MAX {
            return Err(GrammarError::TooLarge { kib, most: START_KIB_MAX });
        }
        match outcome {
            MaskOutcome::Masked => Ok(CompiledGrammar { start: Arc::new(start) }),
            MaskOutcome::Complete => Err(GrammarError::Empty),
        }
    }
}

impl std::fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompiledGrammar").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

impl CompiledGrammar {
    /// Maximum bytes held by a compiled grammar; larger ones are refused.
    pub const BYTES_MAX: usize = START_KIB_MAX << 10;

    /// Returns a matcher at the beginning of an output. With `begins_after`, the output is unconstrained until this token.
    pub fn matcher(&self, begins_after: Option<u32>) -> Matcher {
        Matcher::new(&self.start, begins_after)
    }

    /// Bytes held: those of the grammar and of the state at the beginning of an output.
    pub fn bytes(&self) -> usize {
        self.start.bytes()
    }
}

/// Returns the error of a grammar that the library refuses.
fn refused(error: impl std::fmt::Display) -> GrammarError {
    GrammarError::Refused(shorten(&messages::translated(&error.to_string())))
}

/// Returns a grammar in the library's terms.
fn top_level(grammar: &Grammar, expand_one_of: bool) -> Result<TopLevelGrammar, GrammarError> {
    Ok(match grammar {
        Grammar::JsonObject(whitespace) => {
            TopLevelGrammar::from_json_schema(json_schema::any_object(*whitespace))
        }
        Grammar::JsonSchema(schema, whitespace) => {
            TopLevelGrammar::from_json_schema(json_schema::prepare(schema, *whitespace, expand_one_of)?)
        }
        Grammar::Regex(regex) => {
            nesting::check(regex)?;
            TopLevelGrammar::from_regex(regex)
        }
        Grammar::Choice(choices) => TopLevelGrammar::from_lark(choice_grammar(choices)),
        Grammar::Lark(text) => {
            nesting::check(text)?;
            chains::check_lark(text)?;
            TopLevelGrammar::from_lark(json_in_lark::rewritten(text, expand_one_of)?)
        }
    })
}

/// Returns the Lark grammar of a choice between texts.
fn choice_grammar(choices: &[String]) -> String {
    // JSON's strings are Lark's, with the same escapes.
    let texts = choices.iter().map(|choice| serde_json::Value::from(choice.as_str()).to_string());
    // One terminal: as alternatives of a rule, each takes a place in a row of the parser, which has a few hundred.
    format!("start: CHOICE\nCHOICE: {}", texts.collect::<Vec<_>>().join(" | "))
}

/// Runs `work` on a thread with a large stack, and turns its panics into errors.
fn guarded<T: Send>(work: impl FnOnce() -> Result<T, GrammarError> + Send) -> Result<T, GrammarError> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK_BYTES);
        match thread.spawn_scoped(scope, work) {
            Ok(thread) => thread.join().unwrap_or_else(|panic| Err(panicked(&*panic))),
            Err(error) => Err(GrammarError::Unavailable(format!("no thread can be started ({error})"))),
        }
    })
}

/// Returns the error of a panic of the library.
fn panicked(panic: &(dyn std::any::Any + Send)) -> GrammarError {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    GrammarError::Refused(shorten(&format!("the grammar compiler failed: {}", text.unwrap_or_default())))
}
