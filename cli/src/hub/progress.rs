//! Progress of downloads: bars on a terminal, lines elsewhere.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::sync::{Mutex, PoisonError};

use indicatif::{ProgressBar, ProgressStyle};
use inflight_hub::Progress;

use crate::exit::print_stderr;

/// Files of fewer bytes are fetched without a word.
const SMALL: u64 = 1 << 20;

/// Display of downloads.
pub struct Display {
    kind: Kind,
    files: Mutex<BTreeMap<String, Shown>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Bars,
    /// Lines on standard error.
    Lines,
    /// Records of the log.
    Log,
}

/// File that is being fetched.
struct Shown {
    bar: Option<ProgressBar>,
    bytes: u64,
    present: u64,
    /// Tenths that a line was written about.
    tenths: u64,
}

impl Display {
    /// Creates the display of a command for people.
    pub fn of_command() -> Self {
        let kind = if std::io::stderr().is_terminal() { Kind::Bars } else { Kind::Lines };
        Self { kind, files: Mutex::default() }
    }

    /// Creates the display of a service: records of its log.
    pub fn of_service() -> Self {
        Self { kind: Kind::Log, files: Mutex::default() }
    }

    fn say(&self, text: &str) {
        match self.kind {
            Kind::Log => tracing::info!("{text}"),
            Kind::Bars | Kind::Lines => print_stderr(format_args!("{text}")),
        }
    }

    fn with(&self, file: &str, change: impl FnOnce(&Self, &mut Shown)) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shown) = files.get_mut(file) {
            change(self, shown);
        }
    }
}

impl Progress for Display {
    fn begin(&self, file: &str, bytes: u64, present: u64) {
        if bytes < SMALL {
            return;
        }
        let bar = (self.kind == Kind::Bars).then(|| {
            let template = "{msg:28!} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
            let style =
                ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
            let bar = ProgressBar::new(bytes).with_style(style).with_message(file.to_owned());
            bar.inc(present);
            bar.reset_eta();
            bar
        });
        if bar.is_none() {
            let rest = if present > 0 { format!(", {present} of them present") } else { String::new() };
            self.say(&format!("fetching {file}, {bytes} bytes{rest}"));
        }
        let shown = Shown { bar, bytes, present, tenths: present * 10 / bytes };
        self.files.lock().unwrap_or_else(PoisonError::into_inner).insert(file.to_owned(), shown);
    }

    fn advance(&self, file: &str, bytes: u64) {
        self.with(file, |display, shown| {
            shown.present += bytes;
            match &shown.bar {
                Some(bar) => bar.inc(bytes),
                None => {
                    let tenths = shown.present * 10 / shown.bytes;
                    if tenths > shown.tenths {
                        shown.tenths = tenths;
                        display.say(&format!("{file}: {} %", tenths * 10));
                    }
                }
            }
        });
    }

    fn end(&self, file: &str) {
        self.with(file, |_, shown| {
            if let Some(bar) = &shown.bar {
                bar.finish();
            }
        });
    }

    fn note(&self, text: &str) {
        let files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        match files.values().find_map(|shown| shown.bar.as_ref().filter(|bar| !bar.is_finished())) {
            Some(bar) => bar.println(text),
            None => self.say(text),
        }
    }
}
