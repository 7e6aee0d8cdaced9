//! Which files of a repository a model needs.

use std::collections::BTreeSet;

/// Index of a checkpoint in several files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Checkpoint in one file.
const SINGLE: &str = "model.safetensors";
/// Formats that run code when they are loaded, or that no runtime here reads.
const FOREIGN: [(&str, &str); 6] = [
    (".bin", "pickles of PyTorch, which run code when they are loaded"),
    (".pt", "pickles of PyTorch, which run code when they are loaded"),
    (".pth", "pickles of PyTorch, which run code when they are loaded"),
    (".onnx", "ONNX"),
    (".h5", "TensorFlow"),
    (".msgpack", "Flax"),
];

/// Maximum number of files of a GGUF model.
const PARTS_MAX: usize = 1000;

/// Files to fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Selection {
    /// A directory with a configuration, a tokenizer and checkpoints. `index` tells which of the weight files belong to it.
    Directory { files: Vec<String>, index: bool },
    /// A GGUF model: one file, or all parts in their order.
    Gguf(Vec<String>),
}

/// Chooses files; `wanted` is a file or a quantization.
pub(crate) fn select(files: &[String], wanted: Option<&str>) -> Result<Selection, String> {
    let has = |name: &str| files.iter().any(|file| file == name);
    if let Some(wanted) = wanted {
        return gguf(files, wanted).map(Selection::Gguf);
    }
    if has(INDEX) || has(SINGLE) {
        let mut chosen: Vec<String> = files.iter().filter(|file| is_side_file(file)).cloned().collect();
        if !has(INDEX) {
            chosen.push(SINGLE.to_owned());
        }
        return Ok(Selection::Directory { files: chosen, index: has(INDEX) });
    }
    let weights: Vec<&String> =
        files.iter().filter(|file| file.ends_with(".safetensors") && !file.contains('/')).collect();
    if let ([only], true) = (weights.as_slice(), has("config.json")) {
        let mut chosen: Vec<String> = files.iter().filter(|file| is_side_file(file)).cloned().collect();
        chosen.push((*only).clone());
        return Ok(Selection::Directory { files: chosen, index: false });
    }
    let ggufs: Vec<&String> = files.iter().filter(|file| is_gguf(file)).collect();
    match ggufs.as_slice() {
        [] => Err(nothing(files)),
        [only] => parts(files, only).map(Selection::Gguf),
        several if is_one_model(several) => parts(files, several[0]).map(Selection::Gguf),
        several => {
            let names: BTreeSet<String> = several.iter().map(|file| quantization(file)).collect();
            let names = names.into_iter().collect::<Vec<_>>().join(", ");
            Err(format!("it has several GGUF files; choose one with :QUANTIZATION, of {names}"))
        }
    }
}

/// Whether a file beside the weights is read: configuration, tokenizer, templates.
fn is_side_file(file: &str) -> bool {
    let is_template = file.strip_prefix("additional_chat_templates/").unwrap_or(file);
    let is_json = file.ends_with(".json") && !file.contains('/');
    is_json || (is_template.ends_with(".jinja") && !is_template.contains('/')) || file == "tokenizer.model"
}

fn is_gguf(file: &str) -> bool {
    file.to_ascii_lowercase().ends_with(".gguf") && !file.to_ascii_lowercase().contains("mmproj")
}

/// Returns the quantization in the name of a GGUF file, such as `Q4_K_M`; the name if there is none.
fn quantization(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    let stem = &name[..name.len() - ".gguf".len()];
    let stem =
        stem.rsplit_once("-of-").and_then(|(first, _)| first.rsplit_once('-')).map_or(stem, |(stem, _)| stem);
    let known = |text: &&str| {
        let upper = text.to_ascii_uppercase();
        let digits = upper.trim_start_matches("IQ").trim_start_matches('Q').trim_start_matches("TQ");
        let is_quantized = digits.len() < upper.len() && digits.starts_with(|c: char| c.is_ascii_digit());
        is_quantized || ["F16", "BF16", "F32", "MXFP4"].contains(&upper.as_str())
    };
    stem.rsplit(['-', '.']).find(known).unwrap_or(stem).to_owned()
}

/// Returns what the names of a model's parts share, the number of a part and how many there are; `None` of a whole model.
fn part_of(file: &str) -> Option<(&str, usize, usize)> {
    let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let (number, count): (usize, usize) =
        (number.parse().ok().filter(|_| digits(number))?, count.parse().ok().filter(|_| digits(count))?);
    ((1..=count).contains(&number) && count <= PARTS_MAX).then_some((name, number, count))
}

/// Returns the names of all files of the model that a GGUF file belongs to, in order.
pub fn part_names(file: &str) -> Vec<String> {
    let Some((name, _, count)) = part_of(file) else { return vec![file.to_owned()] };
    (1..=count).map(|number| format!("{name}-{number:05}-of-{count:05}.gguf")).collect()
}

/// Returns all files of the model that a GGUF file belongs to, which must be there.
fn parts(files: &[String], file: &str) -> Result<Vec<String>, String> {
    let parts = part_names(file);
    match parts.iter().find(|part| !files.contains(part)) {
        Some(missing) => Err(format!(
            "{file} is one of {} parts, and {missing} is missing; choose another quantization or revision",
            parts.len()
        )),
        None => Ok(parts),
    }
}

