//! Models in several GGUF files, as `llama-gguf-split` writes them: the first has the metadata, each some of the tensors.

use std::collections::BTreeSet;

use serde_json::Value;

use super::super::error::Error;
use super::super::files::Files;
use super::super::weight_file::WeightFile;
use super::Gguf;

/// Maximum number of parts.
const PARTS_MAX: u64 = 1000;

impl Gguf {
    fn count_of(&self, key: &str) -> Option<u64> {
        self.metadata.get(key).and_then(Value::as_u64)
    }

    /// Opens the other parts of a model whose first part this is, the file `name`, and adds their tensors. Returns their files.
    ///
    /// # Errors
    /// This is not the first part, a part is missing, or one is of another model.
    pub(in super::super) fn join_parts(
        &mut self,
        name: &str,
        beside: &Files,
    ) -> Result<Vec<WeightFile>, Error> {
        let parts = self.count_of("split.count").unwrap_or(1);
        if parts <= 1 {
            return Ok(Vec::new());
        }
        let broken = |label: &str, reason: String| Error::Broken { file: label.to_owned(), reason };
        if parts > PARTS_MAX {
            let reason = format!(
                "it says that it is one of {parts} parts; models of at most {PARTS_MAX} are supported"
            );
            return Err(broken(&self.label, reason));
        }
        let stem = name.strip_suffix(&format!("-00001-of-{parts:05}.gguf"));
        let number = self.count_of("split.no").unwrap_or(0);
        let Some(stem) = stem.filter(|_| number == 0) else {
            let reason = format!(
                "it is part {} of {parts} of a model; give the first part, whose name ends with -00001-of-{parts:05}.gguf, with the others \
                 beside it",
                number.saturating_add(1)
            );
            return Err(broken(&self.label, reason));
        };
        let mut files = Vec::new();
        let mut known: BTreeSet<String> = self.tensors.iter().map(|tensor| tensor.name.clone()).collect();
        for part in 1..parts as usize {
            let name = format!("{stem}-{:05}-of-{parts:05}.gguf", part + 1);
            let Some(file) = beside.open_weights(&name)? else {
                let advice = "it is a part of the model; was the download completed?";
                return Err(Error::MissingFile { file: beside.label(&name), advice });
            };
            let other = Self::parse(&file)?;
            if (other.count_of("split.no"), other.count_of("split.count")) != (Some(part as u64), Some(parts))
            {
                return Err(broken(
                    &other.label,
                    format!("it is not part {} of {parts}, as its name says", part + 1),
                ));
            }
            if let Some(tensor) = other.tensors.iter().find(|tensor| !known.insert(tensor.name.clone())) {
                let reason = format!(
                    "tensor {} is in another part, too: the parts are of different models",
                    tensor.name
                );
                return Err(broken(&other.label, reason));
            }
            self.tensors.extend(other.tensors.into_iter().map(|tensor| super::GgufTensor { part, ..tensor }));
            files.push(file);
        }
        let (all, found) = (self.count_of("split.tensors.count"), self.tensors.len() as u64);
        match all.filter(|all| *all != found) {
            Some(all) => {
                let reason = format!(
                    "its {parts} parts have {found} tensors, not {all}: they are of different models"
                );
                Err(broken(&self.label, reason))
            }
            None => Ok(files),
        }
    }
}
