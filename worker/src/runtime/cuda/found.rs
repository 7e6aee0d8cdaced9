//! Which GPUs there are, and why one can't be used.

use cudarc::driver::{DriverError, result, sys};
use inflight_kernels::cuda::Profile;

use super::driver::explain;

/// The driver that this build's kernels need: CUDA 13.0, which is release 580.
const DRIVER_MIN: i32 = 13_000;
/// Oldest architecture: Ampere.
const COMPUTE_MIN: (i32, i32) = (8, 0);

/// Why there is no GPU to use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// No libcuda.so.
    #[error("there is no NVIDIA driver (libcuda.so is not found)")]
    NoDriver,
    /// The driver is older than the kernels.
    #[error("the NVIDIA driver supports CUDA {found}; CUDA 13.0, which is driver 580 or later, is needed")]
    OldDriver {
        /// What it supports.
        found: String,
    },
    /// The driver is there, but no such device.
    #[error("there is no GPU {ordinal}: the driver sees {count}")]
    NoDevice {
        /// Which was asked for.
        ordinal: usize,
        /// How many there are.
        count: i32,
    },
    /// A GPU without the instructions that kernels need.
    #[error("GPU {ordinal}, {name}, has compute capability {major}.{minor}; 8.0 (Ampere) or later is needed")]
    OldDevice {
        /// Which.
        ordinal: usize,
        /// Its name.
        name: String,
        /// Compute capability.
        major: i32,
        /// Compute capability.
        minor: i32,
    },
    /// Several GPUs, and nothing by which they could tell each other anything.
    #[error(
        "tensor parallelism over GPUs needs NCCL 2.10 or later, which was not found ({found}); install it (the package \
         libnccl2, or the Python wheel nvidia-nccl-cu13) and name its folder in LD_LIBRARY_PATH"
    )]
    Collectives {
        /// What was found instead.
        found: String,
    },
    /// GPUs that can't work together.
    #[error("NCCL cannot create a communicator of GPUs {gpus}: {reason}")]
    Group {
        /// Which.
        gpus: String,
        /// What it says.
        reason: String,
    },
    /// GPUs of a group that would not compute alike.
    #[error(
        "GPU {first} is {first_name} and GPU {other} is {other_name}; GPUs of a tensor-parallel group must be of one model"
    )]
    Unequal {
        /// The first of the group.
        first: usize,
        /// Its name.
        first_name: String,
        /// One that differs.
        other: usize,
        /// Its name.
        other_name: String,
    },
    /// The driver refused.
    #[error("the NVIDIA driver refuses GPU {ordinal}: {reason}")]
    Refused {
        /// Which.
        ordinal: usize,
        /// What it says.
        reason: String,
    },
}

/// What is known of a GPU before it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) ordinal: usize,
    pub(super) name: String,
    pub(super) compute: (i32, i32),
    pub(super) profile: Profile,
}

/// How many GPUs the driver sees; 0 without one, or where it refuses to say.
pub(super) fn count() -> u32 {
    // SAFETY: only loads the library. Everything else of the driver panics without it.
    if !unsafe { sys::is_culib_present() } {
        return 0;
    }
    let count = result::init().and_then(|()| result::device::get_count());
    count.ok().and_then(|count| u32::try_from(count).ok()).unwrap_or(0)
}

/// Asks whether a GPU can be used.
///
/// # Errors
/// [`Unavailable`], saying why not.
pub(super) fn find(ordinal: usize) -> Result<Found, Unavailable> {
    // SAFETY: only loads the library. Everything else of the driver panics without it.
    if !unsafe { sys::is_culib_present() } {
        return Err(Unavailable::NoDriver);
    }
    let refused = |error: DriverError| Unavailable::Refused { ordinal, reason: explain(error) };
    let mut version = 0;
    // SAFETY: writes one number.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(refused)?;
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
    // SAFETY: the device exists.
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
    Ok(Found { ordinal, name, compute: (major, minor), profile })
}

/// What is known of GPUs that are to work together.
///
/// # Errors
/// [`Unavailable`], saying why not.
pub(super) fn find_all(gpus: &[usize]) -> Result<Vec<Found>, Unavailable> {
    let found = gpus.iter().map(|gpu| find(*gpu)).collect::<Result<Vec<_>, _>>()?;
    alike(&found)?;
    Ok(found)
}

/// Checks that steps of all of them are planned and computed alike.
fn alike(found: &[Found]) -> Result<(), Unavailable> {
    let kind = |gpu: &Found| (gpu.name.clone(), gpu.compute, gpu.profile);
    let other = found.iter().find(|other| kind(other) != kind(&found[0]));
    other.map_or(Ok(()), |other| {
        Err(Unavailable::Unequal {
            first: found[0].ordinal,
            first_name: found[0].name.clone(),
            other: other.ordinal,
            other_name: other.name.clone(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_of_a_group_are_of_one_kind() {
        let profile =
            Profile { multiprocessors: 132, shared_bytes: 232_448, multiprocessor_shared_bytes: 233_472 };
        let gpu = |ordinal, name: &str| Found { ordinal, name: name.to_owned(), compute: (9, 0), profile };
        assert_eq!(alike(&[gpu(3, "H200")]), Ok(()));
        assert_eq!(alike(&[gpu(0, "H200"), gpu(5, "H200")]), Ok(()));
        let mixed = alike(&[gpu(0, "H200"), gpu(2, "H200"), gpu(1, "H100")]).unwrap_err().to_string();
        for clue in ["GPU 0 is H200", "GPU 1 is H100", "of one kind"] {
            assert!(mixed.contains(clue), "{mixed}");
        }
        let cut = Profile { multiprocessors: 60, ..profile };
        assert!(alike(&[gpu(0, "H200"), Found { profile: cut, ..gpu(1, "H200") }]).is_err());
    }
}
