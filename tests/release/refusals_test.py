"""What deploy/release/build is refused for, on small repositories that would be released but for one fault."""

import pathlib
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "deploy/release"))

import checks

VERSION = "1.2.3"
FILES = {
    "Cargo.toml": f'[workspace.package]\nversion = "{VERSION}"\n',
    "Cargo.lock": f'[[package]]\nname = "inflight"\nversion = "{VERSION}"\n',
    "CHANGELOG.md": f"# Changelog\n\n## Unreleased\n\n## {VERSION}\n\n- A change.\n\n## 1.2.2\n\n- Another one.\n",
    "deploy/helm/inflight/Chart.yaml": f'version: 0.9.0\nappVersion: "{VERSION}"\n',
    "deploy/compose/compose.yaml": f"image: inflight:{VERSION}-gpu\n",
    "client/python/pyproject.toml": '[project]\ndynamic = ["version"]\n',
}


class Refusals(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.git("init", "--quiet")
        for path, text in FILES.items():
            self.write(path, text)
        self.commit()

    def git(self, *arguments):
        identity = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", self.root, *identity, *arguments], check=True, stdout=subprocess.DEVNULL)

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def commit(self):
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "change")

    def refused(self, *clues):
        with self.assertRaises(checks.Failed) as caught:
            checks.source(self.root)
        for clue in clues:
            self.assertIn(clue, str(caught.exception))

    def changed(self, path, old, new):
        self.assertIn(old, FILES[path])
        self.write(path, FILES[path].replace(old, new))
        self.commit()

    def test_a_clean_tree_with_equal_versions_is_released(self):
        self.assertEqual(checks.source(self.root), VERSION)

    def test_a_changed_or_new_file_is_refused_by_name(self):
        self.write("new.txt", "")
        self.refused("new.txt", "not committed")

    def test_many_changes_are_counted(self):
        for number in range(9):
            self.write(f"new-{number}.txt", "")
        self.refused("new-0.txt", "and 4 more")

    def test_a_version_without_a_section_in_the_changelog_is_refused(self):
        self.changed("CHANGELOG.md", f"## {VERSION}\n", "## 1.2.30\n")
        self.refused("CHANGELOG.md has no section for 1.2.3", "`## 1.2.3`")

    def test_an_empty_section_is_refused(self):
        self.changed("CHANGELOG.md", "- A change.\n", "")
        self.refused("section 1.2.3 of CHANGELOG.md is empty")

    def test_a_heading_may_have_a_date(self):
        self.changed("CHANGELOG.md", f"## {VERSION}\n", f"## [{VERSION}] - 2026-01-31\n")
        self.assertEqual(checks.source(self.root), VERSION)

    def test_other_versions_are_refused_with_their_places(self):
        for path, place in [("Cargo.lock", "Cargo.lock, package inflight: 1.2.2"),
                            ("deploy/helm/inflight/Chart.yaml", "Chart.yaml, appVersion: 1.2.2"),
                            ("deploy/compose/compose.yaml", "deploy/compose/compose.yaml:1, image: 1.2.2")]:
            with self.subTest(path):
                self.changed(path, VERSION, "1.2.2")
                self.refused(place, f"write {VERSION} there")
                self.write(path, FILES[path])
                self.commit()

    def test_a_client_with_a_version_of_its_own_is_refused_if_it_differs(self):
        self.changed("client/python/pyproject.toml", 'dynamic = ["version"]', 'version = "1.2.2"')
        self.refused("client/python/pyproject.toml, version: 1.2.2")

    def test_a_version_that_was_released_from_another_commit_is_refused(self):
        self.git("tag", f"v{VERSION}")
        self.assertEqual(checks.source(self.root), VERSION)
        self.commit()
        self.refused(f"the tag v{VERSION} names commit")

    def test_a_missing_cross_compiler_is_named_by_its_package(self):
        there = mock.patch("shutil.which", lambda tool: None if tool == "aarch64-linux-gnu-gcc" else tool)
        with there, mock.patch("platform.machine", lambda: "x86_64"), self.assertRaises(checks.Failed) as caught:
            checks.tools()
        self.assertIn("apt-get install gcc-aarch64-linux-gnu", str(caught.exception))

    def test_another_architecture_is_refused(self):
        with mock.patch("platform.machine", lambda: "aarch64"), self.assertRaisesRegex(checks.Failed, "this machine is aarch64"):
            checks.tools()
