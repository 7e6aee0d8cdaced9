//! Rules about the text of the sources: where protobuf may appear, how long files and functions may be, what files open with,
//! that `select!` polls in order, and which words comments avoid.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// Folders with production code, relative to the repository.
const SOURCES: [&str; 31] = [
    "bench/src",
    "bench/traces/src",
    "cli/src",
    "client/src",
    "grammar/src",
    "hub/src",
    "kernels/src",
    "proto/contract/src",
    "proto/src",
    "router/core/src",
    "router/output-parser/src",
    "router/src",
    "simulator/src",
    "tests/loom/src",
    "tests/support/cuda/src",
    "tests/support/fixtures/src",
    "tests/support/fuzz/src",
    "tests/support/gpu/src",
    "tests/support/harness/src",
    "tests/support/hub/src",
    "tests/support/kernels/src",
    "tests/support/schemas/src",
    "tests/support/scripted/src",
    "net/src",
    "worker/core/src",
    "worker/models/src",
    "worker/runtime/cpu/src",
    "worker/runtime/cuda/src",
    "worker/runtime/sim/src",
    "worker/runtime/src",
    "worker/src",
];

/// Longest file of production code, in lines.
const LINES_MAX: usize = 600;

/// Longest function of production code, in lines.
const FUNCTION_LINES_MAX: usize = 100;

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
        "router/src/cluster/bundle.rs",
        "router/src/cluster/observer.rs",
        "router/src/cluster/wire.rs",
        "router/src/cluster/wire/",
        "router/src/cluster/worker_calls.rs",
        "router/src/cluster/worker_session.rs",
        "router/src/protocols/grpc/",
        "router/src/protocols/kserve/",
        "router/src/serve.rs",
        "worker/src/bundle.rs",
        "worker/src/session/",
        "worker/src/worker.rs",
        "cli/src/",
        "bench/src/grpc.rs",
        "client/src/",
        "tests/support/harness/src/",
        "tests/support/scripted/src/",
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

/// Characters of Rust code, with those of comments, strings and character literals replaced by spaces.
fn code_of(text: &str) -> Vec<char> {
    let source: Vec<char> = text.chars().collect();
    let mut code = source.clone();
    let starts =
        |at: usize, with: &str| with.chars().enumerate().all(|(i, c)| source.get(at + i) == Some(&c));
    let mut at = 0;
    while at < source.len() {
        let end = if starts(at, "//") {
            (at..source.len()).find(|i| source[*i] == '\n')
        } else if starts(at, "/*") {
            let mut depth = 0;
            (at..source.len()).find(|i| {
                depth += i32::from(starts(*i, "/*")) - i32::from(starts(*i, "*/"));
                depth == 0
            })
        } else if source[at] == 'r'
            && !(at > 0 && (source[at - 1].is_alphanumeric() || source[at - 1] == '_'))
        {
            let hashes: String = source[at + 1..].iter().take_while(|c| **c == '#').collect();
            match source.get(at + 1 + hashes.len()) {
                Some('"') => {
                    let closing = format!("\"{hashes}");
                    let body = at + 2 + hashes.len();
                    (body..source.len()).find(|i| starts(*i, &closing)).map(|i| i + closing.len())
                }
                _ => Some(at),
            }
        } else if source[at] == '"' {
            let mut escaped = false;
            let closes = |i: &usize| {
                let closes = source[*i] == '"' && !escaped;
                escaped = source[*i] == '\\' && !escaped;
                closes
            };
            (at + 1..source.len()).find(closes).map(|i| i + 1)
        } else if source[at] == '\'' && source.get(at + 1) == Some(&'\\') {
            (at + 3..source.len()).find(|i| source[*i] == '\'').map(|i| i + 1)
        } else if source[at] == '\'' && source.get(at + 2) == Some(&'\'') {
            Some(at + 3)
        } else {
            Some(at)
        };
        let end = end.unwrap_or(source.len());
        for character in code[at..end].iter_mut().filter(|character| **character != '\n') {
            *character = ' ';
        }
        at = end.max(at + 1);
    }
    code
}

