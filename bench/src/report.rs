//! Report of a run as a table and as JSON: medians over rounds, and ratios between servers.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::load::LoadPattern;
use crate::measure::{LatencyHistogram, RoundMeasurements};
use crate::rate_search::RateSearch;
use crate::workload::Arrivals;

/// Reported quantity: JSON key, label and sublabel in the table, and its value in a round.
struct Figure {
    key: &'static str,
    label: [&'static str; 2],
    value: fn(&RoundMeasurements) -> Option<f64>,
}

macro_rules! times {
    ($key:literal, $label:literal, $field:ident) => {
        [
            Figure { key: concat!($key, "_ms_mean"), label: [$label, "mean"], value: |m| m.$field.mean_ms() },
            Figure {
                key: concat!($key, "_ms_p50"),
                label: [$label, "p50"],
                value: |m| m.$field.quantile_ms(0.5),
            },
            Figure {
                key: concat!($key, "_ms_p90"),
                label: [$label, "p90"],
                value: |m| m.$field.quantile_ms(0.9),
            },
            Figure {
                key: concat!($key, "_ms_p99"),
                label: [$label, "p99"],
                value: |m| m.$field.quantile_ms(0.99),
            },
            Figure {
                key: concat!($key, "_ms_max"),
                label: [$label, "max"],
                value: |m| m.$field.quantile_ms(1.0),
            },
        ]
    };
}

const RATES: [Figure; 4] = [
    Figure {
        key: "output_tokens_per_s",
        label: ["output tokens/s", ""],
        value: |m| per_second(m, m.output_tokens),
    },
    Figure {
        key: "total_tokens_per_s",
        label: ["prompt and output tokens/s", ""],
        value: |m| per_second(m, m.output_tokens + m.prompt_tokens),
    },
    Figure { key: "requests_per_s", label: ["requests/s", ""], value: |m| per_second(m, m.window_completed) },
    Figure { key: "tokens_per_message", label: ["tokens per message", ""], value: tokens_per_message },
];

const TIMES: [[Figure; 5]; 5] = [
    times!("ttft", "first token, ms", ttft),
    times!("itl", "between tokens, ms", itl),
    times!("tpot", "mean per request, ms", tpot),
    times!("e2e", "end to end, ms", e2e),
    times!("lag", "sent late by, ms", lag),
];

const GOODPUT: Figure = Figure {
    key: "goodput_per_s",
    label: ["requests/s within bounds", ""],
    value: |m| per_second(m, m.slo_met),
};
const ATTAINMENT: Figure = Figure {
    key: "slo_attainment",
    label: ["share within bounds", ""],
    value: |m| (m.started > 0).then(|| m.slo_met as f64 / m.started as f64),
};
const CPU: Figure = Figure {
    key: "generator_cores",
    label: ["cores taken by this command", ""],
    value: |m| m.cpu_s.filter(|_| m.seconds() > 0.0).map(|cpu| cpu / m.seconds()),
};

fn per_second(measured: &RoundMeasurements, count: u64) -> Option<f64> {
    (measured.seconds() > 0.0).then(|| count as f64 / measured.seconds())
}

fn tokens_per_message(measured: &RoundMeasurements) -> Option<f64> {
    (measured.messages > 0).then(|| measured.output_tokens as f64 / measured.messages as f64)
}

/// Measurements of one load pattern on all servers.
#[derive(Debug)]
pub struct LoadPoint {
    /// Load pattern of the rounds.
    pub load: LoadPattern,
    /// Measurements by server, then by round.
    pub rounds: Vec<Vec<RoundMeasurements>>,
}

impl LoadPoint {
    /// Share of the first server's requests that met the objectives, the median over rounds.
    pub fn attainment(&self) -> Option<f64> {
        median_of(&ATTAINMENT, self.rounds.first()?)
    }
}

/// Report of a run.
#[derive(Debug)]
pub struct BenchReport {
    /// Names of the servers.
    pub names: Vec<String>,
    /// Names of the tenants.
    pub tenants: Vec<String>,
    /// Whether service level objectives are set, so that goodput is reported.
    pub has_slo: bool,
    /// Options of the run, for the JSON report.
    pub setting: Value,
    /// Measurements by load pattern, in the order of the runs.
    pub points: Vec<LoadPoint>,
    /// Search for the highest rate, with the share of the requests that had to meet the objectives.
    pub search: Option<(RateSearch, f64)>,
}

/// Returns the median, for an even number of values the mean of the middle two; `None` without values.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.get(values.len().checked_sub(1)? / 2)?, values.get(values.len() / 2)?);
    Some((low + high) / 2.0)
}

