//! `inflight models`: the models of the cache, and whether this machine can serve them.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use inflight_hub::{Cache, Settings, part_names};
use inflight_models::{ModelDir, ModelSource};

use crate::exit::CommandError;

/// Memory beside the weights: the default KV cache of a worker on CPUs.
const BESIDE: u64 = 1 << 30;

/// Options of `inflight models`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Print JSON lines instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Model that could be served.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
struct Row {
    /// Argument of `--model`.
    model: String,
    /// Architecture, or why there is none.
    architecture: Result<String, String>,
    bytes: u64,
    /// What the machine says.
    fits: String,
    path: PathBuf,
}

/// Lists the models of the cache.
///
/// # Errors
/// Standard output cannot be written.
pub fn run(args: &Args) -> Result<(), CommandError> {
    let settings = Settings::of_environment();
    let cache = Cache::new(settings.cache);
    let memory = inflight_worker::host_memory_limit().unwrap_or(u64::MAX);
    let rows: Vec<Row> = cache
        .models()
        .into_iter()
        .flat_map(|model| model.revisions.into_iter().map(move |revision| (model.repo.clone(), revision)))
        .flat_map(|(repo, revision)| {
            let name = match revision.names.first() {
                Some(name) if name == "main" => repo,
                Some(name) => format!("{repo}@{name}"),
                None => format!("{repo}@{}", revision.commit),
            };
            sources(&revision.path)
                .into_iter()
                .map(move |(suffix, path)| row(format!("{name}{suffix}"), path, memory))
        })
        .collect();
    let mut text = String::new();
    if args.json {
        for row in &rows {
            text.push_str(&serde_json::to_string(row).unwrap_or_default());
            text.push('\n');
        }
    } else if rows.is_empty() {
        text = format!(
            "no models in {}; `inflight pull org/name` fetches one, and so does `inflight up --model org/name`\n",
            cache.directory().display()
        );
    } else {
        text = table(&rows);
    }
    let written = std::io::stdout().lock().write_all(text.as_bytes());
    written.map_err(|error| CommandError::chain("cannot write", &error))
}

/// Returns the models of a snapshot: its GGUF files, of several the first, or the directory.
fn sources(snapshot: &Path) -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(snapshot).into_iter().flatten().flatten();
    let mut ggufs: Vec<(String, PathBuf)> = entries
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
        .filter(|(name, _)| name.ends_with(".gguf") && part_names(name).first() == Some(name))
        .map(|(name, path)| (format!(":{name}"), path))
        .collect();
    ggufs.sort();
    if ggufs.is_empty() { vec![(String::new(), snapshot.to_owned())] } else { ggufs }
}

fn row(model: String, path: PathBuf, memory: u64) -> Row {
    let opened = ModelDir::open(&ModelSource::Directory(path.clone()));
    let bytes = weights(&path);
    let architecture =
        opened.as_ref().map(|model| model.architecture().to_owned()).map_err(ToString::to_string);
    let fits =
        if architecture.is_ok() { fit(bytes, memory, path.is_file()) } else { "not supported".to_owned() };
    Row { model, architecture, bytes, fits, path }
}

/// Returns the bytes of a model's weights.
fn weights(path: &Path) -> u64 {
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    if path.is_file() {
        let name = path.file_name().map_or("".into(), |name| name.to_string_lossy());
        return part_names(&name).iter().map(|part| size(&path.with_file_name(part))).sum();
    }
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    entries
        .filter(|path| path.extension().is_some_and(|kind| kind == "safetensors"))
        .map(|path| size(&path))
        .sum()
}

/// Says whether weights fit into memory on CPUs, and with which option.
fn fit(bytes: u64, memory: u64, is_quantized: bool) -> String {
    let needed = |divisor: u64| bytes / divisor + BESIDE;
    let ways = [(1, "yes"), (2, "with --quantize int8"), (3, "with --quantize int4")];
    let ways = if is_quantized { &ways[..1] } else { &ways[..] };
    let found = ways.iter().find(|(divisor, _)| needed(*divisor) <= memory);
    found.map_or_else(
        || format!("no, it needs {} and there are {}", gigabytes(needed(1)), gigabytes(memory)),
        |(_, way)| (*way).to_owned(),
    )
}

/// Writes a number of bytes for people.
pub fn gigabytes(bytes: u64) -> String {
    let (unit, name) = if bytes >= 1_000_000_000 { (1e9, "GB") } else { (1e6, "MB") };
    format!("{:.1} {name}", bytes as f64 / unit)
}

fn table(rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.model.len()).max().unwrap_or(0).max(5);
    let mut text =
        format!("{:width$}  {:>9}  {:24}  fits this machine's memory\n", "model", "size", "architecture");
    for Row { model, architecture, bytes, fits, .. } in rows {
        let architecture = architecture.as_deref().unwrap_or("-");
        text.push_str(&format!("{model:width$}  {:>9}  {architecture:24}  {fits}\n", gigabytes(*bytes)));
    }
    for Row { model, architecture, .. } in rows {
        if let Err(reason) = architecture {
            text.push_str(&format!("{model}: {reason}\n"));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_names_what_would() {
        let gb = 1_000_000_000;
        assert_eq!(fit(2 * gb, 8 * gb, false), "yes");
        assert_eq!(fit(10 * gb, 8 * gb, false), "with --quantize int8");
        assert_eq!(fit(18 * gb, 8 * gb, false), "with --quantize int4");
        assert_eq!(fit(10 * gb, 8 * gb, true), "no, it needs 11.1 GB and there are 8.0 GB");
    }
}
