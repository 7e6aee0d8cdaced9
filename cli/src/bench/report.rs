//! Figures of a run, as a table and as JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::load::Load;
use super::measure::{Measured, Times};
use super::workload::Arrivals;

/// A figure: its key in JSON, the two parts of its label, and where it comes from.
struct Figure {
    key: &'static str,
    label: [&'static str; 2],
    of: fn(&Measured) -> Option<f64>,
}

macro_rules! times {
    ($key:literal, $label:literal, $field:ident) => {
        [
            Figure { key: concat!($key, "_ms_mean"), label: [$label, "mean"], of: |m| m.$field.mean_ms() },
            Figure {
                key: concat!($key, "_ms_p50"),
                label: [$label, "p50"],
                of: |m| m.$field.quantile_ms(0.5),
            },
            Figure {
                key: concat!($key, "_ms_p90"),
                label: [$label, "p90"],
                of: |m| m.$field.quantile_ms(0.9),
            },
            Figure {
                key: concat!($key, "_ms_p99"),
                label: [$label, "p99"],
                of: |m| m.$field.quantile_ms(0.99),
            },
            Figure {
                key: concat!($key, "_ms_max"),
                label: [$label, "max"],
                of: |m| m.$field.quantile_ms(1.0),
            },
        ]
    };
}

const RATES: [Figure; 4] = [
    Figure {
        key: "output_tokens_per_s",
        label: ["output tokens/s", ""],
        of: |m| per_second(m, m.output_tokens),
    },
    Figure {
        key: "total_tokens_per_s",
        label: ["prompt and output tokens/s", ""],
        of: |m| per_second(m, m.output_tokens + m.prompt_tokens),
    },
    Figure { key: "requests_per_s", label: ["requests/s", ""], of: |m| per_second(m, m.window_completed) },
    Figure { key: "tokens_per_message", label: ["tokens per message", ""], of: tokens_per_message },
];

const TIMES: [[Figure; 5]; 5] = [
    times!("ttft", "first token, ms", ttft),
    times!("itl", "between tokens, ms", itl),
    times!("tpot", "mean per request, ms", tpot),
    times!("e2e", "end to end, ms", e2e),
    times!("lag", "sent late by, ms", lag),
];

const GOODPUT: Figure =
    Figure { key: "goodput_per_s", label: ["requests/s within bounds", ""], of: |m| per_second(m, m.good) };
const ATTAINMENT: Figure = Figure {
    key: "slo_attainment",
    label: ["share within bounds", ""],
    of: |m| (m.started > 0).then(|| m.good as f64 / m.started as f64),
};
const CPU: Figure = Figure {
    key: "generator_cores",
    label: ["cores taken by this command", ""],
    of: |m| m.cpu_s.filter(|_| m.seconds() > 0.0).map(|cpu| cpu / m.seconds()),
};

fn per_second(measured: &Measured, count: u64) -> Option<f64> {
    (measured.seconds() > 0.0).then(|| count as f64 / measured.seconds())
}

fn tokens_per_message(measured: &Measured) -> Option<f64> {
    (measured.messages > 0).then(|| measured.output_tokens as f64 / measured.messages as f64)
}

/// One load on all servers: rounds of each.
#[derive(Debug)]
pub struct Point {
    /// The load.
    pub load: Load,
    /// By server, by round.
    pub rounds: Vec<Vec<Measured>>,
}

/// A run.
#[derive(Debug)]
pub struct Report {
    /// What the servers are called.
    pub names: Vec<String>,
    /// Names of the tenants.
    pub tenants: Vec<String>,
    /// Whether there are bounds that a good request keeps.
    pub has_slo: bool,
    /// What was asked for, for the JSON.
    pub setting: Value,
    /// Loads, in the order they were run.
    pub points: Vec<Point>,
}

/// What is in the middle, or between the two that are.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.get(values.len().checked_sub(1)? / 2)?, values.get(values.len() / 2)?);
    Some((low + high) / 2.0)
}

fn median_of(figure: &Figure, rounds: &[Measured]) -> Option<f64> {
    median(rounds.iter().filter_map(figure.of).collect())
}

/// Median, least and greatest ratio of rounds that ran side by side.
fn ratio(figure: &Figure, one: &[Measured], other: &[Measured]) -> Option<[f64; 3]> {
    let of = |pair: (&Measured, &Measured)| Some((figure.of)(pair.0)? / (figure.of)(pair.1)?);
    let mut ratios: Vec<f64> =
        one.iter().zip(other).filter_map(of).filter(|ratio| ratio.is_finite()).collect();
    ratios.sort_by(f64::total_cmp);
    Some([median(ratios.clone())?, *ratios.first()?, *ratios.last()?])
}

