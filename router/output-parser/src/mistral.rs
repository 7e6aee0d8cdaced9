//! Mistral's calls: a JSON array of objects, or a name and its arguments.

use crate::call_object::CallObject;
use crate::call_part::{CallPart, NAME_BYTES_MAX, Progress};
use crate::json_scanner::{JsonScanner, Scan};
use crate::marker::Marker;

/// Position in the calls.
#[derive(Debug, Clone)]
enum State {
    /// After the marker.
    Head,
    /// In the array: in an object, or before it.
    Object(CallObject),
    /// In the array, after an object.
    AfterObject,
    /// In the name.
    Name,
    /// In an id, which has no effect.
    Id,
    /// Before the arguments, or in them.
    Arguments { scanner: JsonScanner, begun: bool },
}

/// Parser of the calls that one marker announces.
#[derive(Debug, Clone)]
pub(crate) struct MistralCalls {
    state: State,
    name: String,
    /// Whether the object is one of an array.
    in_array: bool,
    id_bytes: usize,
}

impl MistralCalls {
    pub(crate) fn new() -> Self {
        Self { state: State::Head, name: String::new(), in_array: false, id_bytes: 0 }
    }

    pub(crate) fn in_text(&self) -> bool {
        match &self.state {
            State::Object(object) => object.in_text(),
            State::Arguments { scanner, .. } => scanner.in_text(),
            State::Head | State::AfterObject | State::Name | State::Id => false,
        }
    }

    /// Whether the arguments of the open call are complete.
    pub(crate) fn has_all_arguments(&self) -> bool {
        matches!(&self.state, State::Object(object) if object.has_all_arguments())
    }

    /// Takes a marker outside of strings.
    pub(crate) fn push_marker(&mut self, marker: Marker) -> Progress {
        match (&self.state, marker) {
            (State::Name, Marker::CallId) if !self.name.trim().is_empty() => {
                self.state = State::Id;
                Progress::More
            }
            (State::Name | State::Id, Marker::Arguments) if !self.name.trim().is_empty() => {
                self.state = State::Arguments { scanner: JsonScanner::new(), begun: false };
                Progress::More
            }
            _ => Progress::Invalid,
        }
    }

    pub(crate) fn push(&mut self, c: char, out: &mut Vec<CallPart>) -> Progress {
        let space = matches!(c, ' ' | '\n' | '\r' | '\t');
        match &mut self.state {
            State::Head | State::AfterObject if space => Progress::More,
            State::Head if c == '[' => {
                self.in_array = true;
                self.state = State::Object(CallObject::new());
                Progress::More
            }
            State::Head if c == '{' => {
                self.state = State::Object(CallObject::new());
                self.push(c, out)
            }
            State::Head => {
                self.state = State::Name;
                self.push(c, out)
            }
            State::Object(object) => match object.push(c, out) {
                Progress::Done if self.in_array => {
                    self.state = State::AfterObject;
                    Progress::More
                }
                progress => progress,
            },
            State::AfterObject if c == ',' => {
                self.state = State::Object(CallObject::new());
                Progress::More
            }
            State::AfterObject if c == ']' => Progress::Done,
            State::AfterObject => Progress::Invalid,
            State::Name if c == '{' && !self.name.trim().is_empty() => {
                self.state = State::Arguments { scanner: JsonScanner::new(), begun: false };
                self.push(c, out)
            }
            State::Name => {
                let allowed = c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | ':' | '/' | ' ' | '\n');
                self.name.push(c);
                if allowed && self.name.len() <= NAME_BYTES_MAX { Progress::More } else { Progress::Invalid }
            }
            State::Id => {
                self.id_bytes += c.len_utf8();
                if self.id_bytes <= NAME_BYTES_MAX { Progress::More } else { Progress::Invalid }
            }
            State::Arguments { begun: false, .. } if space => Progress::More,
            State::Arguments { scanner, begun } => {
                if !*begun {
                    if c != '{' {
                        return Progress::Invalid;
                    }
                    *begun = true;
                    out.push(CallPart::Begin(self.name.trim().to_owned()));
                }
                match scanner.push(c) {
                    Scan::Continue => {
                        out.push(CallPart::Arguments(c.to_string()));
                        Progress::More
                    }
                    Scan::Complete => {
                        out.extend([CallPart::Arguments(c.to_string()), CallPart::End]);
                        Progress::Done
                    }
                    Scan::Ended | Scan::Invalid => Progress::Invalid,
                }
            }
        }
    }
}
