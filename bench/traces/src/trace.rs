//! Readers of published traces (Azure, VTC, Mooncake, length files). The crate contains no trace data.

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

/// Reason why a trace cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be read.
    #[error("can't read the trace {path}: {source}")]
    Read {
        /// Path of the file.
        path: String,
        /// Cause.
        source: std::io::Error,
    },
    /// A column is missing.
    #[error("the trace {path} has no column `{column}`; its header is `{header}`")]
    Column {
        /// Path of the file.
        path: String,
        /// Name of the missing column.
        column: &'static str,
        /// First line of the file.
        header: String,
    },
    /// A value does not parse as the expected number type.
    #[error("the trace {path}, line {line}: `{value}` in column `{column}` is not a number of its kind")]
    Value {
        /// Path of the file.
        path: String,
        /// Line number, from 1.
        line: usize,
        /// Name of the column.
        column: &'static str,
        /// Text found there.
        value: String,
    },
    /// Unknown format.
    #[error(
        "the trace {path} is in no format known here; it begins with `{start}`. Known are CSV files with the columns {known}, and \
         JSON lines with `input_length` and `output_length`"
    )]
    Format {
        /// Path of the file.
        path: String,
        /// Beginning of the first line.
        start: String,
        /// Columns that identify the supported CSV formats.
        known: &'static str,
    },
    /// A line is not valid JSON or lacks a field.
    #[error("the trace {path}, line {line}: {message}")]
    Json {
        /// Path of the file.
        path: String,
        /// Line number, from 1.
        line: usize,
        /// Description of the error.
        message: String,
    },
    /// The trace contains no request.
    #[error("the trace {path} has no request")]
    Empty {
        /// Path of the file.
        path: String,
    },
}

/// Request of a trace, with the fields that the format provides.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TracedRequest {
    /// Arrival in seconds after the first request; `None` if the trace has no times.
    pub arrival_s: Option<f64>,
    /// Number of the tenant, if the trace has tenants.
    pub tenant: Option<u32>,
    /// Prompt length in tokens, at least 1.
    pub prompt_tokens: u32,
    /// Output length in tokens, at least 1.
    pub output_tokens: u32,
    /// Ids of the prompt's blocks of [`TRACED_BLOCK_TOKENS`] tokens, if the trace has them; equal leading ids
    /// mean an equal prefix.
    pub blocks: Vec<u64>,
}

/// Served request, with its times, of a real or simulated server.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServedRequest {
    /// Number of the tenant.
    pub tenant: u32,
    /// Arrival time in seconds.
    pub arrival_s: f64,
    /// Time of the first token in seconds.
    pub first_token_s: f64,
    /// Time of the last token in seconds.
    pub end_s: f64,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Number of generated tokens.
    pub output_tokens: u32,
}

/// Tokens per block of [`TracedRequest::blocks`].
pub const TRACED_BLOCK_TOKENS: u32 = 512;

/// CSV file without quoting.
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

    fn has(&self, column: &str) -> bool {
        self.text.lines().next().unwrap_or_default().split(',').any(|name| name == column)
    }

    /// Returns the position and the name of a column.
    fn column(&self, column: &'static str) -> Result<(usize, &'static str), TraceError> {
        let header = self.text.lines().next().unwrap_or_default();
        let position = header.split(',').position(|name| name == column);
        position.map(|position| (position, column)).ok_or_else(|| TraceError::Column {
            path: self.path.clone(),
            column,
            header: header.to_owned(),
        })
    }

    /// Returns the non-empty lines after the header, with their numbers.
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
        (position, column): (usize, &'static str),
    ) -> Result<T, TraceError> {
        let value = row.split(',').nth(position).unwrap_or_default();
        value.parse().map_err(|_| TraceError::Value {
            path: self.path.clone(),
            line,
            column,
            value: value.to_owned(),
        })
    }
}

