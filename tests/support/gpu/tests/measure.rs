//! The measuring program on a simulated GPU: what the GPU suite relies on and cannot find out without a GPU.

#![allow(clippy::unwrap_used, reason = "test helpers fail like tests")]

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use inflight_fixtures::{BenchmarkShape, TempDir};
use inflight_harness::SimulatedGpu;
use inflight_kernels::cuda::{IMAGES_VARIABLE, Images, Target};
use serde_json::{Value, json};

/// Runs a job with `input` on standard input; returns its lines of JSON, the last of which is the result.
fn measure(
    gpu: Option<&SimulatedGpu>,
    images: Option<&Path>,
    job: &Value,
    input: &str,
) -> (Output, Vec<Value>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_measure"));
    command.arg(job.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.envs(gpu.into_iter().flat_map(SimulatedGpu::environment));
    command.envs(images.map(|folder| (IMAGES_VARIABLE, folder)));
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    (output, lines)
}

/// Simulated GPU of compute capability 9.0 and a small model; `None` where kernels can't be built.
fn simulation() -> Option<(SimulatedGpu, TempDir)> {
    if !SimulatedGpu::AVAILABLE {
        let why = "there was no C++ compiler to build the kernels with";
        inflight_fixtures::skipped("the simulated GPU", why);
        return None;
    }
    let folder = TempDir::new("inflight-mini").unwrap();
    BenchmarkShape::Mini.write(folder.path()).unwrap();
    Some((SimulatedGpu::new("memory=768,checks=false").unwrap(), folder))
}

fn job(model: &Path, task: &Value) -> Value {
    json!({
        "model": model, "task": task, "slots": 2, "batch_tokens": 32, "context_tokens": 64, "autotune": false,
        "graphs": false,
    })
}

fn steps() -> Value {
    json!({ "steps": { "cases": [{ "sequences": 2, "context": 16, "tokens": 1 }], "repeats": 2 } })
}

#[test]
fn a_job_for_a_model_that_is_nowhere_fails_with_a_line_of_json() {
    let (output, lines) = measure(None, None, &job(Path::new("/nowhere"), &steps()), "");
    assert_eq!(output.status.code(), Some(1));
    assert!(lines[0]["error"].as_str().unwrap().contains("/nowhere"), "{lines:?}");
}

#[test]
fn files_replace_kernels() {
    let Some((gpu, model)) = simulation() else { return };
    let images = TempDir::new("inflight-kernel-images").unwrap();
    let file = images.path().join("norm.cubin");
    let embedded = Images::unpack().unwrap();
    let run = || measure(Some(&gpu), Some(images.path()), &job(model.path(), &steps()), "");
    let (_, lines) = run();
    assert_eq!(lines[0]["replaced_images"], json!({}), "an empty folder replaces nothing: {lines:?}");
    // That of this GPU, for another GPU, and none at all.
    std::fs::write(&file, embedded.find("norm", Target::Sm90a).unwrap()).unwrap();
    let (_, lines) = run();
    assert_eq!(lines[0]["replaced_images"]["norm"].as_str().map(str::len), Some(64), "{lines:?}");
    assert!(lines[0]["result"][0]["device_ms"].is_number(), "{lines:?}");
    let foreign = embedded.find("norm", Target::Sm80).unwrap();
    for (bytes, reason) in
        [(foreign, "NO_BINARY_FOR_GPU"), (&foreign[..1000], "truncated"), (&[][..], "empty")]
    {
        std::fs::write(&file, bytes).unwrap();
        let (output, lines) = run();
        let error = lines[0]["error"].as_str().unwrap();
        assert!(error.contains(file.to_str().unwrap()) && error.contains(reason), "{error}");
        assert_eq!(output.status.code(), Some(1));
    }
    // Another family's kernels.
    std::fs::write(&file, embedded.find("copy", Target::Sm90a).unwrap()).unwrap();
    let (_, lines) = run();
    let error = lines[0]["error"].as_str().unwrap();
    assert!(error.contains("looking up norm_") && error.contains(file.to_str().unwrap()), "{error}");
}

#[test]
fn rounds_are_answered_one_by_one() {
    let Some((gpu, model)) = simulation() else { return };
    let rounds = [
        json!({ "lengths": [[20, 3], [5, 2]] }),
        json!({ "lengths": [[20, 4]], "sampling": { "temperature": 0.7, "top_k": 20, "top_p": 0.95 } }),
    ];
    let input = rounds.iter().map(|round| format!("{round}\n")).collect::<String>();
    let (output, lines) = measure(Some(&gpu), None, &job(model.path(), &json!({ "rounds": {} })), &input);
    assert!(output.status.success(), "{lines:?}");
    assert_eq!(lines[0], json!({ "ready": true }));
    let counts = |key: &str| [&lines[1], &lines[2]].map(|line| line[key].as_u64());
    assert_eq!(counts("output_tokens"), [Some(5), Some(4)]);
    assert_eq!(counts("requests"), [Some(2), Some(1)]);
    assert_eq!(lines[3]["result"], json!({ "rounds": 2 }));
}
