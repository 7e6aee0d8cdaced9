//! The parser of a choice's output.

use std::sync::Arc;

use crate::call_ids::CallIds;
use crate::call_machine::CallMachine;
use crate::call_object::CallObject;
use crate::call_part::{CallPart, Progress};
use crate::event::Events;
use crate::marker::{MarkerScanner, Symbol};
use crate::{Marker, OutputEnd, OutputEvent, ReasoningFormat, ToolCallFormat, ToolTypes};

/// Token that is a marker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MarkerToken {
    /// Token id.
    pub id: u32,
    /// Marker that it is.
    pub marker: Marker,
    /// Text that it leaves in a malformed call; empty for a special token.
    pub text: &'static str,
}

/// How a request's output is parsed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OutputFormat {
    /// Format of tool calls; `None`: there are none.
    pub calls: Option<ToolCallFormat>,
    /// Format of reasoning; `None`: there is none.
    pub reasoning: Option<ReasoningFormat>,
    /// Markers that are single tokens, and recognised as such only.
    pub tokens: Vec<MarkerToken>,
    /// Markers that are recognised in the text.
    pub texts: Vec<(Marker, &'static str)>,
    /// Whether the prompt opens the reasoning.
    pub begins_in_reasoning: bool,
    /// Whether calls after the first are dropped.
    pub single_call: bool,
    /// Whether a call is emitted at its end only, if it is whole; the text of any other is content.
    pub whole_calls: bool,
    /// Whether a grammar makes the output either calls or an answer: once an answer has begun, all that follows is content, and a call
    /// without a marker has all keys of one and no others.
    pub constrained_answer: bool,
    /// Tools of the request.
    pub tools: Arc<ToolTypes>,
}

impl OutputFormat {
    /// Returns the marker that a token is.
    pub fn marker(&self, token: u32) -> Option<&MarkerToken> {
        self.tokens.iter().find(|marker| marker.id == token)
    }
}

/// Position in the output.
#[derive(Debug, Clone)]
enum State {
    /// Before the first text, and after reasoning.
    Start,
    Content,
    Reasoning {
        begun: bool,
    },
    /// `bare` if no marker announced it.
    Call {
        machine: CallMachine,
        bare: bool,
    },
    AfterCall,
}

/// Parser of a choice's output.
///
/// Malformed calls are content. If a call turns out to be malformed, or the output ends in it, after its name and some arguments were
/// emitted, it ends there as one that was not made, and what follows is content.
#[derive(Debug, Clone)]
pub struct OutputParser {
    format: Arc<OutputFormat>,
    ids: CallIds,
    scanner: MarkerScanner,
    state: State,
    /// Whitespace whose meaning depends on what follows: it is dropped around calls and reasoning.
    spaces: String,
    /// Text since the beginning of a call that is emitted at its end, else since its last part.
    held: String,
    /// Length of the held text up to the last part of the call.
    parted: usize,
    /// Calls that were begun.
    calls: u32,
    /// Calls that were made.
    made: u32,
    /// Whether one of those that are not dropped was not made.
    has_cut_call: bool,
    /// Whether the last call is dropped, as one was made before it.
    dropped: bool,
    /// Whether the last call has not ended.
    open: bool,
    /// Events of the open call, if it is emitted at its end only.
    pending: Events,
}

impl OutputParser {
    /// Maximum calls of a choice; further ones are content.
    pub const CALLS_MAX: u32 = 128;
    /// Maximum bytes of whitespace that is held back.
    const SPACES_MAX: usize = 256;
    /// Maximum bytes of a call before its name is known.
    const HEAD_BYTES_MAX: usize = 128 << 10;

