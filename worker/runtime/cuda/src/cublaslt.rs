//! GEMMs through cuBLASLt. Creating descriptors and querying the heuristic cost more than a small GEMM, so
//! plans are cached by shape. A plan starts with the heuristic's first algorithm; [`super::autotune`] may
//! replace it.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::CUstream;
use inflight_kernels::cuda::{DeviceError, HalfDtype};

use super::device_memory::DeviceMemory;
use super::driver_error;
use super::gemm::{GemmAlgorithm, GemmKernel};
use super::gpu::{GpuMemory, Matmul};
use super::gpu_info;

/// Cache key of a plan: everything that its descriptors and algorithm depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct GemmPlanKey {
    /// Rows that the plan is created for: see [`plan_rows`].
    rows: u32,
    n: u32,
    k: u32,
    stride: u32,
    half: HalfDtype,
    f32_out: bool,
    bias: bool,
}

/// Rounds rows up to the rows of their plan: exact up to 64, where decode batches are, then in steps that
/// keep the number of plans small.
pub(super) fn plan_rows(rows: u32) -> u32 {
    match rows {
        0..=64 => rows,
        65..=512 => rows.next_multiple_of(32),
        513..=4096 => rows.next_multiple_of(256),
        _ => rows.next_multiple_of(2048),
    }
}

impl GemmPlanKey {
    pub(super) fn new(half: HalfDtype, matmul: &Matmul) -> Self {
        Self {
            rows: plan_rows(matmul.m),
            n: matmul.n,
            k: matmul.k,
            stride: matmul.stride,
            half,
            f32_out: matmul.f32_out,
            bias: matmul.bias.is_some(),
        }
    }
}

/// cuBLASLt descriptors of a GEMM shape, and its algorithms.
struct GemmPlan {
    descriptor: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    /// Algorithms by preference: the first that does not reject the number of rows is used; none: the
    /// tiled kernel.
    algorithms: Vec<GemmAlgorithm>,
    /// How many of the algorithms, from the first on, rejected a number of rows; no entry: none. At most an entry
    /// for each number of rows of the class.
    rejections: HashMap<u32, usize>,
}

/// Algorithm returned by the heuristic.
#[derive(Clone, Copy)]
pub(super) struct CublasLtAlgorithm(sys::cublasLtMatmulAlgo_t);

impl CublasLtAlgorithm {
    /// Returns the library's description of the algorithm, valid for its version and GPU.
    pub(super) fn data(self) -> [u64; 8] {
        self.0.data
    }

    /// Restores an algorithm from its description.
    pub(super) fn from_data(data: [u64; 8]) -> Self {
        Self(sys::cublasLtMatmulAlgo_t { data })
    }
}

/// cuBLASLt handle with cached plans: at most one per row class for each GEMM of a model.
pub(super) struct CublasLt {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceMemory,
    plans: RefCell<HashMap<GemmPlanKey, GemmPlan>>,
}

/// Returns the GEMM library's version for the numerics fingerprint; `own` without cuBLASLt.
pub(super) fn version() -> String {
    // SAFETY: loads the library, and calls it only if that succeeded.
    unsafe {
        match sys::is_culib_present() {
            true => format!("cublaslt {}", sys::cublasLtGetVersion()),
            false => "own".to_owned(),
        }
    }
}

/// Says why a version of cuBLASLt cannot be used with a driver, and which can.
fn too_new_for(library: usize, driver: i32) -> Option<String> {
    // 10000 times the major version; 1000 times before cuBLAS 11.
    let (major, supported) = (library / 10_000, usize::try_from(driver / 1000).unwrap_or(0));
    (major > supported).then(|| {
        format!(
            "libcublasLt is of CUDA {major}, and the driver supports CUDA {supported}: install cuBLAS of CUDA {supported} \
             (the package libcublas-{supported}, or the Python wheel nvidia-cublas-cu{supported}) or a newer driver"
        )
    })
}

fn failed(what: &'static str) -> impl Fn(result::CublasError) -> DeviceError {
    move |error| DeviceError::Failed { what: what.to_owned(), reason: format!("{:?}", error.0) }
}

impl CublasLt {
    /// Opens the library; `None` if it is not installed.
    pub(super) fn open(workspace: DeviceMemory) -> Result<Option<Self>, DeviceError> {
        // SAFETY: only loads the library.
        if !unsafe { sys::is_culib_present() } {
            tracing::warn!("libcublasLt.so not found; using the built-in GEMM kernels, which are slower");
            return Ok(None);
        }
        let driver =
            gpu_info::driver_version().map_err(driver_error::failed("asking for the driver's version"))?;
        // SAFETY: the library is there.
        let library = unsafe { sys::cublasLtGetVersion() };
        if let Some(unusable) = too_new_for(library, driver) {
            tracing::warn!(unusable, "using the built-in GEMM kernels, which are slower");
            return Ok(None);
        }
        let handle = result::create_handle().map_err(failed("opening cublaslt"))?;
        Ok(Some(Self { handle, workspace, plans: RefCell::default() }))
    }

