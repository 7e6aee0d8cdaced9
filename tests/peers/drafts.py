#!/usr/bin/env python3
"""Compares sources of drafts on text: speed and acceptance.

    drafts.py PROGRAM MODEL [--streams 1,4] [--rounds 5] [--output 200] [FLAGS FOR THE WORKERS...]

Starts `PROGRAM up --model MODEL` with one worker for each value of --drafts, asks all of them the same questions of the demo model's evaluation
in turns, greedily, and prints tokens per second relative to the one without drafts (median of the rounds, lowest, highest) and the drafts that
were accepted. All answers must be equal.
"""

import argparse
import json
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EVALUATION = Path(__file__).resolve().parents[2] / "worker/demo/train/corpus/eval.txt"
SOURCES = "off,prompt-lookup,mtp,auto"
PORT = 18780


class Server:
    def __init__(self, program, model, drafts, port, flags):
        self.drafts, self.http, self.metrics = drafts, f"http://127.0.0.1:{port}", None
        command = [program, "up", "--model", model, "--workers=1", f"--drafts={drafts}", f"--http-port={port}", f"--port={port + 1}",
                   f"--metrics-port={port + 2}", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.log = []
        for line in self.process.stdout:
            self.log.append(line)
            if found := re.search(r"(http://[0-9.:]+/metrics) \(worker-0\)", line):
                self.metrics = found.group(1)
                return
        raise SystemExit("".join(self.log))

    def drafts_of(self):
        """Drafted and accepted tokens so far."""
        with urllib.request.urlopen(self.metrics) as response:
            text = response.read().decode()
        return [sum(map(float, re.findall(rf"(?m)^inflight_worker_{name}_total\S* (\S+)$", text))) for name in ("drafted_tokens", "accepted_drafts")]

    def answer(self, prompt, output):
        body = {"prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(f"{self.http}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait()


def questions(count):
    lines = [line.split("=>")[0].strip() for line in EVALUATION.read_text().splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    return [f"<|bos|><|user|>{line}<|end|><|assistant|>" for line in lines[:count]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--streams", default="1,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=int, default=200)
    parser.add_argument("--sources", default=SOURCES, help="values of --drafts; speeds are relative to the first one")
    parser.add_argument("--questions", type=int, default=8)
    arguments, flags = parser.parse_known_args()
    servers = [Server(arguments.program, arguments.model, drafts, PORT + 10 * at, flags) for at, drafts in enumerate(arguments.sources.split(","))]
    prompts = questions(arguments.questions)
    try:
        for streams in map(int, arguments.streams.split(",")):
            speeds, drafted = {server: [] for server in servers}, {server: server.drafts_of() for server in servers}
            for _ in range(arguments.rounds + 1):
                answers = []
                for server in servers:
                    begun = time.monotonic()
                    with ThreadPoolExecutor(streams) as pool:
                        done = list(pool.map(lambda prompt: server.answer(prompt, arguments.output), prompts))
                    speeds[server].append(sum(tokens for _, tokens in done) / (time.monotonic() - begun))
                    answers.append([text for text, _ in done])
                assert all(other == answers[0] for other in answers), "answers differ"
            # The first round warms up.
            base = speeds[servers[0]][1:]
            for server in servers:
                own = speeds[server][1:]
                ratios = [a / b for a, b in zip(own, base)]
                made, stood = (now - before for now, before in zip(server.drafts_of(), drafted[server]))
                spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                print(f"{streams} streams, {server.drafts}: {statistics.median(own):.1f} tokens/s, {spread}, {stood:.0f} of {made:.0f} drafts", flush=True)
    finally:
        for server in servers:
            server.stop()


if __name__ == "__main__":
    main()
