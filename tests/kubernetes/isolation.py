"""Runs a program in namespaces of its own: network, mounts, processes, host name and IPC.

Nothing that it starts can reach another machine, leave a mount behind or outlive it: with the first process of the namespace all
others end.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

CGROUPS = pathlib.Path("/sys/fs/cgroup")
INSIDE = "INFLIGHT_KUBERNETES_CGROUP"
END_SECONDS = 20


def cgroup():
    """The cgroup of all containers of this run, below each controller."""
    return os.environ[INSIDE]


def controllers():
    """The hierarchies of cgroup v1."""
    if (CGROUPS / "cgroup.controllers").exists():
        sys.exit("this machine has cgroup v2 alone: tests/kubernetes makes its cgroups in the hierarchies of v1 so far")
    found = [folder for folder in CGROUPS.iterdir() if (folder / "tasks").exists()]
    missing = {"cpu", "cpuacct", "cpuset", "memory", "devices", "pids"} - {folder.name for folder in found}
    if missing:
        sys.exit(f"{CGROUPS} lacks {', '.join(sorted(missing))}: mount these hierarchies of cgroup v1")
    return found


def make_cgroups(name):
    for controller in controllers():
        folder = controller / name
        folder.mkdir()
        # Children of a cpuset without processors and memory take no process.
        for file in ("cpuset.cpus", "cpuset.mems"):
            if (folder / file).exists():
                (folder / file).write_text((controller / file).read_text())


def remove_cgroups(name):
    """Removes them in the hierarchy of v2 beside them, too, where runc makes it. The last processes may still be ending."""
    deadline = time.monotonic() + END_SECONDS
    for controller in CGROUPS.iterdir():
        for folder, _, _ in os.walk(controller / name, topdown=False):
            while not removed(folder):
                if time.monotonic() > deadline:
                    print(f"warning: {folder} stays", file=sys.stderr)
                    break
                time.sleep(0.05)


def removed(folder):
    try:
        os.rmdir(folder)
    except OSError:
        return False
    return True


def reaper(main):
    """Is the first process of the namespace: collects whatever loses its parent, and ends with `main`."""
    child = os.fork()
    if child == 0:
        main()
        sys.stdout.flush()
        os._exit(0)
    # After its end there may be nothing left to tell.
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM) if os.path.exists(f"/proc/{child}") else None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def run(main):
    """Runs `main` in the namespaces; its exit status is this program's."""
    if INSIDE in os.environ:
        def guarded():
            try:
                main()
            except SystemExit as end:
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
                sys.stdout.flush()
                os._exit(0 if end.code is None else 1 if isinstance(end.code, str) else end.code)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stdout.flush()
                os._exit(1)
        reaper(guarded)
    if os.geteuid() != 0:
        sys.exit("this needs root: it makes namespaces, mounts and cgroups")
    name = f"inflight-kubernetes-{os.getpid()}"
    make_cgroups(name)
    command = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc",
               sys.executable, *sys.argv]
    process = subprocess.Popen(command, env={**os.environ, INSIDE: name})
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while process.poll() is None and not children.read_text():
        time.sleep(0.01)
    print(f"enter with: nsenter --all --target={children.read_text().strip()}", flush=True)
    # The end of unshare, which ignores SIGTERM, is that of every process of the namespace.
    signal.signal(signal.SIGTERM, lambda *_: process.kill())
    # From a terminal it reaches the processes inside as well.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        status = process.wait()
    finally:
        remove_cgroups(name)
    sys.exit(status if status >= 0 else 128 - status)
