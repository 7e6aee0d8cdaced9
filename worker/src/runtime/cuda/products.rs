//! Products through cuBLASLt. Its descriptors and the choice of an algorithm cost more than a small product, so they
//! are made once for each shape. The library's first algorithm is its guess; [`super::trials`] may choose another one.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::CUstream;
use inflight_kernels::cuda::{DeviceError, Half};

use super::OwnProduct;
use super::driver::DeviceMemory;
use super::gpu::{Matmul, Memory};

/// What decides on descriptors and algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PlanKey {
    /// Rows that the plan is made for: see [`rows_class`].
    rows: u32,
    n: u32,
    k: u32,
    stride: u32,
    half: Half,
    wide: bool,
    bias: bool,
}

/// Rows for which one algorithm is asked for: exact up to 64, where decoding is, then in steps that keep the number of
/// plans small.
pub(super) fn rows_class(rows: u32) -> u32 {
    match rows {
        0..=64 => rows,
        65..=512 => rows.next_multiple_of(32),
        513..=4096 => rows.next_multiple_of(256),
        _ => rows.next_multiple_of(2048),
    }
}

impl PlanKey {
    pub(super) fn of(half: Half, matmul: &Matmul) -> Self {
        Self {
            rows: rows_class(matmul.m),
            n: matmul.n,
            k: matmul.k,
            stride: matmul.stride,
            half,
            wide: matmul.wide,
            bias: matmul.bias.is_some(),
        }
    }
}

struct Plan {
    descriptor: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    /// The first is taken; if it refuses some rows of the class, the next one; none: our own kernel.
    ways: Vec<Way>,
}

/// One of the library's ways to make a product.
#[derive(Clone, Copy)]
pub(super) struct Algorithm(sys::cublasLtMatmulAlgo_t);

/// A way to make a product.
#[derive(Clone, Copy)]
pub(super) enum Way {
    /// By the library.
    Library(Algorithm),
    /// By a kernel of our own.
    Own(OwnProduct),
}

impl Way {
    /// Who it is, for logs.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Library(_) => "cublaslt",
            Self::Own(own) => own.name(),
        }
    }
}

/// The library, with the plans made so far: at most as many as there are classes of rows, for each product of a model.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceMemory,
    plans: RefCell<HashMap<PlanKey, Plan>>,
}

/// Which library makes products, for the numerics fingerprint.
pub(super) fn library() -> String {
    // SAFETY: loads the library, and asks it for a number only if that worked.
    unsafe {
        match sys::is_culib_present() {
            true => format!("cublaslt {}", sys::cublasLtGetVersion()),
            false => "own".to_owned(),
        }
    }
}

fn failed(what: &'static str) -> impl Fn(result::CublasError) -> DeviceError {
    move |error| DeviceError::Failed { what: what.to_owned(), reason: format!("{:?}", error.0) }
}

impl Products {
    /// Opens the library; `None` if it is not installed.
    pub(super) fn open(workspace: DeviceMemory) -> Result<Option<Self>, DeviceError> {
        // SAFETY: only loads the library.
        if !unsafe { sys::is_culib_present() } {
            tracing::warn!("libcublasLt.so not found; using the built-in GEMM kernels, which are slower");
            return Ok(None);
        }
        let handle = result::create_handle().map_err(failed("opening cublaslt"))?;
        Ok(Some(Self { handle, workspace, plans: RefCell::default() }))
    }

    /// y = x * weight^T + bias. Nothing is done if a kernel of our own is to make it, which is named.
    ///
    /// # Safety
    /// The addresses are of this device and of matrices as large as said.
    pub(super) unsafe fn run(
        &self,
        half: Half,
        p: &Matmul,
        stream: CUstream,
    ) -> Result<Option<OwnProduct>, DeviceError> {
        let key = PlanKey::of(half, p);
        let mut plans = self.plans.borrow_mut();
        let plan = self.planned(&mut plans, key, p)?;
        loop {
            let made = match plan.ways.first().copied() {
                // SAFETY: passed on to the caller.
                Some(Way::Library(algorithm)) => unsafe { self.multiply(plan, algorithm, p, stream) }?,
                Some(Way::Own(own)) if own.takes(p) => return Ok(Some(own)),
                Some(Way::Own(_)) => false,
                None => return Ok(Some(OwnProduct::Tiled)),
            };
            if made {
                return Ok(None);
            }
            // A way is chosen for the most rows of a class, and by other addresses; it says so before anything runs.
            let by = plan.ways.remove(0).name();
            let (rows, left) = (p.m, plan.ways.len());
            tracing::warn!(?key, rows, by, left, "GEMM algorithm rejected the shape; falling back");
        }
    }

