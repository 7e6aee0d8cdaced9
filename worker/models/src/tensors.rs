//! Tensors of a checkpoint, located in safetensors or GGUF files under their Hugging Face names.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use inflight_kernels::cpu::WeightRows;
use inflight_kernels::{Dtype, Encoding};
use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::Error;
use super::architecture::TensorNames;
use super::content::{Bytes, Digest, TensorContent, in_parallel, return_free_memory};
use super::files::Files;
use super::fingerprint_cache::FingerprintCache;
use super::gguf::{self, Gguf};
use super::weight_file::WeightFile;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Bytes of the length at the start of a safetensors file.
const LENGTH_BYTES: u64 = 8;
/// Maximum size of a safetensors header, as in the reference implementation.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes of a tensor that a thread checks at a time.
const CHECKED_BYTES: usize = 4 << 20;
/// Bytes that are read at once where columns are cut out of rows.
const CHUNK_BYTES: usize = 64 << 20;

/// Tensors of a model's weight files. Opening locates them; their content is read when a runtime loads it.
#[derive(Debug)]
pub struct Tensors {
    weight_files: Vec<Arc<WeightFile>>,
    entries: BTreeMap<String, TensorEntry>,
    cache: Option<FingerprintCache>,
}

#[derive(Debug, Clone)]
pub(super) struct TensorEntry {
    /// Element encoding, or the name of an unsupported one.
    pub(super) encoding: Result<Encoding, String>,
    /// Head size if the rows of a head are interleaved; see [`WeightRows::interleaved`].
    interleaved: Option<usize>,
    pub(super) shape: Vec<usize>,
    pub(super) content: Arc<TensorContent>,
}

/// Tensor of validated shape in its file.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// Encoding of the elements.
    pub encoding: Encoding,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Head size if the rows of a head are interleaved; see [`WeightRows::interleaved`].
    interleaved: Option<usize>,
    content: Arc<TensorContent>,
}

/// Rows of a tensor in memory; independent of the file.
#[derive(Debug, Clone)]
pub struct LoadedTensor {
    /// Encoding of the elements.
    pub encoding: Encoding,
    /// Number of rows.
    rows: usize,
    /// Elements of a row.
    width: usize,
    interleaved: Option<usize>,
    bytes: Bytes,
}

impl Tensor {
    /// Encoded size in bytes.
    pub fn bytes(&self) -> usize {
        self.content.len()
    }

    /// Returns whether the rows are stored in logical order, not interleaved.
    pub fn in_order(&self) -> bool {
        self.interleaved.is_none()
    }

    /// Returns the number of rows, at least one and whole heads, that take about `bytes` bytes.
    pub fn rows_of_bytes(&self, bytes: usize) -> usize {
        let (row, head) = (self.row_bytes().max(1), self.interleaved.unwrap_or(1));
        (bytes / row / head).max(1) * head
    }

    fn width(&self) -> usize {
        self.shape[1..].iter().product()
    }

    fn row_bytes(&self) -> usize {
        self.encoding.bytes(self.width())
    }

    /// Reads whole blocks and checks that their elements are finite.
    fn read(&self, range: Range<usize>) -> Result<Bytes, Error> {
        let bytes = self.content.read(range.clone())?;
        let (block, block_bytes) = (self.encoding.block(), self.encoding.block_bytes());
        let part = CHECKED_BYTES.next_multiple_of(block_bytes);
        in_parallel(bytes.chunks(part).enumerate().collect(), |(nth, chunk)| {
            let Some(at) = self.encoding.first_non_finite(chunk) else { return Ok(()) };
            let (file, tensor) = (self.content.file().label().to_owned(), self.content.tensor().to_owned());
            Err(Error::NonFinite {
                file,
                tensor,
                element: (range.start + nth * part) / block_bytes * block + at,
            })
        })?;
        Ok(bytes)
    }

    /// Reads the tensor.
    ///
    /// # Errors
    /// [`Error::Changed`], [`Error::Read`] or [`Error::NonFinite`].
    pub fn load(&self) -> Result<LoadedTensor, Error> {
        let bytes = self.read(0..self.bytes())?;
        Ok(self.loaded(self.shape[0], self.width(), bytes))
    }

