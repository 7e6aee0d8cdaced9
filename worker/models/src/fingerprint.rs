//! Numerics fingerprint: digest of all that decides the bits of generated tokens.

use std::fmt::Write;

use inflight_kernels::VERSION;
use inflight_kernels::cpu::Isa;
use sha2::{Digest, Sha256};

use super::ModelDir;

/// Maximum size of weights that are hashed completely; larger ones are sampled.
const WHOLE_BYTES_MAX: u64 = 256 << 20;
/// Bytes per sample of a tensor: at its start, its end and [`SAMPLES`] evenly spaced offsets between.
const SAMPLE_BYTES: usize = 4 << 10;
const SAMPLES: usize = 14;

/// Computes the numerics fingerprint of the CPU runtime: SHA-256, in hex, over everything that decides a
/// token's bits. Workers with equal fingerprints generate equal tokens.
///
/// It covers the configuration, the KV cache dtype, the storage `formats` of the weights, the instruction
/// set, the kernels' version, and name, type, shape and content of every tensor. It excludes the number of
/// threads.
///
/// Weights over 256 MiB are sampled: of each tensor the first and the last 4 KiB and 14 evenly spaced
/// stretches of 4 KiB. Retraining or requantization changes the samples, and start-up stays fast.
pub fn fingerprint(model: &ModelDir, kv_dtype: &str, formats: &str, isa: Isa) -> String {
    fingerprint_of(model, kv_dtype, &format!("{formats} {}", isa.name()))
}

/// Computes the numerics fingerprint of any runtime; `arithmetic` names everything that decides bits besides
/// model, KV cache dtype and kernel version.
pub fn fingerprint_of(model: &ModelDir, kv_dtype: &str, arithmetic: &str) -> String {
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
    let whole = model.tensors.total_bytes() <= WHOLE_BYTES_MAX;
    for (name, dtype, shape, bytes) in model.tensors.iter() {
        field(name.as_bytes());
        field(dtype.as_bytes());
        field(format!("{shape:?}").as_bytes());
        if whole || bytes.len() <= SAMPLE_BYTES * (SAMPLES + 2) {
            field(bytes);
        } else {
            let last = bytes.len() - SAMPLE_BYTES;
            for i in 0..SAMPLES + 2 {
                let at = (last as u128 * i as u128 / (SAMPLES as u128 + 1)) as usize;
                field(&bytes[at..at + SAMPLE_BYTES]);
            }
        }
    }
    hash.finalize().iter().fold(String::with_capacity(64), |mut hex, byte| {
        // Writing to a string can't fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}
