//! The cache that other tools share.

use inflight_fixtures::TempDir;
use inflight_hub::{Cache, HubError, Quiet, fetch, locate};
use inflight_hub_stand_in::StandIn;

use super::names::{bytes, model, name};

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
