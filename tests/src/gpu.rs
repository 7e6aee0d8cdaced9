use std::ffi::OsString;
use std::os::unix::fs::symlink;

use anyhow::{Context, Result, ensure};
use inflight_fixtures::TempDir;
use inflight_simulated_driver::settings::{FAULT_VARIABLE, VARIABLE};

/// Names that the libraries of a GPU are looked up by.
const LIBRARIES: [&str; 3] = ["libcuda.so", "libcublasLt.so", "libnccl.so.2"];

/// GPUs that are simulated for the processes that get its environment.
#[derive(Debug)]
pub struct SimulatedGpu {
    folder: TempDir,
    settings: String,
}

impl SimulatedGpu {
    /// Whether kernels can run on it: they need a C++ compiler to be built.
    pub const AVAILABLE: bool = inflight_simulated_driver::AVAILABLE;

    /// With these settings; see [`inflight_simulated_driver::settings`].
    ///
    /// # Errors
    /// The library was not built beside the running test, or the file system refuses.
    pub fn new(settings: &str) -> Result<Self> {
        let program = std::env::current_exe()?;
        let built = program.with_file_name("libinflight_simulated_driver.so");
        ensure!(built.is_file(), "{} is not there", built.display());
        let folder = TempDir::new("inflight-simulated-gpu")?;
        for name in LIBRARIES {
            // One file by three names is loaded once.
            symlink(&built, folder.path().join(name)).context("cannot link a library")?;
        }
        Ok(Self { folder, settings: settings.to_owned() })
    }

    /// What a process needs to find it.
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        let mut path = OsString::from(self.folder.path());
        if let Some(before) = std::env::var_os("LD_LIBRARY_PATH") {
            path.push(":");
            path.push(before);
        }
        vec![
            ("LD_LIBRARY_PATH", path),
            (VARIABLE, self.settings.clone().into()),
            (FAULT_VARIABLE, self.folder.path().join("fault").into()),
        ]
    }

    /// The next kernel on this GPU fails with the driver's error of this number, until [`SimulatedGpu::heal`].
    ///
    /// # Errors
    /// The file system refuses.
    pub fn fail(&self, gpu: usize, error: u32) -> Result<()> {
        let partial = self.folder.path().join("fault.partial");
        std::fs::write(&partial, format!("{error} {gpu}"))?;
        Ok(std::fs::rename(partial, self.folder.path().join("fault"))?)
    }

    /// GPUs that are opened from now on work.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn heal(&self) -> Result<()> {
        Ok(std::fs::remove_file(self.folder.path().join("fault"))?)
    }
}
