//! Conversation of `inflight chat`: its history and the lines that are typed.

use inflight_proto::v1::{Chat, ChatMessage, ToolCall};

/// Meaning of a typed line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry<'a> {
    /// Nothing but whitespace.
    Blank,
    /// Message to the model.
    Message(&'a str),
    /// `/exit`: ends the command.
    Exit,
    /// `/reset`: forgets the conversation.
    Reset,
    /// `/help`: lists the commands.
    Help,
    /// Unknown command.
    Unknown(&'a str),
}

impl<'a> Entry<'a> {
    /// Reads a line. A line that starts with `/` is a command.
    pub fn parse(line: &'a str) -> Self {
        match line.trim() {
            "" => Self::Blank,
            _ if !line.starts_with('/') => Self::Message(line),
            "/exit" | "/quit" => Self::Exit,
            "/reset" => Self::Reset,
            "/help" => Self::Help,
            command => Self::Unknown(command),
        }
    }
}

/// Messages so far: the system message, if any, then user and assistant in turn.
#[derive(Debug, Clone)]
pub struct Conversation {
    system: Option<ChatMessage>,
    /// Answered messages, each followed by its answer.
    turns: Vec<ChatMessage>,
}

impl Conversation {
    /// Creates an empty conversation.
    pub fn new(system: Option<String>) -> Self {
        Self { system: system.map(|content| message("system", content)), turns: Vec::new() }
    }

    /// Whether there is no answered message.
    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Returns the conversation with a next message of the user, which is not kept until it is answered.
    pub fn with(&self, text: &str) -> Chat {
        let user = message("user", text.to_owned());
        Chat {
            messages: self.system.iter().chain(&self.turns).cloned().chain([user]).collect(),
            ..Default::default()
        }
    }

    /// Keeps a message of the user and its answer, with the tool calls in it.
    pub fn keep(&mut self, text: &str, answer: String, tool_calls: Vec<ToolCall>) {
        self.turns.push(message("user", text.to_owned()));
        self.turns.push(ChatMessage { tool_calls, ..message("assistant", answer) });
    }

    /// Forgets all but the system message.
    pub fn reset(&mut self) {
        self.turns.clear();
    }
}

fn message(role: &str, content: String) -> ChatMessage {
    ChatMessage { role: role.to_owned(), content, ..ChatMessage::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_command_only_if_it_starts_with_a_slash() {
        let table = [
            ("", Entry::Blank),
            (" \t", Entry::Blank),
            ("/exit", Entry::Exit),
            ("/reset ", Entry::Reset),
            ("/help", Entry::Help),
            ("/rest", Entry::Unknown("/rest")),
            (" /exit", Entry::Message(" /exit")),
            ("what is /exit?", Entry::Message("what is /exit?")),
        ];
        for (line, entry) in table {
            assert_eq!(Entry::parse(line), entry, "{line:?}");
        }
    }

    #[test]
    fn answered_messages_are_kept_in_order_and_a_reset_keeps_the_system_message() {
        let roles = |chat: &Chat| -> Vec<String> {
            chat.messages.iter().map(|message| format!("{}:{}", message.role, message.content)).collect()
        };
        let mut conversation = Conversation::new(Some("s".to_owned()));
        assert_eq!(roles(&conversation.with("lost")), ["system:s", "user:lost"]);
        conversation.keep("a", "b".to_owned(), Vec::new());
        assert_eq!(roles(&conversation.with("c")), ["system:s", "user:a", "assistant:b", "user:c"]);
        conversation.reset();
        assert!(conversation.is_empty());
        assert_eq!(roles(&conversation.with("d")), ["system:s", "user:d"]);
    }
}