    /// Reads the given rows of a matrix; whole heads if the rows are interleaved.
    ///
    /// # Errors
    /// [`Error::Changed`], [`Error::Read`] or [`Error::NonFinite`].
    ///
    /// # Panics
    /// If the rows are out of range or split a head.
    pub fn load_rows(&self, rows: Range<usize>) -> Result<LoadedTensor, Error> {
        let whole = self.interleaved.is_none_or(|head| (rows.start % head, rows.len() % head) == (0, 0));
        assert!(whole && rows.end <= self.shape[0], "rows are not in the tensor");
        let row = self.row_bytes();
        let bytes = self.read(rows.start * row..rows.end * row)?;
        Ok(self.loaded(rows.len(), self.width(), bytes))
    }

    /// Reads the given columns of a matrix [rows, columns]; whole quantization blocks. Rows stay in the order
    /// of the file.
    ///
    /// # Errors
    /// [`Error::Changed`], [`Error::Read`] or [`Error::NonFinite`].
    ///
    /// # Panics
    /// If the columns are out of range or split a block.
    pub fn load_columns(&self, columns: Range<usize>) -> Result<LoadedTensor, Error> {
        if columns == (0..self.shape[1]) {
            return self.load();
        }
        let (block, rows) = (self.encoding.block(), self.shape[0]);
        let whole = columns.start.is_multiple_of(block) && columns.end.is_multiple_of(block);
        assert!(whole && columns.end <= self.shape[1], "columns are not in the tensor");
        let range = self.encoding.bytes(columns.start)..self.encoding.bytes(columns.end);
        let mut bytes = Vec::with_capacity(rows * range.len());
        let chunk = self.rows_of_bytes(CHUNK_BYTES);
        for first in (0..rows).step_by(chunk) {
            let loaded = self.load_rows(first..(first + chunk).min(rows))?;
            for row in loaded.bytes.chunks_exact(self.row_bytes()) {
                bytes.extend_from_slice(&row[range.clone()]);
            }
        }
        Ok(self.loaded(rows, columns.len(), Bytes::Owned(bytes)))
    }

    fn loaded(&self, rows: usize, width: usize, bytes: Bytes) -> LoadedTensor {
        LoadedTensor { encoding: self.encoding, rows, width, interleaved: self.interleaved, bytes }
    }

    /// Reads the tensor and converts all elements to f32, de-interleaved if it is one-dimensional.
    ///
    /// # Errors
    /// [`Error::Changed`], [`Error::Read`] or [`Error::NonFinite`].
    pub fn to_f32(&self) -> Result<Vec<f32>, Error> {
        let mut out = vec![0.0; self.shape.iter().product()];
        self.encoding.widen(&self.read(0..self.bytes())?, &mut out);
        Ok(match self.interleaved {
            Some(head) if self.shape.len() == 1 => {
                let halves = |head: &[f32]| {
                    let half = |first| head.iter().skip(first).step_by(2).copied();
                    half(0).chain(half(1)).collect::<Vec<_>>()
                };
                out.chunks_exact(head).flat_map(halves).collect()
            }
            _ => out,
        })
    }
}

impl LoadedTensor {
    /// Encoded elements: little-endian, row-major, unaligned.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns all rows.
    pub fn rows(&self) -> WeightRows<'_> {
        WeightRows {
            encoding: self.encoding,
            bytes: &self.bytes,
            rows: self.rows,
            interleaved: self.interleaved,
        }
    }

    /// Returns the given rows; whole heads if the rows are interleaved.
    ///
    /// # Panics
    /// If the rows are out of range or split a head.
    pub fn rows_in(&self, rows: Range<usize>) -> WeightRows<'_> {
        let whole = self.interleaved.is_none_or(|head| (rows.start % head, rows.len() % head) == (0, 0));
        assert!(whole && rows.end <= self.rows, "rows are not in the tensor");
        let row = self.encoding.bytes(self.width);
        let bytes = &self.bytes[rows.start * row..rows.end * row];
        WeightRows { bytes, rows: rows.len(), ..self.rows() }
    }

    /// Returns the given columns of logical row `row` in the file's encoding; whole quantization blocks.
    /// Logical rows are those after de-interleaving; see [`WeightRows::interleaved`].
    ///
    /// # Panics
    /// If row or columns are out of range.
    pub fn columns_of_row(&self, row: usize, columns: Range<usize>) -> &[u8] {
        let bytes = self.encoding.bytes(self.width);
        let at = self.rows().row(row) * bytes;
        &self.bytes[at..at + bytes][self.encoding.bytes(columns.start)..self.encoding.bytes(columns.end)]
    }

    /// Converts stored row `row` to f32.
    ///
    /// # Panics
    /// If the row is out of range, or `out` is not as long as a row.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        let bytes = self.encoding.bytes(out.len());
        self.encoding.widen(&self.bytes[row * bytes..(row + 1) * bytes], out);
    }
}

