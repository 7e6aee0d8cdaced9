"""install.sh and the wheel of the program, as users run them, on folders like that of a release.

The program is INFLIGHT_TEST_PROGRAM; without it the tests with a real program are skipped, and the others run with a script in its place.
INFLIGHT_TEST_PYTHON is a Python with pip, and perhaps uv beside it.
"""

import hashlib
import importlib.machinery
import importlib.util
import io
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy/release"))

import binary_wheel
from checks import Failed

INSTALLER = ROOT / "deploy/release/install.sh"
PROGRAM = os.environ.get("INFLIGHT_TEST_PROGRAM")
MACHINE = platform.machine()
FAKE = b"#!/bin/sh\necho inflight 1.2.3\n"
# What the script may call, so that a test can leave some out.
TOOLS = ("awk", "cat", "chmod", "cp", "curl", "cut", "dirname", "grep", "gzip", "mkdir", "mktemp", "mv", "rm", "sed", "sh", "sha256sum", "tar", "uname",
         "wget")


def archive_of(program, name):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=0) as archive:
        entry = tarfile.TarInfo(f"{name}/inflight")
        entry.mode, entry.size = 0o755, len(program)
        archive.addfile(entry, io.BytesIO(program))
    return file.getvalue()


class Folder:
    """A folder like that of a release, with one archive of a program."""

    def __init__(self, path, program=FAKE, version="1.2.3", machine=MACHINE):
        self.path = path
        path.mkdir(parents=True)
        name = f"inflight-{version}-{machine}-linux"
        self.archive = path / f"{name}.tar.gz"
        self.archive.write_bytes(archive_of(program, name))
        shutil.copy(INSTALLER, path / "install.sh")
        (path / "manifest.json").write_text("{}\n")
        self.sum()

    def sum(self):
        sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
                for file in sorted(self.path.iterdir()) if file.name != "SHA256SUMS"]
        (self.path / "SHA256SUMS").write_text("".join(sums))

    @property
    def url(self):
        return self.path.as_uri()


