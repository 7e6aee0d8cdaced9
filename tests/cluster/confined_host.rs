//! Machines on which the processes that compile grammars cannot be started, or on which `/proc` is hidden.

use std::io;

use anyhow::{Result, ensure};
use inflight_fixtures::skipped;
use inflight_harness::{Confine, RoleProcess, eventually, scrape};
use inflight_proto::v1::constraint::Grammar;
use inflight_proto::v1::{
    Constraint, GenerateRequest, GenerateUnaryResponse, ListModelsRequest, SamplingParams, StopConditions,
    generate_request::Input,
};
use tonic::{Code, Status};

use crate::program;

/// Lets every later attempt of this process to start another one fail, as at a limit of processes; threads are allowed.
fn forbid_processes() -> io::Result<()> {
    const fn statement(code: u32, k: u32) -> libc::sock_filter {
        libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
    }
    const fn jump(test: u32, k: u32, jt: u8, jf: u8) -> libc::sock_filter {
        libc::sock_filter { code: (libc::BPF_JMP | test | libc::BPF_K) as u16, jt, jf, k }
    }
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    // The system call, and the lower half of its first argument, in `seccomp_data` of little-endian machines.
    let (call, flags) = (0, 16);
    let mut filter = [
        statement(LOAD, call),
        // glibc then uses `clone`, whose flags a filter can see.
        jump(libc::BPF_JEQ, libc::SYS_clone3 as u32, 3, 0),
        jump(libc::BPF_JEQ, libc::SYS_clone as u32, 0, 4),
        statement(LOAD, flags),
        jump(libc::BPF_JSET, libc::CLONE_THREAD as u32, 2, 1),
        statement(RETURN, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        statement(RETURN, libc::SECCOMP_RET_ERRNO | libc::EAGAIN as u32),
        statement(RETURN, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: no pointers are passed.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `program` and its filter are valid during the call.
    match unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Puts an empty file system over `/proc`, for this process and its children alone.
fn hide_proc() -> io::Result<()> {
    // SAFETY: no pointers are passed.
    let unshared = unsafe { libc::unshare(libc::CLONE_NEWNS) == 0 }
        // SAFETY: as above.
        || unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) == 0 };
    let (none, root, proc, kind) = (c"none", c"/", c"/proc", c"tmpfs");
    let (private, nothing) = (libc::MS_REC | libc::MS_PRIVATE, std::ptr::null());
    // SAFETY: all strings end with a zero and live as long as the program.
    let mounted = unsafe {
        unshared
            && libc::mount(none.as_ptr(), root.as_ptr(), std::ptr::null(), private, nothing) == 0
            && libc::mount(none.as_ptr(), proc.as_ptr(), kind.as_ptr(), 0, nothing) == 0
    };
    if mounted { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Router and worker on such a machine; `None` if this one allows no such change.
async fn start(confine: Confine, what: &str) -> Result<Option<(RoleProcess, RoleProcess)>> {
    let small = ["--threads=1", "--kv-cache-bytes=16MiB", "--host-cache-bytes=0"].map(str::to_owned);
    let worker = match RoleProcess::start_confined(program().to_owned(), "worker", &small, confine).await {
        Err(error) if format!("{error:#}").contains("cannot start") => {
            skipped(what, &format!("{error:#}"));
            return Ok(None);
        }
        started => started?,
    };
    let flags = [format!("--workers={}", worker.address)];
    let router = RoleProcess::start_confined(program().to_owned(), "router", &flags, confine).await?;
    eventually("the worker is connected", || async {
        let models = router.client()?.list_models(ListModelsRequest {}).await?.into_inner().models;
        ensure!(!models.is_empty());
        Ok(())
    })
    .await?;
    Ok(Some((worker, router)))
}

async fn generate(router: &RoleProcess, schema: Option<&str>) -> Result<GenerateUnaryResponse, Status> {
    let grammar = schema.map(|schema| Constraint {
        grammar: Some(Grammar::JsonSchema(schema.to_owned())),
        ..Constraint::default()
    });
    let request = GenerateRequest {
        input: Some(Input::Text("Once upon a time".to_owned())),
        sampling: Some(SamplingParams { constraint: grammar, ..SamplingParams::default() }),
        stop: Some(StopConditions { max_tokens: Some(16), ..StopConditions::default() }),
        ..GenerateRequest::default()
    };
    let mut client = router.client().map_err(|error| Status::internal(error.to_string()))?;
    Ok(client.generate_unary(request).await?.into_inner())
}

/// Waits until the log of each process says why grammars are refused.
async fn says_at_start(processes: &[&RoleProcess], what: &str, why: &str) -> Result<()> {
    for process in processes {
        eventually("the log says it", || async {
            let log = process.log();
            let said = log.lines().find(|line| line.contains("so grammars are refused"));
            ensure!(said.is_some_and(|line| line.contains(what) && line.contains(why)), "{log}");
            Ok(())
        })
        .await?;
    }
    Ok(())
}

const SCHEMA: &str = r#"{"type":"integer","minimum":1,"maximum":9}"#;

#[tokio::test(flavor = "multi_thread")]
async fn where_no_process_can_be_started_only_structured_output_is_refused_with_the_reason() -> Result<()> {
    let Some((worker, router)) = start(forbid_processes, "forbidden processes").await? else { return Ok(()) };
    says_at_start(&[&worker, &router], "cannot be started", "Resource temporarily unavailable").await?;
    let refused = generate(&router, Some(SCHEMA)).await.err();
    ensure!(
        refused.as_ref().is_some_and(|status| {
            status.code() == Code::ResourceExhausted && status.message().contains("cannot be started")
        }),
        "{refused:?}"
    );
    ensure!(generate(&router, None).await.is_ok());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn where_proc_is_hidden_only_structured_output_is_refused_with_the_reason() -> Result<()> {
    let Some((worker, router)) = start(hide_proc, "hidden /proc").await? else { return Ok(()) };
    says_at_start(&[&worker, &router], "could not be limited", "/proc/self/statm").await?;
    let refused = generate(&router, Some(SCHEMA)).await.err();
    ensure!(
        refused.as_ref().is_some_and(|status| {
            status.code() == Code::ResourceExhausted
                && status.message().contains("structured output is not available on this machine")
                && status.message().contains("/proc/self/statm")
        }),
        "{refused:?}"
    );
    ensure!(generate(&router, None).await.is_ok());
    ensure!(scrape(worker.metrics).await?.total("inflight_worker_promised_bytes")? > 0.0);
    Ok(())
}
