//! Wall clock of a process that a test can set: a library preloaded into it adds an offset to the real one.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

const SECOND: i64 = 1_000_000_000;
const DAY: i64 = 86_400 * SECOND;

/// Offsets that a clock jumps to, beside [`FakeClock::BASE`]: an operator's mistake, a time zone, a time server.
pub const JUMPS: [i64; 7] = [-DAY, DAY, -3600 * SECOND, 3600 * SECOND, -SECOND, SECOND, 0];

/// Library that offsets the wall clock of the processes it is preloaded into.
#[derive(Debug, Clone)]
pub struct ClockLibrary(PathBuf);

impl ClockLibrary {
    /// Compiles the library into `folder`.
    pub fn build(folder: &Path) -> Result<Self> {
        let library = folder.join("clock_offset.so");
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let mut command = Command::new(&compiler);
        command.args(["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"]).arg(&library);
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/attacks/clock_offset.c")).arg("-ldl");
        let output = command.output().with_context(|| format!("cannot run {compiler}"))?;
        ensure!(output.status.success(), "{compiler}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(Self(library))
    }
}

/// Wall clock of a process.
#[derive(Debug)]
pub struct FakeClock {
    library: ClockLibrary,
    path: PathBuf,
    file: File,
}

impl FakeClock {
    /// Offset at the start: 400 days, so that no date of the fake clock is one of the real clock.
    const BASE: i64 = 400 * DAY;

    /// Creates a clock whose offset is in the file `name` of `folder`.
    pub fn new(library: &ClockLibrary, folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(name);
        let clock = Self { library: library.clone(), file: File::create(&path)?, path };
        clock.jump(0)?;
        Ok(clock)
    }

    /// Sets the clock to the real time, the base offset and `offset` nanoseconds.
    pub fn jump(&self, offset: i64) -> Result<()> {
        Ok(self.file.write_all_at(&(Self::BASE + offset).to_ne_bytes(), 0)?)
    }

    /// Returns the environment variables of a process that has this clock.
    pub fn variables(&self) -> [(String, String); 2] {
        let text = |path: &Path| path.display().to_string();
        [
            ("LD_PRELOAD".to_owned(), text(&self.library.0)),
            ("INFLIGHT_CLOCK_OFFSET".to_owned(), text(&self.path)),
        ]
    }

    /// Returns the years and months that this clock may have shown lately. Sets it.
    pub fn months(&self) -> Result<[String; 2]> {
        let month = |offset| {
            self.jump(offset)?;
            self.month()
        };
        Ok([month(-DAY)?, month(DAY)?])
    }

    /// Returns the year and month as another program sees them.
    fn month(&self) -> Result<String> {
        let output = Command::new("date").args(["-u", "+%Y-%m"]).envs(self.variables()).output()?;
        ensure!(output.status.success(), "date: {}", String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8(output.stdout)?.trim().to_owned())
    }
}
