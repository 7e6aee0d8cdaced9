#!/usr/bin/env python3
"""Compares answers in JSON under `--json-whitespace any` and `one-line`: whether they end, whether they are right, and how likely they are.

    json_whitespace.py convert MODEL.gguf OUT.gguf     widens a GGUF file to f16; needs PyPI's gguf
    json_whitespace.py PROGRAM MODEL                   starts `PROGRAM up` with each setting and prints a table

Facts of generated texts are asked for, greedily: 60 texts, each under four schemas, so that right answers are known.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

TEXTS = 60
MAX_TOKENS = 256
PORT = 18760
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry"]
CITIES = ["Oslo", "Paris", "Rome", "Berlin", "Madrid", "Vienna"]
COLORS = ["red", "blue", "green"]
ANIMALS = ["cat", "dog", "horse", "rabbit"]
# Whitespace that models write elsewhere than after a colon or a comma, without that of an indented line.
LAYOUTS = {"line break": r"\n", "space inside a bracket": r"[{\[] |[^\n ] +[}\]]", "space before a colon or comma": r" [:,]"}


def facts(at):
    """Returns the facts of a text: all differ between texts that are near each other."""
    return {
        "name": NAMES[at % len(NAMES)],
        "age": 20 + 7 * at % 60,
        "city": CITIES[(at + at // 8) % len(CITIES)],
        "color": COLORS[(at + at // 5) % len(COLORS)],
        "pets": [ANIMALS[at % 4], ANIMALS[(at + 1 + at // 4 % 3) % 4]],
    }


def text(of):
    one, two = of["pets"]
    return (
        f"{of['name']} is {of['age']} years old and lives in {of['city']}. The favorite color of {of['name']} is {of['color']}. "
        f"{of['name']} has a {one} and a {two}."
    )


def closed(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
ANIMAL = {"enum": ANIMALS}
# Name, schema, and the right answer of some facts.
SCHEMAS = [
    ("strings and integers", closed(name=STRING, age=INTEGER, city=STRING), lambda of: {key: of[key] for key in ("name", "age", "city")}),
    ("enums", closed(name=STRING, color={"enum": COLORS}, first_pet=ANIMAL),
     lambda of: {"name": of["name"], "color": of["color"], "first_pet": of["pets"][0]}),
    ("arrays", closed(city=STRING, pets={"type": "array", "items": STRING}), lambda of: {"city": of["city"], "pets": of["pets"]}),
    ("nested", closed(person=closed(name=STRING, age=INTEGER), pets={"type": "array", "items": closed(kind=STRING, owner=STRING)}),
     lambda of: {"person": {"name": of["name"], "age": of["age"]}, "pets": [{"kind": pet, "owner": of["name"]} for pet in of["pets"]]}),
]


def leaves(value, path=()):
    """Returns the scalars of a value by their paths."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    else:
        return {path: value}
    return {key: leaf for name, part in parts for key, leaf in leaves(part, (*path, name)).items()}


def in_values(answer):
    """Returns the spans of scalars that are no keys, without quotes."""
    for match in re.finditer(r'"((?:[^"\\]|\\.)*)"?|-?\d[\d.eE+-]*|true|false|null', answer):
        if match[0][0] != '"':
            yield match.span()
        elif not re.match(r"\s*:", answer[match.end():]):
            yield match.span(1)


def ask(at, schema, right):
    of = facts(at)
    body = {
        "messages": [{"role": "user", "content": f"{text(of)}\n\nAnswer in JSON with the keys {', '.join(schema['properties'])}."}],
        "temperature": 0, "max_tokens": MAX_TOKENS, "logprobs": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "facts", "schema": schema}},
    }
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=600) as response:
        answer = json.load(response)
    choice = answer["choices"][0]
    content = choice["message"]["content"]
    ends = choice["finish_reason"] == "stop"
    value = json.loads(content) if ends else None
    wanted = leaves(right(of))
    found = leaves(value) if ends else {}
    spans, start, logprobs = list(in_values(content)), 0, []
    for token in choice["logprobs"]["content"]:
        end = start + len(token["token"])
        if any(first < end and start < last for first, last in spans):
            logprobs.append(token["logprob"])
        start = end
    return {
        "content": content, "value": value, "ends": ends, "tokens": answer["usage"]["completion_tokens"],
        "wanted": len(wanted), "right": sum(found.get(path) == leaf for path, leaf in wanted.items()), "logprobs": logprobs,
    }


def answers(program, model, whitespace):
    """Returns the answers of a cluster, by schema."""
    ports = [f"--port={PORT + 1}", f"--http-port={PORT}", f"--metrics-port={PORT + 2}"]
    command = [program, "up", "--workers=1", f"--model={model}", f"--json-whitespace={whitespace}", *ports]
    cluster = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5).close()
                break
            except OSError:
                if cluster.poll() is not None:
                    sys.exit(f"{' '.join(command)} has ended; run it by itself to read why")
                time.sleep(0.2)
        with ThreadPoolExecutor(8) as pool:
            return {name: list(pool.map(lambda at: ask(at, schema, right), range(TEXTS))) for name, schema, right in SCHEMAS}
    finally:
        cluster.send_signal(signal.SIGTERM)
        cluster.wait()


def compare(program, model):
    settings = {whitespace: answers(program, model, whitespace) for whitespace in ("any", "one-line")}
    print("| schema | whitespace | ended as valid JSON | values right | tokens of an answer | mean log probability of a value's token |")
    print("|---|---|---|---|---|---|")
    for name in [name for name, _, _ in SCHEMAS] + ["all"]:
        for whitespace, by_schema in settings.items():
            some = [one for of, found in by_schema.items() if name in (of, "all") for one in found]
            logprobs = [logprob for one in some for logprob in one["logprobs"]]
            print(
                f"| {name} | {whitespace} | {sum(one['ends'] for one in some)} of {len(some)} "
                f"| {sum(one['right'] for one in some)} of {sum(one['wanted'] for one in some)} "
                f"| {sum(one['tokens'] for one in some) / len(some):.1f} | {sum(logprobs) / len(logprobs):.3f} |"
            )
    pairs = [pair for name, _, _ in SCHEMAS for pair in zip(settings["any"][name], settings["one-line"][name], strict=True)]
    both = [(any_, line) for any_, line in pairs if any_["ends"] and line["ends"]]
    print(f"\n{sum(any_['value'] == line['value'] for any_, line in both)} of {len(both)} pairs of whole answers have the same values")
    better, worse = (sum(sign * (line["right"] - any_["right"]) > 0 for any_, line in pairs) for sign in (1, -1))
    print(f"of {len(pairs)} answers, {better} have more values right on one line, {worse} fewer")
    for layout, pattern in LAYOUTS.items():
        # Outside of strings.
        bare = [re.sub(r'"(?:[^"\\]|\\.)*"?', '""', any_["content"]) for any_, _ in pairs]
        print(f"with any whitespace, {sum(bool(re.search(pattern, one)) for one in bare)} of {len(bare)} answers have a {layout}")
    if examples := os.environ.get("EXAMPLES"):
        for any_, line in pairs[:: max(1, len(pairs) // int(examples))]:
            print(f"\nany:      {any_['content']!r}\none-line: {line['content']!r}")


def convert(source, target):
    import numpy
    from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        width = numpy.float16 if len(tensor.shape) > 1 else numpy.float32
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type).astype(width))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(*sys.argv[2:]) if sys.argv[1] == "convert" else compare(*sys.argv[1:])
