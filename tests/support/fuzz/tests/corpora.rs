//! Replays of the kept corpora (`tests/fuzz/corpus`): every input, and seeded mutations of it, on the stable toolchain.
//! `INFLIGHT_FUZZ_SEED` and `INFLIGHT_FUZZ_MUTATIONS` choose others, and more.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use inflight_fuzz::{TARGETS, Target};
use inflight_traces::SplitMix64;

/// Mutations of each input in CI.
const MUTATIONS: u64 = 100;
/// Maximum size of all corpora together.
const CORPORA_BYTES_MAX: u64 = 1 << 20;
/// Bytes that parsers treat specially, in texts and in binary numbers.
const SPECIAL: &[u8] = b"\x00\x01\x7f\x80\xff\"\\{}[]:,.-+0e9 \n\t=#'%<&";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// Names and contents of a target's inputs.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = repository().join("tests/fuzz/corpus").join(target);
    let mut inputs: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(&path).unwrap()))
        .collect();
    inputs.sort_unstable();
    inputs
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).map_or(default, |value| value.parse().expect("a number"))
}

fn below(random: &mut SplitMix64, most: usize) -> usize {
    (random.bits() % most.max(1) as u64) as usize
}

/// Changes an input in one to four places; parts may come from another input.
fn mutate(input: &[u8], other: &[u8], random: &mut SplitMix64) -> Vec<u8> {
    let mut bytes = input.to_vec();
    for _ in 0..=below(random, 4) {
        let at = below(random, bytes.len() + 1);
        let end = (at + 1 + below(random, 16)).min(bytes.len());
        match below(random, 8) {
            0 if at < bytes.len() => bytes[at] ^= 1 << below(random, 8),
            1 if at < bytes.len() => bytes[at] = SPECIAL[below(random, SPECIAL.len())],
            2 => bytes.insert(at, SPECIAL[below(random, SPECIAL.len())]),
            3 => bytes.truncate(at),
            4 => drop(bytes.drain(at..end.max(at))),
            5 => {
                let part = bytes[at..end.max(at)].to_vec();
                bytes.splice(at..at, part);
            }
            6 => {
                let from = below(random, other.len() + 1);
                let part = other[from..(from + 32).min(other.len())].to_vec();
                bytes.splice(at..at, part);
            }
            // A number of four or eight bytes, at an extreme.
            _ => {
                let value = [0, 1, u64::MAX, u64::MAX >> 1, 1 << 63, u64::from(u32::MAX)][below(random, 6)];
                let width = 4 << below(random, 2);
                let end = (at + width).min(bytes.len());
                bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
            }
        }
    }
    bytes
}

/// Runs the target over its corpus and mutations of it. Some inputs must be accepted: a parser that refuses everything tests
/// nothing.
fn replay(target: &Target) {
    let inputs = corpus(target.name);
    let run = |bytes: &[u8], what: &dyn Fn() -> String| {
        catch_unwind(AssertUnwindSafe(|| (target.run)(bytes))).unwrap_or_else(|_| {
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            panic!("target {}, {}; the input in hex: {hex}", target.name, what())
        })
    };
    let accepted = inputs.iter().filter(|(name, bytes)| run(bytes, &|| format!("input {name}"))).count();
    assert!(accepted >= 2, "only {accepted} of {} inputs of {} are accepted", inputs.len(), target.name);
    let (seed, mutations) = (number("INFLIGHT_FUZZ_SEED", 1), number("INFLIGHT_FUZZ_MUTATIONS", MUTATIONS));
    let mut random = SplitMix64::new(seed);
    for (name, bytes) in &inputs {
        for at in 0..mutations {
            let other = &inputs[below(&mut random, inputs.len())].1;
            let mutated = mutate(bytes, other, &mut random);
            run(&mutated, &|| format!("mutation {at} of input {name} with INFLIGHT_FUZZ_SEED={seed}"));
        }
    }
}

macro_rules! replays {
    ($($name:ident),* $(,)?) => {
        mod every_kept_input_and_its_mutations_keep_the_properties_of {
            $(#[test]
            fn $name() {
                let name = stringify!($name);
                super::replay(super::TARGETS.iter().find(|target| target.name == name).expect("a target"));
            })*
        }

        #[test]
        fn every_target_is_replayed_fuzzed_and_has_a_small_corpus() {
            let names: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
            assert_eq!(names, BTreeSet::from([$(stringify!($name).to_owned()),*]));
            let stems = |folder: &str| -> BTreeSet<String> {
                let entries = std::fs::read_dir(repository().join("tests/fuzz").join(folder)).unwrap();
                let stem = |path: PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
                entries.map(|entry| stem(entry.unwrap().path())).collect()
            };
            assert_eq!(names, stems("corpus"));
            assert_eq!(names, stems("fuzz_targets"));
            let manifest = std::fs::read_to_string(repository().join("tests/fuzz/Cargo.toml")).unwrap();
            let listed = |name: &&String| manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\""));
            assert_eq!(names.iter().filter(listed).count(), names.len(), "tests/fuzz/Cargo.toml lists all");
            let inputs = names.iter().flat_map(|name| corpus(name));
            let bytes: u64 = inputs.map(|(_, content)| content.len() as u64).sum();
            assert!(bytes <= CORPORA_BYTES_MAX, "the corpora have {bytes} bytes");
        }
    };
}

replays!(
    config,
    configuration,
    gguf,
    grammar,
    http_json,
    kserve,
    output_parser,
    router_recording,
    router_session,
    safetensors,
    template,
    tenants,
    tokenizer,
    worker_recording,
    worker_session,
);
