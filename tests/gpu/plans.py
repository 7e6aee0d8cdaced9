"""What the script `slot` does in its minutes: phases with hard ends, so that none takes another's time, and the most useful first."""

from dataclasses import dataclass, field

MINUTES = 9.75


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


def slot(families=None):
    """Correct, then fast. `families`: of kernel tests that are run, or all."""
    return Plan([Step("machine", 35), Step("yardstick", 10), Step("kernels", 65, {"families": families}), Step("parity", 75),
                 Step("batch-parity", 45), Step("determinism", 35), Step("table", 165), Step("torch-kernels", 20), Step("beside", 90),
                 Step("swap", 25), Step("replays", 20)], ["qwen3-0.6b", "llama-3.1-8b"])


PLANS = {"slot": slot}


def deadlines(plan, begun, minutes=MINUTES):
    """When each step has to end: when all before it and itself have had their share of the minutes. So none takes another's."""
    ends, at = [], begun
    for step in plan.steps:
        at += step.seconds * minutes / MINUTES
        ends.append(at)
    return ends