fn number(value: Option<f64>) -> String {
    match value {
        None => "-".to_owned(),
        Some(value) if value == 0.0 || value.abs() >= 1000.0 => format!("{value:.0}"),
        Some(value) if value.abs() >= 100.0 => format!("{value:.1}"),
        Some(value) if value.abs() >= 10.0 => format!("{value:.2}"),
        Some(value) => format!("{value:.3}"),
    }
}

fn describe(load: Load) -> String {
    match load {
        Load::Closed { streams: 1 } => "closed loop, 1 stream".to_owned(),
        Load::Closed { streams } => format!("closed loop, {streams} streams"),
        Load::Open { arrivals: Arrivals::Poisson(rate), .. } => {
            format!("open loop, Poisson, {rate} requests/s")
        }
        Load::Open { arrivals: Arrivals::Constant(rate), .. } => {
            format!("open loop, evenly, {rate} requests/s")
        }
        Load::Open { arrivals: Arrivals::Trace { speed, .. }, .. } => {
            format!("open loop, the trace's arrivals at {speed} times their speed")
        }
    }
}

fn sum(rounds: &[Measured], of: impl Fn(&Measured) -> u64) -> u64 {
    rounds.iter().map(of).sum()
}

/// Counts by kind over all rounds, with an example of each.
fn kinds(
    rounds: &[Measured],
    of: impl Fn(&Measured) -> &std::collections::BTreeMap<String, u64>,
) -> Vec<(String, u64, String)> {
    let mut all: Vec<(String, u64, String)> = Vec::new();
    for measured in rounds {
        for (kind, count) in of(measured) {
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

impl Report {
    /// Requests that count, and how many of them failed and were refused, with an example of a failure.
    pub fn failures(&self) -> (u64, u64, u64, Option<String>) {
        let rounds = || self.points.iter().flat_map(|point| &point.rounds).flatten();
        let failed = rounds().flat_map(|measured| measured.failed.values()).sum();
        let refused = rounds().flat_map(|measured| measured.refused.values()).sum();
        let example = rounds().find_map(|measured| {
            let (kind, _) = measured.failed.first_key_value()?;
            Some(format!("{kind}: {}", measured.examples.get(kind).map_or("", String::as_str)))
        });
        (rounds().map(|measured| measured.started).sum(), failed, refused, example)
    }

    fn figures(&self, load: Load) -> Vec<&'static Figure> {
        static GOOD: [&Figure; 2] = [&GOODPUT, &ATTAINMENT];
        static CPUS: [&Figure; 1] = [&CPU];
        static ALL_RATES: &[Figure] = &RATES;
        static ALL_TIMES: &[[Figure; 5]] = &TIMES;
        let open = matches!(load, Load::Open { .. });
        // Whoever sends at the end of another request is never late.
        let times = ALL_TIMES.iter().take(if open { 5 } else { 4 }).flatten();
        let good = GOOD.iter().copied().filter(|_| self.has_slo);
        ALL_RATES.iter().chain(good).chain(times).chain(CPUS.iter().copied()).collect()
    }

    /// The whole as text.
    pub fn table(&self) -> String {
        let mut out = String::new();
        for point in &self.points {
            self.point_table(point, &mut out);
        }
        out
    }

    fn point_table(&self, point: &Point, out: &mut String) {
        let rounds = point.rounds.first().map_or(0, Vec::len);
        let middle = if rounds > 1 { ", medians" } else { "" };
        let _ = writeln!(
            out,
            "{}; {rounds} round{}{middle}",
            describe(point.load),
            if rounds == 1 { "" } else { "s" }
        );
        let mut rows: Vec<Vec<String>> = Vec::new();
        let mut head = vec![String::new(), String::new()];
        head.extend(self.names.iter().cloned());
        head.extend(self.names.iter().skip(1).map(|other| format!("{} / {other}", self.names[0])));
        rows.push(head);
        let mut count = |label: &str, of: &dyn Fn(&Measured) -> u64| {
            let mut row = vec![label.to_owned(), String::new()];
            row.extend(point.rounds.iter().map(|rounds| sum(rounds, of).to_string()));
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
            row.extend(point.rounds.iter().map(|rounds| number(median_of(figure, rounds))));
            let ours = point.rounds.first().map_or(&[][..], |rounds| rounds);
            for other in point.rounds.iter().skip(1) {
                row.push(match ratio(figure, ours, other) {
                    Some([middle, least, most]) if rounds > 1 => {
                        format!("{middle:.2} ({least:.2} to {most:.2})")
                    }
                    Some([middle, ..]) => format!("{middle:.2}"),
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
            for (verb, kinds) in [
                ("refused", kinds(rounds, |measured| &measured.refused)),
                ("failed", kinds(rounds, |measured| &measured.failed)),
            ] {
                for (kind, count, example) in kinds {
                    let _ = writeln!(out, "  {name}: {count} {verb}, {kind}, such as: {example}");
                }
            }
        }
        out.push('\n');
    }

    fn tenant_rows(&self, point: &Point, rows: &mut Vec<Vec<String>>) {
        for (place, name) in self.tenants.iter().enumerate() {
            let of = |figure: &dyn Fn(&Measured) -> Option<f64>| -> Vec<String> {
                let middle =
                    |rounds: &Vec<Measured>| number(median(rounds.iter().filter_map(figure).collect()));
                point.rounds.iter().map(middle).collect()
            };
            let tokens = of(&|m| per_second(m, m.tenants.get(place)?.output_tokens));
            let ttft = of(&|m| m.tenants.get(place)?.ttft.quantile_ms(0.5));
            let tail = of(&|m| m.tenants.get(place)?.ttft.quantile_ms(0.99));
            let e2e = of(&|m| m.tenants.get(place)?.e2e.quantile_ms(0.99));
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

    /// The whole as JSON: every figure of every round, their medians, and ratios of the first server's to each other's.
    pub fn json(&self) -> Value {
        let points: Vec<Value> = self.points.iter().map(|point| self.point_json(point)).collect();
        json!({ "setting": self.setting, "points": points })
    }

    fn point_json(&self, point: &Point) -> Value {
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
                    let [median, least, most] = ratio(figure, &point.rounds[0], other)?;
                    Some((figure.key.to_owned(), json!({ "median": median, "least": least, "most": most })))
                })
                .collect();
            json!({ "of": self.names[0], "to": name, "ratios": ratios })
        });
        let load = match point.load {
            Load::Closed { streams } => json!({ "loop": "closed", "streams": streams }),
            Load::Open { arrivals: Arrivals::Poisson(rate), .. } => {
                json!({ "loop": "open", "arrivals": "poisson", "rate": rate })
            }
            Load::Open { arrivals: Arrivals::Constant(rate), .. } => {
                json!({ "loop": "open", "arrivals": "constant", "rate": rate })
            }
            Load::Open { arrivals: Arrivals::Trace { speed, .. }, .. } => {
                json!({ "loop": "open", "arrivals": "trace", "speed": speed })
            }
        };
        json!({ "load": load, "endpoints": servers.collect::<Vec<_>>(), "ratios": ratios.collect::<Vec<_>>() })
    }

    fn round_json(&self, figures: &[&Figure], measured: &Measured) -> Value {
        let figures: serde_json::Map<String, Value> =
            figures.iter().map(|figure| (figure.key.to_owned(), json!((figure.of)(measured)))).collect();
        let times = |times: &Times| json!({ "count": times.len(), "p50_ms": times.quantile_ms(0.5), "p90_ms": times.quantile_ms(0.9), "p99_ms": times.quantile_ms(0.99) });
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
                "within_bounds": self.has_slo.then_some(measured.good),
            },
            "examples": measured.examples,
            "output_tokens": measured.output_tokens,
            "prompt_tokens": measured.prompt_tokens,
            "gaps": measured.itl.len(),
            "message_tokens_max": measured.message_tokens_max,
            "held_up_ms": measured.held_up.as_secs_f64() * 1e3,
            "tenants": tenants,
        })
    }
}

