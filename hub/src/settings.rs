//! Settings, by the environment variables of the Hub's own tools.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// Where models are, where they are kept, and who asks.
#[derive(Clone)]
pub struct Settings {
    /// Address of the Hub, without a slash at its end.
    pub endpoint: String,
    /// Token of an account, for private and gated models.
    pub token: Option<String>,
    /// Directory of the cache.
    pub cache: PathBuf,
    /// Whether the Hub is not to be asked.
    pub offline: bool,
    /// Connections for one file.
    pub connections: usize,
    /// Bytes of a part, each of which is one request.
    pub part_bytes: u64,
    /// First pause before a request is repeated; it doubles with each repetition.
    pub retry_pause: Duration,
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("endpoint", &self.endpoint)
            .field("has_token", &self.token.is_some())
            .field("cache", &self.cache)
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

impl Settings {
    /// Returns the settings of environment variables: `HF_ENDPOINT`, `HF_TOKEN` (or the file of `HF_TOKEN_PATH`), `HF_HUB_CACHE`, `HF_HOME`,
    /// `XDG_CACHE_HOME`, `HF_HUB_OFFLINE`.
    pub fn of_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let text = |name: &str| set(name).and_then(|value| value.into_string().ok());
        let home = set("HF_HOME").map(PathBuf::from).unwrap_or_else(|| {
            let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
            let below_home = || PathBuf::from(set("HOME").unwrap_or_else(|| "/".into())).join(".cache");
            cache.unwrap_or_else(below_home).join("huggingface")
        });
        let cache = set("HF_HUB_CACHE").or_else(|| set("HUGGINGFACE_HUB_CACHE"));
        let token_file = set("HF_TOKEN_PATH").map_or_else(|| home.join("token"), PathBuf::from);
        let token = text("HF_TOKEN")
            .or_else(|| text("HUGGING_FACE_HUB_TOKEN"))
            .or_else(|| std::fs::read_to_string(token_file).ok())
            .map(|token| token.trim().to_owned())
            .filter(|token| !token.is_empty());
        let is_true = |value: String| ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str());
        let offline = ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"].into_iter().filter_map(text).any(is_true);
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token,
            cache: cache.map_or_else(|| home.join("hub"), PathBuf::from),
            offline,
            connections: 8,
            part_bytes: 16 << 20,
            retry_pause: Duration::from_millis(500),
        }
    }

    /// Returns the settings of this process's environment.
    pub fn of_environment() -> Self {
        Self::of_variables(|name| std::env::var_os(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_have_the_precedence_of_the_hubs_own_tools() {
        let of = |variables: &[(&str, &str)]| {
            Settings::of_variables(|name| {
                let found = variables.iter().find(|(other, _)| *other == name);
                found.map(|(_, value)| OsString::from(value))
            })
        };
        let cache = |variables: &[(&str, &str)]| of(variables).cache.display().to_string();
        assert_eq!(cache(&[("HOME", "/h")]), "/h/.cache/huggingface/hub");
        assert_eq!(cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), "/x/huggingface/hub");
        assert_eq!(cache(&[("XDG_CACHE_HOME", "/x"), ("HF_HOME", "/f")]), "/f/hub");
        assert_eq!(cache(&[("HF_HOME", "/f"), ("HF_HUB_CACHE", "/c")]), "/c");
        let settings = of(&[
            ("HF_ENDPOINT", "http://m/"),
            ("HF_TOKEN", " t "),
            ("HF_HUB_OFFLINE", "1"),
            ("HF_HOME", "/none"),
        ]);
        assert_eq!((settings.endpoint.as_str(), settings.token.as_deref()), ("http://m", Some("t")));
        assert!(settings.offline && !of(&[("HF_HUB_OFFLINE", "0")]).offline);
        assert!(!format!("{settings:?}").contains("\"t\""));
    }
}
