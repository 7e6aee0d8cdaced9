//! Readers of published traces. The files stay where they are; nothing of them is part of this crate.

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

use inflight_worker_core::Time;

use crate::{Request, ServedRequest};

/// A trace that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file can't be read.
    #[error("can't read the trace {path}: {source}")]
    Read {
        /// Which file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A column is missing.
    #[error("the trace {path} has no column `{column}`; its header is `{header}`")]
    Column {
        /// Which file.
        path: String,
        /// The column.
        column: &'static str,
        /// Its first line.
        header: String,
    },
    /// A value is not a number of the kind expected.
    #[error("the trace {path}, line {line}: `{value}` in column `{column}` is not a number of its kind")]
    Value {
        /// Which file.
        path: String,
        /// Which line, from 1.
        line: usize,
        /// The column.
        column: &'static str,
        /// What is there.
        value: String,
    },
}

struct Csv {
    path: String,
    text: String,
}

impl Csv {
    fn read(path: &Path) -> Result<Self, TraceError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|source| TraceError::Read { path: name.clone(), source })?;
        Ok(Self { path: name, text })
    }

    fn place(&self, column: &'static str) -> Result<(usize, &'static str), TraceError> {
        let header = self.text.lines().next().unwrap_or_default();
        let place = header.split(',').position(|name| name == column);
        place.map(|place| (place, column)).ok_or_else(|| TraceError::Column {
            path: self.path.clone(),
            column,
            header: header.to_owned(),
        })
    }

    /// Lines behind the header, with their numbers.
    fn rows(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text
            .lines()
            .enumerate()
            .skip(1)
            .filter(|(_, row)| !row.is_empty())
            .map(|(at, row)| (at + 1, row))
    }

    fn value<T: FromStr>(
        &self,
        (line, row): (usize, &str),
        (place, column): (usize, &'static str),
    ) -> Result<T, TraceError> {
        let value = row.split(',').nth(place).unwrap_or_default();
        value.parse().map_err(|_| TraceError::Value {
            path: self.path.clone(),
            line,
            column,
            value: value.to_owned(),
        })
    }
}

/// Reads a result file of VTC's artifact: when each request arrived, and when a real server answered it. Tenants are
/// numbered in order of appearance.
///
/// # Errors
/// [`TraceError`].
pub fn read_vtc(path: &Path) -> Result<Vec<ServedRequest>, TraceError> {
    let csv = Csv::read(path)?;
    let (arrival, tenant) = (csv.place("req_time")?, csv.place("adapter_dir")?);
    let (prompt, output) = (csv.place("prompt_len")?, csv.place("output_len")?);
    let (first, latency) = (csv.place("first_token_latency")?, csv.place("request_latency")?);
    let mut tenants: BTreeMap<String, u32> = BTreeMap::new();
    let mut requests = Vec::new();
    for row in csv.rows() {
        let next = tenants.len() as u32;
        let arrival_s: f64 = csv.value(row, arrival)?;
        requests.push(ServedRequest {
            tenant: *tenants.entry(csv.value(row, tenant)?).or_insert(next),
            arrival_s,
            first_token_s: arrival_s + csv.value::<f64>(row, first)?,
            end_s: arrival_s + csv.value::<f64>(row, latency)?,
            prompt_tokens: csv.value(row, prompt)?,
            output_tokens: csv.value(row, output)?,
        });
    }
    Ok(requests)
}

/// The requests alone, in order of arrival, to be served anew.
pub fn requests_of(served: &[ServedRequest]) -> Vec<Request> {
    let request = |served: &ServedRequest| {
        let arrival = Time::from_nanos((served.arrival_s.max(0.0) * 1e9).round() as u64);
        // Each has a token to compute and one to generate.
        Request::new(arrival, served.tenant, served.prompt_tokens.max(1), served.output_tokens.max(1))
    };
    let mut requests: Vec<Request> = served.iter().map(request).collect();
    requests.sort_by_key(|request| request.arrival);
    requests
}

/// Reads a file of lengths without arrivals: prompt and output tokens of each request.
///
/// # Errors
/// [`TraceError`].
pub fn read_lengths(path: &Path) -> Result<Vec<(u32, u32)>, TraceError> {
    let csv = Csv::read(path)?;
    let (prompt, output) = (csv.place("num_prefill_tokens")?, csv.place("num_decode_tokens")?);
    csv.rows().map(|row| Ok((csv.value(row, prompt)?, csv.value(row, output)?))).collect()
}