fn median_of(figure: &Figure, rounds: &[RoundMeasurements]) -> Option<f64> {
    median(rounds.iter().filter_map(figure.value).collect())
}

/// Returns median, minimum and maximum of the ratios of `one` to `other` in the same round.
fn ratio(figure: &Figure, one: &[RoundMeasurements], other: &[RoundMeasurements]) -> Option<[f64; 3]> {
    let ratio = |pair: (&RoundMeasurements, &RoundMeasurements)| {
        Some((figure.value)(pair.0)? / (figure.value)(pair.1)?)
    };
    let mut ratios: Vec<f64> =
        one.iter().zip(other).filter_map(ratio).filter(|ratio| ratio.is_finite()).collect();
    ratios.sort_by(f64::total_cmp);
    Some([median(ratios.clone())?, *ratios.first()?, *ratios.last()?])
}

fn format_number(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value == 0.0 || value.abs() >= 1000.0 => format!("{value:.0}"),
        Some(value) if value.abs() >= 100.0 => format!("{value:.1}"),
        Some(value) if value.abs() >= 10.0 => format!("{value:.2}"),
        Some(value) => format!("{value:.3}"),
    }
}

fn describe(load: LoadPattern) -> String {
    match load {
        LoadPattern::Closed { streams: 1 } => "closed loop, 1 stream".to_owned(),
        LoadPattern::Closed { streams } => format!("closed loop, {streams} streams"),
        LoadPattern::Open { arrivals: Arrivals::Poisson(rate), .. } => {
            format!("open loop, Poisson, {rate} requests/s")
        }
        LoadPattern::Open { arrivals: Arrivals::Constant(rate), .. } => {
            format!("open loop, evenly, {rate} requests/s")
        }
        LoadPattern::Open { arrivals: Arrivals::Trace { speed, .. }, .. } => {
            format!("open loop, the trace's arrivals at {speed} times their speed")
        }
    }
}

fn sum(rounds: &[RoundMeasurements], value: impl Fn(&RoundMeasurements) -> u64) -> u64 {
    rounds.iter().map(value).sum()
}

/// Sums counts by kind over all rounds; returns kind, count and an example message.
fn counts_by_kind(
    rounds: &[RoundMeasurements],
    counts: impl Fn(&RoundMeasurements) -> &std::collections::BTreeMap<String, u64>,
) -> Vec<(String, u64, String)> {
    let mut all: Vec<(String, u64, String)> = Vec::new();
    for measured in rounds {
        for (kind, count) in counts(measured) {
            match all.iter_mut().find(|(known, ..)| known == kind) {
                Some((_, sum, _)) => *sum += count,
                None => {
                    let example = measured.examples.get(kind).cloned().unwrap_or_default();
                    all.push((kind.clone(), *count, example));
                }
            }
        }
    }
    all
}

