//! One program: every command compiles every crate with the same features, so what is tested is what is shipped, and the README's two
//! commands share their builds of all dependencies.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Sets of features by package. A package that build scripts use, too, has up to two sets.
type Features = BTreeMap<String, BTreeSet<String>>;

/// Arguments of `cargo tree` that select what the program consists of: `cargo run`, and the build of an artefact.
const PROGRAM: [&str; 3] = ["--package=inflight", "--edges", "normal,build"];
/// … what `cargo test --workspace` compiles, and clippy over all targets.
const WORKSPACE: [&str; 1] = ["--workspace"];

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Resolves features as a build with this selection of packages does.
fn features(selection: &[&str]) -> Result<Features> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["tree", "--locked", "--offline", "--prefix=none", "--no-dedupe", "--format={p}|{f}"])
        .args(selection)
        .current_dir(root())
        .output()
        .context("cargo tree")?;
    ensure!(output.status.success(), "cargo tree {selection:?}: {}", String::from_utf8_lossy(&output.stderr));
    let mut found = Features::new();
    for line in String::from_utf8(output.stdout)?.lines() {
        let Some((package, features)) = line.split_once('|') else { continue };
        // Name and version, without the folder and the kind of a crate.
        let name = package.split_whitespace().take(2).collect::<Vec<_>>().join(" ");
        found.entry(name).or_default().insert(features.trim_end_matches(" (*)").to_owned());
    }
    ensure!(!found.is_empty(), "cargo tree {selection:?} prints nothing");
    Ok(found)
}

fn is_own(package: &str) -> bool {
    package == "inflight" || package.starts_with("inflight ") || package.starts_with("inflight-")
}

/// Returns the packages of `part` that `whole` does not contain with the same features.
fn differing<'a>(part: &'a Features, whole: &Features) -> Vec<(&'a String, BTreeSet<String>)> {
    let missing = |(name, sets): (&'a String, &BTreeSet<String>)| {
        let other = whole.get(name).cloned().unwrap_or_default();
        let left: BTreeSet<String> = sets.difference(&other).cloned().collect();
        (!left.is_empty()).then_some((name, left))
    };
    part.iter().filter_map(missing).collect()
}

#[test]
fn own_crates_have_the_same_features_under_every_command() -> Result<()> {
    let workspace = features(&WORKSPACE)?;
    let own = workspace.keys().filter(|package| is_own(package)).count();
    ensure!(own > 20, "cargo tree lists {own} crates of the workspace");
    let crates =
        ["inflight-router", "inflight-worker", "inflight-kernels"].map(|name| format!("--package={name}"));
    for selection in [&PROGRAM[..], &[&crates[0]], &[&crates[1]], &[&crates[2]]] {
        let mut selected = features(selection)?;
        selected.retain(|package, _| is_own(package));
        ensure!(!selected.is_empty(), "{selection:?} selects no crate of the workspace");
        let wrong = differing(&selected, &workspace);
        ensure!(wrong.is_empty(), "{selection:?} has other features than --workspace: {wrong:?}");
    }
    Ok(())
}

/// Returns what cargo would compile, each unit by what decides its identity: package, target, profile, features, and those of all that it
/// depends on. Values are names for messages.
fn units(command: &[&str]) -> Result<BTreeMap<u64, String>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(command)
        .args(["--locked", "--offline", "--unit-graph", "-Zunstable-options"])
        .env("RUSTC_BOOTSTRAP", "1") // the graph is an unstable output
        .current_dir(root())
        .output()
        .context("cargo --unit-graph")?;
    ensure!(output.status.success(), "cargo {command:?}: {}", String::from_utf8_lossy(&output.stderr));
    let graph: Value = serde_json::from_slice(&output.stdout)?;
    let units = graph["units"].as_array().context("a graph has units")?;
    let mut identities = vec![None; units.len()];
    for index in 0..units.len() {
        identity(units, index, &mut identities);
    }
    let name = |unit: &Value| format!("{} {} {}", unit["pkg_id"], unit["target"]["name"], unit["features"]);
    Ok(identities.into_iter().flatten().zip(units.iter().map(name)).collect())
}

/// Computes the identity of a unit after those of its dependencies.
fn identity(units: &[Value], index: usize, identities: &mut [Option<u64>]) -> u64 {
    if let Some(known) = identities[index] {
        return known;
    }
    let unit = &units[index];
    let dependencies = unit["dependencies"].as_array().map_or(&[][..], Vec::as_slice);
    let mut dependencies: Vec<u64> = dependencies
        .iter()
        .filter_map(|dependency| dependency["index"].as_u64())
        .map(|index| identity(units, index as usize, identities))
        .collect();
    dependencies.sort_unstable();
    let mut hasher = DefaultHasher::new();
    for part in ["pkg_id", "target", "platform", "mode", "features"] {
        unit[part].to_string().hash(&mut hasher);
    }
    // Its name is that of the command: `dev` or `test`.
    let settings = unit["profile"].as_object().into_iter().flatten().filter(|(key, _)| *key != "name");
    settings.map(|(key, value)| format!("{key}={value}")).for_each(|setting| setting.hash(&mut hasher));
    dependencies.hash(&mut hasher);
    let identity = hasher.finish();
    identities[index] = Some(identity);
    identity
}

#[test]
fn the_program_and_its_tests_share_every_compilation() -> Result<()> {
    let program = units(&["build"])?;
    let tests = units(&["test", "--workspace", "--no-run"])?;
    ensure!(program.len() > 300, "the program has {} units", program.len());
    let wrong: Vec<&String> =
        program.iter().filter(|(unit, _)| !tests.contains_key(unit)).map(|(_, name)| name).collect();
    ensure!(
        wrong.is_empty(),
        "`cargo test --workspace` compiles {} units of the program a second time. Features that only tests turn on, of these or of what \
         they depend on, belong into [workspace.dependencies], or into cli/Cargo.toml if no crate names the dependency: {wrong:#?}",
        wrong.len()
    );
    Ok(())
}

#[test]
fn no_script_selects_features() -> Result<()> {
    let scripts = [
        ".ci/run",
        ".ci/nightly",
        "justfile",
        "deploy/docker/Dockerfile",
        "deploy/release/build",
        "tests/gpu/bundle",
    ];
    for script in scripts {
        let text = std::fs::read_to_string(root().join(script)).with_context(|| script.to_owned())?;
        let lines = text.lines().filter(|line| line.contains("cargo") && !line.contains("cargo install"));
        let wrong: Vec<&str> = lines
            .filter(|line| line.contains("--features") || line.contains("--no-default-features"))
            .collect();
        ensure!(wrong.is_empty(), "{script} builds another program than the README: {wrong:?}");
    }
    Ok(())
}
