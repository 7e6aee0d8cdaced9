"""Engines under load: the shipped binary, and a list of requests that all arrive at once."""

import random
import sys


def binary(suite):
    """The binary that is shipped, with a worker on the GPU, under its own load generator."""
    path = suite.model("tiny-llama")
    command = [sys.executable, str(suite.bundle / "cluster.py"), str(suite.bundle / "inflight"), str(path)]
    code, output, seconds = suite.recorder.command("binary", command, 120)
    lines = [line for line in output.splitlines() if line.startswith("cluster: ")]
    # What went wrong stands before the last line.
    detail = lines[-1][9:] if code == 0 and lines else " | ".join(output.strip()[-500:].splitlines())
    suite.check("binary", "inflight up --device cuda:0 under inflight bench", code == 0, f"{detail} in {seconds:.0f} s")


def request_lengths(count):
    """A heavy-tailed mix like chat traffic: prompts and outputs log-normal, cut off."""
    generator = random.Random(11)
    draw = lambda mean, low, high: int(min(high, max(low, generator.lognormvariate(mean, 0.9))))
    return [(draw(5.6, 16, 2048), draw(5.0, 8, 1024)) for _ in range(count)]


def serve(suite):
    for name in ["qwen3-0.6b"] if suite.quick else ["qwen3-0.6b", "llama-3.1-8b"]:
        lengths = request_lengths(8 if suite.rehearse else 256 if suite.quick else 1024)
        try:
            result = suite.job("serve", suite.model(name), {"serve": {"lengths": lengths}}, 240, slots=256, batch_tokens=4096,
                               context_tokens=4096)
        except (RuntimeError, OSError) as error:
            suite.check("serve", name, False, str(error)[:300])
            continue
        suite.json["phases"].setdefault("serve", {})[name] = result
        suite.row("serve", f"{name}, {len(lengths)} requests", f"{result['output_tokens_per_second']:.0f} output tok/s, "
                  f"device busy {100 * result['device_seconds'] / result['seconds']:.0f} %")
