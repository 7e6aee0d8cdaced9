//! The calls of cuBLASLt. Matrices are column by column; only what the runtime asks for is there: the first one transposed,
//! 16-bit numbers in, sums in single precision, with a bias or without.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtEpilogue_t, cublasLtMatmulAlgo_t,
    cublasLtMatmulDescAttributes_t as Attribute, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreferenceAttributes_t as Preferred, cublasLtMatrixLayoutAttribute_t,
    cublasStatus_t as Status, cudaDataType_t,
};
use cudarc::driver::sys::CUstream;
use inflight_kernels::cuda::Half;

use crate::device::Device;
use crate::driver::{current, still, stream};
use crate::handles::Handles;
use crate::locked;
use crate::stream::Work;

type Made<T = ()> = Result<T, Status>;

const BF16: u32 = cudaDataType_t::CUDA_R_16BF as u32;
const F16: u32 = cudaDataType_t::CUDA_R_16F as u32;
const F32: u32 = cudaDataType_t::CUDA_R_32F as u32;
const INVALID: Status = Status::CUBLAS_STATUS_INVALID_VALUE;
const NOT_SUPPORTED: Status = Status::CUBLAS_STATUS_NOT_SUPPORTED;
/// What every algorithm begins with, so that one which was never named is known.
const ALGORITHM: u64 = 0x696e_666c;
/// Scratch of the algorithm that needs some.
const SCRATCH_BYTES: usize = 4096;
/// What addresses are multiples of, unless a preference says otherwise.
const ALIGNMENT: u64 = 256;

#[derive(Clone, Copy)]
struct Layout {
    kind: u32,
    rows: u64,
    columns: u64,
    stride: i64,
}

#[derive(Default, Clone, Copy)]
struct Description {
    transposed: (i32, i32),
    epilogue: u32,
    bias: u64,
    bias_kind: u32,
}

static HANDLES: Handles<usize> = Handles::new();
static LAYOUTS: Handles<Mutex<Layout>> = Handles::new();
static DESCRIPTIONS: Handles<Mutex<Description>> = Handles::new();
static PREFERENCES: Handles<Mutex<usize>> = Handles::new();

fn valid(whether: bool) -> Made {
    whether.then_some(()).ok_or(INVALID)
}

fn layout(handle: *mut c_void) -> Made<Layout> {
    LAYOUTS.get(handle).map(|layout| *locked(&layout)).ok_or(INVALID)
}

fn description(handle: *mut c_void) -> Made<Description> {
    DESCRIPTIONS.get(handle).map(|description| *locked(&description)).ok_or(INVALID)
}

/// # Safety
/// It is null or of that type.
unsafe fn take<T: Copy>(from: *const c_void, bytes: usize) -> Made<T> {
    valid(!from.is_null() && bytes == size_of::<T>())?;
    // SAFETY: passed on to the caller.
    Ok(unsafe { from.cast::<T>().read_unaligned() })
}

/// # Safety
/// It is null or may be written to.
unsafe fn put<T>(to: *mut T, value: T) -> Made {
    valid(!to.is_null())?;
    // SAFETY: passed on to the caller.
    unsafe { to.write(value) };
    Ok(())
}

fn number_bytes(kind: u32) -> Made<usize> {
    match kind {
        BF16 | F16 => Ok(2),
        F32 => Ok(4),
        _ => Err(NOT_SUPPORTED),
    }
}

/// A product that can be made: y[m, n] = x[m, k] * weight[n, k]^T + bias, row by row.
#[derive(Clone, Copy)]
struct Product {
    half: Half,
    wide: bool,
    bias: Option<(u64, u32)>,
    m: usize,
    n: usize,
    k: usize,
    strides: (usize, usize, usize),
}

