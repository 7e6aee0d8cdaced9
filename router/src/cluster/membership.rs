use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::StreamExt as _;
use futures::stream::{SelectAll, unfold};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::cluster::connector::Dial;
use crate::cluster::discovery::{Endpoints, Source, changed};
use crate::cluster::worker_session::{Models, SessionTask};
use crate::dispatcher::Dispatch;
use crate::options::Options;
use crate::restart::restart_on_panic;

/// Keeps a session with every worker that any source names, and with no other.
pub(crate) struct Members {
    options: Options,
    dispatch: Arc<Dispatch>,
    models: Arc<Models>,
    dial: Option<Dial>,
    /// The workers named now, and what retires each.
    known: BTreeMap<String, CancellationToken>,
    next: usize,
    session_tasks: JoinSet<()>,
}

impl Members {
    pub(crate) fn new(options: &Options, dispatch: Arc<Dispatch>, dial: Option<Dial>) -> Self {
        Self {
            options: options.clone(),
            dispatch,
            models: Arc::default(),
            dial,
            known: BTreeMap::new(),
            next: 0,
            session_tasks: JoinSet::new(),
        }
    }

    /// Follows the sources for as long as it is polled.
    pub(crate) async fn follow(mut self, sources: Vec<Source>) {
        let mut following = JoinSet::new();
        let mut changes = SelectAll::new();
        let mut named: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
        for (index, source) in sources.into_iter().enumerate() {
            if let Source::Fixed(address) = &source {
                named.insert(index, BTreeSet::from([address.clone()]));
                continue;
            }
            tracing::info!(source = source.label(), "following worker discovery source");
            let (sender, receiver) = watch::channel::<Endpoints>(None);
            following.spawn(source.follow(self.options.discovery_interval, sender));
            let answers = unfold(receiver, move |mut receiver| async move {
                let found = changed(&mut receiver).await?;
                Some(((index, found), receiver))
            });
            changes.push(Box::pin(answers));
        }
        loop {
            self.reconcile(&named);
            tokio::select! {
                biased;
                Some((index, found)) = changes.next() => {
                    named.insert(index, found.unwrap_or_default());
                }
                // A task ends when its worker was retired; nobody else's task ends.
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
                worker: self.next,
                address: address.clone(),
                options: self.options.clone(),
                dispatch: self.dispatch.clone(),
                models: self.models.clone(),
                dial: self.dial.clone(),
                retired,
            };
            self.next += 1;
            self.session_tasks.spawn(restart_on_panic("worker_session", move || task.clone().run()));
        }
    }
}
