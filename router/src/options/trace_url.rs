//! Address of a trace in a viewer of traces.

use std::fmt;
use std::str::FromStr;

use crate::trace::TraceId;

/// Placeholder of the trace id.
const PLACEHOLDER: &str = "{trace_id}";

/// Template of the addresses of traces: an http or https URL with `{trace_id}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceUrl(String);

impl TraceUrl {
    /// Returns the address of a trace.
    pub(crate) fn of(&self, trace: TraceId) -> String {
        self.0.replace(PLACEHOLDER, &trace.to_string())
    }
}

impl fmt::Display for TraceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for TraceUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
        let host = rest.and_then(|rest| rest.split(['/', '?', '#']).next()).unwrap_or_default();
        let example = "https://traces.example.com/trace/{trace_id}";
        if host.is_empty() || host.contains(PLACEHOLDER) {
            return Err(format!("not an http or https URL with a host, such as {example}"));
        }
        if !text.contains(PLACEHOLDER) {
            return Err(format!(
                "{PLACEHOLDER} is missing, in whose place the id of a trace goes: {example}"
            ));
        }
        if let Some(wrong) =
            text.chars().find(|character| character.is_control() || character.is_whitespace())
        {
            return Err(format!("{wrong:?} is not allowed in a URL; write it as %XX"));
        }
        Ok(Self(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_a_url_with_a_place_for_the_id_of_a_trace() {
        let id = TraceId::from_hex("4bf92f3577b34da6a3ce929d0e0e4736").unwrap();
        let url: TraceUrl =
            "https://g.example/explore?left=%7B%22{trace_id}%22%7D#{trace_id}".parse().unwrap();
        assert_eq!(url.of(id), format!("https://g.example/explore?left=%7B%22{id}%22%7D#{id}"));
        for (wrong, why) in [
            ("javascript:alert({trace_id})", "http or https"),
            ("g.example/{trace_id}", "http or https"),
            ("https:///{trace_id}", "a host"),
            ("http://{trace_id}", "a host"),
            ("https://g.example/trace", "{trace_id} is missing"),
            ("https://g.example/ {trace_id}", "is not allowed"),
            ("https://g.example/\n{trace_id}", "is not allowed"),
        ] {
            let error = wrong.parse::<TraceUrl>().unwrap_err();
            assert!(error.contains(why), "{wrong:?}: {error}");
        }
    }
}
