//! Markers that divide output, and their search in text.

/// Text or token that divides the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Marker {
    /// Begin of reasoning.
    ReasoningBegin,
    /// End of reasoning.
    ReasoningEnd,
    /// Begin of one tool call or several.
    CallBegin,
    /// End of a tool call.
    CallEnd,
    /// Begin of a call, whose marker may be missing, by the tag that names its function.
    FunctionBegin,
    /// Begin of a call's id.
    CallId,
    /// Begin of a call's arguments.
    Arguments,
}

/// Character of the output, or a marker with its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Symbol {
    Char(char),
    Marker(Marker, &'static str),
}

impl Symbol {
    /// Returns its text.
    pub(crate) fn text(self) -> String {
        match self {
            Self::Char(c) => c.to_string(),
            Self::Marker(_, text) => text.to_owned(),
        }
    }
}

/// Incremental search for markers in text. Holds back what may become one.
#[derive(Debug, Clone, Default)]
pub(crate) struct MarkerScanner {
    patterns: Vec<(Marker, &'static str)>,
    /// Longest suffix of the text that is the beginning of a pattern.
    held: String,
}

impl MarkerScanner {
    pub(crate) fn new(patterns: Vec<(Marker, &'static str)>) -> Self {
        Self { patterns, held: String::new() }
    }

    /// Appends a character, and the symbols that it decides.
    pub(crate) fn push(&mut self, c: char, out: &mut Vec<Symbol>) {
        if self.held.is_empty() && !self.patterns.iter().any(|(_, text)| text.starts_with(c)) {
            out.push(Symbol::Char(c));
            return;
        }
        self.held.push(c);
        while !self.held.is_empty() {
            let held = self.held.as_str();
            if let Some((marker, text)) = self.patterns.iter().find(|(_, text)| *text == held) {
                out.push(Symbol::Marker(*marker, text));
                self.held.clear();
                return;
            }
            if self.patterns.iter().any(|(_, text)| text.starts_with(held)) {
                return;
            }
            out.push(Symbol::Char(self.held.remove(0)));
        }
    }

    /// Releases what is held back.
    pub(crate) fn finish(&mut self, out: &mut Vec<Symbol>) {
        out.extend(self.held.drain(..).map(Symbol::Char));
    }
}
