//! The documents name only options that exist, their links lead somewhere, and what the program names has its place in them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use clap::CommandFactory as _;

use crate::Cli;

/// Options of other programs that documents name by themselves, as `--option`: of Valgrind, Docker, `deploy/image/build` and
/// `deploy/release/build`.
const FOREIGN: &[&str] = &[
    "toggle-collect",
    "build-arg",
    "name",
    "target",
    "base",
    "packages",
    "variant",
    "gpu-image",
    "advisories",
    "without-advisories",
    "base-url",
];
/// Document whose tables have options of other engines in their first column.
const COMPARISON: &str = "coming-from.md";

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn documents() -> Vec<PathBuf> {
    let in_folder = |folder: &str| {
        let entries = fs::read_dir(root().join(folder)).unwrap();
        entries
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|end| end == "md"))
    };
    let mut paths: Vec<PathBuf> = in_folder("docs").chain(in_folder("docs/adr")).collect();
    paths.extend(
        ["README.md", "CONTRIBUTING.md", "deploy/helm/inflight/README.md"].map(|file| root().join(file)),
    );
    paths.sort();
    paths
}

/// Returns the names of all options of all commands, aliases included.
fn options() -> BTreeSet<String> {
    let mut cli = Cli::command();
    cli.build();
    let mut names = BTreeSet::new();
    let mut commands = vec![&cli];
    while let Some(command) = commands.pop() {
        commands.extend(command.get_subcommands());
        for argument in command.get_arguments() {
            names.extend(argument.get_long().map(str::to_owned));
            names.extend(argument.get_all_aliases().into_iter().flatten().map(str::to_owned));
        }
    }
    names
}

/// Returns the names of the `--options` in a text.
fn named(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices("--").filter_map(|(at, _)| {
        let begins = !text[..at].ends_with(|before: char| before.is_alphanumeric() || before == '-');
        let rest = &text[at + 2..];
        let end = rest.find(|c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'));
        let name = &rest[..end.unwrap_or(rest.len())];
        // `--tls-*` names several.
        let whole = !name.ends_with('-') && name.starts_with(|c: char| c.is_ascii_lowercase());
        (begins && whole).then_some(name)
    })
}

/// Returns the parts of a document that are commands or options of ours: lines of code blocks that start
/// `inflight`, and spans of code that start with an option or with `inflight`.
fn own_code(text: &str, comparison: bool) -> Vec<String> {
    let mut parts = Vec::new();
    let (mut in_block, mut continued) = (false, false);
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            (in_block, continued) = (!in_block, false);
            continue;
        }
        if in_block {
            let command = line.split(" #").next().unwrap_or_default();
            let program =
                ["inflight ", "./target/debug/inflight ", "./target/release/inflight ", "cargo run -- "];
            let ours = program.iter().find_map(|program| command.trim_start().strip_prefix(program));
            if continued || ours.is_some() {
                parts.push(ours.unwrap_or(command).to_owned());
                continued = command.trim_end().ends_with('\\');
            }
            continue;
        }
        // The first cell of a row of the comparison is theirs.
        let prose = match line.strip_prefix('|') {
            Some(row) if comparison => row.split_once('|').map_or("", |(_, rest)| rest),
            _ => line,
        };
        let spans = prose.split('`').skip(1).step_by(2);
        parts.extend(
            spans.filter(|span| span.starts_with("--") || span.starts_with("inflight ")).map(str::to_owned),
        );
    }
    parts
}

#[test]
fn the_documents_name_only_options_that_exist() {
    let known = options();
    assert!(known.contains("kv-cache-bytes") && known.contains("quantization"), "{known:?}");
    let mut checked = 0;
    let mut unknown = Vec::new();
    for path in documents() {
        let text = fs::read_to_string(&path).unwrap();
        let comparison = path.ends_with(COMPARISON);
        for part in own_code(&text, comparison) {
            for name in named(&part) {
                checked += 1;
                if !known.contains(name) && !FOREIGN.contains(&name) {
                    unknown.push(format!("{}: --{name} in {part:?}", path.display()));
                }
            }
        }
    }
    assert!(unknown.is_empty(), "options that do not exist:\n{}", unknown.join("\n"));
    assert!(checked > 200, "only {checked} options were found");
}

