//! Findings about the cluster, as lines of text.

use inflight_proto::v1::{ClusterDiagnosis, ClusterFinding};

use super::tables::Tone;
use super::text::{percent, wrap};

/// Columns by which figures and advice are indented.
const INDENT: usize = 2;

/// What a finding is about: the router, or a worker and how many others.
fn place(finding: &ClusterFinding) -> String {
    match (finding.worker.as_str(), finding.other_workers) {
        ("", _) => "router".to_owned(),
        (worker, 0) => worker.to_owned(),
        (worker, others) => format!("{worker} and {others} more"),
    }
}

/// Cause, share and place of a finding, as one line.
fn title(finding: &ClusterFinding) -> String {
    let (cause, share) = (finding.bottleneck.replace('_', " "), percent(finding.window_share));
    format!("{cause}, {share}, {}", place(finding))
}

/// Returns the line about the findings for the header; `None` if there are none.
pub fn summary(diagnosis: Option<&ClusterDiagnosis>) -> Option<String> {
    let findings = &diagnosis?.findings;
    let (first, others) = (findings.first()?, findings.len() - 1);
    let more = if others == 0 { String::new() } else { format!("; {others} more") };
    Some(format!("finding: {}{more} (5: details)", title(first)))
}

/// Returns the text of each finding, in lines of at most `columns`.
pub fn text(diagnosis: Option<&ClusterDiagnosis>, columns: usize) -> Vec<Vec<(String, Tone)>> {
    let line = |text: &str, tone| vec![(text.to_owned(), tone)];
    let Some(diagnosis) = diagnosis else { return vec![line("no diagnosis yet", Tone::Dim)] };
    let indented = |text: &str, tone: Tone| {
        let lines = wrap(text, columns.saturating_sub(INDENT).max(1)).into_iter();
        lines.map(move |line| (format!("{:INDENT$}{line}", ""), tone))
    };
    let finding = |finding: &ClusterFinding| {
        let mut lines: Vec<_> =
            wrap(&title(finding), columns.max(1)).into_iter().map(|line| (line, Tone::Wait)).collect();
        lines.extend(indented(&finding.evidence, Tone::Plain));
        lines.extend(indented(&format!("→ {}", finding.advice), Tone::Plain));
        lines
    };
    let mut texts: Vec<_> = diagnosis.findings.iter().map(finding).collect();
    if texts.is_empty() {
        texts.push(line("nothing stands out in the last minute", Tone::Plain));
    }
    if diagnosis.omitted_findings > 0 {
        texts.push(line(&format!("… {} more findings", diagnosis.omitted_findings), Tone::Dim));
    }
    if diagnosis.undiagnosed_workers > 0 {
        texts.push(line(
            &format!("workers without a diagnosis: {}", diagnosis.undiagnosed_workers),
            Tone::Dim,
        ));
    }
    texts
}
