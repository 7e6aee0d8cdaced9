//! Conversation of `inflight chat`: the messages so far.

use inflight_proto::v1::{Chat, ChatMessage, ToolCall};

const SYSTEM: &str = "system";
const USER: &str = "user";

/// Messages so far: the system message, if any, then user and assistant in turn.
#[derive(Debug, Clone, Default)]
pub struct Conversation {
    system: Option<ChatMessage>,
    messages: Vec<ChatMessage>,
}

impl Conversation {
    /// Creates an empty conversation.
    pub fn new(system: Option<String>) -> Self {
        Self { system: system.map(|content| message(SYSTEM, content)), messages: Vec::new() }
    }

    /// Creates a conversation of these messages, the first of which may be a system message.
    pub fn of(mut messages: Vec<ChatMessage>) -> Self {
        let has_system = messages.first().is_some_and(|first| first.role == SYSTEM);
        let system = has_system.then(|| messages.remove(0));
        Self { system, messages }
    }

    /// Whether there is no message but the system message.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Returns the system message.
    pub fn system(&self) -> Option<&str> {
        self.system.as_ref().map(|system| system.content.as_str())
    }

    /// Replaces the system message.
    pub fn set_system(&mut self, text: String) {
        self.system = Some(message(SYSTEM, text));
    }

    /// Iterates over all messages.
    pub fn messages(&self) -> impl Iterator<Item = &ChatMessage> {
        self.system.iter().chain(&self.messages)
    }

    /// Returns the conversation with a next message of the user, which is not kept until it is answered.
    pub fn with(&self, text: &str) -> Chat {
        let user = message(USER, text.to_owned());
        Chat { messages: self.messages().cloned().chain([user]).collect(), ..Default::default() }
    }

    /// Keeps a message of the user and its answer, with the tool calls in it.
    pub fn keep(&mut self, text: &str, answer: String, tool_calls: Vec<ToolCall>) {
        self.messages.push(message(USER, text.to_owned()));
        self.messages.push(ChatMessage { tool_calls, ..message("assistant", answer) });
    }

    /// Removes and returns the last message of the user with what follows it; `None` if there is none.
    pub fn pop_turn(&mut self) -> Option<Vec<ChatMessage>> {
        let at = self.messages.iter().rposition(|message| message.role == USER)?;
        Some(self.messages.split_off(at))
    }

    /// Appends what [`pop_turn`](Self::pop_turn) has removed.
    pub fn push_turn(&mut self, turn: Vec<ChatMessage>) {
        self.messages.extend(turn);
    }

    /// Forgets all but the system message.
    pub fn reset(&mut self) {
        self.messages.clear();
    }
}

fn message(role: &str, content: String) -> ChatMessage {
    ChatMessage { role: role.to_owned(), content, ..ChatMessage::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roles(chat: &Chat) -> Vec<String> {
        chat.messages.iter().map(|message| format!("{}:{}", message.role, message.content)).collect()
    }

    #[test]
    fn answered_messages_are_kept_in_order_and_a_reset_keeps_the_system_message() {
        let mut conversation = Conversation::new(Some("s".to_owned()));
        assert_eq!(roles(&conversation.with("lost")), ["system:s", "user:lost"]);
        conversation.keep("a", "b".to_owned(), Vec::new());
        assert_eq!(roles(&conversation.with("c")), ["system:s", "user:a", "assistant:b", "user:c"]);
        conversation.set_system("t".to_owned());
        conversation.reset();
        assert!(conversation.is_empty());
        assert_eq!(roles(&conversation.with("d")), ["system:t", "user:d"]);
    }

    #[test]
    fn a_turn_is_removed_with_all_that_follows_its_message() {
        let mut conversation = Conversation::new(None);
        assert_eq!(conversation.pop_turn(), None);
        conversation.keep("a", "b".to_owned(), Vec::new());
        conversation.keep("c", "d".to_owned(), Vec::new());
        let mut messages: Vec<ChatMessage> = conversation.messages().cloned().collect();
        messages.push(message("tool", "e".to_owned()));
        messages.insert(0, message("system", "s".to_owned()));
        let mut loaded = Conversation::of(messages);
        assert_eq!(loaded.system(), Some("s"));
        let turn = loaded.pop_turn().unwrap();
        assert_eq!(
            roles(&Chat { messages: turn.clone(), ..Chat::default() }),
            ["user:c", "assistant:d", "tool:e"]
        );
        assert_eq!(roles(&loaded.with("x")), ["system:s", "user:a", "assistant:b", "user:x"]);
        loaded.push_turn(turn);
        assert_eq!(loaded.messages().count(), 6);
    }
}