    /// Creates a parser of one choice.
    pub fn new(format: Arc<OutputFormat>, ids: CallIds) -> Self {
        let state = if format.begins_in_reasoning { State::Reasoning { begun: false } } else { State::Start };
        let scanner = MarkerScanner::new(format.texts.clone());
        let (spaces, held) = (String::new(), String::new());
        Self {
            format,
            ids,
            scanner,
            state,
            spaces,
            held,
            parted: 0,
            calls: 0,
            made: 0,
            has_cut_call: false,
            dropped: false,
            open: false,
            pending: Events::default(),
        }
    }

    /// Whether the output so far ends in reasoning.
    pub fn in_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning { .. })
    }

    /// Returns the number of calls so far, emitted or not.
    pub fn calls(&self) -> u32 {
        self.calls
    }

    /// Whether a call was not made: the output ended within it, or it was malformed.
    pub fn has_cut_call(&self) -> bool {
        self.has_cut_call
    }

    /// Whether the output so far has calls, and all of those that were emitted were made.
    pub fn has_made_calls(&self) -> bool {
        // Of calls that are emitted at their end, a cut one is content.
        self.made > 0 && !self.open && (self.format.whole_calls || !self.has_cut_call)
    }

    /// Takes text.
    pub fn push_text(&mut self, text: &str) -> Vec<OutputEvent> {
        let mut events = Events::default();
        let mut symbols = Vec::new();
        for c in text.chars() {
            self.scanner.push(c, &mut symbols);
            symbols.drain(..).for_each(|symbol| self.symbol(symbol, false, &mut events));
        }
        events.0
    }

    /// Takes a token that is a marker.
    pub fn push_marker(&mut self, token: &MarkerToken) -> Vec<OutputEvent> {
        let mut events = Events::default();
        let mut symbols = Vec::new();
        self.scanner.finish(&mut symbols);
        symbols.into_iter().for_each(|symbol| self.symbol(symbol, false, &mut events));
        self.symbol(Symbol::Marker(token.marker, token.text), true, &mut events);
        events.0
    }

    /// Ends the output.
    pub fn finish(&mut self, end: OutputEnd) -> Vec<OutputEvent> {
        let mut events = Events::default();
        let mut symbols = Vec::new();
        self.scanner.finish(&mut symbols);
        symbols.into_iter().for_each(|symbol| self.symbol(symbol, false, &mut events));
        let spaces = std::mem::take(&mut self.spaces);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Start | State::Content => events.content(&spaces),
            State::Reasoning { .. } => events.reasoning(&spaces),
            State::AfterCall => {}
            State::Call { mut machine, .. } => {
                let was_open = self.open;
                let is_whole = was_open && self.end_call(&mut machine, end, &mut events);
                let is_content = !was_open || (self.format.whole_calls && !is_whole && !self.dropped);
                let held = std::mem::take(&mut self.held);
                if is_content {
                    events.content(&spaces);
                    events.content(&held);
                }
            }
        }
        events.0
    }

    /// Takes a symbol; `exact` if it is a token of its own.
    fn symbol(&mut self, symbol: Symbol, exact: bool, events: &mut Events) {
        match (&mut self.state, symbol) {
            (State::Call { .. }, _) => self.call_symbol(symbol, events),
            (State::Reasoning { .. }, Symbol::Marker(Marker::ReasoningEnd, _)) => {
                self.spaces.clear();
                self.state = State::Start;
            }
            (State::Reasoning { begun }, Symbol::Char(c)) => {
                if c == '\n' && self.spaces.len() < Self::SPACES_MAX {
                    if *begun {
                        self.spaces.push(c);
                    }
                    return;
                }
                *begun = true;
                events.reasoning(&std::mem::take(&mut self.spaces));
                events.reasoning(c.encode_utf8(&mut [0; 4]));
            }
            (_, Symbol::Char(c)) => self.plain(c, events),
            (State::Content, Symbol::Marker(_, text)) if self.format.constrained_answer => {
                self.literal(text, events);
            }
            (State::Reasoning { .. }, Symbol::Marker(_, text)) => self.literal(text, events),
            (State::Start, Symbol::Marker(Marker::ReasoningBegin, _)) => self.begin_reasoning(events),
            (_, Symbol::Marker(Marker::ReasoningBegin, _)) if exact => self.begin_reasoning(events),
            (_, Symbol::Marker(Marker::CallBegin, text))
                if self.format.calls.is_some() && self.calls < Self::CALLS_MAX =>
            {
                text.clone_into(&mut self.held);
                self.parted = 0;
                self.state = self.call(false);
            }
            // Without its marker, it is a call if it names a tool.
            (State::Start | State::Content | State::AfterCall, Symbol::Marker(Marker::FunctionBegin, _))
                if self.format.calls.is_some() && self.calls < Self::CALLS_MAX =>
            {
                self.held.clear();
                self.parted = 0;
                self.state = self.call(true);
                self.call_symbol(symbol, events);
            }
            (State::AfterCall, Symbol::Marker(Marker::CallEnd, _)) => self.spaces.clear(),
            (_, Symbol::Marker(_, text)) => self.literal(text, events),
        }
    }

    fn call(&self, bare: bool) -> State {
        let format = self.format.calls.unwrap_or(ToolCallFormat::Hermes);
        let machine = match format {
            ToolCallFormat::Llama3 if bare => {
                CallMachine::Object(CallObject::bare(self.format.constrained_answer))
            }
            _ => CallMachine::new(format),
        };
        State::Call { machine, bare }
    }

    fn begin_reasoning(&mut self, events: &mut Events) {
        match self.state {
            State::Content => events.content(&std::mem::take(&mut self.spaces)),
            _ => self.spaces.clear(),
        }
        self.state = State::Reasoning { begun: false };
    }

    /// Takes the text of a marker that has no meaning where it is.
    fn literal(&mut self, text: &str, events: &mut Events) {
        text.chars().for_each(|c| self.symbol(Symbol::Char(c), false, events));
    }

    /// Takes a character outside of reasoning and calls.
    fn plain(&mut self, c: char, events: &mut Events) {
        let llama = self.format.calls == Some(ToolCallFormat::Llama3);
        let at_start = !matches!(self.state, State::Content);
        if llama && at_start && c == '{' && self.calls < Self::CALLS_MAX {
            self.state = self.call(true);
            self.call_symbol(Symbol::Char(c), events);
            return;
        }
        let separator = llama && matches!(self.state, State::AfterCall) && c == ';';
        let held = c.is_whitespace() && (self.format.calls.is_some() || at_start);
        if (held || separator) && self.spaces.len() < Self::SPACES_MAX {
            self.spaces.push(c);
            return;
        }
        let spaces = std::mem::take(&mut self.spaces);
        // Line breaks between the reasoning and the answer are part of neither.
        let skipped = matches!(self.state, State::Start) && self.format.reasoning.is_some();
        events.content(if skipped { spaces.trim_start_matches('\n') } else { &spaces });
        events.content(c.encode_utf8(&mut [0; 4]));
        self.state = State::Content;
    }

    fn call_symbol(&mut self, symbol: Symbol, events: &mut Events) {
        let State::Call { machine, bare } = &mut self.state else { return };
        match symbol {
            Symbol::Char(c) => self.held.push(c),
            Symbol::Marker(_, text) => self.held.push_str(text),
        }
        let mut parts = Vec::new();
        let mut progress = machine.push(symbol, &self.format.tools, &mut parts);
        if let Some(CallPart::Begin(name)) = parts.first() {
            let unknown = *bare && !self.format.tools.has(name);
            if unknown || self.calls >= Self::CALLS_MAX {
                parts.clear();
                progress = Progress::Invalid;
            }
        } else if !self.open && self.held.len() > Self::HEAD_BYTES_MAX {
            progress = Progress::Invalid;
        }
        // The last character of a malformed call is no part of it.
        if !parts.is_empty() && progress != Progress::Invalid {
            if !self.format.whole_calls || parts.contains(&CallPart::End) {
                self.held.clear();
            }
            self.parted = self.held.len();
        }
        self.emit(parts, events);
        match progress {
            Progress::More => {}
            Progress::Done => {
                self.held.clear();
                self.parted = 0;
                self.state = State::AfterCall;
            }
            Progress::Invalid => self.malformed(symbol, events),
        }
    }

    /// Continues after a call that is malformed.
    fn malformed(&mut self, symbol: Symbol, events: &mut Events) {
        let mut held = std::mem::take(&mut self.held);
        let state = std::mem::replace(&mut self.state, State::Content);
        let was_open = self.open;
        if let State::Call { mut machine, bare } = state
            && was_open
        {
            // An answer may begin as a call does, and go on with other keys.
            let is_answer = bare && self.format.constrained_answer && self.format.whole_calls;
            if is_answer {
                self.take_back();
            }
            let is_whole = !is_answer && self.end_call(&mut machine, OutputEnd::Model, events);
            let is_end = matches!(symbol, Symbol::Marker(Marker::CallEnd, _));
            if is_whole && is_end {
                // Nothing but brackets is missing.
                self.state = State::AfterCall;
            }
            held = match (is_whole, machine) {
                _ if self.dropped || (is_whole && is_end) => String::new(),
                // What follows the arguments is content, but for the tags that close a value and the call.
                (true, CallMachine::Xml(_)) => symbol.text(),
                (true, _) => held.split_off(self.parted),
                (false, _) => held,
            };
        }
        self.parted = 0;
        if matches!(self.state, State::AfterCall) {
            self.spaces.clear();
            return;
        }
        events.content(&std::mem::take(&mut self.spaces));
        match symbol {
            // It begins another call.
            Symbol::Marker(Marker::CallBegin, text) => {
                events.content(held.strip_suffix(text).unwrap_or(&held));
                self.symbol(symbol, true, events);
            }
            _ => events.content(&held),
        }
    }

    /// Takes back the open call, of which nothing was emitted.
    fn take_back(&mut self) {
        self.pending = Events::default();
        self.calls -= 1;
        self.open = false;
    }

    /// Ends the open call. Returns whether it was made.
    fn end_call(&mut self, machine: &mut CallMachine, end: OutputEnd, events: &mut Events) -> bool {
        let mut parts = Vec::new();
        machine.finish(end, &mut parts);
        let is_whole = parts.last() == Some(&CallPart::End);
        self.emit(parts, events);
        is_whole
    }

    /// Emits parts of calls.
    fn emit(&mut self, parts: Vec<CallPart>, events: &mut Events) {
        for part in parts {
            if let CallPart::Begin(_) = part {
                self.calls += 1;
                self.dropped = self.format.single_call && self.made > 0;
            }
            self.open = !matches!(part, CallPart::End | CallPart::Cut);
            // Spaces before a call are no content, unless the call turns out to be.
            if !self.format.whole_calls || part == CallPart::End {
                self.spaces.clear();
            }
            let dropped = self.dropped;
            self.made += u32::from(part == CallPart::End);
            self.has_cut_call |= part == CallPart::Cut && !dropped;
            let index = self.calls.saturating_sub(1);
            let whole = part == CallPart::End;
            let target = if self.format.whole_calls { &mut self.pending } else { &mut *events };
            match part {
                _ if dropped => {}
                CallPart::Begin(name) => {
                    let id = self.ids.id(index);
                    target.0.push(OutputEvent::CallBegin { index, id, name });
                }
                CallPart::Arguments(fragment) => target.arguments(index, &fragment),
                CallPart::End | CallPart::Cut => target.0.push(OutputEvent::CallEnd { index, whole }),
            }
            if self.format.whole_calls && !self.open {
                let call = std::mem::take(&mut self.pending);
                if whole {
                    events.0.extend(call.0);
                } else {
                    self.calls -= 1;
                }
            }
        }
    }
}
