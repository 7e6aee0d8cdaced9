"""What the suite finds, kept on disk as it comes: a run that is cut off leaves everything up to there.

In the output folder are three files, whatever runs: NAME.json, NAME.txt (the table) and NAME.log (the output of every program,
one after the other).
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Of one program's output in the log; what is in the middle is left out.
LOG_OUTPUT_MAX = 1 << 20
# What programs say in a rehearsal, where there is no GPU.
NO_GPU = ("no NVIDIA driver", "no GPU", "libcuda")


class Skipped(Exception):
    """A step that can't be done here, with the reason; nothing is wrong with what it would have tested. `output`: what a program printed
    that was cut off."""

    def __init__(self, why, output=""):
        super().__init__(why)
        self.output = output


class Recorder:
    def __init__(self, bundle: Path, out: Path, minutes: float, name: str = "gpu-suite"):
        self.bundle, self.out, self.name = bundle, out, name
        self.out.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + minutes * 60
        self.phase_deadline = self.deadline
        self.rows = []  # (phase, what, figure, goal, verdict)
        revision = bundle / "REVISION"
        self.json = {"revision": revision.read_text().strip() if revision.exists() else "unknown", "phases": {}}
        self.failed = False
        self.undone = []  # what was to be checked and was not
        self.loaded = {}
        self.scratch = tempfile.TemporaryDirectory(prefix="gpu-suite-")
        self.jobs = 0
        self.log = self.out / f"{name}.log"
        self.log.write_bytes(b"")
        # Where a step hangs that is no program of its own.
        signal.signal(signal.SIGALRM, self.out_of_time)

    def left(self) -> float:
        """Seconds until the phase should be over."""
        return min(self.deadline, self.phase_deadline) - time.monotonic()

    def limit_phase(self, deadline: float):
        """Ends the phase by then: programs when they have run so long, anything else a second later."""
        self.phase_deadline = deadline
        signal.setitimer(signal.ITIMER_REAL, max(0.1, self.left() + 1))

    def end_phase(self):
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.phase_deadline = self.deadline

    @staticmethod
    def out_of_time(*_):
        raise Skipped("cut off: no time left")

    def row(self, phase, what, figure, goal="", good=None, word=None):
        verdict = word or ("" if good is None else ("ok" if good else "MISSED"))
        self.rows.append((phase, what, figure, goal, verdict))
        print(f"  {what}: {figure} {goal and f'(goal {goal}) '}{verdict}", flush=True)
        self.write()

    def check(self, phase, what, good, detail=""):
        """A row that decides on the exit status."""
        self.failed |= not good
        self.row(phase, what, detail or ("passed" if good else "FAILED"), "", good, None if good else "FAILED")

    def skip(self, phase, why, what=None):
        """A row of something that was to be checked and was not: the run is not complete."""
        self.undone.append(what or phase)
        self.row(phase, what or phase, f"skipped: {why}", word="open")

    def command(self, name, command, timeout, environment=None):
        """Runs a program, whose output goes to the log; (exit status, output, seconds). 124: it ran past its time, 127: it
        could not be started. What the end of the phase cuts off is skipped, and not failed."""
        env = {**os.environ, "RUST_BACKTRACE": "1", **(environment or {})}
        left = self.left()
        if left < 3:
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
        output = self.shorten_log(start)
        self.note(f"===== {name}: exit status {code} after {seconds:.1f} s\n")
        if code == 124 and limit < timeout:
            raise Skipped(f"{name} was cut off after {limit:.0f} s: no time left", output)
        if code == 124:
            output += f"\nran past {limit:.0f} s"
        return code, output, seconds

    def shorten_log(self, start: int) -> str:
        """What is in the log from there on, of which too much is cut out of the file."""
        with open(self.log, "r+b") as log:
            log.seek(start)
            output = log.read()
            if len(output) > LOG_OUTPUT_MAX:
                part = LOG_OUTPUT_MAX // 2
                log.seek(start)
                log.truncate()
                log.write(output[:part] + b"\n[...]\n" + output[-part:])
        return output.decode(errors="replace")

    def note(self, text: str):
        with open(self.log, "ab") as log:
            log.write(text.encode())

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
        self.loaded = self.answer(name, self.measure_command(model, task, **options), timeout)
        self.json.setdefault("jobs", []).append({"name": name, "model": Path(model).name, "options": options, "answer": self.loaded})
        return self.loaded["result"]

    def measure_command(self, model, task, **options):
        """The command of a job, which is in a file: one argument has room for 128 KiB."""
        self.jobs += 1
        file = Path(self.scratch.name) / f"job-{self.jobs}.json"
        job = json.dumps({"model": str(model), "task": task, **options})
        file.write_text(job)
        self.note(f"\n{file.name}: {job[:2000]}\n")
        return [str(self.bundle / "measure"), str(file)]

    def write(self):
        self.json["rows"] = self.rows
        self.json["passed"], self.json["undone"] = not (self.failed or self.undone), self.undone
        for name, text in [("json", json.dumps(self.json, indent=1)), ("txt", self.table())]:
            partial = self.out / f"{self.name}.{name}.partial"
            partial.write_text(text)
            partial.replace(self.out / f"{self.name}.{name}")

    def table(self):
        rows = [("phase", "what", "figure", "goal", "verdict"), *self.rows]
        widths = [min(90, max(len(str(row[i])) for row in rows)) for i in range(5)]
        lines = ["  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        lines.insert(1, "-" * (sum(widths) + 8))
        verdict = "FAILED" if self.failed else f"INCOMPLETE, without {', '.join(self.undone)}" if self.undone else "passed"
        return "\n".join(lines) + f"\n\nchecks {verdict}\n"


class Conversation:
    """A program that answers each line of JSON with one. What else it prints goes to the log."""

    def __init__(self, recorder: Recorder, name: str, command):
        self.recorder, self.name = recorder, name
        self.buffer = b""
        recorder.note(f"\n===== {name}: {' '.join(map(str, command))}, to be asked\n")
        with open(recorder.log, "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, process_group=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                pipe.close()
            except OSError:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def ask(self, message, timeout):
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            pass  # It has ended; its last answer says why.
        return self.answer(timeout)

    def answer(self, timeout):
        """The next line of JSON; an exception with its error, or if it ends or says nothing for so long."""
        left = self.recorder.left()
        end = time.monotonic() + min(timeout, left)
        while True:
            line, newline, rest = self.buffer.partition(b"\n")
            if newline:
                self.buffer = rest
                if not line.startswith(b"{"):
                    self.recorder.note(line.decode(errors="replace") + "\n")
                    continue
                answer = json.loads(line)
                if "error" in answer:
                    raise RuntimeError(f"{self.name}: {answer['error']}")
                return answer
            if not select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                if left < timeout:
                    raise Skipped(f"{self.name} was cut off: no time left")
                raise RuntimeError(f"{self.name} said nothing for {timeout:.0f} s")
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                raise RuntimeError(f"{self.name} ended with exit status {self.process.wait()}; the log may say why")
            self.buffer += more


def rehearsal_failures(rows):
    """Of a run without a GPU: the phases and steps that did not fail for the reason that there is none, or were not reached. The
    first phase only names the machine; figures without a verdict are judged by nobody."""
    def expected(phase, figure, verdict):
        if phase == "machine" and verdict == "ok":
            return True
        if verdict == "FAILED":
            return any(word in figure for word in NO_GPU)
        return verdict == "" or verdict == "open" and "no time left" not in figure
    return [f"{phase}: {what}: {figure}" for phase, what, figure, _, verdict in rows if not expected(phase, str(figure), verdict)]


def end_on_signals():
    """A run that is told to end still prints its table."""
    def end(number, _):
        sys.exit(128 + number)
    for number in [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]:
        signal.signal(number, end)
