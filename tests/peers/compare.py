#!/usr/bin/env python3
"""Compares Inflight's serving with other engines on the same cores and weights: starts each, lets `inflight bench` send all of them the
same requests in turns, and shows medians and ratios. Needs the peers installed (see README.md); nothing of them is part of the project.

    compare.py --shape 135m --dtype bf16 --concurrency 1,4,16,32 \\
        --llama-cpp DIR --llama-server FILE --openvino-python FILE --vllm-python FILE

What runs already is compared too: --endpoint NAME=URL, an OpenAI-compatible API (http://HOST:PORT/v1) or a router (http://HOST:PORT).
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import checkpoint

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Heavy-tailed, as in chat: about 115 tokens in and 62 out on average.
PROMPTS = "lognormal:mean=118,sigma=0.8,max=500"
OUTPUTS = "lognormal:mean=63,sigma=0.9,max=390"
CONTEXT_TOKENS = 1024
PORTS = {"inflight": 8760, "llama.cpp": 8761, "openvino": 8762, "vllm": 8763}
READY_SECONDS = 240


class Peers:
    """Where the peers are, and the commands that convert for and start them."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.folder = arguments.work / arguments.shape
        self.threads = str(len(arguments.cpus.split(",")))

    def checkpoint(self):
        if not (self.folder / "model.safetensors").exists():
            print(f"writing the checkpoint {self.folder}", file=sys.stderr)
            checkpoint.write(self.arguments.shape, self.folder)
        return self.folder

    def converted(self, name, command):
        out = self.arguments.work / f"{self.arguments.shape}-{name}"
        if not out.exists():
            print(f"converting for {name}", file=sys.stderr)
            subprocess.run([str(part) for part in command(out)], check=True, stdout=sys.stderr)
        return out

    def cached(self):
        return self.arguments.prefix_cache == "on"

    def inflight(self):
        command = [self.arguments.inflight, "up", "--json", "--model", self.checkpoint(), "--workers", "1", "--threads", self.threads,
                   "--port", PORTS["inflight"], "--metrics-port", PORTS["inflight"] + 100, "--kv-cache-bytes", "2GiB"]
        if self.arguments.dtype != "bf16":
            command += ["--quantize", self.arguments.dtype]
        if not self.cached():
            command.append("--no-prefix-cache")
        return command + self.arguments.inflight_flags.split(), {}

    def llama(self, streams):
        dtype = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0"}[self.arguments.dtype]
        python = self.arguments.convert_python or self.arguments.vllm_python or sys.executable

        def convert(kind):
            return lambda out: [python, HERE / "to_gguf.py", self.arguments.llama_cpp, self.checkpoint(), out, kind]

        if dtype == "q4_0":
            # The converter knows no four bits; llama-quantize does.
            whole = self.converted("bf16.gguf", convert("bf16"))
            quantize = Path(self.arguments.llama_server).with_name("llama-quantize")
            weights = self.converted("q4_0.gguf", lambda out: [quantize, whole, out, "q4_0"])
        else:
            weights = self.converted(f"{dtype}.gguf", convert(dtype))
        mask = hex(sum(1 << int(cpu) for cpu in self.arguments.cpus.split(",")))
        # -np equal to the streams: with more, its slots share the batch less well.
        return [self.arguments.llama_server, "-m", weights, "--port", PORTS["llama.cpp"], "-t", self.threads, "-tb", self.threads,
                "-C", mask, "--cpu-strict", "1", "-np", streams, "-c", streams * CONTEXT_TOKENS, "-fa", "on",
                "--load-mode", "none", "--cache-ram", "1024" if self.cached() else "0"], {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

    def openvino(self):
        weight = {"bf16": "fp16", "int8": "int8", "int4": "int4"}[self.arguments.dtype]
        exporter = Path(self.arguments.openvino_python).with_name("optimum-cli")
        weights = self.converted(f"openvino-{weight}", lambda out: [
            exporter, "export", "openvino", "--model", self.checkpoint(), "--task", "text-generation-with-past",
            "--weight-format", weight, out])
        return [self.arguments.openvino_python, HERE / "openvino_server.py", weights, "--port", PORTS["openvino"],
                "--threads", self.threads, "--streams", max(self.arguments.concurrency),
                "--prefix-cache", self.arguments.prefix_cache], {}

    def vllm(self):
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": self.arguments.cpus.replace(",", "-") if self.threads == "2" else self.arguments.cpus,
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if self.arguments.vllm_preload:
            environment["LD_PRELOAD"] = self.arguments.vllm_preload
        return [self.arguments.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", self.checkpoint(), "--port", PORTS["vllm"],
                "--dtype", "bfloat16", "--enable-prefix-caching" if self.cached() else "--no-enable-prefix-caching", "--max-model-len", CONTEXT_TOKENS,
                "--max-num-seqs", max(self.arguments.concurrency)], environment


@contextlib.contextmanager
def running(name, command, environment, arguments):
    """A server, from when it answers until it is no more needed."""
    command = ["taskset", "-c", arguments.cpus, *[str(part) for part in command]]
    log = arguments.work / f"{name}.log"
    print("starting " + " ".join([*[f"{key}={value}" for key, value in environment.items()], *command]), file=sys.stderr)
    with open(log, "w") as output:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for(name, process, log)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(name, process, log):
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{name} ended with {process.returncode}; see {log}")
        try:
            if name == "inflight":
                # It says so itself; its port is no HTTP/1.
                if '"event":"ready"' in log.read_text():
                    return
            else:
                urllib.request.urlopen(f"http://127.0.0.1:{PORTS[name]}/v1/models", timeout=2).close()
                return
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.2)
    raise SystemExit(f"{name} was not ready within {READY_SECONDS} s; see {log}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=checkpoint.ALL_SHAPES, default="135m")
    parser.add_argument("--dtype", choices=["bf16", "int8", "int4"], default="bf16")
    parser.add_argument("--concurrency", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, help="that count in each round [default: 12, or 3 for each stream]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompt-tokens", default=PROMPTS)
    parser.add_argument("--output-tokens", default=OUTPUTS)
    parser.add_argument("--prefix-cache", choices=["off", "on"], default="off", help="of all servers, ours included")
    parser.add_argument("--cpus", default="0,1", help="cores that every server is pinned to")
    parser.add_argument("--work", type=Path, default=ROOT / "target" / "peers", help="checkpoints, logs and results")
    parser.add_argument("--inflight", default=ROOT / "target" / "release" / "inflight", help="our binary")
    parser.add_argument("--inflight-flags", default="", help="further flags of `inflight up`")
    parser.add_argument("--llama-cpp", help="its source tree, for the converter")
    parser.add_argument("--llama-server", help="its server")
    parser.add_argument("--convert-python", help="a Python with torch, transformers and sentencepiece, for the converter")
    parser.add_argument("--openvino-python", help="a Python with openvino-genai and optimum-intel")
    parser.add_argument("--vllm-python", help="a Python with vllm for CPUs")
    parser.add_argument("--vllm-preload", help="LD_PRELOAD for it: tcmalloc and libiomp5")
    parser.add_argument("--endpoint", action="append", default=[], help="NAME=URL of a server that runs already")
    return parser.parse_args()


def compare(arguments, peers):
    """Starts the servers, measures each concurrency, and yields the reports. Only llama.cpp's server has to be started anew for each."""
    servers = {"inflight": peers.inflight}
    if arguments.openvino_python:
        servers["openvino"] = peers.openvino
    if arguments.vllm_python and arguments.dtype == "bf16":
        servers["vllm"] = peers.vllm
    with contextlib.ExitStack() as stack:
        for name, start in servers.items():
            command, environment = start()
            stack.enter_context(running(name, command, environment, arguments))
        for streams in arguments.concurrency:
            with contextlib.ExitStack() as inner:
                names = list(servers)
                if arguments.llama_server:
                    command, environment = peers.llama(streams)
                    inner.enter_context(running("llama.cpp", command, environment, arguments))
                    names.insert(1, "llama.cpp")
                yield streams, measure(arguments, names, streams)


def measure(arguments, names, streams):
    """One concurrency."""
    requests = arguments.requests or max(12, 3 * streams)
    bench = [arguments.inflight, "bench", "--concurrency", streams, "--requests", requests, "--rounds", arguments.rounds,
             "--seed", arguments.seed, "--vocab-size", checkpoint.ALL_SHAPES[arguments.shape][5],
             "--prompt-tokens", arguments.prompt_tokens, "--output-tokens", arguments.output_tokens]
    for name in names:
        bench += ["--endpoint", f"{name}=http://127.0.0.1:{PORTS[name]}" + ("" if name == "inflight" else "/v1")]
    for endpoint in arguments.endpoint:
        bench += ["--endpoint", endpoint]
    out = arguments.work / f"{arguments.shape}-{arguments.dtype}-{streams}.json"
    command = [str(part) for part in [*bench, "--json", out]]
    print("running " + " ".join(command), file=sys.stderr)
    subprocess.run(command, check=True)
    return json.loads(out.read_text())


def summary(results):
    """A line for each concurrency: output tokens per second, times to the first token and gaps, and ratios to the best peer in each."""
    names = [endpoint["name"] for endpoint in results[0][1]["points"][0]["endpoints"]]
    head = ["streams", "output tokens/s", "first token P50/P90 ms", "gap P50/P99 ms"]
    head = [head[0], *[f"{column}: {' '.join(names)}; over the best peer" for column in head[1:]]]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for streams, report in results:
        point = report["points"][0]
        median = {endpoint["name"]: endpoint["median"] for endpoint in point["endpoints"]}
        ratios = {entry["to"]: entry["ratios"] for entry in point["ratios"]}

        def over_best(figure, best):
            """Ours over the peer that is best in this figure: the median of the rounds, with the least and the most."""
            peer = best(ratios, key=lambda name: median[name][figure], default=None)
            ratio = ratios[peer][figure] if peer else None
            return f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f}) {peer}" if ratio else "-"

        def latencies(*figures):
            values = ", ".join("/".join(f"{median[name][figure]:.0f}" for figure in figures) for name in names)
            return "; ".join([values, *[over_best(figure, min) for figure in figures]])

        rates = ", ".join(f"{median[name]['output_tokens_per_s']:.1f}" for name in names)
        cells = [str(streams), f"{rates}; {over_best('output_tokens_per_s', max)}"]
        cells += [latencies("ttft_ms_p50", "ttft_ms_p90"), latencies("itl_ms_p50", "itl_ms_p99")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    arguments = parse()
    arguments.work.mkdir(parents=True, exist_ok=True)
    peers = Peers(arguments)
    print(summary(list(compare(arguments, peers))))


if __name__ == "__main__":
    main()