#[derive(Deserialize)]
struct SafetensorsIndex {
    weight_map: BTreeMap<String, String>,
}

impl Tensors {
    /// Opens model.safetensors, or the files of model.safetensors.index.json.
    pub(super) fn open(files: &Files) -> Result<Self, Error> {
        if let Some(file) = files.open_weights(SINGLE)? {
            return Self::of_safetensors(file);
        }
        let Some(bytes) = files.read(INDEX)? else {
            return Err(Error::MissingFile {
                file: files.label(SINGLE),
                advice: "nor is there a model.safetensors.index.json; convert the weights to safetensors",
            });
        };
        let index: SafetensorsIndex = serde_json::from_slice(&bytes)
            .map_err(|error| Error::Broken { file: files.label(INDEX), reason: error.to_string() })?;
        let names: BTreeSet<&String> = index.weight_map.values().collect();
        let mut tensors = Self { weight_files: Vec::new(), entries: BTreeMap::new(), cache: None };
        for name in names {
            if name.contains(['/', '\\']) || name.starts_with('.') {
                let reason = format!("`{name}` is not the name of a file beside it");
                return Err(Error::Broken { file: files.label(INDEX), reason });
            }
            let Some(file) = files.open_weights(name)? else {
                return Err(Error::MissingFile {
                    file: files.label(name),
                    advice: "model.safetensors.index.json names it; was the download completed?",
                });
            };
            tensors.add(file)?;
        }
        Ok(tensors)
    }

    /// Locates the tensors of one safetensors file.
    pub(super) fn of_safetensors(file: WeightFile) -> Result<Self, Error> {
        let mut tensors = Self { weight_files: Vec::new(), entries: BTreeMap::new(), cache: None };
        tensors.add(file)?;
        Ok(tensors)
    }

    /// Wraps the tensors of GGUF files under the names of checkpoints. `head_dim` is set if the rows of
    /// query and key heads are interleaved.
    pub(super) fn of_gguf(
        gguf: Gguf,
        files: Vec<Arc<WeightFile>>,
        names: &TensorNames,
        recurrent: bool,
        head_dim: Option<usize>,
    ) -> Self {
        let mut entries = BTreeMap::new();
        for info in gguf.tensors {
            // Its content is in the configuration.
            if info.name == gguf::FREQUENCY_DIVISORS_TENSOR {
                continue;
            }
            let name = names.of_gguf(&info.name, recurrent).unwrap_or(info.name);
            let rotated = names.is_query_or_key(&name);
            let entry = TensorEntry {
                encoding: info.encoding.map_err(gguf::type_name),
                interleaved: head_dim.filter(|_| rotated),
                content: Arc::new(TensorContent::new(
                    &name,
                    &files[info.part],
                    info.range,
                    rows(&info.shape),
                )),
                shape: info.shape,
            };
            entries.insert(name, entry);
        }
        Self { weight_files: files, entries, cache: None }
    }

    /// All tensors by name.
    pub(super) fn entries(&self) -> &BTreeMap<String, TensorEntry> {
        &self.entries
    }

    /// Adds the tensors of a safetensors file.
    fn add(&mut self, file: WeightFile) -> Result<(), Error> {
        let file = Arc::new(file);
        let broken = |reason: String| Error::Broken { file: file.label().to_owned(), reason };
        let (header, data) = read_header(&file)?;
        for (name, info) in header.tensors() {
            let (start, end) = info.data_offsets;
            let range = data + start as u64..data + end as u64;
            let entry = TensorEntry {
                encoding: match info.dtype {
                    safetensors::Dtype::F32 => Ok(Dtype::F32.into()),
                    safetensors::Dtype::BF16 => Ok(Dtype::Bf16.into()),
                    safetensors::Dtype::F16 => Ok(Dtype::F16.into()),
                    other => Err(other.to_string()),
                },
                interleaved: None,
                content: Arc::new(TensorContent::new(&name, &file, range, rows(&info.shape))),
                shape: info.shape.clone(),
            };
            if let Some(other) = self.entries.insert(name.clone(), entry) {
                let other = other.content.file().label();
                return Err(broken(format!("tensor {name} is also in {other}")));
            }
        }
        self.weight_files.push(file);
        Ok(())
    }

