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
fn the_archive_has_machine_code_for_hopper_and_ptx_with_dependent_launches_and_fp8_conversions() {
    let images = Images::unpack().unwrap();
    for image in images.of(Target::Sm90a).unwrap().iter().chain(&images.of(Target::Sm80).unwrap()) {
        assert_eq!(image.bytes()[..4], *b"\x7fELF", "{}", image.family);
    }
    // The architecture is in bits 8 to 15 of the ELF header's flags (offset 48), `a` among the bits above.
    let flags = |target| {
        let images = images.of(target).unwrap();
        let flags = |image: &inflight_kernels::cuda::Image| image.bytes()[48..52].try_into().map(u32::from_le_bytes);
        images.iter().map(|image| flags(image).unwrap() >> 8 & 0xff).collect::<BTreeSet<u32>>()
    };
    assert_eq!((flags(Target::Sm90a), flags(Target::Sm80)), (BTreeSet::from([90]), BTreeSet::from([80])));
    for image in images.of(Target::Ptx90).unwrap() {
        let text = String::from_utf8_lossy(image.bytes());
        assert!(text.contains(".target sm_90") && text.contains("griddepcontrol.wait"), "{}", image.family);
        if ["attention", "qkv"].contains(&image.family) {
            assert!(text.contains(".e4m3x2"), "{} converts FP8 in software", image.family);
        }
    }
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
