#!/usr/bin/env python3
"""Makes a wheel with the program, by which pip and uv install it.

    deploy/release/binary_wheel.py --binary PROGRAM --version VERSION --output FOLDER [--licence FILE]...

The wheel has no Python: the program is a script of it, so `pip install` puts it on PATH, and `uvx --from WHEEL inflight` runs it. Its tag says
the oldest glibc with all symbols that the program asks for (PEP 600), and a program that needs a library beside those of every Linux with
glibc is refused. Bytes depend on the arguments and SOURCE_DATE_EPOCH alone. Needs readelf.
"""

import argparse
import base64
import hashlib
import os
import pathlib
import re
import sys
import time
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from checks import Failed, output_of

# Libraries that PEP 600 takes for granted, of those that programs written in Rust and C++ need.
LIBRARIES = re.compile(r"^(lib(c|m|dl|rt|util|pthread)\.so\.[0-9]+|libgcc_s\.so\.1|libstdc\+\+\.so\.6|ld-linux-[-\w]+\.so\.[0-9]+)$")
# Names of architectures in ELF, in tags.
MACHINES = {"Advanced Micro Devices X86-64": "x86_64", "AArch64": "aarch64"}
# Before it, zip has no dates.
FIRST_SECONDS = 315532800
SUMMARY = "LLM serving cluster: stateless routers, GPU or CPU workers, one binary"


def glibc(binary):
    """The oldest version of glibc that has all symbols that a binary asks for, as (major, minor)."""
    found = re.findall(r"\bGLIBC_(\d+)\.(\d+)", output_of(["readelf", "--version-info", "--wide", binary]))
    if not found:
        raise Failed(f"{binary} asks for no version of glibc: this is no program for Linux with glibc")
    return max((int(major), int(minor)) for major, minor in found)


def platform_tag(binary):
    """The platform of the wheel, such as manylinux_2_34_x86_64."""
    machine = re.search(r"^\s*Machine:\s*(.+?)\s*$", output_of(["readelf", "--file-header", binary]), re.MULTILINE)[1]
    if machine not in MACHINES:
        raise Failed(f"{binary} is for {machine}: wheels are made for {' and '.join(MACHINES)}")
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output_of(["readelf", "--dynamic", "--wide", binary]))
    if foreign := [library for library in needed if not LIBRARIES.match(library)]:
        raise Failed(f"{binary} needs {', '.join(foreign)}, which not every Linux with glibc has: link it into the program")
    major, minor = glibc(binary)
    return f"manylinux_{major}_{minor}_{MACHINES[machine]}"


def python_version(version):
    """A version in Python's spelling: 1.0.0-rc.1 is 1.0.0rc1 there."""
    parts = re.fullmatch(r"(\d+\.\d+\.\d+)(?:-(alpha|beta|rc)\.?(\d+))?", version)
    if parts is None:
        raise Failed(f"version {version} has no spelling in Python: write MAJOR.MINOR.PATCH, and -alpha.N, -beta.N or -rc.N behind it")
    return parts[1] + (f"{({'alpha': 'a', 'beta': 'b'}).get(parts[2], 'rc')}{parts[3]}" if parts[2] else "")


def metadata(version, licences, readme):
    """Metadata of the package. PEP 639 has the licences."""
    lines = ["Metadata-Version: 2.4", "Name: inflight", f"Version: {version}", f"Summary: {SUMMARY}", "License-Expression: Apache-2.0"]
    lines += [f"License-File: {name}" for name in sorted(licences)]
    lines += ["Classifier: Operating System :: POSIX :: Linux", "Classifier: Programming Language :: Rust",
              "Description-Content-Type: text/markdown", "", readme]
    return "\n".join(lines)


def write(output, binary, version, licences, readme="", seconds=FIRST_SECONDS, level=9):
    """Writes the wheel of a binary into a folder, with licences {name: bytes}, and returns its path."""
    tag = f"py3-none-{platform_tag(binary)}"
    name = f"inflight-{python_version(version)}"
    information = f"{name}.dist-info"
    entries = {
        f"{name}.data/scripts/inflight": (0o755, binary.read_bytes()),
        **{f"{information}/licenses/{licence}": (0o644, text) for licence, text in licences.items()},
        f"{information}/METADATA": (0o644, metadata(python_version(version), licences, readme).encode()),
        f"{information}/WHEEL": (0o644, f"Wheel-Version: 1.0\nGenerator: inflight\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()),
    }
    record = f"{information}/RECORD"
    lines = [f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b'=').decode()},{len(text)}\n"
             for path, (_, text) in entries.items()]
    entries[record] = (0o644, ("".join(lines) + f"{record},,\n").encode())
    path = output / f"{name}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for entry, (mode, text) in entries.items():
            file = zipfile.ZipInfo(entry, time.gmtime(max(seconds, FIRST_SECONDS))[:6])
            file.create_system = 3  # Unix, whose modes follow
            file.external_attr = (0o100000 | mode) << 16
            file.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(file, text, compresslevel=level)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, required=True, help="the program")
    parser.add_argument("--version", required=True, help="its version")
    parser.add_argument("--output", type=pathlib.Path, required=True, help="folder of the wheel")
    parser.add_argument("--licence", type=pathlib.Path, action="append", default=[], metavar="FILE", help="file with a licence")
    arguments = parser.parse_args()
    licences = {file.name: file.read_bytes() for file in arguments.licence}
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", FIRST_SECONDS))
    try:
        print(write(arguments.output, arguments.binary, arguments.version, licences, seconds=seconds))
    except Failed as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
