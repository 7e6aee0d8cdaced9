//! What people type by mistake, or as they are used to from other programs: each answer names the cause and the remedy.

use std::ffi::OsString;

use anyhow::{Context, Result, ensure};
use inflight_fixtures::{Arch, Checkpoint, Dtype, TempDir};
use inflight_harness::{LocalCluster, run_with_env};

use crate::program;

/// A command line, its exit code and what its answer says.
type Mistake<'a> = (&'a str, i32, &'a [&'a str]);

/// Mistakes that need no cluster; `DIR` is a directory with an empty one, a LoRA adapter and a cache of the Hub in it.
const ALONE: [Mistake<'static>; 34] = [
    ("genrate", 2, &["unrecognized subcommand", "'generate'"]),
    ("bench --concurency 1", 2, &["'--concurency'", "'--concurrency'"]),
    ("generate --temp 0.5 Hello", 2, &["'--temp'", "'--temperature'"]),
    ("up --device gpu", 2, &["unknown device `gpu`", "`cuda:N`"]),
    ("worker --policy lifo", 2, &["unknown scheduling policy `lifo`", "fcfs, priority, fair, static"]),
    ("up --device sim:h100", 2, &["no profile `h100`", "h200-llama3-8b"]),
    ("up --quantize q4_k_m", 2, &["no quantisation `q4_k_m`", "`int8` and `int4`"]),
    ("up --model DIR/empty", 1, &["config.json is missing", "is this the right directory?"]),
    ("up --model DIR/adapter", 1, &["it is a LoRA adapter", "merge it into its base model"]),
    (
        "up --model DIR/models--org--name",
        1,
        &["a model in the Hub's cache", "give the model's name, as in org/name"],
    ),
    (
        "up --model DIR/mixtral",
        1,
        &["asks for MixtralForCausalLM, which is not supported", "LlamaForCausalLM"],
    ),
    ("run qwen3", 1, &["there is no such directory or file", "Qwen/qwen3"]),
    ("serve org/name", 1, &["org/name is not in the cache", "inflight pull org/name"]),
    ("up org/name", 1, &["org/name is not in the cache", "inflight pull org/name"]),
    ("up -m org/name", 1, &["org/name is not in the cache", "inflight pull org/name"]),
    ("up --model hf://org/name", 1, &["org/name is not in the cache", "inflight pull org/name"]),
    ("up --model qwen3:0.6b", 1, &["is named with its organisation", "Qwen/qwen3:0.6b"]),
    ("pull org/name", 1, &["HF_HUB_OFFLINE forbids downloads"]),
    ("list", 2, &["no command `list`", "`inflight models`"]),
    ("up --max-model-len 1", 1, &["--max-context-tokens is 1", "from 2 to 1024"]),
    ("up --max-num-seqs 0", 1, &["--max-sequences is 0", "from 1 to 4096"]),
    ("up --tp 65", 1, &["--tensor-parallel is 65", "from 1 to 64"]),
    (
        "up --tool-call-format hermess",
        2,
        &["unknown format \"hermess\"", "llama3, hermes, qwen-xml and mistral"],
    ),
    ("up --api-key", 2, &["a value is required", "--api-key"]),
    ("up --workers 0", 2, &["0 is not in 1..=256", "--workers"]),
    ("up --port 99999", 2, &["99999 is not in 0..=65535", "--port"]),
    ("up --kv-cache-bytes 100TiB", 1, &["the KV pool 100.00 TiB", "lower --kv-cache-bytes"]),
    ("up --config DIR/unknown.toml", 2, &["unknown.toml", "max-seqs", "max-sequences"]),
    ("replay DIR/none", 1, &["can't read", "No such file"]),
    ("generate --schema DIR/none Hello", 2, &["--schema <FILE>", "No such file"]),
    ("generate --endpoint 127.0.0.1:9 Hello", 3, &["127.0.0.1:9", "start a cluster with `inflight up`"]),
    ("top --once --router 127.0.0.1:9", 3, &["127.0.0.1:9", "start a cluster with `inflight up`"]),
    ("diagnose 127.0.0.1:9", 3, &["127.0.0.1:9", "start a cluster with `inflight up`"]),
    ("router --workers 127.0.0.1:9 --streams-max 0", 2, &["--streams-max is 0", "at least 1"]),
];

/// Mistakes at a running cluster, whose address is `GRPC` and whose HTTP port is at `HTTP_ADDRESS`.
const AT_A_CLUSTER: [Mistake<'static>; 4] = [
    ("generate --endpoint GRPC --model gpt-4o Hello", 4, &["gpt-4o", "served are: inflight-demo"]),
    ("generate --endpoint GRPC --max-tokens 100000 Hello", 4, &["together 100005", "lower max_tokens"]),
    ("up --port PORT", 1, &["PORT", "--port"]),
    ("diagnose HTTP_ADDRESS", 3, &["this is the HTTP port"]),
];

async fn check(
    (line, code, pieces): Mistake<'_>,
    replaced: &[(&str, String)],
    home: &OsString,
) -> Result<()> {
    let fill =
        |text: &str| replaced.iter().fold(text.to_owned(), |text, (name, value)| text.replace(name, value));
    let words: Vec<String> = line.split(' ').map(fill).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let variables =
        [("HF_HUB_OFFLINE", "1".into()), ("HF_HOME", home.clone()), ("HF_HUB_CACHE", home.clone())];
    let done = run_with_env(program(), &words, "", &variables).await?;
    ensure!(done.code == Some(code), "{line}: {done:?}");
    for piece in pieces {
        let piece = fill(piece);
        ensure!(done.stderr.contains(&piece), "{line}: `{piece}` is not in: {}", done.stderr);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn each_mistake_is_answered_with_its_cause_and_the_remedy() -> Result<()> {
    let folder = TempDir::new("mistakes")?;
    let path = |name: &str| folder.path().join(name);
    std::fs::create_dir_all(path("empty"))?;
    std::fs::create_dir_all(path("adapter"))?;
    std::fs::write(path("adapter/adapter_config.json"), "{}")?;
    std::fs::create_dir_all(path("models--org--name/refs"))?;
    std::fs::write(path("models--org--name/refs/main"), "0".repeat(40))?;
    std::fs::write(path("unknown.toml"), "max-seqs = 4\n")?;
    let mixtral = Checkpoint::new(Arch::Qwen3, Dtype::Bf16).write_temp()?;
    std::fs::rename(mixtral.path(), path("mixtral"))?;
    let config = std::fs::read_to_string(path("mixtral/config.json"))?;
    std::fs::write(path("mixtral/config.json"), config.replace("Qwen3ForCausalLM", "MixtralForCausalLM"))?;
    let home = OsString::from(path("home"));
    let directory = [("DIR", folder.path().display().to_string())];
    for mistake in ALONE {
        check(mistake, &directory, &home).await?;
    }
    let cluster = LocalCluster::start(program(), &["--workers=1"]).await?;
    let address = |url: &str| url.rsplit('/').next().unwrap_or_default().to_owned();
    let grpc = address(&cluster.endpoint);
    let port = grpc.rsplit(':').next().context("no port")?.to_owned();
    let replaced = [("GRPC", grpc), ("HTTP_ADDRESS", address(&cluster.http)), ("PORT", port)];
    for mistake in AT_A_CLUSTER {
        check(mistake, &replaced, &home).await?;
    }
    Ok(())
}
