use std::collections::BTreeSet;
use std::path::Path;

use inflight_kernels::cuda::{IMAGES_VARIABLE, Images, KERNELS, Replacement, Target};
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
        // The file format of CUDA 12, which drivers from release 535 on load; that of CUDA 13 is version 8.
        assert_eq!(image.bytes()[7..9], [0x33, 7], "{}", image.family);
    }
    // The architecture is in the lowest byte of the ELF header's flags (offset 48).
    let flags = |target| {
        let images = images.of(target).unwrap();
        let flags =
            |image: &inflight_kernels::cuda::Image| image.bytes()[48..52].try_into().map(u32::from_le_bytes);
        images.iter().map(|image| flags(image).unwrap() & 0xff).collect::<BTreeSet<u32>>()
    };
    assert_eq!((flags(Target::Sm90a), flags(Target::Sm80)), (BTreeSet::from([90]), BTreeSet::from([80])));
    for image in images.of(Target::Ptx90).unwrap() {
        let text = String::from_utf8_lossy(image.bytes());
        assert!(
            text.contains(".version 8.7")
                && text.contains(".target sm_90")
                && text.contains("griddepcontrol.wait"),
            "{}",
            image.family
        );
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

/// Name and content of a file.
type File<'a> = (&'a str, &'a [u8]);

/// Writes `files` to a new folder and returns the families read from it, or the error.
fn replaced(files: &[File<'_>]) -> Result<Vec<&'static str>, String> {
    let folder = inflight_fixtures::TempDir::new("inflight-kernel-images").unwrap();
    for (name, bytes) in files {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    let found = Replacement::in_folder(folder.path()).map_err(|error| error.to_string())?;
    assert!(found.iter().all(|replacement| replacement.file.starts_with(folder.path())));
    let images = Images::unpack().unwrap().of_with(Target::Sm80, &found).unwrap();
    assert_eq!(images.len(), KERNELS.iter().map(|(_, family)| family).collect::<BTreeSet<_>>().len());
    Ok(images.iter().filter(|image| image.file().is_some()).map(|image| image.family).collect())
}

/// Smallest ELF file of a GPU: a header and one empty section.
fn machine_code() -> Vec<u8> {
    let mut bytes = vec![0u8; 64 + 64];
    bytes[..6].copy_from_slice(b"\x7fELF\x02\x01");
    bytes[18] = 190;
    bytes[40] = 64;
    bytes[58] = 64;
    bytes[60] = 1;
    bytes
}

#[test]
fn files_replace_embedded_images() {
    let (elf, ptx) = (machine_code(), b".version 9.0\n.target sm_90a\n.entry norm_bf16() { }\n");
    assert_eq!(replaced(&[]), Ok(vec![]));
    assert_eq!(replaced(&[("gemm.log", b"any"), ("norm.cu", b"any")]), Ok(vec![]));
    assert_eq!(replaced(&[("norm.ptx", ptx), ("gemm.cubin", &elf)]), Ok(vec!["gemm", "norm"]));
}

#[test]
fn files_that_are_no_images_are_named_in_errors() {
    let elf = machine_code();
    let ptx: &[u8] = b".version 9.0\n.target sm_90a\n.entry norm_bf16() { }\n";
    let beyond = {
        let mut elf = machine_code();
        elf[64 + 32] = 200;
        elf
    };
    let host = {
        let mut elf = machine_code();
        elf[18] = 62;
        elf
    };
    let cases: [(&[File<'_>], &str, &str); 11] = [
        (&[("norm.cubin", b"")], "norm.cubin", "empty"),
        (&[("norm.ptx", b"")], "norm.ptx", "empty"),
        (&[("norm.cubin", ptx)], "norm.cubin", "nvcc -cubin"),
        (&[("norm.cubin", &host)], "norm.cubin", "nvcc -cubin"),
        (&[("norm.cubin", &elf[..100])], "norm.cubin", "truncated"),
        (&[("norm.cubin", &beyond)], "norm.cubin", "truncated"),
        (&[("norm.ptx", &elf)], "norm.ptx", "nvcc -ptx"),
        (&[("norm.ptx", b"any text")], "norm.ptx", "nvcc -ptx"),
        (&[("norm.ptx", &ptx[..ptx.len() - 3])], "norm.ptx", "truncated"),
        (&[("norms.ptx", ptx)], "norms.ptx", "there are attention, copy"),
        (&[("norm.ptx", ptx), ("norm.cubin", &elf)], "norm.ptx", "remove one"),
    ];
    for (files, name, reason) in cases {
        let error = replaced(files).unwrap_err();
        assert!(error.contains(name) && error.contains(reason) && error.contains(IMAGES_VARIABLE), "{error}");
    }
    let error = Replacement::in_folder(Path::new("/nowhere")).map(|found| found.len()).unwrap_err();
    assert!(error.to_string().contains("/nowhere"), "{error}");
}
