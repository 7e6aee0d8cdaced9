//! Reader of Prometheus' text format, as far as this process writes it.

/// Type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FamilyKind {
    /// Monotonic counter.
    Counter,
    /// Value that goes up and down.
    Gauge,
    /// Distribution over buckets.
    Histogram,
}

/// One value with its labels.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Labels by name, without `le`.
    pub labels: Vec<(String, String)>,
    /// Value.
    pub value: f64,
}

/// Distribution with its labels.
#[derive(Debug, Clone, PartialEq)]
pub struct HistogramSample {
    /// Labels by name.
    pub labels: Vec<(String, String)>,
    /// Upper bound of each bucket and the number of values up to it, ascending; the last bound is infinite.
    pub buckets: Vec<(f64, u64)>,
    /// Sum of the values.
    pub sum: f64,
    /// Number of values.
    pub count: u64,
}

/// All samples of a metric.
#[derive(Debug, Clone, PartialEq)]
pub struct Family {
    /// Name.
    pub name: String,
    /// Type.
    pub kind: FamilyKind,
    /// Description; may be empty.
    pub help: String,
    /// Values of a counter or gauge.
    pub samples: Vec<Sample>,
    /// Values of a histogram.
    pub histograms: Vec<HistogramSample>,
}

/// Line that is not in the format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line} is no sample: {text:?}")]
pub struct ParseError {
    /// Number of the line, from 1.
    line: usize,
    /// The line.
    text: String,
}

/// Reads all metrics of a text. Comments other than HELP and TYPE are skipped.
///
/// # Errors
/// [`ParseError`] with the first line that is no sample of the metric before it.
pub fn parse(text: &str) -> Result<Vec<Family>, ParseError> {
    let mut families: Vec<Family> = Vec::new();
    let mut help = (String::new(), String::new());
    for (at, line) in text.lines().enumerate() {
        let wrong = || ParseError { line: at + 1, text: line.to_owned() };
        if let Some(described) = line.strip_prefix("# HELP ") {
            let (name, description) = described.split_once(' ').unwrap_or((described, ""));
            help = (name.to_owned(), description.to_owned());
        } else if let Some(typed) = line.strip_prefix("# TYPE ") {
            let (name, kind) = typed.split_once(' ').ok_or_else(wrong)?;
            let kind = match kind {
                "counter" => FamilyKind::Counter,
                "gauge" => FamilyKind::Gauge,
                "histogram" => FamilyKind::Histogram,
                _ => return Err(wrong()),
            };
            let help = if help.0 == name { std::mem::take(&mut help.1) } else { String::new() };
            let (name, samples, histograms) = (name.to_owned(), Vec::new(), Vec::new());
            families.push(Family { name, kind, help, samples, histograms });
        } else if !line.is_empty() && !line.starts_with('#') {
            let family = families.last_mut().ok_or_else(wrong)?;
            family.add(line).ok_or_else(wrong)?;
        }
    }
    Ok(families)
}

impl Family {
    /// Adds a sample; `None` if the line is none of this metric.
    fn add(&mut self, line: &str) -> Option<()> {
        let end = line.find(['{', ' '])?;
        let suffix = line[..end].strip_prefix(&self.name)?;
        let (mut labels, rest) = match line[end..].strip_prefix('{') {
            Some(labels) => read_labels(labels)?,
            None => (Vec::new(), &line[end..]),
        };
        let value: f64 = rest.trim().parse().ok()?;
        if self.kind != FamilyKind::Histogram {
            self.samples.push(Sample { labels, value });
            return suffix.is_empty().then_some(());
        }
        let bound = match suffix {
            "_bucket" => {
                let at = labels.iter().position(|(name, _)| name == "le")?;
                Some(labels.remove(at).1.parse::<f64>().ok()?)
            }
            _ => None,
        };
        let known = self.histograms.iter().position(|histogram| histogram.labels == labels);
        let at = known.unwrap_or_else(|| {
            self.histograms.push(HistogramSample { labels, buckets: Vec::new(), sum: 0.0, count: 0 });
            self.histograms.len() - 1
        });
        let histogram = &mut self.histograms[at];
        match (suffix, bound) {
            ("_bucket", Some(bound)) => histogram.buckets.push((bound, value as u64)),
            ("_sum", None) => histogram.sum = value,
            ("_count", None) => histogram.count = value as u64,
            _ => return None,
        }
        Some(())
    }
}

/// Reads `name="value",…}` and returns what follows.
fn read_labels(mut text: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        if let Some(rest) = text.strip_prefix('}') {
            return Some((labels, rest));
        }
        let (name, rest) = text.split_once("=\"")?;
        let mut value = String::new();
        let mut characters = rest.char_indices();
        let end = loop {
            match characters.next()? {
                (at, '"') => break at,
                (_, '\\') => value.push(match characters.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, other) => value.push(other),
            }
        };
        labels.push((name.to_owned(), value));
        text = &rest[end + 1..];
        text = text.strip_prefix(',').unwrap_or(text);
    }
}

/// Writes a label value's text between quotes.
pub fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_recorder_renders_is_read_back() {
        let recorder = metrics_exporter_prometheus::PrometheusBuilder::new()
            .set_buckets_for_metric(
                metrics_exporter_prometheus::Matcher::Full("took_seconds".to_owned()),
                &[0.1, 1.0],
            )
            .unwrap()
            .build_recorder();
        let hostile = "a\\b\"c\nd,e=\"}";
        metrics::with_local_recorder(&recorder, || {
            metrics::describe_counter!("asked_total", "Calls, by \\ caller");
            metrics::counter!("asked_total", "caller" => hostile, "kind" => "x").increment(7);
            metrics::gauge!("open").set(-2.5);
            metrics::gauge!("largest").set(f64::INFINITY);
            for value in [0.05, 0.5, 5.0] {
                metrics::histogram!("took_seconds", "model" => "m").record(value);
            }
        });
        let families = parse(&recorder.handle().render()).unwrap();
        let family = |name: &str| families.iter().find(|family| family.name == name).unwrap();
        let asked = family("asked_total");
        assert_eq!(asked.kind, FamilyKind::Counter);
        let labels = vec![("caller".to_owned(), hostile.to_owned()), ("kind".to_owned(), "x".to_owned())];
        assert_eq!(asked.samples, [Sample { labels, value: 7.0 }]);
        assert_eq!(family("open").samples[0].value, -2.5);
        assert_eq!(family("largest").samples[0].value, f64::INFINITY);
        let took = &family("took_seconds").histograms;
        assert_eq!(took.len(), 1);
        assert_eq!(took[0].labels, [("model".to_owned(), "m".to_owned())]);
        assert_eq!(took[0].buckets, [(0.1, 1), (1.0, 2), (f64::INFINITY, 3)]);
        assert_eq!((took[0].sum, took[0].count), (5.55, 3));
    }

    #[test]
    fn a_line_that_is_no_sample_is_named() {
        for wrong in ["x 1", "# TYPE a gauge\nb 1", "# TYPE a gauge\na{b=\"c 1", "# TYPE a gauge\na one"] {
            let error = parse(wrong).unwrap_err().to_string();
            assert!(error.contains("is no sample"), "{error}");
        }
        assert_eq!(parse("# a comment\n\n"), Ok(Vec::new()));
    }
}
