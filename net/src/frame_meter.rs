//! Bound of the HTTP/2 frames that a peer may send without asking for anything.

use tokio::time::Instant;

/// First bytes of an HTTP/2 connection (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Frame types (RFC 9113, section 6) that carry a call. All others are answered or recorded, and ask for nothing.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;

/// Frames that a new connection may send, and most that it may have saved up.
const ALLOWANCE: f64 = 1000.0;
const ALLOWANCE_MAX: f64 = 10_000.0;
/// Frames allowed for each second, call, and frame of a response: a client that grants window for each frame of a response, once for its
/// stream and once for the connection, sends two.
const PER_SECOND: f64 = 100.0;
const PER_CALL: f64 = 2.0;
const PER_RESPONSE_FRAME: f64 = 4.0;
/// Frames allowed for a response frame with so little data that no answer has it: a client grants windows of single bytes.
const PER_SCRAP: f64 = 0.25;
const SCRAP_BYTES: usize = 8;

/// Counts the control frames (PING, SETTINGS, WINDOW_UPDATE, PRIORITY, RST_STREAM and unknown ones) of an HTTP/2 peer against an
/// allowance that grows with time, calls and responses. Each costs the peer nothing and this side a wake-up and often an answer.
#[derive(Debug)]
pub(crate) struct FrameMeter {
    received: Received,
    sent: FrameScanner,
    allowance: f64,
    refilled: Instant,
}

/// What is known of the peer's protocol.
#[derive(Debug)]
enum Received {
    /// As many bytes of the preface have come.
    Preface(usize),
    Http2(FrameScanner),
    /// HTTP/1.1, which has no such frames.
    Other,
}

impl FrameMeter {
    /// Creates the meter of a connection.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            received: Received::Preface(0),
            sent: FrameScanner::default(),
            allowance: ALLOWANCE,
            refilled: now,
        }
    }

    /// Counts bytes from the peer; returns false if it has sent more control frames than allowed.
    pub(crate) fn received(&mut self, mut bytes: &[u8], now: Instant) -> bool {
        if let Received::Preface(known) = self.received {
            let expected = &PREFACE[known..];
            let length = expected.len().min(bytes.len());
            let (start, rest) = bytes.split_at(length);
            self.received = match start == &expected[..length] {
                true if length == expected.len() => Received::Http2(FrameScanner::default()),
                true => Received::Preface(known + length),
                false => Received::Other,
            };
            bytes = rest;
        }
        let Received::Http2(scanner) = &mut self.received else { return true };
        let (mut calls, mut control) = (0u32, 0u32);
        scanner.scan(bytes, |kind, _| match kind {
            HEADERS => calls += 1,
            DATA | CONTINUATION => {}
            _ => control += 1,
        });
        if calls == 0 && control == 0 {
            return true;
        }
        let seconds = now.saturating_duration_since(self.refilled).as_secs_f64();
        self.refilled = now;
        self.add(seconds * PER_SECOND + f64::from(calls) * PER_CALL);
        self.allowance -= f64::from(control);
        self.allowance >= 0.0
    }

    /// Counts bytes to the peer.
    pub(crate) fn sent(&mut self, bytes: &[u8]) {
        // A server may write before the preface has come.
        if !matches!(self.received, Received::Other) {
            let mut allowed = 0.0;
            self.sent.scan(bytes, |kind, payload| {
                allowed += match kind {
                    DATA if payload < SCRAP_BYTES => PER_SCRAP,
                    DATA | HEADERS => PER_RESPONSE_FRAME,
                    _ => 0.0,
                };
            });
            self.add(allowed);
        }
    }

    fn add(&mut self, frames: f64) {
        self.allowance = (self.allowance + frames).min(ALLOWANCE_MAX);
    }
}

/// Reads the frame headers of one direction, in pieces of any size.
#[derive(Debug, Default)]
struct FrameScanner {
    /// Bytes of the next header that have come.
    header: [u8; FrameScanner::HEADER_BYTES],
    filled: usize,
    /// Bytes of the frame's payload that are to come.
    payload: usize,
}

impl FrameScanner {
    const HEADER_BYTES: usize = 9;

