"""Names that YAML reads as numbers or booleans where they are not quoted: what is rendered differs from that of other names in the names
alone."""

import re

import yaml

# Of a release and of pools; each is one for Kubernetes, too.
NAMES = ("123", "1e3", "on", "0x1", "true", "2024-01-01")
# Those of the rendering that is compared with. They are in no other value.
RELEASE, POOL = "rrel", "ppool"


class Loader(yaml.CSafeLoader):
    """Reads scalars as Kubernetes does: also a number with an exponent alone is one."""


Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789"))


def renamed(value: object, names: dict[str, str]) -> object:
    if isinstance(value, dict):
        return {renamed(key, names): renamed(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item, names) for item in value]
    if isinstance(value, str):
        for name, other in names.items():
            value = value.replace(name, other)
    return value


def without_secrets(documents: list[dict]) -> list[dict]:
    """Leaves out the random values of secrets, which are texts."""
    for document in documents:
        for key, value in document.get("data", {}).items() if document["kind"] == "Secret" else ():
            assert isinstance(key, str) and isinstance(value, str), f"Secret {document['metadata']['name']}: {key!r}: {value!r}"
            document["data"][key] = ""
    return documents


def first_difference(left: object, right: object, at: str = "") -> str | None:
    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        found = (first_difference(left[key], right[key], f"{at}.{key}") for key in left)
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        found = (first_difference(one, other, f"{at}[{number}]") for number, (one, other) in enumerate(zip(left, right)))
    else:
        return None if left == right and type(left) is type(right) else f"{at}: {left!r}, not {right!r}"
    return next((difference for difference in found if difference), None)


def values_of(values: dict, release: str, pool: str) -> dict:
    """Values whose release's objects have the release's name alone, and whose pools have the name with a letter behind it but for the first."""
    pools = [{**entry, "name": pool + "abcdefgh"[at - 1:at]} for at, entry in enumerate(values["pools"])]
    return {**values, "pools": pools, "fullnameOverride": release}


def check(render, values: dict, number: int) -> int:
    """Renders the example of a number, from 0, under a name for the release and another one for its pools, the first example under each name;
    `render(release, values)` returns the documents. Returns how many documents were compared."""
    plain = without_secrets(render(RELEASE, values_of(values, RELEASE, POOL)))
    compared = 0
    for at in range(len(NAMES)) if number == 0 else [number]:
        release, pool = NAMES[at % len(NAMES)], NAMES[(at + 1) % len(NAMES)]
        found = without_secrets(render(release, values_of(values, release, pool)))
        difference = first_difference(found, renamed(plain, {RELEASE: release, POOL: pool}))
        assert difference is None, f"release {release}, pool {pool}: {difference}"
        compared += len(found)
    return compared
