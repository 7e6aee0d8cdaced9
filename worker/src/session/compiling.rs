//! Submissions whose grammars are being compiled: aside, so that the session reads on.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use inflight_grammar::{CompiledGrammar, GrammarError};
use inflight_net::Holder;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::permits::MeteredPermits;
use super::{Message, SessionContext};
use crate::engine::{Command, Request, RequestKey};

/// Maximum memory of compiled grammars whose submissions the engine has not taken, in KiB.
pub(crate) const COMPILED_KIB_MAX: usize = 64 << 10;

/// Pause before a grammar is compiled again that could not be compiled for want of a process or of memory.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// Maximum time of such attempts.
const RETRY_MAX: Duration = Duration::from_secs(30);

/// Submissions of a session that wait for their grammars.
pub(super) struct Compiling {
    sessions: Arc<SessionContext>,
    tasks: JoinSet<()>,
    /// By the submission's id.
    held: Arc<Mutex<BTreeMap<u64, Held>>>,
}

/// Submission whose grammar is being compiled.
#[derive(Default)]
struct Held {
    /// Cancels that wait behind it: the engine must not see them before it.
    commands: Vec<Command>,
    /// Cancelled with all of its choices: its grammar is of no use.
    cancelled: CancellationToken,
}

/// Grammars that are compiled at once.
pub(crate) const COMPILED_AT_ONCE: usize = COMPILED_KIB_MAX / CompiledGrammar::BYTES_MAX.div_ceil(1 << 10);

impl Compiling {
    pub(super) fn new(sessions: &Arc<SessionContext>) -> Self {
        Self { sessions: Arc::clone(sessions), tasks: JoinSet::new(), held: Arc::default() }
    }

    /// Compiles the grammar of a submission, and gives it to the engine with the permits of its memory.
    pub(super) fn start(&mut self, mut request: Box<Request>, permits: MeteredPermits) {
        // Those that have ended.
        while self.tasks.try_join_next().is_some() {}
        let (sessions, held) = (Arc::clone(&self.sessions), Arc::clone(&self.held));
        let id = request.key.request;
        let cancelled = lock(&held).entry(id).or_default().cancelled.clone();
        self.tasks.spawn(async move {
            let most = CompiledGrammar::BYTES_MAX.div_ceil(1 << 10) as u32;
            let tenant = Holder { name: Arc::clone(&request.tenant), weight: request.weight.get() };
            let turn = sessions.compile_turns.turn(Some(&tenant)).await;
            let mut memory = sessions.compiled.acquire(most).await;
            if let Some(constraint) = request.sampling.constraint.clone() {
                let compiled = tokio::select! {
                    biased;
                    () = cancelled.cancelled() => Err(GrammarError::Unavailable("its request was cancelled".to_owned())),
                    compiled = compile(&sessions, constraint) => compiled,
                };
                let bytes = compiled.as_ref().map_or(0, |compiled| compiled.bytes());
                memory.keep(bytes.div_ceil(1 << 10) as u32);
                request.grammar = Some(compiled);
            }
            drop(turn);
            let submit = Message::Command(Command::Submit(request), vec![permits, memory]);
            if sessions.engine.send(submit).await.is_ok() {
                release(&sessions.engine, &held, id).await;
            }
        });
    }

    /// Keeps a cancel whose submission is being compiled until the engine has that. Returns the command otherwise.
    pub(super) fn hold(&self, key: RequestKey, command: Command) -> Option<Command> {
        match lock(&self.held).get_mut(&key.request) {
            Some(held) => {
                if matches!(command, Command::Cancel { choice: None, .. }) {
                    held.cancelled.cancel();
                }
                held.commands.push(command);
                None
            }
            None => Some(command),
        }
    }

    /// Ends all compilations; none of their submissions reaches the engine afterwards.
    pub(super) async fn stop(mut self) {
        self.tasks.shutdown().await;
    }
}

fn lock(held: &Mutex<BTreeMap<u64, Held>>) -> std::sync::MutexGuard<'_, BTreeMap<u64, Held>> {
    held.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends the cancels that were held for a submission, and those that come meanwhile.
async fn release(engine: &mpsc::Sender<Message>, held: &Mutex<BTreeMap<u64, Held>>, id: u64) {
    loop {
        let commands = {
            let mut held = lock(held);
            let commands =
                held.get_mut(&id).map(|held| std::mem::take(&mut held.commands)).unwrap_or_default();
            if commands.is_empty() {
                // From here on the session sends them itself.
                held.remove(&id);
                return;
            }
            commands
        };
        for command in commands {
            if engine.send(Message::Command(command, Vec::new())).await.is_err() {
                return;
            }
        }
    }
}

/// Compiles a grammar that a process of its own has compiled before. The request holds it, as the cache may evict it before the engine
/// takes the request.
async fn compile(
    sessions: &SessionContext,
    constraint: Arc<inflight_contract::Constraint>,
) -> Result<Arc<CompiledGrammar>, GrammarError> {
    let begun = Instant::now();
    loop {
        let outcome = match sessions.grammars.check(&constraint.grammar).await {
            Err(error) => Err(error),
            Ok(_) => {
                let (grammars, constraint) = (Arc::clone(&sessions.grammars), Arc::clone(&constraint));
                let compiled =
                    tokio::task::spawn_blocking(move || grammars.compile(&constraint.grammar)).await;
                compiled.unwrap_or_else(|failed| {
                    Err(GrammarError::Refused(format!("the worker's grammar compiler failed: {failed}")))
                })
            }
        };
        match outcome {
            // The router has admitted it: what is lacking is this machine's, for now or for good.
            Err(error)
                if error.is_transient()
                    && !matches!(error, GrammarError::Host(_))
                    && begun.elapsed() < RETRY_MAX =>
            {
                tracing::warn!(%error, "a grammar is compiled again");
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            outcome => {
                crate::metrics::grammar_lookup(false, begun.elapsed(), sessions.grammars.counters().entries);
                return outcome;
            }
        }
    }
}
