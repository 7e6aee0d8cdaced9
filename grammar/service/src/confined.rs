//! Compilation of untrusted grammars in processes of their own ([`inflight_sandbox`]): a grammar that aborts, hangs or takes gigabytes
//! ends nothing but its own process.

use std::process::ExitCode;
use std::time::Duration;

use inflight_contract::{Grammar, JsonWhitespace};
use inflight_grammar::{Compiler, GrammarError, Vocabulary};
use inflight_sandbox::{Helper, HelperError, HelperOptions, Limits, StateError};
use serde::{Deserialize, Serialize};

/// Limits of one compilation. Usual schemas take 1 to 20 ms and a few MiB.
const LIMITS: Limits =
    Limits { memory_bytes: 256 << 20, cpu: Duration::from_secs(1), wall: Duration::from_secs(30) };

/// How grammars are checked before they are compiled in this process.
#[derive(Debug, Clone)]
pub struct Confinement {
    /// Program that runs [`serve`].
    pub program: inflight_sandbox::Program,
    /// Maximum compilations at once, each of at most [`Confinement::MEMORY_BYTES`].
    pub slots: usize,
}

impl Confinement {
    /// Maximum memory of a compilation in bytes, beside the vocabulary that all of them share.
    pub const MEMORY_BYTES: u64 = LIMITS.memory_bytes;

    pub(crate) fn helper(
        self,
        state: impl Fn() -> Result<Vec<u8>, StateError> + Send + Sync + 'static,
    ) -> Helper {
        let Self { program, slots } = self;
        Helper::new(HelperOptions { purpose: "grammars", program, limits: LIMITS, slots }, state)
    }
}

/// Vocabulary, as it is sent to a helper.
#[derive(Debug, Serialize, Deserialize)]
struct State {
    vocab_size: u32,
    eos_token_ids: Vec<u32>,
    bytes: Vec<u8>,
    lengths: Vec<u32>,
    special: Vec<bool>,
}

/// Grammar, as it is sent to a helper.
#[derive(Debug, Serialize, Deserialize)]
enum Request {
    JsonObject(JsonWhitespace),
    JsonSchema(String, JsonWhitespace),
    Regex(String),
    Choice(Vec<String>),
    Lark(String),
}

/// Outcome of a grammar that a helper compiled.
type Verdict = Result<(), GrammarError>;

/// Returns the state of a helper.
pub(crate) fn state(
    vocabulary: &Vocabulary,
    vocab_size: u32,
    eos_token_ids: &[u32],
) -> Result<Vec<u8>, StateError> {
    let ids = || 0..u32::try_from(vocabulary.len()).unwrap_or(u32::MAX);
    let state = State {
        vocab_size,
        eos_token_ids: eos_token_ids.to_vec(),
        bytes: ids().flat_map(|id| vocabulary.bytes(id)).copied().collect(),
        lengths: ids().map(|id| vocabulary.bytes(id).len() as u32).collect(),
        special: ids().map(|id| vocabulary.is_special(id)).collect(),
    };
    postcard::to_allocvec(&state).map_err(|error| StateError::Unusable(error.to_string()))
}

/// Returns why a helper has no state.
pub(crate) fn state_error(error: &GrammarError) -> StateError {
    match error.is_transient() {
        true => StateError::Unavailable(error.to_string()),
        false => StateError::Unusable(error.to_string()),
    }
}

/// Compiles a grammar in a process of its own. Returns the processor time that it took.
///
/// # Errors
/// [`GrammarError`].
pub(crate) async fn check(helper: &Helper, grammar: &Grammar) -> Result<Duration, GrammarError> {
    let request = match grammar.clone() {
        Grammar::JsonObject(whitespace) => Request::JsonObject(whitespace),
        Grammar::JsonSchema(text, whitespace) => Request::JsonSchema(text, whitespace),
        Grammar::Regex(text) => Request::Regex(text),
        Grammar::Choice(choices) => Request::Choice(choices),
        Grammar::Lark(text) => Request::Lark(text),
    };
    let unread = |error: postcard::Error| GrammarError::Unavailable(error.to_string());
    let request = postcard::to_allocvec(&request).map_err(unread)?;
    let answer = helper.run(&request).await.map_err(|error| match error {
        HelperError::CpuTime(_) | HelperError::Memory(_) => GrammarError::TooCostly(error.to_string()),
        HelperError::Panic(_) => GrammarError::refused(&format!("the grammar compiler failed: {error}")),
        HelperError::State(reason) => GrammarError::Vocabulary(reason),
        HelperError::Host(reason) => GrammarError::Host(reason),
        HelperError::Unavailable(reason) => GrammarError::Unavailable(reason),
    })?;
    let verdict: Verdict = postcard::from_bytes(&answer.bytes).map_err(unread)?;
    verdict.map(|()| answer.cpu)
}

/// Runs this process as the helper that compiles the grammars of another one, which has started it.
pub fn serve() -> ExitCode {
    inflight_sandbox::serve(prepare, compile)
}

fn prepare(state: &[u8]) -> Result<Compiler, StateError> {
    let State { vocab_size, eos_token_ids, bytes, lengths, special } =
        postcard::from_bytes(state).map_err(|error| StateError::Unusable(error.to_string()))?;
    let mut rest = &bytes[..];
    let tokens = lengths.iter().zip(special).map(|(length, special)| {
        let (token, behind) = rest.split_at(rest.len().min(*length as usize));
        rest = behind;
        (token, special)
    });
    let vocabulary = Vocabulary::from_tokens(tokens.collect::<Vec<_>>());
    Compiler::new(&vocabulary, vocab_size, &eos_token_ids).map_err(|error| state_error(&error))
}

fn compile(compiler: &Compiler, request: &[u8]) -> Vec<u8> {
    let verdict: Verdict = match postcard::from_bytes(request) {
        Ok(request) => {
            let grammar = match request {
                Request::JsonObject(whitespace) => Grammar::JsonObject(whitespace),
                Request::JsonSchema(text, whitespace) => Grammar::JsonSchema(text, whitespace),
                Request::Regex(text) => Grammar::Regex(text),
                Request::Choice(choices) => Grammar::Choice(choices),
                Request::Lark(text) => Grammar::Lark(text),
            };
            compiler.compile_on_this_thread(&grammar).map(drop)
        }
        Err(error) => Err(GrammarError::Unavailable(error.to_string())),
    };
    // Without an answer, the grammar is not accepted.
    postcard::to_allocvec(&verdict).unwrap_or_default()
}
