"""The GPU suite: correctness, then benchmarks, then one table and one JSON file."""

import argparse
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import images
import shapes
from phases.all import DEFAULT, PHASES
from phases.kernels import failed_families
from phases.parity import CANONICAL, PARITY_FP8
from plans import MINUTES, PLANS, Plan, Step, deadlines
from recorder import Recorder, Skipped, end_on_signals, rehearsal_failures


# Options of a job that name another way of computing.
MODES = ["deterministic", "experimental", "fp8_kv_cache", "graphs", "copy_streams", "autotune", "overlap", "gpus", "lone_communicator"]


class Suite:
    """What phases have in common."""

    def __init__(self, arguments):
        self.recorder = Recorder(Path(arguments.bundle), Path(arguments.out), arguments.minutes, arguments.name)
        self.row, self.check = self.recorder.row, self.recorder.check
        self.json = self.recorder.json
        self.bundle = self.recorder.bundle
        self.folder = Path(arguments.models)
        self.quick, self.rehearse = arguments.quick, arguments.rehearse
        self.ceilings = None
        self.makers = {}  # processes that make checkpoints, by the checkpoint's folder

    def shape(self, name):
        """The name of the shape that a model has here: in a rehearsal every one is tiny."""
        if self.rehearse and not name.startswith("tiny"):
            return "tiny-qwen3" if name.startswith("qwen3") else "tiny-llama"
        return name

    def job(self, name, path, task, timeout=600, **options):
        """Runs the measuring binary on a model; its result, or an exception with its error. Figures are taken only of a runtime that
        has computed about what the deterministic eager one does; which fast paths it used is kept with the results."""
        if "logits" not in task and "gpus" not in options:
            bound = PARITY_FP8 if options.get("fp8_kv_cache") else CANONICAL
            options["canonical"] = {"file": str(self.reference(path)), "bound": bound}
        result = self.recorder.job(name, path, task, timeout, **options)
        paths = {path: state for path, state in self.recorder.loaded["paths"].items() if state is not True}
        used = {key: value for key, value in options.items() if key in MODES}
        self.json.setdefault("paths off", {})[" ".join([name, path.name, json.dumps(used)])] = paths
        return result

    def reference(self, path):
        """File with logits of the deterministic eager runtime, made once by each build and set of kernel images."""
        build = json.dumps([self.json["revision"], self.json["images"]["replaced"]])
        file = path / f"canonical-{hashlib.sha256(build.encode()).hexdigest()[:12]}.f32"
        if not file.exists():
            partial = file.with_suffix(".partial")
            self.recorder.job("reference", path, {"steps": {"cases": [], "repeats": 1}}, 120, slots=8, batch_tokens=1024,
                              context_tokens=1024, utilization=0.9, deterministic=True, graphs=False, overlap=False, autotune=False,
                              canonical={"file": str(partial)})
            partial.replace(file)
        return file

    def package(self, name):
        """A package, or the reason why not; None where a rehearsal does without."""
        try:
            return importlib.import_module(name)
        except ImportError as error:
            if self.rehearse:
                return None
            raise Skipped(f"{error}; this step needs torch and transformers") from error

    def torch(self):
        """torch with a GPU, or the reason why not."""
        torch = self.package("torch")
        if torch is None or self.package("transformers") is None:
            raise Skipped("torch and transformers are not installed")
        if not torch.cuda.is_available() and not self.rehearse:
            raise RuntimeError("torch sees no GPU: no NVIDIA driver, or one older than this torch needs")
        return torch

    def hollow(self):
        """Whether this is a rehearsal without torch, on checkpoints of zeros."""
        return self.rehearse and (self.package("torch") is None or self.package("transformers") is None)

    def gpu_count(self):
        return 1 if self.rehearse else self.torch().cuda.device_count()

    def model(self, name, dtype="bfloat16"):
        """A checkpoint of that shape; made once. In a rehearsal every one is tiny."""
        name = self.shape(name)
        folder = self.folder / dtype
        if self.hollow():
            return shapes.make_hollow(name, folder, dtype)
        torch = self.torch()
        path = folder / name
        begun = time.monotonic()
        if name.startswith("tiny"):
            # At once: a process of its own would only import torch again.
            importlib.import_module("models").make(name, folder, getattr(torch, dtype))
        elif not (path / "tokenizer.json").exists():
            if name not in self.makers:
                self.make([name], dtype)
            self.wait(name)
        if time.monotonic() - begun > 5:
            print(f"  (waited {time.monotonic() - begun:.0f} s for {name})", flush=True)
        return path

    def make(self, names, dtype="bfloat16"):
        """Begins to make checkpoints, one after the other, in a process of its own."""
        folder = self.folder / dtype
        folder.mkdir(parents=True, exist_ok=True)
        needed = sum(shapes.file_bytes(name) for name in names if not (folder / name / "tokenizer.json").exists())
        if shutil.disk_usage(folder).free < 1.1 * needed:
            raise Skipped(f"{folder} has no {needed >> 30} GiB left for {', '.join(names)}; set --models")
        command = [sys.executable, str(self.bundle / "models.py"), str(folder), dtype, *names]
        output = tempfile.TemporaryFile()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0)
        self.makers |= {name: (folder / name, process, output) for name in names}

    def wait(self, name):
        """Waits for a checkpoint that is being made."""
        path, process, output = self.makers[name]
        while not (path / "tokenizer.json").exists():
            if process.poll() is not None and not (path / "tokenizer.json").exists():
                del self.makers[name]
                output.seek(0)
                raise RuntimeError(f"{name} could not be made: {output.read().decode(errors='replace').strip()[-300:]}")
            if self.recorder.left() < 3:
                raise Skipped(f"{name} is not made yet: no time left")
            time.sleep(0.2)

    def prepare(self, names):
        """Begins to make the checkpoints that later phases need."""
        names = [name for name in names if not (self.folder / "bfloat16" / name / "tokenizer.json").exists()]
        if not names or self.rehearse:
            return
        try:
            self.make(names)
        except Skipped as why:
            self.row("models", ", ".join(names), f"skipped: {why}", word="open")

    def end_makers(self):
        for _, process, _ in self.makers.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def run(self, plan, ends):
        """All steps of a plan, each until its own end at the latest."""
        prepared = False
        for step, end in zip(plan.steps, ends):
            phase = step.phase
            # Checkpoints are made on the GPU, which nothing else may use while its bandwidth is measured.
            if not prepared and phase not in ("machine", "yardstick"):
                self.prepare(plan.models)
                prepared = True
            print(f"== {phase}", flush=True)
            begun = time.monotonic()
            if self.recorder.left() < 10:
                self.recorder.skip(phase, "no time left; run it with --only")
                continue
            try:
                self.recorder.limit_phase(end)
                PHASES[phase](self, **step.options)
            except Skipped as why:
                self.recorder.skip(phase, str(why))
            except Exception as error:  # A phase that breaks must not hide the others.
                self.check(phase, phase, False, f"{type(error).__name__}: {str(error)[:400]}")
            finally:
                self.recorder.end_phase()
            self.json.setdefault("seconds", {})[phase] = round(time.monotonic() - begun, 1)
            self.recorder.write()


