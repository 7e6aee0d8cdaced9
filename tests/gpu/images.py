"""The kernels that run: of which sources, and which files replace embedded ones (INFLIGHT_CUDA_IMAGES)."""

import hashlib
import os
from pathlib import Path


def sources_digest(folder: Path):
    """SHA-256 of all sources, as it is in the archive of the embedded kernels; None without sources."""
    if not folder.is_dir():
        return None
    names = [file.name for file in folder.iterdir() if file.suffix in (".cu", ".cuh") or file.name == "params.h"]
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest() if names else None


def replaced():
    """SHA-256 of each file that replaces an embedded image, by its name; None if the folder can't be read."""
    folder = os.environ.get("INFLIGHT_CUDA_IMAGES")
    if not folder:
        return {}
    try:
        files = sorted(file for file in Path(folder).iterdir() if file.suffix in (".cubin", ".ptx"))
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    except OSError:
        return None


def describe(bundle: Path):
    """For the results."""
    return {"sources": sources_digest(bundle / "cuda"), "folder": os.environ.get("INFLIGHT_CUDA_IMAGES"), "replaced": replaced()}
