//! Bound on the memory that a message takes once it is decoded.
//!
//! An empty element of a repeated field has 2 bytes on the wire and up to several hundred in memory, so a bound on the bytes of a
//! message bounds nothing else. The sizes come from the descriptors, and a message is measured in one pass over its bytes, before
//! anything is allocated.

use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

/// Decoded size that every message may have, in bytes.
const BYTES_MAX: usize = 16 << 20;
/// Decoded bytes beyond that for each encoded byte.
const FACTOR: usize = 4;

/// Memory layout of a message type.
#[derive(Debug)]
struct Shape {
    /// Full name.
    name: &'static str,
    /// Upper bound on `size_of` the generated type.
    #[cfg(test)]
    size: usize,
    /// Number and kind of each field with heap memory.
    fields: &'static [(u32, Kind)],
}

/// Heap memory of a field by its type.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// String or bytes: `size_of` an element if the field is repeated, else 0.
    Bytes(usize),
    /// Submessage: index of its type in [`SHAPES`], and the size of an element if the field is repeated, else 0.
    Message(usize, usize),
    /// Repeated fixed-width numbers: encoded and decoded size of an element.
    Fixed(usize, usize),
    /// Repeated varints: decoded size of an element.
    Varint(usize),
}

/// Layouts of all messages, sorted by name.
static SHAPES: &[Shape] = include!(concat!(env!("OUT_DIR"), "/shapes.rs"));

/// Error of [`check`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SizeError {
    /// The decoded size exceeds the limit.
    #[error(
        "the message of {bytes} bytes would take more than {most} bytes of memory; send fewer elements of repeated fields at once"
    )]
    TooLarge {
        /// Encoded size.
        bytes: usize,
        /// Limit of the decoded size.
        most: usize,
    },
    /// The message is not valid protobuf. prost accepts some of these, because it ignores the wire type of map entries, and allocates
    /// the elements before the error in others.
    #[error("the message does not decode: it ends within a field, or a field has the wrong wire type")]
    Malformed,
}

/// Checks the decoded size of an encoded message of the type `name`.
///
/// # Errors
/// [`SizeError::TooLarge`], or [`SizeError::Malformed`] for a message that does not parse, whose rest cannot be measured.
pub(crate) fn check(name: &str, message: &[u8]) -> Result<(), SizeError> {
    let most = BYTES_MAX + FACTOR * message.len();
    let Ok(index) = SHAPES.binary_search_by(|shape| shape.name.cmp(name)) else { return Ok(()) };
    let mut left = Left(most);
    match left.measure(&SHAPES[index], message, 0) {
        Ok(()) => Ok(()),
        Err(Stop::TooLarge) => Err(SizeError::TooLarge { bytes: message.len(), most }),
        Err(Stop::Malformed) => Err(SizeError::Malformed),
    }
}

/// Returns the decoded size of an encoded message of the type `name`, an upper bound without the message itself, or `None` if it is
/// malformed or its type is unknown.
pub(crate) fn measure(name: &str, message: &[u8]) -> Option<usize> {
    let index = SHAPES.binary_search_by(|shape| shape.name.cmp(name)).ok()?;
    let mut left = Left(usize::MAX);
    left.measure(&SHAPES[index], message, 0).is_ok().then(|| usize::MAX - left.0)
}

/// Reason why measuring ends before the end of a message.
enum Stop {
    TooLarge,
    Malformed,
}

/// Decoded bytes left of the limit.
struct Left(usize);

impl Left {
    /// Recursion limit of prost.
    const DEPTH_MAX: usize = 100;

    fn take(&mut self, bytes: usize) -> Result<(), Stop> {
        self.0 = self.0.checked_sub(bytes).ok_or(Stop::TooLarge)?;
        Ok(())
    }

    fn measure(&mut self, shape: &Shape, mut message: &[u8], depth: usize) -> Result<(), Stop> {
        if depth > Self::DEPTH_MAX {
            return Err(Stop::Malformed);
        }
        while !message.is_empty() {
            let (number, wire) = decode_key(&mut message).map_err(|_| Stop::Malformed)?;
            let kind = shape.fields.iter().find(|(known, _)| *known == number).map(|(_, kind)| *kind);
            let value = match wire {
                WireType::LengthDelimited => {
                    let bytes = decode_varint(&mut message).map_err(|_| Stop::Malformed)?;
                    split(&mut message, usize::try_from(bytes).unwrap_or(usize::MAX))?
                }
                WireType::Varint => {
                    decode_varint(&mut message).map_err(|_| Stop::Malformed)?;
                    // An element of a repeated field that is not packed.
                    &[0]
                }
                WireType::SixtyFourBit => split(&mut message, 8)?,
                WireType::ThirtyTwoBit => split(&mut message, 4)?,
                // No message has groups: prost skips them.
                group => {
                    skip_field(group, number, &mut message, DecodeContext::default())
                        .map_err(|_| Stop::Malformed)?;
                    &[]
                }
            };
            match kind {
                None => {}
                Some(Kind::Bytes(element)) => self.take(element + value.len())?,
                // prost reads an entry of a map here, whatever the wire type.
                Some(Kind::Message(..)) if wire != WireType::LengthDelimited => return Err(Stop::Malformed),
                Some(Kind::Message(index, element)) => {
                    self.take(element)?;
                    self.measure(&SHAPES[index], value, depth + 1)?;
                }
                Some(Kind::Fixed(wire, memory)) => self.take(value.len() / wire * memory)?,
                Some(Kind::Varint(memory)) => {
                    self.take(value.iter().filter(|byte| **byte < 0x80).count() * memory)?;
                }
            }
        }
        Ok(())
    }
}