#[test]
fn only_the_first_column_of_the_comparison_may_name_foreign_options() {
    let text = "| vLLM `--max-num-seqs` | `--max-sequences`, as `--wrong` |\nand `--more`, `cargo test --release`\n\
                ```sh\nvllm serve --x\ninflight up --first \\\n  --second  # --third\nls --all\n```\n";
    let found = |comparison| -> Vec<String> {
        let parts = own_code(text, comparison);
        parts.iter().flat_map(|part| named(part)).map(str::to_owned).collect()
    };
    assert_eq!(found(true), ["max-sequences", "wrong", "more", "first", "second"]);
    assert_eq!(found(false), ["max-num-seqs", "max-sequences", "wrong", "more", "first", "second"]);
}

#[test]
fn the_comparison_lists_every_name_of_vllm_that_is_exported() {
    let text = fs::read_to_string(root().join("docs").join(COMPARISON)).unwrap();
    let source = include_str!("metrics_compat.rs");
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    let exported: BTreeSet<&str> =
        code.split('"').filter(|text| text.starts_with("vllm:") && !text.contains([' ', '{'])).collect();
    assert!(exported.len() > 15, "{exported:?}");
    for name in exported {
        assert!(text.contains(&format!("| `{name}`")) || text.contains(&format!(", `{name}`")), "{name}");
    }
}

/// Returns the anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut in_block = false;
    let headings = text.lines().filter(|line| {
        in_block ^= line.trim_start().starts_with("```");
        !in_block && line.starts_with('#')
    });
    let anchor = |heading: &str| {
        let title = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn links_between_documents_lead_to_a_file_and_a_heading() {
    let (mut checked, mut broken) = (0, Vec::new());
    for path in documents() {
        let text = fs::read_to_string(&path).unwrap();
        for (at, _) in text.match_indices("](") {
            let link = text[at + 2..].split([')', ' ', '\n']).next().unwrap_or_default();
            if link.starts_with("http") || link.is_empty() {
                continue;
            }
            checked += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { path.with_file_name(file) };
            let found = fs::metadata(&target).is_ok()
                && (anchor.is_empty()
                    || anchors(&fs::read_to_string(&target).unwrap_or_default()).contains(anchor));
            if !found {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "links that lead nowhere:\n{}", broken.join("\n"));
    assert!(checked > 100, "only {checked} links were found");
}

#[test]
fn every_finding_of_diagnose_is_explained() {
    let guide = fs::read_to_string(root().join("docs/troubleshooting.md")).unwrap();
    let labels = |source: &str, mark: &str| -> Vec<String> {
        let text = fs::read_to_string(root().join(source)).unwrap();
        let lines = text.lines().filter(|line| line.contains(mark));
        lines.filter_map(|line| Some(line.split('"').nth(1)?.to_owned())).collect()
    };
    let of_workers = labels("worker/core/src/diagnosis/bottleneck.rs", " => \"");
    let of_routers = labels("router/src/live/findings.rs", " bottleneck: \"");
    assert!(of_workers.len() > 10 && of_routers.len() > 1, "{of_workers:?}, {of_routers:?}");
    for label in of_workers.iter().chain(&of_routers) {
        assert!(guide.contains(&format!("\n| `{label}`")), "docs/troubleshooting.md has no row of {label}");
    }
}

#[test]
fn the_documents_name_only_metrics_that_exist() {
    // It is written from the inventory of the code.
    let inventory = fs::read_to_string(root().join("docs/metrics.md")).unwrap();
    let known: BTreeSet<&str> =
        inventory.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    assert!(known.len() > 100, "only {} metrics are documented", known.len());
    let (mut checked, mut unknown) = (0, Vec::new());
    // The rules of CONTRIBUTING.md have examples of bad names.
    for path in documents().into_iter().filter(|path| !path.ends_with("CONTRIBUTING.md")) {
        let text = fs::read_to_string(&path).unwrap();
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        let ours = ["inflight_router_", "inflight_worker_", "gen_ai_server_"];
        // `gen_ai_server_*` names several.
        let named = words
            .filter(|word| ours.iter().any(|prefix| word.starts_with(prefix) && word.len() > prefix.len()));
        for name in named {
            checked += 1;
            let series = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
            if !known.contains(name) && !series.is_some_and(|base| known.contains(base)) {
                unknown.push(format!("{}: {name}", path.display()));
            }
        }
    }
    assert!(unknown.is_empty(), "metrics that do not exist:\n{}", unknown.join("\n"));
    assert!(checked > 200, "only {checked} names were found");
}
