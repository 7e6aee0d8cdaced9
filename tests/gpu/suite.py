"""The GPU suite: correctness, then benchmarks, then one table and one JSON file."""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from recorder import Recorder, Skipped, end_on_signals

# Milliseconds of a decode step at a context of 1,024 tokens, and of a prefill of 1,024, that memory and arithmetic of
# one H200 allow (bf16; 4.3 TB/s and 790 TFLOP/s measured). Small ones first: what they find holds for the others.
FLOORS = {
    "qwen3-0.6b": {1: 0.30, 8: 0.50, 64: 2.03, 256: 7.38, "prefill": 1.29},
    "llama-3.1-8b": {1: 3.52, 8: 3.74, 64: 5.49, 256: 12.9, "prefill": 18.4},
    "qwen3-1.7b": {1: 0.83, 8: 1.02, 64: 2.55, 256: 8.11, "prefill": 3.81},
    "qwen3-8b": {1: 3.56, 8: 3.80, 64: 5.77, 256: 13.9, "prefill": 18.4},
}
FLOORS_OF, FLOORS_COPY_TB_S, FLOORS_TFLOPS = "H200", 4.3, 790.0
# In order: what everything else rests on first, what takes long and says least last.
PHASES = ["machine", "kernels", "parity", "binary", "determinism", "drafts", "tensor-parallel", "steps", "swap", "serve", "peer", "sanitizer", "deterministic-steps",
          "fp8-steps", "serial-steps"]
# Of teacher-forced logits: the largest difference as a part of the largest logit; with a KV cache in 16 bits, and in 8.
PARITY, PARITY_FP8 = 2e-2, 1e-1
# What a checker runs of the kernels' tests: those over buffers, not the ones of single functions.
KERNEL_TESTS = ["attention::", "drafts::", "overlap::", "product::", "rows::", "sampling::"]
# A property that fails is made small, but not for longer than this; what it then says is enough.
KERNEL_TEST_ENVIRONMENT = {"INFLIGHT_TEST_GPU": "1", "PROPTEST_MAX_SHRINK_TIME": "15000", "RUST_BACKTRACE": "0"}
KERNEL_TIMING = "timing::"
SANITIZED_TESTS = ["attention::attention_over", "drafts::", "product::", "rows::", "sampling::tokens"]


