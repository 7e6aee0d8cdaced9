//! GGUF parser: metadata, and tensors in the encodings of ggml. The format is specified in ggml's
//! `docs/gguf.md`.

mod byte_level;
mod config;
mod end_tokens;
mod parts;
mod sentencepiece;
mod tokenizer;
mod vocabulary;

use std::collections::BTreeMap;
use std::ops::Range;

use inflight_kernels::Encoding;
use serde_json::Value;

use super::Error;
use super::weight_file::WeightFile;

pub(super) use config::{FREQUENCY_DIVISORS, FREQUENCY_DIVISORS_TENSOR, GGUF_DELTA, config};
pub(super) use tokenizer::tokenizer;

const MAGIC: &[u8; 4] = b"GGUF";
/// Default alignment of the tensor data in bytes.
const ALIGNMENT: u64 = 32;
/// Maximum rank of a tensor in ggml (`GGML_MAX_DIMS`).
const DIMENSIONS_MAX: u32 = 4;
/// Bytes that are read at once.
const WINDOW_BYTES: u64 = 1 << 20;
/// Maximum bytes of a text in the metadata.
const TEXT_BYTES_MAX: u64 = 256 << 20;

/// Header of a GGUF file: metadata and tensors.
pub(super) struct Gguf {
    pub(super) label: String,
    pub(super) metadata: BTreeMap<String, Value>,
    pub(super) tensors: Vec<GgufTensor>,
}

/// Location and encoding of a tensor in the file.
pub(super) struct GgufTensor {
    pub(super) name: String,
    /// Dimensions, outermost first: the reverse of the file's order.
    pub(super) shape: Vec<usize>,
    /// Encoding, or ggml's type id of an unsupported one.
    pub(super) encoding: Result<Encoding, u32>,
    pub(super) range: Range<u64>,
    /// Index of its file among those of the model.
    pub(super) part: usize,
}

/// Returns ggml's name of a type of elements that is not supported.
pub(super) fn type_name(id: u32) -> String {
    const NAMES: [(u32, &str); 23] = [
        (9, "q8_1"),
        (15, "q8_k"),
        (16, "iq2_xxs"),
        (17, "iq2_xs"),
        (18, "iq3_xxs"),
        (19, "iq1_s"),
        (21, "iq3_s"),
        (22, "iq2_s"),
        (24, "i8"),
        (25, "i16"),
        (26, "i32"),
        (27, "i64"),
        (28, "f64"),
        (29, "iq1_m"),
        (31, "q4_0_4_4"),
        (32, "q4_0_4_8"),
        (33, "q4_0_8_8"),
        (34, "tq1_0"),
        (35, "tq2_0"),
        (36, "iq4_nl_4_4"),
        (37, "iq4_nl_4_8"),
        (38, "iq4_nl_8_8"),
        (40, "nvfp4"),
    ];
    let known = NAMES.iter().find(|(other, _)| *other == id);
    known.map_or_else(|| format!("of ggml's type {id}"), |(_, name)| (*name).to_owned())
}

impl Gguf {
    /// Returns a list of texts in the metadata, if present.
    fn list(&self, key: &str) -> Option<&[Value]> {
        self.metadata.get(key).and_then(Value::as_array).map(Vec::as_slice)
    }

    /// Parses header, metadata and tensor list, and checks that every tensor lies within the file.
    ///
    /// # Errors
    /// The file is not GGUF, has an unsupported version, is truncated, or is inconsistent.
    pub(super) fn parse(file: &WeightFile) -> Result<Self, Error> {
        let mut reader = GgufReader { file, at: 0, window: Vec::new(), window_start: 0 };
        if reader.take(4, "the magic number")? != MAGIC {
            return Err(reader.broken("it does not begin with `GGUF`; it is no GGUF file"));
        }
        let version = reader.u32("the version")?;
        if !(2..=3).contains(&version) {
            let found = format!("it is of version {version}; versions 2 and 3 are supported");
            return Err(reader.broken(&found));
        }
        let (tensors, entries) = (reader.u64("the number of tensors")?, reader.u64("the number of entries")?);
        let mut metadata = BTreeMap::new();
        for _ in 0..entries {
            let key = reader.text("a key of the metadata")?;
            let kind = reader.u32(&key)?;
            let value = reader.value(kind, &key)?;
            metadata.insert(key, value);
        }
        let alignment = match metadata.get("general.alignment").map(Value::as_u64) {
            None => ALIGNMENT,
            Some(Some(alignment)) if alignment.is_power_of_two() => alignment,
            Some(_) => return Err(reader.broken("`general.alignment` is not a power of two")),
        };
        let mut headers = Vec::new();
        for _ in 0..tensors {
            headers.push(reader.tensor_header()?);
        }
        // Saturates, for an alignment that is as large as a number can be.
        let data = reader.at.checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
        let size = file.len();
        let tensors =
            headers.into_iter().map(|header| header.locate(&reader, data, size)).collect::<Result<_, _>>()?;
        Ok(Self { label: file.label().to_owned(), metadata, tensors })
    }
}

/// Entry of the tensor list, before validation.
struct TensorHeader {
    name: String,
    shape: Vec<u64>,
    kind: u32,
    offset: u64,
}

