"""Runs lm-eval, as it comes from PyPI, against `inflight up` with a tiny checkpoint, and checks every number by numpy.

    lm_eval_check.py --inflight target/release/inflight --checkpoint DIR [--parts scores,text,chat]

DIR is a Llama in f32, as `cargo run -p inflight-fixtures --example write -- llama32 f32 DIR` writes it. Runs in lm-eval's own
environment. The tasks and their few documents are written here: nothing is downloaded. lm-eval's own `hf` models would
need torch; tiny_llama.py computes the same.

scores: log-likelihoods of choices and of whole documents, through completions with echo and log probabilities;
text: greedy text through completions; chat: greedy text through chat completions.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import transformers

import background
import tiny_llama

DOCUMENTS = [
    {"question": "the wind was on the", "choices": [" water", " sea", " tall ship"], "answer": 0},
    {"question": "a sea", "choices": [" was", " is 7", " é"], "answer": 1},
    {"question": "ship and water; 7", "choices": [" ships", " tall", " 😀 the wind"], "answer": 2},
    {"question": "the ship was tall", "choices": [" and", "; the wind", "."], "answer": 0},
]
OUTPUT_TOKENS = 12
TOLERANCE = 1e-3
LM_EVAL_SECONDS = 300
QUESTION = "{{question}}"


def write_tasks(folder: pathlib.Path) -> None:
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps(one) + "\n" for one in DOCUMENTS), encoding="utf-8")
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(documents)}}, "test_split": "test"}
    generate = {
        "output_type": "generate_until",
        "doc_to_text": QUESTION,
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n\n"], "do_sample": False, "max_gen_toks": OUTPUT_TOKENS},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    tasks = {
        "tiny_choices": {
            "output_type": "multiple_choice",
            "doc_to_text": QUESTION,
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        },
        "tiny_rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{question}}{{choices[answer]}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        "tiny_text": generate,
    }
    for name, task in tasks.items():
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}), encoding="utf-8")


def samples(folder: pathlib.Path, name: str, model: str, settings: dict, tasks: list[str], *more: str) -> dict[str, list]:
    """Runs `lm_eval` and returns what it logged of each request, by task."""
    output = folder / name
    command = [
        str(pathlib.Path(sys.executable).parent / "lm_eval"),
        *("--model", model),
        *("--model_args", ",".join(f"{key}={value}" for key, value in settings.items())),
        *("--tasks", ",".join(tasks)),
        *("--include_path", str(folder)),
        *("--output_path", str(output)),
        "--log_samples",
        *more,
    ]
    environment = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    finished = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LM_EVAL_SECONDS,
    )
    if finished.returncode != 0:
        raise SystemExit(f"{command} ended with {finished.returncode}:\n{finished.stdout[-6000:]}")
    found = {}
    for task in tasks:
        (log,) = output.rglob(f"samples_{task}_*.jsonl")
        found[task] = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        if len(found[task]) != len(DOCUMENTS):
            raise SystemExit(f"{task}: {len(found[task])} of {len(DOCUMENTS)} documents were evaluated")
    return found


def requests(sample: dict) -> list[tuple[list, object]]:
    """The arguments of each request of a document, and its result."""
    # Named gen_args_0, gen_args_1, …, each with arg_0, arg_1, …
    arguments = [list(sample["arguments"][f"gen_args_{at}"].values()) for at in range(len(sample["arguments"]))]
    return list(zip(arguments, [result[0] for result in sample["resps"]], strict=True))


class Check:
    """Compares results with the checkpoint in numpy."""

    def __init__(self, checkpoint: pathlib.Path):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        self.model = tiny_llama.TinyLlama(checkpoint)
        self.compared = 0
        self.largest = 0.0

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def score(self, what: str, context: list[int], continuation: list[int], result) -> None:
        expected, greedy = self.model.score(context, continuation)
        # A pair for a continuation; for a whole document the log-likelihood alone.
        pair = isinstance(result, list)
        found, found_greedy = (float(result[0]), str(result[1]) == "True") if pair else (float(result), greedy)
        self.compared += 1
        self.largest = max(self.largest, abs(found - expected))
        if not abs(found - expected) <= TOLERANCE or found_greedy != greedy:
            raise SystemExit(f"{what}: log-likelihood {found}, greedy {found_greedy}; expected {expected}, {greedy}")

    def text(self, what: str, prompt: list[int], found: str) -> None:
        tokens = self.model.greedy(prompt, OUTPUT_TOKENS)
        expected = self.tokenizer.decode(tokens, skip_special_tokens=True).split("\n\n")[0]
        self.compared += 1
        # A character whose last bytes are beyond the limit is not delivered.
        if found.rstrip("\ufffd") != expected.rstrip("\ufffd"):
            raise SystemExit(f"{what}: {found!r}, expected {expected!r}")


def scores(check: Check, folder: pathlib.Path, url: str, checkpoint: pathlib.Path) -> None:
    endpoint = {"model": "tiny", "base_url": f"{url}/v1/completions", "max_length": 256}
    # One prompt or several, one request at a time or several, the tokenizer of the folder or of the server.
    local = {"tokenizer": checkpoint, "tokenizer_backend": "huggingface"}
    variants = {
        "one by one": (local, []),
        "batches": (local, ["--batch_size", "4"]),
        "remote": ({"num_concurrent": 4}, []),
    }
    for name, (variant, more) in variants.items():
        settings = {**endpoint, **variant}
        found = samples(folder, name, "local-completions", settings, ["tiny_choices", "tiny_rolling"], *more)
        for sample in found["tiny_choices"]:
            for (context, continuation), result in requests(sample):
                whole, start = check.encode(context + continuation), check.encode(context)
                check.score(f"{name}: {context!r} + {continuation!r}", start, whole[len(start) :], result)
        for sample in found["tiny_rolling"]:
            for (document,), result in requests(sample):
                # A document follows the beginning of a text.
                start = [check.tokenizer.bos_token_id]
                check.score(f"{name}: {document!r}", start, check.encode(document), result)


def text(check: Check, folder: pathlib.Path, url: str, checkpoint: pathlib.Path) -> None:
    endpoint = {"model": "tiny", "base_url": f"{url}/v1/completions", "max_length": 256}
    for name, variant in {"text-ids": {"tokenizer": checkpoint, "tokenizer_backend": "huggingface"}, "text-remote": {}}.items():
        found = samples(folder, name, "local-completions", {**endpoint, **variant}, ["tiny_text"])
        for sample in found["tiny_text"]:
            for (context, _), result in requests(sample):
                check.text(f"{name}: {context!r}", check.encode(context), result)


def chat(check: Check, folder: pathlib.Path, url: str, checkpoint: pathlib.Path) -> None:
    endpoint = {"model": "tiny", "base_url": f"{url}/v1/chat/completions", "num_concurrent": 2}
    found = samples(folder, "chat", "local-chat-completions", endpoint, ["tiny_text"], "--apply_chat_template")
    for sample in found["tiny_text"]:
        for _, result in requests(sample):
            question = [{"role": "user", "content": sample["doc"]["question"]}]
            prompt = check.tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
            check.text(f"chat: {question}", check.encode(prompt), result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inflight", required=True, help="the program inflight")
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
    parser.add_argument("--parts", default="scores,text,chat")
    arguments = parser.parse_args()
    parts = {"scores": scores, "text": text, "chat": chat}
    check = Check(arguments.checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        write_tasks(folder)
        flags = [f"--model={arguments.checkpoint}", "--model-name=tiny"]
        with background.cluster(str(pathlib.Path(arguments.inflight).absolute()), folder, *flags) as url:
            for part in arguments.parts.split(","):
                parts[part](check, folder, url, arguments.checkpoint)
    print(f"lm-eval: {check.compared} results as computed, log-likelihoods within {check.largest:.1e}")


if __name__ == "__main__":
    main()
