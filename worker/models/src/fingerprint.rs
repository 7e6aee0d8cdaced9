//! Numerics fingerprint: digest of all that decides the bits of generated tokens.

use inflight_kernels::VERSION;
use inflight_kernels::cpu::Isa;
use sha2::{Digest, Sha256};

use super::content::hex;
use super::{Error, ModelDir};

/// Computes the numerics fingerprint of the CPU runtime: SHA-256, in hex, over everything that decides a
/// token's bits. Workers with equal fingerprints generate equal tokens.
///
/// It covers the configuration, the KV cache dtype, the storage `formats` of the weights, the instruction
/// set, the kernels' version, and name, type, shape and every byte of every tensor. It excludes the number of
/// threads.
///
/// To be called after the last tensor was loaded: it consists of the digests of the bytes that were loaded, and
/// reads only what no runtime has read.
///
/// # Errors
/// [`Error::Changed`] if a weight file has changed since it was opened; [`Error::Read`].
pub fn fingerprint(model: &ModelDir, kv_dtype: &str, formats: &str, isa: Isa) -> Result<String, Error> {
    fingerprint_of(model, kv_dtype, &format!("{formats} {}", isa.name()))
}

/// Computes the numerics fingerprint of any runtime, like [`fingerprint`]; `arithmetic` names everything that
/// decides bits besides model, KV cache dtype and kernel version.
///
/// # Errors
/// [`Error::Changed`] if a weight file has changed since it was opened; [`Error::Read`].
pub fn fingerprint_of(model: &ModelDir, kv_dtype: &str, arithmetic: &str) -> Result<String, Error> {
    let mut hash = Sha256::new();
    let mut field = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    field(format!("{:?}", model.config).as_bytes());
    field(kv_dtype.as_bytes());
    field(arithmetic.as_bytes());
    field(&VERSION.to_le_bytes());
    // The crate that computes cosines, sines and powers of the rotary tables.
    field(b"libm 0.2");
    let digests = model.tensors.digests()?;
    for ((name, dtype, shape), digest) in model.tensors.iter().zip(&digests) {
        field(name.as_bytes());
        field(dtype.as_bytes());
        field(format!("{shape:?}").as_bytes());
        field(digest);
    }
    Ok(hex(&hash.finalize()))
}
