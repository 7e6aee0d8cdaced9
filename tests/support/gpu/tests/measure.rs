//! The measuring program on a simulated GPU: what the GPU suite relies on and cannot find out without a GPU.

#![allow(clippy::unwrap_used, reason = "test helpers fail like tests")]

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use inflight_fixtures::{BenchmarkShape, TempDir, set_element};
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
    Some((gpu("")?, model(0)))
}

/// Simulated GPU with more settings.
fn gpu(settings: &str) -> Option<SimulatedGpu> {
    if !SimulatedGpu::AVAILABLE {
        let why = "there was no C++ compiler to build the kernels with";
        inflight_fixtures::skipped("the simulated GPU", why);
        return None;
    }
    Some(SimulatedGpu::new(&format!("memory=768,checks=false,{settings}")).unwrap())
}

fn model(seed: u32) -> TempDir {
    let folder = TempDir::new("inflight-mini").unwrap();
    BenchmarkShape::Mini.write(folder.path()).unwrap();
    if seed > 0 {
        set_element(folder.path(), "model.norm.weight", 0, seed as f32).unwrap();
    }
    folder
}

fn job(model: &Path, task: &Value) -> Value {
    json!({
        "model": model, "task": task, "slots": 2, "batch_tokens": 32, "context_tokens": 64, "autotune": false,
        "graphs": false,
    })
}