    /// Makes a product by one of the algorithms that [`Products::ways`] named; false, and nothing done, if it can't.
    ///
    /// # Safety
    /// As [`Products::run`].
    pub(super) unsafe fn run_by(
        &self,
        algorithm: Algorithm,
        half: Half,
        p: &Matmul,
        stream: CUstream,
    ) -> Result<bool, DeviceError> {
        let key = PlanKey::of(half, p);
        let mut plans = self.plans.borrow_mut();
        let plan = self.planned(&mut plans, key, p)?;
        // SAFETY: passed on to the caller.
        unsafe { self.multiply(plan, algorithm, p, stream) }
    }

    /// Ways to make a product that may be the fastest: `most` of the library's, the best guess first, and our own kernels.
    pub(super) fn ways(&self, half: Half, p: &Matmul, most: usize) -> Result<Vec<Way>, DeviceError> {
        let key = PlanKey::of(half, p);
        let plan = self.describe(&key, p)?;
        let algorithms = self.algorithms(&plan, most)?;
        Ok(algorithms.into_iter().map(Way::Library).chain(OwnProduct::taking(p).map(Way::Own)).collect())
    }

    /// A product's class is made in this way from now on, and in `first`, if there is one, where that one refuses.
    pub(super) fn settle(
        &self,
        half: Half,
        p: &Matmul,
        way: Way,
        first: Option<Way>,
    ) -> Result<(), DeviceError> {
        let key = PlanKey::of(half, p);
        let mut plan = self.describe(&key, p)?;
        plan.ways = std::iter::once(way).chain(first).collect();
        self.plans.borrow_mut().insert(key, plan);
        Ok(())
    }

