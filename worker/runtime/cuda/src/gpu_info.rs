//! GPU discovery: properties of each GPU, and the reasons why one cannot be used.

use cudarc::driver::{DriverError, result, sys};
use inflight_kernels::cuda::Profile;

use super::driver_error::error_message;

/// Minimum driver version: CUDA 12.2, release 535. The embedded machine code is that of CUDA 12, which later drivers load, too,
/// and no function of the driver is called that this release lacks.
const DRIVER_MIN: i32 = 12_020;
/// Minimum compute capability: Ampere.
const COMPUTE_MIN: (i32, i32) = (8, 0);

/// Reasons why GPUs cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// libcuda.so is not installed.
    #[error("there is no NVIDIA driver (libcuda.so is not found)")]
    NoDriver,
    /// The driver is too old for the kernels.
    #[error("the NVIDIA driver supports CUDA {found}; CUDA 12.2, which is driver 535 or later, is needed")]
    OldDriver {
        /// CUDA version that it supports.
        found: String,
    },
    /// The driver reports no such GPU.
    #[error("there is no GPU {ordinal}: the driver sees {count}")]
    NoDevice {
        /// Requested ordinal.
        ordinal: usize,
        /// Number of GPUs.
        count: i32,
    },
    /// The GPU's architecture lacks instructions that the kernels use.
    #[error("GPU {ordinal}, {name}, has compute capability {major}.{minor}; 8.0 (Ampere) or later is needed")]
    OldDevice {
        /// Its ordinal.
        ordinal: usize,
        /// Its name.
        name: String,
        /// Major compute capability.
        major: i32,
        /// Minor compute capability.
        minor: i32,
    },
    /// NCCL, which a tensor-parallel group needs, is missing or too old.
    #[error(
        "tensor parallelism over GPUs needs NCCL 2.10 or later, which was not found ({found}); install it (the package \
         libnccl2, or the Python wheel nvidia-nccl-cu13) and name its folder in LD_LIBRARY_PATH"
    )]
    Collectives {
        /// Version found, or the loader's error.
        found: String,
    },
    /// NCCL refused to create a communicator.
    #[error("NCCL cannot create a communicator of GPUs {gpus}: {reason}")]
    Group {
        /// Ordinals of the GPUs.
        gpus: String,
        /// NCCL's error.
        reason: String,
    },
    /// The GPUs of a group are of different models.
    #[error(
        "GPU {first} is {first_name} and GPU {other} is {other_name}; GPUs of a tensor-parallel group must be of one model"
    )]
    Unequal {
        /// Ordinal of the group's first GPU.
        first: usize,
        /// Its name.
        first_name: String,
        /// Ordinal of one that differs.
        other: usize,
        /// Its name.
        other_name: String,
    },
    /// A driver call failed.
    #[error("the NVIDIA driver refuses GPU {ordinal}: {reason}")]
    Refused {
        /// Ordinal of the GPU.
        ordinal: usize,
        /// The driver's error.
        reason: String,
    },
}

/// Properties of a usable GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GpuInfo {
    pub(super) ordinal: usize,
    pub(super) name: String,
    pub(super) compute: (i32, i32),
    pub(super) profile: Profile,
}

/// Returns the number of GPUs that the driver reports; 0 without a driver or if the query fails.
pub(super) fn count() -> u32 {
    // SAFETY: only loads the library; every other driver call panics without it, so this comes first.
    if !unsafe { sys::is_culib_present() } {
        return 0;
    }
    let count = result::init().and_then(|()| result::device::get_count());
    count.ok().and_then(|count| u32::try_from(count).ok()).unwrap_or(0)
}

/// Returns the bytes of a GPU's memory; `None` without a driver or such a GPU.
pub(super) fn memory_bytes(ordinal: usize) -> Option<u64> {
    if ordinal >= count() as usize {
        return None;
    }
    let device = result::device::get(i32::try_from(ordinal).ok()?).ok()?;
    // SAFETY: `device` was returned by the driver.
    let bytes = unsafe { result::device::total_mem(device) };
    bytes.ok().map(|bytes| bytes as u64)
}

