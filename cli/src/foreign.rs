//! Words of other engines on the command line: options that mean the same are aliases of ours, others are answered with ours.
//!
//! The tables here are those of docs/coming-from.md; a test compares both.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command};

use crate::exit::{CommandError, Exit};
use crate::set_by_up::set_by_up;

/// Equivalent of another engine's option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ours {
    /// The option of this name, with the same values: an alias.
    Same(&'static str),
    /// What to give or know instead.
    Instead(&'static str),
}
use Ours::{Instead, Same};

/// Options of another engine that are the same here, or have the same answer.
type Row = (&'static [&'static str], Ours);

/// Commands whose options have equivalents in other engines.
const ROLES: [&str; 3] = ["up", "router", "worker"];
/// Our option that means the number of workers for `up` alone.
const WORKERS: &str = "workers";
const TENANTS: &str = "give --tenants-file FILE, with digests of keys and limits by tenant; `inflight key` makes a key and its digest";
const MODEL_HAS_TOKENIZER: &str = "give --model alone: the tokenizer is that of the model";
const KERNELS: &str = "there is nothing like it, as kernels are built in; --no-autotune takes the first heuristic choice for each GEMM";
const CHUNKS: &str =
    "prefill is always chunked: --step-target, or --slo-ttft and --slo-gap, decide how large chunks are";
const GRAMMARS: &str = "structured output is always on, with llguidance";
const LORA: &str = "adapters are not served";
const SEED: &str = "a seed belongs to a request; without one a seed is drawn and returned";
const ONE_MACHINE: &str = "the layers of a model are not spread; --tensor-parallel splits each of them";
const HOST_CACHE: &str = "give --host-cache-bytes BYTES, for KV blocks of preempted sequences and evicted prefixes; weights are not offloaded";
const KV_BYTES: &str = "give --kv-cache-bytes BYTES on CPUs, --gpu-memory-utilization on GPUs";
const DRAFTS: &str = "give --drafts prompt-lookup, or mtp for a model with an MTP layer; draft models, EAGLE and Medusa are not served";
const TOOL_FORMAT: &str = "give --tool-call-format FORMAT (llama3, hermes, qwen-xml, mistral), by default that of the chat template";
const REASONING_FORMAT: &str =
    "give --reasoning-format FORMAT (think, mistral), by default that of the chat template";
const LOG: &str = "give --log LEVEL; prompts and outputs are never logged";
const DISAGGREGATION: &str = "each worker does both prefill and decode";
const CONTENT: &str = "only text is generated: no images, no embeddings, no classification";
const PROXY: &str = "there is nothing like it; put a proxy in front";

