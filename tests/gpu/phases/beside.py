"""Another server beside ours, on the same checkpoint and lengths, in alternating rounds of the same run: vLLM, or where it is not
installed transformers' continuous batching."""

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import shapes
from phases.parity import CANONICAL
from phases.serving import request_lengths
from recorder import Conversation

CONTEXT = 1024
# Output tokens of a decode case, and of the run that it is compared with: what more tokens take is decoding alone. Against a run of one
# token, the time of the prompts would be subtracted, which is several times that of the steps.
OUTPUT, SHORT = 257, 65
PREFILLS = (1024, 8192, 32768)
BATCHES = (1, 8, 64, 256)
SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.95}
OPTIONS = {"slots": 256, "batch_tokens": 8192, "context_tokens": 33024}
# Of the GPU's memory for each of two servers, and for one alone.
SHARE, ALONE = 0.44, 0.88
ALONE_CASES = ("short sampled 64", "sampled 64", "mix")


def beside(suite, name="llama-3.1-8b", fallback=False):
    """Prefill, decoding by batch, sampled decoding, and a mix of lengths; by ours alone where there is no vLLM."""
    phase = "beside"
    path = suite.model(name)
    figures = suite.json["phases"].setdefault("beside", {})[name] = {}
    has_peer = importlib.util.find_spec("vllm") is not None
    share = SHARE if has_peer else ALONE
    options = OPTIONS if not suite.rehearse else {**OPTIONS, "context_tokens": 2048}
    servers = {}
    if not has_peer:
        suite.row(phase, f"{name}: vLLM", "vllm is not installed", word="open")
    canonical = {"file": str(suite.reference(path)), "bound": CANONICAL}
    command = suite.recorder.measure_command(path, {"rounds": {}}, utilization=share, canonical=canonical, **options)
    with Closing() as closing:
        if has_peer:
            peer = closing.add(Conversation(suite.recorder, "vllm", [
                sys.executable, str(suite.bundle / "peer_vllm.py"), str(path), json.dumps({"utilization": share, **options})]))
        try:
            ours = closing.add(Conversation(suite.recorder, "measure", command))
            ours.answer(120)
            servers["ours"] = ours
        except RuntimeError as error:
            suite.check(phase, f"{name}: ours", False, str(error)[:300])
        if has_peer:
            try:
                figures["version"] = peer.answer(90)["version"]
                # Not before ours has what it needs: it measures how much memory it may take.
                figures["load_seconds"] = peer.ask({}, 240)["load_seconds"]
                servers["vllm"] = peer
            except (RuntimeError, KeyError) as error:
                suite.row(phase, f"{name}: vLLM", f"open: {str(error)[:300]}", word="open")
        if servers:
            rounds(suite, name, servers, room(suite, name, share), figures, has_peer)
    if fallback and not has_peer:
        continuous_batching(suite, name)


def peer(suite):
    beside(suite, "qwen3-0.6b", fallback=True)


class Closing:
    """Ends all conversations at its own end."""

    def __init__(self):
        self.conversations = []

    def add(self, conversation):
        self.conversations.append(conversation)
        return conversation

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for conversation in self.conversations:
            conversation.__exit__()


