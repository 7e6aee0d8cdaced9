"""Writes layers and image archives as the OCI image specification describes them: the same content gives the same bytes."""

import gzip
import hashlib
import io
import json
import pathlib
import tarfile
from dataclasses import dataclass

# Beyond this level, an image of machine code shrinks by less than a hundredth and takes three times as long.
COMPRESSION_LEVEL = 6
COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class Entry:
    """What lies at a path: a folder, or a file with `content`, or a link to `target`."""

    mode: int = 0o755
    content: bytes | pathlib.Path | None = None
    target: str | None = None


@dataclass(frozen=True)
class Blob:
    """A file of the archive, named by its digest."""

    digest: str
    size: int
    diff_id: str = ""

    def descriptor(self, media_type):
        return {"mediaType": media_type, "digest": self.digest, "size": self.size}


class Digesting(io.RawIOBase):
    """Passes on what is written, counts it and computes its digest."""

    def __init__(self, target):
        super().__init__()
        self.target = target
        self.hash = hashlib.sha256()
        self.size = 0

    def writable(self):
        return True

    def write(self, data):
        self.hash.update(data)
        self.size += len(data)
        self.target.write(data)
        return len(data)

    def digest(self):
        return f"sha256:{self.hash.hexdigest()}"


def with_parents(entries):
    """The entries, and the folders that they lie in, sorted by path."""
    complete = dict(entries)
    for path in entries:
        for parent in pathlib.PurePosixPath(path).parents:
            if str(parent) != ".":
                complete.setdefault(str(parent), Entry())
    return sorted(complete.items())


def add(archive, path, entry, seconds):
    member = tarfile.TarInfo(path)
    member.mtime = seconds
    member.mode = entry.mode
    if entry.target is not None:
        member.type, member.linkname, member.mode = tarfile.SYMTYPE, entry.target, 0o777
        archive.addfile(member)
    elif entry.content is None:
        member.type = tarfile.DIRTYPE
        archive.addfile(member)
    elif isinstance(entry.content, bytes):
        member.size = len(entry.content)
        archive.addfile(member, io.BytesIO(entry.content))
    else:
        member.size = entry.content.stat().st_size
        with entry.content.open("rb") as file:
            archive.addfile(member, file)


class Archive:
    """An image layout that grows in `folder`, and becomes one tar file in the end."""

    def __init__(self, folder, seconds):
        self.folder = folder
        self.seconds = seconds
        self.blobs = folder / "blobs/sha256"
        self.blobs.mkdir(parents=True)

    def layer(self, entries):
        """Adds a layer: sorted, owned by root, with one time and without names of users."""
        unfinished = self.folder / "layer"
        with unfinished.open("wb") as file:
            compressed = Digesting(file)
            # Without a name and a time in gzip's header.
            with gzip.GzipFile(filename="", mode="wb", compresslevel=COMPRESSION_LEVEL, fileobj=compressed, mtime=0) as zipped:
                plain = Digesting(zipped)
                with tarfile.open(fileobj=plain, mode="w|", format=tarfile.GNU_FORMAT, bufsize=COPY_BYTES) as archive:
                    for path, entry in with_parents(entries):
                        add(archive, path, entry, self.seconds)
        blob = Blob(compressed.digest(), compressed.size, plain.digest())
        unfinished.rename(self.path(blob))
        return blob

    def json(self, value):
        data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
        blob = Blob(f"sha256:{hashlib.sha256(data).hexdigest()}", len(data))
        self.path(blob).write_bytes(data)
        return blob

    def path(self, blob):
        return self.blobs / blob.digest.removeprefix("sha256:")

    def finish(self, output, layers, config, reference):
        """Writes the archive to `output` and returns the digest of its manifest."""
        config_blob = self.json(config)
        manifest_type = "application/vnd.oci.image.manifest.v1+json"
        manifest = self.json({
            "schemaVersion": 2,
            "mediaType": manifest_type,
            "config": config_blob.descriptor("application/vnd.oci.image.config.v1+json"),
            "layers": [layer.descriptor("application/vnd.oci.image.layer.v1.tar+gzip") for layer in layers],
            "annotations": config["config"]["Labels"],
        })
        # containerd takes the whole reference as the image's name; the specification's annotation is a tag alone.
        names = {"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": reference.rpartition(":")[2]}
        index = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [{
                **manifest.descriptor(manifest_type),
                "annotations": names,
                "platform": {key: config[key] for key in ("architecture", "os")},
            }],
        }
        # What `docker load` reads before Docker 25, which does not know the layout.
        legacy = [{
            "Config": self.name(config_blob),
            "RepoTags": [reference],
            "Layers": [self.name(layer) for layer in layers],
        }]
        entries = {
            "oci-layout": Entry(0o644, b'{"imageLayoutVersion":"1.0.0"}'),
            "index.json": Entry(0o644, json.dumps(index, sort_keys=True).encode()),
            "manifest.json": Entry(0o644, json.dumps(legacy, sort_keys=True).encode()),
            **{self.name(blob): Entry(0o644, self.path(blob)) for blob in [config_blob, manifest, *layers]},
        }
        unfinished = output.with_name(output.name + ".unfinished")
        with tarfile.open(unfinished, "w", format=tarfile.GNU_FORMAT) as archive:
            for path, entry in with_parents(entries):
                add(archive, path, entry, self.seconds)
        # Whoever finds the file finds all of it.
        unfinished.rename(output)
        return manifest.digest

    def name(self, blob):
        return f"blobs/sha256/{self.path(blob).name}"
