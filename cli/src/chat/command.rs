//! Commands of `inflight chat`: their table, and the meaning of what was typed.

/// Command of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Lists the commands.
    Help,
    /// Sets or shows the system message.
    System,
    /// Sets or shows sampling options.
    Set,
    /// Writes the conversation to a file.
    Save,
    /// Replaces the conversation by that of a file.
    Load,
    /// Shows figures of answers.
    Stats,
    /// Generates the last answer anew.
    Retry,
    /// Removes the last message and its answer.
    Undo,
    /// Selects the model.
    Model,
    /// Forgets the conversation.
    Reset,
    /// Ends the command.
    Exit,
}

/// Argument of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Argument {
    /// None.
    None,
    /// Required, with its name.
    Required(&'static str),
    /// Optional, with its name.
    Optional(&'static str),
}

/// Row of the table of commands.
#[derive(Debug, PartialEq, Eq)]
pub struct CommandRow {
    /// Command.
    pub command: Command,
    /// Name with its slash, then aliases.
    pub names: &'static [&'static str],
    /// Argument.
    pub argument: Argument,
    /// What it does.
    pub help: &'static str,
}

const fn row(
    command: Command,
    names: &'static [&'static str],
    argument: Argument,
    help: &'static str,
) -> CommandRow {
    CommandRow { command, names, argument, help }
}

/// Table of commands.
pub const COMMANDS: [CommandRow; 11] = [
    row(Command::Help, &["/help"], Argument::None, "prints this list"),
    row(
        Command::System,
        &["/system"],
        Argument::Optional("TEXT"),
        "sets the system message; without TEXT, prints it",
    ),
    row(
        Command::Set,
        &["/set"],
        Argument::Optional("OPTION VALUE"),
        "sets a sampling option, or adds a value to one with several; VALUE default removes it; alone, prints all",
    ),
    row(Command::Save, &["/save"], Argument::Required("FILE"), "writes the messages as JSON"),
    row(
        Command::Load,
        &["/load"],
        Argument::Required("FILE"),
        "replaces the conversation by the messages of a file",
    ),
    row(
        Command::Stats,
        &["/stats"],
        Argument::Optional("on|off"),
        "prints figures after each answer, or stops that; alone, those of the last answer",
    ),
    row(Command::Retry, &["/retry"], Argument::None, "generates the last answer anew"),
    row(Command::Undo, &["/undo"], Argument::None, "removes the last message and its answer"),
    row(
        Command::Model,
        &["/model"],
        Argument::Optional("NAME"),
        "continues with another model; alone, lists those served",
    ),
    row(
        Command::Reset,
        &["/reset", "/new"],
        Argument::None,
        "forgets the conversation; the system message stays",
    ),
    row(Command::Exit, &["/exit", "/quit"], Argument::None, "ends, as does Ctrl-D"),
];

/// What keys do, below the list of commands.
const KEYS: &str = "\
Ctrl-C stops the current answer; what it said so far is kept. Up and down recall messages, Ctrl-R searches them, Tab completes commands.
A line that ends in a backslash continues on the next one. Lines between lines of \"\"\" are one message, and so is pasted text.
A message that starts with / needs a space before it.";

