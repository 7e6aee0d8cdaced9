"""What the suite finds, kept on disk as it comes: a run that is cut off leaves everything up to there.

In the output folder are three files, whatever runs: gpu-suite.json, gpu-suite.txt (the table) and gpu-suite.log (the output of
every program, one after the other).
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class Skipped(Exception):
    """A step that can't be done here, with the reason; nothing is wrong with what it would have tested."""


class Recorder:
    def __init__(self, bundle: Path, out: Path, minutes: float):
        self.bundle, self.out = bundle, out
        self.out.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + minutes * 60
        self.rows = []  # (phase, what, figure, goal, verdict)
        revision = bundle / "REVISION"
        self.json = {"revision": revision.read_text().strip() if revision.exists() else "unknown", "phases": {}}
        self.failed = False
        self.log = self.out / "gpu-suite.log"
        self.log.write_bytes(b"")

    def left(self) -> float:
        """Seconds until the run should be over."""
        return self.deadline - time.monotonic()

    def row(self, phase, what, figure, goal="", good=None, word=None):
        verdict = word or ("" if good is None else ("ok" if good else "MISSED"))
        self.rows.append((phase, what, figure, goal, verdict))
        print(f"  {what}: {figure} {goal and f'(goal {goal}) '}{verdict}", flush=True)
        self.write()

    def check(self, phase, what, good, detail=""):
        """A row that decides on the exit status."""
        self.failed |= not good
        self.row(phase, what, detail or ("passed" if good else "FAILED"), "", good, None if good else "FAILED")

    def skip(self, phase, why):
        self.row(phase, phase, f"skipped: {why}", word="open")

    def command(self, name, command, timeout, environment=None):
        """Runs a program, whose output goes to the log; (exit status, output, seconds). 124: it ran past its time, 127: it
        could not be started. What the end of the whole run cuts off is skipped, and not failed."""
        env = {**os.environ, "RUST_BACKTRACE": "1", **(environment or {})}
        left = self.left()
        if left < 5:
            raise Skipped("no time left")
        limit = min(timeout, left)
        begun = time.monotonic()
        with open(self.log, "ab") as log:
            log.write(f"\n===== {name}: {' '.join(map(str, command))} (at most {limit:.0f} s)\n".encode())
            log.flush()
            start = log.tell()
            try:
                # A group of its own: checkers start the program as a child, which must end with them. Not a session: what
                # ends this command from outside should end them, too.
                process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                           process_group=0)
            except OSError as error:
                log.write(f"{error}\n".encode())
                return 127, str(error), 0.0
            try:
                code = process.wait(limit)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                code = 124
        seconds = time.monotonic() - begun
        with open(self.log, "rb") as log:
            log.seek(start)
            output = log.read().decode(errors="replace")
        with open(self.log, "ab") as log:
            log.write(f"===== {name}: exit status {code} after {seconds:.1f} s\n".encode())
        if code == 124 and limit < timeout:
            raise Skipped(f"{name} was cut off after {limit:.0f} s: no time left")
        if code == 124:
            output += f"\nran past {limit:.0f} s"
        return code, output, seconds

    def answer(self, name, command, timeout):
        """The last line of JSON that a program prints; an exception with its error if there is none."""
        code, output, _ = self.command(name, command, timeout)
        lines = [line for line in output.splitlines() if line.startswith("{")]
        try:
            answer = json.loads(lines[-1]) if code != 124 else {}
        except (IndexError, json.JSONDecodeError):
            answer = {}
        if not answer or "error" in answer:
            raise RuntimeError(answer.get("error") or f"exit status {code}: {output.strip()[-600:]}")
        return answer

    def job(self, name, model, task, timeout=600, **options):
        """Runs the measuring binary on a model; its result, or an exception with its error."""
        job = json.dumps({"model": str(model), "task": task, **options})
        self.loaded = self.answer(name, [str(self.bundle / "measure"), job], timeout)
        return self.loaded["result"]

    def write(self):
        self.json["rows"] = self.rows
        self.json["passed"] = not self.failed
        for name, text in [("gpu-suite.json", json.dumps(self.json, indent=1)), ("gpu-suite.txt", self.table())]:
            partial = self.out / f"{name}.partial"
            partial.write_text(text)
            partial.replace(self.out / name)

    def table(self):
        rows = [("phase", "what", "figure", "goal", "verdict"), *self.rows]
        widths = [min(90, max(len(str(row[i])) for row in rows)) for i in range(5)]
        lines = ["  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        lines.insert(1, "-" * (sum(widths) + 8))
        return "\n".join(lines) + f"\n\nchecks {'FAILED' if self.failed else 'passed'}\n"


def end_on_signals():
    """A run that is told to end still prints its table."""
    def end(number, _):
        sys.exit(128 + number)
    for number in [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]:
        signal.signal(number, end)