    /// Looks up the digests of large files in a fingerprint cache in `directory`, and saves them there when
    /// they are computed. To be called before tensors are read.
    pub(super) fn use_cache(&mut self, cache: FingerprintCache) {
        for file in &self.weight_files {
            let Some(digests) = cache.look_up(file) else { continue };
            let of_file = || self.entries.iter().filter(|(_, entry)| Arc::ptr_eq(entry.content.file(), file));
            if of_file().all(|(name, _)| digests.contains_key(name)) {
                tracing::debug!(file = file.label(), "digests of the weights found in the fingerprint cache");
                of_file().for_each(|(name, entry)| entry.content.set_cached(digests[name]));
            }
        }
        self.cache = Some(cache);
    }

    /// Returns the digest of every tensor, by name; reads what was not read before. Then checks that no weight
    /// file has changed since it was opened, and saves the digests to the fingerprint cache.
    pub(super) fn digests(&self) -> Result<Vec<Digest>, Error> {
        let digests =
            self.entries.values().map(|entry| entry.content.digest()).collect::<Result<Vec<_>, _>>()?;
        self.weight_files.iter().try_for_each(|file| file.verify())?;
        return_free_memory();
        let Some(cache) = &self.cache else { return Ok(digests) };
        for file in &self.weight_files {
            let entries = self.entries.iter().zip(&digests);
            let computed = entries.filter(|((_, entry), _)| {
                Arc::ptr_eq(entry.content.file(), file) && !entry.content.is_cached()
            });
            let computed: BTreeMap<String, Digest> =
                computed.map(|((name, _), digest)| (name.clone(), *digest)).collect();
            if !computed.is_empty() {
                cache.save(file, &computed);
            }
        }
        Ok(digests)
    }

    /// Returns whether all digests are from the fingerprint cache.
    #[cfg(test)]
    pub(super) fn all_cached(&self) -> bool {
        self.entries.values().all(|entry| entry.content.is_cached())
    }

    /// Names of all tensors, in order.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Returns the label of the file that holds a tensor; empty if there is no such tensor.
    pub(super) fn file_of(&self, name: &str) -> String {
        self.entries.get(name).map_or(String::new(), |entry| entry.content.file().label().to_owned())
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
                [only] => only.label().to_owned(),
                several => format!("none of the {} weight files", several.len()),
            };
            return Err(Error::MissingTensor { file, tensor: name.to_owned(), expected: shape.to_vec() });
        };
        let (file, tensor) = (entry.content.file().label().to_owned(), name.to_owned());
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
            content: Arc::clone(&entry.content),
        })
    }

    /// Total bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.entries.values().map(|entry| entry.content.len() as u64).sum()
    }

    /// Iterates over name, type and shape of every tensor, by name.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, String, &[usize])> {
        self.entries.iter().map(|(name, entry)| {
            let kind = match &entry.encoding {
                Ok(encoding) => encoding.to_string(),
                Err(other) => other.clone(),
            };
            (name.as_str(), kind, entry.shape.as_slice())
        })
    }
}

/// Rows of a matrix; vectors are divided anywhere.
fn rows(shape: &[usize]) -> usize {
    if shape.len() > 1 { shape[0] } else { 0 }
}

/// Reads the header of a safetensors file; returns it with the offset of the tensor data.
fn read_header(file: &WeightFile) -> Result<(Metadata, u64), Error> {
    let bytes = file.len();
    let broken = |reason: String| Error::Broken { file: file.label().to_owned(), reason };
    let no_header = || {
        broken(format!(
            "its {bytes} bytes do not hold the header it announces; it is truncated or not safetensors"
        ))
    };
    if bytes < LENGTH_BYTES {
        return Err(no_header());
    }
    let mut length = [0; LENGTH_BYTES as usize];
    file.read_at(0, &mut length)?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES_MAX {
        return Err(broken(
            "it announces a header of over 100 MB; it is corrupted or not safetensors".to_owned(),
        ));
    }
    let data = LENGTH_BYTES + length;
    if data > bytes {
        return Err(no_header());
    }
    let mut header = vec![0; length as usize];
    file.read_at(LENGTH_BYTES, &mut header)?;
    // Parsing checks that the tensors are contiguous and as large as their shapes say.
    let header: Metadata = serde_json::from_slice(&header)
        .map_err(|error| broken(format!("{error}; it is corrupted or not safetensors")))?;
    if data + header.data_len() as u64 != bytes {
        return Err(broken(format!(
            "its {bytes} bytes are not what its header describes; it is truncated or has something appended"
        )));
    }
    Ok((header, data))
}
