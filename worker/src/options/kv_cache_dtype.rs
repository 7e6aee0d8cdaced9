//! Element type of the KV cache.

use std::str::FromStr;

/// Element type of the KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvCacheDtype {
    /// The model's own 16-bit type.
    #[default]
    Auto,
    /// 8-bit integers with a scale per token and head; CPUs only.
    Int8,
    /// FP8 e4m3 with a scale per token and head; GPUs only.
    Fp8,
}

/// Error for an unknown KV cache dtype.
#[derive(Debug, thiserror::Error)]
#[error(
    "unknown dtype `{0}` of the KV cache; it is `auto`, as the model computes, `int8` on CPUs, or `fp8` on GPUs"
)]
pub struct UnknownKvCacheDtype(String);

impl FromStr for KvCacheDtype {
    type Err = UnknownKvCacheDtype;

    fn from_str(name: &str) -> Result<Self, UnknownKvCacheDtype> {
        match name {
            "auto" => Ok(Self::Auto),
            "int8" => Ok(Self::Int8),
            "fp8" => Ok(Self::Fp8),
            other => Err(UnknownKvCacheDtype(other.to_owned())),
        }
    }
}

impl std::fmt::Display for KvCacheDtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_dtype_is_refused_with_those_that_exist() {
        assert!("int4".parse::<KvCacheDtype>().unwrap_err().to_string().contains("`fp8`"));
    }
}
