"""The three ranked scripts: what each does in its 7.5 minutes, so that it ends within 8 on a machine that has nothing yet."""

from dataclasses import dataclass, field

MINUTES = 7.5


@dataclass
class Step:
    """A phase of a plan."""
    phase: str
    seconds: int  # that it may take at least; what earlier ones leave comes on top
    options: dict = field(default_factory=dict)


@dataclass
class Plan:
    steps: list
    models: list  # made in the background meanwhile, in this order


def first():
    """Does it work at all, and how fast is each kernel?"""
    return Plan([Step("machine", 30), Step("kernels", 110), Step("parity", 110), Step("steps", 100, {"names": ["qwen3-0.6b"]}),
                 Step("microbenchmarks", 100)], ["qwen3-0.6b"])


def second(families=None):
    """What failed in the first, and what is changed until it works: `families` of kernel tests, or all."""
    return Plan([Step("machine", 30), Step("kernels", 90, {"families": families}), Step("determinism", 90),
                 Step("step-modes", 240, {"name": "llama-3.1-8b"})], ["qwen3-0.6b", "llama-3.1-8b"])


def third():
    """Beside vLLM: the larger model first, since it says more; swapping between."""
    return Plan([Step("machine", 20), Step("beside", 240, {"name": "llama-3.1-8b"}), Step("swap", 50),
                 Step("peer", 140)], ["llama-3.1-8b", "qwen3-0.6b"])


PLANS = {"first": first, "second": second, "third": third}


def deadlines(plan, begun, minutes=MINUTES):
    """When each step has to end: when all before it and itself have had their share of the minutes. So none takes another's."""
    ends, at = [], begun
    for step in plan.steps:
        at += step.seconds * minutes / MINUTES
        ends.append(at)
    return ends