/// Options of vLLM.
const VLLM: &[Row] = &[
    (&["--tokenizer"], Instead(MODEL_HAS_TOKENIZER)),
    (&["--revision"], Instead("give --model org/name@revision")),
    (&["--served-model-name"], Same("model-name")),
    (&["--api-key"], Instead(TENANTS)),
    (&["--ssl-certfile"], Same("tls-cert")),
    (&["--ssl-keyfile"], Same("tls-key")),
    (&["--ssl-ca-certs"], Same("tls-client-ca")),
    (&["--root-path", "--middleware"], Instead(PROXY)),
    (&["--allowed-origins"], Instead("give --http-cors ORIGIN,..., without brackets and quotes")),
    (&["--trust-remote-code"], Instead("leave it out: no code of a model runs")),
    (
        &["--dtype"],
        Instead("leave it out: weights keep their 16-bit type; --quantize makes them smaller on CPUs"),
    ),
    (&["--max-model-len"], Same("max-context-tokens")),
    (&["--kv-cache-memory-bytes", "--num-gpu-blocks-override"], Instead(KV_BYTES)),
    (&["--block-size"], Same("block-tokens")),
    (&["--swap-space", "--kv-offloading-size", "--cpu-offload-gb"], Instead(HOST_CACHE)),
    (&["--max-num-seqs"], Same("max-sequences")),
    (&["--max-num-batched-tokens"], Same("max-batch-tokens")),
    (
        &["--enable-chunked-prefill", "--max-num-partial-prefills", "--long-prefill-token-threshold"],
        Instead(CHUNKS),
    ),
    (&["--scheduling-policy"], Same("policy")),
    (
        &["--preemption-mode"],
        Instead(
            "leave it out: a sequence is swapped or recomputed, whichever is cheaper; --preemption-threshold bounds preemption",
        ),
    ),
    (&["--async-scheduling"], Same("overlap")),
    (&["--num-scheduler-steps"], Instead("leave it out: an iteration is a step")),
    (&["--enable-prefix-caching"], Instead("leave it out: prefixes are always cached, by tenant")),
    (&["--no-enable-prefix-caching"], Same("no-prefix-cache")),
    (&["--prefix-caching-hash-algo"], Instead("leave it out: it is SHA-256, keyed by tenant")),
    (&["--speculative-config"], Instead(DRAFTS)),
    (&["--tensor-parallel-size", "--tp", "-tp"], Same("tensor-parallel")),
    (&["--pipeline-parallel-size", "-pp", "--enable-expert-parallel"], Instead(ONE_MACHINE)),
    (&["--data-parallel-size", "-dp"], Same(WORKERS)),
    (&["--enforce-eager", "--compilation-config", "--disable-custom-all-reduce"], Instead(KERNELS)),
    (&["--seed"], Instead(SEED)),
    (&["--guided-decoding-backend", "--structured-outputs-config"], Instead(GRAMMARS)),
    (&["--enable-auto-tool-choice", "--tool-call-parser"], Instead(TOOL_FORMAT)),
    (&["--reasoning-parser"], Instead(REASONING_FORMAT)),
    (&["--enable-lora", "--lora-modules"], Instead(LORA)),
    (&["--task", "--runner", "--limit-mm-per-prompt"], Instead(CONTENT)),
    (&["--max-logprobs"], Instead("leave it out: a request takes at most 20")),
    (&["--disable-log-requests", "--uvicorn-log-level"], Instead(LOG)),
    (&["--otlp-traces-endpoint"], Same("otlp-endpoint")),
    (&["--disable-log-stats"], Instead("give --metrics-listen off to router and worker")),
    (&["--kv-transfer-config"], Instead(DISAGGREGATION)),
    (
        &["--kv-events-config"],
        Instead("leave it out: routers get these events in their sessions with workers"),
    ),
];

/// Options of SGLang and of its router.
const SGLANG: &[Row] = &[
    (&["--model-path"], Same("model")),
    (&["--tokenizer-path"], Instead(MODEL_HAS_TOKENIZER)),
    (&["--admin-api-key"], Instead(TENANTS)),
    (&["--context-length"], Same("max-context-tokens")),
    (
        &["--mem-fraction-static"],
        Instead("give --gpu-memory-utilization PART, of all memory and not only the static part"),
    ),
    (&["--max-total-tokens"], Instead(KV_BYTES)),
    (&["--max-running-requests"], Same("max-sequences")),
    (
        &["--max-queued-requests"],
        Instead("give the router --queue-requests-max and --queue-tokens-max, a worker --max-waiting"),
    ),
    (
        &["--chunked-prefill-size", "--max-prefill-tokens"],
        Instead("give --max-batch-tokens, and --step-target for chunks beside decodes"),
    ),
    (&["--enable-mixed-chunk"], Instead("leave it out: it is always on")),
    (&["--page-size"], Same("block-tokens")),
    (
        &["--schedule-policy"],
        Instead("give --policy (fair, priority, fcfs, static); --placement cost counts prefixes"),
    ),
    (&["--schedule-conservativeness"], Instead("give --decode-reserve-tokens or --kv-watermark")),
    (&["--priority-scheduling-preemption-threshold"], Same("preemption-threshold")),
    (&["--disable-radix-cache"], Same("no-prefix-cache")),
    (&["--enable-hierarchical-cache", "--hicache-ratio", "--hicache-size"], Instead(HOST_CACHE)),
    (&["--disable-overlap-schedule"], Instead("leave it out: it is off unless --overlap is set")),
    (&["--tp-size"], Same("tensor-parallel")),
    (&["--dp-size"], Same(WORKERS)),
    (&["--pp-size", "--ep-size"], Instead(ONE_MACHINE)),
    (&["--torchao-config"], Instead("give --quantize int8 or int4, on CPUs")),
    (&["--speculative-algorithm"], Instead(DRAFTS)),
    (&["--grammar-backend"], Instead(GRAMMARS)),
    (
        &["--constrained-json-whitespace-pattern", "--constrained-json-disable-any-whitespace"],
        Instead("give --json-whitespace one-line (the default) or any"),
    ),
    (&["--enable-deterministic-inference"], Same("deterministic")),
    (&["--random-seed"], Instead(SEED)),
    (&["--lora-paths"], Instead(LORA)),
    (&["--disaggregation-mode"], Instead(DISAGGREGATION)),
    (&["--enable-metrics"], Instead("leave it out: metrics are always served")),
    (&["--enable-trace"], Instead("give --otlp-endpoint URL")),
    (&["--log-level", "--log-requests"], Instead(LOG)),
    (
        &["--watchdog-timeout"],
        Instead("leave it out: a worker whose step does not return is given up by its routers"),
    ),
    (
        &["--worker-urls", "--service-discovery"],
        Instead("give `inflight router` its workers with --workers: a list, dns:// or kubernetes://"),
    ),
    (
        &["--max-concurrent-requests", "--rate-limit-tokens-per-second"],
        Instead("give --streams-max; rates by tenant stand in --tenants-file"),
    ),
    (
        &["--retry-max-retries", "--cb-failure-threshold"],
        Instead("give --retry-rate or --retry-burst; workers with consecutive failures are ejected"),
    ),
];

