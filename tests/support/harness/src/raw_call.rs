//! gRPC calls with raw message bytes.

use anyhow::Result;
use bytes::{Buf as _, BufMut as _};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Request, Status};

/// Sends `message` as the bytes of one request message; returns the error status, `None` on success.
///
/// # Errors
/// The connection fails.
pub async fn send_raw(endpoint: &str, method: &'static str, message: Vec<u8>) -> Result<Option<Status>> {
    let channel = Channel::from_shared(endpoint.to_owned())?.connect().await?;
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await?;
    let path = PathAndQuery::from_static(method);
    let mut stream = match client.server_streaming(Request::new(message), path, RawCodec).await {
        Ok(response) => response.into_inner(),
        Err(status) => return Ok(Some(status)),
    };
    loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(None),
            Err(status) => return Ok(Some(status)),
        }
    }
}

/// Codec that passes message bytes through without decoding them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RawCodec;

impl Codec for RawCodec {
    type Encode = Vec<u8>;
    type Decode = Vec<u8>;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for RawCodec {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_slice(&item);
        Ok(())
    }
}

impl Decoder for RawCodec {
    type Item = Vec<u8>;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Vec<u8>>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining()).to_vec()))
    }
}
