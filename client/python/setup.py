"""Generates the stubs of the API while the package is built; pyproject.toml has the rest."""

import importlib.metadata
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
PROTOS = HERE.parents[1] / "proto"
FILES = ["inflight/v1/inference.proto", "inflight/v1/sampling.proto"]


class BuildWithStubs(build_py):
    """Copies the modules, and generates inflight.v1."""

    def run(self):
        super().run()
        from grpc_tools import protoc

        out = Path(self.build_lib)
        (out / "inflight" / "v1").mkdir(parents=True, exist_ok=True)
        for package in ("inflight", "inflight/v1"):
            (out / package / "__init__.py").touch()
        flags = [f"-I{PROTOS}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
        if protoc.main(["protoc", *flags, *FILES]) != 0:
            raise SystemExit("protoc could not generate the stubs of " + ", ".join(FILES))

    def find_package_modules(self, package, package_dir):
        # Those of inflight are generated.
        return [] if package.split(".")[0] == "inflight" else super().find_package_modules(package, package_dir)

    def check_package(self, package, package_dir):
        return None if package.split(".")[0] == "inflight" else super().check_package(package, package_dir)


def version():
    """The version of the workspace."""
    manifest = (HERE.parents[1] / "Cargo.toml").read_text()
    return re.search(r'^version = "([^"]+)"', manifest, re.MULTILINE).group(1)


def dependencies():
    """The stubs need at least the versions that generated them."""
    installed = importlib.metadata.version
    return [f"grpcio>={installed('grpcio-tools')}", f"protobuf>={installed('protobuf')}"]


setup(version=version(), install_requires=dependencies(), cmdclass={"build_py": BuildWithStubs})