/// Meaning of what was typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry<'a> {
    /// Nothing but whitespace.
    Blank,
    /// Message to the model.
    Message(&'a str),
    /// Command with its argument, which is empty if there is none.
    Command(Command, &'a str),
    /// Known command without the argument that it needs, or with one that it does not take.
    WrongArgument(&'static CommandRow),
    /// Unknown command.
    Unknown(&'a str),
}

impl<'a> Entry<'a> {
    /// Reads a text. One that starts with `/` is a command.
    pub fn parse(text: &'a str) -> Self {
        if text.trim().is_empty() {
            return Self::Blank;
        }
        if !text.starts_with('/') {
            return Self::Message(text);
        }
        let name = text.split_whitespace().next().unwrap_or(text);
        let argument = text[name.len()..].trim();
        let Some(row) = COMMANDS.iter().find(|row| row.names.contains(&name)) else {
            return Self::Unknown(name);
        };
        match (row.argument, argument.is_empty()) {
            (Argument::None, false) | (Argument::Required(_), true) => Self::WrongArgument(row),
            _ => Self::Command(row.command, argument),
        }
    }
}

impl CommandRow {
    /// Returns how the command is typed.
    pub fn usage(&self) -> String {
        let names = self.names.join(", ");
        match self.argument {
            Argument::None => names,
            Argument::Required(name) => format!("{names} {name}"),
            Argument::Optional(name) => format!("{names} [{name}]"),
        }
    }
}

/// Returns the list of commands and keys.
pub fn help() -> String {
    let width = COMMANDS.iter().map(|row| row.usage().len()).max().unwrap_or(0);
    let mut text = String::new();
    for row in &COMMANDS {
        text.push_str(&format!("{:width$}  {}\n", row.usage(), row.help));
    }
    text + KEYS
}

/// Returns the name that is nearest to a mistyped one, by edits of single characters and swaps of neighbours.
pub fn nearest<'a>(typed: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    names.into_iter().min_by_key(|name| strsim::damerau_levenshtein(typed, name))
}

/// Returns the command that is nearest to a mistyped one.
pub fn nearest_command(typed: &str) -> Option<&'static str> {
    nearest(typed, COMMANDS.iter().flat_map(|row| row.names.iter().copied()))
}

/// Returns where the word before the cursor begins, and its completions.
pub fn completions(before: &str, options: &[String], models: &[String]) -> (usize, Vec<String>) {
    let start = before.rfind(char::is_whitespace).map_or(0, |at| {
        at + before[at..].chars().next().map_or(1, char::len_utf8) // behind the space
    });
    let (head, word) = before.split_at(start);
    let names: Vec<&str> = match head.split_whitespace().collect::<Vec<_>>()[..] {
        [] if word.starts_with('/') && start == 0 => {
            COMMANDS.iter().flat_map(|row| row.names.iter().copied()).collect()
        }
        ["/set"] => options.iter().map(String::as_str).collect(),
        ["/model"] => models.iter().map(String::as_str).collect(),
        ["/stats"] => vec!["on", "off"],
        _ => Vec::new(),
    };
    (start, names.into_iter().filter(|name| name.starts_with(word)).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_a_command_only_if_it_starts_with_a_slash() {
        let table = [
            ("", Entry::Blank),
            (" \t\n", Entry::Blank),
            ("/exit", Entry::Command(Command::Exit, "")),
            ("/quit", Entry::Command(Command::Exit, "")),
            ("/reset ", Entry::Command(Command::Reset, "")),
            ("/new", Entry::Command(Command::Reset, "")),
            ("/system  Be brief. ", Entry::Command(Command::System, "Be brief.")),
            ("/system", Entry::Command(Command::System, "")),
            ("/system one\ntwo", Entry::Command(Command::System, "one\ntwo")),
            ("/set\ttop_p 0.5", Entry::Command(Command::Set, "top_p 0.5")),
            ("/stats on", Entry::Command(Command::Stats, "on")),
            ("/rest", Entry::Unknown("/rest")),
            ("/Reset now", Entry::Unknown("/Reset")),
            ("/", Entry::Unknown("/")),
            ("/\u{e9}t\u{e9} x", Entry::Unknown("/\u{e9}t\u{e9}")),
            (" /exit", Entry::Message(" /exit")),
            ("what is /exit?", Entry::Message("what is /exit?")),
        ];
        for (text, entry) in table {
            assert_eq!(Entry::parse(text), entry, "{text:?}");
        }
        for (text, usage) in [("/undo 3", "/undo"), ("/save", "/save FILE"), ("/load  ", "/load FILE")] {
            let Entry::WrongArgument(row) = Entry::parse(text) else { panic!("{text}") };
            assert_eq!(row.usage(), usage);
        }
    }

    #[test]
    fn the_nearest_command_is_named() {
        let table = [
            ("/rest", "/reset"),
            ("/hlep", "/help"),
            ("/stat", "/stats"),
            ("/unod", "/undo"),
            ("/sytsem", "/system"),
        ];
        for (typed, command) in table {
            assert_eq!(nearest_command(typed), Some(command), "{typed}");
        }
    }

    #[test]
    fn commands_and_their_arguments_are_completed() {
        let options = ["top_k", "top_p", "seed"].map(str::to_owned);
        let models = ["llama".to_owned()];
        let table: &[(&str, usize, &[&str])] = &[
            ("/s", 0, &["/system", "/set", "/save", "/stats"]),
            ("/", 0, &[]),
            ("/set to", 5, &["top_k", "top_p"]),
            ("/set top_k ", 11, &[]),
            ("/model ", 7, &["llama"]),
            ("/stats o", 7, &["on", "off"]),
            ("/load x", 6, &[]),
            ("why /s", 4, &[]),
            (" /s", 1, &[]),
            ("caf\u{e9} \u{3000}/s", 9, &[]),
            ("", 0, &[]),
        ];
        for (before, start, expected) in table {
            let (at, found) = completions(before, &options, &models);
            assert_eq!(at, *start, "{before:?}");
            if *before == "/" {
                assert_eq!(found.len(), COMMANDS.iter().map(|row| row.names.len()).sum::<usize>());
            } else {
                assert_eq!(found, *expected, "{before:?}");
            }
        }
    }
}
