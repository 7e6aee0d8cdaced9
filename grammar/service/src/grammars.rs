//! Compiled grammars of one model: a compiler that is prepared in the background or at first use, and a bounded cache.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use inflight_contract::Grammar;
use inflight_grammar::{CompiledGrammar, Compiler, GrammarError, MemoryBudget, Vocabulary};
use inflight_sandbox::Helper;

use crate::cache::DigestCache;
use crate::confined::{self, Confinement};

/// Source of a model's vocabulary, read at first use.
type VocabularySource = Arc<dyn Fn() -> Result<Arc<Vocabulary>, GrammarError> + Send + Sync>;

/// Compiled grammars of one model.
pub struct Grammars {
    source: VocabularySource,
    vocab_size: u32,
    eos_token_ids: Vec<u32>,
    compiler: OnceLock<Result<Compiler, GrammarError>>,
    /// Process in which each grammar is checked before it is compiled in this one; without it, this process checks.
    helper: Option<Helper>,
    /// Held while the compiler is prepared.
    preparing: Mutex<()>,
    /// Memory of the matchers.
    budget: Arc<MemoryBudget>,
    compiled: DigestCache<Result<Arc<CompiledGrammar>, GrammarError>>,
    /// Outcome of each grammar checked; without what was compiled, so that many fit.
    checked: DigestCache<Result<(), GrammarError>>,
    hits: AtomicU64,
    misses: AtomicU64,
}

/// Counters of a model's grammars.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GrammarCounters {
    /// Grammars found in the cache.
    pub hits: u64,
    /// Grammars compiled.
    pub misses: u64,
    /// Entries of the cache.
    pub entries: usize,
}

impl Grammars {
    /// Maximum compiled grammars in the cache.
    const COMPILED_MAX: usize = 64;
    /// Maximum bytes of the compiled grammars in the cache; usual ones have less than 1 MiB.
    const COMPILED_BYTES_MAX: usize = 64 << 20;
    /// Maximum outcomes of checks in the cache.
    const CHECKED_MAX: usize = 4096;

    /// Creates the grammars of a model of `vocab_size` tokens. `source` gives its vocabulary, at first use.
    pub fn new(
        vocab_size: u32,
        eos_token_ids: &[u32],
        source: impl Fn() -> Result<Arc<Vocabulary>, GrammarError> + Send + Sync + 'static,
    ) -> Self {
        Self {
            source: Arc::new(source),
            vocab_size,
            eos_token_ids: eos_token_ids.to_vec(),
            compiler: OnceLock::new(),
            helper: None,
            preparing: Mutex::default(),
            budget: Arc::default(),
            compiled: DigestCache::new(Self::COMPILED_MAX).with_bytes_max(Self::COMPILED_BYTES_MAX),
            checked: DigestCache::new(Self::CHECKED_MAX),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
        }
    }

    /// Checks each grammar in a process of its own, so that this process compiles only what another one has compiled before, within
    /// bounds of time and memory.
    pub fn confined(self, confinement: Confinement) -> Self {
        let (source, vocab_size, eos) =
            (Arc::clone(&self.source), self.vocab_size, self.eos_token_ids.clone());
        let state = move || {
            let vocabulary = source().map_err(|error| confined::state_error(&error))?;
            confined::state(&vocabulary, vocab_size, &eos)
        };
        Self { helper: Some(confinement.helper(state)), ..self }
    }

    /// Number of the process that checks grammars, while it runs.
    pub fn helper_process(&self) -> Option<u32> {
        self.helper.as_ref().and_then(Helper::process)
    }

    /// Bounds the bytes of all matchers; the default is [`MemoryBudget::DEFAULT_BYTES`].
    pub fn with_matcher_bytes_max(self, bytes: usize) -> Self {
        Self { budget: Arc::new(MemoryBudget::new(bytes)), ..self }
    }

    /// Bytes of all matchers, estimated.
    pub fn matcher_bytes(&self) -> usize {
        self.budget.used()
    }

    /// Prepares the vocabulary for [`Grammars::check`] in the background, which takes seconds for a large one, so that the first grammar
    /// does not wait for it. A grammar that comes before it is ready waits for the rest. Returns at once.
    pub fn prepare_checks(self: &Arc<Self>) {
        match &self.helper {
            Some(helper) => helper.start(),
            None => self.prepare_here(),
        }
    }

    /// Prepares the vocabulary for [`Grammars::check`] and [`Grammars::compile`] in the background. Returns at once.
    pub fn prepare_in_background(self: &Arc<Self>) {
        if let Some(helper) = &self.helper {
            helper.start();
        }
        self.prepare_here();
    }

