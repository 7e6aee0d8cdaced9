//! Helper of the tests: its work does what hostile input makes parsers do.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use inflight_sandbox::StateError;

fn main() -> ExitCode {
    inflight_sandbox::serve(prepare, work)
}

/// The state is what requests get back, behind their own text.
fn prepare(state: &[u8]) -> Result<Vec<u8>, StateError> {
    match state {
        b"broken" => Err(StateError::Unusable("the state is broken".to_owned())),
        // A state that the first helper cannot prepare: the one that finds the file and removes it.
        [b'?', path @ ..] if std::fs::remove_file(OsStr::from_bytes(path)).is_ok() => {
            Err(StateError::Unavailable("no thread can be started".to_owned()))
        }
        b"orphan" => {
            // SAFETY: the child only waits for a signal.
            if unsafe { libc::fork() } == 0 {
                loop {
                    // SAFETY: takes no arguments.
                    unsafe { libc::pause() };
                }
            }
            Ok(Vec::new())
        }
        _ => Ok(state.to_vec()),
    }
}

#[expect(clippy::ptr_arg, reason = "the type of a state")]
fn work(state: &Vec<u8>, request: &[u8]) -> Vec<u8> {
    match request {
        b"spin" => loop {
            std::hint::spin_loop();
        },
        b"abort" => std::process::abort(),
        b"exit" => std::process::exit(0),
        b"panic" => panic!("as requested"),
        b"allocate" => {
            let mut held = Vec::new();
            loop {
                held.push(vec![1u8; 1 << 20]);
            }
        }
        b"recurse" => vec![descend(0)],
        b"forge" => {
            // An answer to another request, if the output of the helper could be reached.
            let _ = std::fs::write("/proc/self/fd/1", [0; 64]);
            println!("forged");
            b"nothing forged".to_vec()
        }
        b"system" => {
            let opened = std::fs::File::open("/proc/self/status").is_ok();
            let connected = std::net::UdpSocket::bind("127.0.0.1:0").is_ok();
            let started = std::process::Command::new("/bin/true").status().is_ok();
            let threaded = std::thread::Builder::new().spawn(|| ()).is_ok();
            format!("{opened} {connected} {started} {threaded}").into_bytes()
        }
        b"work" => {
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(100) {}
            state.clone()
        }
        _ => [request, state].concat(),
    }
}

#[expect(unconditional_recursion, reason = "it overflows the stack")]
fn descend(depth: u64) -> u8 {
    let frame = std::hint::black_box([depth; 64]);
    descend(frame[0] + 1).wrapping_add(frame[63] as u8)
}
