//! Clients that speak plain text at a port with TLS, and TLS at a port without.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// First bytes of a TLS connection: the record type of a handshake, and the major version (RFC 8446, section 5.1).
const TLS_HANDSHAKE: [u8; 2] = [22, 3];
/// First bytes of HTTP/2, with which no method of HTTP/1 begins.
const HTTP2: &[u8] = b"PRI";

/// What the client is told.
const SENTENCE: &str = "this port speaks TLS; connect with https:// or a TLS channel";
/// Frame types and the error code of HTTP/2 (RFC 9113, sections 6.5, 6.8 and 7).
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const INADEQUATE_SECURITY: u32 = 12;

/// Most that is read of a refused client's request, in bytes and in time: a socket that is closed with unread data resets the
/// connection, and the client may lose the answer.
const DRAINED_BYTES_MAX: usize = 64 << 10;
const DRAIN_MAX: Duration = Duration::from_secs(1);

/// Whether the first bytes of a connection are those of TLS.
pub(crate) fn is_tls(first: &[u8]) -> bool {
    first.starts_with(&TLS_HANDSHAKE)
}

/// Waits for the first byte of a connection; returns whether it is that of a request of HTTP. The bytes stay unread.
pub(crate) async fn is_http(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    let read = stream.peek(&mut first).await?;
    Ok(read == 1 && first[0].is_ascii_uppercase())
}

/// Answers a request of HTTP/1 or HTTP/2 by a sentence, and ends the connection.
pub(crate) async fn refuse(mut stream: TcpStream) -> io::Result<()> {
    let mut request = [0; 1024];
    let mut filled = 0;
    while filled < HTTP2.len() {
        match stream.read(&mut request[filled..]).await? {
            0 => return Ok(()),
            read => filled += read,
        }
    }
    stream.write_all(&answer(request.starts_with(HTTP2))).await?;
    stream.shutdown().await?;
    let drain = async {
        let mut drained = 0;
        while drained < DRAINED_BYTES_MAX {
            match stream.read(&mut request).await {
                Ok(read) if read > 0 => drained += read,
                _ => break,
            }
        }
    };
    // A client that sends slowly has had the time to read the answer.
    let _ = timeout(DRAIN_MAX, drain).await;
    Ok(())
}

/// Returns the answer to a client of HTTP/2 or HTTP/1.
fn answer(http2: bool) -> Vec<u8> {
    if !http2 {
        let head = "HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close";
        let length = SENTENCE.len() + 1;
        return format!("{head}\r\ncontent-length: {length}\r\n\r\n{SENTENCE}\n").into_bytes();
    }
    let frame = |kind: u8, payload: &[u8]| -> Vec<u8> {
        // The sentence is short.
        let [_, length @ ..] = (payload.len() as u32).to_be_bytes();
        [&length[..], &[kind, 0, 0, 0, 0, 0], payload].concat()
    };
    let last_stream = 0_u32.to_be_bytes();
    let away = [&last_stream[..], &INADEQUATE_SECURITY.to_be_bytes(), SENTENCE.as_bytes()].concat();
    [frame(SETTINGS, &[]), frame(GOAWAY, &away)].concat()
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_client_in_plain_text_gets_a_sentence_in_its_protocol() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        for (request, http, expected) in [
            ("GET / HTTP/1.1\r\nhost: a\r\n\r\n".to_owned(), true, "HTTP/1.1 400 Bad Request\r\n"),
            ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(), true, "\0\0\0\u{4}\0\0\0\0\0"),
            // More than is read at once.
            (format!("POST / HTTP/1.1\r\n\r\n{}", "x".repeat(50_000)), true, "HTTP/1.1 400 Bad Request\r\n"),
            ("\u{16}\u{3}\u{1}".to_owned(), false, ""),
            ("get".to_owned(), false, ""),
        ] {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(request.as_bytes()).await.unwrap();
            let (server, _) = listener.accept().await.unwrap();
            assert_eq!(is_http(&server).await.unwrap(), http, "{request:.40?}");
            assert_eq!(is_tls(request.as_bytes()), request.starts_with('\u{16}'));
            if !http {
                continue;
            }
            let refusing = tokio::spawn(refuse(server));
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).await.unwrap();
            let answer = String::from_utf8_lossy(&answer);
            assert!(answer.starts_with(expected) && answer.contains(SENTENCE), "{answer:?}");
            drop(client);
            refusing.await.unwrap().unwrap();
        }
    }

    #[tokio::test]
    async fn a_client_that_leaves_at_once_is_no_error() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        client.write_all(b"G").await.unwrap();
        drop(client);
        assert!(is_http(&server).await.unwrap());
        refuse(server).await.unwrap();
    }
}
