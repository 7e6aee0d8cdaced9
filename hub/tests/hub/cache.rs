//! The cache that other tools share.

use inflight_fixtures::TempDir;
use inflight_hub::{Cache, HubError, Quiet, fetch, locate};
use inflight_hub_stand_in::StandIn;

use super::names::{bytes, check, model, name};

#[test]
fn models_are_listed_found_by_their_directory_and_removed() {
    let (hub, directory) = (StandIn::start(), TempDir::new("hub").unwrap());
    let files = model(1);
    let commit = hub.add("org/model", "main", &files);
    hub.add("org/g", "refs/pr/1", &[("m.gguf", bytes(20_000, 1))]);
    let settings = hub.settings(directory.path());
    let found = fetch(&name("org/model"), &settings, &Quiet).unwrap();
    fetch(&name("org/g@refs/pr/1"), &settings, &Quiet).unwrap();
    let cache = Cache::new(directory.path().to_owned());
    let models = cache.models();
    let names: Vec<&str> = models.iter().map(|model| model.repo.as_str()).collect();
    assert_eq!(names, ["org/g", "org/model"]);
    assert_eq!((models[0].bytes, &models[0].revisions[0].names), (20_000, &vec!["refs/pr/1".to_owned()]));
    assert_eq!(
        (models[1].revisions[0].commit.as_str(), &models[1].revisions[0].path),
        (commit.as_str(), &found.path)
    );
    // The directory of a model is not that of its files.
    let outer = directory.path().join("models--org--model");
    assert_eq!(locate(outer.to_str().unwrap(), &settings, &Quiet).unwrap().path, found.path);
    // Another process fetches into it.
    let lock = std::fs::read_dir(directory.path().join(".locks/models--org--model"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    let held = std::fs::File::options().write(true).open(lock.path()).unwrap();
    held.lock().unwrap();
    assert!(matches!(cache.remove("org/model"), Err(HubError::InUse { .. })));
    drop(held);
    assert_eq!(cache.remove("org/model").unwrap(), Some(models[1].bytes));
    assert_eq!(cache.remove("org/model").unwrap(), None);
    assert_eq!(cache.models().len(), 1);
}

/// What `huggingface_hub` does with a cache: finds what is there without a network, or fetches.
const PYTHON: &str = r#"
import os, sys
from huggingface_hub import snapshot_download, hf_hub_download
mode, repo, cache = sys.argv[1:]
patterns = ["*.json", "*.jinja", "model-0000[12]-of-00002.safetensors"]
path = snapshot_download(repo, cache_dir=cache, local_files_only=mode == "find", allow_patterns=patterns)
print(os.path.realpath(path))
if mode == "find":
    print(os.path.getsize(hf_hub_download(repo, "tokenizer.json", cache_dir=cache, local_files_only=True)))
"#;

#[test]
fn huggingface_hub_finds_what_was_fetched_and_what_it_fetched_is_found() {
    let Ok(python) = std::env::var("INFLIGHT_TEST_HUB_PYTHON") else {
        inflight_fixtures::skipped(
            "the cache of the Hub",
            "INFLIGHT_TEST_HUB_PYTHON names no Python with huggingface_hub",
        );
        return;
    };
    let run = |mode: &str, hub: &StandIn, cache: &std::path::Path| {
        let output = std::process::Command::new(&python)
            .args(["-c", PYTHON, mode, "org/model"])
            .arg(cache)
            .env("HF_ENDPOINT", hub.endpoint())
            .env("HF_HUB_DISABLE_XET", "1")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let hub = StandIn::start();
    let files = model(3);
    hub.add("org/model", "main", &files);
    let ours = TempDir::new("hub").unwrap();
    let found = fetch(&name("org/model"), &hub.settings(ours.path()), &Quiet).unwrap();
    let text = run("find", &hub, ours.path());
    let real = found.path.canonicalize().unwrap();
    assert_eq!(text.lines().collect::<Vec<_>>(), [real.to_str().unwrap(), "5000"]);
    // And the other way: nothing is fetched again.
    let theirs = TempDir::new("hub").unwrap();
    run("fetch", &hub, theirs.path());
    hub.seen();
    let found = fetch(&name("org/model"), &hub.settings(theirs.path()), &Quiet).unwrap();
    check(&found.path, &files);
    let fetched: Vec<_> = hub.seen().into_iter().filter(|seen| seen.elsewhere).collect();
    assert_eq!(fetched, []);
}
