"""How long each kernel of a step takes alone, and what it moves, by Nsight Compute's counters."""

import csv
import json
import shutil
import tempfile
from pathlib import Path

from recorder import Skipped

# Columns of the report: nanoseconds, and bytes of device memory. Few enough for one pass: a second would run every kernel twice and
# restore what the first wrote.
DURATION, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
CASES = [dict(sequences=1, context=1024, tokens=1), dict(sequences=64, context=1024, tokens=1),
         dict(sequences=1, context=0, tokens=8192)]


def profile(suite, name="qwen3-0.6b"):
    """A decode step of one sequence, one of 64, and a prefill: kernels one after the other, at the clocks that the GPU has."""
    places = [shutil.which("ncu"), "/usr/local/cuda/bin/ncu"]
    profiler = next((place for place in places if place and Path(place).exists()), None)
    if profiler is None:
        raise Skipped("Nsight Compute (ncu) is not installed")
    command = suite.recorder.measure_command(
        suite.model(name), {"steps": {"cases": CASES, "repeats": 2, "profile": True}}, slots=64, batch_tokens=8192, context_tokens=16384,
        graphs=False, utilization=0.3)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.csv"
        code, output, _ = suite.recorder.command("profile", [
            profiler, "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none", "--metrics",
            ",".join([DURATION, READ, WRITTEN]), "--kernel-name-base", "function", "--csv", "--page", "raw", "--print-units", "base",
            "--log-file", str(report), *command], 150)
        text = report.read_text() if report.exists() else ""
    steps = steps_of(text)
    if code != 0 or len(steps) != len(CASES):
        suite.check("profile", name, False, f"{len(steps)} steps, exit status {code}: {(text.strip() or output.strip())[-300:]}")
        return
    answer = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    figures = suite.json["phases"].setdefault("profile", {})[name] = []
    for row, kernels in zip(answer["result"], steps):
        figures.append({"case": row["case"], "kernels": kernels})
        total = sum(entry["us"] for entry in kernels.values())
        sequences, context, tokens = row["case"]
        suite.row("profile", f"{name}, {sequences} x {tokens:,} after {context:,}", f"{total / 1e3:.3f} ms in kernels, one after the other")
        for kernel, entry in sorted(kernels.items(), key=lambda item: -item[1]["us"]):
            suite.row("profile", f"  {kernel}", f"{entry['launches']} x {entry['us'] / entry['launches']:.2f} us = {100 * entry['us'] / total:.0f} %, "
                      f"{entry['bytes'] / entry['us'] / 1e3:.0f} GB/s")


def steps_of(text):
    """The kernels of each step in a report of ncu, by name: launches, microseconds and bytes of all."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = csv.DictReader(lines)
    steps = []
    for row in rows:
        if not row["ID"]:  # the units
            continue
        kernel = row["Kernel Name"]
        if kernel.startswith("embedding"):
            steps.append({})
        entry = steps[-1].setdefault(kernel, {"launches": 0, "us": 0.0, "bytes": 0.0})
        figure = lambda column: float((row.get(column) or "0").replace(",", ""))
        entry["launches"] += 1
        entry["us"] += figure(DURATION) / 1e3
        entry["bytes"] += figure(READ) + figure(WRITTEN)
    return steps
