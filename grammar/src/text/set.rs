//! Sets of texts, closed under intersection, union and complement.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::GrammarError;

/// Maximum bytes of an expression.
const BYTES_MAX: usize = 1 << 18;

/// What a schema allows of strings and of null.
#[derive(Debug, Clone)]
pub(super) struct Form {
    pub(super) null: bool,
    pub(super) text: Texts,
}

impl Form {
    pub(super) fn all() -> Self {
        Self { null: true, text: Texts::any() }
    }

    pub(super) fn none() -> Self {
        Self { null: false, text: Texts::none() }
    }

    /// Strings of an expression of terminals, and null.
    pub(super) fn strings(expression: String) -> Self {
        Self { null: true, text: Texts::matching(expression) }
    }

    pub(super) fn and(self, other: &Self) -> Result<Self, GrammarError> {
        Ok(Self { null: self.null && other.null, text: self.text.and(&other.text)? })
    }

    pub(super) fn or(self, other: Self) -> Result<Self, GrammarError> {
        Ok(Self { null: self.null || other.null, text: self.text.or(other.text)? })
    }

    pub(super) fn not(self) -> Self {
        Self { null: !self.null, text: self.text.not() }
    }
}

/// How the parts of an expression are joined, by which it needs brackets in another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Joined {
    One,
    And,
    Or,
}

/// Set of texts.
#[derive(Debug, Clone)]
pub(super) enum Texts {
    /// These.
    Of(BTreeSet<String>),
    /// All but these.
    AllBut(BTreeSet<String>),
    /// Those of an expression of terminals.
    Matching(Expression),
}

/// Expression of terminals.
#[derive(Debug, Clone)]
pub(super) struct Expression {
    text: String,
    joined: Joined,
}

impl Expression {
    /// Returns the expression as a part of one that is joined so.
    fn within(&self, joined: Joined) -> String {
        if self.joined == Joined::One || self.joined == joined {
            return self.text.clone();
        }
        format!("({})", self.text)
    }

    fn join(&self, other: &Self, joined: Joined) -> Result<Self, GrammarError> {
        let sign = if joined == Joined::And { '&' } else { '|' };
        let text = bounded(format!("{} {sign} {}", self.within(joined), other.within(joined)))?;
        Ok(Self { text, joined })
    }
}

/// Checks the size of an expression.
pub(super) fn bounded(expression: String) -> Result<String, GrammarError> {
    if expression.len() > BYTES_MAX {
        let reason = format!(
            "the strings of the schema need an expression of more than {BYTES_MAX} bytes; use fewer alternatives"
        );
        return Err(GrammarError::Refused(reason));
    }
    Ok(expression)
}

impl Texts {
    pub(super) fn any() -> Self {
        Self::AllBut(BTreeSet::new())
    }

    pub(super) fn none() -> Self {
        Self::Of(BTreeSet::new())
    }

    /// Returns the set of some texts.
    pub(super) fn of<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        Self::Of(texts.into_iter().map(str::to_owned).collect())
    }

    /// Returns the set of an expression of one terminal.
    pub(super) fn matching(text: String) -> Self {
        Self::Matching(Expression { text, joined: Joined::One })
    }

    /// Whether the set is known to be empty.
    pub(super) fn is_none(&self) -> bool {
        matches!(self, Self::Of(texts) if texts.is_empty())
    }

    /// Returns the set as an expression of terminals that can stand in any other; `None` for all texts.
    pub(super) fn expression(&self) -> Option<String> {
        self.whole().map(|expression| expression.within(Joined::One))
    }

    fn whole(&self) -> Option<Expression> {
        match self {
            Self::Of(texts) => Some(listed(texts)),
            Self::AllBut(texts) if texts.is_empty() => None,
            Self::AllBut(texts) => Some(complement(&listed(texts))),
            Self::Matching(expression) => Some(expression.clone()),
        }
    }

    pub(super) fn and(self, other: &Self) -> Result<Self, GrammarError> {
        Ok(match (self, other) {
            (Self::Of(texts), Self::Of(others)) => {
                Self::Of(texts.into_iter().filter(|text| others.contains(text)).collect())
            }
            (Self::Of(mut texts), Self::AllBut(others)) => {
                remove(&mut texts, others);
                Self::Of(texts)
            }
            (Self::AllBut(others), Self::Of(texts)) => {
                Self::Of(texts.iter().filter(|text| !others.contains(*text)).cloned().collect())
            }
            (Self::AllBut(mut texts), Self::AllBut(others)) => {
                texts.extend(others.iter().cloned());
                Self::AllBut(texts)
            }
            (none, _) if none.is_none() => none,
            (_, none) if none.is_none() => Self::none(),
            (left, right) => match (left.whole(), right.whole()) {
                (Some(left), Some(right)) => Self::Matching(left.join(&right, Joined::And)?),
                (Some(only), None) | (None, Some(only)) => Self::Matching(only),
                (None, None) => Self::any(),
            },
        })
    }

    pub(super) fn or(self, other: Self) -> Result<Self, GrammarError> {
        Ok(match (self, other) {
            (Self::Of(mut texts), Self::Of(others)) => {
                texts.extend(others);
                Self::Of(texts)
            }
            (Self::AllBut(mut texts), Self::Of(others)) | (Self::Of(others), Self::AllBut(mut texts)) => {
                remove(&mut texts, &others);
                Self::AllBut(texts)
            }
            (Self::AllBut(texts), Self::AllBut(others)) => {
                Self::AllBut(texts.into_iter().filter(|text| others.contains(text)).collect())
            }
            (only, none) | (none, only) if none.is_none() => only,
            (left, right) => match (left.whole(), right.whole()) {
                (Some(left), Some(right)) => Self::Matching(left.join(&right, Joined::Or)?),
                (None, _) | (_, None) => Self::any(),
            },
        })
    }

    pub(super) fn not(self) -> Self {
        match self {
            Self::Of(texts) => Self::AllBut(texts),
            Self::AllBut(texts) => Self::Of(texts),
            Self::Matching(expression) => Self::Matching(complement(&expression)),
        }
    }
}

/// Removes some texts from others.
fn remove(texts: &mut BTreeSet<String>, others: &BTreeSet<String>) {
    if others.len() < texts.len() {
        others.iter().for_each(|text| _ = texts.remove(text));
    } else {
        texts.retain(|text| !others.contains(text));
    }
}

fn complement(expression: &Expression) -> Expression {
    if let (Joined::One, Some(text)) = (expression.joined, expression.text.strip_prefix('~')) {
        return Expression { text: text.to_owned(), joined: Joined::One };
    }
    Expression { text: format!("~{}", expression.within(Joined::One)), joined: Joined::One }
}

/// Returns the expression of some texts.
fn listed(texts: &BTreeSet<String>) -> Expression {
    let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
    match texts.as_slice() {
        [] => Expression { text: super::NONE.to_owned(), joined: Joined::One },
        [text] => Expression { text: text.clone(), joined: Joined::One },
        _ => Expression { text: texts.join(" | "), joined: Joined::Or },
    }
}

/// Returns a text as a string literal of Lark, whose escapes are those of JSON.
fn literal(text: &str) -> String {
    if text.is_empty() { "/(?:)/".to_owned() } else { Value::from(text).to_string() }
}
