//! Cluster membership: one session task per worker that discovery names.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::StreamExt as _;
use futures::stream::{SelectAll, unfold};
use inflight_router_core::WorkerId;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::cluster::connector::Connector;
use crate::cluster::discovery::{Endpoints, Source, changed};
use crate::cluster::model_cache::{BundleLoad, ModelCache};
use crate::cluster::observer::Observer;
use crate::cluster::worker_calls::WorkerCalls;
use crate::cluster::worker_session::SessionTask;
use crate::dispatcher::SharedDispatcher;
use crate::options::Options;
use crate::restart::restart_on_panic;

/// Runs a session task for every worker that any source names.
pub(crate) struct Membership {
    options: Options,
    dispatch: Arc<SharedDispatcher>,
    models: Arc<ModelCache>,
    connector: Option<Connector>,
    calls: Arc<WorkerCalls>,
    /// Known workers, with the token that retires each.
    known: BTreeMap<String, CancellationToken>,
    next_worker: WorkerId,
    session_tasks: JoinSet<()>,
}

impl Membership {
    pub(crate) fn new(
        options: &Options,
        dispatch: Arc<SharedDispatcher>,
        connector: Option<Connector>,
        calls: Arc<WorkerCalls>,
        load: BundleLoad,
    ) -> Self {
        Self {
            options: options.clone(),
            dispatch,
            models: Arc::new(ModelCache::new(load, options.grammar_confinement.clone())),
            connector,
            calls,
            known: BTreeMap::new(),
            next_worker: WorkerId(0),
            session_tasks: JoinSet::new(),
        }
    }

    /// Follows the sources while polled.
    pub(crate) async fn follow(mut self, sources: Vec<Source>) {
        let mut source_tasks = JoinSet::new();
        let mut changes = SelectAll::new();
        let mut named: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
        for (index, source) in sources.into_iter().enumerate() {
            if let Source::Fixed(address) = &source {
                named.insert(index, BTreeSet::from([address.clone()]));
                continue;
            }
            tracing::info!(source = source.label(), "following worker discovery source");
            let (sender, receiver) = watch::channel::<Endpoints>(None);
            source_tasks.spawn(source.follow(self.options.discovery_interval, sender));
            let updates = unfold(receiver, move |mut receiver| async move {
                let found = changed(&mut receiver).await?;
                Some(((index, found), receiver))
            });
            changes.push(Box::pin(updates));
        }
        loop {
            self.reconcile(&named);
            tokio::select! {
                biased;
                Some((index, found)) = changes.next() => {
                    named.insert(index, found.unwrap_or_default());
                }
                // Only tasks of retired workers end.
                Some(_) = self.session_tasks.join_next() => {}
                else => return,
            }
        }
    }

    fn reconcile(&mut self, named: &BTreeMap<usize, BTreeSet<String>>) {
        let wanted: BTreeSet<&String> = named.values().flatten().collect();
        self.known.retain(|address, retired| {
            let stays = wanted.contains(address);
            if !stays {
                tracing::info!(worker = address, "worker removed by discovery");
                retired.cancel();
            }
            stays
        });
        for address in wanted {
            if self.known.contains_key(address) {
                continue;
            }
            let retired = CancellationToken::new();
            self.known.insert(address.clone(), retired.clone());
            let task = SessionTask {
                worker: self.next_worker,
                address: address.clone(),
                options: self.options.clone(),
                dispatch: self.dispatch.clone(),
                models: self.models.clone(),
                connector: self.connector.clone(),
                retired,
                observer: self
                    .dispatch
                    .live()
                    .map(|hub| Observer::join(hub, &self.calls, self.next_worker, address)),
            };
            self.next_worker = WorkerId(self.next_worker.0 + 1);
            self.session_tasks.spawn(restart_on_panic("worker_session", move || task.clone().run()));
        }
    }
}