/// Splits `bytes` bytes off a message.
fn split<'a>(message: &mut &'a [u8], bytes: usize) -> Result<&'a [u8], Stop> {
    let (value, rest) = message.split_at_checked(bytes).ok_or(Stop::Malformed)?;
    *message = rest;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use prost::{Message, Name};

    use super::*;
    use crate::{kserve, v1};

    fn size<T: Name>() -> usize {
        SHAPES.iter().find(|shape| shape.name == T::full_name()).unwrap().size
    }

    #[test]
    fn sizes_from_the_descriptors_are_at_least_those_in_memory_and_at_most_twice_those() {
        fn assert_size<T: Name>() {
            let (estimated, actual) = (size::<T>(), std::mem::size_of::<T>());
            assert!(
                actual <= estimated && estimated <= 2 * actual,
                "{}: {estimated}, {actual}",
                T::full_name()
            );
        }
        assert_size::<kserve::ModelInferRequest>();
        assert_size::<kserve::model_infer_request::InferInputTensor>();
        assert_size::<kserve::InferParameter>();
        assert_size::<v1::GenerateRequest>();
        assert_size::<v1::ChatMessage>();
        assert_size::<v1::SamplingParams>();
        assert_size::<v1::SessionRequest>();
        assert_size::<v1::Submit>();
        assert_size::<v1::SequenceUpdate>();
        assert_size::<v1::PositionLogprobs>();
        assert_size::<v1::TokenLogprob>();
        assert_size::<v1::WatchResponse>();
    }

    fn check_of<T: Name>(message: &T) -> Result<(), SizeError> {
        check(&T::full_name(), &message.encode_to_vec())
    }

    #[test]
    fn elements_that_take_much_more_than_their_bytes_are_refused_and_large_requests_are_not() {
        let tensors = |count| kserve::ModelInferRequest {
            inputs: vec![kserve::model_infer_request::InferInputTensor::default(); count],
            ..kserve::ModelInferRequest::default()
        };
        assert_eq!(check_of(&tensors(1000)), Ok(()));
        let error = check_of(&tensors(2 << 20)).unwrap_err().to_string();
        assert!(error.starts_with("the message of 4194304 bytes would take more than 33554432"), "{error}");
        let chat = |count, content: &str| v1::GenerateRequest {
            input: Some(v1::generate_request::Input::Chat(v1::Chat {
                messages: vec![
                    v1::ChatMessage { content: content.to_owned(), ..v1::ChatMessage::default() };
                    count
                ],
                ..v1::Chat::default()
            })),
            ..v1::GenerateRequest::default()
        };
        assert_eq!(check_of(&chat(16_384, "hi")), Ok(()), "as many as a conversation may have");
        assert_eq!(check_of(&chat(1, &"x".repeat(4 << 20))), Ok(()));
        assert!(check_of(&chat(1 << 20, "")).is_err(), "nested");
        let ids = kserve::model_infer_request::InferInputTensor {
            contents: Some(kserve::InferTensorContents {
                int64_contents: vec![1; 1 << 20],
                ..Default::default()
            }),
            ..Default::default()
        };
        assert_eq!(check_of(&kserve::ModelInferRequest { inputs: vec![ids], ..Default::default() }), Ok(()));
        // A worker's update with 50,000 positions of 20 log probabilities each is accepted.
        let position = v1::PositionLogprobs {
            chosen: Some(v1::TokenLogprob { token_id: 100_000, logprob: -1.5 }),
            top: vec![v1::TokenLogprob { token_id: 100_000, logprob: -1.5 }; 20],
        };
        let sequence = v1::SequenceUpdate { logprobs: vec![position; 50_000], ..Default::default() };
        let update = v1::Update { sequences: vec![sequence], ..Default::default() };
        let response = v1::SessionResponse { message: Some(v1::session_response::Message::Update(update)) };
        assert_eq!(check_of(&response), Ok(()));
        let sequences = vec![v1::SequenceUpdate::default(); 1 << 20];
        let update = v1::Update { sequences, ..Default::default() };
        let response = v1::SessionResponse { message: Some(v1::session_response::Message::Update(update)) };
        assert!(check_of(&response).is_err());
    }

    #[test]
    fn malformed_messages_are_refused_and_what_follows_a_group_is_measured() {
        for malformed in [&[0xff][..], &[0x0a, 0x05, 1], &[0x0d, 1], &[0x80; 11]] {
            assert_eq!(check("inflight.v1.GenerateRequest", malformed), Err(SizeError::Malformed));
            assert!(v1::GenerateRequest::decode(malformed).is_err());
        }
        // A field that ends behind the message around it: prost decodes the field to its end first.
        let beyond = [0x2a, 0x02, 0x2a, 0x04, 0, 0, 0, 0];
        assert_eq!(check("inference.ModelInferRequest", &beyond), Err(SizeError::Malformed));
        assert!(kserve::ModelInferRequest::decode(&beyond[..]).is_err());
        let empty_tensors = [0x2a, 0x00].repeat(1 << 20);
        let group = [0xfb, 0x07, 0xfc, 0x07];
        // A map entry with the wire type of a 64-bit number. A parser that skips 8 bytes takes the rest for one unknown field.
        let entry = [
            0x21, 0x08, 0x18, 0x18, 0x18, 0x18, 0x18, 0x18, 0x18, 0x7a, 0x88, 0x80, 0x80, 0x01, 0, 0x7a,
            0x05, 0, 0, 0, 0, 0,
        ];
        for prefix in [&[][..], &group, &entry] {
            let message = [prefix, &empty_tensors].concat();
            assert_eq!(kserve::ModelInferRequest::decode(&*message).unwrap().inputs.len(), 1 << 20);
            assert!(check("inference.ModelInferRequest", &message).is_err(), "{prefix:x?}");
        }
        assert_eq!(check("unknown.Message", &[0xff]), Ok(()));
    }
}
