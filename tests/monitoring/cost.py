#!/usr/bin/env python3
"""CPU time that observation costs: a cluster with all of it on beside one with none, in turns.

    python3 tests/monitoring/cost.py PROGRAM [--pairs N] [--seconds S] [--streams N]

PROGRAM is a release build of `inflight`. Both clusters are `inflight up` with two workers on a simulated device (steps of 20 ms)
under the same closed loop of streams. *On* exports traces, metrics and logs to a collector that discards them, is scraped once a
second, records its decisions, serves metrics under the names of another engine, and is watched by a page and by `inflight top`.
Prints the CPU time of router and workers per token, off and on, and the difference, as medians over the pairs. Needs grpcio and curl."""

import argparse
import concurrent.futures
import os
import re
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request

import grpc


class Collector(grpc.GenericRpcHandler):
    """Takes every export and answers that it was stored."""

    def __init__(self):
        self.bytes = 0

    def service(self, _details):
        def take(request, _context):
            self.bytes += len(request)
            return b""

        return grpc.unary_unary_rpc_method_handler(take)


def cpu_seconds(pids):
    """User and system time of the processes so far."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def descendants(pid):
    """The process and all below it."""
    found = [pid]
    for parent in found:
        for task in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{task}/children") as children:
                found += [int(child) for child in children.read().split()]
    return found


class Cluster:
    def __init__(self, program, port, flags):
        self.program, self.port = program, port
        command = [program, "up", f"--port={port}", "--workers=2", "--device=sim:flat,step=0.02", "--max-sequences=256", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port - 10}/readyz", timeout=1).read()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def tokens(self):
        """Output tokens of both workers so far."""
        total = 0
        for at in (2, 3):
            text = urllib.request.urlopen(f"http://127.0.0.1:{self.port + at}/metrics", timeout=5).read().decode()
            total += sum(float(number) for number in re.findall(r"^inflight_worker_generated_tokens_total(?:{.*})? (.*)$", text, re.M))
        return total

    def stop(self):
        self.process.terminate()
        self.process.wait()


class Observers:
    """A page, `top` and a scraper of a cluster."""

    def __init__(self, cluster):
        page = ["curl", "--silent", "--no-buffer", f"http://127.0.0.1:{cluster.port - 10}/ui/events"]
        top = [cluster.program, "top", f"--router=http://127.0.0.1:{cluster.port}", "--json"]
        self.processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for command in (page, top)]
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.scrape, args=(cluster.port,))
        self.thread.start()

    def scrape(self, port):
        while not self.ended.wait(1):
            for at in range(1, 4):
                urllib.request.urlopen(f"http://127.0.0.1:{port + at}/metrics", timeout=5).read()

    def stop(self):
        # Both are to watch until here.
        assert all(process.poll() is None for process in self.processes), "an observer has ended"
        self.ended.set()
        self.thread.join()
        for process in self.processes:
            process.kill()
            process.wait()


def measure(cluster, options, observed):
    """CPU microseconds of router and workers per output token."""
    pids = descendants(cluster.process.pid)
    observers = Observers(cluster) if observed else None
    before, tokens = cpu_seconds(pids), cluster.tokens()
    subprocess.run(
        [options.program, "bench", f"--endpoint=http://127.0.0.1:{cluster.port}", f"--concurrency={options.streams}",
         f"--duration={options.seconds}s", "--prompt-tokens=64", "--output-tokens=200", "--warmup=0", "--seed=1"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    spent, tokens = cpu_seconds(pids) - before, cluster.tokens() - tokens
    if observers:
        observers.stop()
    assert tokens > 0, "the load has no tokens"
    return 1e6 * spent / tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=8)
    parser.add_argument("--streams", type=int, default=64)
    options = parser.parse_args()
    collector = Collector()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), handlers=[collector])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with tempfile.TemporaryDirectory() as folder:
        on = [f"--otlp-endpoint=http://127.0.0.1:{port}", "--otlp-signals=traces,metrics,logs", "--otlp-metrics-interval=10s",
              f"--record={folder}", "--metrics-compat=vllm"]
        clusters = [Cluster(options.program, 18700, []), Cluster(options.program, 18800, on)]
        try:
            pairs = []
            for pair in range(options.pairs):
                figures = [0.0, 0.0]
                for which in (0, 1) if pair % 2 == 0 else (1, 0):
                    figures[which] = measure(clusters[which], options, which == 1)
                pairs.append(figures)
                print(f"pair {pair}: off {figures[0]:.1f}, on {figures[1]:.1f} us a token", flush=True)
        finally:
            for cluster in clusters:
                cluster.stop()
            server.stop(None)
    assert collector.bytes > 0, "nothing was exported"
    differences = sorted(on - off for off, on in pairs)
    print(f"median: off {statistics.median(off for off, _ in pairs):.1f}, on {statistics.median(on for _, on in pairs):.1f}, "
          f"difference {statistics.median(differences):.1f} ({differences[0]:.1f} to {differences[-1]:.1f}) us of CPU a token")


main()
