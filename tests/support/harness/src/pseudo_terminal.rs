//! A program in a pseudo-terminal, with an emulated screen.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::num::NonZero;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, ensure};
use rustix::fs::{Mode, OFlags};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;

use crate::process::{ProcessTag, kill};
use crate::{DEADLINE, eventually};

/// Emulated screen, and what happened on it.
struct Emulator {
    parser: vt100::Parser,
    used_alternate_screen: bool,
    /// Bytes written by the program.
    written: u64,
}

/// Program whose standard streams are a pseudo-terminal, its controlling terminal. The drop kills it.
pub struct PseudoTerminal {
    child: Child,
    /// Process id.
    pub pid: u32,
    master: File,
    emulator: Arc<Mutex<Emulator>>,
    /// Resolves when the reader thread has read all output of the terminal.
    read: Option<oneshot::Receiver<()>>,
    _tag: ProcessTag,
}

impl PseudoTerminal {
    /// Starts a program in a terminal of this size.
    ///
    /// # Errors
    /// There is no pseudo-terminal, or the program cannot be started.
    pub fn start(
        program: &Path,
        arguments: &[&str],
        environment: &[(&str, OsString)],
        rows: u16,
        columns: u16,
    ) -> Result<Self> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        let name = ptsname(&master, Vec::new())?;
        let slave = rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?;
        let size = set_size(&master, rows, columns)?;
        let tag = ProcessTag::new();
        let (variable, value) = tag.variable();
        let stream = |slave: &OwnedFd| slave.try_clone().map(Stdio::from);
        let mut command = std::process::Command::new(program);
        command
            .args(arguments)
            .env("TERM", "xterm-256color")
            .env_remove("NO_COLOR")
            .env(variable, value)
            .envs(environment.iter().map(|(name, value)| (name, value)))
            .stdin(stream(&slave)?)
            .stdout(stream(&slave)?)
            .stderr(stream(&slave)?);
        // SAFETY: between fork and exec the closure makes two system calls and touches no memory of the parent.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                Ok(())
            });
        }
        let mut command = Command::from(command);
        let child = command
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        drop((command, slave)); // the terminal hangs up when the child has ended
        let pid = child.id().context("no process id")?;
        let emulator = Arc::new(Mutex::new(Emulator {
            parser: vt100::Parser::new(size.0, size.1, 0),
            used_alternate_screen: false,
            written: 0,
        }));
        let master = File::from(master);
        let (mut output, screen) = (master.try_clone()?, Arc::clone(&emulator));
        let (reading, read) = oneshot::channel::<()>();
        std::thread::spawn(move || {
            let _reading = reading;
            let mut bytes = [0; 4096];
            // A hang-up is an error, EIO.
            while let Ok(len @ 1..) = output.read(&mut bytes) {
                let mut emulator = screen.lock().unwrap_or_else(PoisonError::into_inner);
                emulator.written += len as u64;
                // One by one, so that an alternate screen within one read is noticed.
                for byte in &bytes[..len] {
                    emulator.parser.process(std::slice::from_ref(byte));
                    emulator.used_alternate_screen |= emulator.parser.screen().alternate_screen();
                }
            }
        });
        Ok(Self { child, pid, master, emulator, read: Some(read), _tag: tag })
    }

    fn emulator(&self) -> MutexGuard<'_, Emulator> {
        self.emulator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the text on the screen, without spaces at the ends of its lines.
    pub fn contents(&self) -> String {
        self.emulator().parser.screen().contents()
    }

    /// Returns the number of bytes that the program wrote.
    pub fn written(&self) -> u64 {
        self.emulator().written
    }

    /// Returns whether the program has shown an alternate screen.
    pub fn used_alternate_screen(&self) -> bool {
        self.emulator().used_alternate_screen
    }

    /// Types a text.
    ///
    /// # Errors
    /// The terminal cannot be written.
    pub fn type_keys(&mut self, keys: &str) -> Result<()> {
        Ok(self.master.write_all(keys.as_bytes())?)
    }

    /// Resizes the terminal; the program is told by a signal.
    ///
    /// # Errors
    /// The size cannot be set.
    pub fn resize(&self, rows: u16, columns: u16) -> Result<()> {
        // Held, so that the emulated screen has its new size before the program draws on it.
        let mut emulator = self.emulator();
        let size = set_size(&self.master, rows, columns)?;
        emulator.parser.screen_mut().set_size(size.0, size.1);
        Ok(())
    }

    /// Sends a signal to the program.
    ///
    /// # Errors
    /// It has ended.
    pub fn signal(&self, signal: i32) -> Result<()> {
        kill(self.pid, signal)
    }

    /// Waits until the screen has a text.
    ///
    /// # Errors
    /// It does not appear within [`DEADLINE`]; the error contains the screen.
    pub async fn wait_for(&self, text: &str) -> Result<()> {
        self.wait_until(text, |screen| screen.contains(text)).await
    }

    /// Waits until the screen's text fulfils a condition.
    ///
    /// # Errors
    /// It does not within [`DEADLINE`]; the error contains the screen.
    pub async fn wait_until(&self, what: &str, condition: impl Fn(&str) -> bool) -> Result<()> {
        let check = || async {
            let screen = self.contents();
            ensure!(condition(&screen), "the screen is\n{screen}");
            Ok(())
        };
        eventually(what, check).await
    }

    /// Waits until the program exits.
    ///
    /// # Errors
    /// It does not exit within [`DEADLINE`]; the error contains the screen.
    pub async fn wait(&mut self) -> Result<ExitStatus> {
        let ended = tokio::time::timeout(DEADLINE, self.child.wait()).await;
        let status =
            ended.with_context(|| format!("it did not end; the screen is\n{}", self.contents()))??;
        // What it wrote last may not have been read yet.
        if let Some(read) = self.read.take() {
            // The thread drops its end when it has read all.
            let _ = tokio::time::timeout(DEADLINE, read).await.context("the terminal does not hang up")?;
        }
        Ok(status)
    }

    /// Checks that the terminal is as a shell expects it: no alternate screen, a cursor, lines and echo.
    ///
    /// # Errors
    /// Names what is not restored.
    pub fn check_restored(&self) -> Result<()> {
        let emulator = self.emulator();
        let screen = emulator.parser.screen();
        ensure!(!screen.alternate_screen(), "the alternate screen is left on");
        ensure!(!screen.hide_cursor(), "the cursor is left hidden");
        ensure!(!screen.bracketed_paste(), "bracketed paste is left on");
        // The master reports the modes of the terminal.
        let modes = tcgetattr(&self.master)?.local_modes;
        ensure!(
            modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG),
            "raw mode is left on"
        );
        Ok(())
    }
}

/// Sets the size of a terminal; returns it.
fn set_size(
    terminal: impl std::os::fd::AsFd,
    rows: u16,
    columns: u16,
) -> Result<(NonZero<u16>, NonZero<u16>)> {
    let side = |length: u16| NonZero::new(length).context("a terminal has rows and columns");
    let size = (side(rows)?, side(columns)?);
    tcsetwinsize(terminal, Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 })?;
    Ok(size)
}
