"""What is in an image or archive: crates that are linked into the binary, packages of Debian, wheels; as SPDX 2.3, and their licences."""

import hashlib
import json
import pathlib
import re
import subprocess
import tomllib
from dataclasses import dataclass

LICENCE_NAMES = re.compile(r"(licen[cs]e|copying|notice|unlicense|copyright)([.-].*)?", re.IGNORECASE)
NONE_GIVEN = "NOASSERTION"


@dataclass(frozen=True)
class Component:
    """Something that an image has from elsewhere."""

    kind: str  # as in a package URL: cargo, deb, pypi
    name: str
    version: str
    sha256: str | None = None
    licence: str = NONE_GIVEN
    qualifiers: str = ""

    def spdx_id(self):
        return "SPDXRef-" + re.sub(r"[^A-Za-z0-9.-]", "-", f"{self.kind}-{self.name}-{self.version}")

    def url(self):
        namespace = "debian/" if self.kind == "deb" else ""
        version = self.version.replace("+", "%2B").replace(":", "%3A")
        return f"pkg:{self.kind}/{namespace}{self.name}@{version}{self.qualifiers}"

    def package(self):
        package = {
            "SPDXID": self.spdx_id(),
            "name": self.name,
            "versionInfo": self.version,
            "downloadLocation": NONE_GIVEN,
            "filesAnalyzed": False,
            "licenseConcluded": NONE_GIVEN,
            "licenseDeclared": self.licence,
            "copyrightText": NONE_GIVEN,
            "externalRefs": [
                {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": self.url()},
            ],
        }
        if self.sha256:
            package["checksums"] = [{"algorithm": "SHA256", "checksumValue": self.sha256}]
        return package


class Crates:
    """The crates that are linked into the binary: no tests, no build scripts, no procedural macros."""

    def __init__(self, root, target):
        selection = ["--locked", "--filter-platform", target]
        metadata = json.loads(cargo(root, ["metadata", "--format-version", "1", *selection]))
        # Metadata has what any package of the workspace enables, the tree only what this one does.
        tree = cargo(root, ["tree", "--locked", "--package", "inflight", "--edges", "normal,no-proc-macro", "--target", target,
                            "--prefix", "none", "--format", "{p}"])
        linked = {tuple(line.split()[:2]) for line in tree.splitlines() if line.strip()}
        self.packages = {package["id"]: package for package in metadata["packages"]
                         if (package["name"], f"v{package['version']}") in linked}
        self.edges = sorted((node["id"], dependency["pkg"])
                            for node in metadata["resolve"]["nodes"] if node["id"] in self.packages
                            for dependency in node["deps"] if dependency["pkg"] in self.packages
                            and any(kind["kind"] is None for kind in dependency["dep_kinds"]))
        with (root / "Cargo.lock").open("rb") as file:
            locked = tomllib.load(file)["package"]
        checksums = {(package["name"], package["version"]): package.get("checksum") for package in locked}
        self.components = {
            identity: Component("cargo", package["name"], package["version"],
                                checksums.get((package["name"], package["version"])), expression(package["license"]))
            for identity, package in self.packages.items()
        }
        self.root_id = next(identity for identity, package in self.packages.items() if package["name"] == "inflight")

    def version(self):
        return self.packages[self.root_id]["version"]

    def licences(self):
        """The licence texts of all crates from elsewhere, each text once."""
        users, without = {}, []
        for package in sorted(self.packages.values(), key=lambda package: (package["name"], package["version"])):
            if package["source"] is None:
                continue
            name = f"{package['name']} {package['version']}"
            folder = pathlib.Path(package["manifest_path"]).parent
            texts = [path.read_text(encoding="utf-8", errors="replace").strip() for path in sorted(folder.iterdir())
                     if path.is_file() and LICENCE_NAMES.fullmatch(path.name)]
            for text in texts:
                users.setdefault(text, []).append(name)
            if not texts:
                without.append(f"{name}: {package['license'] or 'see its sources'}")
        rule = "\n\n" + "-" * 80 + "\n\n"
        parts = [f"{', '.join(names)}\n\n{text}" for text, names in sorted(users.items(), key=lambda pair: pair[1])]
        if without:
            parts.append("Crates whose sources have no file with a licence, and the licences that they declare:\n\n"
                         + "\n".join(without))
        return ("Licences of the crates that are linked into inflight." + rule + rule.join(parts) + "\n").encode()


def cargo(root, arguments):
    return subprocess.run(["cargo", *arguments], cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout


def expression(licence):
    # An old notation for a choice, which SPDX does not know.
    return licence.replace("/", " OR ") if licence else NONE_GIVEN


@dataclass(frozen=True)
class Subject:
    """What an SPDX document describes."""

    kind: str  # image, archive
    variant: str
    purpose: str  # of SPDX


def image(variant):
    return Subject("image", variant, "CONTAINER")


def archive(variant):
    return Subject("archive", variant, "ARCHIVE")


def document(subject, created, binary, crates, others):
    """The SPDX document of a subject with this binary and, beside the crates, the components `others`."""
    version = crates.version()
    described = {
        "SPDXID": f"SPDXRef-{subject.kind}",
        "name": f"inflight-{subject.kind}-{subject.variant}",
        "versionInfo": version,
        "downloadLocation": NONE_GIVEN,
        "filesAnalyzed": False,
        "primaryPackagePurpose": subject.purpose,
        "licenseConcluded": NONE_GIVEN,
        "licenseDeclared": NONE_GIVEN,
        "copyrightText": NONE_GIVEN,
    }
    digest = hashlib.sha256(binary).hexdigest()
    program = crates.components[crates.root_id]
    linked = [component for identity, component in crates.components.items() if identity != crates.root_id]
    components = sorted([*linked, *others], key=Component.spdx_id)
    program_package = {**program.package(), "primaryPackagePurpose": "APPLICATION",
                       "checksums": [{"algorithm": "SHA256", "checksumValue": digest}]}
    contents = {subject.kind: subject.variant, "binary": digest, "others": sorted(component.url() for component in others)}
    whole = described["SPDXID"]
    relations = [("SPDXRef-DOCUMENT", "DESCRIBES", whole),
                 (whole, "CONTAINS", program.spdx_id()),
                 *((whole, "CONTAINS", component.spdx_id()) for component in sorted(others, key=Component.spdx_id)),
                 *((crates.components[user].spdx_id(), "DEPENDS_ON", crates.components[used].spdx_id())
                   for user, used in crates.edges)]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"inflight-{version}-{subject.variant}",
        # Unique for what is in the subject, and equal for the same.
        "documentNamespace": f"https://spdx.org/spdxdocs/inflight-{version}-{subject.variant}-"
                             + hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:32],
        "creationInfo": {"created": created, "creators": ["Tool: inflight-image-build"]},
        "packages": [described, program_package, *(component.package() for component in components)],
        "relationships": [{"spdxElementId": of, "relationshipType": kind, "relatedSpdxElement": to} for of, kind, to in relations],
    }
