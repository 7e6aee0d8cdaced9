#!/usr/bin/env python3
"""Asks a running cluster the prompts of prompts.txt and writes the answers to answers.md, to be read through.

    inflight up &
    python read.py [--url http://127.0.0.1:8640]

Questions and requests are asked as a chat, beginnings of stories are continued as plain text; stories are sampled with a seed.
"""

import argparse
import json
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
BEGINNINGS = ("Once upon", "The old")


def ask(url, path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)["choices"][0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8640")
    url = parser.parse_args().url
    lines = ["# Fifty prompts and the demo model's answers", "", "Written by `read.py`; the README says what is right and wrong with them.", ""]
    for prompt in HERE.joinpath("prompts.txt").read_text().splitlines():
        story = "story" in prompt or prompt.startswith(BEGINNINGS)
        common = {"max_tokens": 400, "seed": 1, "temperature": 0.7 if story else 0, "top_p": 0.9}
        if prompt.startswith(BEGINNINGS):
            answer = prompt + ask(url, "/v1/completions", {"prompt": prompt, **common})["text"]
        else:
            answer = ask(url, "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], **common})["message"]["content"]
        lines += [f"**{prompt}**", "", *("> " + line if line else ">" for line in answer.split("\n")), ""]
    HERE.joinpath("answers.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
