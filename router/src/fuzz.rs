//! Entry points for fuzzing: each parses any bytes as one kind of input of a router and panics if a property of the result does
//! not hold. They return whether the input was accepted.

use crate::cluster::wire;
use crate::protocols;
use crate::protocols::kserve as kserve_api;
use crate::tenants as tenants_file;
use crate::text::{ChatTemplate, Detokenizer, Message, Tokenizer};

/// Separator between the parts of an input, which text files do not contain.
const SEPARATOR: u8 = 0;
/// Text that every accepted tokenizer has to encode.
const SAMPLE: &str = "Hello,  w\u{f6}rld 42!\n\u{1f642}\u{4f60}\u{597d} <s></s><|eot_id|>";

/// tokenizer.json and, behind a zero byte, a text: its bound on the number of tokens holds, and the text streams without partial
/// characters.
///
/// # Panics
/// If one of these does not hold.
pub fn tokenizer(data: &[u8]) -> bool {
    tolerate_library_panics();
    let (json, text) = split(data);
    let Ok(tokenizer) = Tokenizer::from_json(json) else { return false };
    for text in [SAMPLE, &*String::from_utf8_lossy(text)] {
        let Ok(ids) = tokenizer.encode_rendered(text) else { continue };
        let bound = tokenizer.min_tokens(text);
        assert!(bound <= ids.len(), "at least {bound} tokens are said of {text:?}, which has {}", ids.len());
        let vocabulary = tokenizer.vocabulary();
        let mut detokenizer = Detokenizer::new(vocabulary, &[]);
        let (mut streamed, mut bytes) = (String::new(), 0);
        for id in ids {
            bytes += vocabulary.bytes(id).len();
            detokenizer.push(vocabulary, id, &mut streamed);
        }
        detokenizer.finish(&mut streamed);
        // A replacement character takes three bytes for one that is invalid.
        assert!(streamed.len() <= 3 * bytes, "{} bytes from tokens of {bytes}", streamed.len());
    }
    true
}

/// Chat template and, each behind a zero byte, the contents of a conversation: rendering ends, and is the same twice.
///
/// # Panics
/// If it is not.
pub fn template(data: &[u8]) -> bool {
    let mut parts = data.split(|byte| *byte == SEPARATOR).map(String::from_utf8_lossy);
    let source = parts.next().unwrap_or_default();
    let Ok(template) = ChatTemplate::new(&source, "<s>", "</s>") else { return false };
    let role = |at: usize| ["user", "assistant", "system"][at % 3].to_owned();
    let message = |(at, content): (usize, _)| Message::new(&role(at), String::from(content));
    let mut messages: Vec<_> = parts.take(8).enumerate().map(message).collect();
    if messages.is_empty() {
        messages.push(Message::new(&role(0), "Hi".to_owned()));
    }
    let rendered = template.render(&messages[..].into(), time::OffsetDateTime::UNIX_EPOCH);
    // As text: errors have no equality.
    assert_eq!(
        format!("{rendered:?}"),
        format!("{:?}", template.render(&messages[..].into(), time::OffsetDateTime::UNIX_EPOCH))
    );
    rendered.is_ok()
}

/// Body of a request of the HTTP APIs.
///
/// # Panics
/// If a property does not hold.
pub fn http_json(data: &[u8]) -> bool {
    protocols::fuzz::read(data)
}

/// Request of `ModelInfer`.
///
/// # Panics
/// If a property does not hold.
pub fn kserve(data: &[u8]) -> bool {
    kserve_api::fuzz(data)
}

/// Length-delimited messages of a worker.
///
/// # Panics
/// If a property does not hold.
pub fn worker_session(data: &[u8]) -> bool {
    wire::fuzz::session(data)
}

/// Tenants' file.
///
/// # Panics
/// If a property does not hold.
pub fn tenants(data: &[u8]) -> bool {
    std::str::from_utf8(data).is_ok_and(tenants_file::fuzz)
}

/// Takes panics within the tokenizer library from the hook of the fuzzer, which ends the process: loading catches them. Others
/// still end the target.
fn tolerate_library_panics() {
    static HOOK: std::sync::Once = std::sync::Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !panic.location().is_some_and(|location| location.file().contains("/tokenizers-")) {
                before(panic);
            }
        }));
    });
}

/// Splits at the first separator; without one, the second part is empty.
fn split(data: &[u8]) -> (&[u8], &[u8]) {
    let at = data.iter().position(|byte| *byte == SEPARATOR).unwrap_or(data.len());
    (&data[..at], data.get(at + 1..).unwrap_or_default())
}
