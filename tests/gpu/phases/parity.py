"""Teacher-forced logits against those of transformers."""

import random
import tempfile
from pathlib import Path

import shapes

# Of teacher-forced logits: the largest difference as a part of the largest logit; with a KV cache in 16 bits, and in 8.
PARITY, PARITY_FP8 = 2e-2, 1e-1
TOKENS, PREFILL = 700, 660
DETERMINISTIC, SERIAL = {"deterministic": True}, {"deterministic": True, "overlap": False}
MODES = [(TOKENS, {}), (129, {}), (129, DETERMINISTIC), (129, SERIAL), (129, {"fp8_kv_cache": True})]


def parity(suite):
    for dtype in ["bfloat16", "float16"]:
        for name in ["tiny-llama", "tiny-qwen3"]:
            of_model(suite, name, dtype)


def of_model(suite, name, dtype):
    path = suite.model(name, dtype)
    vocabulary = shapes.SHAPES[name][1]["vocab_size"]
    generator = random.Random(3)
    tokens = [generator.randrange(vocabulary) for _ in range(TOKENS)]
    reference = None if suite.hollow() else Reference(suite, path, dtype, tokens)
    overlapping = None
    for chunk, mode in MODES:
        label = " ".join([name, dtype, "chunks of", str(chunk), *(key if value else f"no {key}" for key, value in mode.items())])
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch) / "logits"
            task = {"logits": {"tokens": tokens, "prefill": PREFILL, "chunk": chunk, "out": str(out)}}
            try:
                suite.job("parity", path, task, 120, slots=4, batch_tokens=1024, utilization=0.3, **mode)
            except RuntimeError as error:
                suite.check("parity", label, False, str(error)[:300])
                continue
            if reference is None:
                suite.row("parity", label, "compared with nothing: there is no torch", word="open")
                continue
            ours = reference.numpy.fromfile(out, dtype="<f4").reshape(-1, vocabulary)
        suite.check("parity", label, *reference.compare(ours, PARITY_FP8 if "fp8_kv_cache" in mode else PARITY))
        if mode is DETERMINISTIC:
            overlapping = ours
        elif mode is SERIAL and overlapping is not None:
            # All kernels are our own then, so each overlaps with the next.
            equal = ours.tobytes() == overlapping.tobytes()
            suite.check("parity", f"{name} {dtype}: kernels that overlap change no bit", equal, "equal" if equal else "DIFFER")


class Reference:
    """Logits of transformers."""

    def __init__(self, suite, path, dtype, tokens):
        torch = suite.torch()
        import numpy
        from transformers import AutoModelForCausalLM
        device = "cuda" if torch.cuda.is_available() else "cpu"

        def logits(kind):
            model = AutoModelForCausalLM.from_pretrained(path, dtype=kind).to(device).eval()
            with torch.no_grad():
                rows = model(torch.tensor([tokens], device=device)).logits[0, PREFILL - 1:]
            return rows.float().cpu().numpy()

        self.numpy, self.dtype = numpy, dtype
        # In single precision: the truth that both roundings are measured against.
        self.truth, theirs = logits(torch.float32), logits(getattr(torch, dtype))
        self.scale = numpy.abs(self.truth).max()
        self.peer = float(numpy.abs(theirs - self.truth).max() / self.scale)

    def compare(self, ours, bound):
        """Whether our logits are within the bound and choose the same tokens wherever it is sure; and in words."""
        if ours.shape != self.truth.shape:
            return False, f"{ours.shape} logits, not {self.truth.shape}"
        best = self.numpy.sort(self.truth, axis=1)
        sure = best[:, -1] - best[:, -2] > bound * self.scale
        apart = float(self.numpy.abs(ours - self.truth).max() / self.scale)
        same = bool((ours.argmax(1) == self.truth.argmax(1))[sure].all())
        # NaN compares as false.
        return apart <= bound and same, (f"{apart:.1e} of max|ref| (transformers in {self.dtype}: {self.peer:.1e}); "
                                         f"{int(sure.sum())} sure argmax {'equal' if same else 'DIFFER'}")
