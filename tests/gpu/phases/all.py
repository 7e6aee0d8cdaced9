"""What the suite does, by name and in order: what everything else rests on first, what takes long and says least last.

A phase takes the suite; what it may take besides are keywords. A name is also that of its results.
"""

from phases.beside import beside, peer
from phases.ceilings import yardstick
from phases.determinism import determinism, drafts
from phases.kernels import kernels, microbenchmarks
from phases.machine import machine
from phases.parity import batch_parity, parity
from phases.profile import profile
from phases.ranks import tensor_parallel
from phases.sanitizer import sanitizer
from phases.serving import binary, serve
from phases.steps import deterministic_steps, fp8_steps, serial_steps, step_modes, steps
from phases.swap import swap
from phases.table import replays, table
from phases.torch_kernels import torch_kernels

PHASES = {"machine": machine, "kernels": kernels, "parity": parity, "batch-parity": batch_parity,
          "microbenchmarks": microbenchmarks, "binary": binary,
          "determinism": determinism, "drafts": drafts, "tensor-parallel": tensor_parallel, "steps": steps, "swap": swap, "serve": serve,
          "peer": peer, "profile": profile, "sanitizer": sanitizer, "deterministic-steps": deterministic_steps, "fp8-steps": fp8_steps,
          "serial-steps": serial_steps, "step-modes": step_modes, "beside": beside, "yardstick": yardstick, "table": table,
          "torch-kernels": torch_kernels, "replays": replays}
# Those of a run that names none.
DEFAULT = [name for name in PHASES if name not in ("step-modes", "beside", "yardstick", "table")]
