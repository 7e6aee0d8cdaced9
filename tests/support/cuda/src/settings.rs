//! Configuration of the simulated GPUs, from environment variables.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use crate::lie::Lie;

/// Environment variable with the settings: `name=value`, separated by commas; all have defaults.
pub const VARIABLE: &str = "INFLIGHT_SIMULATED_GPU";
/// Environment variable with the path of a file that injects faults: while it exists, the next kernel fails
/// with the driver error number in it; of one GPU only, if a second number names it.
pub const FAULT_VARIABLE: &str = "INFLIGHT_SIMULATED_GPU_FAULT";

/// Configuration of the simulated GPUs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// `gpus`: number of GPUs.
    pub gpus: usize,
    /// `memory`: MiB of each GPU.
    pub memory_mib: u64,
    /// `taken`: MiB of it in use by other processes.
    pub taken_mib: u64,
    /// `racing`: MiB of it that other processes take after free memory is reported, so that allocations fail.
    pub racing_mib: u64,
    /// `compute`: compute capability, such as `9.0`.
    pub compute: (i32, i32),
    /// `cuda`: CUDA version of the driver, such as `13.0`.
    pub cuda: (i32, i32),
    /// `cublaslt`: CUDA version of cuBLASLt; without it the driver's.
    pub cublaslt: Option<(i32, i32)>,
    /// `ptx`: virtual architecture that kernels report, instead of that of their image; from 90 on they
    /// support overlap.
    pub ptx: Option<i32>,
    /// `overlap`: whether launches with programmatic serialization are accepted.
    pub overlap: bool,
    /// `checks`: whether kernels' addresses and shared-memory accesses are checked, which takes most of their time.
    pub checks: bool,
    /// `late`: maximum random delay, in microseconds, before streams start work that is not waited for.
    pub late: Duration,
    /// `lie`: what it does wrong without an error, for checks of checks.
    pub(crate) lie: Option<Lie>,
    /// File that injects faults.
    pub fault: Option<PathBuf>,
}

impl Settings {
    fn parse(text: &str) -> Result<Self, String> {
        let mut settings = Self {
            gpus: 1,
            memory_mib: 1024,
            taken_mib: 0,
            racing_mib: 0,
            compute: (9, 0),
            cuda: (13, 0),
            cublaslt: None,
            ptx: None,
            overlap: true,
            checks: true,
            late: Duration::from_micros(500),
            lie: None,
            fault: None,
        };
        for setting in text.split(',').filter(|setting| !setting.is_empty()) {
            let invalid = || format!("{VARIABLE}: {setting:?} is no setting of the simulated GPU");
            let (name, value) = setting.split_once('=').ok_or_else(invalid)?;
            let number = || value.parse::<u32>().map_err(|_| invalid());
            let version = || {
                let (major, minor) = value.split_once('.').ok_or_else(invalid)?;
                Ok::<_, String>((
                    major.parse().map_err(|_| invalid())?,
                    minor.parse().map_err(|_| invalid())?,
                ))
            };
            match name {
                "gpus" => settings.gpus = number()? as usize,
                "memory" => settings.memory_mib = number()?.into(),
                "taken" => settings.taken_mib = number()?.into(),
                "racing" => settings.racing_mib = number()?.into(),
                "compute" => settings.compute = version()?,
                "cuda" => settings.cuda = version()?,
                "cublaslt" => settings.cublaslt = Some(version()?),
                "ptx" => settings.ptx = Some(number()? as i32),
                "overlap" => settings.overlap = value.parse().map_err(|_| invalid())?,
                "checks" => settings.checks = value.parse().map_err(|_| invalid())?,
                "lie" => settings.lie = Some(Lie::of_name(value).ok_or_else(invalid)?),
                "late" => settings.late = Duration::from_micros(number()?.into()),
                _ => return Err(invalid()),
            }
        }
        Ok(settings)
    }

    /// Returns the settings of the environment. Exits the process on an invalid setting, since no caller can
    /// handle the error.
    pub(crate) fn get() -> &'static Self {
        static SETTINGS: OnceLock<Settings> = OnceLock::new();
        SETTINGS.get_or_init(|| {
            let text = std::env::var(VARIABLE).unwrap_or_default();
            let mut settings = Self::parse(&text).unwrap_or_else(|invalid| {
                eprintln!("{invalid}");
                std::process::exit(2)
            });
            settings.fault = std::env::var_os(FAULT_VARIABLE).map(PathBuf::from);
            settings
        })
    }
}
