//! Whitespace between the parts of a JSON text.

use std::fmt;
use std::str::FromStr;

/// Whitespace that grammars of JSON allow between the parts of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, serde::Serialize, serde::Deserialize)]
pub enum JsonWhitespace {
    /// None, or one space after a colon and after a comma.
    #[default]
    OneLine,
    /// A space, or a line break with at most 40 spaces or tabs, between all parts. Unbounded whitespace would let a model write it to the
    /// end of its output.
    Any,
}

impl JsonWhitespace {
    /// All values.
    const ALL: [Self; 2] = [Self::OneLine, Self::Any];

    /// Returns the options for it of llguidance's compiler of JSON schemas, a JSON object.
    pub const fn compiler_options(self) -> &'static str {
        match self {
            Self::OneLine => r#"{"whitespace_flexible":false,"item_separator":", ?","key_separator":": ?"}"#,
            Self::Any => r#"{"whitespace_pattern":" |\\r?\\n[ \\t]{0,40}"}"#,
        }
    }
}

impl fmt::Display for JsonWhitespace {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::OneLine => "one-line",
            Self::Any => "any",
        })
    }
}

impl FromStr for JsonWhitespace {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|whitespace| whitespace.to_string() == name);
        found.ok_or_else(|| "neither one-line nor any".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_is_read_by_its_name() {
        for whitespace in JsonWhitespace::ALL {
            assert_eq!(whitespace.to_string().parse(), Ok(whitespace));
        }
        assert!("One-Line".parse::<JsonWhitespace>().is_err());
    }
}