/// Functions with a body: name, first line, number of lines.
fn functions(text: &str) -> Vec<(String, usize, usize)> {
    let code = code_of(text);
    let mut found = Vec::new();
    // Open braces with the function whose body they begin, and the function whose signature is being read, with the depth of
    // brackets before it: a `;` of an array type does not end the signature.
    let mut braces: Vec<Option<(String, usize)>> = Vec::new();
    let mut signature: Option<(String, usize, i32)> = None;
    let (mut line, mut brackets, mut word, mut after_fn) = (1, 0, String::new(), false);
    for character in code {
        if character.is_alphanumeric() || character == '_' {
            word.push(character);
            continue;
        }
        let word = std::mem::take(&mut word);
        if !word.is_empty() {
            if after_fn {
                signature = Some((word.clone(), line, brackets));
            }
            after_fn = word == "fn";
        }
        match character {
            '(' | '[' => {
                brackets += 1;
                after_fn = false; // a type: `fn(u32)`
            }
            ')' | ']' => brackets -= 1,
            ';' if signature.as_ref().is_some_and(|(_, _, depth)| *depth == brackets) => signature = None,
            '{' => {
                let begins = signature.take_if(|(_, _, depth)| *depth == brackets);
                braces.push(begins.map(|(name, first, _)| (name, first)));
            }
            '}' => {
                if let Some((name, first)) = braces.pop().flatten() {
                    found.push((name, first, line - first + 1));
                }
            }
            '\n' => line += 1,
            _ => {}
        }
    }
    found
}

#[test]
fn select_polls_its_branches_in_order_where_the_simulation_runs() -> Result<()> {
    let mut wrong = Vec::new();
    let mut count = 0;
    for folder in ["net/src", "router/src", "worker/src"] {
        for (name, text) in files(folder)? {
            for (at, _) in text.match_indices("select! {") {
                count += 1;
                let line = text[..at].lines().count();
                // Without `biased`, tokio begins at a random branch, and a seed of the simulation does not repeat its run.
                if text[at..].lines().nth(1).is_none_or(|first| first.trim() != "biased;") {
                    wrong.push(format!("{name}:{line}"));
                }
            }
        }
    }
    ensure!(count > 10, "only {count} were found");
    ensure!(wrong.is_empty(), "select! without `biased;`: {}", wrong.join(", "));
    Ok(())
}

#[test]
fn functions_have_at_most_100_lines() -> Result<()> {
    let mut wrong = Vec::new();
    let mut count = 0;
    for (file, text) in sources()? {
        for (name, first, lines) in functions(&text) {
            count += 1;
            if lines > FUNCTION_LINES_MAX {
                wrong.push(format!(
                    "{file}:{first}: `{name}` has {lines} lines, more than {FUNCTION_LINES_MAX}"
                ));
            }
        }
    }
    ensure!(count > 1000, "only {count} functions were found");
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

#[test]
fn the_scanner_of_functions_reads_past_literals_and_comments() {
    let text = r##"
        impl Trait for A<'_> {
            fn one(&self, f: fn(u8) -> [u8; 2]) -> [char; 2] {
                // } fn not() {
                let text = "}\" fn no() {"; /* } /* } */ } */
                let _ = (['}', '\'', '\\'], r#"}"{"#, b'{');
                fn inner() {}
                ['{'; 2]
            }
            fn declared(x: [u8; 3]);
        }
        unsafe fn two<'a>() where A: Fn(&'a str) {
        }
    "##;
    let found = functions(text);
    let expected = [("inner", 7, 1), ("one", 3, 7), ("two", 12, 2)];
    assert_eq!(found, expected.map(|(name, first, lines)| (name.to_owned(), first, lines)));
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