impl TensorHeader {
    /// Validates shape and size; returns the tensor's range in the file. `data` is the offset of the tensor
    /// data, `size` that of the end of the file.
    fn locate(self, reader: &GgufReader<'_>, data: u64, size: u64) -> Result<GgufTensor, Error> {
        let Self { name, shape, kind, offset } = self;
        let lies = |what: &str| reader.broken(&format!("tensor {name} {what}"));
        let encoding = Encoding::of_ggml(kind).ok_or(kind);
        let count = shape.iter().try_fold(1u64, |product, n| product.checked_mul(*n));
        let count = count.filter(|count| *count <= u64::from(u32::MAX) << 8);
        let Some(count) = count else { return Err(lies(&format!("claims the shape {shape:?}"))) };
        let bytes = match encoding {
            Ok(encoding) => {
                // A scalar is a row of one element.
                let row = shape.last().copied().unwrap_or(1);
                if !row.is_multiple_of(encoding.block() as u64) {
                    let block = encoding.block();
                    return Err(lies(&format!(
                        "has rows of {row} numbers, but {encoding} goes in blocks of {block}"
                    )));
                }
                encoding.bytes(count as usize) as u64
            }
            // The size of an unsupported encoding is unknown; requesting the tensor is an error later.
            Err(_) => 0,
        };
        let start = data.checked_add(offset);
        let end = start.and_then(|start| start.checked_add(bytes)).filter(|end| *end <= size);
        match (start, end) {
            (Some(start), Some(end)) => Ok(GgufTensor {
                part: 0,
                shape: shape.iter().map(|n| *n as usize).collect(),
                encoding,
                range: start..end,
                name,
            }),
            _ => Err(lies(&format!(
                "lies {offset} bytes into the data and takes {bytes}, past the end of the file of {size} bytes; it is \
                 truncated"
            ))),
        }
    }
}

/// Bounds-checked little-endian reader.
struct GgufReader<'a> {
    file: &'a WeightFile,
    at: u64,
    /// Bytes of the file from `window_start` on.
    window: Vec<u8>,
    window_start: u64,
}

impl GgufReader<'_> {
    fn broken(&self, reason: &str) -> Error {
        Error::Broken { file: self.file.label().to_owned(), reason: reason.to_owned() }
    }

    /// Reads `count` bytes; `what` names them in errors.
    fn take(&mut self, count: u64, what: &str) -> Result<&[u8], Error> {
        let left = self.file.len() - self.at;
        if count > left {
            return Err(self.broken(&format!(
                "it ends within {what}: {count} bytes are announced at {}, {left} are left; it is truncated or corrupted",
                self.at,
            )));
        }
        if count > TEXT_BYTES_MAX {
            return Err(self.broken(&format!(
                "{what} takes {count} bytes; at most {TEXT_BYTES_MAX} are supported; it is corrupted"
            )));
        }
        if self.at + count > self.window_start + self.window.len() as u64 {
            self.window.resize(count.max(WINDOW_BYTES).min(left) as usize, 0);
            self.window_start = self.at;
            self.file.read_at(self.at, &mut self.window)?;
        }
        let from = (self.at - self.window_start) as usize;
        self.at += count;
        Ok(&self.window[from..from + count as usize])
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], Error> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, Error> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, Error> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn text(&mut self, what: &str) -> Result<String, Error> {
        let count = self.u64(what)?;
        let bytes = self.take(count, what)?.to_vec();
        String::from_utf8(bytes).map_err(|_| self.broken(&format!("{what} is not UTF-8")))
    }

    /// Reads a metadata value of ggml's type id `kind`.
    fn value(&mut self, kind: u32, key: &str) -> Result<Value, Error> {
        Ok(match kind {
            0 => self.array::<1>(key)?[0].into(),
            1 => i8::from_le_bytes(self.array(key)?).into(),
            2 => u16::from_le_bytes(self.array(key)?).into(),
            3 => i16::from_le_bytes(self.array(key)?).into(),
            4 => self.u32(key)?.into(),
            5 => i32::from_le_bytes(self.array(key)?).into(),
            6 => f64::from(f32::from_le_bytes(self.array(key)?)).into(),
            7 => (self.array::<1>(key)?[0] != 0).into(),
            8 => self.text(key)?.into(),
            9 => {
                let (kind, count) = (self.u32(key)?, self.u64(key)?);
                if kind == 9 {
                    return Err(self.broken(&format!("`{key}` is a list of lists, which is not supported")));
                }
                // Not preallocated: each item takes at least a byte, so a false count ends with the file.
                let mut items = Vec::new();
                for _ in 0..count {
                    items.push(self.value(kind, key)?);
                }
                Value::Array(items)
            }
            10 => self.u64(key)?.into(),
            11 => i64::from_le_bytes(self.array(key)?).into(),
            12 => f64::from_le_bytes(self.array(key)?).into(),
            other => return Err(self.broken(&format!("`{key}` is of the unknown type {other}"))),
        })
    }

    fn tensor_header(&mut self) -> Result<TensorHeader, Error> {
        let name = self.text("the name of a tensor")?;
        let dimensions = self.u32(&name)?;
        if dimensions > DIMENSIONS_MAX {
            let found =
                format!("tensor {name} claims {dimensions} dimensions; there are at most {DIMENSIONS_MAX}");
            return Err(self.broken(&found));
        }
        let mut shape = (0..dimensions).map(|_| self.u64(&name)).collect::<Result<Vec<_>, _>>()?;
        shape.reverse();
        Ok(TensorHeader { kind: self.u32(&name)?, offset: self.u64(&name)?, name, shape })
    }
}
