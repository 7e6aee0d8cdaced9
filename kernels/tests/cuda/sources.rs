use std::path::Path;

use inflight_kernels::cuda::{IMAGES, KERNELS};
use sha2::{Digest, Sha256};

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/cuda"))
}

/// Returns the digest of all sources from which PTX is compiled.
fn digest() -> String {
    let is_source = |name: &str| name.ends_with(".cu") || name.ends_with(".cuh") || name == "params.h";
    let mut names: Vec<String> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| is_source(name))
        .collect();
    names.sort();
    let mut hash = Sha256::new();
    for name in names {
        hash.update(std::fs::read(folder().join(name)).unwrap());
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn the_committed_ptx_matches_the_sources() {
    let stored = std::fs::read_to_string(folder().join("ptx/SOURCES.sha256")).unwrap();
    assert_eq!(
        stored.trim(),
        digest(),
        "kernels/cuda has changed: run tests/gpu/compile --write and commit its PTX"
    );
}

#[test]
fn every_kernel_is_in_the_committed_ptx() {
    for (prefix, family) in KERNELS {
        let ptx = std::fs::read_to_string(folder().join(format!("ptx/{family}.ptx"))).unwrap();
        assert!(ptx.contains(&format!(".entry {prefix}")), "{family}.ptx has no {prefix}");
        assert!(IMAGES.iter().any(|image| image.name == *family && !image.bytes.is_empty()));
    }
}