    /// False, and nothing done, if the algorithm can't.
    ///
    /// # Safety
    /// As [`Products::run`].
    unsafe fn multiply(
        &self,
        plan: &mut Plan,
        Algorithm(algorithm): Algorithm,
        p: &Matmul,
        stream: CUstream,
    ) -> Result<bool, DeviceError> {
        let (one, zero) = (1.0f32, 0.0f32);
        let set_columns = |layout, columns: u64| {
            let attribute = sys::cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_COLS;
            // SAFETY: the layout is alive.
            unsafe { result::set_matrix_layout_attribute(layout, attribute, pointer(&columns), 8) }
                .map_err(failed("setting the rows of a product"))
        };
        // The class was planned; these are the rows.
        set_columns(plan.x, p.m.into())?;
        set_columns(plan.y, p.m.into())?;
        plan.set_bias(p)?;
        // SAFETY: descriptors are alive; the rest is passed on to the caller.
        let made = unsafe {
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
        match made {
            Ok(()) => Ok(true),
            // It looks at what it is given before anything runs.
            Err(result::CublasError(
                sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED
                | sys::cublasStatus_t::CUBLAS_STATUS_INVALID_VALUE
                | sys::cublasStatus_t::CUBLAS_STATUS_ARCH_MISMATCH,
            )) => Ok(false),
            Err(error) => Err(failed("a product")(error)),
        }
    }

    /// The plan of a class; a new one has the algorithm that the library takes for the fastest.
    fn planned<'a>(
        &self,
        plans: &'a mut HashMap<PlanKey, Plan>,
        key: PlanKey,
        p: &Matmul,
    ) -> Result<&'a mut Plan, DeviceError> {
        Ok(match plans.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                let mut plan = self.describe(&key, p)?;
                plan.ways = self.algorithms(&plan, 1)?.into_iter().map(Way::Library).collect();
                if plan.ways.is_empty() {
                    tracing::warn!(
                        ?key,
                        "cuBLASLt has no algorithm for the GEMM shape; using the built-in kernel"
                    );
                }
                entry.insert(plan)
            }
        })
    }

    /// Row-major matrices are column-major ones transposed: y^T[n, m] = weight[n, k] * x^T[k, m].
    fn describe(&self, key: &PlanKey, p: &Matmul) -> Result<Plan, DeviceError> {
        let what = "planning a product";
        let half = match key.half {
            Half::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
            Half::F16 => sys::cudaDataType_t::CUDA_R_16F,
        };
        let wide = sys::cudaDataType_t::CUDA_R_32F;
        let out = if key.wide { wide } else { half };
        let (m, n, k) = (u64::from(key.rows), u64::from(key.n), u64::from(key.k));
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let plan = Plan {
            weight: result::create_matrix_layout(half, k, n, k as i64).map_err(failed(what))?,
            x: result::create_matrix_layout(half, k, m, k as i64).map_err(failed(what))?,
            y: result::create_matrix_layout(out, n, m, i64::from(key.stride)).map_err(failed(what))?,
            descriptor: result::create_matmul_desc(compute, wide).map_err(failed(what))?,
            ways: Vec::new(),
        };
        let set = |attribute, value: *const c_void| {
            // SAFETY: the descriptor is alive; all these attributes have four bytes.
            unsafe { result::set_matmul_desc_attribute(plan.descriptor, attribute, value, 4) }
                .map_err(failed(what))
        };
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        // CUBLAS_OP_T of cublas_api.h, which the bindings of cublaslt leave out.
        let transposed = 1i32;
        set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, pointer(&transposed))?;
        if key.bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, pointer(&epilogue))?;
            set(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, pointer(&out))?;
            // Algorithms are chosen by its alignment, too.
            plan.set_bias(p)?;
        }
        Ok(plan)
    }

    /// `most` algorithms for a plan whose scratch fits the workspace, the best guess first; none if the library has none.
    fn algorithms(&self, plan: &Plan, most: usize) -> Result<Vec<Algorithm>, DeviceError> {
        let what = "asking for algorithms";
        let preference = result::create_matmul_pref().map_err(failed(what))?;
        let bytes = self.workspace.bytes();
        let mut found: Vec<MaybeUninit<sys::cublasLtMatmulHeuristicResult_t>> =
            (0..most).map(|_| MaybeUninit::zeroed()).collect();
        let mut count = 0;
        // SAFETY: everything is alive, and there is room for as many as are asked for; the preference is destroyed once.
        let asked = unsafe {
            let attribute =
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let set = result::set_matmul_pref_attribute(preference, attribute, pointer(&bytes), 8);
            let asked = set.and_then(|()| {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    plan.descriptor,
                    plan.weight,
                    plan.x,
                    plan.y,
                    plan.y,
                    preference,
                    most as i32,
                    found.as_mut_ptr().cast(),
                    &mut count,
                )
                .result()
            });
            let _ = result::destroy_matmul_pref(preference);
            asked
        };
        match asked {
            Ok(()) => {}
            Err(result::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => count = 0,
            // Our own kernel makes the product; of a GPU that has failed, the next thing that is asked of it says so.
            Err(error) => {
                tracing::warn!(reason = ?error.0, "cuBLASLt heuristic query failed");
                count = 0;
            }
        }
        let found = found.iter().take(usize::try_from(count).unwrap_or(0)).filter_map(|found| {
            // SAFETY: the library wrote so many, and zero bytes are a valid one.
            let found = unsafe { found.assume_init_ref() };
            let usable =
                found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS && found.workspaceSize <= bytes;
            usable.then_some(Algorithm(found.algo))
        });
        Ok(found.collect())
    }
}

impl Plan {
    fn set_bias(&self, p: &Matmul) -> Result<(), DeviceError> {
        let Some(bias) = p.bias else { return Ok(()) };
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
        let address = if p.wide { bias.wide } else { bias.half };
        // SAFETY: the descriptor is alive; the attribute is a pointer.
        unsafe { result::set_matmul_desc_attribute(self.descriptor, attribute, pointer(&address), 8) }
            .map_err(failed("setting a bias"))
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made by `Products::plan`, destroyed once.
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

impl Drop for Products {
    fn drop(&mut self) {
        self.plans.get_mut().clear();
        // SAFETY: opened by `open`, closed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(m: u32) -> PlanKey {
        let matmul = Matmul { x: 1, weight: 2, bias: None, y: 3, m, n: 64, k: 128, stride: 64, wide: false };
        PlanKey::of(Half::Bf16, &matmul)
    }

    #[test]
    fn a_plan_is_for_shapes_and_not_for_addresses_and_there_are_few() {
        let other =
            Matmul { x: 9, weight: 8, bias: None, y: 7, m: 5, n: 64, k: 128, stride: 64, wide: false };
        assert_eq!(key(5), PlanKey::of(Half::Bf16, &other));
        assert_ne!(key(5), PlanKey::of(Half::F16, &other));
        assert_ne!(key(5), PlanKey::of(Half::Bf16, &Matmul { wide: true, ..other }));
        let classes: std::collections::BTreeSet<u32> = (1..=65_536).map(rows_class).collect();
        assert!(classes.len() < 130, "{}", classes.len());
        assert!((1..=65_536).all(|rows| rows_class(rows) >= rows));
    }
}
