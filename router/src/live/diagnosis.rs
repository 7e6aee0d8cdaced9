//! Diagnosis of the cluster for viewers: the findings of workers and of the router, one for each bottleneck.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::display_text::display_text;
use super::findings::RouterFinding;
use super::view::{DiagnosisView, FindingView};

/// Findings that viewers are sent, and that are taken from a worker.
pub(crate) const FINDINGS_MAX: usize = 20;
/// Longest text of a finding of the router, in bytes: it may name many workers.
const TEXT_BYTES_MAX: usize = 512;

/// Findings of one worker; `None` if it gave no diagnosis.
pub(crate) struct WorkerFindings(pub(crate) Option<Vec<FindingView>>);

impl From<RouterFinding> for FindingView {
    fn from(finding: RouterFinding) -> Self {
        Self {
            bottleneck: Arc::from(finding.bottleneck),
            window_share: finding.window_share,
            evidence: display_text(&finding.evidence, TEXT_BYTES_MAX),
            advice: Arc::from(finding.advice),
            ..Self::default()
        }
    }
}

/// Returns the findings, most severe first. A bottleneck of several workers is shown for the one that it affects most.
pub(crate) fn merge(router: Vec<RouterFinding>, workers: Vec<WorkerFindings>) -> DiagnosisView {
    let mut undiagnosed_workers = 0;
    let mut worst: BTreeMap<Arc<str>, FindingView> = BTreeMap::new();
    for WorkerFindings(findings) in workers {
        let Some(findings) = findings else {
            undiagnosed_workers += 1;
            continue;
        };
        for finding in findings {
            match worst.get_mut(&finding.bottleneck) {
                // Of one worker twice: the first is its most severe.
                Some(known) if known.worker == finding.worker => {}
                Some(known) => {
                    let other_workers = known.other_workers + 1;
                    if finding.window_share > known.window_share {
                        *known = finding;
                    }
                    known.other_workers = other_workers;
                }
                None => drop(worst.insert(finding.bottleneck.clone(), finding)),
            }
        }
    }
    let mut findings: Vec<FindingView> = router.into_iter().map(FindingView::from).collect();
    findings.extend(worst.into_values());
    findings.sort_by(|a, b| b.window_share.total_cmp(&a.window_share));
    let omitted = findings.len().saturating_sub(FINDINGS_MAX);
    findings.truncate(FINDINGS_MAX);
    let omitted_findings = u32::try_from(omitted).unwrap_or(u32::MAX);
    DiagnosisView { findings, undiagnosed_workers, omitted_findings }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(worker: &str, bottleneck: &str, window_share: f64) -> FindingView {
        FindingView {
            worker: Arc::from(worker),
            bottleneck: Arc::from(bottleneck),
            window_share,
            evidence: Arc::from(format!("of {worker}")),
            ..FindingView::default()
        }
    }

    #[test]
    fn a_bottleneck_of_several_workers_is_one_finding_of_the_most_affected() {
        let of = |worker: &str, shares: &[(&str, f64)]| {
            WorkerFindings(Some(shares.iter().map(|(name, share)| finding(worker, name, *share)).collect()))
        };
        let workers = vec![
            of("a", &[("queue_time", 0.2), ("queue_time", 0.1)]),
            of("b", &[("memory_pressure", 0.9), ("queue_time", 0.4)]),
            WorkerFindings(None),
            of("c", &[("queue_time", 0.3)]),
            of("d", &[]),
        ];
        let merged = merge(vec![RouterFinding::recording_failed()], workers);
        let shown: Vec<_> = merged
            .findings
            .iter()
            .map(|finding| (&*finding.bottleneck, &*finding.worker, finding.other_workers))
            .collect();
        assert_eq!(shown, [("recording_failed", "", 0), ("memory_pressure", "b", 0), ("queue_time", "b", 2)]);
        assert_eq!((&*merged.findings[2].evidence, merged.undiagnosed_workers), ("of b", 1));
        assert_eq!(merge(Vec::new(), vec![of("a", &[])]), DiagnosisView::default());
    }

    #[test]
    fn findings_are_bounded_whatever_workers_invent_and_the_most_severe_are_kept() {
        let workers = (0..100).map(|number| {
            let share = f64::from(number) / 100.0;
            WorkerFindings(Some(vec![finding("liar", &format!("made_up_{number}"), share)]))
        });
        let merged = merge(Vec::new(), workers.collect());
        assert_eq!(
            (merged.findings.len(), merged.omitted_findings),
            (FINDINGS_MAX, 100 - FINDINGS_MAX as u32)
        );
        assert_eq!(&*merged.findings[0].bottleneck, "made_up_99");
        let named = RouterFinding { evidence: "w".repeat(100_000), ..RouterFinding::recording_failed() };
        assert_eq!(merge(vec![named], Vec::new()).findings[0].evidence.len(), TEXT_BYTES_MAX);
    }
}
