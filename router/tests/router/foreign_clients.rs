//! Third-party clients against a scripted worker, which generates what no model would on demand: characters
//! and stop strings split over tokens, and failures after some output.

use std::path::Path;
use std::time::Duration;

use inflight_proto::v1;
use inflight_router::HttpOptions;
use serde_json::{Value, json};

use crate::cluster::tokens;
use crate::http_client::{HttpCluster, with_http};
use inflight_scripted::{Command, ScriptedSession};

/// Output of each choice after its index.
const OUTPUT: &str = " 👩‍🚀🙂 ends STOP not here";
/// Output before the stop string `STOP`.
const STOPPED: &str = "0 👩‍🚀🙂 ends ";
/// Output before a failure.
const BROKEN: &str = "0 🙂";
/// Clients in Python and for Node.
const SCRIPTS: [&str; 2] = ["edge_cases.py", "edge_cases.cjs"];
/// Time of one iteration of the scripted worker: the router sends what has arrived before it.
const ITERATION: Duration = Duration::from_millis(2);

/// Returns the tokens of a text, split as finely as the vocabulary allows.
fn fine_tokens(text: &str) -> Vec<u32> {
    text.chars().flat_map(|character| tokens(&character.to_string())).collect()
}

/// Serves the requests of a session: [`OUTPUT`], a token of each choice per iteration; or [`BROKEN`] and a
/// failure, if `FAIL` is in the prompt.
async fn serve(mut session: ScriptedSession) {
    let fail = tokens("FAIL");
    loop {
        let Command::Submit(submit) = session.command().await else { continue };
        let choices = submit.sampling.as_ref().and_then(|sampling| sampling.n).unwrap_or(1).max(1);
        let fails = submit.prompt_token_ids.windows(fail.len()).any(|part| part == fail);
        let outputs: Vec<Vec<u32>> = (0..choices)
            .map(|choice| if fails { fine_tokens(BROKEN) } else { fine_tokens(&format!("{choice}{OUTPUT}")) })
            .collect();
        for at in 0..outputs[0].len() {
            for (choice, output) in (0..).zip(&outputs) {
                session.tokens(&submit, choice, &output[at..=at]);
            }
            tokio::time::sleep(ITERATION).await;
        }
        for choice in 0..choices {
            if fails {
                session.fail(&submit, choice, tonic::Code::Internal);
            } else {
                session.finish(&submit, choice, &[], v1::FinishReason::Length);
            }
        }
    }
}

/// Runs a client and returns what it printed; `None` if this machine lacks it.
pub async fn run(
    variable: &str,
    needed: &str,
    python_script: &str,
    node_script: &str,
    arguments: &[&str],
) -> Option<Value> {
    let Ok(installed) = std::env::var(variable) else {
        inflight_fixtures::skipped("third-party clients", &format!("{variable} names no {needed}"));
        return None;
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/clients");
    let mut command = if variable == "INFLIGHT_TEST_NODE_MODULES" {
        let mut node = tokio::process::Command::new("node");
        node.env("NODE_PATH", installed).arg(folder.join("node").join(node_script));
        node
    } else {
        let mut python = tokio::process::Command::new(installed);
        python.arg(folder.join("python").join(python_script));
        python
    };
    let output = command.args(arguments).kill_on_drop(true).output();
    let output =
        tokio::time::timeout(Duration::from_secs(300), output).await.expect("the client hangs").unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {stderr}");
    Some(serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {stdout}")))
}

/// Names of a client's stop reason, of its error before the headers with its status, and of its error after.
struct Expected {
    stop: &'static str,
    refused: (&'static str, Option<u16>),
    broken: &'static str,
    /// Whether the API has stop strings, and several choices.
    stops: bool,
    choices: bool,
}

impl Default for Expected {
    fn default() -> Self {
        Self {
            stop: "stop",
            refused: ("BadRequestError", Some(400)),
            broken: "APIError",
            stops: true,
            choices: true,
        }
    }
}

fn check(client: &str, answer: &Value, expected: &Expected) {
    let whole = format!("0{OUTPUT}");
    assert_eq!(answer["whole"], whole, "{client}");
    assert_eq!(answer["streamed"], whole, "{client}");
    // Each event has whole characters, and there are many.
    assert!(answer["pieces"].as_u64().unwrap() > 5, "{client}: {answer}");
    if expected.choices {
        let texts: Vec<String> = (0..3).map(|choice| format!("{choice}{OUTPUT}")).collect();
        assert_eq!(answer["choices"], json!(texts), "{client}");
    }
    if expected.stops {
        let stopped = json!([STOPPED, expected.stop]);
        assert_eq!((&answer["stopped"], &answer["stream_stopped"]), (&stopped, &stopped), "{client}");
    }
    assert_eq!(answer["refused"], json!([expected.refused.0, expected.refused.1]), "{client}");
    assert_eq!(answer["broken"], json!([BROKEN, expected.broken]), "{client}");
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes half a minute alone; the lane artefact of .ci/nightly runs it"]
async fn third_party_clients_get_split_characters_stop_strings_choices_and_failures() {
    assert!(fine_tokens("🙂").len() > 1 && fine_tokens("STOP").len() > 1, "they are split over tokens");
    let HttpCluster { cluster, session, address, worker: _worker } =
        HttpCluster::start(with_http(HttpOptions::default())).await;
    let serving = tokio::spawn(serve(session));
    let (url, grpc) = (format!("http://{address}"), cluster.address.to_string());
    let main = ("INFLIGHT_TEST_PYTHON", "Python with tests/clients/python/requirements.txt");
    let frameworks =
        ("INFLIGHT_TEST_FRAMEWORKS_PYTHON", "Python with tests/clients/python/requirements-frameworks.txt");
    let proxy = ("INFLIGHT_TEST_LITELLM_PYTHON", "Python with tests/clients/python/requirements-litellm.txt");
    let responses = Expected { stops: false, choices: false, broken: "RuntimeError", ..Expected::default() };
    let anthropic =
        Expected { stop: "stop_sequence", choices: false, broken: "APIStatusError", ..Expected::default() };
    let langchain = Expected { refused: ("OpenAIInvalidRequestError", Some(400)), ..Expected::default() };
    let triton = Expected {
        refused: ("InferenceServerException", None),
        broken: "InferenceServerException",
        ..Expected::default()
    };
    for (client, (variable, needed), expected) in [
        ("openai chat", main, Expected::default()),
        ("openai completions", main, Expected::default()),
        ("openai responses", main, responses),
        ("anthropic", main, anthropic),
        ("tritonclient", main, triton),
        ("langchain", frameworks, langchain),
        ("llama_index", frameworks, Expected::default()),
        ("litellm", proxy, Expected::default()),
    ] {
        let server = if client == "tritonclient" { &grpc } else { &url };
        let arguments = ["--client", client, "--server", server, "--model", "tiny"];
        if let Some(answer) = run(variable, needed, SCRIPTS[0], SCRIPTS[1], &arguments).await {
            check(client, &answer, &expected);
        }
    }
    let node = run(
        "INFLIGHT_TEST_NODE_MODULES",
        "folder with the package openai",
        SCRIPTS[0],
        SCRIPTS[1],
        &[&url, "tiny"],
    )
    .await;
    if let Some(answer) = node {
        check("openai for Node", &answer, &Expected::default());
    }
    serving.abort();
}
