//! Errors of the CUDA driver as text and as [`DeviceError`].

use cudarc::driver::DriverError;
use inflight_kernels::cuda::DeviceError;

/// Returns the driver's text and name of an error. Panics without a driver library.
pub(super) fn error_message(error: DriverError) -> String {
    let text = |text: Result<&std::ffi::CStr, DriverError>| {
        text.map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(error.error_string()), text(error.error_name()))
}

/// Returns a conversion of driver errors to [`DeviceError::Failed`]; `what` names the failed operation.
pub(super) fn failed(what: &str) -> impl Fn(DriverError) -> DeviceError {
    move |error| DeviceError::Failed { what: what.to_owned(), reason: error_message(error) }
}