impl BenchReport {
    /// Returns the numbers of measured, failed and refused requests, with an example of a failure. Those of rates that a
    /// search found too high are what it looks for, and do not count.
    pub fn failures(&self) -> (u64, u64, u64, Option<String>) {
        let counts = |point: &&LoadPoint| {
            let Some((_, share)) = &self.search else { return true };
            point.attainment().is_some_and(|attained| attained >= *share)
        };
        let rounds = || self.points.iter().filter(counts).flat_map(|point| &point.rounds).flatten();
        let failed = rounds().flat_map(|measured| measured.failed.values()).sum();
        let refused = rounds().flat_map(|measured| measured.refused.values()).sum();
        let example = rounds().find_map(|measured| {
            let (kind, _) = measured.failed.first_key_value()?;
            Some(format!("{kind}: {}", measured.examples.get(kind).map_or("", String::as_str)))
        });
        (rounds().map(|measured| measured.started).sum(), failed, refused, example)
    }

    fn figures(&self, load: LoadPattern) -> Vec<&'static Figure> {
        static GOOD: [&Figure; 2] = [&GOODPUT, &ATTAINMENT];
        static CPUS: [&Figure; 1] = [&CPU];
        static ALL_RATES: &[Figure] = &RATES;
        static ALL_TIMES: &[[Figure; 5]] = &TIMES;
        let open = matches!(load, LoadPattern::Open { .. });
        // The last group, lag, is always zero in a closed loop.
        let times = ALL_TIMES.iter().take(if open { 5 } else { 4 }).flatten();
        let good = GOOD.iter().copied().filter(|_| self.has_slo);
        ALL_RATES.iter().chain(good).chain(times).chain(CPUS.iter().copied()).collect()
    }

    /// Returns the report as a table.
    pub fn table(&self) -> String {
        let mut out = String::new();
        for point in &self.points {
            self.point_table(point, &mut out);
        }
        if let Some((search, share)) = &self.search {
            let percent = (1000.0 * share).round() / 10.0;
            let (met, missed) = (format_number(search.met()), format_number(search.missed()));
            let _ = match (search.met(), search.missed()) {
                (Some(_), Some(_)) => {
                    writeln!(
                        out,
                        "highest rate at which {percent} % of the requests met the objectives: {met} requests/s; not so at {missed}"
                    )
                }
                (Some(_), None) => {
                    writeln!(
                        out,
                        "{percent} % of the requests met the objectives up to {met} requests/s, the highest rate tried"
                    )
                }
                (None, _) => writeln!(
                    out,
                    "fewer than {percent} % of the requests met the objectives even at {missed} requests/s"
                ),
            };
        }
        out
    }

    fn point_table(&self, point: &LoadPoint, out: &mut String) {
        let rounds = point.rounds.first().map_or(0, Vec::len);
        let suffix = if rounds > 1 { ", medians" } else { "" };
        let _ = writeln!(
            out,
            "{}; {rounds} round{}{suffix}",
            describe(point.load),
            if rounds == 1 { "" } else { "s" }
        );
        let mut rows: Vec<Vec<String>> = Vec::new();
        let mut head = vec![String::new(), String::new()];
        head.extend(self.names.iter().cloned());
        head.extend(self.names.iter().skip(1).map(|other| format!("{} / {other}", self.names[0])));
        rows.push(head);
        let mut count = |label: &str, value: &dyn Fn(&RoundMeasurements) -> u64| {
            let mut row = vec![label.to_owned(), String::new()];
            row.extend(point.rounds.iter().map(|rounds| sum(rounds, value).to_string()));
            rows.push(row);
        };
        count("requests completed", &|measured| measured.completed);
        if point.rounds.iter().any(|rounds| sum(rounds, |measured| measured.short) > 0) {
            count("  shorter than asked for", &|measured| measured.short);
        }
        let mut before = "";
        for figure in self.figures(point.load) {
            let [label, part] = figure.label;
            let shown = if label == before { "" } else { label };
            before = label;
            let mut row = vec![shown.to_owned(), part.to_owned()];
            row.extend(point.rounds.iter().map(|rounds| format_number(median_of(figure, rounds))));
            let baseline = point.rounds.first().map_or(&[][..], |rounds| rounds);
            for other in point.rounds.iter().skip(1) {
                row.push(match ratio(figure, baseline, other) {
                    Some([median, min, max]) if rounds > 1 => {
                        format!("{median:.2} ({min:.2} to {max:.2})")
                    }
                    Some([median, ..]) => format!("{median:.2}"),
                    None => "-".to_owned(),
                });
            }
            rows.push(row);
        }
        if self.tenants.len() > 1 {
            self.tenant_rows(point, &mut rows);
        }
        align(&rows, out);
        for (name, rounds) in self.names.iter().zip(&point.rounds) {
            for (verb, counts) in [
                ("refused", counts_by_kind(rounds, |measured| &measured.refused)),
                ("failed", counts_by_kind(rounds, |measured| &measured.failed)),
            ] {
                for (kind, count, example) in counts {
                    let _ = writeln!(out, "  {name}: {count} {verb}, {kind}, such as: {example}");
                }
            }
        }
        out.push('\n');
    }

    fn tenant_rows(&self, point: &LoadPoint, rows: &mut Vec<Vec<String>>) {
        for (index, name) in self.tenants.iter().enumerate() {
            let medians = |figure: &dyn Fn(&RoundMeasurements) -> Option<f64>| -> Vec<String> {
                let cell = |rounds: &Vec<RoundMeasurements>| {
                    format_number(median(rounds.iter().filter_map(figure).collect()))
                };
                point.rounds.iter().map(cell).collect()
            };
            let tokens = medians(&|m| per_second(m, m.tenants.get(index)?.output_tokens));
            let ttft = medians(&|m| m.tenants.get(index)?.ttft.quantile_ms(0.5));
            let tail = medians(&|m| m.tenants.get(index)?.ttft.quantile_ms(0.99));
            let e2e = medians(&|m| m.tenants.get(index)?.e2e.quantile_ms(0.99));
            let label = format!("tenant {name}");
            let parts = [
                ("output tokens/s", tokens),
                ("first token p50, ms", ttft),
                ("first token p99, ms", tail),
                ("end to end p99, ms", e2e),
            ];
            for (at, (part, values)) in parts.into_iter().enumerate() {
                let label = if at == 0 { label.clone() } else { String::new() };
                rows.push([label, part.to_owned()].into_iter().chain(values).collect());
            }
        }
    }

    /// Returns the report as JSON: all figures of all rounds, medians, and ratios of the first server to the
    /// others.
    pub fn json(&self) -> Value {
        let points: Vec<Value> = self.points.iter().map(|point| self.point_json(point)).collect();
        let mut report = json!({ "setting": self.setting, "points": points });
        if let Some((search, share)) = &self.search {
            report["search"] = json!({ "slo_share": share, "highest_met_per_s": search.met(), "lowest_missed_per_s": search.missed() });
        }
        report
    }

    fn point_json(&self, point: &LoadPoint) -> Value {
        let figures = self.figures(point.load);
        let servers = self.names.iter().zip(&point.rounds).map(|(name, rounds)| {
            let median: serde_json::Map<String, Value> = figures
                .iter()
                .map(|figure| (figure.key.to_owned(), json!(median_of(figure, rounds))))
                .collect();
            let rounds: Vec<Value> =
                rounds.iter().map(|measured| self.round_json(&figures, measured)).collect();
            json!({ "name": name, "median": median, "rounds": rounds })
        });
        let ratios = self.names.iter().zip(&point.rounds).skip(1).map(|(name, other)| {
            let ratios: serde_json::Map<String, Value> = figures
                .iter()
                .filter_map(|figure| {
                    let [median, min, max] = ratio(figure, &point.rounds[0], other)?;
                    Some((figure.key.to_owned(), json!({ "median": median, "least": min, "most": max })))
                })
                .collect();
            json!({ "of": self.names[0], "to": name, "ratios": ratios })
        });
        let load = match point.load {
            LoadPattern::Closed { streams } => json!({ "loop": "closed", "streams": streams }),
            LoadPattern::Open { arrivals: Arrivals::Poisson(rate), .. } => {
                json!({ "loop": "open", "arrivals": "poisson", "rate": rate })
            }
            LoadPattern::Open { arrivals: Arrivals::Constant(rate), .. } => {
                json!({ "loop": "open", "arrivals": "constant", "rate": rate })
            }
            LoadPattern::Open { arrivals: Arrivals::Trace { speed, .. }, .. } => {
                json!({ "loop": "open", "arrivals": "trace", "speed": speed })
            }
        };
        json!({ "load": load, "endpoints": servers.collect::<Vec<_>>(), "ratios": ratios.collect::<Vec<_>>() })
    }

    fn round_json(&self, figures: &[&Figure], measured: &RoundMeasurements) -> Value {
        let figures: serde_json::Map<String, Value> =
            figures.iter().map(|figure| (figure.key.to_owned(), json!((figure.value)(measured)))).collect();
        let times = |times: &LatencyHistogram| json!({ "count": times.len(), "p50_ms": times.quantile_ms(0.5), "p90_ms": times.quantile_ms(0.9), "p99_ms": times.quantile_ms(0.99) });
        let tenants: Vec<Value> = self
            .tenants
            .iter()
            .zip(&measured.tenants)
            .map(|(name, tenant)| {
                json!({
                    "name": name,
                    "output_tokens": tenant.output_tokens,
                    "ttft": times(&tenant.ttft),
                    "e2e": times(&tenant.e2e),
                })
            })
            .collect();
        json!({
            "figures": figures,
            "seconds": measured.seconds(),
            "requests": {
                "counted": measured.started,
                "completed": measured.completed,
                "short": measured.short,
                "refused": measured.refused,
                "failed": measured.failed,
                "within_bounds": self.has_slo.then_some(measured.slo_met),
            },
            "examples": measured.examples,
            "output_tokens": measured.output_tokens,
            "prompt_tokens": measured.prompt_tokens,
            "gaps": measured.itl.len(),
            "message_tokens_max": measured.message_tokens_max,
            "held_up_ms": measured.slot_wait_max.as_secs_f64() * 1e3,
            "tenants": tenants,
        })
    }
}

