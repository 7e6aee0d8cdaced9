//! `inflight key`: generates an API key and its SHA-256 digest for the tenants file.

use std::io::Write as _;

use rand::RngCore as _;
use sha2::{Digest as _, Sha256};

use crate::exit::CommandError;

/// Random bytes of a key: 256 bits, the strength of its digest against inversion.
const KEY_BYTES: usize = 32;

/// Options of `inflight key`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the digest of a key, as the tenants file has it.
pub fn digest(key: &str) -> String {
    hex(&Sha256::digest(key.as_bytes()))
}

/// Prints a new random key and its digest.
///
/// # Errors
/// Standard output cannot be written.
pub fn run(_: &Args) -> Result<(), CommandError> {
    let mut bytes = [0; KEY_BYTES];
    rand::rng().fill_bytes(&mut bytes);
    let key = format!("inflight-{}", hex(&bytes));
    let digest = digest(&key);
    let text = format!("key:    {key}\nsha256: {digest}\n");
    std::io::stdout()
        .lock()
        .write_all(text.as_bytes())
        .map_err(|error| CommandError::chain("cannot write", &error))
}
