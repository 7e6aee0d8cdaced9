//! Dependency rules between crates: dependencies point one way, and the pure crates stay pure.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Crates with clocks, I/O, protobuf or randomness, which pure crates must not depend on.
const IMPURE: [&str; 8] = ["tokio", "tonic", "prost", "rand", "hyper", "mio", "getrandom", "metrics"];

/// Returns the names of a workspace package and all its transitive dependencies.
fn dependencies(package: &str) -> Result<Vec<String>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "tree",
            "--locked",
            "--offline",
            "--edges=normal",
            "--prefix=none",
            "--format={p}",
            "--package",
            package,
        ])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .output()
        .context("cargo tree")?;
    ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout)?;
    let mut names: Vec<String> =
        text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect();
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

fn ensure_without(package: &str, unwanted: &[&str]) -> Result<()> {
    let names = dependencies(package)?;
    ensure!(names.iter().any(|name| name == package), "cargo tree does not know {package}: {names:?}");
    let found: Vec<&String> = names
        .iter()
        .filter(|name| unwanted.iter().any(|u| name == u || name.starts_with(&format!("{u}-"))))
        .collect();
    ensure!(found.is_empty(), "{package} depends on {found:?}");
    Ok(())
}

/// Checks that a package depends on no crates of the workspace but the allowed ones.
fn ensure_own_dependencies(package: &str, allowed: &[&str]) -> Result<()> {
    let names = dependencies(package)?;
    ensure!(names.iter().any(|name| name == package), "cargo tree does not know {package}: {names:?}");
    let is_allowed = |name: &str| name == package || allowed.contains(&name) || !name.starts_with("inflight");
    let found: Vec<&String> = names.iter().filter(|name| !is_allowed(name)).collect();
    ensure!(found.is_empty(), "{package} depends on {found:?}");
    Ok(())
}

#[test]
fn pure_crates_depend_on_no_async_runtime_protobuf_or_randomness() -> Result<()> {
    for package in
        ["inflight-contract", "inflight-worker-core", "inflight-router-core", "inflight-output-parser"]
    {
        ensure_without(package, &IMPURE)?;
    }
    Ok(())
}

#[test]
fn dependencies_point_one_way() -> Result<()> {
    ensure_without("inflight-router", &["inflight-worker", "inflight-kernels"])?;
    ensure_without("inflight-worker", &["inflight-router"])?;
    ensure_without("inflight-proto", &["inflight-worker", "inflight-router", "inflight-kernels"])?;
    ensure_without("inflight-net", &["inflight-worker", "inflight-router", "inflight-proto"])?;
    ensure_without("inflight-bench", &["inflight-worker", "inflight-router", "inflight-simulator", "clap"])?;
    ensure_own_dependencies("inflight-client", &["inflight-proto", "inflight-contract"])?;
    ensure_own_dependencies("inflight-grammar", &["inflight-contract"])?;
    ensure_without("inflight-grammar", &["tokio", "tonic", "prost", "hyper"])?;
    ensure_own_dependencies("inflight-sandbox", &[])?;
    ensure_own_dependencies("inflight-options", &[])?;
    let below = ["inflight-contract", "inflight-grammar", "inflight-sandbox"];
    ensure_own_dependencies("inflight-grammar-service", &below)?;
    ensure_without("inflight-traces", &IMPURE)?;
    ensure_without("inflight-kernels", &["inflight-worker", "inflight-router", "inflight-proto", "tokio"])
}

#[test]
fn models_and_runtimes_depend_on_no_worker_and_no_server() -> Result<()> {
    let below = [
        "inflight-contract",
        "inflight-kernels",
        "inflight-models",
        "inflight-options",
        "inflight-worker-core",
    ];
    ensure_own_dependencies("inflight-models", &["inflight-contract", "inflight-kernels"])?;
    ensure_own_dependencies("inflight-runtime", &below)?;
    let below = [&below[..], &["inflight-runtime"]].concat();
    for package in ["inflight-runtime-cpu", "inflight-runtime-cuda", "inflight-runtime-sim"] {
        ensure_own_dependencies(package, &below)?;
    }
    for package in ["inflight-models", "inflight-runtime", "inflight-runtime-cpu", "inflight-runtime-sim"] {
        ensure_without(package, &["tokio", "tonic", "prost", "hyper", "cudarc"])?;
    }
    ensure_without("inflight-runtime-cuda", &["tokio", "tonic", "prost", "hyper"])
}
