//! Faults of the network and of the Hub.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use inflight_fixtures::TempDir;
use inflight_hub::{HubError, Progress, Quiet, Settings, fetch};
use inflight_hub_stand_in::{Fault, StandIn};

use super::names::{bytes, check, model, name};

/// Counts bytes and keeps sentences.
#[derive(Default)]
struct Record {
    arrived: AtomicU64,
    present: AtomicU64,
    notes: Mutex<Vec<String>>,
}

impl Progress for Record {
    fn begin(&self, _: &str, _: u64, present: u64) {
        self.present.fetch_add(present, Ordering::Relaxed);
    }

    fn advance(&self, _: &str, bytes: u64) {
        self.arrived.fetch_add(bytes, Ordering::Relaxed);
    }

    fn end(&self, _: &str) {}

    fn note(&self, text: &str) {
        self.notes.lock().unwrap().push(text.to_owned());
    }
}

#[test]
fn passing_faults_end_in_a_whole_model() {
    for (part, fault, times) in [
        ("/api/", Fault::Status(503, None), 3),
        ("/resolve/", Fault::Status(429, Some(0)), 4),
        ("signature", Fault::Status(500, None), 5),
        ("signature", Fault::Cut(0), 3),
        ("signature", Fault::Cut(7_000), 12),
        ("signature", Fault::NoRanges, 100),
        ("signature", Fault::Expired, 1),
        ("/resolve/", Fault::Cut(1), 2),
        ("/api/", Fault::Cut(3), 1),
    ] {
        let (hub, cache) = (StandIn::start(), TempDir::new("hub").unwrap());
        let files = model(7);
        hub.add("org/model", "main", &files);
        hub.fault(part, fault, times);
        let found = fetch(&name("org/model"), &hub.settings(cache.path()), &Quiet);
        let found = found.unwrap_or_else(|error| panic!("{part} {fault:?}: {error}"));
        check(&found.path, &files);
    }
}

#[test]
fn lasting_faults_end_in_a_sentence_and_the_next_call_continues() {
    for (part, fault, words) in [
        ("/api/", Fault::Status(503, None), "HTTP status 503"),
        ("signature", Fault::Status(404, None), "HTTP status 404"),
        ("signature", Fault::Cut(0), "the connection"),
        ("signature", Fault::Wrong, "and was deleted; a proxy or a mirror changed it"),
        ("tokenizer.json", Fault::Status(403, None), "HTTP status 403"),
    ] {
        let (hub, cache) = (StandIn::start(), TempDir::new("hub").unwrap());
        let files = model(8);
        hub.add("org/model", "main", &files);
        hub.fault(part, fault, u32::MAX);
        let settings = hub.settings(cache.path());
        let error = fetch(&name("org/model"), &settings, &Quiet).unwrap_err().to_string();
        assert!(error.contains(words), "{fault:?}: {error}");
        assert!(!error.contains("signature="), "{error}");
        // What is not whole is no model.
        let away = Settings { offline: true, ..settings.clone() };
        assert!(matches!(fetch(&name("org/model"), &away, &Quiet), Err(HubError::Offline { .. })));
        let repaired = StandIn::start();
        repaired.add("org/model", "main", &files);
        let settings = Settings { endpoint: repaired.endpoint(), ..settings };
        check(&fetch(&name("org/model"), &settings, &Quiet).unwrap().path, &files);
    }
}

#[test]
fn an_interrupted_download_continues_with_the_parts_that_are_missing() {
    let (hub, cache) = (StandIn::start(), TempDir::new("hub").unwrap());
    let weights = bytes(1_000_000, 9);
    hub.add("org/g", "main", &[("m.gguf", weights.clone())]);
    // Some of its hundred parts arrive.
    let settings = Settings { connections: 1, ..hub.settings(cache.path()) };
    struct Stop<'a>(&'a StandIn, AtomicU64);
    impl Progress for Stop<'_> {
        fn begin(&self, _: &str, _: u64, _: u64) {}
        fn advance(&self, _: &str, bytes: u64) {
            if self.1.fetch_add(bytes, Ordering::Relaxed) < 400_000
                && self.1.load(Ordering::Relaxed) >= 400_000
            {
                self.0.fault("signature", Fault::Status(404, None), u32::MAX);
            }
        }
        fn end(&self, _: &str) {}
        fn note(&self, _: &str) {}
    }
    fetch(&name("org/g"), &settings, &Stop(&hub, AtomicU64::new(0))).unwrap_err();
    hub.heal();
    hub.seen();
    let record = Record::default();
    let found = fetch(&name("org/g"), &settings, &record).unwrap();
    assert_eq!(std::fs::read(found.path).unwrap(), weights);
    // The Hub is asked for the address once, and not for each part.
    let asked = hub.seen().into_iter().filter(|seen| seen.line.starts_with("GET /org/g/resolve")).count();
    assert_eq!(asked, 1);
    let (arrived, present) = (record.arrived.load(Ordering::Relaxed), record.present.load(Ordering::Relaxed));
    assert_eq!((arrived, present), (600_000, 400_000));
    // Wrong bytes from an earlier time are found by the digest, and not kept.
    let blobs = cache.path().join("models--org--g/blobs");
    let names: Vec<_> = std::fs::read_dir(blobs).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 1, "{names:?}");
}

#[test]
fn a_lost_network_uses_the_cache_and_says_so() {
    let (hub, cache) = (StandIn::start(), TempDir::new("hub").unwrap());
    hub.add("org/model", "main", &model(10));
    let settings = hub.settings(cache.path());
    let found = fetch(&name("org/model"), &settings, &Quiet).unwrap();
    drop(hub);
    let record = Record::default();
    // Nothing listens there.
    let gone = Settings { endpoint: "http://127.0.0.1:9".to_owned(), ..settings };
    assert_eq!(fetch(&name("org/model"), &gone, &record).unwrap(), found);
    let notes = record.notes.into_inner().unwrap();
    assert!(notes[0].contains("of org/model from the cache"), "{notes:?}");
    let error = fetch(&name("org/other"), &gone, &Quiet).unwrap_err().to_string();
    assert!(error.starts_with("http://127.0.0.1:9/api/models/org/other"), "{error}");
}

#[test]
fn several_at_once_fetch_each_file_once() {
    let (hub, cache) = (StandIn::start(), TempDir::new("hub").unwrap());
    let files = model(11);
    hub.add("org/model", "main", &files);
    let settings = hub.settings(cache.path());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| check(&fetch(&name("org/model"), &settings, &Quiet).unwrap().path, &files));
        }
    });
    let seen = hub.seen();
    let mut parts: Vec<_> =
        seen.iter().filter(|seen| seen.elsewhere).map(|seen| (&seen.line, seen.from)).collect();
    let count = parts.len();
    parts.sort();
    parts.dedup();
    assert_eq!(parts.len(), count, "no part is fetched twice");
}

#[test]
fn without_room_nothing_is_fetched() {
    let (hub, cache) = (StandIn::start(), TempDir::new("hub").unwrap());
    hub.add("org/g", "main", &[("m.gguf", bytes(20_000, 1))]);
    // A directory cannot be made where a file is.
    let file = cache.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = fetch(&name("org/g"), &hub.settings(&file), &Quiet).unwrap_err();
    assert!(error.to_string().starts_with("cannot create "), "{error}");
    assert!(!hub.seen().iter().any(|seen| seen.elsewhere));
}
