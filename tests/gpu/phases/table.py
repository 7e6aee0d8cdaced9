"""The table of an 8B model: decode steps by batch and prompts by length, in each way of computing; and what each way costs."""

import json

from recorder import Skipped

BATCHES = (1, 8, 64, 256, 512)
CONTEXT, CHUNK = 1024, 8192
# A prompt is computed in chunks; the last entry is a chunk behind a long context.
PROMPTS = {"1k": [(0, 1024)], "8k": [(0, CHUNK)], "32k": [(at, CHUNK) for at in range(0, 4 * CHUNK, CHUNK)], "512 after 16k": [(2 * CHUNK, 512)]}
WAYS = {"fast": {}, "deterministic": {"deterministic": True}, "8-bit KV": {"fp8_kv_cache": True}, "no overlap": {"overlap": False}}


def table(suite, name="llama-3.1-8b", ways=WAYS):
    figures = suite.json["phases"].setdefault("table", {})[name] = {}
    for way, options in ways.items():
        try:
            result = suite.job("table", suite.model(name), {"steps": {"cases": cases(), "repeats": 30, "seconds": 0.6}}, 90, slots=512,
                               batch_tokens=CHUNK, context_tokens=4 * CHUNK + 256, **options)
        except Skipped as why:
            suite.recorder.skip("table", str(why), f"{name}, {way}")
            result = partial(why.output)
            if not result:
                continue
        except (RuntimeError, OSError) as error:
            suite.check("table", f"{name}, {way}", False, str(error)[:300])
            continue
        for case in result:
            if "skipped" in case:
                suite.row("table", f"{name}, {way}, {case['case']}", f"not measured: {case['skipped']}", word="open")
        figures[way] = milliseconds(result)
        suite.row("table", f"{name}, {way}", in_words(figures[way]))
        if way != "fast" and "fast" in figures:
            suite.row("table", f"{name}, {way} over fast", ratios(figures["fast"], figures[way]))


def cases():
    decode = [dict(sequences=batch, context=CONTEXT, tokens=1) for batch in BATCHES]
    chunks = dict.fromkeys(chunk for prompt in PROMPTS.values() for chunk in prompt)
    return decode + [dict(sequences=1, context=context, tokens=tokens) for context, tokens in chunks]


def partial(output):
    """The cases that were measured before a run was cut off."""
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"partial"')]
    return [line["partial"] for line in lines]


def milliseconds(result):
    """Milliseconds on the device by decode batch and by prompt; without those that do not fit."""
    took = {tuple(row["case"]): row["device_ms"] for row in result if "device_ms" in row}
    decode = {str(batch): took[batch, CONTEXT, 1] for batch in BATCHES if (batch, CONTEXT, 1) in took}
    prompts = {name: sum(took[1, context, tokens] for context, tokens in chunks) for name, chunks in PROMPTS.items()
               if all((1, context, tokens) in took for context, tokens in chunks)}
    return {"decode": decode, "prompts": prompts}


def in_words(figures):
    decode = ", ".join(f"{batch}: {took:.2f}" for batch, took in figures["decode"].items())
    prompts = ", ".join(f"{prompt}: {took:.1f}" for prompt, took in figures["prompts"].items())
    return f"ms of decode by batch {decode}; of prompts {prompts}"


def ratios(base, other):
    parts = [f"{key} {other[kind][key] / base[kind][key]:.2f}" for kind in ("decode", "prompts") for key in base[kind] if key in other[kind]]
    return ", ".join(parts)


def replays(suite, name="qwen3-0.6b", steps=1000):
    """Many replays of a captured step, with kernels that overlap and without: the same tokens and the same last bits."""
    task = {"replays": {"sequences": 8, "context": 256, "steps": 8 if suite.rehearse else steps}}
    digests = {}
    for label, options in [("overlapping", {}), ("serial", {"overlap": False})]:
        result = suite.job("replays", suite.model(name), task, 60, slots=8, batch_tokens=1024, context_tokens=2048, utilization=0.5,
                           deterministic=True, **options)
        digests[label] = result
        suite.check("replays", f"{name}, {label}", result["steps"] == task["replays"]["steps"], f"{result['steps']} steps")
    suite.json["phases"]["replays"] = digests
    equal = digests["overlapping"]["digest"] == digests["serial"]["digest"]
    suite.check("replays", f"{name}, {steps} replays, overlapping and serial", equal, f"tokens and bits {'equal' if equal else 'DIFFER'}")
