//! Entry points of libcublasLt. Matrices are column-major. Supported is what the runtime uses: A transposed,
//! 16-bit inputs, f32 accumulation, with or without bias.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtEpilogue_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreferenceAttributes_t as Preferred, cublasLtMatrixLayoutAttribute_t,
    cublasStatus_t as Status, cudaDataType_t,
};
use cudarc::driver::sys::CUstream;
use inflight_kernels::cuda::HalfDtype;

use crate::device::SimulatedDevice;
use crate::driver::{check_ranges, current, stream};
use crate::handle_table::HandleTable;
use crate::lie::Lie;
use crate::lock;
use crate::settings::Settings;
use crate::stream::StreamWork;

/// Result of a cuBLASLt call.
type CublasResult<T = ()> = Result<T, Status>;

const BF16: u32 = cudaDataType_t::CUDA_R_16BF as u32;
const F16: u32 = cudaDataType_t::CUDA_R_16F as u32;
const F32: u32 = cudaDataType_t::CUDA_R_32F as u32;
const INVALID: Status = Status::CUBLAS_STATUS_INVALID_VALUE;
const NOT_SUPPORTED: Status = Status::CUBLAS_STATUS_NOT_SUPPORTED;
/// First word of every algorithm, which detects those that the heuristic never returned.
const ALGORITHM_MAGIC: u64 = 0x696e_666c;
/// Scratch bytes of the split-k algorithm.
const SCRATCH_BYTES: usize = 4096;
/// Alignment of addresses that algorithms assume, in bytes, unless a preference lowers it.
const ALIGNMENT: u64 = 256;

#[derive(Clone, Copy)]
struct MatrixLayout {
    kind: u32,
    rows: u64,
    columns: u64,
    stride: i64,
}

#[derive(Default, Clone, Copy)]
struct MatmulDescription {
    transposed: (i32, i32),
    epilogue: u32,
    bias: u64,
    bias_kind: u32,
}

static HANDLES: HandleTable<usize> = HandleTable::new();
static LAYOUTS: HandleTable<Mutex<MatrixLayout>> = HandleTable::new();
static DESCRIPTIONS: HandleTable<Mutex<MatmulDescription>> = HandleTable::new();
static PREFERENCES: HandleTable<Mutex<usize>> = HandleTable::new();

fn check_value(valid: bool) -> CublasResult {
    valid.then_some(()).ok_or(INVALID)
}

fn layout(handle: *mut c_void) -> CublasResult<MatrixLayout> {
    LAYOUTS.get(handle).map(|layout| *lock(&layout)).ok_or(INVALID)
}

fn description(handle: *mut c_void) -> CublasResult<MatmulDescription> {
    DESCRIPTIONS.get(handle).map(|description| *lock(&description)).ok_or(INVALID)
}

/// # Safety
/// `from` is null or points to `bytes` readable bytes.
unsafe fn read<T: Copy>(from: *const c_void, bytes: usize) -> CublasResult<T> {
    check_value(!from.is_null() && bytes == size_of::<T>())?;
    // SAFETY: `from` is not null, and the caller guarantees `bytes` readable bytes, the size of `T`.
    Ok(unsafe { from.cast::<T>().read_unaligned() })
}

/// # Safety
/// `to` is null or valid for writes.
unsafe fn put<T>(to: *mut T, value: T) -> CublasResult {
    check_value(!to.is_null())?;
    // SAFETY: `to` is not null, and the caller guarantees that it is then valid for writes.
    unsafe { to.write(value) };
    Ok(())
}

fn element_bytes(kind: u32) -> CublasResult<usize> {
    match kind {
        BF16 | F16 => Ok(2),
        F32 => Ok(4),
        _ => Err(NOT_SUPPORTED),
    }
}

/// Supported GEMM, row-major: y[m, n] = x[m, k] * weight[n, k]^T + bias.
#[derive(Clone, Copy)]
struct SimulatedGemm {
    half: HalfDtype,
    f32_out: bool,
    bias: Option<(u64, u32)>,
    m: usize,
    n: usize,
    k: usize,
    strides: (usize, usize, usize),
}