    /// Enqueues a GEMM. Returns a built-in kernel, having enqueued nothing, if the plan selects one.
    ///
    /// # Safety
    /// The addresses are of this device and of matrices with the given shapes, which stay allocated until the
    /// stream has run.
    pub(super) unsafe fn run(
        &self,
        half: HalfDtype,
        p: &Matmul,
        stream: CUstream,
    ) -> Result<Option<GemmKernel>, DeviceError> {
        let key = GemmPlanKey::new(half, p);
        let mut plans = self.plans.borrow_mut();
        let plan = self.plan(&mut plans, key, p)?;
        let mut rejected = plan.rejections.get(&p.m).copied().unwrap_or(0);
        loop {
            let enqueued = match plan.algorithms.get(rejected).copied() {
                Some(GemmAlgorithm::CublasLt(algorithm)) => {
                    // SAFETY: the caller guarantees the addresses, shapes and lifetimes of the matrices.
                    unsafe { self.matmul(plan, algorithm, p, stream) }?
                }
                Some(GemmAlgorithm::BuiltIn(kernel)) if kernel.supports(p) => return Ok(Some(kernel)),
                Some(GemmAlgorithm::BuiltIn(_)) => false,
                None => return Ok(Some(GemmKernel::Tiled)),
            };
            if enqueued {
                return Ok(None);
            }
            // An algorithm is chosen for the class's maximum rows and for other addresses; it rejects a shape
            // before it runs. Other numbers of rows of the class keep it.
            let by = plan.algorithms[rejected].name();
            rejected += 1;
            plan.rejections.insert(p.m, rejected);
            metrics::counter!(inflight_runtime::GEMM_REJECTIONS).increment(1);
            let (rows, left) = (p.m, plan.algorithms.len() - rejected);
            tracing::warn!(
                ?key,
                rows,
                by,
                left,
                "GEMM algorithm rejected the number of rows; falling back for it"
            );
        }
    }

    /// Enqueues a GEMM with one algorithm of [`CublasLt::candidates`]. Returns false, having enqueued
    /// nothing, if it rejects the shape.
    ///
    /// # Safety
    /// As [`CublasLt::run`].
    pub(super) unsafe fn run_with(
        &self,
        algorithm: CublasLtAlgorithm,
        half: HalfDtype,
        p: &Matmul,
        stream: CUstream,
    ) -> Result<bool, DeviceError> {
        let key = GemmPlanKey::new(half, p);
        let mut plans = self.plans.borrow_mut();
        let plan = self.plan(&mut plans, key, p)?;
        // SAFETY: the caller guarantees the addresses, shapes and lifetimes of the matrices.
        unsafe { self.matmul(plan, algorithm, p, stream) }
    }

    /// Lists candidate algorithms for a GEMM: up to `max` of cuBLASLt's heuristic, best first, then the
    /// built-in kernels that support it.
    pub(super) fn candidates(
        &self,
        half: HalfDtype,
        p: &Matmul,
        max: usize,
    ) -> Result<Vec<GemmAlgorithm>, DeviceError> {
        let key = GemmPlanKey::new(half, p);
        let plan = self.create_plan(&key, p)?;
        let algorithms = self.heuristic(&plan, max)?.into_iter().map(GemmAlgorithm::CublasLt);
        Ok(algorithms.chain(GemmKernel::supporting(p).map(GemmAlgorithm::BuiltIn)).collect())
    }

    /// Sets the algorithm for a GEMM's row class, with a fallback for shapes that it rejects.
    pub(super) fn set_algorithm(
        &self,
        half: HalfDtype,
        p: &Matmul,
        algorithm: GemmAlgorithm,
        fallback: Option<GemmAlgorithm>,
    ) -> Result<(), DeviceError> {
        let key = GemmPlanKey::new(half, p);
        let mut plan = self.create_plan(&key, p)?;
        plan.algorithms = std::iter::once(algorithm).chain(fallback).collect();
        self.plans.borrow_mut().insert(key, plan);
        Ok(())
    }

