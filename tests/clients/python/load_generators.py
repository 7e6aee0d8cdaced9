"""Runs guidellm or aiperf, as they come from PyPI, against `inflight up` with the embedded model, and checks their reports.

Every request must succeed, and the tokens that the tool counts must be those of the router's usage log, request by request.

    load_generators.py guidellm --program target/ci/guidellm/bin/guidellm --inflight target/release/inflight

.ci/nightly installs both tools.
"""

import argparse
import json
import os
import pathlib
import subprocess
import tempfile
import time

import background

HERE = pathlib.Path(__file__).resolve().parent
TOKENIZER = HERE.parents[2] / "worker" / "demo"
REQUESTS = 20
CONCURRENCY = 4
TOOL_SECONDS = 180
USAGE_SECONDS = 20

# (prompt tokens, output tokens) of each request.
Tokens = list[tuple[int, int]]


def run(command: list[str], folder: pathlib.Path, environment: dict[str, str]) -> None:
    """Runs a tool to its end in `folder`; fails with the end of its output if it does."""
    quiet = {"NO_COLOR": "1", "HF_HOME": str(folder / "hf"), **environment}
    finished = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **quiet},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TOOL_SECONDS,
    )
    if finished.returncode != 0:
        raise SystemExit(f"{command} ended with {finished.returncode}:\n{finished.stdout[-6000:]}")


def guidellm(program: str, url: str, folder: pathlib.Path, api: str) -> Tokens:
    prompts = folder / "prompts.jsonl"
    with open(prompts, "w", encoding="utf-8") as file:
        for number in range(REQUESTS):
            row = {"prompt": f"Tell me a story about {number} cats 🙂", "output_tokens_count": 4 + number}
            file.write(json.dumps(row) + "\n")
    report = folder / "report.json"
    run(
        [
            program,
            "run",
            f"--backend=kind=openai_http,target={url},model=demo,request_format=/v1/{api}",
            f"--profile=kind=concurrent,streams={CONCURRENCY}",
            f"--constraint=kind=max_requests,count={REQUESTS}",
            f"--tokenizer=kind=hf_auto,model={TOKENIZER}",
            f"--data=kind=json_file,path={prompts}",
            f"--output=kind=json,path={report}",
            "--disable-progress",
        ],
        folder,
        {"PYTHONPATH": str(HERE / "stand_ins"), "HF_HUB_OFFLINE": "1"},
    )
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    requests = benchmark["requests"]
    if requests["errored"] or requests["incomplete"] or len(requests["successful"]) != REQUESTS:
        raise SystemExit(f"not all requests succeeded: {json.dumps(benchmark['metrics']['request_totals'])}")
    asked = sorted(request["output_tokens"] for request in requests["successful"])
    if asked != [4 + number for number in range(REQUESTS)]:
        raise SystemExit(f"the outputs have {asked} tokens, instead of those that were asked for")
    return [(request["prompt_tokens"], request["output_tokens"]) for request in requests["successful"]]


def aiperf(program: str, url: str, folder: pathlib.Path, api: str) -> Tokens:
    artifacts = folder / "artifacts"
    run(
        [
            program,
            "profile",
            "--model=demo",
            f"--url={url}",
            f"--endpoint-type={'chat' if api == 'chat/completions' else 'completions'}",
            "--streaming",
            f"--tokenizer={TOKENIZER}",
            f"--concurrency={CONCURRENCY}",
            f"--request-count={REQUESTS}",
            "--isl=32",
            "--osl=16",
            "--extra-inputs=ignore_eos:true",
            "--use-server-token-count",
            "--random-seed=1",
            f"--output-artifact-dir={artifacts}",
            "--ui=none",
        ],
        folder,
        {},
    )
    report = json.loads((artifacts / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    if report["error_summary"] or report["was_cancelled"] or report["request_count"]["avg"] != REQUESTS:
        raise SystemExit(f"not all requests succeeded: {report['request_count']}, {report['error_summary']}")
    # It takes the metrics of the cluster from the URL of the API.
    scraped = artifacts / "server_metrics_export.json"
    if not scraped.is_file() or not json.loads(scraped.read_text(encoding="utf-8"))["metrics"]:
        raise SystemExit(f"it found no metrics at {url}/metrics: {sorted(os.listdir(artifacts))}")
    tokens = []
    with open(artifacts / "profile_export.jsonl", encoding="utf-8") as records:
        for record in map(json.loads, records):
            metrics = record["metrics"]
            tokens.append((metrics["input_sequence_length"]["value"], metrics["output_sequence_length"]["value"]))
    return tokens


def served(log: pathlib.Path, expected: int) -> Tokens:
    """The tokens of each request in the router's usage log, once it has `expected` lines."""
    deadline = time.monotonic() + USAGE_SECONDS
    while True:
        lines = [line for file in sorted(log.glob("*.jsonl")) for line in file.read_text(encoding="utf-8").splitlines()]
        if len(lines) >= expected or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    found = [json.loads(line) for line in lines]
    return [(line["prompt_tokens"], line["completion_tokens"]) for line in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=["guidellm", "aiperf"])
    parser.add_argument("--program", required=True, help="the installed tool")
    parser.add_argument("--inflight", required=True, help="the program inflight")
    arguments = parser.parse_args()
    program, inflight = (str(pathlib.Path(path).absolute()) for path in (arguments.program, arguments.inflight))
    tool = {"guidellm": guidellm, "aiperf": aiperf}[arguments.tool]
    for api in ("chat/completions", "completions"):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            usage = folder / "usage"
            flags = ["--model-name=demo", f"--usage-log={usage}"]
            with background.cluster(inflight, folder, *flags) as url:
                counted = tool(program, url, folder, api)
                billed = served(usage, REQUESTS)
            # Requests of the tool's own, such as a probe before the measurement, come on top.
            missing = [one for one in set(counted) if counted.count(one) > billed.count(one)]
            if len(counted) != REQUESTS or missing:
                raise SystemExit(f"{api}: it counted {sorted(counted)}, the router {sorted(billed)}")
            prompt, output = (sum(column) for column in zip(*counted))
            print(f"{arguments.tool}, {api}: {len(counted)} requests, {prompt} prompt and {output} output tokens, as billed")


if __name__ == "__main__":
    main()
