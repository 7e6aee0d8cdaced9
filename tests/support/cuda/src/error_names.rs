//! Names and descriptions of driver errors.

use std::ffi::CStr;

use cudarc::driver::sys::CUresult;

/// Returns an error's name and description.
pub(crate) fn name_and_description(error: CUresult) -> (&'static CStr, &'static CStr) {
    macro_rules! table {
        ($($name:ident $description:literal),* $(,)?) => {
            match error {
                $(CUresult::$name => {
                    const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!("an identifier contains no zero byte"),
                    };
                    (NAME, $description)
                })*
                _ => (c"CUDA_ERROR_UNKNOWN", c"unknown error"),
            }
        };
    }
    table! {
        CUDA_SUCCESS c"no error",
        CUDA_ERROR_INVALID_VALUE c"invalid argument",
        CUDA_ERROR_OUT_OF_MEMORY c"out of memory",
        CUDA_ERROR_NOT_INITIALIZED c"initialization error",
        CUDA_ERROR_NO_DEVICE c"no CUDA-capable device is detected",
        CUDA_ERROR_INVALID_DEVICE c"invalid device ordinal",
        CUDA_ERROR_INVALID_CONTEXT c"invalid device context",
        CUDA_ERROR_NO_BINARY_FOR_GPU c"no kernel image is available for execution on the device",
        CUDA_ERROR_ECC_UNCORRECTABLE c"uncorrectable ECC error encountered",
        CUDA_ERROR_INVALID_PTX c"a PTX JIT compilation failed",
        CUDA_ERROR_INVALID_HANDLE c"invalid resource handle",
        CUDA_ERROR_ILLEGAL_STATE c"the operation cannot be performed in the present state",
        CUDA_ERROR_NOT_FOUND c"named symbol not found",
        CUDA_ERROR_NOT_READY c"device not ready",
        CUDA_ERROR_ILLEGAL_ADDRESS c"an illegal memory access was encountered",
        CUDA_ERROR_LAUNCH_FAILED c"unspecified launch failure",
        CUDA_ERROR_NOT_SUPPORTED c"operation not supported",
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED c"operation not permitted when stream is capturing",
        CUDA_ERROR_STREAM_CAPTURE_INVALIDATED c"operation failed due to a previous error during capture",
        CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD c"attempt to terminate a thread-local capture sequence from another thread",
    }
}
