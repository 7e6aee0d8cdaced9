//! What a name leads to.

use inflight_fixtures::TempDir;
use inflight_hub::{HubError, ModelName, Quiet, Settings, fetch, locate};
use inflight_hub_stand_in::StandIn;

/// Bytes that compress badly and differ by seed.
pub(super) fn bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    })
    .take(length)
    .collect()
}

/// Files of a model in two weight files.
pub(super) fn model(seed: u64) -> Vec<(&'static str, Vec<u8>)> {
    let index = br#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}"#;
    vec![
        ("README.md", b"# Model".to_vec()),
        ("config.json", b"{}".to_vec()),
        ("empty.json", Vec::new()),
        ("tokenizer.json", bytes(5_000, seed)),
        ("chat_template.jinja", b"{{ messages }}".to_vec()),
        ("pytorch_model.bin", bytes(50_000, seed + 1)),
        ("model.safetensors.index.json", index.to_vec()),
        ("model-00001-of-00002.safetensors", bytes(123_456, seed + 2)),
        ("model-00002-of-00002.safetensors", bytes(20_000, seed + 3)),
        ("model-00003-of-00003.safetensors", bytes(20_000, seed + 4)),
    ]
}

/// Files of it that are needed.
const NEEDED: [&str; 7] = [
    "config.json",
    "empty.json",
    "tokenizer.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
];

pub(super) fn name(text: &str) -> ModelName {
    text.parse().unwrap()
}

/// Checks that a snapshot has exactly the files that are needed, with their bytes.
pub(super) fn check(snapshot: &std::path::Path, files: &[(&str, Vec<u8>)]) {
    for (path, bytes) in files {
        let found = std::fs::read(snapshot.join(path)).ok();
        assert_eq!(found.as_ref(), NEEDED.contains(path).then_some(bytes), "{path}");
    }
}

#[test]
fn a_model_is_fetched_once_and_only_what_it_needs() {
    let (hub, cache) = (StandIn::start(), TempDir::new("hub").unwrap());
    let files = model(1);
    let commit = hub.add("org/model", "main", &files);
    let settings = Settings { token: Some("secret".to_owned()), ..hub.settings(cache.path()) };
    let found = fetch(&name("org/model"), &settings, &Quiet).unwrap();
    let snapshot = cache.path().join("models--org--model/snapshots").join(&commit);
    assert_eq!((&found.path, found.commit.as_deref()), (&snapshot, Some(commit.as_str())));
    check(&snapshot, &files);
    let seen = hub.seen();
    assert!(seen.iter().any(|seen| seen.elsewhere && seen.from == Some(10_000)), "parts: {seen:?}");
    assert!(
        seen.iter().all(|seen| seen.has_token != seen.elsewhere),
        "only the Hub gets the token: {seen:?}"
    );
    // Again: one question, no file.
    assert_eq!(fetch(&name("org/model"), &settings, &Quiet).unwrap(), found);
    assert!(hub.seen().iter().all(|seen| seen.line.contains("/api/")));
    // A commit needs no question at all.
    let exact = name(&format!("org/model@{commit}"));
    assert_eq!(fetch(&exact, &settings, &Quiet).unwrap().path, snapshot);
    assert_eq!(hub.seen(), []);
    // A new commit shares the blobs that are the same.
    let mut changed = files.clone();
    changed[1].1 = b"{\"a\": 1}".to_vec();
    hub.add("org/model", "main", &changed);
    let newer = fetch(&name("org/model"), &settings, &Quiet).unwrap();
    check(&newer.path, &changed);
    let gets: Vec<_> = hub.seen().into_iter().filter(|seen| seen.line.starts_with("GET /org/")).collect();
    assert_eq!(gets.len(), 1, "{gets:?}");
    check(&snapshot, &files);
}

#[test]
fn gguf_files_are_fetched_by_quantization() {
    let (hub, cache) = (StandIn::start(), TempDir::new("hub").unwrap());
    let wanted = bytes(30_000, 5);
    hub.add(
        "org/g",
        "v1",
        &[
            ("m-Q4_K_M.gguf", wanted.clone()),
            ("m-Q8_0.gguf", bytes(30_000, 6)),
            ("mmproj-F16.gguf", bytes(2_000, 7)),
        ],
    );
    let settings = hub.settings(cache.path());
    let found = fetch(&name("org/g@v1:q4_k_m"), &settings, &Quiet).unwrap();
    assert!(found.path.ends_with("m-Q4_K_M.gguf"));
    assert_eq!(std::fs::read(&found.path).unwrap(), wanted);
    assert!(hub.seen().iter().all(|seen| !seen.line.contains("Q8_0")));
    let error = fetch(&name("org/g@v1"), &settings, &Quiet).unwrap_err().to_string();
    assert!(error.ends_with("choose one with :QUANTIZATION, of Q4_K_M, Q8_0"), "{error}");
}

