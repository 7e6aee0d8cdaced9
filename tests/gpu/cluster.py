"""The shipped binary: `inflight up` with a worker on the GPU, under `inflight bench`. `cluster.py BINARY MODEL [DEVICE]`"""

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

START_S = 90
BENCH_S = 60


def main() -> None:
    binary, model = sys.argv[1:3]
    device = sys.argv[3] if len(sys.argv) > 3 else "cuda:0"
    command = [binary, "up", "--workers", "1", "--device", device, "--model", model, "--port", "0", "--json",
               "--max-sequences", "64", "--gpu-memory-utilization", "0.3", "--verbose"]
    cluster = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    # A cluster that neither gets ready nor gives up must not outlast this.
    watchdog = threading.Timer(START_S + BENCH_S, cluster.kill)
    watchdog.start()
    try:
        endpoint = None
        for line in cluster.stdout:
            print(line, end="", flush=True)
            event = json.loads(line)
            if event.get("event") == "ready":
                endpoint = event["endpoint"]
                break
        if endpoint is None:
            sys.exit(f"cluster: `inflight up` ended with {cluster.wait()} before it was ready")
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            bench = [binary, "bench", "--endpoint", endpoint, "--concurrency", "32", "--requests", "128", "--prompt", "ids",
                     "--prompt-tokens", "16..512", "--output-tokens", "8..128", "--seed", "5", "--json", str(report)]
            done = subprocess.run(bench, timeout=BENCH_S, check=False)
            if done.returncode != 0:
                sys.exit(f"cluster: `inflight bench` ended with {done.returncode}")
            figures = json.loads(report.read_text())
        print(json.dumps(figures)[:4000])
        print(f"cluster: {summary(figures)}")
    finally:
        cluster.terminate()
        try:
            cluster.wait(20)
        except subprocess.TimeoutExpired:
            cluster.kill()
        watchdog.cancel()


def summary(report) -> str:
    """What is worth a line of the table."""
    median = report["points"][0]["endpoints"][0]["median"]
    wanted = ["output_tokens_per_s", "ttft_ms_p50", "itl_ms_p50", "itl_ms_p99"]
    return ", ".join(f"{key} {median[key]:.4g}" for key in wanted if isinstance(median.get(key), (int, float)))


if __name__ == "__main__":
    main()