impl SimulatedGemm {
    fn new(
        description: MatmulDescription,
        a: MatrixLayout,
        b: MatrixLayout,
        d: MatrixLayout,
    ) -> CublasResult<Self> {
        if description.transposed != (1, 0) || a.kind != b.kind {
            return Err(NOT_SUPPORTED);
        }
        let half = match a.kind {
            BF16 => HalfDtype::Bf16,
            F16 => HalfDtype::F16,
            _ => return Err(NOT_SUPPORTED),
        };
        if d.kind != F32 && d.kind != a.kind {
            return Err(NOT_SUPPORTED);
        }
        // op(A) is [n, k], B is [k, m], D is [n, m].
        check_value(a.columns == d.rows && a.rows == b.rows && b.columns == d.columns)?;
        let stride = |layout: MatrixLayout| {
            let stride = usize::try_from(layout.stride).map_err(|_| INVALID)?;
            check_value(stride as u64 >= layout.rows && layout.rows > 0 && layout.columns > 0)
                .map(|()| stride)
        };
        let bias = match description.epilogue {
            0 | 1 => None,
            epilogue if epilogue == cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32 => {
                Some((description.bias, description.bias_kind))
            }
            _ => return Err(NOT_SUPPORTED),
        };
        let (m, n, k) = (d.columns as usize, d.rows as usize, a.rows as usize);
        Ok(Self {
            half,
            f32_out: d.kind == F32,
            bias,
            m,
            n,
            k,
            strides: (stride(a)?, stride(b)?, stride(d)?),
        })
    }

    /// Returns the bytes spanned by weight, x and y.
    fn bytes(&self) -> [usize; 3] {
        let span =
            |columns: usize, rows: usize, stride: usize, size: usize| ((columns - 1) * stride + rows) * size;
        let (a, b, d) = self.strides;
        [
            span(self.n, self.k, a, 2),
            span(self.m, self.k, b, 2),
            span(self.m, self.n, d, if self.f32_out { 4 } else { 2 }),
        ]
    }

    /// Computes the GEMM, accumulating over blocks of `k_block` elements.
    fn run(&self, weight: u64, x: u64, y: u64, k_block: usize) {
        let (a, b, d) = self.strides;
        let widened = |at: u64, columns: usize, stride: usize| {
            let at = std::ptr::with_exposed_provenance::<u16>(at as usize);
            let mut values = Vec::with_capacity(columns * self.k);
            for column in 0..columns {
                // SAFETY: the caller has checked that the matrix is within an allocation.
                let bits = (0..self.k).map(|i| unsafe { at.add(column * stride + i).read() });
                values.extend(bits.map(|bits| self.half.widen(bits)));
            }
            values
        };
        let (weight, x) = (widened(weight, self.n, a), widened(x, self.m, b));
        let bias = |column: usize| {
            let Some((at, kind)) = self.bias else { return 0.0 };
            let at = std::ptr::with_exposed_provenance::<u8>(at as usize);
            // SAFETY: the caller has checked that the bias is within an allocation.
            unsafe {
                match kind == F32 {
                    true => at.cast::<f32>().add(column).read(),
                    false => self.half.widen(at.cast::<u16>().add(column).read()),
                }
            }
        };
        let y = std::ptr::with_exposed_provenance_mut::<u8>(y as usize);
        for (row, x) in x.chunks(self.k).enumerate() {
            for (column, weight) in weight.chunks(self.k).enumerate() {
                let mut sum = 0.0;
                for (x, weight) in x.chunks(k_block).zip(weight.chunks(k_block)) {
                    let mut lanes = [0.0f32; 8];
                    for (x, weight) in x.chunks(8).zip(weight.chunks(8)) {
                        x.iter()
                            .zip(weight)
                            .zip(&mut lanes)
                            .for_each(|((x, weight), lane)| *lane += x * weight);
                    }
                    sum += lanes.iter().sum::<f32>();
                }
                let sum = sum + bias(column);
                // SAFETY: the caller has checked that `y` is within an allocation.
                unsafe {
                    match self.f32_out {
                        true => y.cast::<f32>().add(row * d + column).write(sum),
                        false => y.cast::<u16>().add(row * d + column).write(self.half.narrow(sum)),
                    }
                }
            }
        }
    }
}