    /// Enqueues a GEMM. Returns false, having enqueued nothing, if the algorithm rejects the shape.
    ///
    /// # Safety
    /// As [`CublasLt::run`].
    unsafe fn matmul(
        &self,
        plan: &mut GemmPlan,
        CublasLtAlgorithm(algorithm): CublasLtAlgorithm,
        p: &Matmul,
        stream: CUstream,
    ) -> Result<bool, DeviceError> {
        let (one, zero) = (1.0f32, 0.0f32);
        let set_columns = |layout, columns: u64| {
            let attribute = sys::cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_COLS;
            // SAFETY: the plan owns the layout, whose attribute has eight bytes.
            unsafe { result::set_matrix_layout_attribute(layout, attribute, pointer(&columns), 8) }
                .map_err(failed("setting the rows of a GEMM"))
        };
        // The plan is for the row class; set the actual rows.
        set_columns(plan.x, p.m.into())?;
        set_columns(plan.y, p.m.into())?;
        plan.set_bias(p)?;
        // SAFETY: the plan owns the descriptors; the caller guarantees the addresses, shapes and lifetimes of
        // the matrices.
        let status = unsafe {
            result::matmul(
                self.handle,
                plan.descriptor,
                pointer(&one),
                pointer(&zero),
                p.weight as *const c_void,
                plan.weight,
                p.x as *const c_void,
                plan.x,
                p.y as *const c_void,
                plan.y,
                p.y as *mut c_void,
                plan.y,
                &algorithm,
                self.workspace.address() as *mut c_void,
                self.workspace.bytes(),
                stream.cast(),
            )
        };
        match status {
            Ok(()) => Ok(true),
            // Shapes are checked before anything is enqueued.
            Err(result::CublasError(
                sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED
                | sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE
                | sys::cublasStatus_t::CUBLAS_STATUS_ARCH_MISMATCH,
            )) => Ok(false),
            Err(error) => Err(failed("enqueuing a GEMM")(error)),
        }
    }

    /// Returns the plan of a row class, creating it with the heuristic's first algorithm.
    fn plan<'a>(
        &self,
        plans: &'a mut HashMap<GemmPlanKey, GemmPlan>,
        key: GemmPlanKey,
        p: &Matmul,
    ) -> Result<&'a mut GemmPlan, DeviceError> {
        Ok(match plans.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let mut plan = self.create_plan(&key, p)?;
                plan.algorithms =
                    self.heuristic(&plan, 1)?.into_iter().map(GemmAlgorithm::CublasLt).collect();
                if plan.algorithms.is_empty() {
                    tracing::warn!(
                        ?key,
                        "cuBLASLt has no algorithm for the GEMM shape; using the built-in kernel"
                    );
                }
                entry.insert(plan)
            }
        })
    }

    /// Creates a plan without algorithms. Row-major matrices are transposed column-major ones: y^T[n, m] =
    /// weight[n, k] * x^T[k, m].
    fn create_plan(&self, key: &GemmPlanKey, p: &Matmul) -> Result<GemmPlan, DeviceError> {
        let what = "creating a GEMM plan";
        let half = match key.half {
            HalfDtype::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
            HalfDtype::F16 => sys::cudaDataType_t::CUDA_R_16F,
        };
        let single = sys::cudaDataType_t::CUDA_R_32F;
        let out = if key.f32_out { single } else { half };
        let (m, n, k) = (u64::from(key.rows), u64::from(key.n), u64::from(key.k));
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let plan = GemmPlan {
            weight: result::create_matrix_layout(half, k, n, k as i64).map_err(failed(what))?,
            x: result::create_matrix_layout(half, k, m, k as i64).map_err(failed(what))?,
            y: result::create_matrix_layout(out, n, m, i64::from(key.stride)).map_err(failed(what))?,
            descriptor: result::create_matmul_desc(compute, single).map_err(failed(what))?,
            algorithms: Vec::new(),
            rejections: HashMap::new(),
        };
        let set = |attribute, value: *const c_void| {
            // SAFETY: the plan owns the descriptor; all these attributes have four bytes.
            unsafe { result::set_matmul_desc_attribute(plan.descriptor, attribute, value, 4) }
                .map_err(failed(what))
        };
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        // CUBLAS_OP_T of cublas_api.h, missing in cudarc's cublaslt bindings.
        let transposed = 1i32;
        set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, pointer(&transposed))?;
        if key.bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, pointer(&epilogue))?;
            set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, pointer(&out))?;
            // The heuristic considers the bias's alignment, too.
            plan.set_bias(p)?;
        }
        Ok(plan)
    }

    /// Queries the heuristic for up to `max` algorithms whose scratch fits the workspace, best first; empty
    /// if there are none. It is told no alignments, so it assumes operands at multiples of 256 bytes: allocations are, and
    /// parts of matrices are used in place only where they are ([`super::weights`]).
    fn heuristic(&self, plan: &GemmPlan, max: usize) -> Result<Vec<CublasLtAlgorithm>, DeviceError> {
        let what = "querying GEMM algorithms";
        let preference = result::create_matmul_pref().map_err(failed(what))?;
        let bytes = self.workspace.bytes();
        let mut results: Vec<MaybeUninit<sys::cublasLtMatmulHeuristicResult_t>> =
            (0..max).map(|_| MaybeUninit::zeroed()).collect();
        let mut count = 0;
        // SAFETY: the handle, plan and preference are live, `results` has room for `max`, and the preference
        // is destroyed once.
        let queried = unsafe {
            let attribute =
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let set = result::set_matmul_pref_attribute(preference, attribute, pointer(&bytes), 8);
            let queried = set.and_then(|()| {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    plan.descriptor,
                    plan.weight,
                    plan.x,
                    plan.y,
                    plan.y,
                    preference,
                    max as i32,
                    results.as_mut_ptr().cast(),
                    &mut count,
                )
                .result()
            });
            let _ = result::destroy_matmul_pref(preference);
            queried
        };
        match queried {
            Ok(()) => {}
            Err(result::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => count = 0,
            // The built-in kernel is used; if the GPU has failed, the next call reports it.
            Err(error) => {
                tracing::warn!(reason = ?error.0, "cuBLASLt heuristic query failed");
                count = 0;
            }
        }
        let algorithms = results.iter().take(usize::try_from(count).unwrap_or(0)).filter_map(|result| {
            // SAFETY: the library wrote `count` results, and the zeroed rest is valid, too.
            let result = unsafe { result.assume_init_ref() };
            let usable =
                result.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && result.workspaceSize <= bytes;
            usable.then_some(CublasLtAlgorithm(result.algo))
        });
        Ok(algorithms.collect())
    }
}

