//! Options of a conversation's rendering: arguments of the chat template, and where the prompt ends.

use std::collections::BTreeMap;

use minijinja::value::Value;

use super::conversation;

/// Where the prompt of a conversation ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PromptEnd {
    /// Behind the start of a new message of the assistant (`add_generation_prompt`).
    #[default]
    NextMessage,
    /// Behind the last message.
    Messages,
    /// Within the last message, behind its text, which the output continues (`continue_final_message`).
    LastMessage,
}

/// Invalid argument of a chat template.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ArgumentError {
    /// Not a JSON object.
    #[error("it must be a JSON object")]
    NoObject,
    /// Too large.
    #[error("it has {bytes} bytes; at most {} are allowed", TemplateArguments::BYTES_MAX)]
    TooLarge {
        /// Bytes of the JSON text.
        bytes: usize,
    },
    /// Too many arguments.
    #[error("it has {count} arguments; at most {} are allowed", TemplateArguments::COUNT_MAX)]
    TooMany {
        /// Number of arguments.
        count: usize,
    },
    /// Name that is no variable of a template.
    #[error("{0:?} is no name of a template's variable, which has letters, digits and _")]
    Name(String),
    /// Name of a variable that the router sets.
    #[error("{name} cannot be an argument: {reason}")]
    Reserved {
        /// Name.
        name: String,
        /// What to do instead.
        reason: &'static str,
    },
}

/// Variables that the router sets, and what a client that sends one is told.
const RESERVED: [(&str, &str); 7] = [
    ("messages", "send the field messages"),
    ("tools", "send the field tools"),
    ("documents", "put documents into the messages"),
    ("add_generation_prompt", "send the field add_generation_prompt"),
    ("continue_final_message", "send the field continue_final_message"),
    ("chat_template", "the model's own template renders conversations"),
    ("tokenize", "conversations are always tokenized"),
];

/// Arguments of a chat template, which are variables in it; bounded in number and size.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TemplateArguments(Vec<(String, Value)>);

impl TemplateArguments {
    /// Maximum bytes of the arguments as JSON.
    pub const BYTES_MAX: usize = 16 << 10;
    /// Maximum number of arguments.
    pub const COUNT_MAX: usize = 64;

    /// Parses the text of a JSON object.
    ///
    /// # Errors
    /// [`ArgumentError`].
    pub fn of_json(text: &str) -> Result<Self, ArgumentError> {
        if text.len() > Self::BYTES_MAX {
            return Err(ArgumentError::TooLarge { bytes: text.len() });
        }
        let object: BTreeMap<String, Value> =
            serde_json::from_str(text).map_err(|_| ArgumentError::NoObject)?;
        if object.len() > Self::COUNT_MAX {
            return Err(ArgumentError::TooMany { count: object.len() });
        }
        let mut arguments = Self::default();
        for (name, value) in object {
            check_name(&name)?;
            arguments.0.push((name, value));
        }
        Ok(arguments)
    }

    /// Sets an argument, unless the client has set it.
    pub fn set_default(&mut self, name: &str, value: impl Into<Value>) {
        if !self.0.iter().any(|(other, _)| other == name) {
            self.0.push((name.to_owned(), value.into()));
        }
    }

    /// Whether there are no arguments.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over names and values.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Returns the arguments with all texts of their values replaced.
    pub(super) fn map(&self, change: &dyn Fn(&str) -> String) -> Self {
        Self(self.0.iter().map(|(name, value)| (name.clone(), conversation::map(value, change))).collect())
    }

    /// Calls a function with each text of the values.
    pub(super) fn visit(&self, seen: &mut dyn FnMut(&str)) {
        self.0.iter().for_each(|(_, value)| conversation::visit(value, seen));
    }
}

fn check_name(name: &str) -> Result<(), ArgumentError> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let begins = |c: char| c.is_ascii_alphabetic();
    if !name.starts_with(begins) || !name.chars().all(is_word) || name.len() > 128 {
        return Err(ArgumentError::Name(name.chars().take(128).collect()));
    }
    let reserved = RESERVED.iter().find(|(other, _)| *other == name).map(|(_, reason)| *reason);
    let special = name.ends_with("_token").then_some("special tokens are those of the model");
    match reserved.or(special) {
        Some(reason) => Err(ArgumentError::Reserved { name: name.to_owned(), reason }),
        None => Ok(()),
    }
}

/// Options of a rendering.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rendering {
    /// Arguments of the template.
    pub arguments: TemplateArguments,
    /// Where the prompt ends.
    pub end: PromptEnd,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_variables_that_the_router_does_not_set() {
        let arguments = TemplateArguments::of_json(r#"{"enable_thinking": false, "a": [1, "x"]}"#).unwrap();
        assert_eq!(arguments.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["a", "enable_thinking"]);
        for (text, clue) in [
            ("[]", "JSON object"),
            ("7", "JSON object"),
            (r#"{"messages": []}"#, "send the field messages"),
            (r#"{"bos_token": "x"}"#, "special tokens are those of the model"),
            (r#"{"add_generation_prompt": false}"#, "send the field add_generation_prompt"),
            (r#"{"_inflight_time": 0}"#, "no name of a template's variable"),
            (r#"{"a b": 0}"#, "no name of a template's variable"),
            (r#"{"": 0}"#, "no name of a template's variable"),
        ] {
            let error = TemplateArguments::of_json(text).unwrap_err().to_string();
            assert!(error.contains(clue), "{text}: {error}");
        }
        let many: Vec<String> = (0..65).map(|at| format!("\"a{at}\": 1")).collect();
        let many = TemplateArguments::of_json(&format!("{{{}}}", many.join(",")));
        assert_eq!(many, Err(ArgumentError::TooMany { count: 65 }));
        let large = format!("{{\"a\": \"{}\"}}", "x".repeat(TemplateArguments::BYTES_MAX));
        assert!(matches!(TemplateArguments::of_json(&large), Err(ArgumentError::TooLarge { .. })));
        let deep = format!("{{\"a\": {}{}}}", "[".repeat(5000), "]".repeat(5000));
        assert_eq!(TemplateArguments::of_json(&deep), Err(ArgumentError::NoObject));
    }
}
