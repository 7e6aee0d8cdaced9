use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use inflight_kernels::Dtype;
use inflight_kernels::cpu::Rows;
use safetensors::SafeTensors;
use safetensors::tensor::SafeTensorError;
use serde::Deserialize;

use super::Error;
use super::files::{Bytes, Files};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The tensors of a model's weight files, still in the files.
#[derive(Debug)]
pub struct Tensors {
    shards: Vec<Shard>,
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Shard {
    label: String,
    bytes: Bytes,
}

#[derive(Debug, Clone)]
struct Entry {
    shard: usize,
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    range: Range<usize>,
}

/// A tensor whose shape was checked. Holds its file open.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// How its numbers are stored.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
    bytes: Bytes,
    range: Range<usize>,
}

impl Tensor {
    /// Its numbers, little-endian, row-major, at any alignment.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.range.clone()]
    }

    /// As rows of a matrix [shape[0], ...].
    pub fn rows(&self) -> Rows<'_> {
        Rows { dtype: self.dtype, bytes: self.bytes(), rows: self.shape[0] }
    }

    /// All its numbers.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.range.len() / self.dtype.bytes()];
        inflight_kernels::widen(self.dtype, self.bytes(), &mut out);
        out
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Tensors {
    pub(super) fn open(files: &Files) -> Result<Self, Error> {
        let mut tensors = Self { shards: Vec::new(), entries: BTreeMap::new() };
        if let Some(bytes) = files.open(SINGLE)? {
            tensors.add(files.label(SINGLE), bytes)?;
            return Ok(tensors);
        }
        let Some(bytes) = files.open(INDEX)? else {
            return Err(Error::MissingFile {
                file: files.label(SINGLE),
                advice: "nor is there a model.safetensors.index.json; convert the weights to safetensors",
            });
        };
        let index: Index = serde_json::from_slice(&bytes)
            .map_err(|error| Error::Broken { file: files.label(INDEX), reason: error.to_string() })?;
        let names: BTreeSet<&String> = index.weight_map.values().collect();
        for name in names {
            if name.contains(['/', '\\']) || name.starts_with('.') {
                let reason = format!("`{name}` is not the name of a file beside it");
                return Err(Error::Broken { file: files.label(INDEX), reason });
            }
            let Some(bytes) = files.open(name)? else {
                return Err(Error::MissingFile {
                    file: files.label(name),
                    advice: "model.safetensors.index.json names it; was the download completed?",
                });
            };
            tensors.add(files.label(name), bytes)?;
        }
        Ok(tensors)
    }

    fn add(&mut self, label: String, bytes: Bytes) -> Result<(), Error> {
        let broken = |reason: String| Error::Broken { file: label.clone(), reason };
        let header =
            SafeTensors::deserialize(&bytes).map_err(|error| broken(explain(&error, bytes.len())))?;
        let start = bytes.as_ptr() as usize;
        let shard = self.shards.len();
        for (name, view) in header.iter() {
            let from = view.data().as_ptr() as usize - start;
            let entry = Entry {
                shard,
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                range: from..from + view.data().len(),
            };
            if let Some(other) = self.entries.insert(name.to_owned(), entry) {
                let reason = format!("tensor {name} is also in {}", self.shards[other.shard].label);
                return Err(broken(reason));
            }
        }
        drop(header);
        self.shards.push(Shard { label, bytes });
        Ok(())
    }

    /// Whether a tensor is there.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// A tensor of known shape.
    ///
    /// # Errors
    /// It is missing, has another shape, or numbers of a type that kernels don't have.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor, Error> {
        let Some(entry) = self.entries.get(name) else {
            let file = match self.shards.as_slice() {
                [only] => only.label.clone(),
                shards => format!("none of the {} weight files", shards.len()),
            };
            return Err(Error::MissingTensor { file, tensor: name.to_owned(), expected: shape.to_vec() });
        };
        let shard = &self.shards[entry.shard];
        let (file, tensor) = (shard.label.clone(), name.to_owned());
        if entry.shape != shape {
            return Err(Error::Shape { file, tensor, expected: shape.to_vec(), found: entry.shape.clone() });
        }
        let dtype = match entry.dtype {
            safetensors::Dtype::F32 => Dtype::F32,
            safetensors::Dtype::BF16 => Dtype::Bf16,
            safetensors::Dtype::F16 => Dtype::F16,
            other => return Err(Error::Dtype { file, tensor, found: other.to_string() }),
        };
        Ok(Tensor {
            dtype,
            shape: entry.shape.clone(),
            bytes: shard.bytes.clone(),
            range: entry.range.clone(),
        })
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.entries.values().map(|entry| entry.range.len() as u64).sum()
    }

    /// Name, type, shape and bytes of every tensor, by name.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, String, &[usize], &[u8])> {
        self.entries.iter().map(|(name, entry)| {
            let bytes = &self.shards[entry.shard].bytes[entry.range.clone()];
            (name.as_str(), entry.dtype.to_string(), entry.shape.as_slice(), bytes)
        })
    }
}

/// What a header's error means for whoever has the file.
fn explain(error: &SafeTensorError, bytes: usize) -> String {
    match error {
        SafeTensorError::HeaderTooSmall | SafeTensorError::InvalidHeaderLength => {
            format!(
                "its {bytes} bytes do not hold the header it announces; it is truncated or not safetensors"
            )
        }
        SafeTensorError::MetadataIncompleteBuffer => format!(
            "its {bytes} bytes are not what its header describes; it is truncated or has something appended"
        ),
        SafeTensorError::HeaderTooLarge => {
            "it announces a header of over 100 MB; it is corrupted or not safetensors".to_owned()
        }
        other => format!("{other}; it is corrupted or not safetensors"),
    }
}
