//! tonic codec that reports malformed messages as INVALID_ARGUMENT, and refuses those that would take too much memory.

use std::marker::PhantomData;

use prost::bytes::Buf as _;
use prost::{Message, Name};
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic::{Code, Status};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

use crate::decoded_size;

/// Protobuf codec that rejects a message which does not decode with INVALID_ARGUMENT.
///
/// [`ProstCodec`] returns INTERNAL for malformed bytes, such as invalid UTF-8 in a string; that blames the
/// server and makes clients retry a call that cannot succeed. A message that would take much more memory than it has bytes is
/// rejected before it is decoded.
#[derive(Debug)]
pub struct StrictCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for StrictCodec<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T, U> Codec for StrictCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Name + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = StrictDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::default().encoder()
    }

    fn decoder(&mut self) -> Self::Decoder {
        StrictDecoder(ProstCodec::<T, U>::default().decoder())
    }
}

/// Decoder of [`StrictCodec`]: prost's, with decoding errors mapped to INVALID_ARGUMENT and a bound on the memory.
#[derive(Debug)]
pub struct StrictDecoder<U>(ProstDecoder<U>);

/// Encoded size up to which a message is decoded without a check: decoded, it has less than a thousand times as many bytes.
const SMALL_BYTES: usize = 16 << 10;

impl<U: Message + Name + Default> Decoder for StrictDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, src: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // tonic buffers a message contiguously, so the chunk is the whole message.
        if src.remaining() > SMALL_BYTES {
            decoded_size::check(&U::full_name(), src.chunk())
                .map_err(|error| Status::invalid_argument(error.to_string()))?;
        }
        self.0.decode(src).map_err(|status| match status.code() {
            Code::Internal => {
                Status::invalid_argument(format!("the message does not decode: {}", status.message()))
            }
            _ => status,
        })
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.0.buffer_settings()
    }
}
