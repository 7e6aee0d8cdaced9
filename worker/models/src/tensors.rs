//! Tensors of a checkpoint, memory-mapped from safetensors or GGUF files under their Hugging Face names.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use inflight_kernels::cpu::WeightRows;
use inflight_kernels::{Dtype, Encoding};
use safetensors::SafeTensors;
use safetensors::tensor::{SafeTensorError, TensorView};
use serde::Deserialize;

use super::Error;
use super::architecture::TensorNames;
use super::files::{Bytes, Files};
use super::gguf::Gguf;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Memory-mapped tensors of a model's weight files.
#[derive(Debug)]
pub struct Tensors {
    weight_files: Vec<WeightFile>,
    entries: BTreeMap<String, TensorEntry>,
}

#[derive(Debug)]
struct WeightFile {
    label: String,
    bytes: Bytes,
}

#[derive(Debug, Clone)]
pub(super) struct TensorEntry {
    file_index: usize,
    /// Element encoding, or the name of an unsupported one.
    pub(super) encoding: Result<Encoding, String>,
    /// Head size if the rows of a head are interleaved; see [`WeightRows::interleaved`].
    interleaved: Option<usize>,
    pub(super) shape: Vec<usize>,
    pub(super) range: Range<usize>,
}

/// Tensor of validated shape. Keeps its file mapped.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Encoding of the elements.
    pub encoding: Encoding,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Head size if the rows of a head are interleaved; see [`WeightRows::interleaved`].
    interleaved: Option<usize>,
    bytes: Bytes,
    range: Range<usize>,
}

impl Tensor {
    /// Encoded elements: little-endian, row-major, unaligned.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.range.clone()]
    }

    /// Returns the rows of the matrix [shape[0], ...].
    pub fn rows(&self) -> WeightRows<'_> {
        WeightRows {
            encoding: self.encoding,
            bytes: self.bytes(),
            rows: self.shape[0],
            interleaved: self.interleaved,
        }
    }

    /// Returns the given rows of a matrix; whole heads if the rows are interleaved.
    ///
    /// # Panics
    /// If the rows are out of range or split a head.
    pub fn rows_in(&self, rows: Range<usize>) -> WeightRows<'_> {
        let whole = self.interleaved.is_none_or(|head| (rows.start % head, rows.len() % head) == (0, 0));
        assert!(whole && rows.end <= self.shape[0], "rows are not in the tensor");
        let row = self.encoding.bytes(self.shape[1..].iter().product());
        let bytes = &self.bytes()[rows.start * row..rows.end * row];
        WeightRows { bytes, rows: rows.len(), ..self.rows() }
    }

    /// Copies the given columns of a matrix [rows, columns] in the file's encoding; whole quantization
    /// blocks.
    ///
    /// # Panics
    /// If the columns are out of range or split a block.
    pub fn columns_in(&self, columns: Range<usize>) -> Vec<u8> {
        let (block, width) = (self.encoding.block(), self.shape[1]);
        let whole = columns.start.is_multiple_of(block) && columns.end.is_multiple_of(block);
        assert!(whole && columns.end <= width, "columns are not in the tensor");
        let bytes = self.encoding.bytes(columns.start)..self.encoding.bytes(columns.end);
        let mut columns = Vec::with_capacity(self.shape[0] * bytes.len());
        for row in self.bytes().chunks_exact(self.encoding.bytes(width)) {
            columns.extend_from_slice(&row[bytes.clone()]);
        }
        columns
    }

    /// Returns the given columns of logical row `row` of a matrix [rows, columns] in the file's encoding;
    /// whole quantization blocks. Logical rows are those after de-interleaving; see
    /// [`WeightRows::interleaved`].
    ///
    /// # Panics
    /// If row or columns are out of range.
    pub fn columns_of_row(&self, row: usize, columns: Range<usize>) -> &[u8] {
        let bytes = self.encoding.bytes(self.shape[1]);
        let at = self.rows().row(row) * bytes;
        &self.bytes()[at..at + bytes][self.encoding.bytes(columns.start)..self.encoding.bytes(columns.end)]
    }

    /// Returns whether the rows are stored in logical order, not interleaved.
    pub fn in_order(&self) -> bool {
        self.interleaved.is_none()
    }

    /// Converts stored row `row` of a matrix to f32.
    ///
    /// # Panics
    /// If the row is out of range, or `out` is not as long as a row.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        let bytes = self.encoding.bytes(out.len());
        self.encoding.widen(&self.bytes()[row * bytes..(row + 1) * bytes], out);
    }

    /// Releases the tensor's resident pages; it can be read again.
    pub fn release(&self) {
        self.bytes.release(self.range.clone());
    }

    /// Converts all elements to f32, de-interleaved if the tensor is one-dimensional.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.shape.iter().product()];
        self.encoding.widen(self.bytes(), &mut out);
        match self.interleaved {
            Some(head) if self.shape.len() == 1 => {
                let halves = |head: &[f32]| {
                    let half = |first| head.iter().skip(first).step_by(2).copied();
                    half(0).chain(half(1)).collect::<Vec<_>>()
                };
                out.chunks_exact(head).flat_map(halves).collect()
            }
            _ => out,
        }
    }
}

