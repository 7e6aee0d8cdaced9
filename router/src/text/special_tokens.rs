//! Special tokens of a model, as chat templates read them.

/// Special tokens by their names in templates, such as `bos_token`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens(Vec<(&'static str, String)>);

impl SpecialTokens {
    /// Names of the tokens that templates are given.
    pub const NAMES: [&'static str; 7] =
        ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

    /// Returns a token; `None` if the model has none of this name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, token)| token.as_str())
    }

    /// Returns the tokens with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.0.iter().map(|(name, token)| (*name, token.as_str()))
    }
}

/// Other names than [`SpecialTokens::NAMES`] are left out.
impl<T: Into<String>> FromIterator<(&'static str, T)> for SpecialTokens {
    fn from_iter<I: IntoIterator<Item = (&'static str, T)>>(tokens: I) -> Self {
        let known = tokens.into_iter().filter(|(name, _)| Self::NAMES.contains(name));
        Self(known.map(|(name, token)| (name, token.into())).collect())
    }
}
