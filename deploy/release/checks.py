"""What a release is refused for, before anything is built: uncommitted changes, versions that disagree, no section in the changelog,
missing tools."""

import pathlib
import platform
import re
import shutil
import subprocess
import tomllib

SHOWN_MAX = 5
# What a release is built with, and the Debian package that has it.
TOOLS = {
    "cc": "gcc",
    "c++": "g++",
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "aarch64-linux-gnu-strip": "binutils-aarch64-linux-gnu",
    "qemu-aarch64": "qemu-user",
    "strip": "binutils",
    "readelf": "binutils",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
    "git": "git",
}
AARCH64 = "aarch64-unknown-linux-gnu"


class Failed(Exception):
    """What was wrong and what to do."""


def output_of(command, **options):
    """The standard output of a command."""
    try:
        process = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    except FileNotFoundError as error:
        raise Failed(f"{command[0]} is not installed: install it or add it to PATH") from error
    except subprocess.CalledProcessError as error:
        raise Failed(f"{' '.join(map(str, command))} failed: {(error.stderr or error.stdout).strip()}") from error
    return process.stdout


def workspace_version(root):
    """The version of the workspace, which is the version of the release."""
    with (root / "Cargo.toml").open("rb") as file:
        return tomllib.load(file)["workspace"]["package"]["version"]


def clean_tree(root):
    """Refuses changes that no commit has: nobody could build the release again."""
    changes = output_of(["git", "-C", root, "status", "--porcelain"]).splitlines()
    if changes:
        shown = ", ".join(line[3:] for line in changes[:SHOWN_MAX])
        more = f" and {len(changes) - SHOWN_MAX} more" if len(changes) > SHOWN_MAX else ""
        raise Failed(f"the tree has changes that are not committed ({shown}{more}): commit or remove them")


def tag(root, version):
    """Refuses a version that was released from another commit."""
    name = f"refs/tags/v{version}"
    tagged = output_of(["git", "-C", root, "for-each-ref", "--format=%(refname)", name]).strip()
    if not tagged:
        return
    commits = output_of(["git", "-C", root, "rev-parse", f"{name}^{{commit}}", "HEAD"]).split()
    if len(set(commits)) != 1:
        raise Failed(f"the tag v{version} names commit {commits[0][:12]}, the tree is at {commits[1][:12]}: raise version in "
                     "[workspace.package] of Cargo.toml, or check the tag out")


def changelog(root, version):
    """Refuses a version without a section in the changelog, or with an empty one."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"^## \[?{re.escape(version)}\]?(?: [^\n]*)?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        raise Failed(f"CHANGELOG.md has no section for {version}: give the heading `## {version}` to the changes of this release")
    if not section[1].strip():
        raise Failed(f"the section {version} of CHANGELOG.md is empty: list the changes of this release there")


def stated_versions(root):
    """The versions of the product that files state beside Cargo.toml: [(where, version)]."""
    with (root / "Cargo.lock").open("rb") as file:
        locked = {package["name"]: package["version"] for package in tomllib.load(file)["package"]}
    found = [("Cargo.lock, package inflight", locked.get("inflight", "none"))]
    chart = (root / "deploy/helm/inflight/Chart.yaml").read_text(encoding="utf-8")
    stated = re.search(r"^appVersion: *[\"']?([^\s\"']+)", chart, re.MULTILINE)
    found.append(("deploy/helm/inflight/Chart.yaml, appVersion", stated[1] if stated else "none"))
    with (root / "client/python/pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    # Without one of its own, setup.py takes the first version of Cargo.toml; the built wheel is checked for it, too.
    if "version" not in project.get("dynamic", []):
        found.append(("client/python/pyproject.toml, version", project.get("version", "none")))
    for path in sorted((root / "deploy").rglob("*")):
        if path.suffix in (".yaml", ".yml", ".md") or path.name == "Dockerfile":
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                for image in re.findall(r"\binflight:(\d+\.\d+\.\d+[\w.]*)", line):
                    found.append((f"{path.relative_to(root)}:{number}, image", image))
    return found


def versions(root, version):
    """Refuses files that state another version than Cargo.toml."""
    others = [f"{where}: {stated}" for where, stated in stated_versions(root) if stated != version]
    if others:
        raise Failed(f"version is {version} in Cargo.toml and another one elsewhere ({'; '.join(others)}): write {version} there")


def source(root):
    """Checks the sources, and returns the version of the release."""
    version = workspace_version(root)
    clean_tree(root)
    versions(root, version)
    changelog(root, version)
    tag(root, version)
    return version


def tools():
    """Refuses a machine that lacks a tool, before a long build."""
    if platform.machine() != "x86_64":
        raise Failed(f"this machine is {platform.machine()}: build the release on x86-64, which compiles for aarch64, too")
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing:
        raise Failed(f"Debian packages are missing: apt-get install {' '.join(missing)}")
    # A toolchain without rustup has no list; its build says what is missing.
    if shutil.which("rustup") and AARCH64 not in output_of(["rustup", "target", "list", "--installed"]).split():
        raise Failed(f"the Rust toolchain has no target {AARCH64}: rustup target add {AARCH64}")


def program(root, name, places, advice):
    """The path of a program: on PATH, or where .ci/run installs it."""
    installed = [root / "target/ci" / place for place in places]
    found = shutil.which(name) or next((str(path) for path in installed if path.exists()), None)
    if found is None:
        raise Failed(f"{name} is neither on PATH nor in {installed[0].parent}: {advice}")
    return pathlib.Path(found)


def pinned(root, variable):
    """The version of a tool that .ci/run installs."""
    return re.search(rf"^{variable}=(\S+)$", (root / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)[1]
