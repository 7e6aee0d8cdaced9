//! Names of models: `org/name[@revision][:file]`.

use std::fmt;
use std::str::FromStr;

use crate::HubError;

/// Maximum length of each part of `org/name`, in characters.
const PART_MAX: usize = 96;
/// Maximum characters of a revision and of a file.
const SUFFIX_MAX: usize = 255;
/// Prefix with which a name is never taken for a path.
const SCHEME: &str = "hf://";

/// Name of a model on the Hub, with a revision and a file or quantization if they are given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelName {
    repo: String,
    revision: Option<String>,
    file: Option<String>,
}

impl ModelName {
    /// Returns the name that an argument has the form of; `None` for what can only be a path.
    ///
    /// # Errors
    /// [`HubError::Name`]: it begins with `hf://` and is no name.
    pub fn of_argument(text: &str) -> Result<Option<Self>, HubError> {
        match text.strip_prefix(SCHEME) {
            Some(name) => name.parse().map(Some),
            None => Ok(text.parse().ok()),
        }
    }

    /// Organisation and name, `org/name`.
    pub fn repo(&self) -> &str {
        &self.repo
    }

    /// Branch, tag or commit; `main` if none is given.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// File, or quantization of a GGUF file such as `Q4_K_M`.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }
}

impl FromStr for ModelName {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let refused = |reason| HubError::Name { name: text.to_owned(), reason };
        let (org, rest) =
            text.split_once('/').ok_or_else(|| refused("there is no / between organisation and name"))?;
        let end = rest.find(['@', ':']).unwrap_or(rest.len());
        let (model, suffix) = rest.split_at(end);
        if !is_part(org) || !is_part(model) {
            return Err(refused(
                "organisation and name have 1 to 96 letters, digits, -, _ and ., begin with a letter or digit and do not end with .git",
            ));
        }
        let (revision, file) = match suffix.strip_prefix('@') {
            Some(suffix) => match suffix.split_once(':') {
                Some((revision, file)) => (Some(revision), Some(file)),
                None => (Some(suffix), None),
            },
            None => (None, suffix.strip_prefix(':')),
        };
        if !revision.is_none_or(is_suffix) {
            return Err(refused("a revision is the name of a branch or tag, or a commit"));
        }
        if !file.is_none_or(is_suffix) {
            return Err(refused("what follows : is a file of the repository or a quantization"));
        }
        Ok(Self {
            repo: format!("{org}/{model}"),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repo)?;
        self.revision.iter().try_for_each(|revision| write!(f, "@{revision}"))?;
        self.file.iter().try_for_each(|file| write!(f, ":{file}"))
    }
}

fn is_part(part: &str) -> bool {
    part.len() <= PART_MAX
        && part.starts_with(|c: char| c.is_ascii_alphanumeric())
        && part.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
        && !part.contains("--")
        && !part.contains("..")
        && !part.ends_with(".git")
}

/// Whether a text can be a revision or a file: a relative path that stays below where it begins.
pub(crate) fn is_suffix(text: &str) -> bool {
    text.len() <= SUFFIX_MAX
        && !text.contains(|c: char| c.is_control() || c.is_whitespace() || "\\?#%".contains(c))
        && text.split('/').all(|segment| !matches!(segment, "" | "." | ".."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_their_parts_and_paths_are_none() {
        for (text, repo, revision, file) in [
            ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "main", None),
            ("hf://a/b", "a/b", "main", None),
            ("a/b@v1.0", "a/b", "v1.0", None),
            ("a/b@refs/pr/1", "a/b", "refs/pr/1", None),
            ("a/b:Q4_K_M", "a/b", "main", Some("Q4_K_M")),
            ("a/b@main:sub/x.gguf", "a/b", "main", Some("sub/x.gguf")),
        ] {
            let name = ModelName::of_argument(text).unwrap().unwrap();
            assert_eq!((name.repo(), name.revision(), name.file()), (repo, revision, file));
            assert_eq!(name.to_string(), text.trim_start_matches(SCHEME));
        }
        for path in [
            "", "a", "/a/b", "./a", "a/b/c", "~/a/b", "../a", "a b/c", "a/", "a/b:", "a/b@", "a/b:../c",
            "a--b/c", "a/b.git",
        ] {
            assert_eq!(ModelName::of_argument(path).unwrap(), None, "{path}");
            assert!(ModelName::of_argument(&format!("{SCHEME}{path}")).is_err(), "{path}");
        }
    }
}
