//! Device that a worker runs on.

use std::str::FromStr;

use inflight_runtime_sim::{SpecError, read_profile};
use inflight_worker_core::DeviceProfile;

/// Device that runs the model.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Device {
    /// GPUs (`--gpu`) if they are available and can run the model, else the CPU.
    #[default]
    Auto,
    /// CPU cores.
    Cpu,
    /// NVIDIA GPU by ordinal among the visible ones, by default 0; with tensor parallelism, the GPU of rank
    /// 0.
    Cuda(Option<u32>),
    /// Simulated device: takes the time that the profile says and generates meaningless tokens.
    Sim(DeviceProfile),
}

/// Error for an unknown device.
#[derive(Debug, thiserror::Error)]
pub enum UnknownDevice {
    /// Unknown device name.
    #[error("unknown device `{0}`; this build knows `auto`, `cpu`, `cuda`, `cuda:N` and `sim:PROFILE`")]
    Name(String),
    /// Invalid profile of a simulated device.
    #[error(transparent)]
    Profile(#[from] SpecError),
}

impl FromStr for Device {
    type Err = UnknownDevice;

    fn from_str(name: &str) -> Result<Self, UnknownDevice> {
        match name {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(None)),
            other => match (other.strip_prefix("sim:"), other.strip_prefix("cuda:")) {
                (Some(profile), _) => Ok(Self::Sim(read_profile(profile)?)),
                (_, Some(ordinal)) => {
                    let unknown = |_| UnknownDevice::Name(other.to_owned());
                    ordinal.parse().map(|ordinal| Self::Cuda(Some(ordinal))).map_err(unknown)
                }
                _ => Err(UnknownDevice::Name(other.to_owned())),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_are_parsed_and_unknown_ones_are_rejected() {
        for (name, device) in
            [("auto", Device::Auto), ("cpu", Device::Cpu), ("cuda:3", Device::Cuda(Some(3)))]
        {
            assert_eq!(name.parse::<Device>().unwrap(), device);
        }
        assert_eq!("cuda".parse::<Device>().unwrap(), Device::Cuda(None));
        for name in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA"] {
            let refused = name.parse::<Device>().unwrap_err().to_string();
            assert!(refused.contains("cuda:N"), "{refused}");
        }
    }
}
