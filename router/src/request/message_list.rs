//! Messages of a conversation as they are read from a request.

use std::collections::HashMap;

use crate::outcome::Outcome;
use crate::request::tool_call::check_values;
use crate::text::{Message, MessageCall};

/// Maximum messages of a conversation. A decoded message takes many times the two bytes of an empty one on the wire.
const MESSAGES_MAX: usize = 16 << 10;

/// Messages of a conversation read so far, with an index of their tool calls by id. A request may have hundreds of thousands of
/// calls and thousands of results, each of which looks up its call.
#[derive(Debug, Default)]
pub(crate) struct MessageList {
    messages: Vec<Message>,
    /// JSON values of the calls' arguments.
    values: usize,
    /// Tool names by call id; of several calls with an id, the last one counts.
    called: HashMap<String, String>,
}

impl MessageList {
    /// Checks a number of messages. To be called before they are read.
    pub(crate) fn check_count(count: usize) -> Result<(), Outcome> {
        if count <= MESSAGES_MAX {
            return Ok(());
        }
        let reason = format!("messages has {count} messages; at most {MESSAGES_MAX} are allowed");
        Err(Outcome::field("messages", reason))
    }

    /// Appends a message.
    ///
    /// # Errors
    /// There are too many, or their calls are too large.
    pub(crate) fn push(&mut self, message: Message) -> Result<(), Outcome> {
        Self::check_count(self.messages.len() + 1)?;
        for call in &message.tool_calls {
            note(&mut self.called, call);
            self.values += call.values();
        }
        check_values("messages", self.values)?;
        self.messages.push(message);
        Ok(())
    }

    /// Adds a call to the last message if that is of the assistant; otherwise returns the call.
    pub(crate) fn extend_last(&mut self, call: MessageCall) -> Result<(), MessageCall> {
        match self.messages.last_mut().filter(|last| last.role == "assistant") {
            Some(last) => {
                note(&mut self.called, &call);
                self.values += call.values();
                last.tool_calls.push(call);
                Ok(())
            }
            None => Err(call),
        }
    }

    /// Returns the name of the tool that an earlier call has called.
    pub(crate) fn called_tool(&self, id: &str) -> Option<&str> {
        self.called.get(id).map(String::as_str)
    }

    /// Returns the messages so far.
    pub(crate) fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Returns all messages.
    ///
    /// # Errors
    /// Their calls are too large.
    pub(crate) fn into_messages(self) -> Result<Vec<Message>, Outcome> {
        check_values("messages", self.values)?;
        Ok(self.messages)
    }
}

/// Checks that the last message can be continued.
pub(crate) fn check_continued(field: &'static str, messages: &[Message]) -> Result<(), Outcome> {
    let refused =
        |reason: &str| Err(Outcome::field(field, format!("the last message cannot be continued: {reason}")));
    match messages.last() {
        Some(last) if last.role != "assistant" => refused("it is not of the assistant"),
        Some(last) if !last.tool_calls.is_empty() => {
            refused("it has tool calls; send their results behind it")
        }
        Some(last) if last.text().is_empty() => refused("it has no text"),
        _ => Ok(()),
    }
}

fn note(called: &mut HashMap<String, String>, call: &MessageCall) {
    if !call.id.is_empty() {
        called.insert(call.id.clone(), call.name.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(id: &str, name: &str) -> MessageCall {
        MessageCall { id: id.to_owned(), name: name.to_owned(), arguments: minijinja::Value::default() }
    }

    #[test]
    fn a_result_finds_the_last_call_of_its_id_and_none_without_an_id() {
        let mut list = MessageList::default();
        assert_eq!(list.extend_last(call("a", "x")), Err(call("a", "x")), "there is no message");
        let tool_calls = vec![call("a", "x"), call("", "y")];
        list.push(Message { tool_calls, ..Message::new("assistant", String::new()) }).unwrap();
        assert_eq!((list.called_tool("a"), list.called_tool("")), (Some("x"), None));
        list.extend_last(call("a", "z")).unwrap();
        assert_eq!((list.called_tool("a"), list.messages()[0].tool_calls.len()), (Some("z"), 3));
        list.push(Message::new("user", String::new())).unwrap();
        assert!(list.extend_last(call("b", "x")).is_err(), "the last message is of the user");
    }

    #[test]
    fn the_first_message_beyond_the_limit_is_refused() {
        let mut list = MessageList::default();
        for _ in 0..MESSAGES_MAX {
            list.push(Message::default()).unwrap();
        }
        assert!(list.push(Message::default()).is_err());
        assert_eq!(list.into_messages().unwrap().len(), MESSAGES_MAX);
    }
}