/// Options of llama.cpp's server.
const LLAMA_CPP: &[Row] = &[
    (
        &["-hf", "--hf-repo", "-hff", "--hf-file"],
        Instead("give --model org/name:QUANT, such as --model org/name:Q4_K_M"),
    ),
    (&["-a", "--alias"], Same("model-name")),
    (&["-c", "--ctx-size"], Same("max-context-tokens")),
    (&["-np", "--parallel"], Same("max-sequences")),
    (&["-t"], Instead("give --threads N")),
    (
        &["-ub", "--ubatch-size", "-b", "--batch-size"],
        Instead("give --max-batch-tokens, the tokens of an iteration"),
    ),
    (
        &["-ngl", "--gpu-layers", "--n-gpu-layers"],
        Instead("give --device cuda or --device cpu: layers are not divided between them"),
    ),
    (
        &["-fa", "--flash-attn", "--mlock", "--no-mmap", "--jinja"],
        Instead("leave it out: there is nothing to choose"),
    ),
    (
        &["-ctk", "--cache-type-k", "-ctv", "--cache-type-v"],
        Instead("give --kv-cache-dtype int8 on CPUs, fp8 on GPUs"),
    ),
    (&["--chat-template-file"], Same("chat-template")),
    (&["--api-key-file"], Instead(TENANTS)),
    (&["-md", "--model-draft"], Instead(DRAFTS)),
    (
        &["--metrics", "--slots"],
        Instead(
            "leave it out: --metrics-port of `up` says where metrics are, `inflight top` shows the slots",
        ),
    ),
    (
        &["-sm", "--split-mode", "-ts", "--tensor-split"],
        Instead("give --tensor-parallel N, equal shares on N GPUs"),
    ),
];

/// Commands of other engines, and what does the same here.
const COMMANDS: [(&str, &str); 6] = [
    ("list", "`inflight models` lists the models on this machine"),
    ("ls", "`inflight models` lists the models on this machine"),
    ("show", "`inflight models` shows the models on this machine; `inflight top` those that are served"),
    ("start", "`inflight up` starts a cluster"),
    (
        "stop",
        "end `inflight up` with Ctrl-C where it runs, or with `kill` and the process id that it printed",
    ),
    ("version", "`inflight --version` prints the version"),
];

fn rows() -> impl Iterator<Item = &'static Row> {
    [VLLM, SGLANG, LLAMA_CPP].into_iter().flatten()
}