/// Algorithms with different accumulation orders, scratch sizes and supported shapes.
#[derive(Clone, Copy, PartialEq)]
enum SimulatedAlgorithm {
    Whole = 1,
    /// Split-k, which needs scratch.
    SplitK,
    /// Few rows only; larger shapes are rejected when the GEMM is enqueued.
    FewRows,
}

impl SimulatedAlgorithm {
    const ALL: [Self; 3] = [Self::Whole, Self::SplitK, Self::FewRows];

    fn scratch_bytes(self) -> usize {
        if self == Self::SplitK { SCRATCH_BYTES } else { 0 }
    }

    fn supports(self, gemm: &SimulatedGemm) -> bool {
        self != Self::FewRows || gemm.m <= 24
    }

    /// Whether it computes anything: it does, unless it lies.
    fn computes(self) -> bool {
        self == Self::Whole || !Lie::Algorithm.told()
    }

    fn k_block(self, gemm: &SimulatedGemm) -> usize {
        match self {
            Self::Whole => gemm.k,
            Self::SplitK => gemm.k.div_ceil(2),
            Self::FewRows => 64,
        }
    }
}

macro_rules! calls {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of cuBLASLt.")]
        ///
        /// # Safety
        /// As the library's documentation says: pointers are null or valid, and matrices stay allocated until
        /// the stream has run.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> Status {
            let call = || -> CublasResult { $body };
            let outcome = call();
            outcome.err().unwrap_or(Status::CUBLAS_STATUS_SUCCESS)
        }
    )*};
}

/// `cublasLtGetVersion` of cuBLASLt.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    let settings = Settings::get();
    let (major, minor) = settings.cublaslt.unwrap_or(settings.cuda);
    (major * 10_000 + minor * 100) as usize
}

