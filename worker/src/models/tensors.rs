use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use inflight_kernels::cpu::Rows;
use inflight_kernels::{Dtype, Encoding};
use safetensors::SafeTensors;
use safetensors::tensor::SafeTensorError;
use serde::Deserialize;

use super::Error;
use super::files::{Bytes, Files};
use super::gguf::Gguf;

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
    /// `Err`: the name of a type that kernels don't have.
    encoding: Result<Encoding, String>,
    interleaved: Option<usize>,
    shape: Vec<usize>,
    range: Range<usize>,
}

/// A tensor whose shape was checked. Holds its file open.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// How its numbers are stored.
    pub encoding: Encoding,
    /// Its shape.
    pub shape: Vec<usize>,
    /// See [`Rows::interleaved`].
    interleaved: Option<usize>,
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
        Rows {
            encoding: self.encoding,
            bytes: self.bytes(),
            rows: self.shape[0],
            interleaved: self.interleaved,
        }
    }

    /// Some of the rows of a matrix; whole heads where those are interleaved.
    ///
    /// # Panics
    /// If there are no such rows.
    pub fn rows_in(&self, rows: Range<usize>) -> Rows<'_> {
        let whole = self.interleaved.is_none_or(|head| (rows.start % head, rows.len() % head) == (0, 0));
        assert!(whole && rows.end <= self.shape[0], "rows are not in the tensor");
        let row = self.encoding.bytes(self.shape[1..].iter().product());
        let bytes = &self.bytes()[rows.start * row..rows.end * row];
        Rows { bytes, rows: rows.len(), ..self.rows() }
    }

    /// Some of the columns of a matrix [rows, columns], copied as the file stores them: whole blocks.
    ///
    /// # Panics
    /// If there are no such columns, or a block would be cut.
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

    /// Some of the columns of a row of a matrix [rows, columns], as the file stores them: whole blocks. Rows are counted as
    /// [`Rows::interleaved`] brings them apart.
    ///
    /// # Panics
    /// If there are no such columns.
    pub fn columns_of_row(&self, row: usize, columns: Range<usize>) -> &[u8] {
        let bytes = self.encoding.bytes(self.shape[1]);
        let at = self.rows().row(row) * bytes;
        &self.bytes()[at..at + bytes][self.encoding.bytes(columns.start)..self.encoding.bytes(columns.end)]
    }

    /// Whether its rows lie in their order.
    pub fn in_order(&self) -> bool {
        self.interleaved.is_none()
    }

    /// Widens row `row` of a matrix.
    ///
    /// # Panics
    /// If there is no such row, or `out` is not as long as one.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        let bytes = self.encoding.bytes(out.len());
        self.encoding.widen(&self.bytes()[row * bytes..(row + 1) * bytes], out);
    }

    /// Lets go of the memory that reading it from its file took. It can be read again.
    pub fn release(&self) {
        self.bytes.release(self.range.clone());
    }

    /// All its numbers.
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

    /// The tensors of a GGUF file under the names that safetensors files have. `head_dim` is given where the file
    /// holds the rows of queries and keys interleaved.
    pub(super) fn of_gguf(gguf: Gguf, bytes: Bytes, head_dim: Option<usize>) -> Self {
        let mut entries = BTreeMap::new();
        for info in gguf.tensors {
            let Some(name) = hugging_face_name(&info.name) else { continue };
            let rotated = [".q_proj.", ".k_proj."].iter().any(|part| name.contains(part));
            let entry = Entry {
                shard: 0,
                encoding: info.encoding.map_err(|kind| format!("of ggml's type {kind}")),
                interleaved: head_dim.filter(|_| rotated),
                shape: info.shape,
                range: info.range,
            };
            entries.insert(name, entry);
        }
        Self { shards: vec![Shard { label: gguf.label, bytes }], entries }
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
        let encoding = match &entry.encoding {
            Ok(encoding) => *encoding,
            Err(other) => return Err(Error::Dtype { file, tensor, found: other.clone() }),
        };
        Ok(Tensor {
            encoding,
            interleaved: entry.interleaved,
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
            let kind = match &entry.encoding {
                Ok(encoding) => encoding.to_string(),
                Err(other) => other.clone(),
            };
            (name.as_str(), kind, entry.shape.as_slice(), bytes)
        })
    }
}

/// What a tensor of a GGUF file is called in safetensors files; `None` if kernels have no use for it.
fn hugging_face_name(name: &str) -> Option<String> {
    let plain = match name {
        "token_embd.weight" => "model.embed_tokens.weight",
        "output_norm.weight" => "model.norm.weight",
        "output.weight" => "lm_head.weight",
        _ => {
            let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
            let (part, kind) = rest.rsplit_once('.')?;
            let part = match part {
                "attn_norm" => "input_layernorm",
                "ffn_norm" => "post_attention_layernorm",
                "attn_q" => "self_attn.q_proj",
                "attn_k" => "self_attn.k_proj",
                "attn_v" => "self_attn.v_proj",
                "attn_output" => "self_attn.o_proj",
                "attn_q_norm" => "self_attn.q_norm",
                "attn_k_norm" => "self_attn.k_norm",
                "ffn_gate" => "mlp.gate_proj",
                "ffn_up" => "mlp.up_proj",
                "ffn_down" => "mlp.down_proj",
                _ => return None,
            };
            return Some(format!("model.layers.{layer}.{part}.{kind}"));
        }
    };
    Some(plain.to_owned())
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