    fn prepare_here(self: &Arc<Self>) {
        let grammars = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("vocabulary".to_owned());
        // Without the thread, the first grammar prepares it.
        let _ = thread.spawn(move || {
            if let Some(grammars) = grammars.upgrade() {
                let begun = Instant::now();
                match grammars.compiler() {
                    Ok(_) => tracing::info!(
                        seconds = begun.elapsed().as_secs_f64(),
                        "vocabulary prepared for grammars"
                    ),
                    Err(error) => tracing::warn!(%error, "structured output is not available"),
                }
            }
        });
    }

    /// Returns a compiled grammar, from the cache or compiled now, on this thread. Reads the vocabulary if it is not prepared.
    ///
    /// # Errors
    /// [`GrammarError`]; [`GrammarError::Unavailable`] if the helper has not accepted it, or so long ago that it is forgotten: see
    /// [`Grammars::check`].
    pub fn compile(&self, grammar: &Grammar) -> Result<Arc<CompiledGrammar>, GrammarError> {
        let digest = grammar.digest();
        if let Some(known) = self.compiled.get(&digest) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return known;
        }
        if self.helper.is_some() {
            let unchecked = || Err(GrammarError::Unavailable("this one was not checked".to_owned()));
            self.checked.get(&digest).unwrap_or_else(unchecked)?;
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        let compiled = self.compiler().and_then(|compiler| compiler.compile(grammar)).map(Arc::new);
        if !compiled.as_ref().is_err_and(GrammarError::is_transient) {
            let bytes = compiled.as_ref().map_or(0, |compiled| compiled.bytes());
            self.compiled.insert(digest, compiled.clone(), bytes);
        }
        compiled
    }

    /// Returns what [`Grammars::compile`] has in the cache.
    pub fn compiled(&self, grammar: &Grammar) -> Option<Result<Arc<CompiledGrammar>, GrammarError>> {
        let known = self.compiled.get(&grammar.digest());
        self.hits.fetch_add(u64::from(known.is_some()), Ordering::Relaxed);
        known
    }

    /// Whether [`Grammars::check`] answers from the cache.
    pub fn is_checked(&self, grammar: &Grammar) -> bool {
        self.checked.get(&grammar.digest()).is_some()
    }

    /// Checks that a grammar compiles. Returns the processor time that it took, estimated without a helper; zero if the outcome was known. Dropping the future ends
    /// the compilation.
    ///
    /// # Errors
    /// [`GrammarError`].
    pub async fn check(self: &Arc<Self>, grammar: &Grammar) -> Result<Duration, GrammarError> {
        let digest = grammar.digest();
        if let Some(known) = self.checked.get(&digest) {
            self.hits.fetch_add(1, Ordering::Relaxed);
            return known.map(|()| Duration::ZERO);
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
        let outcome = match &self.helper {
            Some(helper) => confined::check(helper, grammar).await,
            None => self.check_here(grammar.clone()).await,
        };
        if !outcome.as_ref().is_err_and(GrammarError::is_transient) {
            self.checked.insert(digest, outcome.clone().map(drop), 0);
        }
        outcome
    }

    /// Checks a grammar in this process.
    async fn check_here(self: &Arc<Self>, grammar: Grammar) -> Result<Duration, GrammarError> {
        let grammars = Arc::clone(self);
        let checked = tokio::task::spawn_blocking(move || {
            let bytes: usize = grammar.texts().iter().map(String::len).sum();
            // No time is measured, so that simulations are the same each time: a microsecond for a byte.
            grammars.compiler()?.compile(&grammar).map(|_| Duration::from_micros(bytes as u64))
        });
        checked.await.unwrap_or_else(|error| Err(GrammarError::Unavailable(error.to_string())))
    }

    /// Returns the counters since the start.
    pub fn counters(&self) -> GrammarCounters {
        GrammarCounters {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            entries: self.compiled.len() + self.checked.len(),
        }
    }

    fn compiler(&self) -> Result<&Compiler, GrammarError> {
        if self.compiler.get().is_none() {
            let _preparing = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
            if self.compiler.get().is_none() {
                let compiler = self.prepare();
                if let Err(error) = &compiler
                    && error.is_transient()
                {
                    return Err(error.clone());
                }
                // Only the holder of the lock sets it.
                let _ = self.compiler.set(compiler);
            }
        }
        match self.compiler.get() {
            Some(compiler) => compiler.as_ref().map_err(Clone::clone),
            // It was set above.
            None => Err(GrammarError::Vocabulary("it was not prepared".to_owned())),
        }
    }

    fn prepare(&self) -> Result<Compiler, GrammarError> {
        let vocabulary = (self.source)()?;
        let compiler = Compiler::new(&vocabulary, self.vocab_size, &self.eos_token_ids)?;
        Ok(compiler.with_budget(Arc::clone(&self.budget)))
    }
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars").field("counters", &self.counters()).finish_non_exhaustive()
    }
}
