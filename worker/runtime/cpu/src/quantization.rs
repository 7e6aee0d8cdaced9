//! Weight quantization at load: bits and group sizes by matrix.

use std::fmt;
use std::str::FromStr;

use inflight_kernels::Dtype;
use inflight_kernels::cpu::{GROUP_MAX, GROUP_STEP, Isa, WeightFormat};

/// Default int8 group sizes: the first that divides a row, else the last. Each group costs a conversion, two
/// multiplications and a load of every sum (1/6 of the arithmetic at 64, 1/12 at 128), and padding a row to
/// whole groups costs more than that.
const GROUPS_INT8: [usize; 3] = [192, 128, 64];
const GROUP_INT4: usize = 32;

/// Weight quantization of a model at load.
///
/// Matrices are quantized in groups of consecutive inputs that share a scale. Norms and biases stay f32, and
/// the embedding keeps the checkpoint's type. The LM head has at least 8 bits, as it decides every token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Quantization {
    four_bits: bool,
    /// Explicit group size.
    group: Option<usize>,
}

/// Error for an unknown quantization.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no quantisation `{0}`; there are `int8` and `int4`, with `:GROUP` for another group size: a multiple of \
     {GROUP_STEP} up to {GROUP_MAX}"
)]
pub struct UnknownQuantization(String);

impl Quantization {
    /// 8 bits in groups of 192, 128 or 64: the largest that divides a row.
    pub const INT8: Self = Self { four_bits: false, group: None };
    /// 4 bits in groups of 32.
    pub const INT4: Self = Self { four_bits: true, group: None };

    /// Returns the format of a decoder layer's matrix with `inputs` inputs.
    pub(super) fn layer(self, inputs: usize) -> WeightFormat {
        match self.four_bits {
            true => WeightFormat::Int4 { group: self.group.unwrap_or(GROUP_INT4) },
            false => {
                let fitting = || GROUPS_INT8.into_iter().find(|group| inputs.is_multiple_of(*group));
                let group = self.group.or_else(fitting).unwrap_or(GROUPS_INT8[GROUPS_INT8.len() - 1]);
                WeightFormat::Int8 { group }
            }
        }
    }

    /// Returns the format of an LM head with `inputs` inputs.
    pub(super) fn head(self, inputs: usize) -> WeightFormat {
        if self.four_bits { Self::INT8 } else { self }.layer(inputs)
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.four_bits { "int4" } else { "int8" })?;
        self.group.map_or(Ok(()), |group| write!(f, ":{group}"))
    }
}

impl FromStr for Quantization {
    type Err = UnknownQuantization;

    fn from_str(name: &str) -> Result<Self, UnknownQuantization> {
        let unknown = || UnknownQuantization(name.to_owned());
        let (kind, group) = name.split_once(':').map_or((name, None), |(kind, group)| (kind, Some(group)));
        let known = match kind {
            "int8" => Self::INT8,
            "int4" => Self::INT4,
            _ => return Err(unknown()),
        };
        let Some(group) = group else { return Ok(known) };
        let group: usize = group.parse().map_err(|_| unknown())?;
        if !(GROUP_STEP..=GROUP_MAX).contains(&group) || !group.is_multiple_of(GROUP_STEP) {
            return Err(unknown());
        }
        Ok(Self { group: Some(group), ..known })
    }
}

/// Returns the default KV cache dtype for a weight format; 16 bits for integer weights.
pub(super) fn kv_dtype(format: WeightFormat) -> Dtype {
    match format {
        WeightFormat::F32 => Dtype::F32,
        WeightFormat::F16 => Dtype::F16,
        WeightFormat::Bf16 | WeightFormat::Int8 { .. } | WeightFormat::Int4 { .. } => Dtype::Bf16,
    }
}

/// Returns the bytes of a packed matrix [n, k].
pub(super) fn packed_bytes(format: WeightFormat, isa: Isa, n: usize, k: usize) -> u64 {
    format.packed_bytes(isa, n, k) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantization_names_are_parsed_and_unknown_ones_are_rejected() {
        for (name, inputs, layer, head) in [
            ("int8", 576, "int8:192", "int8:192"),
            ("int8", 2048, "int8:128", "int8:128"),
            ("int8", 448, "int8:64", "int8:64"),
            ("int8", 100, "int8:64", "int8:64"),
            ("int8:32", 2048, "int8:32", "int8:32"),
            ("int4", 2048, "int4:32", "int8:128"),
            ("int4:8", 448, "int4:8", "int8:64"),
        ] {
            let quantization: Quantization = name.parse().unwrap();
            assert_eq!(quantization.to_string(), name);
            assert_eq!(quantization.layer(inputs).to_string(), layer);
            assert_eq!(quantization.head(inputs).to_string(), head);
        }
        for name in
            ["", "int", "int2", "INT8", "int8:", "int8:0", "int8:12", "int4:264", "int4:-8", "int4:32:1"]
        {
            let message = name.parse::<Quantization>().unwrap_err().to_string();
            assert!(message.contains("multiple of 8"), "{message}");
        }
    }
}