class Suite:
    def __init__(self, arguments):
        self.recorder = Recorder(Path(arguments.bundle), Path(arguments.out), arguments.minutes)
        self.row, self.check, self.job = self.recorder.row, self.recorder.check, self.recorder.job
        self.json = self.recorder.json
        self.bundle = self.recorder.bundle
        self.folder = Path(arguments.models)
        self.quick, self.rehearse = arguments.quick, arguments.rehearse
        self.ceilings = None

    def torch(self):
        """torch with a GPU, or the reason why not."""
        try:
            import torch
            import transformers
        except ImportError as error:
            raise Skipped(f"{error}; this step needs torch and transformers") from error
        if not torch.cuda.is_available() and not self.rehearse:
            raise RuntimeError("torch sees no GPU: no NVIDIA driver, or one older than this torch needs")
        return torch

    def model(self, name, dtype="bfloat16"):
        """A checkpoint of that shape; made once. In a rehearsal every one is tiny."""
        torch = self.torch()
        import models
        if self.rehearse and not name.startswith("tiny"):
            name = "tiny-qwen3" if name.startswith("qwen3") else "tiny-llama"
        folder = self.folder / dtype
        folder.mkdir(parents=True, exist_ok=True)
        bytes_needed = models.file_bytes(name)
        if not (folder / name / "tokenizer.json").exists() and shutil.disk_usage(folder).free < 1.1 * bytes_needed:
            raise Skipped(f"{folder} has no {bytes_needed >> 30} GiB left for {name}; set --models")
        begun = time.monotonic()
        path = models.make(name, folder, getattr(torch, dtype))
        if time.monotonic() - begun > 5:
            print(f"  ({name} made in {time.monotonic() - begun:.0f} s)", flush=True)
        return path

    # Phases

    def machine(self):
        """What this runs on; and whether there is anything to run on, in the words of the binary."""
        code, output, _ = self.recorder.command(
            "nvidia-smi", ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"], 30)
        self.row("machine", "nvidia-smi", output.strip().splitlines()[-1][:90] if output.strip() else f"exit status {code}")
        try:
            torch = self.torch()
            import transformers
            versions = f"python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}"
        except (Skipped, RuntimeError) as error:
            versions = str(error)
        self.row("machine", "packages", versions)
        self.row("machine", "libraries", os.environ.get("LD_LIBRARY_PATH") or "no cublasLt beside torch; the system's, if it has one")
        for program in ["inflight", "measure", "kernel-tests"]:
            # A job with all that has no default, of a model that is nowhere.
            job = json.dumps({"model": "nowhere", "task": {"steps": {"cases": [], "repeats": 1}}})
            arguments = {"inflight": ["--version"], "measure": [job], "kernel-tests": ["--list"]}[program]
            code, output, _ = self.recorder.command(program, [str(self.bundle / program), *arguments], 30)
            # The measuring binary takes the job and finds no model: that it can say so is enough.
            good = code == 1 and "field" not in output if program == "measure" else code == 0
            self.check("machine", f"{program} starts", good, "" if good else output.strip()[-200:])

    def check_filters(self, phase, filters):
        """Fails for each filter that selects none of the kernel tests: the program would run nothing and exit with 0."""
        code, output, _ = self.recorder.command("kernel-tests", [str(self.bundle / "kernel-tests"), "--list"], 30)
        known = [line.removesuffix(": test") for line in output.splitlines() if line.endswith(": test")]
        unknown = unmatched(filters, known)
        if code != 0 or unknown:
            self.check(phase, "every filter selects a test", False, f"none for {', '.join(unknown)}" if code == 0 else outcome(output))

    def kernels(self):
        self.check_filters("kernels", [*KERNEL_TESTS, KERNEL_TIMING])
        # Each family in a process of its own: after one fault on a GPU, nothing else works in that process.
        for family in KERNEL_TESTS:
            code, output, seconds = self.recorder.command(
                f"kernels-{family.rstrip(':')}", [str(self.bundle / "kernel-tests"), "--test-threads=4", "--nocapture", family], 240,
                KERNEL_TEST_ENVIRONMENT)
            self.check("kernels", f"{family.rstrip(':')} against references in f64", code == 0, f"{outcome(output)} in {seconds:.0f} s")
            for line in [] if code == 0 else failures(output):
                print(f"    {line}", flush=True)
        code, output, _ = self.recorder.command(
            "kernel-timing", [str(self.bundle / "kernel-tests"), "--ignored", "--nocapture", KERNEL_TIMING], 180, KERNEL_TEST_ENVIRONMENT)
        rows = list(rows_of(output))
        self.check("kernels", "products of few rows are measured", code == 0 and len(rows) > 1, f"{len(rows)} figures")
        self.json["phases"]["products of few rows"] = rows
        for row in rows:
            if row.get("overlap") and row["m"] in (1, 8):
                self.row("kernels", f"{row['m']} x {row['k']} by {row['n']}, overlapping",
                         f"{row['us']:.1f} us, {row['gb_s']} GB/s, {100 * row['share_of_copy']:.0f} % of copy "
                         f"(deterministic product: {row['deterministic_us']:.1f} us)")

    def sanitizer(self):
        places = [shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer",
                  "/usr/local/cuda/compute-sanitizer/compute-sanitizer"]
        checker = next((place for place in places if place and Path(place).exists()), None)
        if checker is None:
            raise Skipped("compute-sanitizer is not installed")
        cases = {**KERNEL_TEST_ENVIRONMENT, "INFLIGHT_TEST_CASES": "2" if self.quick else "6"}

        def checked(tool):
            # What the driver answers is looked at by who asked: libraries ask for functions that it may lack.
            return [checker, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9", "--print-limit", "20"]

        self.check_filters("sanitizer", SANITIZED_TESTS)
        for tool in ["memcheck", "racecheck"]:
            code, output, seconds = self.recorder.command(
                f"sanitizer-{tool}", [*checked(tool), str(self.bundle / "kernel-tests"), "--test-threads=1", *SANITIZED_TESTS], 180, cases)
            self.sanitized(f"{tool} of the kernels", code, output, seconds)
        # A whole runtime with copies both ways beside decoding, on a small model, and products by our own kernels: the checker
        # would spend its time in the library's.
        task = {"swap": {"blocks": 8, "transfers": 2, "sequences": 4, "context": 128, "steps": 4}}
        job = json.dumps({"model": str(self.model("tiny-qwen3")), "task": task, "slots": 4, "batch_tokens": 256,
                          "context_tokens": 512, "utilization": 0.2, "host_bytes": 64 << 20, "deterministic": True})
        code, output, seconds = self.recorder.command("sanitizer-swap", [*checked("memcheck"), str(self.bundle / "measure"), job], 150)
        self.sanitized("memcheck of swapping beside decoding", code, output, seconds)

    def sanitized(self, what, code, output, seconds):
        if "not supported" in output and "ERROR SUMMARY: 0" not in output:
            self.row("sanitizer", what, f"open: {output.strip().splitlines()[-1][:120]}", word="open")
            return
        summary = [line.strip("= ") for line in output.splitlines() if "SUMMARY" in line]
        detail = f"{summary[-1] if summary else output.strip()[-200:]} in {seconds:.0f} s"
        self.check("sanitizer", what, code == 0, detail)

    def parity(self):
        torch = self.torch()
        import numpy
        from transformers import AutoModelForCausalLM
        device = "cuda" if torch.cuda.is_available() else "cpu"
        vocabulary_of, prefill = {"tiny-llama": 4000, "tiny-qwen3": 5000}, 660
        for name, vocabulary in vocabulary_of.items():
            for dtype in ["bfloat16", "float16"]:
                path = self.model(name, dtype)
                generator = random.Random(3)
                tokens = [generator.randrange(vocabulary) for _ in range(700)]

                def logits(kind):
                    model = AutoModelForCausalLM.from_pretrained(path, dtype=kind).to(device).eval()
                    with torch.no_grad():
                        rows = model(torch.tensor([tokens], device=device)).logits[0, prefill - 1:]
                    return rows.float().cpu().numpy()

                # In single precision: the truth that both roundings are measured against.
                truth, theirs = logits(torch.float32), logits(getattr(torch, dtype))
                scale = numpy.abs(truth).max()
                peer = float(numpy.abs(theirs - truth).max() / scale)
                best = numpy.sort(truth, axis=1)
                deterministic, serial = {"deterministic": True}, {"deterministic": True, "overlap": False}
                overlapping = None
                for chunk, mode in [(700, {}), (129, {}), (129, deterministic), (129, serial), (129, {"fp8_kv_cache": True})]:
                    label = " ".join([name, dtype, "chunks of", str(chunk), *(key if value else f"no {key}" for key, value in mode.items())])
                    bound = PARITY_FP8 if "fp8_kv_cache" in mode else PARITY
                    sure = best[:, -1] - best[:, -2] > bound * scale
                    with tempfile.TemporaryDirectory() as scratch:
                        out = Path(scratch) / "logits"
                        task = {"logits": {"tokens": tokens, "prefill": prefill, "chunk": chunk, "out": str(out)}}
                        try:
                            self.job("parity", path, task, 120, slots=4, batch_tokens=1024, utilization=0.3, **mode)
                        except RuntimeError as error:
                            self.check("parity", label, False, str(error)[:300])
                            continue
                        ours = numpy.fromfile(out, dtype="<f4").reshape(-1, vocabulary)
                    if ours.shape != truth.shape:
                        self.check("parity", label, False, f"{ours.shape} logits, not {truth.shape}")
                        continue
                    apart = float(numpy.abs(ours - truth).max() / scale)
                    same = bool((ours.argmax(1) == truth.argmax(1))[sure].all())
                    # NaN compares as false.
                    self.check("parity", label, apart <= bound and same,
                               f"{apart:.1e} of max|ref| (transformers in {dtype}: {peer:.1e}); "
                               f"{int(sure.sum())} sure argmax {'equal' if same else 'DIFFER'}")
                    if mode is deterministic:
                        overlapping = ours
                    elif mode is serial and overlapping is not None:
                        # All kernels are our own then, so each overlaps with the next.
                        equal = ours.tobytes() == overlapping.tobytes()
                        self.check("parity", f"{name} {dtype}: kernels that overlap change no bit", equal, "equal" if equal else "DIFFER")

    def binary(self):
        """The binary that is shipped, with a worker on the GPU, under its own load generator."""
        path = self.model("tiny-llama")
        code, output, seconds = self.recorder.command("binary", [sys.executable, str(self.bundle / "cluster.py"), str(self.bundle / "inflight"), str(path)], 120)
        lines = [line for line in output.splitlines() if line.startswith("cluster: ")]
        self.check("binary", "inflight up --device cuda:0 under inflight bench", code == 0,
                   f"{lines[-1][9:] if lines else output.strip()[-300:]} in {seconds:.0f} s")

    def determinism(self):
        path = self.model("qwen3-0.6b")
        chunks = [1500, 7, 256] if self.quick else [1500, 2048, 1, 7, 256, 1000]
        results = []
        for deterministic in [True, False]:
            task = {"determinism": {"length": 1500, "companions": [1, 2, 3, 8, 17, 64, 100], "chunks": chunks}}
            result = self.job("determinism", path, task, 200, slots=128, batch_tokens=2048, context_tokens=2048,
                              deterministic=deterministic)
            detail = f"{result['ways']} ways, {len(result['different'])} differ"
            if deterministic:
                self.check("determinism", "bits over batch sizes and chunks", not result["different"], detail)
            else:
                self.row("determinism", "bits over batch sizes and chunks, fast mode (for comparison)", detail)
            results.append(result)
            self.json["phases"]["determinism"] = results

    def drafts(self):
        """Drafts change no bit in the deterministic mode, also with a KV cache in 8 bits and on two GPUs; and what they gain."""
        torch = self.torch()
        limits = dict(slots=16, batch_tokens=1024, context_tokens=1024)
        task = {"streams": [1, 4, 16], "output": 100, "drafts_max": 8, "pairs": 1, "logprobs": True, "governed": False}
        figures = self.json["phases"]["drafts"] = {}
        modes = {"": {}, " fp8_kv_cache": {"fp8_kv_cache": True}, " without graphs": {"graphs": False}}
        if torch.cuda.device_count() > 1:
            modes[" two GPUs"] = {"gpus": [0, 1]}
        path = self.model("qwen3-0.6b")
        for label, mode in modes.items():
            try:
                result = figures[f"bits{label}"] = self.job("drafts", path, {"drafts": task}, 200, deterministic=True, **limits, **mode)
            except RuntimeError as error:
                self.check("drafts", f"bits with drafts and without{label}", False, str(error)[:300])
                continue
            different, accepted = sum(row["different"] for row in result), sum(row["accepted"] for row in result)
            self.check("drafts", f"bits with drafts and without{label}", different == 0 and accepted > 0,
                       f"{accepted} drafts stood, {different} streams differ")
        for name in ["qwen3-0.6b"] if self.quick else ["qwen3-0.6b", "llama-3.1-8b"]:
            task = {"streams": [1, 4, 16], "output": 200, "drafts_max": 8, "pairs": 3 if self.quick else 6, "logprobs": False,
                    "governed": True}
            try:
                result = figures[name] = self.job("drafts", self.model(name), {"drafts": task}, 300, **limits)
            except (RuntimeError, OSError) as error:
                self.check("drafts", name, False, str(error)[:300])
                continue
            for row in result:
                copies = row["workload"] == "copying"
                goal = ("1.5 x" if row["streams"] == 1 else "") if copies else "0.97 x"
                self.row("drafts", f"{name}, {row['streams']} streams, {'copied runs' if copies else 'no repetition'}",
                         f"{row['without']:.0f} / {row['with']:.0f} tok/s = {row['ratio']:.2f} ({row['ratio_min']:.2f} to "
                         f"{row['ratio_max']:.2f}), {row['tokens_per_step']:.2f} tokens a step", goal,
                         row["ratio"] >= float(goal[:-2]) if goal else None)

    def tensor_parallel(self):
        """A communicator of one rank changes no bit, in captured graphs too; two GPUs agree with one, if there are two."""
        import numpy
        torch = self.torch()
        vocabulary, scratch = None, tempfile.TemporaryDirectory()
        generator = random.Random(5)

        def logits(name, path, label, **options):
            out = Path(scratch.name) / label
            task = {"logits": {"tokens": tokens, "prefill": 600, "chunk": 256, "out": str(out)}}
            # Another start may choose other algorithms, whose bits differ.
            result = self.job("tensor-parallel", path, task, 240, slots=4, batch_tokens=1024, utilization=0.3, autotune=False,
                              **options)
            return numpy.fromfile(out, dtype="<f4").reshape(-1, vocabulary), result["greedy"]

        with scratch:
            for name in ["tiny-llama", "tiny-qwen3"]:
                path = self.model(name)
                vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]
                tokens = [generator.randrange(vocabulary) for _ in range(632)]
                for way, mode in [("fast", {}), ("without graphs", {"graphs": False}), ("deterministic", {"deterministic": True}),
                                  ("fp8_kv_cache", {"fp8_kv_cache": True})]:
                    label = f"{name} {way}"
                    try:
                        alone, greedy = logits(name, path, "alone", **mode)
                        lone, same = logits(name, path, "lone", lone_communicator=True, **mode)
                    except RuntimeError as error:
                        self.check("tensor-parallel", f"{label}, one rank", False, str(error)[:300])
                        continue
                    # Bits, so that NaN is as good as itself.
                    equal = alone.tobytes() == lone.tobytes() and greedy == same and bool(numpy.isfinite(alone).all())
                    self.check("tensor-parallel", f"{label}, one rank through NCCL", equal,
                               f"{alone.shape[0]} rows of logits, bits {'equal' if equal else 'DIFFER'}")
                    if torch.cuda.device_count() < 2:
                        continue
                    try:
                        two, _ = logits(name, path, "two", gpus=[0, 1], **mode)
                    except RuntimeError as error:
                        self.check("tensor-parallel", f"{label}, two GPUs", False, str(error)[:300])
                        continue
                    scale = numpy.abs(alone).max()
                    apart = float(numpy.abs(two - alone).max() / scale)
                    bound = PARITY_FP8 if "fp8_kv_cache" in mode else PARITY
                    self.check("tensor-parallel", f"{label}, two GPUs against one", apart <= bound, f"{apart:.1e} of max|ref|")
            if torch.cuda.device_count() < 2:
                self.row("tensor-parallel", "two GPUs", "not run: there are not two", word="open")
                return
            path = self.model("qwen3-0.6b")
            task = {"determinism": {"length": 700, "companions": [1, 3, 17, 64], "chunks": [7, 256, 700]}}
            result = self.job("tensor-parallel", path, task, 200, slots=64, batch_tokens=1024, context_tokens=1024,
                              deterministic=True, gpus=[0, 1])
            self.check("tensor-parallel", "bits over batch sizes and chunks, two GPUs", not result["different"],
                       f"{result['ways']} ways, {len(result['different'])} differ")
            cases = [dict(sequences=b, context=1024, tokens=1) for b in (1, 8, 64)] + [dict(sequences=1, context=0, tokens=1024)]
            for gpus in [[0], [0, 1]]:
                result = self.job("tensor-parallel", path, {"steps": {"cases": cases, "repeats": 30, "seconds": 3.0}}, 240,
                                  slots=64, batch_tokens=4096, context_tokens=4096, gpus=gpus)
                self.json["phases"].setdefault("tensor-parallel", {})[f"{len(gpus)} GPUs"] = result
                took = ", ".join(f"{row['device_ms']:.2f}" for row in result)
                self.row("tensor-parallel", f"qwen3-0.6b on {len(gpus)} GPUs: batch 1, 8, 64, prefill of 1,024", f"{took} ms")

    def swap(self):
        import models
        name = "qwen3-0.6b" if self.quick else "llama-3.1-8b"
        path = self.model(name)
        block = models.kv_bytes_per_token(name) * 16
        blocks = max(1, (512 << 20) // block)
        task = {"swap": {"blocks": blocks, "transfers": 8, "sequences": 64, "context": 1024, "steps": 100}}
        result = self.job("swap", path, task, 300, slots=64, batch_tokens=4096, context_tokens=4096,
                          host_bytes=2 * blocks * block)
        self.json["phases"]["swap"] = result
        one = result["blocks_moved"] * block / 1e9
        for what, key, factor in [("to the host", "out_seconds", 1), ("from the host", "in_seconds", 1),
                                  ("both ways at once", "both_seconds", 2)]:
            rate = factor * one / result[key]
            self.row("swap", what, f"{rate:.1f} GB/s, blocks of {block / (1 << 20):.2f} MiB", "45" if factor == 1 else "",
                     rate >= 45 if factor == 1 else None)
        slower = result["decode_ms_beside_swaps"] / result["decode_ms_calm"] - 1
        beside = result["blocks_beside"] * block / result["beside_seconds"] / 1e9
        self.row("swap", f"{name}: decoding of 64 beside swaps", f"{100 * slower:+.1f} %, {beside:.1f} GB/s meanwhile",
                 "< 10 %", slower < 0.10)

    def measured_ceilings(self):
        if self.ceilings is None:
            self.ceilings = self.json["ceilings"] = measure_ceilings(self.torch())
            self.row("ceilings", "copy", f"{self.ceilings['copy_tb_s']:.2f} TB/s")
            self.row("ceilings", "bf16 product 8192^3", f"{self.ceilings['matmul_tflops']:.0f} TFLOP/s")
            if FLOORS_OF not in self.ceilings["device"]:
                self.row("ceilings", "floors", f"those of one {FLOORS_OF}, by how much slower {self.ceilings['device']} copies and multiplies")
        return self.ceilings

    def floors(self, name):
        """Those of this card: of another than they were computed for, as much longer as it copies and multiplies slower."""
        if self.rehearse or FLOORS_OF in self.measured_ceilings()["device"]:
            return FLOORS[name]
        ceilings = self.measured_ceilings()
        slower, arithmetic = FLOORS_COPY_TB_S / ceilings["copy_tb_s"], FLOORS_TFLOPS / ceilings["matmul_tflops"]
        return {case: floor * (arithmetic if case == "prefill" else slower) for case, floor in FLOORS[name].items()}

    def steps(self):
        self.step_times(["qwen3-0.6b"] if self.quick else list(FLOORS))

    def deterministic_steps(self):
        self.step_times(["qwen3-0.6b"] if self.quick else ["qwen3-0.6b", "llama-3.1-8b"], "deterministic")

    def fp8_steps(self):
        self.step_times(["qwen3-0.6b"] if self.quick else ["qwen3-0.6b", "llama-3.1-8b"], "fp8_kv_cache")

    def serial_steps(self):
        self.step_times(["qwen3-0.6b"] if self.quick else ["qwen3-0.6b", "qwen3-1.7b"], "serial")

    def step_times(self, names, option=None):
        """Steps of some models; with an option that has its price, goals are not judged."""
        import models
        ceilings = {"copy_tb_s": 1.0, "matmul_tflops": 1.0} if self.rehearse else self.measured_ceilings()
        phase = {"deterministic": "deterministic-steps", "fp8_kv_cache": "fp8-steps", "serial": "serial-steps", None: "steps"}[option]
        mode = f" {option}" if option else ""
        cases = [dict(sequences=b, context=1024, tokens=1) for b in (1, 8, 64, 256)]
        cases += [dict(sequences=1, context=0, tokens=1024), dict(sequences=8, context=0, tokens=1024)]
        if option != "deterministic":
            # By differences: what more keys cost is attention alone.
            cases += [dict(sequences=64, context=4096, tokens=1), dict(sequences=1, context=0, tokens=8192),
                      dict(sequences=1, context=16384, tokens=8192)]
        for name in names:
            if self.recorder.left() < 60:
                self.recorder.skip(phase, f"{name}: no time left")
                continue
            try:
                result = self.job(phase, self.model(name), {"steps": {"cases": cases, "repeats": 30, "seconds": 3.0}}, 300, slots=256,
                                  batch_tokens=8192, context_tokens=32768,
                                  **({"overlap": False} if option == "serial" else {option: True} if option else {}))
            except Skipped as why:
                self.recorder.skip(phase, f"{name}: {why}")
                continue
            except (RuntimeError, OSError) as error:
                self.check(phase, name, False, str(error)[:300])
                continue
            floors = self.floors(name)
            self.json["phases"].setdefault("steps", {})[f"{name}{mode}"] = result
            if option is None:
                self.products(name)
            by = {tuple(r["case"]): r.get("device_ms") for r in result}
            if option is None and name == names[min(1, len(names) - 1)]:
                self.untimed_steps(name, cases[:4], by)
            for batch in (1, 8, 64, 256):
                took, floor = by.get((batch, 1024, 1)), floors[batch]
                if took:
                    goal = 1.54 if batch == 256 else 2.0 if name == "qwen3-0.6b" and batch <= 8 else 1.33
                    wall = next(r["wall_ms"] for r in result if tuple(r["case"]) == (batch, 1024, 1))
                    self.row(phase, f"{name}{mode} decode, batch {batch}",
                             f"{took:.2f} ms, {took / floor:.2f} x floor, {batch / took * 1e3:.0f} tok/s (wall {wall:.2f} ms)",
                             "" if option else f"{goal} x", None if option else took <= goal * floor)
                else:
                    self.row(phase, f"{name}{mode} decode, batch {batch}", "not measured: it does not fit", word="open")
            took = by.get((1, 0, 1024))
            if took:
                self.row(phase, f"{name}{mode} prefill of 1,024", f"{took:.2f} ms, "
                         f"{took / floors['prefill']:.2f} x floor")
            more_keys, keys = by.get((64, 4096, 1)), by.get((64, 1024, 1))
            if more_keys and keys and more_keys > keys:
                bytes_each = models.kv_bytes_per_token(name, option == "fp8_kv_cache")
                rate = 64 * (4096 - 1024) * bytes_each / (more_keys - keys) / 1e9
                share = rate / ceilings["copy_tb_s"]
                self.row(phase, f"{name}{mode} paged decode attention",
                         f"{rate:.2f} TB/s, {100 * share:.0f} % of copy",
                         "" if option else "80 %", None if option else share >= 0.8)
            late, early = by.get((1, 16384, 8192)), by.get((1, 0, 8192))
            if late and early and late > early:
                rate = models.attention_flops(name, 8192, 16384) / (late - early) / 1e9
                self.row(phase, f"{name}{mode} prefill attention", f"{rate:.0f} TFLOP/s",
                         "" if option else "300", None if option else rate >= 300)

    def untimed_steps(self, name, cases, timed):
        """What choosing products by time gains whole steps."""
        try:
            result = self.job("steps", self.model(name), {"steps": {"cases": cases, "repeats": 30, "seconds": 3.0}}, 200, slots=256,
                              batch_tokens=8192, context_tokens=32768, autotune=False)
        except Skipped as why:  # What was measured of the model before is still to be shown.
            self.recorder.skip("steps", f"{name} without timed products: {why}")
            return
        except RuntimeError as error:
            self.check("steps", f"{name} without timed products", False, str(error)[:300])
            return
        self.json["phases"].setdefault("steps", {})[f"{name} no autotune"] = result
        pairs = [(row["case"][0], row["device_ms"], timed.get(tuple(row["case"]))) for row in result if "device_ms" in row]
        self.row("steps", f"{name} decode by cuBLASLt's first algorithms",
                 ", ".join(f"batch {b}: {first:.2f} ms ({100 * (first / chosen - 1):+.1f} %)" for b, first, chosen in pairs if chosen))

    def products(self, name):
        """The library's first algorithms against those that the last job's load chose, by rows; the head is one of them."""
        tuned = self.recorder.loaded["products"]
        self.json["phases"].setdefault("products", {})[name] = {"seconds": self.recorder.loaded["load_seconds"], "tuned": tuned}
        if not tuned:
            self.row("steps", f"{name} products", "none was timed", word="open")
        for rows in sorted({entry["shape"][0] for entry in tuned}):
            here = [entry for entry in tuned if entry["shape"][0] == rows and entry["first_us"] is not None]
            if not here:
                continue
            first, chosen = sum(entry["first_us"] for entry in here), sum(entry["us"] for entry in here)
            replaced = [f"{n}x{k} {entry['by'] if entry['own'] else entry['way']}" for entry in here if entry["way"]
                        for _, n, k in [entry["shape"]]]
            work = 2e-6 * sum(m * n * k for m, n, k in (entry["shape"] for entry in here))
            self.row("steps", f"{name} products of {rows} rows, one of each of {len(here)}",
                     f"first {first:.1f} us, chosen {chosen:.1f} us, {100 * (first / chosen - 1):+.1f} %, {work / chosen:.1f} TFLOP/s"
                     + (f"; replaced: {', '.join(replaced)}" if replaced else ""))

    def lengths(self, count):
        """A heavy-tailed mix like chat traffic: prompts and outputs log-normal, cut off."""
        generator = random.Random(11)
        draw = lambda mean, low, high: int(min(high, max(low, generator.lognormvariate(mean, 0.9))))
        return [(draw(5.6, 16, 2048), draw(5.0, 8, 1024)) for _ in range(8 if self.rehearse else count)]

    def serve(self):
        for name in ["qwen3-0.6b"] if self.quick else ["qwen3-0.6b", "llama-3.1-8b"]:
            lengths = self.lengths(256 if self.quick else 1024)
            try:
                result = self.job("serve", self.model(name), {"serve": {"lengths": lengths}}, 240, slots=256, batch_tokens=4096,
                                  context_tokens=4096)
            except (RuntimeError, OSError) as error:
                self.check("serve", name, False, str(error)[:300])
                continue
            self.json["phases"].setdefault("serve", {})[name] = result
            self.row("serve", f"{name}, {len(lengths)} requests", f"{result['output_tokens_per_second']:.0f} output tok/s, "
                     f"device busy {100 * result['device_seconds'] / result['seconds']:.0f} %")

    def peer(self):
        name = "qwen3-0.6b"
        path = self.model(name)
        lengths = self.lengths(128 if self.quick else 256)
        figures = self.json["phases"]["peer"] = {}
        try:
            ours = figures["ours"] = self.job("serve-peer", path, {"serve": {"lengths": lengths}}, 200, slots=256,
                                              batch_tokens=4096, context_tokens=4096)
        except RuntimeError as error:
            self.check("peer", f"{name}: ours", False, str(error)[:300])
            ours = None
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "lengths.json"
            file.write_text(json.dumps(lengths))
            theirs = self.recorder.answer("peer", [sys.executable, str(self.bundle / "peer.py"), str(path), str(file)], 240)
        figures["theirs"] = theirs
        if ours is None:
            self.row("peer", f"{name}: transformers' continuous batching ({theirs['attention']})",
                     f"{theirs['output_tokens_per_second']:.0f} output tok/s")
            return
        ratio = ours["output_tokens_per_second"] / theirs["output_tokens_per_second"]
        self.row("peer", f"{name}: ours / transformers' continuous batching ({theirs['attention']})",
                 f"{ours['output_tokens_per_second']:.0f} / {theirs['output_tokens_per_second']:.0f} output tok/s = {ratio:.1f} x",
                 "3 x", ratio >= 3)

    def run(self, phases):
        for phase in phases:
            print(f"== {phase}", flush=True)
            begun = time.monotonic()
            if self.recorder.left() < 30:
                self.recorder.skip(phase, "no time left; run it with --only")
                continue
            try:
                getattr(self, phase.replace("-", "_"))()
            except Skipped as why:
                self.recorder.skip(phase, str(why))
            except Exception as error:  # A phase that breaks must not hide the others.
                self.check(phase, phase, False, f"{type(error).__name__}: {str(error)[:400]}")
            self.json.setdefault("seconds", {})[phase] = round(time.monotonic() - begun, 1)
            self.recorder.write()


def rows_of(output):
    """The lines of JSON that a test prints; the first one may come behind its name."""
    for line in output.splitlines():
        try:
            yield json.loads(line[line.index('{"'):])
        except ValueError:
            continue


def unmatched(filters, tests):
    """Filters that select none of the tests, which the test program selects by a part of their names."""
    return [filter for filter in filters if not any(filter in test for test in tests)]


def outcome(output):
    """What a test program says at its end."""
    results = [line for line in output.splitlines() if line.startswith("test result")]
    return results[-1][13:60] if results else output.strip()[-300:]


def failures(output):
    """Names of failed tests, and what they say first."""
    lines = output.splitlines()
    return [line[:300] for line in lines if line.endswith("FAILED") or "panicked at" in line or "Test failed" in line][:20]


def measure_ceilings(torch):
    """Copy bandwidth (bytes read plus written) and bf16 product rate of this very card."""

    def timed(work, repeats=10):
        for _ in range(3):
            work()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(repeats):
            work()
        events[1].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]) / repeats / 1e3

    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * source.numel() / timed(lambda: target.copy_(source)) / 1e12
    del source, target
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = 2 * 8192**3 / timed(lambda: a @ b) / 1e12
    del a, b
    torch.cuda.empty_cache()
    return {"copy_tb_s": copy, "matmul_tflops": product, "device": torch.cuda.get_device_name()}


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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu-suite"), help="folder of the results [default: $OUT, else gpu-suite]")
    parser.add_argument("--models", default=default_models(),
                        help="folder of the random-weight checkpoints: 37 GB, 2 GB with --quick [default: %(default)s]")
    parser.add_argument("--only", default=",".join(PHASES), metavar="PHASE,...", help=f"of {' '.join(PHASES)}")
    parser.add_argument("--quick", action="store_true", help="the smallest model, fewer cases")
    parser.add_argument("--minutes", type=float, default=25, help="phases that do not fit into them are left out, and said to be [default: 25]")
    parser.add_argument("--rehearse", action="store_true",
                        help="goes through every step without a GPU, on tiny models; each must fail and say that there is none")
    arguments = parser.parse_args()
    phases = arguments.only.split(",")
    unknown = set(phases) - set(PHASES)
    if unknown:
        parser.error(f"unknown phases {sorted(unknown)}; there are {PHASES}")
    end_on_signals()
    suite = Suite(arguments)
    try:
        suite.run(phases)
    finally:
        suite.recorder.write()
        print("\n" + suite.recorder.table(), flush=True)
        print(f"results: {suite.recorder.out / 'gpu-suite.json'}, .txt and .log", flush=True)
    sys.exit(1 if suite.recorder.failed else 0)


if __name__ == "__main__":
    main()
