//! Processes on simulated GPUs.

use std::ffi::OsString;
use std::os::unix::fs::symlink;

use anyhow::{Context, Result, ensure};
use inflight_fixtures::TempDir;
use inflight_simulated_driver::settings::{FAULT_VARIABLE, VARIABLE};

/// File names of the CUDA libraries that the simulated driver stands for.
const LIBRARIES: [&str; 3] = ["libcuda.so", "libcublasLt.so", "libnccl.so.2"];

/// Simulated GPUs, seen by processes that run with its [`environment`](Self::environment).
#[derive(Debug)]
pub struct SimulatedGpu {
    folder: TempDir,
    settings: String,
}

impl SimulatedGpu {
    /// Whether kernels can run on it; they are built only with a C++ compiler.
    pub const AVAILABLE: bool = inflight_simulated_driver::AVAILABLE;

    /// Creates simulated GPUs with `settings`, see [`inflight_simulated_driver::settings`].
    ///
    /// # Errors
    /// The driver library is not in the folder of the running test, or a file operation fails.
    pub fn new(settings: &str) -> Result<Self> {
        let program = std::env::current_exe()?;
        let built = program.with_file_name("libinflight_simulated_driver.so");
        ensure!(built.is_file(), "{} is not there", built.display());
        let folder = TempDir::new("inflight-simulated-gpu")?;
        for name in LIBRARIES {
            // Three links to one file: the dynamic loader loads it once.
            symlink(&built, folder.path().join(name)).context("cannot link a library")?;
        }
        Ok(Self { folder, settings: settings.to_owned() })
    }

    /// Runs the test named `test` of this program again in a child process with simulated GPUs, because the
    /// dynamic loader reads its search path only at process start. Returns true in the child, false outside.
    ///
    /// # Errors
    /// The test fails in the child, or the simulated GPUs cannot be created.
    pub fn within(settings: &str, test: &str) -> Result<bool> {
        // Variable with the path of a file that the child creates, as proof that the test ran.
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
        let started = gpu.folder.path().join("started");
        let status = std::process::Command::new(std::env::current_exe()?)
            .args(["--exact", test, "--nocapture"])
            .envs(gpu.environment())
            .env(INSIDE, &started)
            .status()?;
        ensure!(status.success(), "{test} failed with {status} on GPUs that are {settings}");
        ensure!(started.exists(), "there is no test {test}");
        Ok(false)
    }

    /// Returns the environment variables of a process that is to run on the simulated GPUs.
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

    /// Makes kernels on GPU `gpu` fail with CUDA driver error `error`, until [`SimulatedGpu::heal`].
    ///
    /// # Errors
    /// A file operation fails.
    pub fn fail(&self, gpu: usize, error: u32) -> Result<()> {
        let partial = self.folder.path().join("fault.partial");
        std::fs::write(&partial, format!("{error} {gpu}"))?;
        Ok(std::fs::rename(partial, self.folder.path().join("fault"))?)
    }

    /// Clears the fault for GPUs opened from now on.
    ///
    /// # Errors
    /// A file operation fails.
    pub fn heal(&self) -> Result<()> {
        Ok(std::fs::remove_file(self.folder.path().join("fault"))?)
    }
}
