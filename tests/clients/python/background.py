"""Servers that run in the background of a script, and end with it."""

import contextlib
import ctypes
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

# The longest that a server may take to become ready, on a busy machine too.
READY_SECONDS = 50
PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """A loopback port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def process(command: list[str], log: pathlib.Path, environment: dict[str, str] | None = None, **options):
    """Runs `command` with its standard error in `log`, and ends it at the end of the block."""
    with open(log, "w", encoding="utf-8") as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **(environment or {})},
            preexec_fn=_die_with_parent,
            **options,
        )
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def wait_ready(url: str, child: subprocess.Popen, log: pathlib.Path) -> None:
    """Polls `url` until it answers 200; fails with the end of `log` if the process ends or READY_SECONDS pass."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            # Refused until it listens, or an error status while it starts.
            time.sleep(0.1)
    raise SystemExit(f"{url} is not ready; exit code {child.poll()}:\n{log.read_text(encoding='utf-8')[-4000:]}")


@contextlib.contextmanager
def cluster(program: str, folder: pathlib.Path, *flags: str):
    """Runs `inflight up` on free ports, with metrics at its HTTP APIs, and yields the URL of these."""
    log = folder / "inflight.log"
    command = [program, "up", "--json", "--port=0", "--workers=1", *flags]
    environment = {"INFLIGHT_ROUTER_HTTP_METRICS": "true"}
    with process(command, log, environment, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            event = json.loads(line)
            if event.get("event") == "ready":
                yield event["http"]
                return
        raise SystemExit(f"{command} did not become ready:\n{log.read_text(encoding='utf-8')[-4000:]}")
