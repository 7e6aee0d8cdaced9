//! Fast paths of the runtime on a GPU: which are in use, and why one is not.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use inflight_kernels::cuda::Target;

const OVERLAPPED_KERNELS: &str = "overlapped_kernels";
const REFUSED: PathOff = PathOff { why: "the driver refuses programmatic dependent launches", costs: true };

/// What decides which paths are in use.
#[derive(Debug, Clone, Copy)]
pub(super) struct PathConditions {
    /// Compute capability of the GPU.
    pub(super) compute: (i32, i32),
    /// Embedded code that it runs.
    pub(super) target: Target,
    pub(super) deterministic: bool,
    pub(super) cublaslt: bool,
    pub(super) autotune: bool,
    /// Whether a GEMM was timed, or its choice known from an earlier start.
    pub(super) tuned: bool,
    pub(super) overlap_wanted: bool,
    pub(super) overlap: bool,
    pub(super) graphs: bool,
    /// Whether a step was captured.
    pub(super) captured: bool,
    pub(super) fp8_kv: bool,
}

/// A fast path that is not in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathOff {
    /// The reason.
    pub why: &'static str,
    /// Whether the path is missing rather than turned off by an option: then its absence costs speed and is warned of.
    pub costs: bool,
}

/// A fast path by name; `Ok` if it is in use.
pub type GpuPath = (&'static str, Result<(), PathOff>);

impl PathConditions {
    /// Lists the paths.
    pub(super) fn paths(&self) -> [GpuPath; 6] {
        let off = |why, costs| Err(PathOff { why, costs });
        let hopper = self.compute == (9, 0);
        let machine_code = match self.target {
            Target::Ptx90 => {
                off("no machine code for this GPU is embedded; the driver compiles PTX at every start", true)
            }
            Target::Sm80 | Target::Sm90a => Ok(()),
        };
        let overlap = match (self.overlap, self.overlap_wanted) {
            (true, _) => Ok(()),
            (false, false) => off("turned off by an option", false),
            (false, true) if self.compute.0 < 9 => off("needs compute capability 9.0", false),
            (false, true) => Err(REFUSED),
        };
        let cublaslt = match (self.cublaslt, self.deterministic) {
            (true, _) => Ok(()),
            (false, true) => off("--deterministic uses the built-in GEMM kernels", false),
            (false, false) => off("libcublasLt.so was not found; install cuBLAS for CUDA 12 or 13", true),
        };
        let autotune = match (self.cublaslt && self.autotune, self.deterministic) {
            (true, _) if self.tuned => Ok(()),
            (true, _) => off("no GEMM was timed within the time for it", true),
            (false, true) => off("--deterministic uses the built-in GEMM kernels", false),
            (false, false) if self.autotune => off("there is no cuBLASLt to choose from", false),
            (false, false) => off("turned off by --no-autotune", false),
        };
        let graphs = match (self.graphs, self.captured) {
            (true, true) => Ok(()),
            (true, false) => off("no step was captured", true),
            (false, _) => off("turned off by an option", false),
        };
        let e4m3 = match (self.fp8_kv, hopper || self.target == Target::Ptx90) {
            (false, _) => off("the KV cache is in 16 bits", false),
            (true, true) => Ok(()),
            (true, false) => off("this GPU's code converts FP8 in software", true),
        };
        [
            ("machine_code", machine_code),
            (OVERLAPPED_KERNELS, overlap),
            ("cublaslt", cublaslt),
            ("autotuned_gemms", autotune),
            ("cuda_graphs", graphs),
            ("hardware_fp8", e4m3),
        ]
    }
}

/// Fast paths of a rank: as they were when its model was loaded, but for launch overlap, which the driver may refuse later.
#[derive(Debug, Clone)]
pub struct GpuPaths {
    at_load: [GpuPath; 6],
    overlap: Arc<AtomicBool>,
}

impl GpuPaths {
    /// Paths at load, and whether kernels overlap now.
    pub(super) fn new(at_load: [GpuPath; 6], overlap: Arc<AtomicBool>) -> Self {
        Self { at_load, overlap }
    }

    /// Lists the paths as they are now.
    pub fn list(&self) -> [GpuPath; 6] {
        let now = |(path, state): GpuPath| {
            let lost = path == OVERLAPPED_KERNELS && state.is_ok() && !self.overlap.load(Relaxed);
            (path, if lost { Err(REFUSED) } else { state })
        };
        self.at_load.map(now)
    }
}

/// Exports that kernels overlap no more.
pub(super) fn overlap_lost() {
    metrics::gauge!(inflight_runtime::GPU_PATH, "path" => OVERLAPPED_KERNELS).set(0.0);
}

/// Logs the paths in one line, each that costs speed in a warning of its own, and exports them.
pub(super) fn report(rank: usize, paths: &[GpuPath]) {
    for (path, state) in paths {
        metrics::gauge!(inflight_runtime::GPU_PATH, "path" => *path).set(if state.is_ok() {
            1.0
        } else {
            0.0
        });
    }
    if rank > 0 {
        return;
    }
    let on = paths.iter().filter(|(_, state)| state.is_ok()).map(|(path, _)| *path);
    let off = paths.iter().filter_map(|(path, state)| state.err().map(|off| format!("{path} ({})", off.why)));
    tracing::info!(
        on = on.collect::<Vec<_>>().join(", "),
        off = off.collect::<Vec<_>>().join(", "),
        "fast paths of the GPU"
    );
    for (path, state) in paths {
        if let Err(PathOff { why, costs: true }) = state {
            tracing::warn!(path, why, "a fast path of the GPU is off, which costs speed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: PathConditions = PathConditions {
        compute: (9, 0),
        target: Target::Sm90a,
        deterministic: false,
        cublaslt: true,
        autotune: true,
        tuned: true,
        overlap_wanted: true,
        overlap: true,
        graphs: true,
        captured: true,
        fp8_kv: true,
    };

    fn off(conditions: PathConditions) -> Vec<(&'static str, bool)> {
        conditions.paths().into_iter().filter_map(|(path, state)| Some((path, state.err()?.costs))).collect()
    }

    #[test]
    fn all_paths_are_on_where_nothing_is_missing_and_each_one_off_says_whether_it_costs() {
        assert_eq!(off(HOPPER), []);
        assert_eq!(off(PathConditions { fp8_kv: false, ..HOPPER }), [("hardware_fp8", false)]);
        let missing = PathConditions { cublaslt: false, ..HOPPER };
        assert_eq!(off(missing), [("cublaslt", true), ("autotuned_gemms", false)]);
        let deterministic = PathConditions { deterministic: true, ..missing };
        assert_eq!(off(deterministic), [("cublaslt", false), ("autotuned_gemms", false)]);
        assert_eq!(off(PathConditions { overlap: false, ..HOPPER }), [("overlapped_kernels", true)]);
        let unwanted = PathConditions { overlap: false, overlap_wanted: false, ..HOPPER };
        assert_eq!(off(unwanted), [("overlapped_kernels", false)]);
        let ampere = PathConditions { compute: (8, 0), target: Target::Sm80, overlap: false, ..HOPPER };
        assert_eq!(off(ampere), [("overlapped_kernels", false), ("hardware_fp8", true)]);
        assert_eq!(off(PathConditions { tuned: false, ..HOPPER }), [("autotuned_gemms", true)]);
        assert_eq!(off(PathConditions { captured: false, ..HOPPER }), [("cuda_graphs", true)]);
        let blackwell = PathConditions { compute: (12, 0), target: Target::Ptx90, ..HOPPER };
        assert_eq!(off(blackwell), [("machine_code", true)]);
    }
}
