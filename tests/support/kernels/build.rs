//! Compiles the CUDA kernels and the harness as plain C++, with a fiber per CUDA thread.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

const FAMILIES: [&str; 11] = [
    "attention",
    "copy",
    "delta",
    "embedding",
    "gemm",
    "norm",
    "output_gate",
    "qkv",
    "sampling",
    "skinny",
    "swiglu",
];

fn main() {
    println!("cargo::rustc-check-cfg=cfg(harness, harness_checked)");
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let kernels = package.join("../../../kernels/cuda");
    for watched in [kernels.as_path(), Path::new("harness"), Path::new("build.rs")] {
        println!("cargo::rerun-if-changed={}", watched.display());
    }
    println!("cargo::rerun-if-env-changed=CXX");
    let harness = ["harness", "checks"].map(|file| PathBuf::from(format!("harness/{file}.cpp")));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let sources =
        FAMILIES.iter().map(|family| format!("{family}.cu")).chain(["harness/faulty.cu".to_owned()]);
    let units: Vec<PathBuf> = sources
        .map(|source| {
            let file = out.join(source.replace(['/', '.'], "_")).with_extension("cpp");
            fs::write(&file, format!("#include \"{source}\"\n")).expect("OUT_DIR can be written");
            file
        })
        .collect();
    let builder = || {
        let mut build = cc::Build::new();
        // The kernels include `harness/harness.h`.
        build.includes([package, kernels.as_path()]);
        build.cpp(true).std("c++17").opt_level(2).debug(false).warnings(true).extra_warnings(true);
        // No implicit fused multiply-add: kernels call it explicitly where they want it.
        build.flag("-ffp-contract=off").flag("-Wno-unknown-pragmas");
        // Kernels register themselves in a table, so no symbol refers to their objects.
        build.link_lib_modifier("+whole-archive");
        build
    };
    // Instrumented loads and stores call into the harness; the sanitizer's runtime is not linked. Without
    // instrumentation the kernels run with fewer checks.
    const INSTRUMENTED: &str = "-fsanitize=thread";
    let linux = env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux");
    let checked = linux && builder().is_flag_supported(INSTRUMENTED).unwrap_or(false);
    let (mut harness_build, mut kernels_build) = (builder(), builder());
    harness_build.files(&harness).cpp_link_stdlib(None);
    kernels_build.files(&units);
    if checked {
        harness_build.define("HARNESS_CHECKED", None);
        kernels_build.define("HARNESS_CHECKED", None).flag(INSTRUMENTED);
    }
    let built = harness_build
        .try_compile("inflight_harness")
        .and_then(|()| kernels_build.try_compile("inflight_harness_kernels"));
    match built {
        Ok(()) => {
            println!("cargo::rustc-cfg=harness");
            if checked {
                println!("cargo::rustc-cfg=harness_checked");
            }
        }
        Err(error) => println!("cargo::warning=the CUDA kernels are not tested on this machine: {error}"),
    }
}