/// Whether files are parts of one model.
fn is_one_model(files: &[&String]) -> bool {
    let model = |file: &&String| part_of(file).map(|(name, _, count)| (name.to_owned(), count));
    let first = files.first().and_then(model);
    first.is_some() && files.iter().all(|file| model(file) == first)
}

fn gguf(files: &[String], wanted: &str) -> Result<Vec<String>, String> {
    if let Some(file) = files.iter().find(|file| *file == wanted) {
        let foreign = FOREIGN.iter().find(|(ending, _)| file.ends_with(ending));
        return match foreign {
            Some((_, what)) => Err(format!("{file} is {what}; only safetensors and GGUF are loaded")),
            None if is_gguf(file) => parts(files, file),
            None => Err(format!("{file} is no GGUF file; leave out :{wanted} for a model in safetensors")),
        };
    }
    let ggufs: Vec<&String> = files.iter().filter(|file| is_gguf(file)).collect();
    let matching: Vec<&String> =
        ggufs.iter().copied().filter(|file| quantization(file).eq_ignore_ascii_case(wanted)).collect();
    match matching.as_slice() {
        [only] => parts(files, only),
        [] if ggufs.is_empty() => Err(format!("it has no file {wanted}, and no GGUF files")),
        [] => {
            let names: BTreeSet<String> = ggufs.iter().map(|file| quantization(file)).collect();
            let names = names.into_iter().collect::<Vec<_>>().join(", ");
            Err(format!("it has no file {wanted} and no GGUF file of that quantization; it has {names}"))
        }
        several if is_one_model(several) => parts(files, several[0]),
        several => {
            let names: Vec<&str> = several.iter().map(|file| file.as_str()).collect();
            Err(format!("several files are {wanted}; name one of {}", names.join(", ")))
        }
    }
}

/// Says what a repository has that is of no use.
fn nothing(files: &[String]) -> String {
    let has = |ending: &str| files.iter().any(|file| file.ends_with(ending));
    let found = FOREIGN.iter().find(|(ending, _)| has(ending));
    match found {
        Some((_, what)) => {
            format!("it has no safetensors and no GGUF file, only {what}; look for a conversion of the model")
        }
        None if has("adapter_model.safetensors") => {
            "it is an adapter (LoRA), not a whole model; merge it into its base model first".to_owned()
        }
        None => "it has no safetensors and no GGUF file".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(files: &[&str], wanted: Option<&str>) -> Result<Selection, String> {
        select(&files.iter().map(|file| (*file).to_owned()).collect::<Vec<_>>(), wanted)
    }

    #[test]
    fn only_what_is_read_is_chosen() {
        let files = [
            "README.md",
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "additional_chat_templates/tools.jinja",
            "model.safetensors",
            "pytorch_model.bin",
            "onnx/model.onnx",
            "original/params.json",
            "consolidated.safetensors",
        ];
        let expected = [
            "config.json",
            "tokenizer.json",
            "chat_template.jinja",
            "additional_chat_templates/tools.jinja",
            "model.safetensors",
        ];
        let Selection::Directory { files: chosen, index: false } = of(&files, None).unwrap() else {
            panic!()
        };
        assert_eq!(chosen, expected);
        assert!(of(&files, Some("pytorch_model.bin")).unwrap_err().contains("run code"));
        assert!(of(&files, Some("Q4_K_M")).unwrap_err().contains("no GGUF files"));
        assert!(of(&["config.json", "pytorch_model.bin"], None).unwrap_err().contains("run code"));
        assert!(
            of(&["adapter_config.json", "adapter_model.safetensors"], None).unwrap_err().contains("LoRA")
        );
        assert!(of(&["README.md"], None).unwrap_err().contains("no safetensors and no GGUF"));
        let Selection::Directory { index: true, .. } =
            of(&["config.json", INDEX, "model-00001-of-00002.safetensors"], None).unwrap()
        else {
            panic!()
        };
    }

    #[test]
    fn gguf_files_are_chosen_by_name_and_by_quantization() {
        let files = [
            "m-Q4_K_M.gguf",
            "m.q8_0.gguf",
            "mmproj-F16.gguf",
            "m-IQ2_XS-00001-of-00002.gguf",
            "m-IQ2_XS-00002-of-00002.gguf",
        ];
        for (wanted, file) in [("Q4_K_M", 0), ("q4_k_m", 0), ("Q8_0", 1), ("m.q8_0.gguf", 1)] {
            assert_eq!(of(&files, Some(wanted)), Ok(Selection::Gguf(vec![files[file].to_owned()])));
        }
        assert!(of(&files, None).unwrap_err().ends_with("of IQ2_XS, Q4_K_M, q8_0"));
        assert!(of(&files, Some("Q5_0")).unwrap_err().contains("it has IQ2_XS, Q4_K_M, q8_0"));
        let parts = || Ok(Selection::Gguf(files[3..].iter().map(|part| (*part).to_owned()).collect()));
        for wanted in ["iq2_xs", files[3], files[4]] {
            assert_eq!(of(&files, Some(wanted)), parts(), "{wanted}");
        }
        assert_eq!(of(&[files[4], files[3]], None), parts());
        let refused = of(&files[..4], Some("IQ2_XS")).unwrap_err();
        assert!(refused.contains("m-IQ2_XS-00002-of-00002.gguf is missing"), "{refused}");
        assert_eq!(of(&["a.gguf"], None), Ok(Selection::Gguf(vec!["a.gguf".to_owned()])));
        assert_eq!(quantization("x/Model-7B-BF16.gguf"), "BF16");
    }
}
