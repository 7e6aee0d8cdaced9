#!/usr/bin/env python3
"""Compares sources of drafts on text: speed and acceptance.

    drafts.py PROGRAM MODEL [--streams 1,4] [--rounds 5] [--output 200] [FLAGS FOR THE WORKERS...]

Starts `PROGRAM serve MODEL` once for each value of --drafts, asks all servers the same questions of the demo model's evaluation in turns,
greedily, and prints tokens per second relative to the server without drafts: the median over the rounds, the lowest and the highest.
All answers must be equal.
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
SOURCES = ["off", "prompt-lookup", "mtp", "auto"]
PORT = 18780


class Server:
    def __init__(self, program, model, drafts, port, flags):
        self.drafts, self.http = drafts, f"http://127.0.0.1:{port}"
        command = [program, "up", "--model", model, f"--drafts={drafts}", f"--http-listen=127.0.0.1:{port}", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.log = []
        for line in self.process.stdout:
            self.log.append(line)
            if found := re.search(r"worker.*(http://[0-9.:]+/metrics)", line):
                self.metrics = found.group(1)
            if "ready" in line.lower():
                return
        raise SystemExit("".join(self.log))

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
    lines = [line.split("\t")[0].split("|")[0].strip() for line in EVALUATION.read_text().splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    return [f"<|bos|><|user|>{line}<|end|><|assistant|>" for line in lines[:count]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--streams", default="1,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=int, default=200)
    parser.add_argument("--questions", type=int, default=8)
    arguments, flags = parser.parse_known_args()
    servers = [Server(arguments.program, arguments.model, drafts, PORT + at, flags) for at, drafts in enumerate(SOURCES)]
    prompts = questions(arguments.questions)
    try:
        for streams in map(int, arguments.streams.split(",")):
            speeds = {server.drafts: [] for server in servers}
            for _ in range(arguments.rounds + 1):
                answers = []
                for server in servers:
                    begun = time.monotonic()
                    with ThreadPoolExecutor(streams) as pool:
                        done = list(pool.map(lambda prompt: server.answer(prompt, arguments.output), prompts))
                    speeds[server.drafts].append(sum(tokens for _, tokens in done) / (time.monotonic() - begun))
                    answers.append([text for text, _ in done])
                assert all(other == answers[0] for other in answers), "answers differ"
            # The first round warms up.
            base = speeds["off"][1:]
            for drafts, own in speeds.items():
                ratios = [a / b for a, b in zip(own[1:], base)]
                median = statistics.median(own[1:])
                print(f"{streams} streams, {drafts}: {median:.1f} tokens/s, {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)
    finally:
        for server in servers:
            server.stop()
            for line in server.log:
                if "draft" in line:
                    print(server.drafts, line.strip())


if __name__ == "__main__":
    main()
