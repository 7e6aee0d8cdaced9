//! Products through cuBLASLt. Its descriptors and the choice of an algorithm cost more than a small product, so they
//! are made once for each shape.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;

use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::CUstream;
use inflight_kernels::cuda::{DeviceError, Half};

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
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// The library, with the plans made so far.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: DeviceMemory,
    /// `None`: the library has no algorithm for it.
    plans: RefCell<HashMap<PlanKey, Option<Plan>>>,
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
            tracing::warn!(
                "libcublasLt.so is not found; products are made by our own kernels, which are slower"
            );
            return Ok(None);
        }
        let handle = result::create_handle().map_err(failed("opening cublaslt"))?;
        Ok(Some(Self { handle, workspace, plans: RefCell::default() }))
    }

    /// y = x * weight^T + bias; false, and nothing done, if the library has no algorithm for it.
    ///
    /// # Safety
    /// The addresses are of this device and of matrices as large as said.
    pub(super) unsafe fn run(&self, half: Half, p: &Matmul, stream: CUstream) -> Result<bool, DeviceError> {
        let key = PlanKey::of(half, p);
        let mut plans = self.plans.borrow_mut();
        let plan = match plans.entry(key) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(self.plan(&key, p)?),
        };
        let Some(plan) = plan else { return Ok(false) };
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
                &plan.algorithm,
                self.workspace.address() as *mut c_void,
                self.workspace.bytes(),
                stream.cast(),
            )
        };
        match made {
            Ok(()) => Ok(true),
            // An algorithm is chosen for the most rows of a class; it says so before anything runs.
            Err(result::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => {
                let rows = p.m;
                tracing::warn!(
                    ?key,
                    rows,
                    "cublaslt's algorithm does not take these rows; our own kernel does"
                );
                plans.insert(key, None);
                Ok(false)
            }
            Err(error) => Err(failed("a product")(error)),
        }
    }

    /// Row-major matrices are column-major ones transposed: y^T[n, m] = weight[n, k] * x^T[k, m].
    fn plan(&self, key: &PlanKey, p: &Matmul) -> Result<Option<Plan>, DeviceError> {
        let what = "planning a product";
        let half = match key.half {
            Half::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
            Half::F16 => sys::cudaDataType_t::CUDA_R_16F,
        };
        let wide = sys::cudaDataType_t::CUDA_R_32F;
        let out = if key.wide { wide } else { half };
        let (m, n, k) = (u64::from(key.rows), u64::from(key.n), u64::from(key.k));
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let mut plan = Plan {
            weight: result::create_matrix_layout(half, k, n, k as i64).map_err(failed(what))?,
            x: result::create_matrix_layout(half, k, m, k as i64).map_err(failed(what))?,
            y: result::create_matrix_layout(out, n, m, i64::from(key.stride)).map_err(failed(what))?,
            descriptor: result::create_matmul_desc(compute, wide).map_err(failed(what))?,
            // SAFETY: a plain struct of numbers, written below.
            algorithm: unsafe { std::mem::zeroed() },
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
        let preference = result::create_matmul_pref().map_err(failed(what))?;
        let bytes = self.workspace.bytes();
        // SAFETY: everything is alive; the preference is destroyed once.
        let heuristic = unsafe {
            let attribute =
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            let set = result::set_matmul_pref_attribute(preference, attribute, pointer(&bytes), 8);
            let heuristic = set.and_then(|()| {
                result::get_matmul_algo_heuristic(
                    self.handle,
                    plan.descriptor,
                    plan.weight,
                    plan.x,
                    plan.y,
                    plan.y,
                    preference,
                )
            });
            let _ = result::destroy_matmul_pref(preference);
            heuristic
        };
        match heuristic {
            Ok(heuristic) => {
                plan.algorithm = heuristic.algo;
                Ok(Some(plan))
            }
            Err(result::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => {
                tracing::warn!(?key, "cublaslt has no algorithm for this product; our own kernel makes it");
                Ok(None)
            }
            Err(error) => Err(failed(what)(error)),
        }
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
