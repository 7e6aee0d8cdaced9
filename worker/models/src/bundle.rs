//! Model bundle: the files of a model directory that routers need.

use std::path::Path;

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

/// Folder with chat templates beside the default one, such as `tool_use.jinja` for conversations with tools.
const TEMPLATES: &str = "additional_chat_templates";
/// Maximum files in [`TEMPLATES`].
const TEMPLATES_MAX: usize = 16;
/// Maximum bytes of a chat template.
const TEMPLATE_BYTES_MAX: usize = 1 << 20;

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
    for name in templates(files)? {
        if let Some(bytes) = files.read(&name)? {
            bundle.push((name, bytes.into_owned()));
        }
    }
    for (name, bytes) in bundle.iter().filter(|(name, _)| name.ends_with(".jinja")) {
        check_size(&files.label(name), bytes.len())?;
    }
    if let Err(error) = serde_json::from_slice::<Tokenizer>(&bundle[0].1) {
        return Err(Error::Broken { file: files.label(&bundle[0].0), reason: error.to_string() });
    }
    Ok(bundle)
}

/// Returns the names of the files in [`TEMPLATES`], in ascending order.
fn templates(files: &Files) -> Result<Vec<String>, Error> {
    let mut names = files.list(TEMPLATES, ".jinja")?;
    if names.len() > TEMPLATES_MAX {
        let reason = format!("it has {} chat templates; at most {TEMPLATES_MAX} are read", names.len());
        return Err(Error::Broken { file: files.label(TEMPLATES), reason });
    }
    names.sort_unstable();
    Ok(names.into_iter().map(|name| format!("{TEMPLATES}/{name}")).collect())
}

/// Checks the size of a chat template.
fn check_size(file: &str, bytes: usize) -> Result<(), Error> {
    if bytes > TEMPLATE_BYTES_MAX {
        let reason = format!("it has {bytes} bytes; a chat template has at most {TEMPLATE_BYTES_MAX}");
        return Err(Error::Broken { file: file.to_owned(), reason });
    }
    Ok(())
}

/// Replaces the chat templates of a bundle by the one in a file.
pub(super) fn replace_template(bundle: &mut Vec<(String, Vec<u8>)>, path: &Path) -> Result<(), Error> {
    let file = path.display().to_string();
    let read = |source| Error::Read { file: file.clone(), source };
    let metadata = std::fs::metadata(path).map_err(read)?;
    if !metadata.is_file() {
        return Err(read(std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is not a file")));
    }
    check_size(&file, usize::try_from(metadata.len()).unwrap_or(usize::MAX))?;
    let bytes = std::fs::read(path).map_err(read)?;
    if let Err(error) = std::str::from_utf8(&bytes) {
        return Err(Error::Broken { file, reason: format!("a chat template is text: {error}") });
    }
    bundle.retain(|(name, _)| !name.ends_with(".jinja"));
    bundle.push(("chat_template.jinja".to_owned(), bytes));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> std::path::PathBuf {
        let folder = std::env::temp_dir().join(format!("inflight-bundle-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(folder.join(TEMPLATES)).unwrap();
        std::fs::write(folder.join("tokenizer.json"), r#"{"model": {}}"#).unwrap();
        folder
    }

    fn names(bundle: &[(String, Vec<u8>)]) -> Vec<&str> {
        bundle.iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn a_bundle_has_the_templates_of_a_model_up_to_a_limit_and_a_file_replaces_them() {
        let folder = folder("templates");
        let template =
            |name: &str, text: &[u8]| std::fs::write(folder.join(TEMPLATES).join(name), text).unwrap();
        template("tool_use.jinja", b"t");
        template("rag.jinja", b"r");
        template("notes.txt", b"n");
        std::fs::write(folder.join("chat_template.jinja"), "d").unwrap();
        let read = || read(&Files::of_directory(&folder).unwrap());
        let mut bundle = read().unwrap();
        let additional = ["additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja"];
        assert_eq!(names(&bundle), [&["tokenizer.json", "chat_template.jinja"], &additional[..]].concat());
        let file = folder.join("own");
        std::fs::write(&file, "o").unwrap();
        replace_template(&mut bundle, &file).unwrap();
        assert_eq!(names(&bundle), ["tokenizer.json", "chat_template.jinja"]);
        assert_eq!(bundle[1].1, b"o");
        let mut refused = |text: &[u8]| {
            std::fs::write(&file, text).unwrap();
            replace_template(&mut bundle, &file).unwrap_err().to_string()
        };
        assert!(refused(b"\xff").contains("own is broken: a chat template is text"));
        assert!(refused(&vec![b'a'; TEMPLATE_BYTES_MAX + 1]).contains("at most 1048576"));
        let missing = replace_template(&mut bundle, &folder.join("none")).unwrap_err().to_string();
        assert!(missing.starts_with("cannot read") && missing.contains("none"), "{missing}");
        assert!(replace_template(&mut bundle, &folder).unwrap_err().to_string().contains("it is not a file"));
        (0..TEMPLATES_MAX).for_each(|number| template(&format!("{number}.jinja"), b"x"));
        let refused = read().unwrap_err().to_string();
        assert!(refused.contains("it has 18 chat templates; at most 16 are read"), "{refused}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
