"""What this runs on."""

import json
import os
import sys

from recorder import Skipped


def machine(suite):
    """What this runs on; and whether there is anything to run on, in the words of the binary."""
    code, output, _ = suite.recorder.command(
        "nvidia-smi", ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,clocks.max.sm", "--format=csv,noheader"], 30)
    suite.row("machine", "nvidia-smi", output.strip().splitlines()[-1][:90] if output.strip() else f"exit status {code}")
    try:
        torch = suite.torch()
        import transformers
        versions = f"python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}"
    except (Skipped, RuntimeError) as error:
        versions = str(error)
    suite.row("machine", "packages", versions)
    suite.row("machine", "libraries", os.environ.get("LD_LIBRARY_PATH") or "no cublasLt beside torch; the system's, if it has one")
    kernel_images = suite.json["images"]
    replaced = kernel_images["replaced"]
    suite.row("machine", "kernel images", "embedded" if replaced == {} else f"{kernel_images['folder']} can't be read" if replaced is None else
              "replaced: " + ", ".join(f"{file} {digest[:12]}" for file, digest in replaced.items()))
    for program in ["inflight", "measure", "kernel-tests"]:
        # A job with all that has no default, of a model that is nowhere.
        job = json.dumps({"model": "nowhere", "task": {"steps": {"cases": [], "repeats": 1}}})
        arguments = {"inflight": ["--version"], "measure": [job], "kernel-tests": ["--list"]}[program]
        code, output, _ = suite.recorder.command(program, [str(suite.bundle / program), *arguments], 30)
        # The measuring binary takes the job and finds no model: that it can say so is enough.
        good = code == 1 and "field" not in output if program == "measure" else code == 0
        suite.check("machine", f"{program} starts", good, "" if good else output.strip()[-200:])