/// Writes rows with their columns one under another: the first two to the left, numbers to the right.
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
    fn medians_and_ratios_are_of_rounds_side_by_side() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0]), Some(2.5));
        assert_eq!(median(Vec::new()), None);
        let now = tokio::time::Instant::now();
        let round = |tokens| Measured {
            output_tokens: tokens,
            opened: Some(now),
            closed: Some(now + std::time::Duration::from_secs(2)),
            ..Measured::default()
        };
        let (ours, theirs) = (vec![round(10), round(30), round(80)], vec![round(10), round(10), round(20)]);
        assert_eq!(median_of(&RATES[0], &ours), Some(15.0));
        assert_eq!(ratio(&RATES[0], &ours, &theirs), Some([3.0, 1.0, 4.0]));
        assert_eq!(ratio(&RATES[3], &ours, &theirs), None, "there was no message");
        let report = Report {
            names: vec!["a".into(), "b".into()],
            tenants: vec![String::new()],
            has_slo: false,
            setting: Value::Null,
            points: vec![Point { load: Load::Closed { streams: 4 }, rounds: vec![ours, theirs] }],
        };
        assert!(report.table().contains("3.00 (1.00 to 4.00)"), "{}", report.table());
        assert_eq!(report.json()["points"][0]["ratios"][0]["ratios"]["output_tokens_per_s"]["median"], 3.0);
    }
}
