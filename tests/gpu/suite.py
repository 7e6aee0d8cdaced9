"""The GPU suite: correctness, then benchmarks, then one table and one JSON file."""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import models

# Milliseconds of a decode step at a context of 1,024 tokens, and of a prefill of 1,024, that memory and arithmetic of
# one H200 allow (bf16; 4.3 TB/s and 790 TFLOP/s measured).
FLOORS = {
    "qwen3-0.6b": {1: 0.30, 8: 0.50, 64: 2.03, 256: 7.38, "prefill": 1.29},
    "qwen3-1.7b": {1: 0.83, 8: 1.02, 64: 2.55, 256: 8.11, "prefill": 3.81},
    "qwen3-8b": {1: 3.56, 8: 3.80, 64: 5.77, 256: 13.9, "prefill": 18.4},
    "llama-3.1-8b": {1: 3.52, 8: 3.74, 64: 5.49, 256: 12.9, "prefill": 18.4},
}
PHASES = ["kernels", "sanitizer", "parity", "determinism", "swap", "steps", "serve", "peer"]


class Suite:
    def __init__(self, arguments):
        self.bundle = Path(arguments.bundle)
        self.out = Path(arguments.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.models = Path(arguments.models)
        self.quick = arguments.quick
        self.deadline = time.monotonic() + arguments.minutes * 60
        self.rows = []  # (phase, what, figure, goal, verdict)
        self.json = {"revision": (self.bundle / "REVISION").read_text().strip(), "phases": {}}
        self.failed = False

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def row(self, phase, what, figure, goal="", good=None):
        verdict = "" if good is None else ("ok" if good else "MISSED")
        self.rows.append((phase, what, figure, goal, verdict))
        print(f"  {what}: {figure} {goal and f'(goal {goal}) '}{verdict}", flush=True)

    def check(self, phase, what, good, detail=""):
        self.row(phase, what, detail or ("passed" if good else "FAILED"), "", good)
        self.failed |= not good

    def command(self, name, command, timeout, environment=None):
        """Runs a program; its output goes to a log beside the JSON."""
        log = self.out / f"{name}.log"
        env = {**os.environ, "RUST_BACKTRACE": "0", **(environment or {})}
        begun = time.monotonic()
        try:
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  timeout=max(1, min(timeout, self.left())))
            code, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as expired:
            code, output = 124, expired.stdout or b""
        log.write_bytes(output)
        return code, output.decode(errors="replace"), time.monotonic() - begun

    def job(self, name, model, task, timeout=600, **options):
        """Runs the measuring binary; its result, or an exception with its error."""
        path = self.out / f"{name}.job.json"
        path.write_text(json.dumps({"model": str(model), "task": task, **options}))
        code, output, _ = self.command(name, [str(self.bundle / "measure"), str(path)], timeout)
        lines = [line for line in output.splitlines() if line.startswith("{")]
        answer = json.loads(lines[-1]) if lines else {"error": f"exit status {code}: {output[-600:]}"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    # Phases

    def kernels(self):
        wanted = ["attention::", "product::", "rows::", "sampling::"]
        code, output, seconds = self.command(
            "kernels", [str(self.bundle / "kernel-tests"), "--test-threads=4", *wanted], 300, {"INFLIGHT_TEST_GPU": "1"})
        results = [line for line in output.splitlines() if line.startswith("test result")]
        self.check("kernels", "every kernel against references in f64", code == 0,
                   f"{results[-1][13:60] if results else output[-200:]} in {seconds:.0f} s")

    def sanitizer(self):
        for tool in ["memcheck", "racecheck"]:
            code, output, seconds = self.command(
                f"sanitizer-{tool}",
                ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20",
                 str(self.bundle / "kernel-tests"), "--test-threads=1",
                 "attention::attention_over", "product::", "rows::", "sampling::tokens"],
                240, {"INFLIGHT_TEST_GPU": "1", "INFLIGHT_TEST_CASES": "3" if self.quick else "8"})
            summary = [line for line in output.splitlines() if "SUMMARY" in line]
            self.check("sanitizer", f"compute-sanitizer {tool}", code == 0,
                       f"{summary[-1].strip('= ') if summary else output[-200:]} in {seconds:.0f} s")

    def parity(self):
        import numpy
        import torch
        from transformers import AutoModelForCausalLM
        for name in ["tiny-llama", "tiny-qwen3"]:
            for dtype in ["bfloat16", "float16"]:
                path = models.make(name, self.models / dtype, getattr(torch, dtype))
                generator = random.Random(3)
                vocabulary = models.SHAPES[name][1]["vocab_size"]
                tokens = [generator.randrange(vocabulary) for _ in range(700)]
                prefill = 660
                # In single precision: the truth that both roundings are measured against.
                model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda().eval()
                with torch.no_grad():
                    truth = model(torch.tensor([tokens]).cuda()).logits[0, prefill - 1:].float().cpu().numpy()
                half = model.to(getattr(torch, dtype))
                with torch.no_grad():
                    theirs = half(torch.tensor([tokens]).cuda()).logits[0, prefill - 1:].float().cpu().numpy()
                del model, half
                torch.cuda.empty_cache()
                scale = numpy.abs(truth).max()
                for chunk, mode in [(700, {}), (129, {}), (129, {"deterministic": True})]:
                    label = f"{name} {dtype} chunks of {chunk}{' deterministic' if mode else ''}"
                    out = self.out / "logits.bin"
                    task = {"logits": {"tokens": tokens, "prefill": prefill, "chunk": chunk, "out": str(out)}}
                    try:
                        self.job("parity", path, task, 120, slots=4, batch_tokens=1024, utilization=0.3, **mode)
                    except RuntimeError as error:
                        self.check("parity", label, False, str(error)[:160])
                        continue
                    ours = numpy.fromfile(out, dtype="<f4").reshape(-1, vocabulary)
                    out.unlink()
                    apart = float(numpy.abs(ours - truth).max() / scale)
                    peer = float(numpy.abs(theirs - truth).max() / scale)
                    best = numpy.sort(truth, axis=1)
                    sure = best[:, -1] - best[:, -2] > 2e-2 * scale
                    same = bool((ours.argmax(1) == truth.argmax(1))[sure].all())
                    self.check("parity", label, apart <= 2e-2 and same,
                               f"{apart:.1e} of max|ref| (transformers in {dtype}: {peer:.1e}); "
                               f"{int(sure.sum())} sure argmax {'equal' if same else 'DIFFER'}")

    def determinism(self):
        import torch
        path = models.make("qwen3-0.6b", self.models, torch.bfloat16)
        for deterministic in [True, False]:
            task = {"determinism": {"length": 1500, "companions": [1, 2, 3, 8, 17, 64, 100],
                                    "chunks": [1500, 2048, 1, 7, 256, 1000] if not self.quick else [1500, 7, 256]}}
            result = self.job("determinism", path, task, 300, slots=128, batch_tokens=2048,
                              context_tokens=2048, deterministic=deterministic)
            same = not result["different"]
            label = "bits over batch sizes and chunks" + ("" if deterministic else ", fast mode (for comparison)")
            detail = f"{result['ways']} ways, {len(result['different'])} differ"
            if deterministic:
                self.check("determinism", label, same, detail)
            else:
                self.row("determinism", label, detail)
            self.json["phases"].setdefault("determinism", []).append(result)

    def swap(self):
        import torch
        name = "llama-3.1-8b" if not self.quick else "qwen3-0.6b"
        path = models.make(name, self.models, torch.bfloat16)
        block = models.kv_bytes_per_token(name) * 16
        blocks = max(1, (512 << 20) // block)
        task = {"swap": {"blocks": blocks, "transfers": 8, "sequences": 64, "context": 1024, "steps": 100}}
        result = self.job("swap", path, task, 300, slots=64, batch_tokens=4096, context_tokens=4096,
                          host_bytes=2 * blocks * block)
        one = result["blocks_moved"] * block / 1e9
        for what, key, factor in [("to the host", "out_seconds", 1), ("from the host", "in_seconds", 1),
                                  ("both ways at once", "both_seconds", 2)]:
            rate = factor * one / result[key]
            self.row("swap", what, f"{rate:.1f} GB/s", "45" if factor == 1 else "", rate >= 45 if factor == 1 else None)
        slower = result["decode_ms_beside_swaps"] / result["decode_ms_calm"] - 1
        self.row("swap", "decoding beside swaps", f"{100 * slower:+.1f} %", "< 10 %", slower < 0.10)
        self.json["phases"]["swap"] = result

    def steps(self):
        import torch
        ceilings = measure_ceilings()
        self.json["ceilings"] = ceilings
        self.row("ceilings", "copy", f"{ceilings['copy_tb_s']:.2f} TB/s")
        self.row("ceilings", "bf16 product 8192^3", f"{ceilings['matmul_tflops']:.0f} TFLOP/s")
        names = ["qwen3-0.6b"] if self.quick else list(FLOORS)
        for name in names:
            if self.left() < 60:
                self.row("steps", name, "skipped: no time left")
                continue
            path = models.make(name, self.models, torch.bfloat16)
            cases = [dict(sequences=b, context=1024, tokens=1) for b in (1, 8, 64, 256)]
            cases += [dict(sequences=1, context=0, tokens=1024), dict(sequences=8, context=0, tokens=1024)]
            # By differences: what more keys cost is attention alone.
            cases += [dict(sequences=64, context=4096, tokens=1), dict(sequences=1, context=0, tokens=8192),
                      dict(sequences=1, context=16384, tokens=8192)]
            for deterministic in [False, True]:
                if deterministic and self.quick:
                    continue
                result = self.job("steps", path, {"steps": {"cases": cases, "repeats": 30}}, 400, slots=256,
                                  batch_tokens=8192, context_tokens=32768, deterministic=deterministic)
                self.json["phases"].setdefault("steps", {})[f"{name}{' deterministic' if deterministic else ''}"] = result
                by = {tuple(r["case"]): r.get("device_ms") for r in result}
                mode = " deterministic" if deterministic else ""
                for batch in (1, 8, 64, 256):
                    took, floor = by[(batch, 1024, 1)], FLOORS[name][batch]
                    if took:
                        goal = 1.54 if batch == 256 else 2.0 if name == "qwen3-0.6b" and batch <= 8 else 1.33
                        self.row("steps", f"{name}{mode} decode, batch {batch}",
                                 f"{took:.2f} ms, {took / floor:.2f} x floor, {batch / took * 1e3:.0f} tok/s",
                                 "" if deterministic else f"{goal} x", None if deterministic else took <= goal * floor)
                took = by[(1, 0, 1024)]
                if took:
                    self.row("steps", f"{name}{mode} prefill of 1,024", f"{took:.2f} ms, "
                             f"{took / FLOORS[name]['prefill']:.2f} x floor")
                if by[(64, 4096, 1)] and by[(64, 1024, 1)]:
                    more = 64 * (4096 - 1024) * models.kv_bytes_per_token(name)
                    rate = more / (by[(64, 4096, 1)] - by[(64, 1024, 1)]) / 1e9
                    share = rate / ceilings["copy_tb_s"]
                    self.row("steps", f"{name}{mode} paged decode attention", f"{rate:.2f} TB/s, {100 * share:.0f} % of copy",
                             "" if deterministic else "80 %", None if deterministic else share >= 0.8)
                if by[(1, 16384, 8192)] and by[(1, 0, 8192)]:
                    flops = models.attention_flops(name, 8192, 16384)
                    rate = flops / (by[(1, 16384, 8192)] - by[(1, 0, 8192)]) / 1e9
                    self.row("steps", f"{name}{mode} prefill attention", f"{rate:.0f} TFLOP/s",
                             "" if deterministic else "300", None if deterministic else rate >= 300)

    def lengths(self, count):
        """A heavy-tailed mix like chat traffic: prompts and outputs log-normal, cut off."""
        generator = random.Random(11)
        draw = lambda mean, low, high: int(min(high, max(low, generator.lognormvariate(mean, 0.9))))
        return [(draw(5.6, 16, 2048), draw(5.0, 8, 1024)) for _ in range(count)]

    def serve(self):
        import torch
        for name in ["qwen3-0.6b"] if self.quick else ["qwen3-0.6b", "llama-3.1-8b"]:
            path = models.make(name, self.models, torch.bfloat16)
            lengths = self.lengths(256 if self.quick else 1024)
            result = self.job("serve", path, {"serve": {"lengths": lengths}}, 400, slots=256, batch_tokens=4096,
                              context_tokens=4096)
            self.json["phases"].setdefault("serve", {})[name] = result
            self.row("serve", f"{name}, {len(lengths)} requests", f"{result['output_tokens_per_second']:.0f} output tok/s, "
                     f"device busy {100 * result['device_seconds'] / result['seconds']:.0f} %")

    def peer(self):
        name = "qwen3-0.6b"
        import torch
        path = models.make(name, self.models, torch.bfloat16)
        lengths = self.lengths(128 if self.quick else 256)
        ours = self.job("serve-peer", path, {"serve": {"lengths": lengths}}, 300, slots=256, batch_tokens=4096,
                        context_tokens=4096)
        file = self.out / "peer.lengths.json"
        file.write_text(json.dumps(lengths))
        code, output, _ = self.command("peer", [sys.executable, str(self.bundle / "peer.py"), str(path), str(file)], 400)
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if code != 0 or not lines:
            self.row("peer", "transformers' continuous batching", f"did not run: {output[-200:]}")
            return
        theirs = json.loads(lines[-1])
        self.json["phases"]["peer"] = {"ours": ours, "theirs": theirs}
        ratio = ours["output_tokens_per_second"] / theirs["output_tokens_per_second"]
        self.row("peer", f"{name}: ours / transformers generate_batch",
                 f"{ours['output_tokens_per_second']:.0f} / {theirs['output_tokens_per_second']:.0f} output tok/s = {ratio:.1f} x",
                 "3 x", ratio >= 3)

    def run(self, phases):
        for phase in phases:
            print(f"== {phase}", flush=True)
            if self.left() < 30:
                self.row(phase, phase, "skipped: no time left")
                continue
            try:
                getattr(self, phase)()
            except Exception as error:  # A phase that breaks must not hide the others.
                self.failed = True
                self.row(phase, phase, f"BROKE: {type(error).__name__}: {str(error)[:300]}", "", False)
            self.write()

    def write(self):
        self.json["rows"] = self.rows
        self.json["passed"] = not self.failed
        (self.out / "gpu-suite.json").write_text(json.dumps(self.json, indent=1))

    def table(self):
        widths = [max(len(str(row[i])) for row in self.rows) for i in range(5)]
        print("\n" + "-" * (sum(widths) + 8))
        for row in self.rows:
            print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip())
        print(f"\nchecks {'FAILED' if self.failed else 'passed'}; JSON in {self.out / 'gpu-suite.json'}")


def measure_ceilings():
    """Copy bandwidth (bytes read plus written) and bf16 product rate of this very card."""
    import torch

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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu-suite"))
    parser.add_argument("--models", default="/tmp/inflight-models")
    parser.add_argument("--only", default=",".join(PHASES))
    parser.add_argument("--quick", action="store_true", help="the smallest model, fewer cases")
    parser.add_argument("--minutes", type=float, default=25)
    arguments = parser.parse_args()
    phases = arguments.only.split(",")
    unknown = set(phases) - set(PHASES)
    if unknown:
        parser.error(f"unknown phases {sorted(unknown)}; there are {PHASES}")
    suite = Suite(arguments)
    suite.run(phases)
    suite.write()
    suite.table()
    sys.exit(1 if suite.failed else 0)


if __name__ == "__main__":
    main()
