//! A tool call written as a JSON object with its name and its arguments.

use crate::call_part::{CallPart, NAME_BYTES_MAX, Progress};
use crate::json_scanner::{JsonScanner, Scan};

/// Keys of a call's arguments.
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];
/// Keys beside name and arguments of an object that no marker announces.
const OTHER_KEYS: [&str; 2] = ["type", "id"];

/// Position in the object.
#[derive(Debug, Clone)]
enum State {
    /// Before the opening brace.
    Before,
    /// Before a key; `first` if the object may end.
    Key {
        first: bool,
    },
    /// In a key.
    KeyText {
        escaped: bool,
    },
    Colon,
    /// Before a value.
    Value,
    /// In the name.
    Name {
        escaped: bool,
    },
    /// In the arguments.
    Arguments(JsonScanner),
    /// In arguments that are written as a JSON string.
    QuotedArguments {
        escaped: bool,
    },
    /// In a value that has no effect.
    Other(JsonScanner),
    AfterValue,
}

/// Parser of the object.
#[derive(Debug, Clone)]
pub(crate) struct CallObject {
    state: State,
    /// Text of the current key, or string value, as it is written between its quotes.
    text: String,
    name: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    has_arguments: bool,
    begun: bool,
    /// Whether only the keys of a call are taken.
    strict: bool,
    /// Whether arguments may not be left out.
    needs_arguments: bool,
}

impl CallObject {
    /// Maximum bytes of a key, and of quoted or early arguments.
    const KEY_BYTES_MAX: usize = 64;
    const HELD_BYTES_MAX: usize = 64 << 10;

    /// Creates a parser of an object behind a marker.
    pub(crate) fn new() -> Self {
        Self {
            state: State::Before,
            text: String::new(),
            name: None,
            early: None,
            has_arguments: false,
            begun: false,
            strict: false,
            needs_arguments: false,
        }
    }

    /// Creates a parser of an object that no marker announces: it has no other keys than those of calls.
    pub(crate) fn bare(needs_arguments: bool) -> Self {
        Self { strict: true, needs_arguments, ..Self::new() }
    }

    /// Whether a string is open, in which any text may come.
    pub(crate) fn in_text(&self) -> bool {
        match &self.state {
            State::KeyText { .. } | State::Name { .. } | State::QuotedArguments { .. } => true,
            State::Arguments(scanner) | State::Other(scanner) => scanner.in_text(),
            State::Before | State::Key { .. } | State::Colon | State::Value | State::AfterValue => false,
        }
    }

    /// Whether name and arguments are complete: nothing but closing brackets is missing.
    pub(crate) fn has_all_arguments(&self) -> bool {
        let in_arguments = matches!(self.state, State::Arguments(_) | State::QuotedArguments { .. });
        self.begun && self.has_arguments && !in_arguments
    }

    /// Takes the next character.
    pub(crate) fn push(&mut self, c: char, out: &mut Vec<CallPart>) -> Progress {
        let space = matches!(c, ' ' | '\n' | '\r' | '\t');
        match &mut self.state {
            State::Before | State::Key { .. } | State::Colon | State::Value | State::AfterValue if space => {
                Progress::More
            }
            State::Before if c == '{' => self.enter(State::Key { first: true }),
            State::Key { .. } if c == '"' => {
                self.text.clear();
                self.enter(State::KeyText { escaped: false })
            }
            State::Key { first: true } | State::AfterValue if c == '}' => self.end(out),
            State::AfterValue if c == ',' => self.enter(State::Key { first: false }),
            State::Colon if c == ':' => self.enter(State::Value),
            State::Value => self.value(c, out),
            State::KeyText { escaped } => {
                if c == '"' && !*escaped {
                    return self.enter(State::Colon);
                }
                *escaped = c == '\\' && !*escaped;
                self.hold(c, Self::KEY_BYTES_MAX)
            }
            State::Name { escaped } => {
                if c == '"' && !*escaped {
                    return self.name_end(out);
                }
                *escaped = c == '\\' && !*escaped;
                self.hold(c, NAME_BYTES_MAX)
            }
            State::QuotedArguments { escaped } => {
                if c == '"' && !*escaped {
                    return self.quoted_end(out);
                }
                *escaped = c == '\\' && !*escaped;
                self.hold(c, Self::HELD_BYTES_MAX)
            }
            State::Arguments(scanner) => match scanner.push(c) {
                Scan::Continue => self.argument(c, out),
                Scan::Complete => {
                    self.state = State::AfterValue;
                    self.argument(c, out)
                }
                Scan::Ended | Scan::Invalid => Progress::Invalid,
            },
            State::Other(scanner) => match scanner.push(c) {
                Scan::Continue => Progress::More,
                Scan::Complete => self.enter(State::AfterValue),
                Scan::Ended => {
                    self.state = State::AfterValue;
                    self.push(c, out)
                }
                Scan::Invalid => Progress::Invalid,
            },
            State::Before | State::Key { .. } | State::Colon | State::AfterValue => Progress::Invalid,
        }
    }

