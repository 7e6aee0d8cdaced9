//! Models of workers, each loaded once.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use inflight_grammar_service::Confinement;

use crate::cluster::bundle::{BundleFiles, Model};
use crate::cluster::worker_session::SessionError;

/// Where bundles are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BundleLoad {
    /// On blocking threads: building a tokenizer takes seconds of CPU for a large vocabulary.
    Thread,
    /// On tokio tasks, for simulations on a paused clock: while such a runtime waits for a thread, the number of its
    /// polls, and with it the order of its tasks, depends on real time.
    Task,
}

/// Loaded bundles by digest: each is fetched and loaded once, for all workers that serve it.
#[derive(Debug)]
pub(crate) struct ModelCache {
    load: BundleLoad,
    confinement: Option<Confinement>,
    slots: Mutex<BTreeMap<String, BundleSlot>>,
}

type BundleSlot = Arc<tokio::sync::Mutex<Weak<Model>>>;

impl ModelCache {
    pub(crate) fn new(load: BundleLoad, confinement: Option<Confinement>) -> Self {
        Self { load, confinement, slots: Mutex::default() }
    }

    /// Returns the model of a bundle, which `fetch` supplies if it is not loaded.
    pub(super) async fn get<F>(&self, digest: &str, fetch: F) -> Result<Arc<Model>, SessionError>
    where
        F: Future<Output = Result<BundleFiles, SessionError>>,
    {
        let slot = self.slot(digest);
        let mut loaded = slot.lock().await;
        if let Some(model) = loaded.upgrade() {
            return Ok(model);
        }
        let bundle = fetch.await?;
        let expected = digest.to_owned();
        let confinement = self.confinement.clone();
        let load = move || bundle.load(&expected, confinement);
        let task = match self.load {
            BundleLoad::Thread => tokio::task::spawn_blocking(load),
            BundleLoad::Task => tokio::spawn(async { load() }),
        };
        let model = task.await.map_err(|_| {
            SessionError::Protocol("loading its bundle failed on a fault of the tokenizer library".to_owned())
        })??;
        model.prepare_grammars();
        let model = Arc::new(model);
        *loaded = Arc::downgrade(&model);
        Ok(model)
    }

    fn slot(&self, digest: &str) -> BundleSlot {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        // Remove slots that are not in use and whose model was dropped.
        slots.retain(|_, slot| {
            Arc::strong_count(slot) > 1 || slot.try_lock().map_or(true, |model| model.strong_count() > 0)
        });
        slots.entry(digest.to_owned()).or_default().clone()
    }
}