/// Reads a result file of the VTC artifact, with arrivals and the latencies of a real server. Tenants are
/// numbered in order of appearance.
///
/// # Errors
/// [`TraceError`].
pub fn read_vtc(path: &Path) -> Result<Vec<ServedRequest>, TraceError> {
    let csv = Csv::read(path)?;
    let (arrival, tenant) = (csv.column("req_time")?, csv.column("adapter_dir")?);
    let (prompt, output) = (csv.column("prompt_len")?, csv.column("output_len")?);
    let (first, latency) = (csv.column("first_token_latency")?, csv.column("request_latency")?);
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

/// Reads a file of prompt and output lengths without arrivals.
///
/// # Errors
/// [`TraceError`].
pub fn read_lengths(path: &Path) -> Result<Vec<(u32, u32)>, TraceError> {
    let csv = Csv::read(path)?;
    let (prompt, output) = (csv.column("num_prefill_tokens")?, csv.column("num_decode_tokens")?);
    csv.rows().map(|row| Ok((csv.value(row, prompt)?, csv.value(row, output)?))).collect()
}

/// Reads a trace of any supported format, detected by its first line: Azure
/// (`TIMESTAMP,ContextTokens,GeneratedTokens`), length files ([`read_lengths`]), VTC ([`read_vtc`]), and
/// Mooncake JSON lines. Requests with times are sorted by arrival.
///
/// # Errors
/// [`TraceError`].
pub fn read_trace(path: &Path) -> Result<Vec<TracedRequest>, TraceError> {
    let csv = Csv::read(path)?;
    let mut requests = if csv.text.starts_with('{') {
        read_mooncake(&csv)?
    } else if csv.has("ContextTokens") {
        read_azure(&csv)?
    } else if csv.has("req_time") {
        let traced = |served: &ServedRequest| TracedRequest {
            arrival_s: Some(served.arrival_s),
            tenant: Some(served.tenant),
            prompt_tokens: served.prompt_tokens.max(1),
            output_tokens: served.output_tokens.max(1),
            blocks: Vec::new(),
        };
        read_vtc(path)?.iter().map(traced).collect()
    } else if csv.has("num_prefill_tokens") {
        let traced = |(prompt, output): (u32, u32)| TracedRequest {
            prompt_tokens: prompt.max(1),
            output_tokens: output.max(1),
            ..TracedRequest::default()
        };
        read_lengths(path)?.into_iter().map(traced).collect()
    } else {
        let start = csv.text.lines().next().unwrap_or_default().chars().take(80).collect();
        let known = "TIMESTAMP, ContextTokens and GeneratedTokens; num_prefill_tokens and num_decode_tokens; req_time, \
                     adapter_dir, prompt_len and output_len";
        return Err(TraceError::Format { path: csv.path, start, known });
    };
    requests.sort_by(|a, b| a.arrival_s.unwrap_or(0.0).total_cmp(&b.arrival_s.unwrap_or(0.0)));
    let Some(first) = requests.first().map(|request| request.arrival_s) else {
        return Err(TraceError::Empty { path: csv.path });
    };
    for request in &mut requests {
        request.arrival_s = request.arrival_s.zip(first).map(|(at, first)| at - first);
    }
    Ok(requests)
}

fn read_azure(csv: &Csv) -> Result<Vec<TracedRequest>, TraceError> {
    let time = csv.column("TIMESTAMP")?;
    let (prompt, output) = (csv.column("ContextTokens")?, csv.column("GeneratedTokens")?);
    let request = |row| {
        Ok(TracedRequest {
            arrival_s: Some(csv.value::<Timestamp>(row, time)?.0),
            prompt_tokens: csv.value::<u32>(row, prompt)?.max(1),
            output_tokens: csv.value::<u32>(row, output)?.max(1),
            ..TracedRequest::default()
        })
    };
    csv.rows().map(request).collect()
}

/// Unix time in seconds, parsed from `YYYY-MM-DD HH:MM:SS.FFFFFFF`.
struct Timestamp(f64);

impl FromStr for Timestamp {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (date, time) = text.trim().split_once([' ', 'T']).ok_or(())?;
        let three = |text: &str, mark: char| -> Result<[f64; 3], ()> {
            let numbers: Vec<f64> =
                text.split(mark).map(|part| part.parse().map_err(|_| ())).collect::<Result<_, ()>>()?;
            numbers.try_into().map_err(|_| ())
        };
        let [year, month, day] = three(date, '-')?;
        let [hour, minute, second] = three(time, ':')?;
        if !(1.0..=12.0).contains(&month) || !(1970.0..1e4).contains(&year) {
            return Err(());
        }
        // Years begin in March, so that the leap day is the last day of a year.
        let (year, month) = if month > 2.0 { (year, month - 3.0) } else { (year - 1.0, month + 9.0) };
        let leaps = (year / 4.0).floor() - (year / 100.0).floor() + (year / 400.0).floor();
        let days = year * 365.0 + leaps + ((153.0 * month + 2.0) / 5.0).floor() + day - 1.0 - 719_468.0;
        Ok(Self(((days * 24.0 + hour) * 60.0 + minute) * 60.0 + second))
    }
}