impl GemmPlan {
    fn set_bias(&self, p: &Matmul) -> Result<(), DeviceError> {
        let Some(bias) = p.bias else { return Ok(()) };
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
        let address = if p.f32_out { bias.f32 } else { bias.half };
        // SAFETY: the plan owns the descriptor; the attribute is a pointer.
        unsafe { result::set_matmul_desc_attribute(self.descriptor, attribute, pointer(&address), 8) }
            .map_err(failed("setting a bias"))
    }
}

impl Drop for GemmPlan {
    fn drop(&mut self) {
        // SAFETY: `create_plan` created them, and they are destroyed once.
        unsafe {
            let _ = result::destroy_matmul_desc(self.descriptor);
            for layout in [self.weight, self.x, self.y] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

fn pointer<T>(value: &T) -> *const c_void {
    std::ptr::from_ref(value).cast()
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        self.plans.get_mut().clear();
        // SAFETY: created in `open` and destroyed once, after all plans.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(m: u32) -> GemmPlanKey {
        let matmul =
            Matmul { x: 1, weight: 2, bias: None, y: 3, m, n: 64, k: 128, stride: 64, f32_out: false };
        GemmPlanKey::new(HalfDtype::Bf16, &matmul)
    }

    #[test]
    fn a_library_of_a_later_major_version_than_the_driver_is_refused_with_the_one_that_would_do() {
        for (library, driver) in [(130_000, 13_000), (130_100, 13_020), (120_902, 12_020), (120_902, 13_000)]
        {
            assert_eq!(too_new_for(library, driver), None, "{library} on {driver}");
        }
        let reason = too_new_for(130_000, 12_020).unwrap();
        assert!(reason.contains("CUDA 13") && reason.contains("nvidia-cublas-cu12"), "{reason}");
    }

    #[test]
    fn plans_are_keyed_by_shape_not_by_address_and_are_few() {
        let other =
            Matmul { x: 9, weight: 8, bias: None, y: 7, m: 5, n: 64, k: 128, stride: 64, f32_out: false };
        assert_eq!(key(5), GemmPlanKey::new(HalfDtype::Bf16, &other));
        assert_ne!(key(5), GemmPlanKey::new(HalfDtype::F16, &other));
        assert_ne!(key(5), GemmPlanKey::new(HalfDtype::Bf16, &Matmul { f32_out: true, ..other }));
        let classes: std::collections::BTreeSet<u32> = (1..=65_536).map(plan_rows).collect();
        assert!(classes.len() < 130, "{}", classes.len());
        assert!((1..=65_536).all(|rows| plan_rows(rows) >= rows));
    }
}