/// Adds the names that other engines have for an option of a router or a worker as aliases.
pub fn alias(argument: Arg) -> Arg {
    // A router's --workers are addresses, not their number.
    if argument.get_long() == Some(WORKERS) { argument } else { alias_of_up(argument) }
}

/// Adds the names that other engines have for an option of `up` as aliases.
pub fn alias_of_up(mut argument: Arg) -> Arg {
    let Some(long) = argument.get_long().map(str::to_owned) else { return argument };
    for (names, ours) in rows() {
        if matches!(ours, Same(ours) if *ours == long) {
            argument = names.iter().fold(argument, |argument, name| with_name(argument, name));
        }
    }
    argument
}

/// Adds an alias, unless the option has it. A name of one dash and several letters cannot be one.
fn with_name(argument: Arg, name: &'static str) -> Arg {
    if let Some(long) = name.strip_prefix("--") {
        let has = argument.get_all_aliases().is_some_and(|aliases| aliases.contains(&long));
        return if has { argument } else { argument.alias(long) };
    }
    let mut letters = name.trim_start_matches('-').chars();
    let (first, second) = (letters.next(), letters.next());
    let short = first.filter(|_| second.is_none());
    let has = |short| argument.get_all_short_aliases().is_some_and(|aliases| aliases.contains(&short));
    match short {
        Some(short) if !has(short) => argument.short_alias(short),
        _ => argument,
    }
}

/// Replaces commands of other engines by ours, in the arguments of the process.
pub fn replace_command(arguments: &mut Vec<OsString>) {
    let Some(command) = arguments.get(1).and_then(|argument| argument.to_str()) else { return };
    let ours: &[&str] = match command {
        "run" | "serve" => &["up"],
        "ps" => &["top", "--once"],
        _ => return,
    };
    arguments.splice(1..2, ours.iter().map(OsString::from));
}

/// Returns the error of arguments that clap refused: where the argument is known, with what to give instead of it.
pub fn explain(error: clap::Error, arguments: &[OsString], cli: &Command) -> CommandError {
    let named = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let explained = match error.kind() {
        ErrorKind::InvalidSubcommand => named(ContextKind::InvalidSubcommand).and_then(|word| {
            let (_, answer) = COMMANDS.iter().find(|(command, _)| *command == word)?;
            Some(format!("there is no command `{word}`: {answer}"))
        }),
        // Of `-hf`, clap takes `-h`.
        ErrorKind::DisplayHelp => instead("-h", arguments, cli),
        ErrorKind::UnknownArgument => {
            named(ContextKind::InvalidArg).and_then(|refused| instead(refused, arguments, cli))
        }
        _ => None,
    };
    explained.map_or(CommandError::Clap(error), |message| CommandError::new(Exit::Usage, message))
}

/// Returns what is to be given instead of an option that a command does not have.
fn instead(refused: &str, arguments: &[OsString], cli: &Command) -> Option<String> {
    let command = arguments.get(1)?.to_str()?;
    let refused = refused.split(['=', ' ']).next().unwrap_or_default();
    let unexpected = |name: &str, answer: &str| Some(format!("unexpected argument '{name}': {answer}"));
    if ROLES.contains(&command) {
        // Of `-tp`, clap refuses `-t`.
        let typed = arguments.iter().filter_map(|argument| argument.to_str()?.split('=').next());
        let typed: Vec<&str> = typed.filter(|typed| typed.starts_with(refused)).collect();
        let row =
            rows().find_map(|(names, ours)| Some((names.iter().find(|name| typed.contains(name))?, ours)));
        match row {
            Some((name, Instead(answer))) => return unexpected(name, answer),
            Some((name, Same(ours))) if has(cli, command, ours) && (*ours != WORKERS || command == "up") => {
                return unexpected(name, &format!("give --{ours}"));
            }
            Some((name, Same(ours))) => {
                return unexpected(name, &format!("it is --{ours} of {}", owners(cli, ours)));
            }
            None => {}
        }
    }
    let long = refused.strip_prefix("--")?;
    if command == "up"
        && let Some(answer) = set_by_up(long)
    {
        return unexpected(refused, answer);
    }
    let owners = owners(cli, long);
    if owners.is_empty() || has(cli, command, long) {
        return None;
    }
    unexpected(refused, &format!("`inflight {command}` has no such option; it is one of {owners}"))
}

