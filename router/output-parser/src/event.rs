//! Events of parsed output.

/// Why an output ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputEnd {
    /// The model ended it, or a stop string.
    Model,
    /// It was cut off, at its maximum length say.
    Cut,
}

/// Part of a choice's output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OutputEvent {
    /// Text for the user.
    Content(String),
    /// Text of the model's reasoning.
    Reasoning(String),
    /// Begin of a tool call.
    CallBegin {
        /// Position among the calls of the choice, from 0.
        index: u32,
        /// Id that the result of the call refers to.
        id: String,
        /// Name of the tool.
        name: String,
    },
    /// Fragment of a call's arguments; those of a whole call are together the text of a JSON object.
    CallArguments {
        /// Position of the call.
        index: u32,
        /// Text of the fragment.
        fragment: String,
    },
    /// End of a tool call.
    CallEnd {
        /// Position of the call.
        index: u32,
        /// Whether it was made: its arguments are a JSON object. Otherwise the output ended within it, or it was malformed.
        whole: bool,
    },
}

impl OutputEvent {
    /// Merges neighbouring events of one kind, so that what they say does not depend on how the output was divided.
    pub fn merged(events: impl IntoIterator<Item = Self>) -> Vec<Self> {
        let mut merged = Events::default();
        for event in events {
            match event {
                Self::Content(text) => merged.content(&text),
                Self::Reasoning(text) => merged.reasoning(&text),
                Self::CallArguments { index, fragment } => merged.arguments(index, &fragment),
                Self::CallBegin { .. } | Self::CallEnd { .. } => merged.0.push(event),
            }
        }
        merged.0
    }
}

/// Collects events; text of one kind is merged.
#[derive(Debug, Clone, Default)]
pub(crate) struct Events(pub(crate) Vec<OutputEvent>);

impl Events {
    pub(crate) fn content(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(OutputEvent::Content(last)) => last.push_str(text),
            _ => self.0.push(OutputEvent::Content(text.to_owned())),
        }
    }

    pub(crate) fn reasoning(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(OutputEvent::Reasoning(last)) => last.push_str(text),
            _ => self.0.push(OutputEvent::Reasoning(text.to_owned())),
        }
    }

    pub(crate) fn arguments(&mut self, index: u32, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(OutputEvent::CallArguments { index: last, fragment }) if *last == index => {
                fragment.push_str(text);
            }
            _ => self.0.push(OutputEvent::CallArguments { index, fragment: text.to_owned() }),
        }
    }
}
