//! Findings about the router itself, for the diagnosis of the cluster.

use std::time::Duration;

use super::view::{ClusterView, WorkerState, WorkerView};

/// Bottleneck at the router.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RouterFinding {
    pub(crate) bottleneck: &'static str,
    /// Approximate share of the requests or workers that it affects, in (0, 1].
    pub(crate) window_share: f64,
    pub(crate) evidence: String,
    pub(crate) advice: &'static str,
}

impl RouterFinding {
    /// The recording has ended with an error; it limits no request.
    pub(super) fn recording_failed() -> Self {
        Self {
            bottleneck: "recording_failed",
            window_share: 1.0,
            evidence: "the router's recording ended early: its file could not be written".to_owned(),
            advice: "free space where --record writes, and restart the router",
        }
    }

    /// The workers of models have different fingerprints; `None` without any.
    pub(super) fn mixed_fingerprints(models: &[String]) -> Option<Self> {
        (!models.is_empty()).then(|| Self {
            bottleneck: "mixed_fingerprints",
            window_share: 1.0,
            evidence: format!("workers of one model have different numerics fingerprints: {}", models.join(", ")),
            advice: "finish the rollout, or give each kind of worker a --model-name of its own: a stream that fails over may continue with other tokens",
        })
    }
}

/// Returns what is wrong at the router, most severe first. Requests queued for longer than `queue_objective` count
/// as late.
pub(super) fn of(
    cluster: &ClusterView,
    workers: &[&WorkerView],
    queue_objective: Duration,
) -> Vec<RouterFinding> {
    let mut findings = Vec::new();
    let share = |part: usize, of: usize| part as f64 / of.max(1) as f64;
    let in_state = |state| workers.iter().filter(|worker| worker.state == Some(state)).count();
    for (state, bottleneck, what, advice) in [
        (
            WorkerState::Disconnected,
            "workers_disconnected",
            "have no session with this router",
            "look at the logs of these workers, and at the router's for why it cannot connect",
        ),
        (
            WorkerState::Ejected,
            "workers_ejected",
            "are ejected from placement after failures in a row",
            "look at the logs of these workers; an ejected worker is tried again by itself",
        ),
    ] {
        let count = in_state(state);
        if count > 0 {
            let named: Vec<&str> = workers
                .iter()
                .filter(|worker| worker.state == Some(state))
                .map(|worker| &*worker.name)
                .collect();
            let evidence = format!("{count} of {} workers {what}: {}", workers.len(), named.join(", "));
            findings.push(RouterFinding {
                bottleneck,
                window_share: share(count, workers.len()),
                evidence,
                advice,
            });
        }
    }
    let open = cluster.open_requests as usize;
    if cluster.retrying_requests > 0 {
        let retrying = cluster.retrying_requests as usize;
        findings.push(RouterFinding {
            bottleneck: "retries",
            window_share: share(retrying, open),
            evidence: format!(
                "{retrying} of {open} open requests lost their worker and wait for another attempt"
            ),
            advice: "find out why workers fail; a higher --retry-rate starts attempts earlier",
        });
    }
    let queued = cluster.queued_requests as usize;
    if queued > 0 && cluster.queue_ms.p90 > queue_objective.as_secs_f64() * 1000.0 {
        findings.push(RouterFinding {
            bottleneck: "router_queue",
            window_share: share(queued, open),
            evidence: format!(
                "{queued} of {open} open requests wait at the router; of the last minute's, one in ten waited over {:.1} s",
                cluster.queue_ms.p90 / 1000.0
            ),
            advice: "add workers, or give tenants lower limits",
        });
    }
    findings.sort_by(|a, b| b.window_share.total_cmp(&a.window_share));
    findings
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::view::Percentiles;
    use super::*;

    #[test]
    fn a_calm_router_has_no_findings_and_each_trouble_has_one() {
        let worker = |state| WorkerView { name: Arc::from("w"), state: Some(state), ..WorkerView::default() };
        let [connected, lost, ejected] =
            [WorkerState::Connected, WorkerState::Disconnected, WorkerState::Ejected].map(worker);
        let calm = ClusterView { open_requests: 9, queued_requests: 3, ..ClusterView::default() };
        assert_eq!(of(&calm, &[&connected], Duration::from_secs(1)), []);
        let queue_ms = Percentiles { p90: 1500.0, ..Percentiles::default() };
        let busy = ClusterView { retrying_requests: 1, queue_ms, ..calm };
        let trouble = [&connected, &lost, &ejected, &lost];
        let found = of(&busy, &trouble, Duration::from_secs(1));
        let names: Vec<_> = found.iter().map(|finding| finding.bottleneck).collect();
        assert_eq!(names, ["workers_disconnected", "router_queue", "workers_ejected", "retries"]);
        let patient = of(&busy, &trouble, Duration::from_secs(2));
        assert!(patient.iter().all(|finding| finding.bottleneck != "router_queue"), "{patient:?}");
        assert_eq!(RouterFinding::mixed_fingerprints(&[]), None);
        let mixed = RouterFinding::mixed_fingerprints(&["a".to_owned(), "b".to_owned()]).unwrap();
        assert!(mixed.evidence.ends_with("fingerprints: a, b"), "{mixed:?}");
        assert_eq!(found[0].evidence, "2 of 4 workers have no session with this router: w, w");
    }
}