/// Writes rows with aligned columns: the first two left-aligned, others right-aligned.
fn align(rows: &[Vec<String>], out: &mut String) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for row in rows {
        let mut line = String::from(" ");
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let _ = match column {
                0 | 1 => write!(line, " {cell:<width$}"),
                _ => write!(line, "  {cell:>width$}"),
            };
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_over_rounds_and_ratios_between_rounds_of_equal_index() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0]), Some(2.5));
        assert_eq!(median(Vec::new()), None);
        let now = tokio::time::Instant::now();
        let round = |tokens| RoundMeasurements {
            output_tokens: tokens,
            opened: Some(now),
            closed: Some(now + std::time::Duration::from_secs(2)),
            ..RoundMeasurements::default()
        };
        let (baseline, other) =
            (vec![round(10), round(30), round(80)], vec![round(10), round(10), round(20)]);
        assert_eq!(median_of(&RATES[0], &baseline), Some(15.0));
        assert_eq!(ratio(&RATES[0], &baseline, &other), Some([3.0, 1.0, 4.0]));
        assert_eq!(ratio(&RATES[3], &baseline, &other), None, "there was no message");
        let report = BenchReport {
            names: vec!["a".into(), "b".into()],
            tenants: vec![String::new()],
            has_slo: false,
            setting: Value::Null,
            points: vec![LoadPoint {
                load: LoadPattern::Closed { streams: 4 },
                rounds: vec![baseline, other],
            }],
            search: None,
        };
        assert!(report.table().contains("3.00 (1.00 to 4.00)"), "{}", report.table());
        assert_eq!(report.json()["points"][0]["ratios"][0]["ratios"]["output_tokens_per_s"]["median"], 3.0);
    }
}
