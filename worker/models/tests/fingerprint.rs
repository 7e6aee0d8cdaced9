//! The fingerprint of models that differ in one byte, in every file format.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail like tests")]

use std::fs;
use std::path::Path;

use inflight_fixtures::{Arch, Checkpoint, Dtype, Family, TempDir};
use inflight_models::{ModelDir, ModelSource, fingerprint_of};
use proptest::prelude::*;
use proptest::sample::Index;

fn fingerprint(path: &Path) -> String {
    let model = ModelDir::open(&ModelSource::Directory(path.to_owned())).unwrap();
    fingerprint_of(&model, "bf16", "").unwrap()
}

/// Model in `files` files, or in a GGUF file; returns its path and that of the last weight file.
fn model(folder: &TempDir, files: usize) -> (std::path::PathBuf, std::path::PathBuf) {
    let checkpoint = Checkpoint::new(Arch::Llama2, Dtype::F16);
    let path = folder.path().to_owned();
    match files {
        0 => {
            fs::write(path.join("tokenizer.json"), Family::Llama3.tokenizer_json()).unwrap();
            let file = path.join("tiny.gguf");
            fs::write(&file, checkpoint.gguf().unwrap()).unwrap();
            (file.clone(), file)
        }
        1 => {
            checkpoint.write(&path).unwrap();
            (path.clone(), path.join("model.safetensors"))
        }
        files => {
            checkpoint.sharded(files).write(&path).unwrap();
            (path.clone(), path.join(format!("model-{files:05}-of-{files:05}.safetensors")))
        }
    }
}

/// Returns the bytes of a weight file that are no tensor data.
fn header_bytes(weights: &[u8], gguf: bool) -> usize {
    match gguf {
        // The fixture has no padding, and its last tensor ends the file.
        true => weights.len() * 3 / 4,
        false => 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn models_that_differ_in_one_byte_have_different_fingerprints(
        files in 0usize..3, place in any::<Index>(), flipped in 1u8..,
    ) {
        let folder = TempDir::new("inflight-fingerprint").unwrap();
        let (path, weights) = model(&folder, files);
        let before = fingerprint(&path);
        let mut bytes = fs::read(&weights).unwrap();
        let header = header_bytes(&bytes, files == 0);
        let at = header + place.index(bytes.len() - header);
        bytes[at] ^= flipped;
        // A new file, as downloads write them.
        let next = weights.with_extension("next");
        fs::write(&next, &bytes).unwrap();
        fs::rename(&next, &weights).unwrap();
        prop_assert_ne!(fingerprint(&path), before, "byte {} of {}", at, bytes.len());
    }
}

#[test]
fn the_fingerprint_does_not_depend_on_the_number_of_files() {
    let of = |files| {
        let folder = TempDir::new("inflight-fingerprint").unwrap();
        fingerprint(&model(&folder, files).0)
    };
    assert_eq!(of(1), of(2));
    assert_eq!(of(1), of(1));
}
