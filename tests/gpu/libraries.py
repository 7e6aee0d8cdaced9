"""Prints the folders that have cuBLASLt of CUDA 13 and NCCL: those of Python packages first, then a toolkit's; joined by colons."""

import glob
import importlib.util
import os


def folders():
    roots = []
    for package in ["nvidia", "torch"]:
        try:
            found = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            found = None
        # Without importing it, which takes seconds.
        for place in (found.submodule_search_locations or []) if found else []:
            roots.append(os.path.dirname(place))
    for root in roots:
        for pattern in ["nvidia/*/lib", "nvidia/*/lib64", "torch/lib"]:
            yield from sorted(glob.glob(os.path.join(root, pattern)))
    for pattern in ["/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/x86_64-linux/lib"]:
        yield from sorted(glob.glob(pattern))


def main():
    # The driver's own folder, where a container mounts it and the loader does not know of it.
    drivers = [folder for folder in ["/usr/local/nvidia/lib64", "/usr/local/nvidia/lib"]
               if glob.glob(os.path.join(folder, "libcuda.so*"))]
    places = list(folders())
    having = lambda library: [folder for folder in places if glob.glob(os.path.join(folder, library))][:1]
    print(":".join(dict.fromkeys([*having("libcublasLt.so.13*"), *having("libnccl.so.2"), *drivers])))


if __name__ == "__main__":
    main()
