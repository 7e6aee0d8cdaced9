//! Parsing of simulated device profiles: built-in names, JSON files and overrides.

use std::path::PathBuf;

use inflight_worker_core::{DeviceProfile, ProfileError};
use serde_json::Value;

/// Error for an invalid device profile.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// Unknown name or invalid coefficient.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// An override is not `KEY=NUMBER`.
    #[error("`{0}` is not KEY=NUMBER")]
    Override(String),
    /// Reading the file failed.
    #[error("can't read the device profile {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The file is not a JSON object of numbers.
    #[error("the device profile {} {what}", path.display())]
    Format {
        /// Path of the file.
        path: PathBuf,
        /// Defect, as the predicate of the error sentence.
        what: String,
    },
}

/// Parses `PROFILE[,KEY=NUMBER]...`: a built-in name or the path of a JSON file, which contains a `/` or ends
/// in `.json`, and coefficients that override the profile's.
///
/// The file is a JSON object of cost coefficients by name.
/// Default of missing coefficients: the built-in profile that the file's key `base` names, else `flat`.
///
/// # Errors
/// [`SpecError`].
pub fn read_profile(spec: &str) -> Result<DeviceProfile, SpecError> {
    let mut parts = spec.split(',');
    let name = parts.next().unwrap_or_default();
    let mut profile = if name.contains('/') || name.ends_with(".json") {
        read_file(name)?
    } else {
        DeviceProfile::built_in(name)?
    };
    for part in parts {
        let wrong = || SpecError::Override(part.to_owned());
        let (key, value) = part.split_once('=').ok_or_else(wrong)?;
        profile.set(key.trim(), value.trim().parse().map_err(|_| wrong())?)?;
    }
    Ok(profile)
}

fn read_file(name: &str) -> Result<DeviceProfile, SpecError> {
    let path = PathBuf::from(name);
    let format = |what: String| SpecError::Format { path: path.clone(), what };
    let text =
        std::fs::read_to_string(&path).map_err(|source| SpecError::Read { path: path.clone(), source })?;
    let parsed: Value =
        serde_json::from_str(&text).map_err(|error| format(format!("is no JSON: {error}")))?;
    let Value::Object(fields) = parsed else { return Err(format("is no JSON object".to_owned())) };
    let base = match fields.get("base") {
        None => "flat",
        Some(Value::String(base)) => base,
        Some(_) => return Err(format("has a `base` that is no name".to_owned())),
    };
    let mut profile = DeviceProfile::built_in(base)?;
    for (key, value) in fields.iter().filter(|(key, _)| *key != "base") {
        let number = value.as_f64().ok_or_else(|| format(format!("has a `{key}` that is no number")))?;
        profile.set(key, number)?;
    }
    Ok(profile)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_are_read_by_name_or_file_with_overrides() {
        let base = DeviceProfile::built_in("h200-llama3-8b").unwrap();
        assert_eq!(read_profile("h200-llama3-8b").unwrap(), base);
        let changed = read_profile("h200-llama3-8b,step=0.001, pool_tokens = 4096").unwrap();
        assert_eq!(changed, DeviceProfile { step: 1e-3, pool_tokens: 4096, ..base });

        let path = std::env::temp_dir().join(format!("profile-{}.json", std::process::id()));
        let spec = path.display().to_string();
        std::fs::write(&path, r#"{"base": "h200-llama3-8b", "step": 0.001}"#).unwrap();
        let read = read_profile(&format!("{spec},pool_tokens=4096")).unwrap();
        assert_eq!(read, changed);
        for (text, expected) in [
            ("[1]", "no JSON object"),
            ("{", "no JSON"),
            (r#"{"base": 1}"#, "no name"),
            (r#"{"base": "abacus"}"#, "abacus"),
            (r#"{"step": "fast"}"#, "no number"),
            (r#"{"speed": 1}"#, "speed"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = read_profile(&spec).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        std::fs::remove_file(&path).unwrap();
        for (spec, expected) in [
            ("", "no profile ``"),
            ("abacus", "no profile `abacus`"),
            ("flat,step", "`step` is not KEY=NUMBER"),
            ("flat,step=x", "is not KEY=NUMBER"),
            ("flat,step=-1", "from 0 to 60"),
            ("/no/such/file", "can't read"),
        ] {
            let error = read_profile(spec).unwrap_err().to_string();
            assert!(error.contains(expected), "{spec}: {error}");
        }
    }
}
