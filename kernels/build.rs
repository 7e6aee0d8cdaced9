//! Builds the CUDA kernels as plain C++ over fibers, for tests without a GPU (feature `harness`). What GPUs run
//! is in the archive `cuda/images.zst`, which `tests/gpu/compile --write` renews.

fn main() {
    println!("cargo::rustc-check-cfg=cfg(harness, harness_checked)");
    for watched in ["cuda", "build.rs"] {
        println!("cargo::rerun-if-changed={watched}");
    }
    println!("cargo::rerun-if-env-changed=CXX");
    #[cfg(feature = "harness")]
    harness::build();
}

#[cfg(feature = "harness")]
mod harness {
    use std::env;
    use std::fs;
    use std::path::PathBuf;

    const FAMILIES: [&str; 9] =
        ["attention", "copy", "embedding", "gemm", "norm", "qkv", "sampling", "skinny", "swiglu"];

    /// Compiles the kernels and the harness as C++; without a working compiler, only warns.
    pub fn build() {
        let runtime = ["harness", "checks"].map(|file| PathBuf::from(format!("cuda/harness/{file}.cpp")));
        let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
        let sources = FAMILIES.iter().map(|family| format!("cuda/{family}.cu"));
        let sources = sources.chain(["cuda/harness/faulty.cu".to_owned()]);
        let kernels: Vec<PathBuf> = sources
            .map(|source| {
                let text = format!("#include \"{}/{source}\"\n", env!("CARGO_MANIFEST_DIR"));
                let file = out.join(source.replace(['/', '.'], "_")).with_extension("cpp");
                fs::write(&file, text).expect("OUT_DIR can be written");
                file
            })
            .collect();
        let builder = || {
            let mut build = cc::Build::new();
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
        let (mut runtime_build, mut kernels_build) = (builder(), builder());
        runtime_build.files(&runtime).cpp_link_stdlib(None);
        kernels_build.files(&kernels);
        if checked {
            runtime_build.define("HARNESS_CHECKED", None);
            kernels_build.define("HARNESS_CHECKED", None).flag(INSTRUMENTED);
        }
        let built = runtime_build
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
}
