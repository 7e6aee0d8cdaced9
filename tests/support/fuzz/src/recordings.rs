//! Recordings of schedulers and dispatchers, as `inflight replay` reads them.

use inflight_router_core as router;
use inflight_worker_core as worker;

/// Recording of a worker's scheduler: a replay gives the same twice, and one that was cut off replays up to the cut.
///
/// # Panics
/// If one of these does not hold.
pub fn worker_recording(data: &[u8]) -> bool {
    if !has_small_pools(data) {
        return false;
    }
    let replay = |bytes: &[u8]| {
        let mut events = 0u64;
        let plans = worker::replay(bytes, |_| events += 1);
        (plans, events)
    };
    check(data, replay, |result| result.as_ref().ok().copied())
}

/// Recording of a router's dispatcher: as that of a worker.
///
/// # Panics
/// As for [`worker_recording`].
pub fn router_recording(data: &[u8]) -> bool {
    let replay = |bytes: &[u8]| {
        let mut commands = 0;
        let events = router::replay(bytes, |_, _, after| commands += after.len() as u64);
        (events, commands)
    };
    check(data, replay, |result| result.as_ref().ok().copied())
}

/// Whether the limits in the header of a recording are small: large pools take time, and find nothing more. Behind the groups of layers, the
/// state and the snapshot are the numbers (unsigned LEB128) of device blocks, host blocks and running sequences.
fn has_small_pools(data: &[u8]) -> bool {
    let mut rest = data.get(8..).unwrap_or_default();
    let mut number = || {
        let end = rest.iter().position(|byte| *byte < 0x80).map_or(rest.len(), |at| at + 1);
        let (number, behind) = rest.split_at(end);
        rest = behind;
        number
    };
    // Tokens of a span, and the groups, each with its blocks and perhaps a window.
    number();
    for _ in 0..number().first().copied().unwrap_or(0).min(4) {
        number();
        if number() == [1] {
            number();
        }
    }
    // Blocks of a state and of a snapshot, and positions between two of those.
    for _ in 0..3 {
        number();
    }
    (0..3).all(|_| number().len() <= 2)
}

fn check<R: PartialEq + std::fmt::Debug>(
    data: &[u8],
    replay: impl Fn(&[u8]) -> (R, u64),
    count: impl Fn(&R) -> Option<u64>,
) -> bool {
    let whole = replay(data);
    assert_eq!(whole, replay(data), "a second replay differs");
    let Some(records) = count(&whole.0) else { return false };
    // The cut depends on the content, so that mutations move it.
    let cut = data.iter().fold(0usize, |hash, byte| hash.wrapping_mul(31).wrapping_add((*byte).into()));
    let cut = cut % (data.len() + 1);
    let (part, events) = replay(&data[..cut]);
    if let Some(part) = count(&part) {
        assert!(part <= records && events <= whole.1, "{part} records of {records} at {cut}");
    }
    true
}
