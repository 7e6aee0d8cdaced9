"""Tensor parallelism: a communicator of one rank, and two GPUs where there are two."""

import json
import random
import tempfile
from pathlib import Path

from phases.parity import PARITY, PARITY_FP8


def tensor_parallel(suite):
    """A communicator of one rank changes no bit, in captured graphs too; two GPUs agree with one, if there are two."""
    numpy, gpus = suite.package("numpy"), suite.gpu_count()
    vocabulary, scratch = None, tempfile.TemporaryDirectory()
    generator = random.Random(5)

    def logits(name, path, label, **options):
        out = Path(scratch.name) / label
        task = {"logits": {"sequences": [tokens], "prompts": [600], "chunk": 256, "out": str(out)}}
        # Another start may choose other algorithms, whose bits differ.
        suite.job("tensor-parallel", path, task, 240, slots=4, batch_tokens=1024, utilization=0.3, autotune=False, **options)
        return numpy.fromfile(out, dtype="<f4").reshape(-1, vocabulary)

    with scratch:
        for name in ["tiny-llama", "tiny-qwen3"]:
            path = suite.model(name)
            vocabulary = json.loads((path / "config.json").read_text())["vocab_size"]
            tokens = [generator.randrange(vocabulary) for _ in range(632)]
            for way, mode in [("fast", {}), ("without graphs", {"graphs": False}), ("deterministic", {"deterministic": True}),
                              ("fp8_kv_cache", {"fp8_kv_cache": True})]:
                label = f"{name} {way}"
                try:
                    alone = logits(name, path, "alone", **mode)
                    lone = logits(name, path, "lone", lone_communicator=True, **mode)
                except RuntimeError as error:
                    suite.check("tensor-parallel", f"{label}, one rank", False, str(error)[:300])
                    continue
                # Bits, so that NaN is as good as itself.
                equal = alone.tobytes() == lone.tobytes() and bool(numpy.isfinite(alone).all())
                suite.check("tensor-parallel", f"{label}, one rank through NCCL", equal,
                            f"{alone.shape[0]} rows of logits, bits {'equal' if equal else 'DIFFER'}")
                if gpus < 2:
                    continue
                try:
                    two = logits(name, path, "two", gpus=[0, 1], **mode)
                except RuntimeError as error:
                    suite.check("tensor-parallel", f"{label}, two GPUs", False, str(error)[:300])
                    continue
                scale = numpy.abs(alone).max()
                apart = float(numpy.abs(two - alone).max() / scale)
                bound = PARITY_FP8 if "fp8_kv_cache" in mode else PARITY
                suite.check("tensor-parallel", f"{label}, two GPUs against one", apart <= bound, f"{apart:.1e} of max|ref|")
        if gpus < 2:
            suite.row("tensor-parallel", "two GPUs", "not run: there are not two", word="open")
            return
        path = suite.model("qwen3-0.6b")
        task = {"determinism": {"length": 700, "companions": [1, 3, 17, 64], "chunks": [7, 256, 700]}}
        result = suite.job("tensor-parallel", path, task, 200, slots=64, batch_tokens=1024, context_tokens=1024,
                           deterministic=True, gpus=[0, 1])
        suite.check("tensor-parallel", "bits over batch sizes and chunks, two GPUs", not result["different"],
                    f"{result['ways']} ways, {len(result['different'])} differ")
        cases = [dict(sequences=b, context=1024, tokens=1) for b in (1, 8, 64)] + [dict(sequences=1, context=0, tokens=1024)]
        for ranks in [[0], [0, 1]]:
            result = suite.job("tensor-parallel", path, {"steps": {"cases": cases, "repeats": 30, "seconds": 3.0}}, 240,
                               slots=64, batch_tokens=4096, context_tokens=4096, gpus=ranks)
            suite.json["phases"].setdefault("tensor-parallel", {})[f"{len(ranks)} GPUs"] = result
            took = ", ".join(f"{row['device_ms']:.2f}" for row in result)
            suite.row("tensor-parallel", f"qwen3-0.6b on {len(ranks)} GPUs: batch 1, 8, 64, prefill of 1,024", f"{took} ms")
