//! What GPUs are simulated, as the environment says.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

/// The variable with the settings: `name=value`, separated by commas; all have defaults.
pub const VARIABLE: &str = "INFLIGHT_SIMULATED_GPU";
/// The variable with the name of a file: while it is there, the next kernel fails, with the number in it as the driver's error;
/// of one GPU only, if a second number names it.
pub const FAULT_VARIABLE: &str = "INFLIGHT_SIMULATED_GPU_FAULT";

/// What GPUs are simulated.
#[derive(Debug, Clone)]
pub struct Settings {
    /// `gpus`: how many.
    pub gpus: usize,
    /// `memory`: MiB of each.
    pub memory_mib: u64,
    /// `taken`: MiB of it that other processes have.
    pub taken_mib: u64,
    /// `racing`: MiB of it that other processes take unseen, so that allocations fail although memory was free.
    pub racing_mib: u64,
    /// `compute`: compute capability, as `9.0`.
    pub compute: (i32, i32),
    /// `cuda`: what the driver supports, as `13.0`.
    pub cuda: (i32, i32),
    /// `ptx`: the virtual architecture that kernels claim to be compiled of, instead of that of their image; from 90 on they
    /// may overlap.
    pub ptx: Option<i32>,
    /// `overlap`: whether launches that overlap are accepted.
    pub overlap: bool,
    /// `late`: how many microseconds streams may take until they begin what nobody waits for.
    pub late: Duration,
    /// The file whose appearance is a fault.
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
            ptx: None,
            overlap: true,
            late: Duration::from_micros(500),
            fault: None,
        };
        for setting in text.split(',').filter(|setting| !setting.is_empty()) {
            let wrong = || format!("{VARIABLE}: {setting:?} is no setting of the simulated GPU");
            let (name, value) = setting.split_once('=').ok_or_else(wrong)?;
            let number = || value.parse::<u32>().map_err(|_| wrong());
            let version = || {
                let (major, minor) = value.split_once('.').ok_or_else(wrong)?;
                Ok::<_, String>((major.parse().map_err(|_| wrong())?, minor.parse().map_err(|_| wrong())?))
            };
            match name {
                "gpus" => settings.gpus = number()? as usize,
                "memory" => settings.memory_mib = number()?.into(),
                "taken" => settings.taken_mib = number()?.into(),
                "racing" => settings.racing_mib = number()?.into(),
                "compute" => settings.compute = version()?,
                "cuda" => settings.cuda = version()?,
                "ptx" => settings.ptx = Some(number()? as i32),
                "overlap" => settings.overlap = value.parse().map_err(|_| wrong())?,
                "late" => settings.late = Duration::from_micros(number()?.into()),
                _ => return Err(wrong()),
            }
        }
        Ok(settings)
    }

    /// What the environment says; a wrong setting ends the process, for nobody could be told.
    pub(crate) fn get() -> &'static Self {
        static SETTINGS: OnceLock<Settings> = OnceLock::new();
        SETTINGS.get_or_init(|| {
            let text = std::env::var(VARIABLE).unwrap_or_default();
            let mut settings = Self::parse(&text).unwrap_or_else(|wrong| {
                eprintln!("{wrong}");
                std::process::exit(2)
            });
            settings.fault = std::env::var_os(FAULT_VARIABLE).map(PathBuf::from);
            settings
        })
    }
}