impl Product {
    fn of(description: Description, a: Layout, b: Layout, d: Layout) -> Made<Self> {
        if description.transposed != (1, 0) || a.kind != b.kind {
            return Err(NOT_SUPPORTED);
        }
        let half = match a.kind {
            BF16 => Half::Bf16,
            F16 => Half::F16,
            _ => return Err(NOT_SUPPORTED),
        };
        if d.kind != F32 && d.kind != a.kind {
            return Err(NOT_SUPPORTED);
        }
        // op(A) is [n, k], B is [k, m], D is [n, m].
        valid(a.columns == d.rows && a.rows == b.rows && b.columns == d.columns)?;
        let stride = |layout: Layout| {
            let stride = usize::try_from(layout.stride).map_err(|_| INVALID)?;
            valid(stride as u64 >= layout.rows && layout.rows > 0 && layout.columns > 0).map(|()| stride)
        };
        let bias = match description.epilogue {
            0 | 1 => None,
            epilogue if epilogue == cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32 => {
                Some((description.bias, description.bias_kind))
            }
            _ => return Err(NOT_SUPPORTED),
        };
        let (m, n, k) = (d.columns as usize, d.rows as usize, a.rows as usize);
        Ok(Self { half, wide: d.kind == F32, bias, m, n, k, strides: (stride(a)?, stride(b)?, stride(d)?) })
    }

    /// Bytes from the first number to the last of each matrix: weight, x, y.
    fn bytes(&self) -> [usize; 3] {
        let reach =
            |columns: usize, rows: usize, stride: usize, size: usize| ((columns - 1) * stride + rows) * size;
        let (a, b, d) = self.strides;
        [
            reach(self.n, self.k, a, 2),
            reach(self.m, self.k, b, 2),
            reach(self.m, self.n, d, if self.wide { 4 } else { 2 }),
        ]
    }

    /// Sums go over parts of `part` numbers.
    fn make(&self, weight: u64, x: u64, y: u64, part: usize) {
        let (a, b, d) = self.strides;
        let widened = |at: u64, columns: usize, stride: usize| {
            let at = std::ptr::with_exposed_provenance::<u16>(at as usize);
            let mut wide = Vec::with_capacity(columns * self.k);
            for column in 0..columns {
                // SAFETY: whoever calls has looked whether the matrix is there.
                let numbers = (0..self.k).map(|i| unsafe { at.add(column * stride + i).read() });
                wide.extend(numbers.map(|bits| self.half.widen(bits)));
            }
            wide
        };
        let (weight, x) = (widened(weight, self.n, a), widened(x, self.m, b));
        let bias = |column: usize| {
            let Some((at, kind)) = self.bias else { return 0.0 };
            let at = std::ptr::with_exposed_provenance::<u8>(at as usize);
            // SAFETY: as above.
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
                for (x, weight) in x.chunks(part).zip(weight.chunks(part)) {
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
                // SAFETY: as above.
                unsafe {
                    match self.wide {
                        true => y.cast::<f32>().add(row * d + column).write(sum),
                        false => y.cast::<u16>().add(row * d + column).write(self.half.narrow(sum)),
                    }
                }
            }
        }
    }
}

/// Ways to make products, which differ in their sums, in what they need, and in what they take.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Whole = 1,
    /// With scratch.
    Split,
    /// Of few rows; that it is asked for more is seen only then.
    Few,
}

impl Way {
    const ALL: [Self; 3] = [Self::Whole, Self::Split, Self::Few];

    fn scratch_bytes(self) -> usize {
        if self == Self::Split { SCRATCH_BYTES } else { 0 }
    }

    fn takes(self, product: &Product) -> bool {
        self != Self::Few || product.m <= 24
    }

    fn part(self, product: &Product) -> usize {
        match self {
            Self::Whole => product.k,
            Self::Split => product.k.div_ceil(2),
            Self::Few => 64,
        }
    }
}

macro_rules! calls {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of cuBLASLt.")]
        ///
        /// # Safety
        /// As the library's documentation says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> Status {
            let call = || -> Made { $body };
            let outcome = call();
            outcome.err().unwrap_or(Status::CUBLAS_STATUS_SUCCESS)
        }
    )*};
}

