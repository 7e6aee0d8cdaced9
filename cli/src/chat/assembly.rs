//! Messages of several lines: typed lines become one text.

/// Line that begins and ends a block.
const FENCE: &str = "\"\"\"";

/// Text of one message or command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// Lines, without the line break at the end.
    pub text: String,
    /// Whether it is a message whatever it starts with, as it was typed between fences.
    pub block: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// Before the first line.
    #[default]
    Empty,
    /// After a line that ended in a backslash.
    Continued,
    /// After an opening fence.
    Block,
}

/// Assembles texts of typed lines.
///
/// A line that ends in a backslash continues on the next one. Lines between two lines `"""` are one text. What is typed or pasted may itself
/// have line breaks; those inside have no meaning.
#[derive(Debug, Default)]
pub struct Assembler {
    state: State,
    text: String,
}

impl Assembler {
    /// Whether a text has begun and has not ended.
    pub fn is_open(&self) -> bool {
        self.state != State::Empty
    }

    /// Discards the begun text.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Takes what was entered at once. Returns the text that it completes.
    pub fn push(&mut self, typed: &str) -> Option<Text> {
        match self.state {
            State::Empty if typed.trim() == FENCE => {
                self.state = State::Block;
                None
            }
            State::Empty | State::Continued => match typed.strip_suffix('\\') {
                Some(line) => {
                    self.state = State::Continued;
                    self.text.push_str(line);
                    self.text.push('\n');
                    None
                }
                None => {
                    self.text.push_str(typed);
                    self.take(false)
                }
            },
            State::Block => {
                let (before, last) = typed.rsplit_once('\n').unwrap_or(("", typed));
                if last.trim() != FENCE {
                    self.text.push_str(typed);
                    self.text.push('\n');
                    return None;
                }
                self.text.push_str(before);
                if before.is_empty() {
                    self.text.pop(); // the break before the fence
                }
                self.take(true)
            }
        }
    }

    fn take(&mut self, block: bool) -> Option<Text> {
        let text = std::mem::take(&mut self.text);
        self.state = State::Empty;
        Some(Text { text, block })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_become_texts() {
        // What is entered, and what that completes.
        let line = |text: &str| Some((text.to_owned(), false));
        let block = |text: &str| Some((text.to_owned(), true));
        let table = [
            (vec!["one"], line("one")),
            (vec![""], line("")),
            (vec!["one\\", "two"], line("one\ntwo")),
            (vec!["one\\", "\\", "\"\"\""], line("one\n\n\"\"\"")),
            (vec!["one\\"], None),
            (vec!["pasted\\\nlines\n"], line("pasted\\\nlines\n")),
            (vec!["pasted\nlines\\", "end"], line("pasted\nlines\nend")),
            (vec!["\"\"\"", "one", "", "  two\\", "\"\"\""], block("one\n\n  two\\")),
            (vec![" \"\"\" ", "/exit", "\"\"\" "], block("/exit")),
            (vec!["\"\"\"", "\"\"\""], block("")),
            (vec!["\"\"\"", "a", "pasted\n\"\"\"\nlines", "b\n\"\"\""], block("a\npasted\n\"\"\"\nlines\nb")),
            (vec!["\"\"\"", "open"], None),
            (vec!["\"\"\"quoted\"\"\""], line("\"\"\"quoted\"\"\"")),
        ];
        for (entered, expected) in table {
            let mut assembler = Assembler::default();
            let (last, before) = entered.split_last().unwrap();
            for typed in before {
                assert_eq!(assembler.push(typed), None, "{entered:?}");
                assert!(assembler.is_open(), "{entered:?}");
            }
            let completed = assembler.push(last).map(|Text { text, block }| (text, block));
            assert_eq!(assembler.is_open(), completed.is_none(), "{entered:?}");
            assert_eq!(completed, expected, "{entered:?}");
            // Nothing remains of it.
            assembler.clear();
            assert_eq!(assembler.push("next").map(|text| text.text), Some("next".to_owned()));
        }
    }
}
