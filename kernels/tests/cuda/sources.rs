use std::collections::BTreeSet;
use std::path::Path;

use inflight_kernels::cuda::{Images, KERNELS, Target};
use sha2::{Digest, Sha256};

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/cuda"))
}

/// Returns the digest of all sources from which the archive is compiled.
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
fn the_committed_archive_matches_the_sources() {
    let images = Images::unpack().unwrap();
    assert_eq!(
        images.sources(),
        Some(digest().as_str()),
        "kernels/cuda has changed: run tests/gpu/compile --write and commit images.zst"
    );
    let bytes = std::fs::metadata(folder().join("images.zst")).unwrap().len();
    assert!(bytes <= 2 << 20, "images.zst has {bytes} bytes");
}

#[test]
fn every_gpu_finds_every_family_in_the_archive() {
    let images = Images::unpack().unwrap();
    let families: BTreeSet<&str> = KERNELS.iter().map(|(_, family)| *family).collect();
    for target in Target::ALL {
        let found: BTreeSet<&str> = images.of(target).unwrap().iter().map(|image| image.family).collect();
        assert_eq!(found, families, "{target:?}");
    }
    let target = |(major, minor)| Target::of(major, minor);
    let of = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)].map(target);
    let (ampere, later) = (Some(Target::Sm80), Some(Target::Ptx90));
    assert_eq!(of, [None, ampere, ampere, ampere, Some(Target::Sm90a), later, later]);
}
