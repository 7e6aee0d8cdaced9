//! Builds the CUDA kernels: for every architecture where nvcc is found (`INFLIGHT_NVCC`, `CUDA_HOME`,
//! `PATH`), else from the committed PTX; with feature `harness`, also as plain C++ over fibers.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

const FAMILIES: [&str; 9] =
    ["attention", "copy", "embedding", "gemm", "norm", "qkv", "sampling", "skinny", "swiglu"];
/// Default machine-code targets; `INFLIGHT_CUDA_ARCHITECTURES` overrides them. Others use PTX.
const ARCHITECTURES: [&str; 6] = ["80", "86", "89", "90a", "100a", "120"];
/// First nvcc release that supports all of them.
const NVCC_MIN: (u32, u32) = (12, 8);

fn main() {
    println!("cargo::rustc-check-cfg=cfg(harness, harness_checked)");
    for watched in ["cuda", "build.rs"] {
        println!("cargo::rerun-if-changed={watched}");
    }
    for variable in ["INFLIGHT_NVCC", "INFLIGHT_CUDA_ARCHITECTURES", "CUDA_HOME", "CXX"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_some() {
        embed_images();
    }
    #[cfg(feature = "harness")]
    build_harness();
}

fn embed_images() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let sources = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("cuda");
    let (form, files) = match nvcc() {
        Some(nvcc) => ("Fatbin", fatbins(&nvcc, &sources, &out)),
        None => ("Ptx", FAMILIES.map(|family| sources.join(format!("ptx/{family}.ptx"))).to_vec()),
    };
    // A static, because a constant would be embedded again in every crate that names it.
    let mut text = String::from("/// Images of all kernel families.\npub static IMAGES: &[Image] = &[\n");
    for (family, file) in FAMILIES.iter().zip(files) {
        text += &format!(
            "    Image {{ name: {family:?}, form: Form::{form}, bytes: &Aligned(*include_bytes!({:?})).0 }},\n",
            file.display().to_string()
        );
    }
    text += "];\n";
    fs::write(out.join("images.rs"), text).expect("OUT_DIR can be written");
}

/// Returns the path of nvcc if it is found and new enough.
fn nvcc() -> Option<PathBuf> {
    let found = env::var_os("INFLIGHT_NVCC").map(PathBuf::from).or_else(|| {
        let homes = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin"));
        let paths = env::var_os("PATH").map(|path| env::split_paths(&path).collect::<Vec<_>>());
        let mut folders = homes.into_iter().chain(paths.into_iter().flatten());
        folders.find_map(|folder| Some(folder.join("nvcc")).filter(|nvcc| nvcc.is_file()))
    })?;
    let output = Command::new(&found).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let release = text.split("release ").nth(1)?.split(',').next()?;
    let (major, minor) = release.split_once('.')?;
    let version = (major.trim().parse().ok()?, minor.trim().parse().ok()?);
    if version < NVCC_MIN {
        println!(
            "cargo::warning={} is release {release}, too old for every architecture; the committed PTX is used",
            found.display()
        );
        return None;
    }
    Some(found)
}

fn fatbins(nvcc: &Path, sources: &Path, out: &Path) -> Vec<PathBuf> {
    let targets: Vec<PathBuf> = FAMILIES.iter().map(|family| out.join(format!("{family}.fatbin"))).collect();
    let architectures = env::var("INFLIGHT_CUDA_ARCHITECTURES").unwrap_or_else(|_| ARCHITECTURES.join(" "));
    let architectures = architectures.as_str();
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for (family, target) in FAMILIES.iter().zip(&targets) {
            let failures = &failures;
            scope.spawn(move || {
                let mut command = Command::new(nvcc);
                command.args(["-std=c++17", "-O3", "--expt-relaxed-constexpr", "-fatbin", "-o"]).arg(target);
                for architecture in architectures.split_whitespace() {
                    command.arg(format!("-gencode=arch=compute_{architecture},code=sm_{architecture}"));
                }
                command.arg("-gencode=arch=compute_80,code=compute_80");
                command.arg(sources.join(format!("{family}.cu")));
                let failure = match command.output() {
                    Ok(output) if output.status.success() => return,
                    Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
                    Err(error) => error.to_string(),
                };
                if let Ok(mut failures) = failures.lock() {
                    failures.push(format!("{family}.cu: {failure}"));
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_default();
    assert!(failures.is_empty(), "nvcc failed:\n{}", failures.join("\n"));
    targets
}

/// Compiles the kernels and the harness as C++; without a working compiler, only warns.
#[cfg(feature = "harness")]
fn build_harness() {
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