    /// Calls `each` with the type and the payload's bytes of each frame whose header is complete.
    fn scan(&mut self, mut bytes: &[u8], mut each: impl FnMut(u8, usize)) {
        while !bytes.is_empty() {
            let skipped = self.payload.min(bytes.len());
            self.payload -= skipped;
            bytes = &bytes[skipped..];
            let taken = bytes.len().min(Self::HEADER_BYTES - self.filled);
            self.header[self.filled..self.filled + taken].copy_from_slice(&bytes[..taken]);
            self.filled += taken;
            bytes = &bytes[taken..];
            if self.filled == Self::HEADER_BYTES {
                let [a, b, c, kind, ..] = self.header;
                self.payload = u32::from_be_bytes([0, a, b, c]) as usize;
                self.filled = 0;
                each(kind, self.payload);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const PING: u8 = 6;
    const WINDOW_UPDATE: u8 = 8;

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let [_, length @ ..] = u32::try_from(payload).unwrap().to_be_bytes();
        [&length[..], &[kind, 0, 0, 0, 0, 1], &vec![7; payload]].concat()
    }

    fn meter() -> (FrameMeter, Instant) {
        let now = Instant::now();
        let mut meter = FrameMeter::new(now);
        assert!(meter.received(PREFACE, now));
        (meter, now)
    }

    /// Number of frames accepted of `most` that come `every` so often.
    fn accepted(kind: u8, most: usize, every: Duration) -> usize {
        let (mut meter, now) = meter();
        (0..most).take_while(|at| meter.received(&frame(kind, 8), now + every * *at as u32)).count()
    }

    #[test]
    fn control_frames_are_bounded_by_time_calls_and_responses() {
        for kind in [PING, 4, WINDOW_UPDATE, 2, 3, 0x77] {
            assert_eq!(accepted(kind, 5000, Duration::ZERO), 1000, "type {kind}");
        }
        assert_eq!(accepted(PING, 5000, Duration::from_millis(10)), 5000, "a hundred a second");
        assert_eq!(accepted(DATA, 5000, Duration::ZERO), 5000);
        // A hundred thousand tokens, each with two grants of window.
        let (mut meter, now) = meter();
        let grants = [frame(WINDOW_UPDATE, 4), frame(WINDOW_UPDATE, 4)].concat();
        let token = frame(DATA, 40);
        assert!((0..100_000).all(|_| {
            meter.sent(&token);
            meter.received(&grants, now)
        }));
        // What is saved up is bounded. The last grants took two.
        let pings = (0..50_000).take_while(|_| meter.received(&frame(PING, 8), now)).count();
        assert_eq!(pings, 9_998);
    }

    #[test]
    fn answers_to_control_frames_allow_no_more_of_them() {
        let (mut meter, now) = meter();
        let answered = (0..5000).take_while(|_| {
            meter.sent(&frame(PING, 8));
            meter.received(&frame(PING, 8), now)
        });
        assert_eq!(answered.count(), 1000);
    }

    #[test]
    fn windows_of_single_bytes_allow_no_flood() {
        let (mut meter, now) = meter();
        let granted = (0..50_000).take_while(|_| {
            meter.sent(&frame(DATA, 1));
            meter.received(&frame(WINDOW_UPDATE, 4), now)
        });
        assert!(granted.count() < 2_000);
    }

    #[test]
    fn other_protocols_are_not_counted() {
        let mut meter = FrameMeter::new(Instant::now());
        let request = b"GET / HTTP/1.1\r\n\r\n".repeat(10_000);
        assert!(request.chunks(7).all(|piece| meter.received(piece, Instant::now())));
    }

    proptest! {
        #[test]
        fn pieces_of_any_size_have_the_same_frames(
            frames in prop::collection::vec((any::<u8>(), 0..40usize), 0..50),
            cuts in prop::collection::vec(1..30usize, 1..20)
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(|(kind, payload)| frame(*kind, *payload)).collect();
            let mut scanner = FrameScanner::default();
            let (mut found, mut rest) = (Vec::new(), &bytes[..]);
            for cut in cuts.iter().cycle() {
                let (piece, after) = rest.split_at(rest.len().min(*cut));
                scanner.scan(piece, |kind, _| found.push(kind));
                rest = after;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(found, frames.iter().map(|(kind, _)| *kind).collect::<Vec<_>>());
            prop_assert_eq!((scanner.filled, scanner.payload), (0, 0));
        }
    }
}
