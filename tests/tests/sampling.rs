//! The table of numeric sampling parameters beside the protocols that say the same in their comments.

use std::fs;

use inflight_contract::{NumberKind, SAMPLING_NUMBERS, SamplingNumber};

fn read(file: &str) -> String {
    let path = format!("{}/../{file}", env!("CARGO_MANIFEST_DIR"));
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the comment above a field, its lines joined, and its type.
fn field(proto: &str, name: &str) -> Option<(String, String)> {
    let mut comment = Vec::new();
    for line in proto.lines().map(str::trim) {
        match line.strip_prefix("// ") {
            Some(text) => comment.push(text),
            None => {
                let words: Vec<&str> = line.split_whitespace().collect();
                if let ["optional", kind, field, "=", ..] = words[..]
                    && field == name
                {
                    return Some((comment.join(" "), kind.to_owned()));
                }
                comment.clear();
            }
        }
    }
    None
}

#[test]
fn the_protocols_have_the_types_ranges_and_defaults_of_the_table() {
    let (sampling, kserve) =
        (read("proto/inflight/v1/sampling.proto"), read("proto/inference/grpc_service.proto"));
    for SamplingNumber { name, kind, absent, range, .. } in SAMPLING_NUMBERS {
        let (comment, found) =
            field(&sampling, name).unwrap_or_else(|| panic!("sampling.proto has no field {name}"));
        let expected = match kind {
            NumberKind::Float => "float",
            NumberKind::Integer => "int32",
        };
        assert_eq!(found, expected, "{name}");
        // The highest integer is no bound that a reader needs.
        let range = match range.strip_suffix(", 2147483647]") {
            Some(low) => format!("At least {}", low.trim_start_matches('[')),
            None => format!("In {range}"),
        };
        let says = format!("{range}; default {absent}.");
        assert!(comment.ends_with(&says), "{name}: the comment of sampling.proto does not end with {says:?}");
        assert!(kserve.contains(&format!("`{name}`")), "grpc_service.proto does not list {name}");
    }
}