fn read_mooncake(csv: &Csv) -> Result<Vec<TracedRequest>, TraceError> {
    let lines = csv.text.lines().enumerate().filter(|(_, line)| !line.is_empty());
    let request = |(at, line): (usize, &str)| {
        let invalid = |message: String| TraceError::Json { path: csv.path.clone(), line: at + 1, message };
        let value: serde_json::Value =
            serde_json::from_str(line).map_err(|error| invalid(error.to_string()))?;
        let tokens = |key: &str| {
            let tokens = value[key].as_u64().and_then(|tokens| u32::try_from(tokens).ok());
            tokens
                .map(|tokens| tokens.max(1))
                .ok_or_else(|| invalid(format!("`{key}` is no number of tokens")))
        };
        let arrival = match &value["timestamp"] {
            serde_json::Value::Null => None,
            given => {
                Some(given.as_f64().ok_or_else(|| invalid("`timestamp` is no number".to_owned()))? / 1e3)
            }
        };
        Ok(TracedRequest {
            arrival_s: arrival,
            tenant: None,
            prompt_tokens: tokens("input_length")?,
            output_tokens: tokens("output_length")?,
            blocks: value["hash_ids"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(serde_json::Value::as_u64)
                .collect(),
        })
    };
    lines.map(request).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, text: &str) -> Result<Vec<TracedRequest>, TraceError> {
        let path = std::env::temp_dir().join(format!("inflight-trace-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let read = read_trace(&path);
        std::fs::remove_file(&path).unwrap();
        read
    }

    #[test]
    fn every_format_is_detected_by_its_first_line() {
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-02-28 23:59:59.5000000,374,44\n2024-03-01 00:00:00.2500000,9,0";
        let requests = read("azure", azure).unwrap();
        assert_eq!((requests[0].prompt_tokens, requests[0].output_tokens), (374, 44));
        assert_eq!(requests[1].arrival_s, Some(86_400.75), "2024 has a 29 February");
        assert_eq!(requests[1].output_tokens, 1);
        let lengths = read("lengths", "num_prefill_tokens,num_decode_tokens\n74,918\n").unwrap();
        assert_eq!(
            (lengths[0].arrival_s, lengths[0].prompt_tokens, lengths[0].output_tokens),
            (None, 74, 918)
        );
        let vtc = "req_time,adapter_dir,prompt_len,output_len,first_token_latency,request_latency\n\
                   3.0,b,13,199,1.0,9.0\n1.0,a,7,8,1.0,9.0\n";
        let requests = read("vtc", vtc).unwrap();
        assert_eq!((requests[0].arrival_s, requests[0].tenant), (Some(0.0), Some(1)));
        assert_eq!((requests[1].arrival_s, requests[1].tenant), (Some(2.0), Some(0)));
        let mooncake =
            "{\"timestamp\": 1500, \"input_length\": 600, \"output_length\": 5, \"hash_ids\": [3, 4]}\n";
        assert_eq!(read("mooncake", mooncake).unwrap()[0].blocks, [3, 4]);
    }

    #[test]
    fn an_invalid_trace_yields_a_specific_error() {
        let error = |name, text| read(name, text).unwrap_err().to_string();
        assert!(error("other", "a,b\n1,2\n").contains("no format known here; it begins with `a,b`"));
        assert!(error("none", "num_prefill_tokens,num_decode_tokens\n").contains("no request"));
        assert!(error("lines", "{\"input_length\": 1}\n").contains("line 1: `output_length`"));
        let date = "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n";
        assert!(error("date", date).contains("line 2: `yesterday` in column `TIMESTAMP`"));
        assert!(
            read_trace(Path::new("/nowhere/trace.csv"))
                .unwrap_err()
                .to_string()
                .contains("/nowhere/trace.csv")
        );
    }
}