/// `cublasLtGetVersion` of cuBLASLt.
#[unsafe(no_mangle)]
pub extern "C" fn cublasLtGetVersion() -> usize {
    130_000
}

calls! {
    fn cublasLtCreate(handle: *mut *mut c_void) {
        let device = current().map_err(|_| Status::CUBLAS_STATUS_NOT_INITIALIZED)?;
        // SAFETY: passed on to the caller.
        unsafe { put(handle, HANDLES.add(Arc::new(device.ordinal))) }
    }

    fn cublasLtDestroy(handle: *mut c_void) {
        HANDLES.remove(handle).map(drop).ok_or(Status::CUBLAS_STATUS_NOT_INITIALIZED)
    }

    fn cublasLtMatrixLayoutCreate(out: *mut *mut c_void, kind: u32, rows: u64, columns: u64, stride: i64) {
        number_bytes(kind)?;
        // SAFETY: passed on to the caller.
        unsafe { put(out, LAYOUTS.add(Arc::new(Mutex::new(Layout { kind, rows, columns, stride })))) }
    }

    fn cublasLtMatrixLayoutSetAttribute(handle: *mut c_void, attribute: u32, from: *const c_void, bytes: usize) {
        let layout = LAYOUTS.get(handle).ok_or(INVALID)?;
        if attribute != cublasLtMatrixLayoutAttribute_t::CUBLASLT_MATRIX_LAYOUT_COLS as u32 {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: passed on to the caller.
        locked(&layout).columns = unsafe { take(from, bytes) }?;
        Ok(())
    }

    fn cublasLtMatrixLayoutDestroy(handle: *mut c_void) {
        LAYOUTS.remove(handle).map(drop).ok_or(INVALID)
    }

    fn cublasLtMatmulDescCreate(out: *mut *mut c_void, compute: u32, scale: u32) {
        if compute != cublasComputeType_t::CUBLAS_COMPUTE_32F as u32 || scale != F32 {
            return Err(NOT_SUPPORTED);
        }
        // Without a kind of its own, a bias is of the output's.
        let description = Description { epilogue: 1, bias_kind: u32::MAX, ..Description::default() };
        // SAFETY: passed on to the caller.
        unsafe { put(out, DESCRIPTIONS.add(Arc::new(Mutex::new(description)))) }
    }

    fn cublasLtMatmulDescSetAttribute(handle: *mut c_void, attribute: u32, from: *const c_void, bytes: usize) {
        const TRANSPOSED: u32 = Attribute::CUBLASLT_MATMUL_DESC_TRANSA as u32;
        const EPILOGUE: u32 = Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE as u32;
        const BIAS: u32 = Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER as u32;
        const BIAS_KIND: u32 = Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE as u32;
        let description = DESCRIPTIONS.get(handle).ok_or(INVALID)?;
        let mut description = locked(&description);
        // SAFETY: passed on to the caller.
        unsafe {
            match attribute {
                TRANSPOSED => description.transposed.0 = take(from, bytes)?,
                EPILOGUE => description.epilogue = take(from, bytes)?,
                BIAS => description.bias = take(from, bytes)?,
                BIAS_KIND => description.bias_kind = take(from, bytes)?,
                _ => return Err(NOT_SUPPORTED),
            }
        }
        Ok(())
    }

    fn cublasLtMatmulDescDestroy(handle: *mut c_void) {
        DESCRIPTIONS.remove(handle).map(drop).ok_or(INVALID)
    }

    fn cublasLtMatmulPreferenceCreate(out: *mut *mut c_void) {
        // SAFETY: passed on to the caller.
        unsafe { put(out, PREFERENCES.add(Arc::new(Mutex::new(0)))) }
    }

    fn cublasLtMatmulPreferenceSetAttribute(handle: *mut c_void, attribute: u32, from: *const c_void, bytes: usize) {
        let preference = PREFERENCES.get(handle).ok_or(INVALID)?;
        if attribute != Preferred::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as u32 {
            return Err(NOT_SUPPORTED);
        }
        // SAFETY: passed on to the caller.
        *locked(&preference) = unsafe { take(from, bytes) }?;
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
        let scratch = *locked(PREFERENCES.get(preference).ok_or(INVALID)?.as_ref());
        layout(c)?;
        let product = Product::of(description(how)?, layout(a)?, layout(b)?, layout(d)?)?;
        let ways = Way::ALL.into_iter().filter(|way| way.scratch_bytes() <= scratch && way.takes(&product));
        let ways: Vec<Way> = ways.take(usize::try_from(wanted).map_err(|_| INVALID)?).collect();
        for (i, way) in ways.iter().enumerate() {
            let mut data = [0; 8];
            data[..2].copy_from_slice(&[ALGORITHM, *way as u64]);
            let result = cublasLtMatmulHeuristicResult_t {
                algo: cublasLtMatmulAlgo_t { data },
                workspaceSize: way.scratch_bytes(),
                state: Status::CUBLAS_STATUS_SUCCESS,
                wavesCount: 1.0,
                reserved: [0; 4],
            };
            // SAFETY: there is room for as many as are wanted.
            unsafe { found.add(i).write(result) };
        }
        // SAFETY: passed on to the caller.
        unsafe { put(count, ways.len() as c_int) }?;
        if ways.is_empty() { Err(NOT_SUPPORTED) } else { Ok(()) }
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
        valid(stream.device.ordinal == *ordinal)?;
        // SAFETY: both are numbers of the scale's type, on the host.
        let (alpha, beta) = unsafe { (take::<f32>(alpha, 4)?, take::<f32>(beta, 4)?) };
        if (alpha, beta) != (1.0, 0.0) || c != d.cast_const() || c_layout != d_layout {
            return Err(NOT_SUPPORTED);
        }
        let mut description = description(how)?;
        let out = layout(d_layout)?;
        if description.bias_kind == u32::MAX {
            description.bias_kind = out.kind;
        }
        let product = Product::of(description, layout(a_layout)?, layout(b_layout)?, out)?;
        valid(!algorithm.is_null())?;
        // SAFETY: passed on to the caller.
        let [magic, way, ..] = unsafe { (*algorithm).data };
        let way = Way::ALL.into_iter().find(|known| (ALGORITHM, *known as u64) == (magic, way)).ok_or(INVALID)?;
        if !way.takes(&product) {
            return Err(NOT_SUPPORTED);
        }
        let (weight, x, y) = (a.addr() as u64, b.addr() as u64, d.addr() as u64);
        let (scratch, scratch_bytes) = (workspace.addr() as u64, way.scratch_bytes());
        valid(scratch_bytes <= workspace_bytes)?;
        // Algorithms are chosen for addresses that are so aligned.
        valid([weight, x, y].iter().all(|address| address % ALIGNMENT == 0))?;
        let there = move |device: &Device| {
            let [weight_bytes, x_bytes, y_bytes] = product.bytes();
            let bias_size = |kind| if kind == F32 { 4 } else { 2 };
            device.holds(weight, weight_bytes)
                && device.holds(x, x_bytes)
                && device.holds(y, y_bytes)
                && product.bias.is_none_or(|(at, kind)| device.holds(at, product.n * bias_size(kind)))
                && (scratch_bytes == 0 || device.holds(scratch, scratch_bytes))
        };
        let work = move |device: &Device| {
            still(there(device))?;
            if scratch_bytes > 0 {
                let scratch = std::ptr::with_exposed_provenance_mut::<u8>(scratch as usize);
                // SAFETY: it is there, as was just seen.
                unsafe { scratch.write_bytes(0xff, scratch_bytes) };
            }
            product.make(weight, x, y, way.part(&product));
            Ok(())
        };
        stream.enqueue(Work::new(work)).map(drop).map_err(|_| Status::CUBLAS_STATUS_EXECUTION_FAILED)
    }
}