calls! {
    fn cublasLtCreate(handle: *mut *mut c_void) {
        let device = current().map_err(|_| Status::CUBLAS_STATUS_NOT_INITIALIZED)?;
        // SAFETY: the caller of this entry point guarantees that the output pointer is null or valid for
        // writes.
        unsafe { put(handle, HANDLES.add(Arc::new(device.ordinal))) }
    }

    fn cublasLtDestroy(handle: *mut c_void) {
        HANDLES.remove(handle).map(drop).ok_or(Status::CUBLAS_STATUS_NOT_INITIALIZED)
    }

    fn cublasLtMatrixLayoutCreate(out: *mut *mut c_void, kind: u32, rows: u64, columns: u64, stride: i64) {
        element_bytes(kind)?;
        // SAFETY: the caller of this entry point guarantees that the output pointer is null or valid for
        // writes.
        unsafe { put(out, LAYOUTS.add(Arc::new(Mutex::new(MatrixLayout { kind, rows, columns, stride })))) }
    }

    fn cublasLtMatrixLayoutSetAttribute(handle: *mut c_void, attribute: u32, from: *const c_void, bytes: usize) {
        let layout = LAYOUTS.get(handle).ok_or(INVALID)?;
        if attribute != cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_COLS as u32 {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: the caller of this entry point guarantees `bytes` readable bytes at `from`, or null.
        lock(&layout).columns = unsafe { read(from, bytes) }?;
        Ok(())
    }

    fn cublasLtMatrixLayoutDestroy(handle: *mut c_void) {
        LAYOUTS.remove(handle).map(drop).ok_or(INVALID)
    }

    fn cublasLtMatmulDescCreate(out: *mut *mut c_void, compute: u32, scale: u32) {
        if compute != cublasComputeType_t::CUBLAS_COMPUTE_32F as u32 || scale != F32 {
            return Err(NOT_SUPPORTED);
        }
        // Unless set, a bias has the output's type.
        let description = MatmulDescription { epilogue: 1, bias_kind: u32::MAX, ..MatmulDescription::default() };
        // SAFETY: the caller of this entry point guarantees that the output pointer is null or valid for
        // writes.
        unsafe { put(out, DESCRIPTIONS.add(Arc::new(Mutex::new(description)))) }
    }

    fn cublasLtMatmulDescSetAttribute(handle: *mut c_void, attribute: u32, from: *const c_void, bytes: usize) {
        const TRANSPOSED: u32 = Attribute::CUBLASLT_MATMUL_DESC_TRANSA as u32;
        const EPILOGUE: u32 = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE as u32;
        const BIAS: u32 = Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER as u32;
        const BIAS_KIND: u32 = Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE as u32;
        let description = DESCRIPTIONS.get(handle).ok_or(INVALID)?;
        let mut description = lock(&description);
        // SAFETY: the caller of this entry point guarantees `bytes` readable bytes at `from`, or null.
        unsafe {
            match attribute {
                TRANSPOSED => description.transposed.0 = read(from, bytes)?,
                EPILOGUE => description.epilogue = read(from, bytes)?,
                BIAS => description.bias = read(from, bytes)?,
                BIAS_KIND => description.bias_kind = read(from, bytes)?,
                _ => return Err(NOT_SUPPORTED),
            }
        }
        Ok(())
    }

    fn cublasLtMatmulDescDestroy(handle: *mut c_void) {
        DESCRIPTIONS.remove(handle).map(drop).ok_or(INVALID)
    }

    fn cublasLtMatmulPreferenceCreate(out: *mut *mut c_void) {
        // SAFETY: the caller of this entry point guarantees that the output pointer is null or valid for
        // writes.
        unsafe { put(out, PREFERENCES.add(Arc::new(Mutex::new(0)))) }
    }

    fn cublasLtMatmulPreferenceSetAttribute(handle: *mut c_void, attribute: u32, from: *const c_void, bytes: usize) {
        let preference = PREFERENCES.get(handle).ok_or(INVALID)?;
        if attribute != Preferred::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as u32 {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: the caller of this entry point guarantees `bytes` readable bytes at `from`, or null.
        *lock(&preference) = unsafe { read(from, bytes) }?;
        Ok(())
    }

    fn cublasLtMatmulPreferenceDestroy(handle: *mut c_void) {
        PREFERENCES.remove(handle).map(drop).ok_or(INVALID)
    }

    fn cublasLtMatmulAlgoGetHeuristic(
        handle: *mut c_void,
        how: *mut c_void,
        a: *mut c_void,
        b: *mut c_void,
        c: *mut c_void,
        d: *mut c_void,
        preference: *mut c_void,
        wanted: c_int,
        found: *mut cublasLtMatmulHeuristicResult_t,
        count: *mut c_int,
    ) {
        HANDLES.get(handle).ok_or(Status::CUBLAS_STATUS_NOT_INITIALIZED)?;
        let scratch = *lock(PREFERENCES.get(preference).ok_or(INVALID)?.as_ref());
        layout(c)?;
        let gemm = SimulatedGemm::new(description(how)?, layout(a)?, layout(b)?, layout(d)?)?;
        let algorithms = SimulatedAlgorithm::ALL.into_iter();
        let algorithms = algorithms.filter(|known| known.scratch_bytes() <= scratch && known.supports(&gemm));
        let wanted = usize::try_from(wanted).map_err(|_| INVALID)?;
        let algorithms: Vec<SimulatedAlgorithm> = algorithms.take(wanted).collect();
        for (i, algorithm) in algorithms.iter().enumerate() {
            let mut data = [0; 8];
            data[..2].copy_from_slice(&[ALGORITHM_MAGIC, *algorithm as u64]);
            let result = cublasLtMatmulHeuristicResult_t {
                algo: cublasLtMatmulAlgo_t { data },
                workspaceSize: algorithm.scratch_bytes(),
                state: Status::CUBLAS_STATUS_SUCCESS,
                wavesCount: 1.0,
                reserved: [0; 4],
            };
            // SAFETY: the caller guarantees room for `wanted` results.
            unsafe { found.add(i).write(result) };
        }
        // SAFETY: the caller of this entry point guarantees that the output pointer is null or valid for
        // writes.
        unsafe { put(count, algorithms.len() as c_int) }?;
        if algorithms.is_empty() { Err(NOT_SUPPORTED) } else { Ok(()) }
    }

    fn cublasLtMatmul(
        handle: *mut c_void,
        how: *mut c_void,
        alpha: *const c_void,
        a: *const c_void,
        a_layout: *mut c_void,
        b: *const c_void,
        b_layout: *mut c_void,
        beta: *const c_void,
        c: *const c_void,
        c_layout: *mut c_void,
        d: *mut c_void,
        d_layout: *mut c_void,
        algorithm: *const cublasLtMatmulAlgo_t,
        workspace: *mut c_void,
        workspace_bytes: usize,
        on: CUstream,
    ) {
        let ordinal = HANDLES.get(handle).ok_or(Status::CUBLAS_STATUS_NOT_INITIALIZED)?;
        let stream = stream(on).map_err(|_| Status::CUBLAS_STATUS_EXECUTION_FAILED)?;
        check_value(stream.device.ordinal == *ordinal)?;
        // SAFETY: the caller guarantees host pointers to factors of the scale type, f32.
        let (alpha, beta) = unsafe { (read::<f32>(alpha, 4)?, read::<f32>(beta, 4)?) };
        if (alpha, beta) != (1.0, 0.0) || c != d.cast_const() || c_layout != d_layout {
            return Err(NOT_SUPPORTED);
        }
        let mut description = description(how)?;
        let out = layout(d_layout)?;
        if description.bias_kind == u32::MAX {
            description.bias_kind = out.kind;
        }
        let gemm = SimulatedGemm::new(description, layout(a_layout)?, layout(b_layout)?, out)?;
        check_value(!algorithm.is_null())?;
        // SAFETY: `algorithm` is not null, and the caller guarantees that it points to an algorithm.
        let [magic, id, ..] = unsafe { (*algorithm).data };
        let mut known = SimulatedAlgorithm::ALL.into_iter();
        let algorithm =
            known.find(|known| (ALGORITHM_MAGIC, *known as u64) == (magic, id)).ok_or(INVALID)?;
        if !algorithm.supports(&gemm) {
            return Err(NOT_SUPPORTED);
        }
        let (weight, x, y) = (a.addr() as u64, b.addr() as u64, d.addr() as u64);
        let (scratch, scratch_bytes) = (workspace.addr() as u64, algorithm.scratch_bytes());
        check_value(scratch_bytes <= workspace_bytes)?;
        // Algorithms assume aligned addresses.
        check_value([weight, x, y].iter().all(|address| address % ALIGNMENT == 0))?;
        let valid_ranges = move |device: &SimulatedDevice| {
            let [weight_bytes, x_bytes, y_bytes] = gemm.bytes();
            let bias_size = |kind| if kind == F32 { 4 } else { 2 };
            device.holds(weight, weight_bytes)
                && device.holds(x, x_bytes)
                && device.holds(y, y_bytes)
                && gemm.bias.is_none_or(|(at, kind)| device.holds(at, gemm.n * bias_size(kind)))
                && (scratch_bytes == 0 || device.holds(scratch, scratch_bytes))
        };
        let work = move |device: &SimulatedDevice| {
            check_ranges(valid_ranges(device))?;
            if scratch_bytes > 0 {
                let scratch = std::ptr::with_exposed_provenance_mut::<u8>(scratch as usize);
                // SAFETY: the scratch was just checked to be within an allocation.
                unsafe { scratch.write_bytes(0xff, scratch_bytes) };
            }
            if device.computes() && algorithm.computes() {
                gemm.run(weight, x, y, algorithm.k_block(&gemm));
            }
            Ok(())
        };
        stream.enqueue(StreamWork::new(work)).map(drop).map_err(|_| Status::CUBLAS_STATUS_EXECUTION_FAILED)
    }
}
