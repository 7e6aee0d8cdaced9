//! Rules about the text of the sources: where protobuf may appear, how long files may be, what they open with, and which files
//! may import each other.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Folders with production code, relative to the repository.
const SOURCES: [&str; 10] = [
    "cli/src",
    "kernels/src",
    "proto/contract/src",
    "proto/src",
    "router/core/src",
    "router/src",
    "simulator/src",
    "net/src",
    "worker/core/src",
    "worker/src",
];

/// Longest file of production code, in lines.
const LINES_MAX: usize = 600;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every `.rs` file below a folder, with its path relative to the repository.
fn files(folder: &str) -> Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![repository().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(repository())?.to_string_lossy().into_owned();
                found.insert(name, fs::read_to_string(&path)?);
            }
        }
    }
    ensure!(!found.is_empty(), "{folder} has no sources");
    Ok(found)
}

fn sources() -> Result<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for folder in SOURCES {
        all.extend(files(folder)?);
    }
    Ok(all)
}

#[test]
fn protobuf_types_appear_only_in_the_apis_and_the_session_modules() -> Result<()> {
    // `bundle.rs` takes the digest of a bundle from the crate, and no message.
    let allowed = [
        "proto/src/",
        "router/src/api/grpc.rs",
        "router/src/api/kserve.rs",
        "router/src/api/kserve/",
        "router/src/api/serve.rs",
        "router/src/cluster/bundle.rs",
        "router/src/cluster/wire.rs",
        "router/src/cluster/worker_session.rs",
        "worker/src/bundle.rs",
        "worker/src/session/",
        "worker/src/worker.rs",
        "cli/src/",
    ];
    let wrong: Vec<String> = sources()?
        .into_iter()
        .filter(|(name, text)| {
            text.contains("inflight_proto") && !allowed.iter().any(|prefix| name.starts_with(prefix))
        })
        .map(|(name, _)| name)
        .collect();
    ensure!(wrong.is_empty(), "protobuf types outside of the APIs and the session modules: {wrong:?}");
    Ok(())
}

#[test]
fn source_files_open_with_a_module_comment_and_have_at_most_600_lines() -> Result<()> {
    let mut wrong = Vec::new();
    for (name, text) in sources()? {
        if !text.starts_with("//!") {
            wrong.push(format!("{name} does not open with `//!`"));
        }
        let lines = text.lines().count();
        if lines > LINES_MAX {
            wrong.push(format!("{name} has {lines} lines, more than {LINES_MAX}"));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Module path of a file within its crate: `router/src/api/auth.rs` is `api::auth`.
fn module(folder: &str, file: &str) -> String {
    let path = file.trim_start_matches(folder).trim_start_matches('/').trim_end_matches(".rs");
    path.trim_end_matches("/mod").trim_end_matches("mod").replace('/', "::")
}

/// Modules that a file imports by `crate::` paths; the longest prefix that is a file counts. Imports by `super::`, between a module
/// and its parts, are not followed.
fn imports(text: &str, modules: &BTreeSet<String>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    for path in code.split("crate::").skip(1) {
        let mut longest = None;
        let mut prefix = String::new();
        for segment in path.split("::") {
            let name: String = segment.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if name.is_empty() {
                break;
            }
            prefix = if prefix.is_empty() { name.clone() } else { format!("{prefix}::{name}") };
            if modules.contains(&prefix) {
                longest = Some(prefix.clone());
            }
            if name.len() < segment.len() {
                break;
            }
        }
        found.extend(longest);
    }
    found
}

#[test]
fn import_cycles_in_the_router_have_at_most_two_files() -> Result<()> {
    let mut cycles = Vec::new();
    for folder in ["router/src", "router/core/src"] {
        let files = files(folder)?;
        let modules: BTreeSet<String> = files.keys().map(|file| module(folder, file)).collect();
        let edges: BTreeMap<String, BTreeSet<String>> =
            files.iter().map(|(file, text)| (module(folder, file), imports(text, &modules))).collect();
        // Files that reach each other: a cycle has as many as reach it and are reached by it.
        let reach: BTreeMap<&String, BTreeSet<&String>> = edges
            .keys()
            .map(|start| {
                let mut seen: BTreeSet<&String> = BTreeSet::new();
                let mut next: Vec<&String> = edges[start].iter().collect();
                while let Some(module) = next.pop() {
                    if seen.insert(module) {
                        next.extend(edges.get(module).into_iter().flatten());
                    }
                }
                (start, seen)
            })
            .collect();
        for (start, reached) in &reach {
            let circle: Vec<&&String> = reached
                .iter()
                .filter(|other| reach.get(**other).is_some_and(|back| back.contains(start)))
                .collect();
            if circle.len() > 2 {
                cycles.push(format!("{folder}: {circle:?}"));
            }
        }
    }
    cycles.sort();
    cycles.dedup();
    ensure!(cycles.is_empty(), "import cycles: {}", cycles.join("\n"));
    Ok(())
}

/// Private words for things that have a name in the field.
const PRIVATE_WORDS: [(&str, &str); 14] = [
    ("gives way", "is preempted"),
    ("give way", "preempt"),
    ("gave way", "was preempted"),
    ("needy", "beneficiary"),
    ("somebody", "the client, the worker, …"),
    ("nobody", "no worker, no client, …"),
    ("whoever", "the caller, the client, …"),
    ("goes on", "continues"),
    ("gets on", "makes progress"),
    ("got on", "made progress"),
    ("nonsense", "protocol violation"),
    ("hearsay", "indirect counters"),
    ("abreast", "interleaved"),
    ("tries on", "retries"),
];

/// Whether `text` has `words` with no letter before or after.
fn contains_words(text: &str, words: &str) -> bool {
    text.match_indices(words).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + words.len()..].chars().next();
        !before.is_some_and(char::is_alphanumeric) && !after.is_some_and(char::is_alphanumeric)
    })
}

#[test]
fn comments_use_the_terms_of_the_field() -> Result<()> {
    let mut wrong = Vec::new();
    for (name, text) in sources()? {
        for (number, line) in text.lines().enumerate() {
            let Some((_, comment)) = line.split_once("//") else { continue };
            let comment = comment.to_lowercase();
            for (word, term) in PRIVATE_WORDS {
                if contains_words(&comment, word) {
                    wrong.push(format!("{name}:{}: {word:?}; say: {term}", number + 1));
                }
            }
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}