    fn enter(&mut self, state: State) -> Progress {
        self.state = state;
        Progress::More
    }

    /// Appends to the current text.
    fn hold(&mut self, c: char, bytes_max: usize) -> Progress {
        self.text.push(c);
        if self.text.len() > bytes_max { Progress::Invalid } else { Progress::More }
    }

    /// Takes the first character of a value.
    fn value(&mut self, c: char, out: &mut Vec<CallPart>) -> Progress {
        let is_arguments = ARGUMENTS.contains(&self.text.as_str());
        if self.text == "name" {
            self.text.clear();
            let fresh = c == '"' && self.name.is_none();
            return if fresh { self.enter(State::Name { escaped: false }) } else { Progress::Invalid };
        }
        if is_arguments && matches!(c, '{' | '"') {
            if std::mem::replace(&mut self.has_arguments, true) {
                return Progress::Invalid;
            }
            if c == '"' {
                self.text.clear();
                return self.enter(State::QuotedArguments { escaped: false });
            }
            let mut scanner = JsonScanner::new();
            scanner.push(c);
            self.state = State::Arguments(scanner);
            self.begin(out);
            return self.argument(c, out);
        }
        // Arguments that are null are none.
        let other = !self.strict || is_arguments || OTHER_KEYS.contains(&self.text.as_str());
        if (is_arguments && c != 'n') || !other {
            return Progress::Invalid;
        }
        let mut scanner = JsonScanner::new();
        match scanner.push(c) {
            Scan::Continue => self.enter(State::Other(scanner)),
            Scan::Complete | Scan::Ended | Scan::Invalid => Progress::Invalid,
        }
    }

    fn begin(&mut self, out: &mut Vec<CallPart>) {
        if let Some(name) = self.name.as_ref().filter(|_| !self.begun) {
            self.begun = true;
            out.push(CallPart::Begin(name.clone()));
        }
    }

    fn argument(&mut self, c: char, out: &mut Vec<CallPart>) -> Progress {
        if self.begun {
            out.push(CallPart::Arguments(c.to_string()));
            return Progress::More;
        }
        let early = self.early.get_or_insert_default();
        early.push(c);
        if early.len() > Self::HELD_BYTES_MAX { Progress::Invalid } else { Progress::More }
    }

    fn name_end(&mut self, out: &mut Vec<CallPart>) -> Progress {
        let name: Result<String, _> = serde_json::from_str(&format!("\"{}\"", self.text));
        let Some(name) = name.ok().filter(|name| !name.is_empty()) else { return Progress::Invalid };
        self.name = Some(name);
        self.state = State::AfterValue;
        self.release_early(out);
        Progress::More
    }

    fn quoted_end(&mut self, out: &mut Vec<CallPart>) -> Progress {
        let text: Result<String, _> = serde_json::from_str(&format!("\"{}\"", self.text));
        let object = |text: &String| {
            serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok() && text.trim_start().starts_with('{')
        };
        let Some(text) = text.ok().filter(object) else { return Progress::Invalid };
        self.early = Some(text);
        self.state = State::AfterValue;
        self.release_early(out);
        Progress::More
    }

    /// Releases arguments that were held back, once the name is known.
    fn release_early(&mut self, out: &mut Vec<CallPart>) {
        if self.name.is_none() {
            return;
        }
        if let Some(early) = self.early.take() {
            self.begin(out);
            out.push(CallPart::Arguments(early));
        }
    }

    fn end(&mut self, out: &mut Vec<CallPart>) -> Progress {
        if self.name.is_none() || (self.needs_arguments && !self.has_arguments) {
            return Progress::Invalid;
        }
        if !self.has_arguments {
            self.begin(out);
            out.push(CallPart::Arguments("{}".to_owned()));
        }
        out.push(CallPart::End);
        Progress::Done
    }
}
