#!/usr/bin/env python3
"""Runs an unpacked image as a container engine would: by runc, or by namespaces of its own where runc does not work.

Either way: the image's user and environment, a read-only root file system, no capabilities, no new privileges, a file system in
memory at /tmp, and namespaces of its own for mounts, processes, IPC, the host name and the network, which has only the loopback.
"""

import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import uuid

TMP_BYTES = 64 << 20
CAPABILITY_LAST = 63
PR_SET_NO_NEW_PRIVS, PR_CAPBSET_READ, PR_CAPBSET_DROP = 38, 23, 24
START_SECONDS = 30


class Runc:
    """Containers of runc: `program` with `libraries` as the loader's path."""

    name = "runc"

    def __init__(self, program, libraries, work):
        self.program = program
        self.environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
        self.work = work

    def start(self, image, arguments, environment=()):
        identity = f"inflight-test-{uuid.uuid4().hex[:12]}"
        bundle = self.work / identity
        bundle.mkdir()
        spec = specification(image, arguments, environment)
        (bundle / "config.json").write_text(json.dumps(spec, indent=1), encoding="utf-8")
        pid_file = bundle / "pid"
        process = subprocess.Popen([*self.command(), "run", "--bundle", bundle, "--pid-file", pid_file, identity],
                                   env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return Container(process, lambda: int(pid_file.read_text(encoding="utf-8") or 0) if pid_file.exists() else 0,
                         lambda: self.delete(identity))

    def command(self):
        return [str(self.program), "--root", str(self.work / "runc")]

    def delete(self, identity):
        # Fails where the container is gone, as it should be.
        subprocess.run([*self.command(), "delete", "--force", identity], env=self.environment, check=False,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Unshare:
    """The same restrictions by unshare(1) and the system calls in `enter`."""

    name = "unshare"

    def __init__(self, work):
        self.work = work

    def start(self, image, arguments, environment=()):
        request = {"root": str(image.root), "user": image.config["User"], "environment": [*image.config["Env"], *environment],
                   "arguments": [*image.config["Entrypoint"], *arguments]}
        command = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--ipc", "--uts", "--net",
                   sys.executable, __file__, json.dumps(request)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")

        def pid():
            found = children.read_text(encoding="ascii").split() if children.exists() else []
            # Before it is the program, it is this file.
            program = pathlib.Path(image.config["Entrypoint"][0]).name
            return next((int(child) for child in found if program_of(child) == program), 0)

        return Container(process, pid, lambda: None)


def program_of(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


class Container:
    """A started container, until `close`."""

    def __init__(self, process, find_pid, remove):
        self.process = process
        self.find_pid = find_pid
        self.remove = remove
        self.output = ""

    def pid(self):
        """The host's id of the container's first process."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if pid := self.find_pid():
                return pid
            if self.process.poll() is not None:
                raise RuntimeError(f"the container ended at its start: {self.wait(1)}")
            time.sleep(0.05)
        raise RuntimeError(f"the container has no process after {START_SECONDS} s")

    def wait(self, seconds):
        """The exit status and the output, of standard output and error together."""
        output, _ = self.process.communicate(timeout=seconds)
        self.output += output.decode(errors="replace")
        return self.process.returncode, self.output

    def close(self):
        if self.process.poll() is None:
            if pid := self.find_pid():
                os.kill(pid, signal.SIGKILL)
            else:
                self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.remove()


def specification(image, arguments, environment):
    user, group = map(int, image.config["User"].split(":"))
    none = {kind: [] for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")}
    in_memory = ["nosuid", "nodev"]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": {"uid": user, "gid": group},
            "args": [*image.config["Entrypoint"], *arguments],
            "env": [*image.config["Env"], *environment],
            "cwd": image.config["WorkingDir"],
            "capabilities": none,
            "noNewPrivileges": True,
        },
        "root": {"path": str(image.root), "readonly": True},
        "hostname": "inflight",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=65536k"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": [*in_memory, "mode=1777", "size=65536k"]},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": [*in_memory, "mode=1777", f"size={TMP_BYTES}"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": [*in_memory, "noexec", "ro"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": [*in_memory, "noexec", "ro"]},
        ],
        "linux": {
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    }


def enter(request):
    """In the new namespaces: arranges the file systems, gives up all rights and becomes the program."""
    root = request["root"]
    # Read before the host's files are out of reach.
    libc = ctypes.CDLL(None, use_errno=True)
    mount = lambda *arguments: subprocess.run(["mount", *arguments], check=True)
    mount("--bind", root, root)
    mount("-t", "proc", "proc", f"{root}/proc")
    mount("-t", "tmpfs", "-o", "nosuid,mode=755,size=64k", "tmpfs", f"{root}/dev")
    for device in ("null", "zero", "full", "random", "urandom"):
        pathlib.Path(f"{root}/dev/{device}").touch()
        mount("--bind", f"/dev/{device}", f"{root}/dev/{device}")
    pathlib.Path(f"{root}/dev/shm").mkdir()
    for folder in ("dev/shm", "tmp"):
        mount("-t", "tmpfs", "-o", f"nosuid,nodev,mode=1777,size={TMP_BYTES}", "tmpfs", f"{root}/{folder}")
    mount("-o", "remount,bind,ro", root)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.chroot(root)
    os.chdir("/")
    for capability in range(CAPABILITY_LAST + 1):
        if libc.prctl(PR_CAPBSET_READ, capability, 0, 0, 0) == 1:
            check(libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0))
    user, group = map(int, request["user"].split(":"))
    os.setgroups([])
    os.setresgid(group, group, group)
    # Capabilities go with the last user id that is root's.
    os.setresuid(user, user, user)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    environment = dict(variable.split("=", 1) for variable in request["environment"])
    os.execve(request["arguments"][0], request["arguments"], environment)


def check(status):
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    enter(json.loads(sys.argv[1]))
