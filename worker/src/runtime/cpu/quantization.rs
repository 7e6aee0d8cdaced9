use std::fmt;
use std::str::FromStr;

use inflight_kernels::Dtype;
use inflight_kernels::cpu::{GROUP_MAX, GROUP_STEP, Isa, WeightFormat};

/// Numbers that share a scale where nothing else is asked for.
const GROUP_INT8: usize = 64;
const GROUP_INT4: usize = 32;

/// How the weights of a model become integers when it is loaded.
///
/// Matrices are quantised by groups of neighbouring inputs; norms and biases stay f32, the embedding stays as it is
/// in its file. The head is never below 8 bits, as every token's choice goes through it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Quantization {
    four_bits: bool,
    group: usize,
}

/// A quantisation that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no quantisation `{0}`; there are `int8` and `int4`, with `:GROUP` for another group size: a multiple of \
     {GROUP_STEP} up to {GROUP_MAX}"
)]
pub struct UnknownQuantization(String);

impl Quantization {
    /// 8 bits, groups of 64.
    pub const INT8: Self = Self { four_bits: false, group: GROUP_INT8 };
    /// 4 bits, groups of 32.
    pub const INT4: Self = Self { four_bits: true, group: GROUP_INT4 };

    /// How a layer's matrices are stored.
    pub(super) fn layers(self) -> WeightFormat {
        match self {
            Self { four_bits: false, group } => WeightFormat::Int8 { group },
            Self { four_bits: true, group } => WeightFormat::Int4 { group },
        }
    }

    /// How the head is stored.
    pub(super) fn head(self) -> WeightFormat {
        match self {
            Self { four_bits: false, group } => WeightFormat::Int8 { group },
            Self { four_bits: true, .. } => Self::INT8.head(),
        }
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.layers())
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
        let group = match group {
            None => known.group,
            Some(group) => group.parse().map_err(|_| unknown())?,
        };
        if !(GROUP_STEP..=GROUP_MAX).contains(&group) || !group.is_multiple_of(GROUP_STEP) {
            return Err(unknown());
        }
        Ok(Self { group, ..known })
    }
}

/// Keys and values are 16-bit numbers where the weights are integers.
pub(super) fn kv_dtype(format: WeightFormat) -> Dtype {
    match format {
        WeightFormat::F32 => Dtype::F32,
        WeightFormat::F16 => Dtype::F16,
        WeightFormat::Bf16 | WeightFormat::Int8 { .. } | WeightFormat::Int4 { .. } => Dtype::Bf16,
    }
}

/// Bytes that a matrix [n, k] takes once packed.
pub(super) fn packed_bytes(format: WeightFormat, isa: Isa, n: usize, k: usize) -> u64 {
    format.packed_bytes(isa, n, k) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_bits_and_group_and_nothing_else_is_taken() {
        for (name, expected) in
            [("int8", "int8:64"), ("int4", "int4:32"), ("int8:128", "int8:128"), ("int4:8", "int4:8")]
        {
            assert_eq!(name.parse::<Quantization>().unwrap().to_string(), expected);
        }
        for name in
            ["", "int", "int2", "INT8", "int8:", "int8:0", "int8:12", "int4:264", "int4:-8", "int4:32:1"]
        {
            let message = name.parse::<Quantization>().unwrap_err().to_string();
            assert!(message.contains("multiple of 8"), "{message}");
        }
    }
}
