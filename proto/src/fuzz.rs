//! Entry point for fuzzing: messages of any bytes, measured and decoded.

use prost::encoding::decode_varint;
use prost::{Message, Name};

use crate::decoded_size;

/// Decodes a message. Returns it with the upper bound on its heap memory in bytes that the codec finds before it decodes, or `None`
/// if the codec refuses it as malformed.
///
/// # Panics
/// If the codec would refuse the same message as an encoder writes it.
pub fn decode<T: Message + Name + Default>(message: &[u8]) -> Option<(T, usize)> {
    let decoded = T::decode(message).ok()?;
    let again = decoded_size::measure(&T::full_name(), &decoded.encode_to_vec());
    assert!(again.is_some(), "a valid message of {} bytes is refused", message.len());
    Some((decoded, decoded_size::measure(&T::full_name(), message)?))
}

/// Decodes the length-delimited message at the front of `data`, as [`decode`], and removes it.
///
/// # Panics
/// As [`decode`].
pub fn decode_length_delimited<T: Message + Name + Default>(data: &mut &[u8]) -> Option<(T, usize)> {
    let bytes = usize::try_from(decode_varint(data).ok()?).ok()?;
    let (message, rest) = data.split_at_checked(bytes)?;
    *data = rest;
    decode(message)
}
