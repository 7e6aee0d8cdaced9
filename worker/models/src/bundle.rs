//! Model bundle: the files of a model directory that routers need.

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::Error;
use super::files::Files;

/// Names of bundle files, in the order of the bundle.
const NAMES: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
];

/// Minimal schema of tokenizer.json, to detect other content.
#[derive(Deserialize)]
struct Tokenizer {
    #[serde(rename = "model")]
    _model: IgnoredAny,
}

/// Reads the bundle files that exist.
pub(super) fn read(files: &Files) -> Result<Vec<(String, Vec<u8>)>, Error> {
    let mut bundle = Vec::new();
    for name in NAMES {
        match files.read(name)? {
            Some(bytes) => bundle.push((name.to_owned(), bytes.into_owned())),
            None if name == "tokenizer.json" => {
                return Err(Error::MissingFile {
                    file: files.label(name),
                    advice: "routers need it to turn text into tokens; it comes with the model's other files",
                });
            }
            None => {}
        }
    }
    if let Err(error) = serde_json::from_slice::<Tokenizer>(&bundle[0].1) {
        return Err(Error::Broken { file: files.label(&bundle[0].0), reason: error.to_string() });
    }
    Ok(bundle)
}