class Installer(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.home = self.folder / "home"
        self.home.mkdir()

    def tools(self, without=(), **scripts):
        """A folder of programs for PATH: those that the script may call but for some, and scripts in place of others."""
        path = self.folder / "-".join(["tools", *without, *scripts])
        path.mkdir()
        for tool in set(TOOLS) - set(without) - set(scripts):
            if found := shutil.which(tool):
                (path / tool).symlink_to(found)
        for name, text in scripts.items():
            (path / name).write_text(f"#!/bin/sh\n{text}\n")
            (path / name).chmod(0o755)
        return path

    def install(self, *arguments, shell=("sh",), script=INSTALLER, **variables):
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), **variables}
        return subprocess.run([*shell, script, *map(str, arguments)], env=environment, capture_output=True, text=True, check=False)

    def installed(self, prefix, *arguments, **options):
        done = self.install(*arguments, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual([file.name for file in (prefix / "bin").iterdir()], ["inflight"])
        self.assertEqual((prefix / "bin/inflight").stat().st_mode & 0o777, 0o755)
        return done.stdout

    def refused(self, sentence, *arguments, **options):
        """Nothing is installed, what is installed stays, and nothing is left behind."""
        prefix = self.home / ".local"
        (prefix / "bin").mkdir(parents=True, exist_ok=True)
        (prefix / "bin/inflight").write_text("of before")
        scratch = self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        done = self.install(*arguments, TMPDIR=str(scratch), **options)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertTrue(done.stderr.splitlines()[-1].startswith("error: "), done.stderr)
        self.assertEqual(done.stderr.count("error: "), 1, done.stderr)
        self.assertIn(sentence, done.stderr)
        self.assertEqual((prefix / "bin/inflight").read_text(), "of before")
        self.assertEqual([file.name for file in (prefix / "bin").iterdir()], ["inflight"])
        self.assertEqual(list(scratch.iterdir()), [])

    def test_every_shell_installs_and_installs_again(self):
        release = Folder(self.folder / "a release")
        for shell in (["sh"], ["dash"], ["bash", "--posix"], ["busybox", "sh"]):
            if shutil.which(shell[0]):
                prefix = self.folder / f"prefix of {shell[0]}"
                for _ in range(2):
                    # A space in the address is one of the folder.
                    told = self.installed(prefix, "--base-url", f"file://{release.path}/", "--prefix", prefix, shell=shell)
                    self.assertIn(f"inflight 1.2.3 is installed as {prefix}/bin/inflight", told)
                    self.assertIn(f'It is not on PATH: export PATH="{prefix}/bin:$PATH"', told)
                    self.assertIn("inflight up", told)

    def test_a_release_installs_itself_below_home(self):
        release = Folder(self.folder / "release")
        told = self.installed(self.home / ".local", script=release.path / "install.sh", PATH=f"{self.home}/.local/bin:{os.environ['PATH']}")
        self.assertNotIn("PATH", told)
        self.installed(self.folder / "there", INFLIGHT_BASE_URL=release.url, INFLIGHT_PREFIX=str(self.folder / "there"))

    def test_curl_and_wget_download(self):
        release = Folder(self.folder / "release")
        serve = f'case $url in https://example.com/r/*) cp "{release.path}/${{url##*/}}" "$file";; *) exit 22;; esac'
        curl = f'while [ $# -gt 1 ]; do [ "$1" = --output ] && file=$2; shift; done; url=$1; {serve}'
        wget = f'file=$3 url=$4; {serve}'
        for name, path in (("curl", self.tools(without=("wget",), curl=curl)), ("wget", self.tools(without=("curl",), wget=wget))):
            prefix = self.folder / name
            self.installed(prefix, "--base-url", "https://example.com/r", "--prefix", prefix, PATH=str(path))
            self.refused("cannot download https://example.com/SHA256SUMS", "--base-url", "https://example.com", PATH=str(path))

    def test_what_is_wrong_with_a_release_is_refused(self):
        release = Folder(self.folder / "release")
        at = ("--base-url", release.url)
        release.archive.write_bytes(archive_of(FAKE + b"# changed\n", release.archive.name.removesuffix(".tar.gz")))
        self.refused("it was damaged or changed, so nothing was installed", *at)
        release.archive.unlink()
        self.refused(f"{release.archive} is missing: is this the folder of a release?", *at)
        release.sum()
        self.refused(f"SHA256SUMS has no archive inflight-VERSION-{MACHINE}-linux.tar.gz: is this the folder of a release?", *at)
        (release.path / "SHA256SUMS").unlink()
        self.refused("SHA256SUMS is missing: is this the folder of a release?", *at)
        two = Folder(self.folder / "two")
        shutil.copy(two.archive, two.path / two.archive.name.replace("1.2.3", "1.2.4"))
        two.sum()
        self.refused(f"has several archives for {MACHINE}: give the folder of one release", "--base-url", two.url)
        broken = Folder(self.folder / "broken", b"#!/bin/sh\necho GLIBC_9.9 not found >&2; exit 1\n")
        self.refused("does not run on this machine, so nothing was installed: GLIBC_9.9 not found", "--base-url", broken.url)
        named = Folder(self.folder / "named")
        named.archive.write_bytes(archive_of(FAKE, "other"))
        named.sum()
        self.refused("cannot unpack", "--base-url", named.url)

    def test_what_is_wrong_with_a_machine_is_refused(self):
        release = Folder(self.folder / "release")
        at = ("--base-url", release.url)
        self.refused("there is no public place of releases yet, so give the folder of one by --base-url or INFLIGHT_BASE_URL")
        self.refused("http://example.com/SHA256SUMS is neither https:// nor file://", "--base-url", "http://example.com")
        self.refused("unknown argument --prefiks; known are --base-url URL, --prefix FOLDER and --help", "--prefiks", "x")
        self.refused("--prefix needs a value", "--prefix")
        file = self.folder / "file"
        file.touch()
        self.refused(f"cannot make the folder {file}/bin: give one that you may write to by --prefix", *at, "--prefix", file)
        self.refused("neither curl nor wget is installed", "--base-url", "https://example.com", PATH=str(self.tools(without=("curl", "wget"))))
        self.refused("none of sha256sum, shasum and openssl is installed", *at, PATH=str(self.tools(without=("sha256sum",))))
        for uname, sentence in (("[ $1 = -s ] && echo Darwin || echo arm64", "releases have programs for Linux, and this is Darwin"),
                                ("[ $1 = -s ] && echo Linux || echo riscv64", "programs for x86_64 and aarch64, and this is riscv64")):
            self.refused(sentence, *at, PATH=f"{self.tools(uname=uname)}")
            shutil.rmtree(self.folder / "tools-uname")

    def test_a_script_that_was_cut_off_does_nothing(self):
        text = INSTALLER.read_text()
        for size in range(0, len(text) - len('main "$@"\n'), 97):
            done = subprocess.run(["sh", "-s", "--", "--base-url", "file:///nowhere"], input=text[:size], env={"PATH": os.environ["PATH"], "HOME": str(self.home)},
                                  capture_output=True, text=True, check=False)
            self.assertEqual(list(self.home.iterdir()), [], f"{size} bytes: {done.stderr}")

    def test_a_published_release_knows_its_address(self):
        loader = importlib.machinery.SourceFileLoader("release_build", str(ROOT / "deploy/release/build"))
        build = importlib.util.module_from_spec(importlib.util.spec_from_loader("release_build", loader))
        loader.exec_module(build)
        script = self.folder / "install.sh"
        script.write_text(build.installer("https://example.com/inflight/1.2.3"))
        self.refused("cannot download https://example.com/inflight/1.2.3/SHA256SUMS", script=script, PATH=str(self.tools(curl="exit 6")))
        self.assertEqual(build.installer(""), INSTALLER.read_text())
        for address in ('https://example.com/"; rm', "http://example.com", "file:///srv"):
            with self.assertRaises(Failed):
                build.installer(address)


class Wheel(unittest.TestCase):
    def test_versions_have_pythons_spelling(self):
        for version, python in (("0.2.0", "0.2.0"), ("1.0.0-rc.1", "1.0.0rc1"), ("1.0.0-alpha.2", "1.0.0a2"), ("1.0.0-beta3", "1.0.0b3")):
            self.assertEqual(binary_wheel.python_version(version), python)
        for version in ("1.0", "1.0.0-dev.1", "1.0.0+7"):
            with self.assertRaises(Failed):
                binary_wheel.python_version(version)

    def test_tags_come_from_symbols_and_libraries(self):
        def platform_tag(**changes):
            says = {"--file-header": "  Machine:   Advanced Micro Devices X86-64\n", "--version-info": "GLIBC_2.4 GLIBC_2.34 GLIBC_2.9 GLIBC_PRIVATE",
                    "--dynamic": " 0x1 (NEEDED)  Shared library: [libc.so.6]\n 0x1 (NEEDED)  Shared library: [libgcc_s.so.1]\n"}
            says |= {f"--{name.replace('_', '-')}": text for name, text in changes.items()}
            with mock.patch.object(binary_wheel, "output_of", lambda command: says[command[1]]):
                return binary_wheel.platform_tag("program")

        self.assertEqual(platform_tag(), "manylinux_2_34_x86_64")
        self.assertEqual(platform_tag(file_header="  Machine: AArch64\n"), "manylinux_2_34_aarch64")
        for sentence, changes in (("is for RISC-V", {"file_header": "Machine: RISC-V\n"}), ("asks for no version of glibc", {"version_info": ""}),
                                  ("needs libssl.so.3", {"dynamic": "0x1 (NEEDED) Shared library: [libssl.so.3]\n"})):
            with self.assertRaisesRegex(Failed, sentence):
                platform_tag(**changes)


    def test_the_same_program_gives_the_same_bytes(self):
        # Any program for this machine.
        program = pathlib.Path(shutil.which("true")).resolve()
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
            wheels = [binary_wheel.write(pathlib.Path(folder), program, "1.0.0-rc.1", {"LICENSE": b"text"}, "# Title", 1_700_000_000)
                      for folder in (one, two)]
            self.assertEqual(wheels[0].name, wheels[1].name)
            self.assertEqual(wheels[0].read_bytes(), wheels[1].read_bytes())
            with zipfile.ZipFile(wheels[0]) as archive:
                names = archive.namelist()
                self.assertEqual(names, [f"inflight-1.0.0rc1.{name}" for name in (
                    "data/scripts/inflight", "dist-info/licenses/LICENSE", "dist-info/METADATA", "dist-info/WHEEL", "dist-info/RECORD")])
                self.assertIn("\nVersion: 1.0.0rc1\n", archive.read(names[2]).decode())
                self.assertEqual([line.partition(",")[0] for line in archive.read(names[4]).decode().splitlines()], names)
                self.assertEqual({entry.date_time for entry in archive.infolist()}, {(2023, 11, 14, 22, 13, 20)})


@unittest.skipUnless(PROGRAM, "INFLIGHT_TEST_PROGRAM is not set")
class RealProgram(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        # As in a release: of the program for tests, nine tenths are symbols and debug information.
        cls.program = cls.folder / "inflight"
        subprocess.run(["strip", "--strip-all", "-o", cls.program, PROGRAM], check=True)
        cls.version = subprocess.run([cls.program, "--version"], check=True, capture_output=True, text=True).stdout.split()[1]
        # Compressing it takes longer than all else.
        cls.wheel = binary_wheel.write(cls.folder, cls.program, cls.version, {"LICENSE": (ROOT / "LICENSE").read_bytes()}, level=0)

    def says_its_version(self, *command, **options):
        done = subprocess.run([*map(str, command), "--version"], capture_output=True, text=True, check=False, **options)
        self.assertEqual((done.returncode, done.stdout.split()[:2]), (0, ["inflight", self.version]), done.stderr)

    def test_install_sh_installs_it(self):
        release = Folder(self.folder / "release", self.program.read_bytes(), self.version)
        subprocess.run(["sh", release.path / "install.sh", "--prefix", self.folder / "prefix"], check=True, stdout=subprocess.DEVNULL)
        self.says_its_version(self.folder / "prefix/bin/inflight")

    def test_pip_installs_the_wheel_offline(self):
        environment = self.folder / "venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        pip = [os.environ.get("INFLIGHT_TEST_PYTHON", sys.executable), "-m", "pip", "--python", environment / "bin/python", "--quiet",
               "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--no-index", "--find-links", self.folder, "inflight"], check=True)
        self.says_its_version(environment / "bin/inflight")
        subprocess.run([*pip, "uninstall", "--yes", "inflight"], check=True)
        self.assertFalse((environment / "bin/inflight").exists())

    def test_uvx_runs_the_wheel_offline(self):
        beside = pathlib.Path(os.environ.get("INFLIGHT_TEST_PYTHON", sys.executable)).parent
        uvx = shutil.which("uvx") or shutil.which("uvx", path=beside)
        if uvx is None:
            self.skipTest("uvx is not installed")
        uv = {**os.environ, "UV_CACHE_DIR": str(self.folder / "uv"), "UV_PYTHON_DOWNLOADS": "never"}
        self.says_its_version(uvx, "--offline", "--no-index", "--python", sys.executable, "--find-links", self.folder, "inflight", env=uv)
        self.says_its_version(uvx, "--offline", "--no-index", "--python", sys.executable, "--from", self.wheel, "inflight", env=uv)


if __name__ == "__main__":
    unittest.main()
