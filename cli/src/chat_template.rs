//! Check of `--chat-template` before a model is loaded for minutes.

use std::path::Path;

use inflight_router::text::ChatTemplate;

use crate::exit::{CommandError, Exit};

/// Checks that a file has a chat template.
///
/// # Errors
/// It cannot be read, or its text is no template.
pub fn check(file: Option<&Path>) -> Result<(), CommandError> {
    let Some(file) = file else { return Ok(()) };
    let refused = |reason: &dyn std::fmt::Display| {
        let advice = "correct it, or leave the flag out to use the model's own template";
        CommandError::new(Exit::Usage, format!("--chat-template {}: {reason}; {advice}", file.display()))
    };
    let source = std::fs::read_to_string(file).map_err(|error| refused(&error))?;
    ChatTemplate::new(&source, "", "").map(drop).map_err(|error| refused(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_has_no_chat_template_is_refused_by_its_name() {
        let file = std::env::temp_dir().join(format!("inflight-template-{}.jinja", std::process::id()));
        let outcome = |text: &[u8]| {
            std::fs::write(&file, text).unwrap();
            match check(Some(&file)) {
                Ok(()) => None,
                Err(CommandError::Message(Exit::Usage, message)) => Some(message),
                Err(other) => panic!("{other:?}"),
            }
        };
        assert_eq!(outcome(b"{{ messages[0].content }}"), None);
        let refused = outcome(b"a\n{% if %}").unwrap();
        assert!(refused.starts_with("--chat-template /") && refused.contains("does not parse"), "{refused}");
        assert!(refused.contains("line 2") || refused.contains(":2)"), "{refused}");
        assert!(outcome(b"\xff").unwrap().contains("valid UTF-8"));
        std::fs::remove_file(&file).unwrap();
        assert!(check(Some(&file)).is_err() && check(None).is_ok());
    }
}
