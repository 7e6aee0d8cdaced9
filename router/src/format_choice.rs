//! Choice of the formats of models' output, by flag.

use std::fmt;
use std::str::FromStr;

/// Format of a model's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice<F> {
    /// That of the model's chat template.
    Auto,
    /// None: the output is text.
    None,
    Format(F),
}

/// Formats of models: one for all, and others for single models, as in `auto,my-model=hermes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FormatChoice<F> {
    all: Choice<F>,
    models: Vec<(String, Choice<F>)>,
}

impl<F> Default for FormatChoice<F> {
    fn default() -> Self {
        Self { all: Choice::Auto, models: Vec::new() }
    }
}

impl<F: Copy> FormatChoice<F> {
    /// Returns the format of a model whose chat template has the format `detected`.
    pub(crate) fn of(&self, model: &str, detected: Option<F>) -> Option<F> {
        let named = self.models.iter().find(|(name, _)| name == model).map(|(_, choice)| choice);
        match named.unwrap_or(&self.all) {
            Choice::Auto => detected,
            Choice::None => None,
            Choice::Format(format) => Some(*format),
        }
    }
}

impl<F: fmt::Display> fmt::Display for Choice<F> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => out.write_str("auto"),
            Self::None => out.write_str("none"),
            Self::Format(format) => format.fmt(out),
        }
    }
}

impl<F: fmt::Display> fmt::Display for FormatChoice<F> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.all.fmt(out)?;
        self.models.iter().try_for_each(|(model, choice)| write!(out, ",{model}={choice}"))
    }
}

impl<F: FromStr<Err: fmt::Display>> FromStr for FormatChoice<F> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let choice = |name: &str| match name {
            "auto" => Ok(Choice::Auto),
            "none" => Ok(Choice::None),
            name => name.parse().map(Choice::Format).map_err(|error| format!("{error}, auto and none")),
        };
        let mut formats = Self::default();
        for part in text.split(',').map(str::trim) {
            match part.rsplit_once('=') {
                Some((model, name)) => formats.models.push((model.to_owned(), choice(name)?)),
                None => formats.all = choice(part)?,
            }
        }
        Ok(formats)
    }
}

#[cfg(test)]
mod tests {
    use inflight_output_parser::ToolCallFormat;

    use super::*;

    #[test]
    fn one_format_counts_for_all_models_but_those_named() {
        let formats: FormatChoice<ToolCallFormat> = "mistral, a/b=hermes,c=none,d=auto".parse().unwrap();
        assert_eq!(formats.to_string(), "mistral,a/b=hermes,c=none,d=auto");
        let of = |model| formats.of(model, Some(ToolCallFormat::Llama3));
        assert_eq!(of("x"), Some(ToolCallFormat::Mistral));
        assert_eq!(of("a/b"), Some(ToolCallFormat::Hermes));
        assert_eq!((of("c"), of("d")), (None, Some(ToolCallFormat::Llama3)));
        let refused = "xml".parse::<FormatChoice<ToolCallFormat>>().unwrap_err();
        assert!(refused.contains("qwen-xml") && refused.contains("auto"), "{refused}");
    }
}
