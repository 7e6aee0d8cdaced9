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
    /// Whether it has kernels: they need a C++ compiler to be built.
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

    /// Runs the test of this name of the running program once more, in a process that has such GPUs: libraries are looked for where
    /// the environment said when a process began. True in that process, which is to go on.
    ///
    /// # Errors
    /// The test failed there, or as [`SimulatedGpu::new`].
    pub fn within(settings: &str, test: &str) -> Result<bool> {
        // The name of a file that says that the test was there.
        const INSIDE: &str = "INFLIGHT_TEST_INSIDE_SIMULATION";
        if let Some(file) = std::env::var_os(INSIDE) {
            std::fs::write(file, test)?;
            return Ok(true);
        }
        if !Self::AVAILABLE {
            inflight_fixtures::skipped(
                "the simulated GPU",
                "there was no C++ compiler to build the kernels with",
            );
            return Ok(false);
        }
        let gpu = Self::new(settings)?;
        let begun = gpu.folder.path().join("begun");
        let status = std::process::Command::new(std::env::current_exe()?)
            .args(["--exact", test, "--nocapture"])
            .envs(gpu.environment())
            .env(INSIDE, &begun)
            .status()?;
        ensure!(status.success(), "{test} failed with {status} on GPUs that are {settings}");
        ensure!(begun.exists(), "there is no test {test}");
        Ok(false)
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
