//! Preparation of a vocabulary in the background.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use inflight_contract::Grammar;
use inflight_grammar::Grammars;

use super::vocabulary::*;

#[test]
fn a_vocabulary_is_prepared_once_in_the_background_and_a_grammar_that_comes_before_waits() {
    let (release, released) = mpsc::channel::<()>();
    let (begun, begins) = mpsc::channel();
    let released = Mutex::new(released);
    let reads = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&reads);
    let grammars = Arc::new(Grammars::new(VOCAB_SIZE, &[END], move || {
        counted.fetch_add(1, Ordering::Relaxed);
        begun.send(()).unwrap();
        released.lock().unwrap().recv().unwrap();
        Ok(Arc::new(vocabulary()))
    }));
    grammars.prepare_in_background();
    begins.recv().unwrap();
    let early = {
        let grammars = Arc::clone(&grammars);
        std::thread::spawn(move || grammars.compile(&Grammar::JsonObject).map(|_| ()))
    };
    release.send(()).unwrap();
    assert_eq!(early.join().unwrap(), Ok(()));
    grammars.prepare_in_background();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert_eq!(runtime.block_on(grammars.check(&Grammar::Regex("a".to_owned()))).map(drop), Ok(()));
    assert_eq!(reads.load(Ordering::Relaxed), 1);
}