def default_models():
    """Memory, where there is plenty: writing 16 GB to a disk takes a minute."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 45e9 and available_memory() > 100e9
    folder = memory if roomy else Path(tempfile.gettempdir())
    return str(folder / "inflight-models")


def available_memory():
    """Bytes that programs may still take; 0 if nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def earlier_failures(arguments):
    """The families that failed by the results of an earlier run; None: all."""
    file = Path(arguments.results) if arguments.results else None
    if file is None:
        return None
    try:
        return failed_families(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        sys.exit(f"{file}: {error}")


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu-suite"), help="folder of the results [default: $OUT, else gpu-suite]")
    parser.add_argument("--models", default=default_models(),
                        help="folder of the random-weight checkpoints: 37 GB, 2 GB with --quick [default: %(default)s]")
    parser.add_argument("--plan", choices=PLANS, help="that of the script, in place of phases")
    parser.add_argument("--results", metavar="SLOT.json", help="of `--plan`: results of an earlier run, whose failed families of kernel tests alone are run again")
    parser.add_argument("--only", default=",".join(DEFAULT), metavar="PHASE,...", help=f"of {' '.join(PHASES)}")
    parser.add_argument("--quick", action="store_true", help="the smallest model, fewer cases")
    parser.add_argument("--minutes", type=float, help=f"phases that do not fit into them are left out, and said to be [default: 25, of a plan {MINUTES}]")
    parser.add_argument("--peers", metavar="ARCHIVE", help="tar archive of Python packages to compare with, vLLM's among them")
    parser.add_argument("--rehearse", action="store_true",
                        help="goes through every step without a GPU, on tiny models; each must fail and say that there is none")
    arguments = parser.parse_args()
    arguments.minutes = arguments.minutes or (MINUTES if arguments.plan else 25)
    arguments.name = arguments.plan or "gpu-suite"
    unknown = set(arguments.only.split(",")) - set(PHASES)
    if unknown:
        parser.error(f"unknown phases {sorted(unknown)}; there are {list(PHASES)}")
    return arguments


def unpack_peers(archive):
    """Makes the packages of an archive importable here and in programs that this one starts."""
    folder = tempfile.mkdtemp(prefix="gpu-suite-peers-")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))


def import_packages():
    """Imports what phases need, before any of them has an end: an import that is cut off can't be repeated."""
    for name in ["torch", "transformers"]:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"{name}: {error}", flush=True)


def main():
    arguments = parse()
    end_on_signals()
    begun = time.monotonic()
    if arguments.peers:
        unpack_peers(arguments.peers)
    if not arguments.rehearse:
        import_packages()
    suite = Suite(arguments)
    recorder = suite.recorder
    suite.json["images"] = images.describe(recorder.bundle)
    if arguments.plan:
        plan = PLANS[arguments.plan](earlier_failures(arguments))
        ends = deadlines(plan, begun, arguments.minutes)
    else:
        plan = Plan([Step(phase, 0) for phase in arguments.only.split(",")], [])
        ends = [recorder.deadline] * len(plan.steps)
    try:
        suite.run(plan, ends)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        suite.end_makers()
        recorder.write()
        print("\n" + recorder.table(), flush=True)
        print(f"results: {recorder.out / recorder.name}.json, .txt and .log", flush=True)
    if arguments.rehearse:
        unexpected = rehearsal_failures(recorder.rows)
        print("\n".join(["rehearsed" if not unexpected else "not because there is no GPU:", *unexpected]), flush=True)
        sys.exit(1 if unexpected else 0)
    sys.exit(1 if recorder.failed else 3 if recorder.undone and arguments.plan else 0)


if __name__ == "__main__":
    main()