/// Whether a command has an option.
fn has(cli: &Command, command: &str, long: &str) -> bool {
    let command = cli.find_subcommand(command);
    command.is_some_and(|command| command.get_arguments().any(|argument| argument.get_long() == Some(long)))
}

/// Returns the roles with an option, as text.
fn owners(cli: &Command, long: &str) -> String {
    let owners = ROLES.iter().filter(|role| has(cli, role, long)).map(|role| format!("`inflight {role}`"));
    owners.collect::<Vec<_>>().join(" and ")
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use clap::CommandFactory as _;

    use super::*;
    use crate::Cli;
    use crate::config::parse;

    /// Returns the first words of the spans of code in a text that are options.
    fn options(text: &str) -> impl Iterator<Item = &str> {
        let spans = text.split('`').skip(1).step_by(2);
        spans.filter_map(|span| span.split(' ').next()).filter(|word| word.starts_with('-'))
    }

    /// Returns the options of the documentation's tables, each with what stands beside it.
    fn documented() -> BTreeMap<&'static str, Vec<&'static str>> {
        let text = include_str!("../../docs/coming-from.md");
        let sections = text.split("\n## ").filter(|section| section.starts_with("Options of "));
        let rows = sections.flat_map(str::lines).filter_map(|line| line.strip_prefix("| "));
        let mut found: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (theirs, ours) in rows.filter_map(|row| row.split_once(" | ")) {
            options(theirs).for_each(|name| found.entry(name).or_default().push(ours));
        }
        found
    }

    #[test]
    fn the_documentation_and_the_tables_have_the_same_options_with_the_same_answers() {
        let cli = Cli::command();
        let documented = documented();
        let known: BTreeSet<&str> = rows().flat_map(|(names, _)| names.iter().copied()).collect();
        assert!(known.len() > 100 && known.len() == rows().map(|(names, _)| names.len()).sum::<usize>());
        for name in documented.keys() {
            let own = name.strip_prefix("--").is_some_and(|long| {
                let aliases = |argument: &Arg| {
                    argument.get_visible_aliases().is_some_and(|aliases| aliases.contains(&long))
                };
                let mut up = cli.find_subcommand("up").unwrap().get_arguments();
                has(&cli, "up", long) || up.any(aliases)
            });
            assert!(
                own || *name == "-m" || known.contains(name),
                "docs/coming-from.md has {name}, foreign.rs does not"
            );
        }
        for (names, ours) in rows() {
            for name in *names {
                let beside =
                    documented.get(name).unwrap_or_else(|| panic!("docs/coming-from.md lacks {name}"));
                let options = match ours {
                    Same(ours) => vec![format!("--{ours}")],
                    Instead(answer) => {
                        let words = answer
                            .split([' ', ',', ':', ';', '(', ')'])
                            .filter(|word| word.starts_with("--"));
                        words.map(str::to_owned).collect()
                    }
                };
                for option in options {
                    let is_there = beside.iter().any(|text| self::options(text).any(|word| word == option));
                    assert!(is_there, "docs/coming-from.md lacks {option} beside {name}: {beside:?}");
                    let long = option.trim_start_matches("--");
                    assert!(ROLES.iter().any(|role| has(&cli, role, long)), "{option} does not exist");
                }
            }
        }
    }

    /// What is typed, and parts of the answer.
    const MISTAKES: &[(&str, &[&str])] = &[
        // Typing errors keep their suggestions.
        ("genrate", &["generate"]),
        ("bench --concurency 4", &["--concurrency"]),
        ("generate --temp 1", &["--temperature"]),
        // Commands of other engines.
        ("list", &["no command `list`", "`inflight models`"]),
        ("ls", &["`inflight models`"]),
        ("show qwen3", &["`inflight models`", "`inflight top`"]),
        ("stop", &["Ctrl-C"]),
        // Options of other engines.
        ("up --admin-api-key x", &["'--admin-api-key'", "--tenants-file", "`inflight key`"]),
        ("router --api-key x", &["--tenants-file"]),
        ("up --tool-call-parser hermes", &["--tool-call-format", "hermes, qwen-xml"]),
        ("up --seed 1", &["'--seed'", "belongs to a request"]),
        ("up -ngl 99", &["'-ngl'", "--device cuda"]),
        ("worker -np 8", &["'-np'", "give --max-sequences"]),
        ("up -tp 2", &["'-tp'", "give --tensor-parallel"]),
        ("worker -dp 2", &["'-dp'", "it is --workers of `inflight up`"]),
        ("up -hf Qwen/Qwen3-0.6B-GGUF", &["'-hf'", "--model"]),
        (
            "router --max-model-len 4096",
            &["it is --max-context-tokens of `inflight up` and `inflight worker`"],
        ),
        // Options of another role.
        (
            "worker --tool-call-format hermes",
            &["`inflight worker` has no such option", "one of `inflight up` and `inflight router`"],
        ),
        ("router --model a", &["`inflight up` and `inflight worker`"]),
        ("up --listen 0.0.0.0:1", &["--host and --port"]),
        ("up --http-listen 0.0.0.0:1", &["--http-port"]),
        ("up --gpu 0,1", &["--tensor-parallel"]),
        ("up --worker-tls-ca a", &["without TLS"]),
        // Values.
        ("up --device gpu", &["--device", "cuda"]),
        ("up --policy lifo", &["--policy", "fcfs"]),
        ("up --quantize q4_k_m", &["--quantize", "int4"]),
        ("up --tool-call-format hermess", &["--tool-call-format", "qwen-xml"]),
        ("up --workers 0", &["--workers", "1..=256"]),
        ("up --port 99999", &["--port", "65535"]),
        // Addresses.
        ("generate --endpoint 127.0.0.1 a", &["--endpoint", "the port is missing", "HOST:PORT"]),
        ("chat --endpoint http://127.0.0.1:8640/v1", &["it has the path /v1", "gRPC"]),
        ("top --router ftp://a:1", &["\"ftp\"", "http://HOST:PORT"]),
        ("diagnose 127.0.0.1:0", &["no number from 1 to 65535"]),
        ("bench --endpoint a=127.0.0.1", &["the port is missing"]),
    ];

    #[test]
    fn mistakes_are_answered_with_their_cause_and_remedy() {
        for (typed, clues) in MISTAKES {
            let words = std::iter::once("inflight").chain(typed.split(' ')).map(OsString::from);
            let answer = parse(words).unwrap_err();
            for clue in *clues {
                assert!(answer.to_string().contains(clue), "{typed}: no {clue:?} in: {answer}");
            }
        }
    }

    #[test]
    fn options_and_addresses_of_other_engines_are_taken() {
        for typed in [
            "up -m a --max-model-len 4096 --tp 2 --max-num-seqs 9 --max-num-batched-tokens 99 --block-size 32",
            "run a --ctx-size 4096 --parallel 4 --alias b --http-cors * --tool-call-format hermes",
            "serve a -c 4096 --model-name b --default-max-tokens 9 --placement prefix --tls-cert c --tls-key d",
            "worker --model-path a --tp-size 2 --served-model-name b --enable-deterministic-inference",
            "router --workers a:1 --ssl-certfile c --ssl-keyfile d",
            "ps --router 127.0.0.1:8650",
            "generate -m a --endpoint 127.0.0.1:8650,http://[::1]:8650 b",
            "chat --endpoint router:8650",
            "top --router router:8650",
            "diagnose --router router:8650",
            "diagnose http://127.0.0.1:8652 127.0.0.1:8653",
            "bench --endpoint 127.0.0.1:8650 --endpoint peer=127.0.0.1:8000/v1",
        ] {
            let words = std::iter::once("inflight").chain(typed.split(' ')).map(OsString::from);
            parse(words).unwrap_or_else(|error| panic!("{typed}: {error}"));
        }
    }
}