/// Returns the CUDA version that the driver supports, 1000 times its major and 10 times its minor number.
pub(super) fn driver_version() -> Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: the driver writes one `int` to `version`.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
    Ok(version)
}

/// Checks that a GPU can be used, and returns its properties.
///
/// # Errors
/// [`Unavailable`] with the reason.
pub(super) fn probe(ordinal: usize) -> Result<GpuInfo, Unavailable> {
    // SAFETY: only loads the library; every other driver call panics without it, so this comes first.
    if !unsafe { sys::is_culib_present() } {
        return Err(Unavailable::NoDriver);
    }
    let refused = |error: DriverError| Unavailable::Refused { ordinal, reason: error_message(error) };
    let version = driver_version().map_err(refused)?;
    if version < DRIVER_MIN {
        let found = format!("{}.{}", version / 1000, version % 1000 / 10);
        return Err(Unavailable::OldDriver { found });
    }
    result::init().map_err(refused)?;
    let count = result::device::get_count().map_err(refused)?;
    if i32::try_from(ordinal).map_or(true, |ordinal| ordinal >= count) {
        return Err(Unavailable::NoDevice { ordinal, count });
    }
    let device = result::device::get(ordinal as i32).map_err(refused)?;
    use sys::CUdevice_attribute as Attribute;
    // SAFETY: `device` was returned by the driver.
    let attribute = |which| unsafe { result::device::get_attribute(device, which) }.map_err(refused);
    let name = result::device::get_name(device).map_err(refused)?;
    let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    if (major, minor) < COMPUTE_MIN {
        return Err(Unavailable::OldDevice { ordinal, name, major, minor });
    }
    let profile = Profile {
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as u32,
        multiprocessor_shared_bytes: attribute(
            Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
        )? as u32,
    };
    Ok(GpuInfo { ordinal, name, compute: (major, minor), profile })
}

/// Checks that the GPUs can be used as a group, and returns their properties.
///
/// # Errors
/// [`Unavailable`] with the reason.
pub(super) fn probe_all(gpus: &[usize]) -> Result<Vec<GpuInfo>, Unavailable> {
    let infos = gpus.iter().map(|gpu| probe(*gpu)).collect::<Result<Vec<_>, _>>()?;
    check_same_model(&infos)?;
    Ok(infos)
}

/// Checks that all GPUs are of one model, so that ranks plan and compute steps identically.
fn check_same_model(gpus: &[GpuInfo]) -> Result<(), Unavailable> {
    let kind = |gpu: &GpuInfo| (gpu.name.clone(), gpu.compute, gpu.profile);
    let other = gpus.iter().find(|other| kind(other) != kind(&gpus[0]));
    other.map_or(Ok(()), |other| {
        Err(Unavailable::Unequal {
            first: gpus[0].ordinal,
            first_name: gpus[0].name.clone(),
            other: other.ordinal,
            other_name: other.name.clone(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_of_a_group_are_of_one_model() {
        let profile =
            Profile { multiprocessors: 132, shared_bytes: 232_448, multiprocessor_shared_bytes: 233_472 };
        let gpu = |ordinal, name: &str| GpuInfo { ordinal, name: name.to_owned(), compute: (9, 0), profile };
        assert_eq!(check_same_model(&[gpu(3, "H200")]), Ok(()));
        assert_eq!(check_same_model(&[gpu(0, "H200"), gpu(5, "H200")]), Ok(()));
        let mixed =
            check_same_model(&[gpu(0, "H200"), gpu(2, "H200"), gpu(1, "H100")]).unwrap_err().to_string();
        for clue in ["GPU 0 is H200", "GPU 1 is H100", "of one model"] {
            assert!(mixed.contains(clue), "{mixed}");
        }
        let smaller = Profile { multiprocessors: 60, ..profile };
        assert!(check_same_model(&[gpu(0, "H200"), GpuInfo { profile: smaller, ..gpu(1, "H200") }]).is_err());
    }
}