fn steps() -> Value {
    let cases = json!([{ "sequences": 2, "context": 16, "tokens": 1 }]);
    json!({ "steps": { "cases": cases, "repeats": 2, "computed_blocks": 1 } })
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
    let run = || {
        let (output, mut lines) = measure(Some(&gpu), Some(images.path()), &job(model.path(), &steps()), "");
        (output, lines.pop().unwrap())
    };
    let last = run().1;
    assert_eq!(last["replaced_images"], json!({}), "an empty folder replaces nothing: {last}");
    // That of this GPU, for another GPU, and none at all.
    std::fs::write(&file, embedded.find("norm", Target::Sm90a).unwrap()).unwrap();
    let last = run().1;
    assert_eq!(last["replaced_images"]["norm"].as_str().map(str::len), Some(64), "{last}");
    assert!(last["result"][0]["device_ms"].is_number(), "{last}");
    let foreign = embedded.find("norm", Target::Sm80).unwrap();
    for (bytes, reason) in
        [(foreign, "NO_BINARY_FOR_GPU"), (&foreign[..1000], "truncated"), (&[][..], "empty")]
    {
        std::fs::write(&file, bytes).unwrap();
        let (output, last) = run();
        let error = last["error"].as_str().unwrap();
        assert!(error.contains(file.to_str().unwrap()) && error.contains(reason), "{error}");
        assert_eq!(output.status.code(), Some(1));
    }
    // Another family's kernels.
    std::fs::write(&file, embedded.find("copy", Target::Sm90a).unwrap()).unwrap();
    let last = run().1;
    let error = last["error"].as_str().unwrap();
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

/// Result of a job, or its error.
fn outcome(settings: &str, job: &Value) -> Option<Result<Value, String>> {
    let (output, lines) = measure(Some(&gpu(settings)?), None, job, "");
    let last = lines.last().unwrap();
    Some(match last.get("error") {
        Some(error) => {
            assert_eq!(output.status.code(), Some(1));
            Err(error.as_str().unwrap().to_owned())
        }
        None => Ok(last.clone()),
    })
}

/// Tasks of all kinds that report figures or bits.
fn tasks(folder: &Path) -> Vec<(&'static str, Value)> {
    let sequences = [(0..40).collect::<Vec<u32>>(), (7..30).collect()];
    let replays = json!({ "sequences": 2, "context": 16, "steps": 4 });
    let swap = json!({ "blocks": 2, "transfers": 2, "sequences": 2, "context": 16, "steps": 2 });
    let logits =
        json!({ "sequences": sequences, "prompts": [36, 20], "chunk": 16, "out": folder.join("logits") });
    vec![
        ("steps", steps()["steps"].clone()),
        ("logits", logits),
        ("determinism", json!({ "length": 40, "companions": [1, 2], "chunks": [32, 7] })),
        ("replays", replays),
        ("serve", json!({ "lengths": [[8, 4], [20, 3]] })),
        ("swap", swap),
    ]
}

fn task_job(model: &Path, name: &str, task: &Value) -> Value {
    let mut job = job(model, &json!({ name: task }));
    job["deterministic"] = true.into();
    job["host_bytes"] = (64 << 20).into();
    job
}

#[test]
fn every_task_passes_on_an_honest_gpu() {
    let folder = model(0);
    for (name, task) in tasks(folder.path()) {
        let Some(result) = outcome("", &task_job(folder.path(), name, &task)) else { return };
        let result = result.unwrap_or_else(|error| panic!("{name}: {error}"));
        if name == "determinism" {
            assert_eq!((&result["result"]["different"], &result["result"]["rows"]), (&json!([]), &json!(6)));
        }
        assert_eq!(result["paths"]["overlapped_kernels"], true, "{result}");
    }
}

#[test]
fn no_task_reports_anything_of_a_gpu_that_computes_nothing_or_nan_or_keeps_old_results() {
    let folder = model(0);
    for lie in ["nothing", "nan", "stale"] {
        for (name, task) in tasks(folder.path()) {
            // Old tokens are tokens: the steps of an engine are compared before it is measured, by the canonical check.
            if (name, lie) == ("serve", "stale") {
                continue;
            }
            let Some(result) = outcome(&format!("lie={lie}"), &task_job(folder.path(), name, &task)) else {
                return;
            };
            let error = result.expect_err(&format!("{name} of a GPU that computes {lie}"));
            let expected = [
                "is NaN: the step computed it wrong, or not at all",
                "is not its most likely one",
                "logits are not finite",
                "are infinite or NaN",
                "gave other tokens",
            ];
            assert!(expected.iter().any(|reason| error.contains(reason)), "{name}, {lie}: {error}");
        }
    }
}

#[test]
fn copies_that_are_not_made_are_found() {
    let folder = model(0);
    let (name, task) = tasks(folder.path()).pop().unwrap();
    let Some(result) = outcome("lie=copies", &task_job(folder.path(), name, &task)) else { return };
    let error = result.unwrap_err();
    assert!(
        error.contains("came back from the host with another content") || error.contains("is NaN"),
        "{error}"
    );
}

#[test]
fn a_run_whose_fast_paths_are_off_without_an_option_fails() {
    let folder = model(0);
    let mut job = job(folder.path(), &steps());
    let Some(result) = outcome("overlap=false", &job) else { return };
    let error = result.unwrap_err();
    assert!(error.contains("the fast path overlapped_kernels is off: the driver refuses"), "{error}");
    job["overlap"] = false.into();
    let paths = outcome("overlap=false", &job).unwrap().unwrap()["paths"].clone();
    assert_eq!(paths["overlapped_kernels"], "turned off by an option");
    assert_eq!(paths["cublaslt"], true);
}

#[test]
fn figures_of_another_model_than_that_of_the_deterministic_eager_run_are_refused() {
    let (folder, other) = (model(0), model(9));
    let file = folder.path().join("canonical");
    let check = |bound: Option<f32>| json!({ "file": file, "bound": bound });
    let mut reference = job(folder.path(), &steps());
    for (key, value) in [("deterministic", true), ("overlap", false)] {
        reference[key] = value.into();
    }
    reference["canonical"] = check(None);
    let Some(written) = outcome("", &reference) else { return };
    assert_eq!(written.unwrap()["canonical"]["rows"], 10);
    let mut fast = job(folder.path(), &steps());
    fast["graphs"] = true.into();
    fast["canonical"] = check(Some(2e-2));
    let result = outcome("", &fast).unwrap().unwrap();
    assert!(result["canonical"]["apart"].as_f64().unwrap() < 2e-2, "{result}");
    fast["model"] = other.path().to_str().unwrap().into();
    let error = outcome("", &fast).unwrap().unwrap_err();
    assert!(error.contains("what is measured is not this model"), "{error}");
    // An engine is measured after the same check.
    let mut serve = job(folder.path(), &json!({ "serve": { "lengths": [[8, 2]] } }));
    serve["canonical"] = check(Some(2e-2));
    let error = outcome("lie=nothing", &serve).unwrap().unwrap_err();
    assert!(error.contains("the check before the task: logit"), "{error}");
}

#[test]
fn an_algorithm_that_computes_nothing_is_not_chosen_however_fast_it_is() {
    let folder = model(0);
    let mut job = job(folder.path(), &steps());
    job["autotune"] = true.into();
    let Some(result) = outcome("lie=algorithm", &job) else { return };
    let error = result.unwrap_err();
    assert!(error.contains("a GEMM algorithm computes something else than the built-in kernel"), "{error}");
}
