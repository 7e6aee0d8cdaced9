"""compute-sanitizer over the kernels' tests and over swapping."""

import json
import re
import shutil
from pathlib import Path

from phases.kernels import TEST_ENVIRONMENT, check_filters
from recorder import Skipped

SANITIZED_TESTS = ["attention::attention_over", "drafts::", "non_finite::", "product::", "rows::", "sampling::tokens"]


def sanitizer(suite):
    places = [shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer",
              "/usr/local/cuda/compute-sanitizer/compute-sanitizer"]
    checker = next((place for place in places if place and Path(place).exists()), None)
    if checker is None:
        raise Skipped("compute-sanitizer is not installed")
    cases = {**TEST_ENVIRONMENT, "INFLIGHT_TEST_CASES": "2" if suite.quick else "6"}

    def checked(tool):
        # What the driver answers is looked at by who asked: libraries ask for functions that it may lack.
        return [checker, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9", "--print-limit", "20"]

    check_filters(suite, "sanitizer", SANITIZED_TESTS)
    for tool in ["memcheck", "racecheck"]:
        code, output, seconds = suite.recorder.command(
            f"sanitizer-{tool}", [*checked(tool), str(suite.bundle / "kernel-tests"), "--test-threads=1", *SANITIZED_TESTS], 180, cases)
        sanitized(suite, f"{tool} of the kernels", code, output, seconds)
    # A whole runtime with copies both ways beside decoding, on a small model, and products by our own kernels: the checker
    # would spend its time in the library's.
    task = {"swap": {"blocks": 8, "transfers": 2, "sequences": 4, "context": 128, "steps": 4}}
    job = json.dumps({"model": str(suite.model("tiny-qwen3")), "task": task, "slots": 4, "batch_tokens": 256,
                      "context_tokens": 512, "utilization": 0.2, "host_bytes": 64 << 20, "deterministic": True})
    code, output, seconds = suite.recorder.command("sanitizer-swap", [*checked("memcheck"), str(suite.bundle / "measure"), job], 150)
    sanitized(suite, "memcheck of swapping beside decoding", code, output, seconds)


def sanitized(suite, what, code, output, seconds):
    summary = [line.strip("= ") for line in output.splitlines() if "SUMMARY" in line]
    if "not supported" in output and not summary:
        suite.row("sanitizer", what, f"open: {output.strip().splitlines()[-1][:120]}", word="open")
        return
    detail = f"{summary[-1] if summary else 'no summary: ' + output.strip()[-200:]} in {seconds:.0f} s"
    suite.check("sanitizer", what, code == 0 and is_clean(summary), detail)


def is_clean(summary):
    """Whether the checker has reached its end, and found nothing."""
    return bool(summary) and all(re.match(r"(ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards)", line) for line in summary)
