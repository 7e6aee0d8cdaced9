//! Helper processes under hostile work, kills and stops: each request gets its own answer or a reason, and the owner lives on.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking, in its helpers too")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use inflight_sandbox::{Helper, HelperError, HelperOptions, Limits, Program, StateError};
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};

// By the clock, a machine that runs much else beside the tests takes many times the processor time.
const LIMITS: Limits =
    Limits { memory_bytes: 64 << 20, cpu: Duration::from_secs(1), wall: Duration::from_secs(120) };

fn helper(slots: usize, state: impl Into<Vec<u8>>) -> Helper {
    let state = state.into();
    let program = Program {
        path: env!("CARGO_BIN_EXE_hostile-helper").into(),
        name: "helper".into(),
        arguments: Vec::new(),
    };
    let options = HelperOptions { purpose: "tests", program, limits: LIMITS, slots };
    Helper::new(options, move || Ok(state.clone()))
}

async fn answer(helper: &Helper, request: &str) -> Result<String, HelperError> {
    helper.run(request.as_bytes()).await.map(|answer| String::from_utf8(answer.bytes).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_work_ends_its_own_process_and_nothing_else() {
    let helper = helper(4, " and state");
    assert_eq!(answer(&helper, "request").await.as_deref(), Ok("request and state"));
    let process = helper.process();
    for (request, expected) in [
        ("spin", HelperError::CpuTime(LIMITS.cpu)),
        ("allocate", HelperError::Memory(LIMITS.memory_bytes)),
        ("recurse", HelperError::Memory(LIMITS.memory_bytes)),
        ("abort", HelperError::Memory(LIMITS.memory_bytes)),
        ("panic", HelperError::Panic("as requested".to_owned())),
    ] {
        let begun = Instant::now();
        let (hostile, usual) = tokio::join!(answer(&helper, request), answer(&helper, "usual"));
        assert_eq!(hostile, Err(expected), "{request}");
        assert_eq!(usual.as_deref(), Ok("usual and state"), "beside {request}");
        println!("{request}: {:?}", begun.elapsed());
    }
    assert_eq!(answer(&helper, "forge").await.as_deref(), Ok("nothing forged"));
    // An exit without an answer says nothing about the request.
    assert!(matches!(answer(&helper, "exit").await, Err(HelperError::Unavailable(_))));
    assert_eq!(answer(&helper, "last").await.as_deref(), Ok("last and state"));
    assert_eq!(helper.process(), process, "the helper itself was never replaced");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_work_can_neither_open_nor_connect_nor_start_anything() {
    let helper = helper(1, "");
    assert_eq!(answer(&helper, "system").await.as_deref(), Ok("false false false false"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_processor_time_of_an_answer_is_that_of_its_work() {
    let helper = helper(1, "");
    assert_eq!(answer(&helper, "first").await.as_deref(), Ok("first"));
    let cpu = helper.run(b"work").await.unwrap().cpu;
    assert!((Duration::from_millis(20)..Duration::from_millis(500)).contains(&cpu), "{cpu:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_request_ends_its_process_and_frees_its_slot() {
    let helper = Arc::new(helper(1, ""));
    assert_eq!(answer(&helper, "first").await.as_deref(), Ok("first"));
    for _ in 0..20 {
        let spinning = tokio::spawn({
            let helper = Arc::clone(&helper);
            async move { answer(&helper, "spin").await }
        });
        tokio::task::yield_now().await;
        spinning.abort();
        let _ = spinning.await;
    }
    let begun = Instant::now();
    assert_eq!(answer(&helper, "next").await.as_deref(), Ok("next"));
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    let process = helper.process().unwrap();
    let left = || {
        let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
        let children = |thread: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(thread.unwrap().path().join("children")).unwrap()
        };
        threads.map(children).collect::<String>()
    };
    while !left().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60), "processes {} are left", left());
        tokio::task::yield_now().await;
    }
    // They were ended long before their own limit, a second of processor time each. The fields count from the one behind the name.
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    let ticks: u64 = fields[13..15].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum();
    let used = Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second());
    assert!(used < Duration::from_secs(10), "the processes of 20 dropped requests used {used:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_or_stopped_helper_is_replaced_and_no_request_is_lost() {
    let helper = Arc::new(helper(4, "!"));
    assert_eq!(answer(&helper, "first").await.as_deref(), Ok("first!"));
    let mut killed = 0;
    for round in 0..6 {
        let requests = (0..4).map(|number| {
            let helper = Arc::clone(&helper);
            tokio::spawn(async move { (number, answer(&helper, &format!("{round} {number}")).await) })
        });
        let requests: Vec<_> = requests.collect();
        if let Some(process) = helper.process() {
            let process = Pid::from_raw(process.cast_signed()).unwrap();
            // A stopped helper is found by its silence, after the time of a request.
            let signal = if round == 3 { Signal::STOP } else { Signal::KILL };
            kill_process(process, signal).unwrap();
            killed += 1;
        }
        for request in requests {
            let (number, answer) = request.await.unwrap();
            assert_eq!(answer.as_deref(), Ok(&*format!("{round} {number}!")));
        }
    }
    assert!(killed > 3);
    let process = helper.process().unwrap();
    drop(helper);
    let gone = Instant::now();
    while std::fs::exists(format!("/proc/{process}")).unwrap() {
        assert!(gone.elapsed() < Duration::from_secs(60), "the helper {process} outlives its owner");
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn states_that_cannot_be_prepared_and_programs_that_cannot_start_are_errors() {
    let broken = helper(1, "broken");
    for _ in 0..2 {
        assert_eq!(answer(&broken, "a").await, Err(HelperError::State("the state is broken".to_owned())));
    }
    let absent = Helper::new(absent_program(), || Ok(Vec::new()));
    let error = answer(&absent, "a").await.unwrap_err();
    assert!(error.to_string().contains("/nonexistent/program cannot be started"), "{error}");
    let refused = Helper::new(absent_program(), || Err(StateError::Unusable("no vocabulary".to_owned())));
    assert_eq!(answer(&refused, "a").await, Err(HelperError::State("no vocabulary".to_owned())));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_helper_is_replaced_although_a_process_that_it_leaves_keeps_its_pipes_open() {
    let helper = helper(1, "orphan");
    assert_eq!(answer(&helper, "first").await.as_deref(), Ok("first"));
    let process = helper.process().unwrap();
    kill_process(Pid::from_raw(process.cast_signed()).unwrap(), Signal::KILL).unwrap();
    let next = tokio::time::timeout(Duration::from_secs(60), answer(&helper, "next")).await;
    assert_eq!(next.unwrap().as_deref(), Ok("next"));
    assert_ne!(helper.process(), Some(process));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_state_that_a_helper_cannot_prepare_for_now_is_prepared_by_the_next() {
    let file =
        std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("first-{}", std::process::id()));
    std::fs::write(&file, "").unwrap();
    let state = format!("?{}", file.display());
    let helper = helper(1, state.clone());
    assert_eq!(answer(&helper, "").await, Ok(state));
    assert!(!file.exists(), "the first helper has failed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_helper_whose_memory_another_process_limits_is_replaced_and_fails_no_request() {
    let helper = helper(1, "!");
    assert_eq!(answer(&helper, "first").await.as_deref(), Ok("first!"));
    let process = helper.process().unwrap();
    let little = Rlimit { current: Some(16 << 20), maximum: Some(16 << 20) };
    prlimit(Pid::from_raw(process.cast_signed()), Resource::As, little).unwrap();
    assert_eq!(answer(&helper, "next").await.as_deref(), Ok("next!"));
    assert_ne!(helper.process(), Some(process));
}

fn absent_program() -> HelperOptions {
    let program =
        Program { path: "/nonexistent/program".into(), name: "helper".into(), arguments: Vec::new() };
    HelperOptions { purpose: "tests", program, limits: LIMITS, slots: 1 }
}
