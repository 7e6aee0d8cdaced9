//! The line about the whole cluster, as items that flow into as many lines as they need.

use inflight_proto::v1::Percentiles;

use super::findings;
use super::state::ClusterState;
use super::text::{count, fit, millis, rate, width};

/// Space between two items of a line.
const GAP: usize = 2;

/// Returns the lines about the cluster, each at most `columns` wide.
pub fn lines(state: &ClusterState, columns: usize) -> Vec<String> {
    let cluster = &state.cluster;
    let number = |value: u32| count(value.into());
    let percentiles = |name: &str, value: Option<Percentiles>| {
        let Percentiles { p50, p90, p99 } = value.unwrap_or_default();
        format!("{name} {}/{}/{}", millis(p50), millis(p90), millis(p99))
    };
    let routers = if cluster.routers > 1 { format!(", one of {}", cluster.routers) } else { String::new() };
    let mut items = vec![format!("router {} {}{routers}", cluster.router, cluster.version).trim().to_owned()];
    if !cluster.models.is_empty() {
        items.push(cluster.models.join(" "));
    }
    let workers = state.workers.len();
    items.push(format!("{workers} worker{}", if workers == 1 { "" } else { "s" }));
    items.push(format!("viewers {}", number(cluster.viewers)));
    let load = [
        format!("open {}", number(cluster.open_requests)),
        format!("queued {}", number(cluster.queued_requests)),
        format!("flight {}", number(cluster.in_flight_requests)),
        format!("retry {}", number(cluster.retrying_requests)),
        format!("out {} tok/s", rate(cluster.output_tokens_per_second)),
        format!("in {} tok/s", rate(cluster.prompt_tokens_per_second)),
        format!("ended {}/s", rate(cluster.ended_per_second)),
    ];
    let latency = [
        "p50/p90/p99 ms".to_owned(),
        percentiles("first token", cluster.first_token_ms),
        percentiles("gap", cluster.gap_ms),
        percentiles("queue", cluster.queue_ms),
    ];
    let mut lines = flow(&items, columns);
    lines.extend(flow(&load, columns));
    lines.extend(flow(&latency, columns));
    lines.extend(findings::summary(state.diagnosis.as_ref()).map(|line| fit(&line, columns)));
    lines
}

/// Fills lines of at most `columns` with items, in order.
fn flow(items: &[String], columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for item in items {
        let item = fit(item, columns);
        match lines.last_mut() {
            Some(line) if width(line) + GAP + width(&item) <= columns => {
                line.push_str(&" ".repeat(GAP));
                line.push_str(&item);
            }
            _ => lines.push(item),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_flow_into_lines_that_fit() {
        let items = ["one", "two", "three", "longer than a line"].map(str::to_owned);
        assert_eq!(flow(&items, 10), ["one  two", "three", "longer th…"]);
        for columns in 0..120 {
            let lines = lines(&ClusterState::default(), columns);
            assert!(lines.iter().all(|line| width(line) <= columns), "{columns}: {lines:?}");
        }
    }
}