def room(suite, name, share):
    """Tokens that a server's KV cache has room for, with a margin; None if nobody says how much memory there is."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], capture_output=True, text=True,
                              timeout=20, check=False)
        total = int(done.stdout.split()[0]) << 20
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return None
    # Activations of a prefill and graphs take some gigabytes.
    return int(total * share - shapes.file_bytes(name) - 5e9) // shapes.kv_bytes_per_token(name)


def cases(tokens_max):
    """(label, rounds, lengths, sampling, whether it fits) in order: the cheap ones first, the mix of lengths last."""
    fits = lambda lengths: tokens_max is None or sum(prompt + output for prompt, output in lengths) <= tokens_max
    for tokens in PREFILLS:
        yield f"prefill {tokens}", 3, [(tokens, 1)], {}, True
    for batch in BATCHES:
        if batch == BATCHES[-1]:  # The longest: what else fits into the time comes before.
            sampled = [(CONTEXT, OUTPUT)] * 64
            yield "short sampled 64", 3, [(CONTEXT, SHORT)] * 64, SAMPLING, fits(sampled)
            yield "sampled 64", 3, sampled, SAMPLING, fits(sampled)
        long = [(CONTEXT, OUTPUT)] * batch
        rounds = 3 if batch < 256 else 2
        yield f"short decode {batch}", rounds, [(CONTEXT, SHORT)] * batch, {}, fits(long)
        yield f"decode {batch}", rounds, long, {}, fits(long)
    yield "mix", 2, request_lengths(128), {}, True


def rounds(suite, name, servers, tokens_max, figures, has_peer):
    """All cases, of each a round by one server after the other; figures as they come. Alone only those that `steps` does not have."""
    medians = figures["seconds"] = {}
    try:
        for server in servers.values():  # What is compiled, captured or tuned when it is first used.
            for lengths in ([(CONTEXT, 8)] * 8, [(PREFILLS[-1], 2)]):
                server.ask({"lengths": lengths}, 60)
        for label, count, lengths, sampling, fits in cases(tokens_max):
            if not has_peer and label not in ALONE_CASES:
                continue
            if not fits:
                suite.row("beside", f"{name}, {label}", "not measured: it does not fit", word="open")
                continue
            seconds = {server: [] for server in servers}
            for round in range(count):
                # Whoever comes second finds a warmer card.
                order = list(servers)[::-1 if round % 2 else 1]
                for server in order:
                    answer = servers[server].ask({"lengths": lengths, "sampling": sampling}, 90)
                    seconds[server].append(answer["seconds"])
            medians[label] = {server: {"seconds": statistics.median(all), "all": all, "output_tokens": sum(o for _, o in lengths)}
                              for server, all in seconds.items()}
            show(suite, name, label, medians)
    except (RuntimeError, KeyError) as error:
        suite.check("beside", f"{name}: rounds", False, str(error)[:300])


def show(suite, name, label, medians):
    """The row of a case; shorter outputs only serve to tell decoding from prompts."""
    kind, _, count = label.partition(" ")
    figures = {}
    for server, took in medians[label].items():
        seconds = took["seconds"]
        if kind == "prefill":
            figures[server] = (seconds * 1e3, f"{seconds * 1e3:.1f} ms")
        elif kind == "mix":
            figures[server] = (seconds, f"{took['output_tokens'] / seconds:.0f} output tok/s")
        elif kind in ("decode", "sampled"):
            before = medians[f"short {label}"][server]["seconds"]
            step = (seconds - before) / (OUTPUT - SHORT)
            figures[server] = (step, f"{step * 1e3:.2f} ms a step, {int(count) / step:.0f} tok/s" if step > 0 else "shorter than its prompts")
    if not figures:
        return
    text = " | ".join(f"{server} {figure}" for server, (_, figure) in figures.items())
    if len(figures) == 2 and min(value for value, _ in figures.values()) > 0:
        ratio = figures["vllm"][0] / figures["ours"][0]
        suite.row("beside", f"{name}, {label}", f"{text}; {ratio:.2f} x as fast", "1 x", ratio >= 1)
    else:
        suite.row("beside", f"{name}, {label}", text)


def continuous_batching(suite, name):
    """transformers' continuous batching beside ours, on one list of requests."""
    path = suite.model(name)
    lengths = request_lengths(8 if suite.rehearse else 128 if suite.quick else 256)
    figures = suite.json["phases"]["peer"] = {}
    try:
        ours = figures["ours"] = suite.job("serve-peer", path, {"serve": {"lengths": lengths}}, 200, slots=256,
                                           batch_tokens=4096, context_tokens=4096)
    except RuntimeError as error:
        suite.check("peer", f"{name}: ours", False, str(error)[:300])
        ours = None
    suite.torch()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "lengths.json"
        file.write_text(json.dumps(lengths))
        theirs = suite.recorder.answer("peer", [sys.executable, str(suite.bundle / "peer.py"), str(path), str(file)], 240)
    figures["theirs"] = theirs
    if ours is None:
        suite.row("peer", f"{name}: transformers' continuous batching ({theirs['attention']})",
                  f"{theirs['output_tokens_per_second']:.0f} output tok/s")
        return
    ratio = ours["output_tokens_per_second"] / theirs["output_tokens_per_second"]
    suite.row("peer", f"{name}: ours / transformers' continuous batching ({theirs['attention']})",
              f"{ours['output_tokens_per_second']:.0f} / {theirs['output_tokens_per_second']:.0f} output tok/s = {ratio:.1f} x",
              "3 x", ratio >= 3)
