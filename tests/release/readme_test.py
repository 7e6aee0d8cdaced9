"""The README's lines of installation and use, one after the other, in an empty home, without a network but for a stand-in of the Hub.

They run in a network namespace of their own, so the ports of the README are free. INFLIGHT_TEST_PROGRAM is the program, with the example hub_stand_in
beside it; INFLIGHT_TEST_PYTHON a Python with pip and uv. Prints how long each line took.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "deploy/release")]

PROGRAM = os.environ.get("INFLIGHT_TEST_PROGRAM")
# Seconds after which a line is given up.
LIMIT = 60
# What `up` prints when it serves.
READY = "is ready"


def blocks(text):
    """The shell lines of a document by the heading above them; a line that ends in a backslash goes on in the next one."""
    found, heading, inside = {}, "", False
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("```"):
            inside = line == "```sh"
        elif not inside and line.startswith("#"):
            heading = line.lstrip("# ")
        elif inside and line.strip():
            found.setdefault(heading, []).append(re.sub(r"\s+# .*", "", line).strip())
    return found


class Up:
    """An `up` of the README in the background."""

    def __init__(self, line, runner):
        self.output, self.is_ready = [], threading.Event()
        self.process = subprocess.Popen(["sh", "-c", "exec " + line], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **runner)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.output.append(line)
            if READY in line:
                self.is_ready.set()
        self.is_ready.set()

    def wait(self):
        ready = self.is_ready.wait(LIMIT) and self.process.poll() is None
        if not ready:
            self.stop()
            raise AssertionError("".join(self.output))

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(LIMIT)
        finally:
            self.process.kill()
            self.reader.join()


class Lines:
    """Runs lines of the README and keeps what they took."""

    def __init__(self, folder, endpoint):
        home, work = folder / "home", folder / "work"
        home.mkdir()
        work.mkdir()
        tools = folder / "tools"
        tools.mkdir()
        python = os.environ.get("INFLIGHT_TEST_PYTHON", sys.executable)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "environment"], check=True)
        (tools / "pip").write_text(f'#!/bin/sh\nexec "{python}" -m pip --python "{folder}/environment/bin/python" --disable-pip-version-check "$@"\n')
        (tools / "pip").chmod(0o755)
        beside = pathlib.Path(python).parent
        if found := shutil.which("uvx") or shutil.which("uvx", path=beside):
            (tools / "uvx").symlink_to(found)
        path = f"{home}/.local/bin:{tools}:/usr/local/bin:/usr/bin:/bin"
        variables = {"HOME": str(home), "PATH": path, "HF_ENDPOINT": endpoint, "UV_PYTHON": sys.executable, "UV_PYTHON_DOWNLOADS": "never"}
        self.runner = {"cwd": work, "env": variables}
        self.work, self.tools = work, tools

    def run(self, line, told=""):
        begin = time.monotonic()
        done = subprocess.run(["sh", "-c", line], input=told, capture_output=True, text=True, timeout=LIMIT, check=False, **self.runner)
        self.say(line, begin)
        if done.returncode != 0:
            raise AssertionError(f"{line}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def up(self, line):
        begin = time.monotonic()
        up = Up(line, self.runner)
        up.wait()
        self.say(line, begin)
        return up

    def say(self, line, begin):
        print(f"{time.monotonic() - begin:6.2f} s  {line}", flush=True)


def inside(folder, release, endpoint):
    """All of it, within the namespace."""
    lines = Lines(folder, endpoint)
    found = blocks((ROOT / "README.md").read_text())
    install, source = found["Install"], found["From source"]
    program = lines.work / "target/debug/inflight"
    program.parent.mkdir(parents=True)
    program.symlink_to(pathlib.Path(PROGRAM).resolve())
    shutil.copytree(ROOT / "examples", lines.work / "examples")
    served = None
    for line in install:
        line = line.replace("FOLDER", str(release))
        if line.startswith("uvx") and not (lines.tools / "uvx").exists():
            print(f"skipped, as uvx is not installed: {line}")
        elif " up" in line.split('"')[0]:
            up = lines.up(line)
            answer = lines.run('inflight generate --max-tokens 8 "Hello"')
            assert answer.strip(), line
            up.stop()
        else:
            # The lines of clients follow those of `up`, and go to the demo model.
            if served is None and line.split()[0] in ("inflight", "curl"):
                served = lines.up("inflight up")
            answer = lines.run(line)
            if line.startswith("curl"):
                assert json.loads(answer)["choices"][0]["message"]["content"], answer
            elif line.startswith("inflight"):
                assert "batch" in answer, answer
    assert served is not None, install
    for line in source:
        if line.startswith("cargo"):
            continue  # .ci/run is called by them.
        answer = lines.run(line, "Hello\n/quit\n" if line.endswith("chat") else "")
        if "--schema" in line:
            person = json.loads(answer)
            assert answer.strip().count("\n") == 0, answer
            assert set(person) == {"name", "age", "likes"} and 0 < len(person["name"]) <= 20, answer
    served.stop()


@unittest.skipUnless(PROGRAM, "INFLIGHT_TEST_PROGRAM is not set")
class Readme(unittest.TestCase):
    def test_each_line_works_in_an_empty_home(self):
        isolated = ["unshare", "--user", "--map-root-user", "--net"]
        if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode != 0:
            self.skipTest("network namespaces are not permitted")
        done = subprocess.run([*isolated, sys.executable, "-B", __file__, "--inside"], check=False)
        self.assertEqual(done.returncode, 0)

    def test_blocks_are_found_with_their_headings(self):
        text = "# A\n## B\n```sh\na b   # why\nc \\\n    d\n```\n```text\n# no\n```\n### C\n```sh\ne\n```\n"
        self.assertEqual(blocks(text), {"B": ["a b", "c      d"], "C": ["e"]})


def main():
    # Only now: the other tests of this folder need none of it.
    import binary_wheel
    from install_test import Folder

    program = pathlib.Path(PROGRAM).resolve()
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        # As in a release, without symbols.
        stripped = folder / "inflight"
        subprocess.run(["strip", "--strip-all", "-o", stripped, program], check=True)
        version = subprocess.run([stripped, "--version"], check=True, capture_output=True, text=True).stdout.split()[1]
        release = Folder(folder / "release", stripped.read_bytes(), version)
        binary_wheel.write(release.path, stripped, version, {"LICENSE": (ROOT / "LICENSE").read_bytes()}, level=0)
        release.sum()
        names = re.findall(r"inflight up ([\w.-]+/[\w.-]+)", (ROOT / "README.md").read_text())
        hub = subprocess.Popen([program.parent / "examples/hub_stand_in", *names], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            inside(folder, release.path, hub.stdout.readline().strip())
        finally:
            hub.stdin.close()
            hub.wait()


if __name__ == "__main__":
    if sys.argv[1:] == ["--inside"]:
        main()
    else:
        unittest.main()
