"""Every value of the chart has an effect: for each, some values file sets it, and taken out of it, the rendering changes."""

import concurrent.futures
import copy
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator

import yaml

Path = tuple[str, ...]
# Values that Kubernetes defines, which count as one.
WHOLE = {"resources", "podAnnotations", "podLabels", "nodeSelector", "affinity", "labels", "annotations"}
# In a Secret's data; they are random.
SECRET = re.compile(r'(?m)^(  "[-\w.]+": ")[A-Za-z0-9+/=]{24,}"$')


def leaves(values: object, path: Path = ()) -> Iterator[Path]:
    if isinstance(values, dict) and values and not (path and path[-1] in WHOLE):
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def places(values: dict, path: Path) -> list[tuple[dict, str]]:
    """Where a file sets a value: those of pools are set for each or for all."""
    *above, last = path
    homes = [values.get("poolDefaults"), *values.get("pools", [])] if above[:1] == ["poolDefaults"] else [values]
    steps = above[1:] if above[:1] == ["poolDefaults"] else above
    found = []
    for home in homes:
        for step in steps:
            home = home.get(step) if isinstance(home, dict) else None
        if isinstance(home, dict) and last in home:
            found.append((home, last))
    return found


def check(chart: pathlib.Path, files: list[pathlib.Path], render: Callable[[pathlib.Path], str]) -> int:
    contents = [yaml.safe_load(file.read_text()) or {} for file in files]

    def rendered(values: dict) -> str:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "values.yaml")
            file.write_text(yaml.safe_dump(values))
            try:
                return SECRET.sub(r"\1", render(file))
            except RuntimeError as refused:
                return str(refused)

    before = [rendered(values) for values in contents]

    defaults = yaml.safe_load((chart / "values.yaml").read_text())

    def effective(path: Path) -> bool:
        [(home, key)] = places({**defaults, "pools": []}, path)
        default = home[key]
        for values, unchanged in zip(contents, before, strict=True):
            if all(home[key] == default for home, key in places(values, path)):
                continue
            without = copy.deepcopy(values)
            found = places(without, path)
            for home, key in found:
                del home[key]
            if rendered(without) != unchanged:
                return True
        return False

    paths = [path for path in leaves(defaults) if path != ("pools",)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        without_effect = [".".join(path) for path, found in zip(paths, pool.map(effective, paths), strict=True) if not found]
    if without_effect:
        raise RuntimeError("no example and no file of tests/chart/values shows an effect of: " + ", ".join(without_effect))
    return len(paths)
