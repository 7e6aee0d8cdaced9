use std::fmt::Write;

use inflight_kernels::VERSION;
use inflight_kernels::cpu::Isa;
use sha2::{Digest, Sha256};

use super::ModelDir;

/// Models up to this size are hashed whole, larger ones by sample.
const WHOLE_BYTES_MAX: u64 = 256 << 20;
/// A sample takes this much at a tensor's start and end and at [`SAMPLES`] places evenly between.
const SAMPLE_BYTES: usize = 4 << 10;
const SAMPLES: usize = 14;

/// The numerics fingerprint: SHA-256, in hex, over everything that decides a token's bits, so that two workers of one
/// fingerprint give equal answers. That is the configuration, the dtype of the KV pool, `formats` (how the
/// matrices are stored), the instruction set, the
/// kernels' version, and name, type, shape and numbers of every tensor. It is not the number of threads.
///
/// Of a model over 256 MiB, the numbers that count are a sample: of each tensor the first and the last 4 KiB and 14
/// stretches of 4 KiB evenly between. Any retraining or requantisation shows there, and start-up stays fast.
///
/// `formats` names how the weights are held.
pub fn fingerprint(model: &ModelDir, kv_dtype: &str, formats: &str, isa: Isa) -> String {
    fingerprint_of(model, kv_dtype, &format!("{formats} {}", isa.name()))
}

/// The same for whatever computes: `arithmetic` names all of it that decides a bit, beside the kernels' version.
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
    // Cosines, sines and powers of the rotary tables come from this crate.
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
