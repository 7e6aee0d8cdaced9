"""Teacher-forced logits against those of transformers: one sequence in chunks, and many that are computed together."""

import random
import tempfile
from pathlib import Path

import shapes

# Of teacher-forced logits: the largest difference as a part of the largest logit; with a KV cache in 16 bits, and in 8.
PARITY, PARITY_FP8 = 2e-2, 1e-1
# Of two ways of computing that both round, in models of up to 36 layers.
CANONICAL = 4e-2
TOKENS, PREFILL = 700, 660
DETERMINISTIC, SERIAL = {"deterministic": True}, {"deterministic": True, "overlap": False}
MODES = [(TOKENS, {}), (129, {}), (129, DETERMINISTIC), (129, SERIAL), (129, {"fp8_kv_cache": True})]
# Each shape with an option of its own: biases, a window, scaled positions.
OPTIONS = {"tiny-qwen2": "biases", "tiny-mistral": "a window", "tiny-llama3": "scaled positions",
           "tiny-qwen3": "norms of queries and keys", "tiny-llama": "",
           "tiny-gemma3": "windows beside full attention, heads of 256, norms behind a part, GELU",
           "tiny-qwen35": "recurrent layers beside gated attention, heads of 256, a partial rotary embedding"}
# Sequences give up the blocks that a window has passed.
RELEASED = (129, {"experimental": True})
# Sequences that are computed together, their longest prompt, and the tokens that are decoded of each.
TOGETHER, LONGEST, DECODED = 64, 600, 8


def parity(suite):
    for dtype in ["bfloat16", "float16"]:
        for name in OPTIONS if dtype == "bfloat16" else ["tiny-llama", "tiny-qwen3"]:
            of_model(suite, name, dtype)


def batch_parity(suite, names=("qwen3-0.6b", "tiny-qwen2", "tiny-mistral", "tiny-llama3", "tiny-gemma3", "tiny-qwen35")):
    """Prompts in chunks beside decoding, in the mode that speed is measured in: every row of every sequence."""
    for name in names:
        together(suite, name)


def label_of(name, what, mode):
    return " ".join([name, what, *(key if value else f"no {key}" for key, value in mode.items())])


def of_model(suite, name, dtype):
    path = suite.model(name, dtype)
    vocabulary = shapes.SHAPES[name][1]["vocab_size"]
    generator = random.Random(3)
    sequences = [[generator.randrange(vocabulary) for _ in range(TOKENS)]]
    reference = None if suite.hollow() else Reference(suite, path, dtype, sequences, [PREFILL])
    overlapping = None
    for chunk, mode in MODES + [RELEASED] * (name == "tiny-mistral"):
        if name in shapes.EXPERIMENTAL:
            mode = mode | {"experimental": True}
        label = label_of(name, f"{dtype} chunks of {chunk}", mode)
        ours = logits(suite, "parity", label, path, sequences, [PREFILL], chunk, slots=4, batch_tokens=1024, utilization=0.3,
                      autotune=(chunk, mode) == (TOKENS, {}), **mode)
        if ours is None:
            continue
        suite.check("parity", label, *reference.compare(ours, PARITY_FP8 if "fp8_kv_cache" in mode else PARITY))
        if mode.get("deterministic") and "overlap" not in mode:
            overlapping = ours
        elif mode.get("deterministic") and overlapping is not None:
            # All kernels are our own then, so each overlaps with the next. That they did, the paths of each job say.
            equal = ours.tobytes() == overlapping.tobytes()
            suite.check("parity", f"{name} {dtype}: kernels that overlap change no bit", equal, "equal" if equal else "DIFFER")


def together(suite, name):
    path = suite.model(name)
    vocabulary = shapes.SHAPES[suite.shape(name)][1]["vocab_size"]
    generator = random.Random(4)
    count = 4 if suite.rehearse else TOGETHER
    prompts = [generator.randrange(16, LONGEST) for _ in range(count)]
    sequences = [[generator.randrange(vocabulary) for _ in range(prompt + DECODED)] for prompt in prompts]
    reference = None if suite.hollow() else Reference(suite, path, "bfloat16", sequences, prompts)
    for mode in [{}, DETERMINISTIC]:
        if name in shapes.EXPERIMENTAL:
            mode = mode | {"experimental": True}
        label = label_of(name, f"{count} sequences together", mode)
        ours = logits(suite, "batch-parity", label, path, sequences, prompts, 512, slots=64, batch_tokens=1024, context_tokens=1024,
                      utilization=0.5, **mode)
        if ours is not None:
            suite.check("batch-parity", label, *reference.compare(ours, PARITY))


def logits(suite, phase, label, path, sequences, prompts, chunk, **options):
    """Our logits of all rows; None if there are none, or nothing to compare them with, which is then said."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "logits"
        task = {"logits": {"sequences": sequences, "prompts": prompts, "chunk": chunk, "out": str(out)}}
        try:
            suite.job(phase, path, task, 120, **options)
        except RuntimeError as error:
            suite.check(phase, label, False, str(error)[:300])
            return None
        numpy = None if suite.hollow() else suite.package("numpy")
        if numpy is None:
            suite.recorder.skip(phase, "compared with nothing: there is no torch", label)
            return None
        rows = sum(len(tokens) - prompt + 1 for tokens, prompt in zip(sequences, prompts))
        return numpy.fromfile(out, dtype="<f4").reshape(rows, -1)


class Reference:
    """Logits of transformers."""

    def __init__(self, suite, path, dtype, sequences, prompts):
        torch = suite.torch()
        import numpy
        from transformers import AutoModelForCausalLM
        device = "cuda" if torch.cuda.is_available() else "cpu"

        def logits(kind):
            model = AutoModelForCausalLM.from_pretrained(path, dtype=kind).to(device).eval()
            with torch.no_grad():
                rows = [model(torch.tensor([tokens], device=device)).logits[0, prompt - 1:].float().cpu()
                        for tokens, prompt in zip(sequences, prompts)]
            return torch.cat(rows).numpy()

        # In single precision: the truth that both roundings are measured against.
        truth, theirs = logits(torch.float32), logits(getattr(torch, dtype))
        self.comparison = Comparison(numpy, truth)
        self.peer = self.comparison.apart(theirs)
        self.dtype = dtype

    def compare(self, ours, bound):
        """As close as the bound, or as twice what rounding does to transformers."""
        good, words = self.comparison.compare(ours, max(bound, 2 * self.peer))
        return good, f"{words} (transformers in {self.dtype}: {self.peer:.1e})"


class Comparison:
    """What rows of logits are compared with."""

    def __init__(self, numpy, truth):
        self.numpy, self.truth = numpy, truth
        self.scale = numpy.abs(truth).max()

    def apart(self, ours):
        return float(self.numpy.abs(ours - self.truth).max() / self.scale)

    def compare(self, ours, bound):
        """Whether logits are within the bound and choose the same tokens wherever the truth is sure, which it has to be once; and in words."""
        if ours.shape != self.truth.shape:
            return False, f"{ours.shape} logits, not {self.truth.shape}"
        if not (self.numpy.isfinite(ours).all() and self.numpy.isfinite(self.truth).all()):
            return False, "logits that are not finite"
        best = self.numpy.partition(self.truth, -2, axis=1)
        sure = best[:, -1] - best[:, -2] > bound * self.scale
        apart = self.apart(ours)
        same = bool((ours.argmax(1) == self.truth.argmax(1))[sure].all())
        words = f"{apart:.1e} of max|ref|, {int(sure.sum())} of {len(sure)} rows sure, their argmax {'equal' if same else 'DIFFER'}"
        return apart <= bound and same and bool(sure.any()), words