#[test]
fn all_parts_of_a_gguf_model_are_fetched_and_found_without_the_hub() {
    let (hub, cache) = (StandIn::start(), TempDir::new("hub").unwrap());
    let part = |number: u64| format!("Q8_0/m-Q8_0-{number:05}-of-00003.gguf");
    let files: Vec<(String, Vec<u8>)> = (1..=3).map(|number| (part(number), bytes(9_000, number))).collect();
    let listed: Vec<(&str, Vec<u8>)> =
        files.iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
    hub.add("org/g", "main", &listed);
    let settings = hub.settings(cache.path());
    let found = fetch(&name("org/g:q8_0"), &settings, &Quiet).unwrap().path;
    assert!(found.ends_with(part(1)), "{}", found.display());
    let folder = found.parent().unwrap();
    for (file, content) in &files {
        assert_eq!(&std::fs::read(folder.parent().unwrap().join(file)).unwrap(), content, "{file}");
    }
    let offline = Settings { offline: true, ..settings };
    for wanted in ["org/g:q8_0", "org/g:Q8_0/m-Q8_0-00002-of-00003.gguf"] {
        assert_eq!(fetch(&name(wanted), &offline, &Quiet).unwrap().path, found, "{wanted}");
    }
    // Not one of which a part is missing.
    std::fs::remove_file(folder.join("m-Q8_0-00003-of-00003.gguf")).unwrap();
    for wanted in ["org/g:q8_0", "org/g:Q8_0/m-Q8_0-00001-of-00003.gguf"] {
        let error = fetch(&name(wanted), &offline, &Quiet).unwrap_err().to_string();
        assert!(error.contains("not in the cache"), "{wanted}: {error}");
    }
}

#[test]
fn what_cannot_be_had_is_said_in_a_sentence() {
    let (hub, cache) = (StandIn::start(), TempDir::new("hub").unwrap());
    hub.add("org/private", "main", &model(1));
    hub.set_token("org/private", "good");
    hub.add("org/gated", "main", &model(2));
    hub.set_gated("org/gated");
    hub.add("org/model", "main", &model(3));
    hub.add("org/model", "v1.0", &model(4));
    hub.add("org/pickle", "main", &[("config.json", b"{}".to_vec()), ("pytorch_model.bin", bytes(2_000, 1))]);
    let broken = br#"{"weight_map": {"a": "../../secret.safetensors"}}"#;
    hub.add(
        "org/broken",
        "main",
        &[("model.safetensors.index.json", broken.to_vec()), ("config.json", b"{}".to_vec())],
    );
    let settings = hub.settings(cache.path());
    for (argument, words) in [
        ("org/none", "org/none is not on http://127.0.0.1"),
        (
            "org/private",
            "or is private; there is no directory org/private here either. Check the name, and set HF_TOKEN",
        ),
        ("org/gated", "gated: accept its conditions at http"),
        ("org/model@v1", "org/model has no revision v1; near are v1.0, main"),
        ("org/pickle", "pickles of PyTorch, which run code"),
        ("org/broken", "names ../../secret.safetensors, which the repository does not have"),
        ("org/model:Q4_K_M", "it has no file Q4_K_M, and no GGUF files"),
        ("./org/none", "there is no such directory or file"),
        ("qwen3:0.6b", "is named with its organisation, as in Qwen/qwen3:0.6b"),
        ("hf://model", "is no model of the Hub"),
    ] {
        let error = locate(argument, &settings, &Quiet).unwrap_err().to_string();
        assert!(error.contains(words), "{argument}: {error}");
    }
    let settings = Settings { token: Some("bad".to_owned()), ..settings };
    let error = locate("org/private", &settings, &Quiet).unwrap_err().to_string();
    assert!(error.contains("not visible to the account of HF_TOKEN"), "{error}");
    let settings = Settings { token: Some("good".to_owned()), ..settings };
    locate("org/private", &settings, &Quiet).unwrap();
    let away = Settings { offline: true, ..settings };
    let error = locate("org/none", &away, &Quiet).unwrap_err();
    assert!(matches!(error, HubError::Offline { .. }), "{error}");
}