#[derive(Deserialize)]
struct SafetensorsIndex {
    weight_map: BTreeMap<String, String>,
}

impl Tensors {
    /// Opens model.safetensors, or the files of model.safetensors.index.json.
    pub(super) fn open(files: &Files) -> Result<Self, Error> {
        let mut tensors = Self { weight_files: Vec::new(), entries: BTreeMap::new() };
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
        let index: SafetensorsIndex = serde_json::from_slice(&bytes)
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

    /// Wraps the tensors of a GGUF file under the names of checkpoints. `head_dim` is set if the rows of
    /// query and key heads are interleaved.
    pub(super) fn of_gguf(gguf: Gguf, bytes: Bytes, names: &TensorNames, head_dim: Option<usize>) -> Self {
        let mut entries = BTreeMap::new();
        for info in gguf.tensors {
            let Some(name) = names.of_gguf(&info.name) else { continue };
            let rotated = names.is_query_or_key(&name);
            let entry = TensorEntry {
                file_index: 0,
                encoding: info.encoding.map_err(|kind| format!("of ggml's type {kind}")),
                interleaved: head_dim.filter(|_| rotated),
                shape: info.shape,
                range: info.range,
            };
            entries.insert(name, entry);
        }
        Self { weight_files: vec![WeightFile { label: gguf.label, bytes }], entries }
    }

    fn add(&mut self, label: String, bytes: Bytes) -> Result<(), Error> {
        for (name, entry) in parse_header(&label, &bytes, self.weight_files.len())? {
            match self.entries.entry(name) {
                Entry::Vacant(vacant) => drop(vacant.insert(entry)),
                Entry::Occupied(other) => {
                    let first = &self.weight_files[other.get().file_index].label;
                    let reason = format!("tensor {} is also in {first}", other.key());
                    return Err(Error::Broken { file: label, reason });
                }
            }
        }
        self.weight_files.push(WeightFile { label, bytes });
        Ok(())
    }

    /// Returns whether the tensor exists.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// Returns a tensor of the expected shape.
    ///
    /// # Errors
    /// The tensor is missing, has another shape, or an unsupported encoding.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<Tensor, Error> {
        let Some(entry) = self.entries.get(name) else {
            let file = match self.weight_files.as_slice() {
                [only] => only.label.clone(),
                several => format!("none of the {} weight files", several.len()),
            };
            return Err(Error::MissingTensor { file, tensor: name.to_owned(), expected: shape.to_vec() });
        };
        let weight_file = &self.weight_files[entry.file_index];
        let (file, tensor) = (weight_file.label.clone(), name.to_owned());
        if entry.shape != shape {
            return Err(Error::Shape { file, tensor, expected: shape.to_vec(), found: entry.shape.clone() });
        }
        let encoding = match &entry.encoding {
            Ok(encoding) => *encoding,
            Err(other) => return Err(Error::Dtype { file, tensor, found: other.clone() }),
        };
        Ok(Tensor {
            encoding,
            interleaved: entry.interleaved,
            shape: entry.shape.clone(),
            bytes: weight_file.bytes.clone(),
            range: entry.range.clone(),
        })
    }

    /// Total bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.entries.values().map(|entry| entry.range.len() as u64).sum()
    }

    /// Iterates over name, type, shape and bytes of every tensor, by name.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, String, &[usize], &[u8])> {
        self.entries.iter().map(|(name, entry)| {
            let bytes = &self.weight_files[entry.file_index].bytes[entry.range.clone()];
            let kind = match &entry.encoding {
                Ok(encoding) => encoding.to_string(),
                Err(other) => other.clone(),
            };
            (name.as_str(), kind, entry.shape.as_slice(), bytes)
        })
    }
}

/// Parses the header of a safetensors file; returns its tensors by name.
pub(super) fn parse_header(
    label: &str,
    bytes: &[u8],
    file_index: usize,
) -> Result<BTreeMap<String, TensorEntry>, Error> {
    let header = SafeTensors::deserialize(bytes)
        .map_err(|error| Error::Broken { file: label.to_owned(), reason: explain(&error, bytes.len()) })?;
    let start = bytes.as_ptr() as usize;
    let entry = |(name, view): (&str, TensorView<'_>)| {
        let from = view.data().as_ptr() as usize - start;
        let entry = TensorEntry {
            file_index,
            encoding: match view.dtype() {
                safetensors::Dtype::F32 => Ok(Dtype::F32.into()),
                safetensors::Dtype::BF16 => Ok(Dtype::Bf16.into()),
                safetensors::Dtype::F16 => Ok(Dtype::F16.into()),
                other => Err(other.to_string()),
            },
            interleaved: None,
            shape: view.shape().to_vec(),
            range: from..from + view.data().len(),
        };
        (name.to_owned(), entry)
    };
    Ok(header.iter().map(entry).collect())
}

/// Explains a safetensors error to the user.
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
