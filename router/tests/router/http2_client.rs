//! HTTP/2 client on the frames of the wire.

use inflight_proto::v1;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use crate::cluster::Cluster;

/// Encodes an HTTP/2 frame.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let [_, length @ ..] = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// HPACK headers without indexing of a gRPC call: POST, http, a path, and the authority `a`.
pub fn headers(path: &str) -> Vec<u8> {
    let head = [&[0x83, 0x86, 0x04, path.len() as u8], path.as_bytes(), &[0x01, 1, b'a']].concat();
    [head, header("content-type", "application/grpc"), header("te", "trailers")].concat()
}

fn header(name: &str, value: &str) -> Vec<u8> {
    [&[0, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
}

/// Frame as it is received.
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

/// HTTP/2 connection, frame by frame.
pub struct Frames {
    reader: BufReader<OwnedReadHalf>,
    writer: OwnedWriteHalf,
}

impl Frames {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const SETTINGS: u8 = 4;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const END_STREAM: u8 = 1;
    pub const END_HEADERS: u8 = 4;
    /// Settings of a client whose streams have no window but what it grants.
    pub const NO_WINDOW: [u8; 6] = [0, 4, 0, 0, 0, 0];

    pub async fn connect(cluster: &Cluster, settings: &[u8]) -> Self {
        let (reader, writer) = TcpStream::connect(cluster.address).await.unwrap().into_split();
        let mut frames = Self { reader: BufReader::new(reader), writer };
        frames.writer.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        frames.write(&[frame(Self::SETTINGS, 0, 0, settings)]).await.unwrap();
        frames
    }

    pub async fn write(&mut self, frames: &[Vec<u8>]) -> std::io::Result<()> {
        self.writer.write_all(&frames.concat()).await
    }

    /// Reads the next frame; `None` at the end of the connection.
    pub async fn read(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        self.reader.read_exact(&mut head).await.ok()?;
        let [a, b, c, kind, flags, stream @ ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        self.reader.read_exact(&mut payload).await.ok()?;
        Some(Frame { kind, flags, stream: u32::from_be_bytes(stream), payload })
    }

    /// Makes a gRPC call with one message, and these headers besides.
    pub async fn call(
        &mut self,
        stream: u32,
        path: &str,
        more: &[(&str, &str)],
        message: &impl prost::Message,
    ) {
        let mut head = headers(path);
        more.iter().for_each(|(name, value)| head.extend(header(name, value)));
        let message = message.encode_to_vec();
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        let data = [&[0], &length[..], &message].concat();
        let call = [
            frame(Self::HEADERS, Self::END_HEADERS, stream, &head),
            frame(Self::DATA, Self::END_STREAM, stream, &data),
        ];
        self.write(&call).await.unwrap();
    }

    /// Generates over a stream, up to the headers of the response: its transport has then taken what there was.
    pub async fn generate(&mut self, stream: u32, more: &[(&str, &str)], request: &v1::GenerateRequest) {
        self.call(stream, "/inflight.v1.Inference/Generate", more, request).await;
        loop {
            let Frame { kind, stream: of, .. } = self.read().await.expect("the connection has ended");
            if (kind, of) == (Self::HEADERS, stream) {
                return;
            }
        }
    }

    pub async fn grant(&mut self, stream: u32, bytes: u32) {
        self.write(&[frame(Self::WINDOW_UPDATE, 0, stream, &bytes.to_be_bytes())]).await.unwrap();
    }

    /// Reads the events of a generation whose headers were read, up to its trailers.
    pub async fn events(&mut self, stream: u32) -> Vec<v1::generate_response::Event> {
        let mut data = Vec::new();
        loop {
            let read = self.read().await.expect("the connection has ended");
            match read.kind {
                Self::DATA if read.stream == stream => data.extend(read.payload),
                Self::HEADERS if read.stream == stream => break,
                _ => {}
            }
        }
        let (mut events, mut rest) = (Vec::new(), &data[..]);
        while let [_, a, b, c, d, behind @ ..] = rest {
            let (message, next) = behind.split_at(u32::from_be_bytes([*a, *b, *c, *d]) as usize);
            events.extend(v1::GenerateResponse::decode(message).unwrap().event);
            rest = next;
        }
        events
    }
}
