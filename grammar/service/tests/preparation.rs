//! Preparation of a vocabulary in the background.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use inflight_contract::{Grammar, JsonWhitespace};
use inflight_grammar::Vocabulary;
use inflight_grammar_service::Grammars;

/// Vocabulary of single bytes, and the control token that ends a text.
const END: u32 = 256;

fn vocabulary() -> Vocabulary {
    let bytes: Vec<[u8; 1]> = (0..=255).map(|byte| [byte]).collect();
    let tokens = bytes.iter().map(|byte| (&byte[..], false));
    Vocabulary::from_tokens(tokens.chain([(&b"<end>"[..], true)]))
}

#[test]
fn a_vocabulary_is_prepared_once_in_the_background_and_a_grammar_that_comes_before_waits() {
    let (release, released) = mpsc::channel::<()>();
    let (begun, begins) = mpsc::channel();
    let released = Mutex::new(released);
    let reads = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&reads);
    let grammars = Arc::new(Grammars::new(END + 1, &[END], move || {
        counted.fetch_add(1, Ordering::Relaxed);
        begun.send(()).unwrap();
        released.lock().unwrap().recv().unwrap();
        Ok(Arc::new(vocabulary()))
    }));
    grammars.prepare_in_background();
    begins.recv().unwrap();
    let early = {
        let grammars = Arc::clone(&grammars);
        std::thread::spawn(move || {
            grammars.compile(&Grammar::JsonObject(JsonWhitespace::OneLine)).map(|_| ())
        })
    };
    release.send(()).unwrap();
    assert_eq!(early.join().unwrap(), Ok(()));
    grammars.prepare_in_background();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert_eq!(runtime.block_on(grammars.check(&Grammar::Regex("a".to_owned()))).map(drop), Ok(()));
    assert_eq!(reads.load(Ordering::Relaxed), 1);
}
